"""Attention whose queries, keys and values are whole on every rank begins on shards of them.

    scaled_dot_product_attention(q, k, v, is_causal=True)
    ->  scaled_dot_product_attention(clone(q), clone(k), clone(v), is_causal=True)

What is computed token by token begins on shards by itself; attention counts from its first query and mixes tokens, so
it does not: a program that is an attention and little else would run whole on every rank.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.graph.record import mark, record
from sp_compile.passes.base import Pass
from sp_compile.passes.job import Job
from sp_compile.sharding.factors import flat
from sp_compile.sharding.placement import REPLICATE
from sp_compile.sharding.rule import lookup


class BeginAttention(Pass):
    """Clones what attention reads, where it could be cut along the sequence and nobody has begun to."""

    requires = frozenset({"canonical", "exchanges are marked"})
    provides = frozenset({"attention begins"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        if job.ranks.n == 1:
            return 0
        axes, plan = job.axes(gm), job.plan(gm)
        found = {node: self._mixed(node) for node in gm.graph.nodes if axes.shard(node) is not None}
        made: dict[Node, Node] = {}
        for node, operands in found.items():
            if not operands or record(node).whole or any(plan.of(x) != REPLICATE for x in operands):
                continue
            for x in operands:
                if x not in made:
                    with gm.graph.inserting_before(node):
                        made[x] = self.compute(torch.ops.aten.clone.default, (x,), node)
                    mark(made[x], begins=True)
                node.replace_input_with(x, made[x])
        return len(made)

    def _mixed(self, node: Node) -> list[Node]:
        """What attention cuts along its sequence: queries, keys and values; [] for any other op."""
        call, rule = lookup(node) or (None, None)
        if call is None or rule is None:
            return []
        mixing = {f for dims in rule.operands for f in flat(dims) if rule.kind(f) == "attend"}
        read = [x for i, x in enumerate(call.operands) if i not in rule.masks and mixing & set(flat(rule.operands[i]))]
        return list(dict.fromkeys(read))
