"""CUDA's attention kernels as arithmetic on all scores, with their operands, layouts and results.

Each asserts the requirements of the kernel. Windows and causal masks of fewer queries than keys are aligned at the end;
a negative size means no window. A row without keys has out 0 and log-sum-exp +inf, or 0 with some biases. Values that a
kernel does not write are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
HEADS_FIRST = (0, 2, 1, 3)


def _allowed(rows: int, keys: int, left: int | None, right: int | None) -> Tensor:
    """Return the mask of a window, bool (rows, keys)."""
    offset = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    allowed = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None and left >= 0:
        allowed &= offset >= -left
    if right is not None and right >= 0:
        allowed &= offset <= right
    return allowed


def _scores(q: Tensor, k: Tensor, allowed: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Return the masked scores; a bias is -inf if it overflows a float32 in powers of 2."""
    scores = q.double() @ k.double().mT * scale
    if bias is not None:
        scores = scores + bias.double()
        scores = torch.where((scores / math.log(2)).float() == -math.inf, -math.inf, scores)
    return scores.masked_fill(~allowed, -math.inf)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(B, H, S, D) -> out in q's dtype, and lse (B, H, S) in float32."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = _scores(q, k, allowed, scale, bias)
    lse = scores.logsumexp(-1)
    lse = torch.where(lse == -math.inf, math.inf, lse)
    return (torch.exp(scores - lse[..., None]) @ v.double()).to(q.dtype), lse.float()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, _ = _backward_with_bias(grad, q, k, v, out, lse, allowed, scale)
    return dq, dk, dv


