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

    pair       a query and a key; it attends if the mask's predicate holds
    plan       blocks of queries x keys in which pairs attend; other blocks are skipped (``masks/block_plan.py``)
    band       a block whose attending pairs are those of a window
    masked     a block whose predicate must be evaluated for each pair. Bounds of the vectors settle most parts of it;
               the remaining ones are undecided
    table      bounds of a vector on the host (``masks/pieces.py``); it is exact where both bounds are equal
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from sp_compile.lowering.masks.block_plan import count_decided_pairs, plan_blocks, tiles_by_position
from sp_compile.lowering.masks.blocks import Block, BlockPlan, Kind, count_pairs
from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.predicate import is_distance_only, position_conditions
from sp_compile.lowering.masks.spans import Rows, Segment, local_valid_rows, sort_by_index, span_rows
from sp_compile.lowering.torch_compat import FakeTensor, size_hint, use_real_tensors

from . import attend, attend_parts  # noqa: F401  (registers the operators)
from .masking import CallMask
from .op_args import LocalArgs

MAX_COUNTED_BLOCKS = 1 << 15  # the maximum number of undecided blocks that are evaluated for one attention

PlanArgs = tuple[str, Rows, Rows, tuple[int, ...], tuple[Pieces, ...], tuple[Pieces, ...]]  # arguments of `plan_blocks`


@register_flop_formula(torch.ops.sp.attend, get_raw=True)
def attend_flops(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **_meta: Any) -> int:
    """Return the FLOPs of ``sp::attend``: per pair that attends, a score (D products) and a weighted value (E).

    Each product counts twice, for a multiplication and an addition.
    """
    args, _ = LocalArgs.of(arguments)
    dim, value_dim = map(size_hint, [q.shape[-1], v.shape[-1]])
    return 2 * _attended_pairs(q, k, args) * (dim + value_dim)


@register_flop_formula([torch.ops.sp.attend_backward, torch.ops.sp.attend_backward_parts], get_raw=True)
def attend_backward_flops(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any, **_meta: Any
) -> int:
    """Return the FLOPs of ``sp::attend_backward``: five matrix products over the pairs that attend.

    The scores, dq and dk have D products each; dv and the gradient of the weights have E. Each product counts twice,
    for a multiplication and an addition.
    """
    args, _ = LocalArgs.of(arguments)
    dim, value_dim = map(size_hint, [q.shape[-1], v.shape[-1]])
    return 2 * _attended_pairs(q, k, args) * (3 * dim + 2 * value_dim)


def _attended_pairs(q: Tensor, k: Tensor, args: LocalArgs) -> int:
    """Return the number of (query, key) pairs that attend over all batch entries and query heads.

    For fake tensors it is the mean over the ranks. Otherwise it is that of this rank, from tables on the host of the
    vectors that the mask reads, such as document numbers; if these are not exact, from the vectors on the device.
    """
    batch, heads, queries, keys = map(size_hint, [*q.shape[:3], k.shape[2]])
    spans = tuple(map(size_hint, args.q_span)), tuple(map(size_hint, args.k_span))
    sizes = tuple(map(size_hint, args.sizes))
    if not batch * heads:
        return 0
    if isinstance(q, FakeTensor) or q.is_meta:
        return batch * heads * _mean_pairs(args.predicate, *spans, queries, keys, sizes)
    q_rows, k_rows = local_valid_rows(spans[0], queries, args.group), local_valid_rows(spans[1], keys, args.group)
    pieces = tuple(map(Pieces.of, args.make_pieces()))  # the tables, of the vectors over queries first
    plan_args = args.predicate, q_rows, k_rows, sizes, pieces[: len(args.rows)], pieces[len(args.rows) :]
    # A table whose lower and upper bounds are equal determines all values of its vector.
    if all(np.array_equal(table.lows, table.highs) for table in pieces):
        return batch * heads * _count_known_pairs(*plan_args)
    return heads * _count_planned_pairs(plan_blocks(*plan_args), plan_args, args.rows, args.cols, batch, q.device)


def _table_values(vector: Pieces) -> Tensor:
    """Return the values of a vector from a table of equal lower and upper bounds, on the CPU: int64 (1, length)."""
    lows, _, _ = vector.lines(np.arange(vector.length))
    return torch.from_numpy(lows)[None]


@lru_cache(maxsize=1024)
def _count_known_pairs(
    predicate: str, q_rows: Rows, k_rows: Rows, sizes: tuple[int, ...], row_tables: tuple[Pieces, ...] = (),
    col_tables: tuple[Pieces, ...] = (),
) -> int:  # fmt: skip
    """Count the attending pairs of one batch entry from tables of the vectors, so that the device is not read.

    Args:
        predicate: The mask as a condition on the positions of a query and a key.
        q_rows: The positions of the queries.
        k_rows: The positions of the keys.
        sizes: Numbers that the predicate reads.
        row_tables: Tables of the vectors over queries that it reads; lower and upper bounds are equal.
        col_tables: Tables of the vectors over keys that it reads.
    """
    args = predicate, q_rows, k_rows, sizes, row_tables, col_tables
    # A predicate that reads no vectors depends on positions only.
    plan = plan_blocks(*args) if row_tables or col_tables else tiles_by_position(*args[:4])
    rows, cols = list(map(_table_values, row_tables)), list(map(_table_values, col_tables))  # the vectors
    batch_entries = 1
    return _count_planned_pairs(plan, args, rows, cols, batch_entries, torch.device("cpu"))


