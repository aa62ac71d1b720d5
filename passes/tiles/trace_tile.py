"""Trace the programs of one tile, for results and gradients, as graphs without autograd.

    h, w, y -> sum of cross_entropy     forward: (h, w, y) -> loss      at once: (h, w, y) -> loss, dh, (dz.mT, h)

Each node of the region runs with the sizes of a tile in its size arguments. Values that all tiles add up are returned
as parts (`partial_sums.py`): the loop adds them to its accumulator, and no tile computes a separate gradient of a
weight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.registry import graph_code
from sp_compile.lowering.tiles.tile_ops import tile_length
from sp_compile.lowering.tiles.tile_program import (
    ANY_LENGTH,
    PROGRAMS,
    ROWS,
    Extents,
    TileBody,
    TilePart,
    TileProgram,
    TileValue,
    resolve_shape,
)
from sp_compile.lowering.torch_compat import FakeTensorMode, enable_python_dispatcher, make_symbolic_mode
from sp_compile.passes.graph.fakes import trace_function
from sp_compile.passes.graph.modes import disable_autocast, disable_autocast_cache, restore_autocast
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import as_sizes, is_same_size, read_sizes_from_inputs, size_product
from sp_compile.passes.graph.strides import is_identity, order_of_strides
from sp_compile.passes.sharding.placement import Shard
from sp_compile.passes.sharding.rule import lookup_rule

from .partial_sums import return_parts
from .tile_regions import TileRegion, count_rows
from .tile_symbols import SymbolPlaces, has_symbolic_length, has_symbols, row_dim, split_row_dim, symbol_places
from .tile_view import TokenView

aten = torch.ops.aten


def merge_row_dim(shape: Sequence[Any], have: Shard, rows: Any) -> list[Any]:
    """Return the shape with `rows` rows, in the dim that they share with other factors.

    Args:
        shape: The shape of the value.
        have: The placement of its rows.
        rows: The number of rows.
    """
    return [*shape[: have.dim], have.outer * rows * have.inner, *shape[have.dim + 1 :]]


class TileFunction:
    """One tile of a region, as a function of tensors."""

    def __init__(self, view: TokenView, region: TileRegion, places: SymbolPlaces, length: Any, sizes: Extents) -> None:
        self.view, self.region, self.places, self.length, self.sizes = view, region, places, length, sizes

    def shape(self, node: Node, length: Any, of: Extents) -> list[Any]:
        """Return the shape of a value in a tile of this length, with symbols replaced by `of`."""
        have, shape = self.view.rows(node), as_sizes(node.meta["val"].shape)
        return resolve_shape(shape if have is None else merge_row_dim(shape, have, ROWS), {**of, ROWS: length})

    def inputs(self) -> list[Tensor]:
        """Return fake operands: rows, then replicated ones."""
        rows = []
        for x in self.region.rows:
            have, value = self.view.rows(x), x.meta["val"]
            assert have is not None
            shape = split_row_dim(as_sizes(value.shape), have, self.length)
            rows.append(torch.empty(resolve_shape(shape, self.sizes), dtype=value.dtype, device=value.device))
        return rows + [self._fake_like(x.meta["val"]) for x in self.region.replicated]

    def _fake_like(self, x: Tensor) -> Tensor:
        shape, strides = as_sizes(x.shape), as_sizes(x.stride())
        if all(isinstance(extent, int) for extent in (*shape, *strides)):
            return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        return torch.empty(resolve_shape(shape, self.sizes), dtype=x.dtype, device=x.device)

    def results(self, *operands: Tensor) -> list[Tensor]:
        """Return the results of one tile for its operands, with rows in a separate dim."""
        env: dict[Node, Any] = dict(zip((*self.region.rows, *self.region.replicated), operands, strict=True))
        first = self.view.rows(self.region.rows[0])
        assert first is not None
        length = operands[0].shape[row_dim(first)]  # read from the operand, so that the trace records its source
        of = {symbol: operands[i].shape[d] for symbol, (i, d) in self.places.items()}
        env.update({x: env[x].reshape(self.shape(x, length, of)) for x in self.region.rows})
        for node in self.region.nodes:
            env[node] = self._call(node, env, length, of)
        return [self._output(x, env[x], length, of) for x in self.region.results]

    def _output(self, x: Node, value: Tensor, length: Any, of: Extents) -> Tensor:
        have = self.view.rows(x)
        if have is None:
            return value
        return value.reshape(resolve_shape(split_row_dim(as_sizes(x.meta["val"].shape), have, length), of))

    def _call(self, node: Node, env: dict[Node, Any], length: Any, of: Extents) -> Any:
        if node.target is operator.getitem:
            return env[node.args[0]][node.args[1]]
        found = lookup_rule(node)
        assert found is not None
        call, rule = found
        assert rule is not None
        operands = [env[x] for x in call.operands]
        if rule.reshapes:
            return operands[0].reshape(self.shape(node, length, of))
        sized = {rule.sizes: self.shape(node, length, of)} if rule.sizes else {}
        args, kwargs = call.with_operands(operands, **sized)
        with restore_autocast(self.view.source[node]):
            return node.target(*args, **kwargs)


def tile_program(view: TokenView, region: TileRegion, tiles: int) -> TileProgram:
    """Create and register the region's program.

    Args:
        view: The token view.
        region: A region of the view.
        tiles: The number of tiles.
    """
    total = count_rows(view, region)
    length: Any = tile_length(total, tiles)
    places = symbol_places(view, region)
    assert places is not None
    of: Extents = {}
    mode, lengths = FakeTensorMode(), {n: n for n in (length, total % length or length)}
    if has_symbols(view, region):
        mode, (length, *others) = make_symbolic_mode(
            max(2, length), *(max(2, view.size_hints.get(x, 2)) for x in places)
        )
        of = dict(zip(places, others, strict=True))
        if has_symbolic_length(view, region):
            lengths = {ANY_LENGTH: length}
    operands = (*region.rows, *region.replicated)
    wanted = tuple(i for i, x in enumerate(operands) if _can_require_grad(x))
    with _tracing_mode(mode):
        each = {n: TileFunction(view, region, places, rows, of) for n, rows in lengths.items()}
        differentiable, wanted = _differentiable_parts(next(iter(each.values())), wanted)
        only = [region.results[i] for i in differentiable]
        at_once = (
            len(only) == 1
            and view.is_sum(only[0])
            and is_same_size(size_product(as_sizes(only[0].meta["val"].shape)), 1)
        )
        sums = [view.rows(operands[i]) is None for i in wanted]
        traced = {n: _trace_body(tile, wanted, differentiable, at_once, sums) for n, tile in each.items()}
        uniform = [len(set(ways)) == 1 for ways in zip(*(ways for _, ways in traced.values()), strict=True)]
        if not all(uniform):
            sums = [a and b for a, b in zip(sums, uniform, strict=True)]
            traced = {n: _trace_body(tile, wanted, differentiable, at_once, sums) for n, tile in each.items()}
    bodies = {n: body for n, (body, _) in traced.items()}
    ways = next(iter(traced.values()))[1]
    names = {symbol: sympy.Symbol(f"n{i}", integer=True, positive=True) for i, symbol in enumerate(places)}
    results = tuple(_trace_value(view, x, x.meta["val"].dtype, names) for x in region.results)
    saved = [_trace_value(view, operands[i], operands[i].meta["val"].dtype, names) for i in wanted]
    if at_once:  # a sum over many tokens may exceed the range of float16
        saved = [replace(x, dtype=torch.float32) if x.dtype == torch.float16 else x for x in saved]
    gradients = tuple(replace(x, adds=way) for x, way in zip(saved, ways, strict=True))
    dims = tuple(row_dim(have) for x in region.rows if (have := view.rows(x)))
    known = (dims, results, differentiable, wanted, gradients, at_once, tuple(zip(names.values(), places.values())))
    code = known, {n: _body_code(body) for n, body in bodies.items()}
    return PROGRAMS[PROGRAMS.register(code, lambda name: TileProgram(name, bodies, *known))]


def redraws_in_backward(program: TileProgram) -> bool:
    """Return True if a recomputing backward draws the same random numbers as the forward."""
    pairs = [(body.forward.graph, body.gradients.graph) for body in program.bodies.values() if body.gradients]
    counts = [[sum(map(_count_draws, gm.graph.nodes)) for gm in pair] for pair in pairs]
    return program.at_once or all(first == second for first, second in counts)


def _count_draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _can_require_grad(x: Node) -> bool:
    value = x.meta["val"]
    return node_info(x).requires_grad is not False and (value.is_floating_point() or value.is_complex())


def _trace_value(view: TokenView, x: Node, dtype: torch.dtype, names: Mapping[Any, Any]) -> TileValue:
    have, shape = view.rows(x), as_sizes(x.meta["val"].shape)
    separate = shape if have is None else split_row_dim(shape, have, ROWS)
    named = tuple(extent if isinstance(extent, int) else extent.subs(names) for extent in separate)
    if have is not None:
        return TileValue(named, dtype, row_dim(have))
    order = order_of_strides(as_sizes(x.meta["val"].stride()))
    return TileValue(named, dtype, None, order=() if is_identity(order) else tuple(order))


@contextmanager
def _tracing_mode(mode: FakeTensorMode) -> Iterator[None]:
    """Run on fake tensors, under the caller's autocast."""
    with mode, enable_python_dispatcher(), disable_autocast_cache():
        yield


