"""Ops that slide a window along dims: a result reads its neighbours (kind "halo"), or the whole if they are unknown.

The batch passes. Windows over one dim are followed in `sharding/windows`; over several, all that they slide over is
needed whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sp_compile.passes.graph.call import Call, overloads
from sp_compile.passes.sharding.placement import Placement, Replicate, Shard
from sp_compile.passes.sharding.rule import Dims, Factors, rule, rule_of
from sp_compile.passes.sharding.window_rules import SHARD_WINDOWS, WINDOW_CALLS, slides_of

from ._build import along, names, resized_dims
from .exchange_rules import frame_of
from .movement import pad, roll, unfold

aten, sp = torch.ops.aten, torch.ops.sp


@rule_of(*overloads("conv2d conv2d.padding conv3d conv3d.padding"))
@rule_of(*overloads("conv_transpose1d conv_transpose2d.input conv_transpose3d.input"))
def conv(call: Call) -> Factors | None:
    """Without a batch dim nothing passes."""
    weight = names(call.ndim("weight"), "w")
    image = names(len(weight) - 1, "i")
    batch = ("n",) if call.ndim() == len(weight) else ()
    operands = ((*batch, *image), weight) + ((("b",),) if call["bias"] is not None else ())
    kinds = {f: "whole" for dims in operands for f in dims if f != "n"}
    return Factors(operands, ((*batch, *names(len(image), "o")),), kinds)


# On the last dims; batch and channels pass.
_OVER_LINES = overloads("""
    adaptive_avg_pool1d adaptive_max_pool1d max_pool1d_with_indices reflection_pad1d replication_pad1d
    upsample_linear1d.vec upsample_nearest1d.vec
""")
_OVER_IMAGES = overloads("""
    adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d max_pool2d max_pool2d_with_indices reflection_pad2d
    replication_pad2d upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_nearest2d.vec
""")
rule_of(*_OVER_LINES)(resized_dims(ndim=1))
rule_of(*_OVER_IMAGES)(resized_dims(ndim=2))
rule_of(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)(resized_dims(ndim=3))
rule(aten.grid_sampler.default, "n c h w, n y x xy -> n c y x", whole="h w xy")

# What the ops do to dims, if windows could not be followed.
_RULES_OF_DIMS: dict[Any, Callable[[Call], Any]] = {
    **dict.fromkeys(overloads("constant_pad_nd pad"), pad),
    **dict.fromkeys(overloads("avg_pool1d max_pool1d"), resized_dims(ndim=1)),
    **dict.fromkeys((sp.avg_pool1d.default, sp.max_pool1d.default), resized_dims(ndim=1)),
    **dict.fromkeys([*overloads("conv1d conv1d.padding convolution"), sp.conv1d.default], conv),
    **dict.fromkeys((aten.unfold.default, sp.unfold.default), unfold),
    **dict.fromkeys((sp.roll.default, sp.shift.default), partial(along, at=(), lazy=True)),
    aten.roll.default: roll,
}


@rule_of(*WINDOW_CALLS)
def _sliding(call: Call) -> Factors | None:
    """The dims that a window slides over keep their names; so they do in the result, whatever its length is."""
    rule: Factors | None = _RULES_OF_DIMS[call.node.target](call)
    if rule is None or rule.spans:
        return rule
    operand, result, kinds, slides = rule.operands[0], list(rule.results[0]), dict(rule.kinds), {}
    for at, found in slides_of(call).items():
        kinds.pop(result[at], None)
        result[at] = operand[at]
        kinds[operand[at]] = "halo"
        slides[operand[at]] = found.sliding
    rule = replace(rule, results=(tuple(result),), kinds=kinds, slides=slides)
    return _framed(call, rule) if call.node.target in SHARD_WINDOWS and call["frame"] is not None else rule


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
