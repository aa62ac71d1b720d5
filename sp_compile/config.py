"""Find the ranks that share the sequence from the options of `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.base.ranks import Ranks, find_axis_pair


def parse_unchecked(options: Mapping[str, Any]) -> tuple[DeviceMesh | None, str | None, bool]:
    """Return the mesh of options that are not validated yet.

    The ranks need it to exchange the errors of the validation.

    Args:
        options: The options as passed to `torch.compile`.

    Returns:
        The mesh, its axis, and True if the options define the mesh or the sequence dims.
    """
    mesh = options.get("mesh")
    return mesh, options.get("mesh_dim"), mesh is not None or options.get("seq_dims", "auto") != "auto"


def can_split_sequence(mesh: DeviceMesh | None, mesh_dim: str | None, own_groups: Sequence[Ranks]) -> bool:
    """Return True if a program with its own collectives has a mesh axis on which its sequence can be split.

    Args:
        mesh: The mesh of the options.
        mesh_dim: The axis of the options.
        others: The groups of the program's collectives.

    Returns:
        False without a mesh, for a mesh of one axis whose group the program uses, and for a mesh of several axes if
        `mesh_dim` is None and the mesh has neither an axis "sp" nor a pair of axes of a strategy.
    """
    if not isinstance(mesh, DeviceMesh):
        return mesh is not None
    if mesh.ndim > 1 and mesh_dim is None and "sp" not in (mesh.mesh_dim_names or ()) and find_axis_pair(mesh) is None:
        return False
    return mesh.ndim > 1 or mesh.get_group().group_name not in {r.group for r in own_groups}
