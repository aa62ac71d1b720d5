"""Real ranks for tests: four Gloo processes that live as long as the session.

A test takes the ``ranks`` fixture and calls ``ranks.run(n, fn, *args)``; ``fn``, a function of a test
module, runs in the first ``n`` processes. It calls ``group()``, ``mesh()`` or ``mesh2d(dp, sp)`` of this
module. Ranks that do not answer in time are reported, killed and replaced.
"""

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WORLD = 4
TIMEOUT = 120.0
COMPILE_TIMEOUT = 300.0
"""Seconds for a call that compiles by Inductor."""
GRACE = 5.0
"""Seconds for the other ranks to answer after one has failed."""

CPP_FLAGS_OF_TESTS = "SP_COMPILE_CPP_FLAGS_OF_TESTS"  # ranks inherit the variable
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",  # ranks are forked, and CUDA does not survive that
}


def configure_torch() -> None:
    """Disable torch's timing of guards, which takes 30 ms a program; raise errors in passes and of aliased results.

    Compile kernels of scans with the flags in the variable `CPP_FLAGS_OF_TESTS`, too.
    """
    from torch._dynamo import guards  # imported here: it queries torch.cuda, see `support/cuda/absent.py`
    from torch._functorch import config

    from sp_compile.lowering.scan.kernels import native
    from sp_compile.passes.capture import uncaptured

    added = tuple(os.environ.get(CPP_FLAGS_OF_TESTS, "").split())
    native.CPP_FLAGS = (*native.CPP_FLAGS, *(flag for flag in added if flag not in native.CPP_FLAGS))
    uncaptured.raises_internal_errors = True
    guards.profile_guard_manager = lambda *_: 0.0
    config.error_on_custom_op_aliasing = True  # torch's default if CI is set; else it warns


class RanksError(AssertionError):
    """Some rank raised, died or did not answer."""


@dataclass(frozen=True)
class Failure:
    """An error of a rank."""

    kinds: tuple[str, ...]  # names of the class and its bases, also of wrapped errors
    words: str  # the message
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure of an error; call it in the handler."""
        kinds, inner = [], error
        while inner is not None:
            kinds += [base.__name__ for base in type(inner).__mro__]
            inner = getattr(inner, "inner_exception", None)
        return cls(tuple(kinds), str(error), traceback.format_exc())

    def __str__(self) -> str:
        return self.traceback


def forkserver() -> ForkServerContext:
    """Return a context whose processes have slow imports and compilations done: see ``parallel/warm.py``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.parallel.warm"])
    path = os.pathsep.join(filter(None, sys.path))  # Python 3.11 does not pass it to preloaded modules
    with mock.patch.dict(os.environ, {**ENVIRONMENT, "PYTHONPATH": path}):
        ensure_running()
    return context


# In a worker.

_groups: dict[int, dist.ProcessGroup] = {}
_running = 0
_as_users_run = False


def as_users_run() -> bool:
    """Return True if this call compiles with Inductor and all default options; see ``pytest.mark.as_users_run``."""
    return _as_users_run


def group(n: int | None = None) -> dist.ProcessGroup:
    """Return the process group of the first ``n`` ranks; of the ranks of this call by default."""
    return _groups[n or _running]


def mesh(n: int | None = None) -> DeviceMesh:
    """Return a 1-D mesh ("sp",) over the first ``n`` ranks; over the ranks of this call by default."""
    return DeviceMesh.from_group(group(n), "cpu", mesh_dim_names=("sp",))


@functools.cache
def mesh2d(dp: int, sp: int) -> DeviceMesh:
    """Return a 2-D mesh ("dp", "sp") over all four ranks; a collective call."""
    return init_device_mesh("cpu", (dp, sp), mesh_dim_names=("dp", "sp"))


def _stack_of(store: str, rank: int) -> Path:
    """Return the file to which a rank writes its stack on SIGUSR1."""
    return Path(f"{store}.stack{rank}")


