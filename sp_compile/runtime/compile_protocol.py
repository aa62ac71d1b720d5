"""What ranks tell each other while they compile: as many exchanges on every rank, whatever fails on one of them.

Ranks that compile one program ask each other the same questions in the same order. One that fails in between still
answers all that the others will ask, with its error, so they fail too and none waits.

What one process group of a program decides, its ranks' neighbours over the other groups have to decide as well:
tensor-parallel groups of one grid look at values of their own. Where one scatters a layer and the next does not, what
both exchange over a third group, as data-parallel ranks do, would have two sizes.

Ranks may have other numbers of Python's in such a program: `ids - 12` on one rank is `ids - 24` on the next, and slopes
of a rank's heads are its own, from the first compilation on. A scale or a size that a schedule changes on some ranks
only was the same on all of them until then (`check_numbers`). That is told where ranks are called on the same data. A
rank with data of its own, as tokens are whose experts lie on other ranks, has numbers of its own whenever it likes:
positions behind what it has seen, temperatures of its requests.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import RanksDiffer, RemoteError, SpError, at
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.torch_compat import compiled_frame, pytree
from sp_compile.runtime.control.channel import wire_of
from sp_compile.runtime.control.message import COMPILES, STOPS, Message

from .agreement import SHOWN, answers, different_work, exchanged, failure, not_compiled, what_differs
from .fingerprint import subject_of, unlike
from .input_checks import InputDigests
from .settings_digest import mode

OTHER_NUMBERS = (
    "the ranks of this group compile this program again with different Python numbers, which were the same on all of "
    "them before"
)


class Lockstep:
    """The exchanges of one compilation, in order: each a group and what its ranks will ask each other.

    Every rank of the groups makes one and calls `ask` for each question in turn, and `finish` when it is done or has
    failed. Without processes nobody is asked, and the answers are this rank's own.

    A group is asked no more where a rank of it is gone, or comes to something else: all its ranks hear of that, and by
    `finish` those of their other groups. opened: are all compiling that came? apart: these groups, and why.
    """

    def __init__(self, questions: Sequence[tuple[Ranks, str]]) -> None:
        self.left = list(questions)
        self.opened = False
        self.apart: dict[Ranks, RanksDiffer] = {}

    def open(self, also: Sequence[Ranks] = ()) -> None:
        """Begin: are the others compiling as well? also: groups that are not asked here, but wait for each other.

        Raises SpError on every rank of a group that is of two minds, and of the groups that they are in; and where a
        rank does not come, which `finish` has to tell the other groups.
        """
        self.opened, mine = True, Message(COMPILES, fields={"": f"in mode {mode()}"})
        for ranks in dict.fromkeys([*(ranks for ranks, _ in self.left), *also]):
            try:
                if ranks.exchanges:
                    self._exchanged(ranks, mine if self.opened else STOPS)
            except RanksDiffer as apart:
                self.opened &= apart.__cause__ is not None  # a rank that did not come
        if not self.opened:
            self.left = []
        for problem in self.apart.values():
            raise problem

    def skip(self, ranks: Ranks, questions: Sequence[str]) -> None:
        """Ask these no more; for reasons that all ranks of the group know."""
        self.left = [(r, q) for r, q in self.left if r != ranks or q not in questions]

    def ask(self, ranks: Ranks, question: str, mine: Any) -> list[Any]:
        """Every rank's answer, in the order of the ranks; None of one that never came to ask this.

        Raises SpError on every rank if one has failed, with what that one said, or if one does not come to this.
        """
        while self.left and self.left[0] != (ranks, question):
            self._answer(None)
        if not self.left:
            raise AssertionError(f"nobody else asks {question!r} over {ranks} now")
        self.left.pop(0)
        everyone = self._exchanged(ranks, Message(COMPILES, question, asks=True, answer=mine))
        group = ranks.process_group
        numbers = range(ranks.n) if group is None else dist.get_process_group_ranks(group)
        if failed := failure([one.error for one in everyone], numbers):
            raise RemoteError(failed.code, failed.cause, failed.fix)
        return [one.answer for one in everyone]

    def finish(self, error: Exception | None = None) -> Exception | None:
        """Answer what the others will still ask; why this rank fails, which it may learn here."""
        while self.left:
            try:
                self._answer(error)
            except RanksDiffer as apart:
                error = error or apart
        return error

    def _answer(self, error: Exception | None) -> None:
        """The next question, which this rank has no use for."""
        ranks, question = self.left.pop(0)
        if ranks.exchanges:
            self._exchanged(ranks, Message(COMPILES, question, error=not_compiled(error), asks=True))

    def _exchanged(self, ranks: Ranks, mine: Message) -> list[Message]:
        """Every rank's message; [] if all say the same and nobody asks. Raises RanksDiffer, and asks these no more."""
        try:
            everyone, cause = exchanged(ranks, mine) or [], None
            problem = different_work(everyone)
        except SpError as error:  # a rank is gone
            everyone, cause, problem = [], error, error
        if problem is not None:
            self.left = [one for one in self.left if one[0] != ranks]
            self.apart[ranks] = RanksDiffer(problem.code, problem.cause, problem.fix)
            raise self.apart[ranks] from cause
        return everyone


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


