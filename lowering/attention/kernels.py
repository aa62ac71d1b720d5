"""Attention of one block, forward and backward: a table of kernels, of which the first that accepts a block runs it.

Shapes, and rows that attend to nothing: see ``kernel_args.py``. The CPU has PyTorch's flash kernel, CUDA those of
``kernels_cuda.py``; masks and functions of scores that they do not know are compiled into one (``triton/flex``), and
what that refuses is arithmetic on all scores of a block.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import HALF, LEAST_FILL, accumulation_dtype
from sp_compile.lowering.masks import score
from sp_compile.lowering.masks.blocks import Kind
from sp_compile.lowering.masks.score_program import has_fills
from sp_compile.lowering.triton import AVAILABLE
from sp_compile.lowering.triton.flex import flex_calls as fused

from . import kernels_cuda as cuda
from .kernel_args import AddedFloats, Case, Gradients, Kernel, Need, bytes_copied, finite_lse, padded

aten = torch.ops.aten

# CPU.


def _additive(case: Case, like: Tensor) -> Tensor | None:
    """The mask as the CPU kernel wants it: floats of q's dtype."""
    bias = None if case.bias is None else case.bias.to(like.dtype)
    if case.allowed is None:
        return bias
    return torch.where(case.allowed, like.new_zeros(()) if bias is None else bias, -torch.inf)


def _neighbouring(*xs: Tensor) -> Sequence[Tensor]:
    """q, k and v with rows that neighbour each other, as far as `bytes_copied` says so."""
    return tuple(map(Tensor.contiguous, xs)) if bytes_copied(*xs) else xs


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    mask, width = _additive(case, q), max(q.shape[-1], v.shape[-1])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_neighbouring(*padded(width, q, k, v)), 0.0, case.causal, attn_mask=mask, scale=case.scale
    )
    if mask is not None:
        lse = lse.masked_fill(mask.amax(-1) == -torch.inf, -torch.inf)
    return out[..., : v.shape[-1]], lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Gradients:
    mask, width = _additive(case, q), max(q.shape[-1], v.shape[-1])
    grad, query, key, value, out = padded(width, grad, q, k, v, out)
    query, key, value = _neighbouring(query, key, value)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, finite_lse(lse), 0.0, case.causal, attn_mask=mask, scale=case.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]], None


# CUDA, from texts. Heads are at least as wide as a product of matrices there.

_NARROWEST = 16


def _width(x: Tensor) -> int:
    return max(x.shape[-1], _NARROWEST)


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    assert case.pairs is not None
    (query, key), (value,) = padded(_width(q), q, k), padded(_width(v), v)
    out, lse = fused.forward(query, key, value, case.pairs, case.scale)
    return out[..., : v.shape[-1]], lse


def _fused_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Gradients:
    assert case.pairs is not None
    query, key = padded(_width(q), q, k)
    grad, value, out = padded(_width(v), grad, v, out)
    dq, dk, dv = fused.backward(grad, query, key, value, out, lse, case.pairs, case.scale, case.table_grads)
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], None


def _fused_works() -> bool:
    return AVAILABLE and fused.works()


# Any device and dtype. Query heads that share a key head are rows of one product.


def _grouped(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(B, Hq, Q, X) -> (B, Hkv, Hq / Hkv * Q, X)."""
    return x.to(dtype).unflatten(1, (heads, -1)).flatten(2, 3)


def _scaled(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """The products of queries and keys with the scale, (B, Hq, Q, K) in the accumulation dtype."""
    dtype = accumulation_dtype(q.dtype)
    scores = _grouped(q, k.shape[1], dtype) @ k.to(dtype).mT * case.scale
    return scores.view(*q.shape[:3], k.shape[2])


def _scores(scaled: Tensor, case: Case) -> Tensor:
    """What the softmax reads, of the same shape, -inf where masked."""
    scores, dtype = scaled, scaled.dtype
    if case.score is not None:
        scores = score.evaluate(case.score.text, scores, case.score.values)
    if case.bias is not None:
        scores = scores + case.bias.to(dtype)
    return scores if case.allowed is None else scores.masked_fill(~case.allowed, -torch.inf)


def _dropped(weights: Tensor, case: Case) -> Tensor:
    if case.kept is None:
        return weights
    # A rate of 0 keeps nothing, and must not divide by it.
    return torch.where(case.kept, weights / (case.keep_rate or 1.0), 0.0)


def _weights(scores: Tensor, lse: Tensor, case: Case) -> Tensor:
    """The softmax of all keys' scores, of which these are some: all of them where there may be fills."""
    if case.score is not None and has_fills(case.score.text):
        return scores.softmax(-1).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    if case.bias is None or case.bias_grad:
        return torch.exp(scores - finite_lse(lse).unsqueeze(-1))
    # A row of nothing but fills: its log-sum-exp has lost how many there are. A mask that may have one is never cut.
    filled = (lse <= -LEAST_FILL) & (lse != -torch.inf)
    weights = torch.exp(scores - torch.where(filled, scores.amax(-1), finite_lse(lse)).unsqueeze(-1))
    return weights.div_(torch.where(filled, weights.sum(-1), 1.0).unsqueeze(-1))


def _math_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    scores = _scores(_scaled(q, k, case), case)
    lse = scores.logsumexp(-1)
    weights = _dropped(_weights(scores, lse, case), case)
    out = _grouped(weights, k.shape[1], scores.dtype) @ v.to(scores.dtype)
    return out.view(*q.shape[:3], v.shape[-1]).to(q.dtype), lse


def _math_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Gradients:
    heads, dtype = k.shape[1], accumulation_dtype(q.dtype)
    scaled = _scaled(q, k, case)
    weights = _weights(_scores(scaled, case), lse, case)
    rows = _grouped(grad, heads, dtype)
    dv = _grouped(_dropped(weights, case), heads, dtype).mT @ rows
    dweights = _dropped((rows @ v.to(dtype).mT).view(weights.shape), case)
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta)
    dbias = dscores.sum_to_size(case.bias.shape) if case.bias is not None and case.bias_grad else None
    if case.score is not None:
        dscores = score.pulled_back(case.score.text, scaled, case.score.values, dscores, case.table_grads)
    products = _grouped(dscores, heads, dtype) * case.scale
    dq = (products @ k.to(dtype)).view(q.shape)
    return dq, products.mT @ _grouped(q, heads, dtype), dv, dbias


