"""Save the results of attention in checkpointed regions, in the joint graph before it is partitioned.

The backward recomputes a checkpointed region, except results that the user's policy (selective checkpointing) saves. It
may save attention, whose forward is expensive. Its backward reads the output and the log-sum-exp of the forward,
possibly through views: these nodes are marked for the partitioner.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import apply_policies, has_policy, is_saved, mark_must_save
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.matchers import move_source

aten, sp = torch.ops.aten, torch.ops.sp
SDPA_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
# Ops that users name in policies, and that `sp::attend` replaces.
FORWARD_OPS = [getattr(aten, f"_scaled_dot_product_{kernel}").default for kernel in SDPA_KERNELS]
# Attention backwards, and their arguments that the forward computes.
BACKWARD_OPS = dict.fromkeys((sp.attend_backward.default, sp.attend_backward_parts.default), ("out", "lse")) | {
    getattr(aten, f"_scaled_dot_product_{kernel}_backward").default: ("out", "logsumexp") for kernel in SDPA_KERNELS
}


class SaveAttentionInCheckpoints(Pass):
    """Pass that saves the results that attention backwards read, so that no forward is recomputed.

    A policy names attention ops. The backward may read a copy or cast of their results, which it does not name.
    """

    provides = frozenset({"saved attention"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Mark nodes of the forward as saved for the backward, and return their number.

        They compute results that an attention backward reads, and a policy of selective checkpointing saves them.
        """
        saved_nodes = {x for node in gm.graph.nodes for x in _forward_nodes(node) if is_saved(x)}
        for node in saved_nodes:
            mark_must_save(node)
        return len(saved_nodes)


def _forward_nodes(node: Node) -> Iterator[Node]:
    """Yield the nodes that compute the output and log-sum-exp which a node reads, if it is an attention backward.

    If it reads a copy, cast or view of these, the node of the forward op is yielded: its result is the smallest value
    to save. Yields nothing for other nodes.
    """
    for name in BACKWARD_OPS.get(node.target, ()):
        value = OpCall(node)[name]
        if isinstance(value, Node):
            source = _copied_node(value)
            while source is not None:
                value, source = source, _copied_node(source)
            yield value.args[0] if value.target is operator.getitem else value  # the op, not one of its results


def _copied_node(node: Node) -> Node | None:
    """Return the node of which this one is a copy, cast or view; else None.

    None, too, if the source has a wider dtype: it would need more memory to save.
    """
    source = node.args[0] if node.target is aten.detach.default else move_source(node)
    if not isinstance(source, Node):
        return None
    return source if source.meta["val"].element_size() <= node.meta["val"].element_size() else None


def apply_checkpoint_policies(gm: GraphModule) -> AbstractContextManager[Any]:
    """Return a context in which AOTAutograd's tracing applies checkpoint policies to sp::attend, too.

    A policy of selective checkpointing that saves one of `FORWARD_OPS`, such as flash attention, then also saves the
    sp::attend that has replaced it. The compiler traces the graph in this context. Without policies it does nothing.
    """
    if not any(has_policy(node) for node in gm.graph.nodes):
        return nullcontext()
    return apply_policies([sp.attend.default], FORWARD_OPS)
