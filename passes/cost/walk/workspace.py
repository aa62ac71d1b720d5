"""Memory that kernels of attention, and a CPU's elementwise ones, take for themselves while they run."""

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
"""Backwards of attention on a GPU that take memory for themselves -> the dims of heads and of rows in an operand.

A sum and the gradient of queries in float32, in multiples of 128 rows, and, where query heads share those of keys, the
gradients of these for each query head (`mha_bwd` of ATen's flash_attn/flash_api.cpp). Of cuDNN's nothing is in the
open, and as much is assumed.
"""
WORKSPACE_ROWS = 128
QUERY_BLOCKS, KEY_BLOCK = ((768, 256), (192, 64), (0, 32)), 512
"""(queries from which on, queries of a block), and keys of a block: ATen/native/cpu/FlashAttentionKernel.cpp."""


def conversion_bytes(target: Any, operands: Sequence[torch.Tensor], result: torch.Tensor) -> int:
    """Bytes of what a CPU's elementwise operator has in the result's dtype beside it.

    PyTorch copies operands of other dtypes there, as a mask of dropout, before it computes.
    """
    if result.device.type != "cpu":
        return 0
    if target in DROPOUT_CALLS:
        return current_bytes(result)
    other = [x for x in operands if x.dtype != result.dtype and x.dim()] if target in ARITHMETIC_OPS else []
    return sum(size_hint(x.numel()) * result.element_size() for x in other)


def op_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """Bytes, of an operator that is given these tensors."""
    if operands[0].device.type == "cpu":
        return _cpu_workspace(target, operands) if target in CPU_FLASH_OPS else 0
    return _gpu_workspace(target, operands) if target in BACKWARDS_OF_GPU and operands[0].dtype in HALF else 0


def _cpu_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """What the threads of PyTorch's kernel have: blocks of scores, in half types beside a copy in these."""
    first = CPU_FLASH_OPS[target] - 1  # a backward is given the gradient in front
    (rows, keys), size = (size_hint(x.shape[-2]) for x in operands[first : first + 2]), operands[0].element_size()
    block = next(size for least, size in QUERY_BLOCKS if rows >= least) * min(keys, KEY_BLOCK)
    return CPU_FLASH_OPS[target] * torch.get_num_threads() * block * (size if size > 2 else 4 + size)


def _gpu_workspace(target: Any, operands: Sequence[torch.Tensor]) -> int:
    """What flash attention's backward has: see `BACKWARDS_OF_GPU`; a forward has nothing that counts."""
    heads_at, rows_at = BACKWARDS_OF_GPU[target]
    q, k, v = operands[1:4]
    heads, of_keys = (size_hint(x.shape[heads_at]) for x in (q, k))
    rows, dim = size_hint(q.shape[rows_at]), size_hint(q.shape[-1])
    return flash_workspace(size_hint(q.shape[0]), heads, of_keys, rows, dim, current_bytes(k) + current_bytes(v))


def flash_workspace(batch: int, heads: int, of_keys: int, rows: int, dim: int, keys: int) -> int:
    """What flash attention's backward has for so many heads of queries and of keys; keys: bytes of K and V."""
    sums = 4 * batch * heads * -(-rows // WORKSPACE_ROWS) * WORKSPACE_ROWS * (1 + dim)
    return sums if heads == of_keys else sums + keys * heads // of_keys
