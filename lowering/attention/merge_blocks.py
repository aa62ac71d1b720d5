"""Attention over some keys and over others, into attention over both; parts of rows; accumulators that stay one.

A compiler that sees additions postpones them: it adds all parts at the end in one kernel, and keeps them until then.
The accumulators of a ring are therefore changed in place, by operators that it does not see into.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.library import opaque
from sp_compile.lowering.triton import can_use_triton

from .kernel_args import finite_lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax averages ``out`` (..., S, E) with log-sum-exps ``lse`` (..., S) of two disjoint sets of keys.

    Computed and returned in lse's dtype (float32 or float64). An lse of -inf stands for no key at all: its
    out must be finite and counts for nothing; with two of them the result is 0 and -inf. Any other logits
    are safe, however large. One pass over the accumulators: Inductor fuses the expression, eager CUDA
    tensors take the kernel in ``triton/merge_blocks.py``.
    """
    if can_use_triton(out_a):
        from sp_compile.lowering.triton.merge_kernel import launch_merge

        return launch_merge(out_a, lse_a, out_b, lse_b)
    return merge_pointwise(out_a, lse_a, out_b, lse_b)


def merge_pointwise(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``merge`` as pointwise operations."""
    kept, share, lse = _merge_weights(lse_a, lse_b)
    return out_a.to(lse.dtype) * kept + out_b.to(lse.dtype) * share, lse


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` (B, H, S, E) and its ``lse`` (B, H, S), with one key more, of the logits ``sinks`` (H,) and the value 0.

    Computed and returned in lse's dtype. What is kept is computed from the new lse, so that whoever keeps both results
    for a backward in another graph does so: a partitioner computes again what no result needs.
    """
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.to(lse.dtype) * torch.exp(lse - finite_lse(both)).unsqueeze(-1), both


def sinks_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient (H,) of ``sinks``, of the cotangent of ``out``, which is with them, as is ``lse``."""
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - finite_lse(lse))
    return -(weights * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _merge_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What counts of either (..., S, 1), and the lse of both (..., S)."""
    top = torch.maximum(lse_a, lse_b)
    finite = torch.where(top == -torch.inf, 0.0, top)
    a, b = torch.exp(lse_a - finite), torch.exp(lse_b - finite)
    total = a + b
    # The larger of the two is 1, so that only the empty sum of 0 is below it.
    divisor = total.clamp_min(1.0)
    return (a / divisor).unsqueeze(-1), (b / divisor).unsqueeze(-1), finite + torch.log(total)


@opaque(
    "merge_into(Tensor(a!) out, Tensor(b!) lse, Tensor block, Tensor block_lse) -> ()",
    lambda out, lse, block, block_lse: None,
)
def merge_into(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """``merge`` in the place of its first two operands.

    Shapes: out (..., S, E) and lse (..., S), contiguous and in lse's dtype; block (..., S, E) of any dtype and strides,
    block_lse (..., S). Bytes: none.
    """
    if can_use_triton(out):
        from sp_compile.lowering.triton.merge_kernel import launch_merge

        launch_merge(out, lse, block, block_lse, into=(out, lse))
    else:
        rows = _rows_with_keys(block_lse) if out.device.type == "cpu" else slice(None)  # a GPU would be waited for
        out, lse, block, block_lse = out[..., rows, :], lse[..., rows], block[..., rows, :], block_lse[..., rows]
        kept, share, both = _merge_weights(lse, block_lse)
        out.mul_(kept).addcmul_(block, share)
        lse.copy_(both)


def _rows_with_keys(lse: Tensor) -> slice:
    """From the first to the last row that attends to any key: half of a zigzag shard in most steps of a ring."""
    found = (lse != -torch.inf).flatten(0, -2).any(0).nonzero()
    return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0)


@opaque("add_into(Tensor(a!) total, Tensor part) -> ()", lambda total, part: None)
def add_into(total: Tensor, part: Tensor) -> None:
    """total += part, now. Shapes: any, equal. Bytes: none."""
    total.add_(part)


class WrittenRows:
    """Which rows of a buffer hold something, as runs that do not touch each other."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def add(self, rows: tuple[int, int]) -> list[tuple[int, int, bool]]:
        """The rows (offset, length) are written: (offset, length, did they hold nothing?) of their parts, in order."""
        start, stop = rows[0], sum(rows)
        if start == stop:
            return []
        first = last = bisect_left(self._runs, start, key=lambda run: run[1])
        at, found = start, []
        while last < len(self._runs) and self._runs[last][0] <= stop:
            low, high = max(self._runs[last][0], at), min(self._runs[last][1], stop)
            found += [(at, low, True), (low, high, False)]
            at, last = high, last + 1
        found.append((at, stop, True))
        touched = [(start, stop), *self._runs[first:last]]
        self._runs[first:last] = [(min(run[0] for run in touched), max(run[1] for run in touched))]
        return [(low, high - low, new) for low, high, new in found if high > low]

    def gaps(self, length: int) -> list[tuple[int, int]]:
        """The rows (offset, length), of so many, that hold nothing."""
        edges = [0, *(edge for run in self._runs for edge in run), length]
        return [(low, high - low) for low, high in zip(edges[::2], edges[1::2]) if high > low]


class GradAccumulator:
    """A gradient that is given in parts, along dim 2. A first part that is all of it is kept, in this dtype.

    place: where it is to be written; in new memory if None.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, place: Tensor | None = None) -> None:
        self._like, self._dtype, self._total, self._fixed = like, dtype, place, place is not None
        self._written = WrittenRows()

    def add(self, part: Tensor, rows: tuple[int, int]) -> None:
        """Add ``part`` to the rows (offset, length)."""
        parts = self._written.add(rows)
        if self._total is None and rows == (0, self._like.shape[2]) and part.dtype == self._dtype:
            self._total = part
            return
        for start, length, new in parts:
            here, more = self._buffer().narrow(2, start, length), part.narrow(2, start - rows[0], length)
            here.copy_(more) if new else here.add_(more)

    def _buffer(self) -> Tensor:
        if self._total is None:
            self._total = empty_rows_first(self._like, self._dtype)
        return self._total

    def total(self) -> Tensor:
        """What was added, 0 elsewhere; if it was not given a place, as `empty_rows_first` lie."""
        total = self._buffer()
        for gap in self._written.gaps(self._like.shape[2]):
            total.narrow(2, *gap).zero_()
        return total if self._fixed else total.transpose(1, 2).contiguous().transpose(1, 2)


