"""Build the global view of a Dynamo graph, with parameters and placements of its inputs.

The global view is the captured graph of the full sequence; later passes split it over the ranks. A sequence dim is a
dim of an input along which the ranks split it. A placement describes how an input is sharded. A `Sharded` input is a
wrapper of a rank's shard, which an earlier graph has returned; its layout describes the shard (dim, ranks, order of
rows). Load-balanced rows are ordered such that ranks have equal work in causal attention. With inputs="local"
each rank passes its shard, so that Dynamo traces a graph of s tokens. This graph is captured again with n*s in every
sequence dim for n ranks, so that positions created in the model (arange over the sequence) are global; the shards are
the inputs of the local graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import SpError, node_line
from sp_compile.lowering.base.options import OUTPUTS, SPConfig
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.shard_storage import Layout
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.lowering.torch_compat import argument_name, pytree
from sp_compile.passes.graph.node_info import mark_inputs, node_info, set_node_info
from sp_compile.passes.graph.sizes import as_size, symbolic_sizes
from sp_compile.passes.sharding.axes import Axes, name_axes
from sp_compile.passes.sharding.find_sequences import find_sequences
from sp_compile.passes.sharding.placement import Frame, Placement, Shard

from .capture import capture, fake_inputs, specialize_inputs
from .view_writes import VIEW_OPS, ResultView, SharedResults, omit_views


def capture_shards(
    gm: GraphModule, example_inputs: Sequence[Any], n: int, seq_dims: Mapping[str, int] | None
) -> tuple[GraphModule, dict[str, Placement]]:
    """Capture the global view of a graph whose inputs are shards.

    Dynamo traces the program again if a sequence dim is static.

    Args:
        gm: Dynamo graph.
        example_inputs: Inputs of the graph, shards of a rank.
        n: Number of ranks.
        seq_dims: Sequence dims by input name; None to detect them.

    Returns:
        The graph in the global view, and the placements of sharded inputs.

    Raises:
        SpError: If a sequence dim is static or shares its symbol with another dim, or a guard on its length does not
            hold for the full sequence.
    """
    mode, _ = fake_inputs(())
    guards = torch_compat.length_guards(mode)  # read before capture, which adds guards on the global length
    local = capture(gm, example_inputs)  # the graph of one shard
    dims = _sequence_dims(local, seq_dims, n)  # sequence dim by name of the input
    _, fakes = fake_inputs(example_inputs)
    nodes = local.graph.find_nodes(op="placeholder")
    static_dims = [
        (x, dims[node.name])
        for node, x in zip(nodes, example_inputs)
        if node.name in dims and isinstance(as_size(node.meta["val"].shape[dims[node.name]]), int)
    ]
    torch_compat.retrace_with_symbols(static_dims)  # raises if there are any, so that Dynamo traces again
    symbols = _sequence_symbols(nodes, dims)
    unified = (torch_compat.unify_symbols(mode, guard) for guard in guards)  # one symbol for lengths that are equal
    # Guards on strides are not checked: they hold for this rank's memory only, and values do not depend on them.
    size_symbols = {
        symbol
        for dynamo_node, node in zip(gm.graph.find_nodes(op="placeholder"), nodes)
        if not torch_compat.is_memory_layout(dynamo_node)
        for size in symbolic_sizes(node)
        for symbol in size.free_symbols
    }
    _check_guards_of_sequence([guard for guard in unified if guard.free_symbols <= size_symbols], symbols, n, mode)
    global_fakes = [_global_fake(fake, dims.get(node.name), symbols, n, mode) for node, fake in zip(nodes, fakes)]
    graph = capture(gm, example_inputs, fakes=global_fakes)
    placements: dict[str, Placement] = {}
    for node, fake in zip(graph.graph.find_nodes(op="placeholder"), fakes):
        set_node_info(node, local=fake)  # the input as the ranks pass it
        if node.name in dims:
            dim = dims[node.name]
            placements[node.name] = Shard(dim, Frame.full(as_size(node.meta["val"].shape[dim])))
        elif isinstance(fake, torch.SymInt) and as_size(fake) in symbols:  # an input that is the length of a shard
            set_node_info(node, scale=n)
    return graph, placements


def _sequence_dims(graph: GraphModule, seq_dims: Mapping[str, int] | None, n: int) -> dict[str, int]:
    """Return the sequence dim of each input that has one, by name: the user's dims, or else the detected ones.

    Args:
        graph: Captured graph of a shard.
        seq_dims: The user's dims by input name; None to detect them.
        n: Number of ranks.
    """
    axes, inputs = name_axes(graph), graph.graph.find_nodes(op="placeholder")
    axes.n = n
    user_dims = None if seq_dims is None else {x: seq_dims[x.name] for x in inputs if x.name in seq_dims}
    find_sequences(graph, axes, user_dims)
    if user_dims is not None:
        return {node.name: dim % node.meta["val"].ndim for node, dim in user_dims.items()}
    detected = {node: axes.sequence_dims(node) for node in inputs if torch_compat.is_argument(node)}  # no parameters
    first_dims = {node: dims[0] for node, dims in detected.items() if dims}  # an input is sharded along one dim
    _check_equal_rows(first_dims, axes)
    return {node.name: dim for node, dim in first_dims.items()}


def _check_equal_rows(dims: Mapping[Node, int], axes: Axes) -> None:
    """Raise if a rank's inputs of one sequence differ in their number of rows along the detected dims.

    One of them may then be a complete table of positions, which is not a shard.
    """
    first_inputs: dict[Any, Node] = {}  # first input of each sequence
    for node, dim in dims.items():
        # An atom is a factor of a dim, such as B and S of a dim B * S; just one of them is a sequence.
        # `axes.dims` has the dims by node and index of the result, 0 for an input.
        (sequence,) = {axes.find(atom.name) for atom in axes.dims[node, 0][dim] if axes.is_sequence(atom)}
        first = first_inputs.setdefault(sequence, node)
        first_rows, rows = (torch_compat.size_hint(x.meta["val"].shape[dims[x]]) for x in (first, node))
        if first_rows != rows:
            raise SpError(
                "SP234",
                f"inputs='local': expected equal numbers of rows in dim {dims[first]} of {argument_name(first)} and "
                f"dim {dim} of {argument_name(node)}, which share a sequence, got {first_rows} and {rows}.",
            )


def _sequence_symbols(nodes: Sequence[Node], dims: Mapping[str, int]) -> set[sympy.Expr]:
    """Return the symbols that are the lengths of sequence dims, which are multiplied for the global view.

    Raises if a sequence dim is a constant, or if another dim has the same symbol. `nodes` are the placeholders of the
    captured graph of a shard; `dims` has the sequence dims by name.
    """
    symbols: dict[sympy.Expr, str] = {}  # with the name of the dim
    for node in nodes:
        if node.name in dims:
            extent = as_size(node.meta["val"].shape[dims[node.name]])
            if isinstance(extent, int):  # in spite of `retrace_with_symbols`
                raise SpError(
                    "SP232",
                    f"inputs='local': dim {dims[node.name]} of {argument_name(node)} is compiled as the constant "
                    f"{extent}: its length is 1, or the program reads it as a number.",
                )
            symbols.setdefault(extent, f"dim {dims[node.name]} of {argument_name(node)}")
    for node in nodes:
        value = node.meta.get("val")
        for d, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if dims.get(node.name) != d and as_size(extent) in symbols:
                raise SpError(
                    "SP233",
                    f"inputs='local': dim {d} of {argument_name(node)} has the length of the sequence on this rank, "
                    f"{symbols[as_size(extent)]}, so that it is ambiguous which dims are shards.",
                )
    return set(symbols)


def _check_guards_of_sequence(
    guards: Iterable[sympy.Basic], symbols: set[sympy.Expr], n: int, mode: torch_compat.FakeTensorMode
) -> None:
    """Raise if a guard on the length of a shard does not hold for the full sequence, which is n times as long.

    Then Dynamo has traced a branch that the global view does not take. The conditions on the full length become guards.

    Args:
        guards: Guards of Dynamo's trace.
        symbols: Lengths of sequence dims of a shard.
        n: Number of ranks.
        mode: Fake mode of the compilation.
    """
    global_lengths = {symbol: n * symbol for symbol in symbols}
    for condition in guards:
        if condition.free_symbols.isdisjoint(symbols):
            continue
        if not torch_compat.assume_fact(mode, condition.xreplace(global_lengths)):
            readable = condition.xreplace({symbol: sympy.Symbol("length") for symbol in symbols})
            raise SpError(
                "SP235",
                f"inputs='local': a branch or a shape of the program depends on its length: {readable} holds for the "
                "rows of one rank, but not for the sequence.",
            )


def _global_fake(fake: Any, dim: int | None, symbols: set[sympy.Expr], n: int, mode: Any) -> Any:
    """Return the fake input of the global view for the fake input of a shard.

    Args:
        fake: Fake tensor, SymInt or other value.
        dim: Sequence dim of the tensor, which becomes n times as long; None for an input without one.
        symbols: Lengths of sequence dims; an input that is one of them is multiplied by n.
        n: Number of ranks.
        mode: Fake mode of the compilation.
    """
    if isinstance(fake, torch.SymInt):
        return fake * n if as_size(fake) in symbols else fake
    if dim is None or not isinstance(fake, torch.Tensor):
        return fake
    shape = [s * n if d == dim else s for d, s in enumerate(fake.shape)]
    with mode:
        return torch.empty(shape, dtype=fake.dtype, device=fake.device).requires_grad_(fake.requires_grad)


@dataclass(frozen=True)
class GlobalView:
    """Dynamo graph in the global view, with the facts about its inputs and results that the passes need."""

    graph: GraphModule  # captured graph
    fragment: bool  # True for a part of a model between graph breaks
    arguments: list[str]  # inputs, as named in the user's code
    names: list[str]  # results, as named in the user's code
    outputs: list[str]  # output option of each result
    seq_dims: dict[str, int] | None  # sequence dims from the user, by placeholder
    inputs: dict[str, Placement]  # placements of sharded inputs
    layouts: dict[int, Layout]  # layouts of `Sharded` inputs, by index
    writes: dict[int, int]  # index of a `Sharded` input -> result with its new value
    views: Sequence[ResultView]  # as in `GraphBoundary`
    hidden: int  # number of hidden results, as in `GraphBoundary`
    written: Sequence[int]  # indices of mutated inputs, as in `GraphBoundary`

    @property
    def folds(self) -> int:
        """Return the row order of sharded inputs: 1 contiguous (also if none or mixed), 2 zigzag, 0 load-balanced."""
        return min((layout.folds for layout in self.layouts.values()), default=1)


def global_view(
    gm: GraphModule, example_inputs: Sequence[Any], options: SPConfig, ranks: Ranks, accept_balanced: bool = False
) -> GlobalView:
    """Capture the graph for the passes, with facts about its inputs and results.

    Args:
        gm: Dynamo graph.
        example_inputs: Inputs of the graph.
        options: Options of the backend.
        ranks: Ranks that shard the sequence.
        accept_balanced: Accept load-balanced rows of an earlier graph in their order.

    Returns:
        The global view.

    Raises:
        SpError: If an option does not match the inputs or results, or is not supported for the program.
    """
    fragment = torch_compat.is_fragment(gm)
    if fragment and "local" in (options.inputs, options.outputs):
        raise SpError("SP231", "inputs='local' and outputs='local' are not supported with graph breaks.")
    mark_inputs(gm.graph, example_inputs)
    seq_dims = None if isinstance(options.seq_dims, str) else _dims_by_placeholder(gm, options.seq_dims, fragment)
    inputs: dict[str, Placement] = {}
    layouts: dict[int, Layout] = {}
    if options.inputs == "local" and ranks.n > 1:
        torch_compat.refuse_eager_fallback()
        graph, inputs = capture_shards(gm, example_inputs, ranks.n, seq_dims)
    else:
        graph = capture(gm, example_inputs)
        inputs, layouts = _sharded_inputs(graph, example_inputs, ranks, accept_balanced)
    mark_inputs(graph.graph, example_inputs)
    arguments = [argument_name(n) for n in gm.graph.find_nodes(op="placeholder")]
    results = [leaf if isinstance(leaf, Node) else None for leaf in pytree.tree_leaves(gm.graph.output_node().args[0])]
    names = _names_of_results(gm, results)
    outputs = _resolve_output_options(names, results, options.outputs, fragment)
    # The captured graph has the results of the program, then hidden results (bases of views that the caller gets), then
    # new values of `Sharded` inputs, which stay sharded ("lazy"): append the names and options of the latter two.
    write_backs = _write_backs(graph)
    views, first_views = _omit_recreated_results(graph, example_inputs, options.inputs, outputs)
    names += [f"a tensor of which {names[view.number]} is a view" for view in first_views]  # of the hidden results
    writes = _return_writes(graph, example_inputs, write_backs)
    names += [arguments[i] for i in writes]
    outputs += ["lazy"] * len(writes)
    hidden, written = len(first_views), list(write_backs)
    return GlobalView(
        graph, fragment, arguments, names, outputs, seq_dims, inputs, layouts, writes, views, hidden, written
    )


def _sharded_inputs(
    graph: GraphModule, example_inputs: Sequence[Any], ranks: Ranks, accept_balanced: bool
) -> tuple[dict[str, Placement], dict[int, Layout]]:
    """Return the placements, by name, and layouts, by index, of inputs that stay sharded on these ranks.

    These are `Sharded` inputs of the same ranks that are sharded along a complete dim; all others are gathered before
    the program. With `accept_balanced` only inputs with load-balanced rows stay sharded, otherwise only those without.
    Records the fake shard of each as `local` of its node.
    """
    mode, _ = fake_inputs(())
    placements: dict[str, Placement] = {}
    layouts: dict[int, Layout] = {}
    for i, (node, x) in enumerate(zip(graph.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        if not isinstance(x, Sharded) or (x.sharding.n, x.sharding.group) != (ranks.n, ranks.group):
            continue
        if not x.sharding.is_plain or x.sharding.is_balanced != accept_balanced:  # plain: along a complete dim
            continue
        layout, value = replace(x.sharding, balanced=None), node.meta["val"]  # without the row order of this call
        with mode, torch.no_grad():
            local = layout.local_rows(value).detach()
        set_node_info(node, local=local.requires_grad_(x.requires_grad))
        placements[node.name] = Shard(layout.dim, Frame.full(as_size(value.shape[layout.dim]), layout.folds))
        layouts[i] = layout
    return placements, layouts


def _write_backs(graph: GraphModule) -> dict[int, Node]:
    """Return the node that copies the new value of each mutated input to it, by index of the input."""
    indices: dict[Any, int] = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)  # copy_(target, value)
    return {indices[copy.args[0]]: copy for copy in copies if copy.args[0] in indices}


def _omit_recreated_results(
    graph: GraphModule, example_inputs: Sequence[Any], inputs: str, outputs: list[str]
) -> tuple[tuple[ResultView, ...], list[ResultView]]:
    """Remove results from the graph that the runtime recreates as views of other results or of arguments.

    Views of arguments remain results with inputs='local', and views of results with outputs='local', because the sizes
    in the view ops are global. A hidden result is one that the graph returns only as the base of views.

    Args:
        graph: Captured graph.
        example_inputs: Inputs of the graph.
        inputs: The option `inputs`.
        outputs: Output option of each result. Modified: the option of a base is the strongest of its views, and those
            of the hidden results are appended.

    Returns:
        The omitted views, and for each hidden result its first view.
    """
    shared: SharedResults = graph.meta[VIEW_OPS]
    of_results = [view for view in shared.views if not view.of_argument and "local" not in outputs]
    is_viewable = [type(x) in (torch.Tensor, torch.nn.Parameter, Sharded) for x in example_inputs]  # no other subclass
    of_inputs = [view for view in shared.views if view.of_argument and inputs != "local" and is_viewable[view.base]]
    n_results, hidden = len(outputs), list[ResultView]()
    for view in of_results:
        # `base` is the index of a result. Hidden results are numbered n_results, n_results + 1, ... in the order of
        # their first views, so that the next number is that of a new one.
        if view.base == n_results + len(hidden):
            hidden.append(view)
            outputs.append(outputs[view.number])
        options = outputs[view.base], outputs[view.number]
        outputs[view.base] = max(options, key=OUTPUTS.index)  # the stronger one, which satisfies both
    views = tuple(sorted([*of_results, *of_inputs], key=lambda view: view.number))
    omit_views(graph, views, len(hidden))
    return views, hidden


def _return_writes(
    graph: GraphModule, example_inputs: Sequence[Any], write_backs: Mapping[int, Node]
) -> dict[int, int]:
    """Replace the copies of new values to `Sharded` inputs by results, which the runtime writes to the shards.

    Modifies the graph. `write_backs` is a result of `_write_backs`.

    Returns:
        Index of the result by index of the input.
    """
    output, result_indices = graph.graph.output_node(), dict[int, int]()
    for i, copy in write_backs.items():
        if isinstance(example_inputs[i], Sharded):
            results: Any = output.args[0]
            result_indices[i] = len(results)
            output.args = (type(results)([*results, copy.args[1]]),)
            graph.graph.erase_node(copy)
    graph.recompile()
    return result_indices


def local_inputs(
    example_inputs: Sequence[Any], layouts: Mapping[int, Layout] | None = None, graph: GraphModule | None = None
) -> list[Any]:
    """Return example inputs to compile a rank's program with.

    A `Sharded` input with a layout becomes a fake of this rank's rows; other `Sharded` inputs, and results of pending
    collectives, become fakes of the full tensors.

    Args:
        example_inputs: Inputs of the graph.
        layouts: Layouts of sharded inputs, as in `global_view`; None for an unsplit program.
        graph: Captured graph, as in `global_view`; None for an unsplit program.

    Returns:
        One value for each input.
    """
    # The sizes of Dynamo's graph remain symbols; those of a captured graph may be constants.
    inputs = list(example_inputs) if graph is None else specialize_inputs(example_inputs)
    if not any(isinstance(x, Sharded | torch_compat.AsyncCollectiveTensor) for x in example_inputs):
        return inputs
    _, fakes = fake_inputs(example_inputs)
    nodes = graph.graph.find_nodes(op="placeholder") if graph is not None else []
    for i, x in enumerate(example_inputs):
        if i in (layouts or ()):
            inputs[i] = node_info(nodes[i]).local
        elif isinstance(x, Sharded | torch_compat.AsyncCollectiveTensor):
            inputs[i] = fakes[i]
    return inputs


def _names_of_results(gm: GraphModule, results: Sequence[Node | None]) -> list[str]:
    """Return the user's name of each result, for options and messages.

    This is the name in the returned structure, or the name on the line that computes it (Dynamo appends numbers, as in
    `hidden_states_15`) if it is unique, or the name of the node.

    Args:
        gm: Dynamo graph.
        results: Node of each result; None for a value that is not a tensor.
    """
    structure_names = torch_compat.result_names(gm)
    line_names = [_name_on_line(node) for node in results]
    names = list[str]()
    for node, line_name in zip(results, line_names):
        node_name = "" if node is None else node.name
        is_unique = line_name != "" and line_names.count(line_name) == 1
        names.append(structure_names.get(node_name) or (line_name if is_unique else node_name))
    return names


def _name_on_line(node: Node | None) -> str:
    """Return a node's name on the user's line that computes it, else its own; "" for an input or None.

    For the node `h_2` with the line `h = f(h)` this is `h`, since the line contains no `h_2`.
    """
    if node is None or node.op == "placeholder":
        return ""
    name, line = _without_number(node.name), node_line(node)
    is_on_line = re.search(rf"\b{name}\b", line) and not re.search(rf"\b{node.name}\b", line)
    return name if is_on_line else node.name


def _without_number(node_name: str) -> str:
    """Return a node's name without the number that Dynamo appends to repeated names."""
    return re.sub(r"_\d+$", "", node_name)


