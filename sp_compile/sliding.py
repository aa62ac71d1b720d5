"""Ops whose results read a window of rows along a dim: what they read, and where the result lies on shards.

    row j of the result reads rows j * stride - before + [0, width) of the operand, and constants beyond its ends

A convolution, a pooling, an unfold; with width 1, a shift. A roll reads one row, too, but counts round the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from .layout import Frame, Shard
from .shapes import Size, divides, mostly, quotient, same, typical


@dataclass(frozen=True)
class Sliding:
    """The rows that a result of `length` rows reads.

    rolls: by how many rows, for a roll; `before` and `width` are then 0 and 1.
    """

    length: Size
    before: Size = 0
    width: Size = 1
    stride: int = 1
    rolls: Size | None = None

    def after(self, rows: Size) -> Size:
        """How many constants follow an operand of so many rows; negative if the last rows are not read."""
        return plain((self.length - 1) * self.stride + self.width - self.before - rows)

    def fits(self, rows: Size) -> bool:
        """Is the result no longer than a sequence of so many rows, one for every `stride` of which it has?"""
        return _at_most(self.length * self.stride, rows)


def plain(a: Size) -> Size:
    """The size with its terms collected: an int where the symbols cancel."""
    if isinstance(a, int):
        return a
    a = sympy.expand(a)
    return int(a) if a.is_Integer else a


def place(sliding: Sliding, shard: Shard, n: int) -> Shard | str:
    """Where the result lies if the operand lies as in `shard`, or why it has to be whole instead."""
    frame = shard.frame
    if frame.folds != 1:
        return "its neighbours are elsewhere in the zigzag layout"
    if not (same(shard.outer, 1) and same(shard.inner, 1)):
        return "the sequence shares a dim with others"
    if sliding.rolls is not None:
        return _rolled(sliding, shard, n)
    size = frame.size if sliding.stride == 1 else quotient(frame.size, sliding.stride)
    if size is None or (sliding.stride > 1 and not divides(n, size)):
        return f"{n} ranks times its stride of {sliding.stride} do not provably divide the sequence of {frame.size}"
    found = _result_frame(sliding, frame, size)
    if found is None:
        return f"a result of {sliding.length} rows does not fit into a sequence of {size}"
    if same(found.length, 1) or not mostly(found.length, found.size):
        return f"a result of {sliding.length} rows would leave most ranks idle"
    low = plain(frame.start - sliding.before - sliding.stride * found.start)
    if not isinstance(low, int) or not isinstance(sliding.width, int):
        return "how far it reaches is not known"
    reach = max(-low, 0) + max(low + sliding.width - sliding.stride, 0)
    if sliding.width > 1 and 2 * reach > typical(frame.size):
        return f"it reaches over {reach} rows, more than half of the sequence of {frame.size}"
    return replace(shard, frame=found)


def _rolled(sliding: Sliding, shard: Shard, n: int) -> Shard | str:
    sizes = (sliding.rolls, shard.frame.size, shard.frame.start, shard.frame.length)
    if isinstance(sliding.rolls, int) and (shard.frame.exact(n) or all(isinstance(s, int) for s in sizes)):
        return shard
    return f"{n} ranks do not provably divide the sequence of {shard.frame.size} that it goes round"


def _result_frame(sliding: Sliding, frame: Frame, size: Size) -> Frame | None:
    """The result's window of `size` positions: next to the operand's, else at the front, else at the end."""
    last = plain(size - sliding.length)
    beside = quotient(frame.start, sliding.stride)
    for start in (beside, 0, last):
        if start is not None and _at_most(start, last) and _at_most(0, start):
            return Frame(size, start, sliding.length)
    return None


def _at_most(a: Size, b: Size) -> bool:
    """Is a <= b whatever the symbols, which are positive, are?"""
    difference = sympy.expand(sympy.sympify(b) - sympy.sympify(a))
    return bool(difference.is_nonnegative)
