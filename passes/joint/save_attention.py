"""Save the results of attention in checkpointed regions, in the joint graph before it is partitioned."""

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
BACKWARD_OPS = {
    sp.attend_backward.default: ("out", "lse"),
    aten._scaled_dot_product_flash_attention_backward.default: ("out", "logsumexp"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: ("out", "logsumexp"),
    aten._scaled_dot_product_efficient_attention_backward.default: ("out", "logsumexp"),
    aten._scaled_dot_product_cudnn_attention_backward.default: ("out", "logsumexp"),
}
"""Attention backwards, and their arguments that the forward computes."""
FORWARD_OPS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""Ops that users name in policies, and that `sp::attend` replaces."""


class SaveAttentionInCheckpoints(Pass):
    """Pass that saves the results that attention backwards read, so that no forward is recomputed."""

    provides = frozenset({"saved attention"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        stays = {saved for node in gm.graph.nodes for saved in _forward_nodes(node) if is_saved(saved)}
        for saved in stays:
            mark_must_save(saved)
        return len(stays)


def _forward_nodes(node: Node) -> Iterator[Node]:
    """Yield the forward nodes whose results an attention backward reads."""
    for name in BACKWARD_OPS.get(node.target, ()):
        value = OpCall(node)[name]
        if isinstance(value, Node):
            while (source := _value_source(value)) is not None:
                value = source
            yield value.args[0] if value.target is operator.getitem else value


def _value_source(node: Node) -> Node | None:
    """Return the node of which this one is a copy or view, unless that has a wider dtype; else None."""
    source = node.args[0] if node.target is aten.detach.default else move_source(node)
    if not isinstance(source, Node):
        return None
    return source if source.meta["val"].element_size() <= node.meta["val"].element_size() else None


def apply_checkpoint_policies(gm: GraphModule) -> AbstractContextManager[Any]:
    """Return a context in which AOTAutograd's tracing applies the policies of checkpoints."""
    if not any(has_policy(node) for node in gm.graph.nodes):
        return nullcontext()
    return apply_policies([sp.attend.default], FORWARD_OPS)
