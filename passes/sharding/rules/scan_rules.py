"""Scans: torch's along a dim, and sp::scan and its kin, whose frame spells where operands and results lie, if anywhere.

Along the scanned dim every position needs what all before it combine to (kind "scan"); all other dims pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sp_compile.passes.graph.call import Call
from sp_compile.passes.graph.sizes import Size
from sp_compile.passes.sharding.placement import Placement, Replicate, Shard
from sp_compile.passes.sharding.rule import Dims, Factors, rule_of

from ._build import aligned, along, names
from .exchange_rules import frame_of

aten, sp = torch.ops.aten, torch.ops.sp


@rule_of(aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.cumsum.default, aten.logcumsumexp.default)
def _cumulative(call: Call) -> Factors:
    return along(call, [call.dim()], kind="scan")


@rule_of(sp.scan.default, sp.extremes.default)
def _scan(call: Call) -> Factors:
    """ "... s ..., ... s ... -> ... s ...": x and segment ids, which are one a position or broadcast to x."""
    dims = names(call.ndim())
    at = dims[call.dim() :][:1]
    segments = [
        at if len(shape) == 1 else aligned(shape, call.shape(), dims)
        for shape in map(call.shape, range(1, len(call.operands)))
    ]
    return _framed(call, (dims, *segments), dims, at)


@rule_of(sp.linear_scan.default)
def _linear_scan(call: Call) -> Factors:
    """ "... s ..., ... s ..., ... ... -> ... s ...": a, b, and the state before the first position, on every rank."""
    full: tuple[Size, ...] = call.result_shapes()[0]
    dims = names(len(full))
    at = call.dim(operand=1)
    rows = tuple(aligned(call.shape(i), full, dims) for i in range(2))
    before = [
        aligned(call.shape(i), full[:at] + full[at + 1 :], dims[:at] + dims[at + 1 :])
        for i in range(2, len(call.operands))
    ]
    return _framed(call, (*rows, *before), dims, dims[at : at + 1], invariant=(2,))


def _framed(call: Call, operands: tuple[Dims, ...], result: Dims, at: Dims, invariant: Sequence[int] = ()) -> Factors:
    """at: the scanned dim's name, or nothing for a number. invariant: operands whose gradients are whole everywhere."""
    results = tuple(result for _ in call.results())
    kinds = dict.fromkeys(at, "scan")
    if call["frame"] is None or not at:
        return Factors(operands, results, kinds)
    frame = frame_of(call)[0]
    wants: list[Placement] = [
        Shard(dims.index(at[0]), frame) if at[0] in dims else Replicate(partial_grad=i not in invariant)
        for i, dims in enumerate(operands)
    ]
    gives = Shard(result.index(at[0]), frame)
    return Factors(operands, results, kinds, wants=tuple(wants), gives=gives)
