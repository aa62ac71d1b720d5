"""Reductions and orderings along dims."""

from __future__ import annotations

from typing import Any

import torch

from ..rule import Call, Factors, RuleFunction, rule_of
from ._build import dims_of, names, replaced, resized_dims, whole_dims

aten = torch.ops.aten


def _reduce(kind: str) -> RuleFunction:
    """Reduce the dims of the argument `dim` (all without it); those kept by `keepdim` have no name."""

    def instantiate(call: Call) -> Factors | None:
        dims = names(call.ndim())
        at = dims_of(call.get("dim"), len(dims)) if dims else ()
        kept = replaced(dims, at, "")
        result = kept if call.get("keepdim") else tuple(f for f in kept if f)
        if len(result) != call.results()[0].ndim:  # all.dims takes [] for no dims, the others for all
            return None
        return Factors((dims,), tuple(result for _ in call.results()), {dims[d]: kind for d in at})

    return instantiate


def _register(kind: str, ops: dict[Any, str]) -> None:
    for packet, overloads in ops.items():
        for overload in overloads.split():
            rule_of(getattr(packet, overload))(_reduce(kind))


_register("mean", {aten.mean: "default dim"})
_register(
    "sum",
    {aten.count_nonzero: "default dim_IntList", aten.nansum: "default", aten.sum: "default dim_IntList"},
)
_register(
    "whole",
    {
        aten.all: "default dim dims",
        aten.amax: "default",
        aten.amin: "default",
        aten.aminmax: "default",
        aten.any: "default dim dims",
        aten.argmax: "default",
        aten.argmin: "default",
        aten.kthvalue: "default",
        aten.linalg_vector_norm: "default",
        aten.logsumexp: "default",
        aten.max: "default dim",
        aten.median: "default dim",
        aten.min: "default dim",
        aten.mode: "default",
        aten.nanmean: "default",
        aten.nanmedian: "default dim",
        aten.norm: "Scalar ScalarOpt_dim ScalarOpt_dim_dtype ScalarOpt_dtype",
        aten.prod: "default dim_int",
        aten.special_logsumexp: "default",
        aten.std: "correction default dim",
        aten.std_mean: "correction default dim",
        aten.var: "correction default dim",
        aten.var_mean: "correction default dim",
    },
)

rule_of(aten.argsort.default, aten.argsort.stable)(whole_dims("dim"))
rule_of(aten.sort.default, aten.sort.stable)(whole_dims("dim"))
rule_of(aten.topk.default)(resized_dims("dim"))


@rule_of(aten.diff.default)
def _diff(call: Call) -> Factors:
    """Differences along a dim, with optional rows before and after it."""
    dims = names(call.ndim())
    at = call.dim()
    operands = tuple(replaced(dims, [at], f"operand{i}_") for i in range(len(call.operands)))
    return Factors(operands, (replaced(dims, [at], "new"),), {o[at]: "whole" for o in operands})
