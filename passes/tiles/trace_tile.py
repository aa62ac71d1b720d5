"""A region -> the programs of one tile: its results, and the gradients of what goes in, as graphs without autograd.

    h, w, y -> sum of cross_entropy     forward: (h, w, y) -> loss      at once: (h, w, y) -> loss, dh, (dz.mT, h)

Each node of the region runs with the sizes of a tile where the call spells sizes. What all tiles add to is given as
`partial_sums.py` finds it: the loop adds it to what it has, and no tile makes a gradient of a weight of its own.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

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
    resolved,
)
from sp_compile.lowering.torch_compat import FakeTensorMode, enable_python_dispatcher, symbolic_mode
from sp_compile.passes.graph.fakes import traced
from sp_compile.passes.graph.modes import autocast_at, uncached_autocast, without_autocast
from sp_compile.passes.graph.node_info import record
from sp_compile.passes.graph.sizes import product, read_off_inputs, same, sizes
from sp_compile.passes.graph.strides import is_identity, order_of_strides
from sp_compile.passes.sharding.placement import Shard
from sp_compile.passes.sharding.rule import lookup

from .partial_sums import give_parts
from .tile_regions import Region, row_count
from .tile_symbols import SymbolPlaces, has_symbols, is_of_any_length, row_dim, rows_apart, symbol_places
from .tile_view import TokenView

aten = torch.ops.aten


def together(shape: Sequence[Any], have: Shard, rows: Any) -> list[Any]:
    """The shape with so many rows, in the dim that they share with others."""
    return [*shape[: have.dim], have.outer * rows * have.inner, *shape[have.dim + 1 :]]


class TileOf:
    """One tile of a region, as a function of tensors."""

    def __init__(self, view: TokenView, region: Region, places: SymbolPlaces, length: Any, sizes: Extents) -> None:
        self.view, self.region, self.places, self.length, self.sizes = view, region, places, length, sizes

    def shape(self, node: Node, length: Any, of: Extents) -> list[Any]:
        """Of a value in a tile of this length."""
        have, shape = self.view.rows(node), sizes(node.meta["val"].shape)
        return resolved(shape if have is None else together(shape, have, ROWS), {**of, ROWS: length})

    def inputs(self) -> list[Tensor]:
        """Fake operands: rows, then whole ones."""
        rows = []
        for x in self.region.rows:
            have, value = self.view.rows(x), x.meta["val"]
            assert have is not None
            shape = rows_apart(sizes(value.shape), have, self.length)
            rows.append(torch.empty(resolved(shape, self.sizes), dtype=value.dtype, device=value.device))
        return rows + [self._like(x.meta["val"]) for x in self.region.whole]

    def _like(self, x: Tensor) -> Tensor:
        shape, strides = sizes(x.shape), sizes(x.stride())
        if all(isinstance(extent, int) for extent in (*shape, *strides)):
            return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)
        return torch.empty(resolved(shape, self.sizes), dtype=x.dtype, device=x.device)

    def results(self, *given: Tensor) -> list[Tensor]:
        """What one tile makes of its operands, rows in a dim of their own."""
        env: dict[Node, Any] = dict(zip((*self.region.rows, *self.region.whole), given, strict=True))
        first = self.view.rows(self.region.rows[0])
        assert first is not None
        length = given[0].shape[row_dim(first)]  # read off the operand, so that a trace knows where it is from
        of = {symbol: given[i].shape[d] for symbol, (i, d) in self.places.items()}
        env.update({x: env[x].reshape(self.shape(x, length, of)) for x in self.region.rows})
        for node in self.region.nodes:
            env[node] = self._call(node, env, length, of)
        return [self._out(x, env[x], length, of) for x in self.region.results]

    def _out(self, x: Node, value: Tensor, length: Any, of: Extents) -> Tensor:
        have = self.view.rows(x)
        if have is None:
            return value
        return value.reshape(resolved(rows_apart(sizes(x.meta["val"].shape), have, length), of))

    def _call(self, node: Node, env: dict[Node, Any], length: Any, of: Extents) -> Any:
        if node.target is operator.getitem:
            return env[node.args[0]][node.args[1]]
        found = lookup(node)
        assert found is not None
        call, rule = found
        assert rule is not None
        operands = [env[x] for x in call.operands]
        if rule.reshapes:
            return operands[0].reshape(self.shape(node, length, of))
        sized = {rule.sizes: self.shape(node, length, of)} if rule.sizes else {}
        args, kwargs = call.rebuild(operands, **sized)
        with autocast_at(self.view.source[node]):
            return node.target(*args, **kwargs)


def tile_program(view: TokenView, region: Region, tiles: int) -> TileProgram:
    """The region's program for so many tiles; registered."""
    total = row_count(view, region)
    length: Any = tile_length(total, tiles)
    places = symbol_places(view, region)
    assert places is not None
    of: Extents = {}
    mode, lengths = FakeTensorMode(), {n: n for n in (length, total % length or length)}
    if has_symbols(view, region):
        mode, (length, *others) = symbolic_mode(max(2, length), *(max(2, view.hints.get(x, 2)) for x in places))
        of = dict(zip(places, others, strict=True))
        if is_of_any_length(view, region):
            lengths = {ANY_LENGTH: length}
    operands = (*region.rows, *region.whole)
    wanted = tuple(i for i, x in enumerate(operands) if _wants_gradient(x))
    with _tracing(mode):
        each = {n: TileOf(view, region, places, rows, of) for n, rows in lengths.items()}
        differentiable, wanted = _differentiable(next(iter(each.values())), wanted)
        only = [region.results[i] for i in differentiable]
        at_once = len(only) == 1 and view.is_sum(only[0]) and same(product(sizes(only[0].meta["val"].shape)), 1)
        sums = [view.rows(operands[i]) is None for i in wanted]
        made = {n: _body(tile, wanted, differentiable, at_once, sums) for n, tile in each.items()}
        alike = [len(set(ways)) == 1 for ways in zip(*(ways for _, ways in made.values()), strict=True)]
        if not all(alike):
            sums = [a and b for a, b in zip(sums, alike, strict=True)]
            made = {n: _body(tile, wanted, differentiable, at_once, sums) for n, tile in each.items()}
    bodies = {n: body for n, (body, _) in made.items()}
    ways = next(iter(made.values()))[1]
    names = {symbol: sympy.Symbol(f"n{i}", integer=True, positive=True) for i, symbol in enumerate(places)}
    results = tuple(_value(view, x, x.meta["val"].dtype, names) for x in region.results)
    kept = [_value(view, operands[i], operands[i].meta["val"].dtype, names) for i in wanted]
    if at_once:  # of a sum over many tokens: more than a small exponent holds
        kept = [replace(x, dtype=torch.float32) if x.dtype == torch.float16 else x for x in kept]
    gradients = tuple(replace(x, adds=way) for x, way in zip(kept, ways, strict=True))
    dims = tuple(row_dim(have) for x in region.rows if (have := view.rows(x)))
    known = (dims, results, differentiable, wanted, gradients, at_once, tuple(zip(names.values(), places.values())))
    name = _digest(bodies, known)
    return PROGRAMS.setdefault(name, TileProgram(name, bodies, *known))


