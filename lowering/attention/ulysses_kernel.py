"""Exchange row shards for head shards between the ranks of a neighborhood, and back (Ulysses).

A neighborhood is `ranks` adjacent ranks. Before, a rank has its own rows of all heads; after, all rows of its heads:

    q (B, H, s, D), k, v (B, Hkv, t, D)   ->   (B, H / ranks, ranks * s, D), (B, Hkv / ranks, ranks * t, D)

Uses one all-to-all for q, k and v, or two if keys have another length than queries; one for the result. Padding is
not removed.
"""

import math

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, frame_folds, is_known
from sp_compile.lowering.comm import routes

from .op_args import HEADS, SEQUENCE, ShardArgs


def to_heads(q: Tensor, k: Tensor, v: Tensor, args: ShardArgs, ranks: int) -> list[Tensor]:
    """Exchange this rank's rows of all heads for the rows of its neighborhood of some heads (Ulysses).

    A neighborhood is ``ranks`` adjacent ranks. The exchange is one all-to-all among them, or two if keys have another
    length than queries.

    Args:
        q: (B, H, s, D).
        k: (B, Hkv, t, D). Key heads are repeated until ``ranks`` divides their number.
        v: (B, Hkv, t, E).
        args: Arguments of the sharded operator.
        ranks: The number of ranks of a neighborhood.

    Returns:
        [q, k, v], shaped (B, heads / ranks, ranks * rows, width).
    """
    keys, values = (_repeat_key_heads(x, ranks) for x in (k, v))
    heads, route = keys.shape[HEADS], routes.neighborhood_route(args.group, ranks)
    have_equal_rows = is_known(q.shape[SEQUENCE] == keys.shape[SEQUENCE])
    exchanges = [[q, keys, values]] if have_equal_rows else [[q], [keys, values]]
    results = []
    for xs, frame in zip(exchanges, (args.q_frame, args.k_frame)):
        row_frame = _neighborhood_frame(frame, xs[0].shape[SEQUENCE] * ranks)
        # The heads are split without padding. The frame counts key heads, also for q: its H dim is (key heads, query
        # heads of each), so that a rank gets the query heads of its key heads.
        head_frame = [1, heads, 0, heads]
        results += torch.ops.sp.all_to_all(xs, HEADS, head_frame, SEQUENCE, row_frame, ranks, route)
    return results


def to_sequence(out: Tensor, args: ShardArgs, ranks: int) -> Tensor:
    """Exchange the result, all rows of a neighborhood of this rank's heads, for this rank's rows of all heads.

    Args:
        out: (B, H / ranks, ranks * s, E).
        args: Arguments of the sharded operator.
        ranks: The number of ranks of a neighborhood.

    Returns:
        (B, H, s, E).
    """
    row_frame, heads = _neighborhood_frame(args.q_frame, out.shape[SEQUENCE]), out.shape[HEADS] * ranks
    head_frame = [1, heads, 0, heads]  # outer, size, start, length: all heads, without padding
    route = routes.neighborhood_route(args.group, ranks)
    return torch.ops.sp.all_to_all([out], SEQUENCE, row_frame, HEADS, head_frame, ranks, route)[0]


def _repeat_key_heads(x: Tensor, ranks: int) -> Tensor:
    """Repeat key heads until ``ranks`` divides their number; the backward sums over the repetitions."""
    repeats = math.lcm(x.shape[HEADS], ranks) // x.shape[HEADS]
    return x if repeats == 1 else x.repeat_interleave(repeats, HEADS)


def _neighborhood_frame(frame: FrameArg, length: int) -> FrameArg:
    """Return a frame in which all ``length`` rows of a neighborhood are valid, with the layout of ``frame``.

    ``sp::all_to_all`` then removes no padding. Zigzag rows arrive in sequence order: the first chunks of all ranks,
    then their second chunks in reverse.
    """
    return [1, length, 0, length, frame_folds(frame)]  # outer, size, start, length, chunks per rank
