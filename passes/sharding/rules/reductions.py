"""Rules of reductions along dims (sum, mean, max, var, ..), and of sorts, topk and diff, which read all of a dim.

A rule names the dims of a call's operands and results; it lets the passes run the call on shards. A reduced dim has a
kind: for "sum" and "mean" each rank reduces its rows, and the results are added later. For "whole" the dim is gathered
before the call, because the results of parts do not add up. The other dims pass, they may remain sharded. See
`sharding/rule.py`.
"""

from __future__ import annotations

import torch

from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.sharding.rule import BoundRule, RuleFunction, register_rule_function

from ._build import along_dims, factor_names, gathered_dims, normalize_dims, replace_dims, resize_dims

aten = torch.ops.aten


def _reduce_rule(kind: str) -> RuleFunction:
    """Return a rule function that reduces `dim` (default: all dims); dims kept by `keepdim` have no name."""

    def instantiate(call: OpCall) -> BoundRule | None:
        """Return the rule of a reduction, or None if it returns other dims than its arguments define."""
        names = factor_names(call.ndim())
        dims = normalize_dims(call.get("dim"), len(names)) if names else ()
        with_keepdim = replace_dims(names, dims, "")
        result = with_keepdim if call.get("keepdim") else tuple(f for f in with_keepdim if f)
        if len(result) != call.results()[0].ndim:  # all.dims reduces no dims for [], other ops reduce all
            return None
        return along_dims(call, dims, result, kind)

    return instantiate


_REDUCTION_KINDS = parse_overloads("""
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
register_rule_function(*_REDUCTION_KINDS)(_reduce_rule("whole"))

register_rule_function(aten.argsort.default, aten.argsort.stable, aten.sort.default, aten.sort.stable)(gathered_dims)
register_rule_function(aten.topk.default)(resize_dims("dim"))


@register_rule_function(aten.diff.default)
def _diff_rule(call: OpCall) -> BoundRule:
    """Return the rule of differences along a dim, with optional rows before and after it."""
    names, dim = factor_names(call.ndim()), call.dim()
    operands = tuple(replace_dims(names, [dim], f"operand{i}_") for i in range(len(call.operands)))
    return BoundRule(operands, (replace_dims(names, [dim], "new"),), {operand[dim]: "whole" for operand in operands})
