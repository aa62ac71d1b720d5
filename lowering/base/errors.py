"""Define the package's exceptions, and find the user's source lines for their messages.

A message names the line of the model that an FX node was traced from: `source_line` reads it from the stack trace that
Dynamo or make_fx stores in `node.meta["stack_trace"]`, as "folder/file.py:12: y = x.cumsum(1)". A stack trace is a text
whose first frame (one call: file, line number, function) is the outermost and whose last frame is the innermost call.
"""

import difflib
import re
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Self

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import ShortenTraceback

from .error_codes import ERRORS

MAX_ERROR_WIDTH = 300  # characters of a line of an error of a compiler
UNKNOWN_LINE = "unknown source line"
PARAMETERS_LINE = "the parameters"  # in place of the line of an all-reduce of parameter gradients
RESULTS_LINE = "the results"  # in place of the line of a gather of results
TANGENTS_LINE = f"gradients of {RESULTS_LINE}"  # in place of the line of gradients that the caller passes

# A frame of a stack trace: file, line number, function, and the line of code that follows unless it is another frame.
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (.*)\n?((?:(?!\s*File ").*\n?)?)', re.MULTILINE)


class SpError(ValueError):
    """Base error of the package: a code, a cause and a fix.

    Args:
        code: A key of `error_codes.ERRORS`, such as "SP101".
        cause: The expected and the found value, as sentences that start with the option or argument.
        fix: The remedy, if it depends on the case. Defaults to the registry's fix for the code.
    """

    def __init__(self, code: str, cause: str, fix: str | None = None) -> None:
        self.code, self.cause = code, cause
        self.fix = ERRORS[code].fix if fix is None else fix
        separator = "\n" if "\n" in cause else " "
        super().__init__(f"{code}: {cause}{separator}{self.fix}")

    def with_context(self, text: str) -> Self:
        """Return a copy of the error with text inserted before the cause.

        A caller adds the place of the error, such as the name of a rule, if the raising function cannot name it.

        Args:
            text: Text that is prepended to the cause.

        Returns:
            An error of the same class, code and fix.
        """
        return type(self)(self.code, f"{text}{self.cause}", self.fix)

    def __reduce__(self) -> tuple[Any, ...]:  # errors of ranks are pickled
        return type(self), (self.code, self.cause, self.fix)


class CaptureError(SpError):
    """Failure to capture a graph. torch.compile without this backend may still compile it."""


class WriteError(CaptureError):
    """In-place write that depends on aliasing or autograd and is only safe in eager mode."""


class RemoteError(SpError):
    """Failure of another rank, as reported by that rank. The rank that raises it does not report it again."""


class RankMismatchError(SpError, ShortenTraceback):
    """Disagreement between ranks of a group on their next step, or absence of some of the ranks.

    Raised while Dynamo compiles. Dynamo wraps other errors of a backend, but propagates this one unchanged, because it
    is a `ShortenTraceback`, torch's base class of such errors. At the next call Dynamo compiles again.
    """

    def __init__(self, code: str, cause: str, fix: str | None = None) -> None:
        SpError.__init__(self, code, cause, fix)
        ShortenTraceback.__init__(self, str(self), first_useful_frame=None)


def did_you_mean(name: Any, known: Iterable[str], count: int = 1) -> str:
    """Return a hint at the closest known names, or "" if none is close.

    Args:
        name: The value that the user passed.
        known: The valid names.
        count: The largest number of names in the hint.

    Returns:
        A hint such as " (did you mean 'ring'?)".
    """
    close = difflib.get_close_matches(str(name), known, n=count)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


def node_line(node: Node) -> str:
    """Return the user's source line of a node: "file.py:12: code", or "unknown source line".

    The line is the innermost frame of the node's stack trace outside torch and this package.
    """
    return source_line(stack_trace(node))


def describe_node(node: Node) -> str:
    """Return the node's name, its op and the user's source line, as messages name a node."""
    return f"{node.name} ({node.target}) at {node_line(node)}"


def stack_trace(node: Node) -> str:
    """Return the stack trace of the call that created a node, or "" if none was recorded."""
    return node.meta.get("stack_trace") or ""


def first_frame(trace: str, code: CodeType, name: str) -> str:
    """Return the outermost frame of a function in a stack trace, as "Model at folder/file.py:12".

    Messages name a compiled program by this frame of one of its nodes: the call of the function that Dynamo compiled.

    Args:
        trace: The stack trace of a node.
        code: The code of the compiled function.
        name: Text in place of the function's name, such as the class of the model.

    Returns:
        "" if the stack trace has no such frame.
    """
    for file, line, function, _ in _FRAME.findall(trace):
        if file == code.co_filename and _is_function(function, code.co_name):
            return f"{name} at {_short_path(file)}:{line}"
    return ""


def first_called_frame(traces: list[str]) -> str:
    """Return the outermost frame of a program outside of torch and this package, as "forward at folder/file.py:12".

    Of several stack traces, the one with the fewest frames before such a frame is read. Traces without such a frame,
    as of ops that functions of this package compute themselves, are read only if there are no others.

    Args:
        traces: The stack traces of the nodes of a program.

    Returns:
        "" if no stack trace has a frame. If all frames are of torch or of this package, the first one of a trace.
    """
    calls = [frames for frames in map(_FRAME.findall, traces) if frames]
    if not calls:
        return ""
    reaching = [frames for frames in calls if _count_foreign(frames) < len(frames)]
    frames = min(reaching or calls, key=_count_foreign)
    file, line, function, _ = frames[_count_foreign(frames) % len(frames)]  # the first one if all are foreign
    return f"{function} at {_short_path(file)}:{line}"


def _count_foreign(frames: list[tuple[str, ...]]) -> int:
    """Return the number of frames before the first one outside of torch and this package."""
    return next((i for i, (file, *_) in enumerate(frames) if not _is_foreign(file)), len(frames))


def _is_function(function: str, name: str) -> bool:
    """Return True if the function of a frame is `name`, or Dynamo's continuation of it after a graph break."""
    return function == name or function.startswith(f"torch_dynamo_resume_in_{name}_at_")


def source_line(trace: str) -> str:
    """Return the innermost frame of a stack trace outside torch and this package: "file.py:12: code".

    Returns "unknown source line" if all frames are of torch or of this package.
    """
    for file, line, _, code in reversed(_FRAME.findall(trace)):
        if not _is_foreign(file):
            return f"{_short_path(file)}:{line}: {code.strip()}".rstrip(": ")  # no colon without code
    return UNKNOWN_LINE


def failed_node_line(error: BaseException) -> str:
    """Return the user's line of the node that was processed when an error was raised, or "" if it is unknown.

    A function that processes a node has it in a local variable. The traceback of the error, then that of each of its
    causes, is searched for such a variable, from the innermost frame to the outermost.
    """
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in reversed([*traceback.walk_tb(cause.__traceback__)]):
            nodes = [value for value in frame.f_locals.values() if isinstance(value, Node)]
            lines = [line for line in map(node_line, nodes) if line != UNKNOWN_LINE]
            if lines:
                return lines[0]
        cause = cause.__cause__ or cause.__context__
    return ""


def shorten_error(error: BaseException) -> str:
    """Return an error in at most two lines: its type and first line, and the next line that contains "error:".

    A compiler's message often starts with a general line and contains "error: ..." below.
    """
    first, *others = [line for line in str(error).splitlines() if line.strip()] or [""]
    details = next((line.strip() for line in others if "error:" in line.lower()), "")
    text = f"{type(error).__name__}: {first.strip()[:MAX_ERROR_WIDTH]}".removesuffix(": ")  # no colon without a message
    return f"{text}\n{details[:MAX_ERROR_WIDTH]}" if details else text


def user_line() -> str:
    """Return the innermost user line of the running call, in the form of `node_line`, where there is no node."""
    return source_line("".join(traceback.format_stack()))


def _short_path(file: str) -> Path:
    """Return the name of a file with its folder, as messages show it: equal for every working directory."""
    return Path(*Path(file).parts[-2:])


@cache
def _is_foreign(file: str) -> bool:
    """Return True for a file of torch or of this package."""
    return any(Path(file).is_relative_to(folder) for folder in _foreign_folders())


@cache
def _foreign_folders() -> tuple[Path, ...]:
    """Return the folders of torch and of this package, whose frames are not the user's."""
    package = Path(__file__).parents[2]  # sp_compile, whose links passes and lowering are not resolved here
    return Path(torch.__file__).parent, package
