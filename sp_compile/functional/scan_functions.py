"""Compute prefix scans and linear recurrences, of unsplit tensors or of shards of a sequence.

If every rank passes its shard and the group, it receives its shard of the scan of the full sequence. Gradients are
returned for the shards.

The functions run in eager mode and inside `torch.compile`, on tensors of any shape, strides and length. They support
reverse-mode differentiation in linear memory, and second derivatives where the operation has them, except
`affine_scan`. Integer overflow wraps around. NaN, infinities and ties of extremes are treated as by `torch.cumsum`,
`cumprod`, `cummax`, `cummin` and `logcumsumexp`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.lowering.base.ranks import Mesh

from .affine_call import ROWS_FROM_END, AffineCall
from .scan_call import LinearCall, ScanCall, number_as_tensor
from .scan_shards import make_shard_options


def inclusive_scan(
    x: Tensor,
    dim: int,
    op: str = "sum",
    *,
    reverse: bool = False,
    indices: bool = False,
    dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    group: Mesh = None,
    layout: str = "contiguous",
    length: int | None = None,
    exchange: str = "auto",
    check: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the cumulative result of an operation along a dim, each element included.

    The operations are those of `torch.cumsum`, `cumprod`, `cummax`, `cummin` and `logcumsumexp`.

    Args:
        x: (..., S, ...): bool, uint8, int8 to int64, or a floating dtype of 16 bits or more.
        dim: The dim of S.
        op: The operation: "sum", "prod", "max", "min" or "logsumexp".
        reverse: If True, scan from the last position to the first.
        indices: If True, for "max" and "min", return the position of each value along dim as well.
        dtype: The dtype of the result, to which x is cast first. None: x's dtype, or int64 for sums and products of
            integers and bools.
        accumulate_dtype: The dtype of intermediate sums, products and logsumexps. None: float32 for bfloat16 and
            float16, float64 for float32 on a CPU, as in torch.cumsum, else the dtype of the result.
        group: The ranks that store shards: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None: x
            is unsplit.
        layout: The rows that a rank stores. "contiguous": rank r of n stores rows r * s to (r + 1) * s. "zigzag":
            chunks r and 2n - 1 - r of 2n.
        length: Rows of the sequence without the padding at its end, which does not contribute. None: no row is padding.
        exchange: The exchange of carries. "gather": one all-gather in the forward and one in the backward. "steps":
            ceil(log2(n)) shifts in each, for "contiguous" shards. "auto": the one with the shorter predicted time.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (..., S, ...) with the dtype of the result; with `indices`, a tuple of that and the positions, int64.

    Raises:
        SpError: An argument is invalid on a rank (SP454, SP501 to SP507, SP511 to SP526), the calls of the ranks differ
            (SP508), or the group does not define the ranks (SP111 to SP116).

    >>> inclusive_scan(torch.tensor([3, 1, 2]), 0)
    tensor([3, 4, 6])
    """
    shards = make_shard_options(group, layout, length, exchange)
    call = ScanCall(
        "inclusive_scan", check, dim, reverse, accumulate_dtype, shards, x, op, exclusive=False, dtype=dtype,
        indices=indices,
    )  # fmt: skip
    return call.run_with_indices() if indices else call.run()


