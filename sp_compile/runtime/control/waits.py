"""Announce in the store that a rank waits for others, and find the ranks that have not arrived.

A rank announces a wait of more than `STORE_DELAY` seconds. Its group reads the number of exchanges before the wait:
ranks with another number have not arrived. All ranks read its operation, since a rank that has not arrived in one group
may itself wait in another group.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from .store import package_store, query_store

STORE_DELAY = 2.0  # seconds of a wait before the store is read


@dataclass(eq=False)
class WaitRecord:
    """Waits of the ranks of one group in its store."""

    group: str  # name of the group in torch
    ranks: list[int]  # global ranks of the group
    store: Any  # the group's store, with a prefix of its channel
    announced: int = -1  # number of exchanges before the last one whose wait was announced
    is_waiting: bool = False  # True from an announcement until the wait ends

    def announce(self, number: int, operation: str) -> None:
        """Announce, once, that this rank waits in an exchange with `number` exchanges before it."""
        if self.announced == number:
            return
        self.announced, self.is_waiting = number, True
        key = f"waits/{dist.get_rank()}"
        with suppress(RuntimeError):  # the rank that hosts the store is lost
            query_store(lambda: self.store.set(key, str(number)), None)
        _announce_to_all(f"{operation} over the group {self.group}")

    def end(self) -> None:
        """End the announced wait, if any."""
        if self.is_waiting:
            self.is_waiting = False
            _announce_to_all("")

    def absent_ranks(self, waited: float, number: int) -> list[int]:
        """Return the ranks that do not wait in this exchange; [] if that is not known, as after a short wait.

        Args:
            waited: Seconds since this rank waits.
            number: Number of exchanges before this one.
        """
        others = [rank for rank in self.ranks if rank != dist.get_rank()]
        if len(others) == 1:  # the only rank that this one can wait for
            return others
        if waited < 2 * STORE_DELAY:  # ranks that wait may not have announced it yet
            return []
        with suppress(RuntimeError):  # the rank that hosts the store is lost
            # A rank that waits in this exchange has announced the same number of exchanges before it as this rank has.
            return [rank for rank in others if query_store(partial(self._waiting_at, rank), -1) != number]
        return []

    def _waiting_at(self, rank: int) -> int:
        """Return the number of exchanges before the last one in which a rank had to wait, or -1."""
        key = f"waits/{rank}"
        return int(self.store.get(key)) if self.store.check([key]) else -1

    def describe_late(self, absent: Sequence[int], last_operations: Sequence[str]) -> str:
        """Return the last operations of ranks that have not arrived, and the operations in which they wait, as text.

        Args:
            absent: The ranks that have not arrived.
            last_operations: Last operation of each rank of the group.
        """
        of_rank = dict(zip(self.ranks, last_operations))
        lines = describe_by_operation({rank: of_rank[rank] for rank in absent or self.ranks})
        elsewhere = [f"Rank {rank} waits as well: it {text}." for rank in absent if (text := _wait_of(rank))]
        return " ".join([f"Last operation of {line}." for line in lines] + elsewhere)


def describe_by_operation(operations: dict[int, str], between: str = ": ") -> list[str]:
    """Return a line for each operation, with the ranks whose operation it is: "rank 0, 2: calls Decoder".

    Args:
        operations: The operation of each rank.
        between: The text between ranks and operation.
    """
    ranks: dict[str, list[str]] = {}
    for rank, operation in operations.items():
        ranks.setdefault(operation, []).append(str(rank))
    return [f"rank {', '.join(of_operation)}{between}{operation}" for operation, of_operation in ranks.items()]


def _announce_to_all(text: str) -> None:
    """Write to the store of all ranks in which operation this rank waits; "" if it does not wait."""
    if dist.is_available() and dist.is_initialized():
        store, key = package_store(), f"waiting/{dist.get_rank()}"
        with suppress(RuntimeError):  # the rank that hosts the store is lost
            query_store(lambda: store.set(key, text), None)


def _wait_of(rank: int) -> str:
    """Return the operation in which a rank waits, in any group; "" if it does not wait or that is not known."""
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    store, key = package_store(), f"waiting/{rank}"
    with suppress(RuntimeError):  # the rank that hosts the store is lost
        return query_store(lambda: bytes(store.get(key)).decode() if store.check([key]) else "", "")
    return ""
