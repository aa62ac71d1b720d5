"""Handle exceptions that a program raises on one rank while other ranks may wait for it.

The rank publishes the exception: it writes a stop notice to the store of the process groups. Ranks that wait for it, in
an exchange of messages or in a collective (`watch.py`), read the notice and raise, without waiting until the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import is_checkpoint_stop, is_lost_connection
from sp_compile.passes.graph.provenance import ExchangeSource, failed_exchange, failed_line

from .channel import ControlChannel, publish_stop
from .message import Message, StopNotice
from .watch import abort_groups, find_stop_notice, involved_channels

MAX_EXCEPTION_WIDTH = 500  # characters of an exception that other ranks repeat
_AGREED_ATTRIBUTE = "_sp_compile_known"  # attribute of exceptions that the other ranks raise as well, or have received


@contextmanager
def mark_agreed() -> Iterator[None]:
    """Mark an SpError raised in the context as raised by all ranks, so that it is not published again."""
    try:
        yield
    except SpError as error:
        setattr(error, _AGREED_ATTRIBUTE, True)
        raise


@contextmanager
def announce_failures(
    channel: ControlChannel | None, mine: Message, places: Mapping[str, ExchangeSource], lines: Mapping[str, str]
) -> Iterator[None]:
    """Publish exceptions raised in the context; raise SpError in place of a lost connection to a rank.

    The context is one call of a program or its backward. A lost connection means that a rank has raised, or is lost.

    Args:
        channel: The channel of the group, or None.
        mine: The message of this rank about its operation.
        places: The user's lines of the program's collectives, from `exchange_sources`.
        lines: The user's lines of its nodes, from `node_lines`.

    Raises:
        SpError: In place of the error of a lost connection, if another rank has raised (SP661), or is lost (SP621).
    """
    start = time.monotonic()
    try:
        yield
    except BaseException as error:
        # The other ranks raise the exception as well or have received it, or it is no failure: torch's checkpoint ends
        # a recomputation by one.
        is_known = hasattr(error, _AGREED_ATTRIBUTE) or is_checkpoint_stop(error)
        # An SpError of a broken channel is published by the function that breaks it.
        if channel is None or is_known or (channel.broken and isinstance(error, SpError)):
            raise
        if is_lost_connection(error):
            place, notice = failed_exchange(error, places), find_stop_notice()
            if notice is None:  # no rank has raised
                raise channel.fail_timeout(mine, time.monotonic() - start, error, place) from error
            group_error = channel.break_group(notice, f"{mine}, in {place}" if place else str(mine))
            abort_groups(notice)
            raise group_error from error
        # An exception of this rank itself.
        line = failed_line(error, lines) or failed_exchange(error, places)
        channel.raised = _publish_exception(error, str(mine), line)
        raise


def abort_if_connected(channel: ControlChannel | None, messages: Sequence[Message], mine: Message) -> None:
    """End the groups of a program after a rank has raised in it, if there is more than one group.

    Ranks of the other groups wait in the program for this rank. With one group no rank waits: all ranks have exchanged
    their messages, and can run the next call together.

    Args:
        channel: The channel of the group, or None.
        messages: Message of each rank of the group.
        mine: The message of this rank about its operation.
    """
    raised = [message.raised for message in messages if message.raised]
    if channel is not None and raised and len(involved_channels()) > 1:
        rank, text = raised[0]
        notice = StopNotice(rank, text, continues=False, exchanges={}, raised=True)
        channel.break_group(notice, str(mine))
        abort_groups(notice)


def _publish_exception(error: BaseException, operation: str, line: str) -> tuple[int, str]:
    """Publish that this rank has raised, and add the rank and the line to the text of the exception.

    The type of the exception does not change, since the user's code may catch it.

    Args:
        error: The exception.
        operation: Text of the operation of this rank.
        line: The user's line, or the inputs of the op; "" if unknown.

    Returns:
        The rank, and the text for other ranks.
    """
    setattr(error, _AGREED_ATTRIBUTE, True)  # so that no enclosing context publishes it again
    where = f"at {line}, when it {operation}" if line else f"when it {operation}"
    cause = f"{type(error).__name__}: {str(error)[:MAX_EXCEPTION_WIDTH]}".removesuffix(": ")
    # continues: this rank may take part in the next call, since the user's code may catch the exception.
    publish_stop(f"{cause}, {where}", continues=True, raised=True)
    own_line = f"rank {dist.get_rank()} raised this {where}"
    has_plain_text = type(error).__str__ is BaseException.__str__ and len(error.args) == 1
    if has_plain_text and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{own_line}",)
    else:  # a note is shown in tracebacks only, but is possible for every exception
        error.add_note(own_line)
    return dist.get_rank(), f"{cause}, {where}"
