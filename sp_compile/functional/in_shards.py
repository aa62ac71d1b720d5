"""Wrap the rows of a rank as a sharded tensor, which a compiled graph accepts without an exchange.

A DTensor cannot be used for this, since torch does not mix DTensors with plain parameters in an operation.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import local_row_count
from sp_compile.lowering.base.ranks import Mesh, Ranks, ranks_of
from sp_compile.lowering.collectives.shard_storage import Layout, Origin
from sp_compile.lowering.collectives.sharded import from_local
from sp_compile.runtime.sharded_values import agree_to_read


def in_shards(x: Tensor, dim: int | None = None, mesh: Mesh = None) -> Tensor:
    """Return the rows of this rank as a tensor of the global shape, of which each rank stores its own rows.

    Nothing is exchanged. A model that is compiled with backend="sp" uses the shards directly, as with the option
    inputs="local". Gradients are returned for the shards.

    Args:
        x: (..., s, ...), any dtype: the rows of this rank in the order of the ranks, with the same s on each. Or a
            DTensor with Shard(dim) on a mesh of one axis, of any length.
        dim: The dim of s. Optional for a DTensor.
        mesh: The ranks that store the rows: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None
            selects the default process group. For a DTensor, its own mesh is used.

    Returns:
        (..., S, ...) with x's dtype, where S is n * s, or the DTensor's length. On one rank, the rows themselves.

    Raises:
        SpError: `dim` is missing or out of range (SP546), the DTensor has another placement or mesh (SP547), or the
            mesh does not define the ranks (SP111 to SP116).
    """
    if isinstance(x, DTensor):
        return _from_dtensor(x, dim)
    if dim is None or not -x.ndim <= dim < x.ndim:
        raise SpError("SP546", f"dim: expected a dim of the rows of shape {list(x.shape)}, got {dim}.")
    ranks = ranks_of(mesh)
    return _make_sharded(x, dim % x.ndim, ranks, ranks.n * x.shape[dim])


def _from_dtensor(x: DTensor, dim: int | None) -> Tensor:
    """Return the sharded tensor of a DTensor with Shard(dim).

    Shards of a length that the ranks do not divide are padded to equal lengths, with copies of the last valid row.

    Raises:
        SpError: The DTensor has another placement or mesh (SP547).
    """
    placement = x.placements[0]
    is_shard = x.device_mesh.ndim == 1 and type(placement) is Shard  # no subclass: its rows may have another order
    if not is_shard or dim not in (None, placement.dim, placement.dim - x.ndim):
        expected = f"Shard({dim})" if dim is not None else "Shard(dim)"
        raise SpError(
            "SP547",
            f"x: expected a DTensor with {expected} on a mesh of one axis, got {x.placements} on a mesh of "
            f"{x.device_mesh.ndim} axes.",
        )
    ranks, dim, length = ranks_of(x.device_mesh), placement.dim % x.ndim, x.shape[placement.dim]
    rows = x.to_local()
    frame = [1, length, 0, length]  # all rows of the sequence are valid
    padding = local_row_count(frame, ranks.n) - rows.shape[dim]
    if padding:
        shape = [padding if d == dim else extent for d, extent in enumerate(rows.shape)]
        rows = torch.cat([rows, rows.new_zeros(shape)], dim)
    rows = torch.ops.sp.window(rows, dim, frame, ranks.n, ranks.group)  # fills the padded rows
    return _make_sharded(rows, dim, ranks, length)


def _make_sharded(rows: Tensor, dim: int, ranks: Ranks, length: int) -> Tensor:
    """Return the sharded tensor of global `length` along `dim` with these rows; on one rank, the rows."""
    if ranks.n == 1:
        return rows
    layout = Layout(dim, ranks.n, ranks.group, order=tuple(range(rows.ndim)))  # contiguous memory
    origin = Origin(f"the argument of in_shards, {list(rows.shape)}", partial(agree_to_read, ranks))
    return from_local(rows, layout, length, origin)
