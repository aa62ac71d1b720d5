"""Copy between arrays of any strides with a tiled Triton kernel. The import requires triton.

Elements are moved as words, integers of 1 to 8 bytes, independent of their dtype. A unit is one or two words that a
thread moves at once. Tiles read and write full cache lines. After merging of adjacent dims, a tile is rows x columns x
run, which one program of the kernel moves, and the other dims are looped over:

    run         the dim that is contiguous in source and target
    rows        the dim that is adjacent to the run in the target
    columns     the dim that is adjacent to it in the source, or any dim if run and rows are few bytes

    (n, g, h, D) <- (g, n, h, D)    run h * D, rows g: the pack of a head exchange
    (n, g, h, D) <- (n, h, g, D)    run D, rows h, columns g: the pack of heads stored before positions
    (n, g, 8)    <- (g, n, 8)       run 8, rows g, columns n: narrow, and still read and written in lines
    (g, A)       <- (A, g)          run 1, rows A, columns g: a transpose
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import use_device

MAX_UNIT = 16  # maximum bytes that a thread moves at once
CACHE_LINE = 128  # bytes of a run that needs no columns
MOVE_TILE = 16384  # bytes of a tile
MIN_TILE_BYTES = 4096  # minimum bytes of a tile, if the array has that many
MAX_LOOPS = 4  # dims over which a kernel can loop


class Stride(NamedTuple):
    """Size of a dim and its strides in the source, which is read, and in the target, which is written."""

    size: int  # number of positions
    read: int  # stride in the source
    written: int  # stride in the target

    @property
    def is_contiguous(self) -> bool:
        """Return True if both strides are 1, so that the dim is the run."""
        return self.read == self.written == 1


NO_STRIDE = Stride(1, 0, 0)  # a dim of size 1


@dataclass(frozen=True)
class TileShape:
    """Tiling of a copy, with all lengths and strides in units of `unit` bytes."""

    unit: int  # bytes that divide all strides and addresses; a power of two up to 16
    run: int  # length of the contiguous run
    rows: Stride  # dim adjacent to the run in the target
    columns: Stride  # dim adjacent to the run in the source
    loops: tuple[Stride, ...]  # all other dims, looped over
    tile: tuple[int, int, int]  # powers of two: rows, columns and elements of the run that one program moves

    @property
    def word(self) -> int:
        """Return the bytes of a word."""
        return min(self.unit, 8)

    @property
    def vector(self) -> int:
        """Return the number of words per unit."""
        return self.unit // self.word

    @property
    def programs(self) -> int:
        """Return the number of tiles, one for each program of the launch."""
        sizes = self.rows.size, self.columns.size, self.run * self.vector
        return math.prod(map(triton.cdiv, sizes, self.tile)) * math.prod(loop.size for loop in self.loops)


@lru_cache(maxsize=4096)
def choose_tiling(
    shape: tuple[int, ...], read: tuple[int, ...], written: tuple[int, ...], itemsize: int, aligned: int = MAX_UNIT
) -> TileShape | None:
    """Return the tiling of a copy, or None if more than `MAX_LOOPS` dims remain to loop over.

    A program copies a tile of rows x columns x run, and loops over the other dims. The run is the dim that is
    contiguous in both arrays, of length 1 if there is none. Without a tiling the caller uses torch's copy.

    Args:
        shape: Shape of both arrays.
        read: Strides of the source.
        written: Strides of the target.
        itemsize: Bytes of an element: 1, 2, 4 or 8.
        aligned: Bytes that divide both addresses.
    """
    dims = _merge_strides([Stride(*dim) for dim in zip(shape, read, written) if dim[0] != 1])
    run = next((dim.size for dim in dims if dim.is_contiguous), 1)
    others = [dim for dim in dims if not dim.is_contiguous]
    # Convert lengths and strides from elements to units: the largest number of bytes that divides all of them.
    lengths = [run, *(dim.read for dim in others), *(dim.written for dim in others)]
    unit = math.gcd(MAX_UNIT, aligned, *(length * itemsize for length in lengths))
    run = run * itemsize // unit
    others = [Stride(dim.size, dim.read * itemsize // unit, dim.written * itemsize // unit) for dim in others]
    # The dim with the smallest stride in the target is adjacent to the run there: writes of a tile fill cache lines.
    rows = min(others, key=lambda dim: dim.written, default=NO_STRIDE)
    others = [dim for dim in others if dim is not rows]
    columns = NO_STRIDE
    # Short runs need columns that are adjacent in the source, so that reads fill lines. A dim with stride 0 there, as
    # that of an expanded source, does not help.
    if run * unit < CACHE_LINE:
        columns = min((dim for dim in others if dim.read), key=lambda dim: dim.read, default=NO_STRIDE)
        if rows.read and rows.read < columns.read:  # the rows are adjacent in the source, too
            columns = NO_STRIDE
    if columns is NO_STRIDE and run * rows.size * unit < MIN_TILE_BYTES:  # enlarge a small tile
        columns = max(others, key=lambda dim: dim.size, default=NO_STRIDE)
    loops = tuple(dim for dim in others if dim is not columns)
    if len(loops) > MAX_LOOPS:
        return None
    return TileShape(unit, run, rows, columns, loops, _tile_shape(run, rows.size, columns.size, unit))


def _merge_strides(dims: list[Stride]) -> list[Stride]:
    """Return the dims from the target's outermost to its innermost, with dims merged that are adjacent in both arrays.

    Two dims are merged if the outer stride is the inner size times the inner stride, in source and target.
    """
    merged: list[Stride] = []
    for dim in sorted(dims, key=lambda dim: (-dim.written, -dim.read)):
        outer = merged[-1] if merged else None
        if outer is not None and (outer.read, outer.written) == (dim.size * dim.read, dim.size * dim.written):
            merged[-1] = Stride(outer.size * dim.size, dim.read, dim.written)
        else:
            merged.append(dim)
    return merged


def _tile_shape(run: int, rows: int, columns: int, unit: int) -> tuple[int, int, int]:
    """Return the rows, columns and words of the run of a tile: powers of two, of at most MOVE_TILE bytes together.

    ``run`` is in units of ``unit`` bytes; ``rows`` and ``columns`` are the sizes of these dims in the array.
    """
    word = min(unit, 8)
    words_of_run = run * (unit // word)
    run, rows, columns = (triton.next_power_of_2(max(n, 1)) for n in (words_of_run, rows, columns))
    run = min(run, MOVE_TILE // word)
    max_runs = MOVE_TILE // word // run  # rows times columns of a tile
    # The tile has all rows if they fit, and columns in the rest. But it has at least about sqrt(max_runs) columns if
    # the array does: a tile of many rows and one column would read short runs of the source.
    root = 1 << (max_runs.bit_length() // 2)
    columns = min(columns, max(max_runs // rows, root))
    return min(rows, max_runs // columns), columns, run


WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # integer types by size in bytes


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    source, target,
    loop_0, loop_1, loop_2, loop_3, read_0, read_1, read_2, read_3, written_0, written_1, written_2, written_3,
    run, rows, columns, read_row, read_column, written_row, written_column,
    WORD: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, FULL_RUNS: tl.constexpr,
):  # fmt: skip
    """Move one tile of ROWS x COLUMNS x RUN words.

    ``source`` and ``target`` are addresses, as integers. Lengths and strides are in units of VECTOR words. ``loop_i``
    is the size of a dim that is looped over, with the strides ``read_i`` in the source and ``written_i`` in the target.
    WORD is the number of bytes of a word, and VECTOR the number of words that are always adjacent. ALIGNED is the
    number of bytes that divides all addresses; FULL_RUNS is True if RUN divides the run. ``loop_0``, the size of the
    outermost loop, is not needed.

    The index of the program is a mixed-radix number. Its digits, from the last one on: the tile in the run, in the
    columns and in the rows, and the position in each loop.
    """
    index = tl.program_id(0).to(tl.int64)
    run_tiles, column_tiles, row_tiles = (tl.cdiv(run * VECTOR, RUN), tl.cdiv(columns, COLUMNS), tl.cdiv(rows, ROWS))
    word_0 = index % run_tiles * RUN
    index = index // run_tiles
    column_0 = index % column_tiles * COLUMNS
    index = index // column_tiles
    row_0 = index % row_tiles * ROWS
    index = index // row_tiles
    read, written = index % loop_3 * read_3, index % loop_3 * written_3
    index = index // loop_3
    read, written = read + index % loop_2 * read_2, written + index % loop_2 * written_2
    index = index // loop_2
    read, written = read + index % loop_1 * read_1, written + index % loop_1 * written_1
    index = index // loop_1
    read, written = read + index * read_0, written + index * written_0
    # A tile is loaded as (rows, columns, run) and stored as (columns, rows, run): in both, the last dims are adjacent
    # in memory.
    row, column = row_0 + tl.arange(0, ROWS)[:, None, None], column_0 + tl.arange(0, COLUMNS)[None, :, None]
    addresses, mask = _tile_addresses(source, read, word_0, row, column, run, rows, columns, read_row, read_column,
                                      WORD, VECTOR, ALIGNED, RUN, FULL_RUNS)  # fmt: skip
    values = tl.permute(tl.load(addresses, mask=mask), (1, 0, 2))
    row, column = row_0 + tl.arange(0, ROWS)[None, :, None], column_0 + tl.arange(0, COLUMNS)[:, None, None]
    addresses, mask = _tile_addresses(target, written, word_0, row, column, run, rows, columns, written_row,
                                      written_column, WORD, VECTOR, ALIGNED, RUN, FULL_RUNS)  # fmt: skip
    tl.store(addresses, values, mask=mask)


@triton.jit
def _tile_addresses(  # type: ignore[no-untyped-def]
    base, start, word_0, row, column, run, rows, columns, row_stride, column_stride,
    WORD: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, RUN: tl.constexpr, FULL_RUNS: tl.constexpr,
):  # fmt: skip
    """Return the addresses of the words of a tile in one array, and the mask of those inside the array.

    ``base`` is the address of the array. ``start`` is the offset of the program's position in the loops, in units of
    VECTOR words, as are lengths and strides. ``row`` and ``column`` are the indices of the tile in the array, which has
    ``rows`` and ``columns`` of them; ``word_0`` is the tile's first word in the run. The results are three-dimensional,
    with the shape of ``row`` and ``column`` together and RUN.
    """
    word = (word_0 + tl.arange(0, RUN))[None, None, :]
    inside = (row < rows) & (column < columns)
    if not FULL_RUNS:
        inside = inside & (word < run * VECTOR)
    pointer = tl.multiple_of(base.to(tl.int64).to(tl.pointer_type(WORD)), ALIGNED)
    return pointer + (start + row * row_stride + column * column_stride) * VECTOR + word, inside


def copy_strided(target: Tensor, source: Tensor) -> bool:
    """Copy source to target, of equal shape and dtype; return False if the kernel does not support it."""
    source = source.resolve_conj().resolve_neg()
    if target.is_conj() or target.is_neg():  # its memory has other values than the tensor
        return False
    if target.is_complex():
        return copy_strided(torch.view_as_real(target), torch.view_as_real(source))
    aligned = math.gcd(MAX_UNIT, target.data_ptr(), source.data_ptr())
    tiling = choose_tiling(source.shape, source.stride(), target.stride(), source.element_size(), aligned)
    if tiling is not None and source.numel():
        _launch_move(tiling, target, source.data_ptr())
    return tiling is not None


def _launch_move(tiling: TileShape, target: Tensor, source: int) -> None:
    """Launch the kernel that copies from the address ``source`` to the memory of ``target``."""
    loops = [NO_STRIDE] * (MAX_LOOPS - len(tiling.loops)) + [*tiling.loops]  # always MAX_LOOPS dims
    rows, columns, run = tiling.tile  # of one tile; `tiling.rows`, `.columns` and `.run` are those of the arrays
    with use_device(target):
        _move_kernel[(tiling.programs,)](
            source, target.data_ptr(),
            *(loop.size for loop in loops), *(loop.read for loop in loops), *(loop.written for loop in loops),
            tiling.run, tiling.rows.size, tiling.columns.size, tiling.rows.read, tiling.columns.read,
            tiling.rows.written, tiling.columns.written,
            WORD=WORD_TYPES[tiling.word], VECTOR=tiling.vector, ALIGNED=tiling.unit,
            ROWS=rows, COLUMNS=columns, RUN=run, FULL_RUNS=tiling.run * tiling.vector % run == 0,
        )  # fmt: skip
