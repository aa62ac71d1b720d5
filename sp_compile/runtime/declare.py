"""Declare the groups of a mesh to the passes, and create communicators over several axes.

Every rank of the program must take part in the creation of a communicator, at the same point. A pass cannot create one,
since compilation runs at different times on different ranks. The program therefore declares its mesh once.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.torch_compat import group_timeout, process_groups
from sp_compile.passes.cost.known_groups import KnownGroups, Partition, add_declared, label_subsets, reduce_partitions
from sp_compile.passes.cost.measure import measure_reductions
from sp_compile.runtime.control.message import MEASURE_VERB, register_sendable

from .agreement import all_gather_object, failure, make_error_barrier, wrap_error


def declare_groups(
    mesh: DeviceMesh | Sequence[dist.ProcessGroup], unions: Sequence[Sequence[str]] | None = None, measure: bool = True
) -> KnownGroups:
    """Declare the axes of a mesh, so that `merge_reductions` can merge collectives over several axes.

    Every rank of the program must call it at the same point, including the ranks outside of the mesh. Existing
    communicators of the same ranks are reused: those of a flattened mesh, of the default group and of an earlier call.

    Args:
        mesh: A DeviceMesh, or one process group of this rank for each axis: None, or the result of new_group, where
            this rank is in none. The axes of a sequence are named "0", "1", ... Two axes may have the same groups, as
            tensor and expert parallelism often do.
        unions: Names of the axes that may be reduced together, such as [("dp", "sp")]; [] for none. By default every
            subset of two or more axes that forms a full grid, without repeated or overlapping groups. That is one
            communicator a rank for two axes and four for three.
        measure: If True, time the all-reduces of each communicator on these ranks. Measurements of this process or on
            the disk of rank 0 are reused.

    Returns:
        The table of groups. The backend finds it without further configuration.

    Raises:
        SpError: On every rank, if there is no process group, mesh or axis; if the arguments differ between ranks; if an
            axis has no group, or two groups of a rank; if a rank passes None for an axis but is in the group of another
            rank; or if `unions` has an unknown axis, or axes whose ranks do not form a grid.
    """
    if not dist.is_initialized():
        raise SpError("SP614", "declare_groups: there is no default process group.")
    world = dist.group.WORLD
    ranks = Ranks(world.size(), world.group_name)
    every: list[_Declaration] = all_gather_object(ranks, "declares", "groups", _make_declaration(mesh, unions, measure))
    axes = _agreed_axes(every)
    names, turns = _create_communicators(axes, every)
    near = _reachable_ranks(dist.get_rank(), [groups for _, groups in names])
    members = {name: tuple(g for g in groups if g[0] in near) for name, groups in names if name is not None}
    hosts = [told.host for told in every]
    table = KnownGroups(members, {r: hosts.index(host) for r, host in enumerate(hosts)})
    where = _common_device(every)
    if every[0].measure and where is not None:
        lines, in_turn = measure_reductions(
            names,
            turns,
            _device_of_kind(every[0].device),
            _device_of_kind(where),
            make_error_barrier(ranks, MEASURE_VERB),
        )
        table = replace(table, lines=lines, turns=in_turn)
    add_declared(table)
    return table


@register_sendable
@dataclass(frozen=True)
class _Axis:
    """Process group of one rank."""

    name: str  # of the group in torch
    ranks: tuple[int, ...]  # global ranks
    backend: str  # backend of each device type, such as "cpu:gloo,cuda:nccl"


@register_sendable
@dataclass(frozen=True)
class _Declaration:
    """Message that a rank sends to the others to declare its groups."""

    host: str  # name of the machine
    device: str = "cpu"  # device type of the mesh
    axes: Mapping[str, _Axis | None] = field(default_factory=dict)  # group of the rank for each axis
    existing: tuple[_Axis, ...] = ()  # all process groups of the rank
    unions: tuple[tuple[str, ...], ...] | None = None  # axes to reduce together; None for the default
    measure: bool = True  # time the all-reduces
    error: SpError | None = None  # error of this rank, if its arguments are invalid


def _make_declaration(mesh: Any, unions: Any, measure: Any) -> _Declaration:
    """Return the declaration of this rank.

    An error is sent as well: if this rank raised here, the others would wait.
    """
    host = platform.node()
    try:
        existing = tuple(_Axis(*group) for group in process_groups())
        by_name = {axis.name: axis for axis in existing}
        axes = {
            label: by_name[group.group_name] if isinstance(group, dist.ProcessGroup) else None
            for label, group in _groups_of(mesh).items()
        }
        return _Declaration(host, _device_type(mesh), axes, existing, _validate_unions(unions), bool(measure))
    except Exception as error:
        return _Declaration(host, error=wrap_error(error))


def _validate_unions(unions: Any) -> tuple[tuple[str, ...], ...] | None:
    """Return `unions` as tuples of strings; raise SpError for other types, since the ranks compare the result."""
    if unions is None:
        return None
    lists = isinstance(unions, list | tuple) and all(isinstance(labels, list | tuple) for labels in unions)
    if not lists or not all(isinstance(label, str) for labels in unions for label in labels):
        raise SpError("SP616", f"unions: expected lists of names of axes, got {unions!r}.")
    return tuple(tuple(labels) for labels in unions)


def _groups_of(mesh: Any) -> dict[str, dist.ProcessGroup | None]:
    """Return the group of this rank for each axis."""
    if isinstance(mesh, DeviceMesh):
        labels = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        inside = mesh.get_coordinate() is not None
        return {label: mesh.get_group(dim) if inside else None for dim, label in enumerate(labels)}
    outside = (None, dist.GroupMember.NON_GROUP_MEMBER)
    if (
        not isinstance(mesh, Sequence)
        or not mesh
        or not all(isinstance(g, dist.ProcessGroup) or g in outside for g in mesh)
    ):
        got = mesh if mesh == [] else type(mesh).__name__
        raise SpError(
            "SP615", f"mesh: expected a DeviceMesh, or for each axis the process group of this rank, got {got}."
        )
    return {str(i): group if isinstance(group, dist.ProcessGroup) else None for i, group in enumerate(mesh)}


def _agreed_axes(every: Sequence[_Declaration]) -> dict[str, Partition]:
    """Return the groups of all ranks for each axis."""
    if failed := failure([told.error for told in every]):
        raise failed.with_context("declare_groups: ")
    for rank, told in enumerate(every):
        theirs, ours = _describe_arguments(told), _describe_arguments(every[0])
        if theirs != ours:
            raise SpError("SP617", f"declare_groups: rank {rank} passes {theirs}, rank 0 {ours}.")
    return {label: _axis_groups(label, [told.axes[label] for told in every]) for label in every[0].axes}


def _describe_arguments(told: _Declaration) -> str:
    return f"axes {tuple(told.axes)}, unions {told.unions} and measure={told.measure}"


def _axis_groups(label: str, mine: Sequence[_Axis | None]) -> Partition:
    """Return the groups of one axis from the group of each rank."""
    groups = sorted({axis.ranks for axis in mine if axis is not None})
    ranks = [rank for group in groups for rank in group]
    if not groups:
        raise SpError("SP618", f"declare_groups: no rank passes a group of axis {label!r}.")
    if len(set(ranks)) != len(ranks):
        raise SpError("SP618", f"declare_groups: the groups of axis {label!r} overlap: {groups}.")
    outside = [(rank, group) for group in groups for rank in group if mine[rank] is None]
    if outside:
        rank, group = outside[0]
        cause = f"rank {rank} passes None for axis {label!r}, but is in the group {group} that others pass."
        raise SpError("SP618", f"declare_groups: {cause}")
    return tuple(groups)


def _create_communicators(
    axes: Mapping[str, Partition], every: Sequence[_Declaration]
) -> tuple[list[tuple[str | None, Partition]], list[list[int]]]:
    """Return the communicators of this rank for each axis and union, and the axis indices of each union."""
    mine = every[dist.get_rank()].axes
    names = [(axis.name if (axis := mine[label]) else None, groups) for label, groups in axes.items()]
    made: dict[Partition, str | None] = {}
    turns = []
    for labels, groups in _requested_unions(axes, every[0].unions):
        if groups not in made:
            made[groups] = _find_communicator(groups, labels[0], every)
        names.append((made[groups], groups))
        turns.append([list(axes).index(label) for label in labels])
    return names, turns


def _requested_unions(
    axes: Mapping[str, Partition], asked: Sequence[Sequence[str]] | None
) -> list[tuple[Sequence[str], Partition]]:
    """Return the axes that share a communicator, with the groups of each union."""
    found = []
    for labels in label_subsets(list(axes)) if asked is None else asked:
        unknown = [label for label in labels if label not in axes]
        if unknown or not labels:
            raise SpError("SP616", f"unions: expected axes out of {list(axes)}, got {unknown}.")
        groups = reduce_partitions([axes[label] for label in labels])
        if groups is not None:
            found.append((labels, groups))
        elif asked is not None:
            shown = [axes[label] for label in labels]
            raise SpError("SP616", f"unions: the groups of {tuple(labels)} are not a full grid: {shown}.")
    return found


def _find_communicator(groups: Partition, like: str, every: Sequence[_Declaration]) -> str | None:
    """Return the name of the communicator of this rank in `groups`.

    A communicator that all members have is reused; otherwise a new one is created.
    """
    mine = None
    usual = next(e.backend for e in every[0].existing if len(e.ranks) == len(every))
    for ranks in groups:
        axis = every[ranks[0]].axes[like]
        assert axis is not None
        common = [
            e
            for e in every[ranks[0]].existing
            if (e.ranks, e.backend) == (ranks, axis.backend) and all(e in every[r].existing for r in ranks)
        ]
        if common:
            name = common[0].name
        else:
            backend = axis.backend if axis.backend != usual else None
            made = dist.new_group(list(ranks), group_timeout(dist.group.WORLD), backend)
            name = ""
        if dist.get_rank() in ranks:
            mine = name or made.group_name
    return mine


def _reachable_ranks(rank: int, parts: Sequence[Partition]) -> set[int]:
    """Return the ranks that are connected to this rank through groups.

    Other ranks may have a separate mesh of another shape.
    """
    near, size = {rank}, 0
    while size != len(near):
        size = len(near)
        near.update(r for part in parts for group in part if not near.isdisjoint(group) for r in group)
    return near


def _common_device(every: Sequence[_Declaration]) -> str | None:
    """Return the device type that all groups support.

    Returns None if there is none, as for nccl groups with a gloo default group on the CPU.
    """
    world = next(e for e in every[0].existing if len(e.ranks) == len(every))
    used = [axis for told in every for axis in told.axes.values() if axis is not None]
    common = set.intersection(*({part.split(":")[0] for part in a.backend.split(",")} for a in [world, *used]))
    order = ["cpu"] if dist.get_backend() == "gloo" else []
    return next((kind for kind in [*order, every[0].device, *sorted(common)] if kind in common), None)


def _device_type(mesh: Any) -> str:
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    accelerator = torch.accelerator.current_accelerator()
    only_cpu = accelerator is None or dist.get_backend() == "gloo"
    return "cpu" if only_cpu else accelerator.type


def _device_of_kind(kind: str) -> torch.device:
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device(kind)
