"""The fallback: what no pass can do on shards is done on the whole, correctly, and reported.

    sp.unshard(x)      the node then runs alike on every rank; backward: each rank takes its slice of the gradient
    sp.all_gather(x)   the node goes on with shards of another operand; backward: a reduce-scatter

Bytes sent per rank: (n-1) times its shard of x. Refuses: everything, by name, under fallback="error".

Takes out exchanges that no longer fit: an exchange is an identity in the global view, so leaving it out is right.

    y = sp.unshard(x, dim=2)   where x is now sharded on dim 1   ->   y = x, and the demand is stated anew

A strategy writes its exchanges for the placements of one Plan. Discharging a demand upstream may move what lies
downstream of it. Bytes moved: none. Refuses nothing.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.context import NoteKind
from sp_compile.passes.graph.call import OpCall, is_tensor
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.propagate import SUMMAND_DEMAND
from sp_compile.passes.sharding.placement import Demand, Shard

from .discharge import DemandPass

sp = torch.ops.sp


class GatherOperands(DemandPass):
    """Claims every demand for a whole operand."""

    requires = DemandPass.requires | {"claimed"}  # by whoever does better
    provides = frozenset({"gathered"})
    kinds = frozenset({"whole", "align", "no rule", "attend", "scan", "halo", "invariant"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        if node.op == "output" or self.job.fallback == "gather" or all(d.kind == "invariant" for d in demands):
            return None
        reasons = "; ".join(self._gather_reason(d) for d in demands)
        raise SpError("SP305", f"fallback='error': {describe_node(node)} would be gathered: {reasons}.")

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        for demand in demands:
            if demand.kind == "invariant":
                self._regather(node, demand)
            else:
                self._gather(node, demand)

    def _regather(self, node: Node, demand: Demand) -> None:
        """What was gathered for a node on shards is used alike on every rank: the other pair of gradients."""
        gathered = demanded_operand(node, demand.operand)
        with self.insert_after(gathered):
            whole = self.emit(sp.unshard.default, gathered.args, gathered.meta["val"], node)
        replace_operand(node, demand.operand, whole)

    def _gather_reason(self, demand: Demand) -> str:
        operand = demanded_operand(demand.node, demand.operand)
        return f"{demand.why} (operand {operand.name}, global shape {list(operand.meta['val'].shape)})"

    def _gather(self, node: Node, demand: Demand) -> None:
        source = demanded_operand(node, demand.operand)
        have = self.plan.of(source)
        # Propagation is not to begin a sequence here, of what is gathered or was whole.
        set_node_info(node, replicated=True)
        if not isinstance(have, Shard):
            if have == SUMMAND_DEMAND:
                self._regather(node, demand)
            return
        op = sp.all_gather.default if demand.keeps_sharding else sp.unshard.default
        whole = next((u for u in source.users if u.target is op and u.args[0] is source), None)
        if whole is None:
            args = (source, have.dim, self.sizes.list(have.frame_arg()), self.job.ranks.n, self.job.ranks.group)
            with self.insert_after(source):
                whole = self.emit(op, args, source.meta["val"], node)
        replace_operand(node, demand.operand, whole)
        if node.op != "output":
            text = f"{demand.why} (global shape {list(source.meta['val'].shape)})"
            self.note(node, text, kind=NoteKind.GATHERED)


def demanded_operand(node: Node, index: int) -> Node:
    """The operand that a demand numbers."""
    if node.op == "output":
        return node.all_input_nodes[index]
    if isinstance(node.target, OpOverload):
        return OpCall(node).operands[index]
    return [a for a in node.all_input_nodes if is_tensor(a)][index]


def replace_operand(node: Node, index: int, new: Node) -> None:
    """Give the node another operand at the place that a demand numbers."""
    if node.op == "output" or not isinstance(node.target, OpOverload):
        node.replace_input_with(demanded_operand(node, index), new)
        return
    call = OpCall(node)
    operands = list(call.operands)
    operands[index] = new
    node.args, node.kwargs = call.with_operands(operands)


class RevertStaleExchanges(DemandPass):
    """Claims the demands of exchanges whose operands are not placed as they were written for."""

    kinds = frozenset({"stale"})

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        operands = OpCall(node).operands
        if is_tensor(node):
            self.replace(node, operands[0])
        else:
            self.replace(node, operands)
