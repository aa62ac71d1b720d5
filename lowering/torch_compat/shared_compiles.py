"""Compile a graph with Inductor in one process of a host, while other processes wait and load the result.

The ranks of a program compile equal graphs. Inductor stores each compiled graph on disk, but all ranks start at the
same time, so that each would compile it. Here the first process that misses a graph in the cache locks a file named
after its key, and compiles it. The others wait for the lock and look the graph up again. No messages are exchanged:
processes without a common cache directory, or with another graph, have no lock in common and do not wait.

A process waits for the first one only. If that one fails, ends or stores nothing, all waiting processes compile at the
same time. A process that compiles never waits for another, so there is no deadlock.

torch has two such caches. Inductor's has one entry for a forward and one for its backward. AOTAutograd's has one for
both, without which a process traces and partitions the joint graph. It is stored after the backward, which torch
compiles when it first runs: a process that others may wait for compiles it with the forward.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

try:
    import fcntl
except ImportError:  # a system without file locks, on which each process compiles by itself
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

WAIT_LIMIT = 1800.0  # seconds after which a process stops waiting for another, and compiles by itself
LOCK_INTERVAL = 0.1  # seconds between two attempts to lock a file

CacheAnswer = tuple[Any, dict[str, Any]]  # a graph of the cache, or None, and facts about the lookup


class _ThreadLocks(threading.local):
    """The locks of the compilations that run in this thread; None if none runs."""

    held: contextlib.ExitStack | None = None  # of a graph of Inductor
    held_for_both: contextlib.ExitStack | None = None  # of a joint graph of AOTAutograd


_thread = _ThreadLocks()
_num_held = [0]  # locks that this process holds, in a list so that a function can change it


def compile_in_one_process(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's function that compiles one graph, with a lock between a miss in its cache and the result.

    Args:
        compile_graph: The function; its first lookup of a graph in the cache is that of the graph it compiles.
    """
    _lock_misses()

    @wraps(compile_graph)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Compile a graph, and release its lock at the end or after an error."""
        outer = _thread.held
        with contextlib.ExitStack() as _thread.held:
            try:
                return compile_graph(*args, **kwargs)
            finally:
                _thread.held = outer

    return run


def _lock_misses() -> None:
    """Make Inductor's lookups in its cache wait for another process that compiles the same graph."""
    from torch._inductor.codecache import FxGraphCache

    lookup = getattr(FxGraphCache, "load_with_key", None)
    if lookup is None or hasattr(lookup, "__wrapped__"):  # another version of torch, or by an earlier call
        return

    @wraps(lookup)
    def wait_after_miss(key: str, *args: Any, **kwargs: Any) -> CacheAnswer:
        """Look a graph up; after a miss, lock its key or wait for the process that has locked it."""
        found = lookup(key, *args, **kwargs)
        held = _thread.held
        if found[0] is not None or held is None or not _can_wait():
            return found
        if _lock_or_wait(key, held):
            held.close()  # all that have waited load the result at the same time, or compile if there is none
            return lookup(key, *args, **kwargs)
        return lookup(key, *args, **kwargs) if _is_stored(key) else found  # stored since the first lookup?

    FxGraphCache.load_with_key = staticmethod(wait_after_miss)


@contextlib.contextmanager
def trace_in_one_process() -> Iterator[None]:
    """Let AOTAutograd trace and compile a graph in the block, with a lock from a miss in its cache to the end."""
    if not _has_neighbors():
        yield
        return
    _lock_joint_misses()
    outer = _thread.held_for_both
    with contextlib.ExitStack() as _thread.held_for_both:
        try:
            yield
        finally:
            _thread.held_for_both = outer


def _has_neighbors() -> bool:
    """Return True if other ranks may run on this host, and torch does not trace the backward again when it runs."""
    if not (dist.is_available() and dist.is_initialized()) or os.environ.get("LOCAL_WORLD_SIZE") == "1":
        return False
    return dist.get_world_size() > 1 and not torch._dynamo.compiled_autograd.compiled_autograd_enabled


