"""Rules of normalizations, softmax and related ops, backward ops of autograd, and losses.

A rule names the dims of the operands and results of a call; the names are its factors. "..." is any number of dims. A
factor of kind "replicate" is gathered before the call, such as those of a mean or a softmax. A factor of kind "sum" or
"mean" is reduced: each rank reduces its rows, and the results are added later, as are gradients of weights. Others
pass: they remain sharded. A rule function returns the rule of a call, or None: the call then runs on gathered operands.

A shard may end with padded rows, which must not change a reduced loss. A loss of class indices ignores a position whose
target is ignore_index, so `pad` fills the target with it. For other losses no fill of one operand removes a padded row.
Their sum has the kind "total", and strategies replace it by the loss of each position and a masked sum.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import Any

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.rule import BoundRule, register_rule_function

from ._build import bind_rule, factor_names, gathered_dims, replace_dims, resize_dims

aten = torch.ops.aten


def _affine_rule(call: OpCall, dims: str, weight_dims: str, replicate: str) -> BoundRule | None:
    """Return the rule of a normalization of x with any number of other operands, such as weight and bias.

    Args:
        call: Call of the op.
        dims: Names of the dims of x and the result.
        weight_dims: Names of the dims of each other operand.
        replicate: Names of the dims that are gathered, such as those of the mean; "" for none.
    """
    operands = ", ".join([dims, *([weight_dims] * (len(call.operands) - 1))])
    return bind_rule(call, f"{operands} -> {dims}", replicate=replicate)


@register_rule_function(aten.batch_norm.default, aten.instance_norm.default)
def _batch_norm_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of batch norm or instance norm.

    Batch norm takes the mean of a channel over batch and positions ("n ..."), instance norm over positions. These dims
    are gathered. If the op also updates running statistics, the channels are gathered, too, as every rank has all
    statistics. If it normalizes by running statistics, all dims pass.
    """
    gathered = "n ..." if call.node.target is aten.batch_norm.default else "..."
    if not call.get("training", call.get("use_input_stats")):
        gathered = ""
    elif call["running_mean"] is not None:
        gathered = "n c ..."
    return _affine_rule(call, "n c ...", "c", replicate=gathered)


@register_rule_function(aten.group_norm.default)
def _group_norm_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of group norm, which gathers channels and positions; the batch passes."""
    return _affine_rule(call, "n c ...", "c", replicate="c ...")


@register_rule_function(aten.layer_norm.default, aten.rms_norm.default)
def _layer_norm_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of layer norm or RMS norm, which gathers the normalized last dims."""
    normalized = " ".join(factor_names(len(call["normalized_shape"]), "n"))
    return _affine_rule(call, f"... {normalized}", normalized, replicate=normalized)


@register_rule_function(aten.cosine_similarity.default)
def _cosine_similarity_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of cosine similarity, which gathers the dim of the vectors; all other dims pass.

    None if the operands have different numbers of dims.
    """
    if call.ndim(0) != call.ndim(1) or not call.ndim():
        return None
    names, dim = factor_names(call.ndim()), call.dim()
    result = " ".join(names[:dim] + names[dim + 1 :])
    return bind_rule(call, f"{' '.join(names)}, {' '.join(names)} -> {result}", replicate=names[dim])


@register_rule_function(aten.pairwise_distance.default)
def _pairwise_distance_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of pairwise_distance, the norm of x - y along the last dim, which is gathered.

    The other dims broadcast and pass.
    """
    result = "... 1" if call["keepdim"] else "..."
    return bind_rule(call, f"... d, ... d -> {result}", replicate="d")


@register_rule_function(aten.native_layer_norm.default)
def _native_layer_norm_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of layer norm that also returns mean and reciprocal deviation of each row.

    It gathers the normalized dims, which have size 1 in these statistics (the name "").
    """
    names = factor_names(call.ndim())
    num_rows = len(names) - len(call["normalized_shape"])  # number of dims that are not normalized
    features = names[num_rows:]
    statistics = replace_dims(names, range(num_rows, len(names)), "")
    operands = (names, *([features] * (len(call.operands) - 1)))
    return BoundRule(operands, (names, statistics, statistics), dict.fromkeys(features, "replicate"))


register_rule_function(aten.glu.default)(resize_dims("dim"))


@register_rule_function(aten._log_softmax.default, aten._softmax.default, aten.log_softmax.int, aten.softmax.int)
def _softmax_rule(call: OpCall) -> BoundRule:
    """Return the rule of softmax, which gathers its dim, because every result is divided by a sum along it.

    `normalizes` marks the rule, so that `find_sequences` recognizes a softmax before a product as attention.
    """
    return replace(gathered_dims(call), normalizes=True)


@register_rule_function(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of softmax's backward, which gathers the normalized dim, because it subtracts a sum along it."""
    dims = factor_names(call.ndim())
    return BoundRule((dims, dims), (dims,), {dims[call.dim()]: "replicate"})


