"""Rules of scans: those of torch, and sp::scan and related ops, whose frame defines placements, if it is set.

Along the scanned dim every position needs the combined values before it (kind "scan"); all other dims pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.placement import Placement, Replicate, Shard
from sp_compile.passes.sharding.rule import BoundRule, Dims, register_rule_function

from ._build import align_names, along_dims, factor_names
from .exchange_rules import call_frame

aten, sp = torch.ops.aten, torch.ops.sp


@register_rule_function(
    aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.cumsum.default, aten.logcumsumexp.default
)
def _cumulative_rule(call: OpCall) -> BoundRule:
    return along_dims(call, [call.dim()], kind="scan")


@register_rule_function(sp.scan.default, sp.extremes.default)
def _scan_rule(call: OpCall) -> BoundRule:
    """Return "... s ..., ... s ... -> ... s ...": x, and segment ids, one per position or broadcast to x."""
    dims = factor_names(call.ndim())
    at = dims[call.dim() :][:1]
    segments = [
        at if len(shape) == 1 else align_names(shape, call.shape(), dims)
        for shape in map(call.shape, range(1, len(call.operands)))
    ]
    return _framed_scan_rule(call, (dims, *segments), dims, at)


@register_rule_function(sp.linear_scan.default)
def _linear_scan_rule(call: OpCall) -> BoundRule:
    """Return "... s ..., ... s ..., ... ... -> ... s ...": a, b, and the replicated initial state."""
    full: tuple[Size, ...] = call.result_shapes()[0]
    dims = factor_names(len(full))
    at = call.dim(operand=1)
    rows = tuple(align_names(call.shape(i), full, dims) for i in range(2))
    before = [
        align_names(call.shape(i), full[:at] + full[at + 1 :], dims[:at] + dims[at + 1 :])
        for i in range(2, len(call.operands))
    ]
    return _framed_scan_rule(call, (*rows, *before), dims, dims[at : at + 1], invariant=(2,))


def _framed_scan_rule(
    call: OpCall, operands: tuple[Dims, ...], result: Dims, at: Dims, invariant: Sequence[int] = ()
) -> BoundRule:
    """Return the rule of a scan, with placements if the call has a frame.

    Args:
        call: Call of the op.
        operands: Dims of the operands.
        result: Dims of the results.
        at: Name of the scanned dim; empty for 0-dim tensors.
        invariant: Operands whose gradients are equal on all ranks.
    """
    results = tuple(result for _ in call.results())
    kinds = dict.fromkeys(at, "scan")
    if call["frame"] is None or not at:
        return BoundRule(operands, results, kinds)
    frame = call_frame(call)[0]
    wants: list[Placement] = [
        Shard(dims.index(at[0]), frame) if at[0] in dims else Replicate(partial_grad=i not in invariant)
        for i, dims in enumerate(operands)
    ]
    gives = Shard(result.index(at[0]), frame)
    return BoundRule(operands, results, kinds, operand_placements=tuple(wants), result_placements=gives)
