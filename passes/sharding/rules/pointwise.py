"""Rules of elementwise ops with broadcasting: all ops with the tag pointwise, and ops that lack it.

"..., ... -> ..." is the rule of an op with two operands: "..." is any number of dims, aligned at the last one, and all
of them pass, so that each rank computes its rows. A lazy op only moves or casts elements, so it is no reason to shard a
replicated operand. A rule function returns the rule of a call, or None: the call then runs on gathered operands.

Padded rows fill up shards to equal lengths. They are finite, except rows that a slice cuts off (x[:, 1:] remains the
same local rows). SMOOTH_OPS are finite, with finite derivatives, if their operands are, so they may read any finite
padded rows. Any other op may fail on them, or turn a zero cotangent into 0 * inf (the square root of a zero).
`passes/localize/fill_padding.py` restores the padded rows before such ops.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from sp_compile.lowering import token_functions  # noqa: F401  (defines an op)
from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.sharding.rule import POINTWISE, BoundRule, register_rule_function, rule, rule_of

from ._build import along_dims, bind_rule, factor_names

aten = torch.ops.aten

LAZY_OPS = parse_overloads("""
    alias clone contiguous detach empty_like full_like lift lift_fresh lift_fresh_copy ones_like rand_like
    randint_like randint_like.low_dtype randn_like to.device to.dtype to.dtype_layout _to_copy zeros_like
""") + [torch.ops.prims.convert_element_type.default]


def pointwise_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of an elementwise op, "..., ... -> ..." for two operands: all dims pass; None without tensors.

    It is registered for torch's tag `pointwise`, so it is the rule of all ops with this tag and no other rule.
    """
    if not call.operands or not call.results():
        return None
    operands = ", ".join("..." for _ in call.operands)
    results = ", ".join("..." for _ in call.results())
    return bind_rule(call, f"{operands} -> {results}", lazy=call.node.target in LAZY_OPS)


UNTAGGED_OPS = parse_overloads("""
    __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor _conj absolute alpha_dropout arccos arccosh
    arcsin arcsinh arctan arctan2 arctanh complex conj divide.Scalar divide.Tensor divide.Tensor_mode
    dropout fill.Scalar fill.Tensor fix float_power.Scalar float_power.Tensor_Scalar
    float_power.Tensor_Tensor floor_divide.Scalar floor_divide greater.Scalar greater.Tensor
    greater_equal.Scalar greater_equal.Tensor hardswish imag isclose isreal less.Scalar less.Tensor
    less_equal.Scalar less_equal.Tensor log_sigmoid masked_fill.Tensor multiply.Scalar multiply.Tensor
    native_dropout negative not_equal.Scalar not_equal.Tensor polar real resolve_conj resolve_neg rrelu
    rsub.Tensor special_digamma special_erf special_erfc special_exp2 special_expit special_expm1
    special_gammaln special_i0 special_log1p special_logit special_ndtr special_round special_sinc
    special_xlogy subtract.Scalar subtract.Tensor true_divide.Scalar where.Scalar where.ScalarOther
    where.ScalarSelf where.self
""")
register_rule_function(POINTWISE, *LAZY_OPS, *UNTAGGED_OPS, torch.ops.sp.token_function.default)(pointwise_rule)

rule(aten.copy.default, "..., ... -> ...")
rule([aten.feature_alpha_dropout.default, aten.feature_dropout.default], "n c ... -> n c ...", replicate="...")
rule(aten.prelu.default, "n c ..., c -> n c ...")


@register_rule_function(aten.to.other, aten.type_as.default)
def _like_other_rule(call: OpCall) -> BoundRule | None:
    """Return the rule of x.to(other) or x.type_as(other), a cast to the dtype and device of `other`.

    Operands of equal shape are sharded together; else `other` is gathered, because the shapes need not broadcast.
    """
    if call.shape(0) == call.shape(1):
        return bind_rule(call, "..., ... -> ...", lazy=True)
    # The dims of `other` are of the kind "replicate": they are not sharded.
    dims, other = factor_names(call.ndim()), factor_names(call.ndim(1), "other")
    return BoundRule((dims, other), (dims,), dict.fromkeys(other, "replicate"), lazy=True)


@register_rule_function(aten.view.dtype)
def _view_dtype_rule(call: OpCall) -> BoundRule:
    """Return the rule of x.view(dtype), which gathers the last dim if its size changes with the item size."""
    if call.results()[0].element_size() == call.operands[0].meta["val"].element_size():
        return along_dims(call, (), lazy=True)
    last = call.ndim() - 1
    return along_dims(call, [last], (*factor_names(last), "new"), lazy=True)


SMOOTH_OPS = parse_overloads("""
    add.Tensor addmm baddbmm bmm cos cross_entropy_loss dropout einsum gelu layer_norm linear
    log_softmax.int masked_fill.Scalar matmul mean mean.dim mm mse_loss mul.Scalar mul.Tensor neg
    nll_loss_nd relu rms_norm sigmoid silu sin softmax.int sub.Tensor sum sum.dim_IntList tanh
""")


def is_smooth(node: Node) -> bool:
    """Return True if the call is finite, with finite derivatives, wherever its operands are finite.

    Padded rows, which fill up shards to equal lengths, may have any finite values before such an op.
    """
    rule = rule_of(node)
    if rule is None or not (rule.lazy or node.target in SMOOTH_OPS):
        return False
    call = OpCall(node)
    eps = call.get("eps")  # of norms
    is_infinite = any(isinstance(x, float) and not math.isfinite(x) for x in call.args.values())  # as in x + inf
    if is_infinite and node.target is not aten.full_like.default:  # which reads no element
        return False
    return eps is None or eps > 0


def is_pure_move(node: Node) -> bool:
    """Return True if the op only moves or casts elements, and is smooth (`is_smooth`).

    Padded rows before such an op may even be infinite or NaN, because it does not mix them with valid rows.
    """
    rule = rule_of(node)
    return rule is not None and rule.lazy and is_smooth(node)
