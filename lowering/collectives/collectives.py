"""The ``sp::`` collectives: one node an exchange, with the pair of gradients its type asks for.

Types. *Shard*: the dim is split over the ranks by a frame (see ``frames.py``); what padded rows hold is defined in
``pad_rows.py``, and their cotangents are zero. *Partial*: the true value is the sum over the ranks. A value that is
whole on every rank is *invariant* when its cotangent is too, and *replicated* when each rank's cotangent is a term of a
sum.

Every operator takes the number of ranks ``n`` and a process group's name; none has an edge that knows the
rank. Bytes are what one rank sends with the usual ring algorithms; x is the local operand.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import (
    FrameArg,
    from_rows_first,
    inner_rows,
    is_padded,
    local_row_count,
    nearest_rows,
    own_positions,
    pad_to_frame,
    to_rank_order,
    to_rows_first,
    to_sequence_order,
    trim,
)
from sp_compile.lowering.base.library import LinearMap, composite, opaque
from sp_compile.lowering.comm.communicator import current_communicator

from .pad_rows import fill_padding

# The maps. Each pair below names two of them.


def _slice_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """This rank's rows of a whole x; positions outside the window get the nearest row inside."""
    if n == 1 and not is_padded(frame, n):
        return x
    inner = inner_rows(x.shape[dim], frame[0] * frame[3])
    positions = own_positions(frame, n, group, x.device)
    return x.index_select(dim, nearest_rows(positions, frame, inner))


def _slice_rows_zeroed(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """This rank's rows of a whole cotangent; zeros at positions outside the window."""
    return fill_padding(_slice_rows(x, dim, frame, n, group), dim, frame, 0, n, group)


def _gather_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """All ranks' rows of the window. Rows travel in front, so that the result is a view (outer 1)."""
    outer = frame[0]
    inner = inner_rows(x.shape[dim], outer * local_row_count(frame, n))
    rows = to_sequence_order(current_communicator().all_gather(to_rows_first(x, dim, outer), n, group), frame, n)
    return from_rows_first(trim(rows, 0, frame, n, inner), dim, outer)


def _reduce_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str, edge: bool) -> Tensor:
    """Sum whole tensors over the ranks; this rank's rows, with padding as `pad_to_frame` has it.

    Values (edge) by the collective of that name, for those who look for it; cotangents in the fastest way.
    """
    rows = pad_to_frame(to_rows_first(x, dim, frame[0]), 0, [1, *frame[1:]], n, edge)
    return from_rows_first(
        current_communicator().reduce_scatter(to_rank_order(rows, frame, n), n, group, plain=edge), dim, frame[0]
    )


_reduce_cotangents, _reduce_values = partial(_reduce_rows, edge=False), partial(_reduce_rows, edge=True)


def _all_reduce_sum(x: Tensor, n: int, group: str) -> Tensor:
    return current_communicator().all_reduce(x, n, group)


def _broadcast_first(x: Tensor, group: str) -> Tensor:
    return current_communicator().broadcast(x, group)


def _identity(x: Tensor, *where: Any) -> Tensor:
    return x.view_as(x)


# The operators.


@opaque(
    "rank(str group, Device device) -> Tensor", lambda group, device: torch.empty((), dtype=torch.int64, device=device)
)
def rank(group: str, device: torch.device) -> Tensor:
    """() -> varying: this rank's index in the group, read when the program runs.

    Shapes: -> () int64 on ``device``. Bytes: none. Backward: none, an integer. Opaque on purpose: a graph
    that holds this node instead of a number is the same on every rank.
    Source: ``dist.get_rank(group)``.
    """
    return torch.full((), current_communicator().rank(group), dtype=torch.int64, device=device)


