"""Rules of products of matrices and vectors, which sum over the dims that their operands share.

A rule names the dims of the operands and results of a call, "n i, i m -> n m". The names are its factors. A factor of
no result is contracted: the product sums over it. If it is sharded, each rank has a summand (kind "sum"). A product
with an addend, such as a bias, gathers the contracted factor (kind "replicate"), as each rank would add the addend to
its summand. Other factors pass: they remain sharded. "..." is any number of dims.

A rule function returns the rule of a call, or None: the call then runs on gathered operands.
"""

from __future__ import annotations

import torch

from sp_compile.lowering import packed_linear, scaled_linear  # noqa: F401  (define ops)
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.rule import BoundRule, RuleFunction, register_rule_function, rule

from ._build import bind_rule

aten, sp = torch.ops.aten, torch.ops.sp

rule(aten.bmm.default, "b n i, b i m -> b n m", sum="i")
rule([aten.dot.default, aten.inner.default, aten.vdot.default], "i, i -> ", sum="i")
rule([aten.ger.default, aten.outer.default], "n, m -> n m")
rule(aten.mm.default, "n i, i m -> n m", sum="i")
rule(aten.mv.default, "n i, i -> n", sum="i")
rule(
    aten.bilinear.default,
    "... i, ... j, o i j -> ... o; sum=i j",
    "... i, ... j, o i j, o -> ... o; replicate=i j",  # the bias would be added on every rank
)


def _with_addend(text: str, replicate: str) -> RuleFunction:
    """Return a rule function for an op that adds an addend, its first operand, to a product, such as addmm.

    The dims that the product sums over are gathered. If they were sharded, each rank would add the addend to its part
    of the sum.

    Args:
        text: Rule text of the product alone.
        replicate: Names of the contracted factors.
    """
    result = text.partition("->")[2].split()

    def instantiate(call: OpCall) -> BoundRule | None:
        """Return the rule of a call; the addend has the last dims of the result, to which it broadcasts."""
        addend_ndim = call.ndim(0)
        addend = " ".join(result[len(result) - addend_ndim :])
        return bind_rule(call, f"{addend}, {text}", replicate=replicate)

    return instantiate


register_rule_function(aten.addbmm.default)(_with_addend("b n i, b i m -> n m", replicate="b i"))
register_rule_function(aten.addmm.default)(_with_addend("n i, i m -> n m", replicate="i"))
register_rule_function(aten.addmv.default)(_with_addend("n i, i -> n", replicate="i"))
register_rule_function(aten.baddbmm.default)(_with_addend("b n i, b i m -> b n m", replicate="i"))


@register_rule_function(aten.linear.default, sp.subclass_linear.default)
def _linear_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of linear: "... i, o i -> ... o" with sum="i", or "... i, o i, o -> ... o" with a bias.

    With a bias, i is gathered, because otherwise each rank would add the bias to its part of the sum. A weight with one
    dim has no output features o.
    """
    out = "o" if call.ndim(1) == 2 else ""
    if call["bias"] is None:
        return bind_rule(call, f"... i, {out} i -> ... {out}", sum="i")
    return bind_rule(call, f"... i, {out} i, {out} -> ... {out}", replicate="i")


@register_rule_function(sp.scaled_linear.default)
def _scaled_linear_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of sp::scaled_linear(x, w_t, *scales), a linear layer in float8: "... i, i o -> ... o".

    The scales are optional tensors: each is one number for all of x, or a vector with a number for each column i of x.
    The columns are gathered, since x may be cast with a scale for each row, which is computed from all its columns.
    """
    scales = "".join(", i" if call.ndim(k) == 1 else ", " for k in range(2, len(call.operands)))
    return bind_rule(call, f"... i, i o{scales} -> ... o", replicate="i")


@register_rule_function(sp.packed_linear.default)
def _packed_linear_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of sp::packed_linear(x, w, scales, bias), a linear layer: "... i, w0 w1, ..., o -> ... o".

    The dims of packed weights and scales are those of no value: all are gathered, also the output features o.
    """
    has_bias = call["bias"] is not None
    parts = range(1, len(call.operands) - has_bias)  # the weight and its scales
    names = [" ".join(f"w{k}{d}" for d in range(call.ndim(k))) for k in parts]
    bias = ", o" if has_bias else ""
    return bind_rule(call, f"... i, {', '.join(names)}{bias} -> ... o", replicate=" ".join(["i", "o", *names]))


@register_rule_function(aten.linalg_matmul.default, aten.matmul.default)
def _matmul_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of matmul, which sums over i, for vectors, matrices and batches of matrices."""
    text_of = {  # (the first operand is a vector, the second one is a vector)
        (True, True): "i, i -> ",
        (True, False): "i, ... i m -> ... m",
        (False, True): "... n i, i -> ... n",
        (False, False): "... n i, ... i m -> ... n m",
    }
    return bind_rule(call, text_of[call.ndim(0) == 1, call.ndim(1) == 1], sum="i")


@register_rule_function(aten.einsum.default)
def _einsum_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of an einsum, whose factors are the labels of the equation: "bi,io->bo" is "b i, i o -> b o".

    Labels that are not in the result are summed over. None if an operand has a label twice (a diagonal), if the
    equation has another number of operands than the call, or if it sums over the dims of "...".
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
    only_permutes = len(operands) == 1 and not contracted  # `lazy`: it only moves data, so it starts no sequence
    return bind_rule(call, text, sum=" ".join(sorted(contracted)), lazy=only_permutes)


def _equation_labels(group: str) -> list[str]:
    """Return the labels of one operand or result of an equation: "ab...c" is ["a", "b", "...", "c"]."""
    head, dots, tail = group.partition("...")
    return [*head, *([dots] if dots else []), *tail]
