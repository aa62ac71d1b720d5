"""Where the results of the sp:: exchanges lie. In the global view every one of them is an identity.

Collectives of the user's program over other ranks than those that share the sequence: each row by itself. A node that
exchanges with ranks which hold other rows has no rule; see `mark_across`. Those over the very ranks of the
pass are no business of a rule either; see `passes.tensor_parallel.varying.spell`.

Blocks of rows that a tensor-parallel program takes and puts together itself (see `lowering/collectives`): a block is
one of n equal ones, whatever rows it has, so that a view of the rows as batch and sequence keeps it.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import Call
from sp_compile.passes.graph.node_info import record
from sp_compile.passes.graph.sizes import Size, product, quotient, same, sizes
from sp_compile.passes.sharding.placement import REPLICATE, Frame, Partial, Placement, Replicate, Shard, Varying
from sp_compile.passes.sharding.rule import Factors, rule_of, transfer

from ._build import bind

c10d, sp = torch.ops._c10d_functional, torch.ops.sp


def frame_of(call: Call, name: str = "frame") -> tuple[Frame, Size]:
    """The Frame and the outer factor that an exchange's SymInt[] argument spells."""
    outer, size, start, length, *folds = sizes(call[name])
    return Frame(size, start, length, *folds), outer


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


@transfer(sp.reduce_scatter.default)
def _reduce_scatter(call: Call) -> tuple[Placement, ...]:
    frame, outer = frame_of(call)
    dim = call["dim"] % call.ndim()
    inner = quotient(call.shape()[dim], product((outer, frame.length)))
    return (Shard(dim, frame, outer, inner or 1),)


def lies_as_written(call: Call, have: Placement) -> bool:
    """Is the operand placed as the exchange was written for? A later rewrite upstream may have moved it."""
    op = call.node.target
    if op in (sp.all_reduce.default, sp.reduce_scatter.default):
        return isinstance(have, (Partial, Varying))
    if op in (sp.broadcast.default, sp.broadcast_grad.default):
        return isinstance(have, Replicate)
    prefix = "gather_" if op is sp.all_to_all.default else ""
    frame, outer = frame_of(call, f"{prefix}frame")
    dim = call[f"{prefix}dim"] % call.ndim()
    if not isinstance(have, Shard) or have.dim != dim:
        return False
    return have.frame.like(frame) and same(have.outer, outer)


@rule_of(c10d.all_reduce.default, c10d.broadcast.default, c10d.wait_tensor.default, sp.reduce_pair.default)
def _row_wise(call: Call) -> Factors | None:
    return None if record(call.node).no_rule else bind(call, "... -> ...", lazy=True)


@rule_of(c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default)
def _along_the_first(call: Call) -> Factors | None:
    return None if record(call.node).no_rule else bind(call, "a ... -> c ...", whole="a")
