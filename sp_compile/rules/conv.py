"""Convolutions, pooling and interpolation: the batch passes, and what a window slides over is needed whole.

Windows over one dim are followed in sliding.py.
"""

from __future__ import annotations

from typing import Any

import torch

from ..rule import Call, Factors, rule_of
from ._build import bind, names, resized_dims

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