def draws_again(program: TileProgram) -> bool:
    """Do gradients that are computed from nothing draw as often as the forward does, and so the same numbers?"""
    pairs = [(body.forward.graph, body.gradients.graph) for body in program.bodies.values() if body.gradients]
    counts = [[sum(map(_draws, gm.graph.nodes)) for gm in pair] for pair in pairs]
    return program.at_once or all(first == second for first, second in counts)


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _wants_gradient(x: Node) -> bool:
    value = x.meta["val"]
    return record(x).requires_grad is not False and (value.is_floating_point() or value.is_complex())


def _value(view: TokenView, x: Node, dtype: torch.dtype, names: Mapping[Any, Any]) -> TileValue:
    have, shape = view.rows(x), sizes(x.meta["val"].shape)
    apart = shape if have is None else rows_apart(shape, have, ROWS)
    named = tuple(extent if isinstance(extent, int) else extent.subs(names) for extent in apart)
    if have is not None:
        return TileValue(named, dtype, row_dim(have))
    order = order_of_strides(sizes(x.meta["val"].stride()))
    return TileValue(named, dtype, None, order=() if is_identity(order) else tuple(order))


@contextmanager
def _tracing(mode: FakeTensorMode) -> Iterator[None]:
    """On fake tensors, under the caller's autocast."""
    with mode, enable_python_dispatcher(), uncached_autocast():
        yield


