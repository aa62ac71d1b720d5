"""Define ``sp::packed_linear``, a linear layer of bitsandbytes with a frozen weight of 4 bits, the base of QLoRA.

    bitsandbytes.matmul_4bit(x, w, quant_state, bias=b)   ->   packed_linear(x, w, [absmax, ...], b, ...)

The op calls the function of the package, so that the weight is dequantized in forward and backward, and never stored in
the dtype of x. Each row of the result depends on the same row of x.
"""

from typing import Any

import torch
from torch import Tensor

from .base.library import composite

NESTED_BLOCK = 256  # elements with one scale of scales; the package supports no other number


@composite(
    "packed_linear(Tensor x, Tensor w, Tensor[] scales, Tensor? bias, int[] shape, int block, str kind, "
    "ScalarType dtype) -> Tensor",
    padded="as given",
)
def packed_linear(
    x: Tensor, w: Tensor, scales: list[Tensor], bias: Tensor | None, shape: list[int], block: int, kind: str, dtype: Any
) -> Tensor:
    """Multiply x and a weight of 4 bits, as bitsandbytes' `matmul_4bit` does.

    Shapes: x (..., K), w (bytes, 1) -> (..., N). Bytes: none. Backward: that of the package; w has no gradient.

    Args:
        x: Rows, of all ranks or of one.
        w: The packed weight, replicated.
        scales: The largest value of each block; or, in 8 bits, its codes, and the scales, table and offset of these.
        bias: (N), or None.
        shape: (N, K).
        block: Number of elements with one scale.
        kind: "nf4" or "fp4".
        dtype: The dtype to which the package dequantizes the weight for the backward.
    """
    import bitsandbytes
    from bitsandbytes.functional import QuantState

    absmax, *nested = scales
    state = QuantState(absmax, shape=torch.Size(shape), blocksize=block, quant_type=kind, dtype=dtype)
    if nested:
        largest, table, offset = nested
        inner = QuantState(largest, code=table, blocksize=NESTED_BLOCK, dtype=torch.float32)
        state = QuantState(absmax, state.shape, None, block, kind, dtype, offset, inner)
    return bitsandbytes.matmul_4bit(x, w, state, bias=bias)
