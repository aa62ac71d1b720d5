"""Rules of factories: any dim can be local, because the size argument defines its length.

Factories of values that depend on the position (arange, linspace, eye, randperm) have no rule and are replicated.

Random draws that are not elementwise are here, too; elementwise ones (bernoulli, rand_like, dropout) are pointwise.
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
    return BoundRule((), (factor_names(len(call["size"]), "made"),), sizes="size", lazy=True)


@register_rule_function(aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
def _factory_like_rule(call: OpCall) -> BoundRule:
    """Return a rule that reads only the dtype and the device of the operand."""
    operand, result = factor_names(call.ndim(), "operand"), factor_names(len(call["size"]), "made")
    return BoundRule((operand,), (result,), dict.fromkeys(operand, "whole"), sizes="size", lazy=True)


rule(aten.scalar_tensor.default, "->", lazy=True)
register_rule_function(*parse_overloads("bernoulli bernoulli.p bernoulli.Tensor binomial poisson uniform"))(
    pointwise_rule
)
register_rule_function(*parse_overloads("normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor"))(pointwise_rule)
rule(aten.multinomial.default, "... w -> ... draws", whole="w")  # each row depends on all of its weights
