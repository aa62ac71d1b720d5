"""Softmax and its kin: their dim is needed whole."""

from __future__ import annotations

import torch

from ..rule import rule_of
from ._build import resized_dims, whole_dims

aten = torch.ops.aten

rule_of(aten._log_softmax.default)(whole_dims("dim"))
rule_of(aten._softmax.default)(whole_dims("dim"))
rule_of(aten.glu.default)(resized_dims("dim"))
rule_of(aten.log_softmax.int)(whole_dims("dim"))
rule_of(aten.softmax.int)(whole_dims("dim"))
