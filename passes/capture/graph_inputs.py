"""Build the global view of a Dynamo graph, with parameters and placements of its inputs.

With inputs="local" each rank passes its shard, and the program keeps its meaning for the full sequence.

Dynamo traced a sequence of s tokens. The graph is captured again with n*s in every sequence dim, so that positions
created in the model (arange over the sequence) are global; the shards are the inputs of the local graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, node_line
from sp_compile.lowering.base.options import OUTPUTS, SPConfig
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.shard_storage import Layout
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.lowering.torch_compat import (
    AsyncCollectiveTensor,
    FakeTensorMode,
    argument_name,
    assume_fact,
    is_argument,
    is_fragment,
    is_module_state,
    length_guards,
    pytree,
    refuse_eager_fallback,
    result_names,
    retrace_with_symbols,
    size_hint,
    unify_symbols,
)
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import as_size
from sp_compile.passes.sharding.axes import Axes, find_sequences, name_axes
from sp_compile.passes.sharding.placement import Frame, Placement, Shard

from .capture import capture, fake_inputs, settle_inputs
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
    conditions = length_guards(mode)  # guards of Dynamo only: capture adds guards on the global length
    local = capture(gm, example_inputs)
    dims = _sequence_dims(local, seq_dims)
    _, fakes = fake_inputs(example_inputs)
    nodes = local.graph.find_nodes(op="placeholder")
    along = [(x, node, dims[node.name]) for node, x in zip(nodes, example_inputs) if node.name in dims]
    retrace_with_symbols((x, d) for x, node, d in along if isinstance(as_size(node.meta["val"].shape[d]), int))
    symbols = _dim_symbols(nodes, dims)
    _require_for_global(conditions, symbols, n, mode)
    global_fakes = [_enlarge(fake, dims.get(node.name), symbols, n, mode) for node, fake in zip(nodes, fakes)]
    graph = capture(gm, example_inputs, fakes=global_fakes)
    placements: dict[str, Placement] = {}
    for node, fake in zip(graph.graph.find_nodes(op="placeholder"), fakes):
        set_node_info(node, local=fake)
        if node.name in dims:
            dim = dims[node.name]
            placements[node.name] = Shard(dim, Frame.full(as_size(node.meta["val"].shape[dim])))
        elif isinstance(fake, torch.SymInt) and as_size(fake) in symbols:
            set_node_info(node, scale=n)
    return graph, placements


def _sequence_dims(graph: GraphModule, seq_dims: Mapping[str, int] | None) -> dict[str, int]:
    axes, inputs = name_axes(graph), graph.graph.find_nodes(op="placeholder")
    named = None if seq_dims is None else {n: seq_dims[n.name] for n in inputs if n.name in seq_dims}
    find_sequences(graph, axes, named)
    if named is not None:
        return {node.name: dim % node.meta["val"].ndim for node, dim in named.items()}
    found = {node.name: axes.sequence_dims(node) for node in inputs if is_argument(node)}
    _refuse_other_lengths([(node, found[node.name][0]) for node in inputs if found.get(node.name)], axes)
    return {name: dims[0] for name, dims in found.items() if dims}


def _refuse_other_lengths(along: Sequence[tuple[Node, int]], axes: Axes) -> None:
    """Raise if shards of one sequence differ in their number of rows: one may be a table of positions."""
    first: dict[Any, tuple[Node, int]] = {}
    for node, dim in along:
        (name,) = {axes.find(atom.name) for atom in axes.dims[node, 0][dim] if axes.is_sequence(atom)}
        other, at_other = first.setdefault(name, (node, dim))
        rows = [size_hint(x.meta["val"].shape[d]) for x, d in ((other, at_other), (node, dim))]
        if rows[0] != rows[1]:
            raise SpError(
                "SP234",
                f"inputs='local': expected equal numbers of rows in dim {at_other} of {argument_name(other)} and "
                f"dim {dim} of {argument_name(node)}, which share a sequence, got {rows[0]} and {rows[1]}.",
            )


def _dim_symbols(nodes: Sequence[Node], dims: Mapping[str, int]) -> set[sympy.Expr]:
    symbols: set[sympy.Expr] = set()
    for node in nodes:
        if node.name in dims:
            extent = as_size(node.meta["val"].shape[dims[node.name]])
            if isinstance(extent, int):
                raise SpError(
                    "SP232",
                    f"inputs='local': dim {dims[node.name]} of {argument_name(node)} is compiled as the constant "
                    f"{extent}: its length is 1, or the program reads it as a number.",
                )
            symbols.add(extent)
    for node in nodes:
        value = node.meta.get("val")
        for d, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if dims.get(node.name) != d and as_size(extent) in symbols:
                raise SpError(
                    "SP233",
                    f"inputs='local': dim {d} of {argument_name(node)} is as long as the sequence dim on this rank "
                    f"({extent}), so the sequence dim is ambiguous.",
                )
    return symbols


def _require_for_global(facts: Iterable[sympy.Basic], symbols: set[sympy.Expr], n: int, mode: FakeTensorMode) -> None:
    """Require that each guard on the length of a shard also holds for the length of the full sequence."""
    wholes = {symbol: n * symbol for symbol in symbols}
    for fact in (unify_symbols(mode, one) for one in facts):
        if fact.free_symbols & symbols and not assume_fact(mode, fact.xreplace(wholes)):
            of_it = fact.xreplace({symbol: sympy.Symbol("length") for symbol in symbols})
            raise SpError(
                "SP235",
                f"inputs='local': a branch or a shape of the program depends on its length: {of_it} holds for the rows "
                "of one rank, but not for the sequence.",
            )


def _enlarge(fake: Any, dim: int | None, symbols: set[sympy.Expr], n: int, mode: Any) -> Any:
    if isinstance(fake, torch.SymInt):
        return fake * n if as_size(fake) in symbols else fake
    if dim is None or not isinstance(fake, torch.Tensor):
        return fake
    shape = [s * n if d == dim else s for d, s in enumerate(fake.shape)]
    with mode:
        return torch.empty(shape, dtype=fake.dtype, device=fake.device).requires_grad_(fake.requires_grad)


@dataclass(frozen=True)
class GlobalView:
    """Dynamo graph in the global view."""

    graph: GraphModule  # captured graph
    fragment: bool  # True for a part of a model between graph breaks
    arguments: list[str]  # inputs, as named in the user's code
    names: list[str]  # results, as named in the user's code
    outputs: list[str]  # output option of each result
    seq_dims: dict[str, int] | None  # sequence dims from the user
    inputs: dict[str, Placement]  # placements of sharded inputs
    layouts: dict[int, Layout]  # layouts of `Sharded` inputs, by index
    writes: dict[int, int]  # index of a `Sharded` input -> result with its new value
    views: Sequence[ResultView]  # as in `GraphBoundary`
    hidden: int  # number of hidden results, as in `GraphBoundary`
    has_writes: Sequence[int]  # mutated inputs, as in `GraphBoundary`

    @property
    def folds(self) -> int:
        """Return the number of sequence chunks of a rank in the inputs (see `RowOrder`)."""
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
    fragment = is_fragment(gm)
    if fragment and "local" in (options.inputs, options.outputs):
        raise SpError("SP231", "inputs='local' and outputs='local' are not supported with graph breaks.")
    _mark_inputs(gm, example_inputs)
    seq_dims = None if isinstance(options.seq_dims, str) else _placeholder_names(gm, options.seq_dims, fragment)
    inputs: dict[str, Placement] = {}
    layouts: dict[int, Layout] = {}
    if options.inputs == "local" and ranks.n > 1:
        refuse_eager_fallback()
        graph, inputs = capture_shards(gm, example_inputs, ranks.n, seq_dims)
    else:
        graph = capture(gm, example_inputs)
        inputs, layouts = _sharded_inputs(graph, example_inputs, ranks, accept_balanced)
    _mark_inputs(graph, example_inputs)
    arguments = [argument_name(n) for n in gm.graph.find_nodes(op="placeholder")]
    results = [leaf if isinstance(leaf, Node) else None for leaf in pytree.tree_leaves(gm.graph.output_node().args[0])]
    names, result_names = _result_names(gm, results), ["" if node is None else node.name for node in results]
    outputs, written = _result_options(names, result_names, options.outputs, fragment), tuple(_written_inputs(graph))
    views, hidden = _omitted_views(graph, example_inputs, options.inputs, outputs)
    names += [f"a tensor of which {names[one.number]} is a view" for one in hidden]
    writes = _return_writes(graph, example_inputs)
    names += [arguments[i] for i in writes]
    outputs += ["lazy"] * len(writes)
    return GlobalView(
        graph, fragment, arguments, names, outputs, seq_dims, inputs, layouts, writes, views, len(hidden), written
    )


def _sharded_inputs(
    graph: GraphModule, example_inputs: Sequence[Any], ranks: Ranks, balanced: bool
) -> tuple[dict[str, Placement], dict[int, Layout]]:
    """Return placements and layouts of inputs that an earlier graph sharded on these ranks.

    An input that is sharded along a part of a dim is gathered. If load-balanced rows are accepted, only load-balanced
    inputs remain sharded; otherwise only the others do.
    """
    mode, _ = fake_inputs(())
    placements: dict[str, Placement] = {}
    layouts: dict[int, Layout] = {}
    for i, (node, x) in enumerate(zip(graph.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        if not isinstance(x, Sharded) or not x.sharding.is_plain or x.sharding.is_balanced != balanced:
            continue
        if (x.sharding.n, x.sharding.group) != (ranks.n, ranks.group):
            continue
        layout, value = replace(x.sharding, balanced=None), node.meta["val"]
        with mode, torch.no_grad():
            local = layout.local_rows(value).detach()
        set_node_info(node, local=local.requires_grad_(x.requires_grad))
        placements[node.name] = Shard(layout.dim, Frame.full(as_size(value.shape[layout.dim]), layout.folds))
        layouts[i] = layout
    return placements, layouts


def _written_inputs(graph: GraphModule) -> Iterator[int]:
    """Yield the indices of the inputs that a graph mutates."""
    inputs = list(graph.graph.find_nodes(op="placeholder"))
    for copy in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if copy.args[0] in inputs:
            yield inputs.index(copy.args[0])


def _omitted_views(
    graph: GraphModule, example_inputs: Sequence[Any], inputs: str, outputs: list[str]
) -> tuple[tuple[ResultView, ...], list[ResultView]]:
    """Omit results that are recreated as views of others after the run.

    The output option of a base applies to all its views. Results are not omitted with inputs='local' or
    outputs='local', because the sizes of views are global.

    Returns:
        The omitted views, and for each hidden result its first view.
    """
    shared: SharedResults = graph.meta[VIEW_OPS]
    of_results = [view for view in shared.views if not view.of_argument]
    if "local" in outputs:
        of_results = []
    has_memory = [type(x) in (torch.Tensor, torch.nn.Parameter, Sharded) for x in example_inputs]
    of_inputs = [view for view in shared.views if view.of_argument and inputs != "local" and has_memory[view.base]]
    own, hidden = len(outputs), list[ResultView]()
    for view in of_results:
        if view.base == own + len(hidden):
            hidden.append(view)
            outputs.append(outputs[view.number])
        options = outputs[view.base], outputs[view.number]
        outputs[view.base] = max(options, key=OUTPUTS.index)  # the one that satisfies both
    views = tuple(sorted([*of_results, *of_inputs], key=lambda view: view.number))
    omit_views(graph, views, len(hidden))
    return views, hidden


def _return_writes(graph: GraphModule, example_inputs: Sequence[Any]) -> dict[int, int]:
    """Return new values of `Sharded` inputs as results, in place of copies; result index by input index."""
    output, found = graph.graph.output_node(), dict[int, int]()
    numbers = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    for copy in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        i = numbers.get(copy.args[0])
        if i is not None and isinstance(example_inputs[i], Sharded):
            results = output.args[0]
            found[i] = len(results)
            output.args = (type(results)([*results, copy.args[1]]),)
            graph.graph.erase_node(copy)
    if found:
        graph.recompile()
    return found


def local_inputs(
    example_inputs: Sequence[Any], layouts: Mapping[int, Layout] | None = None, graph: GraphModule | None = None
) -> list[Any]:
    """Return the inputs for the compilation of a rank's program: local rows of `Sharded`, or full tensors.

    Results of pending collectives are replaced by fakes, too.

    Args:
        example_inputs: Inputs of the graph.
        layouts: Layouts of sharded inputs, as in `global_view`; None for an unsplit program.
        graph: Captured graph, as in `global_view`; None for an unsplit program.

    Returns:
        One value for each input.
    """
    others = Sharded, AsyncCollectiveTensor
    settled = list(example_inputs) if graph is None else settle_inputs(example_inputs)  # Dynamo's graph has its symbols
    if not any(isinstance(x, others) for x in example_inputs):
        return settled
    _, fakes = fake_inputs(example_inputs)
    nodes = graph.graph.find_nodes(op="placeholder") if graph is not None else []
    rows = {i: node_info(nodes[i]).local for i in layouts or ()}
    return [rows.get(i, fakes[i]) if isinstance(x, others) else settled[i] for i, x in enumerate(example_inputs)]


def _result_names(gm: GraphModule, results: Sequence[Node | None]) -> list[str]:
    """Return the user's name of each result.

    This is the name in the returned structure, or the name on the line that computes it (Dynamo appends numbers, as in
    `hidden_states_15`) if it is unique, or the name of the node.
    """
    returned = result_names(gm)
    on_lines = [_base_name_of(node) for node in results]
    unique = [name if on_lines.count(name) == 1 else "" for name in on_lines]
    return ["" if node is None else returned.get(node.name, unique[i] or node.name) for i, node in enumerate(results)]


def _base_name_of(node: Node | None) -> str:
    """Return the node's name without a number that its line does not contain."""
    if node is None or node.op == "placeholder":
        return ""
    name, line = re.sub(r"_\d+$", "", node.name), node_line(node)
    return name if re.search(rf"\b{name}\b", line) and not re.search(rf"\b{node.name}\b", line) else node.name


