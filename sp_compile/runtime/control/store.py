"""Requests to the key-value store of the process groups, which may never answer."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from sp_compile.lowering.torch_compat import drain_gloo_threads, group_store

STORE_TIMEOUT = 2.0  # seconds within which the store answers: it may be in a rank that has stopped

T = TypeVar("T")


def query_store(ask: Callable[[], T], otherwise: T) -> T:
    """What the store says; `otherwise` if it says nothing, as one that lies in a rank that was stopped.

    Raises what `ask` raises.
    """
    if _pending_queries:
        _pending_queries[0].join(STORE_TIMEOUT)  # it may have answered just now
        if _pending_queries[0].is_alive():
            return otherwise
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    _pending_queries[:] = [threading.Thread(target=run, daemon=True)]
    _pending_queries[0].start()
    try:
        return answer.result(STORE_TIMEOUT)
    except TimeoutError:
        return otherwise


_pending_queries: list[threading.Thread] = []  # of the last question to the store, which may be without an answer


def _join_threads() -> None:
    """Wait for threads in C++: one that comes back from there when Python has ended aborts the process."""
    for thread in _pending_queries:
        thread.join(STORE_TIMEOUT)
    if dist.is_available() and dist.is_initialized():
        drain_gloo_threads()


atexit.register(_join_threads)


def package_store() -> Any:
    """The part of the default group's store that is this package's."""
    return dist.PrefixStore("sp_compile", group_store(dist.group.WORLD))
