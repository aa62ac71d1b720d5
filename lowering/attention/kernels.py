"""Select the kernel of an attention block from a table: the first one that supports the block runs it.

See ``kernel_args.py`` for shapes and for rows that attend to nothing. The CPU uses PyTorch's flash kernel, CUDA the
kernels of ``kernels_cuda.py``. Masks and score functions that these do not support are compiled into a flex kernel
(``triton/flex``). The dense fallback computes all scores of a block.

    block           a rectangle of local queries x local keys that one kernel call computes (``masks/blocks.py``)
    fused kernel    flex: it evaluates the text of the mask and the score function itself
    fill            a large finite score in place of -inf, which models write into masks (at least ``MIN_FILL``)
    bias            an additive mask
    lse             log-sum-exps of rows of scores; -inf in a row that attends to nothing
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import HALF, MIN_FILL, accumulation_dtype
from sp_compile.lowering.masks.blocks import Kind
from sp_compile.lowering.masks.score import evaluate_score, may_have_fills, score_vjp
from sp_compile.lowering.triton import AVAILABLE
from sp_compile.lowering.triton.flex import flex_calls as fused

from . import kernels_cuda as cuda
from .kernel_args import (
    BiasSupport,
    Gradients,
    Kernel,
    KernelArgs,
    KernelKey,
    cpu_copy_bytes,
    invert_empty_lse,
    pad_last_dim,
)

aten = torch.ops.aten

# CPU.


def _copy_rows(*xs: Tensor) -> Sequence[Tensor]:
    """Return q, k and v, as contiguous copies if `cpu_copy_bytes` finds that these are worth their cost."""
    return tuple(map(Tensor.contiguous, xs)) if cpu_copy_bytes(*xs) else xs


def _cpu_mask(q: Tensor, args: KernelArgs) -> Tensor | None:
    """Return the additive mask: in float32 if q is half precision and the bias has another dtype, else in q's dtype.

    The kernel adds masks in float32, so that this does not round such a bias to q's dtype.
    """
    is_wider = q.dtype in HALF and args.bias is not None and args.bias.dtype != q.dtype
    return args.additive_mask(torch.float32 if is_wider else q.dtype)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
    """Run PyTorch's CPU flash kernel; return out (B, Hq, Q, E) and lse (B, Hq, Q).

    It requires equal head dims, so that operands are padded, and out is trimmed. Operands that are read with strides
    are copied first if that is faster (`_copy_rows`).
    """
    mask, width = _cpu_mask(q, args), max(q.shape[-1], v.shape[-1])
    # 0.0: no dropout, here and in the backward.
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_copy_rows(*pad_last_dim(width, q, k, v)), 0.0, args.causal, attn_mask=mask, scale=args.scale
    )
    if mask is not None:  # the kernel returns no -inf for rows without keys
        lse = lse.masked_fill(mask.amax(-1) == -torch.inf, -torch.inf)
    return out[..., : v.shape[-1]], lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: KernelArgs
) -> Gradients:
    """Run the backward of PyTorch's CPU flash kernel; return dq, dk, dv, and None, since it has no gradient of a bias.

    It requires equal head dims, so that operands are padded, and gradients are trimmed.
    """
    mask, width = _cpu_mask(q, args), max(q.shape[-1], v.shape[-1])
    grad, query, key, value, out = pad_last_dim(width, grad, q, k, v, out)
    query, key, value = _copy_rows(query, key, value)  # contiguous, where the kernel is faster then
    # invert_empty_lse: rows without keys get the weights exp(score - inf) = 0, and not NaN
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, invert_empty_lse(lse), 0.0, args.causal, attn_mask=mask, scale=args.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]], None


# CUDA, compiled from mask texts and score functions.


def _fused_width(x: Tensor) -> int:
    """Return the width to which x is padded for flex: its head dim, but at least 16, the minimum of Triton's tl.dot."""
    return max(x.shape[-1], 16)


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
    """Run flex_attention on all queries and keys of a call; return out (B, Hq, Q, E) and lse (B, Hq, Q).

    ``args.pairs`` has the texts of the mask and the score function, which it compiles. Head dims below 16, the minimum
    of its kernels, are padded.
    """
    assert args.pairs is not None
    query, key = pad_last_dim(_fused_width(q), q, k)
    (value,) = pad_last_dim(_fused_width(v), v)
    out, lse = fused.flex_block_forward(query, key, value, args.pairs, args.scale)
    return out[..., : v.shape[-1]], lse


def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: KernelArgs
) -> Gradients:
    """Run flex_attention's backward; return dq, dk, dv and None (no gradient of a bias).

    `args.pairs` has the texts of the mask and of the score function, which flex evaluates for each query and key.
    Adds the gradients of the score function's tables to ``args.table_grads`` in place.
    """
    assert args.pairs is not None
    query, key = pad_last_dim(_fused_width(q), q, k)
    grad, value, out = pad_last_dim(_fused_width(v), grad, v, out)
    dq, dk, dv = fused.flex_block_backward(grad, query, key, value, out, lse, args.pairs, args.scale, args.table_grads)
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], None


