"""Exchange messages between ranks before an operation, and describe mismatches.

One exchange, a comparison or an all-gather of messages, is used in all situations: before an eager call, during
compilation, before and after a compiled program, and where groups are declared. Ranks that are about to run different
operations therefore receive each other's message and all raise.

The messages are sent over a control channel, connections of the group that the model does not use. The operation
of a message is its verb, subject, model and number: CALL_VERB is a call of a compiled program, COMPILE_VERB a
compilation, and READ_VERB the gather of a sharded value that eager code reads. Its fields are values by name that must
be equal, its answer is a value that each rank sends to all. A mismatch is the SpError of ranks that do not agree.

A rank that cannot reach an exchange publishes a stop notice: it writes the reason to the store of the process groups.
Ranks that wait in an exchange read the notice there and raise, instead of waiting until the timeout.

    all_gather_messages(ranks, Message("calls", "forward", 7, inputs={"ids": InputRecord("(2, 4096)"), ...}))
    all_gather_object(ranks, "declares", "groups", mine)      # the value of every rank
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isclose, isfinite, isnan
from typing import Any

from sp_compile.lowering.base.errors import RemoteError, SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.runtime.control.channel import channel_of, publish_stop
from sp_compile.runtime.control.message import COMPILE_VERB, READ_VERB, STOP_MESSAGE, UNIT_VERB, FieldValue, Message
from sp_compile.runtime.control.votes import are_messages_equal, gather_bodies
from sp_compile.runtime.control.waits import describe_by_operation

TOLERANCE_RATIO = 3e-3  # relative to the magnitude of a summary; accounts for half precision
MAX_SHOWN_FIELDS = 8  # fields that differ, in an error message
MAX_FIELD_WIDTH = 1000  # characters of a value


def all_gather_messages(ranks: Ranks, mine: Message) -> list[Message] | None:
    """Return the message of every rank, in the order of the ranks, so that the caller can compare them.

    Returns None if all messages are equal, no answer is expected and no rank has failed.

    Args:
        ranks: The ranks that run the operation.
        mine: The message of this rank.

    Raises:
        SpError: As `ControlChannel.gather`.
    """
    channel = channel_of(ranks)  # None without processes
    if channel is not None:
        if mine.verb != READ_VERB:  # any thread may read a sharded value
            channel.check_thread()
        if channel.raised:  # an exception since the last exchange, which the other ranks have not received
            mine, channel.raised = replace(mine, raised=channel.raised), None
    # Compare digests first. Ranks with equal digests and without an error exchange nothing more.
    if are_messages_equal(mine, ranks, channel):
        if channel is not None:  # the last operation of each rank, which the error of a later timeout shows
            channel.last_fields = [str(mine)] * ranks.n
        return None
    messages = [Message.read(body) for body in gather_bodies(mine, ranks, channel)]
    if channel is not None:
        channel.last_fields = [str(m) if m.error is None else f"{m} and failed" for m in messages]
        if describe_operation_mismatch(messages):  # the ranks may have counted different numbers of calls
            channel.reset_counters(messages)
    return messages


def require_agreement(ranks: Ranks, mine: Message, mismatch: SpError | None = None) -> list[Message]:
    """Exchange messages before an operation, and raise if the ranks do not agree on it.

    Returns the message of every rank, or [] if all are equal and no answer is expected.

    Args:
        ranks: The ranks that run the operation.
        mine: The message of this rank.
        mismatch: The error to raise if `Message.fields` or `Message.note` differ, to which the differences are added;
            None to permit differences.

    Raises:
        SpError: On every rank, if a rank has failed, the ranks run different operations, or `mismatch` applies.
    """
    messages = all_gather_messages(ranks, mine) or []
    error = find_mismatch(messages, mismatch)
    if error is not None:
        raise error
    return messages


def all_gather_object(ranks: Ranks, verb: str, subject: str, value: Any) -> list[Any]:
    """Return the value of every rank, in the order of the ranks. All of them call it at the same point.

    Args:
        ranks: The ranks that run the operation.
        verb: The operation for messages, such as "compares".
        subject: The object of the verb, such as "programs".
        value: The value of this rank: JSON values, tuples, frozen sets and registered dataclasses.

    Raises:
        SpError: As `require_agreement`.
    """
    mine = Message(verb, subject, expects_answer=True, answer=value)
    return [message.answer for message in require_agreement(ranks, mine)]


@contextmanager
def publish_failure() -> Iterator[None]:
    """Publish an SpError of this rank in the context, so that ranks that wait for it raise, too.

    For code before an exchange, such as parsing arguments. The reason is written to the store as a stop notice
    (`publish_stop`). Ranks that are already in the exchange read it there; otherwise they would wait until the timeout.
    """
    try:
        yield
    except SpError as error:
        publish_stop(str(error))
        raise


def make_exchange(ranks: Ranks, operation: Message) -> Callable[[Exception | None, Any], list[Any]]:
    """Return a function that exchanges values, and raises the same SpError on all ranks if one has failed.

    The passes that measure transfers receive it as an argument, since they may not import the runtime. If the value is
    None on all ranks, only errors are exchanged.

    Args:
        ranks: The ranks that run the operation.
        operation: The message, without error and answer.
    """

    def exchange(error: Exception | None, value: Any) -> list[Any]:
        """Return the values of all ranks; raise the error of this or another rank, on every rank."""
        mine = replace(operation, error=wrap_error(error), expects_answer=value is not None, answer=value)
        try:
            return [message.answer for message in require_agreement(ranks, mine)]
        except SpError as problem:
            raise problem from error

    return exchange


def find_mismatch(messages: Sequence[Message], mismatch: SpError | None = None) -> SpError | None:
    """Return the error that every rank raises after an exchange, or None if the ranks agree.

    The ranks do not agree if one has failed, their operations differ, or `mismatch` applies.

    Args:
        messages: Message of each rank; [] if all are equal.
        mismatch: The error if `Message.fields` or `Message.note` differ, to which the differences are added; None to
            permit differences.
    """
    error = merge_failures([message.error for message in messages]) or describe_operation_mismatch(messages)
    if error is not None or mismatch is None:
        return error
    fields = [{"": message.note, **message.fields} for message in messages]  # the note is a field without a name
    cause = describe_field_mismatch(fields, mismatch.cause)
    return SpError(mismatch.code, cause, mismatch.fix) if cause else None


def describe_operation_mismatch(messages: Sequence[Message]) -> SpError | None:
    """Return the error of ranks that are about to run different operations, or None.

    Its text starts with the exceptions that the ranks have raised before, the usual cause.
    """
    if len({(message.verb, message.subject, message.model, message.number) for message in messages}) <= 1:
        return None
    return _operation_error(messages).with_context(describe_raised(messages))


def describe_raised(messages: Sequence[Message]) -> str:
    """Return a line for each rank with an exception since the last exchange; "" without one.

    Such an exception is the usual cause of a mismatch, so that errors show it first.
    """
    raised = [message.raised for message in messages if message.raised]
    return "".join(f"rank {rank} raised {text}\n" for rank, text in raised)


def _operation_error(messages: Sequence[Message]) -> SpError:
    """Return the error of ranks with different operations, with the code of the first case below that applies."""
    n, verbs = len(messages), [message.verb for message in messages]
    operations = [f"{message}: {message.note}" if message.note else str(message) for message in messages]
    rows = "\n".join(f"  rank {rank} {operation}" for rank, operation in enumerate(operations))

    # STOP_MESSAGE is a complete message, with only a verb; the other constants are verbs.
    stopped = _format_ranks([rank for rank, verb in enumerate(verbs) if verb == STOP_MESSAGE.verb])
    if stopped:
        cause = f"rank {stopped} of {n} does not take part: another of its process groups has stopped with an error."
        return SpError("SP603", cause)

    compiling = _format_ranks([rank for rank, verb in enumerate(verbs) if verb == COMPILE_VERB])
    if compiling and len({*verbs}) > 1 and UNIT_VERB not in verbs:
        cause = f"rank {compiling} of {n} compiles the program again for this call and the others do not:\n{rows}"
        return SpError("SP602", cause)

    readers = _format_ranks([rank for rank, verb in enumerate(verbs) if verb == READ_VERB])
    if readers and len({*verbs}) > 1:
        return SpError("SP604", f"rank {readers} of {n} reads a sharded tensor and the others do not:\n{rows}")
    if readers:
        return SpError("SP604", f"the {n} ranks of this group read different sharded tensors:\n{rows}")

    if UNIT_VERB in verbs:
        calls = "; ".join(describe_by_operation(dict(enumerate(operations)), between=" "))
        return SpError("SP620", f"the {n} ranks with shards of the weights run different operations: {calls}.")

    cause = f"the {n} ranks of this group are about to run different operations:\n{rows}"
    # Calls are counted from 1 for each set of weight tensors (`ControlChannel.count_call`).
    first_calls = [rank for rank, message in enumerate(messages) if message.number == 1]
    is_same_program = len({(message.verb, message.subject) for message in messages}) == 1
    if is_same_program and 0 < len(first_calls) < n:
        ranks = _format_ranks(first_calls)
        return SpError("SP605", f"{cause}\nrank {ranks} of {n} calls it with new weight tensors.")
    return SpError("SP601", cause)


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text: "0, 2"."""
    return ", ".join(map(str, ranks))


