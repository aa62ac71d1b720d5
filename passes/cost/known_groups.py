"""Table of the groups of a mesh with their ranks on all processes, for passes.

A graph names only the groups of the rank that traced it. Decisions of a pass about groups must be equal on all ranks,
so they use this table, which contains the groups of all ranks, not the process groups of the current rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist

from sp_compile.lowering.base.errors import SpError

from .collective_time import LatencyBandwidth

Partition: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of one mesh axis, or of several axes: global ranks in group order."""


@dataclass(frozen=True)
class KnownGroups:
    """Declared groups."""

    members: Mapping[str, Partition] = field(
        default_factory=dict
    )  # group name in this rank's graphs -> groups of this kind on all ranks
    nodes: Mapping[int, int] = field(default_factory=dict)  # rank -> machine number, 0 by default
    lines: Mapping[str, LatencyBandwidth] = field(default_factory=dict)  # group name -> measured all_reduce time

    def __getitem__(self, name: str) -> Partition:
        """Return the groups called `name`.

        Raises:
            SpError: If the group was not declared.
        """
        if name not in self.members:
            known = ", ".join(map(repr, sorted(self.members))) or "none"
            raise SpError("SP611", f"group {name!r} was not declared; declared groups: {known}.")
        return self.members[name]

    def size(self, name: str) -> int:
        """Return the number of ranks of a group."""
        return len(self[name][0])

    def communicator(self, union: Partition, ordered: bool = False) -> str | None:
        """Return the name of a communicator for these groups, or None.

        Args:
            union: Groups.
            ordered: Require the same order of ranks.
        """
        wanted = _canonical_groups(union, ordered)
        return next((n for n, groups in self.members.items() if _canonical_groups(groups, ordered) == wanted), None)

    def is_in_one_node(self, name: str) -> bool:
        """Return True if each of the groups is on one machine."""
        return all(len({self.nodes.get(rank, 0) for rank in group}) == 1 for group in self[name])

    def merge(self, other: KnownGroups) -> KnownGroups:
        """Return the union of both tables."""
        return KnownGroups(**{name: {**table, **getattr(other, name)} for name, table in vars(self).items()})


def label_subsets(labels: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all subsets of two or more labels, in order."""
    sizes = range(2, len(labels) + 1)
    return [several for size in sizes for several in itertools.combinations(labels, size)]


# Composition of collectives, traced by contribution.


def reduce_partitions(parts: Sequence[Partition]) -> Partition | None:
    """Return the groups of one reduction that is equal to consecutive reductions over `parts`, or None.

    This requires that every rank's value counts exactly once, equally on all ranks of a group, so the parts are axes of
    a full grid. Overlapping groups, groups of different sizes and missing ranks return None.
    """
    members = _joined_ranks(parts)
    return None if members is None else _as_disjoint({tuple(sorted(ranks)) for ranks in members})


def gather_partitions(parts: Sequence[Partition]) -> Partition | None:
    """Return the groups of one all_gather that is equal to consecutive all_gathers over `parts`, or None.

    The order of the ranks matters: the last part is the major one.
    """
    members = _joined_ranks(parts)
    return None if members is None else _as_disjoint(set(members))


def scatter_partitions(parts: Sequence[Partition]) -> Partition | None:
    """Return the groups of one reduce_scatter for those over `parts`: the adjoint of `gather_partitions`."""
    return gather_partitions(parts[::-1])


def _joined_ranks(parts: Sequence[Partition]) -> list[tuple[int, ...]] | None:
    """Return the distinct rank sequences after gathering over each part, or None for unequal groups."""
    members: dict[int, tuple[int, ...]] = {rank: (rank,) for group in parts[0] for rank in group}
    for part in parts:
        if {rank for group in part for rank in group} != members.keys() or len({len(g) for g in part}) != 1:
            return None
        joined = {group: tuple(itertools.chain.from_iterable(members[r] for r in group)) for group in part}
        members = {rank: joined[group] for group in part for rank in group}
    return list({id(ranks): ranks for ranks in members.values()}.values())


def _as_disjoint(groups: Iterable[tuple[int, ...]]) -> Partition | None:
    """Return the groups if no rank occurs twice, which implies that a group's ranks hold the same."""
    groups = sorted(groups)
    ranks = [rank for group in groups for rank in group]
    return tuple(groups) if len(set(ranks)) == len(ranks) else None


def _canonical_groups(groups: Partition, ordered: bool) -> Partition:
    return tuple(sorted(group if ordered else tuple(sorted(group)) for group in groups))


_declared_groups: weakref.WeakKeyDictionary[Any, KnownGroups] = weakref.WeakKeyDictionary()


def declared_groups() -> KnownGroups:
    """Return the groups declared in this process."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return _declared_groups.get(world, KnownGroups()) if world is not None else KnownGroups()


def add_declared(table: KnownGroups) -> None:
    """Add groups to the declared ones of this process."""
    world = dist.group.WORLD
    _declared_groups[world] = _declared_groups.get(world, KnownGroups()).merge(table)
