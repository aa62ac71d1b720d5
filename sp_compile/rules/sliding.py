"""Ops that slide a window along dims: a result reads its neighbours (kind "halo"), or the whole if they are unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..call import Call
from ..layout import Placement, Replicate, Shard
from ..rule import Dims, Factors, Window, rule_of
from ..sliding_calls import ON_SHARDS, SLIDING, slides_of
from ._build import names, resized_dims
from .conv import conv
from .redistribute import frame_of
from .windows import pad, roll, unfold

aten, sp = torch.ops.aten, torch.ops.sp


def _same_dims(call: Call) -> Factors:
    dims = names(call.ndim())
    return Factors((dims,), (dims,), lazy=True)


_pool = resized_dims(ndim=1)
# What the ops do to dims, if windows could not be followed.
_DIMS: dict[Any, Callable[[Call], Any]] = {
    aten.avg_pool1d.default: _pool,
    aten.constant_pad_nd.default: pad,
    aten.conv1d.default: conv,
    aten.conv1d.padding: conv,
    aten.convolution.default: conv,
    aten.max_pool1d.default: _pool,
    aten.pad.default: pad,
    aten.roll.default: roll,
    aten.unfold.default: unfold,
    sp.avg_pool1d.default: _pool,
    sp.conv1d.default: conv,
    sp.max_pool1d.default: _pool,
    sp.roll.default: _same_dims,
    sp.shift.default: _same_dims,
    sp.unfold.default: unfold,
}


@rule_of(*SLIDING)
def _sliding(call: Call) -> Factors | Window | None:
    """The dims that a window slides over keep their names; so they do in the result, whatever its length is."""
    rule: Factors | Window | None = _DIMS[call.node.target](call)
    if not isinstance(rule, Factors):
        return rule
    operand, result, kinds, slides = rule.operands[0], list(rule.results[0]), dict(rule.kinds), {}
    for at, found in slides_of(call).items():
        kinds.pop(result[at], None)
        result[at] = operand[at]
        kinds[operand[at]] = "halo"
        slides[operand[at]] = found.sliding
    rule = replace(rule, results=(tuple(result),), kinds=kinds, slides=slides)
    return _framed(call, rule) if call.node.target in ON_SHARDS and call["frame"] is not None else rule


def _framed(call: Call, rule: Factors) -> Factors:
    """The call says where its shards lie; weights are read whole."""
    (at,) = slides_of(call)

    def placed(dims: Dims, frame: str) -> Placement:
        factor = rule.operands[0][at]
        if factor not in dims:
            return Replicate(partial_grad=True)
        return Shard(dims.index(factor), frame_of(call, frame)[0])

    result = "result" if call.get("result") is not None else "frame"
    wants = tuple(placed(dims, "frame") for dims in rule.operands)
    return replace(rule, wants=wants, gives=placed(rule.results[0], result))
