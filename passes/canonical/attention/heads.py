"""Rewrite repeated key and value heads as grouped heads, so that the attention op repeats them.

    k = reshape(expand(unsqueeze(k, 2)))            transformers' repeat_kv
    k = repeat_interleave(k, r, 1)                  torchtune, lit-gpt
    k = reshape(permute(expand(unsqueeze(k, 2))))   OpenAI's GPT-OSS, (S, H, r, D) originally
    sdpa(q, k, v)                           ->      sdpa(q, k0, v0, enable_gqa=True) on the Hkv heads themselves

An exchange before the attention then sends Hkv heads instead of H. Bytes moved: none. Unchanged: keys and values
repeated differently, and tilings (`repeat`), which pair other heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_same_shape, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import attention_nodes
from sp_compile.passes.sharding.matchers import keeps_order, move_source, skip_reshapes, value_origin

aten = torch.ops.aten


HEADS_DIM = -3


@register_pass
class GroupKeyHeads(CanonicalPass):
    """Replacement of repeated key and value heads by the heads before the repetition."""

    requires = frozenset({"mask predicates"})  # a mask is recognized by the scores of all heads
    provides = frozenset({"canonical", "grouped heads"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        changes = 0
        for node in attention_nodes(gm):
            before = node.all_input_nodes
            if self._group(node):
                changes += 1
                self.drop(*before)
        return changes

    def _group(self, node: Node) -> bool:
        call = OpCall(node)
        if call["enable_gqa"] or call.ndim() != 4:
            return False
        key, value = (_unrepeated_heads(operand) or self._undo_repeat(operand) for operand in call.operands[1:3])
        tiled = [x for x in call.operands[1:3] if _is_tiled(x)]
        if tiled:
            why = "it repeats the list of heads, and grouped heads need repeat_interleave"
            self.note_refusal(tiled[0], f"keys or values are sent with every copy of a head: {why}")
        elif (key is None) != (value is None):
            self.note_refusal(node, "keys or values are sent with every copy of a head: only one of them is repeated")
        if key is None or value is None or not is_same_size(node_shape(key)[HEADS_DIM], node_shape(value)[HEADS_DIM]):
            return False
        if exact_quotient(call.shape()[HEADS_DIM], node_shape(key)[HEADS_DIM]) is None:
            return False
        node.args, node.kwargs = call.with_operands([call.operands[0], key, value, *call.operands[3:]], enable_gqa=True)
        set_node_info(node, grouped=True)  # set here, so that passes/strategies/attention/expand_heads.py may undo it
        return True

    def _undo_repeat(self, node: Node) -> Node | None:
        """Return x if the node is x with its heads repeated in place, in any order of dims."""
        moved = skip_reshapes(node)
        expanded = value_origin(moved.args[0]) if moved.target is aten.permute.default else None
        if expanded is None or expanded.target is not aten.expand.default:
            return None
        single, order = expanded.args[0], OpCall(moved)["dims"]
        before, after = (node_shape(n) for n in (single, expanded))
        grown = [
            d for d, extent in enumerate(after) if len(before) != len(after) or not is_same_size(before[d], extent)
        ]
        batch, heads, length, width = node_shape(node)
        shape = node_shape(moved)
        at = order.index(grown[0]) if len(grown) == 1 else len(shape)
        fewer = size_product(shape[:at])
        if not is_same_shape(shape[at + 1 :], (length, width)) or not is_same_size(fewer * shape[at], batch * heads):
            return None
        if not is_same_size(batch, 1):
            return None
        with self.graph.inserting_before(moved):
            turned = self.compute(aten.permute.default, (single, list(order)), moved)
            return self.reshape(turned, (1, fewer, length, width), moved)


def _unrepeated_heads(node: Node) -> Node | None:
    """Return x if the node repeats every head of x r times in place: (B, h, S, D) -> (B, h*r, S, D)."""
    node = value_origin(node)
    if node.target is aten.repeat_interleave.self_int:
        call = OpCall(node)
        return call.operands[0] if call["dim"] is not None and call.dim() == call.ndim() + HEADS_DIM else None
    expanded = skip_reshapes(node)
    if expanded.target is not aten.expand.default or expanded.meta["val"].ndim != 5:
        return None
    batch, heads, repeats, length, width = node_shape(expanded)
    single = (batch, heads, 1, length, width)
    if not _has_shape(expanded.args[0], single) or not _has_shape(node, (batch, heads * repeats, length, width)):
        return None
    source = value_origin(expanded.args[0])
    while not _has_shape(source, (batch, heads, length, width)):
        if not keeps_order(source):
            return None
        source = value_origin(move_source(source))
    return source


def _is_tiled(node: Node) -> bool:
    """Return True if a sequence of several heads is repeated (tiled)."""
    node = value_origin(node)
    if node.target is not aten.repeat.default or node.meta["val"].ndim != 4:
        return False
    source = OpCall(node).operands[0]
    before, after = node_shape(source), node_shape(node)
    heads = before[HEADS_DIM] if len(before) == 4 else 1
    return not is_same_size(heads, 1) and not is_same_size(heads, after[HEADS_DIM])


def _has_shape(node: Node, wanted: Sequence[Size]) -> bool:
    return is_same_shape(node_shape(node), wanted)
