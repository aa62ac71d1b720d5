"""Which ranks take the same batches: the data-parallel replicas of a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import STRATEGIES, Mesh, Ranks, ranks_of, resolve
from sp_compile.runtime.agreement import all_gather_object, publish_failure

SAME_BATCH = frozenset({"sp", "cp", "tp", "ep", "etp", "pp"})
"""Mesh axes along which all ranks take the same batch, with those of strategies; along others they take other ones."""


@dataclass(frozen=True)
class Replica:
    """The ranks that take one batch, of which there are `n`, and this is number `rank`, from 0.

    first: is this rank the one that reads where one reads for all? sequence: those that it reads for. axes: the groups
    by which this rank reaches all others, one behind the other; each of them as `Ranks`.
    """

    rank: int
    n: int
    first: bool
    sequence: tuple[Ranks, ...]
    axes: tuple[Ranks, ...]


def replica_of(mesh: Mesh = None, mesh_dim: str | None = None, data_dims: str | Sequence[str] | None = None) -> Replica:
    """Where this rank stands.

    mesh: a DeviceMesh with named axes. data_dims: the axes along which ranks take different batches; by default all but
    those of `SAME_BATCH`, of strategies, and `mesh_dim`. Nobody is asked. With a mesh of one axis, or a group, its
    ranks take the same batches, and all ranks of the default process group ask each other who else there is, so all
    have to come. None: the default group is one replica.

    Raises SpError: a mesh of several axes without names, an axis that it lacks, this rank outside of it, groups that
    are not the default group cut in pieces.
    """
    with publish_failure():
        if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
            return _of_axes(mesh, mesh_dim, data_dims)
        if data_dims is not None:
            raise SpError("SP811", f"data_dims: {data_dims!r} names axes, but mesh does not have several axes.")
        ranks = resolve(mesh, mesh_dim) if isinstance(mesh, DeviceMesh) else ranks_of(mesh)
    return _of_group(ranks)


def _of_axes(mesh: DeviceMesh, mesh_dim: str | None, data_dims: str | Sequence[str] | None) -> Replica:
    names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names:
        raise SpError("SP812", f"mesh: expected names of the {mesh.ndim} axes, got None.")
    if coordinate is None:
        raise SpError("SP112", f"mesh: this rank ({dist.get_rank()}) is not in the mesh {mesh}.")
    given = [data_dims] if isinstance(data_dims, str) else data_dims
    for name in [*(given or ()), *([mesh_dim] if mesh_dim is not None else ())]:
        if name not in names:
            raise SpError("SP114", f"mesh: expected an axis {name!r}, got {names}.")
    if given is not None and mesh_dim in given:
        raise SpError("SP813", f"data_dims: {mesh_dim!r} is the axis of the sequence.")
    alike = SAME_BATCH.union({mesh_dim}, *(strategy.axes for strategy in STRATEGIES.values()))
    different = set(given) if given is not None else set(names) - alike
    if len(different) == len(names):
        raise SpError("SP814", f"mesh: expected an axis of the sequence, got {names}.")
    rank, n = 0, 1
    axes = [Ranks(mesh.size(i), mesh.get_group(i).group_name) for i in range(mesh.ndim)]
    for name, at, ranks in zip(names, coordinate, axes, strict=True):
        if name in different:
            rank, n = rank * ranks.n + at, n * ranks.n
    same = [i for i, name in enumerate(names) if name not in different]
    first = all(coordinate[i] == 0 for i in same)
    order = [*same, *(i for i in range(mesh.ndim) if i not in same)]
    return Replica(rank, n, first, tuple(axes[i] for i in same), tuple(axes[i] for i in order))


def _of_group(ranks: Ranks) -> Replica:
    group = ranks.process_group
    if group is None or not ranks.exchanges:
        return Replica(0, 1, True, (), ())
    members = dist.get_process_group_ranks(group)
    first = members[0] == dist.get_rank()
    world = ranks_of(dist.group.WORLD)
    if ranks.n == world.n:
        return Replica(0, 1, first, (ranks,), (ranks,))
    everyone = all_gather_object(world, "asks for", "the ranks that share a sequence", members)
    groups = sorted({tuple(one) for one in everyone}, key=min)
    if sum(map(len, groups)) != world.n or math.gcd(*map(len, groups)) != ranks.n:
        raise SpError(
            "SP815",
            f"mesh: expected groups of equal size over the {world.n} ranks of the default process group, got {groups}.",
        )
    return Replica(groups.index(tuple(members)), len(groups), first, (ranks,), (ranks, world))
