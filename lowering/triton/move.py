"""Copies between arrays of any strides, of this device or of its peers. Importing this needs triton.

Elements are moved as words, whatever their dtype is; the tiles are `lowering.strided`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..strided import LOOPS, NONE, WIDEST, Tiling, tiling
from .scan_sweep import on_device

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _move(  # type: ignore[no-untyped-def]
    source, target, peers, first, count, per_peer,
    loop_0, loop_1, loop_2, loop_3, read_0, read_1, read_2, read_3, written_0, written_1, written_2, written_3,
    run, rows, columns, read_row, read_column, written_row, written_column,
    PEERS: tl.constexpr, WORD: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One tile. Addresses are integers; with PEERS ``source`` is added to that of each of ``count`` peers in turn."""
    at = tl.program_id(0).to(tl.int64)
    run_tiles, column_tiles, row_tiles = (
        tl.cdiv(run * VECTOR, RUN),
        tl.cdiv(columns, COLUMNS),
        tl.cdiv(rows, ROWS),
    )
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
    if PEERS:
        peer = (tl.program_id(1) + first) % count
        table = peers.to(tl.int64).to(tl.pointer_type(tl.int64))
        source = tl.load(table + peer) + source
        written += peer.to(tl.int64) * per_peer
    # The last dims of a tile are neighbours in memory: columns where it is read, rows where it is written.
    row, column = row_0 + tl.arange(0, ROWS)[:, None, None], column_0 + tl.arange(0, COLUMNS)[None, :, None]
    given, inside = _words(source, read, word_0, row, column, run, rows, columns, read_row, read_column,
                           WORD, VECTOR, ALIGNED, RUN, WHOLE)  # fmt: skip
    values = tl.permute(tl.load(given, mask=inside), (1, 0, 2))
    row, column = row_0 + tl.arange(0, ROWS)[None, :, None], column_0 + tl.arange(0, COLUMNS)[:, None, None]
    made, inside = _words(target, written, word_0, row, column, run, rows, columns, written_row, written_column,
                          WORD, VECTOR, ALIGNED, RUN, WHOLE)  # fmt: skip
    tl.store(made, values, mask=inside)


@triton.jit
def _words(  # type: ignore[no-untyped-def]
    base, start, word_0, row, column, run, rows, columns, of_row, of_column,
    WORD: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, RUN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Where one side of a tile is in memory, and which of it is inside."""
    word = (word_0 + tl.arange(0, RUN))[None, None, :]
    inside = (row < rows) & (column < columns)
    if not WHOLE:
        inside = inside & (word < run * VECTOR)
    memory = tl.multiple_of(base.to(tl.int64).to(tl.pointer_type(WORD)), ALIGNED)
    return memory + (start + row * of_row + column * of_column) * VECTOR + word, inside


def copy(target: Tensor, source: Tensor) -> bool:
    """target.copy_(source) of equal shape and dtype. False, and nothing done, where the kernel has no tiles for it."""
    source = source.resolve_conj().resolve_neg()
    if target.is_conj() or target.is_neg():
        return False
    if target.is_complex():
        return copy(torch.view_as_real(target), torch.view_as_real(source))
    aligned = _alignment(target.data_ptr(), source.data_ptr())
    plan = tiling(source.shape, source.stride(), target.stride(), source.element_size(), aligned)
    if plan is not None and source.numel():
        _launch(plan, target, source.data_ptr(), None, 0, 0)
    return plan is not None


def from_peers(
    target: Tensor, peers: Tensor, offset: int, strides: Sequence[int], dim: int, first: int
) -> bool:
    """Block r of ``dim`` of the target is what peer r holds, `offset` elements into its memory, at these strides.

    peers: int64 (n,) on the target's device, addresses that WIDEST divides. first: the peer to begin with. False as
    for `copy`.
    """
    if target.is_complex():
        strides = [*(2 * s for s in strides), 1]
        dim = dim % target.ndim
        return from_peers(torch.view_as_real(target), peers, 2 * offset, strides, dim, first)
    count, size = len(peers), target.element_size()
    block = target.narrow(dim, 0, target.shape[dim] // count)
    between = block.shape[dim] * target.stride(dim)
    aligned = _alignment(target.data_ptr(), offset * size, between * size)
    plan = tiling(block.shape, tuple(strides), block.stride(), size, aligned)
    if plan is not None and target.numel():
        _launch(plan, target, offset * size, peers, first, between * size // plan.unit)
    return plan is not None


def _launch(
    plan: Tiling, target: Tensor, source: int, peers: Tensor | None, first: int, per_peer: int
) -> None:
    loops = [*(NONE for _ in range(LOOPS - len(plan.loops))), *plan.loops]
    count = 1 if peers is None else len(peers)
    rows, columns, run = plan.tile
    with on_device(target):
        _move[(plan.programs, count)](
            source, target.data_ptr(), 0 if peers is None else peers.data_ptr(), first, count, per_peer,
            *(loop.size for loop in loops), *(loop.read for loop in loops), *(loop.written for loop in loops),
            plan.run, plan.rows.size, plan.columns.size, plan.rows.read, plan.columns.read,
            plan.rows.written, plan.columns.written,
            PEERS=peers is not None, WORD=WORDS[plan.word], VECTOR=plan.vector, ALIGNED=plan.unit,
            ROWS=rows, COLUMNS=columns, RUN=run, WHOLE=plan.run * plan.vector % run == 0,
        )  # fmt: skip


def _alignment(*distances: int) -> int:
    """The largest power of two, up to what a thread moves at once, that divides all of them."""
    out = WIDEST
    while any(d % out for d in distances):
        out //= 2
    return out
