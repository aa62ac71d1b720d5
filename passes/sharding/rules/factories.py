"""Rules of factories, ops that create a tensor of a given size: any dim of the result may be sharded.

`sizes="size"` in a rule names the schema argument with the sizes of the result; each rank passes its local length
there. A lazy op is no reason to shard its result. Factories of values that depend on the position (arange, linspace,
eye, randperm) have no rule: each rank computes all of the result.

Random draws that are not elementwise are here, too; elementwise ones (rand_like, dropout) are pointwise. A draw with
elementwise parameters, such as normal(mean, std), has the rule of pointwise ops.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.sharding.rule import BoundRule, register_rule_function, rule

from ._build import factor_names
from .pointwise import pointwise_rule

aten = torch.ops.aten


@register_rule_function(*parse_overloads("empty.memory_format full ones rand randint randint.low randn zeros"))
def _factory_rule(call: OpCall) -> BoundRule:
    """Return the rule of a factory without operands, such as zeros(size), any dim of which may be sharded."""
    return BoundRule((), (factor_names(len(call["size"]), "made"),), sizes="size", lazy=True)


@register_rule_function(aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
def _factory_like_rule(call: OpCall) -> BoundRule:
    """Return the rule of x.new_zeros(size) and the like, which read only the dtype and the device of x.

    The result shares no dim with x. A rule must give each such dim a kind, and there is none for a dim that is not
    read, so it is "replicate": a sharded x is gathered for the call. In captured graphs `normalize_ops.py` avoids this:
    it replaces the call by zeros(size), which has no operand.
    """
    operand, result = factor_names(call.ndim(), "operand"), factor_names(len(call["size"]), "made")
    return BoundRule((operand,), (result,), dict.fromkeys(operand, "replicate"), sizes="size", lazy=True)


rule(aten.scalar_tensor.default, "->", lazy=True)
register_rule_function(*parse_overloads("bernoulli bernoulli.p bernoulli.Tensor binomial poisson uniform"))(
    pointwise_rule
)
register_rule_function(*parse_overloads("normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor"))(pointwise_rule)
rule(aten.multinomial.default, "... w -> ... draws", replicate="w")  # each row depends on all of its weights
