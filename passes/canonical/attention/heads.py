"""Rewrite repeated key and value heads as grouped heads, so that the attention op repeats them.

    k = reshape(expand(unsqueeze(k, 2)))            transformers' repeat_kv
    k = repeat_interleave(k, r, 1)                  torchtune, lit-gpt
    k = reshape(permute(expand(unsqueeze(k, 2))))   OpenAI's GPT-OSS, (S, H, r, D) originally
    sdpa(q, k, v)                           ->      sdpa(q, k0, v0, enable_gqa=True) on the Hkv heads themselves

Here H is the number of query heads, a multiple r of the Hkv heads of keys and values. *Tiled* heads are repeated as a
list, h0, h1, h0, h1. An exchange before the attention then sends Hkv heads instead of H. Bytes moved: none. Unchanged:
keys and values repeated differently, and tiled heads (`repeat`), which are paired with other query heads.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import exact_quotient, is_same_shape, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import attention_nodes
from sp_compile.passes.sharding.matchers import permutation_of, skip_reshapes, value_origin

aten = torch.ops.aten
HEADS_DIM = -3  # of (B, H, S, D)


@register_pass
class GroupKeyHeads(CanonicalPass):
    """Replacement of repeated key and value heads by the heads before the repetition."""

    requires = frozenset({"mask predicates"})  # a mask is recognized by the scores of all heads
    provides = frozenset({"canonical", "grouped heads"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace repeated keys and values of every attention, and report repetitions that remain."""
        changes = 0
        for node in attention_nodes(gm):
            operands = node.all_input_nodes
            if self._group(node):
                changes += 1
                self.drop(*operands)  # erase the repetitions, which have no users any more
        return changes

    def _group(self, node: Node) -> bool:
        """Replace the keys and values of an attention by those before each head was repeated, with enable_gqa.

        Returns False if not both are repeated, equally often and in the order in which enable_gqa repeats them.
        """
        call = OpCall(node)
        if call["enable_gqa"] or call.ndim() != 4:
            return False
        key, value = (self._undo_repeat(x) for x in call.operands[1:3])
        tiled = [x for x in call.operands[1:3] if _is_tiled(x)]  # repeated as a list: h0, h1, h0, h1
        if tiled:
            reason = "it repeats the list of heads, and grouped heads need repeat_interleave"
            self.note_refusal(tiled[0], f"keys or values are sent with every copy of a head: {reason}")
        elif (key is None) != (value is None):
            self.note_refusal(node, "keys or values are sent with every copy of a head: only one of them is repeated")
        heads = [node_shape(x)[HEADS_DIM] for x in (key, value) if x is not None]
        # Not both are repeated, or not equally often, or the number of query heads is no multiple of theirs.
        if len(heads) < 2 or not is_same_size(*heads) or exact_quotient(call.shape()[HEADS_DIM], heads[0]) is None:
            self.drop(key, value)  # if `_undo_repeat` has added them
            return False
        node.args, node.kwargs = call.with_operands([call.operands[0], key, value, *call.operands[3:]], enable_gqa=True)
        set_node_info(node, grouped=True)  # set here, so that passes/strategies/attention/expand_heads.py may undo it
        return True

    def _undo_repeat(self, node: Node) -> Node | None:
        """Return keys or values (B, h, S, D) before each of their h heads was repeated r times; None for other values.

        The node (B, h * r, S, D) is a repeat_interleave; reshape(expand(x, (B, h, r, S, D))); or
        reshape(permute(expand(x))), where a dim of size 1 is expanded and moved after the heads, as (S, h, 1, D) ->
        (S, h, r, D) -> (h, r, S, D) -> (1, h * r, S, D).
        """
        repeated = value_origin(node)
        if repeated.target is aten.repeat_interleave.self_int:
            call = OpCall(repeated)
            repeats_heads = call["dim"] is not None and call.dim() == call.ndim() + HEADS_DIM
            return call.operands[0] if repeats_heads else None
        permuted = skip_reshapes(repeated)
        order = permutation_of(permuted)
        expanded = permuted if order is None else value_origin(OpCall(permuted).operands[0])
        # An expand in the place of heads, (B, 1, S, D) -> (B, h, S, D), is not matched: it has no dim for the copies.
        if expanded.target is not aten.expand.default or (order is None and expanded.meta["val"].ndim != 5):
            return None
        x = expanded.args[0]
        sizes = zip(node_shape(x), node_shape(expanded))
        repeated_dims = [d for d, (before, after) in enumerate(sizes) if not is_same_size(before, after)]
        result_shape = node_shape(node)
        if x.meta["val"].ndim != expanded.meta["val"].ndim or len(repeated_dims) != 1 or len(result_shape) != 4:
            return None
        # After the permute, if there is one, the shape must be (dims of batch and heads of x, r, S, D). `repeats_dim`
        # is the place of the expanded dim, r. Without a permute (order is None) the dims keep their places.
        batch, heads, length, width = result_shape
        (repeated_dim,) = repeated_dims
        shape, repeats_dim = node_shape(permuted), repeated_dim if order is None else order.index(repeated_dim)
        num_heads = exact_quotient(size_product(shape[:repeats_dim]), batch)
        if num_heads is None or not is_same_size(num_heads * shape[repeats_dim], heads):
            return None
        if not is_same_shape(shape[repeats_dim + 1 :], (length, width)):
            return None
        with self.graph.inserting_before(node):
            x = x if order is None else self.compute(aten.permute.default, (x, list(order)), node)
            unrepeated = self.reshape(x, (batch, num_heads, length, width), node)
        origin = value_origin(unrepeated)  # k for reshape(unsqueeze(k, 2)), which is not needed
        if origin is not unrepeated:
            self.drop(unrepeated)
        return origin


def _is_tiled(node: Node) -> bool:
    """Return True if the node repeats several heads as a list, h0, h1, h0, h1, as `x.repeat(1, 2, 1, 1)` does.

    enable_gqa repeats each head in place, h0, h0, h1, h1, so that such heads cannot be grouped.
    """
    node = value_origin(node)
    if node.target is not aten.repeat.default or node.meta["val"].ndim != 4:
        return False
    shape = node_shape(OpCall(node).operands[0])
    heads = shape[HEADS_DIM] if len(shape) == 4 else 1
    # Several heads, whose number the repeat changes: it may also repeat other dims only.
    return not is_same_size(heads, 1) and not is_same_size(heads, node_shape(node)[HEADS_DIM])
