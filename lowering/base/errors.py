"""The one error of the package, and how it names the user's code."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import ShortenTraceback

from .error_codes import ERRORS

UNKNOWN_LINE = "unknown source line"
PARAMETERS_LINE, RESULTS_LINE = "the parameters", "the results"
TANGENTS_LINE = f"gradients of {RESULTS_LINE}"
"""In a line's place: gradients of parameters, added up; what makes results whole; what the caller hands in for them."""

_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in .*\n((?:(?!\s*File ").*\n?)?)', re.MULTILINE)

_OUTERMOST_PATTERN = re.compile(r'^\s*File "([^"]+)", line (\d+), in (.*)$', re.MULTILINE)


class SpError(ValueError):
    """The one error of the package: a code, its cause and its fix.

    Args:
        code: A key of `error_codes.ERRORS`, such as "SP101".
        cause: What was expected and what was found, as sentences that begin with the option or the argument.
        fix: What to do, where it depends on the case. The registry's fix of the code by default.
    """

    def __init__(self, code: str, cause: str, fix: str | None = None) -> None:
        self.code, self.cause = code, cause
        self.fix = ERRORS[code].fix if fix is None else fix
        super().__init__(("\n" if "\n" in cause else " ").join((f"{code}: {cause}", self.fix)))

    def with_context(self, words: str) -> Self:
        """Return the same error whose cause begins with `words`."""
        return type(self)(self.code, f"{words}{self.cause}", self.fix)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.cause, self.fix)


class CaptureError(SpError):
    """A graph that cannot be captured. torch.compile alone may well compile it."""


class WriteError(CaptureError):
    """A write in place whose meaning depends on shared memory, or on autograd: only eager code is sure to be right."""


class RemoteError(SpError):
    """What failed on another rank, as that one told it."""


class RankMismatchError(SpError, ShortenTraceback):
    """This rank and others of its group are of two minds about what to do now, or some of these did not come.

    Raised while Dynamo compiles, which lets it out as it is and tries again at the next call.
    """

    def __init__(self, code: str, cause: str, fix: str | None = None) -> None:
        SpError.__init__(self, code, cause, fix)
        ShortenTraceback.__init__(self, str(self), first_useful_frame=None)


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """A hint at the known word that is the closest; "" if none is close."""
    close = difflib.get_close_matches(str(word), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def node_line(node: Node) -> str:
    """The user's source line behind `node`: "file.py:12: code", or "unknown source line".

    The innermost frame of the node's stack trace that lies neither in torch nor in this package.
    """
    return source_line(stack_trace(node))


def describe_node(node: Node) -> str:
    """Return the node's name, its op and the user's source line."""
    return f"{node.name} ({node.target}) at {node_line(node)}"


def stack_trace(node: Node) -> str:
    """The stack trace of the call that made the node; "" if nobody noted it."""
    return node.meta.get("stack_trace") or ""


def first_frame(trace: str) -> str:
    """The outermost frame of a stack trace: "forward at FILE:12"; "" of none."""
    found = _OUTERMOST_PATTERN.search(trace)
    return f"{found[3]} at {Path(*Path(found[1]).parts[-2:])}:{found[2]}" if found else ""


def source_line(trace: str) -> str:
    """As `node_line`, of a stack trace."""
    for file, line, code in reversed(_FRAME.findall(trace)):
        path = Path(file)
        if not any(path.is_relative_to(folder) for folder in _foreign_folders()):
            short = Path(*path.parts[-2:])  # enough to find it, the same wherever the program is started
            return f"{short}:{line}: {code.strip()}".rstrip(": ")
    return UNKNOWN_LINE


def user_line() -> str:
    """As `node_line`, of the call that is running."""
    return source_line("".join(traceback.format_stack()))


@cache
def _foreign_folders() -> tuple[Path, ...]:
    package = Path(__file__).parents[2]  # sp_compile, whose links passes and lowering are not resolved here
    return Path(torch.__file__).parent, package
