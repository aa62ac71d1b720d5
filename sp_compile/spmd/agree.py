"""Ranks say what they are about to do, and what follows if they do not agree.

There is one exchange for all situations: before an eager call, while compiling, before and behind a compiled program,
where groups are declared. Ranks that are about to do different things therefore meet and hear of it, all of them.

    agree(ranks, Message("calls", "forward", 7, {"input ids": "(2, 4096)", ...}))
    answers(ranks, "declares", "groups", mine)      every rank's
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isnan
from typing import Any

import torch

from sp_compile.config import Ranks
from sp_compile.errors import RemoteError, SpError
from sp_compile.lowering.collectives.checksums import ABOUT

from .control.message import COMPILES, READS, STOPS, TOGETHER, Message
from .control.wire import STOPPED, gather, stop, wire_of

CLOSE = 3e-3  # of the first of them, which says how large it is: half precision leaves as much open
SHOWN = 8  # fields that differ, in an error message
WIDTH = 1000  # characters of a value


def exchanged(ranks: Ranks, mine: Message) -> list[Message] | None:
    """Every rank's message, in the order of the ranks; None if all say the same and nobody asks or has failed.

    Raises what `Wire.gather` does.
    """
    wire = wire_of(ranks)
    if wire is not None and mine.doing != READS:
        wire.own()
    if wire is not None and wire.raised:
        mine, wire.raised = replace(mine, raised=wire.raised), None
    headers = gather(mine.header, ranks, torch.int64, mine)
    same = all(header == headers[0] for header in headers)
    if same and not mine.error and not mine.asks:
        if wire is not None:
            wire.seen = [str(mine)] * ranks.n
        return None
    longest = max(length for (length,) in gather([len(mine.body)], ranks, torch.int64, mine))
    bodies = gather(list(mine.body.ljust(longest)), ranks, torch.uint8, mine)
    everyone = [Message.read(bytes(one)) for one in bodies]
    if wire is not None:
        wire.seen = [f"{one} and failed" if one.error else str(one) for one in everyone]
        if different_work(everyone):
            wire.begin_anew(everyone)
    return everyone


def agree(ranks: Ranks, mine: Message, what: str, advice: str) -> None:
    """Raise SpError, the same on every rank, if any has failed or they do not say the same.

    what, advice: what differs where only fields do, and what to do about it.
    """
    everyone = exchanged(ranks, mine)
    problem = difference(everyone, what, advice) if everyone is not None else ""
    if problem:
        raise SpError(problem)


def ask(ranks: Ranks, mine: Message) -> list[Message]:
    """Every rank's message, with its answer. Raises SpError on every rank if they are not all about to do the same."""
    everyone = exchanged(ranks, mine)
    assert everyone is not None
    different = different_work(everyone)
    if different:
        raise SpError(different)
    return everyone


def answers(ranks: Ranks, doing: str, subject: str, mine: Any) -> list[Any]:
    """Every rank's answer, in the order of the ranks. Raises what `ask` does."""
    return [one.answer for one in ask(ranks, Message(doing, subject, asks=True, answer=mine))]


@contextmanager
def saying_why() -> Iterator[None]:
    """Say why this rank stops, where it finds something wrong before it meets the others."""
    try:
        yield
    except SpError as error:
        stop(str(error)[:STOPPED])
        raise


def meeting(ranks: Ranks, saying: Message) -> Callable[[Exception | None], None]:
    """A barrier at which all ranks hear of what has failed on one of them, as the same SpError."""

    def meet(error: Exception | None) -> None:
        words = f"{type(error).__name__}: {error}" if error is not None else ""
        problem = difference(exchanged(ranks, replace(saying, error=words)) or [saying], "", "")
        if problem:
            raise SpError(problem) from error

    return meet


def difference(everyone: Sequence[Message], what: str, advice: str) -> str:
    """Why ranks cannot go on, in words; "" if they can."""
    failed = [f"rank {rank}: {one.error}" for rank, one in enumerate(everyone) if one.error]
    return "\n".join(failed) or different_work(everyone) or unlike_fields(everyone, what, advice)


def different_work(everyone: Sequence[Message]) -> str:
    """Are ranks about to do different things? If some have raised in a program, that comes first."""
    if len({(one.doing, one.subject, one.model, one.number) for one in everyone}) <= 1:
        return ""
    return who_raised(everyone) + _different(everyone)


def who_raised(everyone: Sequence[Message]) -> str:
    """What ranks have raised in a program since the last exchange, in lines; "" if none has."""
    return "".join(f"rank {one.raised[0]} raised {one.raised[1]}\n" for one in everyone if one.raised)


