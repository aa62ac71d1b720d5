"""Resolve the ranks that share a sequence from a mesh or process group.

`Ranks` is the number of ranks and the name of their process group, which is what ``sp::`` operators take. `resolve`
returns it for the options `mesh` and `mesh_dim`, `ranks_of` for the `group` of a function on local shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.torch_compat import flatten_mesh, group_backend, is_known_process_group, process_group

from .errors import SpError
from .registry import Table

# Attention strategies (`passes.cost.attention_cost.Strategy`) by value of the option `attention`.
STRATEGIES: Table[Any] = Table("attention")


def process_rank() -> int:
    """Return the rank of this process, or 0 without processes."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@dataclass(frozen=True)
class Ranks:
    """Ranks that share one sequence."""

    n: int  # number of ranks
    group: str  # name of the process group; "" if there is none
    ulysses: int | None = None  # number of adjacent ranks that share heads, if the mesh has axes ("ring", "ulysses")

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Return the process group, or None in a simulation and for a single rank."""
        if not self.group or not dist.is_initialized():
            return None
        return process_group(self.group)

    @property
    def has_other_processes(self) -> bool:
        """Return True if the group has other processes. A group of torch's "fake" backend has none."""
        group = self.process_group
        return self.n > 1 and group is not None and "fake" not in str(dist.get_backend(group))

    def check_backend(self, device: torch.device) -> None:
        """Raise SpError if Gloo would exchange CUDA tensors, whose all-gather crashes the process.

        The crash is a segmentation fault, seen with torch 2.11 on an H100.

        Args:
            device: Device of the tensors.

        Raises:
            SpError: The group uses Gloo for tensors of a GPU.
        """
        if device.type != "cuda" or not dist.is_initialized() or not is_known_process_group(self.group):
            return
        if self.has_other_processes and group_backend(process_group(self.group), device) == "gloo":
            raise SpError(
                "SP117",
                f"The {self.n} ranks of group {self.group!r} exchange tensors of {device} by Gloo, whose all-gather of "
                "GPU tensors crashes the process.",
            )


# Ranks as passed to the functions on local shards. None selects the default group.
Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup | Ranks | None


def ranks_of(mesh: Mesh) -> Ranks:
    """Return the ranks that the argument `mesh` or `group` of a function on local shards describes.

    Inside torch.compile the result is a constant of the graph.

    Args:
        mesh: A DeviceMesh, process group or Ranks; None for the default group.

    Raises:
        SpError: This rank is not in the process group, or `resolve` fails.
    """
    if isinstance(mesh, Ranks):
        return mesh
    if mesh == dist.GroupMember.NON_GROUP_MEMBER:
        raise SpError("SP112", f"mesh or group: this rank ({dist.get_rank()}) is not in the process group.")
    if isinstance(mesh, dist.ProcessGroup):
        return Ranks(dist.get_world_size(mesh), mesh.group_name)
    return _resolve_mesh(mesh)


@torch.compiler.assume_constant_result
def _resolve_mesh(mesh: DeviceMesh | None) -> Ranks:
    """Call `resolve` as a constant of the graph that Dynamo traces."""
    return resolve(mesh, None)


def resolve(mesh: DeviceMesh | None, mesh_dim: str | None) -> Ranks:
    """Return the ranks that share the sequence: those of a mesh axis, or of the default group without a mesh.

    Some attention strategies split the sequence over a pair of axes, as hybrid attention over ("ring", "ulysses"). A
    mesh with both axes of a pair is flattened to one axis, row-major, of which adjacent ranks are on the inner axis.

    Args:
        mesh: The mesh, or None.
        mesh_dim: The axis that splits the sequence. May be None for a mesh of one axis, an axis "sp" or a pair of axes.

    Raises:
        SpError: The mesh lacks the axis, `mesh_dim` is missing, or this rank is not in the mesh.
    """
    if mesh is None:
        return _default_group(mesh_dim)
    if not isinstance(mesh, DeviceMesh):
        raise SpError("SP111", f"mesh: expected a torch.distributed DeviceMesh, got {type(mesh).__name__}.")
    ulysses = None
    pair = find_axis_pair(mesh) if mesh_dim is None else None
    if pair is not None:
        outer, inner = pair
        names = mesh.mesh_dim_names
        ulysses = mesh[inner].size()
        if names.index(outer) > names.index(inner):
            raise SpError("SP115", f"mesh: expected axis {outer!r} before axis {inner!r}, got axes {names}.")
        mesh = flatten_mesh(mesh[outer, inner], f"sp_{outer}_{inner}")
    mesh = _sequence_axis(mesh, mesh_dim)
    if mesh.get_coordinate() is None:
        raise SpError("SP112", f"mesh: this rank ({dist.get_rank()}) is not in the mesh {mesh}.")
    group = mesh.get_group()
    return Ranks(dist.get_world_size(group), group.group_name, ulysses)


def can_split_sequence(mesh: DeviceMesh | None, mesh_dim: str | None, groups: Sequence[Ranks]) -> bool:
    """Return True if `resolve` should determine the axis of the sequence for a program with collectives of its own.

    Such a program, as with tensor parallelism, may use all axes of the mesh itself; its sequence is then not split.

    Args:
        mesh: The mesh of the options, which may be of a wrong type.
        mesh_dim: The axis that the options name.
        groups: The groups of the program's own collectives.

    Returns:
        False without a mesh, if the groups use its only axis, or if it has several axes and none is for the sequence.
    """
    if mesh is None:
        return False
    if not isinstance(mesh, DeviceMesh):
        return True  # `resolve` raises an error for it
    if mesh.ndim == 1:
        return mesh.get_group().group_name not in {ranks.group for ranks in groups}
    return mesh_dim is not None or "sp" in (mesh.mesh_dim_names or ()) or find_axis_pair(mesh) is not None


def find_axis_pair(mesh: DeviceMesh) -> tuple[str, str] | None:
    """Return the pair of axes of a strategy, such as ("ring", "ulysses"), that the mesh has; None if it has none."""
    pairs: list[tuple[str, str]] = [strategy.axes for strategy in STRATEGIES.values() if strategy.axes]
    return next((pair for pair in pairs if set(pair) <= set(mesh.mesh_dim_names or ())), None)


def _default_group(mesh_dim: str | None) -> Ranks:
    """Return the ranks of the default process group, or a single rank without one."""
    if mesh_dim is not None:
        raise SpError("SP116", f"mesh_dim: {mesh_dim!r} names an axis of a mesh, but mesh is None.")
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(1, "")
    return ranks_of(dist.group.WORLD)


def _sequence_axis(mesh: DeviceMesh, mesh_dim: str | None) -> DeviceMesh:
    """Return the 1-D mesh of the axis that splits the sequence: `mesh_dim`, by default "sp" or the only axis.

    Raises:
        SpError: The mesh does not have the axis.
    """
    names = mesh.mesh_dim_names
    if mesh.ndim > 1:
        axis = mesh_dim or "sp"
        if axis not in (names or ()):
            raise SpError("SP113", f"mesh: expected an axis {axis!r}, got {mesh.ndim} axes {names or 'without names'}.")
        return mesh[axis]
    if mesh_dim is not None and mesh_dim not in (names or ()):
        raise SpError("SP114", f"mesh: expected an axis {mesh_dim!r}, got {names or 'one without a name'}.")
    return mesh


SINGLE_RANK = Ranks(1, "")  # ranks of a single-device program