def _backward_with_bias(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, allowed: Tensor, scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and of the scores (float64); out and lse may include more keys."""
    assert grad.dtype == q.dtype == k.dtype == v.dtype == out.dtype
    assert lse.dtype == torch.float32
    heads = k.shape[1]
    keys, values = (x.repeat_interleave(q.shape[1] // heads, 1).double() for x in (k, v))
    weights = torch.exp(_scores(q, keys, allowed, scale, bias) - lse.double()[..., None])
    grad = grad.double()
    dbias = weights * (grad @ values.mT - (grad * out.double()).sum(-1, keepdim=True))
    dscores = dbias * scale
    dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dscores.mT @ q.double(), weights.mT @ grad))
    return (dscores @ keys).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias


def _check_operands(*xs: Tensor, dtypes: tuple[torch.dtype, ...] = HALF) -> None:
    """Check the requirements of all kernels: contiguous heads of equal width, a multiple of 8."""
    for x in xs:
        assert x.dtype in dtypes
        assert x.stride(-1) == 1
        assert x.shape[-1] == xs[0].shape[-1]
        assert x.shape[-1] % 8 == 0


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout_p: float = 0.0, is_causal: bool = False,
    debug: bool = False, *, scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    assert (bias, with_lse, dropout_p, debug) == (None, True, 0.0, False)
    _check_operands(q, k, v)
    allowed = _allowed(q.shape[2], k.shape[2], None, 0 if is_causal else None)
    assert not is_causal or q.shape[2] == k.shape[2]
    out, lse = _forward(q, k, v, allowed, scale)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), torch.zeros(())


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, _seed: Tensor, _offset: Tensor,
    _bias: None, _q: None, _k: None, most_q: int, most_k: int, dropout_p: float, is_causal: bool, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (most_q, most_k, dropout_p) == (q.shape[2], k.shape[2], 0.0)
    _check_operands(grad, q, k, v, out)
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    allowed = _allowed(q.shape[2], k.shape[2], None, 0 if is_causal else None)
    found = _backward(grad, q, k, v, out, lse.squeeze(-1), allowed, scale)
    return tuple(torch.empty_like(x).copy_(y) for x, y in zip((q, k, v), found))  # as in its meta registration


def _stretches(
    q: Tensor, k: Tensor, ends: tuple[Tensor | None, Tensor | None]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the ranges of queries and of keys of each sequence, from their cumulative lengths `ends`."""
    assert all(x is not None and x.dtype == torch.int32 and x.is_contiguous() and x.ndim == 1 for x in ends)
    queries, keys = (x.tolist() for x in ends if x is not None)
    assert len(queries) == len(keys)
    assert 1 < len(queries) <= 1 << 16  # limit of a grid
    assert (queries[0], keys[0]) == (0, 0)
    assert (queries[-1], keys[-1]) == (len(q), len(k))
    assert queries == sorted(queries)
    assert keys == sorted(keys)
    return list(zip(pairwise(queries), pairwise(keys)))


def _longest(stretches: list[tuple[tuple[int, int], tuple[int, int]]]) -> tuple[int, int]:
    """Return the largest number of queries and of keys of a sequence."""
    queries, keys = (max(b - a for a, b in side) for side in zip(*stretches))
    return queries, keys


def _sequences(
    q: Tensor, k: Tensor, ends: tuple[Tensor | None, Tensor | None], most: tuple[int, int]
) -> Iterator[tuple[slice, slice]]:
    stretches = _stretches(q, k, ends)
    queries, keys = _longest(stretches)
    assert most == (max(2, queries), keys)
    yield from ((slice(*a), slice(*b)) for a, b in stretches)


def flash_window(left: int | None, right: int | None, keys: int) -> tuple[int | None, int | None]:
    """Return FlashAttention-2's form of a window: a side of all keys is None, and a single side adds the other."""
    left, right = (None if side is None or side >= keys else side for side in (left, right))
    if left is not None and right is None:
        return left, keys
    return (keys, right) if left is None and right is not None else (left, right)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, most_q: int, most_k: int,
    dropout_p: float, is_causal: bool, debug: bool, *, scale: float, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert (dropout_p, debug) == (0.0, False)
    _check_operands(q, k, v)
    window = (None, 0) if is_causal else flash_window(window_size_left, window_size_right, most_k)
    if cum_q is None:
        assert (most_q, most_k) == (q.shape[1], k.shape[1])
        q, k, v = (x.permute(HEADS_FIRST) for x in (q, k, v))
        out, lse = _forward(q, k, v, _allowed(most_q, most_k, *window), scale)
        out = out.transpose(1, 2)
    else:
        out, lse = torch.empty_like(q), torch.full((q.shape[1], q.shape[0]), math.nan)
        for rows, keys in _sequences(q, k, (cum_q, cum_k), (most_q, most_k)):
            one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
            part, part_lse = _forward(*one, _allowed(one[0].shape[2], one[1].shape[2], *window), scale)
            out[rows], lse[:, rows] = part[0].transpose(0, 1), part_lse[0]
    return out.contiguous(), lse, torch.zeros(2), torch.zeros(()), torch.zeros(())


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor | None,
    cum_k: Tensor | None, most_q: int, most_k: int, dropout_p: float, is_causal: bool, _rng: Tensor, _unused: Tensor,
    *, scale: float, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dropout_p == 0.0
    _check_operands(grad, q, k, v, out)
    assert lse.is_contiguous()
    window = (None, 0) if is_causal else flash_window(window_size_left, window_size_right, most_k)
    if cum_q is None:
        assert (most_q, most_k) == (q.shape[1], k.shape[1])
        given = [x.permute(HEADS_FIRST) for x in (grad, q, k, v, out)]
        found = _backward(*given, lse, _allowed(most_q, most_k, *window), scale)
        return tuple(x.transpose(1, 2).contiguous() for x in found)
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    assert lse.shape == (q.shape[1], q.shape[0])
    for rows, keys in _sequences(q, k, (cum_q, cum_k), (most_q, most_k)):
        one = [x.transpose(0, 1)[None] for x in (grad[rows], q[rows], k[keys], v[keys], out[rows])]
        allowed = _allowed(one[1].shape[2], one[2].shape[2], *window)
        found = _backward(*one, lse[None, :, rows], allowed, scale)
        dq[rows], dk[keys], dv[keys] = (x[0].transpose(0, 1) for x in found)
    return dq, dk, dv


EFFICIENT = (torch.float32, *HALF)


def _check_bias(bias: Tensor, q: Tensor, keys: int) -> None:
    """q (B, S, H, D). Rows are read 16 bytes at a time, the last of them beyond the last key, but not of the memory."""
    batch, rows, heads, _ = q.shape
    assert bias.shape == (batch, heads, rows, keys)
    assert bias.dtype == q.dtype
    assert bias.stride(3) == 1
    steps = [stride for stride, size in zip(bias.stride()[:3], bias.shape) if size > 1]
    assert not any(x * bias.element_size() % 16 for x in (bias.storage_offset(), *steps))
    last = bias.storage_offset() + sum((size - 1) * step for size, step in zip(bias.shape[:3], bias.stride()))
    last += keys + -keys % (16 // bias.element_size())
    assert last * bias.element_size() <= bias.untyped_storage().nbytes()


def _efficient_sequences(
    q: Tensor, k: Tensor, ends: tuple[Tensor | None, Tensor | None], most: tuple[int, int]
) -> Iterator[tuple[int, slice, slice]]:
    """Their number, and their rows in (1, rows, H, X); neither side of any is empty.

    Its backward takes what remains of a number of blocks of keys divided by that of blocks of queries, and leaves
    gradients of queries without keys as they were.
    """
    assert len(q) == len(k) == 1
    stretches = _stretches(q[0], k[0], ends)
    assert most == _longest(stretches)
    assert all(a < b for both in stretches for a, b in both)
    yield from ((number, slice(*a), slice(*b)) for number, (a, b) in enumerate(stretches))


def _window_of(kind: int, size: int | None) -> tuple[int | None, int | None]:
    """Causal masks alone have one, and it counts the query's own place; 0 is none."""
    assert kind in (0, 2)
    assert kind == 2 or not size
    return (size - 1 if size else None), (0 if kind == 2 else None)


def _window_of_backward(rows: int, keys: int, kind: int, size: int | None) -> Tensor:
    """Return the mask of the backward in torch 2.13: the left side of a window is aligned at the beginning."""
    left, right = _window_of(kind, size)
    allowed = _allowed(rows, keys, None, right)
    return allowed if left is None else allowed & (torch.arange(keys) - torch.arange(rows)[:, None] >= -left)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cum_q: Tensor | None, cum_k: Tensor | None, most_q: int,
    most_k: int, dropout_p: float, kind: int, with_lse: bool, *, scale: float, window_size: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    assert (dropout_p, with_lse) == (0.0, True)
    _check_operands(q, k, v, dtypes=EFFICIENT)
    assert q.shape[2] == k.shape[2] == v.shape[2]
    window, unused = _window_of(kind, window_size), (torch.zeros(()), torch.zeros(()), most_q, most_k)
    query, key, value = (x.permute(HEADS_FIRST) for x in (q, k, v))
    if cum_q is not None:
        assert bias is None
        out = torch.full_like(q[..., : v.shape[3]], math.nan)
        lse = q.new_full((len(cum_q) - 1, q.shape[2], most_q + -most_q % 32), math.nan, dtype=torch.float32)
        for number, rows, keys in _efficient_sequences(q, k, (cum_q, cum_k), (most_q, most_k)):
            one = query[:, :, rows], key[:, :, keys], value[:, :, keys]
            part, part_lse = _forward(*one, _allowed(one[0].shape[2], one[1].shape[2], *window), scale)
            written = _padded(torch.where(part_lse == math.inf, 0.0, part_lse))
            out[:, rows], lse[number, :, : written.shape[2]] = part.transpose(1, 2), written[0]
        return out, lse, *unused
    assert (most_q, most_k) == (q.shape[1], k.shape[1])
    if bias is not None:
        _check_bias(bias, q, most_k)
    out, lse = _forward(query, key, value, _allowed(most_q, most_k, *window), scale, bias)
    lse = _padded(lse if bias is None else torch.where(lse == math.inf, 0.0, lse))  # of a row without keys
    return out.transpose(1, 2).contiguous(), lse, *unused


def _padded(lse: Tensor) -> Tensor:
    return torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, cum_q: Tensor | None,
    cum_k: Tensor | None, most_q: int, most_k: int, lse: Tensor, dropout_p: float, _seed: Tensor, _offset: Tensor,
    kind: int, bias_grad: bool, *, scale: float, window_size: int | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    assert dropout_p == 0.0
    assert bias is not None or not bias_grad
    _check_operands(grad, q, k, v, out, dtypes=EFFICIENT)
    assert lse.is_contiguous()
    assert out.is_contiguous()
    given = [x.permute(HEADS_FIRST) for x in (grad, q, k, v, out)]
    if cum_q is not None:
        assert bias is None
        assert lse.shape == (len(cum_q) - 1, q.shape[2], most_q + -most_q % 32)
        dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
        for number, rows, keys in _efficient_sequences(q, k, (cum_q, cum_k), (most_q, most_k)):
            one = [x[:, :, keys if i in (2, 3) else rows] for i, x in enumerate(given)]
            length = one[1].shape[2]
            allowed = _window_of_backward(length, one[2].shape[2], kind, window_size)
            parts = _backward(*one, lse[None, number, :, :length], allowed, scale)
            dq[:, rows], dk[:, keys], dv[:, keys] = (x.transpose(1, 2) for x in parts)
        return dq, dk, dv, None
    assert (most_q, most_k) == (q.shape[1], k.shape[1])
    assert lse.shape == (q.shape[0], q.shape[2], most_q + -most_q % 32)
    allowed = _window_of_backward(most_q, most_k, kind, window_size)
    if bias is not None:
        _check_bias(bias, q, most_k)
    *found, dscores = _backward_with_bias(*given, lse[..., :most_q], allowed, scale, bias)
    dbias = None
    if bias is not None and bias_grad:
        dbias = bias.new_full((*bias.shape[:3], most_k + -most_k % 16), math.nan)[..., :most_k]
        dbias.copy_(dscores.masked_fill(~allowed, math.nan))  # tiles that it skips are not written
    return *(x.transpose(1, 2).contiguous() for x in found), dbias


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._flash_attention_forward.default: _flash,
    aten._flash_attention_backward.default: _flash_backward,
    aten._efficient_attention_forward.default: _efficient,
    aten._efficient_attention_backward.default: _efficient_backward,
}
"""Attention kernels of a GPU, and their implementations here."""
