"""The kernels of CUDA that PyTorch brings: cuDNN's, FlashAttention and memory-efficient attention.

Measured on one H100, torch 2.11, bfloat16, 8192 queries and keys, 32 heads over 8 of 128, TFLOP/s of full and of causal
blocks:

               forward    backward
    cuDNN      652 565    568 501
    flash      356 308    303 285
    efficient  175        135          float32 as well

FlashAttention-3 and -4 are not torch's: a user activates what he has installed (torch.nn.attention.
activate_flash_attention_impl), and aten's flash attention is that from then on, windows, sequences and all. Published
for it, of the same sizes with 16 heads: 659 630 forward, 559 531 backward (Dao-AILab/flash-attention, pull request
1791). It has no dropout, which is asked of no kernel with a name, takes Hopper alone (-4: and Blackwell, there heads of
128), and gives the same bits each time to heads of at most 192. No GPU has run it from here.

Efficient attention takes sequences one behind the other, too, in one batch entry, without a bias; each has memory for
log-sum-exps, and in its backward for gradients of queries, as the longest of the call has (``packed.py``). Its windows
are causal ones. It adds a bias, and gives its gradient, a number for each score, in q's dtype. It reads a bias that
broadcasts where it lies, if rows are aligned. Of masks a bias is made. With one it gives a row without keys the
log-sum-exp 0, and takes what is below -2.3e38 for -inf. From its source; no GPU has run it with one from here.

Each has its own log-sum-exp: cuDNN's is (B, H, S, 1); FlashAttention's (B, H, S), and +inf for a row without keys (-inf
of -3 and -4); that of efficient attention is padded along S to a multiple of 32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.lowering.masks.blocks import CAUSAL_WINDOW, FULL_WINDOW, Window

from .kernel_args import Gradients, KernelArgs, finite_lse, pad_last_dim
from .packed import ROW_ALIGNMENT, PackedRows

aten = torch.ops.aten


def _padded_width(q: Tensor, v: Tensor) -> int:
    """Heads of one width, a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _trim_grads(q: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """Gradients without what was padded."""
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]], None


def _unused_rng_state(q: Tensor) -> Tensor:
    """The state of random numbers, where nothing is dropped."""
    return torch.empty((), dtype=torch.int64, device=q.device)


# cuDNN.


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, case: KernelArgs) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *pad_last_dim(_padded_width(q, v), q, k, v), None, True, 0.0, case.causal, False, scale=case.scale
    )
    return out[..., : v.shape[-1]], lse.reshape(q.shape[:3])


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: KernelArgs
) -> Gradients:
    grad, query, key, value, out = pad_last_dim(_padded_width(q, v), grad, q, k, v, out)
    lse = finite_lse(lse).contiguous().unsqueeze(-1)
    unused = _unused_rng_state(q)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, lse, unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, case.causal,
        scale=case.scale,
    )  # fmt: skip
    return _trim_grads(q, v, *grads)


# FlashAttention, which has rows before heads.


class _FlashRows(NamedTuple):
    """How one call of it counts rows: those of a batch of blocks, or of sequences one behind the other."""

    ends: tuple[Tensor | None, Tensor | None]
    max_length: tuple[int, int]
    causal: bool
    sizes: dict[str, int | None]

    @staticmethod
    def of(q: Tensor, k: Tensor, case: KernelArgs) -> _FlashRows:
        window = CAUSAL_WINDOW if case.causal else case.window
        sizes = (
            {}
            if window in (FULL_WINDOW, CAUSAL_WINDOW)
            else {"window_size_left": window.left, "window_size_right": window.right}
        )
        if case.sequences is None:
            return _FlashRows((None, None), (q.shape[2], k.shape[2]), window == CAUSAL_WINDOW, sizes)
        queries, keys = case.sequences
        # With one query a sequence it would look for as many sequences as queries; this is an upper bound.
        return _FlashRows(
            (queries.ends, keys.ends), (max(2, queries.max_length), keys.max_length), window == CAUSAL_WINDOW, sizes
        )

    def to_kernel(self, *xs: Tensor) -> list[Tensor]:
        """(B, H, S, X) -> (B, S, H, X), or (B * S, H, X) of sequences: a view of what has heads behind rows."""
        swapped = [x.transpose(1, 2) for x in xs]
        return swapped if self.ends[0] is None else [x.flatten(0, 1) for x in swapped]

    def from_kernel(self, batch: int, *xs: Tensor) -> list[Tensor]:
        """Undo `laid`."""
        return [(x if self.ends[0] is None else x.unflatten(0, (batch, -1))).transpose(1, 2) for x in xs]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, case: KernelArgs) -> tuple[Tensor, Tensor]:
    rows = _FlashRows.of(q, k, case)
    query, key, value = rows.to_kernel(*pad_last_dim(_padded_width(q, v), q, k, v))
    out, lse, *_ = aten._flash_attention_forward(
        query, key, value, *rows.ends, *rows.max_length, 0.0, rows.causal, False, scale=case.scale, **rows.sizes
    )
    if case.sequences is not None:
        # Sequences are neighbours in it, heads are not; and some may be without keys.
        lse = lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
        lse = torch.where(lse == torch.inf, -torch.inf, lse)
    return rows.from_kernel(q.shape[0], out)[0][..., : v.shape[-1]], lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: KernelArgs
) -> Gradients:
    rows = _FlashRows.of(q, k, case)
    grad, query, key, value, out = rows.to_kernel(*pad_last_dim(_padded_width(q, v), grad, q, k, v, out))
    lse, unused = finite_lse(lse), _unused_rng_state(q)
    lse = lse if case.sequences is None else lse.transpose(0, 1).flatten(1)
    grads = aten._flash_attention_backward(
        grad, query, key, value, out, lse.contiguous(), *rows.ends, *rows.max_length, 0.0, rows.causal, unused, unused,
        scale=case.scale, **rows.sizes,
    )  # fmt: skip
    return _trim_grads(q, v, *rows.from_kernel(q.shape[0], *grads))


