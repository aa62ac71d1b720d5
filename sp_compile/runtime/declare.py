"""Declare the groups of a mesh to the passes, and create communicators over several axes.

An axis of a mesh splits all ranks into groups; a communicator over several axes has the ranks of all of them (a union).
Every rank of the program must take part in the creation of a communicator, at the same point. A pass cannot create one,
since compilation runs at different times on different ranks. The program therefore declares its mesh once. The mesh is
not flattened (`DeviceMesh._flatten`): DTensor would then merge its redistributions independently of `merge_reductions`.
torch's switch for that is a private context manager, which would have to be active in the user's code, around each
operation of a DTensor.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.lowering.torch_compat import group_timeout, process_groups
from sp_compile.passes.cost.known_groups import KnownGroups, Partition, add_declared, label_subsets, reduce_partitions
from sp_compile.passes.cost.measure import measure_reductions
from sp_compile.runtime.control.message import MEASURE_MESSAGE, register_sendable

from .agreement import all_gather_object, make_exchange, merge_failures, wrap_error

# name of a process group, its global ranks, and its backends, such as "cpu:gloo,cuda:nccl"
GroupEntry: TypeAlias = tuple[str, tuple[int, ...], str]


def declare_groups(mesh: DeviceMesh | Sequence[dist.ProcessGroup | None], measure: bool = True) -> KnownGroups:
    """Declare the axes of a mesh, so that `merge_reductions` can merge collectives over several axes.

    Every rank of the program must call it at the same point, including the ranks outside of the mesh. Each subset of
    two or more axes that forms a full grid gets a communicator: one for two axes, four for three. Declare a submesh,
    such as `mesh["dp", "sp"]`, to create fewer. Existing communicators of the same ranks are reused: those of a
    flattened mesh, of the default group and of an earlier call.

    Args:
        mesh: A DeviceMesh, or one process group of this rank for each axis: None, or the result of new_group, where
            this rank is in none. Two axes may have the same groups, as tensor and expert parallelism often do.
        measure: If True, time the all-reduces of each communicator on these ranks. Measurements of this process or on
            the disk of rank 0 are reused.

    Returns:
        The table of groups. The backend finds it without further configuration.

    Raises:
        SpError: On every rank, if there is no process group, mesh or axis; if the arguments differ between ranks; or if
            the groups of an axis overlap, or a rank does not pass the group that it is in.
    """
    if not dist.is_initialized():
        raise SpError("SP614", "declare_groups: there is no default process group.")
    ranks = ranks_of(dist.group.WORLD)
    declarations: list[_Declaration] = all_gather_object(ranks, "declares", "groups", _make_declaration(mesh, measure))
    axes = _agreed_axes(declarations)  # label of an axis -> the ranks of each of its groups
    own_groups = declarations[dist.get_rank()].axes
    # The name of this rank's group by axis: the first item of its `GroupEntry`; None if the rank is not in the mesh.
    own_names = {label: entry[0] if entry else None for label, entry in own_groups.items()}
    # For each axis, the name of this rank's group and the ranks of all groups.
    groups = [(name, axes[label]) for label, name in own_names.items()]
    # Add the same for the communicators over several axes; `union` is None if these axes form no full grid.
    for labels in label_subsets(list(axes)):
        union = reduce_partitions([axes[label] for label in labels])
        if union is not None and union not in [partition for _, partition in groups]:
            groups.append((_find_communicator(union, labels[0], declarations), union))
    hosts = [declaration.host for declaration in declarations]
    members = {name: partition for name, partition in groups if name is not None}
    table = KnownGroups(members, {rank: hosts.index(host) for rank, host in enumerate(hosts)})
    # Time the all-reduces, if every group has a backend for tensors of the device.
    device = _device_of_messages()
    passed_groups = [entry for declaration in declarations for entry in declaration.axes.values() if entry]
    if measure and all(f"{device.type}:" in backends for _, _, backends in passed_groups):
        table = replace(table, lines=measure_reductions(groups, device, make_exchange(ranks, MEASURE_MESSAGE)))
    add_declared(table)
    return table


@register_sendable
@dataclass(frozen=True)
class _Declaration:
    """Message that a rank sends to the others to declare its groups."""

    host: str  # name of the machine
    axes: Mapping[str, GroupEntry | None] = field(default_factory=dict)  # group of the rank for each axis
    existing: tuple[GroupEntry, ...] = ()  # all process groups of the rank, oldest first
    measure: bool = True  # time the all-reduces
    error: SpError | None = None  # error of this rank, if its arguments are invalid


def _make_declaration(mesh: Any, measure: Any) -> _Declaration:
    """Return the declaration of this rank, which it then sends to all ranks.

    The declaration contains an error of the arguments, if any: if this rank raised here, the others would wait.
    """
    host = platform.node()
    try:
        existing = {record.name: record for record in process_groups()}
        axes = {
            label: existing[group.group_name] if isinstance(group, dist.ProcessGroup) else None
            for label, group in _groups_of(mesh).items()
        }
        return _Declaration(host, axes, tuple(existing.values()), bool(measure))
    except Exception as error:
        return _Declaration(host, error=wrap_error(error))


def _groups_of(mesh: Any) -> dict[str, Any]:
    """Return the process group of this rank for each axis of the argument `mesh`; None if it is in no group.

    The label of an axis is its name, or its number if it has none.

    Raises:
        SpError: The argument is neither a mesh nor a list of groups (SP615).
    """
    if isinstance(mesh, DeviceMesh):
        labels = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        is_in_mesh = mesh.get_coordinate() is not None
        return dict(zip(labels, mesh.get_all_groups() if is_in_mesh else [None] * mesh.ndim))
    if not isinstance(mesh, list | tuple) or not mesh:
        cause = "mesh: expected a DeviceMesh, or for each axis the process group of this rank"
        raise SpError("SP615", f"{cause}, got {mesh if mesh == [] else type(mesh).__name__}.")
    return dict(zip(map(str, range(len(mesh))), mesh))


def _agreed_axes(declarations: Sequence[_Declaration]) -> dict[str, Partition]:
    """Check the declarations of all ranks, and combine them.

    Returns:
        The ranks of each group, by axis.

    Raises:
        SpError: The declaration of a rank has an error, or the declarations do not agree.
    """
    error = merge_failures([declaration.error for declaration in declarations])
    if error is not None:
        raise error.with_context("declare_groups: ")
    arguments = [f"axes {tuple(x.axes)} and measure={x.measure}" for x in declarations]
    for rank, text in enumerate(arguments):
        if text != arguments[0]:
            raise SpError("SP617", f"declare_groups: rank {rank} passes {text}, rank 0 {arguments[0]}.")
    axes: dict[str, Partition] = {}
    for label in declarations[0].axes:
        # For each rank, the (name, ranks, backends) of its group; None if it passed no group for the axis.
        entries = [declaration.axes[label] for declaration in declarations]
        passed_groups = [entry[1] if entry else None for entry in entries]  # the ranks of the group of each rank
        axes[label] = tuple(sorted({group for group in passed_groups if group}))
        for rank, passed_group in enumerate(passed_groups):
            is_in_other_group = any(rank in group and group != passed_group for group in axes[label])
            if not axes[label] or is_in_other_group:
                expected = f"groups of axis {label!r} without common ranks, each passed by all of its ranks"
                got = f"{passed_group} from rank {rank}, and {list(axes[label])} from all ranks"
                raise SpError("SP618", f"declare_groups: expected {expected}, got {got}.")
    return axes


def _find_communicator(union: Partition, label: str, declarations: Sequence[_Declaration]) -> str | None:
    """Return the name of the communicator over several axes that contains this rank, or None.

    A communicator that all members have is reused; otherwise a new one is created. Every rank calls this function.

    Args:
        union: The ranks of each communicator over these axes.
        label: One of the axes, whose backend the communicators use.
        declarations: Declaration of each rank.
    """
    own_name: str | None = None
    # A group is a tuple (name, ranks, backends). The default group is the oldest one with all ranks.
    default_backends = next(
        backends for _, ranks, backends in declarations[0].existing if len(ranks) == len(declarations)
    )
    for ranks in union:
        members = [declarations[rank] for rank in ranks]
        axis_group = members[0].axes[label]
        assert axis_group is not None
        _, _, backends = axis_group
        known_to_all = set.intersection(*(set(member.existing) for member in members))
        reusable = [entry for entry in members[0].existing if entry in known_to_all and entry[1:] == (ranks, backends)]
        is_member = dist.get_rank() in ranks
        if reusable:
            name, _, _ = reusable[0]
        else:  # new_group requires that every rank of the program calls it
            backend = backends if backends != default_backends else None  # None: those of the default group
            group = dist.new_group(list(ranks), group_timeout(dist.group.WORLD), backend)
            name = group.group_name if is_member else ""
        if is_member:
            own_name = name
    return own_name


def _device_of_messages() -> torch.device:
    """Return the device of tensors that collectives of the default group accept, to time them with such tensors."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
