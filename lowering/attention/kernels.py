"""Attention of one block, forward and backward: PyTorch's flash kernels, and arithmetic for all they refuse.

Shapes: q (B, Hq, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, E), out and grad (B, Hq, Q, E), lse (B, Hq, Q); no dim
is empty and Hkv divides Hq. ``out`` and ``lse`` given to a backward are those over all keys, of which the
block holds some. A row that attends to nothing has out 0 and lse -inf, and gives no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """What is the same for all elements of a block's scores, and the tensors that broadcast to them."""

    scale: float
    causal: bool = False
    """The i-th query attends to the first i + 1 keys. Only for kernels that are not dense."""
    allowed: Tensor | None = None
    """bool (B | 1, Hq | 1, Q | 1, K | 1): True where a query may attend."""
    bias: Tensor | None = None
    """float (B | 1, Hq | 1, Q | 1, K | 1), added to the scaled scores."""
    kept: Tensor | None = None
    """bool (B, Hq, Q, K): the weights that dropout keeps."""
    keep_rate: float = 1.0
    """The probability of that."""
    bias_grad: bool = False


class Need(NamedTuple):
    """What decides which kernel runs a block."""

    device: str
    dtype: torch.dtype
    masked: bool
    by_element: bool
    """Dropout, or a gradient of the bias: something for each score."""
    head_dim: int


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Kernel(NamedTuple):
    accepts: Callable[[Need], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Case], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    dense: bool
    """Whether it keeps all scores of its block in memory. It then knows masks only as ``allowed``."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half types, else the type itself."""
    return torch.float32 if dtype in _HALF else dtype


def _finite_lse(lse: Tensor) -> Tensor:
    """exp(score - lse) of a row that attends to nothing must be 0, for a score of -inf as well."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _dense_rows(x: Tensor) -> Tensor:
    """The kernels read whole rows without asking for their stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(width: int, *xs: Tensor) -> list[Tensor]:
    """Zeros behind the last dim, which change neither scores nor the part that is kept."""
    return [_dense_rows(x) if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in xs]


# CPU.


def _additive(case: Case, like: Tensor) -> Tensor | None:
    """The mask as the CPU kernel wants it: floats of q's dtype."""
    bias = None if case.bias is None else case.bias.to(like.dtype)
    if case.allowed is None:
        return bias
    return torch.where(case.allowed, like.new_zeros(()) if bias is None else bias, -torch.inf)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    mask, width = _additive(case, q), max(q.shape[-1], v.shape[-1])
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *_padded(width, q, k, v), 0.0, case.causal, attn_mask=mask, scale=case.scale
    )
    if mask is not None:
        lse = lse.masked_fill(mask.amax(-1) == -torch.inf, -torch.inf)
    return out[..., : v.shape[-1]], lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Gradients:
    mask, width = _additive(case, q), max(q.shape[-1], v.shape[-1])
    grad, query, key, value, out = _padded(width, grad, q, k, v, out)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, _finite_lse(lse), 0.0, case.causal, attn_mask=mask, scale=case.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]], None


# CUDA.


def _cuda_width(q: Tensor, v: Tensor) -> int:
    """Heads of one width, a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *_padded(_cuda_width(q, v), q, k, v), 0.0, case.causal, False, scale=case.scale
    )
    return out[..., : v.shape[-1]], lse


def _cuda_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Gradients:
    grad, query, key, value, out = _padded(_cuda_width(q, v), grad, q, k, v, out)
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    lengths = None, None, q.shape[2], k.shape[2]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, _finite_lse(lse).contiguous(), *lengths, 0.0, case.causal, unused, unused,
        scale=case.scale,
    )  # fmt: skip
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]], None


# Any device and dtype. Query heads that share a key head are rows of one product.


def _grouped(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(B, Hq, Q, X) -> (B, Hkv, Hq / Hkv * Q, X)."""
    return x.to(dtype).unflatten(1, (heads, -1)).flatten(2, 3)


def _scores(q: Tensor, k: Tensor, case: Case) -> Tensor:
    """(B, Hq, Q, K) in the accumulation dtype, -inf where masked."""
    dtype = accumulation_dtype(q.dtype)
    scores = _grouped(q, k.shape[1], dtype) @ k.to(dtype).mT * case.scale
    scores = scores.view(*q.shape[:3], k.shape[2])
    if case.bias is not None:
        scores = scores + case.bias.to(dtype)
    return scores if case.allowed is None else scores.masked_fill(~case.allowed, -torch.inf)


def _dropped(weights: Tensor, case: Case) -> Tensor:
    if case.kept is None:
        return weights
    # A rate of 0 keeps nothing, and must not divide by it.
    return torch.where(case.kept, weights / (case.keep_rate or 1.0), 0.0)


def _math_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, case)
    lse = scores.logsumexp(-1)
    weights = _dropped(torch.exp(scores - _finite_lse(lse).unsqueeze(-1)), case)
    out = _grouped(weights, k.shape[1], scores.dtype) @ v.to(scores.dtype)
    return out.view(*q.shape[:3], v.shape[-1]).to(q.dtype), lse


def _math_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Gradients:
    heads, dtype = k.shape[1], accumulation_dtype(q.dtype)
    weights = torch.exp(_scores(q, k, case) - _finite_lse(lse).unsqueeze(-1))
    rows = _grouped(grad, heads, dtype)
    dv = _grouped(_dropped(weights, case), heads, dtype).mT @ rows
    dweights = _dropped((rows @ v.to(dtype).mT).view(weights.shape), case)
    delta = (grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta)
    products = _grouped(dscores, heads, dtype) * case.scale
    dq = (products @ k.to(dtype)).view(q.shape)
    dbias = dscores.sum_to_size(case.bias.shape) if case.bias is not None and case.bias_grad else None
    return dq, products.mT @ _grouped(q, heads, dtype), dv, dbias


def _flash_on_cpu(need: Need) -> bool:
    return need.device == "cpu" and not need.by_element and need.dtype.is_floating_point and need.head_dim > 0


def _flash_on_cuda(need: Need) -> bool:
    if need.device != "cuda" or need.masked or need.by_element:
        return False
    return need.dtype in _HALF and 0 < need.head_dim <= 256 and torch.cuda.get_device_capability() >= (8, 0)


# The first that accepts a block takes it.
KERNELS = (
    Kernel(_flash_on_cpu, _cpu_forward, _cpu_backward, dense=False),
    Kernel(_flash_on_cuda, _cuda_forward, _cuda_backward, dense=False),
    Kernel(lambda need: True, _math_forward, _math_backward, dense=True),
)
