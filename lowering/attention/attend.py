"""Attention of local queries to local keys, forward and backward: two operators that stay opaque in a graph.

They read the rank and their vectors when they run, so that their Python bodies may skip blocks; a graph that holds them
is the same on every rank. One operator call is the kernel calls of its blocks, and their results put together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.dtypes import accumulation_dtype
from sp_compile.lowering.library import opaque
from sp_compile.lowering.masks.blocks import Block, Kind, PackedCall

from .args import LocalArgs
from .case import Kernel, Need
from .kernels import KERNELS
from .masking import Masking
from .merge import merge

CPU_SCORES, GPU_SCORES = 1 << 20, 1 << 26
"""The most scores, or elements of a mask that is data, for which one kernel call makes tensors. A CPU is
fastest while they stay in its cache."""

Strip = list[tuple[Block | PackedCall, Kernel]]
"""Blocks with the same queries, and what runs them."""


def _nothing(q: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The result of queries without keys."""
    lse = q.new_full(shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    return q.new_zeros(shape), lse


def _shape_of_grad(mask: Tensor | None, wanted: bool) -> Sequence[int]:
    return mask.shape if mask is not None and wanted else (0,)


class _Sum:
    """A gradient that is given in parts, along dim 2. A first part that is all of it is not added but kept."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._total: Tensor | None = None

    def add(self, part: Tensor, rows: tuple[int, int]) -> None:
        """Add ``part`` to the rows (offset, length)."""
        if self._total is None and rows == (0, self._like.shape[2]):
            self._total = part.to(self._dtype)
        else:
            self.total().narrow(2, *rows).add_(part)

    def total(self) -> Tensor:
        """What was added so far, contiguous."""
        if self._total is None:
            self._total = self._like.new_zeros(self._like.shape, dtype=self._dtype)
        self._total = self._total.contiguous()
        return self._total


class _Average:
    """Attention that is given in parts: of other queries, or of other keys that the same queries attend to."""

    def __init__(self, q: Tensor, width: int) -> None:
        self._q, self._shape = q, (*q.shape[:3], width)
        self._total: tuple[Tensor, Tensor] | None = None
        self._behind = 0
        """Rows from here on have no part yet."""

    def add(self, out: Tensor, lse: Tensor, rows: tuple[int, int]) -> None:
        """Out and its lse, for the rows (offset, length)."""
        new, self._behind = rows[0] >= self._behind, max(self._behind, sum(rows))
        if self._total is None and rows == (0, self._q.shape[2]):
            self._total = out, lse
            return
        if self._total is None:
            self._total = _nothing(self._q, self._shape)
        if not new:
            self._total = self._total[0].to(lse.dtype), self._total[1]
            before = [x.narrow(2, *rows) for x in self._total]
            out, lse = merge(before[0], before[1], out, lse)
            if rows == (0, self._q.shape[2]):
                self._total = out, lse
                return
        for whole, part in zip(self._total, (out, lse)):
            whole.narrow(2, *rows).copy_(part)

    def total(self) -> tuple[Tensor, Tensor]:
        """What was added, out in q's dtype, contiguous."""
        out, lse = _nothing(self._q, self._shape) if self._total is None else self._total
        return out.to(self._q.dtype).contiguous(), lse.contiguous()


def _strips(q: Tensor, v: Tensor, masking: Masking, mask_grad: bool) -> Iterator[Strip]:
    """The calls in groups of the same queries, cut where a kernel would make too large tensors."""

    def kernel(kind: Kind, rows: int) -> Kernel:
        kind = kind if masking.mask is None else Kind.MASKED
        by_element = masking.dropout is not None or bool(masking.score) or mask_grad
        head_dim = max(q.shape[3], v.shape[3])
        need = Need(q.device, q.dtype, kind, by_element, head_dim, rows)
        return next(kernel for kernel in KERNELS if kernel.accepts(need))

    calls = masking.plan.blocks
    if masking.mask is None and not kernel(Kind.PACKED, q.shape[2]).dense:
        for call in masking.plan.packed:
            yield [(call, kernel(Kind.PACKED, call.query_rows[1]))]
        calls = masking.plan.others
    for _, blocks in groupby(calls, key=lambda block: (block.query_rows, block.kind is Kind.BAND)):
        found = [(block, kernel(block.kind, min(block.q_len, block.k_len))) for block in blocks]
        whole: Strip = [pair for pair in found if not pair[1].takes_masks]
        if whole:
            yield whole  # a part of a causal block is masked
        strip = [pair for pair in found if pair[1].takes_masks]
        if not strip:
            continue
        rows = min(_most_rows(q, masking, *pair) for pair in strip)
        first = strip[0][0]
        for low in range(0, first.q_len, rows):
            yield [(_cut(block, low, rows), kernel) for block, kernel in strip]


def _most_rows(q: Tensor, masking: Masking, block: Block, kernel: Kernel) -> int:
    """The most query rows of one call."""
    if kernel.dense:
        tensors = q.shape[0] * q.shape[1]
    elif masking.mask is not None:
        tensors = masking.mask.shape[0] * masking.mask.shape[1]
    else:
        return block.q_len
    scores = CPU_SCORES if q.device.type == "cpu" else GPU_SCORES
    return max(1, min(block.q_len, scores // (tensors * block.k_len)))


def _cut(block: Block, low: int, rows: int) -> Block:
    """The block's rows [low, low + rows), as far as there are any."""
    if rows >= block.q_len:
        return block
    rows = min(rows, block.q_len - low)
    cut = block._replace(q_off=block.q_off + low, q_len=rows)
    return cut._replace(kind=Kind.MASKED, k_len=low + rows) if block.kind is Kind.CAUSAL else cut


def _operands(q: Tensor, k: Tensor, v: Tensor, block: Block | PackedCall) -> tuple[Tensor, Tensor, Tensor]:
    keys = block.key_rows
    return q.narrow(2, *block.query_rows), k.narrow(2, *keys), v.narrow(2, *keys)


def _scaled(q: Tensor, scale: float) -> tuple[Tensor, int, float]:
    """(q * sign, sign, a scale above 0): PyTorch's causal kernel returns NaN for any other."""
    if scale > 0:
        return q, 1, scale
    sign = -1 if scale < 0 else 0
    return q * sign, sign, -scale if sign else 1.0


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    args, (mask_grad, *_) = LocalArgs.of(rest)
    shapes = q.shape, k.shape, v.shape, _shape_of_grad(args.mask, mask_grad)
    return tuple(q.new_empty(shape, dtype=accumulation_dtype(q.dtype)) for shape in shapes)


@opaque(
    f"attend(Tensor q, Tensor k, Tensor v, {LocalArgs.schema()}, Tensor[]? after=None) -> (Tensor out, Tensor lse)",
    lambda q, k, v, *_: (
        q.new_empty([*q.shape[:3], v.shape[3]]),
        q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype)),
    ),
    replays=False,  # which kernels it calls, documents tell
)
def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Shard(queries), Shard(keys) -> Shard(queries): the softmax average over this rank's keys.

    Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, E), any strides, Hkv divides Hq -> out
    (B, Hq, Sq, E) in q's dtype and lse (B, Hq, Sq), the log-sum-exp of the scaled masked scores in float32 or
    float64, both contiguous; 0 and -inf where a query attends to nothing. Bytes: none. ``after`` only orders: what is
    sent, or added up, before this block.

    The mask's rows are those of the local queries, (B | 1, Hq | 1, Sq | 1, whole key length | 1). Dropout keeps
    weights by a hash of ``seed``, batch, head, query and key. All else: see ``LocalArgs``.
    """
    args, _ = LocalArgs.of(rest)
    q, _, scale = _scaled(q, args.scale)
    masking, total = Masking.of(q, k, args), _Average(q, v.shape[3])
    for strip in _strips(q, v, masking, mask_grad=False):
        parts = [
            kernel.forward(*_operands(q, k, v, block), masking.case(block, q.shape[0], scale, kernel.dense))
            for block, kernel in strip
        ]
        total.add(*reduce(lambda a, b: merge(*a, *b), parts), strip[0][0].query_rows)
    return total.total()


@opaque(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{LocalArgs.schema()}, bool mask_grad, Tensor[]? after=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    _fake_backward,
    replays=False,
)
def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``attend`` over some of the keys, given ``out`` and ``lse`` over all of them.

    Shapes: grad and out (B, Hq, Sq, E), lse (B, Hq, Sq) -> dq, dk, dv as q, k, v and dmask as mask (empty (0,)
    without ``mask_grad``), contiguous, in float32 for half types. The results of disjoint sets of keys add up
    exactly. Bytes: none; ``after`` as above.
    """
    args, (mask_grad, *_) = LocalArgs.of(rest)
    q, sign, scale = _scaled(q, args.scale)
    masking, dtype = Masking.of(q, k, args), accumulation_dtype(q.dtype)
    grad, out = grad.to(q.dtype), out.to(q.dtype)
    dq, dk, dv = (_Sum(x, dtype) for x in (q, k, v))
    wanted = args.mask is not None and mask_grad
    dmask = q.new_zeros(_shape_of_grad(args.mask, mask_grad), dtype=dtype)
    for block, kernel in (pair for strip in _strips(q, v, masking, wanted) for pair in strip):
        queries, keys = block.query_rows, block.key_rows
        given, *of_rows = (x.narrow(2, *queries) for x in (grad, out, lse))
        case = replace(masking.case(block, q.shape[0], scale, kernel.dense), bias_grad=wanted)
        dq_part, dk_part, dv_part, dbias = kernel.backward(given, *_operands(q, k, v, block), *of_rows, case)
        dq.add(dq_part, queries)
        dk.add(dk_part, keys)
        dv.add(dv_part, keys)
        if dbias is not None and isinstance(block, Block):
            masking.add_grad(dmask, dbias, block)
    return dq.total() if sign == 1 else dq.total() * sign, dk.total(), dv.total(), dmask
