"""The process that has an absent GPU: `AbsentGpu.run(fn, *args)` calls a function of a test module there.

Nothing here imports torch before the guard is loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

from support.cuda import guard

TIMEOUT = 300.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TRITON_INTERPRET": "0"}


class GpuError(AssertionError):
    """The function raised, or did not answer."""


def _work(library: str, pipe: Connection) -> None:
    """Pretend, then answer calls until the pipe closes."""
    guard.load(library)
    from support.cuda.absent import pretend
    from support.ranks import answer

    pretend()
    while True:
        try:
            payload = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(answer(payload))


class AbsentGpu:
    """The process, started at the first call and again after one that did not answer. library: see ``guard.py``.

    timeout: seconds for a call.
    """

    def __init__(self, library: str, timeout: float = TIMEOUT) -> None:
        self._library, self._timeout = library, timeout
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def run(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """fn(*args, **options) where the GPU seems to be; both ways are pickled. Raises GpuError with the traceback."""
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        self._pipe.send_bytes(pickle.dumps((partial(fn, **options), args)))
        if not self._pipe.poll(self._timeout):
            self.close()
            raise GpuError(f"{fn.__name__}: no answer in {self._timeout} s")
        try:
            ok, result = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            self.close()
            raise GpuError(f"{fn.__name__}: the process died") from None
        if not ok:
            raise GpuError(result)
        return result

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None and self._pipe is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = self._pipe = None

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(self._library, theirs), daemon=True)
        with mock.patch.dict(os.environ, ENVIRONMENT):
            self._process.start()
        theirs.close()
