"""Rules of sliding windows: convolutions, pooling, pads, shifts, rolls and unfold.

A rule names the dims of the operands and results of a call. A dim with the same name in operand and result may be
sharded, such as the batch. A dim of kind "replicate" is gathered before the call. A row of a result reads a window of
rows of the operand. A dim along which known windows slide has the kind "halo" (`sharding/window_rules.py`): it may be
sharded, and a rank receives the rows of its neighbors that it reads. If windows are unknown, or slide over several
dims, their dims are gathered.

An sp:: window op with a frame already runs on shards; the frame describes how its rows are distributed over the ranks.
A rule function returns the rule of a call, or None: the call then runs on gathered operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.sharding.placement import Placement, Replicate, Shard
from sp_compile.passes.sharding.rule import BoundRule, Dims, register_rule_function, rule
from sp_compile.passes.sharding.window_rules import SHARD_WINDOWS, WINDOW_CALLS, sliding_calls

from ._build import along_dims, factor_names, resize_dims
from .exchange_rules import call_frame
from .movement import pad_rule, roll_rule, unfold_rule

aten, sp = torch.ops.aten, torch.ops.sp


@register_rule_function(*parse_overloads("conv_transpose1d conv_transpose2d.input conv_transpose3d.input"))
def conv_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of a convolution with unknown windows: all dims but the batch, if there is one, are gathered.

    `_sliding_rule` starts from it, and lets dims with known windows be sharded.
    """
    weight = factor_names(call.ndim("weight"), "w")
    image = factor_names(len(weight) - 1, "i")  # channels and positions
    batch = ("n",) if call.ndim() == len(weight) else ()
    operands = ((*batch, *image), weight) + ((("b",),) if call["bias"] is not None else ())
    kinds = {f: "replicate" for dims in operands for f in dims if f != "n"}
    return BoundRule(operands, ((*batch, *factor_names(len(image), "o")),), kinds)


# Ops that gather their last dims, by the number of these; batch and channels pass.
_RESIZING_OPS = {
    1: """adaptive_avg_pool1d adaptive_max_pool1d max_pool1d_with_indices reflection_pad1d replication_pad1d
    upsample_linear1d.vec upsample_nearest1d.vec""",
    2: """adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d max_pool2d max_pool2d_with_indices reflection_pad2d
    replication_pad2d upsample_bicubic2d.vec upsample_bilinear2d.vec upsample_nearest2d.vec""",
    3: "pixel_shuffle pixel_unshuffle",
}
for _ndim, _ops in _RESIZING_OPS.items():
    register_rule_function(*parse_overloads(_ops))(resize_dims(ndim=_ndim))
rule(aten.grid_sampler.default, "n c h w, n y x xy -> n c y x", replicate="h w xy")

# Rule functions by op, for calls whose windows are unknown; `_sliding_rule` starts from their rules.
_RULES_OF_UNKNOWN_WINDOWS: dict[Any, Callable[[OpCall], Any]] = {
    **dict.fromkeys(parse_overloads("constant_pad_nd pad"), pad_rule),
    **dict.fromkeys(parse_overloads("avg_pool1d max_pool1d"), resize_dims(ndim=1)),
    **dict.fromkeys((sp.avg_pool1d.default, sp.max_pool1d.default), resize_dims(ndim=1)),
    **dict.fromkeys(parse_overloads("conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding"), conv_rule),
    **dict.fromkeys((aten.convolution.default, sp.conv_along.default), conv_rule),
    **dict.fromkeys((aten.unfold.default, sp.unfold.default), unfold_rule),
    **dict.fromkeys((sp.roll.default, sp.shift.default), partial(along_dims, dims=(), lazy=True)),
    aten.roll.default: roll_rule,
}


@register_rule_function(*WINDOW_CALLS)
def _sliding_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of an op with sliding windows, such as a convolution, a pool, a pad or a roll.

    It starts from the rule for unknown windows, which gathers their dims. A dim with known windows may be sharded: it
    has one name in operand and result, whose lengths may differ, and the kind "halo", or no kind if each row of the
    result reads the same row of the operand. `slides` has the rows that the windows read.
    """
    rule: BoundRule | None = _RULES_OF_UNKNOWN_WINDOWS[call.node.target](call)
    if rule is None or rule.spans:  # spans: a pad that cuts is a slice
        return rule
    operand, result, kinds, slides = rule.operands[0], list(rule.results[0]), dict(rule.kinds), {}
    for dim, window_call in sliding_calls(call).items():
        kinds.pop(result[dim], None)  # the name of the gathered dim, which the result no longer has
        result[dim] = operand[dim]
        if window_call.sliding.is_pointwise(call.shape()[dim]):
            kinds.pop(operand[dim], None)
            continue
        kinds[operand[dim]] = "halo"
        slides[operand[dim]] = window_call.sliding
    rule = replace(rule, results=(tuple(result),), kinds=kinds, slides=slides)
    is_on_shards = call.node.target in SHARD_WINDOWS and call["frame"] is not None
    return _framed_window_rule(call, rule) if is_on_shards else rule


def _framed_window_rule(call: OpCall, rule: BoundRule) -> BoundRule:
    """Return the rule of a call of an sp:: window op on shards, with the placements from its frame arguments.

    Propagation then does not choose placements: x is sharded as in `frame`, and the result as in `result`, if it has
    another frame. Weights and biases are replicated, and their gradients are partial (each rank has a summand).
    """
    (dim,) = sliding_calls(call)  # a dict whose only key is the dim of x along which windows slide
    sharded_factor = rule.operands[0][dim]

    def placement_of(names: Dims, frame_argument: str) -> Placement:
        """Return the placement of an operand or result with these dims."""
        if sharded_factor not in names:
            return Replicate(partial_grad=True)
        return Shard(names.index(sharded_factor), call_frame(call, frame_argument))

    result_frame = "result" if call.get("result") is not None else "frame"
    wants = tuple(placement_of(names, "frame") for names in rule.operands)
    return replace(rule, operand_placements=wants, result_placements=placement_of(rule.results[0], result_frame))
