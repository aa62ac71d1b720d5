"""The ranks that share a sequence: their number and the name of their process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._compat import flat_mesh, process_group
from .errors import SpError


@dataclass(frozen=True)
class Ranks:
    """`n` ranks that hold one sequence between them; `group`: the process group's name ("" where there is none).

    ulysses: how many neighbours share heads, where the mesh says so by a (ring, ulysses) pair of axes.
    """

    n: int
    group: str
    ulysses: int | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group itself; None where there are no processes (a simulation, a single rank)."""
        if not self.group or not dist.is_initialized():
            return None
        return process_group(self.group)


Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup | Ranks | None
"""How the functions on local shards are told their ranks; None is the default group."""


def ranks_of(mesh: Mesh) -> Ranks:
    """The ranks of a function on local shards; see `resolve`. Inside torch.compile they are constants.

    Raises SpError: what `resolve` raises, and this rank outside the process group.
    """
    if isinstance(mesh, Ranks):
        return mesh
    if mesh == dist.GroupMember.NON_GROUP_MEMBER:
        raise SpError(f"mesh: this rank ({dist.get_rank()}) is not in the process group")
    if isinstance(mesh, dist.ProcessGroup):
        return Ranks(dist.get_world_size(mesh), mesh.group_name)
    return _resolved(mesh)


@torch.compiler.assume_constant_result
def _resolved(mesh: DeviceMesh | None) -> Ranks:
    return resolve(mesh, None)


def splits_sequence(mesh: DeviceMesh | None, mesh_dim: str | None, others: Sequence[Ranks]) -> bool:
    """Has a program that already talks over `others` a mesh axis left for its sequence?

    Not without a mesh, nor with one whose axes its groups take, nor with one of several axes none of which is named.
    """
    if not isinstance(mesh, DeviceMesh):
        return mesh is not None
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and mesh_dim is None and "sp" not in names and not {"ring", "ulysses"} <= set(names):
        return False
    return mesh.ndim > 1 or mesh.get_group().group_name not in {r.group for r in others}


def resolve(mesh: DeviceMesh | None, mesh_dim: str | None) -> Ranks:
    """The sequence-parallel ranks: the mesh's only axis or the named one; without a mesh, the default group.

    A mesh with axes "ring" and "ulysses" (next to others or not) is both of them as one axis, row-major.

    Raises SpError: a mesh of several axes without `mesh_dim`, an axis that the mesh lacks, this rank outside the mesh.
    """
    if mesh is None:
        return _default_group(mesh_dim)
    if not isinstance(mesh, DeviceMesh):
        raise SpError(f"mesh: expected a torch.distributed DeviceMesh, got {type(mesh).__name__}")
    ulysses = None
    if mesh_dim is None and {"ring", "ulysses"} <= set(mesh.mesh_dim_names or ()):
        ulysses = mesh["ulysses"].size()
        mesh = _ring_by_ulysses(mesh)
    mesh = _axis(mesh, mesh_dim)
    if mesh.get_coordinate() is None:
        raise SpError(f"mesh: this rank ({dist.get_rank()}) is not in the mesh {mesh}")
    group = mesh.get_group()
    return Ranks(dist.get_world_size(group), group.group_name, ulysses)


def _default_group(mesh_dim: str | None) -> Ranks:
    if mesh_dim is not None:
        raise SpError(f"mesh_dim={mesh_dim!r} names an axis of a mesh, and no mesh is given: pass mesh=...")
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(1, "")
    group = dist.group.WORLD
    return Ranks(dist.get_world_size(group), group.group_name)


def _ring_by_ulysses(mesh: DeviceMesh) -> DeviceMesh:
    """Both axes as one."""
    names = mesh.mesh_dim_names
    if names.index("ring") > names.index("ulysses"):
        raise SpError(
            f"mesh: its axes are {names}; 'ring' comes before 'ulysses', whose ranks are neighbours"
        )
    return flat_mesh(mesh["ring", "ulysses"], "sp_ring_ulysses")


def _axis(mesh: DeviceMesh, mesh_dim: str | None) -> DeviceMesh:
    """The axis that splits the sequence, as a mesh of its own."""
    names = mesh.mesh_dim_names
    if mesh.ndim > 1:
        if not names or (mesh_dim or "sp") not in names:
            raise SpError(
                f"mesh: it has {mesh.ndim} axes {names} and no axis {mesh_dim or 'sp'!r}; "
                "pass mesh_dim='<name of the axis that splits the sequence>' or slice the mesh: mesh['sp']"
            )
        return mesh[mesh_dim or "sp"]
    if mesh_dim is not None and mesh_dim not in (names or ()):
        raise SpError(f"mesh: it has no axis {mesh_dim!r}, only {names}")
    return mesh
