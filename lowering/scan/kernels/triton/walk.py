"""Scan with programs that each walk over a part of the length, with their state in registers.

With one part, every element is read once and written once, by one launch. With several there are two launches: one
computes the totals of the parts, and one scans the parts again, each from its carry, which its program combines from
the totals of the parts before it. These are three passes over memory instead of two.

In `_walk_lines`, x, second and starts are the operands of a `Sweep`, (outer, length, inner); a line is one of the
outer * inner sequences along the length. The strides per_outer, per_time and per_inner are those of starts.
`Sweep.options` has the constants in capitals. Most arguments are only passed to `load_tile`, which reads a tile, and
`append_last_state`.
Importing this module needs triton.
"""

import triton
import triton.language as tl

from sp_compile.lowering.scan.scan_table import start_strides
from sp_compile.lowering.triton.device import use_device

from .triton_ops import combine_where, scan_segments, scan_states
from .triton_tiles import (
    State,
    Sweep,
    Tile,
    append_last_state,
    last_place,
    load_state,
    load_tile,
    neutral,
    store_products,
    store_tile,
    store_total,
    tile_lines,
)


@triton.jit
def _scan_tile(  # type: ignore[no-untyped-def]
    p, q, flag, states_p, states_q, row, OP: tl.constexpr, PAIR: tl.constexpr, SEGMENTED: tl.constexpr
):
    """Return the flags and states of a tile, scanned from the state (p, q) unless a segment begins at its first row."""
    states_p, states_q = combine_where((row == 0) & (flag == 0), p, q, states_p, states_q, OP, PAIR)
    if SEGMENTED:
        flag, states_p, states_q = scan_segments(flag, states_p, states_q, OP)
    else:
        states_p, states_q = scan_states(states_p, states_q, OP)
    return flag, states_p, states_q


