"""Dynamo graph -> graph in the global view, whose inputs say whether they are parameters and where they lie.

inputs="local": each rank passes its shard, and the program still means what it means on the whole sequence.

Dynamo saw a sequence of s tokens. The graph is captured again as if every sequence dim had n*s, so that positions made
in the model (arange over the sequence) count over all ranks; the shards then enter the local graph as they are.
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
from sp_compile.lowering.base.options import IOOptions, stronger_output
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
    """(graph in the global view, placements of the inputs that arrive sharded).

    A dim that is static becomes a symbol: Dynamo traces the program once more.
    Raises SpError: a sequence dim that stays static, that shares its symbol with a dim that is not a sequence, or whose
    length the program has asked for something that is not so of the whole.
    """
    mode, _ = fake_inputs(())
    asked = length_guards(mode)  # by Dynamo alone: what capture asks, it asks of the whole, too
    local = capture(gm, example_inputs)
    dims = _sequence_dims(local, seq_dims)
    _, fakes = fake_inputs(example_inputs)
    nodes = local.graph.find_nodes(op="placeholder")
    along = [(x, node, dims[node.name]) for node, x in zip(nodes, example_inputs) if node.name in dims]
    retrace_with_symbols((x, d) for x, node, d in along if isinstance(as_size(node.meta["val"].shape[d]), int))
    symbols = _dim_symbols(nodes, dims)
    _require_for_global(asked, symbols, n, mode)
    whole = [_enlarge(fake, dims.get(node.name), symbols, n, mode) for node, fake in zip(nodes, fakes)]
    graph = capture(gm, example_inputs, fakes=whole)
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
    """Refuse shards of one sequence with different numbers of rows: one may be a table of positions."""
    first: dict[Any, tuple[Node, int]] = {}
    for node, dim in along:
        (name,) = {axes.find(atom.name) for atom in axes.dims[node, 0][dim] if axes.is_sequence(atom)}
        other, at_other = first.setdefault(name, (node, dim))
        rows = [size_hint(x.meta["val"].shape[d]) for x, d in ((other, at_other), (node, dim))]
        if rows[0] != rows[1]:
            raise SpError(
                "SP234",
                f"inputs='local': expected as many rows in dim {at_other} of {argument_name(other)} as in dim {dim} of "
                f"{argument_name(node)}, which share a sequence, got {rows[0]} and {rows[1]}.",
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
                    f"inputs='local': dim {d} of {argument_name(node)} has the size of the local sequence, {extent}, "
                    "so either may be the sequence.",
                )
    return symbols


def _require_for_global(asked: Iterable[sympy.Basic], symbols: set[sympy.Expr], n: int, mode: FakeTensorMode) -> None:
    """Require that each guard on the length of a shard also holds for the length of the full sequence."""
    wholes = {symbol: n * symbol for symbol in symbols}
    for fact in (unify_symbols(mode, one) for one in asked):
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
    """A Dynamo graph in the global view. fragment: is it a piece of a model, between graph breaks?

    arguments, names: what the user's code calls inputs and results; outputs: what the option of that name says of each
    result. writes: which result, behind those of the code, is what the graph writes to an input that is `Sharded`: by
    the number of that. seq_dims: the sequence dims that the user named. inputs: where those lie that come in shards;
    layouts: of the ones that are `Sharded`, by number. views, hidden, written: as `GraphBoundary` has them. folds:
    chunks of
    the sequence that a rank holds of them.
    """

    graph: GraphModule
    fragment: bool
    arguments: list[str]
    names: list[str]
    outputs: list[str]
    seq_dims: dict[str, int] | None
    inputs: dict[str, Placement]
    layouts: dict[int, Layout]
    writes: dict[int, int]
    views: Sequence[ResultView]
    hidden: int
    has_writes: Sequence[int]

    @property
    def folds(self) -> int:
        return min((layout.folds for layout in self.layouts.values()), default=1)


def global_view(
    gm: GraphModule, example_inputs: Sequence[Any], asked: IOOptions, ranks: Ranks, deals: bool = False
) -> GlobalView:
    """The graph as the passes take it, and what is known of its inputs and results.

    deals: it takes rows that an earlier graph has dealt as they lie, and keeps their order.
    Raises SpError: options that name none of them, or that the program cannot honour.
    """
    fragment = is_fragment(gm)
    if fragment and "local" in (asked.inputs, asked.outputs):
        raise SpError("SP231", "inputs='local' and outputs='local' are not supported with graph breaks.")
    _mark_inputs(gm, example_inputs)
    seq_dims = None if isinstance(asked.seq_dims, str) else _placeholder_names(gm, asked.seq_dims, fragment)
    inputs: dict[str, Placement] = {}
    layouts: dict[int, Layout] = {}
    if asked.inputs == "local" and ranks.n > 1:
        refuse_eager_fallback()
        graph, inputs = capture_shards(gm, example_inputs, ranks.n, seq_dims)
    else:
        graph = capture(gm, example_inputs)
        inputs, layouts = _sharded_inputs(graph, example_inputs, ranks, deals)
    _mark_inputs(graph, example_inputs)
    arguments = [argument_name(n) for n in gm.graph.find_nodes(op="placeholder")]
    results = [leaf if isinstance(leaf, Node) else None for leaf in pytree.tree_leaves(gm.graph.output_node().args[0])]
    names, made = _result_names(gm, results), ["" if node is None else node.name for node in results]
    outputs, written = _result_options(names, made, asked.outputs, fragment), tuple(_written_inputs(graph))
    views, hidden = _omitted_views(graph, example_inputs, asked.inputs, outputs)
    names += [f"a tensor of which {names[one.number]} is a view" for one in hidden]
    writes = _return_writes(graph, example_inputs)
    names += [arguments[i] for i in writes]
    outputs += ["lazy"] * len(writes)
    return GlobalView(
        graph, fragment, arguments, names, outputs, seq_dims, inputs, layouts, writes, views, len(hidden), written
    )


def _sharded_inputs(
    graph: GraphModule, example_inputs: Sequence[Any], ranks: Ranks, deals: bool
) -> tuple[dict[str, Placement], dict[int, Layout]]:
    """Where inputs lie that an earlier graph left in shards on these ranks; the graph is told how many rows each has.

    One that lies along a part of a dim is taken whole; where some are dealt, only these are not.
    """
    mode, _ = fake_inputs(())
    placements: dict[str, Placement] = {}
    layouts: dict[int, Layout] = {}
    for i, (node, x) in enumerate(zip(graph.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        if not isinstance(x, Sharded) or not x.sharding.is_plain or x.sharding.is_balanced != deals:
            continue
        if (x.sharding.n, x.sharding.group) != (ranks.n, ranks.group):
            continue
        layout, whole = replace(x.sharding, balanced=None), node.meta["val"]
        with mode, torch.no_grad():
            local = layout.local_rows(whole).detach()
        set_node_info(node, local=local.requires_grad_(x.requires_grad))
        placements[node.name] = Shard(layout.dim, Frame.full(as_size(whole.shape[layout.dim]), layout.folds))
        layouts[i] = layout
    return placements, layouts


def _written_inputs(graph: GraphModule) -> Iterator[int]:
    """The numbers of the inputs that a graph changes in place."""
    inputs = list(graph.graph.find_nodes(op="placeholder"))
    for copy in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        if copy.args[0] in inputs:
            yield inputs.index(copy.args[0])


def _omitted_views(
    graph: GraphModule, example_inputs: Sequence[Any], inputs: str, outputs: list[str]
) -> tuple[tuple[ResultView, ...], list[ResultView]]:
    """The results that are made as views of others once the program has run, and of each result more that it returns
    for them the first view. The option's word of a base becomes that of all its views.

    Not where a rank's rows are wanted, or given: sizes are those of one device.
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
        outputs[view.base] = stronger_output(outputs[view.base], outputs[view.number])
    views = tuple(sorted([*of_results, *of_inputs], key=lambda view: view.number))
    omit_views(graph, views, len(hidden))
    return views, hidden


