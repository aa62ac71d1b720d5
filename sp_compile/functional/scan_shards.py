"""Scans of shards: how ranks share the scanned dim, and what they have to tell each other before and after.

Whatever is wrong on one rank is raised on all of them. That takes exchanges of their own, which `check` asks for: one
all-gather of 16 bytes a call, and where the values of integers or ids have to be looked at one or two more.

Checks of a scan that need its values: done in eager mode only, and not on a tensor without values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile._compat import FakeTensor, is_functorch_tensor
from sp_compile.config import Mesh, Ranks, ranks_of
from sp_compile.cost.machine import Machine
from sp_compile.cost.scan import choose_exchange, rounds_of
from sp_compile.errors import SpError
from sp_compile.lowering import routes
from sp_compile.lowering.communicator import current
from sp_compile.lowering.library import tag_programs
from sp_compile.spmd.check_call import agree, numbers


def observable(x: Tensor) -> bool:
    """May Python look at the values of x?"""
    if torch.compiler.is_compiling():
        return False
    return not (x.is_meta or isinstance(x, FakeTensor) or is_functorch_tensor(x))


def transformed(*xs: Tensor | None) -> bool:
    """Is one of them inside torch.func, which does not see into the body of an operator?"""
    if torch.compiler.is_compiling():
        return False
    return any(is_functorch_tensor(x) for x in xs if x is not None)


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


LAYOUTS = ("contiguous", "zigzag")
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
        return 2 if self.layout == "zigzag" else 1

    def problems(self, shape: Sequence[int], dim: int) -> Iterator[str]:
        """What is wrong with shards of this shape along dim."""
        if not shape:
            yield "a tensor of no dims has none that ranks could share"
        rows = shape[dim]
        whole = rows * self.ranks.n
        for name, value, known in (("layout", self.layout, LAYOUTS), ("exchange", self.exchange, EXCHANGES)):
            if value not in known:
                yield f"{name}={value!r}: expected {' or '.join(map(repr, known))}"
        if self.folds == 2 and rows % 2:
            yield f"zigzag shards are two equal chunks, but this one has {rows} rows"
        if self.folds == 2 and self.exchange == "steps":
            yield "exchange='steps' is for layout='contiguous'; pass 'gather' or 'auto'"
        if self.length is not None and not isinstance(self.length, (int, torch.SymInt)):
            yield f"length is an int, got {type(self.length).__name__}"
        if self.length is not None and not 0 <= self.length <= whole:
            yield f"length={self.length}: expected 0 to {whole}, the rows of all {self.ranks.n} ranks"

    def arguments(self, rows: int, nbytes: int, device: torch.device) -> tuple[Any, ...]:
        """frame, exchange, n and group of the sp operators. nbytes: what a rank has to tell of its shard, a chunk."""
        whole, n = rows * self.ranks.n, self.ranks.n
        frame = [1, whole, 0, whole if self.length is None else self.length]
        exchange = self.exchange
        if exchange == "auto" and n > 2 and self.folds == 1:
            exchange = choose_exchange(nbytes, n, Machine.of(device.type)).exchange
        exchange = "gather" if exchange == "auto" else exchange
        if torch.compiler.is_compiling():
            _prepare(self.ranks.group, n if exchange == "steps" else 1)
        return [*frame, 2] if self.folds == 2 else frame, exchange, n, self.ranks.group

    def agree(self, name: str, problem: str | None, description: str) -> None:
        """Raise SpError on every rank if any has a problem, or if their calls differ."""
        given = f"{self.layout}, length={self.length}, exchange={self.exchange}, {self.ranks.n} ranks"
        alike = "shards are of equal length, options the same"
        agree(name, problem, f"{description}, {given}", self.ranks, alike)

    def any(self, mine: bool) -> bool:
        """Is it so on some rank?"""
        return any(flag for (flag,) in numbers([mine], self.ranks))

    def raise_together(self, name: str, problem: str | None) -> None:
        """Raise SpError on every rank if any has a problem."""
        if self.any(problem is not None):
            agree(name, problem, "no problem", self.ranks, "")

    def ungrouped(self, ids: Tensor, dim: int) -> bool:
        """Does an id come again, on whichever rank, after another one? Gathers ids that are not in order."""
        n, group = self.ranks.n, self.ranks.group
        ids = ids.movedim(dim, 0)
        rows = ids.unflatten(0, (self.folds, ids.shape[0] // self.folds))
        ends = self._in_order(current().all_gather(rows[:, [0, -1]], n, group)).flatten(0, 1)
        ascends, descends = (bool(beats(rows[:, 1:], rows[:, :-1]).all()) for beats in (torch.ge, torch.le))
        local = numbers([ascends, descends], self.ranks)
        for sorted_, beats in zip(zip(*local), (torch.ge, torch.le)):
            if all(sorted_) and bool(beats(ends[1:], ends[:-1]).all()):
                return False
        return ungrouped(self._in_order(current().all_gather(rows, n, group)).flatten(0, 1)[: self.length], 0)

    def _in_order(self, chunks: Tensor) -> Tensor:
        """All ranks' chunks, (n * folds, ...) -> in the sequence's order."""
        if self.folds == 1:
            return chunks
        return torch.cat([chunks[::2], chunks[1::2].flip(0)])


def shards_of(group: Mesh, layout: str, length: int | None, exchange: str) -> Shards | None:
    """None: x is whole. Raises SpError for options of shards without a group, and what `ranks_of` raises."""
    if group is not None:
        return Shards(ranks_of(group), layout, length, exchange)
    if layout != "contiguous" or length is not None or exchange != "auto":
        raise SpError("scan: layout, length and exchange describe shards; pass group= as well")
    if torch.compiler.is_compiling():
        _prepare("", 1)
    return None


@torch.compiler.assume_constant_result
def _prepare(group: str, n: int) -> None:
    """A compiled program may come from a cache, untraced: its routes are known then, and it was made of these ops."""
    routes.declare_shifts(group, [1 << k for k in range(rounds_of(n))])
    tag_programs()
