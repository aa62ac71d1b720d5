"""What ranks tell each other while they compile: as many exchanges on every rank, whatever fails on one of them.

Ranks that compile one program ask each other the same questions in the same order. One that fails in between still
answers all that the others will ask, with its error, so they fail too and none waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from sp_compile.lowering.base.errors import RankMismatchError, RemoteError, SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.runtime.control.message import COMPILE_VERB, STOP_VERB, Message

from .agreement import all_gather_messages, describe_operation_mismatch, failure, not_compiled
from .settings_digest import mode_fields


class CompileProtocol:
    """The exchanges of one compilation, in order: each a group and what its ranks will ask each other.

    Every rank of the groups makes one and calls `ask` for each question in turn, and `finish` when it is done or has
    failed. Without processes nobody is asked, and the answers are this rank's own.

    A group is asked no more where a rank of it is gone, or comes to something else: all its ranks hear of that, and by
    `finish` those of their other groups. opened: are all compiling that came? apart: these groups, and why.
    """

    def __init__(self, questions: Sequence[tuple[Ranks, str]]) -> None:
        self.left = list(questions)
        self.opened = False
        self.apart: dict[Ranks, RankMismatchError] = {}

    def start(self, also: Sequence[Ranks] = ()) -> None:
        """Begin: are the others compiling as well? also: groups that are not asked here, but wait for each other.

        Raises SpError on every rank of a group that is of two minds, and of the groups that they are in; and where a
        rank does not come, which `finish` has to tell the other groups.
        """
        self.opened, mine = True, Message(COMPILE_VERB, fields={"": f"in mode {mode_fields()}"})
        for ranks in dict.fromkeys([*(ranks for ranks, _ in self.left), *also]):
            try:
                if ranks.exchanges:
                    self._all_gather(ranks, mine if self.opened else STOP_VERB)
            except RankMismatchError as apart:
                self.opened &= apart.__cause__ is not None  # a rank that did not come
        if not self.opened:
            self.left = []
        for problem in self.apart.values():
            raise problem

    def exchange(self, ranks: Ranks, question: str, mine: Any) -> list[Any]:
        """Every rank's answer, in the order of the ranks; None of one that never came to ask this.

        Raises SpError on every rank if one has failed, with what that one said, or if one does not come to this.
        """
        while self.left and self.left[0] != (ranks, question):
            self._answer_next(None)
        if not self.left:
            raise AssertionError(f"nobody else asks {question!r} over {ranks} now")
        self.left.pop(0)
        everyone = self._all_gather(ranks, Message(COMPILE_VERB, question, expects_answer=True, answer=mine))
        group = ranks.process_group
        numbers = range(ranks.n) if group is None else dist.get_process_group_ranks(group)
        if failed := failure([one.error for one in everyone], numbers):
            raise RemoteError(failed.code, failed.cause, failed.fix)
        return [one.answer for one in everyone]

    def finish(self, error: Exception | None = None) -> Exception | None:
        """Answer what the others will still ask; why this rank fails, which it may learn here."""
        while self.left:
            try:
                self._answer_next(error)
            except RankMismatchError as apart:
                error = error or apart
        return error

    def _answer_next(self, error: Exception | None) -> None:
        """The next question, which this rank has no use for."""
        ranks, question = self.left.pop(0)
        if ranks.exchanges:
            self._all_gather(ranks, Message(COMPILE_VERB, question, error=not_compiled(error), expects_answer=True))

    def _all_gather(self, ranks: Ranks, mine: Message) -> list[Message]:
        """Every rank's message; [] if all say the same and nobody asks. Raises RanksDiffer, and asks these no more."""
        try:
            everyone, cause = all_gather_messages(ranks, mine) or [], None
            problem = describe_operation_mismatch(everyone)
        except SpError as error:  # a rank is gone
            everyone, cause, problem = [], error, error
        if problem is not None:
            self.left = [one for one in self.left if one[0] != ranks]
            self.apart[ranks] = RankMismatchError(problem.code, problem.cause, problem.fix)
            raise self.apart[ranks] from cause
        return everyone