@register_rule_function(aten.native_layer_norm_backward.default)
def _layer_norm_backward_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of layer norm's backward: it gathers the normalized dims.

    Gradients of weight and bias are sums over all rows (kind "sum"). The op has no results for gradients that the
    argument `output_mask` does not request.
    """
    names = factor_names(call.ndim())
    num_rows = call.ndim() - len(call["normalized_shape"])  # number of dims that are not normalized
    rows, features = names[:num_rows], names[num_rows:]
    statistics = (*rows, *[""] * len(features))
    weights = [features for name in ("weight", "bias") if call[name] is not None]
    gradients = (names, features, features)  # of the input, the weight and the bias
    results = tuple(compress(gradients, call["output_mask"]))
    kinds = {**dict.fromkeys(rows, "sum"), **dict.fromkeys(features, "replicate")}
    return BoundRule((names, names, statistics, statistics, *weights), results, kinds)


NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
# The kind of the reduced positions: of losses whose targets can be filled so that padded rows add 0, and of others.
_REDUCTION_KIND = {MEAN: "mean", SUM: "sum"}
# Of losses without such targets. A mean is always replaced by a masked sum over the count (`reduce_demands.py`), so
# that it needs no kind of its own; to a plain sum, padded rows would be added.
_UNFILLED_KIND = {MEAN: "mean", SUM: "total"}

CLASS_LOSSES = parse_overloads("cross_entropy_loss nll_loss nll_loss2d nll_loss_nd")
LOSS_RULES = parse_overloads("""
    binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
""")


@register_rule_function(*LOSS_RULES)
def _elementwise_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of an elementwise loss, such as mse_loss.

    It is "..., ... -> ..." without a reduction, and "..., ... -> " with one: all dims have the kind "mean", or "total"
    for a sum, to which padded rows would be added (`_UNFILLED_KIND`).
    """
    operands = ", ".join("..." for _ in call.operands)
    if call["reduction"] == NONE:
        return bind_rule(call, f"{operands} -> ...")
    kind = _UNFILLED_KIND[call["reduction"]]
    return bind_rule(call, f"{operands} -> ", **{kind: "..."})


# dims of operands without and with class weights, and the dims of rows; a rank needs all classes of a row
ROW_LOSSES = {
    aten.cosine_embedding_loss.default: ("n d, n d, n", "n d, n d, n", "n"),
    aten.multi_margin_loss.default: ("n d, n", "n d, n, d", "n"),
    aten.multilabel_margin_loss.default: ("n d, n d", "n d, n d", "n"),
    aten.triplet_margin_loss.default: ("... d, ... d, ... d", "", "..."),
}


@register_rule_function(*ROW_LOSSES)
def _row_loss_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of a loss of each row n, such as triplet_margin_loss, whose last dim d is gathered.

    With a reduction, the rows have the kind "mean", or "total" for a sum, in which no fill of one operand removes
    padded rows. None without a batch.
    """
    plain, weighted, rows = ROW_LOSSES[call.node.target]  # dims of operands without and with class weights; of rows
    if call.ndim() < 2:
        return None
    text = weighted if call.get("weight") is not None else plain
    if call["reduction"] == NONE:
        return bind_rule(call, f"{text} -> {rows}", replicate="d")
    return bind_rule(call, f"{text} -> ", replicate="d", **{_UNFILLED_KIND[call["reduction"]]: rows})


@register_rule_function(aten.cross_entropy_loss.default)
def _cross_entropy_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of cross entropy, which gathers the classes; the other dims (positions) pass or are reduced.

    Targets of the input's shape are class probabilities; other targets are class indices. None if the shapes of input
    and probabilities are not provably equal.
    """
    if call.ndim("target") != call.ndim("self"):
        return _class_loss_rule(call)
    if not all(is_same_size(a, b) for a, b in zip(call.shape("self"), call.shape("target"), strict=True)):
        return None
    dims, positions = _loss_dims(call)
    kind = _UNFILLED_KIND.get(call["reduction"])  # None without a reduction
    return _reduced_loss(call, (dims, dims), positions, kind, pad=None)


@register_rule_function(aten.nll_loss.default, aten.nll_loss2d.default, aten.nll_loss_nd.default)
def _class_loss_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of a loss with class indices as targets, such as nll_loss, which gathers the classes.

    In a reduction, `pad` fills padded rows of the target (operand 1) with ignore_index, so that they do not count.
    """
    dims, positions = _loss_dims(call)
    kind = _REDUCTION_KIND.get(call["reduction"])  # None without a reduction
    return _reduced_loss(call, (dims, positions), positions, kind, pad=(1, call["ignore_index"]))


def _loss_dims(call: OpCall) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the dims of the input of a loss over classes, and the same without the classes "c".

    The latter are the positions, of which each has a target. The input has the dims (C), (N, C) or (N, C, d1, ...).
    """
    positions = factor_names(call.ndim("self") - 1, "n")
    return (*positions[:1], "c", *positions[1:]), positions


def _reduced_loss(call: OpCall, operands: Any, positions: Any, kind: str | None, pad: Any) -> BoundRule:
    """Return the rule of a loss over classes, which are gathered.

    Args:
        call: Call of the op.
        operands: Names of the dims of the input and of the target.
        positions: Names of the dims without the classes, over which the loss may be reduced.
        kind: Kind of the reduction; None for a loss per position.
        pad: Index of the operand, and value, that remove padded rows from the reduction; or None.
    """
    weight = (("c",),) if call["weight"] is not None else ()
    kinds = {"c": "replicate"} | (dict.fromkeys(positions, kind) if kind else {})
    return BoundRule((*operands, *weight), (() if kind else positions,), kinds, pad=pad if kind else None)
