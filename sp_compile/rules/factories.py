"""Tensors made from sizes: any dim can be local, because the size argument says how long it is.

Values that depend on the position (arange, linspace, eye, randperm) have no rule: they are made whole.
"""

from __future__ import annotations

import torch

from ..rule import Call, Factors, rule_of
from ._build import names

aten = torch.ops.aten


@rule_of(
    aten.empty.memory_format,
    aten.full.default,
    aten.ones.default,
    aten.rand.default,
    aten.randint.default,
    aten.randint.low,
    aten.randn.default,
    aten.zeros.default,
)
def _made(call: Call) -> Factors:
    return Factors((), (names(len(call["size"]), "made"),), sizes="size", lazy=True)


@rule_of(
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
)
def _made_like(call: Call) -> Factors:
    """Only the dtype and the device of the operand are read."""
    operand, made = names(call.ndim(), "operand"), names(len(call["size"]), "made")
    return Factors((operand,), (made,), dict.fromkeys(operand, "whole"), sizes="size", lazy=True)


@rule_of(aten.scalar_tensor.default)
def _scalar(call: Call) -> Factors:
    return Factors((), ((),), lazy=True)
