"""The merge of two attention results as one Triton kernel. Importing this needs triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out, lse, rows, width, stride_a, stride_b,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS rows of (rows, width) results; ``stride_*`` is from row to row."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    here = row < rows
    inside = here & (column < width)

    a, b = tl.load(lse_a + row, mask=here, other=0.0), tl.load(lse_b + row, mask=here, other=0.0)
    top = tl.maximum(a, b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp(a - finite), tl.exp(b - finite)
    total = a + b
    # The larger of the two is 1, so that only the empty sum of 0 is below it.
    divisor = tl.maximum(total, 1.0)

    x = tl.load(out_a + row * stride_a + column, mask=inside, other=0.0).to(total.dtype)
    y = tl.load(out_b + row * stride_b + column, mask=inside, other=0.0).to(total.dtype)
    tl.store(out + row * width + column, x * (a / divisor) + y * (b / divisor), mask=inside)
    tl.store(lse + row, finite + tl.log(total), mask=here)


def launch(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(..., E), (...), (..., E), (...) -> (..., E), (...) in lse's dtype, contiguous."""
    width = out_a.shape[-1]
    a, b = (x.reshape(-1, width) for x in (out_a, out_b))
    a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (a, b))
    out, lse = torch.empty(out_a.shape, dtype=lse_a.dtype, device=out_a.device), torch.empty_like(
        lse_a, memory_format=torch.contiguous_format
    )
    if out.numel() or lse.numel():
        grid = (triton.cdiv(lse.numel(), ROWS),)
        _merge[grid](
            a, lse_a.contiguous(), b, lse_b.contiguous(), out, lse, lse.numel(), width, a.stride(0), b.stride(0),
            ROWS=ROWS, WIDTH=triton.next_power_of_2(max(width, 1)),
        )  # fmt: skip
    return out, lse
