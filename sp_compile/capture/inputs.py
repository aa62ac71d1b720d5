"""Dynamo graph -> graph in the global view, whose inputs say whether they are parameters and where they lie.

inputs="local": each rank passes its shard, and the program still means what it means on the whole sequence.

Dynamo saw a sequence of s tokens. The graph is captured again as if every sequence dim had n*s, so that positions made
in the model (arange over the sequence) count over all ranks; the shards then enter the local graph as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile._compat import argument_name, is_fragment, is_module_state, refuse_eager_fallback
from sp_compile.config import SPConfig
from sp_compile.errors import SpError
from sp_compile.graph.record import mark, record
from sp_compile.graph.sizes import size
from sp_compile.sharding.axes import find_sequences, name_axes
from sp_compile.sharding.placement import Frame, Placement, Shard

from .capture import capture, fake_inputs


def capture_shards(
    gm: GraphModule, example_inputs: Sequence[Any], n: int, seq_dims: Mapping[str, int] | None
) -> tuple[GraphModule, dict[str, Placement]]:
    """(graph in the global view, placements of the inputs that arrive sharded).

    Raises SpError: a sequence dim that is static, or that shares its symbol with a dim that is not a sequence.
    """
    local = capture(gm, example_inputs)
    dims = _sequence_dims(local, seq_dims)
    mode, fakes = fake_inputs(example_inputs)
    nodes = local.graph.find_nodes(op="placeholder")
    symbols = _symbols(nodes, dims)
    whole = [_enlarge(fake, dims.get(node.name), symbols, n, mode) for node, fake in zip(nodes, fakes)]
    graph = capture(gm, example_inputs, fakes=whole)
    placements: dict[str, Placement] = {}
    for node, fake in zip(graph.graph.find_nodes(op="placeholder"), fakes):
        mark(node, local=fake)
        if node.name in dims:
            dim = dims[node.name]
            placements[node.name] = Shard(dim, Frame.full(size(node.meta["val"].shape[dim])))
        elif isinstance(fake, torch.SymInt) and size(fake) in symbols:
            mark(node, scale=n)
    return graph, placements


def _sequence_dims(graph: GraphModule, seq_dims: Mapping[str, int] | None) -> dict[str, int]:
    axes, inputs = name_axes(graph), graph.graph.find_nodes(op="placeholder")
    named = None if seq_dims is None else {n: seq_dims[n.name] for n in inputs if n.name in seq_dims}
    find_sequences(graph, axes, named)
    if named is not None:
        return {node.name: dim % node.meta["val"].ndim for node, dim in named.items()}
    found = {node.name: axes.sequence_dims(node) for node in inputs if not record(node).parameter}
    return {name: dims[0] for name, dims in found.items() if dims}


def _symbols(nodes: Sequence[Node], dims: Mapping[str, int]) -> set[sympy.Expr]:
    symbols: set[sympy.Expr] = set()
    for node in nodes:
        if node.name in dims:
            extent = size(node.meta["val"].shape[dims[node.name]])
            if isinstance(extent, int):
                raise SpError(
                    f"inputs='local': dim {dims[node.name]} of {node.name} is compiled as the constant {extent}, which "
                    "the graph may hold as a number; compile with dynamic=True, or torch._dynamo.mark_dynamic it"
                )
            symbols.add(extent)
    for node in nodes:
        value = node.meta.get("val")
        for d, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if dims.get(node.name) != d and size(extent) in symbols:
                raise SpError(
                    f"inputs='local': dim {d} of {node.name} has the size of the local sequence, {extent}, so the two "
                    "cannot be told apart; pass inputs of another size, or name it in seq_dims if it is the sequence"
                )
    return symbols


def _enlarge(fake: Any, dim: int | None, symbols: set[sympy.Expr], n: int, mode: Any) -> Any:
    if isinstance(fake, torch.SymInt):
        return fake * n if size(fake) in symbols else fake
    if dim is None or not isinstance(fake, torch.Tensor):
        return fake
    shape = [s * n if d == dim else s for d, s in enumerate(fake.shape)]
    with mode:
        return torch.empty(shape, dtype=fake.dtype, device=fake.device).requires_grad_(fake.requires_grad)


def global_view(
    gm: GraphModule, example_inputs: Sequence[Any], config: SPConfig, n: int
) -> tuple[GraphModule, dict[str, Placement], dict[str, int] | None, bool]:
    """(graph in the global view, where inputs lie that come in shards, the sequence dims that the user named,
    whether the graph is a piece of a model, between graph breaks, so that it may lack inputs that the user named).
    """
    fragment = is_fragment(gm)
    if fragment and (config.outputs == "local" or config.inputs == "local"):
        raise SpError("inputs='local' and outputs='local' need a model without graph breaks: what crosses one is whole")
    _mark_inputs(gm, example_inputs)
    seq_dims = None if isinstance(config.seq_dims, str) else _placeholder_names(gm, config.seq_dims, fragment)
    inputs: dict[str, Placement] = {}
    if config.inputs == "local" and n > 1:
        refuse_eager_fallback()
        graph, inputs = capture_shards(gm, example_inputs, n, seq_dims)
    else:
        graph = capture(gm, example_inputs)
    _mark_inputs(graph, example_inputs)
    return graph, inputs, seq_dims, fragment


def _mark_inputs(graph: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Say of each whether it is one of the user's arguments, and whether it may need a gradient."""
    for node, example in zip(graph.graph.find_nodes(op="placeholder"), example_inputs):
        if isinstance(example, torch.Tensor):
            parameter = isinstance(example, torch.nn.Parameter) or is_module_state(node)
            mark(node, requires_grad=example.requires_grad, parameter=parameter)


def _placeholder_names(graph: GraphModule, seq_dims: Mapping[Any, int], fragment: bool) -> dict[str, int] | None:
    """The user's argument names (or indices) as the names of the graph's placeholders.

    A fragment of the model may lack some of them; one that has none finds its sequence by itself (None).
    """
    tensors = [n for n in graph.graph.find_nodes(op="placeholder") if record(n).parameter is False]
    out = {}
    for key, dim in seq_dims.items():
        found = [n for n in tensors if argument_name(n) == key]
        if isinstance(key, int) and key < len(tensors):
            found = [tensors[key]]
        if not found and fragment:
            continue
        if len(found) != 1:
            known = [argument_name(n) for n in tensors]
            raise SpError(f"seq_dims: no input is called {key!r}; the graph's tensor inputs are {known}")
        out[found[0].name] = dim
    return out or None