# Memory-efficient attention, which knows no heads that share keys.

_EFFICIENT_CAUSAL = 2  # aligned at the end; 0: every pair
_ALIGNED_ELEMENTS = 16  # to whose multiples torch pads rows of a bias: it reads 16 bytes at a time
_MIN_ALIGNED = -torch.finfo(torch.float32).max * math.log(
    2
)  # what is less, it makes -inf of: it goes on with powers of 2


def supports_efficient_window(window: Window, square: bool) -> bool:
    """Its backward (of torch 2.13; later ones do) counts a window from the first query and key, its forward from the
    last ones: these are the same where there are as many of either."""
    return window in (FULL_WINDOW, CAUSAL_WINDOW) or (window.right == 0 and square)


def _efficient_mask(case: KernelArgs) -> tuple[int, dict[str, int]]:
    """(its number for the mask, the size of a window, which counts the query's own place)."""
    left, right = case.window
    return _EFFICIENT_CAUSAL if case.causal or right == 0 else 0, {} if left is None else {"window_size": left + 1}


class _EfficientRows(NamedTuple):
    """How one call of it has rows: (B, S, H, X), or (1, rows, H, X) of sequences one behind the other."""

    queries: PackedRows | None
    keys: PackedRows | None
    batch: int
    ends: tuple[Tensor | None, Tensor | None]
    max_length: tuple[int, int]

    @staticmethod
    def of(q: Tensor, k: Tensor, case: KernelArgs) -> _EfficientRows:
        if case.sequences is None:
            return _EfficientRows(None, None, q.shape[0], (None, None), (q.shape[2], k.shape[2]))
        queries, keys = case.sequences
        return _EfficientRows(
            queries, keys, q.shape[0], (queries.ends, keys.ends), (queries.max_length, keys.max_length)
        )

    def pack_queries(self, *xs: Tensor) -> list[Tensor]:
        """(B, H, S, X), or (B, H, S)."""
        swapped = [x.transpose(1, 2) for x in xs]
        return swapped if self.queries is None else [self.queries.pack(x) for x in swapped]

    def pack_keys(self, x: Tensor, heads: int) -> Tensor:
        """(B, Hkv, S, X), with the heads of queries then."""
        swapped, shared = x.transpose(1, 2), heads // x.shape[1]
        rows = swapped if self.keys is None else self.keys.pack(swapped)
        return rows if shared == 1 else rows.repeat_interleave(shared, 2)

    def unpack_queries(self, x: Tensor, other: float = 0.0) -> Tensor:
        """Undo `pack_queries`."""
        return (x if self.queries is None else self.queries.unpack(x, self.batch, other)).transpose(1, 2)

    def unpack_keys(self, x: Tensor, heads: int) -> Tensor:
        """The transpose of `pack_keys`: summed over the query heads of a key head."""
        rows = x.unflatten(2, (heads, -1)).sum(3)
        return (rows if self.keys is None else self.keys.unpack(rows, self.batch)).transpose(1, 2)

    def unpack_lse(self, lse: Tensor) -> Tensor:
        """(B, H, S) of what it gives."""
        if self.queries is None:
            return lse[..., : self.max_length[0]]
        return self.unpack_queries(self.queries.unpad_per_sequence(lse), -torch.inf)

    def pack_lse(self, lse: Tensor) -> Tensor:
        if self.queries is None:
            return F.pad(lse, (0, -lse.shape[-1] % ROW_ALIGNMENT), value=torch.inf)
        return self.queries.pad_per_sequence(*self.pack_queries(lse))


