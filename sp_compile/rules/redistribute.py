"""Where the results of the sp:: exchanges lie. In the global view every one of them is an identity."""

from __future__ import annotations

import torch

from ..layout import REPLICATE, Frame, Placement, Replicate, Shard
from ..rule import Call, transfer
from ..shapes import quotient, sizes

sp = torch.ops.sp


def frame_of(call: Call, name: str = "frame") -> tuple[Frame, object]:
    """The Frame and the outer factor that an exchange's SymInt[4] argument spells."""
    outer, size, start, length = sizes(call[name])
    return Frame(size, start, length), outer


@transfer(sp.all_to_all.default)
def _all_to_all(call: Call) -> tuple[Placement, ...]:
    frame, _ = frame_of(call, "scatter_frame")
    dim = call["scatter_dim"] % call.ndim()
    inner = [quotient(call.shape(i)[dim], frame.length) for i in range(len(call.operands))]
    return tuple(Shard(dim, frame, 1, i or 1) for i in inner)


@transfer(sp.all_gather.default)
def _all_gather(call: Call) -> tuple[Placement, ...]:
    return (Replicate(partial_grad=True),)


@transfer(sp.all_reduce.default, sp.broadcast.default, sp.broadcast_grad.default, sp.unshard.default)
def _invariant(call: Call) -> tuple[Placement, ...]:
    return (REPLICATE,)
