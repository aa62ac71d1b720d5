"""Random draws that are not elementwise; the elementwise ones (bernoulli, rand_like, dropout, ...) are pointwise."""

from __future__ import annotations

import torch

from ..rule import Call, Factors, rule_of
from ._build import bind
from .pointwise import pointwise_rule

aten = torch.ops.aten

rule_of(
    aten.bernoulli.Tensor,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.binomial.default,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.poisson.default,
    aten.uniform.default,
)(pointwise_rule)


@rule_of(aten.multinomial.default)
def _multinomial(call: Call) -> Factors | None:
    """Each row is drawn from all of its own weights."""
    return bind(call, "... w -> ... draws", whole="w")