def merge_failures(errors: Sequence[SpError | None], ranks: Sequence[int] = ()) -> SpError | None:
    """Return the error that all ranks raise if some have failed, or None if none has.

    It is the first of the errors, with the other ones in its text.

    Args:
        errors: The error of each rank, or None.
        ranks: The numbers of the ranks in messages; by default 0, 1, ...
    """
    failures: dict[tuple[str, str, str], tuple[SpError, list[int]]] = {}  # fields -> an error with them, its ranks
    for rank, error in zip(ranks or range(len(errors)), errors):
        if error is not None:
            failures.setdefault((error.code, error.cause, error.fix), (error, []))[1].append(rank)
    if not failures:
        return None
    (first, first_ranks), *others = failures.values()
    texts = "".join(f"\nrank {_format_ranks(failed)}: {error}" for error, failed in others)
    return SpError(first.code, f"rank {_format_ranks(first_ranks)}: {first.cause}{texts}", first.fix)


def describe_field_mismatch(fields: Sequence[Mapping[str, FieldValue]], summary: str) -> str:
    """Return the cause of an SpError if a field that every rank has differs between ranks, otherwise "".

    Fields of only some ranks are ignored. Summaries may differ by rounding (`is_close`).

    Args:
        fields: The values of each rank, by name.
        summary: The first sentence of the cause.
    """
    if not fields:
        return ""
    first, *others = fields
    common = [name for name in first if all(name in other for other in others)]
    differing = [name for name in common if not all(is_close(first[name], other[name]) for other in others)]
    return format_mismatch(summary, format_rank_rows(fields, differing)) if differing else ""


