"""What crosses from one chunk of a sharded sequence to the next: a carry for each, from a summary of each.

A chunk is what a rank holds, or in zigzag frames half of it. Its summary is what its own scan makes of it: the total
of a scan, the map of a recurrence, the running extreme. The carry into a chunk combines the summaries of those before
it in scan order.

    exchange="gather"   one all-gather, and every rank scans the n (or 2n) summaries: (n - 1) * C bytes, C a rank's
    exchange="steps"    ceil(log2 n) shifts, step k to the rank 2^k further on: at most ceil(log2 n) * C bytes

Summaries are (folds, ...), in the order of the chunks that this rank holds. Nothing here is differentiable.

``sp::to_bytes`` and ``sp::from_bytes``: values of several dtypes in one buffer, so that one collective carries them.

Opaque, because what a compiler makes of reading bytes as numbers depends on their alignment. Not differentiable.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import in_order
from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.communicator import current, off_the_wire, on_the_wire
from sp_compile.lowering.torch_compat import pytree

from .monoids import MONOIDS, Combine, Pair, compose, segmented, selecting

sp = torch.ops.sp


class ExchangeWay(NamedTuple):
    """Which way a scan runs, and over whose rows.

    dim: that of the chunks; their rows are dim + 1. folds: chunks a rank. exchange: "gather" or "steps".
    """

    dim: int
    reverse: bool
    n: int = 1
    folds: int = 1
    exchange: str = "gather"
    group: str = ""

    @property
    def rows(self) -> int:
        return self.dim + 1

    @property
    def alone(self) -> bool:
        return self.n == 1

    @property
    def back(self) -> ExchangeWay:
        return self._replace(reverse=not self.reverse)

    @property
    def frame(self) -> list[int]:
        """Of one row a chunk."""
        chunks = self.n * self.folds
        return [1, chunks, 0, chunks, self.folds]

    def own(self, device: torch.device) -> Tensor:
        """Indices of this rank's chunks, int64 (folds,): read when the program runs."""
        rank = sp.rank(self.group, device)
        return torch.stack([rank, 2 * self.n - 1 - rank][: self.folds])

    def places(self, device: torch.device) -> Tensor:
        """The same counted in scan order."""
        own = self.own(device)
        return self.n * self.folds - 1 - own if self.reverse else own


def carry_of_scan(
    total: Tensor, stops: Tensor | None, ends: Pair | None, op: str, way: ExchangeWay
) -> tuple[Tensor, Tensor | None]:
    """What a scan carries into this rank's chunks, and whether a segment begins there.

    total (folds, ...): of the last segment. stops: bool, does a segment begin in the chunk? Broadcasts to total.
    ends: the first and the last segment id in scan order, like stops, if nobody has compared them yet. Results are like
    total and stops; without ends nothing is compared (None).
    """
    if way.exchange == "steps":
        return _steps_of_scan(total, stops, ends, op, way)
    given = [total] if stops is None else [total, stops, *(ends or ())]
    total, *rest = _gathered(given, way)
    places, cut = way.places(total.device), None
    if ends is not None:
        first, last = rest[1:]
        cuts = torch.cat([torch.ones_like(rest[0][:1]), first[1:] != last[:-1]])
        rest, cut = [rest[0] | cuts], cuts.index_select(0, places)
    starts = rest[0] if rest else None
    same = total.dtype
    sums, _ = sp.local_scan(total, starts, 0, op, False, False, same, same, False)
    return _shifted(sums, MONOIDS[op].identity(same), places), cut


def carry_of_extremes(value: Tensor, index: Tensor, op: str, way: ExchangeWay) -> Pair:
    """The extreme before this rank's chunks and its index, like value and index, which are those of its chunks."""
    identity = MONOIDS[op].identity(value.dtype)
    if way.exchange == "steps":
        first = torch.full_like(value, identity), torch.zeros_like(index)
        carry, index = _exclusive((value, index), first, selecting(op), way)
        return carry, index
    value, index = _gathered([value, index], way)
    best, winner = sp.local_extremes(value, None, 0, op, False)
    places = way.places(value.device)
    return _shifted(best, identity, places), _shifted(index.gather(0, winner), 0, places)


def carry_of_recurrence(
    factor: Tensor, state: Tensor, initial: Tensor | None, way: ExchangeWay
) -> tuple[Tensor, Tensor | None]:
    """What a recurrence carries into this rank's chunks, and what comes out of the last chunk of all.

    factor, state (folds, ...): the map of a chunk. initial (...): what goes into the first. Exchanged in steps, only
    the last rank could know what comes out (None).
    """
    first = state.new_zeros(state.shape[1:]) if initial is None else initial.to(state.dtype)
    if way.exchange == "steps":
        a, b = _exclusive((factor, state), (torch.ones_like(factor), torch.zeros_like(state)), compose, way)
        return torch.addcmul(b, a, first), None
    factor, state = _gathered([factor, state], way)
    same = state.dtype
    states = sp.local_linear_scan(factor, state, first, 0, False, False, same, same)
    before = torch.cat([first[None], states[:-1]])
    return before.index_select(0, way.places(state.device)), states[-1]


