"""A scan whose programs each walk down a part of the length, carrying their state in registers.

One part: every element is read once and written once. More parts: first the totals of the parts, then their scan,
then the parts again, each from its carry: three passes over memory instead of two. Importing this needs triton.
"""

from dataclasses import replace

import triton
import triton.language as tl

from .scan_operators import combine, scan_segments, scan_states
from .scan_parts import last, leaf, lines_of, load_state, neutral, starts_of, time_of, value_of
from .scan_sweep import State, Sweep, Tile, on_device


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    x, second, starts, carry, carry_index, out, out_index, total, total_second, total_flag,
    lines, length, inner, part, per_outer, per_time, per_inner,
    OP: tl.constexpr, LEAF: tl.constexpr, PAIR: tl.constexpr, NEUTRAL: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, GIVEN: tl.constexpr, FLAT: tl.constexpr, SHARED: tl.constexpr,
    SEGMENTED: tl.constexpr, SHIFT: tl.constexpr, REVERSE: tl.constexpr, CARRY: tl.constexpr,
    STORE: tl.constexpr, TOTAL: tl.constexpr, STEPS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Places [k * part, (k + 1) * part) of LINES lines. carry and totals are (parts, lines), in scan order."""
    k = tl.program_id(1).to(tl.int64)
    line, exists, base = lines_of(tl.program_id(0), lines, length, inner, FLAT, LINES)
    row = tl.arange(0, STEPS)[:, None]
    begin = k * part
    end = tl.minimum(begin + part, length)
    p, q = neutral(LEAF, NEUTRAL, ACC, INDEX, LINES)
    if CARRY:
        p, q = load_state(carry, carry_index, k * lines + line, exists, p, q, LEAF)
    any_start = tl.zeros((1, LINES), tl.int32)
    at = begin
    # Parts are multiples of STEPS: only the end of the last one is in the middle of a tile.
    while at < end:
        # Known of a counter of `for`, which the interpreter cannot run over tensors: lets loads be wide.
        place = tl.multiple_of(at, STEPS) + row
        inside = exists & (place < length)
        time = time_of(place, length, REVERSE)
        source = time_of(place - SHIFT, length, REVERSE)
        taken = inside
        if SHIFT:
            taken = inside & (place > begin)
        kept = taken
        carried = row == 0
        flag = tl.zeros((STEPS, LINES), tl.int32)
        if SEGMENTED:
            flag = starts_of(
                starts, time, line, place < length, inside, inner, per_outer, per_time, per_inner, SHARED, STEPS, LINES
            )
            carried = carried & (flag == 0)
            if SHIFT:
                kept = taken & (flag == 0)
        own, own_q = leaf(
            x, second, base + source * inner, base + time * inner, taken, kept, inside, time,
            LEAF, NEUTRAL, ACC, INDEX, GIVEN,
        )  # fmt: skip
        # Into the first element, not into the results: there a product of all the factors may overflow.
        both, both_q = combine(p, q, own, own_q, OP)
        own = tl.where(carried, both, own)
        if PAIR:
            own_q = tl.where(carried, both_q, own_q)
        if SEGMENTED:
            flag, own, own_q = scan_segments(flag, own, own_q, OP)
        else:
            own, own_q = scan_states(own, own_q, OP)
        if STORE:
            found = value_of(own, own_q, LEAF).to(out.dtype.element_ty)
            tl.store(out + base + time * inner, found, mask=inside)
            if LEAF == "indexed":
                found_q = own_q.to(out_index.dtype.element_ty)
                tl.store(out_index + base + time * inner, found_q, mask=inside)
        p = last(own, row, STEPS)
        if PAIR:
            q = last(own_q, row, STEPS)
        if SEGMENTED:
            any_start = any_start | last(flag, row, STEPS)
        at += STEPS
    if TOTAL:
        if SHIFT:
            # The element that the shift left over. What a recurrence adds is not behind: it has nothing to add here.
            left = base + time_of(end - 1, length, REVERSE) * inner
            own, own_q = leaf(
                x, second, left, left, exists, exists, line < 0, left, LEAF, NEUTRAL, ACC, INDEX, GIVEN
            )
            p, q = combine(p, q, own, own_q, OP)
        tl.store(total + k * lines + line, value_of(p, q, LEAF), mask=exists)
        if LEAF == "linear" or LEAF == "indexed":
            tl.store(total_second + k * lines + line, q, mask=exists)
        if SEGMENTED:
            tl.store(total_flag + k * lines + line, any_start.to(tl.int8), mask=exists)


def walk(
    sweep: Sweep, tile: Tile, part: int, carry: State | None, out: State | None, total: bool
) -> State | None:
    """Scan parts of so many places, a multiple of the tile's. Returns their totals (parts, lines) if asked for.

    carry: what goes into every part, (parts, lines). out: where results go, like x; None if only totals are wanted.
    """
    parts = triton.cdiv(sweep.length, part)
    totals = sweep.states(parts) if total else None
    unused = State(sweep.x, sweep.x, sweep.x)
    into, to, sums = carry or unused, out or unused, totals or unused
    with on_device(sweep.x):
        _walk[(triton.cdiv(sweep.lines, tile.lines), parts)](
            *sweep.tensors(),
            *sweep.pointers(into.value, into.second, to.value, to.second, sums.value, sums.second, sums.flag),
            *sweep.sizes(), part, *sweep.strides(), **sweep.options(tile),
            CARRY=carry is not None, STORE=out is not None, TOTAL=total,
        )  # fmt: skip
    return totals


def in_one(sweep: Sweep, tile: Tile, initial: State | None, out: State | None, total: bool) -> State | None:
    """Each line by one program: reads x once, writes results once. Without out, only the total is wanted."""
    whole = triton.cdiv(sweep.length, tile.steps) * tile.steps
    return walk(sweep if out else sweep.totals(), tile, whole, initial, out, total)


def in_parts(sweep: Sweep, tile: Tile, part: int, initial: State | None, out: State | None) -> State | None:
    """Each line by several programs: reads x twice, writes results once. Without out: reads x once. -> total."""
    sums = walk(sweep.totals(), tile, part, None, None, True)
    assert sums is not None
    over = sweep.over(sums)
    small = over.tile(tile.steps * tile.lines, tile.warps)
    if out is None:
        return in_one(over, small, initial, None, True)
    carry = _carry(sweep, over.length, initial)
    in_one(over, small, initial, carry.rows(1), False)
    walk(sweep, tile, part, carry, out, False)
    return carry.rows(over.length)


def _carry(sweep: Sweep, parts: int, initial: State | None) -> State:
    """Memory for what goes into every part and what comes out of the last: the first row is what there is before."""
    carry = replace(sweep, starts=None).states(parts + 1)
    carry.value[0] = sweep.start if initial is None else initial.value[0]
    if carry.second is not None:
        carry.second[0] = 0
    return carry
