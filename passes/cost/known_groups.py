"""Which ranks the groups of a mesh hold, and which communicator holds several of them at once: a table for passes.

A graph names only the groups of the rank that it was traced on. What a pass decides about them has to be the same on
every rank, so it asks this table, which knows the groups of all ranks, and never the process it runs in.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed as dist

from sp_compile.lowering.base.errors import SpError

from .collective_time import LatencyBandwidth

Partition: TypeAlias = tuple[tuple[int, ...], ...]
"""The groups of one mesh axis, or of several at once: the global ranks of each, in the order of the group."""


@dataclass(frozen=True)
class KnownGroups:
    """The groups that were declared.

    members: group name, as this rank's graphs have it -> the groups of its kind on all ranks.
    nodes: rank -> number of the machine it runs on; a rank that is not in it has machine 0.
    lines: group name -> what an all_reduce over it takes, by the bytes that a rank sends, where that was measured.
    turns: names of several -> the same of all_reduces over one behind the other.
    """

    members: Mapping[str, Partition] = field(default_factory=dict)
    nodes: Mapping[int, int] = field(default_factory=dict)
    lines: Mapping[str, LatencyBandwidth] = field(default_factory=dict)
    turns: Mapping[frozenset[str], LatencyBandwidth] = field(default_factory=dict)

    @staticmethod
    def of(mesh_shape: Sequence[int], names: Sequence[str], ranks_per_node: int | None = None) -> KnownGroups:
        """The table of a row-major mesh without processes: axes called `names`, and a union "a+b" of any of them."""
        if len(mesh_shape) != len(names) or len(set(names)) != len(names):
            raise SpError(
                "SP613", f"names: expected one name for each axis of the mesh {tuple(mesh_shape)}, got {tuple(names)}."
            )
        axes = {name: mesh_axis_groups(mesh_shape, dim) for dim, name in enumerate(names)}
        members = dict(axes)
        for several in label_subsets(names):
            union = reduce_partitions([axes[name] for name in several])
            assert union is not None
            members["+".join(several)] = union
        ranks = range(math.prod(mesh_shape))
        return KnownGroups(members, {r: r // ranks_per_node if ranks_per_node else 0 for r in ranks})

    def __getitem__(self, name: str) -> Partition:
        """The groups called `name`. Raises SpError if none was declared."""
        if name not in self.members:
            known = ", ".join(map(repr, sorted(self.members))) or "none"
            raise SpError("SP611", f"group {name!r} was not declared; declared groups: {known}.")
        return self.members[name]

    def size(self, name: str) -> int:
        """How many ranks a group of that name has."""
        return len(self[name][0])

    def communicator(self, union: Partition, ordered: bool = False) -> str | None:
        """The name of the groups of these ranks, `ordered`: in this order; None if there are none."""
        wanted = _canonical_groups(union, ordered)
        return next((n for n, groups in self.members.items() if _canonical_groups(groups, ordered) == wanted), None)

    def is_in_one_node(self, name: str) -> bool:
        """Does each of the groups lie within one machine?"""
        return all(len({self.nodes.get(rank, 0) for rank in group}) == 1 for group in self[name])

    def merge(self, other: KnownGroups) -> KnownGroups:
        """Both tables in one."""
        return KnownGroups(**{name: {**table, **getattr(other, name)} for name, table in vars(self).items()})


def mesh_axis_groups(mesh_shape: Sequence[int], dim: int) -> Partition:
    """The groups of one axis of a row-major mesh: (2, 3), 0 -> (0, 3), (1, 4), (2, 5)."""
    inner, size = math.prod(mesh_shape[dim + 1 :]), mesh_shape[dim]
    firsts = (o * size * inner + i for o in range(math.prod(mesh_shape[:dim])) for i in range(inner))
    return tuple(tuple(first + k * inner for k in range(size)) for first in firsts)


def label_subsets(labels: Sequence[str]) -> list[tuple[str, ...]]:
    """Every two or more of the labels, in their order."""
    sizes = range(2, len(labels) + 1)
    return [several for size in sizes for several in itertools.combinations(labels, size)]


# What one collective after the other amounts to, traced contribution by contribution.


def reduce_partitions(parts: Sequence[Partition]) -> Partition | None:
    """The groups over which one reduction is the same as reductions over `parts`, one after the other.

    They are if every rank's value then counts exactly once, on all ranks of a group alike: the parts are the axes of a
    full grid. None if they are not: overlapping groups, groups of unequal sizes, ranks that some of the parts lack.
    """
    held = _held_ranks(parts)
    return None if held is None else _as_disjoint({tuple(sorted(ranks)) for ranks in held})


def gather_partitions(parts: Sequence[Partition]) -> Partition | None:
    """The groups whose all_gather is the same as all_gathers over `parts`, one after the other; None if there are none.

    The order of the ranks counts: that of the last part is the major one.
    """
    held = _held_ranks(parts)
    return None if held is None else _as_disjoint(set(held))


def scatter_partitions(parts: Sequence[Partition]) -> Partition | None:
    """The groups whose reduce_scatter is that of reduce_scatters over `parts`: the adjoint of `gather_partitions`."""
    return gather_partitions(parts[::-1])


def _held_ranks(parts: Sequence[Partition]) -> list[tuple[int, ...]] | None:
    """The ranks whose values a rank has after each has taken those of its group, part by part; equal ones once."""
    held: dict[int, tuple[int, ...]] = {rank: (rank,) for group in parts[0] for rank in group}
    for part in parts:
        if {rank for group in part for rank in group} != held.keys() or len({len(g) for g in part}) != 1:
            return None
        joined = {group: tuple(itertools.chain.from_iterable(held[r] for r in group)) for group in part}
        held = {rank: joined[group] for group in part for rank in group}
    return list({id(ranks): ranks for ranks in held.values()}.values())


def _as_disjoint(groups: Iterable[tuple[int, ...]]) -> Partition | None:
    """The groups, if no rank occurs twice. Each rank is in what it holds, so then all of a group hold the same."""
    groups = sorted(groups)
    ranks = [rank for group in groups for rank in group]
    return tuple(groups) if len(set(ranks)) == len(ranks) else None


def _canonical_groups(groups: Partition, ordered: bool) -> Partition:
    return tuple(sorted(group if ordered else tuple(sorted(group)) for group in groups))


_declared_groups: weakref.WeakKeyDictionary[Any, KnownGroups] = weakref.WeakKeyDictionary()


def declared_groups() -> KnownGroups:
    """All that was declared in this process; an empty table if nothing was."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return _declared_groups.get(world, KnownGroups()) if world is not None else KnownGroups()


def add_declared(table: KnownGroups) -> None:
    """Add groups to the declared ones of this process."""
    world = dist.group.WORLD
    _declared_groups[world] = _declared_groups.get(world, KnownGroups()).merge(table)