def _result_options(
    names: Sequence[str], results: Sequence[str], outputs: str | Mapping[str | int, str], fragment: bool
) -> list[str]:
    """Return the output option of each result, by its returned name or its name in the code.

    Names that a fragment of the model does not have are ignored.
    """
    if isinstance(outputs, str):
        return [outputs] * len(names)
    options = ["auto"] * len(names)
    for key, option in outputs.items():
        found = [i for i, (name, one) in enumerate(zip(names, results)) if key == name != one]
        found = found or [i for i, one in enumerate(results) if key in (i, one, re.sub(r"_\d+$", "", one))]
        if not found and not fragment:
            raise SpError("SP237", f"outputs: expected a result of {names}, got {key!r}.")
        for i in found:
            options[i] = option
    return options


def _mark_inputs(graph: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Record for each input whether it is a parameter, and whether it requires a gradient."""
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), example_inputs):
        if isinstance(example, torch.Tensor):
            parameter = isinstance(example, torch.nn.Parameter) or is_module_state(node)
            set_node_info(node, requires_grad=example.requires_grad, parameter=parameter)


def _placeholder_names(graph: GraphModule, seq_dims: Mapping[Any, int], fragment: bool) -> dict[str, int] | None:
    """Convert the user's argument names or indices to names of placeholders.

    A fragment of the model may lack some of them; if it has none, None is returned, and the sequence is detected.
    """
    tensors = [n for n in graph.graph.find_nodes(op="placeholder") if node_info(n).parameter is False]
    out = {}
    for key, dim in seq_dims.items():
        found = [n for n in tensors if argument_name(n) == key]
        if isinstance(key, int) and key < len(tensors):
            found = [tensors[key]]
        if not found and fragment:
            continue
        if len(found) != 1:
            known = [argument_name(n) for n in tensors]
            raise SpError("SP236", f"seq_dims: expected a tensor input of {known}, got {key!r}.")
        out[found[0].name] = dim
    return out or None