def _count_planned_pairs(
    plan: BlockPlan, args: PlanArgs, rows: Sequence[Tensor], cols: Sequence[Tensor], batch: int, device: torch.device
) -> int:
    """Count the attending pairs of all batch entries.

    Bands have a closed form. In a masked block, the predicate depends on the pair: bounds of the vectors settle most of
    its parts, and the predicate is evaluated for the pairs of the others (undecided), or for a sample of these.

    Args:
        plan: The blocks of queries x keys in which pairs attend.
        args: Arguments from which `plan_blocks` made the plan.
        rows: Vectors (B | 1, Sq) that the predicate reads.
        cols: Vectors (B | 1, Sk) that the predicate reads.
        batch: Number of batch entries.
        device: Device of the vectors.
    """
    masked = [block for block in plan.others if block.kind is Kind.MASKED]
    # `count_pairs` counts all pairs of masked blocks, which are counted below instead.
    in_bands = count_pairs(plan) - sum(block.q_len * block.k_len for block in masked)
    settled, undecided = count_decided_pairs(masked, MAX_COUNTED_BLOCKS, *args)
    evaluated = _count_block_pairs(_evaluation_mask(args, rows, cols, device), undecided, batch)
    return batch * in_bands + round(batch * settled + evaluated)


def _evaluation_mask(args: PlanArgs, rows: Sequence[Tensor], cols: Sequence[Tensor], device: torch.device) -> CallMask:
    """Return a mask whose `evaluate_predicate` evaluates the predicate for the pairs of a block.

    It has no plan. The predicate reads vectors over queries as row0, .., over keys as col0, .., and numbers as n0, ...
    """
    predicate, q_rows, k_rows, sizes, *_ = args
    vectors = {f"row{i}": x for i, x in enumerate(rows)} | {f"col{i}": x for i, x in enumerate(cols)}
    numbers = {f"n{i}": size for i, size in enumerate(sizes)}
    return CallMask(
        BlockPlan(), q_rows, k_rows, predicate, mask=None, vectors=vectors, sizes=numbers, dropout=None, score="",
        heads=[], tables=[], device=device, batch=1,
    )  # fmt: skip


def _count_block_pairs(masking: CallMask, blocks: Sequence[tuple[float, Block]], batch: int) -> float:
    """Count the attending pairs of blocks in all batch entries by evaluating their predicate; synchronizes once.

    Each block has a weight: the number of blocks that it represents in a sample, or 1.
    """
    sums, factors = [], []
    with use_real_tensors():  # a tracer or mode that is active must not record these ops
        for weight, block in blocks:
            allowed = masking.evaluate_predicate(block)
            assert allowed is not None  # the block has a predicate
            sums.append(allowed.sum())
            # `allowed` broadcasts to all batch entries and pairs of the block.
            factors.append(weight * (batch * block.q_len * block.k_len // allowed.numel()))
        counts = torch.stack(sums).tolist() if sums else []
    return sum(count * factor for count, factor in zip(counts, factors))


@lru_cache(maxsize=1024)
def _mean_pairs(
    predicate: str, q_span: Sequence[int], k_span: Sequence[int], queries: int, keys: int, sizes: tuple[int, ...]
) -> int:
    """Return the mean number of attending pairs over the ranks, for fake tensors.

    All ranks need the same number, because a partitioner decides by it. Conditions that read vectors, which have no
    values, are assumed to hold; those on positions are counted.

    Args:
        predicate: The mask as a condition on the positions of a query and a key.
        q_span: The placement of the queries: the number of ranks first (`shard_spans`).
        k_span: The placement of the keys.
        queries: Queries per rank.
        keys: Keys per rank.
        sizes: Numbers that the predicate reads.
    """
    conditions, ranks = position_conditions(predicate), range(max(q_span[0], k_span[0]))
    query_rows = [span_rows(q_span, queries, rank) for rank in ranks]
    if k_span[0] == 1:  # all ranks have the same keys and different queries
        row_pairs = [(tuple(chain(*query_rows)), span_rows(k_span, keys, 0))]
    else:
        row_pairs = [(rows, span_rows(k_span, keys, rank)) for rank, rows in zip(ranks, query_rows)]
    row_pairs = [(sort_by_index(q), sort_by_index(k)) for q, k in row_pairs]
    if not is_distance_only(conditions, sizes):
        return sum(_count_known_pairs(conditions, q, k, sizes) for q, k in row_pairs) // len(ranks)
    # The predicate depends only on the distance of a query and a key. Pairs of segments (consecutive positions) with
    # the same lengths and the same distance thus have the same count, which is computed once.
    segment_pairs = Counter((q.length, k.length, k.first - q.first) for qs, ks in row_pairs for q in qs for k in ks)
    counts = (
        times * _count_pairs_at_distance(conditions, q_length, k_length, distance, sizes)
        for (q_length, k_length, distance), times in segment_pairs.items()
    )
    return sum(counts) // len(ranks)


@lru_cache(maxsize=1 << 14)
def _count_pairs_at_distance(predicate: str, queries: int, keys: int, distance: int, sizes: tuple[int, ...]) -> int:
    """Count the attending pairs of consecutive queries and consecutive keys.

    ``distance`` is the first key's index minus the first query's. The smaller one of the two indices is set to 0.
    """
    q_rows = (Segment(first=max(0, -distance), offset=0, length=queries),)
    k_rows = (Segment(first=max(0, distance), offset=0, length=keys),)
    return _count_known_pairs(predicate, q_rows, k_rows, sizes)
