"""Define the tiles, states and sweeps that the scan kernels share. Importing this module needs triton.

A tensor (outer, length, inner) has outer * inner lines; line l is column l % inner of row l // inner. A program
processes a tile of STEPS places in scan order (dim 0) by LINES lines (dim 1). Neighbors in memory are lines if
inner > 1, and places if inner == 1, so a tile is always read in contiguous runs.

Scans run forward over places; place i is time length - 1 - i if REVERSE. An exclusive scan, and a lagged recurrence,
is the inclusive scan of the elements one place earlier: SHIFT.

Names in the kernels:

    p, q                states, or their first and second tensors, see `triton_ops.py`
    x, second, starts   operands, see `Sweep`; starts is read with the strides per_outer, per_time and per_inner
    line, exists, base  number of each line, whether it exists, and the address of its first element, (1, LINES)
    place, time         numbers of a row in scan order and in memory, (STEPS, 1)
    OP, LEAF            the operation; the kind of the states of single elements, see `_leaf_states`
    NEUTRAL, ACC, INDEX the neutral value; the types of values and of indices
    FLAT, EVEN          outer == 1; LINES divides the number of lines
    GIVEN               indices are read from ``second``
    SHARED, SEGMENTED   all lines have the same starts; there are starts
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_ops import LEAF_KINDS, combine


@triton.jit
def tile_lines(  # type: ignore[no-untyped-def]
    tile, lines, length, inner, FLAT: tl.constexpr, EVEN: tl.constexpr, LINES: tl.constexpr
):
    """Return the numbers of the lines of a tile, True for those that exist, and their start addresses, (1, LINES) each.

    The last tile may extend past the number of lines.
    """
    line = tile.to(tl.int64) * LINES + tl.arange(0, LINES)[None, :]
    # Bounds and addresses that are known at compile time allow wide loads.
    if EVEN:
        exists = tl.full((1, LINES), 1, tl.int1)
    else:
        exists = line < lines
    if FLAT and LINES == 1:  # a single line: LINES is 1 only if inner is 1 (`Sweep.tile`), and outer is 1
        base = tl.zeros_like(line)
    elif FLAT:
        base = line
    else:
        base = line // inner * length * inner + line % inner
    return line, exists, base


@triton.jit
def _time_at(place, length, REVERSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row in memory of a place in scan order."""
    return length - 1 - place if REVERSE else place


