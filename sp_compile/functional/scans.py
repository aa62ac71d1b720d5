"""Prefix scans: inclusive_scan, exclusive_scan, segmented_scan, and linear_scan for h = a * h + b.

Differentiable in reverse mode, twice where the operation is, in linear memory; eager or inside torch.compile, where no
values are looked at: integers wrap round, and an id that comes again begins another segment. Of any shape and strides,
along any dim, of any length. All but linear_scan take

    x (..., S, ...)     bool, uint8, int8 to int64, or floating-point of 16 bits or more; the result is like x
    dim         the dim of S, negative ones counted from the last
    op          "sum", "prod", "max", "min" or "logsumexp"
    reverse     from the last position to the first
    dtype       x is cast to it first, as by torch.cumsum. If None x's dtype, but int64 for sums and products of
                integers and bools
    accumulate_dtype    what sums, products and logsumexps are rounded to on the way. If None float32 for bfloat16 and
                float16, float64 for float32 on a CPU, which is what torch.cumsum does there, else the result's dtype
    check       raise if an integer sum or product overflows. That takes a pass over integers that may, for which
                a GPU is waited for. Not done inside torch.compile

and, if every rank passes its shard of a sequence, like linear_scan

    group       the ranks: a ProcessGroup, or a DeviceMesh of one axis or with an axis "sp". x is this rank's shard, the
                result that of the scan of the whole, gradients flow to the shards. None: x is whole
    layout      "contiguous": rank r of n holds rows r * s ...; "zigzag": chunks r and 2n - 1 - r of 2n (s is even)
    length      of the whole sequence, where the last of the n * s rows are padding, which may hold anything: nothing is
                carried from them, and what is returned for them is for no loss to use
    exchange    how ranks learn what is carried to them: "gather", one all-gather forward and one backward; "steps",
                ceil(log2 n) shifts each way; "auto" takes the faster one for the bytes to be carried
    check       compares the ranks' calls as well, so that what is wrong on one rank is raised on all and none hangs:
                24 bytes a rank on the CPU, and more where values must be looked at, for which a GPU is waited for:
                integers that may overflow, and ids, of which all are gathered if they are not in order

NaN, infinities, and of equal extremes which is the one whose index and gradient count, as torch.cumsum, cumprod,
cummax, cummin and logcumsumexp have them. Raise SpError for what does not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.lowering.base.ranks import Mesh

from .scan_call import LinearCall, ScanCall, as_tensor
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
    """Each element combined with all before it: torch.cumsum, cumprod, cummax, cummin or logcumsumexp.

    indices: of max or min return also where each value stands along dim, int64.

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
    """All elements before each one combined; for the first, op's identity: 0, 1, or the dtype's lowest or highest.

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
    runs: bool = False,
    check: bool = True,
) -> Tensor:
    """A scan that begins anew wherever the id changes, as in batches of packed sequences.

    segment_ids: integers, (S,) or broadcast to x, sharded like x. Equal ids stand together, which `check` makes sure
    of, unless with runs=True each run of them is a segment, and an id may come again as another.

    >>> segmented_scan(torch.tensor([3, 1, 2, 4]), torch.tensor([0, 0, 1, 1]), 0)
    tensor([3, 4, 2, 6])
    """
    how = check, dim, reverse, accumulate_dtype, shards_of(group, layout, length, exchange)
    return ScanCall("segmented_scan", *how, x, op, exclusive, dtype, segment_ids, runs).run()


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
    """h_t = a_t * h_(t-1) + b_t along dim: the recurrence of a diagonal state-space model.

    a, b (..., S, ...): floating-point, broadcast to each other, a may be a number; h is of their common shape and
    dtype. initial: h before the first step, of that shape without dim, or broadcast to it, or a number; zeros if None.
    With a group it is the same on every rank, and so is its gradient. reverse: h_t = a_t * h_(t+1) + b_t.

    >>> linear_scan(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([1.0, 1.0, 1.0]), 0)
    tensor([1.0000, 1.5000, 1.7500])
    """
    how = check, dim, reverse, accumulate_dtype, shards_of(group, layout, length, exchange)
    return LinearCall("linear_scan", *how, as_tensor(a, b), b, as_tensor(initial, b)).run()


parallel_inclusive_scan = inclusive_scan
parallel_exclusive_scan = exclusive_scan
