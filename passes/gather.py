"""The fallback: what no pass can do on shards is done on the whole, correctly, and reported.

    sp.unshard(x)      the node then runs alike on every rank; backward: each rank takes its slice of the gradient
    sp.all_gather(x)   the node goes on with shards of another operand; backward: a reduce-scatter

Bytes sent per rank: (n-1) times its shard of x. Causal attention over gathered keys gets its mask spelt out, because
`is_causal` counts from the first local query. Refuses: everything, by name, under fallback="error".
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..call import Call, is_tensor
from ..layout import Demand, Shard
from .rewrite import Rewrite

sp, aten = torch.ops.sp, torch.ops.aten


class Gather(Rewrite):
    """Claims every demand for a whole operand, attention's keys and values included."""

    name = "gather"
    kinds = frozenset({"whole", "align", "no rule", "attend", "invariant"})

    def refuses(self, node: Node, demands: list[Demand]) -> str | None:
        if (
            node.op == "output"
            or self.job.fallback == "gather"
            or all(d.kind == "invariant" for d in demands)
        ):
            return None
        if all(d.kind == "attend" for d in demands) and self.job.attention == "gather":
            return None
        reasons = "; ".join(self._reason(d) for d in demands)
        raise self.error(
            node, f"{reasons}. fallback='error' forbids gathering it; use fallback='gather' or add a rule"
        )

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        if any(d.kind == "attend" for d in demands):
            self._attention(node, demands)
            return
        for demand in demands:
            if demand.kind == "invariant":
                self._regather(node, demand)
            else:
                self._gather(node, demand)

    def _regather(self, node: Node, demand: Demand) -> None:
        """What was gathered for a node on shards is used alike on every rank: the other pair of gradients."""
        gathered = _operand(node, demand.operand)
        with self.after(gathered):
            whole = self.emit(sp.unshard.default, gathered.args, gathered.meta["val"], node)
        _replace_operand(node, demand.operand, whole)

    def _reason(self, demand: Demand) -> str:
        operand = _operand(demand.node, demand.operand)
        return f"{demand.why} (operand {operand.name}, global shape {list(operand.meta['val'].shape)})"

    def _gather(self, node: Node, demand: Demand) -> None:
        source = _operand(node, demand.operand)
        have, why = self.plan.of(source), self._reason(demand)
        assert isinstance(have, Shard)
        op = sp.all_gather.default if demand.keeps_sharding else sp.unshard.default
        whole = next((u for u in source.users if u.target is op and u.args[0] is source), None)
        if whole is None:
            args = (source, have.dim, self.frame(have), self.job.ranks.n, self.job.ranks.group)
            with self.after(source):
                whole = self.emit(op, args, source.meta["val"], node)
        _replace_operand(node, demand.operand, whole)
        if node.op != "output":
            self.note(node, why)

    def _attention(self, node: Node, demands: list[Demand]) -> None:
        """Gather keys and values; queries stay sharded unless nothing else is."""
        causal = Call(node)["is_causal"] and isinstance(self.plan.of(Call(node).operands[0]), Shard)
        for demand in demands:
            if demand.operand != 0:
                self._gather(node, demand)
        if causal:
            call = Call(node)
            with self.graph.inserting_before(node):
                mask = self._causal_mask(call, node)
            node.args, node.kwargs = call.rebuild(call.operands, attn_mask=mask, is_causal=False)

    def _causal_mask(self, call: Call, node: Node) -> Node:
        rows, columns = (self.sizes(call.shape(i)[-2]) for i in (0, 1))
        device = node.meta["val"].device
        row = self.compute(aten.arange.default, (rows,), node, {"device": device})
        column = self.compute(aten.arange.default, (columns,), node, {"device": device})
        return self.compute(
            aten.ge.Tensor, (self.compute(aten.unsqueeze.default, (row, 1), node), column), node
        )


def _operand(node: Node, index: int) -> Node:
    if node.op == "output":
        return node.all_input_nodes[index]
    if isinstance(node.target, torch._ops.OpOverload):
        return Call(node).operands[index]
    return [a for a in node.all_input_nodes if is_tensor(a)][index]


def _replace_operand(node: Node, index: int, new: Node) -> None:
    if node.op == "output" or not isinstance(node.target, torch._ops.OpOverload):
        node.replace_input_with(_operand(node, index), new)
        return
    call = Call(node)
    operands = list(call.operands)
    operands[index] = new
    node.args, node.kwargs = call.rebuild(operands)
