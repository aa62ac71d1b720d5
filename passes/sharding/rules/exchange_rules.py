"""Placements of the results of sp:: exchanges, and rules of the user's own collectives.

An exchange is an sp:: op that changes only the placement of a value: in the global view, where all tensors are full, it
is the identity. Its transfer function returns the placements of its results, from its frame arguments. A frame (outer,
size, start, length and optional folds, see `lowering/base/frames.py`) describes how a dim is distributed over the
ranks. The dim is the product outer * rows * inner. `Replicate(partial_grad=True)` is a replicated value of whose
gradient each rank has a summand.

Collectives of the user's program over ranks that do not share the sequence act on each row separately, by rules. A node
that communicates with ranks that hold other rows has no rule (`MarkUserCollectives` marks it) and runs on gathered
operands. Collectives over the ranks of the pass are not handled by rules; see `passes.tensor_parallel.varying`.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import as_sizes, exact_quotient, is_same_size, size_product
from sp_compile.passes.sharding.placement import REPLICATE, Frame, Partial, Placement, Replicate, Shard, Varying
from sp_compile.passes.sharding.rule import BoundRule, register_rule_function, register_transfer

from ._build import along_dims, bind_rule, factor_names, replace_dims

c10d, sp = torch.ops._c10d_functional, torch.ops.sp


def call_frame(call: OpCall, name: str = "frame") -> Frame:
    """Return the frame in an argument of an sp:: op, [outer, size, start, length] and optional folds."""
    _, size, start, length, *folds = as_sizes(call[name])
    return Frame(size, start, length, *folds)


def call_shard(call: OpCall, dim: int, name: str = "frame", operand: int = 0) -> Shard:
    """Return the shard of a dim of an operand that the frame in an argument of an sp:: op describes.

    The dim is the product outer * rows * inner; outer and inner are 1 unless other dims are flattened with the
    sequence. The argument has no `inner`, which follows from the size of the dim.
    """
    frame = call_frame(call, name)
    outer, *_ = as_sizes(call[name])
    inner = exact_quotient(call.shape(operand)[dim], size_product((outer, frame.length)))
    return Shard(dim, frame, outer, inner or 1)  # None if the quotient is no known integer


@register_transfer(sp.all_to_all.default)
def _transfer_all_to_all(call: OpCall) -> tuple[Placement, ...]:
    """Return the placements of the results of sp::all_to_all, one for each operand: shards of the dim it scatters."""
    dim = call.dim("scatter_dim")
    return tuple(call_shard(call, dim, "scatter_frame", i) for i in range(len(call.operands)))


# Each rank has a summand of the gradient of a gathered value. The backward, a reduce_scatter, adds them.
register_transfer(sp.all_gather.default)(lambda call: (Replicate(partial_grad=True),))
# The results of these, and their gradients, are equal on all ranks.
register_transfer(sp.all_reduce.default, sp.broadcast.default, sp.broadcast_grad.default, sp.unshard.default)(
    lambda call: (REPLICATE,)
)


@register_transfer(sp.reduce_scatter.default)
def _transfer_reduce_scatter(call: OpCall) -> tuple[Placement, ...]:
    """Return the placement of the result of sp::reduce_scatter: a shard of the dim that it scatters."""
    return (call_shard(call, call.dim()),)


def has_expected_placement(call: OpCall, have: Placement) -> bool:
    """Return True if an operand of an exchange has the placement for which the exchange was inserted.

    Later rewrites may have changed its placement; propagation then demands that the exchange is removed.

    Args:
        call: Call of the exchange.
        have: Current placement of the operand.
    """
    op = call.node.target
    if op in (sp.all_reduce.default, sp.reduce_scatter.default):
        return isinstance(have, (Partial, Varying))
    if op in (sp.broadcast.default, sp.broadcast_grad.default):
        return isinstance(have, Replicate)
    # Other exchanges gather a shard, which their frame describes.
    prefix = "gather_" if op is sp.all_to_all.default else ""
    expected = call_shard(call, call.dim(f"{prefix}dim"), f"{prefix}frame")
    if not isinstance(have, Shard) or have.dim != expected.dim:
        return False
    return have.frame.is_same_window(expected.frame) and is_same_size(have.outer, expected.outer)


@register_rule_function(
    c10d.all_reduce.default, c10d.broadcast.default, c10d.wait_tensor.default, sp.reduce_pair.default
)
def _separate_elements_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of a collective of the user's program that acts on each element separately: all dims pass.

    None if its ranks have other rows of the sequence (`no_rule`): it then runs on gathered values. `lazy`: a collective
    is no reason to start a sequence at a replicated operand.
    """
    return None if node_info(call.node).no_rule else bind_rule(call, "... -> ...", lazy=True)


@register_rule_function(
    c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default
)
def _first_dim_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of a collective of the user's program that joins or splits the first dim, which is gathered.

    None if its ranks have other rows of the sequence (`no_rule`): it then runs on gathered values.
    """
    return None if node_info(call.node).no_rule else bind_rule(call, "a ... -> c ...", replicate="a")


@register_rule_function(sp.rows.default)
def _rows_rule(call: OpCall) -> BoundRule:
    """Return the rule of sp::rows, which selects adjacent rows of a dim, as narrow does.

    Without a frame, the dim is gathered. With a frame, the op runs on shards: each rank returns its own rows among the
    selected ones, and zeros in place of the others, so that the result is partial.
    """
    names, dim = factor_names(call.ndim()), call.dim()
    result = replace_dims(names, [dim], "row")
    if call["frame"] is None:
        return along_dims(call, [dim], result, lazy=True)
    want: tuple[Placement, ...] = (Shard(dim, call_frame(call)),)
    kinds = {names[dim]: "replicate"}  # the result does not have the dim; due to `want`, it is not gathered
    return BoundRule((names,), (result,), kinds, operand_placements=want, result_placements=Partial())
