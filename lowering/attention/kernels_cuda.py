"""Call PyTorch's CUDA attention kernels: cuDNN, FlashAttention and memory-efficient attention.

Measured on one H100 with torch 2.11 in bfloat16: 8192 queries and keys, 32 query heads and 8 key heads of width 128.
TFLOP/s of full and of causal blocks:

               forward    backward
    cuDNN      652 565    568 501
    flash      356 308    303 285
    efficient  175        135          float32 as well

FlashAttention-3 and -4 are not part of torch. A user activates an installed one
(torch.nn.attention.activate_flash_attention_impl). aten's flash attention then runs it, including windows and
sequences. Published for it, for the same sizes with 16 heads: 659 630 forward, 559 531 backward
(Dao-AILab/flash-attention, pull request 1791). It does not support dropout, which no named kernel uses. It supports
Hopper only (-4: also Blackwell, there with heads of 128), and is deterministic for head dims up to 192. It has not been
run on a GPU here.

Efficient attention also supports packed sequences, in one batch entry and without a bias. It allocates log-sum-exps,
and in its backward gradients of queries, for each sequence as for the longest one (``packed.py``). Its windows are
causal. It supports a bias and its gradient, one element per score, in q's dtype. It reads a broadcast bias without a
copy if rows are aligned. Masks are converted to a bias. With a bias it returns the log-sum-exp 0 for a row without
keys, and treats values below -2.3e38 as -inf. This is from its source; it has not been run with a bias on a GPU here.

Each kernel has its own form of log-sum-exp. cuDNN: (B, H, S, 1). FlashAttention: (B, H, S), with +inf for a row without
keys (-inf in -3 and -4). Efficient attention: padded along S to a multiple of 32.

In this module, a bias is an additive mask, `added` the bias and the bool mask as one tensor, and a packed call one for
several sequences per batch entry, as cu_seqlens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.lowering.masks.blocks import CAUSAL_WINDOW, FULL_WINDOW, Window

from .kernel_args import Gradients, KernelArgs, invert_empty_lse, pad_last_dim
from .packed import ROW_ALIGNMENT, PackedRows

aten = torch.ops.aten


def _padded_width(q: Tensor, v: Tensor) -> int:
    """Return the larger head dim of q and v, rounded up to a multiple of 8, as the kernels require it."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _trim_grads(q: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """Return (dq, dk, dv, None), trimmed to the head dims of q and v; None is the gradient of a bias."""
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]], None


def _unused_rng_state(q: Tensor) -> Tensor:
    """Return a placeholder for the random state, an argument of the backward kernels that only dropout reads."""
    return torch.empty((), dtype=torch.int64, device=q.device)


# cuDNN.


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
    """Run cuDNN's forward on q (B, Hq, Q, D), k and v; return out (B, Hq, Q, E) and lse (B, Hq, Q)."""
    # No bias, with lse, no dropout, no debug mask.
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        *pad_last_dim(_padded_width(q, v), q, k, v), None, True, 0.0, args.causal, False, scale=args.scale
    )
    return out[..., : v.shape[-1]], lse.reshape(q.shape[:3])


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: KernelArgs
) -> Gradients:
    """Run cuDNN's backward for grad, the cotangent of out; return dq, dk, dv and None (no gradient of a bias)."""
    grad, query, key, value, out = pad_last_dim(_padded_width(q, v), grad, q, k, v, out)
    lse = invert_empty_lse(lse).contiguous().unsqueeze(-1)  # (B, Hq, Q, 1), +inf for rows without keys
    unused = _unused_rng_state(q)
    # No bias and no sequences (None), no dropout (0.0).
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        grad, query, key, value, out, lse, unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, args.causal,
        scale=args.scale,
    )  # fmt: skip
    return _trim_grads(q, v, *grads)


# FlashAttention, whose layout has rows before heads.


