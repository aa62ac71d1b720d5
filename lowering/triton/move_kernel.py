"""Copy between arrays of any strides with a tiled Triton kernel. The import requires triton.

Elements are moved as integers of 1 to 8 bytes, independent of their dtype. Tiles read and write full cache lines. After
merging of dims, a tile is rows x columns x run, and the other dims are looped over. The *run* is contiguous on both
sides. `rows` are adjacent to it in the target, and `columns` in the source, or along any dim if these are few bytes.

    (n, g, h, D) <- (g, n, h, D)    run h * D, rows g: the pack of a head exchange
    (n, g, h, D) <- (n, h, g, D)    run D, rows h, columns g: the pack of heads stored before positions
    (n, g, 8)    <- (g, n, 8)       run 8, rows g, columns n: narrow, and still read and written in lines
    (g, A)       <- (A, g)          run 1, rows A, columns g: a transpose
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import use_device

MAX_WORD_BYTES = 16  # bytes that a thread moves at once
CACHE_LINE = 128  # bytes of a run that needs no columns
MOVE_TILE = 16384  # bytes of a tile
MIN_PROGRAMS = 4096  # bytes of a tile, if the array has that many
MAX_LOOPS = 4  # dims over which a kernel can loop


class Stride(NamedTuple):
    """Size of a dim and its strides in the source and the target."""

    size: int  # number of positions
    read: int  # stride in the source
    written: int  # stride in the target


NO_STRIDE = Stride(1, 0, 0)


@dataclass(frozen=True)
class TileShape:
    """Tiling of a copy, with all lengths and strides in units of `unit` bytes."""

    unit: int  # bytes
    run: int  # length of the contiguous run
    rows: Stride  # dim adjacent to the run in the target
    columns: Stride  # dim adjacent to the run in the source
    loops: tuple[Stride, ...]  # all other dims, looped over
    tile: tuple[int, int, int]  # powers of two: rows, columns and elements of the run that one program moves

    @property
    def word(self) -> int:
        """Return the bytes of the integers that are moved."""
        return min(self.unit, 8)

    @property
    def vector(self) -> int:
        """Return the number of these integers per unit."""
        return self.unit // self.word

    @property
    def programs(self) -> int:
        """Return the number of tiles."""
        sizes = self.rows.size, self.columns.size, self.run * self.vector
        return math.prod(map(triton.cdiv, sizes, self.tile)) * math.prod(loop.size for loop in self.loops)


@lru_cache(maxsize=4096)
def choose_tiling(
    shape: tuple[int, ...],
    read: tuple[int, ...],
    written: tuple[int, ...],
    itemsize: int,
    aligned: int = MAX_WORD_BYTES,
) -> TileShape | None:
    """Return the tiling of a copy, or None if more than `MAX_LOOPS` dims remain to loop over.

    Args:
        shape: Shape of both arrays.
        read: Strides of the source.
        written: Strides of the target.
        itemsize: Bytes of an element: 1, 2, 4 or 8.
        aligned: Bytes that divide both addresses.
    """
    dims = _merge_strides([Stride(*dim) for dim in zip(shape, read, written) if dim[0] != 1])
    run = next((dim.size for dim in dims if dim.read == dim.written == 1), 1)
    others = [dim for dim in dims if not dim.read == dim.written == 1]
    distances = [run, *(d for dim in others for d in (dim.read, dim.written))]
    unit = math.gcd(MAX_WORD_BYTES, aligned, *(d * itemsize for d in distances))
    run, others = run * itemsize // unit, [Stride(size, *(d * itemsize // unit for d in far)) for size, *far in others]
    rows = min(others, key=lambda dim: dim.written, default=NO_STRIDE)
    others = [dim for dim in others if dim is not rows]
    columns = NO_STRIDE
    if run * unit < CACHE_LINE:
        columns = min((dim for dim in others if dim.read), key=lambda dim: dim.read, default=NO_STRIDE)
        columns = NO_STRIDE if rows.read and rows.read < columns.read else columns
    if columns is NO_STRIDE and run * rows.size * unit < MIN_PROGRAMS:
        columns = max(others, key=lambda dim: dim.size, default=NO_STRIDE)
    loops = tuple(dim for dim in others if dim is not columns)
    if len(loops) > MAX_LOOPS:
        return None
    return TileShape(unit, run, rows, columns, loops, _tile_shape(run, rows.size, columns.size, unit))


def _merge_strides(dims: list[Stride]) -> list[Stride]:
    """Sort dims from the outermost of the target to the innermost, and merge contiguous ones."""
    out: list[Stride] = []
    for dim in sorted(dims, key=lambda dim: (-dim.written, -dim.read)):
        last = out[-1] if out else None
        if last is not None and (last.read, last.written) == (dim.size * dim.read, dim.size * dim.written):
            out[-1] = Stride(last.size * dim.size, dim.read, dim.written)
        else:
            out.append(dim)
    return out


def _tile_shape(run: int, rows: int, columns: int, unit: int) -> tuple[int, int, int]:
    word = min(unit, 8)
    run, rows, columns = (triton.next_power_of_2(max(n, 1)) for n in (run * (unit // word), rows, columns))
    run = min(run, MOVE_TILE // word)
    left = MOVE_TILE // word // run
    # Columns use the elements that rows do not use, and at least the square root of all.
    columns = min(columns, max(left // rows, 1 << left.bit_length() // 2))
    return min(rows, left // columns), columns, run


WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # integer types by size in bytes


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    source, target,
    loop_0, loop_1, loop_2, loop_3, read_0, read_1, read_2, read_3, written_0, written_1, written_2, written_3,
    run, rows, columns, read_row, read_column, written_row, written_column,
    WORD: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Move one tile. Addresses are integers."""
    at = tl.program_id(0).to(tl.int64)
    run_tiles, column_tiles, row_tiles = (tl.cdiv(run * VECTOR, RUN), tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS))
    word_0 = at % run_tiles * RUN
    at = at // run_tiles
    column_0 = at % column_tiles * COLUMNS
    at = at // column_tiles
    row_0 = at % row_tiles * ROWS
    at = at // row_tiles
    read, written = at % loop_3 * read_3, at % loop_3 * written_3
    at = at // loop_3
    read, written = read + at % loop_2 * read_2, written + at % loop_2 * written_2
    at = at // loop_2
    read, written = read + at % loop_1 * read_1, written + at % loop_1 * written_1
    at = at // loop_1
    read, written = read + at * read_0, written + at * written_0
    # The last dims of a tile are adjacent in memory: columns in the source, rows in the target.
    row, column = row_0 + tl.arange(0, ROWS)[:, None, None], column_0 + tl.arange(0, COLUMNS)[None, :, None]
    given, inside = _word_offsets(source, read, word_0, row, column, run, rows, columns, read_row, read_column,
                           WORD, VECTOR, ALIGNED, RUN, WHOLE)  # fmt: skip
    values = tl.permute(tl.load(given, mask=inside), (1, 0, 2))
    row, column = row_0 + tl.arange(0, ROWS)[None, :, None], column_0 + tl.arange(0, COLUMNS)[:, None, None]
    made, inside = _word_offsets(target, written, word_0, row, column, run, rows, columns, written_row, written_column,
                          WORD, VECTOR, ALIGNED, RUN, WHOLE)  # fmt: skip
    tl.store(made, values, mask=inside)