def empty_rows_first(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty (B, H, s, D), in memory as (B, s, H, D), as flash kernels give gradients and models take them."""
    batch, heads, rows, width = like.shape
    return like.new_empty((batch, rows, heads, width), dtype=dtype).transpose(1, 2)


class SoftmaxAccumulator:
    """Attention that is given in parts: of other queries, or of other keys that the same queries attend to."""

    def __init__(self, q: Tensor, width: int) -> None:
        self._q, self._shape = q, (*q.shape[:3], width)
        self._total: tuple[Tensor, Tensor] | None = None
        self._written = WrittenRows()

    def add(self, out: Tensor, lse: Tensor, rows: tuple[int, int]) -> None:
        """Out and its lse, for the rows (offset, length)."""
        parts, whole = self._written.add(rows), (0, self._shape[2])
        if rows == whole and self._total is None:
            self._total = out, lse
            return
        total = self._buffers()
        if not all(new for _, _, new in parts):
            total = self._total = total[0].to(lse.dtype), total[1]
        if parts == [(*whole, False)]:
            self._total = merge(*total, out, lse)
            return
        for start, length, new in parts:
            here = [x.narrow(2, start, length) for x in total]
            more = [x.narrow(2, start - rows[0], length) for x in (out, lse)]
            for x, value in zip(here, more if new else merge(*here, *more)):
                x.copy_(value)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        if self._total is None:
            lse = self._q.new_empty(self._shape[:3], dtype=accumulation_dtype(self._q.dtype))
            self._total = self._q.new_empty(self._shape), lse
        return self._total

    def total(self) -> tuple[Tensor, Tensor]:
        """What was added, out in q's dtype, contiguous; 0 and -inf elsewhere."""
        out, lse = self._buffers()
        for gap in self._written.gaps(self._shape[2]):
            out.narrow(2, *gap).zero_()
            lse.narrow(2, *gap).fill_(-torch.inf)
        return out.to(self._q.dtype).contiguous(), lse.contiguous()
