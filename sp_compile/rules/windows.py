"""Ops that cut, mirror, pad or shift along dims: a contiguous piece is a window, for all else the dim is whole.

Shifts by known numbers are followed further in sliding.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..rule import Call, Dims, Factors, Window, rule_of
from ..shapes import Size, same, size
from ._build import names, replaced, wrap

aten = torch.ops.aten


def _whole_at(call: Call, at: Sequence[int], result: Dims | None = None) -> Factors:
    """Data moves within the dims at `at`; the result has the operand's dims unless given."""
    dims = names(call.ndim())
    results = tuple(dims if result is None else result for _ in call.results())
    return Factors((dims,), results, {dims[d]: "whole" for d in at if dims}, lazy=True)


@rule_of(aten.flip.default)
def _flip(call: Call) -> Factors:
    return _whole_at(call, [wrap(d, call.ndim()) for d in call["dims"]])


def roll(call: Call) -> Factors:
    """Without dims it runs through the flattened tensor, and then all of them are whole."""
    return _whole_at(call, [wrap(d, call.ndim()) for d in call["dims"] or range(call.ndim())])


def pad(call: Call) -> Window | Factors:
    """Pairs (before, after) from the last dim on; a pair of zeros leaves its dim as it is, negative ones cut it."""
    widths = [size(w) for w in call["pad"]]
    ndim = call.ndim()
    pairs = {ndim - 1 - i // 2: widths[i : i + 2] for i in range(0, len(widths), 2)}
    at = [d for d, pair in pairs.items() if not all(same(w, 0) for w in pair)]
    if len(at) == 1 and all(isinstance(w, int) and w <= 0 for w in pairs[at[0]]):
        return Window(at[0], ((-pairs[at[0]][0], call.result_shapes()[0][at[0]]),))
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


@rule_of(aten.select.int)
def _select(call: Call) -> Factors:
    dims, at = names(call.ndim()), call.dim()
    return _whole_at(call, [at], dims[:at] + dims[at + 1 :])


@rule_of(aten.unbind.int)
def _unbind(call: Call) -> Factors:
    return _select(call)


@rule_of(aten.slice.Tensor)
def _slice(call: Call) -> Window | Factors:
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
        return _whole_at(call, [dim], replaced(names(call.ndim()), [dim], "sliced"))
    return Window(dim, ((start, length),))


def _start_of(start: Any, end: Any, extent: Size, length: Size) -> Size | None:
    """Where a slice that is shorter than its dim begins; None where clamping can not be ruled out."""
    start = 0 if start is None else size(start)
    if isinstance(start, int) and isinstance(extent, int):
        return min(max(start + extent if start < 0 else start, 0), extent)
    start = extent + start if isinstance(start, int) and start < 0 else start
    end = extent if end is None else size(end)
    end = extent + end if isinstance(end, int) and end < 0 else end
    # A length of exactly end - start, or one that reaches the end, means that the start was not clamped.
    unclamped = same(start, 0) or same(length, end - start) or same(length, extent - start)
    return start if unclamped else None


@rule_of(aten.narrow.default)
def _narrow(call: Call) -> Window | Factors:
    dim, start, length = call.dim(), size(call["start"]), size(call["length"])
    extent = call.shape()[dim]
    if isinstance(start, int) and start < 0:
        start = extent + start
    return Window(dim, ((start, length),))


@rule_of(
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.tensor_split.indices,
    aten.tensor_split.sections,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def _split(call: Call) -> Window | Factors:
    """Pieces lie one after the other (tensor_split by indices may overlap or leave gaps: then its dim is whole)."""
    dim = call.dim()
    lengths = [shape[dim] for shape in call.result_shapes()]
    if "indices" in call.args and not same(sum(lengths), call.shape()[dim]):
        return _whole_at(call, [dim], replaced(names(call.ndim()), [dim], "piece"))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return Window(dim, tuple(zip(starts, lengths, strict=True)))
