"""Workspace of attention kernels and of elementwise CPU kernels.

A workspace is memory that a kernel allocates for its run, besides operands and results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sp_compile.lowering.base.dtypes import HALF
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.graph.sizes import current_bytes

from .kinds import ARITHMETIC_OPS, CPU_FLASH_OPS, DROPOUT_CALLS

# GPU attention backwards with a workspace -> dims of heads and of rows in an operand. The workspace contains a sum and
# the gradient of queries in float32, in multiples of 128 rows, and for grouped heads the gradients of K and V per query
# head (`mha_bwd` of ATen's flash_attn/flash_api.cpp). cuDNN is assumed to be equal.
GPU_BACKWARDS = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: (1, 2),
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: (1, 2),
    torch.ops.aten._flash_attention_backward.default: (2, 1),
    torch.ops.sp.attend_backward.default: (1, 2),
    torch.ops.sp.attend_backward_parts.default: (1, 2),
}
WORKSPACE_ROWS = 128
# (minimum queries, queries of a block), and keys of a block: ATen/native/cpu/FlashAttentionKernel.cpp
QUERY_BLOCKS, KEY_BLOCK = ((768, 256), (192, 64), (0, 32)), 512


def conversion_bytes(target: Any, operands: Sequence[torch.Tensor], result: torch.Tensor) -> int:
    """Return the bytes of the copies that an elementwise op on a CPU makes of operands in the result's dtype.

    PyTorch converts operands of other dtypes, such as a dropout mask, before it computes. Operands without dims, such
    as a scale, have a negligible size.
    """
    if result.device.type != "cpu":
        return 0
    if target in DROPOUT_CALLS:  # it multiplies by the mask (bool), which is converted to the dtype of the result
        return current_bytes(result)
    converted = [x for x in operands if x.dtype != result.dtype and x.dim()] if target in ARITHMETIC_OPS else []
    return sum(size_hint(x.numel()) * result.element_size() for x in converted)


def op_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an attention op allocates for its run, besides operands and results.

    On a GPU only backwards in half types allocate much: flash attention and cuDNN support no other dtypes.
    """
    if operands[0].device.type == "cpu":
        return _cpu_workspace(target, operands) if target in CPU_FLASH_OPS else 0
    return _gpu_workspace(target, operands) if target in GPU_BACKWARDS and operands[0].dtype in HALF else 0


def _cpu_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """Return the bytes that attention on a CPU allocates: blocks of scores per thread, copied for half types."""
    num_blocks = CPU_FLASH_OPS[target]  # of scores per thread: 1 in a forward, 2 in a backward
    query, key = operands[:2] if num_blocks == 1 else operands[1:3]  # operand 0 of a backward is the gradient
    rows, keys, element_size = size_hint(query.shape[-2]), size_hint(key.shape[-2]), query.element_size()
    block_rows = next(size for min_rows, size in QUERY_BLOCKS if rows >= min_rows)
    scores = block_rows * min(keys, KEY_BLOCK)  # number of scores in a block
    score_bytes = element_size if element_size > 2 else 4 + element_size  # float32, and the copy in the half type
    return num_blocks * torch.get_num_threads() * scores * score_bytes


def _gpu_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """Return the bytes that flash attention's backward allocates besides its results, see `flash_workspace`."""
    heads_dim, rows_dim = GPU_BACKWARDS[target]
    q, k, v = operands[1:4]  # operand 0 is the gradient of the result
    heads, key_heads = (size_hint(x.shape[heads_dim]) for x in (q, k))
    rows, dim = size_hint(q.shape[rows_dim]), size_hint(q.shape[-1])
    key_bytes = current_bytes(k) + current_bytes(v)
    batch = size_hint(q.shape[0])
    return flash_workspace(batch=batch, heads=heads, key_heads=key_heads, rows=rows, dim=dim, key_bytes=key_bytes)


def flash_workspace(batch: int, heads: int, key_heads: int, rows: int, dim: int, key_bytes: int) -> int:
    """Return the bytes that flash attention's backward allocates besides operands and results.

    These are a sum per row and the gradient of queries in float32, and for grouped heads the gradients of K and V per
    query head.

    Args:
        batch: Batch size.
        heads: Query heads.
        key_heads: Key heads.
        rows: Queries.
        dim: Head dim.
        key_bytes: Bytes of K and V.
    """
    padded_rows = -(-rows // WORKSPACE_ROWS) * WORKSPACE_ROWS  # the next multiple
    float32_bytes = 4 * batch * heads * padded_rows * (1 + dim)
    return float32_bytes if heads == key_heads else float32_bytes + key_bytes * heads // key_heads