def _align_bias(bias: Tensor, keys: int) -> bool:
    """Whether it reads rows of the bias as they lie, 16 bytes at a time, none of them beyond the memory."""
    if bias.shape[3] != keys or bias.stride(3) != 1:
        return False
    steps = [stride for stride, size in zip(bias.stride()[:3], bias.shape) if size > 1]
    return not any(x % _ALIGNED_ELEMENTS for x in (keys, bias.storage_offset(), *steps))


def _combine_bias_and_mask(q: Tensor, case: KernelArgs, keys: int) -> Tensor | None:
    """(B | 1, H | 1, Q | 1, K): bias and mask in one, copied only where there is a mask or rows are not aligned."""
    bias = case.bias
    if case.allowed is not None:
        bias = torch.where(case.allowed, q.new_zeros(()) if bias is None else bias, -torch.inf)
    if bias is None or _align_bias(bias, keys):
        return bias
    rows = bias.new_zeros((*bias.shape[:3], keys + -keys % _ALIGNED_ELEMENTS))[..., :keys]
    return rows.copy_(bias)


def _rows_without_keys(added: Tensor, case: KernelArgs, queries: int) -> Tensor:
    """bool (B | 1, H | 1, Q | 1): which rows attend to nothing."""
    keys, least = added.shape[3], -torch.inf if added.dtype == torch.float16 else _MIN_ALIGNED
    if not case.causal:
        return added.amax(-1) <= least
    attended = (added > least).view(torch.uint8)
    first = attended.argmax(-1, keepdim=True)  # 0 if there is none
    last = torch.arange(keys - queries, keys, device=added.device)[:, None]
    return ((attended.gather(-1, first) == 0) | (first > last)).squeeze(-1)


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, case: KernelArgs) -> tuple[Tensor, Tensor]:
    query, key, value = pad_last_dim(_padded_width(q, v), q, k, v)
    rows, (kind, window), added = (
        _EfficientRows.of(q, k, case),
        _efficient_mask(case),
        _combine_bias_and_mask(q, case, k.shape[2]),
    )
    out, lse, *_ = aten._efficient_attention_forward(
        *rows.pack_queries(query), *(rows.pack_keys(x, q.shape[1]) for x in (key, value)),
        None if added is None else added.expand(*q.shape[:3], k.shape[2]), *rows.ends, *rows.max_length, 0.0, kind,
        True, scale=case.scale, **window,
    )  # fmt: skip
    out, lse = rows.unpack_queries(out), rows.unpack_lse(lse)
    if added is not None:
        lse = lse.masked_fill(_rows_without_keys(added, case, q.shape[2]), -torch.inf)  # 0 there, and out as well
    return out[..., : v.shape[-1]], lse


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: KernelArgs
) -> Gradients:
    grad, query, key, value, out = pad_last_dim(_padded_width(q, v), grad, q, k, v, out)
    rows, (kind, window), added = (
        _EfficientRows.of(q, k, case),
        _efficient_mask(case),
        _combine_bias_and_mask(q, case, k.shape[2]),
    )
    grad, query, out = rows.pack_queries(grad, query, out)
    bias, wanted, unused = case.bias, case.bias is not None and case.bias_grad, _unused_rng_state(q)
    dq, dk, dv, dadded = aten._efficient_attention_backward(
        grad, query, *(rows.pack_keys(x, q.shape[1]) for x in (key, value)),
        None if added is None else added.expand(*q.shape[:3], k.shape[2]),
        out.contiguous(),  # of half types it reads whole rows without asking for their stride
        *rows.ends, *rows.max_length, rows.pack_lse(finite_lse(lse)), 0.0, unused, unused, kind, wanted,
        scale=case.scale, **window,
    )  # fmt: skip
    dbias = _bias_grad(dadded, bias.shape, case.causal) if bias is not None and wanted else None
    return *_trim_grads(q, v, rows.unpack_queries(dq), *(rows.unpack_keys(x, k.shape[1]) for x in (dk, dv)))[:3], dbias


def _bias_grad(grad: Tensor, shape: torch.Size, causal: bool) -> Tensor:
    """(B, H, Q, K) -> the bias's shape, summed in float32. What a causal block skips was not written."""
    if causal:
        grad = grad.tril_(grad.shape[3] - grad.shape[2])
    dims = [dim for dim, size in enumerate(shape) if size == 1 and grad.shape[dim] > 1]
    return grad.sum(dims, keepdim=True, dtype=torch.float32) if dims else grad
