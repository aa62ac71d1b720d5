"""The FLOPs of ``sp::attend`` and its backward, for torch.utils.flop_counter and all that asks it.

Products of matrices count, as everywhere in torch: two forward, five backward, over the pairs that attend. What a mask
leaves out is not counted (torch counts all pairs of a causal attention), but of a block whose pairs only the predicate
knows, or a mask that is data, every pair is: the kernels that take masks compute them all.

    tensors         what this rank does, from the tables of the vectors that the mask looks up
    fake tensors    the mean over the ranks, the same on each of them: a partitioner decides by it what every rank keeps
                    for its backward, and vectors have no values, so what depends on them is taken to hold
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sp_compile._compat import FakeTensor, size_hint
from sp_compile.lowering.masks.blocks import pairs_of
from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.plan import pairs_by_position, plan
from sp_compile.lowering.masks.predicate import of_positions
from sp_compile.lowering.masks.spans import rows_of, valid_rows

from .args import LocalArgs


@register_flop_formula(torch.ops.sp.attend, get_raw=True)
def attend_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_meta: Any) -> int:
    """Two products for each pair, of D and of E. Shapes: those of ``sp::attend``."""
    args, _ = LocalArgs.of(rest)
    dim, value_dim = map(size_hint, [q.shape[-1], v.shape[-1]])
    return 2 * _pairs(q, k, args) * (dim + value_dim)


@register_flop_formula(torch.ops.sp.attend_backward, get_raw=True)
def attend_backward_flops(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    out_val: Any = None,
    **_meta: Any,
) -> int:
    """Five products for each pair: scores again, dq and dk of D, dv and the gradients of the weights of E."""
    args, _ = LocalArgs.of(rest)
    dim, value_dim = map(size_hint, [q.shape[-1], v.shape[-1]])
    return 2 * _pairs(q, k, args) * (3 * dim + 2 * value_dim)


def _pairs(q: Tensor, k: Tensor, args: LocalArgs) -> int:
    """Queries and keys that attend, of all batch entries and query heads."""
    batch, heads, queries, keys = map(size_hint, [*q.shape[:3], k.shape[2]])
    spans = tuple(map(size_hint, args.q_span)), tuple(map(size_hint, args.k_span))
    sizes = tuple(map(size_hint, args.sizes))
    if not batch * heads:
        return 0
    if isinstance(q, FakeTensor) or q.is_meta:
        return batch * heads * _mean_pairs(args.predicate, *spans, queries, keys, sizes)
    q_rows, k_rows = (valid_rows(s, length, args.group) for s, length in zip(spans, (queries, keys)))
    pieces = tuple(map(Pieces.of, args.pieces_made()))
    vectors = pieces[: len(args.rows)], pieces[len(args.rows) :]
    return batch * heads * pairs_of(plan(args.predicate, q_rows, k_rows, sizes, *vectors))


@lru_cache(maxsize=1024)
def _mean_pairs(
    predicate: str, q_span: Sequence[int], k_span: Sequence[int], queries: int, keys: int, sizes: tuple[int, ...]
) -> int:
    """Over the ranks, as far as positions alone tell."""
    known, places = of_positions(predicate), max(q_span[0], k_span[0])
    rows = [(rows_of(q_span, queries, place), rows_of(k_span, keys, place)) for place in range(places)]
    return sum(pairs_by_position(known, q_rows, k_rows, sizes) for q_rows, k_rows in rows) // places
