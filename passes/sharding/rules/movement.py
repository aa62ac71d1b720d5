"""Ops that rearrange, add, drop or repeat dims, or cut, mirror, pad or shift along them. Almost all only move data.

A contiguous piece is a window; for all else the dim is whole. Shifts by known numbers are followed further in
`rules/windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sp_compile.passes.graph.call import Call, overloads
from sp_compile.passes.graph.sizes import Size, from_front, same, size
from sp_compile.passes.sharding.reshape import reshaping
from sp_compile.passes.sharding.rule import Dims, Factors, RuleFunction, rule, rule_of

from ._build import aligned, along, bind, dims_of, names, replaced, wrap

aten = torch.ops.aten

_whole_at = partial(along, lazy=True)  # data moves within these dims


def _moved(result: Any) -> RuleFunction:
    """The result's dims are the operand's in another order: result(dims, call)."""

    def instantiate(call: Call) -> Factors:
        dims = names(call.ndim())
        return Factors((dims,), (tuple(result(dims, call)),), lazy=True)

    return instantiate


rule(overloads("adjoint mH mT"), "... a b -> ... b a", lazy=True)
rule_of(aten.numpy_T.default, aten.t.default)(_moved(lambda dims, call: dims[::-1]))
rule_of(aten.permute.default)(_moved(lambda dims, call: [dims[wrap(d, len(dims))] for d in call["dims"]]))


@rule_of(*overloads("movedim.int movedim.intlist moveaxis.int moveaxis.intlist"))
@_moved
def _relocated(dims: Dims, call: Call) -> Dims:
    source, destination = (dims_of(call[name], len(dims)) for name in ("source", "destination"))
    to = {d: dims[s] for s, d in zip(source, destination, strict=True)}
    rest = iter(f for f in dims if f not in to.values())
    return tuple(to[d] if d in to else next(rest) for d in range(len(dims)))


@rule_of(*overloads("swapaxes swapdims transpose.int"))
@_moved
def _swapped(dims: Dims, call: Call) -> Dims:
    first, second = ("axis0", "axis1") if "axis0" in call.args else ("dim0", "dim1")
    a, b = call.dim(first), call.dim(second)
    order = {a: b, b: a}
    return tuple(dims[order.get(d, d)] for d in range(len(dims)))


rule(aten.diag_embed.default, "... i -> ... i j", whole="i", lazy=True)
rule(aten.view_as_complex.default, "... c -> ...", whole="c", lazy=True)
rule(aten.view_as_real.default, "... -> ... c", lazy=True)
rule_of(aten.atleast_1d.default)(lambda call: bind(call, "... -> ..." if call.ndim() else "-> one"))


@rule_of(*overloads("_reshape_alias _unsafe_view flatten.using_ints ravel reshape unflatten.int view"))
def _reshape(call: Call) -> Factors:
    return reshaping(call.shape(), call.result_shapes()[0])


@rule_of(aten.reshape_as.default, aten.view_as.default)
def _reshape_as(call: Call) -> Factors:
    rule_ = _reshape(call)
    return replace(rule_, operands=(*rule_.operands, *rule_.results), lenders=(1,))


@rule_of(aten.broadcast_tensors.default, aten.broadcast_to.default, aten.expand.default, aten.expand_as.default)
def _expand(call: Call) -> Factors:
    """A dim of size 1 that grows has no name in its operand: the size argument, or another operand, says how far."""
    result = call.result_shapes()[0]
    dims = names(len(result))
    operands = tuple(aligned(call.shape(i), result, dims) for i in range(len(call.operands)))
    sizes = "size" if "size" in call.args else None
    return Factors(operands, tuple(dims for _ in call.results()), sizes=sizes, lazy=True)


@rule_of(aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Factors:
    dims = names(call.ndim())
    at = wrap(call["dim"], len(dims) + 1)
    return Factors((dims,), ((*dims[:at], "", *dims[at:]),), lazy=True)


@rule_of(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(call: Call) -> Factors | None:
    """Drops dims of size 1. One that is asked for but longer is needed whole: a rank's part of it may be of size 1."""
    shape = call.shape()
    dims = names(len(shape))
    asked = range(len(shape)) if "dim" not in call.args else dims_of(call["dim"], len(shape))
    if call.get("dim") == []:
        asked = ()
    gone = {d for d in asked if shape and same(shape[d], 1)}
    if len(shape) - len(gone) != len(call.result_shapes()[0]):
        return None
    kinds = {dims[d]: "whole" for d in asked if d not in gone and shape}
    result = tuple(f for d, f in enumerate(dims) if d not in gone)
    return Factors((replaced(dims, gone, ""),), (result,), kinds, lazy=True)


