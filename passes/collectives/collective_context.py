"""Provide the context of passes over the collectives of a program, and their queries to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.input_facts import InputFacts


class RankQueries:
    """Queries of passes to the ranks of a program with process groups of its own.

    These are the answers for a program without such groups, and for a pass that runs directly. `CompileSession` of the
    runtime has the others. All ranks send the same queries, as the answers may need messages between them.
    """

    groups: Sequence[Ranks] = ()  # the groups that the program exchanges over
    # facts about the inputs over the ranks of a group, such as equal values, by the group's name
    facts: Mapping[str, InputFacts] = MappingProxyType({})

    def has_same_programs(self, gm: GraphModule) -> bool:
        """Return True if all ranks have the same joint graph and facts, so that they rewrite it equally.

        Args:
            gm: The joint graph of this rank.
        """
        return True

    def can_compare_gradients(self, ranks: Ranks) -> bool:
        """Return True if the ranks can compare gradients at run time, as rewrites that assume equal ones need.

        Args:
            ranks: The group of the gradients.
        """
        return False


@dataclass
class CollectiveContext(PassContext):
    """The context of a pass over collectives."""

    # `session.facts` names the tensor arguments of the program input_0, input_1, ...
    session: RankQueries = field(default_factory=RankQueries)
