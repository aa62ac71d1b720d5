"""Rows of an identity matrix become comparisons, which a rank makes of its own rows: one-hot targets.

    eye(V)[ids]          ->  arange(V)[ids][..., None] == arange(V), in eye's dtype
    index_select(eye(V), 0, ids)

Also of an eye that was cast. The numbers are still read at the ids, so that negative ones count from the end, and what
is out of range is the same error. Leaves alone: eye in products, and what reads its columns, or reads it by masks.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.graph.call import Call, shape_of
from sp_compile.passes.base import Spelling, register
from sp_compile.passes.job import Job
from sp_compile.sharding.matchers import behind, is_cast, is_copy

aten = torch.ops.aten
READS = (aten.index.Tensor, aten.index_select.default)
TABLES = (aten.eye.default, aten.eye.m)


@register
class OneHotRows(Spelling):
    """Rewrites what reads rows of an identity matrix in one graph."""

    requires = frozenset({"explicit"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        found = [node for op in READS for node in gm.graph.find_nodes(op="call_function", target=op) if _is_read(node)]
        for node in found:
            self._respell(node)
        return len(found)

    def _respell(self, node: Node) -> None:
        (table, ids), value = Call(node).operands, node.meta["val"]
        device = {"device": value.device}
        with self.graph.inserting_before(node):
            rows, columns = (
                self.compute(aten.arange.default, (self.sizes(extent),), node, device) for extent in shape_of(table)
            )
            options = ([ids],) if node.target is aten.index.Tensor else (0, ids)
            classes = self.compute(node.target, (rows, *options), node)
            each = self.compute(aten.unsqueeze.default, (classes, -1), node)
            here = self.compute(aten.eq.Tensor, (each, columns), node)
            self.replace(node, self.cast(here, value.dtype, node))


def _is_read(node: Node) -> bool:
    """Does it read rows of an identity matrix, at integers?"""
    call = Call(node)
    if len(call.operands) != 2 or call.get("dim", 0) != 0 or (call.get("indices") or [call.operands[1]])[0] is None:
        return False
    table, ids = call.operands
    found = behind(table, lambda n: is_cast(n) or is_copy(n))
    return found.target in TABLES and ids.meta["val"].dtype in (torch.int64, torch.int32)
