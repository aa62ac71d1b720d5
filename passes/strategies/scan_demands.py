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

`UseFastScans` runs scans of local rows that are slow in torch by the kernels of the package.

    cumsum(x, 0)    ->   sp.scan(x, None, 0, "sum")      x: (T, E): torch processes one column at a time

The lowering table (`lowering/scan/scan_table.py`) defines slow scans: any scan that it does not lower to torch. Applies
to any number of ranks, and to graphs without a sequence. Bytes moved: none. Unchanged: small tensors, and dtypes
without scans in the package.
"""

from __future__ import annotations

import math

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from sp_compile.lowering.scan.linear_attention import LINEAR_ATTENTION_OPS
from sp_compile.lowering.scan.monoids import accumulate_dtype
from sp_compile.lowering.scan.scan_table import ScanProblem, is_torch_lowering
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.base import Pass
from sp_compile.passes.canonical.scan_forms.scan_calls import (
    CUMULATIVE_OPS,
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
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import as_sizes, is_same_size
from sp_compile.passes.sharding.placement import Demand, PlacementPlan, Shard

from .discharge import DemandPass

aten, sp = torch.ops.aten, torch.ops.sp
COMBINE_OPS = {
    "sum": aten.add.Tensor,
    "prod": aten.mul.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}
MIN_SCAN_ELEMENTS = 1 << 14  # of a scan that is replaced; smaller scans are dominated by the overhead of a call


class SplitNestedScans(DemandPass):
    """Split of scans along a dim of several factors."""

    provides = frozenset({"claimed", "flat scans"})
    kinds = frozenset({"scan"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Split scans until each runs along the sequence only; return the number of splits.

        A scan of a dim (batch, sequence, choices of a token) takes two splits.
        """
        total_splits, splits = 0, super().apply(gm, context)
        while splits:
            total_splits += splits
            context.invalidate()  # the plan is computed again for the rewritten graph
            splits = super().apply(gm, context)
        return total_splits

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass)."""
        return "" if scan_shard(self.plan, node).is_only_factor else _unsupported_reason(node)

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a scan along a flattened dim, such as (batch, sequence), by scans along both factors."""
        shard = scan_shard(self.plan, node)
        flat_scan = to_sp_scan(self, node)
        with self.graph.inserting_before(flat_scan):
            result = self._scan_both_factors(flat_scan, shard)
        self.replace(flat_scan, result)
        self.note(result, f"a scan of {shard.frame.length} positions within a dim of {shard}")

    def _scan_both_factors(self, node: Node, shard: Shard) -> Node:
        """Emit a scan along the inner factor of a dim, one of its totals along the outer factor, and their combination.

        For cumsum of a dim (B, S), y = cumsum(x, S) scans each sequence, and the totals of the sequences before each
        one, an exclusive scan of y[:, -1] along B, are added.

        Args:
            node: An `sp.scan` along the dim.
            shard: The placement of its operand, whose dim is outer * sequence * inner.

        Returns:
            The node of the combination.
        """
        call, value = OpCall(node), node.meta["val"]
        dim, op, exclusive, reverse = call.dim(), call["op"], call["exclusive"], call["reverse"]
        # Unflatten the dim: (batch, sequence), or (batch * sequence, choices) if each position has several elements.
        length, has_choices = shard.frame.length, not is_same_size(shard.inner, 1)
        factors = (shard.outer * length, shard.inner) if has_choices else (shard.outer, length)
        shape = as_sizes(value.shape)
        # The sum of the two scans is in the dtype of accumulation, so that it is rounded only once, as for one scan.
        dtype = call["accumulate"] if op in ("sum", "prod") else None
        x = self.cast(call.operands[0], dtype or accumulate_dtype(op, value.dtype, value.device), node)
        x = self.reshape(x, (*shape[:dim], *factors, *shape[dim + 1 :]), node)
        inner_scan = emit_scan(self, x, dim + 1, op, x.meta["val"], node, exclusive, reverse)
        inclusive = self.compute(COMBINE_OPS[op], (inner_scan, x), node) if exclusive else inner_scan
        totals = self.compute(aten.select.int, (inclusive, dim + 1, 0 if reverse else -1), node)
        # For each row of `dim`, the total of all rows before it (after it, for a reversed scan).
        before = emit_scan(self, totals, dim, op, totals.meta["val"], node, exclusive=True, reverse=reverse)
        # is_aside: this scan, along the batch or the choices, is no evidence that its dim is a sequence.
        set_node_info(inner_scan if has_choices else before, is_aside=True)
        before = self.compute(aten.unsqueeze.default, (before, dim + 1), node)
        result = self.compute(COMBINE_OPS[op], (before, inner_scan), node)
        return self.cast(self.reshape(result, shape, node), value.dtype, node)


