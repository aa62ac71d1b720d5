"""Define the ``sp::`` collectives: one node per exchange, with the backward that its types imply.

Types. *Shard*: the dim is sharded over the ranks by a frame (see ``frames.py``). ``pad_rows.py`` defines the contents
of padded rows; their cotangents are zero. *Partial*: the true value is the sum over the ranks. A full tensor on every
rank is *invariant* if its cotangent is a full tensor, too. It is *replicated* if each rank's cotangent is a term of a
sum. *Varying*: the value differs between ranks.

Every operator has arguments for the number of ranks ``n`` and the name of a process group; no argument depends on the
rank. Bytes are those that one rank sends with the usual ring algorithms; x is the local operand. A cotangent is the
gradient of a result. The window of a frame are the positions with valid rows; the others are padding.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base import frames
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import FrameArg, column_along, own_positions
from sp_compile.lowering.base.library import LinearMap, composite, opaque
from sp_compile.lowering.comm.communicator import current_communicator

from .pad_rows import fill_padding

# Linear maps of local tensors: each operator below is one of them, and its backward another, the adjoint.


def _slice_own_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Return this rank's rows of a full x; padding has copies of the nearest row of the window."""
    if n == 1 and not frames.is_padded(frame, n):
        return x
    outer, length = frame[0], frame[3]
    inner = frames.inner_rows(x.shape[dim], outer * length)
    positions = frames.own_positions(frame, n, group, x.device)
    return x.index_select(dim, frames.nearest_rows(positions, frame, inner))