def _resolve_output_options(
    names: Sequence[str], results: Sequence[Node | None], outputs: str | Mapping[str | int, str], fragment: bool
) -> list[str]:
    """Return the output option of each result, "auto" if the user has set none; raise for unknown results.

    Args:
        names: Name of each result from `_names_of_results`.
        results: Node of each result; None for a value that is not a tensor.
        outputs: The option for all results, or by name in the returned structure, index, or name in the code.
        fragment: True to ignore names that this fragment of a model does not have.
    """
    if isinstance(outputs, str):
        return [outputs] * len(names)
    node_names = ["" if node is None else node.name for node in results]
    options = ["auto"] * len(names)
    for key, option in outputs.items():
        # Names that the user gave, those that differ from the node's, take precedence over indices and names of nodes.
        matches = [i for i, name in enumerate(names) if key == name and name != node_names[i]]
        if not matches:
            matches = [i for i, name in enumerate(node_names) if key in (i, name, _without_number(name))]
        if not matches and not fragment:
            raise SpError("SP237", f"outputs: expected one of the results {names} or its index, got {key!r}.")
        for i in matches:
            options[i] = option
    return options


def _dims_by_placeholder(graph: GraphModule, seq_dims: Mapping[Any, int], fragment: bool) -> dict[str, int] | None:
    """Return the user's `seq_dims` by names of placeholders instead of names or indices of arguments.

    A fragment (a part of a model between graph breaks) may lack some of them. Returns None if it has none: then the
    sequence is detected.

    Args:
        graph: Dynamo graph, marked by `mark_inputs`.
        seq_dims: The user's dims, by argument name or by index among the tensors that are not parameters.
        fragment: True for a part of a model.
    """
    tensors = [n for n in graph.graph.find_nodes(op="placeholder") if node_info(n).parameter is False]
    arguments = [argument_name(n) for n in tensors]
    dims = dict[str, int]()
    for key, dim in seq_dims.items():
        matches = [node for node, argument in zip(tensors, arguments) if argument == key]
        if isinstance(key, int) and 0 <= key < len(tensors):
            matches = [tensors[key]]
        if not matches and fragment:
            continue
        if len(matches) != 1:
            raise SpError(
                "SP236", f"seq_dims: expected one of the tensor inputs {arguments} or its index, got {key!r}."
            )
        dims[matches[0].name] = dim
    return dims or None
