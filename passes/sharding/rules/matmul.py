"""Rules of products of matrices and vectors, which sum over the dims that their operands share.

A rule names the dims of the operands and results of a call, "n i, i m -> n m". The names are its factors. A factor of
no result is contracted: the product sums over it. If it is sharded, each rank has a summand (kind "sum"). A product
with an addend, such as a bias, gathers the contracted factor (kind "whole"), as each rank would add the addend to its
summand. Other factors pass: they remain sharded. "..." is any number of dims.

A rule function returns the rule of a call, or None: the call then runs on gathered operands.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.rule import BoundRule, RuleFunction, register_rule_function, rule

from ._build import bind_rule

aten = torch.ops.aten

rule(aten.bmm.default, "b n i, b i m -> b n m", sum="i")
rule([aten.dot.default, aten.inner.default, aten.vdot.default], "i, i -> ", sum="i")
rule([aten.ger.default, aten.outer.default], "n, m -> n m")
rule(aten.mm.default, "n i, i m -> n m", sum="i")
rule(aten.mv.default, "n i, i -> n", sum="i")
rule(
    aten.bilinear.default,
    "... i, ... j, o i j -> ... o; sum=i j",
    "... i, ... j, o i j, o -> ... o; whole=i j",  # the bias would be added on every rank
)


def _with_addend(text: str, whole: str) -> RuleFunction:
    """Return a rule function of an addend plus a product, whose contracted factors are gathered.

    The first operand is the addend, which broadcasts.

    Args:
        text: Rule text of the product alone.
        whole: Names of the contracted factors.
    """
    result = text.partition("->")[2].split()

    def instantiate(call: OpCall) -> BoundRule | None:
        """Return the rule of a call, whose addend has the last dims of the result."""
        addend = " ".join(result[len(result) - call.ndim() :])
        return bind_rule(call, f"{addend}, {text}", whole=whole)

    return instantiate


register_rule_function(aten.addbmm.default)(_with_addend("b n i, b i m -> n m", whole="b i"))
register_rule_function(aten.addmm.default)(_with_addend("n i, i m -> n m", whole="i"))
register_rule_function(aten.addmv.default)(_with_addend("n i, i -> n", whole="i"))
register_rule_function(aten.baddbmm.default)(_with_addend("b n i, b i m -> b n m", whole="i"))


@register_rule_function(aten.linear.default)
def _linear_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of linear: it sums over the input features i, and gathers them if there is a bias.

    A weight with one dim has no output features o.
    """
    weight = "o i" if call.ndim("weight") == 2 else "i"
    result = "... o" if call.ndim("weight") == 2 else "..."
    if call["bias"] is None:
        return bind_rule(call, f"... i, {weight} -> {result}", sum="i")
    return bind_rule(call, f"... i, {weight}, {weight[:-1].strip()} -> {result}", whole="i")


@register_rule_function(aten.linalg_matmul.default, aten.matmul.default)
def _matmul_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of matmul, which sums over i, for vectors, matrices and batches of matrices."""
    texts = {
        (True, True): "i, i -> ",
        (True, False): "i, ... i m -> ... m",
        (False, True): "... n i, i -> ... n",
        (False, False): "... n i, ... i m -> ... n m",
    }
    return bind_rule(call, texts[call.ndim(0) == 1, call.ndim(1) == 1], sum="i")  # by whether an operand is a vector


@register_rule_function(aten.einsum.default)
def _einsum_rule(call: OpCall) -> BoundRule | None:
    """Return the rule that has the labels (letters) of the equation as factors, or None.

    There is none if an operand has a label twice (a diagonal), or if the equation sums over the dims of "...".
    """
    equation = call["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = [_equation_labels(labels) for labels in left.split(",")]
    if any(len(set(labels)) != len(labels) for labels in operands) or len(operands) != len(call.operands):
        return None
    if not arrow:  # the result has the labels that occur once, in alphabetical order
        once = sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    result = _equation_labels(right)
    contracted = {label for labels in operands for label in labels} - set(result)
    if "..." in contracted:
        return None
    text = ", ".join(map(" ".join, operands)) + " -> " + " ".join(result)
    return bind_rule(call, text, sum=" ".join(sorted(contracted)), lazy=len(operands) == 1 and not contracted)


def _equation_labels(group: str) -> list[str]:
    """Split the labels of one operand or result of an equation: "ab...c" is a, b, "..." and c."""
    head, dots, tail = group.partition("...")
    return [*head, *([dots] if dots else []), *tail]
