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

from sp_compile.lowering.masks.blocks import CAUSAL, FULL, Window

from .kernel_args import Case, Gradients, finite_lse, padded
from .packed import ALIGNED, PackedRows

aten = torch.ops.aten


def _width(q: Tensor, v: Tensor) -> int:
    """Heads of one width, a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _cut(q: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """Gradients without what was padded."""
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]], None


def _unused(q: Tensor) -> Tensor:
    """The state of random numbers, where nothing is dropped."""
    return torch.empty((), dtype=torch.int64, device=q.device)


# cuDNN.


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *padded(_width(q, v), q, k, v), None, True, 0.0, case.causal, False, scale=case.scale
    )
    return out[..., : v.shape[-1]], lse.reshape(q.shape[:3])


def cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Gradients:
    grad, query, key, value, out = padded(_width(q, v), grad, q, k, v, out)
    lse = finite_lse(lse).contiguous().unsqueeze(-1)
    unused = _unused(q)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, lse, unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, case.causal,
        scale=case.scale,
    )  # fmt: skip
    return _cut(q, v, *grads)


# FlashAttention, which has rows before heads.


class _CallRows(NamedTuple):
    """How one call of it counts rows: those of a batch of blocks, or of sequences one behind the other."""

    ends: tuple[Tensor | None, Tensor | None]
    longest: tuple[int, int]
    causal: bool
    sizes: dict[str, int | None]

    @staticmethod
    def of(q: Tensor, k: Tensor, case: Case) -> _CallRows:
        window = CAUSAL if case.causal else case.window
        sizes = {} if window in (FULL, CAUSAL) else {"window_size_left": window.left, "window_size_right": window.right}
        if case.sequences is None:
            return _CallRows((None, None), (q.shape[2], k.shape[2]), window == CAUSAL, sizes)
        queries, keys = case.sequences
        # With one query a sequence it would look for as many sequences as queries; this is an upper bound.
        return _CallRows((queries.ends, keys.ends), (max(2, queries.most), keys.most), window == CAUSAL, sizes)

    def laid(self, *xs: Tensor) -> list[Tensor]:
        """(B, H, S, X) -> (B, S, H, X), or (B * S, H, X) of sequences: a view of what has heads behind rows."""
        swapped = [x.transpose(1, 2) for x in xs]
        return swapped if self.ends[0] is None else [x.flatten(0, 1) for x in swapped]

    def back(self, batch: int, *xs: Tensor) -> list[Tensor]:
        """Undo `laid`."""
        return [(x if self.ends[0] is None else x.unflatten(0, (batch, -1))).transpose(1, 2) for x in xs]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    rows = _CallRows.of(q, k, case)
    query, key, value = rows.laid(*padded(_width(q, v), q, k, v))
    out, lse, *_ = aten._flash_attention_forward(
        query, key, value, *rows.ends, *rows.longest, 0.0, rows.causal, False, scale=case.scale, **rows.sizes
    )
    if case.sequences is not None:
        # Sequences are neighbours in it, heads are not; and some may be without keys.
        lse = lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
        lse = torch.where(lse == torch.inf, -torch.inf, lse)
    return rows.back(q.shape[0], out)[0][..., : v.shape[-1]], lse


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case) -> Gradients:
    rows = _CallRows.of(q, k, case)
    grad, query, key, value, out = rows.laid(*padded(_width(q, v), grad, q, k, v, out))
    lse, unused = finite_lse(lse), _unused(q)
    lse = lse if case.sequences is None else lse.transpose(0, 1).flatten(1)
    grads = aten._flash_attention_backward(
        grad, query, key, value, out, lse.contiguous(), *rows.ends, *rows.longest, 0.0, rows.causal, unused, unused,
        scale=case.scale, **rows.sizes,
    )  # fmt: skip
    return _cut(q, v, *rows.back(q.shape[0], *grads))


# Memory-efficient attention, which knows no heads that share keys.

_CAUSAL = 2  # aligned at the end; 0: every pair
_ELEMENTS = 16  # to whose multiples torch pads rows of a bias: it reads 16 bytes at a time
_LEAST = -torch.finfo(torch.float32).max * math.log(2)  # what is less, it makes -inf of: it goes on with powers of 2


def efficient_knows(window: Window, square: bool) -> bool:
    """Its backward (of torch 2.13; later ones do) counts a window from the first query and key, its forward from the
    last ones: these are the same where there are as many of either."""
    return window in (FULL, CAUSAL) or (window.right == 0 and square)


def _masked(case: Case) -> tuple[int, dict[str, int]]:
    """(its number for the mask, the size of a window, which counts the query's own place)."""
    left, right = case.window
    return _CAUSAL if case.causal or right == 0 else 0, {} if left is None else {"window_size": left + 1}


class _LayoutOfRows(NamedTuple):
    """How one call of it has rows: (B, S, H, X), or (1, rows, H, X) of sequences one behind the other."""

    queries: PackedRows | None
    keys: PackedRows | None
    batch: int
    ends: tuple[Tensor | None, Tensor | None]
    longest: tuple[int, int]

    @staticmethod
    def of(q: Tensor, k: Tensor, case: Case) -> _LayoutOfRows:
        if case.sequences is None:
            return _LayoutOfRows(None, None, q.shape[0], (None, None), (q.shape[2], k.shape[2]))
        queries, keys = case.sequences
        return _LayoutOfRows(queries, keys, q.shape[0], (queries.ends, keys.ends), (queries.most, keys.most))

    def of_queries(self, *xs: Tensor) -> list[Tensor]:
        """(B, H, S, X), or (B, H, S)."""
        swapped = [x.transpose(1, 2) for x in xs]
        return swapped if self.queries is None else [self.queries.packed(x) for x in swapped]

    def of_keys(self, x: Tensor, heads: int) -> Tensor:
        """(B, Hkv, S, X), with the heads of queries then."""
        swapped, shared = x.transpose(1, 2), heads // x.shape[1]
        rows = swapped if self.keys is None else self.keys.packed(swapped)
        return rows if shared == 1 else rows.repeat_interleave(shared, 2)

    def queries_back(self, x: Tensor, other: float = 0.0) -> Tensor:
        """Undo `of_queries`."""
        return (x if self.queries is None else self.queries.unpacked(x, self.batch, other)).transpose(1, 2)

    def keys_back(self, x: Tensor, heads: int) -> Tensor:
        """The transpose of `of_keys`: summed over the query heads of a key head."""
        rows = x.unflatten(2, (heads, -1)).sum(3)
        return (rows if self.keys is None else self.keys.unpacked(rows, self.batch)).transpose(1, 2)

    def lse_of_kernel(self, lse: Tensor) -> Tensor:
        """(B, H, S) of what it gives."""
        if self.queries is None:
            return lse[..., : self.longest[0]]
        return self.queries_back(self.queries.of_rows(lse), -torch.inf)

    def lse_for_kernel(self, lse: Tensor) -> Tensor:
        if self.queries is None:
            return F.pad(lse, (0, -lse.shape[-1] % ALIGNED), value=torch.inf)
        return self.queries.of_sequences(*self.of_queries(lse))


def _aligned(bias: Tensor, keys: int) -> bool:
    """Whether it reads rows of the bias as they lie, 16 bytes at a time, none of them beyond the memory."""
    if bias.shape[3] != keys or bias.stride(3) != 1:
        return False
    steps = [stride for stride, size in zip(bias.stride()[:3], bias.shape) if size > 1]
    return not any(x % _ELEMENTS for x in (keys, bias.storage_offset(), *steps))


def _added(q: Tensor, case: Case, keys: int) -> Tensor | None:
    """(B | 1, H | 1, Q | 1, K): bias and mask in one, copied only where there is a mask or rows are not aligned."""
    bias = case.bias
    if case.allowed is not None:
        bias = torch.where(case.allowed, q.new_zeros(()) if bias is None else bias, -torch.inf)
    if bias is None or _aligned(bias, keys):
        return bias
    rows = bias.new_zeros((*bias.shape[:3], keys + -keys % _ELEMENTS))[..., :keys]
    return rows.copy_(bias)


def _without_keys(added: Tensor, case: Case, queries: int) -> Tensor:
    """bool (B | 1, H | 1, Q | 1): which rows attend to nothing."""
    keys, least = added.shape[3], -torch.inf if added.dtype == torch.float16 else _LEAST
    if not case.causal:
        return added.amax(-1) <= least
    attended = (added > least).view(torch.uint8)
    first = attended.argmax(-1, keepdim=True)  # 0 if there is none
    last = torch.arange(keys - queries, keys, device=added.device)[:, None]
    return ((attended.gather(-1, first) == 0) | (first > last)).squeeze(-1)


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    query, key, value = padded(_width(q, v), q, k, v)
    rows, (kind, window), added = _LayoutOfRows.of(q, k, case), _masked(case), _added(q, case, k.shape[2])
    out, lse, *_ = aten._efficient_attention_forward(
        *rows.of_queries(query), *(rows.of_keys(x, q.shape[1]) for x in (key, value)),
        None if added is None else added.expand(*q.shape[:3], k.shape[2]), *rows.ends, *rows.longest, 0.0, kind, True,
        scale=case.scale, **window,
    )  # fmt: skip
    out, lse = rows.queries_back(out), rows.lse_of_kernel(lse)
    if added is not None:
        lse = lse.masked_fill(_without_keys(added, case, q.shape[2]), -torch.inf)  # 0 there, and out as well
    return out[..., : v.shape[-1]], lse


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, case: Case
) -> Gradients:
    grad, query, key, value, out = padded(_width(q, v), grad, q, k, v, out)
    rows, (kind, window), added = _LayoutOfRows.of(q, k, case), _masked(case), _added(q, case, k.shape[2])
    grad, query, out = rows.of_queries(grad, query, out)
    bias, wanted, unused = case.bias, case.bias is not None and case.bias_grad, _unused(q)
    dq, dk, dv, dadded = aten._efficient_attention_backward(
        grad, query, *(rows.of_keys(x, q.shape[1]) for x in (key, value)),
        None if added is None else added.expand(*q.shape[:3], k.shape[2]),
        out.contiguous(),  # of half types it reads whole rows without asking for their stride
        *rows.ends, *rows.longest, rows.lse_for_kernel(finite_lse(lse)), 0.0, unused, unused, kind, wanted,
        scale=case.scale, **window,
    )  # fmt: skip
    dbias = _of_bias(dadded, bias.shape, case.causal) if bias is not None and wanted else None
    return *_cut(q, v, rows.queries_back(dq), *(rows.keys_back(x, k.shape[1]) for x in (dk, dv)))[:3], dbias


def _of_bias(grad: Tensor, shape: torch.Size, causal: bool) -> Tensor:
    """(B, H, Q, K) -> the bias's shape, summed in float32. What a causal block skips was not written."""
    if causal:
        grad = grad.tril_(grad.shape[3] - grad.shape[2])
    dims = [dim for dim, size in enumerate(shape) if size == 1 and grad.shape[dim] > 1]
    return grad.sum(dims, keepdim=True, dtype=torch.float32) if dims else grad
