"""Handle exceptions that a program raises on one rank while other ranks may wait for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import is_lost_connection
from sp_compile.passes.graph.provenance import ExchangeSource, failed_exchange, failed_line

from .channel import ControlChannel, publish_stop
from .message import Message, StopNotice
from .watch import abort_groups, involved_groups, raised_rank

CAUSE = 500  # characters of an exception that other ranks repeat
_agreed_errors = "_sp_compile_known"  # attribute of exceptions that other ranks know of


@contextmanager
def mark_agreed() -> Iterator[None]:
    """Mark an SpError raised in the context as known to all ranks."""
    try:
        yield
    except SpError as error:
        setattr(error, _agreed_errors, True)
        raise


@contextmanager
def announce_failures(
    wire: ControlChannel | None, what: Message, places: Mapping[str, ExchangeSource], lines: Mapping[str, str]
) -> Iterator[None]:
    """Publish exceptions raised in the context, and raise SpError if a peer has raised or is lost.

    Args:
        wire: The channel of the group, or None.
        what: The operation of this rank.
        places: Collectives as `exchange_sources` returns them.
        lines: Lines of nodes as `node_lines` returns them.
    """
    begun = time.monotonic()
    try:
        yield
    except BaseException as error:
        if wire is None or hasattr(error, _agreed_errors) or (wire.broken and isinstance(error, SpError)):
            raise
        if is_lost_connection(error):
            place, found = failed_exchange(error, places), raised_rank()
            if found is None:
                raise wire.fail_timeout(what, time.monotonic() - begun, error, place) from error
            ended = wire.break_group(found, f"{what}, in {place}" if place else str(what))
            abort_groups(found)
            raise ended from error
        wire.raised = _publish_failure(error, str(what), failed_line(error, lines) or failed_exchange(error, places))
        raise


def abort_if_connected(wire: ControlChannel | None, everyone: Sequence[Message], doing: Message) -> None:
    """End the groups of a program after a rank has raised in it, if there is more than one group.

    Ranks of a single group are in step again at the next call: see `GuardedProgram`.
    """
    raised = [one.raised for one in everyone if one.raised]
    if wire is not None and raised and len(involved_groups()) > 1:
        rank, words = raised[0]
        found = StopNotice(rank, words, False, {}, raised=True)
        wire.break_group(found, str(doing))
        abort_groups(found)


def _publish_failure(error: BaseException, doing: str, line: str) -> tuple[int, str]:
    """Publish that this rank has raised, and add the rank and the line to the exception.

    The type of the exception does not change.

    Args:
        error: The exception.
        doing: Text of the operation of this rank.
        line: The user's line, or the inputs of the op; "" if unknown.

    Returns:
        The rank, and the text for other ranks.
    """
    setattr(error, _agreed_errors, True)
    where = f"at {line}, when it {doing}" if line else f"when it {doing}"
    cause = f"{type(error).__name__}: {str(error)[:CAUSE]}".removesuffix(": ")
    publish_stop(f"{cause}, {where}", goes_on=True, raised=True)
    own = f"rank {dist.get_rank()} raised this {where}"
    is_plain = type(error).__str__ is BaseException.__str__ and len(error.args) == 1
    if is_plain and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{own}",)
    else:
        error.add_note(own)
    return dist.get_rank(), f"{cause}, {where}"
