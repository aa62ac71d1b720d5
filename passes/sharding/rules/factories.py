"""Tensors made from sizes: any dim can be local, because the size argument says how long it is.

Values that depend on the position (arange, linspace, eye, randperm) have no rule: they are made whole.

Random draws that are not elementwise; the elementwise ones (bernoulli, rand_like, dropout, ...) are pointwise.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import Call, overloads
from sp_compile.passes.sharding.rule import Factors, rule, rule_of

from ._build import names
from .pointwise import pointwise_rule

aten = torch.ops.aten


@rule_of(*overloads("empty.memory_format full ones rand randint randint.low randn zeros"))
def _made(call: Call) -> Factors:
    return Factors((), (names(len(call["size"]), "made"),), sizes="size", lazy=True)


@rule_of(aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
def _made_like(call: Call) -> Factors:
    """Only the dtype and the device of the operand are read."""
    operand, made = names(call.ndim(), "operand"), names(len(call["size"]), "made")
    return Factors((operand,), (made,), dict.fromkeys(operand, "whole"), sizes="size", lazy=True)


rule(aten.scalar_tensor.default, "->", lazy=True)
rule_of(*overloads("bernoulli bernoulli.p bernoulli.Tensor binomial poisson uniform"))(pointwise_rule)
rule_of(*overloads("normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor"))(pointwise_rule)
rule(aten.multinomial.default, "... w -> ... draws", whole="w")  # each row of all of its own weights
