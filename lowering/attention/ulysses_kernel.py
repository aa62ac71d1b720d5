"""Ulysses between neighbouring ranks: from a share of the rows and all heads to all rows and a share, and back.

    q (B, H, s, D), k, v (B, Hkv, t, D)   ->   (B, H / ranks, ranks * s, D), (B, Hkv / ranks, ranks * t, D)

One all-to-all for q, k and v, or two where the keys are of another length; one for the result. Padding stays.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, frame_folds, is_known
from sp_compile.lowering.comm import routes

from .op_args import HEADS, SEQUENCE, ShardArgs


def to_heads(q: Tensor, k: Tensor, v: Tensor, args: ShardArgs, ranks: int) -> list[Tensor]:
    """The whole heads of this rank for the rows of all neighbours. Key heads are repeated for the ranks to divide."""
    keys, values = (_repeat_key_heads(x, ranks) for x in (k, v))
    heads = keys.shape[HEADS]
    together = is_known(q.shape[SEQUENCE] == keys.shape[SEQUENCE])
    groups = [[q, keys, values]] if together else [[q], [keys, values]]
    moved = []
    for xs, frame in zip(groups, (args.q_frame, args.k_frame)):
        rows, group = (
            _neighborhood_frame(frame, xs[0].shape[SEQUENCE] * ranks),
            routes.neighborhood_route(args.group, ranks),
        )
        moved += torch.ops.sp.all_to_all(xs, HEADS, [1, heads, 0, heads], SEQUENCE, rows, ranks, group)
    return moved


def to_sequence(out: Tensor, args: ShardArgs, ranks: int) -> Tensor:
    """The way back of the result."""
    rows, heads = _neighborhood_frame(args.q_frame, out.shape[SEQUENCE]), out.shape[HEADS] * ranks
    group = routes.neighborhood_route(args.group, ranks)
    return torch.ops.sp.all_to_all([out], SEQUENCE, rows, HEADS, [1, heads, 0, heads], ranks, group)[0]


def _repeat_key_heads(x: Tensor, ranks: int) -> Tensor:
    """Key heads as often as needed for the ranks to divide them; backward: summed over the repetitions."""
    times = math.lcm(x.shape[HEADS], ranks) // x.shape[HEADS]
    return x if times == 1 else x.repeat_interleave(times, HEADS)


def _neighborhood_frame(frame: FrameArg, length: int) -> FrameArg:
    """All rows of a neighbourhood, as a frame: nothing is trimmed, and zigzag halves come in order."""
    return [1, length, 0, length, frame_folds(frame)]
