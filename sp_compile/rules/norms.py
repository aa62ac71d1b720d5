"""Normalisations: the dims that a mean runs over are needed whole."""

from __future__ import annotations

import torch

from ..rule import Call, Factors, rule_of
from ._build import bind, names, replaced

aten = torch.ops.aten


def _affine(call: Call, text: str, each: str, whole: str = "") -> Factors | None:
    """The text for the input and the result, with `each` for every further operand that is there."""
    operands = ", ".join([text, *([each] * (len(call.operands) - 1))])
    return bind(call, f"{operands} -> {text}", whole=whole)


@rule_of(aten.batch_norm.default)
def _batch_norm(call: Call) -> Factors | None:
    return _affine(call, "n c ...", "c", whole="n ..." if call["training"] else "")


@rule_of(aten.group_norm.default)
def _group_norm(call: Call) -> Factors | None:
    return _affine(call, "n c ...", "c", whole="c ...")


@rule_of(aten.instance_norm.default)
def _instance_norm(call: Call) -> Factors | None:
    """Running statistics are means over the batch too."""
    if not call["use_input_stats"]:
        return _affine(call, "n c ...", "c")
    return _affine(call, "n c ...", "c", whole="..." if call["running_mean"] is None else "n ...")


@rule_of(aten.layer_norm.default, aten.rms_norm.default)
def _layer_norm(call: Call) -> Factors | None:
    each = " ".join(names(len(call["normalized_shape"]), "n"))
    return _affine(call, f"... {each}", each, whole=each)


@rule_of(aten.cosine_similarity.default)
def _cosine_similarity(call: Call) -> Factors | None:
    ndim = max(call.ndim(0), call.ndim(1))
    if call.ndim(0) != call.ndim(1) or not ndim:
        return None
    dims = names(ndim)
    at = call["dim"] % ndim
    text = " ".join(dims)
    return bind(call, f"{text}, {text} -> {' '.join(dims[:at] + dims[at + 1 :])}", whole=dims[at])


@rule_of(aten.native_layer_norm.default)
def _native_layer_norm(call: Call) -> Factors | None:
    """The mean and the reciprocal deviation keep the normalised dims as ones."""
    size = len(call["normalized_shape"])
    dims = names(call.ndim())
    tail = dims[len(dims) - size :]
    kept = replaced(dims, range(len(dims) - size, len(dims)), "")
    return Factors(
        (dims, *([tail] * (len(call.operands) - 1))), (dims, kept, kept), dict.fromkeys(tail, "whole")
    )
