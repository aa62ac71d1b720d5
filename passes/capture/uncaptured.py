"""Fall back to unsplit graphs that run on gathered inputs, with a warning.

As with any torch.compile backend that cannot compile a graph, the results are correct, and one warning has the reason.
An unsplit program computes the complete sequence on every rank. A CaptureError is an SpError that leads to this
decision (`UnsplitDecision`); other SpErrors are raised to the user.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sp_compile.lowering.base.errors import CaptureError, SpError, WriteError, failed_node_line, shorten_error
from sp_compile.lowering.base.warn import warn_once
from sp_compile.lowering.torch_compat import (
    GuardOnDataDependentSymNode,
    RestartAnalysis,
    ShortenTraceback,
    is_fallback_error,
)

log = logging.getLogger(__name__)

UNSPLIT_WARNING = (  # % (subject, reason)
    "%s runs unsplit on every rank, although it is compiled with backend='sp', which cannot split it: "
    "%s. fallback='error' raises an error instead"
)

NOT_TRACED_CAUSE = "torch cannot trace its forward or backward without the data"

raises_internal_errors = False  # True in tests: an unsplit program would have correct results in spite of the error


@contextmanager
def wrap_failures() -> Iterator[None]:
    """Convert unexpected exceptions of the lowering to CaptureError, so that the program runs unsplit.

    Sizes that depend on data are the user's (SP212); other exceptions are bugs of a pass (SP213).

    SpError, MemoryError, Dynamo's own errors, and torch's errors on which Dynamo falls back to eager are not converted.
    """
    try:
        yield
    except (SpError, RestartAnalysis, ShortenTraceback, MemoryError):
        raise
    except Exception as error:
        if is_fallback_error(error):
            raise
        line = failed_node_line(error)
        place = f", at {line}" if line else ""
        if isinstance(error, GuardOnDataDependentSymNode):
            raise CaptureError(
                "SP212", f"expected sizes that do not depend on data, got {error.cond}{place}."
            ) from error
        if raises_internal_errors:  # in tests
            raise
        raise CaptureError("SP213", f"internal error: {shorten_error(error).rstrip('.')}{place}.") from error


@dataclass(frozen=True)
class UnsplitDecision:
    """Decision that every rank runs a program as it was written."""

    reason: str  # for the report and the warning
    can_compile: bool = True  # False for an in-place write that only eager code runs correctly


def decide_unsplit(error: Exception) -> UnsplitDecision | None:
    """Return the decision for a program that could not be split, or None for an error of the user.

    Args:
        error: The error of the capture, of the passes, or of torch for their result.
    """
    if isinstance(error, CaptureError):
        return UnsplitDecision(str(error), can_compile=not isinstance(error, WriteError))
    if is_fallback_error(error):  # torch.compile itself falls back to eager
        return UnsplitDecision(f"{NOT_TRACED_CAUSE} ({type(error).__name__}: {error}).")
    return None


def warn_unsplit(subject: str, reason: str) -> None:
    """Warn on rank 0 that a program runs unsplit, once for each program and reason.

    Args:
        subject: The program, as the subject of a sentence, such as "this graph".
        reason: The reason of the decision.
    """
    warn_once(log, UNSPLIT_WARNING, subject, reason.rstrip(". "))
