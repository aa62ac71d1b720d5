"""Register the FLOP formulas of ``sp::attend`` and its backward with torch.utils.flop_counter.

As elsewhere in torch, only matrix products count: two in the forward and five in the backward, over the pairs that
attend. Masked pairs are not counted (torch counts all pairs of a causal attention), even if the kernel computes them.
With a tensor mask every pair counts.

    tensors         the work of this rank, from the tables of the vectors that the mask reads. If these do not determine
                    it (batch entries differ), from the vectors, which synchronizes with the device
    fake tensors    the mean over the ranks, equal on all of them, because a partitioner uses it to select the tensors
                    that every rank saves. Vectors have no values, so conditions that read them are assumed to hold

Most pairs belong to bands, which have a closed form. Of masked blocks, those at the edge of the mask are evaluated pair
by pair. If there are too many, a sample of them is evaluated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sp_compile.lowering.masks.block_plan import plan_blocks, settle_blocks, tiles_by_position
from sp_compile.lowering.masks.blocks import Block, BlockPlan, Kind, count_pairs
from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.predicate import depends_on_distance, position_conditions
from sp_compile.lowering.masks.spans import Rows, Segment, local_valid_rows, sort_by_index, span_rows
from sp_compile.lowering.torch_compat import FakeTensor, size_hint, use_real_tensors

from .masking import CallMask
from .op_args import LocalArgs

MAX_COUNTED_BLOCKS = 1 << 15  # the maximum number of undecided blocks that are evaluated for one attention

PlanArgs = tuple[str, Rows, Rows, tuple[int, ...], tuple[Pieces, ...], tuple[Pieces, ...]]  # arguments of `plan_blocks`


@register_flop_formula(torch.ops.sp.attend, get_raw=True)
def attend_flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_meta: Any) -> int:
    """Return the FLOPs of ``sp::attend``: two products per pair, with inner dims D and E."""
    args, _ = LocalArgs.of(rest)
    dim, value_dim = map(size_hint, [q.shape[-1], v.shape[-1]])
    return 2 * _attended_pairs(q, k, args) * (dim + value_dim)


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
    """Return the FLOPs of ``sp::attend_backward``: five products per pair.

    The scores, dq and dk use D; dv and the gradient of the weights use E.
    """
    args, _ = LocalArgs.of(rest)
    dim, value_dim = map(size_hint, [q.shape[-1], v.shape[-1]])
    return 2 * _attended_pairs(q, k, args) * (3 * dim + 2 * value_dim)


def _attended_pairs(q: Tensor, k: Tensor, args: LocalArgs) -> int:
    """Return the number of attending (query, key) pairs over all batch entries and query heads."""
    batch, heads, queries, keys = map(size_hint, [*q.shape[:3], k.shape[2]])
    spans = tuple(map(size_hint, args.q_span)), tuple(map(size_hint, args.k_span))
    sizes = tuple(map(size_hint, args.sizes))
    if not batch * heads:
        return 0
    if isinstance(q, FakeTensor) or q.is_meta:
        return batch * heads * _mean_pairs(args.predicate, *spans, queries, keys, sizes)
    q_rows, k_rows = (local_valid_rows(s, length, args.group) for s, length in zip(spans, (queries, keys)))
    pieces = tuple(map(Pieces.of, args.make_pieces()))
    plan_args = args.predicate, q_rows, k_rows, sizes, pieces[: len(args.rows)], pieces[len(args.rows) :]
    if all(map(_has_known_table, pieces)):
        return batch * heads * _count_known_pairs(*plan_args)
    return heads * _count_rows(plan_blocks(*plan_args), plan_args, (args.rows, args.cols), batch, q.device)


def _has_known_table(vector: Pieces) -> bool:
    """Return True if the table determines all values of the vector."""
    return np.array_equal(vector.lows, vector.highs)


def _table_values(vector: Pieces) -> Tensor:
    """Return the values of a vector whose table is exact, int64 (1, length)."""
    lows, _, _ = vector.lines(np.arange(vector.length))
    return torch.from_numpy(lows)[None]


@lru_cache(maxsize=1024)
def _count_known_pairs(
    predicate: str,
    q_rows: Rows,
    k_rows: Rows,
    sizes: tuple[int, ...],
    rows: tuple[Pieces, ...] = (),
    cols: tuple[Pieces, ...] = (),
) -> int:
    """Count the pairs of one batch entry from tables that determine all values."""
    args = predicate, q_rows, k_rows, sizes, rows, cols
    plan = plan_blocks(*args) if rows or cols else tiles_by_position(*args[:4])
    vectors = [list(map(_table_values, side)) for side in (rows, cols)]
    return _count_rows(plan, args, vectors, 1, torch.device("cpu"))


def _count_rows(
    plan: BlockPlan, args: PlanArgs, vectors: Sequence[Sequence[Tensor]], batch: int, device: torch.device
) -> int:
    """Count the attending pairs of all batch entries.

    vectors: the vectors of rows, and of cols.
    """
    masked = [block for block in plan.others if block.kind is Kind.MASKED]
    of_formulas = count_pairs(plan) - sum(block.q_len * block.k_len for block in masked)
    known, left = settle_blocks(masked, MAX_COUNTED_BLOCKS, *args)
    return batch * of_formulas + round(
        batch * known + _count_block_pairs(_evaluate_mask(args, vectors, device), left, batch)
    )


def _evaluate_mask(args: PlanArgs, vectors: Sequence[Sequence[Tensor]], device: torch.device) -> CallMask:
    """Return a mask without a plan, which evaluates the predicate of blocks."""
    predicate, q_rows, k_rows, sizes, *_ = args
    named = {f"{side}{i}": x for side, xs in zip(("row", "col"), vectors) for i, x in enumerate(xs)}
    numbers = {f"n{i}": size for i, size in enumerate(sizes)}
    return CallMask(BlockPlan(), q_rows, k_rows, predicate, None, named, numbers, None, "", [], [], device, 1)


def _count_block_pairs(masking: CallMask, blocks: Sequence[tuple[float, Block]], batch: int) -> float:
    """Count the pairs of these blocks over all batch entries, with one synchronization."""
    sums, factors = [], []
    with use_real_tensors():
        for weight, block in blocks:
            allowed = masking.evaluate_predicate(block)
            assert allowed is not None  # because the block is masked
            sums.append(allowed.sum())
            factors.append(weight * (batch * block.q_len * block.k_len // allowed.numel()))
        found = torch.stack(sums).tolist() if sums else []
    return sum(count * factor for count, factor in zip(found, factors))


@lru_cache(maxsize=1024)
def _mean_pairs(
    predicate: str, q_span: Sequence[int], k_span: Sequence[int], queries: int, keys: int, sizes: tuple[int, ...]
) -> int:
    """Return the mean number of pairs over the ranks, from the conditions on positions only.

    The result does not depend on the order of a rank's rows.
    """
    known, places = position_conditions(predicate), range(max(q_span[0], k_span[0]))
    of_queries = [span_rows(q_span, queries, place) for place in places]
    if k_span[0] == 1:  # all ranks have the same keys and different queries
        sides = [(tuple(chain(*of_queries)), span_rows(k_span, keys, 0))]
    else:
        sides = [(rows, span_rows(k_span, keys, place)) for place, rows in zip(places, of_queries)]
    sides = [(sort_by_index(q), sort_by_index(k)) for q, k in sides]
    if not depends_on_distance(known, sizes):
        return sum(_count_known_pairs(known, q, k, sizes) for q, k in sides) // len(places)
    apart = Counter((q.length, k.length, k.first - q.first) for rows, others in sides for q in rows for k in others)
    return sum(times * _count_pairs_at_distance(known, *one, sizes) for one, times in apart.items()) // len(places)


@lru_cache(maxsize=1 << 14)
def _count_pairs_at_distance(predicate: str, queries: int, keys: int, distance: int, sizes: tuple[int, ...]) -> int:
    """Count the pairs of two contiguous runs.

    distance: the first key's index minus the first query's.
    """
    rows, of_keys = Segment(max(0, -distance), 0, queries), Segment(max(0, distance), 0, keys)
    return _count_known_pairs(predicate, (rows,), (of_keys,), sizes)
