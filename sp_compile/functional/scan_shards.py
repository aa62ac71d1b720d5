"""Validate the shards of a scan, and choose the exchange of carries between ranks.

A carry is what a rank adds to the rows of later ranks. "gather" exchanges all carries at once, "steps" in ceil(log2(n))
shifts over n ranks. A route is the communicator of an exchange between some of the ranks.
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

from .rank_call import STATIC_LAYOUTS, check_choice, shard_frame

SCAN_EXCHANGES = ("auto", "gather", "steps")  # values of the argument `exchange`


@dataclass(frozen=True)
class ScanShardOptions:
    """Options of a scan along a sharded dim."""

    ranks: Ranks  # the ranks that share the scanned dim
    layout: str  # key of `LAYOUTS`
    length: int | None  # rows of the sequence without padding; None if no row is padding
    exchange: str  # one of `SCAN_EXCHANGES`

    @property
    def chunks(self) -> int:
        """Return the number of chunks of the sequence that a rank stores.

        Returns:
            1 for contiguous rows, 2 for the zigzag layout.
        """
        return LAYOUTS[self.layout].chunks

    def errors(self, shape: Sequence[int], dim: int) -> Iterator[SpError]:
        """Yield an error for each option that does not match the shards; the caller reads the first one only.

        Args:
            shape: The shape of a shard.
            dim: The scanned dim.

        Returns:
            SP454, SP502, SP507, SP512 or SP513.
        """
        if not shape:
            yield SpError("SP512", "x: expected at least one dim with group=, got none.")
        rows = shape[dim]
        total_rows = rows * self.ranks.n
        yield from check_choice("layout", self.layout, STATIC_LAYOUTS)
        yield from check_choice("exchange", self.exchange, SCAN_EXCHANGES)
        if rows % self.chunks:
            expected = f"an even number of rows for layout={self.layout!r}"
            yield SpError("SP454", f"x: expected {expected}, got {rows} along dim {dim}.")
        if self.chunks > 1 and self.exchange == "steps":
            yield SpError("SP513", f"exchange='steps' is not supported with layout={self.layout!r}.")
        if self.length is not None and not isinstance(self.length, (int, torch.SymInt)):
            yield SpError("SP502", f"length: expected an int, got {type(self.length).__name__}.")
        if self.length is not None and not 0 <= self.length <= total_rows:
            rows_of_all = f"the rows of all {self.ranks.n} ranks"
            yield SpError("SP507", f"length: expected 0 to {total_rows}, {rows_of_all}, got {self.length}.")

    def arguments(self, rows: int, nbytes: int, device: torch.device) -> tuple[Any, ...]:
        """Return the arguments of the scan operators that describe the shards.

        Args:
            rows: Rows of each rank.
            nbytes: Bytes that a rank sends for each chunk.
            device: The device of the operands.

        Returns:
            The frame, the exchange ("gather" or "steps"), the number of ranks and the group.
        """
        n, exchange = self.ranks.n, self.exchange
        if exchange == "auto":
            can_use_steps = n > 2 and self.chunks == 1  # two ranks would exchange the same in one step
            exchange = choose_exchange(nbytes, n, Machine.of(device.type)).exchange if can_use_steps else "gather"
        if torch.compiler.is_compiling():  # only steps, each between two ranks, need routes
            _declare_scan_routes(self.ranks.group, n if exchange == "steps" else 1)
        return shard_frame(rows, n, self.length, self.layout), exchange, n, self.ranks.group

    def __str__(self) -> str:
        """Return the options as text, which the ranks compare."""
        return f"{self.layout}, length={self.length}, exchange={self.exchange}, {self.ranks.n} ranks"


def make_shard_options(group: Mesh, layout: str, length: int | None, exchange: str) -> ScanShardOptions | None:
    """Return the options of a scan along a sharded dim.

    Args:
        group: The ranks that store shards. None: the operands are unsplit.
        layout: The layout of the shards.
        length: Rows of the sequence without padding. None: no row is padding.
        exchange: One of `SCAN_EXCHANGES`.

    Returns:
        The options; None without a group.

    Raises:
        SpError: Options of shards are passed without a group (SP511), or the group does not define the ranks (SP111 to
            SP116).
    """
    if group is not None:
        return ScanShardOptions(ranks_of(group), layout, length, exchange)
    if layout != CONTIGUOUS.name or length is not None or exchange != "auto":
        raise SpError("SP511", "layout, length, exchange: not supported without group=.")
    if torch.compiler.is_compiling():
        _declare_scan_routes("", 1)  # no route; adds the version of the operators to the key of torch's caches
    return None


@torch.compiler.assume_constant_result
def _declare_scan_routes(group: str, n: int) -> None:
    """Declare the routes of a traced call over n ranks, and add the operators' version to the key of torch's caches.

    There are no routes for n = 1. A compiled program may be loaded from a cache without tracing, so both must be known
    before the call runs. The decorator makes Dynamo call this function at trace time.
    """
    routes.declare_shift_routes(group, step_offsets(n))
    tag_programs()