def scan_shard(plan: PlacementPlan, node: Node) -> Shard:
    """Return the placement that a scan needs of its operand to run on shards: the only Shard in `plan.wants`."""
    return next(want for want in plan.wants[node] if isinstance(want, Shard))


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


class ShardScans(DemandPass):
    """Exchange of the carries of scans.

    Direct use: `ShardScans(1)(graph_module)` replaces the slow scans of any graph: large ones for which the package has
    a faster kernel than torch (`UseFastScans`).
    """

    requires = DemandPass.requires | {"flat scans"}
    kinds = frozenset({"scan"})

    def call(self, graph_module: GraphModule) -> PassResult:
        """Run the pass on a graph module, then replace slow scans without an exchange by the kernels of the package."""
        modified = super().call(graph_module).modified
        return PassResult(graph_module, UseFastScans(self.context)(graph_module).modified or modified)

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass)."""
        if node.target not in (*SP_SCANS, *TORCH_SCANS):
            return "no scan over shards is defined for this op"
        if not is_scannable_call(OpCall(node)):
            return f"scans do not support {OpCall(node).results()[0].dtype} on shards"
        shard = scan_shard(self.plan, node)
        if shard.frame.order.is_balanced:
            return f"the rows before each row are on other ranks in the {shard.frame.order.name} layout"
        return None if shard.is_only_factor else ""  # a dim of several factors is for `SplitNestedScans`

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Set the frame of a scan, so that it runs on shards, and the exchange by which ranks send their carries.

        A carry is the total of the rows of a rank, which later ranks add to their scans.
        """
        shard = scan_shard(self.plan, node)
        scan = to_sp_scan(self, node)
        call, ranks, folds = OpCall(scan), self.context.ranks, shard.frame.folds
        carry_bytes, _ = message_bytes(call, folds, size_hint)  # of the forward
        # The exchange is one all-gather, or steps in which each rank sends to the rank 1, 2, 4, ... after it.
        supports_steps = scan.target not in (sp.affine_scan.default, *LINEAR_ATTENTION_OPS)
        cost = choose_exchange(int(carry_bytes), ranks.n, self.context.machine_of(scan), folds, supports_steps)
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


class UseFastScans(Pass):
    """Replacement of torch's scans that need no exchange."""

    requires = frozenset({"no demands"})
    provides = frozenset({"planned"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace the scans that need no exchange and are slow in torch; return their number."""
        demanding = {demand.node for demand in context.plan(gm).demands}
        scans = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in TORCH_SCANS]
        slow_scans = [n for n in scans if n not in demanding and is_slow_scan(n)]
        for node in slow_scans:
            new = to_sp_scan(self, node)
            self.note(new, f"{TORCH_SCANS[node.target]} along dim {OpCall(new).dim()}, which is slow in torch", "scan")
        return len(slow_scans)


def is_slow_scan(node: Node) -> bool:
    """Return True for a large scan of torch for which the lowering table selects a faster kernel of the package."""
    call = OpCall(node)
    result, dim, op = call.results()[0], call.dim(), TORCH_SCANS[node.target]
    shape = [size_hint(size) for size in result.shape]
    if math.prod(shape) < MIN_SCAN_ELEMENTS or not is_scannable_call(call):
        return False
    kind = "scan" if node.target in CUMULATIVE_OPS else "extremes"
    outer, length, inner = math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])
    dtypes = (call.operands[0].meta["val"].dtype, result.dtype, accumulate_dtype(op, result.dtype, result.device))
    # total=False: the combination of all rows is not needed as a second result.
    problem = ScanProblem(kind, result.device.type, outer, length, inner, *dtypes, op=op, total=False)
    return not is_torch_lowering(problem)
