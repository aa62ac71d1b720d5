"""Merge two attention results with one Triton kernel. Importing this module requires triton.

A result is a pair for a part of the keys: ``out``, the output, and ``lse``, the log-sum-exp of the scores of each row,
which is -inf in rows without keys. The merged pair is that of all keys. ``attention/merge_blocks.py`` has the formula.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 2048  # elements that one program of the kernel merges


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_a, lse_a, out_b, lse_b, out, lse, rows, heads, length, width,
    batch_a, head_a, row_a, batch_b, head_b, row_b, ROWS: tl.constexpr, WIDTH: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Merge ROWS of the batch * heads * length rows, as ``merge_blocks.merge_pointwise``.

    The merged lse is log(exp(lse_a) + exp(lse_b)), and out the average of out_a and out_b with the weights exp(lse_a)
    and exp(lse_b), computed relative to the larger lse. ``rows`` is the number of all rows and ``width`` their length;
    WIDTH is the next power of two. ``batch_a`` to ``row_b`` are strides of out_a and out_b; the other tensors are
    contiguous. With IN_PLACE, out is out_a.
    """
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    row_mask = row < rows
    mask = row_mask & (column < width)
    batch, head, position = row // (heads * length), row // length % heads, row % length

    a, b = tl.load(lse_a + row, mask=row_mask, other=0.0), tl.load(lse_b + row, mask=row_mask, other=0.0)
    # Rows without keys in the second operand are not read from it, and in place they are not written.
    mask_b = mask & (b != float("-inf"))
    if IN_PLACE:
        row_mask = row_mask & (b != float("-inf"))
        mask = mask_b
    max_lse = tl.maximum(a, b)
    finite_max = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    exp_a, exp_b = tl.exp(a - finite_max), tl.exp(b - finite_max)
    total = exp_a + exp_b
    # The larger of the two is 1, so the total is less than 1 only if both are 0.
    divisor = tl.maximum(total, 1.0)

    offset_a = batch * batch_a + head * head_a + position * row_a + column
    offset_b = batch * batch_b + head * head_b + position * row_b + column
    x = tl.load(out_a + offset_a, mask=mask, other=0.0).to(total.dtype)
    y = tl.load(out_b + offset_b, mask=mask_b, other=0.0).to(total.dtype)
    merged = x * (exp_a / divisor) + y * (exp_b / divisor)
    tl.store(out + row * width + column, merged.to(out.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # several threads read a row's lse, and one of them overwrites it
    tl.store(lse + row, finite_max + tl.log(total), mask=row_mask)


def launch_merge(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two attention results with one launch; results are contiguous, new ones in the dtype of lse.

    Args:
        out_a: (..., S, E), any floating dtype.
        lse_a: (..., S), floating.
        out_b: (..., S, E). Not read in rows whose lse is -inf.
        lse_b: (..., S).
        into: Tensors for the results, out of any floating dtype and lse; new ones if None. They may be out_a and lse_a,
            as every element is read before it is written.

    Returns:
        out (..., S, E) and lse (..., S).
    """
    if into is None:
        into = tuple(torch.empty(x.shape, dtype=lse_a.dtype, device=x.device) for x in (out_a, lse_a))
    out, lse = into
    a, b = _view_four_dims(out_a), _view_four_dims(out_b)
    _, heads, length, width = a.shape
    if lse.numel():
        columns = triton.next_power_of_2(max(width, 1))
        rows = max(1, TILE_ELEMENTS // columns)
        _merge_kernel[(triton.cdiv(lse.numel(), rows),)](
            a, lse_a.contiguous(), b, lse_b.contiguous(), out, lse, lse.numel(), heads, length, width,
            *a.stride()[:3], *b.stride()[:3], ROWS=rows, WIDTH=columns, IN_PLACE=out is out_a,
        )  # fmt: skip
    return out, lse


def _view_four_dims(x: Tensor) -> Tensor:
    """Return x as (batch, heads, S, E) with contiguous rows, as the kernel requires.

    It is a view for results of attention kernels, and a copy if the elements of a row are not adjacent.
    """
    x = x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x.flatten(0, -4)
    return x if x.stride(-1) == 1 else x.contiguous()
