"""Attention of local queries to local keys, forward and backward: two operators that stay opaque in a graph.

They read the rank and their vectors when they run, so that their Python bodies may skip blocks; a graph that
holds them is the same on every rank.
"""

from typing import Any

import torch
from torch import Tensor

from .blockwise import attend_blocks, attend_blocks_backward
from .kernels import accumulation_dtype
from .library import LIBRARY
from .masking import Masking

_MASK = (
    "Tensor? mask, Tensor[] rows, Tensor[] cols, SymInt[] sizes, str predicate, Tensor? seed, float dropout_p"
)
_WHERE = "float scale, SymInt[] q_span, SymInt[] k_span, int split_heads, str group"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rows: list[Tensor],
    cols: list[Tensor],
    sizes: list[int],
    predicate: str,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    q_span: list[int],
    k_span: list[int],
    split_heads: int,
    group: str,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shard(queries), Shard(keys) -> Shard(queries): the softmax average over this rank's keys.

    Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, E), any strides, Hkv divides Hq -> out
    (B, Hq, Sq, E) in q's dtype and lse (B, Hq, Sq), the log-sum-exp of the scaled masked scores in float32 or
    float64, both contiguous; 0 and -inf where a query attends to nothing. Bytes: none; ``after`` only orders.

    Who may attend to whom: ``predicate`` with the whole-length ``rows`` and ``cols`` (B | 1, S) and ``sizes``,
    and ``mask``, bool or additive float (B | 1, Hq | 1, Sq | 1, whole key length | 1). Which rows are here:
    ``q_span`` and ``k_span`` (see ``spans.py``). Dropout keeps weights by a hash of ``seed``, batch, head,
    query and key; the heads here are every ``split_heads``-th rank's share.
    """
    masking = Masking.of(
        q, k, mask, rows, cols, sizes, predicate, seed, dropout_p, q_span, k_span, split_heads, group
    )
    sign, scale = _positive(scale)
    return attend_blocks(q if sign == 1 else q * sign, k, v, masking, scale)


def _positive(scale: float) -> tuple[int, float]:
    """(what to multiply queries by, a scale above 0): PyTorch's causal kernel returns NaN for any other."""
    return (1, scale) if scale > 0 else (-1, -scale) if scale < 0 else (0, 1.0)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    rows: list[Tensor],
    cols: list[Tensor],
    sizes: list[int],
    predicate: str,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    q_span: list[int],
    k_span: list[int],
    split_heads: int,
    group: str,
    mask_grad: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``attend`` over some of the keys, given ``out`` and ``lse`` over all of them.

    Shapes: grad and out (B, Hq, Sq, E), lse (B, Hq, Sq) -> dq, dk, dv as q, k, v and dmask as mask (empty (0,)
    without ``mask_grad``), contiguous, in float32 for half types. The results of disjoint sets of keys add up
    exactly. Bytes: none.
    """
    masking = Masking.of(
        q, k, mask, rows, cols, sizes, predicate, seed, dropout_p, q_span, k_span, split_heads, group
    )
    sign, scale = _positive(scale)
    if sign == 1:
        return attend_blocks_backward(grad, q, k, v, out, lse, masking, scale, mask_grad)
    dq, *others = attend_blocks_backward(grad, q * sign, k, v, out, lse, masking, scale, mask_grad)
    return dq * sign, *others


_TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(
    f"attend(Tensor q, Tensor k, Tensor v, {_MASK}, {_WHERE}, Tensor? after=None) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
LIBRARY.define(
    f"attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_MASK}, {_WHERE}, "
    "bool mask_grad, Tensor? after=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    tags=_TAGS,
)
LIBRARY.impl("attend", attend, "CompositeExplicitAutograd")
LIBRARY.impl("attend_backward", attend_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("sp::attend", lib=LIBRARY)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty([*q.shape[:3], v.shape[3]])
    return out, q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@torch.library.register_fake("sp::attend_backward", lib=LIBRARY)
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    rows: list[Tensor],
    cols: list[Tensor],
    sizes: list[int],
    predicate: str,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    q_span: list[int],
    k_span: list[int],
    split_heads: int,
    group: str,
    mask_grad: bool,
    after: Tensor | None = None,
) -> tuple[Tensor, ...]:
    dtype = accumulation_dtype(q.dtype)
    shape = mask.shape if mask is not None and mask_grad else (0,)
    return *(x.new_empty(x.shape, dtype=dtype) for x in (q, k, v)), q.new_empty(shape, dtype=dtype)