@rule_of(aten.repeat.default, aten.tile.default)
def _repeat(call: Call) -> Factors:
    """A dim repeated once passes; the others are made from all of the operand's."""
    given = call["repeats"] if "repeats" in call.args else call["dims"]
    ndim = max(call.ndim(), len(given))
    repeats = [1] * (ndim - len(given)) + list(given)
    dims = names(ndim)
    operand = dims[ndim - call.ndim() :]
    many = [d for d, times in enumerate(repeats) if not same(size(times), 1) or d < ndim - call.ndim()]
    kinds = {dims[d]: "whole" for d in many if dims[d] in operand}
    return Factors((operand,), (replaced(dims, many, "new"),), kinds, lazy=True)


@rule_of(aten.repeat_interleave.self_int)
def _repeat_interleave(call: Call) -> Factors | None:
    """A head repeated in place: ranks that hold whole heads repeat their own, but the sizes differ, so it is whole."""
    if call["dim"] is None:
        return None
    return _whole_at(call, [call.dim()], replaced(names(call.ndim()), [call.dim()], "new"))


DIM_BY_LETTER = {"r": 0, "v": 0, "h": 1, "d": 2}
"""By their first letters, the dims of row_stack, vstack, hsplit, dsplit, ..."""


def _dim_of(call: Call, ndim: int) -> int:
    return wrap(call["dim"], ndim) if "dim" in call.args else min(DIM_BY_LETTER[str(call.node.target)[5]], ndim - 1)


@rule_of(*overloads("hstack vstack row_stack dstack"))
def _stacked(call: Call) -> Factors | None:
    ndim = len(call.result_shapes()[0])
    return _cat(call) if all(call.ndim(i) == ndim for i in range(len(call.operands))) else None


@rule_of(aten.cat.default, aten.concat.default, aten.concatenate.default)
def _cat(call: Call) -> Factors:
    """Along its dim every operand is needed whole, unless the others are empty, as a cache is at first.

    torch skips an operand of shape (0,) whatever the dims of the others.
    """
    ndim = len(call.result_shapes()[0])
    dims, at = names(ndim), _dim_of(call, ndim)
    shapes = [call.shape(i) for i in range(len(call.operands))]
    skipped = [len(shape) == 1 and same(shape[0], 0) and ndim > 1 for shape in shapes]
    parts = [i for i, shape in enumerate(shapes) if not skipped[i] and not same(shape[at], 0)]
    alone = len(parts) == 1
    rows = [(dims[at] if i in parts else "") if alone else f"part{i}" for i in range(len(shapes))]
    operands = tuple(
        ("",) if skip else (*dims[:at], row, *dims[at + 1 :]) for skip, row in zip(skipped, rows, strict=True)
    )
    if alone:
        return Factors(operands, (dims,), lazy=True)
    kinds = {row: "whole" for skip, row in zip(skipped, rows, strict=True) if not skip}
    return Factors(operands, ((*dims[:at], "all", *dims[at + 1 :]),), kinds, lazy=True)


@rule_of(aten.stack.default)
def _stack(call: Call) -> Factors:
    dims = names(call.ndim())
    at = wrap(call["dim"], len(dims) + 1)
    result = (*dims[:at], "stacked", *dims[at:])
    return Factors(tuple(dims for _ in call.operands), (result,), lazy=True)


@rule_of(aten.meshgrid.default, aten.meshgrid.indexing)
def _meshgrid(call: Call) -> Factors | None:
    """Of vectors: each gives the result one dim."""
    if any(call.ndim(i) != 1 for i in range(len(call.operands))):
        return None
    dims = names(len(call.operands))
    result = (*dims[1::-1], *dims[2:]) if call.get("indexing") == "xy" else dims
    return Factors(tuple((f,) for f in dims), tuple(result for _ in dims), lazy=True)


def _cut(call: Call, at: int, spans: Sequence[tuple[Size, Size]]) -> Factors:
    """Each result is a contiguous piece: (start, length) along the dim. Tensors may say where."""
    dims = names(call.ndim())
    where = [names(call.ndim(i), f"where{i}_") for i in range(1, len(call.operands))]
    kinds = {dims[at]: "window", **{f: "whole" for vector in where for f in vector}}
    return Factors((dims, *where), (dims,) * len(spans), kinds, lazy=True, spans=tuple(spans))


