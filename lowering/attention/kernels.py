"""Select the kernel of an attention block from a table: the first one that supports the block runs it.

See ``kernel_args.py`` for shapes and for rows that attend to nothing. The CPU uses PyTorch's flash kernel, CUDA the
kernels of ``kernels_cuda.py``. Masks and score functions that these do not support are compiled into a flex kernel
(``triton/flex``). The dense fallback computes all scores of a block.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import HALF, MIN_FILL, accumulation_dtype
from sp_compile.lowering.masks.blocks import Kind
from sp_compile.lowering.masks.score import evaluate_score, may_have_fills, score_vjp
from sp_compile.lowering.triton import AVAILABLE
from sp_compile.lowering.triton.flex import flex_calls as fused

from . import kernels_cuda as cuda
from .kernel_args import BiasSupport, Gradients, Kernel, KernelArgs, KernelKey, cpu_copy_bytes, finite_lse, pad_last_dim

aten = torch.ops.aten

# CPU.


def _additive_mask(case: KernelArgs, like: Tensor) -> Tensor | None:
    """Return the mask as an additive tensor of q's dtype, as the CPU kernel requires."""
    bias = None if case.bias is None else case.bias.to(like.dtype)
    if case.allowed is None:
        return bias
    return torch.where(case.allowed, like.new_zeros(()) if bias is None else bias, -torch.inf)


def _with_dense_rows(*xs: Tensor) -> Sequence[Tensor]:
    """Return q, k and v with contiguous rows if `cpu_copy_bytes` finds that copies are worth their cost."""
    return tuple(map(Tensor.contiguous, xs)) if cpu_copy_bytes(*xs) else xs


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, case: KernelArgs) -> tuple[Tensor, Tensor]:
    mask, width = _additive_mask(case, q), max(q.shape[-1], v.shape[-1])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_with_dense_rows(*pad_last_dim(width, q, k, v)), 0.0, case.causal, attn_mask=mask, scale=case.scale
    )
    if mask is not None:
        lse = lse.masked_fill(mask.amax(-1) == -torch.inf, -torch.inf)
    return out[..., : v.shape[-1]], lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: KernelArgs
) -> Gradients:
    mask, width = _additive_mask(case, q), max(q.shape[-1], v.shape[-1])
    grad, query, key, value, out = pad_last_dim(width, grad, q, k, v, out)
    query, key, value = _with_dense_rows(query, key, value)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, finite_lse(lse), 0.0, case.causal, attn_mask=mask, scale=case.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]], None


# CUDA, compiled from mask texts and score functions. The head dim is at least the minimum size of a matrix product.

_MIN_WIDTH = 16


def _fused_width(x: Tensor) -> int:
    return max(x.shape[-1], _MIN_WIDTH)


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, case: KernelArgs) -> tuple[Tensor, Tensor]:
    assert case.pairs is not None
    (query, key), (value,) = pad_last_dim(_fused_width(q), q, k), pad_last_dim(_fused_width(v), v)
    out, lse = fused.flex_block_forward(query, key, value, case.pairs, case.scale)
    return out[..., : v.shape[-1]], lse


def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: KernelArgs
) -> Gradients:
    assert case.pairs is not None
    query, key = pad_last_dim(_fused_width(q), q, k)
    grad, value, out = pad_last_dim(_fused_width(v), grad, v, out)
    dq, dk, dv = fused.flex_block_backward(grad, query, key, value, out, lse, case.pairs, case.scale, case.table_grads)
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], None


def _is_fused_available() -> bool:
    return AVAILABLE and fused.is_flex_available()


# Any device and dtype. Query heads that share a key head form the rows of one product.


def _group_heads(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Reshape (B, Hq, Q, X) to (B, Hkv, Hq / Hkv * Q, X)."""
    return x.to(dtype).unflatten(1, (heads, -1)).flatten(2, 3)


def _scaled_scores(q: Tensor, k: Tensor, case: KernelArgs) -> Tensor:
    """Return the scaled products of queries and keys, (B, Hq, Q, K) in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    scores = _group_heads(q, k.shape[1], dtype) @ k.to(dtype).mT * case.scale
    return scores.view(*q.shape[:3], k.shape[2])


def _masked_scores(scaled: Tensor, case: KernelArgs) -> Tensor:
    """Apply the score function, the bias and the mask; masked scores are -inf."""
    scores, dtype = scaled, scaled.dtype
    if case.score is not None:
        scores = evaluate_score(case.score.name, scores, case.score.values)
    if case.bias is not None:
        scores = scores + case.bias.to(dtype)
    return scores if case.allowed is None else scores.masked_fill(~case.allowed, -torch.inf)


def _apply_dropout(weights: Tensor, case: KernelArgs) -> Tensor:
    if case.keep_mask is None:
        return weights
    # A keep probability of 0 keeps no weight; avoid the division by 0.
    return torch.where(case.keep_mask, weights / (case.keep_prob or 1.0), 0.0)


def _softmax_weights(scores: Tensor, lse: Tensor, case: KernelArgs) -> Tensor:
    """Return the weights of these keys in the softmax over all keys.

    If scores may hold fills, the block must contain all keys of its queries.
    """
    if case.score is not None and may_have_fills(case.score.name):
        return scores.softmax(-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    if case.bias is None or case.bias_grad:
        return torch.exp(scores - finite_lse(lse).unsqueeze(-1))
    # In a row of fills only, the log-sum-exp does not encode their number. A mask that may have one is never cut.
    filled = (lse <= -MIN_FILL) & (lse != -torch.inf)
    weights = torch.exp(scores - torch.where(filled, scores.amax(-1), finite_lse(lse)).unsqueeze(-1))
    return weights.div_(torch.where(filled, weights.sum(-1), 1.0).unsqueeze(-1))


def _math_forward(q: Tensor, k: Tensor, v: Tensor, case: KernelArgs) -> tuple[Tensor, Tensor]:
    scores = _masked_scores(_scaled_scores(q, k, case), case)
    lse = scores.logsumexp(-1)
    weights = _apply_dropout(_softmax_weights(scores, lse, case), case)
    out = _group_heads(weights, k.shape[1], scores.dtype) @ v.to(scores.dtype)
    return out.view(*q.shape[:3], v.shape[-1]).to(q.dtype), lse


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: KernelArgs
) -> Gradients:
    heads, dtype = k.shape[1], accumulation_dtype(q.dtype)
    scaled = _scaled_scores(q, k, case)
    weights = _softmax_weights(_masked_scores(scaled, case), lse, case)
    rows = _group_heads(grad, heads, dtype)
    dv = _group_heads(_apply_dropout(weights, case), heads, dtype).mT @ rows
    dweights = _apply_dropout((rows @ v.to(dtype).mT).view(weights.shape), case)
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta)
    del weights, dweights  # a score function saves tensors of the same size
    dbias = dscores.sum_to_size(case.bias.shape) if case.bias is not None and case.bias_grad else None
    if case.score is not None:
        dscores = score_vjp(case.score.name, scaled, case.score.values, dscores, case.table_grads)
    products = _group_heads(dscores, heads, dtype) * case.scale
    dq = (products @ k.to(dtype)).view(q.shape)
    return dq, products.mT @ _group_heads(q, heads, dtype), dv, dbias


