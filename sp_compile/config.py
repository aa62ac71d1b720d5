"""The options of `torch.compile(model, backend="sp", options={...})`.

The ranks that share a sequence: their number and the name of their process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.base.ranks import Ranks, find_axis_pair


def parse_unchecked(options: Mapping[str, Any]) -> tuple[DeviceMesh | None, str | None, bool]:
    """(mesh, mesh_dim, is the sequence named or its mesh?) of options that may be wrong: ranks meet to hear of that."""
    mesh = options.get("mesh")
    return mesh, options.get("mesh_dim"), mesh is not None or options.get("seq_dims", "auto") != "auto"


def can_split_sequence(mesh: DeviceMesh | None, mesh_dim: str | None, own_groups: Sequence[Ranks]) -> bool:
    """Has a program that already talks over `own_groups` a mesh axis left for its sequence?

    Not without a mesh, nor with one whose axes its groups take, nor with one of several axes none of which is named.
    """
    if not isinstance(mesh, DeviceMesh):
        return mesh is not None
    if mesh.ndim > 1 and mesh_dim is None and "sp" not in (mesh.mesh_dim_names or ()) and find_axis_pair(mesh) is None:
        return False
    return mesh.ndim > 1 or mesh.get_group().group_name not in {r.group for r in own_groups}
