"""The ranks that share a sequence, and how a mesh names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.torch_compat import flatten_mesh, group_backend, known_process_group, process_group

from .errors import SpError
from .registry import Table

STRATEGIES: Table[Any] = Table("attention")
"""Attention strategies (`passes.cost.attention_cost.Strategy`) by the value of the option `attention`."""


@dataclass(frozen=True)
class Ranks:
    """`n` ranks that hold one sequence between them; `group`: the process group's name ("" where there is none).

    ulysses: how many neighbours share heads, where the mesh says so by a pair of axes (`Strategy.axes`).
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

    @property
    def exchanges(self) -> bool:
        """Are there other processes in the group? The "fake" backend has none."""
        group = self.process_group
        return self.n > 1 and group is not None and "fake" not in str(dist.get_backend(group))

    def check_carries(self, device: torch.device) -> None:
        """Raises SpError where Gloo would exchange tensors of a GPU: its all-gather of them ends the process.

        A segmentation fault, seen with torch 2.11 on an H100.
        """
        real = device.type == "cuda" and dist.is_initialized() and known_process_group(self.group)
        if real and self.exchanges and group_backend(process_group(self.group), device) == "gloo":
            raise SpError(
                "SP117",
                f"The {self.n} ranks of group {self.group!r} exchange tensors of {device} by Gloo, whose all-gather of "
                "such tensors ends the process.",
            )


Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup | Ranks | None
"""How the functions on local shards are told their ranks; None is the default group."""


def ranks_of(mesh: Mesh) -> Ranks:
    """The ranks of a function on local shards; see `resolve`. Inside torch.compile they are constants.

    Raises SpError: what `resolve` raises, and this rank outside the process group.
    """
    if isinstance(mesh, Ranks):
        return mesh
    if mesh == dist.GroupMember.NON_GROUP_MEMBER:
        raise SpError("SP112", f"mesh: this rank ({dist.get_rank()}) is not in the process group.")
    if isinstance(mesh, dist.ProcessGroup):
        return Ranks(dist.get_world_size(mesh), mesh.group_name)
    return _resolve_mesh(mesh)


@torch.compiler.assume_constant_result
def _resolve_mesh(mesh: DeviceMesh | None) -> Ranks:
    return resolve(mesh, None)


def resolve(mesh: DeviceMesh | None, mesh_dim: str | None) -> Ranks:
    """The sequence-parallel ranks: the mesh's only axis or the named one; without a mesh, the default group.

    A mesh with both axes of a strategy (next to others or not) is both of them as one axis, row-major.

    Raises SpError: a mesh of several axes without `mesh_dim`, an axis that the mesh lacks, this rank outside the mesh.
    """
    if mesh is None:
        return _default_group(mesh_dim)
    if not isinstance(mesh, DeviceMesh):
        raise SpError("SP111", f"mesh: expected a torch.distributed DeviceMesh, got {type(mesh).__name__}.")
    ulysses = None
    if mesh_dim is None and (pair := find_axis_pair(mesh)) is not None:
        (outer, inner), names = pair, mesh.mesh_dim_names
        ulysses = mesh[inner].size()
        if names.index(outer) > names.index(inner):
            raise SpError("SP115", f"mesh: expected axis {outer!r} before axis {inner!r}, got axes {names}.")
        mesh = flatten_mesh(mesh[outer, inner], f"sp_{outer}_{inner}")
    mesh = _chart_axis(mesh, mesh_dim)
    if mesh.get_coordinate() is None:
        raise SpError("SP112", f"mesh: this rank ({dist.get_rank()}) is not in the mesh {mesh}.")
    group = mesh.get_group()
    return Ranks(dist.get_world_size(group), group.group_name, ulysses)


def find_axis_pair(mesh: DeviceMesh) -> tuple[str, str] | None:
    """The axes of a mesh that a strategy splits the sequence over together."""
    pairs: list[tuple[str, str]] = [strategy.axes for strategy in STRATEGIES.values() if strategy.axes]
    return next((pair for pair in pairs if set(pair) <= set(mesh.mesh_dim_names or ())), None)


def _default_group(mesh_dim: str | None) -> Ranks:
    if mesh_dim is not None:
        raise SpError("SP116", f"mesh_dim: {mesh_dim!r} names an axis of a mesh, but mesh is None.")
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(1, "")
    return ranks_of(dist.group.WORLD)


def _chart_axis(mesh: DeviceMesh, mesh_dim: str | None) -> DeviceMesh:
    """The axis that splits the sequence, as a mesh of its own."""
    names = mesh.mesh_dim_names
    if mesh.ndim > 1:
        if not names or (mesh_dim or "sp") not in names:
            raise SpError("SP113", f"mesh: expected an axis {mesh_dim or 'sp'!r}, got {mesh.ndim} axes {names}.")
        return mesh[mesh_dim or "sp"]
    if mesh_dim is not None and mesh_dim not in (names or ()):
        raise SpError("SP114", f"mesh: expected an axis {mesh_dim!r}, got {names}.")
    return mesh


SINGLE_RANK = Ranks(1, "")
