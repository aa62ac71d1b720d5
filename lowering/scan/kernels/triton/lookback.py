"""A scan in one pass whatever the shape: every program scans one tile and looks back for what comes before it.

Decoupled look-back (Merrill and Garland, 2016, "Single-pass parallel prefix scan with decoupled look-back"). A
program publishes the total of its tile, then adds up what its predecessors have published until it finds one that
knows the total of all places up to its own tile, and publishes that too. Here it reads a window of predecessors at
a time. Tiles are handed out by a counter, so that a program waits only for programs that already run.
Which sums are added up depends on their timing: the last bits of floats may differ from run to run.

A state of one 32-bit tensor is published as one 64-bit word, with what it is in the upper half. Others are written
to memory of their own first: barrier, release and acquire order them. Importing this needs triton.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from sp_compile.lowering.triton.device import on_device

from .operators import combine_where, scan_segments, scan_states
from .tiles import (
    State,
    Sweep,
    Tile,
    last,
    lines_of,
    load_state,
    load_tile,
    neutral,
    store_tile,
    value_of,
    with_last,
)

WINDOW_STATES = 2048
"""At most so many are read at a time."""


@triton.jit
def _publish(  # type: ignore[no-untyped-def]
    words, values, seconds, slots, at, exists, state, p, q, PACKED: tl.constexpr, PAIR: tl.constexpr
):
    """state: 1, the total of a tile; 2, of all places up to its end. Each has memory of its own: some may read it."""
    if PACKED:
        bits = p.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.atomic_xchg(words + at, (state.to(tl.int64) << 32) | bits, mask=exists, sem="relaxed")
    else:
        slot = (state - 1).to(tl.int64) * slots + at
        tl.store(values + slot, p, mask=exists)
        if PAIR:
            tl.store(seconds + slot, q, mask=exists)
        tl.debug_barrier()
        tl.atomic_xchg(words + at, state.to(tl.int64), mask=exists, sem="release")


@triton.jit
def _read(words, at, here, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What is published now; 0 is nothing yet."""
    if PACKED:
        word = tl.load(words + at, mask=here, other=1 << 32, volatile=True)
    else:
        word = tl.where(here, tl.atomic_add(words + at, 0, mask=here, sem="acquire"), 1)
    return word


@triton.jit
def _await(  # type: ignore[no-untyped-def]
    words, values, seconds, slots, at, here, p, q, PACKED: tl.constexpr, PAIR: tl.constexpr
):
    """Wait until all that is here has been published. -> state, 1 elsewhere, and p and q, as given elsewhere."""
    word = _read(words, at, here, PACKED)
    while tl.min(tl.min(word, 1), 0) == 0:
        word = _read(words, at, here, PACKED)
    if PACKED:
        state = (word >> 32).to(tl.int32)
        p = tl.where(here, (word & 0xFFFFFFFF).to(tl.int32).to(p.dtype, bitcast=True), p)
    else:
        state = word.to(tl.int32)
        tl.debug_barrier()
        slot = (state - 1).to(tl.int64) * slots + at
        p = tl.where(here, tl.load(values + slot, mask=here, other=0, volatile=True), p)
        if PAIR:
            q = tl.where(here, tl.load(seconds + slot, mask=here, other=0, volatile=True), q)
    return state, p, q


