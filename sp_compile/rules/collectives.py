"""Collectives of the user's program over other ranks than those that share the sequence: each row by itself.

A node that exchanges with ranks which hold other rows has no rule; see `weights.mark_across`. Those over the very ranks
of the pass are no business of a rule either; see `tensor_parallel.spell`.
"""

from __future__ import annotations

import torch

from ..rule import Call, Factors, rule_of
from ._build import bind

c10d, sp = torch.ops._c10d_functional, torch.ops.sp


@rule_of(c10d.all_reduce.default, c10d.broadcast.default, c10d.wait_tensor.default, sp.reduce_pair.default)
def _row_wise(call: Call) -> Factors | None:
    return None if "sp_no_rule" in call.node.meta else bind(call, "... -> ...", lazy=True)


@rule_of(
    c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default
)
def _along_the_first(call: Call) -> Factors | None:
    return None if "sp_no_rule" in call.node.meta else bind(call, "a ... -> c ...", whole="a")