def _fresh_leaves(operands: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    return [x.detach().requires_grad_(i in wanted) for i, x in enumerate(operands)]


def _differentiable_parts(tile: TileFunction, wanted: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of differentiable results, and of the operands in `wanted` that have a gradient.

    A weight that is read only under no_grad has no gradient on a single device, and an optimizer does not update it;
    with a gradient of zeros, it would decay.
    """
    with torch.enable_grad():
        leaves = _fresh_leaves(tile.inputs(), wanted)
        outputs = tile.results(*leaves)
    found = tuple(i for i, x in enumerate(outputs) if x.requires_grad)
    if not found:
        return (), ()
    through = [outputs[i] for i in found]
    operands = _compute_gradients(
        through, [leaves[i] for i in wanted], [torch.ones_like(x) for x in through], allow_unused=True
    )
    return found, tuple(i for i, x in zip(wanted, operands, strict=True) if x is not None)


def _compute_gradients(
    through: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor], allow_unused: bool = False
) -> tuple[Any, ...]:
    """Compute gradients outside of autocast, as a backward that is called outside of autocast does."""
    with disable_autocast(through[0].device.type):
        return torch.autograd.grad(through, leaves, cotangents, allow_unused=allow_unused)


def _trace_body(
    tile: TileFunction, wanted: Sequence[int], differentiable: Sequence[int], at_once: bool, sums: Sequence[bool]
) -> tuple[TileBody, list[str]]:
    """Trace the parts for one length, and return the form in which each gradient is added up.

    sums: True for gradients that may be returned as parts.
    """
    inputs = tile.inputs()
    many = len(inputs)

    def forward(*operands: Tensor) -> list[Tensor]:
        """Return the results of one tile."""
        with torch.no_grad():
            return tile.results(*operands)

    def gradients(*operands: Tensor) -> list[Tensor]:
        """Return the gradients of one tile; with `at_once`, after its results."""
        with torch.enable_grad():
            leaves = _fresh_leaves(operands[:many], wanted)
            results = tile.results(*leaves)
            through = [results[i] for i in differentiable]
            cotangents = [torch.ones_like(x) for x in through] if at_once else list(operands[many:])
        found = _compute_gradients(through, [leaves[i] for i in wanted], cotangents)
        return [*([x.detach() for x in results] if at_once else ()), *found]

    plain = TilePart(_trace_graph(forward, inputs), inputs)
    if not wanted:
        return TileBody(plain), []
    through = [tile.view.rows(tile.region.results[i]) for i in differentiable]
    results = [plain.graph.graph.output_node().args[0][i].meta["val"] for i in differentiable]
    operands = [*inputs, *([] if at_once else [torch.empty_like(x) for x in results])]
    assert len(through) == len(results)
    graph = _trace_graph(gradients, operands)
    ways = return_parts(graph, sums)
    return TileBody(plain, TilePart(graph, operands)), ways


def _trace_graph(run: Callable[..., Any], operands: Sequence[Tensor]) -> GraphModule:
    gm = trace_function(run, operands)
    read_sizes_from_inputs(gm.graph)
    gm.recompile()
    return gm


def _body_code(body: TileBody) -> list[Any]:
    """Return the code of the parts, and the shapes of their operands."""
    return [
        (graph_code(part.graph), part.strides, [(x.shape, x.dtype, x.device) for x in part.inputs])
        for part in body.parts
    ]