@triton.jit
def _look_back(  # type: ignore[no-untyped-def]
    words, values, seconds, slots, k, line, lines, exists, p, q, OP: tl.constexpr, PAIR: tl.constexpr,
    PACKED: tl.constexpr, WINDOW: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """The state before tile k; p and q are neutral, (1, LINES)."""
    row = tl.arange(0, WINDOW)[:, None]
    none_p = tl.broadcast_to(p, (WINDOW, LINES))
    none_q = tl.broadcast_to(q, (WINDOW, LINES))
    done = tl.zeros((1, LINES), tl.int32)
    newest = k - 1
    while newest >= 0:
        tile = newest - (WINDOW - 1) + row
        here = exists & (tile >= 0)
        at = tile.to(tl.int64) * lines + line
        state, own, own_q = _await(words, values, seconds, slots, at, here, none_p, none_q, PACKED, PAIR)
        latest = tl.max(tl.where(state == 2, row, -1), 0, keep_dims=True)
        needed = row >= latest
        own, own_q = scan_states(tl.where(needed, own, none_p), tl.where(needed, own_q, none_q), OP)
        before, before_q = last(own, row, WINDOW), last(own_q, row, WINDOW)
        both, both_q = combine_where(done == 0, before, before_q, p, q, OP, PAIR)
        p = both
        if PAIR:  # a tensor that goes round a loop for nothing can crash Triton's compiler
            q = both_q
        done = done | (latest >= 0).to(tl.int32)
        finished = tl.min(tl.min(tl.where(exists, done, 1), 1), 0)
        newest = tl.where(finished != 0, -1, newest - WINDOW)
    return p, q


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    x, second, starts, initial, out, out_index, total, total_second, words, values, seconds, counter,
    lines, length, inner, slots, per_outer, per_time, per_inner,
    OP: tl.constexpr, LEAF: tl.constexpr, PAIR: tl.constexpr, NEUTRAL: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, GIVEN: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr,
    SHARED: tl.constexpr, SEGMENTED: tl.constexpr, SHIFT: tl.constexpr, REVERSE: tl.constexpr,
    CARRY: tl.constexpr, TOTAL: tl.constexpr, PACKED: tl.constexpr, WINDOW: tl.constexpr,
    STEPS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """One tile. The first program to ask gets the first one."""
    ticket = tl.atomic_add(counter, 1)
    tiles = tl.cdiv(lines, LINES)
    k = (ticket // tiles).to(tl.int32)
    inner = inner // UNIT * UNIT
    line, exists, base = lines_of(ticket % tiles, lines, length, inner, FLAT, EVEN, LINES)
    row = tl.arange(0, STEPS)[:, None]
    where, inside, flag, p, q = load_tile(
        x, second, starts, line, exists, base, k.to(tl.int64) * STEPS + row, 0, length, inner,
        per_outer, per_time, per_inner,
        LEAF, NEUTRAL, ACC, INDEX, GIVEN, SHARED, SEGMENTED, SHIFT, REVERSE, STEPS, LINES,
    )  # fmt: skip
    none, none_q = neutral(LEAF, NEUTRAL, ACC, INDEX, LINES)
    if CARRY:
        before, before_q = load_state(initial, initial, line, exists & (k == 0), none, none_q, LEAF)
        p, q = combine_where((row == 0) & (flag == 0) & (k == 0), before, before_q, p, q, OP, PAIR)
    if SEGMENTED:
        flag, p, q = scan_segments(flag, p, q, OP)
    else:
        p, q = scan_states(p, q, OP)

    # A tile that holds a start, or has nothing before it, needs no predecessor.
    sums, sums_q = last(p, row, STEPS), last(q, row, STEPS)
    alone = exists & (k == 0)
    if SEGMENTED:
        alone = alone | (last(flag, row, STEPS) != 0)
    at = k.to(tl.int64) * lines + line
    state = tl.where(alone, 2, 1)
    _publish(words, values, seconds, slots, at, exists, state, sums, sums_q, PACKED, PAIR)
    before, before_q = _look_back(
        words, values, seconds, slots, k, line, lines, exists, none, none_q, OP, PAIR, PACKED, WINDOW, LINES
    )
    sums, sums_q = combine_where(alone == 0, before, before_q, sums, sums_q, OP, PAIR)
    state = tl.full((1, LINES), 2, tl.int32)
    _publish(words, values, seconds, slots, at, exists, state, sums, sums_q, PACKED, PAIR)

    p, q = combine_where((flag == 0) & (k > 0), before, before_q, p, q, OP, PAIR)
    store_tile(out, out_index, where, inside, p, q, LEAF)
    if TOTAL:
        if SHIFT:
            sums, sums_q = with_last(
                sums, sums_q, x, second, exists, base, length, length, inner,
                OP, LEAF, NEUTRAL, ACC, INDEX, GIVEN, REVERSE,
            )  # fmt: skip
        final = exists & (k == tl.cdiv(length, STEPS) - 1)
        tl.store(total + line, value_of(sums, sums_q, LEAF), mask=final)
        if LEAF == "linear":
            tl.store(total_second + line, sums_q, mask=final)


def in_one_pass(
    sweep: Sweep, tile: Tile, window: int, initial: State | None, out: State, total: bool
) -> State | None:
    """Each line by as many programs as it has tiles: reads x once, writes results once. -> total, if asked for.

    window: predecessors that are read at a time, a power of 2.
    """
    places = triton.cdiv(sweep.length, tile.steps)
    slots = places * sweep.lines
    packed = sweep.leaf == "value" and sweep.compute.itemsize == 4
    words = sweep.x.new_zeros(slots + 1, dtype=torch.int64)
    memory = replace(sweep, starts=None)
    published = State(words, words) if packed else memory.states(2 * places, whole=True)
    totals = memory.states(1) if total else None
    sums = totals or State(sweep.x)
    pointers = [
        None if initial is None else initial.value, out.value, out.second, sums.value, sums.second,
        words, published.value, published.second, words[slots:],
    ]  # fmt: skip
    with on_device(sweep.x):
        _scan[(places * triton.cdiv(sweep.lines, tile.lines),)](
            *sweep.tensors(), *sweep.pointers(*pointers), *sweep.sizes(), slots, *sweep.strides(),
            **sweep.options(tile), CARRY=initial is not None, TOTAL=total, PACKED=packed,
            WINDOW=max(1, min(window, WINDOW_STATES // tile.lines)),
        )  # fmt: skip
    return totals
