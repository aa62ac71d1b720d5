"""Exchange messages during compilation, with the same number of exchanges on every rank.

Ranks that compile one program run the same exchanges in the same order. A rank that fails sends its error in all
remaining exchanges, so that the other ranks fail as well instead of waiting.
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
    """Exchanges of one compilation in order, each a group and the name of the exchange.

    Every rank of the groups creates a protocol, calls `exchange` for each exchange in order, and calls `finish` when
    it has compiled or failed. Without processes there is no communication, and results are those of this rank.

    If a rank of a group is lost or runs another operation, the group runs no further exchanges. All its ranks raise,
    and `finish` forwards the error to their other groups.

    Attributes:
        left: The remaining exchanges.
        opened: True if all ranks have started to compile.
        apart: The groups that stopped, with the error of each.
    """

    def __init__(self, questions: Sequence[tuple[Ranks, str]]) -> None:
        self.left = list(questions)
        self.opened = False
        self.apart: dict[Ranks, RankMismatchError] = {}

    def start(self, also: Sequence[Ranks] = ()) -> None:
        """Check that the other ranks compile as well.

        Args:
            also: Groups without exchanges in this compilation, whose ranks wait for each other.

        Raises:
            SpError: On every rank of a group whose ranks run different operations, and of the other groups of these
                ranks; and if a rank does not arrive, which `finish` forwards to the other groups.
        """
        self.opened, mine = True, Message(COMPILE_VERB, note=f"in mode {mode_fields()}")
        for ranks in dict.fromkeys([*(ranks for ranks, _ in self.left), *also]):
            try:
                if ranks.has_other_processes:
                    self._all_gather(ranks, mine if self.opened else STOP_VERB)
            except RankMismatchError as apart:
                self.opened &= apart.__cause__ is not None  # a rank that did not arrive
        if not self.opened:
            self.left = []
        for problem in self.apart.values():
            raise problem

    def exchange(self, ranks: Ranks, question: str, mine: Any) -> list[Any]:
        """Return the value of every rank, in the order of the ranks.

        The value is None for a rank that does not reach this exchange.

        Raises:
            SpError: On every rank, if a rank has failed, with its error, or if a rank runs another operation.
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
        """Run the remaining exchanges, and return the error of this rank.

        The error may be one that these exchanges received from another rank.
        """
        while self.left:
            try:
                self._answer_next(error)
            except RankMismatchError as apart:
                error = error or apart
        return error

    def _answer_next(self, error: Exception | None) -> None:
        """Run the next exchange, whose result this rank does not use."""
        ranks, question = self.left.pop(0)
        if ranks.has_other_processes:
            self._all_gather(ranks, Message(COMPILE_VERB, question, error=not_compiled(error), expects_answer=True))

    def _all_gather(self, ranks: Ranks, mine: Message) -> list[Message]:
        """Return the message of every rank, or [] if all are equal and none expects an answer.

        Raises:
            RankMismatchError: If the operations differ or a rank is lost. The group runs no further exchanges.
        """
        try:
            everyone, cause = all_gather_messages(ranks, mine) or [], None
            problem = describe_operation_mismatch(everyone)
        except SpError as error:  # a rank is lost
            everyone, cause, problem = [], error, error
        if problem is not None:
            self.left = [one for one in self.left if one[0] != ranks]
            self.apart[ranks] = RankMismatchError(problem.code, problem.cause, problem.fix)
            raise self.apart[ranks] from cause
        return everyone
