"""The context of passes over the collectives of a program, and what they ask of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.context import PassContext
from sp_compile.passes.sharding.input_facts import InputFacts


class RankQueries(Protocol):
    """The queries of passes to the ranks that a program connects. The runtime implements it; all ranks ask the same."""

    @property
    def groups(self) -> Sequence[Ranks]:
        """Return the groups that the program exchanges over."""

    @property
    def facts(self) -> Mapping[str, InputFacts]:
        """Return the facts about the inputs on each group, by the group's name."""

    def has_same_programs(self, gm: GraphModule) -> bool:
        """Return True if all ranks have the same joint graph and the same facts about its inputs."""

    def compares_gradients(self, ranks: Ranks) -> bool:
        """Return True if the ranks compare gradients at run time."""


@dataclass
class NoRanks:
    """The queries of a program that connects no ranks."""

    groups: Sequence[Ranks] = ()
    facts: Mapping[str, InputFacts] = field(default_factory=dict)

    def has_same_programs(self, gm: GraphModule) -> bool:
        """Return True: there is no other rank."""
        return True

    def compares_gradients(self, ranks: Ranks) -> bool:
        """Return False: there is no other rank."""
        return False


@dataclass
class CollectiveJob(PassContext):
    """The context of a pass over collectives. session: the ranks that the program connects.

    `session.facts` calls the function's tensor arguments input_0, input_1, ... in order.
    """

    session: RankQueries = field(default_factory=NoRanks)
