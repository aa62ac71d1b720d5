"""Compute a value once that a program computes several times from the same operands.

    cos_1 = cos(mul(arange(S), f))     for the query and the key of each layer
    cos_2 = cos(mul(arange(S), f))     ->  cos_1

Models compute rotary tables and masks in every layer. Later passes, and the tracing of the compiler, take time for each
node. Unchanged: values with a gradient, whose summands would be added in another order; random draws, memory without
values (`empty`), and operands of draws, since compilers merge draws from equal operands; values in regions of a
checkpoint, merged with others of the same region only; values that share memory with a result, to which callers may
write; and values with more bytes than any with a gradient, such as a mask of S x S, which would be kept for all layers,
so that nothing is merged in a graph without gradients. Bytes moved: none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import enter_autocast, exit_autocast, pytree, storage_of
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.differentiable import differentiable_nodes
from sp_compile.passes.graph.edit import REGION_META
from sp_compile.passes.graph.mutation import is_mutation, is_pure
from sp_compile.passes.graph.node_info import META_KEY
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import current_bytes

# ops whose result has no defined values
UNINITIALIZED = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
    for overload in getattr(torch.ops.aten, name).overloads()
)


class MergeRepeats(Pass):
    """Replacement of repeated calls in one graph."""

    requires = frozenset({"canonical"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace each call by an earlier equal one; return the number of removed calls."""
        differentiable = differentiable_nodes(gm)
        max_bytes = max((current_bytes(x) for x in _tensors(differentiable)), default=0)
        draws = set(filter(is_random, gm.graph.nodes))
        writers = [gm.graph.output_node(), *draws, *filter(is_mutation, gm.graph.nodes)]  # callers may write to results
        kept = {storage_of(x) for node in writers for x in _tensors(node.all_input_nodes)}
        first: dict[Any, Node] = {}  # the first node of each call
        regions: dict[Any, Any] = {}  # arguments of the open autocast regions, by the call that enters them
        changes = 0
        for node in gm.graph.nodes:
            if node.target is enter_autocast:
                regions[node] = node.args
            elif node.target is exit_autocast:
                regions.pop(node.args[0])
            if node.op != "call_function" or node in differentiable or not is_pure(node):
                continue
            # Earlier passes have marked nodes that have META_KEY.
            if META_KEY in node.meta or node in draws or node.target in UNINITIALIZED:
                continue
            if any(current_bytes(x) > max_bytes or storage_of(x) in kept for x in _tensors([node])):
                continue
            earlier = first.setdefault((*regions.values(), *_call_key(node)), node)
            if earlier is not node:
                node.replace_all_uses_with(earlier)
                gm.graph.erase_node(node)
                changes += 1
        return changes


def _tensors(nodes: Iterable[Node]) -> list[torch.Tensor]:
    """Return the strided tensors among the values of nodes, which may be lists."""
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return [x for x in values if isinstance(x, torch.Tensor) and x.layout == torch.strided]


def _call_key(node: Node) -> tuple[Any, ...]:
    """Return a hashable value that is equal for equal calls in the same region of a checkpoint; 1 and 1.0 differ."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    arguments = tuple((type(x), x if isinstance(x, Node) else repr(x)) for x in leaves)
    return node.target, structure, arguments, *(repr(node.meta.get(key)) for key in REGION_META)