class _FlashLayout(NamedTuple):
    """Layout of one FlashAttention call: (B, S, H, X), or (B * S, H, X) for packed sequences."""

    ends: tuple[Tensor | None, Tensor | None]  # ends of the sequences of queries and of keys; None for a batch
    max_length: tuple[int, int]  # maximum number of queries and of keys
    causal: bool  # whether the window is causal
    window_args: dict[str, int | None]  # keyword arguments of other windows

    @staticmethod
    def of(q: Tensor, k: Tensor, args: KernelArgs) -> _FlashLayout:
        """Return the layout of a call, from its shapes, window and sequences, as arguments of the kernel.

        A window is a range of keys around the position of each query; sequences are those of a packed (varlen) call.
        """
        window = CAUSAL_WINDOW if args.causal else args.window
        window_args: dict[str, int | None] = {}
        if window not in (FULL_WINDOW, CAUSAL_WINDOW):
            window_args = {"window_size_left": window.left, "window_size_right": window.right}
        causal = window == CAUSAL_WINDOW
        if args.sequences is None:
            no_ends = None, None
            return _FlashLayout(no_ends, (q.shape[2], k.shape[2]), causal, window_args)
        queries, keys = args.sequences
        # For a maximum length of 1, the kernel would assume one sequence per query. A larger maximum is permitted.
        max_length = max(2, queries.max_length), keys.max_length
        return _FlashLayout((queries.ends, keys.ends), max_length, causal, window_args)

    def to_kernel(self, *xs: Tensor) -> list[Tensor]:
        """Convert (B, H, S, X) to (B, S, H, X), or for packed sequences to (B * S, H, X); views if possible."""
        swapped = [x.transpose(1, 2) for x in xs]
        return swapped if self.ends[0] is None else [x.flatten(0, 1) for x in swapped]

    def from_kernel(self, batch: int, *xs: Tensor) -> list[Tensor]:
        """Undo `to_kernel`, for outputs and gradients of ``batch`` batch entries."""
        return [(x if self.ends[0] is None else x.unflatten(0, (batch, -1))).transpose(1, 2) for x in xs]


def flash_forward(q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
    """Run FlashAttention's forward on q (B, Hq, Q, D), k and v; return out (B, Hq, Q, E) and lse (B, Hq, Q)."""
    layout = _FlashLayout.of(q, k, args)
    query, key, value = layout.to_kernel(*pad_last_dim(_padded_width(q, v), q, k, v))
    # No dropout (0.0) and no debug mask (False).
    out, lse, *_ = aten._flash_attention_forward(
        query, key, value, *layout.ends, *layout.max_length, 0.0, layout.causal, False, scale=args.scale,
        **layout.window_args,
    )  # fmt: skip
    if args.sequences is not None:
        # The kernel returns lse as (H, B * Q), with +inf for rows without keys.
        lse = lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
        lse = torch.where(lse == torch.inf, -torch.inf, lse)
    return layout.from_kernel(q.shape[0], out)[0][..., : v.shape[-1]], lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: KernelArgs
) -> Gradients:
    """Run FlashAttention's backward for grad, the cotangent of out; return dq, dk, dv and None (no bias gradient)."""
    layout = _FlashLayout.of(q, k, args)
    grad, query, key, value, out = layout.to_kernel(*pad_last_dim(_padded_width(q, v), grad, q, k, v, out))
    # The kernel expects +inf, not -inf, for rows without keys, and a random state, which only dropout (0.0) reads.
    lse, unused = invert_empty_lse(lse), _unused_rng_state(q)
    if args.sequences is not None:
        lse = lse.transpose(0, 1).flatten(1)  # (H, B * Q)
    grads = aten._flash_attention_backward(
        grad, query, key, value, out, lse.contiguous(), *layout.ends, *layout.max_length, 0.0, layout.causal, unused,
        unused, scale=args.scale, **layout.window_args,
    )  # fmt: skip
    return _trim_grads(q, v, *layout.from_kernel(q.shape[0], *grads))


# Memory-efficient attention, which does not support grouped query heads.

_EFFICIENT_CAUSAL = 2  # aligned at the end; 0: every pair
_ALIGNED_ELEMENTS = 16  # torch pads rows of a bias to a multiple of this; it reads 16 bytes at a time
# The least finite score: it converts scores to powers of 2, which turns smaller values into -inf.
_MIN_SCORE = -torch.finfo(torch.float32).max * math.log(2)


def can_run_efficient_window(window: Window, is_square: bool) -> bool:
    """Return True if memory-efficient attention supports the window in forward and backward.

    A window that is not simply causal needs equal numbers of queries and keys (``is_square``): up to torch 2.13, the
    backward aligns a window with the first query and key, but the forward aligns it with the last ones.
    """
    return window in (FULL_WINDOW, CAUSAL_WINDOW) or (window.right == 0 and is_square)


def _efficient_mask(args: KernelArgs) -> tuple[int, dict[str, int]]:
    """Return the mask type and the window, as a keyword argument, of efficient attention.

    The mask type is 0 without a causal limit, or `_EFFICIENT_CAUSAL`. The kernel's window size includes the query's own
    position; `args.window.left` does not.
    """
    left, right = args.window
    mask_type = _EFFICIENT_CAUSAL if args.causal or right == 0 else 0
    return mask_type, {} if left is None else {"window_size": left + 1}


