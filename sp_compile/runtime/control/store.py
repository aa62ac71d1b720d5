"""Requests to the key-value store of the process groups, which may never answer."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from sp_compile.lowering.torch_compat import group_store, let_gloo_finish

ANSWERS = 2.0  # seconds within which the store answers: it may be in a rank that has stopped

T = TypeVar("T")


def answered(ask: Callable[[], T], otherwise: T) -> T:
    """What the store says; `otherwise` if it says nothing, as one that lies in a rank that was stopped.

    Raises what `ask` raises.
    """
    if _asking:
        _asking[0].join(ANSWERS)  # it may have answered just now
        if _asking[0].is_alive():
            return otherwise
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    _asking[:] = [threading.Thread(target=run, daemon=True)]
    _asking[0].start()
    try:
        return answer.result(ANSWERS)
    except TimeoutError:
        return otherwise


_asking: list[threading.Thread] = []  # of the last question to the store, which may be without an answer


def _ended() -> None:
    """Wait for threads in C++: one that comes back from there when Python has ended aborts the process."""
    for thread in _asking:
        thread.join(ANSWERS)
    if dist.is_available() and dist.is_initialized():
        let_gloo_finish()


atexit.register(_ended)


def of_all() -> Any:
    """The part of the default group's store that is this package's."""
    return dist.PrefixStore("sp_compile", group_store(dist.group.WORLD))