def _leaves(given: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    return [x.detach().requires_grad_(i in wanted) for i, x in enumerate(given)]


def _differentiable(tile: TileOf, wanted: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The results that a gradient goes through, and of the operands that want one those that it comes to.

    A weight that is read under no_grad alone has none, on one device, and an optimizer leaves it as it is; given zeros,
    it would decay.
    """
    with torch.enable_grad():
        leaves = _leaves(tile.inputs(), wanted)
        made = tile.results(*leaves)
    found = tuple(i for i, x in enumerate(made) if x.requires_grad)
    if not found:
        return (), ()
    through = [made[i] for i in found]
    given = _gradients(through, [leaves[i] for i in wanted], [torch.ones_like(x) for x in through], allow_unused=True)
    return found, tuple(i for i, x in zip(wanted, given, strict=True) if x is not None)


def _gradients(
    through: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor], allow_unused: bool = False
) -> tuple[Any, ...]:
    """Of a part in full precision they are made in that, as by a backward that is called outside of autocast."""
    with without_autocast(through[0].device.type):
        return torch.autograd.grad(through, leaves, cotangents, allow_unused=allow_unused)


def _body(
    tile: TileOf, wanted: Sequence[int], differentiable: Sequence[int], at_once: bool, sums: Sequence[bool]
) -> tuple[TileBody, list[str]]:
    """The parts for one length, and how each gradient is added up. sums: may it be given as parts?"""
    inputs = tile.inputs()
    many = len(inputs)

    def forward(*given: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return tile.results(*given)

    def gradients(*given: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            leaves = _leaves(given[:many], wanted)
            made = tile.results(*leaves)
            through = [made[i] for i in differentiable]
            cotangents = [torch.ones_like(x) for x in through] if at_once else list(given[many:])
        found = _gradients(through, [leaves[i] for i in wanted], cotangents)
        return [*([x.detach() for x in made] if at_once else ()), *found]

    plain = TilePart(_graph(forward, inputs), inputs)
    if not wanted:
        return TileBody(plain), []
    through = [tile.view.rows(tile.region.results[i]) for i in differentiable]
    results = [plain.graph.graph.output_node().args[0][i].meta["val"] for i in differentiable]
    given = [*inputs, *([] if at_once else [torch.empty_like(x) for x in results])]
    assert len(through) == len(results)
    graph = _graph(gradients, given)
    ways = give_parts(graph, sums)
    return TileBody(plain, TilePart(graph, given)), ways


def _graph(run: Callable[..., Any], given: Sequence[Tensor]) -> GraphModule:
    gm = traced(run, given)
    read_off_inputs(gm.graph)
    gm.recompile()
    return gm


def _digest(bodies: dict[int, TileBody], known: Any) -> str:
    """Of what the parts compute; the name of a program."""
    text = hashlib.sha256(repr(known).encode())
    for length, body in bodies.items():
        for part in body.parts:
            shapes = [(x.shape, strides, x.dtype, x.device) for x, strides in zip(part.inputs, part.strides)]
            text.update(repr((length, part.graph.code, shapes)).encode())
            for name, value in sorted(part.graph.named_buffers()):
                text.update(repr((name, value.dtype, value.tolist())).encode())
    return text.hexdigest()[:16]
