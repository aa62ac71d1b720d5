"""Prefix scans: inclusive_scan, exclusive_scan, segmented_scan, and linear_scan for h = a * h + b.

They are differentiable in reverse mode, twice where the operation is, in linear memory; eager or inside torch.compile;
for tensors of any shape, strides and length. Integers that overflow wrap round. NaN, infinities, and which of equal
extremes has the index and the gradient are those of torch.cumsum, cumprod, cummax, cummin and logcumsumexp. If every
rank passes its shard of a sequence and its group, each gets its shard of the scan of the full sequence, and gradients
flow to the shards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.lowering.base.ranks import Mesh

from .scan_call import LinearCall, ScanCall, number_as_tensor
from .scan_shards import shards_of


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
    """Return each element combined with all before it: torch.cumsum, cumprod, cummax, cummin or logcumsumexp.

    Args:
        x: Values of shape ``(..., S, ...)``: bool, uint8, int8 to int64, or floating-point of 16 bits or more.
        dim: The dim of S.
        op: "sum", "prod", "max", "min" or "logsumexp".
        reverse: Scan from the last position to the first.
        indices: For max and min, return the position of each value along dim as well.
        dtype: The dtype of the result, to which x is cast first. None: x's dtype, but int64 for sums and products of
            integers and bools.
        accumulate_dtype: The dtype of intermediate sums, products and logsumexps. None: float32 for bfloat16 and
            float16, float64 for float32 on a CPU, as in torch.cumsum, else the dtype of the result.
        group: The ranks that hold shards: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None: x is
            the full sequence.
        layout: "contiguous": rank r of n holds rows ``r * s`` to ``(r + 1) * s``; "zigzag": chunks r and
            ``2n - 1 - r`` of 2n.
        length: The length of the sequence without the padding after it, of which nothing is carried. None: no row is
            padding.
        exchange: "gather": one all-gather forward and one backward; "steps": ``ceil(log2(n))`` shifts each way, for
            layout "contiguous"; "auto": the faster one for the bytes to be carried.
        check: Compare the ranks' calls first, for 24 bytes a rank on the CPU, so that all ranks raise what is wrong
            on one. Not done inside torch.compile.

    Returns:
        A tensor of x's shape; with ``indices=True`` that and the positions, int64.

    Raises:
        SpError: An operand or option does not fit, on any rank; or the ranks' calls differ.

    >>> inclusive_scan(torch.tensor([3, 1, 2]), 0)
    tensor([3, 4, 6])
    """
    how = check, dim, reverse, accumulate_dtype, shards_of(group, layout, length, exchange)
    call = ScanCall("inclusive_scan", *how, x, op, False, dtype, indices=indices)
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
    """Return all elements before each one combined.

    Args:
        x: Values of shape ``(..., S, ...)``: bool, uint8, int8 to int64, or floating-point of 16 bits or more.
        dim: The dim of S.
        op: "sum", "prod", "max", "min" or "logsumexp".
        reverse: Scan from the last position to the first.
        dtype: The dtype of the result, to which x is cast first. None: x's dtype, but int64 for sums and products of
            integers and bools.
        accumulate_dtype: The dtype of intermediate sums, products and logsumexps. None: float32 for bfloat16 and
            float16, float64 for float32 on a CPU, as in torch.cumsum, else the dtype of the result.
        group: The ranks that hold shards: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None: x is
            the full sequence.
        layout: "contiguous": rank r of n holds rows ``r * s`` to ``(r + 1) * s``; "zigzag": chunks r and
            ``2n - 1 - r`` of 2n.
        length: The length of the sequence without the padding after it, of which nothing is carried. None: no row is
            padding.
        exchange: "gather": one all-gather forward and one backward; "steps": ``ceil(log2(n))`` shifts each way, for
            layout "contiguous"; "auto": the faster one for the bytes to be carried.
        check: Compare the ranks' calls first, for 24 bytes a rank on the CPU, so that all ranks raise what is wrong
            on one. Not done inside torch.compile.

    Returns:
        A tensor of x's shape. The first element in scan order is the identity of `op`: 0 or 1, or the least or greatest
        value of the dtype.

    Raises:
        SpError: An operand or option does not fit, on any rank; or the ranks' calls differ.

    >>> exclusive_scan(torch.tensor([3, 1, 2]), 0)
    tensor([0, 3, 4])
    """
    how = check, dim, reverse, accumulate_dtype, shards_of(group, layout, length, exchange)
    return ScanCall("exclusive_scan", *how, x, op, True, dtype).run()


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
    """Return a scan that restarts wherever the id changes, as in batches of packed sequences.

    Args:
        x: Values of shape ``(..., S, ...)``: bool, uint8, int8 to int64, or floating-point of 16 bits or more.
        segment_ids: Integers of shape ``(S,)``, or broadcast to x; sharded like x. Each run of equal ids is a segment.
        dim: The dim of S.
        op: "sum", "prod", "max", "min" or "logsumexp".
        exclusive: Combine the elements before each one only.
        reverse: Scan from the last position to the first.
        dtype: The dtype of the result, to which x is cast first. None: x's dtype, but int64 for sums and products of
            integers and bools.
        accumulate_dtype: The dtype of intermediate sums, products and logsumexps. None: float32 for bfloat16 and
            float16, float64 for float32 on a CPU, as in torch.cumsum, else the dtype of the result.
        group: The ranks that hold shards: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None: x is
            the full sequence.
        layout: "contiguous": rank r of n holds rows ``r * s`` to ``(r + 1) * s``; "zigzag": chunks r and
            ``2n - 1 - r`` of 2n.
        length: The length of the sequence without the padding after it, of which nothing is carried. None: no row is
            padding.
        exchange: "gather": one all-gather forward and one backward; "steps": ``ceil(log2(n))`` shifts each way, for
            layout "contiguous"; "auto": the faster one for the bytes to be carried.
        check: Compare the ranks' calls first, for 24 bytes a rank on the CPU, so that all ranks raise what is wrong
            on one. Not done inside torch.compile.

    Returns:
        A tensor of x's shape.

    Raises:
        SpError: An operand or option does not fit, on any rank; or the ranks' calls differ.

    >>> segmented_scan(torch.tensor([3, 1, 2, 4]), torch.tensor([0, 0, 1, 1]), 0)
    tensor([3, 4, 2, 6])
    """
    how = check, dim, reverse, accumulate_dtype, shards_of(group, layout, length, exchange)
    return ScanCall("segmented_scan", *how, x, op, exclusive, dtype, segment_ids).run()


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
    """Return h_t = a_t * h_(t-1) + b_t along dim: the recurrence of a diagonal state-space model.

    Args:
        a: Factors, floating-point, of shape ``(..., S, ...)`` or broadcast to b; or one number.
        b: Summands, floating-point, of shape ``(..., S, ...)`` or broadcast to a.
        dim: The dim of S.
        initial: h before the first step, of h's shape without dim, or broadcast to it; or a number. None: zeros. With
            a group it is the same on every rank, and so is its gradient.
        reverse: Compute h_t = a_t * h_(t+1) + b_t.
        accumulate_dtype: The dtype of intermediate states. None: float32 for bfloat16 and float16, float64 for float32
            on a CPU, else the dtype of the result.
        group: The ranks that hold shards: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". None: a
            and b are the full sequence.
        layout: "contiguous": rank r of n holds rows ``r * s`` to ``(r + 1) * s``; "zigzag": chunks r and
            ``2n - 1 - r`` of 2n.
        length: The length of the sequence without the padding after it, of which nothing is carried. None: no row is
            padding.
        exchange: "gather": one all-gather forward and one backward; "steps": ``ceil(log2(n))`` shifts each way, for
            layout "contiguous"; "auto": the faster one for the bytes to be carried.
        check: Compare the ranks' calls first, for 24 bytes a rank on the CPU, so that all ranks raise what is wrong
            on one. Not done inside torch.compile.

    Returns:
        h, of the common shape and dtype of a and b.

    Raises:
        SpError: An operand or option does not fit, on any rank; or the ranks' calls differ.

    >>> linear_scan(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 1.0, 1.0]), 0)
    tensor([1.0000, 1.5000, 1.7500])
    """
    how = check, dim, reverse, accumulate_dtype, shards_of(group, layout, length, exchange)
    return LinearCall("linear_scan", *how, number_as_tensor(a, b), b, number_as_tensor(initial, b)).run()
