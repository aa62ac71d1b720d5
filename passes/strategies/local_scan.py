"""Run scans of local rows that are slow in torch by the kernels of the package.

    cumsum(x, 0)    ->   sp.scan(x, None, 0, "sum")      x: (T, E): torch processes one column at a time

The lowering table (`lowering/scan/scan_table.py`) defines slow scans: any scan that it does not lower to torch. Applies
to any number of ranks, and to graphs without a sequence. Bytes moved: none. Unchanged: small tensors, and dtypes
without scans in the package.
"""

from __future__ import annotations

import math

from torch.fx import GraphModule, Node

from sp_compile.lowering.scan.monoids import accumulate_dtype
from sp_compile.lowering.scan.scan_table import ScanProblem, is_torch_lowering
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.base import Pass
from sp_compile.passes.canonical.scan_forms.scan_calls import CUMULATIVE_OPS, TORCH_SCANS, is_scannable_call, to_sp_scan
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall

MIN_ELEMENTS = 1 << 14  # of a scan that is replaced; smaller scans are dominated by the overhead of a call


class UseFastScans(Pass):
    """Replacement of torch's scans that need no exchange."""

    requires = frozenset({"no demands"})
    provides = frozenset({"planned"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace the scans that need no exchange and are slow in torch; return their number."""
        demanding = {demand.node for demand in context.plan(gm).demands}
        scans = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in TORCH_SCANS]
        slow_scans = [n for n in scans if n not in demanding and is_slow(n)]
        for node in slow_scans:
            new = to_sp_scan(self, node)
            self.note(new, f"{TORCH_SCANS[node.target]} along dim {OpCall(new).dim()}, which is slow in torch", "scan")
        return len(slow_scans)


def is_slow(node: Node) -> bool:
    """Return True for a large scan of torch for which the lowering table selects a faster kernel of the package."""
    call = OpCall(node)
    result, dim, op = call.results()[0], call.dim(), TORCH_SCANS[node.target]
    shape = [size_hint(size) for size in result.shape]
    if math.prod(shape) < MIN_ELEMENTS or not is_scannable_call(call):
        return False
    kind = "scan" if node.target in CUMULATIVE_OPS else "extremes"
    outer, length, inner = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    dtypes = (call.operands[0].meta["val"].dtype, result.dtype, accumulate_dtype(op, result.dtype, result.device))
    # total=False: the combination of all rows is not needed as a second result.
    problem = ScanProblem(kind, result.device.type, outer, length, inner, *dtypes, op=op, total=False)
    return not is_torch_lowering(problem)