def exclusive_scan(
    x: Tensor,
    dim: int,
    op: str = "sum",
    *,
    reverse: bool = False,
    dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    group: Mesh = None,
    layout: str = "contiguous",
    length: int | None = None,
    exchange: str = "auto",
    check: bool = True,
) -> Tensor:
    """Return the cumulative result of an operation along a dim, each element excluded.

    Args:
        x: (..., S, ...): bool, uint8, int8 to int64, or a floating dtype of 16 bits or more.
        dim: The dim of S.
        op: The operation: "sum", "prod", "max", "min" or "logsumexp".
        reverse: If True, scan from the last position to the first.
        dtype: The dtype of the result, to which x is cast first. None: x's dtype, or int64 for sums and products of
            integers and bools.
        accumulate_dtype: The dtype of intermediate sums, products and logsumexps. None: float32 for bfloat16 and
            float16, float64 for float32 on a CPU, as in torch.cumsum, else the dtype of the result.
        group: The ranks that store shards: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None: x
            is unsplit.
        layout: The rows that a rank stores. "contiguous": rank r of n stores rows r * s to (r + 1) * s. "zigzag":
            chunks r and 2n - 1 - r of 2n.
        length: Rows of the sequence without the padding at its end, which does not contribute. None: no row is padding.
        exchange: The exchange of carries. "gather": one all-gather in the forward and one in the backward. "steps":
            ceil(log2(n)) shifts in each, for "contiguous" shards. "auto": the one with the shorter predicted time.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (..., S, ...) with the dtype of the result. The first element in scan order is the identity of `op`: 0 or 1, or
        the least or greatest value of the dtype.

    Raises:
        SpError: An argument is invalid on a rank (SP454, SP501 to SP507, SP511 to SP526), the calls of the ranks differ
            (SP508), or the group does not define the ranks (SP111 to SP116).

    >>> exclusive_scan(torch.tensor([3, 1, 2]), 0)
    tensor([0, 3, 4])
    """
    shards = make_shard_options(group, layout, length, exchange)
    call = ScanCall("exclusive_scan", check, dim, reverse, accumulate_dtype, shards, x, op, exclusive=True, dtype=dtype)
    return call.run()


def segmented_scan(
    x: Tensor,
    segment_ids: Tensor,
    dim: int,
    op: str = "sum",
    *,
    exclusive: bool = False,
    reverse: bool = False,
    dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    group: Mesh = None,
    layout: str = "contiguous",
    length: int | None = None,
    exchange: str = "auto",
    check: bool = True,
) -> Tensor:
    """Return a cumulative result that restarts at each segment, as for packed sequences.

    Args:
        x: (..., S, ...): bool, uint8, int8 to int64, or a floating dtype of 16 bits or more.
        segment_ids: (S,), or broadcastable to x, any integer dtype; sharded as x is. A run of equal ids is a segment.
        dim: The dim of S.
        op: The operation: "sum", "prod", "max", "min" or "logsumexp".
        exclusive: If True, combine only the elements before each one.
        reverse: If True, scan from the last position to the first.
        dtype: The dtype of the result, to which x is cast first. None: x's dtype, or int64 for sums and products of
            integers and bools.
        accumulate_dtype: The dtype of intermediate sums, products and logsumexps. None: float32 for bfloat16 and
            float16, float64 for float32 on a CPU, as in torch.cumsum, else the dtype of the result.
        group: The ranks that store shards: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None: x
            is unsplit.
        layout: The rows that a rank stores. "contiguous": rank r of n stores rows r * s to (r + 1) * s. "zigzag":
            chunks r and 2n - 1 - r of 2n.
        length: Rows of the sequence without the padding at its end, which does not contribute. None: no row is padding.
        exchange: The exchange of carries. "gather": one all-gather in the forward and one in the backward. "steps":
            ceil(log2(n)) shifts in each, for "contiguous" shards. "auto": the one with the shorter predicted time.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (..., S, ...) with the dtype of the result.

    Raises:
        SpError: An argument is invalid on a rank (SP454, SP501 to SP507, SP511 to SP526), the calls of the ranks differ
            (SP508), or the group does not define the ranks (SP111 to SP116).

    >>> segmented_scan(torch.tensor([3, 1, 2, 4]), torch.tensor([0, 0, 1, 1]), 0)
    tensor([3, 4, 2, 6])
    """
    shards = make_shard_options(group, layout, length, exchange)
    return ScanCall(
        "segmented_scan", check, dim, reverse, accumulate_dtype, shards, x, op, exclusive, dtype, segment_ids
    ).run()


