"""Table of the process groups of a mesh with their ranks on all processes, for passes.

A partition is a set of disjoint groups of ranks, such as those of one mesh axis. Example: the first axis of a 2 x 2
mesh is the partition ((0, 2), (1, 3)). A declared group is one that the user has passed to `declare_groups`.

A graph names only the groups of the rank that traced it. Decisions of a pass about groups must be equal on all ranks,
so they use this table, which contains the groups of all ranks, not the process groups of the current rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist

from sp_compile.lowering.base.errors import SpError

from .collective_time import LatencyBandwidth

# disjoint groups of one mesh axis, or of several joined axes: global ranks in group order
Partition: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class KnownGroups:
    """Table of declared groups."""

    # name of a group in this rank's graphs -> the partition of all ranks to which it belongs
    members: Mapping[str, Partition] = field(default_factory=dict)
    nodes: Mapping[int, int] = field(default_factory=dict)  # rank -> machine number, 0 by default
    lines: Mapping[str, LatencyBandwidth] = field(default_factory=dict)  # group name -> measured all_reduce time

    def __getitem__(self, name: str) -> Partition:
        """Return the partition to which the group called `name` belongs: all groups of its mesh axis.

        Raises:
            SpError: If the group was not declared.
        """
        if name not in self.members:
            raise self.undeclared_error(name)
        return self.members[name]

    def undeclared_error(self, name: str, collective: str = "") -> SpError:
        """Return the error about a group called `name` that was not declared, with the collective that runs over it."""
        group = f"group {name!r} of {collective}" if collective else f"group {name!r}"
        declared = ", ".join(map(repr, sorted(self.members))) or "none"
        return SpError("SP611", f"{group} was not declared; declared groups: {declared}.")

    def size(self, name: str) -> int:
        """Return the number of ranks of the group called `name`."""
        return len(self[name][0])

    def communicator(self, partition: Partition, ordered: bool = False) -> str | None:
        """Return the name of a declared group of this partition, over which a merged collective can run, or None.

        Args:
            partition: The groups of the merged collective, on all ranks.
            ordered: True if the order of ranks in a group matters.
        """
        key = _canonical_groups(partition, ordered)
        return next((name for name, groups in self.members.items() if _canonical_groups(groups, ordered) == key), None)

    def is_in_one_node(self, name: str) -> bool:
        """Return True if each group in the partition of `name` is on one machine."""
        return all(len({self.nodes.get(rank, 0) for rank in group}) == 1 for group in self[name])

    def merge(self, other: KnownGroups) -> KnownGroups:
        """Return the union of both tables; the entries of `other` take precedence."""
        return KnownGroups(
            members={**self.members, **other.members},
            nodes={**self.nodes, **other.nodes},
            lines={**self.lines, **other.lines},
        )


def label_subsets(labels: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all subsets of two or more axis labels; a communicator over the ranks of each is created."""
    sizes = range(2, len(labels) + 1)
    return [subset for size in sizes for subset in itertools.combinations(labels, size)]


# Composition of collectives. Each rank has the sequence of ranks whose values contribute to its result.


def reduce_partitions(partitions: Sequence[Partition]) -> Partition | None:
    """Return the groups of one reduction equal to consecutive reductions over `partitions`, or None.

    A partition is the groups of one mesh axis, on all ranks. For the axes ((0, 2), (1, 3)) and ((0, 1), (2, 3)) of a
    2 x 2 mesh the result is ((0, 1, 2, 3),). Every rank's value must count exactly once, equally on all ranks of a
    group. Returns None for overlapping groups, groups of different sizes and missing ranks.
    """
    members = _joined_ranks(partitions)
    return None if members is None else _as_disjoint({tuple(sorted(ranks)) for ranks in members})


def gather_partitions(partitions: Sequence[Partition]) -> Partition | None:
    """Return the groups of one all_gather equal to consecutive all_gathers over `partitions`, or None.

    The order of the ranks matters: the last partition is the major one. After ((0, 2), (1, 3)) and ((0, 1), (2, 3)),
    each rank has the values in the order 0, 2, 1, 3.
    """
    members = _joined_ranks(partitions)
    return None if members is None else _as_disjoint(set(members))


def scatter_partitions(partitions: Sequence[Partition]) -> Partition | None:
    """Return the groups of one reduce_scatter equal to consecutive ones over `partitions`, or None.

    It is the adjoint of an all_gather, so the order of the partitions is reversed.
    """
    return gather_partitions(partitions[::-1])


def _joined_ranks(partitions: Sequence[Partition]) -> list[tuple[int, ...]] | None:
    """Return the ranks whose values a rank has, in order, after an all_gather over each partition in order.

    There is one sequence for each group of the last partition. After ((0, 2), (1, 3)), ranks 0 and 2 have the values of
    (0, 2), ranks 1 and 3 those of (1, 3). After ((0, 1), (2, 3)), all ranks have those of (0, 2, 1, 3): the result has
    this sequence twice, and the caller counts it once. Returns None if a partition has groups of different sizes or
    other ranks than the first one.
    """
    # rank -> ranks whose values it has
    sequences: dict[int, tuple[int, ...]] = {rank: (rank,) for group in partitions[0] for rank in group}
    gathered: dict[tuple[int, ...], tuple[int, ...]] = {}  # group of the partition -> ranks whose values its ranks have
    for partition in partitions:
        if set(itertools.chain(*partition)) != sequences.keys() or len(set(map(len, partition))) != 1:
            return None
        gathered = {group: tuple(itertools.chain(*(sequences[rank] for rank in group))) for group in partition}
        sequences = {rank: gathered[group] for group in partition for rank in group}
    return list(gathered.values())


def _as_disjoint(groups: Collection[tuple[int, ...]]) -> Partition | None:
    """Return the sorted groups; None if two of them share a rank, so that results in a group differ."""
    ranks = list(itertools.chain(*groups))
    return tuple(sorted(groups)) if len(set(ranks)) == len(ranks) else None


def _canonical_groups(groups: Partition, ordered: bool) -> Partition:
    """Return the groups in sorted order, for a comparison; without `ordered`, their ranks are sorted, too."""
    if not ordered:
        groups = tuple(tuple(sorted(group)) for group in groups)
    return tuple(sorted(groups))


# default process group -> its table
_declared_groups: weakref.WeakKeyDictionary[Any, KnownGroups] = weakref.WeakKeyDictionary()


def declared_groups() -> KnownGroups:
    """Return the groups declared in this process; empty before `torch.distributed` is initialized."""
    return _declared_groups.get(dist.group.WORLD, KnownGroups()) if dist.is_initialized() else KnownGroups()


def add_declared(table: KnownGroups) -> None:
    """Add groups to the declared ones of this process."""
    _declared_groups[dist.group.WORLD] = declared_groups().merge(table)
