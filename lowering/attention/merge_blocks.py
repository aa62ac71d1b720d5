"""Merge block results of attention by their log-sum-exps (lse), and accumulate parts of rows.

An attention runs as several kernel calls (blocks). Each has some of the query rows and some of the keys:

    other keys of the same rows    outputs are merged by lse, gradients of queries are added
    other rows                     results are written to their rows of one buffer

Sinks are one additional logit per head, of no key.

A compiler that traces additions may postpone them: it adds all parts in one kernel at the end and stores them until
then. The accumulators of a ring are therefore updated in place, by opaque operators.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.masks.pieces import Flags
from sp_compile.lowering.triton import can_use_triton

from .kernel_args import invert_empty_lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exps of attention over two disjoint sets of keys, from those over each set.

    Computed in one pass: Inductor fuses the expression, and eager CUDA tensors use the kernel in
    ``triton/merge_kernel.py``. Logits of any size are safe.

    Args:
        out_a: (..., S, E), any floating dtype. Must be finite; it is ignored where its lse is -inf.
        lse_a: (..., S), float32 or float64. -inf where a row attends to none of the keys.
        out_b: As out_a, for the other keys.
        lse_b: As lse_a, for the other keys.

    Returns:
        (out, lse) over both sets of keys in lse's dtype; 0 and -inf where both lse are -inf.
    """
    if can_use_triton(out_a):
        from sp_compile.lowering.triton.merge_kernel import launch_merge

        return launch_merge(out_a, lse_a, out_b, lse_b)
    return merge_pointwise(out_a, lse_a, out_b, lse_b)


