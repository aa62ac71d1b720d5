"""Run scans along a sharded sequence on shards: only carries are exchanged.

    cumsum(x, S)       ->   sp.scan(x, None, S, "sum", ..., frame, exchange, n, group)
    cummax(x, S)       ->   sp.extremes(x, S, "max", ..., frame, exchange, n, group)
    sp.linear_scan(a, b, initial, S)   ->   the same with its frame, also sp.affine_scan, sp.linear_attention

A carry is the total of the rows of a rank, which later ranks add to their own scan. Also cumprod, cummin, logcumsumexp,
and sp.scan and sp.extremes without a frame, which come from idioms and user calls. One collective forward and one
backward. Bytes sent: (n - 1) * C, independent of S, where C is one row of the result in the accumulation dtype. Large
carries take ceil(log2 n) steps (cost/scan_cost.py). Unchanged (to be gathered): dims with more than the sequence (see
below), and dtypes without scans, such as complex numbers.

`SplitNestedScans` splits a scan along a dim of which the sequence is only a factor: a batch of sequences in one dim, or
choices of each token.

    cumsum(x: (B * S, ...), 0)      rows of one sequence, then the total of the sequences before it:
        y = sp.scan(x: (B, S, ...), 1);  y + sp.scan(y[:, -1], 0, exclusive)[:, None]
    cumsum(x: (S * K, ...), 0)      within each position, then over the positions:
        y = cumsum(x: (S, K, ...), 1);   y + sp.scan(y[:, -1], 0, exclusive)[:, None]

The remaining scans along S are for `ShardScans` and `select_row.py`. Bytes sent: those of one scan; for a batch also
one row of each sequence, from the rank that has it. Refuses: indices of extremes, segments and recurrences, and float
maxima and log-sum-exps, whose gradients would differ from those of the scan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from sp_compile.lowering.scan.linear_attention import LINEAR_ATTENTION_OPS
from sp_compile.lowering.scan.monoids import accumulate_dtype
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.canonical.scan_forms.scan_calls import (
    EXTREME_OPS,
    RECURRENCES,
    SP_SCANS,
    TORCH_SCANS,
    emit_scan,
    has_index_reader,
    is_scannable_call,
    to_sp_scan,
)
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.scan_cost import choose_exchange, message_bytes
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import as_sizes, is_same_size
from sp_compile.passes.sharding.placement import Demand, PlacementPlan, Shard

from .discharge import DemandPass
from .local_scan import UseFastScans

aten, sp = torch.ops.aten, torch.ops.sp
COMBINE_OPS = {
    "sum": aten.add.Tensor,
    "prod": aten.mul.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}


class SplitNestedScans(DemandPass):
    """Split of scans along a dim of several factors."""

    provides = frozenset({"claimed", "flat scans"})
    kinds = frozenset({"scan"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Split scans until each runs along the sequence only; return the number of splits.

        A scan of a dim (batch, sequence, choices of a token) takes two splits.
        """
        total_splits, splits = 0, super().apply(gm, job)
        while splits:
            total_splits += splits
            job.invalidate()
            splits = super().apply(gm, job)
        return total_splits

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass)."""
        return "" if is_only_sequence(scan_shard(self.plan, node)) else _unsupported_reason(node)

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a scan along a flattened dim, such as (batch, sequence), by scans along both factors."""
        shard = scan_shard(self.plan, node)
        flat_scan = to_sp_scan(self, node)
        with self.graph.inserting_before(flat_scan):
            result = _TwoLevelScan(self, flat_scan).run(shard)
        self.replace(flat_scan, result)
        self.note(result, f"a scan of {shard.frame.length} positions within a dim of {shard}")


def scan_shard(plan: PlacementPlan, node: Node) -> Shard:
    """Return the placement of the operand of a scan that runs on shards."""
    return next(want for want in plan.wants[node] if isinstance(want, Shard))


def is_only_sequence(shard: Shard) -> bool:
    """Return True if the sharded dim consists of the sequence only, without a batch or choices of tokens."""
    return is_same_size(shard.outer, 1) and is_same_size(shard.inner, 1)


def _unsupported_reason(node: Node) -> str | None:
    """Return the reason, for the report, why a scan along a flattened dim cannot be split into two; None if it can.

    The second scan adds totals to the results of the first one. For indices of extremes, segments and recurrences this
    is not possible; for float maxima and log-sum-exps, gradients would differ.
    """
    call = OpCall(node)
    op, value = TORCH_SCANS.get(node.target) or call.get("op", ""), call.results()[0]
    is_known = node.target in (sp.scan.default, *TORCH_SCANS) and is_scannable_call(call)
    reads_indices = node.target in EXTREME_OPS and has_index_reader(node)
    if not is_known or reads_indices or call.get("segments") is not None:
        return "its dim contains more than the sequence, and two scans cannot be combined"
    if op not in COMBINE_OPS or (op in ("max", "min") and value.is_floating_point()):
        return f"its dim contains more than the sequence, and a {op} of two scans has another gradient"
    return None


