"""Provide the context of passes over the collectives of a program, and their queries to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.input_facts import InputFacts


class RankQueries(Protocol):
    """Queries of passes to the ranks of a program with process groups of its own.

    The runtime implements them. All ranks send the same queries, as the answers may need messages between them.
    """

    @property
    def groups(self) -> Sequence[Ranks]:
        """Return the groups that the program exchanges over."""

    @property
    def facts(self) -> Mapping[str, InputFacts]:
        """Return the facts about the inputs over the ranks of each group, such as equal values, by the group's name."""

    def has_same_programs(self, gm: GraphModule) -> bool:
        """Return True if all ranks have the same joint graph and facts, so that they rewrite it equally.

        Args:
            gm: The joint graph of this rank.
        """

    def compares_gradients(self, ranks: Ranks) -> bool:
        """Return True if the ranks can compare gradients at run time, as rewrites that assume equal ones need.

        Args:
            ranks: The group of the gradients.
        """


@dataclass
class NoRanks:
    """The queries of a program without process groups of its own, and of a pass that runs directly."""

    groups: Sequence[Ranks] = ()  # always empty
    facts: Mapping[str, InputFacts] = field(default_factory=dict)  # always empty

    def has_same_programs(self, gm: GraphModule) -> bool:
        """Return True: there is no other rank."""
        return True

    def compares_gradients(self, ranks: Ranks) -> bool:
        """Return False: there is no other rank."""
        return False


@dataclass
class CollectiveContext(PassContext):
    """The context of a pass over collectives."""

    # `session.facts` names the tensor arguments of the program input_0, input_1, ...
    session: RankQueries = field(default_factory=NoRanks)
