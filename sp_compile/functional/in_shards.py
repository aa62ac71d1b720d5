"""Rows that a rank has already, as a value that knows its shard: a compiled graph takes it as it lies.

A DTensor does not go into a model of plain parameters, in eager mode or compiled: torch refuses to mix them.
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
from sp_compile.runtime.sharded_values import meet_to_read


def in_shards(x: Tensor, dim: int | None = None, mesh: Mesh = None) -> Tensor:
    """This rank's rows as the value of one device, without an exchange; differentiable.

    x: a DTensor with Shard(dim) on a mesh of one axis, of any length; or (..., s, ...) rows of `dim`, as many on every
    rank of the `mesh` (a group, a mesh of one axis, or the default group), in the order of the ranks.
    Returns (..., S, ...), of x's dtype: the DTensor's shape, or S = n * s. Models under backend="sp" take it as those
    with inputs="local" take rows, without that option. With one rank it is x's values.
    Raises SpError: a DTensor that lies otherwise, or rows without a dim.
    """
    if isinstance(x, DTensor):
        return _from_dtensor(x, dim)
    if dim is None or not -x.ndim <= dim < x.ndim:
        raise SpError("SP546", f"dim: expected a dim of the rows of shape {list(x.shape)}, got {dim}.")
    ranks = ranks_of(mesh)
    return _make_sharded(x, dim % x.ndim, ranks, ranks.n * x.shape[dim])


def _from_dtensor(x: DTensor, dim: int | None) -> Tensor:
    placement = x.placements[0]
    if (
        x.device_mesh.ndim != 1
        or type(placement) is not Shard
        or dim not in (None, placement.dim, placement.dim - x.ndim)
    ):
        wanted = f"Shard({dim})" if dim is not None else "Shard(dim)"
        raise SpError(
            "SP547",
            f"x: expected a DTensor with {wanted} on a mesh of one axis, got {x.placements} on a mesh of "
            f"{x.device_mesh.ndim} axes.",
        )
    ranks, dim, length = ranks_of(x.device_mesh), placement.dim % x.ndim, x.shape[placement.dim]
    rows = x.to_local()
    frame = [1, length, 0, length]
    missing = local_row_count(frame, ranks.n) - rows.shape[dim]
    if missing:
        shape = [missing if d == dim else extent for d, extent in enumerate(rows.shape)]
        rows = torch.cat([rows, rows.new_zeros(shape)], dim)
    return _make_sharded(torch.ops.sp.window(rows, dim, frame, ranks.n, ranks.group), dim, ranks, length)


def _make_sharded(rows: Tensor, dim: int, ranks: Ranks, length: int) -> Tensor:
    if ranks.n == 1:
        return rows
    layout = Layout(dim, ranks.n, ranks.group, tuple(range(rows.ndim)))
    return from_local(
        rows, layout, length, Origin(f"the argument of in_shards, {list(rows.shape)}", partial(meet_to_read, ranks))
    )
