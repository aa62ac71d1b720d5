"""What autograd's formulas call: rows pass, and gradients of weights are sums over them."""

from __future__ import annotations

import torch

from ..rule import Call, Factors, rule_of
from ._build import names

aten = torch.ops.aten


@rule_of(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax(call: Call) -> Factors | None:
    """What was normalised is needed whole."""
    dims = names(call.ndim())
    return Factors((dims, dims), (dims,), {dims[call.dim()]: "whole"})


@rule_of(aten.native_layer_norm_backward.default)
def _layer_norm(call: Call) -> Factors | None:
    """Gradients of the weight and the bias: sums over all rows."""
    rows = call.ndim() - len(call["normalized_shape"])
    dims = names(call.ndim())
    row, features = dims[:rows], dims[rows:]
    of_row = (*row, *[""] * len(features))
    weights = [features for name in ("weight", "bias") if call[name] is not None]
    results = [dims, features, features]
    made = [r for r, wanted in zip(results, call["output_mask"]) if wanted]
    kinds = {**dict.fromkeys(row, "sum"), **dict.fromkeys(features, "whole")}
    return Factors((dims, dims, of_row, of_row, *weights), tuple(made), kinds)