class _EfficientLayout(NamedTuple):
    """Layout of one efficient attention call: (B, S, H, X), or (1, rows, H, X) for packed sequences."""

    queries: PackedRows | None  # query rows of packed sequences; None for a batch
    keys: PackedRows | None  # key rows of packed sequences; None for a batch
    batch: int  # batch size
    ends: tuple[Tensor | None, Tensor | None]  # ends of the sequences of queries and of keys; None for a batch
    max_length: tuple[int, int]  # maximum number of queries and of keys

    @staticmethod
    def of(q: Tensor, k: Tensor, args: KernelArgs) -> _EfficientLayout:
        """Return the layout of a call: of a batch, or of packed sequences if ``args`` has any."""
        if args.sequences is None:
            max_length = q.shape[2], k.shape[2]
            return _EfficientLayout(queries=None, keys=None, batch=q.shape[0], ends=(None, None), max_length=max_length)
        queries, keys = args.sequences
        ends, max_length = (queries.ends, keys.ends), (queries.max_length, keys.max_length)
        return _EfficientLayout(queries, keys, q.shape[0], ends, max_length)

    def pack_queries(self, *xs: Tensor) -> list[Tensor]:
        """Convert tensors of the queries to the kernel's layout, which has rows before heads.

        (B, H, S, X) becomes (B, S, H, X), or (1, rows, H, X) for packed sequences; an lse (B, H, S) the same without X.
        """
        swapped = [x.transpose(1, 2) for x in xs]
        return swapped if self.queries is None else [self.queries.pack(x) for x in swapped]

    def pack_keys(self, x: Tensor, heads: int) -> Tensor:
        """Convert keys or values (B, Hkv, S, X) to the kernel's layout, with key heads repeated to ``heads``.

        The kernel requires equal numbers of query and key heads.
        """
        rows, heads_per_key_head = x.transpose(1, 2), heads // x.shape[1]
        rows = rows if self.keys is None else self.keys.pack(rows)
        return rows if heads_per_key_head == 1 else rows.repeat_interleave(heads_per_key_head, 2)

    def unpack_queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Convert a result of the queries back to (B, H, S, X); rows of no sequence are filled with ``fill``."""
        return (x if self.queries is None else self.queries.unpack(x, self.batch, fill)).transpose(1, 2)

    def unpack_keys(self, x: Tensor, heads: int) -> Tensor:
        """Convert the gradient of keys or values back to (B, Hkv, S, X), with Hkv = ``heads``.

        The gradients of repeated key heads are summed.
        """
        rows = x.unflatten(2, (heads, -1)).sum(3)
        return (rows if self.keys is None else self.keys.unpack(rows, self.batch)).transpose(1, 2)

    def unpack_lse(self, lse: Tensor) -> Tensor:
        """Convert the kernel's log-sum-exps, which are padded along S, to (B, H, S)."""
        if self.queries is None:
            return lse[..., : self.max_length[0]]
        # Rows that belong to no sequence get -inf, as rows without keys.
        return self.unpack_queries(self.queries.unpad_per_sequence(lse), -torch.inf)

    def pack_lse(self, lse: Tensor) -> Tensor:
        """Convert log-sum-exps (B, H, S) to the kernel's form, padded with +inf to a multiple of ROW_ALIGNMENT rows."""
        if self.queries is None:
            return F.pad(lse, (0, -lse.shape[-1] % ROW_ALIGNMENT), value=torch.inf)
        return self.queries.pad_per_sequence(*self.pack_queries(lse))


def _is_bias_aligned(bias: Tensor, keys: int) -> bool:
    """Return True if efficient attention can read the additive mask (B | 1, H | 1, Q | 1, K) without a copy.

    It reads 16 bytes at a time: the first element of each row and the number of keys must be multiples of
    _ALIGNED_ELEMENTS.
    """
    if bias.shape[3] != keys or bias.stride(3) != 1:
        return False
    strides = [stride for stride, size in zip(bias.stride()[:3], bias.shape) if size > 1]
    return all(offset % _ALIGNED_ELEMENTS == 0 for offset in (keys, bias.storage_offset(), *strides))


def _combine_bias_and_mask(q: Tensor, args: KernelArgs, keys: int) -> Tensor | None:
    """Return the bias and the bool mask as one additive mask (B | 1, H | 1, Q | 1, K); None without either.

    The kernel requires aligned rows (`_is_bias_aligned`). A bias without aligned rows is copied to padded rows.
    """
    bias = args.additive_mask(q.dtype)
    if bias is None or _is_bias_aligned(bias, keys):
        return bias
    padded_keys = keys + -keys % _ALIGNED_ELEMENTS
    rows = bias.new_zeros((*bias.shape[:3], padded_keys))[..., :keys]
    return rows.copy_(bias)


