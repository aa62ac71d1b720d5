"""Blocks of rows that a tensor-parallel program takes and puts together itself: see lowering/rows.py.

A block is one of n equal ones, whatever rows it has, so that a view of the rows as batch and sequence keeps it.
"""

from __future__ import annotations

import torch

from ..layout import VARYING, Frame, Shard
from ..rule import Call, Factors, rule_of
from ._build import names, replaced

sp = torch.ops.sp


@rule_of(sp.own_rows.default)
def _own_rows(call: Call) -> Factors:
    """A sharded value's block is what the rank holds."""
    dims, at = names(call.ndim()), call["dim"]
    want = Shard(at, Frame.full(call["n"]), inner=call.results()[0].shape[at])
    result = replaced(dims, [at], "block")
    return Factors((dims,), (result,), {dims[at]: "whole"}, wants=(want,), gives=VARYING, alias=True)


@rule_of(sp.all_rows.default)
def _all_rows(call: Call) -> Factors:
    """The ranks' blocks are a value that is sharded already."""
    dims, at = names(call.ndim()), call["dim"]
    gives = Shard(at, Frame.full(call["n"]), inner=call.shape()[at])
    result = replaced(dims, [at], "rows")
    return Factors((dims,), (result,), {dims[at]: "whole"}, wants=(VARYING,), gives=gives, alias=True)
