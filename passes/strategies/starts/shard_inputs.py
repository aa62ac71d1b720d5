"""Shard replicated values at which a sequence starts although the op that reads them would not start it.

    scaled_dot_product_attention(q, k, v, is_causal=True)
    ->  scaled_dot_product_attention(clone(q), clone(k), clone(v), is_causal=True)

    unflatten(pad(x, rows), dim, (-1, chunk))  ->  unflatten(clone(pad(x, rows)), dim, (-1, chunk))

Token-wise ops shard replicated inputs by default, and so do queries of attention without a mask. A mask that depends on
the query's position prevents it: a program of little else than one attention would run replicated on every rank. So
would a loop over chunks of an input, because the dims of chunks and of their rows are no sequences by themselves. A
sequence starts at a node that computes its own rows of a sequence from replicated operands; the clone is such a node.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.passes.base import Pass
from sp_compile.passes.canonical.pad_inputs import match_padding
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.sharding.attention_axes import attention_nodes, has_query_position
from sp_compile.passes.sharding.axes import Axes
from sp_compile.passes.sharding.matchers import move_source
from sp_compile.passes.sharding.placement import REPLICATE

CHUNK_OPS = parse_overloads("unflatten.int view reshape")


class ShardReplicatedInputs(Pass):
    """Cloning of replicated values that could be sharded along the sequence."""

    requires = frozenset({"canonical", "marked collectives", "joined sequences"})
    provides = frozenset({"sharded inputs"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Clone replicated inputs of masked attention and of splits into chunks, and return the number of clones.

        The clones are marked, so that propagation shards them: a rank then computes only its rows.
        """
        # `replicated` marks attention at which no sequence may start.
        masked = [n for n in attention_nodes(gm) if has_query_position(OpCall(n)) and not node_info(n).replicated]
        splits = [n for n in gm.graph.nodes if n.target in CHUNK_OPS]
        if context.ranks.n == 1 or not (masked or splits):
            return 0
        axes, plan = context.axes(gm), context.plan(gm)
        readers = {n: OpCall(n).operands[:3] for n in masked}  # q, k, v, of which two may be the same node
        readers |= {n: OpCall(n).operands for n in splits if _splits_chunks(axes, n)}
        clones: dict[Node, Node] = {}  # by operand; several nodes may share one
        for node, operands in readers.items():
            has_sequence = axes.shard(node if node in masked else operands[0]) is not None
            if not has_sequence or any(plan.of(x) != REPLICATE for x in operands):
                continue
            for x in dict.fromkeys(operands):
                if x not in clones:
                    with gm.graph.inserting_before(node):
                        clones[x] = self.compute(torch.ops.aten.clone.default, (x,), node)
                    set_node_info(clones[x], starts_sequence=True)
                node.replace_input_with(x, clones[x])
        return len(clones)


def _splits_chunks(axes: Axes, node: Node) -> bool:
    """Return True if a reshape splits a sequence of an input into chunks, so that no dim of its result has a name."""
    (x,) = OpCall(node).operands
    source, moved = x, move_source(x) or _padded_value(x)
    while moved is not None:
        source, moved = moved, move_source(moved) or _padded_value(moved)
    shard = axes.shard(x)
    is_chunked = shard is not None and shard.frame.granule > 1 and axes.shard(node) is None
    return is_chunked and source.op == "placeholder" and has_gradient_dtype(x.meta["val"])


def _padded_value(node: Node) -> Node | None:
    """Return the value of which a node is a padding, or None for other nodes."""
    padding = match_padding(node)
    return padding.source if padding is not None else None