def _different(everyone: Sequence[Message]) -> str:
    whole = [f"{one}: {one.fields['']}" if "" in one.fields else str(one) for one in everyone]
    each = "\n".join(f"  rank {rank} {one}" for rank, one in enumerate(whole))
    n, stopped = len(everyone), [rank for rank, one in enumerate(everyone) if one.doing == STOPS.doing]
    alone = [rank for rank, one in enumerate(everyone) if one.doing == COMPILES]
    if stopped:
        return (
            f"rank {_listed(stopped)} of {n} does not take part in this call: ranks of another of its groups disagree, "
            "and its own error says on what"
        )
    if alone and len(alone) < n:
        return (
            f"rank {_listed(alone)} of {n} compiles the program anew for this call and the others do not: every rank "
            "of a group that a program exchanges over has to call it with the same sizes and numbers, and in the same "
            "mode. Pad what has another size; pass a number that changes as a tensor; TORCH_LOGS=recompiles says why "
            "it compiles\n" + each
        )
    readers = [rank for rank, one in enumerate(everyone) if one.doing == READS]
    if readers and len(readers) < n:
        return f"rank {_listed(readers)} of {n} reads what lies in shards and the others do not. {TOGETHER}:\n{each}"
    if readers:
        return f"the {n} ranks of this group read different values that lie in shards. {TOGETHER}:\n{each}"
    return (
        f"the {len(everyone)} ranks of this group are about to do different things; every rank has to run the same "
        f"models and backwards in the same order:\n{each}{_of_new_weights(everyone)}"
    )


def _of_new_weights(everyone: Sequence[Message]) -> str:
    """What to look for where some ranks alone call a program with weights that are new to them; "" if none does."""
    new = [rank for rank, one in enumerate(everyone) if one.number == 1]
    one_program = len({(one.doing, one.subject) for one in everyone}) == 1
    return NEW_WEIGHTS.format(_listed(new), len(everyone)) if one_program and 0 < len(new) < len(everyone) else ""


NEW_WEIGHTS = (
    "\nrank {} of {} calls it with tensors for weights that it has not called it with before. Every rank has to make "
    "such tensors alike: look for load_state_dict(assign=True), a copy of the model, a weight that is set, tied or "
    "added on some ranks only"
)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def failures(errors: Sequence[str], ranks: Sequence[int]) -> str:
    """What failed, and on which of the ranks; "" if nothing did."""
    failed = {error: [r for r, e in zip(ranks, errors) if e == error] for error in errors if error}
    each = "\n".join(f"rank {_listed(who)}: {error}" for error, who in failed.items())
    return f"the model could not be compiled on {each}" if failed else ""


def unlike_fields(everyone: Sequence[Message], what: str, advice: str) -> str:
    """Which fields differ that all ranks have? "" if none does."""
    names = [name for name in everyone[0].fields if all(name in one.fields for one in everyone)]
    names = [
        name for name in names if not all(is_close(everyone[0].fields[name], one.fields[name]) for one in everyone)
    ]
    return what_differs(what, advice, rows_by_rank([one.fields for one in everyone], names)) if names else ""


HOW, SPLIT = "how it runs", "as backend='sp' compiles it"
SPLIT_BY_SOME = "backend='sp' could compile this program on some ranks of this group only"
SAME_WAY = "a program runs whole on all of them or on none: give every rank the same model, inputs and versions"


def way(whole: str) -> dict[str, str]:
    """The field that says how a program runs. whole: why as it was written; "" if it is split."""
    return {HOW: f"whole: {re.sub('0x[0-9a-f]+', '', whole)}" if whole else SPLIT}


def unlike_ways(everyone: Sequence[Message]) -> str:
    """Does the program of some ranks run as it was written, and not of others? \"\" if not."""
    how = [one.fields.get(HOW, SPLIT) for one in everyone]
    return what_differs(SPLIT_BY_SOME, SAME_WAY, how) if 0 < how.count(SPLIT) < len(how) else ""


def rows_by_rank(everyone: Sequence[Mapping[str, str]], names: Sequence[str]) -> list[str]:
    """What each rank says of the first of these fields, and how many more there are."""
    shown, more = names[:SHOWN], f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    each = [", ".join(f"{name} {one.get(name, 'missing')[:WIDTH]}".strip() for name in shown) for one in everyone]
    return [row + more for row in each]


def what_differs(what: str, advice: str, rows: Sequence[str], heading: str = "What differs") -> str:
    """The error of ranks that do not say the same; rows: of each rank, what it says."""
    each = "\n".join(f"  rank {rank}: {row}" for rank, row in enumerate(rows))
    return f"{what}; {advice}. {heading}:\n{each}"


def is_close(a: str, b: str) -> bool:
    """Do two ranks say the same of a value, as far as numbers need be the same?"""
    if a == b or not (a.startswith(ABOUT) and b.startswith(ABOUT)):
        return a == b
    first, second = ([float(x) for x in one.removeprefix(ABOUT).split()] for one in (a, b))
    return all(x == y or (isnan(x) and isnan(y)) or abs(x - y) <= CLOSE * first[0] for x, y in zip(first, second))


def error_text(error: Exception | None) -> str:
    """What a rank sends of its error; "" of none, and of one that another rank sends."""
    if isinstance(error, RemoteError):
        return ""  # the rank that failed says it
    if error is None or isinstance(error, SpError):
        return str(error or "")
    return f"{type(error).__name__}: {error}"
