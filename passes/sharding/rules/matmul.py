"""Contractions, reductions and orderings along dims.

A factor that is summed over leaves a Partial, except where an addend would be counted per rank.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import Call, overloads
from sp_compile.passes.sharding.rule import Factors, RuleFunction, rule, rule_of

from ._build import along, bind, dims_of, names, replaced, resized_dims, whole_dims

aten = torch.ops.aten

rule(aten.bmm.default, "b n i, b i m -> b n m", sum="i")
rule([aten.dot.default, aten.inner.default, aten.vdot.default], "i, i -> ", sum="i")
rule([aten.ger.default, aten.outer.default], "n, m -> n m")
rule(aten.mm.default, "n i, i m -> n m", sum="i")
rule(aten.mv.default, "n i, i -> n", sum="i")
rule(
    aten.bilinear.default,
    "... i, ... j, o i j -> ... o; sum=i j",
    "... i, ... j, o i j, o -> ... o; whole=i j",  # the bias would be added once per rank
)


def _added(text: str, whole: str) -> RuleFunction:
    """A product plus an addend that broadcasts to it (a bias is a vector). The sum would add it once per rank."""
    result = text.partition("->")[2].split()

    def instantiate(call: Call) -> Factors | None:
        addend = " ".join(result[len(result) - call.ndim() :])
        return bind(call, f"{addend}, {text}", whole=whole)

    return instantiate


rule_of(aten.addbmm.default)(_added("b n i, b i m -> n m", whole="b i"))
rule_of(aten.addmm.default)(_added("n i, i m -> n m", whole="i"))
rule_of(aten.addmv.default)(_added("n i, i -> n", whole="i"))
rule_of(aten.baddbmm.default)(_added("b n i, b i m -> b n m", whole="i"))


@rule_of(aten.linear.default)
def _linear(call: Call) -> Factors | None:
    """A bias would be added once per rank, so with one the contraction can not stay a sum of summands."""
    weight = "o i" if call.ndim("weight") == 2 else "i"
    result = "... o" if call.ndim("weight") == 2 else "..."
    if call["bias"] is None:
        return bind(call, f"... i, {weight} -> {result}", sum="i")
    return bind(call, f"... i, {weight}, {weight[:-1].strip()} -> {result}", whole="i")


@rule_of(aten.linalg_matmul.default, aten.matmul.default)
def _matmul(call: Call) -> Factors | None:
    left, right = call.ndim(0), call.ndim(1)
    if left == 1 and right == 1:
        return bind(call, "i, i -> ", sum="i")
    if left == 1:
        return bind(call, "i, ... i m -> ... m", sum="i")
    if right == 1:
        return bind(call, "... n i, i -> ... n", sum="i")
    return bind(call, "... n i, ... i m -> ... n m", sum="i")


@rule_of(aten.einsum.default)
def _einsum(call: Call) -> Factors | None:
    """By its own equation; none if a label stands twice in an operand (a diagonal)."""
    equation = call["equation"].replace(" ", "")
    left, arrow, result = equation.partition("->")
    groups = [_labels(group) for group in left.split(",")]
    if any(len(set(group)) != len(group) for group in groups) or len(groups) != len(call.operands):
        return None
    if not arrow:
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    kept = _labels(result)
    contracted = {label for group in groups for label in group} - set(kept)
    if "..." in contracted:
        return None
    text = ", ".join(" ".join(group) for group in groups) + " -> " + " ".join(kept)
    return bind(call, text, sum=" ".join(sorted(contracted)), lazy=len(groups) == 1 and not contracted)


def _labels(group: str) -> list[str]:
    head, dots, tail = group.partition("...")
    return [*head, *([dots] if dots else []), *tail]


def _reduce(kind: str) -> RuleFunction:
    """Reduce the dims of the argument `dim` (all without it); those kept by `keepdim` have no name."""

    def instantiate(call: Call) -> Factors | None:
        dims = names(call.ndim())
        at = dims_of(call.get("dim"), len(dims)) if dims else ()
        kept = replaced(dims, at, "")
        result = kept if call.get("keepdim") else tuple(f for f in kept if f)
        if len(result) != call.results()[0].ndim:  # all.dims takes [] for no dims, the others for all
            return None
        return along(call, at, result, kind)

    return instantiate


_REDUCTIONS = overloads("""
    all all.dim all.dims amax amin aminmax any any.dim any.dims argmax argmin kthvalue linalg_vector_norm
    logsumexp max max.dim median median.dim min min.dim mode nanmean nanmedian nanmedian.dim norm.Scalar
    norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype prod prod.dim_int special_logsumexp
    std.correction std std.dim std_mean.correction std_mean std_mean.dim var.correction var var.dim
    var_mean.correction var_mean var_mean.dim
""")
rule_of(*overloads("mean mean.dim"))(_reduce("mean"))
rule_of(*overloads("count_nonzero count_nonzero.dim_IntList nansum sum sum.dim_IntList"))(_reduce("sum"))
rule_of(*_REDUCTIONS)(_reduce("whole"))

rule_of(aten.argsort.default, aten.argsort.stable, aten.sort.default, aten.sort.stable)(whole_dims)
rule_of(aten.topk.default)(resized_dims("dim"))


@rule_of(aten.diff.default)
def _diff(call: Call) -> Factors:
    """Differences along a dim, with optional rows before and after it."""
    dims = names(call.ndim())
    at = call.dim()
    operands = tuple(replaced(dims, [at], f"operand{i}_") for i in range(len(call.operands)))
    return Factors(operands, (replaced(dims, [at], "new"),), {o[at]: "whole" for o in operands})
