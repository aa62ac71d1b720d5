"""Scans of shards: how ranks share the scanned dim, and what they have to tell each other before and after.

Whatever is wrong on one rank is raised on all of them. That takes exchanges of their own, which `check` asks for: one
of 24 bytes a rank and call, and where the values of integers or ids have to be looked at one or two more. Values are
looked at in eager mode only, and not those of a tensor without values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.config import Mesh, Ranks, ranks_of
from sp_compile.cost.machine import Machine
from sp_compile.cost.scan import choose_exchange, offsets_of_steps
from sp_compile.errors import SpError
from sp_compile.lowering import routes
from sp_compile.lowering.communicator import current
from sp_compile.lowering.frames import CONTIGUOUS, LAYOUTS, in_order
from sp_compile.lowering.library import tag_programs
from sp_compile.spmd.agree import answers
from sp_compile.spmd.control.message import CALLS

from .call import HELD, frame, wrong_choice


def ungrouped(ids: Tensor, dim: int) -> bool:
    """Does an id come again along dim after another one? Ids that are not in order are sorted."""
    before, after = _neighbours(ids, dim)
    if bool((before <= after).all()) or bool((before >= after).all()):
        return False
    changes = (before != after).sum(dim)
    before, after = _neighbours(ids.sort(dim).values, dim)
    return bool((changes != (before != after).sum(dim)).any())


def _neighbours(ids: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    pairs = max(ids.shape[dim] - 1, 0)
    return ids.narrow(dim, 0, pairs), ids.narrow(dim, ids.shape[dim] - pairs, pairs)


def never_overflows(x: Tensor, op: str, length: int, dtype: torch.dtype) -> bool:
    """Does the dtype hold every sum or product of `length` numbers of x's own dtype, bool or integers?"""
    if x.dtype is torch.bool:
        return not _exceeds(1, op, length, torch.iinfo(dtype).max)
    own = torch.iinfo(x.dtype)
    return not _exceeds(max(-own.min, own.max), op, length, torch.iinfo(dtype).max)


def may_overflow(x: Tensor, op: str, length: int, dtype: torch.dtype) -> bool:
    """Can a sum or product of `length` numbers as large as those of an integer x leave the dtype?"""
    if never_overflows(x, op, length, dtype) or not x.numel():
        return False
    ends = (x.to(torch.uint8) if x.dtype is torch.bool else x).aminmax()
    least, greatest = (int(end) for end in ends)
    return _exceeds(max(-least, greatest), op, length, torch.iinfo(dtype).max)


def _exceeds(magnitude: int, op: str, length: int, limit: int) -> bool:
    if op == "sum":
        return magnitude * length > limit
    return magnitude > 1 and length * math.log2(magnitude) >= math.log2(limit)


def wrapped(out: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the integers of out have wrapped round in dtype, told by the same numbers in float64.

    A number that wraps is off by a multiple of 2**bits, and float64 by much less than half of that, or it is so large
    that one before it has wrapped.
    """
    return ((exact - out.double()).abs() >= 2.0 ** (torch.iinfo(dtype).bits - 1)) | ~exact.isfinite()


EXCHANGES = ("auto", "gather", "steps")


@dataclass(frozen=True)
class Shards:
    """The ranks' shards of the scanned dim. length: of the whole sequence, None if no row is padding."""

    ranks: Ranks
    layout: str
    length: int | None
    exchange: str

    @property
    def folds(self) -> int:
        """Chunks that a rank holds."""
        return LAYOUTS[self.layout].chunks

    def problems(self, shape: Sequence[int], dim: int) -> Iterator[SpError]:
        """Yield what is wrong with shards of this shape along dim."""
        if not shape:
            yield SpError("SP512", "x: expected at least one dim with group=, got none.")
        rows = shape[dim]
        whole = rows * self.ranks.n
        yield from wrong_choice("layout", self.layout, HELD)
        yield from wrong_choice("exchange", self.exchange, EXCHANGES)
        if rows % self.folds:
            yield SpError("SP454", f"layout: expected an even number of rows for {self.layout!r}, got {rows}.")
        if self.folds > 1 and self.exchange == "steps":
            yield SpError("SP513", f"exchange='steps' is not supported with layout={self.layout!r}.")
        if self.length is not None and not isinstance(self.length, (int, torch.SymInt)):
            yield SpError("SP502", f"length: expected an int, got {type(self.length).__name__}.")
        if self.length is not None and not 0 <= self.length <= whole:
            rows_of_all = f"the rows of all {self.ranks.n} ranks"
            yield SpError("SP507", f"length: expected 0 to {whole}, {rows_of_all}, got {self.length}.")

    def arguments(self, rows: int, nbytes: int, device: torch.device) -> tuple[Any, ...]:
        """frame, exchange, n and group of the sp operators. nbytes: what a rank has to tell of its shard, a chunk."""
        n, exchange = self.ranks.n, self.exchange
        if exchange == "auto" and n > 2 and self.folds == 1:
            exchange = choose_exchange(nbytes, n, Machine.of(device.type)).exchange
        exchange = "gather" if exchange == "auto" else exchange
        if torch.compiler.is_compiling():
            _prepare(self.ranks.group, n if exchange == "steps" else 1)
        return frame(rows, n, self.length, self.layout), exchange, n, self.ranks.group

    def __str__(self) -> str:
        return f"{self.layout}, length={self.length}, exchange={self.exchange}, {self.ranks.n} ranks"

    def any(self, mine: bool) -> bool:
        """Is it so on some rank?"""
        return any(self._answers(mine))

    def _answers(self, mine: Any) -> list[Any]:
        """What every rank says of its shard."""
        return answers(self.ranks, CALLS, "a scan of shards", mine)

    def ungrouped(self, ids: Tensor, dim: int) -> bool:
        """Does an id come again, on whichever rank, after another one? Gathers ids that are not in order."""
        n, group = self.ranks.n, self.ranks.group
        ids = ids.movedim(dim, 0)
        lies = frame(ids.shape[0], n, self.length, self.layout)
        rows = ids.unflatten(0, (self.folds, ids.shape[0] // self.folds))
        ends = in_order(current().all_gather(rows[:, [0, -1]], n, group), lies, n).flatten(0, 1)
        ascends, descends = (bool(beats(rows[:, 1:], rows[:, :-1]).all()) for beats in (torch.ge, torch.le))
        local = self._answers([ascends, descends])
        for sorted_, beats in zip(zip(*local), (torch.ge, torch.le)):
            if all(sorted_) and bool(beats(ends[1:], ends[:-1]).all()):
                return False
        whole = in_order(current().all_gather(rows, n, group), lies, n).flatten(0, 1)
        return ungrouped(whole[: self.length], 0)


def shards_of(group: Mesh, layout: str, length: int | None, exchange: str) -> Shards | None:
    """None: x is whole. Raises SpError for options of shards without a group, and what `ranks_of` raises."""
    if group is not None:
        return Shards(ranks_of(group), layout, length, exchange)
    if layout != CONTIGUOUS.name or length is not None or exchange != "auto":
        raise SpError("SP511", "layout, length, exchange: not supported without group=.")
    if torch.compiler.is_compiling():
        _prepare("", 1)
    return None


@torch.compiler.assume_constant_result
def _prepare(group: str, n: int) -> None:
    """A compiled program may come from a cache, untraced: its routes are known then, and it was made of these ops."""
    routes.declare_shifts(group, offsets_of_steps(n))
    tag_programs()
