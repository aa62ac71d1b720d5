"""Let one of several processes compile a graph, while the others wait for its result in torch's cache on disk.

The ranks of a sequence have the same graph. Without this module all of them miss the cache at the same time, and each
compiles the graph. Processes share a lock only if they share the cache folder and their graphs have the same text,
inputs and devices, because torch's key contains the same facts.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

WAIT_LIMIT = 600.0  # seconds after which a process compiles the graph itself
LOCK_POLL_INTERVAL = 0.05  # seconds between two attempts to take the lock
FINISHED = "finished"  # content of the lock file after a compilation, whether it succeeded or failed


@contextlib.contextmanager
def compile_once(gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: str) -> Iterator[None]:
    """Run the compilation in the body in one process first; others with the same arguments wait, then load.

    A process does not wait if the graph was compiled before, if caches are disabled, or if the folder has no locks. The
    operating system releases the lock of a process that ends, so that the next one compiles. The body must not exchange
    messages with other ranks. The backward is compiled in the body, too, because torch's cache contains both.

    Args:
        gm: The graph.
        inputs: Example inputs.
        settings: All else on which the result depends.
    """
    import torch._functorch.config as functorch_config

    if not _has_caches():
        yield
        return
    with_backward = functorch_config.patch(force_non_lazy_backward_lowering=True)
    with wait_for_turn(_lock_path(gm, inputs, settings)), with_backward:
        yield


def _has_caches() -> bool:
    """Return True if torch stores graphs compiled by Inductor on disk."""
    import torch._functorch.config as functorch_config
    from torch._inductor import config

    enabled = config.fx_graph_cache and functorch_config.enable_autograd_cache
    return bool(enabled and not config.force_disable_caches)


def _lock_path(gm: torch.fx.GraphModule, inputs: Sequence[Any], settings: str) -> Path:
    """Return the path of the lock of a graph, in torch's cache folder."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    leaves = [(str(x.device), str(x.dtype), str(x.shape)) if isinstance(x, torch.Tensor) else str(x) for x in inputs]
    text = "\n".join([torch.__version__, settings, str(leaves), str(torch.is_grad_enabled()), gm.code])
    return Path(cache_dir()) / "sp_compile" / hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def wait_for_turn(path: Path, limit: float = WAIT_LIMIT) -> Iterator[None]:
    """Hold the lock in the body until it ends; do not hold it if the graph was compiled, or after `limit` seconds."""
    with contextlib.ExitStack() as stack:
        file: IO[str] | None = None
        with contextlib.suppress(OSError, ImportError):  # a read-only folder, or a system without flock
            path.parent.mkdir(parents=True, exist_ok=True)
            opened = stack.enter_context(path.open("a+"))
            file = opened if _take_lock(opened, limit) else None
        try:
            yield
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.write(FINISHED)
                    file.flush()


def _take_lock(file: IO[str], limit: float) -> bool:
    """Wait for the lock of an open file; closing the file releases it.

    Returns:
        True if this process has the lock and must compile; False if another one has finished, or after `limit` seconds.
    """
    import fcntl

    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        file.seek(0)
        if file.read():
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_POLL_INTERVAL)
            continue
        file.seek(0)
        if not file.read():  # it may have finished between the two calls
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
    return False