# Dense arithmetic, for any device and dtype. Query heads that share a key head form the rows of one product.


def _group_heads(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Reshape (B, Hq, Q, X) to (B, Hkv, Hq / Hkv * Q, X), with Hkv = ``heads``, and cast to ``dtype``.

    Query heads that share a key head become rows of one matrix product with it.
    """
    return x.to(dtype).unflatten(1, (heads, -1)).flatten(2, 3)


def _scaled_scores(q: Tensor, k: Tensor, args: KernelArgs) -> Tensor:
    """Return the scaled products of queries and keys, (B, Hq, Q, K) in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    scores = _group_heads(q, k.shape[1], dtype) @ k.to(dtype).mT * args.scale
    return scores.view(*q.shape[:3], k.shape[2])


def _masked_scores(scaled: Tensor, args: KernelArgs) -> Tensor:
    """Apply the score function, the bias and the mask to scaled scores; masked scores become -inf."""
    scores, dtype = scaled, scaled.dtype
    if args.score is not None:
        scores = evaluate_score(args.score.name, scores, args.score.values)
    if args.bias is not None:
        scores = scores + args.bias.to(dtype)
    return scores if args.allowed is None else scores.masked_fill(~args.allowed, -torch.inf)


def _apply_dropout(weights: Tensor, args: KernelArgs) -> Tensor:
    """Zero the weights that dropout drops, and divide the others by the probability to keep them."""
    if args.keep_mask is None:
        return weights
    # A keep probability of 0 keeps no weight; avoid the division by 0.
    return torch.where(args.keep_mask, weights / (args.keep_prob or 1.0), 0.0)


def _softmax_weights(scores: Tensor, lse: Tensor, args: KernelArgs) -> Tensor:
    """Return the weights (B, Hq, Q, K) of a block's keys in the softmax over all keys: exp(scores - lse).

    The formula fails for rows of fills only, the large finite numbers (at most -MIN_FILL) that models use in place of
    -inf. The lse of 4 scores of -1e30 is -1e30 + log(4), which rounds to -1e30, so that each weight would be 1 instead
    of 1/4. The weights of these rows are computed from the scores: the block contains all keys of the row, since keys
    are not split for a mask that may have such rows.

    Args:
        scores: (B, Hq, Q, K), masked.
        lse: (B, Hq, Q), over all keys; in a forward, over the block's. A row of -inf has weights 0.
        args: Arguments of the call.
    """
    if args.score is not None and may_have_fills(args.score.name):
        return scores.softmax(-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    has_only_fills = (lse <= -MIN_FILL) & (lse != -torch.inf)
    # Without a bias there are no fills. On a GPU, `any` would synchronize, so the general form is always computed.
    if args.bias is None or (lse.is_cpu and not has_only_fills.any()):
        return torch.exp(scores - invert_empty_lse(lse).unsqueeze(-1))
    shift = torch.where(has_only_fills, scores.amax(-1), invert_empty_lse(lse))
    weights = torch.exp(scores - shift.unsqueeze(-1))
    return weights.div_(torch.where(has_only_fills, weights.sum(-1), 1.0).unsqueeze(-1))


def _math_forward(q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
    """Compute out = softmax(scores) @ v (B, Hq, Q, E) and lse (B, Hq, Q) with matrix products, on any device."""
    scores = _masked_scores(_scaled_scores(q, k, args), args)
    lse = scores.logsumexp(-1)
    weights = _apply_dropout(_softmax_weights(scores, lse, args), args)
    out = _group_heads(weights, k.shape[1], scores.dtype) @ v.to(scores.dtype)
    return out.view(*q.shape[:3], v.shape[-1]).to(q.dtype), lse


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: KernelArgs
) -> Gradients:
    """Compute dq, dk, dv and dbias (None if not needed) with matrix products, from scores that are computed again.

    ``grad`` is the cotangent of out. The gradients of the score function's tables are added to ``args.table_grads``.
    """
    heads, dtype = k.shape[1], accumulation_dtype(q.dtype)
    scaled = _scaled_scores(q, k, args)
    weights = _softmax_weights(_masked_scores(scaled, args), lse, args)
    grouped_grad = _group_heads(grad, heads, dtype)
    dv = _group_heads(_apply_dropout(weights, args), heads, dtype).mT @ grouped_grad
    dweights = _apply_dropout((grouped_grad @ v.to(dtype).mT).view(weights.shape), args)
    # The gradient of the softmax: weights * (dweights - sum(weights * dweights)). The sum over all keys, of which this
    # block has only some, equals sum(grad * out).
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta)
    del weights, dweights  # a score function saves tensors of the same size
    dbias = dscores.sum_to_size(args.bias.shape) if args.bias is not None and args.bias_grad else None
    if args.score is not None:
        dscores = score_vjp(args.score.name, scaled, args.score.values, dscores, args.table_grads)
    dproducts = _group_heads(dscores, heads, dtype) * args.scale
    dq = (dproducts @ k.to(dtype)).view(q.shape)
    return dq, dproducts.mT @ _group_heads(q, heads, dtype), dv, dbias


DENSE_KINDS = frozenset({Kind.FULL, Kind.CAUSAL})  # block kinds of kernels without windows
PACKED_KINDS = DENSE_KINDS | {Kind.BAND, Kind.PACKED}  # block kinds of kernels with windows and packed sequences
BIAS_KINDS = BiasSupport(same=True, other=True)  # support for a bias of any dtype, without its gradient
_FP32, _FP16, _BF16 = (frozenset({dtype}) for dtype in (torch.float32, torch.float16, torch.bfloat16))
# Efficient attention multiplies rows by strides in int32 (pytorch/pytorch#187227), and cuDNN is not known to be right
# above this number: 512K keys of 32 heads of 128, or 4M queries of 4 heads.
INT32_ELEMENTS = 2**31 - 1
_flash = partial(
    Kernel, forward=cuda.flash_forward, backward=cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PACKED_KINDS
)
_efficient = partial(
    Kernel, "efficient", cuda.efficient_forward, cuda.efficient_backward, device="cuda", aligned_at_end=True,
    capability=(7, 0), windows=cuda.can_run_efficient_window, pads=True, rate="efficient", elements=INT32_ELEMENTS,
    repeats_heads=True,
)  # fmt: skip

# All kernels, in order of preference. Their criteria: see `Kernel`.
BLOCK_KERNELS = (
    Kernel(
        "flash, CPU", _cpu_forward, _cpu_backward, device="cpu", dtypes=HALF | {torch.float32, torch.float64},
        kinds=DENSE_KINDS | {Kind.MASKED}, biases=BIAS_KINDS,
    ),
    # Activating one of these replaces torch's own flash attention in aten.
    _flash("FlashAttention-3", head_dim=256, generations=frozenset({9}), flash="FA3", repeatable=192, rate="flash3"),
    _flash("FlashAttention-4", head_dim=256, generations=frozenset({9}), flash="FA4", rate="flash4"),
    _flash("FlashAttention-4", head_dim=128, generations=frozenset({10}), flash="FA4", rate="flash4"),
    # Its backward is reliable for head dims up to 128. It builds a program for each shape, which pays off
    # only if there are few shapes.
    Kernel(
        "cuDNN", cuda.cudnn_forward, cuda.cudnn_backward, device="cuda", dtypes=HALF, kinds=DENSE_KINDS, head_dim=128,
        rows=128, capability=(9, 0), switch=torch.backends.cuda.cudnn_sdp_enabled, repeatable=0, rate="cudnn",
        elements=INT32_ELEMENTS,
    ),
    _flash("flash", head_dim=256, capability=(8, 0), flash="", rate="flash"),
    _efficient(dtypes=_FP32 | _FP16, kinds=PACKED_KINDS),
    _efficient(dtypes=_BF16, kinds=PACKED_KINDS, capability=(8, 0)),
    # In float32 it uses tensor cores, which flex does not. Pure masks go to flex, which skips blocks by their texts.
    _efficient(dtypes=_FP32, biases=BiasSupport(none=False, same=True, grad=True)),
    # Compilation takes about a minute, so it is not used for few rows.
    Kernel(
        "flex", _fused_forward, _fused_backward, fused=True, device="cuda", dtypes=HALF | _FP32, biases=BIAS_KINDS,
        head_dim=256, rows=128, capability=(8, 0), rate="fused",
        switch=lambda: AVAILABLE and fused.is_flex_available(),
    ),
    # Cases without flex: gradients of a bias, few rows, wider heads, or no compiler.
    _efficient(dtypes=_FP32 | _FP16, biases=BiasSupport(same=True, grad=True)),
    _efficient(dtypes=_BF16, biases=BiasSupport(same=True, grad=True), capability=(8, 0)),
    Kernel("dense", _math_forward, _math_backward, dense=True, biases=BIAS_KINDS._replace(grad=True), rate="dense"),
)  # fmt: skip


def kernel_for(key: KernelKey) -> Kernel:
    """Return the kernel that runs a block with this key: the first in order of preference that supports it."""
    return next(kernel for kernel in BLOCK_KERNELS if kernel.can_run(key))


def expected_kernel(key: KernelKey) -> Kernel:
    """Return the kernel that would run a block on the newest device of the key's type, for estimates.

    The own device is not read, so that all ranks get the same result.
    """
    return next(kernel for kernel in BLOCK_KERNELS if kernel.can_run_on_type(key))


def retry_without_flex(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of an operator with a second run if flex_attention cannot be compiled.

    After the error flex is unavailable in this process, so that the second run selects other kernels.
    """

    @wraps(body)
    def run(*args: Any) -> Any:
        """Run the body; at most twice, since the second run does not use flex."""
        try:
            return body(*args)
        except fused.CannotCompileError:
            return body(*args)

    return run
