"""Exchange messages during compilation, with the same number of exchanges on every rank.

Ranks that compile one program run the same exchanges in the same order: each gathers a value of every rank of a group,
such as the digests of its inputs. A rank that fails sends its error in all remaining exchanges, so that the other ranks
fail as well instead of waiting.

A group stops if its ranks run different operations, or one is lost: it runs no further exchanges. A rank is in several
groups, so it forwards that with STOP_MESSAGE and its error in the exchanges of its other groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from sp_compile.lowering.base.errors import RankMismatchError, RemoteError, SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.runtime.control.message import COMPILE_VERB, STOP_MESSAGE, Message

from .agreement import all_gather_messages, describe_operation_mismatch, error_to_send, merge_failures
from .settings_digest import mode_text


class CompileProtocol:
    """Exchanges of one compilation in order, each with a group and a name such as "inputs".

    Every rank of the groups creates a protocol, calls `exchange` for each exchange in order, and calls `finish` when
    it has compiled or failed. Without processes there is no communication, and results are those of this rank.

    If a rank of a group is lost or runs another operation, the group stops. All its ranks raise, and `finish` forwards
    the error to their other groups.

    Args:
        exchanges: The exchanges of the compilation in order: the group and the name of each.

    Attributes:
        remaining: The remaining exchanges.
        opened: True after `start`, unless ranks of a group ran another operation instead of this compilation.
        stopped_groups: The groups that stopped, with the error of each.
    """

    def __init__(self, exchanges: Sequence[tuple[Ranks, str]]) -> None:
        self.remaining = list(exchanges)
        self.opened = False
        self.stopped_groups: dict[Ranks, RankMismatchError] = {}

    def start(self, more_groups: Sequence[Ranks] = ()) -> None:
        """Check that the other ranks compile as well.

        Args:
            more_groups: Groups that may have no exchange in this compilation, but whose ranks must compile as well.

        Raises:
            SpError: The ranks of a group run different operations; every rank of the group, and of the other groups of
                these ranks, raises. Or a rank does not arrive; `finish` forwards this error to the other groups.
        """
        self.opened, mine = True, Message(COMPILE_VERB, note=f"in mode {mode_text()}")
        for ranks in dict.fromkeys([*(ranks for ranks, _ in self.remaining), *more_groups]):
            try:
                if ranks.has_other_processes:  # after a mismatch in a group, the later groups receive STOP_MESSAGE
                    self._all_gather(ranks, mine if self.opened else STOP_MESSAGE)
            except RankMismatchError as error:
                # Ranks that run another operation have no exchanges of this compilation, so none follows. A lost rank
                # (its error is the cause) ends only its group: the others receive the error in their exchanges.
                if error.__cause__ is None:
                    self.opened = False
        if not self.opened:  # the exchanges of this compilation do not take place
            self.remaining = []
        for mismatch in self.stopped_groups.values():  # raise the first one, if any
            raise mismatch

    def exchange(self, ranks: Ranks, name: str, value: Any) -> list[Any]:
        """Return the value of every rank, in the order of the ranks; None for a rank that skips this exchange.

        Earlier exchanges that this rank has skipped are run first, without a value of this rank, since the other ranks
        run them.

        Args:
            ranks: The group of the exchange.
            name: The name of the exchange.
            value: The value of this rank.

        Raises:
            SpError: On every rank, if a rank has failed, with its error, or if a rank runs another operation.
        """
        while self.remaining and self.remaining[0] != (ranks, name):
            self._run_next(None)
        assert self.remaining, f"the exchange {name!r} over {ranks} is not a later one of this compilation"
        self.remaining.pop(0)
        messages = self._all_gather(ranks, Message(COMPILE_VERB, name, expects_answer=True, answer=value))
        group = ranks.process_group
        numbers = range(ranks.n) if group is None else dist.get_process_group_ranks(group)  # of all ranks, for messages
        error = merge_failures([message.error for message in messages], numbers)
        if error is not None:
            raise RemoteError(error.code, error.cause, error.fix)
        return [message.answer for message in messages]

    def finish(self, error: Exception | None = None) -> Exception | None:
        """Run the remaining exchanges, in which this rank sends `error`, since the other ranks wait in them.

        Args:
            error: The error of the compilation on this rank, if any.

        Returns:
            The error, or that of another rank that these exchanges received; None if no rank has failed.
        """
        while self.remaining:  # `_run_next` removes one
            try:
                self._run_next(error)
            except RankMismatchError as mismatch:  # a rank is lost or runs another operation
                error = error or mismatch
        return error

    def _run_next(self, error: Exception | None) -> None:
        """Run the next exchange for the other ranks: send the error of this rank, if any, and ignore the result."""
        ranks, name = self.remaining.pop(0)
        # `error_to_send` omits a received error (`RemoteError`), which all ranks of its group have received. The
        # remaining exchanges may be of other groups, whose ranks lack it, so it is sent as an error of this rank.
        if isinstance(error, RemoteError):
            sent: SpError | None = SpError(error.code, error.cause, error.fix)
        else:
            sent = error_to_send(error)
        if ranks.has_other_processes:
            self._all_gather(ranks, Message(COMPILE_VERB, name, error=sent, expects_answer=True))

    def _all_gather(self, ranks: Ranks, mine: Message) -> list[Message]:
        """Return the message of every rank, or [] if all are equal and none expects an answer.

        Raises:
            RankMismatchError: If the operations differ or a rank is lost. The group stops.
        """
        messages: list[Message] = []
        cause: SpError | None = None  # the error of the wait for a lost rank
        try:
            messages = all_gather_messages(ranks, mine) or []
            error = describe_operation_mismatch(messages)
        except SpError as lost_rank:
            cause = error = lost_rank
        if error is not None:
            self.remaining = [exchange for exchange in self.remaining if exchange[0] != ranks]
            self.stopped_groups[ranks] = RankMismatchError(error.code, error.cause, error.fix)
            raise self.stopped_groups[ranks] from cause
        return messages
