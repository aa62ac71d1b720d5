"""How a copy between two arrays of any strides is cut into tiles that read and write whole cache lines.

Of the dims that are left once all that can be merged are: the *run* is contiguous on both sides; `rows` lie next to
it where it is written, `columns` where it is read; a tile is rows x columns x run, the other dims are looped over.

    (n, g, h, D) <- (g, n, h, D)    run h * D, rows g: the pack of a head exchange
    (n, g, 8)    <- (g, n, 8)       run 8, rows g, columns n: narrow, and still read and written in lines
    (g, A)       <- (A, g)          run 1, rows A, columns g: a transpose
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

WIDEST = 16  # bytes that a thread moves at once
LINE = 128  # bytes of a run that needs no neighbours
TILE = 16384  # bytes
LOOPS = 4


class Dim(NamedTuple):
    """Positions, and the distance between them where they are read and where they are written."""

    size: int
    read: int
    written: int


NONE = Dim(1, 0, 0)


@dataclass(frozen=True)
class Tiling:
    """unit: bytes in which distances are counted; run: its length in units; word: bytes of an element, `vector` a unit.

    tile: the powers of two (rows, columns, words of the run) that one program moves.
    """

    unit: int
    run: int
    rows: Dim
    columns: Dim
    loops: tuple[Dim, ...]
    tile: tuple[int, int, int]

    @property
    def word(self) -> int:
        return min(self.unit, 8)

    @property
    def vector(self) -> int:
        return self.unit // self.word

    @property
    def programs(self) -> int:
        """Tiles in all."""
        out = _cdiv(self.run * self.vector, self.tile[2])
        out *= _cdiv(self.rows.size, self.tile[0]) * _cdiv(self.columns.size, self.tile[1])
        for loop in self.loops:
            out *= loop.size
        return out


@lru_cache(maxsize=4096)
def tiling(
    shape: tuple[int, ...],
    read: tuple[int, ...],
    written: tuple[int, ...],
    itemsize: int,
    aligned: int = WIDEST,
) -> Tiling | None:
    """Tiles of a copy of `shape`, of elements of `itemsize` (1, 2, 4 or 8) bytes, between arrays of these strides.

    aligned: bytes that divide both addresses, and every other distance that is added to them. None where too many
    dims are left to loop over.
    """
    dims = _merged([Dim(*dim) for dim in zip(shape, read, written) if dim[0] != 1])
    run = next((dim.size for dim in dims if dim.read == dim.written == 1), 1)
    others = [dim for dim in dims if not dim.read == dim.written == 1]
    unit = _unit(run, others, itemsize, aligned)
    run, others = run * itemsize // unit, [_in_units(dim, itemsize, unit) for dim in others]
    rows = min(others, key=lambda dim: dim.written, default=NONE)
    others = [dim for dim in others if dim is not rows]
    columns = NONE
    if run * unit < LINE:
        columns = min((dim for dim in others if dim.read), key=lambda dim: dim.read, default=NONE)
        columns = NONE if rows.read and rows.read < columns.read else columns
    loops = tuple(dim for dim in others if dim is not columns)
    if len(loops) > LOOPS:
        return None
    return Tiling(unit, run, rows, columns, loops, _tile(run, rows.size, columns.size, unit))


def _merged(dims: list[Dim]) -> list[Dim]:
    """From the outermost of what is written to the innermost; neighbours on both sides as one."""
    out: list[Dim] = []
    for dim in sorted(dims, key=lambda dim: (-dim.written, -dim.read)):
        last = out[-1] if out else None
        if last is not None and (last.read, last.written) == (dim.size * dim.read, dim.size * dim.written):
            out[-1] = Dim(last.size * dim.size, dim.read, dim.written)
        else:
            out.append(dim)
    return out


def _unit(run: int, others: Sequence[Dim], itemsize: int, aligned: int) -> int:
    distances = [run, *(d for dim in others for d in (dim.read, dim.written))]
    unit = min(WIDEST, aligned)
    while unit > itemsize and any(d * itemsize % unit for d in distances):
        unit //= 2
    return unit


def _in_units(dim: Dim, itemsize: int, unit: int) -> Dim:
    return Dim(dim.size, dim.read * itemsize // unit, dim.written * itemsize // unit)


def _tile(run: int, rows: int, columns: int, unit: int) -> tuple[int, int, int]:
    word = min(unit, 8)
    run = min(_power(run * (unit // word)), TILE // word)
    left = TILE // word // run
    wide = 1
    while wide * wide < left:
        wide *= 2
    columns = min(_power(columns), wide)
    rows = min(_power(rows), left // columns)
    return rows, columns, run


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
