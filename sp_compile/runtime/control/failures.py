"""What a rank does with an exception that its program raises: other ranks may wait for it, or have made it wait."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import is_lost
from sp_compile.passes.graph.provenance import Place, exchange_of, line_of

from .channel import STOPPED, Wire, stop
from .message import Message, Stop
from .watch import end_groups, involved, raised_meanwhile

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
            place, found = exchange_of(error, places), raised_meanwhile()
            if found is None:
                raise wire.lost(what, time.monotonic() - begun, error, place) from error
            ended = wire.end(found, f"{what}, in {place}" if place else str(what))
            end_groups(found)
            raise ended from error
        wire.raised = _announce(error, str(what), line_of(error, lines) or exchange_of(error, places))
        raise


def end_if_connected(wire: Wire | None, everyone: Sequence[Message], doing: Message) -> None:
    """End the groups of a program that ranks are out of step in, as one has raised, if they are more than one.

    Ranks of a single group are in step again at the next call: see `CheckedProgram`.
    """
    raised = [one.raised for one in everyone if one.raised]
    if wire is not None and raised and len(involved()) > 1:
        rank, words = raised[0]
        found = Stop(rank, words, False, {}, raised=True)
        wire.end(found, str(doing))
        end_groups(found)


def _announce(error: BaseException, doing: str, line: str) -> tuple[int, str]:
    """Leave in the store that this rank has raised, and name the rank and the line in the exception, whose type stays.

    Returns the rank, and what others are to know of it.
    doing: what the rank did, as a message has it. line: the user's, or what the op works on; "" if that is not known.
    """
    setattr(error, _KNOWN, True)
    where = f"at {line}, when it {doing}" if line else f"when it {doing}"
    cause = f"{type(error).__name__}: {str(error)[:CAUSE]}".removesuffix(": ")
    stop(f"{cause}, {where}"[:STOPPED], goes_on=True, raised=True)
    own = f"rank {dist.get_rank()} raised this {where}"
    is_plain = type(error).__str__ is BaseException.__str__ and len(error.args) == 1
    if is_plain and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{own}",)
    else:
        error.add_note(own)
    return dist.get_rank(), f"{cause}, {where}"