@triton.jit
def _word_offsets(  # type: ignore[no-untyped-def]
    base, start, word_0, row, column, run, rows, columns, of_row, of_column,
    WORD: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the addresses of one side of a tile, and the mask of those inside the array."""
    word = (word_0 + tl.arange(0, RUN))[None, None, :]
    inside = (row < rows) & (column < columns)
    if not WHOLE:
        inside = inside & (word < run * VECTOR)
    memory = tl.multiple_of(base.to(tl.int64).to(tl.pointer_type(WORD)), ALIGNED)
    return memory + (start + row * of_row + column * of_column) * VECTOR + word, inside


def copy_strided(target: Tensor, source: Tensor) -> bool:
    """Copy source to target, of equal shape and dtype, and return False if the kernel does not support it."""
    source = source.resolve_conj().resolve_neg()
    if target.is_conj() or target.is_neg():
        return False
    if target.is_complex():
        return copy_strided(torch.view_as_real(target), torch.view_as_real(source))
    aligned = math.gcd(MAX_WORD_BYTES, target.data_ptr(), source.data_ptr())
    plan = choose_tiling(source.shape, source.stride(), target.stride(), source.element_size(), aligned)
    if plan is not None and source.numel():
        _launch_move(plan, target, source.data_ptr())
    return plan is not None


def _launch_move(plan: TileShape, target: Tensor, source: int) -> None:
    loops = [*(NO_STRIDE for _ in range(MAX_LOOPS - len(plan.loops))), *plan.loops]
    rows, columns, run = plan.tile
    with use_device(target):
        _move_kernel[(plan.programs,)](
            source, target.data_ptr(),
            *(loop.size for loop in loops), *(loop.read for loop in loops), *(loop.written for loop in loops),
            plan.run, plan.rows.size, plan.columns.size, plan.rows.read, plan.columns.read,
            plan.rows.written, plan.columns.written,
            WORD=WORD_TYPES[plan.word], VECTOR=plan.vector, ALIGNED=plan.unit,
            ROWS=rows, COLUMNS=columns, RUN=run, WHOLE=plan.run * plan.vector % run == 0,
        )  # fmt: skip
