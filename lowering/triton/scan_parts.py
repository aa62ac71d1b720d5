"""What the scan kernels share. Importing this needs triton.

A tensor (outer, length, inner) has outer * inner lines; line l is column l % inner of row l // inner. A program
holds a tile of STEPS places in scan order (dim 0) by LINES lines (dim 1). Lines are neighbours in memory where
inner > 1, places where inner == 1, so that either way a tile is read in whole runs.

Scans run forward over places; place i is time length - 1 - i if REVERSE. An exclusive scan, and a lagged
recurrence, is the inclusive one of what comes a place earlier: SHIFT.
"""

import triton
import triton.language as tl


@triton.jit
def lines_of(tile, lines, length, inner, FLAT: tl.constexpr, LINES: tl.constexpr):  # type: ignore[no-untyped-def]
    """-> the numbers of a tile's lines, whether they exist, and where they begin; FLAT: outer == 1."""
    line = tile.to(tl.int64) * LINES + tl.arange(0, LINES)[None, :]
    if FLAT:
        begin = line
    else:
        begin = line // inner * length * inner + line % inner
    return line, line < lines, begin


@triton.jit
def time_of(place, length, REVERSE: tl.constexpr):  # type: ignore[no-untyped-def]
    if REVERSE:
        time = length - 1 - place
    else:
        time = place
    return time


@triton.jit
def starts_of(  # type: ignore[no-untyped-def]
    starts, time, line, exists, inside, inner, per_outer, per_time, per_inner,
    SHARED: tl.constexpr, STEPS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """1 where a segment begins. exists: places that do; inside: elements. SHARED: all lines have the same starts."""
    if SHARED:
        flag = tl.load(starts + time, mask=exists, other=0)
    else:
        at = line // inner * per_outer + time * per_time + line % inner * per_inner
        flag = tl.load(starts + at, mask=inside, other=0)
    return tl.broadcast_to((flag != 0).to(tl.int32), (STEPS, LINES))


@triton.jit
def leaf(  # type: ignore[no-untyped-def]
    x, second, at, now, taken, kept, inside, time, LEAF: tl.constexpr, NEUTRAL: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """The states of single elements, neutral where not kept; the second tensor is a copy of the first if not needed.

    x is read at ``at`` where taken: values, or factors of a recurrence, whose ``second`` holds what is added, read at
    ``now`` where inside. Of an indexed state the index is ``time``, or if GIVEN what ``second`` holds.
    """
    p = tl.where(kept, tl.load(x + at, mask=taken, other=0).to(ACC), NEUTRAL)
    q = p
    if LEAF == "linear":
        p = tl.load(second + now, mask=inside, other=0).to(ACC)
    if LEAF == "exponentials":
        q = tl.where(kept, 1.0, 0.0).to(ACC)
    if LEAF == "indexed":
        if GIVEN:
            q = tl.load(second + at, mask=taken, other=0)
        else:
            q = tl.broadcast_to(time, p.shape).to(INDEX)
    return p, q


@triton.jit
def neutral(  # type: ignore[no-untyped-def]
    LEAF: tl.constexpr, NEUTRAL: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, LINES: tl.constexpr
):
    """The state that changes nothing, for every line."""
    p = tl.full((1, LINES), NEUTRAL, ACC)
    q = p
    if LEAF == "linear":
        p = tl.full((1, LINES), 0, ACC)
    if LEAF == "exponentials":
        q = tl.full((1, LINES), 0, ACC)
    if LEAF == "indexed":
        q = tl.full((1, LINES), 0, INDEX)
    return p, q


@triton.jit
def load_state(  # type: ignore[no-untyped-def]
    values, indices, at, here, p, q, LEAF: tl.constexpr
):
    """The state of every line that `value_of` wrote, over the neutral p and q. A linear state is its h."""
    p = tl.where(here, tl.load(values + at, mask=here, other=0), p)
    if LEAF == "exponentials":
        q = q + 1
    if LEAF == "indexed":
        q = tl.load(indices + at, mask=here, other=0)
    return p, q


@triton.jit
def value_of(p, q, LEAF: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a state stands for. The logarithm is taken in float64: that of float32 is an approximation here."""
    if LEAF == "exponentials":
        p = p + tl.log(q.to(tl.float64)).to(p.dtype)
    return p


@triton.jit
def last(x, row, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(STEPS, LINES) -> (1, LINES), the last place. All else counts as 0, so infinities stay what they are."""
    return tl.sum(tl.where(row == STEPS - 1, x, 0), 0, keep_dims=True)
