"""Workspace of attention kernels and of elementwise CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sp_compile.lowering.base.dtypes import HALF
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.graph.sizes import current_bytes

from .kinds import ARITHMETIC_OPS, CPU_FLASH_OPS, DROPOUT_CALLS

BACKWARDS_OF_GPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: (1, 2),
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: (1, 2),
    torch.ops.aten._flash_attention_backward.default: (2, 1),
    torch.ops.sp.attend_backward.default: (1, 2),
}
"""GPU attention backwards with a workspace -> dims of heads and of rows in an operand.

The workspace contains a sum and the gradient of queries in float32, in multiples of 128 rows, and for grouped heads the
gradients of K and V per query head (`mha_bwd` of ATen's flash_attn/flash_api.cpp). cuDNN is assumed to be equal.
"""
WORKSPACE_ROWS = 128
QUERY_BLOCKS, KEY_BLOCK = ((768, 256), (192, 64), (0, 32)), 512
"""(minimum queries, queries of a block), and keys of a block: ATen/native/cpu/FlashAttentionKernel.cpp."""


def conversion_bytes(target: Any, operands: Sequence[torch.Tensor], result: torch.Tensor) -> int:
    """Return the bytes of operands that a CPU's elementwise op converts to the result's dtype.

    PyTorch copies operands of other dtypes, such as a dropout mask, before it computes.
    """
    if result.device.type != "cpu":
        return 0
    if target in DROPOUT_CALLS:
        return current_bytes(result)
    other = [x for x in operands if x.dtype != result.dtype and x.dim()] if target in ARITHMETIC_OPS else []
    return sum(size_hint(x.numel()) * result.element_size() for x in other)


def op_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """Return the workspace of an operator with these operands in bytes."""
    if operands[0].device.type == "cpu":
        return _cpu_workspace(target, operands) if target in CPU_FLASH_OPS else 0
    return _gpu_workspace(target, operands) if target in BACKWARDS_OF_GPU and operands[0].dtype in HALF else 0


def _cpu_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """Return the bytes of score blocks of all threads, including a copy for half types."""
    first = CPU_FLASH_OPS[target] - 1  # the first operand of a backward is the gradient
    (rows, keys), size = (size_hint(x.shape[-2]) for x in operands[first : first + 2]), operands[0].element_size()
    block = next(size for least, size in QUERY_BLOCKS if rows >= least) * min(keys, KEY_BLOCK)
    return CPU_FLASH_OPS[target] * torch.get_num_threads() * block * (size if size > 2 else 4 + size)


def _gpu_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """Return the workspace of flash attention's backward, see `BACKWARDS_OF_GPU`; forwards have none."""
    heads_at, rows_at = BACKWARDS_OF_GPU[target]
    q, k, v = operands[1:4]
    heads, of_keys = (size_hint(x.shape[heads_at]) for x in (q, k))
    rows, dim = size_hint(q.shape[rows_at]), size_hint(q.shape[-1])
    return flash_workspace(size_hint(q.shape[0]), heads, of_keys, rows, dim, current_bytes(k) + current_bytes(v))


def flash_workspace(batch: int, heads: int, of_keys: int, rows: int, dim: int, keys: int) -> int:
    """Return the workspace of flash attention's backward in bytes.

    Args:
        batch: Batch size.
        heads: Query heads.
        of_keys: Key heads.
        rows: Queries.
        dim: Head dim.
        keys: Bytes of K and V.
    """
    sums = 4 * batch * heads * -(-rows // WORKSPACE_ROWS) * WORKSPACE_ROWS * (1 + dim)
    return sums if heads == of_keys else sums + keys * heads // of_keys
