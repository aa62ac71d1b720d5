"""Scans of shards: how ranks share the scanned dim, and what they have to tell each other before and after.

Whatever is wrong on one rank is raised on all of them. That takes an exchange of its own, of 24 bytes a rank and call,
which `check` asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import CONTIGUOUS, LAYOUTS
from sp_compile.lowering.base.library import tag_programs
from sp_compile.lowering.base.ranks import Mesh, Ranks, ranks_of
from sp_compile.lowering.comm import routes
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.scan_cost import choose_exchange, step_offsets

from .rank_call import HOLDS_PATTERN, check_choice, shard_frame

SCAN_EXCHANGES = ("auto", "gather", "steps")


@dataclass(frozen=True)
class ScanShardOptions:
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
        total = rows * self.ranks.n
        yield from check_choice("layout", self.layout, HOLDS_PATTERN)
        yield from check_choice("exchange", self.exchange, SCAN_EXCHANGES)
        if rows % self.folds:
            yield SpError("SP454", f"layout: expected an even number of rows for {self.layout!r}, got {rows}.")
        if self.folds > 1 and self.exchange == "steps":
            yield SpError("SP513", f"exchange='steps' is not supported with layout={self.layout!r}.")
        if self.length is not None and not isinstance(self.length, (int, torch.SymInt)):
            yield SpError("SP502", f"length: expected an int, got {type(self.length).__name__}.")
        if self.length is not None and not 0 <= self.length <= total:
            rows_of_all = f"the rows of all {self.ranks.n} ranks"
            yield SpError("SP507", f"length: expected 0 to {total}, {rows_of_all}, got {self.length}.")

    def arguments(self, rows: int, nbytes: int, device: torch.device) -> tuple[Any, ...]:
        """frame, exchange, n and group of the sp operators. nbytes: what a rank has to tell of its shard, a chunk."""
        n, exchange = self.ranks.n, self.exchange
        if exchange == "auto" and n > 2 and self.folds == 1:
            exchange = choose_exchange(nbytes, n, Machine.of(device.type)).exchange
        exchange = "gather" if exchange == "auto" else exchange
        if torch.compiler.is_compiling():
            _declare_scan_routes(self.ranks.group, n if exchange == "steps" else 1)
        return shard_frame(rows, n, self.length, self.layout), exchange, n, self.ranks.group

    def __str__(self) -> str:
        return f"{self.layout}, length={self.length}, exchange={self.exchange}, {self.ranks.n} ranks"


def shards_of(group: Mesh, layout: str, length: int | None, exchange: str) -> ScanShardOptions | None:
    """None: x is whole. Raises SpError for options of shards without a group, and what `ranks_of` raises."""
    if group is not None:
        return ScanShardOptions(ranks_of(group), layout, length, exchange)
    if layout != CONTIGUOUS.name or length is not None or exchange != "auto":
        raise SpError("SP511", "layout, length, exchange: not supported without group=.")
    if torch.compiler.is_compiling():
        _declare_scan_routes("", 1)
    return None


@torch.compiler.assume_constant_result
def _declare_scan_routes(group: str, n: int) -> None:
    """A compiled program may come from a cache, untraced: its routes are known then, and it was made of these ops."""
    routes.declare_shift_routes(group, step_offsets(n))
    tag_programs()