@triton.jit
def _combine_totals(  # type: ignore[no-untyped-def]
    p, q, totals, totals_second, totals_flag, k, line, exists, lines,
    OP: tl.constexpr, LEAF: tl.constexpr, PAIR: tl.constexpr, NEUTRAL: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, SEGMENTED: tl.constexpr, STEPS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Return the state (p, q), combined with the totals of the parts before part k, in tiles of STEPS parts.

    The totals are (parts, lines), as `_walk_lines` stores them. They are read as a scan (1, parts, lines), forward.
    """
    row = tl.arange(0, STEPS)[:, None]
    first = k * 0  # the first part of a tile; an int64 tensor, as the loop requires
    while first < k:
        place = first + row
        if LEAF == "linear":  # x of a recurrence are its factors
            x, second = totals_second, totals
        else:
            x, second = totals, totals_second
        # Neither a segment shared by all lines, nor a shift, nor the reverse order.
        _address, _inside, flag, states_p, states_q = load_tile(
            x, second, totals_flag, line, exists, line, place, 0, k, lines, 0, lines, 1,
            LEAF, NEUTRAL, ACC, INDEX, LEAF == "indexed", False, SEGMENTED, False, False, STEPS, LINES,
        )  # fmt: skip
        _flag, states_p, states_q = _scan_tile(p, q, flag, states_p, states_q, row, OP, PAIR, SEGMENTED)
        places = tl.minimum(k - first, STEPS)
        p = last_place(states_p, row, places)
        if PAIR:
            q = last_place(states_q, row, places)
        first += STEPS
    return p, q


@triton.jit
def _first_state(  # type: ignore[no-untyped-def]
    initial, initial_index, totals, totals_second, totals_flag, k, line, exists, lines,
    OP: tl.constexpr, LEAF: tl.constexpr, PAIR: tl.constexpr, NEUTRAL: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, SEGMENTED: tl.constexpr, CARRY: tl.constexpr, TOTALS: tl.constexpr,
    STEPS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Return the state (p, q) from which part k starts; the arguments are those of `_walk_lines`."""
    p, q = neutral(LEAF, NEUTRAL, ACC, INDEX, LINES)
    if CARRY:
        p, q = load_state(initial, initial_index, line, exists, p, q, LEAF)
    if TOTALS:
        p, q = _combine_totals(
            p, q, totals, totals_second, totals_flag, k, line, exists, lines,
            OP, LEAF, PAIR, NEUTRAL, ACC, INDEX, SEGMENTED, STEPS, LINES,
        )  # fmt: skip
    return p, q


@triton.jit
def _walk_lines(  # type: ignore[no-untyped-def]
    x, second, starts, initial, initial_index, totals, totals_second, totals_flag,
    out, out_index, total, total_second, total_flag, states, before_states, products,
    lines, length, inner, part, per_outer, per_time, per_inner,
    OP: tl.constexpr, LEAF: tl.constexpr, PAIR: tl.constexpr, NEUTRAL: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, GIVEN: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr,
    SHARED: tl.constexpr, SEGMENTED: tl.constexpr, SHIFT: tl.constexpr, REVERSE: tl.constexpr,
    CARRY: tl.constexpr, TOTALS: tl.constexpr, STORE: tl.constexpr, TOTAL: tl.constexpr,
    PRODUCT: tl.constexpr, FIRST: tl.constexpr, STEPS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Scan one part of LINES lines, the places [k * part, (k + 1) * part) in scan order, in tiles of STEPS places.

    k is the program's number along the length. A state has one tensor p or, if PAIR, two, (p, q). With CARRY, lines
    start from the states ``initial`` (1, lines), else from the neutral state. With TOTALS, part k starts after the
    ``totals`` (parts, lines) of the parts before it, else as if it were the first. With STORE, results are written to
    ``out`` and ``out_index``, and with PRODUCT those of `ResultProducts` to ``products``. With TOTAL, the state after
    the part is written to ``total`` (and `total_second`, and `total_flag` for segments), (parts, lines), or with TOTALS
    that after the last part, (1, lines). The docstring of the module describes the other arguments.
    """
    k = tl.program_id(1).to(tl.int64)
    inner = inner // UNIT * UNIT  # the same number, but Triton can derive that UNIT divides it
    line, exists, base = tile_lines(tl.program_id(0), lines, length, inner, FLAT, EVEN, LINES)
    row = tl.arange(0, STEPS)[:, None]
    p, q = _first_state(
        initial, initial_index, totals, totals_second, totals_flag, k, line, exists, lines,
        OP, LEAF, PAIR, NEUTRAL, ACC, INDEX, SEGMENTED, CARRY, TOTALS, STEPS, LINES,
    )  # fmt: skip
    has_start = tl.zeros((1, LINES), tl.int32)  # 1 if a segment has begun in this part
    begin = k * part
    end = tl.minimum(begin + part, length)
    tile_begin = begin
    while tile_begin < end:
        # A part is a multiple of STEPS, so only the end of the length is within a tile. Triton infers this
        # for the counter of a `for`, but its interpreter cannot count from a tensor.
        place = tl.multiple_of(tile_begin, STEPS) + row
        address, inside, flag, states_p, states_q = load_tile(
            x, second, starts, line, exists, base, place, begin, length, inner, per_outer, per_time, per_inner,
            LEAF, NEUTRAL, ACC, INDEX, GIVEN, SHARED, SEGMENTED, SHIFT, REVERSE, STEPS, LINES,
        )  # fmt: skip
        flag, states_p, states_q = _scan_tile(p, q, flag, states_p, states_q, row, OP, PAIR, SEGMENTED)
        if SEGMENTED:
            has_start = has_start | last_place(flag, row, STEPS)
        if STORE:
            store_tile(out, out_index, address, inside, states_p, states_q, LEAF)
            store_products(
                states, before_states, products, address, inside, states_p, line, exists, base, place, length, inner,
                PRODUCT, FIRST, REVERSE,
            )  # fmt: skip
        p = last_place(states_p, row, STEPS)
        if PAIR:
            q = last_place(states_q, row, STEPS)
        tile_begin += STEPS
    if TOTAL:
        if SHIFT:
            p, q = append_last_state(
                p, q, x, second, exists, base, end, length, inner, OP, LEAF, NEUTRAL, ACC, INDEX, GIVEN, REVERSE
            )  # fmt: skip
        if TOTALS:  # only the last part stores its state, as that of the line
            k, exists = k * 0, exists & (end == length)
        store_total(total, total_second, total_flag, k * lines + line, exists, p, q, has_start, LEAF, SEGMENTED)


def _run_parts(
    sweep: Sweep, tile: Tile, part: int, initial: State | None, totals: State | None, out: State | None, total: bool
) -> State | None:
    """Scan all parts of all lines by one launch.

    Args:
        sweep: The scan.
        tile: The tile of a program.
        part: Places of a part, a multiple of the places of the tile.
        initial: (1, lines), the state before every line; None for the neutral state.
        totals: (parts, lines), the totals of all parts, from which each part continues; None to start each part as if
            it were the first one.
        out: Memory for the results, like x; None if only totals are needed.
        total: True to return totals.

    Returns:
        If requested, the total of every part, (parts, lines); with ``totals``, that of every line, (1, lines).
    """
    parts = triton.cdiv(sweep.length, part)
    result = sweep.states(1 if totals is not None else parts) if total else None
    product = None if out is None else sweep.product
    factors = (None, None, None) if product is None else (product.states, product.first, product.out)
    unused = State(sweep.x, sweep.x, sweep.x)  # a kernel needs a pointer for each argument, even one that it never uses
    before, known, results, sums = initial or unused, totals or unused, out or unused, result or unused
    with use_device(sweep.x):
        _walk_lines[(triton.cdiv(sweep.lines, tile.lines), parts)](
            *sweep.pointers(sweep.x, sweep.second, sweep.starts),
            *sweep.pointers(before.value, before.second, known.value, known.second, known.flag),
            *sweep.pointers(results.value, results.second, sums.value, sums.second, sums.flag, *factors),
            sweep.lines, sweep.length, sweep.x.shape[2], part, *start_strides(sweep.starts), **sweep.options(tile),
            CARRY=initial is not None, TOTALS=totals is not None, STORE=out is not None, TOTAL=total,
            PRODUCT=product is not None, FIRST=product is not None and product.first is not None,
        )  # fmt: skip
    return result


def scan_single_pass(sweep: Sweep, tile: Tile, initial: State | None, out: State | None, total: bool) -> State | None:
    """Scan each line with one program, which reads x once and writes results once.

    Without out, only the total is computed. Returns the total, (1, lines), or None if it is not requested.
    """
    padded_length = triton.cdiv(sweep.length, tile.steps) * tile.steps  # one part of whole tiles
    scanned = sweep.totals() if out is None else sweep
    return _run_parts(scanned, tile, padded_length, initial, None, out, total)


def scan_in_parts(
    sweep: Sweep, tile: Tile, part: int, initial: State | None, out: State | None, total: bool
) -> State | None:
    """Scan each line with several programs, by two launches.

    Reads x twice and writes results once. Without out, reads x once, and only the total is computed. Returns the total,
    (1, lines), or None if it is not requested.
    """
    part_totals = _run_parts(sweep.totals(), tile, part, None, None, out=None, total=True)
    assert part_totals is not None
    if out is not None:
        return _run_parts(sweep, tile, part, initial, part_totals, out, total)
    totals_sweep = sweep.sweep_over_parts(part_totals)
    totals_tile = totals_sweep.tile(tile.steps * tile.lines, tile.warps)  # with the number of elements of `tile`
    return scan_single_pass(totals_sweep, totals_tile, initial, out=None, total=total)