@rule_of(aten.flip.default)
def _flip(call: Call) -> Factors:
    return _whole_at(call, [wrap(d, call.ndim()) for d in call["dims"]])


def roll(call: Call) -> Factors:
    """Without dims it runs through the flattened tensor, and then all of them are whole."""
    return _whole_at(call, [wrap(d, call.ndim()) for d in call["dims"] or range(call.ndim())])


def pad(call: Call) -> Factors:
    """Pairs (before, after) from the last dim on; a pair of zeros leaves its dim as it is, negative ones cut it."""
    widths = [size(w) for w in call["pad"]]
    ndim = call.ndim()
    pairs = {ndim - 1 - i // 2: widths[i : i + 2] for i in range(0, len(widths), 2)}
    at = [d for d, pair in pairs.items() if not all(same(w, 0) for w in pair)]
    if len(at) == 1 and all(isinstance(w, int) and w <= 0 for w in pairs[at[0]]):
        return _cut(call, at[0], [(-pairs[at[0]][0], call.result_shapes()[0][at[0]])])
    return _whole_at(call, at, replaced(names(ndim), at, "padded"))


@rule_of(aten.diagonal.default)
def _diagonal(call: Call) -> Factors:
    dims = names(call.ndim())
    at = [wrap(call["dim1"], len(dims)), wrap(call["dim2"], len(dims))]
    return _whole_at(call, at, (*(f for d, f in enumerate(dims) if d not in at), "diagonal"))


@rule_of(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> Factors:
    """Rows and columns are compared by their positions."""
    return _whole_at(call, [call.ndim() - 2, call.ndim() - 1])


def unfold(call: Call) -> Factors:
    """The windows stand where the rows stood, and what each holds in a last dim."""
    at = wrap(call.get("dim", call.get("dimension")), call.ndim())
    dims = names(call.ndim())
    return _whole_at(call, [at] if dims else [], (*replaced(dims, [at], "windows"), "window"))


@rule_of(aten.select.int, aten.unbind.int)
def _select(call: Call) -> Factors:
    dims, at = names(call.ndim()), call.dim()
    return _whole_at(call, [at], dims[:at] + dims[at + 1 :])


@rule_of(aten.slice.Tensor)
def _slice(call: Call) -> Factors:
    """A contiguous slice is a window; one with a step needs its dim whole, as does one whose place is not provable."""
    dim = call.dim()
    extent, length = call.shape()[dim], call.result_shapes()[0][dim]
    if not same(size(call["step"]), 1):
        start = None
    elif same(extent, length):
        start = 0
    else:
        start = _start_of(call["start"], call["end"], extent, length)
    if start is None:
        dims = names(call.ndim())
        result = replaced(dims, [dim], "sliced")
        return replace(_whole_at(call, [dim], result), picks={result[dim]: dims[dim]})
    return _cut(call, dim, [(start, length)])


def _start_of(start: Any, end: Any, extent: Size, length: Size) -> Size | None:
    """Where a slice that is shorter than its dim begins; None where clamping can not be ruled out."""
    start = 0 if start is None else from_front(size(start), extent)
    if isinstance(start, int) and isinstance(extent, int):
        return min(max(start, 0), extent)
    end = extent if end is None else from_front(size(end), extent)
    # A length of exactly end - start, or one that reaches the end, means that the start was not clamped.
    unclamped = same(start, 0) or same(length, end - start) or same(length, extent - start)
    return start if unclamped else None


@rule_of(aten.narrow.default)
def _narrow(call: Call) -> Factors:
    dim = call.dim()
    return _cut(call, dim, [(from_front(size(call["start"]), call.shape()[dim]), size(call["length"]))])


SPLITS = overloads("""
    chunk split.Tensor split.sizes split_with_sizes tensor_split.indices tensor_split.sections unsafe_chunk
    unsafe_split.Tensor unsafe_split_with_sizes
    hsplit.int hsplit.array vsplit.int vsplit.array dsplit.int dsplit.array
""")


@rule_of(*SPLITS)
def _split(call: Call) -> Factors:
    """Pieces lie one after the other (tensor_split by indices may overlap or leave gaps: then its dim is whole)."""
    dim = _dim_of(call, call.ndim())
    lengths = [shape[dim] for shape in call.result_shapes()]
    if "indices" in call.args and not same(sum(lengths), call.shape()[dim]):
        return _whole_at(call, [dim], replaced(names(call.ndim()), [dim], "piece"))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return _cut(call, dim, list(zip(starts, lengths, strict=True)))
