"""Tables looked up by index."""

from __future__ import annotations

import torch

from ..rule import Call, Factors, rule_of
from ._build import bind

aten = torch.ops.aten


@rule_of(aten.embedding.default)
def _embedding(call: Call) -> Factors | None:
    """scale_grad_by_freq counts each index over the whole batch, which no rank sees alone."""
    if call["scale_grad_by_freq"]:
        return bind(call, "v d, ... -> ... d", whole="v ...")
    return bind(call, "v d, ... -> ... d", whole="v")


@rule_of(aten.one_hot.default)
def _one_hot(call: Call) -> Factors | None:
    """Without a number of classes each rank would take its own largest index."""
    return None if call["num_classes"] == -1 else bind(call, "... -> ... v")