CompiledCode = tuple[str, int, tuple[int, int | None]]
"""The name of a program, the number of its model, and of its code in Dynamo."""


@dataclass
class PythonNumbers:
    """What ranks know of the programs that they have compiled.

    written: by the shape of the graph, too: were the numbers written in it the same on all of them every time?
    varied: the types of those that were not; of a program that was not compiled yet there is no entry.
    """

    written: dict[tuple[CompiledCode, int], bool] = field(default_factory=dict)
    varied: defaultdict[CompiledCode, set[type]] = field(default_factory=lambda: defaultdict(set))


_numbers_of: weakref.WeakKeyDictionary[Any, PythonNumbers] = weakref.WeakKeyDictionary()


def check_numbers(
    ranks: Ranks, gm: GraphModule, inputs: Sequence[Any], mine: InputDigests, everyone: Sequence[InputDigests | None]
) -> None:
    """Raises SpError, on every rank, where ranks have changed a number of Python's since the program was compiled last.

    Where they are given other sizes or data numbers may come of these, and nothing is said; nor of another graph,
    unless a number became an input of it, as Dynamo makes those that change: it was written in the graph before.
    """
    wire, all_of = wire_of(ranks), [one for one in everyone if one is not None]
    forms = {(one.text.shape, one.cut, *one.numbers, str(one.of_data())) for one in all_of}
    if wire is None or len(all_of) < len(everyone) or len(forms) > 1:
        return
    weights = [x for x in inputs if isinstance(x, torch.nn.Parameter)]
    program = subject_of(gm), wire.model(weights), compiled_frame()
    seen, shape = _numbers_of.setdefault(wire, PythonNumbers()), (program, mine.text.shape)
    given = {name: x for name, x in mine.numbers.items() if any(one.numbers[name] != x for one in all_of)}
    differ = unlike(gm, [one.text for one in all_of]) or frozenset()
    nodes = [node for node in gm.graph.nodes if node.name in differ]
    problems = [
        f"{name} {x}" for name, x in given.items() if program in seen.varied and type(x) not in seen.varied[program]
    ]
    if seen.written.get(shape):
        problems += [f"{', '.join(map(repr, _numbers(node)))} at {at(node)}" for node in nodes]
    if problems:
        rows = answers(ranks, "compares", "numbers", "; ".join(problems[:SHOWN]))
        raise SpError("SP606", what_differs(OTHER_NUMBERS, rows))
    seen.written[shape] = seen.written.get(shape, True) and not nodes
    seen.varied[program].update(map(type, [*given.values(), *(x for node in nodes for x in _numbers(node))]))


def _numbers(node: Node) -> list[int | float]:
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, (int, float))]