def merge_pointwise(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``merge`` with pointwise ops, for the CPU and for compilers, which fuse them."""
    weight_a, weight_b, lse = _merge_weights(lse_a, lse_b)
    return out_a.to(lse.dtype) * weight_a + out_b.to(lse.dtype) * weight_b, lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add one key per head, with logit ``sinks`` and value 0, to the softmax of a finished attention.

    Returned out and lse are all that the backward needs.

    Args:
        out: (B, H, S, E), any floating dtype.
        lse: (B, H, S), float32 or float64.
        sinks: (H,), any floating dtype.

    Returns:
        The new (out, lse) in lse's dtype.
    """
    total_lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # `invert_empty_lse` replaces -inf, the lse of a row without keys and with a sink of -inf, by +inf: its factor is 0.
    return out.to(lse.dtype) * torch.exp(lse - invert_empty_lse(total_lse)).unsqueeze(-1), total_lse


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of ``sinks`` (H,), the logits of one additional key per head that `add_sinks` adds.

    Args:
        grad: (B, H, S, E), the cotangent of ``out``.
        out: (B, H, S, E), the output with sinks.
        lse: (B, H, S), the log-sum-exps with sinks.
        sinks: (H,), any floating dtype.
    """
    # The sink has the value 0, so that its score has the gradient weight * (0 - sum(grad * out)), summed over all rows.
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - invert_empty_lse(lse))
    return -(weights * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _merge_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weight_a, weight_b, lse): the weights (..., S, 1) of two outputs in their sum, and its lse (..., S).

    Rows without keys have an lse of -inf; if both are -inf, both weights are 0.
    """
    max_lse = torch.maximum(lse_a, lse_b)
    finite_max = torch.where(max_lse == -torch.inf, 0.0, max_lse)
    exp_a, exp_b = torch.exp(lse_a - finite_max), torch.exp(lse_b - finite_max)
    total = exp_a + exp_b
    # The larger of exp_a and exp_b is 1, so that the total is less than 1 only if both are 0.
    divisor = total.clamp_min(1.0)
    return (exp_a / divisor).unsqueeze(-1), (exp_b / divisor).unsqueeze(-1), finite_max + torch.log(total)


@opaque(
    "merge_into(Tensor(a!) out, Tensor(b!) lse, Tensor block, Tensor block_lse) -> ()",
    lambda out, lse, block, block_lse: None,
)
def merge_into(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Merge the results of a block into the accumulators ``out`` and ``lse`` in place, in ring steps after the first.

    ``merge`` describes the computation.

    Args:
        out: (..., S, E), contiguous, in lse's dtype.
        lse: (..., S), contiguous, float32 or float64.
        block: (..., S, E), any dtype and strides. Not read before the first and after the last row with keys.
        block_lse: (..., S), any strides. -inf in rows without keys.

    Bytes: none.
    """
    if can_use_triton(out):
        from sp_compile.lowering.triton.merge_kernel import launch_merge

        launch_merge(out, lse, block, block_lse, into=(out, lse))
        return
    if out.device.type == "cpu":  # on a GPU this would synchronize
        rows = _rows_with_keys(block_lse)
        # `rows` is a slice, so that these are views: the writes below change the accumulators.
        out, lse, block, block_lse = out[..., rows, :], lse[..., rows], block[..., rows, :], block_lse[..., rows]
    else:
        block = block.masked_fill((block_lse == -torch.inf).unsqueeze(-1), 0)
    old_weight, block_weight, merged_lse = _merge_weights(lse, block_lse)
    out.mul_(old_weight).addcmul_(block, block_weight)
    lse.copy_(merged_lse)


@opaque(
    "merge_to(Tensor out, Tensor lse, Tensor block, Tensor block_lse, ScalarType dtype) -> (Tensor out, Tensor lse)",
    lambda out, lse, block, block_lse, dtype: (out.new_empty(out.shape, dtype=dtype), lse.new_empty(lse.shape)),
)
def merge_to(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge the results of two blocks to new tensors, of which out has another dtype than the first block.

    In half types it is the first merge, of two half types to an accumulator, and the last one, to the result: no
    further kernel casts.

    Args:
        out: (..., S, E), any floating dtype and strides.
        lse: (..., S), float32 or float64.
        block: (..., S, E), as for ``merge_into``: not read before the first and after the last row with keys.
        block_lse: (..., S), any strides.
        dtype: Dtype of the merged out.

    Returns:
        out in ``dtype`` and lse, contiguous.

    Bytes: none.
    """
    if can_use_triton(out):
        from sp_compile.lowering.triton.merge_kernel import launch_merge

        return launch_merge(
            out, lse, block, block_lse, into=(out.new_empty(out.shape, dtype=dtype), lse.new_empty(lse.shape))
        )
    total, total_lse = lse.new_empty(out.shape).copy_(out), lse.new_empty(lse.shape).copy_(lse)
    merge_into(total, total_lse, block, block_lse)
    return total.to(dtype), total_lse


def merge_block(
    out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge the results of a block into (out, lse), and return them with out in ``dtype``.

    They are updated in place if out has this dtype, which must then be that of lse.
    """
    if out.dtype == dtype == lse.dtype:
        torch.ops.sp.merge_into(out, lse, block, block_lse)
        return out, lse
    return torch.ops.sp.merge_to(out, lse, block, block_lse, dtype)


def _rows_with_keys(lse: Tensor) -> slice:
    """Return the slice from the first to the last row with an lse that is not -inf: only these rows are merged.

    Other rows attend to no key of the block. In most steps of a ring they are half of a zigzag shard.
    """
    rows = (lse != -torch.inf).flatten(0, -2).any(0).nonzero()
    return slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0)


@opaque("add_into(Tensor(a!) total, Tensor part) -> ()", lambda total, part: None)
def add_into(total: Tensor, part: Tensor) -> None:
    """Add ``part`` to ``total`` in place. Shapes: any, equal. Bytes: none.

    The operator is opaque, since a compiler could postpone plain additions and store all parts until then.
    """
    total.add_(part)


class RowRange(NamedTuple):
    """Consecutive rows of a buffer that are all written or all not written."""

    offset: int  # first row
    length: int  # number of rows
    is_new: bool  # whether they are not written


class WrittenRows:
    """Record of the written rows of a buffer: parts are copied to new rows, and added or merged to others."""

    def __init__(self, length: int) -> None:
        """Create the record of a buffer with ``length`` rows, none of which is written."""
        self._is_written = np.zeros(length, np.bool_)

    def add(self, rows: tuple[int, int]) -> list[RowRange]:
        """Mark the rows (offset, length) as written, and return them as ranges.

        The rows of a range were either all unwritten before (`is_new`) or all written.
        """
        offset, length = rows
        is_written = self._is_written[offset : offset + length]
        ranges = [RowRange(offset + start, count, is_new) for start, count, is_new in _split_by_state(is_written)]
        is_written[:] = True
        return ranges

    def flags(self) -> Tensor:
        """Return whether each row is written, bool (length,) on the host."""
        return torch.from_numpy(self._is_written.copy())

    def gaps(self) -> list[tuple[int, int]]:
        """Return the rows that are not written, as a list of (offset, length); the caller fills them at the end."""
        return [(offset, length) for offset, length, is_new in _split_by_state(self._is_written) if is_new]


def _split_by_state(is_written: Flags) -> list[RowRange]:
    """Return the ranges of consecutive rows with equal flags, from one flag per row.

    A range is (offset, length, is_new); rows that are not written yet are new. [1, 1, 0] gives (0, 2, False) and
    (2, 1, True), [] gives no range.
    """
    # The first row of each range, and the end of the last one.
    edges = [0, *(np.flatnonzero(np.diff(is_written)) + 1).tolist(), len(is_written)]
    return [RowRange(start, stop - start, not is_written[start]) for start, stop in pairwise(edges) if start < stop]


class GradAccumulator:
    """Accumulator of a gradient (B, H, S, D) whose parts along S are added one after the other.

    ``sp::attend_backward`` has one for each of dq, dk and dv. A first part that covers all rows is stored without a
    copy if its dtype matches and no buffer is passed.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, buffer: Tensor | None = None) -> None:
        """Create an empty accumulator.

        Args:
            like: (B, H, S, D), the tensor whose gradient is accumulated.
            dtype: Dtype of the gradient.
            buffer: (B, H, S, D), the tensor to write to; None to allocate one.
        """
        self._like, self._dtype = like, dtype
        self._total, self._has_fixed_buffer = buffer, buffer is not None
        self._written = WrittenRows(like.shape[2])

    def add(self, part: Tensor, rows: tuple[int, int]) -> None:
        """Add ``part`` (B, H, length, D) to the rows (offset, length) of the gradient.

        Rows that have no value yet are written. A first part with all rows becomes the sum without a copy.
        """
        parts = self._written.add(rows)  # ranges (offset, length, is_new); is_new: rows without a value
        # `_total` is None before the first part, if the caller has passed no buffer.
        if self._total is None and rows == (0, self._like.shape[2]) and part.dtype == self._dtype:
            self._total = part
            return
        for offset, length, is_new in parts:
            total = self._buffer().narrow(2, offset, length)
            addend = part.narrow(2, offset - rows[0], length)
            if is_new:
                total.copy_(addend)
            else:
                total.add_(addend)

    def _buffer(self) -> Tensor:
        """Return the buffer of the sum, allocated at the first call."""
        if self._total is None:
            self._total = empty_rows_first(self._like, self._dtype)
        return self._total

    def total(self) -> Tensor:
        """Return the sum (B, H, S, D), which is 0 in rows without a part.

        Unless the caller has passed a buffer, its memory layout is (B, S, H, D), as of `empty_rows_first`.
        """
        total = self._buffer()
        for gap in self._written.gaps():
            total.narrow(2, *gap).zero_()
        return total if self._has_fixed_buffer else total.transpose(1, 2).contiguous().transpose(1, 2)


def empty_rows_first(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty (B, H, s, D) tensor with the memory layout (B, s, H, D) of flash kernels and models."""
    batch, heads, rows, width = like.shape
    return like.new_empty((batch, rows, heads, width), dtype=dtype).transpose(1, 2)


class SoftmaxAccumulator:
    """Accumulator of the outputs of the kernel calls of ``sp::attend``.

    Each call has other queries, or other keys of the same queries. In the second case outputs are merged.
    """

    def __init__(self, q: Tensor, width: int) -> None:
        """Create an empty accumulator for the queries q (B, H, S, D) and values of ``width`` elements."""
        self._q, self._shape = q, (*q.shape[:3], width)
        self._total: tuple[Tensor, Tensor] | None = None
        self._written = WrittenRows(q.shape[2])

    def add(self, out: Tensor, lse: Tensor, rows: tuple[int, int]) -> None:
        """Add the results of a kernel call: merge them by lse with earlier ones of the same queries.

        Args:
            out: (B, H, length, width).
            lse: (B, H, length).
            rows: The query rows of the part, (offset, length).
        """
        parts = self._written.add(rows)  # ranges (offset, length, is_new); is_new: rows without earlier results
        all_rows = (0, self._shape[2])
        if rows == all_rows and self._total is None:
            self._total = out, lse
            return
        total = self._buffers()
        if not all(part.is_new for part in parts):  # `out` of several calls is merged in the precision of lse
            total = self._total = total[0].to(lse.dtype), total[1]
        if parts == [RowRange(*all_rows, is_new=False)]:  # all rows are merged: no copy is needed
            self._total = merge(*total, out, lse)
            return
        for offset, length, is_new in parts:
            old = [x.narrow(2, offset, length) for x in total]
            new = [x.narrow(2, offset - rows[0], length) for x in (out, lse)]
            for x, value in zip(old, new if is_new else merge(*old, *new)):
                x.copy_(value)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """Return the buffers of out and lse, allocated at the first call."""
        if self._total is None:
            lse = self._q.new_empty(self._shape[:3], dtype=accumulation_dtype(self._q.dtype))
            self._total = self._q.new_empty(self._shape), lse
        return self._total

    def total(self, filled: bool = True) -> tuple[Tensor, Tensor]:
        """Return out (B, H, S, width) in q's dtype and lse (B, H, S), contiguous.

        Rows without a part, which attend to no key, have out 0 and lse -inf. If not ``filled``, out is undefined in
        such rows before the first part and after the last one.
        """
        out, lse = self._buffers()
        for offset, length in self._written.gaps():
            if filled or 0 < offset < self._shape[2] - length:
                out.narrow(2, offset, length).zero_()
            lse.narrow(2, offset, length).fill_(-torch.inf)
        return out.to(self._q.dtype).contiguous(), lse.contiguous()
