"""Ops that slide a window along dims: a result reads its neighbours (kind "halo"), or the whole if they are unknown.

Convolutions, pooling and interpolation: the batch passes, and what a window slides over is needed whole.

Windows over one dim are followed in sliding.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from sp_compile.graph.call import Call
from sp_compile.sharding.placement import Placement, Replicate, Shard
from sp_compile.sharding.rule import Dims, Factors, rule_of
from sp_compile.sharding.windows import ON_SHARDS, SLIDING, slides_of

from ._build import bind, names, resized_dims
from .exchanges import frame_of
from .movement import pad, roll, unfold

aten = torch.ops.aten


@rule_of(
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
def conv(call: Call) -> Factors | None:
    """Without a batch dim nothing passes."""
    weight = names(call.ndim("weight"), "w")
    image = names(len(weight) - 1, "i")
    batch = ("n",) if call.ndim() == len(weight) else ()
    operands = ((*batch, *image), weight) + ((("b",),) if call["bias"] is not None else ())
    kinds = {f: "whole" for dims in operands for f in dims if f != "n"}
    return Factors(operands, ((*batch, *names(len(image), "o")),), kinds)


def _spatial(ndim: int, *ops: Any) -> None:
    """Ops on the last `ndim` dims; batch and channels pass."""
    rule_of(*ops)(resized_dims(ndim=ndim))


_spatial(
    1,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_max_pool1d.default,
    aten.max_pool1d_with_indices.default,
    aten.reflection_pad1d.default,
    aten.replication_pad1d.default,
    aten.upsample_linear1d.vec,
    aten.upsample_nearest1d.vec,
)
_spatial(
    2,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_max_pool2d.default,
    aten.avg_pool2d.default,
    aten.max_pool2d.default,
    aten.max_pool2d_with_indices.default,
    aten.reflection_pad2d.default,
    aten.replication_pad2d.default,
    aten.upsample_bicubic2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
)
_spatial(3, aten.pixel_shuffle.default, aten.pixel_unshuffle.default)


@rule_of(aten.grid_sampler.default)
def _grid_sampler(call: Call) -> Factors | None:
    if call.ndim() != 4:
        return None
    return bind(call, "n c h w, n y x xy -> n c y x", whole="h w xy")


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
def _sliding(call: Call) -> Factors | None:
    """The dims that a window slides over keep their names; so they do in the result, whatever its length is."""
    rule: Factors | None = _DIMS[call.node.target](call)
    if rule is None or rule.spans:
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
