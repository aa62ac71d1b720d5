"""Losses.

Padding. A class-index loss ignores a position whose target is ignore_index, so `pad` fills the target with it. The
other losses have no fill of one operand that makes a padded row vanish: their sum is a `total`, which passes/reduce.py
splits into the loss of each position and a masked sum.
"""

from __future__ import annotations

from typing import Any

import torch

from ..rule import Call, Factors, rule_of
from ..shapes import same
from ._build import bind, names

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
_KIND = {MEAN: "mean", SUM: "sum"}
_ELEMENTWISE = {MEAN: "mean", SUM: "total"}


@rule_of(
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.hinge_embedding_loss.default,
    aten.huber_loss.default,
    aten.kl_div.default,
    aten.l1_loss.default,
    aten.margin_ranking_loss.default,
    aten.mse_loss.default,
    aten.poisson_nll_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
)
def _elementwise(call: Call) -> Factors | None:
    operands = ", ".join("..." for _ in call.operands)
    if call["reduction"] == NONE:
        return bind(call, f"{operands} -> ...")
    return bind(call, f"{operands} -> ", **{_ELEMENTWISE[call["reduction"]]: "..."})


@rule_of(aten.cosine_embedding_loss.default)
def _cosine_embedding_loss(call: Call) -> Factors | None:
    if call["reduction"] == NONE:
        return bind(call, "n d, n d, n -> n", whole="d")
    return bind(call, "n d, n d, n -> ", whole="d", **{_ELEMENTWISE[call["reduction"]]: "n"})


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
