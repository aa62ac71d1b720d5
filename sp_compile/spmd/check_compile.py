"""What ranks tell each other while they compile: as many exchanges on every rank, whatever fails on one of them.

Ranks that compile one program ask each other the same questions in the same order. One that fails in between still
answers all that the others will ask, with its error, so they fail too and none waits.

What one process group of a program decides, its ranks' neighbours over the other groups have to decide as well:
tensor-parallel groups of one grid look at values of their own. Where one scatters a layer and the next does not, what
both exchange over a third group, as data-parallel ranks do, would have two sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from sp_compile.config import Ranks
from sp_compile.errors import RanksDiffer, RemoteError

from .agree import ask, astray, exchanged, failures
from .message import COMPILES, STOPS, Message
from .settings import mode


class Lockstep:
    """The exchanges of one compilation, in order: each a group and what its ranks will ask each other.

    Every rank of the groups makes one and calls `ask` for each question in turn, and `finish` when it is done or has
    failed. Without processes nobody is asked, and the answers are this rank's own.
    """

    def __init__(self, questions: Sequence[tuple[Ranks, str]]) -> None:
        self.left = list(questions)

    def open(self, also: Sequence[Ranks] = ()) -> None:
        """Begin: are the others compiling as well? also: groups that are not asked here, but wait for each other.

        Raises SpError on every rank of a group that is of two minds, and of the groups that they are in.
        """
        strayed = ""
        for ranks in dict.fromkeys([*(ranks for ranks, _ in self.left), *also]):
            if strayed:
                exchanged(ranks, STOPS)
            elif ranks.exchanges:
                strayed = astray(exchanged(ranks, Message(COMPILES, fields={"": f"in mode {mode()}"})) or ())
        if strayed:
            self.left = []
            raise RanksDiffer(strayed)

    def skip(self, ranks: Ranks, questions: Sequence[str]) -> None:
        """Ask these no more; for reasons that all ranks of the group know."""
        self.left = [(r, q) for r, q in self.left if r != ranks or q not in questions]

    def ask(self, ranks: Ranks, question: str, mine: Any) -> list[Any]:
        """Every rank's answer, in the order of the ranks; None of one that never came to ask this.

        Raises SpError on every rank if one has failed, with what that one said.
        """
        while self.left and self.left[0] != (ranks, question):
            self._answer(None)
        if not self.left:
            raise AssertionError(f"nobody else asks {question!r} over {ranks} now")
        self.left.pop(0)
        everyone = ask(ranks, Message(COMPILES, question, asks=True, answer=mine))
        group = ranks.process_group
        numbers = range(ranks.n) if group is None else dist.get_process_group_ranks(group)
        failed = failures([one.error for one in everyone], numbers)
        if failed:
            raise RemoteError(failed)
        return [one.answer for one in everyone]

    def finish(self, error: Exception | None = None) -> None:
        """Answer what the others will still ask."""
        while self.left:
            self._answer(error)

    def _answer(self, error: Exception | None) -> None:
        """The next question, which this rank has no use for."""
        ranks, question = self.left.pop(0)
        words = "" if error is None else str(error) or type(error).__name__
        if ranks.exchanges:
            exchanged(ranks, Message(COMPILES, question, error=words, asks=True))


def rounds(groups: Sequence[Ranks], question: str) -> list[tuple[Ranks, str]]:
    """What `connected` asks, in order; of a single group nothing."""
    if len(groups) == 1:
        return []
    return [(ranks, f"{question}.{i}") for i in range(len(groups)) for ranks in groups]


def connected(talk: Lockstep, groups: Sequence[Ranks], question: str, said: Sequence[str]) -> bool:
    """Do all ranks that any of the groups connect say the same over each group? They all get the same answer.

    said: by this rank over each of the groups. What one group finds its neighbours hear, and theirs: hence the rounds.
    """
    alike, words = True, dict(zip(groups, said))
    for ranks, one in rounds(groups, question):
        answers = talk.ask(ranks, one, (alike, words[ranks]))
        alike = all(answer == (True, words[ranks]) for answer in answers)
    return alike
