"""The context of passes over the collectives of a program, and what they ask of its ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.fx import GraphModule

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.context import Job
from sp_compile.passes.sharding.input_facts import Facts


class RankQueries(Protocol):
    """The queries of passes to the ranks that a program connects. The runtime implements it; all ranks ask the same."""

    @property
    def groups(self) -> Sequence[Ranks]:
        """Return the groups that the program exchanges over."""

    @property
    def facts(self) -> Mapping[str, Facts]:
        """Return the facts about the inputs on each group, by the group's name."""

    @property
    def differing(self) -> Collection[str]:
        """Return the names of the groups whose ranks have different programs, or may."""

    def rows(self, ranks: Ranks, starts: list[int]) -> list[list[int]]:
        """Return where the blocks of each rank begin."""

    def numbers(self, gm: GraphModule, ranks: Ranks) -> frozenset[str] | None:
        """Return the nodes whose constants differ between ranks; None if the graphs differ in more than constants."""

    def same_exchanges(self, local: GraphModule, ranks: Ranks, tangents: Sequence[str]) -> bool:
        """Return True if every rank would exchange the same and compare the same gradients."""

    def same_layers(self, gm: GraphModule, local: GraphModule, ranks: Ranks, layers: Sequence[Any]) -> bool:
        """Return True if the ranks of the program's other groups would scatter the same layers."""

    def all_equal(self) -> bool:
        """Return True if the programs of all connected ranks are equal."""

    def compares_gradients(self, ranks: Ranks) -> bool:
        """Return True if the ranks compare gradients at run time."""


@dataclass
class NoRanks:
    """The queries of a program that connects no ranks."""

    groups: Sequence[Ranks] = ()
    facts: Mapping[str, Facts] = field(default_factory=dict)
    differing: Collection[str] = ()

    def rows(self, ranks: Ranks, starts: list[int]) -> list[list[int]]:
        """Return the blocks of the only rank."""
        return [starts]

    def numbers(self, gm: GraphModule, ranks: Ranks) -> frozenset[str] | None:
        """Return no node: there is no other rank."""
        return frozenset()

    def same_exchanges(self, local: GraphModule, ranks: Ranks, tangents: Sequence[str]) -> bool:
        """Return True: there is no other rank."""
        return True

    def same_layers(self, gm: GraphModule, local: GraphModule, ranks: Ranks, layers: Sequence[Any]) -> bool:
        """Return True: there is no other rank."""
        return True

    def all_equal(self) -> bool:
        """Return True: there is no other rank."""
        return True

    def compares_gradients(self, ranks: Ranks) -> bool:
        """Return False: there is no other rank."""
        return False


@dataclass
class CollectiveJob(Job):
    """The context of a pass over collectives. session: the ranks that the program connects.

    `session.facts` calls the function's tensor arguments input_0, input_1, ... in order.
    """

    session: RankQueries = field(default_factory=NoRanks)
