"""Query the key-value store of the process groups with a timeout."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from sp_compile.lowering.torch_compat import drain_gloo_threads, group_store

STORE_TIMEOUT = 2.0  # seconds; the store may be hosted by a rank that has stopped

T = TypeVar("T")


def query_store(query: Callable[[], T], otherwise: T) -> T:
    """Return the result of a store query, or `otherwise` if the store does not answer within `STORE_TIMEOUT`.

    It does not answer if the rank that hosts it was stopped. A query cannot be interrupted, so it runs in a thread.
    Exceptions of the query are raised.
    """
    for pending in [*_pending_queries]:  # of earlier calls, which the store may have answered by now
        pending.join(STORE_TIMEOUT)
        if pending.is_alive():
            return otherwise
    answer: Future[T] = Future()

    def run() -> None:
        """Run the query and store its result or its error."""
        try:
            answer.set_result(query())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()  # before it is stored, since other calls join stored threads, which must have started
    _pending_queries[:] = [*(pending for pending in _pending_queries if pending.is_alive()), thread]
    try:
        return answer.result(STORE_TIMEOUT)
    except TimeoutError:
        return otherwise


_pending_queries: list[threading.Thread] = []  # threads of the last queries, which may be pending


def _join_threads() -> None:
    """Join query threads, since a thread that returns from C++ after Python's exit aborts the process."""
    for thread in _pending_queries:
        thread.join(STORE_TIMEOUT)
    if dist.is_available() and dist.is_initialized():
        drain_gloo_threads()  # wait for the threads of process groups, which would abort it, too


atexit.register(_join_threads)


class Arrival:
    """Entry of one rank in the number of arrived ranks of a group, which the group's store holds."""

    def __init__(self, store: Any, key: str, address: str) -> None:
        """Describe a rank that is not counted yet.

        Args:
            store: The group's store, with a prefix of its channel.
            key: The key of this rank's address.
            address: The address, which other ranks read after all have arrived.
        """
        self.store, self.key, self.address = store, key, address
        self.counted: list[str] = []  # the key while this rank is in the count: only one thread can pop it
        self.has_left = False

    def count(self) -> int:
        """Return the number of arrived ranks; the first call publishes the address of this rank and counts it."""
        if self.counted:
            arrived = int(self.store.add("here", 0))  # reads the number
        else:
            self.store.set(self.key, self.address)
            arrived = int(self.store.add("here", 1))
            self.counted.append(self.key)
        if self.has_left:  # `leave` ran while the store did not answer, maybe before `counted` was set
            self._remove()
        return arrived

    def leave(self) -> None:
        """Remove this rank from the count, at once or when a pending `count` ends."""
        self.has_left = True
        if self.counted:
            query_store(self._remove, None)

    def _remove(self) -> None:
        """Remove this rank from the count once, although two threads may call this."""
        with suppress(IndexError):
            self.counted.pop()
            self.store.add("here", -1)


def package_store() -> Any:
    """Return this package's part of the default group's store."""
    return dist.PrefixStore("sp_compile", group_store(dist.group.WORLD))
