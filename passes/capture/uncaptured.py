"""Graphs that run as they were written, whole on every rank: which errors allow it, and what the user is told.

As torch.compile alone does where a backend cannot compile a graph: the results are right, and one warning says why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from sp_compile.lowering.base.errors import CaptureError, SpError
from sp_compile.lowering.torch_compat import RestartAnalysis, ShortenTraceback, is_fallback_error

log = logging.getLogger(__name__)

UNSPLIT_WARNING = (
    "%s runs whole on every rank, as it was written, though it is compiled with backend='sp', which cannot split it: "
    "%s. fallback='error' makes this an error"
)

NOT_TRACED_CAUSE = "torch cannot trace it, forward or backward, without the data"

_warned_unsplit: set[tuple[str, str]] = set()


@contextmanager
def wrap_failures() -> Iterator[None]:
    """Make any failure of capture or of a pass, other than an SpError or Dynamo's own, a CaptureError."""
    try:
        yield
    except (SpError, RestartAnalysis, ShortenTraceback, MemoryError):
        raise
    except Exception as error:
        if is_fallback_error(error):
            raise
        raise CaptureError("SP213", f"{type(error).__name__}: {str(error).rstrip('.')}.") from error


def unsplit_reason(error: Exception) -> str:
    """Why a program runs as it was written after this error; "" if the error stays one."""
    if isinstance(error, CaptureError):
        return str(error)
    return f"{NOT_TRACED_CAUSE} ({type(error).__name__}: {error})." if is_fallback_error(error) else ""


def warn_unsplit(subject: str, why: str) -> None:
    """Warn on rank 0, once for each program and reason."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank == 0 and (subject, why) not in _warned_unsplit:
        _warned_unsplit.add((subject, why))
        log.warning(UNSPLIT_WARNING, subject, why.rstrip(". "))
