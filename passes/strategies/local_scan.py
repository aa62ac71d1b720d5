"""Scans that torch is slow at, of rows that are all here, by the package's own kernels.

    cumsum(x, 0)    ->   sp.scan(x, None, 0, "sum")      x: (T, E): torch walks down one column at a time

What is slow is for the lowering table to say (`lowering/scan/scan_table.py`): any scan that it would not hand to torch
itself. On any number of ranks, and on graphs without a sequence. Bytes moved: none. Leaves alone: small tensors, and
dtypes that have no scans here.
"""

from __future__ import annotations

import math

from torch.fx import GraphModule, Node

from sp_compile.lowering.scan.monoids import accumulate_dtype
from sp_compile.lowering.scan.scan_table import ScanProblem, is_torch_lowering
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.base import Pass
from sp_compile.passes.canonical.scan_calls import CUMULATIVE_OPS, TORCH_SCANS, is_scannable_call, to_sp_scan
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall

LARGE_CARRY = 1 << 14  # elements; below them the call is what takes time


class UseFastScans(Pass):
    """Takes torch's scans that nothing has to be exchanged for."""

    requires = frozenset({"no demands"})
    provides = frozenset({"planned"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Replace the slow ones."""
        waiting = {d.node for d in job.plan(gm).demands}
        nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in TORCH_SCANS]
        slow = [n for n in nodes if n not in waiting and is_slow(n)]
        for node in slow:
            fresh = to_sp_scan(self, node)
            why = f"{TORCH_SCANS[node.target]} along dim {OpCall(fresh).dim()}, which torch is slow at"
            self.note(fresh, why, "scan")
        return len(slow)


def is_slow(node: Node) -> bool:
    """Would the lowering table run the scan by anything but torch?"""
    call, result = OpCall(node), OpCall(node).results()[0]
    op, dim, extents = TORCH_SCANS[node.target], call.dim(), [size_hint(s) for s in result.shape]
    if math.prod(extents) < LARGE_CARRY or not extents or not is_scannable_call(call):
        return False
    wide = accumulate_dtype(op, result.dtype, result.device)
    kind = "scan" if node.target in CUMULATIVE_OPS else "extremes"
    outer, inner = (math.prod(part) for part in (extents[:dim], extents[dim + 1 :]))
    rows = (outer, extents[dim], inner)
    dtypes = (call.operands[0].meta["val"].dtype, result.dtype, wide)
    problem = ScanProblem(kind, result.device.type, *rows, *dtypes, op=op, total=False)
    return not is_torch_lowering(problem)