def neighbours(ends: Tensor, first: Tensor, way: ExchangeWay) -> Tensor:
    """The ends (folds, ...) of the chunks before this rank's, `first` (...) before them all. Differentiable."""
    (first,) = sp.reduce_grad([first], "reduce", way.n, way.group)
    rows = sp.all_gather(ends, 0, way.frame, way.n, way.group)
    rows = rows.flip(0) if way.reverse else rows
    return torch.cat([first[None], rows[:-1]]).index_select(0, way.places(ends.device))


def last_of(ends: Tensor, way: ExchangeWay) -> Tensor:
    """The end (...) of the last chunk of all, invariant, of ends (folds, ...). Differentiable."""
    rows = sp.unshard(ends, 0, way.frame, way.n, way.group)
    return rows[0] if way.reverse else rows[-1]


def _gathered(parts: list[Tensor], way: ExchangeWay) -> list[Tensor]:
    """All chunks' parts, (n * folds, ...) each, in scan order."""
    sent = parts[0] if len(parts) == 1 else sp.to_bytes(parts)
    rows = in_order(current().all_gather(sent, way.n, way.group), way.frame, way.n)
    rows = rows.flip(0) if way.reverse else rows
    return [rows] if len(parts) == 1 else sp.from_bytes(rows, parts)


def _shifted(inclusive: Tensor, identity: float, places: Tensor) -> Tensor:
    """Of the running results of all chunks, those before the chunks at these places."""
    first = torch.full_like(inclusive[:1], identity)
    return torch.cat([first, inclusive[:-1]]).index_select(0, places)


def _steps_of_scan(
    total: Tensor, stops: Tensor | None, ends: Pair | None, op: str, way: ExchangeWay
) -> tuple[Tensor, Tensor | None]:
    combine: Combine = MONOIDS[op].combine
    empty = torch.full_like(total, MONOIDS[op].identity(total.dtype))
    if stops is None:
        return _exclusive(total, empty, combine, way), None
    if ends is None:
        return _exclusive((stops, total), (stops, empty), segmented(combine), way)[1], None
    join = segmented(combine)

    def merge(left: Any, right: Any) -> Any:
        stops, total, first, last = right
        return *join(left[:2], (stops | (left[3] != first), total)), left[2], last

    _, carry, _, last = _exclusive((stops, total, *ends), (stops, empty, *ends), merge, way)
    return carry, (last != ends[0]) | (way.places(total.device) == 0).view([-1] + [1] * (last.ndim - 1))


def _exclusive(state: Any, empty: Any, combine: Combine, way: ExchangeWay) -> Any:
    """The combination of all earlier ranks' states, `empty` on the first: each step doubles how many are seen."""
    place = way.places(pytree.tree_leaves(state)[0].device)
    carry, step = empty, 1
    while step < way.n:
        came = _from_behind(state, step, way)
        known = place >= step
        carry = _where(known, came if step == 1 else combine(came, carry), carry)
        state = _where(known, combine(came, state), state)
        step *= 2
    return carry


def _where(known: Tensor, new: Any, old: Any) -> Any:
    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(known.view([1] * a.ndim), a, b)

    return pytree.tree_map(pick, new, old)


def _from_behind(state: Any, step: int, way: ExchangeWay) -> Any:
    """The state of the rank `step` before this one in scan order, in one shift; the first ones get the last ones'."""
    leaves, tree = pytree.tree_flatten(state)
    sent = leaves[0] if len(leaves) == 1 else sp.to_bytes(leaves)
    route = routes.shift(way.group, -step if way.reverse else step)
    came = off_the_wire(current().wait(current().start_shift(on_the_wire(sent), route)), sent)
    return pytree.tree_unflatten([came] if len(leaves) == 1 else sp.from_bytes(came, leaves), tree)


def _width(part: Tensor) -> int:
    return math.prod(part.shape[1:]) * part.element_size()  # Size.numel would make symbolic sizes constants


@opaque(
    "to_bytes(Tensor[] parts) -> Tensor",
    lambda parts: parts[0].new_empty((parts[0].shape[0], sum(map(_width, parts))), dtype=torch.uint8),
)
def to_bytes(parts: list[Tensor]) -> Tensor:
    """Rows of several tensors side by side: (k, ...) of any dtypes -> (k, bytes) uint8. Source: views and one copy."""
    rows = [part.reshape(part.shape[0], part.shape[1:].numel()) for part in parts]
    none = parts[0].new_empty((parts[0].shape[0], 0), dtype=torch.uint8)
    return torch.cat([none, *(_aligned(row).view(torch.uint8) for row in rows if row.numel())], 1)


@opaque(
    "from_bytes(Tensor message, Tensor[] parts) -> Tensor[]",
    lambda message, parts: [part.new_empty((message.shape[0], *part.shape[1:])) for part in parts],
)
def from_bytes(message: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Undo `to_bytes`: (m, bytes) -> tensors (m, ...) with the further sizes and the dtypes of `parts`."""
    rows = message.split([_width(part) for part in parts], 1)
    shapes = [(message.shape[0], *part.shape[1:]) for part in parts]
    return [
        _aligned(row).view(p.dtype).view(shape) if row.numel() else p.new_empty(shape)
        for row, p, shape in zip(rows, parts, shapes, strict=True)
    ]


def _aligned(rows: Tensor) -> Tensor:
    """A copy that starts where numbers may start, with the strides that reading other numbers needs even of one row."""
    return rows.clone(memory_format=torch.contiguous_format)
