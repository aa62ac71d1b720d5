"""Normalisations, softmax and its kin, what autograd's formulas call, and losses.

The dims that a mean or a softmax runs over are needed whole; gradients of weights are sums over rows.

Padding. A class-index loss ignores a position whose target is ignore_index, so `pad` fills the target with it. The
other losses have no fill of one operand that makes a padded row vanish: their sum is a `total`, which `reduce`
splits into the loss of each position and a masked sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sp_compile.passes.graph.call import Call, overloads
from sp_compile.passes.graph.sizes import same
from sp_compile.passes.sharding.rule import Factors, rule_of

from ._build import bind, names, replaced, resized_dims, whole_dims

aten = torch.ops.aten


def _affine(call: Call, text: str, each: str, whole: str = "") -> Factors | None:
    """The text for the input and the result, with `each` for every further operand that is there."""
    operands = ", ".join([text, *([each] * (len(call.operands) - 1))])
    return bind(call, f"{operands} -> {text}", whole=whole)


@rule_of(aten.batch_norm.default)
def _batch_norm(call: Call) -> Factors | None:
    """Running statistics are whole on every rank."""
    whole = "n ..." if call["running_mean"] is None else "n c ..."
    return _affine(call, "n c ...", "c", whole=whole if call["training"] else "")


@rule_of(aten.group_norm.default)
def _group_norm(call: Call) -> Factors | None:
    return _affine(call, "n c ...", "c", whole="c ...")


@rule_of(aten.instance_norm.default)
def _instance_norm(call: Call) -> Factors | None:
    """Running statistics are means over the batch too, and whole on every rank."""
    if not call["use_input_stats"]:
        return _affine(call, "n c ...", "c")
    return _affine(call, "n c ...", "c", whole="..." if call["running_mean"] is None else "n c ...")


@rule_of(aten.layer_norm.default, aten.rms_norm.default)
def _layer_norm(call: Call) -> Factors | None:
    each = " ".join(names(len(call["normalized_shape"]), "n"))
    return _affine(call, f"... {each}", each, whole=each)


@rule_of(aten.cosine_similarity.default)
def _cosine_similarity(call: Call) -> Factors | None:
    if call.ndim(0) != call.ndim(1) or not call.ndim():
        return None
    dims, at = names(call.ndim()), call.dim()
    text = " ".join(dims)
    return bind(call, f"{text}, {text} -> {' '.join(dims[:at] + dims[at + 1 :])}", whole=dims[at])


@rule_of(aten.pairwise_distance.default)
def _pairwise_distance(call: Call) -> Factors | None:
    """The norm of a difference along the last dim: broadcasting comes first."""
    return bind(call, f"... d, ... d -> ...{' 1' * call['keepdim']}", whole="d")


@rule_of(aten.native_layer_norm.default)
def _native_layer_norm(call: Call) -> Factors | None:
    """The mean and the reciprocal deviation keep the normalised dims as ones."""
    size = len(call["normalized_shape"])
    dims = names(call.ndim())
    tail = dims[len(dims) - size :]
    kept = replaced(dims, range(len(dims) - size, len(dims)), "")
    return Factors((dims, *([tail] * (len(call.operands) - 1))), (dims, kept, kept), dict.fromkeys(tail, "whole"))


rule_of(aten.glu.default)(resized_dims("dim"))


@rule_of(aten._log_softmax.default, aten._softmax.default, aten.log_softmax.int, aten.softmax.int)
def _softmax(call: Call) -> Factors:
    """Needed whole, because every result is divided by the sum along it."""
    return replace(whole_dims(call), normalises=True)


@rule_of(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(call: Call) -> Factors | None:
    """What was normalised is needed whole."""
    dims = names(call.ndim())
    return Factors((dims, dims), (dims,), {dims[call.dim()]: "whole"})


@rule_of(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: Call) -> Factors | None:
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


NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
_KIND = {MEAN: "mean", SUM: "sum"}
_ELEMENTWISE = {MEAN: "mean", SUM: "total"}

CLASS_LOSSES = overloads("cross_entropy_loss nll_loss nll_loss2d nll_loss_nd")
LOSSES = overloads("""
    binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
""")


@rule_of(*LOSSES)
def _elementwise(call: Call) -> Factors | None:
    operands = ", ".join("..." for _ in call.operands)
    if call["reduction"] == NONE:
        return bind(call, f"{operands} -> ...")
    return bind(call, f"{operands} -> ", **{_ELEMENTWISE[call["reduction"]]: "..."})


ROW_LOSSES = {
    aten.cosine_embedding_loss.default: ("n d, n d, n", "n d, n d, n", "n"),
    aten.multi_margin_loss.default: ("n d, n", "n d, n, d", "n"),
    aten.multilabel_margin_loss.default: ("n d, n d", "n d, n d", "n"),
    aten.triplet_margin_loss.default: ("... d, ... d, ... d", "", "..."),
}
"""What each row is compared with has all of a row; with a weight of each class, the second."""


@rule_of(*ROW_LOSSES)
def _row_loss(call: Call) -> Factors | None:
    plain, weighted, rows = ROW_LOSSES[call.node.target]
    if call.ndim() < 2:
        return None
    text = weighted if call.get("weight") is not None else plain
    if call["reduction"] == NONE:
        return bind(call, f"{text} -> {rows}", whole="d")
    return bind(call, f"{text} -> ", whole="d", **{_ELEMENTWISE[call["reduction"]]: rows})


@rule_of(aten.cross_entropy_loss.default)
def _cross_entropy_loss(call: Call) -> Factors | None:
    """Classes are whole. Targets of the input's shape are class probabilities, else class indices."""
    if call.ndim("target") != call.ndim("self"):
        return _classes(call)
    if not all(same(a, b) for a, b in zip(call.shape("self"), call.shape("target"), strict=True)):
        return None
    dims, positions = _dims(call)
    return _over(call, (dims, dims), positions, _ELEMENTWISE.get(call["reduction"]), None)


@rule_of(aten.nll_loss.default, aten.nll_loss2d.default, aten.nll_loss_nd.default)
def _classes(call: Call) -> Factors | None:
    dims, positions = _dims(call)
    return _over(call, (dims, positions), positions, _KIND.get(call["reduction"]), (1, call["ignore_index"]))


def _dims(call: Call) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The input's dims, (C), (N, C) or (N, C, d1, ...), and those without the classes."""
    positions = names(call.ndim("self") - 1, "n")
    return (*positions[:1], "c", *positions[1:]), positions


def _over(call: Call, operands: Any, positions: Any, kind: str | None, pad: Any) -> Factors:
    weight = (("c",),) if call["weight"] is not None else ()
    kinds = {"c": "whole"} | (dict.fromkeys(positions, kind) if kind else {})
    return Factors((*operands, *weight), (() if kind else positions,), kinds, pad=pad if kind else None)