def _rows_without_keys(added: Tensor, args: KernelArgs, queries: int) -> Tensor:
    """Return a mask of the rows that attend to nothing, bool (B | 1, H | 1, Q | 1).

    The kernel returns an lse of 0 for them, which the caller replaces by -inf.

    Args:
        added: (B | 1, H | 1, Q | 1, K), bias and mask as one tensor.
        args: Arguments of the call; with ``causal``, later keys than the query's do not count.
        queries: The number of queries.
    """
    keys = added.shape[3]
    # The kernel treats scores up to _MIN_SCORE as -inf; float16 has no such finite numbers.
    masked_score = -torch.inf if added.dtype == torch.float16 else _MIN_SCORE
    if not args.causal:
        return added.amax(-1) <= masked_score
    is_allowed = (added > masked_score).view(torch.uint8)
    first_key = is_allowed.argmax(-1, keepdim=True)  # 0 if there is none
    last_key = torch.arange(keys - queries, keys, device=added.device)[:, None]  # of each row, by the causal mask
    return ((is_allowed.gather(-1, first_key) == 0) | (first_key > last_key)).squeeze(-1)


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, args: KernelArgs) -> tuple[Tensor, Tensor]:
    """Run memory-efficient attention's forward; return out (B, Hq, Q, E) and lse (B, Hq, Q)."""
    query, key, value = pad_last_dim(_padded_width(q, v), q, k, v)
    layout, (mask_type, window) = _EfficientLayout.of(q, k, args), _efficient_mask(args)
    added = _combine_bias_and_mask(q, args, k.shape[2])  # one additive mask, or None
    # No dropout (0.0), with lse (True).
    out, lse, *_ = aten._efficient_attention_forward(
        *layout.pack_queries(query), *(layout.pack_keys(x, q.shape[1]) for x in (key, value)),
        None if added is None else added.expand(*q.shape[:3], k.shape[2]), *layout.ends, *layout.max_length, 0.0,
        mask_type, True, scale=args.scale, **window,
    )  # fmt: skip
    out, lse = layout.unpack_queries(out), layout.unpack_lse(lse)
    if added is not None:
        # The kernel returns out and lse 0 for rows without keys.
        lse = lse.masked_fill(_rows_without_keys(added, args, q.shape[2]), -torch.inf)
    return out[..., : v.shape[-1]], lse


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: KernelArgs
) -> Gradients:
    """Run memory-efficient attention's backward; return dq, dk, dv and the gradient of the bias, or None.

    ``grad`` is the cotangent of out. The gradient of the bias is computed if ``args.bias_grad``.
    """
    grad, query, key, value, out = pad_last_dim(_padded_width(q, v), grad, q, k, v, out)
    layout, (mask_type, window) = _EfficientLayout.of(q, k, args), _efficient_mask(args)
    added = _combine_bias_and_mask(q, args, k.shape[2])  # one additive mask, or None
    grad, query, out = layout.pack_queries(grad, query, out)
    trained_bias = args.bias if args.bias_grad else None  # the kernel computes the bias gradient only for it
    unused = _unused_rng_state(q)
    # No dropout (0.0).
    dq, dk, dv, dadded = aten._efficient_attention_backward(
        grad, query, *(layout.pack_keys(x, q.shape[1]) for x in (key, value)),
        None if added is None else added.expand(*q.shape[:3], k.shape[2]),
        out.contiguous(),  # for half types it assumes contiguous rows
        *layout.ends, *layout.max_length, layout.pack_lse(invert_empty_lse(lse)), 0.0, unused, unused, mask_type,
        trained_bias is not None, scale=args.scale, **window,
    )  # fmt: skip
    dk, dv = (layout.unpack_keys(x, k.shape[1]) for x in (dk, dv))
    dq, dk, dv, _ = _trim_grads(q, v, layout.unpack_queries(dq), dk, dv)
    return dq, dk, dv, None if trained_bias is None else _bias_grad(dadded, trained_bias.shape, args.causal)


def _bias_grad(grad: Tensor, shape: torch.Size, causal: bool) -> Tensor:
    """Sum the kernel's gradient of the bias (B, H, Q, K) over the dims along which the bias broadcasts, in float32.

    The kernel does not write the pairs that a causal mask excludes, so they are set to 0 first.
    """
    if causal:
        grad = grad.tril_(grad.shape[3] - grad.shape[2])
    dims = [dim for dim, size in enumerate(shape) if size == 1 and grad.shape[dim] > 1]
    return grad.sum(dims, keepdim=True, dtype=torch.float32) if dims else grad