def _return_writes(graph: GraphModule, example_inputs: Sequence[Any]) -> dict[int, int]:
    """Let the graph return what it writes to values in shards; the number of the result, by that of the input."""
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
    """What stands for the inputs when the program of one rank is compiled: of a `Sharded` its rows, or the whole, and
    of what a collective is still to bring that.

    layouts, graph: as `global_view` has them; of a program that is not split there are none.
    """
    others = Sharded, AsyncCollectiveTensor
    given = list(example_inputs) if graph is None else settle_inputs(example_inputs)  # Dynamo's graph has its symbols
    if not any(isinstance(x, others) for x in example_inputs):
        return given
    _, fakes = fake_inputs(example_inputs)
    nodes = graph.graph.find_nodes(op="placeholder") if graph is not None else []
    rows = {i: node_info(nodes[i]).local for i in layouts or ()}
    return [rows.get(i, fakes[i]) if isinstance(x, others) else given[i] for i, x in enumerate(example_inputs)]


def _result_names(gm: GraphModule, results: Sequence[Node | None]) -> list[str]:
    """What the user calls each result: as what is returned has it; or as the line that makes it, whose names Dynamo
    numbers (`hidden_states_15`), if that is the only result of this name; or as Dynamo does.
    """
    returned = result_names(gm)
    on_lines = [_base_name_of(node) for node in results]
    alone = [name if on_lines.count(name) == 1 else "" for name in on_lines]
    return ["" if node is None else returned.get(node.name, alone[i] or node.name) for i, node in enumerate(results)]


def _base_name_of(node: Node | None) -> str:
    """The node's name without a number that its line does not have."""
    if node is None or node.op == "placeholder":
        return ""
    name, line = re.sub(r"_\d+$", "", node.name), node_line(node)
    return name if re.search(rf"\b{name}\b", line) and not re.search(rf"\b{node.name}\b", line) else node.name


def _result_options(
    names: Sequence[str], made: Sequence[str], outputs: str | Mapping[str | int, str], fragment: bool
) -> list[str]:
    """What the option says of each result, by what is returned or by the code that makes it. A fragment may lack some
    that it names.
    """
    if isinstance(outputs, str):
        return [outputs] * len(names)
    asked = ["auto"] * len(names)
    for key, word in outputs.items():
        found = [i for i, (name, one) in enumerate(zip(names, made)) if key == name != one]
        found = found or [i for i, one in enumerate(made) if key in (i, one, re.sub(r"_\d+$", "", one))]
        if not found and not fragment:
            raise SpError("SP237", f"outputs: expected a result of {names}, got {key!r}.")
        for i in found:
            asked[i] = word
    return asked


def _mark_inputs(graph: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Say of each whether it is one of the user's arguments, and whether it may need a gradient."""
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), example_inputs):
        if isinstance(example, torch.Tensor):
            parameter = isinstance(example, torch.nn.Parameter) or is_module_state(node)
            set_node_info(node, requires_grad=example.requires_grad, parameter=parameter)


def _placeholder_names(graph: GraphModule, seq_dims: Mapping[Any, int], fragment: bool) -> dict[str, int] | None:
    """The user's argument names (or indices) as the names of the graph's placeholders.

    A fragment of the model may lack some of them; one that has none finds its sequence by itself (None).
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
