"""What a rank does with an exception that its program raises: other ranks may wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from sp_compile.errors import SpError

from .wire import STOPPED, stop

CAUSE = 500  # characters of an exception that other ranks repeat
_KNOWN = "_sp_compile_known"


def is_known(error: BaseException) -> bool:
    """Do other ranks know of it?"""
    return hasattr(error, _KNOWN)


@contextmanager
def agreeing() -> Iterator[None]:
    """An SpError that ranks agree on inside is known to all of them."""
    try:
        yield
    except SpError as error:
        setattr(error, _KNOWN, True)
        raise


def announce(error: BaseException, doing: str, line: str) -> None:
    """Leave in the store that this rank has raised, and name the rank and the line in the exception, whose type stays.

    doing: what the rank did, as a message has it. line: the user's; "" if nobody knows.
    """
    setattr(error, _KNOWN, True)
    where = f"at {line}, when it {doing}" if line else f"when it {doing}"
    cause = f"{type(error).__name__}: {str(error)[:CAUSE]}".removesuffix(": ")
    stop(f"{cause}, {where}"[:STOPPED], goes_on=True, raised=True)
    where = f"rank {dist.get_rank()} raised this {where}"
    if len(error.args) == 1 and str(error) == error.args[0]:
        error.args = (f"{error.args[0]}\n{where}",)
    else:
        error.add_note(where)
