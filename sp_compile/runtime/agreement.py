"""Exchange messages between ranks before an operation, and describe mismatches.

One exchange is used in all situations: before an eager call, during compilation, before and after a compiled program,
and where groups are declared. Ranks that are about to run different operations therefore meet and all raise.

    all_gather_messages(ranks, Message("calls", "forward", 7, inputs={"ids": InputRecord("(2, 4096)"), ...}))
    all_gather_object(ranks, "declares", "groups", mine)      # the value of every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isnan
from typing import Any

import torch

from sp_compile.lowering.base.errors import RemoteError, SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.checksums import SUMMARY_PREFIX
from sp_compile.runtime.control.channel import channel_of, gather_integers, publish_stop
from sp_compile.runtime.control.message import COMPILE_VERB, READ_VERB, STOP_VERB, Message

TOLERANCE_RATIO = 3e-3  # relative to the first value, the magnitude; accounts for half precision
MAX_SHOWN_FIELDS = 8  # fields that differ, in an error message
MAX_FIELD_WIDTH = 1000  # characters of a value


def all_gather_messages(ranks: Ranks, mine: Message) -> list[Message] | None:
    """Return the message of every rank, in the order of the ranks.

    Returns None if all messages are equal, no answer is expected and no rank has failed.

    Raises:
        SpError: As `ControlChannel.gather`.
    """
    wire = channel_of(ranks)
    if wire is not None and mine.verb != READ_VERB:
        wire.check_thread()
    if wire is not None and wire.raised:
        mine, wire.raised = replace(mine, raised=wire.raised), None
    headers = gather_integers(mine.header, ranks, torch.int64, mine)
    same = all(header == headers[0] for header in headers)
    if same and mine.error is None and not mine.expects_answer:
        if wire is not None:
            wire.last_fields = [str(mine)] * ranks.n
        return None
    longest = max(length for (length,) in gather_integers([len(mine.body)], ranks, torch.int64, mine))
    bodies = gather_integers(list(mine.body.ljust(longest)), ranks, torch.uint8, mine)
    everyone = [Message.read(bytes(one)) for one in bodies]
    if wire is not None:
        wire.last_fields = [str(one) if one.error is None else f"{one} and failed" for one in everyone]
        if describe_operation_mismatch(everyone):
            wire.reset_counters(everyone)
    return everyone


def require_agreement(ranks: Ranks, mine: Message, mismatch: SpError | None = None) -> list[Message]:
    """Return the message of every rank, or [] if all are equal and no answer is expected.

    Args:
        ranks: The ranks that run the operation.
        mine: The operation of this rank.
        mismatch: Error of ranks whose fields or notes differ, without the differences; None if they may differ.

    Raises:
        SpError: On every rank, if a rank has failed, or the ranks run different operations or have different fields.
    """
    everyone = all_gather_messages(ranks, mine) or []
    if problem := find_mismatch(everyone, mismatch):
        raise problem
    return everyone


def all_gather_object(ranks: Ranks, doing: str, subject: str, mine: Any) -> list[Any]:
    """Return the value of every rank, in the order of the ranks.

    Raises:
        SpError: As `require_agreement`.
    """
    return [one.answer for one in require_agreement(ranks, Message(doing, subject, expects_answer=True, answer=mine))]


@contextmanager
def publish_failure() -> Iterator[None]:
    """Publish an SpError that this rank raises in the context, before it meets the others."""
    try:
        yield
    except SpError as error:
        publish_stop(str(error))
        raise


def make_exchange(ranks: Ranks, saying: Message) -> Callable[[Exception | None, Any], list[Any]]:
    """Return a function that exchanges values, and raises the same SpError on all ranks if one has failed."""

    def meet(error: Exception | None, value: Any) -> list[Any]:
        """Return the values of all ranks; raise the error of this or another rank, on every rank."""
        mine = replace(saying, error=wrap_error(error), expects_answer=value is not None, answer=value)
        try:
            return [one.answer for one in require_agreement(ranks, mine)]
        except SpError as problem:
            raise problem from error

    return meet


def find_mismatch(everyone: Sequence[Message], mismatch: SpError | None = None) -> SpError | None:
    """Return the error of ranks that failed, run different operations or have different fields, or None.

    Args:
        everyone: Message of each rank.
        mismatch: As in `require_agreement`.
    """
    if problem := failure([one.error for one in everyone]) or describe_operation_mismatch(everyone):
        return problem
    if mismatch is None:
        return None
    differ = describe_field_mismatch([{"": one.note, **one.fields} for one in everyone], mismatch.cause)
    return SpError(mismatch.code, differ, mismatch.fix) if differ else None


def describe_operation_mismatch(everyone: Sequence[Message]) -> SpError | None:
    """Return the error of ranks that are about to run different operations, or None."""
    if len({(one.verb, one.subject, one.model, one.number) for one in everyone}) <= 1:
        return None
    return _first_difference(everyone).with_context(describe_raised(everyone))


def describe_raised(everyone: Sequence[Message]) -> str:
    """Return lines with the exceptions of ranks since the last exchange, or "" if there are none."""
    return "".join(f"rank {one.raised[0]} raised {one.raised[1]}\n" for one in everyone if one.raised)


def _first_difference(everyone: Sequence[Message]) -> SpError:
    whole = [f"{one}: {one.note}" if one.note else str(one) for one in everyone]
    each = "\n".join(f"  rank {rank} {one}" for rank, one in enumerate(whole))
    n, gone = len(everyone), [rank for rank, one in enumerate(everyone) if one.verb == STOP_VERB.verb]
    alone = [rank for rank, one in enumerate(everyone) if one.verb == COMPILE_VERB]
    if gone:
        cause = f"rank {_format_ranks(gone)} of {n} does not take part in this call, as another of its groups differs."
        return SpError("SP603", cause)
    if alone and len(alone) < n:
        ranks = f"rank {_format_ranks(alone)} of {n}"
        cause = f"{ranks} compiles the program again for this call and the others do not:\n{each}"
        return SpError("SP602", cause)
    readers = [rank for rank, one in enumerate(everyone) if one.verb == READ_VERB]
    if readers and len(readers) < n:
        return SpError(
            "SP604", f"rank {_format_ranks(readers)} of {n} reads a value in shards and the others do not:\n{each}"
        )
    if readers:
        return SpError("SP604", f"the {n} ranks of this group read different values in shards:\n{each}")
    cause = f"the {n} ranks of this group are about to do different things:\n{each}"
    new = [rank for rank, one in enumerate(everyone) if one.number == 1]
    if 0 < len(new) < n and len({(one.verb, one.subject) for one in everyone}) == 1:
        return SpError("SP605", f"{cause}\nrank {_format_ranks(new)} of {n} calls it with new tensors for weights.")
    return SpError("SP601", cause)


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def failure(errors: Sequence[SpError | None], ranks: Sequence[int] = ()) -> SpError | None:
    """Return the first of the errors, with the ranks and the other errors, or None."""
    failed: dict[str, list[int]] = {}
    for rank, error in zip(ranks or range(len(errors)), errors):
        if error is not None:
            failed.setdefault(str(error), []).append(rank)
    first = next((error for error in errors if error is not None), None)
    if first is None:
        return None
    (who, *_), (_, *others) = failed.values(), failed.items()
    rest = "".join(f"\nrank {_format_ranks(ranks)}: {text}" for text, ranks in others)
    return SpError(first.code, f"rank {_format_ranks(who)}: {first.cause}{rest}", first.fix)


def describe_field_mismatch(everyone: Sequence[Mapping[str, str]], what: str) -> str:
    """Return the cause of an error if values that all ranks have differ, otherwise ""."""
    if not everyone:
        return ""
    names = [name for name in everyone[0] if all(name in one for one in everyone)]
    names = [name for name in names if not all(is_close(everyone[0][name], one[name]) for one in everyone)]
    return format_mismatch(what, format_rank_rows(everyone, names)) if names else ""


def format_rank_rows(everyone: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """Return a row of each rank with the first of these fields and the number of remaining ones."""
    shown, more = (
        names[:MAX_SHOWN_FIELDS],
        f" and {len(names) - MAX_SHOWN_FIELDS} more" if len(names) > MAX_SHOWN_FIELDS else "",
    )
    each = [
        ", ".join(f"{name} {one.get(name, 'missing')[:MAX_FIELD_WIDTH]}".strip() for name in shown) for one in everyone
    ]
    return [row + more for row in each]


def format_mismatch(what: str, rows: Sequence[str], heading: str = "What differs") -> str:
    """Return the cause of an error with a row of each rank."""
    each = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))
    return f"{what}. {heading}:\n{each}"


def is_close(a: str, b: str) -> bool:
    """Return True if two field values are equal, or are summaries within the tolerance."""
    if a == b or not (a.startswith(SUMMARY_PREFIX) and b.startswith(SUMMARY_PREFIX)):
        return a == b
    first, second = ([float(x) for x in one.removeprefix(SUMMARY_PREFIX).split()] for one in (a, b))
    return all(
        x == y or (isnan(x) and isnan(y)) or abs(x - y) <= TOLERANCE_RATIO * first[0] for x, y in zip(first, second)
    )


def wrap_error(error: Exception | None) -> SpError | None:
    """Return the error as an SpError."""
    if error is None or isinstance(error, SpError):
        return error
    return SpError("SP608", f"{type(error).__name__}: {error}.")


def not_compiled(error: Exception | None) -> SpError | None:
    """Return the compilation error that a rank sends; None for an error received from another rank."""
    if error is None or isinstance(error, RemoteError):
        return None
    found = error if isinstance(error, SpError) else SpError("SP607", f"{type(error).__name__}: {error}.")
    return found.with_context("the model could not be compiled: ")
