"""Gather operands for nodes that no pass can run on shards, and report each gather.

    sp.unshard(x)      the node then runs equally on every rank; backward: each rank takes its slice of the gradient
    sp.all_gather(x)   another operand of the node remains sharded; backward: a reduce-scatter

Bytes sent per rank: (n-1) times its shard of x. Refuses everything, by name, under fallback="error".

`GatherPairs` gathers one operand of an op on all pairs of rows, such as k of scores q @ k.T, or v of weights @ v. The
value of each pair, scores or weights, remains sharded and is larger than the gathered operand; this is no fallback.

`RevertStaleExchanges` removes stale exchanges, which were written for a placement that their operand no longer has. An
exchange is an identity in the global view, so its removal is correct.

    y = sp.unshard(x, dim=2)   where x is now sharded on dim 1   ->   y = x, and the demand is stated again

A strategy writes its exchanges for the placements of one PlacementPlan. Discharging a demand upstream may change
placements downstream. Bytes moved: none. Refuses nothing.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.context import NoteKind
from sp_compile.passes.graph.call import OpCall, is_tensor
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.propagation.node_steps import SUMMAND_GRAD
from sp_compile.passes.sharding.placement import Demand, Shard

from .discharge import DemandPass

sp = torch.ops.sp


class GatherOperands(DemandPass):
    """Fallback that claims every demand for a gathered operand."""

    note_kind = NoteKind.GATHERED

    requires = DemandPass.requires | {"claimed"}  # by a better strategy
    provides = frozenset({"gathered"})
    kinds = frozenset({"gathered", "align", "no rule", "attend", "scan", "halo", "invariant"})

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim all demands, or "" for a node whose demands arose in this round.

        Raises:
            SpError: An operand would be gathered, and the option is fallback="error". Results are always gathered. A
                demand "invariant" gathers nothing, and "pairs" gathers less than remains sharded (`GatherPairs`).
        """
        if self.context.open_nodes is not None and node not in self.context.open_nodes:
            return ""
        is_fallback = any(demand.kind not in ("invariant", "pairs") for demand in demands)
        if node.op == "output" or self.context.options.fallback == "gather" or not is_fallback:
            return None
        reasons = "; ".join(self._gather_reason(demand) for demand in demands)
        raise SpError("SP305", f"fallback='error': operands of {describe_node(node)} would be gathered: {reasons}.")

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Gather each demanded operand.

        An operand with a demand "invariant" is gathered already, by an sp::all_gather, but the node is replicated and
        has the full gradient on every rank. Then only the backward of the gather is replaced.
        """
        for demand in demands:
            if demand.kind == "invariant":
                self._regather(node, demand)
            else:
                self._gather(node, demand)

    def _regather(self, node: Node, demand: Demand) -> None:
        """Replace an operand that is an sp::all_gather by an sp::unshard of the same value, for a replicated node.

        Both gather; the backward of an all_gather adds the gradients of all ranks, which is right for nodes on shards.
        The gradients of a replicated node are equal on all ranks, and the backward of an unshard slices them.
        """
        gathered = demanded_operand(node, demand.operand)
        with self.insert_after(gathered):
            unsharded = self.emit(sp.unshard.default, gathered.args, gathered.meta["val"], node)
        replace_operand(node, demand.operand, unsharded)

    def _gather_reason(self, demand: Demand) -> str:
        """Return the reason of a demand with its operand and global shape, for the error of a refusal."""
        operand = demanded_operand(demand.node, demand.operand)
        return f"{demand.why} (operand {operand.name}, global shape {list(operand.meta['val'].shape)})"

    def _gather(self, node: Node, demand: Demand) -> None:
        """Replace a sharded operand of the node by its gathered value; nodes share one gather of each kind.

        The gather is an sp::all_gather if the node still runs on shards of another operand, so that ranks have
        different gradients, and an sp::unshard if it runs replicated.
        """
        source = demanded_operand(node, demand.operand)
        have = self.plan.of(source)
        # Once all operands are replicated, propagation could start a new sequence at the node and state the demand
        # again. The mark prevents it. If another operand is sharded (`keeps_sharding`), the mark has no effect.
        set_node_info(node, replicated=True)
        if not isinstance(have, Shard):  # a replicated operand, of a scan or window at which a sequence would start
            if have == SUMMAND_GRAD:  # it is an sp::all_gather, which expects a part of the gradient from each rank
                self._regather(node, demand)
            return
        op = sp.all_gather.default if demand.keeps_sharding else sp.unshard.default
        gathered = next((user for user in source.users if user.target is op and user.args[0] is source), None)
        if gathered is None:
            args = (source, have.dim, self.sizes.list(have.frame_arg()), self.context.ranks.n, self.context.ranks.group)
            with self.insert_after(source):
                gathered = self.emit(op, args, source.meta["val"], node)
        replace_operand(node, demand.operand, gathered)
        if node.op != "output":
            text = f"{demand.why} (global shape {list(source.meta['val'].shape)})"
            self.note(node, text, kind=self.note_kind)


class GatherPairs(GatherOperands):
    """Gather of an operand whose rows an op combines with each row of another one, such as k in q @ k.T.

    The values of all pairs remain sharded along the rows of the other operand, so this is no fallback.
    """

    requires, provides = DemandPass.requires, DemandPass.provides
    kinds = frozenset({"pairs"})
    note_kind = NoteKind.REWRITTEN


def demanded_operand(node: Node, index: int) -> Node:
    """Return the operand for which a node states a demand.

    Args:
        node: The node that states the demand.
        index: `Demand.operand`: an index into the operands of an op. For the output it is an index into its inputs, and
            for another node, such as a getitem, into its inputs that are tensors.
    """
    if node.op == "output":
        return node.all_input_nodes[index]
    if isinstance(node.target, OpOverload):
        return OpCall(node).operands[index]
    return [a for a in node.all_input_nodes if is_tensor(a)][index]


def replace_operand(node: Node, index: int, new: Node) -> None:
    """Replace the operand for which a node states a demand, such as by its gathered value.

    Args:
        node: The node.
        index: `Demand.operand`, as in `demanded_operand`.
        new: The new operand.
    """
    if node.op == "output" or not isinstance(node.target, OpOverload):
        node.replace_input_with(demanded_operand(node, index), new)
        return
    # Replace this operand only: another operand of the op may be the same node, such as x in x @ x.
    call = OpCall(node)
    operands = list(call.operands)
    operands[index] = new
    node.args, node.kwargs = call.with_operands(operands)


class RevertStaleExchanges(DemandPass):
    """Removal of exchanges whose operands have another placement than expected."""

    kinds = frozenset({"stale"})

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace an exchange by its operands, its value in the global view."""
        operands = OpCall(node).operands
        self.replace(node, operands[0] if is_tensor(node) else operands)