def _lock_joint_misses() -> None:
    """Make lookups in AOTAutograd's cache wait for another process that traces and compiles the same graph."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    lookup = getattr(AOTAutogradCache, "try_load", None)
    if lookup is None or hasattr(lookup, "__wrapped__"):  # another version of torch, or by an earlier call
        return

    @wraps(lookup)
    def wait_after_miss(*args: Any, **kwargs: Any) -> Any:
        """Look a program up; after a miss, lock its key or wait for the process that has locked it.

        Without a key, as for a graph whose passes exchange messages, nothing is locked.
        """
        found, held = lookup(*args, **kwargs), _thread.held_for_both
        key = _missed_key(found)
        if key is None or held is None or not _can_wait():
            return found
        if _lock_or_wait(key, held):
            held.close()
            return lookup(*args, **kwargs)
        if os.path.isdir(AOTAutogradCache._get_tmp_dir_for_key(key)):  # stored since the first lookup?
            found = lookup(*args, **kwargs)
        if _missed_key(found) is None:
            return found
        program, config = found
        return program, dataclasses.replace(config, force_non_lazy_backward_lowering=True)

    AOTAutogradCache.try_load = staticmethod(wait_after_miss)


def _missed_key(found: Any) -> str | None:
    """Return the key under which AOTAutograd stores a program that its cache does not have; None if it has none.

    Args:
        found: The result of a lookup: a program or None, and AOTAutograd's settings. None for other versions of torch.
    """
    if not isinstance(found, tuple) or len(found) != 2 or found[0] is not None:
        return None
    return getattr(getattr(found[1], "cache_info", None), "cache_key", None)


def _can_wait() -> bool:
    """Return True if a miss in the cache may wait for another process.

    False without a cache on disk, in a process that holds a lock, and if Inductor exchanges messages with the other
    ranks while it compiles: these would wait for a rank that waits for them.
    """
    from torch._inductor import config

    overlap = getattr(config, "aten_distributed_optimizations", None)
    exchanges = (
        config.reorder_for_compute_comm_overlap,
        getattr(config, "distributed_max_autotune_gemm", False),
        getattr(overlap, "enable_overlap_scheduling", False),
        getattr(overlap, "spmd_check", False),
    )
    return fcntl is not None and config.fx_graph_cache and not _num_held[0] and not any(exchanges)


def _is_stored(key: str) -> bool:
    """Return True if the cache has results for a key, perhaps for other sizes of a dynamic shape."""
    from torch._inductor.codecache import FxGraphCache

    return os.path.isdir(FxGraphCache._get_tmp_dir_for_key(key))


def _lock_or_wait(key: str, held: contextlib.ExitStack) -> bool:
    """Lock the file of a key, after waiting for another process that has locked it.

    Args:
        key: The key of a graph in Inductor's cache.
        held: Receives the lock. Not if the file system has no locks, or after `WAIT_LIMIT`.

    Returns:
        True if the lock was not free at first.
    """
    from torch._inductor.codecache import get_lock_dir

    has_waited, limit = False, time.monotonic() + WAIT_LIMIT
    try:
        file = os.open(os.path.join(get_lock_dir(), f"{key}.sp.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        held.callback(os.close, file)
        while time.monotonic() < limit:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.enter_context(_count_as_held(file))
                break
            if not has_waited:
                log.info("another process compiles the graph %s, whose result is loaded", key)
            has_waited = True
            time.sleep(LOCK_INTERVAL)
    except OSError as error:  # a directory that is not writable, or a file system without locks
        log.info("the graph %s is compiled without a lock: %s", key, error)
    return has_waited


@contextlib.contextmanager
def _count_as_held(file: int) -> Iterator[None]:
    """Count a lock of this process in the block, and release it at the end, also for forked processes."""
    _num_held[0] += 1
    try:
        yield
    finally:
        _num_held[0] -= 1
        fcntl.flock(file, fcntl.LOCK_UN)
