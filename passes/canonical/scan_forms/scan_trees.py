"""Mark scans by an unknown function: leaves are gathered once, and all ranks compute the result.

    torch.associative_scan(combine_mode="generic") of complex numbers, online softmax, matrices, a running argmax
        tracing unrolls it into a tree of combinations (`unrolled_scans.py`), whose ops have the mark of their call
    torch.associative_scan, torch.scan as one op

The scanned values are the *leaves*. Runs after all rewrites of scans and marks the remaining ones: propagation gathers
the operands of marked nodes. The sequence is found by its dim, and the ops of a tree form one region, inside of which
no new sequence begins. Bytes moved: those of the gather of the leaves.
"""

from __future__ import annotations

from torch.fx import GraphModule

from sp_compile.lowering.torch_compat import associative_scan_op, scan_op
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.node_info import find_scan_calls, set_node_info
from sp_compile.passes.graph.sizes import is_same_size
from sp_compile.passes.sharding.matchers import match_piece

NO_SCAN_REASON = (
    "it combines rows by a function that is no sum, product, maximum, minimum, log-sum-exp or linear recurrence of "
    "real numbers, so its leaves are gathered, once"
)
SCANNED_OPS = {associative_scan_op: 1, scan_op: 2}  # index of the argument with the scanned values, along dim 0


@register_pass
class MarkScanTrees(CanonicalPass):
    """Marking of the remaining scans of one graph."""

    requires = frozenset({"scans"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Mark the remaining scan ops and unrolled scans, so that their operands are gathered once.

        Returns the number of unrolled scans, without the marked scan ops. The mark `scanned`, the index of an argument
        and the dim along which it is scanned, is evidence that the dim is a sequence.
        """
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target in SCANNED_OPS:
                set_node_info(node, scanned=(SCANNED_OPS[node.target], 0))
        calls = find_scan_calls(gm.graph)
        for nodes in calls.values():
            for node in nodes:
                # Propagation gathers the operands of a node with `no_rule`, which is the reason. `scanned` makes a dim
                # of operand 0 a sequence. Each leaf has one slice of its odd rows, x[1::2].
                piece = match_piece(node)
                is_odd_rows = piece is not None and piece.step == 2 and is_same_size(piece.start, 1)
                scanned = (0, piece.dim) if piece is not None and is_odd_rows and piece.source not in nodes else None
                set_node_info(node, no_rule=NO_SCAN_REASON, scanned=scanned)
        return len(calls)