WHOLE = frozenset({Kind.FULL, Kind.CAUSAL})
PIECES = WHOLE | {Kind.BAND, Kind.PACKED}
READ = AddedFloats(same=True, other=True)
_FP32, _FP16, _BF16 = (frozenset({dtype}) for dtype in (torch.float32, torch.float16, torch.bfloat16))
_efficient = partial(
    Kernel, "efficient", cuda.efficient_forward, cuda.efficient_backward, device="cuda", aligned_at_end=True,
    capability=(7, 0), windows=cuda.efficient_knows, pads=True, rate="efficient",
)  # fmt: skip

KERNELS = (
    Kernel(
        "flash, CPU", _cpu_forward, _cpu_backward, device="cpu", dtypes=HALF | {torch.float32, torch.float64},
        kinds=WHOLE | {Kind.MASKED}, biases=READ,
    ),
    # Who has activated one of these wants it to run, and nothing reaches torch's own flash attention any more.
    Kernel(
        "FlashAttention-3", cuda.flash_forward, cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PIECES,
        head_dim=256, generations=frozenset({9}), flash="FA3", repeatable=192, rate="flash3",
    ),
    Kernel(
        "FlashAttention-4", cuda.flash_forward, cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PIECES,
        head_dim=256, generations=frozenset({9}), flash="FA4", rate="flash4",
    ),
    Kernel(
        "FlashAttention-4", cuda.flash_forward, cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PIECES,
        head_dim=128, generations=frozenset({10}), flash="FA4", rate="flash4",
    ),
    # Up to heads of 128 its backward is old enough to be relied on. It builds a program for each shape, which is worth
    # it where there are few.
    Kernel(
        "cuDNN", cuda.cudnn_forward, cuda.cudnn_backward, device="cuda", dtypes=HALF, kinds=WHOLE, head_dim=128,
        rows=128, capability=(9, 0), switch=torch.backends.cuda.cudnn_sdp_enabled, repeatable=0, rate="cudnn",
    ),
    Kernel(
        "flash", cuda.flash_forward, cuda.flash_backward, device="cuda", dtypes=HALF, kinds=PIECES, head_dim=256,
        capability=(8, 0), flash="", rate="flash",
    ),
    _efficient(dtypes=_FP32 | _FP16, kinds=PIECES),
    _efficient(dtypes=_BF16, kinds=PIECES, capability=(8, 0)),
    # In float32 it has tensor cores, which flex has not. Masks alone flex knows as texts, and skips by them.
    _efficient(dtypes=_FP32, biases=AddedFloats(none=False, same=True, grad=True)),
    # Compiled for its texts, which takes a minute: not for a few rows.
    Kernel(
        "flex", _fused_forward, _fused_backward, fused=True, device="cuda", dtypes=HALF | _FP32, biases=READ,
        head_dim=256, rows=128, capability=(8, 0), switch=_fused_works, rate="fused",
    ),
    # What flex has not: gradients of a bias, few rows, wider heads, or a compiler.
    _efficient(dtypes=_FP32 | _FP16, biases=AddedFloats(same=True, grad=True)),
    _efficient(dtypes=_BF16, biases=AddedFloats(same=True, grad=True), capability=(8, 0)),
    Kernel("dense", _math_forward, _math_backward, dense=True, biases=READ._replace(grad=True), rate="dense"),
)  # fmt: skip


def kernel_for(need: Need) -> Kernel:
    """The one that runs such blocks here."""
    return next(kernel for kernel in KERNELS if kernel.accepts(need))


def expected_kernel(need: Need) -> Kernel:
    """The one that runs such blocks on the newest device of its kind: what all ranks know, wherever they are."""
    return next(kernel for kernel in KERNELS if kernel.is_for(need))