class _TwoLevelScan:
    """Scan along a flattened dim of two factors as a scan along the inner one, and one of its totals along the outer.

    For cumsum of a dim (B, S), y = cumsum(x, S) scans each sequence, and the totals of the sequences before each one,
    an exclusive scan of y[:, -1] along B, are added.

    Args:
        editor: Emits the nodes, before the scan.
        node: An `sp.scan` along the dim.
    """

    def __init__(self, editor: GraphEditor, node: Node) -> None:
        """Read the arguments of the scan, and determine the dtype of accumulation of both scans."""
        call = OpCall(node)
        self.editor, self.node, self.value = editor, node, node.meta["val"]
        self.x, self.dim, self.op = call.operands[0], call.dim(), call["op"]
        self.exclusive, self.reverse = call["exclusive"], call["reverse"]
        # The sum of the two scans is in this dtype, so that it is rounded only once, as the result of one scan.
        dtype = call["accumulate"] if self.op in ("sum", "prod") else None
        self.accumulate = dtype or accumulate_dtype(self.op, self.value.dtype, self.value.device)

    def run(self, shard: Shard) -> Node:
        """Emit the two scans and their combination, and return the node of the result.

        Args:
            shard: The placement of the operand, whose dim is outer * sequence * inner.
        """
        # Unflatten the dim: (batch, sequence), or (batch * sequence, choices) if each position has several elements.
        dim, length, has_choices = self.dim, shard.frame.length, not is_same_size(shard.inner, 1)
        factors = (shard.outer * length, shard.inner) if has_choices else (shard.outer, length)
        shape = as_sizes(self.value.shape)
        x = self.editor.cast(self.x, self.accumulate, self.node)
        x = self.editor.reshape(x, (*shape[:dim], *factors, *shape[dim + 1 :]), self.node)
        inner_scan, totals_before = self.two_levels(x, dim)
        set_node_info(inner_scan if has_choices else totals_before, is_aside=True)  # the one not along the sequence
        totals_before = self.call(aten.unsqueeze.default, totals_before, dim + 1)
        result = self.call(COMBINE_OPS[self.op], totals_before, inner_scan)
        return self.editor.cast(self.editor.reshape(result, shape, self.node), self.value.dtype, self.node)

    def two_levels(self, x: Node, dim: int) -> tuple[Node, Node]:
        """Emit the scan of x along dim + 1, and the exclusive scan of its totals along dim; return both.

        The second one has, for each row of `dim`, the total of all rows before it (after it, for a reversed scan).
        """
        inner_scan = self.scan(x, dim + 1, self.exclusive)
        inclusive = self.call(COMBINE_OPS[self.op], inner_scan, x) if self.exclusive else inner_scan
        totals = self.call(aten.select.int, inclusive, dim + 1, 0 if self.reverse else -1)
        return inner_scan, self.scan(totals, dim, exclusive=True)

    def scan(self, x: Node, dim: int, exclusive: bool) -> Node:
        """Emit a scan of x along one dim, with the op and the direction of the original scan."""
        return emit_scan(self.editor, x, dim, self.op, x.meta["val"], self.node, exclusive, self.reverse)

    def call(self, target: Any, *args: Any) -> Node:
        """Emit a call of an op at the position of the original scan, and return its node."""
        return self.editor.compute(target, args, self.node)


class ShardScans(DemandPass):
    """Exchange of the carries of scans.

    Direct use: `ShardScans(1)(graph_module)` replaces the slow scans of any graph: large ones for which the package has
    a faster kernel than torch (`local_scan.py`).
    """

    requires = DemandPass.requires | {"flat scans"}
    kinds = frozenset({"scan"})

    def call(self, graph_module: GraphModule) -> PassResult:
        """Run the pass on a graph module, then replace slow scans without an exchange by the kernels of the package."""
        modified = super().call(graph_module).modified
        return PassResult(graph_module, UseFastScans(self.job)(graph_module).modified or modified)

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass)."""
        if node.target not in (*SP_SCANS, *TORCH_SCANS):
            return "no scan over shards is defined for this op"
        if not is_scannable_call(OpCall(node)):
            return f"scans do not support {OpCall(node).results()[0].dtype} on shards"
        shard = scan_shard(self.plan, node)
        if shard.frame.order.is_balanced:
            return f"the rows before each row are on other ranks in the {shard.frame.order.name} layout"
        return None if is_only_sequence(shard) else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Set the frame of a scan, so that it runs on shards, and the exchange by which ranks send their carries.

        A carry is the total of the rows of a rank, which later ranks add to their scans.
        """
        shard = scan_shard(self.plan, node)
        scan = to_sp_scan(self, node)
        call, ranks, folds = OpCall(scan), self.job.ranks, shard.frame.folds
        carry_bytes, _ = message_bytes(call, folds, size_hint)  # of the forward
        # The exchange is one all-gather, or steps in which each rank sends to the rank 1, 2, 4, ... after it.
        supports_steps = scan.target not in (sp.affine_scan.default, *LINEAR_ATTENTION_OPS)
        cost = choose_exchange(int(carry_bytes), ranks.n, self.job.machine_of(scan), folds, supports_steps)
        options = {"exchange": cost.exchange, "n": ranks.n, "group": ranks.group}
        frame = self.sizes.list(shard.frame_arg())
        scan.args, scan.kwargs = call.with_operands(call.operands, frame=frame, **options)
        self.note(scan, f"{_describe_scan(call)} of {shard.frame.size} positions: {cost}")


def _describe_scan(call: OpCall) -> str:
    """Return the kind of a scan for the report, such as "inclusive sum, reversed,", or the name of a recurrence."""
    if call.node.target in RECURRENCES:
        name, kernel = RECURRENCES[call.node.target], call.get("kernel")
        return f"{name} {kernel}" if kernel else name
    kind = "exclusive" if call.get("exclusive") else "inclusive"
    return f"{kind} {call['op']}" + (", reversed," if call["reverse"] else "")
