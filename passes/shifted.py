"""Recognises rows that moved one place along a dim, and what came in at the end: the ways in which people write it.

    pad(y, (1, -1))     pad(y, (1, 0))[:-1]     cat([zeros, y[:-1]])     pad(y[:-1], (1, 0))

Reads the graph only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..call import Call, is_tensor
from ..movement import Window
from ..rule import lookup
from ..shapes import Size, same, size, sizes
from .scalars import scalar

aten = torch.ops.aten
PADS = (aten.constant_pad_nd.default, aten.pad.default)
CUTS = (aten.slice.Tensor, aten.narrow.default)
CATS = (aten.cat.default, aten.concat.default, aten.concatenate.default)
FILLED = {
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.new_ones.default: 1.0,
}
FILLS = (aten.full.default, aten.full_like.default, aten.new_full.default)
MOVES = (
    aten.expand.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.to.dtype,
    aten.unsqueeze.default,
    aten.view.default,
)


@dataclass(frozen=True)
class Shifted:
    """Row i is row i - 1 of `source` (by 1) or row i + 1 (by -1); the row without one holds `fill`.

    chain: the nodes between source and value, which only each other use.
    """

    source: Node
    dim: int
    by: int
    fill: float
    chain: tuple[Node, ...]


def shifted(node: Node) -> Shifted | None:
    """The value as rows that moved by one; None if it is anything else."""
    if node.op != "call_function":
        return None
    if node.target in CATS:
        return _joined(node)
    if node.target in PADS:
        return _padded(node)
    cut = cut_of(node)
    if cut is None or cut[0].target not in PADS or len(cut[0].users) != 1:
        return None
    source, dim, start, _ = cut
    padding = _padding(source)
    if padding is None or padding[0] != dim or not same(Call(source).shape()[dim], _rows(node, dim)):
        return None
    _, before, after, fill = padding
    if (before, after, start) == (1, 0, 0) or (before, after, start) == (0, 1, 1):
        return Shifted(Call(source).operands[0], dim, before - after, fill, (source, node))
    return None


def _padded(node: Node) -> Shifted | None:
    padding = _padding(node)
    if padding is None:
        return None
    dim, before, after, fill = padding
    source = Call(node).operands[0]
    if (before, after) in ((1, -1), (-1, 1)):
        return Shifted(source, dim, before, fill, (node,))
    return _refilled(source, dim, before, after, fill, node)


def _refilled(source: Node, dim: int, before: int, after: int, fill: float, node: Node) -> Shifted | None:
    """One row was cut off at one end, and one comes in at the other."""
    cut = cut_of(source)
    if cut is None or cut[1] != dim or len(source.users) != 1:
        return None
    y, _, start, length = cut
    rows = _rows(y, dim)
    if not same(length + 1, rows):
        return None
    if (before, after) in ((1, 0), (0, 1)) and same(start, after):
        return Shifted(y, dim, before - after, fill, (source, node))
    return None


def _joined(node: Node) -> Shifted | None:
    """cat of one row of a constant and of all rows but one."""
    call = Call(node)
    if len(call.operands) != 2:
        return None
    dim = int(call["dim"]) % node.meta["val"].ndim
    for at, (row, rest) in enumerate((call.operands, reversed(call.operands))):
        fill = _uniform(row)
        if fill is not None and row.meta["val"].ndim == node.meta["val"].ndim and same(_rows(row, dim), 1):
            return _refilled(rest, dim, 1 - at, at, fill, node)
    return None


def _padding(node: Node) -> tuple[int, int, int, float] | None:
    """(dim, before, after, fill) of a pad of one dim by a constant."""
    call = Call(node)
    widths = [size(w) for w in call["pad"]]
    if call.get("mode", "constant") != "constant" or not all(isinstance(w, int) for w in widths):
        return None
    padded = [i // 2 for i in range(0, len(widths), 2) if widths[i] or widths[i + 1]]
    if len(padded) != 1:
        return None
    at, fill = padded[0], call["value"]
    dim = node.meta["val"].ndim - 1 - at
    return dim, int(widths[2 * at]), int(widths[2 * at + 1]), float(fill if fill is not None else 0.0)


def cut_of(node: Node) -> tuple[Node, int, Size, Size] | None:
    """(operand, dim, start, length) of a contiguous piece of it."""
    found = lookup(node) if node.target in CUTS else None
    rule = found[1] if found is not None else None
    if found is None or not isinstance(rule, Window) or rule.spans is None:
        return None
    return found[0].operands[0], rule.dim, *rule.spans[0]


def _rows(node: Node, dim: int) -> Size:
    return sizes(node.meta["val"].shape)[dim]


def _uniform(node: Any) -> float | None:
    """The number that every element holds, if the graph says so."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    if node.target in FILLED:
        return FILLED[node.target]
    if node.target in FILLS:
        fill = Call(node)["fill_value"]
        return float(fill) if isinstance(fill, (int, float)) else scalar(fill, node.meta["val"].dtype)
    if node.target in MOVES:
        return _uniform(node.args[0])
    return scalar(node, node.meta["val"].dtype)
