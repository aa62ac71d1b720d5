"""How the process groups of a program lie to each other: as the axes of a grid, one around another, or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from sp_compile.config import Ranks
from sp_compile.sharding.placement import REPLICATE, VARYING, Placement

Ask = Callable[[Ranks, tuple[int, ...]], Sequence[tuple[int, ...] | None]]


@dataclass(frozen=True)
class Grid:
    """Other groups, by name, as the ranks of one group see them.

    level: all its ranks have the same rank there. beside: all the ranks there have the same rank in it. around: those
    groups that hold all its ranks. The axes of a mesh are level and beside each other.
    """

    level: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    around: frozenset[str] = frozenset()

    def leaves(self, over: str, whole: bool) -> Placement | None:
        """What an exchange of equal values leaves; None: the same on all ranks, row by row if its operand is cut.

        whole: its results are the same on all ranks that take part.
        """
        if over in self.level and over in self.beside:
            return None
        return REPLICATE if whole and over in self.around else VARYING


def grids(groups: Sequence[Ranks], ask: Ask) -> dict[str, Grid]:
    """The Grid of every group; `ask`: every rank's answer, over a group. Every rank calls it, with its own groups."""
    members = {r.group: _members(r) for r in groups}
    mine = tuple(dist.get_rank(r.process_group) if r.process_group is not None else 0 for r in groups)
    level: dict[str, frozenset[str]] = {}
    for ranks in groups:
        everyone = [places for places in ask(ranks, mine) if places is not None and len(places) == len(mine)]
        same = [len({places[i] for places in everyone}) == 1 for i in range(len(groups))]
        level[ranks.group] = frozenset(g.group for g, is_same in zip(groups, same) if is_same)
    return {
        name: Grid(
            level[name],
            frozenset(other for other, theirs in level.items() if name in theirs),
            frozenset(other for other, theirs in members.items() if members[name] <= theirs),
        )
        for name in level
    }


def _members(ranks: Ranks) -> frozenset[int]:
    group = ranks.process_group
    return frozenset() if group is None else frozenset(dist.get_process_group_ranks(group))
