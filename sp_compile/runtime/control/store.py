"""Query the key-value store of the process groups with a timeout."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from sp_compile.lowering.torch_compat import drain_gloo_threads, group_store

STORE_TIMEOUT = 2.0  # seconds; the store may be hosted by a rank that has stopped

T = TypeVar("T")


def query_store(ask: Callable[[], T], otherwise: T) -> T:
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
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()  # before it is stored, since other calls join stored threads, which must have started
    _pending_queries[:] = [*(query for query in _pending_queries if query.is_alive()), thread]
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


def package_store() -> Any:
    """Return this package's part of the default group's store."""
    return dist.PrefixStore("sp_compile", group_store(dist.group.WORLD))