DENSE_KINDS = frozenset({Kind.FULL, Kind.CAUSAL})  # block kinds of kernels without windows
PACKED_KINDS = DENSE_KINDS | {Kind.BAND, Kind.PACKED}  # block kinds of kernels with windows and packed sequences
BIAS_KINDS = BiasSupport(same=True, other=True)  # support for a bias of any dtype, without its gradient
_FP32, _FP16, _BF16 = (frozenset({dtype}) for dtype in (torch.float32, torch.float16, torch.bfloat16))
_efficient = partial(
    Kernel, "efficient", cuda.efficient_forward, cuda.efficient_backward, device="cuda", aligned_at_end=True,
    capability=(7, 0), windows=cuda.supports_efficient_window, pads=True, rate="efficient",
)  # fmt: skip

# all kernels, in order of preference
BLOCK_KERNELS = (
    Kernel(
        "flash, CPU", _cpu_forward, _cpu_backward, device="cpu", dtypes=HALF | {torch.float32, torch.float64},
        kinds=DENSE_KINDS | {Kind.MASKED}, biases=BIAS_KINDS,
    ),
    # Activating one of these replaces torch's own flash attention in aten.
    Kernel(
        "FlashAttention-3", cuda.flash_forward, cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PACKED_KINDS,
        head_dim=256, generations=frozenset({9}), flash="FA3", repeatable=192, rate="flash3",
    ),
    Kernel(
        "FlashAttention-4", cuda.flash_forward, cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PACKED_KINDS,
        head_dim=256, generations=frozenset({9}), flash="FA4", rate="flash4",
    ),
    Kernel(
        "FlashAttention-4", cuda.flash_forward, cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PACKED_KINDS,
        head_dim=128, generations=frozenset({10}), flash="FA4", rate="flash4",
    ),
    # Its backward is reliable for head dims up to 128. It builds a program for each shape, which pays off
    # only if there are few shapes.
    Kernel(
        "cuDNN", cuda.cudnn_forward, cuda.cudnn_backward, device="cuda", dtypes=HALF, kinds=DENSE_KINDS, head_dim=128,
        rows=128, capability=(9, 0), switch=torch.backends.cuda.cudnn_sdp_enabled, repeatable=0, rate="cudnn",
    ),
    Kernel(
        "flash", cuda.flash_forward, cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PACKED_KINDS, head_dim=256,
        capability=(8, 0), flash="", rate="flash",
    ),
    _efficient(dtypes=_FP32 | _FP16, kinds=PACKED_KINDS),
    _efficient(dtypes=_BF16, kinds=PACKED_KINDS, capability=(8, 0)),
    # In float32 it uses tensor cores, which flex does not. Pure masks go to flex, which skips blocks by their texts.
    _efficient(dtypes=_FP32, biases=BiasSupport(none=False, same=True, grad=True)),
    # Compilation takes about a minute, so it is not used for few rows.
    Kernel(
        "flex", _fused_forward, _fused_backward, fused=True, device="cuda", dtypes=HALF | _FP32, biases=BIAS_KINDS,
        head_dim=256, rows=128, capability=(8, 0), switch=_is_fused_available, rate="fused",
    ),
    # Cases without flex: gradients of a bias, few rows, wider heads, or no compiler.
    _efficient(dtypes=_FP32 | _FP16, biases=BiasSupport(same=True, grad=True)),
    _efficient(dtypes=_BF16, biases=BiasSupport(same=True, grad=True), capability=(8, 0)),
    Kernel("dense", _math_forward, _math_backward, dense=True, biases=BIAS_KINDS._replace(grad=True), rate="dense"),
)  # fmt: skip


def kernel_for(need: KernelKey) -> Kernel:
    """Return the first kernel that can run the block on this device."""
    return next(kernel for kernel in BLOCK_KERNELS if kernel.can_run(need))


def expected_kernel(need: KernelKey) -> Kernel:
    """Return the kernel for the newest device of this type.

    All ranks get the same result, independent of their own device.
    """
    return next(kernel for kernel in BLOCK_KERNELS if kernel.is_for_device(need))
