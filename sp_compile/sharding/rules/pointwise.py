"""Ops that act on each element alone, with broadcasting: whatever is tagged pointwise, and what torch forgot to tag.

Ops whose derivative is finite wherever their value is.

A slice of a sharded sequence keeps the rows that it cuts off: the same local value, under a shorter window. One device
never computes on those rows. Behind the ops listed here that does no harm: their cotangents are zero and stay so. Any
other op may turn them into 0 * inf (the square root of a zero), so `passes/localize` replaces the rows first.
"""

from __future__ import annotations

import torch

from sp_compile.graph.call import Call
from sp_compile.sharding.rule import POINTWISE, Factors, rule, rule_of

from ._build import bind, names

aten = torch.ops.aten

LAZY = {
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.ones_like.default,
    aten.rand_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randn_like.default,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
    aten.zeros_like.default,
}


def pointwise_rule(call: Call) -> Factors | None:
    """Every operand and every result "...", whatever the number of tensor operands. (aten.equal gives a bool.)"""
    if not call.operands or not call.results():
        return None
    operands = ", ".join("..." for _ in call.operands)
    results = ", ".join("..." for _ in call.results())
    return bind(call, f"{operands} -> {results}", lazy=call.node.target in LAZY)


UNTAGGED = (
    aten.__and__.Scalar,
    aten.__and__.Tensor,
    aten.__or__.Scalar,
    aten.__or__.Tensor,
    aten._conj.default,
    aten._to_copy.default,
    aten.absolute.default,
    aten.alias.default,
    aten.alpha_dropout.default,
    aten.arccos.default,
    aten.arccosh.default,
    aten.arcsin.default,
    aten.arcsinh.default,
    aten.arctan.default,
    aten.arctan2.default,
    aten.arctanh.default,
    aten.clone.default,
    aten.complex.default,
    aten.conj.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.divide.Scalar,
    aten.divide.Tensor,
    aten.divide.Tensor_mode,
    aten.dropout.default,
    aten.empty_like.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.fix.default,
    aten.float_power.Scalar,
    aten.float_power.Tensor_Scalar,
    aten.float_power.Tensor_Tensor,
    aten.floor_divide.Scalar,
    aten.floor_divide.default,
    aten.full_like.default,
    aten.greater.Scalar,
    aten.greater.Tensor,
    aten.greater_equal.Scalar,
    aten.greater_equal.Tensor,
    aten.hardswish.default,
    aten.imag.default,
    aten.isclose.default,
    aten.isreal.default,
    aten.less.Scalar,
    aten.less.Tensor,
    aten.less_equal.Scalar,
    aten.less_equal.Tensor,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.log_sigmoid.default,
    aten.masked_fill.Tensor,
    aten.multiply.Scalar,
    aten.multiply.Tensor,
    aten.native_dropout.default,
    aten.negative.default,
    aten.not_equal.Scalar,
    aten.not_equal.Tensor,
    aten.ones_like.default,
    aten.polar.default,
    aten.rand_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.randn_like.default,
    aten.real.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten.rrelu.default,
    aten.rsub.Tensor,
    aten.special_digamma.default,
    aten.special_erf.default,
    aten.special_erfc.default,
    aten.special_exp2.default,
    aten.special_expit.default,
    aten.special_expm1.default,
    aten.special_gammaln.default,
    aten.special_i0.default,
    aten.special_log1p.default,
    aten.special_logit.default,
    aten.special_ndtr.default,
    aten.special_round.default,
    aten.special_sinc.default,
    aten.special_xlogy.default,
    aten.subtract.Scalar,
    aten.subtract.Tensor,
    aten.to.device,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.true_divide.Scalar,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.self,
    aten.zeros_like.default,
)
rule_of(POINTWISE, *UNTAGGED)(pointwise_rule)

rule(aten.copy.default, "..., ... -> ...")
rule([aten.feature_alpha_dropout.default, aten.feature_dropout.default], "n c ... -> n c ...", whole="...")
rule(aten.prelu.default, "n c ..., c -> n c ...")


@rule_of(aten.to.other, aten.type_as.default)
def _like_other(call: Call) -> Factors | None:
    """Only the dtype and the device of the other operand are read, and it need not broadcast."""
    if call.shape(0) == call.shape(1):
        return bind(call, "..., ... -> ...", lazy=True)
    dims, other = names(call.ndim()), names(call.ndim(1), "other")
    return Factors((dims, other), (dims,), dict.fromkeys(other, "whole"), lazy=True)


@rule_of(aten.view.dtype)
def _view_dtype(call: Call) -> Factors:
    """Another item size changes the last dim."""
    dims = names(call.ndim())
    if call.results()[0].element_size() == call.operands[0].meta["val"].element_size():
        return Factors((dims,), (dims,), lazy=True)
    return Factors((dims,), ((*dims[:-1], "new"),), {dims[-1]: "whole"}, lazy=True)


SMOOTH = frozenset(
    {
        aten.add.Tensor,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.cos.default,
        aten.cross_entropy_loss.default,
        aten.dropout.default,
        aten.einsum.default,
        aten.gelu.default,
        aten.layer_norm.default,
        aten.linear.default,
        aten.log_softmax.int,
        aten.masked_fill.Scalar,
        aten.matmul.default,
        aten.mean.default,
        aten.mean.dim,
        aten.mm.default,
        aten.mse_loss.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.nll_loss_nd.default,
        aten.relu.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.sin.default,
        aten.softmax.int,
        aten.sub.Tensor,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.tanh.default,
        aten.where.self,
    }
)