@triton.jit
def _leaf_states(  # type: ignore[no-untyped-def]
    x, second, source, address, source_mask, state_mask, inside, time, LEAF: tl.constexpr, NEUTRAL: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Return the states (p, q) of single elements, in which x is neutral outside ``state_mask``.

    LEAF is the kind of operation. "value": p is the element, and q is p. "linear": p is the summand of a recurrence, q
    its factor. "exponentials": p is the element as the maximum, q is 1. "indexed": p is the element, q its index, which
    is its time (its row in memory), or the value of ``second`` if GIVEN.

    x, the values or the factors of a recurrence, is read at ``source``, where ``source_mask`` is True. Summands are
    read from ``second`` at ``address``, where ``inside`` is True.
    """
    p = tl.where(state_mask, tl.load(x + source, mask=source_mask, other=0).to(ACC), NEUTRAL)
    q = p
    if LEAF == "linear":
        p = tl.load(second + address, mask=inside, other=0).to(ACC)
    if LEAF == "exponentials":
        q = tl.where(state_mask, 1.0, 0.0).to(ACC)
    if LEAF == "indexed":
        if GIVEN:
            q = tl.load(second + source, mask=source_mask, other=0)
        else:
            q = tl.broadcast_to(time, p.shape).to(INDEX)
    return p, q


@triton.jit
def _start_flags(  # type: ignore[no-untyped-def]
    starts, time, line, in_line, inside, inner, per_outer, per_time, per_inner,
    SHARED: tl.constexpr, STEPS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Return 1 for elements at which a segment begins, else 0, int32 (STEPS, LINES).

    If SHARED, all lines have the same starts, which are read once per place; `in_line` masks the places before the end
    of a line, (STEPS, 1). Otherwise those of each element are read; `inside` masks elements, (STEPS, LINES).
    """
    if SHARED:
        flag = tl.load(starts + time, mask=in_line, other=0)
    else:
        address = line // inner * per_outer + time * per_time + line % inner * per_inner
        flag = tl.load(starts + address, mask=inside, other=0)
    return tl.broadcast_to((flag != 0).to(tl.int32), (STEPS, LINES))


@triton.jit
def load_tile(  # type: ignore[no-untyped-def]
    x, second, starts, line, exists, base, place, begin, length, inner, per_outer, per_time, per_inner,
    LEAF: tl.constexpr, NEUTRAL: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, GIVEN: tl.constexpr,
    SHARED: tl.constexpr, SEGMENTED: tl.constexpr, SHIFT: tl.constexpr, REVERSE: tl.constexpr,
    STEPS: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Return the addresses of a tile's elements, the mask of the valid ones, their flags and their states (p, q).

    A flag is 1 if a segment begins at the element. With SHIFT the state of a place is that of the element one place
    earlier (neutral for the first of a segment), as an exclusive scan needs it. Nothing before the place ``begin`` is
    read: the state there is neutral, and the program combines it with its carry.

    ``line``, ``exists`` and ``base`` are results of `tile_lines`; ``place`` has the numbers of the tile's rows in scan
    order, (STEPS, 1). A time is the number of a row in memory.
    """
    inside = exists & (place < length)
    time = _time_at(place, length, REVERSE)
    address = base + time * inner
    source, source_mask = address, inside  # where x is read; the summands `second` are read at `address`
    if SHIFT:
        source = base + _time_at(place - 1, length, REVERSE) * inner
        source_mask = inside & (place > begin)
    state_mask = source_mask
    flag = tl.zeros((STEPS, LINES), tl.int32)
    if SEGMENTED:
        flag = _start_flags(
            starts, time, line, place < length, inside, inner, per_outer, per_time, per_inner, SHARED, STEPS, LINES
        )  # fmt: skip
        if SHIFT:
            state_mask = source_mask & (flag == 0)
    p, q = _leaf_states(
        x, second, source, address, source_mask, state_mask, inside, time, LEAF, NEUTRAL, ACC, INDEX, GIVEN
    )  # fmt: skip
    return address, inside, flag, p, q


@triton.jit
def append_last_state(  # type: ignore[no-untyped-def]
    p, q, x, second, exists, base, end, length, inner, OP: tl.constexpr, LEAF: tl.constexpr,
    NEUTRAL: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, GIVEN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Return states (p, q) after the elements of a part, combined with its last element, at the place ``end`` - 1.

    A part is the places that one program scans. A scan with SHIFT combines at each place the element one place earlier,
    and so has not read the last one. In a lagged recurrence, s_i = a_i * (s_(i-1) + b_i), only the factors a are
    shifted: the summand b of the last element is in the state already, and only its factor is missing. The state
    (0, factor) adds it, for which no summand is read (``nowhere``). ``time`` is not read, as no scan of indexed states
    is shifted.
    """
    address = base + _time_at(end - 1, length, REVERSE) * inner
    nowhere = address < 0  # False for all lines
    last_p, last_q = _leaf_states(
        x, second, source=address, address=address, source_mask=exists, state_mask=exists, inside=nowhere,
        time=address, LEAF=LEAF, NEUTRAL=NEUTRAL, ACC=ACC, INDEX=INDEX, GIVEN=GIVEN,
    )  # fmt: skip
    return combine(p, q, last_p, last_q, OP)


@triton.jit
def neutral(  # type: ignore[no-untyped-def]
    LEAF: tl.constexpr, NEUTRAL: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr, LINES: tl.constexpr
):
    """Return the neutral state (p, q) of every line, (1, LINES) each."""
    p = tl.full((1, LINES), NEUTRAL, ACC)
    q = p
    if LEAF == "linear":  # h = 0 and a factor of 1, which is NEUTRAL
        p = tl.full((1, LINES), 0, ACC)
    if LEAF == "exponentials":  # the maximum -inf, and no terms of the sum
        q = tl.full((1, LINES), 0, ACC)
    if LEAF == "indexed":
        q = tl.full((1, LINES), 0, INDEX)
    return p, q


@triton.jit
def load_state(values, indices, address, mask, p, q, LEAF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load states (p, q) from the results of a scan; outside the mask, return the given neutral p.

    A result y of logsumexp is loaded as the state with the maximum y and the sum 1, as y = y + log(1). Of a recurrence
    only h is loaded: the product of the factors before is not needed. A neutral p (the maximum -inf) has no effect with
    any q.
    """
    p = tl.where(mask, tl.load(values + address, mask=mask, other=0), p)
    if LEAF == "exponentials":
        q = q + 1  # the neutral sum is 0
    if LEAF == "indexed":
        q = tl.load(indices + address, mask=mask, other=0)
    return p, q


@triton.jit
def value_of(p, q, LEAF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the result of a state: p, and for logsumexp the maximum p plus the logarithm of the sum q.

    The logarithm is computed in float64: that of float32 is an approximation in Triton.
    """
    if LEAF == "exponentials":
        p = p + tl.log(q.to(tl.float64)).to(p.dtype)
    return p


@triton.jit
def store_tile(out, out_index, address, inside, p, q, LEAF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the results of a tile, and their indices if the operation has them."""
    tl.store(out + address, value_of(p, q, LEAF).to(out.dtype.element_ty), mask=inside)
    if LEAF == "indexed":
        tl.store(out_index + address, q.to(out_index.dtype.element_ty), mask=inside)


@triton.jit
def store_products(  # type: ignore[no-untyped-def]
    states, first, out, address, inside, p, line, exists, base, place, length, inner,
    PRODUCT: tl.constexpr, FIRST: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """With PRODUCT, store the products of a `ResultProducts`: of each result p with the state of the next place.

    With FIRST, the last place reads ``first``, else 0.
    """
    if PRODUCT:
        has_next = inside & (place + 1 < length)
        source = states + base + _time_at(place + 1, length, REVERSE) * inner
        state = tl.load(source, mask=has_next, other=0).to(p.dtype)
        if FIRST:
            state = tl.where(has_next, state, tl.load(first + line, mask=exists, other=0).to(p.dtype))
        tl.store(out + address, (p * state).to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_total(  # type: ignore[no-untyped-def]
    total, total_second, total_flag, address, exists, p, q, flag, LEAF: tl.constexpr, SEGMENTED: tl.constexpr
):
    """Store the states (p, q) of all lines, and their flags if there are segments."""
    tl.store(total + address, value_of(p, q, LEAF), mask=exists)
    if LEAF == "linear" or LEAF == "indexed":
        tl.store(total_second + address, q, mask=exists)
    if SEGMENTED:
        tl.store(total_flag + address, flag.to(tl.int8), mask=exists)


@triton.jit
def last_place(x, row, places):  # type: ignore[no-untyped-def]
    """Return the last of the first ``places`` places of a tile: (STEPS, LINES) -> (1, LINES).

    It is a sum in which the other places are 0, because Triton cannot index values in registers.
    """
    return tl.sum(tl.where(row == places - 1, x, 0), 0, keep_dims=True)


TRITON_TYPES = {torch.int32: tl.int32, torch.int64: tl.int64, torch.float32: tl.float32, torch.float64: tl.float64}
RUN_BYTES = 128  # minimum bytes of neighboring lines of a tile, if the tensor has them


@dataclass(frozen=True)
class State:
    """States of some places of every line, (places, lines)."""

    value: Tensor  # the value, or h of a recurrence
    second: Tensor | None = None  # the factor of a recurrence, or the index
    flag: Tensor | None = None  # int8, 1 if a segment begins there

    def rows(self, begin: int, end: int | None = None) -> State:
        """Return the states of the places from begin to end."""
        return State(*(x if x is None else x[begin:end] for x in (self.value, self.second, self.flag)))


@dataclass(frozen=True)
class Tile:
    """A tile of STEPS places by LINES lines, and its number of warps."""

    steps: int  # a power of 2
    lines: int  # a power of 2
    warps: int  # of a program


@dataclass(frozen=True)
class ResultProducts:
    """The products of the results of a scan with other states, of the next places, as a second result.

    The result p of a place is multiplied by the state of the next place in scan order. The scan is the reverse of the
    one that has computed these states, so that it is the state before the row.
    """

    states: Tensor  # like x
    first: Tensor | None  # (lines,), the states before the first row, which the last place reads; None for zeros
    out: Tensor  # memory for the products, like x


@dataclass(frozen=True)
class Sweep:
    """An inclusive scan of x (outer, length, inner) along its length; with shift, of the elements one place earlier."""

    x: Tensor  # (outer, length, inner): the values, or the factors of a recurrence
    op: str  # "sum", "prod", "max", "min", or one of LEAF_KINDS
    neutral: float  # the identity of the operation in x; 1 for "linear", whose x are the factors
    compute: torch.dtype  # a key of TRITON_TYPES, the type of all states
    index: torch.dtype  # int32 or int64
    second: Tensor | None = None  # the summands of a recurrence, or the indices of x if they are not its times
    starts: Tensor | None = None  # bool or int8, (outer|1, length, inner|1)
    shift: bool = False  # scan the elements one place earlier
    reverse: bool = False  # scan from the last row
    product: ResultProducts | None = None  # a second result, where results are stored

    @property
    def leaf(self) -> str:
        """Return the kind of the states, for the kernels."""
        return LEAF_KINDS.get(self.op, "value")

    @property
    def length(self) -> int:
        """Return the length of a line."""
        return self.x.shape[1]

    @property
    def lines(self) -> int:
        """Return the number of lines."""
        return self.x.shape[0] * self.x.shape[2]

    @property
    def start(self) -> float:
        """Return the result of the scan before its first element.

        For "linear" that is the state h = 0, as `neutral` is the neutral factor, 1.
        """
        return 0 if self.op == "linear" else self.neutral

    def totals(self) -> Sweep:
        """Return the sweep whose last state combines all elements of x.

        A shifted scan combines at each place the elements before it, so that its last state lacks the last element:
        the shift is removed. A lagged recurrence, s_i = a_i * (s_(i-1) + b_i), keeps it, since it combines each summand
        b with the factor a one place earlier; `append_last_state` adds the last factor.
        """
        return replace(self, shift=self.shift and self.op == "linear")

    def sweep_over_parts(self, totals: State) -> Sweep:
        """Return the sweep that scans the totals of the parts of every line, (parts, lines), which are in scan order.

        Its x is (1, parts, lines): a part has one row.
        """
        x, second = totals.value, totals.second
        if self.op == "linear":
            x, second = second, x  # x of a recurrence are its factors
        x, second, starts = (part if part is None else part[None] for part in (x, second, totals.flag))
        return replace(self, x=x, second=second, starts=starts, shift=False, reverse=False)

    def states(self, places: int) -> State:
        """Return uninitialized memory to store the state of every line at this number of places.

        Of a state of logsumexp only the result is stored, one tensor (see `value_of`).
        """
        shape = places, self.lines
        second_dtype = {"linear": self.compute, "indexed": self.index}.get(self.leaf)  # None: one tensor per state
        return State(
            self.x.new_empty(shape, dtype=self.compute),
            None if second_dtype is None else self.x.new_empty(shape, dtype=second_dtype),
            None if self.starts is None else self.x.new_empty(shape, dtype=torch.int8),
        )

    @property
    def value_bytes(self) -> int:
        """Return the bytes of the state of one element in registers, without its flag."""
        second_bytes = {"value": 0, "indexed": self.index.itemsize}.get(self.leaf, self.compute.itemsize)
        return self.compute.itemsize + second_bytes

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the state of one element in registers, with its flag."""
        return self.value_bytes + (4 if self.starts is not None else 0)  # a flag is an int32 in registers

    def tile(self, elements: int, warps: int) -> Tile:
        """Return a tile of at most this number of elements, with the given number of warps.

        It has as few lines as a contiguous run of memory needs; the other elements are more places of these lines. If
        the lines are too short for that, it has more lines.
        """
        run_elements = RUN_BYTES // self.x.element_size()
        # Lines that are neighbors in memory, enough for one run but at least 16; all sizes are powers of 2, for Triton.
        lines = min(triton.next_power_of_2(self.x.shape[2]), max(run_elements, 16), elements)
        steps = min(triton.next_power_of_2(self.length), elements // lines)
        lines = max(lines, min(triton.next_power_of_2(self.lines), elements // steps))
        return Tile(steps, lines, warps)

    def pointers(self, *tensors: Tensor | None) -> list[Tensor]:
        """Return tensors as kernel arguments: bools as bytes, and x, which is not read, in place of None."""
        present = (self.x if x is None else x for x in tensors)
        return [x.view(torch.uint8) if x.dtype is torch.bool else x for x in present]

    def options(self, tile: Tile) -> dict[str, Any]:
        """Return the constants that the kernels are compiled with, by name."""
        return {
            "OP": self.op,
            "LEAF": self.leaf,
            "PAIR": self.leaf != "value",  # states have two tensors
            "NEUTRAL": self.neutral,
            "ACC": TRITON_TYPES[self.compute],
            "INDEX": TRITON_TYPES[self.index],
            "GIVEN": self.leaf == "indexed" and self.second is not None,  # indices are read from `second`
            "UNIT": math.gcd(self.x.shape[2], 16),  # known divisor of the inner size, for wide loads
            "FLAT": self.x.shape[0] == 1,
            "EVEN": self.lines % tile.lines == 0,
            "SHARED": self.starts is not None and self.starts.shape[0] == self.starts.shape[2] == 1,  # by all lines
            "SEGMENTED": self.starts is not None,
            "SHIFT": self.shift,
            "REVERSE": self.reverse,
            "STEPS": tile.steps,
            "LINES": tile.lines,
            "num_warps": tile.warps,
        }
