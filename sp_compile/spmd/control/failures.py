"""What a rank does with an exception that its program raises: other ranks may wait for it, or have made it wait."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

from sp_compile._compat import is_lost
from sp_compile.errors import SpError
from sp_compile.graph.places import Place, line_of, place_of

from .message import Message
from .watch import end_groups
from .wire import STOPPED, Wire, stop

CAUSE = 500  # characters of an exception that other ranks repeat
_KNOWN = "_sp_compile_known"  # an attribute of exceptions that other ranks know of


@contextmanager
def agreeing() -> Iterator[None]:
    """An SpError that is raised inside is known to all ranks, or announced."""
    try:
        yield
    except SpError as error:
        setattr(error, _KNOWN, True)
        raise


@contextmanager
def announcing(
    wire: Wire | None, what: Message, places: Mapping[str, Place], lines: Mapping[str, str]
) -> Iterator[None]:
    """Let other ranks know if this one raises inside, and raise SpError where it waits for one that has raised or gone.

    what: what this rank does. places, lines: as `places_of` and `node_lines` give them.
    """
    begun = time.monotonic()
    try:
        yield
    except BaseException as error:
        if wire is None or hasattr(error, _KNOWN) or (wire.broken and isinstance(error, SpError)):
            raise
        if is_lost(error):
            words = wire.lost(what, time.monotonic() - begun, error, place_of(error, places))
            if wire.ended is not None:
                end_groups(wire.ended)
            raise SpError(words) from error
        _announce(error, str(what), line_of(error, lines))
        raise


def _announce(error: BaseException, doing: str, line: str) -> None:
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