@composite(
    "shard(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("", "all_gather"), padded="nearest"
)
def shard(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Invariant -> Shard(dim).

    Shapes: dim of outer * length * inner -> outer * s * inner, s = ceil(size / n). Bytes: none.
    Backward: all_gather of the shards, (n - 1) * bytes(result): the window's rows, invariant.
    Source: one index_select, which a compiler fuses into the reader.
    """
    return LinearMap.apply(x, _slice_rows, _gather_rows, dim % x.ndim, frame, n, group)


@composite("unshard(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("all_gather", ""))
def unshard(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Shard(dim) -> invariant: for values that every rank goes on to use alike.

    Shapes: dim of outer * s * inner -> outer * length * inner. Bytes: (n - 1) * bytes(x).
    Backward: this rank's rows of the cotangent, zeros at padding; no bytes.
    Source: all_gather_into_tensor, then views (outer 1).
    """
    return LinearMap.apply(x, _gather_rows, _slice_rows_zeroed, dim % x.ndim, frame, n, group)


@composite(
    "all_gather(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("all_gather", "reduce_scatter")
)
def all_gather(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Shard(dim) -> replicated: for values that each rank uses in its own way, as K and V.

    Shapes: dim of outer * s * inner -> outer * length * inner. Bytes: (n - 1) * bytes(x).
    Backward: reduce_scatter of the cotangents, as many bytes.
    Source: all_gather_into_tensor, then views (outer 1).
    """
    return LinearMap.apply(x, _gather_rows, _reduce_cotangents, dim % x.ndim, frame, n, group)


@composite("reduce_scatter(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", padded="nearest")
def reduce_scatter(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Partial(sum) -> Shard(dim): each rank gets its rows of the sum, and copies of valid rows as padding.

    Shapes: dim of outer * length * inner -> outer * s * inner. Bytes: (n - 1) / n * bytes(x).
    Backward: all_gather of the shards, as many bytes. Source: reduce_scatter_tensor.
    """
    return LinearMap.apply(x, _reduce_values, _gather_rows, dim % x.ndim, frame, n, group)


@composite("all_reduce(Tensor x, int n, str group) -> Tensor", moves=("all_reduce", ""))
def all_reduce(x: Tensor, n: int, group: str) -> Tensor:
    """Partial(sum) -> invariant.

    Shapes: any -> same. Bytes: 2 * (n - 1) / n * bytes(x). Backward: identity, no bytes; the derivative of
    ``_c10d_functional.all_reduce`` is another all_reduce and belongs to another pair of types.
    Source: all_reduce(sum).
    """
    return x if n == 1 else LinearMap.apply(x, _all_reduce_sum, _identity, n, group)


@composite("broadcast(Tensor x, str group) -> Tensor", moves=("broadcast", ""))
def broadcast(x: Tensor, group: str) -> Tensor:
    """Varying -> invariant: every rank gets rank 0's values, as random draws that must agree need.

    Shapes: any -> same. Bytes: bytes(x) from rank 0. Backward: identity, no bytes: the values were meant to
    be equal, so each rank's own computation of them takes the invariant cotangent.
    Source: broadcast from the group's rank 0.
    """
    return LinearMap.apply(x, _broadcast_first, _identity, group)


@composite("broadcast_grad(Tensor x, str group) -> Tensor", moves=("", "broadcast"))
def broadcast_grad(x: Tensor, group: str) -> Tensor:
    """Invariant -> invariant: the identity; every rank gets rank 0's cotangent.

    Shapes: any -> same, a view. Bytes: none. Backward: a broadcast, bytes(x) from rank 0. With ``broadcast``
    behind a random op it makes value and gradient those of rank 0's draw.
    """
    return LinearMap.apply(x, _identity, _broadcast_first, group)


class _ReduceGradFunction(torch.autograd.Function):
    """Identity whose cotangents are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, how: str, n: int, group: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.where = how, n, group
        return tuple(_identity(x) for x in xs)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        how, n, group = ctx.where
        if how == "partial":
            return None, None, None, *(None if g is None else g * n for g in grads)
        return None, None, None, *_sum_flat(grads, n, group)


def _sum_flat(grads: Sequence[Tensor | None], n: int, group: str) -> list[Tensor | None]:
    """Sum over the ranks: one all_reduce for all tensors of a dtype and device; None stays None."""
    sums = list(grads)
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}
    for i, grad in enumerate(grads):
        if grad is not None:
            kinds.setdefault((grad.dtype, grad.device), []).append((i, grad))
    for members in kinds.values():
        rows = [grad.reshape(-1) for _, grad in members]
        flat = _all_reduce_sum(rows[0] if len(rows) == 1 else torch.cat(rows), n, group)
        pieces = flat.split([row.numel() for row in rows])
        for (i, grad), piece in zip(members, pieces, strict=True):
            sums[i] = piece.view(grad.shape)
    return sums


@composite("reduce_grad(Tensor[] xs, str how, int n, str group) -> Tensor[]", moves=("", "all_reduce"))
def reduce_grad(xs: list[Tensor], how: str, n: int, group: str) -> list[Tensor]:
    """Invariant -> replicated: parameters and other whole values entering sharded computation.

    Shapes: any -> same, views. Bytes: none. Backward: ``how="reduce"`` sums the cotangents in one
    all_reduce a dtype, 2 * (n - 1) / n of their bytes; ``how="partial"`` multiplies them by n and leaves
    the mean over the ranks to data parallelism. A cotangent that is nowhere needed stays None.
    Source: views; ValueError for any other ``how``.
    """
    if how not in ("reduce", "partial"):
        raise ValueError(f"sp::reduce_grad: how must be 'reduce' or 'partial', got {how!r}")
    return list(xs) if n == 1 else list(_ReduceGradFunction.apply(how, n, group, *xs))