def linear_scan(
    a: Tensor | float,
    b: Tensor,
    dim: int,
    *,
    initial: Tensor | float | None = None,
    reverse: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    group: Mesh = None,
    layout: str = "contiguous",
    length: int | None = None,
    exchange: str = "auto",
    check: bool = True,
) -> Tensor:
    """Return h_t = a_t * h_(t-1) + b_t along a dim, the recurrence of a diagonal state-space model.

    Algorithm: parallel scan of the pairs (a, b), Blelloch, "Prefix sums and their applications", 1990.

    Args:
        a: (..., S, ...), or broadcastable to b, any floating dtype: the factors. Or a Python scalar, which is not
            rounded to 16 bits.
        b: (..., S, ...), or broadcastable to a, any floating dtype: the summands.
        dim: The dim of S.
        initial: (..., ...), h's shape without dim, or broadcastable to it, any floating dtype: h before the first step.
            Or a Python scalar. None: zeros. With a group, it is replicated, and so is its gradient.
        reverse: If True, compute h_t = a_t * h_(t+1) + b_t.
        accumulate_dtype: The dtype of intermediate states. None: float32 for bfloat16 and float16, float64 for float32
            on a CPU, else the dtype of the result.
        group: The ranks that store shards: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None: a
            and b are unsplit.
        layout: The rows that a rank stores. "contiguous": rank r of n stores rows r * s to (r + 1) * s. "zigzag":
            chunks r and 2n - 1 - r of 2n.
        length: Rows of the sequence without the padding at its end, which does not contribute. None: no row is padding.
        exchange: The exchange of carries. "gather": one all-gather in the forward and one in the backward. "steps":
            ceil(log2(n)) shifts in each, for "contiguous" shards. "auto": the one with the shorter predicted time.
        check: If True, compare the calls of all ranks first (24 bytes a rank, on the CPU). An invalid call then raises
            on every rank. Not done inside `torch.compile`.

    Returns:
        (..., S, ...), h, with the common shape and dtype of a and b.

    Raises:
        SpError: An argument is invalid on a rank (SP454, SP502 to SP507, SP511 to SP513, SP526), the calls of the ranks
            differ (SP508), or the group does not define the ranks (SP111 to SP116).

    >>> linear_scan(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 1.0, 1.0]), 0)
    tensor([1.0000, 1.5000, 1.7500])
    """
    shards = make_shard_options(group, layout, length, exchange)
    factors, initial_state = number_as_tensor(a, b), number_as_tensor(initial, b)
    result = b.dtype if factors is not a else None  # a number does not determine the dtype
    return LinearCall(
        "linear_scan", check, dim, reverse, accumulate_dtype, shards, factors, b, initial_state, result
    ).run()


def affine_scan(
    m: Tensor,
    b: Tensor,
    *,
    initial: Tensor | None = None,
    exclusive: bool = False,
    reverse: bool = False,
    accumulate_dtype: torch.dtype | None = None,
    group: Mesh = None,
    layout: str = "contiguous",
    length: int | None = None,
    check: bool = True,
) -> Tensor:
    """Return h_t = m_t @ h_(t-1) + b_t, the recurrence of a state that matrices multiply.

    Linear attention with a delta rule is such a recurrence over chunks of tokens (Yang et al., arXiv:2406.06484). The
    steps run one after another on each rank; ranks exchange one matrix and one state. Differentiable once.

    Args:
        m: (..., S, K, K), any floating dtype: the matrices.
        b: (..., S, K, V), any floating dtype, with equal other dims: the summands.
        initial: (..., K, V), or broadcastable to it, any floating dtype: h before the first step. None: zeros. With a
            group, it is replicated, and so is its gradient.
        exclusive: If True, return h_(t-1) in place of h_t: the state before each step.
        reverse: If True, compute h_t = m_t @ h_(t+1) + b_t.
        accumulate_dtype: The dtype of intermediate states. None: float32 for bfloat16 and float16, else the dtype of
            the result.
        group: The ranks that store shards of S: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None:
            m and b are unsplit.
        layout: The rows that a rank stores, as in `linear_scan`.
        length: Rows of the sequence without the padding at its end, which does not contribute. None: no row is padding.
        check: If True, compare the calls of all ranks first, as in `linear_scan`.

    Returns:
        (..., S, K, V), h, with the common dtype of m and b.

    Raises:
        SpError: An argument is invalid on a rank (SP454, SP502, SP504 to SP507, SP511 to SP513, SP526), the calls of
            the ranks differ (SP508), or the group does not define the ranks (SP111 to SP116).

    >>> affine_scan(torch.tensor([[[0.5]], [[0.5]], [[0.5]]]), torch.ones(3, 1, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    # This operator has one exchange, "gather". Without a group, `make_shard_options` accepts only the default, "auto".
    exchange = "auto" if group is None else "gather"
    shards = make_shard_options(group, layout, length, exchange)
    return AffineCall(
        "affine_scan", check, ROWS_FROM_END, reverse, accumulate_dtype, shards, m, b, initial, exclusive
    ).run()
