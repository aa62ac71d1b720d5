"""Results of attention in checkpointed regions stay where they are marked to: in the joint graph, before its cut."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import asked_policies, has_policy, is_kept, must_stay
from sp_compile.passes.base import Pass
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call
from sp_compile.passes.sharding.matchers import source_of

aten, sp = torch.ops.aten, torch.ops.sp
BACKWARDS = {
    sp.attend_backward.default: ("out", "lse"),
    aten._scaled_dot_product_flash_attention_backward.default: ("out", "logsumexp"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: ("out", "logsumexp"),
    aten._scaled_dot_product_efficient_attention_backward.default: ("out", "logsumexp"),
    aten._scaled_dot_product_cudnn_attention_backward.default: ("out", "logsumexp"),
}
"""Backwards of attention, and the arguments that its forward made."""
FORWARDS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""What policies are written for, and `sp::attend` stands for."""


class StayInCheckpoints(Pass):
    """What backwards of attention read of a marked forward is not computed again, and so neither is the forward."""

    provides = frozenset({"attention stays"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        stays = {made for node in gm.graph.nodes for made in _read(node) if is_kept(made)}
        for made in stays:
            must_stay(made)
        return len(stays)


def _read(node: Node) -> Iterator[Node]:
    """The nodes that made what a backward of attention is given of its forward."""
    for name in BACKWARDS.get(node.target, ()):
        value = Call(node)[name]
        if isinstance(value, Node):
            while (source := _source(value)) is not None:
                value = source
            yield value.args[0] if value.target is operator.getitem else value


def _source(node: Node) -> Node | None:
    """What the node holds the elements of: with all else that reads them, it is what stays. Not if that is wider."""
    source = node.args[0] if node.target is aten.detach.default else source_of(node)
    if not isinstance(source, Node):
        return None
    return source if source.meta["val"].element_size() <= node.meta["val"].element_size() else None


def ask_policies(gm: GraphModule) -> AbstractContextManager[Any]:
    """Inside, AOTAutograd asks the policies of checkpoints as it traces the graph."""
    if not any(has_policy(node) for node in gm.graph.nodes):
        return nullcontext()
    return asked_policies([sp.attend.default], FORWARDS)
