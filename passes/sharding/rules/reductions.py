"""Rules of reductions (sum, mean, max, var, ..), and of sort, topk and diff, which read all of a dim.

A rule names the dims of the operands and results of a call, and gives some a kind. A reduced dim of kind "sum" or
"mean" may be sharded: each rank reduces its rows, and the ranks' results are added later. A dim of kind "replicate" is
gathered before the call, as ranks' results cannot be added. Other dims pass: they remain sharded.

A rule function returns the rule of a call, or None: the call then runs on gathered operands.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.sharding.placement import REPLICATE
from sp_compile.passes.sharding.rule import BoundRule, RuleFunction, register_rule_function

from ._build import along_dims, factor_names, gathered_dims, normalize_dims, replace_dims, resize_dims
from .exchange_rules import call_shard

aten, sp = torch.ops.aten, torch.ops.sp


def _reduce_rule(kind: str) -> RuleFunction:
    """Return a rule function for ops that reduce the argument `dim`, or all dims without one.

    Args:
        kind: Kind of the reduced dims: "sum", "mean", or "replicate" to gather them.
    """

    def instantiate(call: OpCall) -> BoundRule | None:
        """Return the rule of a call; None for all(x, dim=[]), which reduces no dims where other ops reduce all."""
        names = factor_names(call.ndim())
        dims = normalize_dims(call.get("dim"), len(names)) if names else ()
        kept = replace_dims(names, dims, "")  # with keepdim, a reduced dim has size 1, and the name ""
        result = kept if call.get("keepdim") else tuple(f for f in kept if f)
        if len(result) != call.results()[0].ndim:
            return None
        return along_dims(call, dims, result, kind)

    return instantiate


_GATHERED_REDUCTIONS = parse_overloads("""
    all all.dim all.dims amax amin aminmax any any.dim any.dims argmax argmin kthvalue linalg_vector_norm
    logsumexp max max.dim median median.dim min min.dim mode nanmean nanmedian nanmedian.dim norm.Scalar
    norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype prod prod.dim_int special_logsumexp
    std.correction std std.dim std_mean.correction std_mean std_mean.dim var.correction var var.dim
    var_mean.correction var_mean var_mean.dim
""")
register_rule_function(*parse_overloads("mean mean.dim"))(_reduce_rule("mean"))
register_rule_function(*parse_overloads("count_nonzero count_nonzero.dim_IntList nansum sum sum.dim_IntList"))(
    _reduce_rule("sum")
)
register_rule_function(*_GATHERED_REDUCTIONS)(_reduce_rule("replicate"))

register_rule_function(aten.argsort.default, aten.argsort.stable, aten.sort.default, aten.sort.stable)(gathered_dims)
register_rule_function(aten.topk.default)(resize_dims("dim"))


@register_rule_function(aten.diff.default)
def _diff_rule(call: OpCall) -> BoundRule:
    """Return the rule of diff, which gathers the dim of the differences; all other dims pass.

    Further operands are rows that torch prepends or appends to x.
    """
    names, dim = factor_names(call.ndim()), call.dim()
    operands = tuple(replace_dims(names, [dim], f"operand{i}_") for i in range(len(call.operands)))
    return BoundRule(
        operands, (replace_dims(names, [dim], "new"),), {operand[dim]: "replicate" for operand in operands}
    )


@register_rule_function(sp.extreme.default)
def _extreme_rule(call: OpCall) -> BoundRule:
    """Return the rule of sp::extreme, the maximum over `dims`, of which `dim` is sharded as the frame describes.

    The op runs on shards, and its result is the maximum over all ranks, replicated.
    """
    names, dims = factor_names(call.ndim()), call["dims"]
    kept = replace_dims(names, dims, "")
    result = kept if call["keepdim"] else tuple(f for f in kept if f)
    # `operand_placements`: a pass has inserted the op for an operand on shards, so that "replicate" gathers nothing
    # here.
    kinds = {names[d]: "replicate" for d in dims}
    wants = (call_shard(call, call["dim"]),)
    return BoundRule((names,), (result,), kinds, operand_placements=wants, result_placements=REPLICATE)
