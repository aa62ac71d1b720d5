"""Shard the inputs of attention whose queries, keys and values are replicated.

    scaled_dot_product_attention(q, k, v, is_causal=True)
    ->  scaled_dot_product_attention(clone(q), clone(k), clone(v), is_causal=True)

Token-wise ops shard replicated inputs by default, and so do queries of attention without a mask. A mask that depends on
the query's position prevents it: a program of little else than one attention would run replicated on every rank. A
sequence starts at a node that computes its own rows of a sequence from replicated operands; the clone is such a node.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.sharding.attention_axes import attention_nodes, has_query_position
from sp_compile.passes.sharding.placement import REPLICATE


class ShardAttentionInputs(Pass):
    """Cloning of replicated inputs of attention that could be sharded along the sequence."""

    requires = frozenset({"canonical", "marked collectives", "joined sequences"})
    provides = frozenset({"sharded inputs"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Clone replicated queries, keys and values of masked attention, and return the number of clones.

        The clones are marked, so that propagation shards them: a rank then computes only its rows.
        """
        # `replicated` marks attention at which no sequence may start.
        masked = [n for n in attention_nodes(gm) if has_query_position(OpCall(n)) and not node_info(n).replicated]
        if context.ranks.n == 1 or not masked:
            return 0
        axes, plan = context.axes(gm), context.plan(gm)
        clones: dict[Node, Node] = {}  # by operand; several attentions may share one
        for node in masked:
            operands = dict.fromkeys(OpCall(node).operands[:3])  # q, k, v, of which two may be the same node
            has_sequence = axes.shard(node) is not None  # the shard of its result along a sequence
            if not has_sequence or any(plan.of(x) != REPLICATE for x in operands):
                continue
            for x in operands:
                if x not in clones:
                    with gm.graph.inserting_before(node):
                        clones[x] = self.compute(torch.ops.aten.clone.default, (x,), node)
                    set_node_info(clones[x], starts_sequence=True)
                node.replace_input_with(x, clones[x])
        return len(clones)