def _work(rank: int, store: str, pipe: Connection) -> None:
    """Join the groups, then answer calls until the pipe closes."""
    global _running, _as_users_run
    faulthandler.register(signal.SIGUSR1, _stack_of(store, rank).open("w"), all_threads=True)
    torch.set_num_threads(1)
    init = {"init_method": f"file://{store}", "timeout": timedelta(seconds=TIMEOUT)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, **init)
    for n in range(1, WORLD):
        _groups[n] = dist.new_group(range(n))
    _groups[WORLD] = dist.group.WORLD
    initial_count = _count_groups()
    while True:
        try:
            _running, _as_users_run, payload = pipe.recv()
        except EOFError:
            return
        found = answer(payload)
        pipe.send((_count_groups() - initial_count, found))


def _count_groups() -> int:
    """Return the number of groups that this rank has created, from which torch makes the name of the next one."""
    return int(dist.distributed_c10d._world.group_count)


def answer(payload: bytes) -> bytes:
    """Run one pickled call; return the pickled (True, result) or (False, Failure)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        fn, args = pickle.loads(payload)
        if _as_users_run:
            from support.recording import checked_as_users_run as run  # only in a rank: it imports the package

            return pickle.dumps((True, run(fn, *args)))
        return pickle.dumps((True, fn(*args)))
    except Exception as error:
        return pickle.dumps((False, Failure.of(error)))


# In the test process.


class Ranks:
    """The workers, started at the first call and again after a failure."""

    def __init__(self) -> None:
        self.as_users_run = False
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._group_counts: dict[int, int] = {}  # groups that the calls of each rank have created
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(self, n: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Call ``fn(*args)`` on ranks 0 to ``n - 1``; return their results in rank order.

        Raises RanksError with the traceback of every rank that raised and the names of those that died or
        did not answer within ``timeout`` seconds.
        """
        if self.as_users_run:
            timeout = max(timeout, COMPILE_TIMEOUT)
        answers = self.answers(n, fn, *args, timeout=timeout)
        silent = [rank for rank in range(n) if rank not in answers]
        failures = [f"rank {r} of {n}:\n{text}" for r, (ok, text) in sorted(answers.items()) if not ok]
        if silent:
            failures += [
                f"rank {rank} of {n} answered {result!r:.500}" for rank, (_, result) in sorted(answers.items())
            ]
            failures.append(f"no answer from ranks {silent} of {n}")
            failures += [f"rank {rank} is at\n{self._stack(rank)}" for rank in silent]
            self.close()
        if failures:
            raise RanksError("\n".join(failures))
        return [answers[rank][1] for rank in range(n)]

    def answers(
        self, n: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, grace: float = GRACE
    ) -> dict[int, tuple[bool, Any]]:
        """Return (True, result) or (False, Failure) of each rank that answered in time.

        grace: seconds for the other ranks to answer after one has failed.
        """
        payload = pickle.dumps((fn, args))
        # After an error on some ranks only, these may have created fewer groups, whose names would no longer match.
        has_equal_names = len({self._group_counts.get(rank, 0) for rank in range(n)}) == 1
        if not self._processes or not has_equal_names or not all(process.is_alive() for process in self._processes):
            self.close()
            self._start()
        for pipe in self._pipes[:n]:
            pipe.send((n, self.as_users_run, payload))
        return self._collect(n, timeout, grace)

    def close(self) -> None:
        """Kill the workers."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._group_counts = [], [], {}

    def _start(self) -> None:
        context = forkserver()
        self._store = tempfile.mktemp(dir=self._folder.name)
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self._store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _stack(self, rank: int) -> str:
        """Return the stack of a rank."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
        return _stack_of(self._store, rank).read_text()

    def _collect(self, n: int, timeout: float, grace: float) -> dict[int, tuple[bool, Any]]:
        """Collect the answers until the deadline."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {self._pipes[rank]: rank for rank in range(n)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    self._group_counts[rank], found = pipe.recv()
                    answers[rank] = pickle.loads(found)
                except (EOFError, ConnectionError):
                    deadline = min(deadline, time.monotonic() + grace)
                    continue
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + grace)
        return answers