def _slice_rows_zeroed(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Return this rank's rows of a full cotangent, with zeros in padding."""
    return fill_padding(_slice_own_rows(x, dim, frame, n, group), dim, frame, 0, n, group)


def _gather_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Return the full x from all ranks' rows, without padding; for outer 1 a view of the gathered tensor."""
    outer = frame[0]
    inner = frames.inner_rows(x.shape[dim], outer * frames.local_row_count(frame, n))
    gathered = current_communicator().all_gather(frames.to_rows_first(x, dim, outer), n, group)
    rows = frames.to_sequence_order(gathered, frame, n)
    return frames.from_rows_first(frames.trim(rows, 0, frame, n, inner), dim, outer)


def _reduce_rows(x: Tensor, dim: int, frame: FrameArg, n: int, group: str, is_value: bool) -> Tensor:
    """Sum full tensors over the ranks and return this rank's rows.

    Args:
        x: The full tensor, a term of the sum.
        dim: The dim to shard.
        frame: The frame of the dim.
        n: Number of ranks.
        group: Name of the process group.
        is_value: True for a value: padding has copies of valid rows, and the collective is torch's reduce_scatter,
            which users can find in the graph. False for a cotangent: padding has zeros, and the communicator may run an
            all-to-all and a local sum where that is faster.
    """
    # Rows become dim 0, without the outer factor: the frame of dim 0 has outer = 1.
    rows = frames.pad_to_frame(frames.to_rows_first(x, dim, frame[0]), 0, [1, *frame[1:]], n, edge=is_value)
    summed = current_communicator().reduce_scatter(frames.to_rank_order(rows, frame, n), n, group, plain=is_value)
    return frames.from_rows_first(summed, dim, frame[0])


_reduce_cotangents, _reduce_values = partial(_reduce_rows, is_value=False), partial(_reduce_rows, is_value=True)


def _all_reduce_sum(x: Tensor, n: int, group: str) -> Tensor:
    """Return the sum of x over the ranks."""
    return current_communicator().all_reduce(x, n, group)


def _broadcast_first(x: Tensor, group: str) -> Tensor:
    """Return the x of the group's rank 0, on every rank."""
    return current_communicator().broadcast(x, group)


def _view_operand(x: Tensor, *_: Any) -> Tensor:
    """Return a view of x: the forward or the backward of an operator that does not communicate in this direction.

    It is a view, since an operator must not return its operand itself.
    """
    return x.view_as(x)


# Operators.


@opaque(
    "rank(str group, Device device) -> Tensor", lambda group, device: torch.empty((), dtype=torch.int64, device=device)
)
def rank(group: str, device: torch.device) -> Tensor:
    """Return this rank's index in the group, read at run time: () -> varying.

    Shapes: -> () int64 on ``device``. Bytes: none. Backward: none, an integer. The operator is opaque: a graph with
    this node in place of a constant is the same on every rank.
    Runs: ``dist.get_rank(group)``.
    """
    return torch.full((), current_communicator().rank(group), dtype=torch.int64, device=device)


@composite(
    "shard(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("", "all_gather"), padded="nearest"
)
def shard(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Shard a value: invariant -> Shard(dim).

    Shapes: dim of outer * length * inner -> outer * s * inner, s = ceil(size / n). Bytes: none.
    Backward: all_gather of the shards, (n - 1) * bytes(result): the window's rows, invariant.
    Runs: one index_select, which a compiler fuses into the reader.
    """
    return LinearMap.apply(x, _slice_own_rows, _gather_rows, dim % x.ndim, frame, n, group)


@composite("unshard(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("all_gather", ""))
def unshard(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Gather a value that all ranks use equally: Shard(dim) -> invariant.

    Shapes: dim of outer * s * inner -> outer * length * inner. Bytes: (n - 1) * bytes(x).
    Backward: this rank's rows of the cotangent, zeros at padding; no bytes.
    Runs: all_gather_into_tensor, then views (outer 1).
    """
    return LinearMap.apply(x, _gather_rows, _slice_rows_zeroed, dim % x.ndim, frame, n, group)


@composite(
    'rows(Tensor x, int dim, SymInt start, SymInt length, SymInt[]? frame=None, int n=1, str group="") -> Tensor',
    padded="as given",  # of rows along another dim
)
def rows(
    x: Tensor, dim: int, start: int, length: int, frame: FrameArg | None = None, n: int = 1, group: str = ""
) -> Tensor:
    """Select adjacent rows of the sequence: Shard(dim) -> Partial(sum), zeros for the rows of other ranks.

    `start` counts from the first position of the window. Without a frame, x is the full tensor, and this is `narrow`.
    Shapes: dim -> length. The frame has no outer or inner factor. Bytes: none.
    Backward: the cotangent at the rows that this rank has. Runs: index_select and `where`.
    """
    if frame is None:
        return x.narrow(dim, start, length)
    first = frame[2] + start  # the window begins at position frame[2] of the sequence
    positions = torch.arange(length, device=x.device) + first
    is_row = positions[:, None] == own_positions(frame, n, group, x.device)  # (length, s)
    local_index, is_own = is_row.to(torch.int8).argmax(1), is_row.any(1)  # index 0 for rows of other ranks
    return torch.where(column_along(is_own, dim, x.ndim), x.index_select(dim, local_index), 0)


@composite(
    "all_gather(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor", moves=("all_gather", "reduce_scatter")
)
def all_gather(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Gather a value that each rank uses differently, such as K and V: Shard(dim) -> replicated.

    Shapes: dim of outer * s * inner -> outer * length * inner. Bytes: (n - 1) * bytes(x).
    Backward: reduce_scatter of the cotangents, of the same number of bytes.
    Runs: all_gather_into_tensor, then views (outer 1).
    """
    return LinearMap.apply(x, _gather_rows, _reduce_cotangents, dim % x.ndim, frame, n, group)


@composite(
    "reduce_scatter(Tensor x, int dim, SymInt[] frame, int n, str group) -> Tensor",
    moves=("reduce_scatter", "all_gather"),
    padded="nearest",
)
def reduce_scatter(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Sum over the ranks and shard the result: Partial(sum) -> Shard(dim). Padding copies valid rows.

    Shapes: dim of outer * length * inner -> outer * s * inner. Bytes: (n - 1) / n * bytes(x).
    Backward: all_gather of the shards, of the same number of bytes.
    Runs: reduce_scatter_tensor.
    """
    return LinearMap.apply(x, _reduce_values, _gather_rows, dim % x.ndim, frame, n, group)


@composite("all_reduce(Tensor x, int n, str group) -> Tensor", moves=("all_reduce", ""))
def all_reduce(x: Tensor, n: int, group: str) -> Tensor:
    """Sum over the ranks: Partial(sum) -> invariant.

    Shapes: any -> same. Bytes: 2 * (n - 1) / n * bytes(x). Backward: identity, no bytes, as every rank has the full
    cotangent. (torch's derivative of ``_c10d_functional.all_reduce`` is another all_reduce: Partial -> replicated.)
    Runs: all_reduce(sum).
    """
    return x if n == 1 else LinearMap.apply(x, _all_reduce_sum, _view_operand, n, group)


@composite("broadcast(Tensor x, str group) -> Tensor", moves=("broadcast", ""))
def broadcast(x: Tensor, group: str) -> Tensor:
    """Copy rank 0's values to every rank, as for random draws that must agree: varying -> invariant.

    Shapes: any -> same. Bytes: bytes(x) from rank 0. Backward: identity, no bytes. The cotangent is the same on
    every rank, and each rank passes it to its own x, although only rank 0's x was used; ``broadcast_grad`` corrects
    gradients that depend on x. Runs: broadcast from the group's rank 0.
    """
    return LinearMap.apply(x, _broadcast_first, _view_operand, group)


@composite("broadcast_grad(Tensor x, str group) -> Tensor", moves=("", "broadcast"))
def broadcast_grad(x: Tensor, group: str) -> Tensor:
    """Return x, and copy rank 0's cotangent to every rank: invariant -> invariant.

    Inserted on the operand x of a random op, such as dropout, whose result ``broadcast`` replaces by rank 0's. In the
    backward each rank's gradient of x belongs to its own draw. That of rank 0, whose draw was used, replaces them.
    Shapes: any -> same, a view. Bytes: none. Backward: a broadcast, bytes(x) from rank 0.
    """
    return LinearMap.apply(x, _view_operand, _broadcast_first, group)


class _ReduceGradFunction(torch.autograd.Function):
    """Identity of several tensors, whose gradients are summed over the ranks, or scaled by their number."""

    @staticmethod
    def forward(ctx: Any, how: str, n: int, group: str, *xs: Tensor) -> tuple[Tensor, ...]:
        """Return views of the tensors, unchanged."""
        ctx.set_materialize_grads(False)
        ctx.how, ctx.n, ctx.group = how, n, group
        return tuple(_view_operand(x) for x in xs)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Sum the gradients over the ranks, or scale them by the number of ranks for ``how="partial"``."""
        if ctx.how == "partial":
            return None, None, None, *(None if grad is None else grad * ctx.n for grad in grads)
        return None, None, None, *_sum_flat(grads, ctx.n, ctx.group)


def _sum_flat(grads: Sequence[Tensor | None], n: int, group: str) -> list[Tensor | None]:
    """Return each gradient summed over the ranks, and None where it is None.

    The gradients of one dtype and device are flattened and concatenated, for a single all_reduce.
    """
    sums = list(grads)
    by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[int, Tensor]]] = {}  # (index, gradient) of each
    for i, grad in enumerate(grads):
        if grad is not None:
            by_kind.setdefault((grad.dtype, grad.device), []).append((i, grad))
    for members in by_kind.values():
        vectors = [grad.reshape(-1) for _, grad in members]
        total = _all_reduce_sum(vectors[0] if len(vectors) == 1 else torch.cat(vectors), n, group)
        for (i, grad), grad_sum in zip(members, total.split([x.numel() for x in vectors]), strict=True):
            sums[i] = grad_sum.view(grad.shape)
    return sums


@composite("reduce_grad(Tensor[] xs, str how, int n, str group) -> Tensor[]", moves=("", "all_reduce"))
def reduce_grad(xs: list[Tensor], how: str, n: int, group: str) -> list[Tensor]:
    """Return parameters and other full tensors that each rank uses for its rows: invariant -> replicated.

    Shapes: any -> same, views. Bytes: none. Backward: ``how="reduce"`` sums the cotangents in one all_reduce per dtype,
    2 * (n - 1) / n of their bytes. ``how="partial"`` multiplies them by n: data parallelism then averages over these
    ranks, which divides by n. The cotangent of a value without readers stays None.
    Runs: views. Errors: SpError for any other ``how``.
    """
    if how not in ("reduce", "partial"):
        raise SpError("SP507", f"sp::reduce_grad: expected how='reduce' or how='partial', got {how!r}.")
    return list(xs) if n == 1 else list(_ReduceGradFunction.apply(how, n, group, *xs))
