"""Shorten the errors of compilers: the user's line and the cause, and a file with the rest.

Errors of Inductor contain operands, generated code or the output of a C++ compiler, often 60 lines. The complete text,
with all tracebacks, is written to a file of this rank in a folder that is the same for equal errors of all ranks.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from pathlib import Path

from sp_compile.lowering.base.errors import SpError, failed_node_line, shorten_error
from sp_compile.lowering.base.ranks import process_rank
from sp_compile.lowering.torch_compat import RestartAnalysis, is_inductor_error
from sp_compile.runtime.control.message import hash_text

MAX_SHORT_ERROR_LINES = 3  # lines of an error that is not shortened
VERBOSE_HINT = "TORCHDYNAMO_VERBOSE=1 shows the complete error"


def shorten_failure(error: Exception, subject: str) -> Exception:
    """Return the error of a compilation with the user's line, in a few lines; write the complete error to a file.

    An SpError and a MemoryError are returned unchanged, as is RestartAnalysis, by which Dynamo starts again. So is a
    short error of another compiler than Inductor, with the line as a note. TORCHDYNAMO_VERBOSE=1 disables the function.

    Args:
        error: The error.
        subject: The name of the program.
    """
    if isinstance(error, SpError | RestartAnalysis | MemoryError) or os.environ.get("TORCHDYNAMO_VERBOSE") == "1":
        return error
    line = failed_node_line(error)
    if not is_inductor_error(error) and str(error).count("\n") < MAX_SHORT_ERROR_LINES:
        if line:
            error.add_note(f"{subject}: compiling {line}")
        return error
    text = shorten_error(error)
    where = f"{subject}: compiling {line} failed" if line else f"{subject}: compiling the program failed"
    failure = SpError("SP243", f"{where}: {text.rstrip('.')}.", f"{_write_error(error, subject)}. {COMPARE_HINT}")
    failure.__suppress_context__ = True  # the traceback of `error` would be printed before it
    return failure


COMPARE_HINT = (
    "Look for the cause there, and compare with compiler='aot_eager', and with torch.compile without this backend."
)


def _write_error(error: Exception, subject: str) -> str:
    """Write the complete error to a file, and return a sentence about where it is, without a period."""
    owner = str(os.getuid()) if hasattr(os, "getuid") else ""  # users of a machine have different folders
    folder = Path(tempfile.gettempdir(), f"sp_compile_{hash_text(f'{owner} {subject} {shorten_error(error)}'):x}")
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
        (folder / f"rank{process_rank()}.txt").write_text("".join(traceback.format_exception(error)))
    except OSError:
        return VERBOSE_HINT
    return f"The complete error is in {folder}"