def format_rank_rows(fields: Sequence[Mapping[str, FieldValue]], names: Sequence[str]) -> list[str]:
    """Return the line of each rank in an error message, such as "x (2, 4), mask missing and 3 more".

    Args:
        fields: The values of each rank, by name.
        names: The fields to show, of which only the first ones are shown.
    """
    shown, num_hidden = names[:MAX_SHOWN_FIELDS], len(names) - MAX_SHOWN_FIELDS
    suffix = f" and {num_hidden} more" if num_hidden > 0 else ""
    rows = []
    for values in fields:
        texts = [f"{name} {_format_value(values.get(name, 'missing'))}".strip() for name in shown]
        rows.append(", ".join(texts) + suffix)
    return rows


def _format_value(value: FieldValue) -> str:
    """Return the text of a field value in an error message: "about 1.5 0.2 0.3" for a summary."""
    return value[:MAX_FIELD_WIDTH] if isinstance(value, str) else f"about {' '.join(map(repr, value))}"


def format_mismatch(summary: str, rows: Sequence[str], heading: str = "What differs", member: str = "rank") -> str:
    """Return the cause of an error: a sentence, and a row of each rank (or another `member`) below a heading."""
    lines = "\n".join(f"  {member} {i}: {row}" for i, row in enumerate(rows))
    return f"{summary}. {heading}:\n{lines}"


def is_close(a: FieldValue, b: FieldValue) -> bool:
    """Return True if two field values are equal, or are summaries that differ only by rounding.

    The rounding is relative to the magnitude, the first number of a summary. If both magnitudes overflow (inf or nan),
    it is relative to the largest finite number. An overflow equals only the same overflow.
    """
    if isinstance(a, str) or isinstance(b, str) or len(a) != len(b):
        return a == b
    magnitudes = [*filter(isfinite, (a[0], b[0]))] or [abs(x) for x in (*a, *b) if isfinite(x)]
    tolerance = TOLERANCE_RATIO * max(magnitudes, default=0.0)
    return all(isclose(x, y, rel_tol=0.0, abs_tol=tolerance) or (isnan(x) and isnan(y)) for x, y in zip(a, b))


def wrap_error(error: Exception | None) -> SpError | None:
    """Return the error as an SpError, which a message can contain (SP608 for other exceptions), or None."""
    if error is None or isinstance(error, SpError):
        return error
    return SpError("SP608", f"{type(error).__name__}: {error}.")


def error_to_send(error: Exception | None) -> SpError | None:
    """Return the compilation error that this rank sends to others, as an SpError; None without one.

    An error that this rank has received from another one (`RemoteError`) is not sent again.
    """
    if error is None or isinstance(error, RemoteError):
        return None
    sent = error if isinstance(error, SpError) else SpError("SP607", f"{type(error).__name__}: {error}.")
    return sent.with_context("the model could not be compiled: ")
