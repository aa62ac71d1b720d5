"""Placements of the results of sp:: exchanges, each of which is an identity in the global view.

Collectives of the user's program over ranks that do not share the sequence act on each row separately. A node that
communicates with ranks that hold other rows has no rule; see `mark_group_exchanges`. Collectives over the ranks of the
pass are not handled by rules either; see `passes.tensor_parallel.varying`.

Blocks of rows that a tensor-parallel program splits and joins itself (see `lowering/collectives`) are one of n equal
blocks for any rows, so that a view of the rows as batch and sequence preserves them.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_sizes, exact_quotient, is_same_size, size_product
from sp_compile.passes.sharding.placement import REPLICATE, Frame, Partial, Placement, Replicate, Shard, Varying
from sp_compile.passes.sharding.rule import BoundRule, register_rule_function, register_transfer

from ._build import bind_rule

c10d, sp = torch.ops._c10d_functional, torch.ops.sp


def call_frame(call: OpCall, name: str = "frame") -> tuple[Frame, Size]:
    """Return the frame and the outer factor of a SymInt[] argument of an exchange."""
    outer, size, start, length, *folds = as_sizes(call[name])
    return Frame(size, start, length, *folds), outer


@register_transfer(sp.all_to_all.default)
def _transfer_all_to_all(call: OpCall) -> tuple[Placement, ...]:
    """Return the shards along the dim that an all_to_all scatters; sizes imply the factors after the sequence."""
    frame, _ = call_frame(call, "scatter_frame")
    dim = call["scatter_dim"] % call.ndim()
    inner_sizes = [exact_quotient(call.shape(i)[dim], frame.length) for i in range(len(call.operands))]
    return tuple(Shard(dim, frame, 1, inner or 1) for inner in inner_sizes)


@register_transfer(sp.all_gather.default)
def _transfer_all_gather(call: OpCall) -> tuple[Placement, ...]:
    return (Replicate(partial_grad=True),)


@register_transfer(sp.all_reduce.default, sp.broadcast.default, sp.broadcast_grad.default, sp.unshard.default)
def _transfer_invariant(call: OpCall) -> tuple[Placement, ...]:
    return (REPLICATE,)


@register_transfer(sp.reduce_scatter.default)
def _transfer_reduce_scatter(call: OpCall) -> tuple[Placement, ...]:
    frame, outer = call_frame(call)
    dim = call["dim"] % call.ndim()
    inner = exact_quotient(call.shape()[dim], size_product((outer, frame.length)))
    return (Shard(dim, frame, outer, inner or 1),)


def has_expected_placement(call: OpCall, have: Placement) -> bool:
    """Return True if the operand has the placement that the exchange expects.

    A later rewrite upstream may have changed it.
    """
    op = call.node.target
    if op in (sp.all_reduce.default, sp.reduce_scatter.default):
        return isinstance(have, (Partial, Varying))
    if op in (sp.broadcast.default, sp.broadcast_grad.default):
        return isinstance(have, Replicate)
    prefix = "gather_" if op is sp.all_to_all.default else ""
    frame, outer = call_frame(call, f"{prefix}frame")
    dim = call[f"{prefix}dim"] % call.ndim()
    if not isinstance(have, Shard) or have.dim != dim:
        return False
    return have.frame.is_same_window(frame) and is_same_size(have.outer, outer)


@register_rule_function(
    c10d.all_reduce.default, c10d.broadcast.default, c10d.wait_tensor.default, sp.reduce_pair.default
)
def _transfer_row_wise(call: OpCall) -> BoundRule | None:
    """Return the rule of a collective that acts on each element separately."""
    return None if node_info(call.node).no_rule else bind_rule(call, "... -> ...", lazy=True)


@register_rule_function(
    c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default
)
def _transfer_first_dim(call: OpCall) -> BoundRule | None:
    """Return the rule of a collective that joins or splits the first dim, which is gathered."""
    return None if node_info(call.node).no_rule else bind_rule(call, "a ... -> c ...", whole="a")
