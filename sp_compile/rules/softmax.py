"""Softmax and its kin: their dim is needed whole."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..rule import Call, Factors, rule_of
from ._build import resized_dims, whole_dims

aten = torch.ops.aten

rule_of(aten.glu.default)(resized_dims("dim"))


@rule_of(aten._log_softmax.default, aten._softmax.default, aten.log_softmax.int, aten.softmax.int)
def _softmax(call: Call) -> Factors:
    """Needed whole, because every result is divided by the sum along it."""
    return replace(whole_dims("dim")(call), normalises=True)
