"""inputs="local": each rank passes its shard, and the program still means what it means on the whole sequence.

Dynamo saw a sequence of s tokens. The graph is captured again as if every sequence dim had n*s, so that positions made
in the model (arange over the sequence) count over all ranks; the shards then enter the local graph as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from .axes import find_sequences, name_axes
from .capture import capture, fake_inputs
from .errors import SpError
from .layout import Frame, Placement, Shard
from .shapes import size


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
        node.meta["sp_local"] = fake
        if node.name in dims:
            dim = dims[node.name]
            placements[node.name] = Shard(dim, Frame.full(size(node.meta["val"].shape[dim])))
        elif isinstance(fake, torch.SymInt) and size(fake) in symbols:
            node.meta["sp_scale"] = n
    return graph, placements


def _sequence_dims(graph: GraphModule, seq_dims: Mapping[str, int] | None) -> dict[str, int]:
    if seq_dims is not None:
        ndims = {
            n.name: n.meta["val"].ndim for n in graph.graph.find_nodes(op="placeholder") if n.name in seq_dims
        }
        for name, dim in seq_dims.items():
            if not -ndims[name] <= dim < ndims[name]:
                raise SpError(f"seq_dims: {name!r} has {ndims[name]} dims, so it has no dim {dim}")
        return {name: dim % ndims[name] for name, dim in seq_dims.items()}
    axes = name_axes(graph)
    find_sequences(graph, axes)
    found = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        dims = axes.sequence_dims(node)
        if dims and not node.meta.get("sp_param", False):
            found[node.name] = dims[0]
    return found


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
    shape = [s * n if d == dim % fake.ndim else s for d, s in enumerate(fake.shape)]
    with mode:
        return torch.empty(shape, dtype=fake.dtype, device=fake.device).requires_grad_(fake.requires_grad)
