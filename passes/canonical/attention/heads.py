"""Repeated key and value heads become grouped heads: the repetition moves into the attention op.

    k = reshape(expand(unsqueeze(k, 2)))            transformers' repeat_kv
    k = repeat_interleave(k, r, 1)                  torchtune, lit-gpt
    k = reshape(permute(expand(unsqueeze(k, 2))))   OpenAI's GPT-OSS, (S, H, r, D) at first
    sdpa(q, k, v)                           ->      sdpa(q, k0, v0, enable_gqa=True) on the Hkv heads themselves

so that an exchange before the attention sends Hkv heads and not H. Bytes moved: none. Leaves alone: keys and values
repeated differently, tilings (`repeat`), which pair other heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Spelling, register
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call, shape_of
from sp_compile.passes.graph.node_info import mark
from sp_compile.passes.graph.sizes import Size, all_same, product, quotient, same
from sp_compile.passes.sharding.attention_axes import attention_nodes
from sp_compile.passes.sharding.matchers import before_reshapes, keeps_order, origin, source_of

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


HEADS_DIM = -3


@register
class GroupHeads(Spelling):
    """Gives every attention the key and value heads before their repetition."""

    requires = frozenset({"masks are predicates"})  # a mask is recognised by the scores of all heads
    provides = frozenset({"canonical", "heads are grouped"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        changes = 0
        for node in attention_nodes(gm):
            before = node.all_input_nodes
            if self._group(node):
                changes += 1
                self.drop(*before)
        return changes

    def _group(self, node: Node) -> bool:
        call = Call(node)
        if call["enable_gqa"] or call.ndim() != 4:
            return False
        key, value = (_before_repeat(operand) or self._turned(operand) for operand in call.operands[1:3])
        tiled = [x for x in call.operands[1:3] if _is_tiled(x)]
        if tiled:
            why = "its copies are of all heads in turn, and grouped heads have theirs side by side (repeat_interleave)"
            self.refused(tiled[0], f"keys or values are sent with every copy of a head: {why}")
        elif (key is None) != (value is None):
            self.refused(node, "keys or values are sent with every copy of a head: one of them alone is repeated here")
        if key is None or value is None or not same(shape_of(key)[HEADS_DIM], shape_of(value)[HEADS_DIM]):
            return False
        if quotient(call.shape()[HEADS_DIM], shape_of(key)[HEADS_DIM]) is None:
            return False
        node.args, node.kwargs = call.rebuild([call.operands[0], key, value, *call.operands[3:]], enable_gqa=True)
        mark(node, grouped=True)  # by us, so that passes/strategies/attention/expand_heads.py may undo it
        return True

    def _turned(self, node: Node) -> Node | None:
        """x, if the node is x with its heads repeated in place before its dims were brought into this order."""
        moved = before_reshapes(node)
        expanded = origin(moved.args[0]) if moved.target is aten.permute.default else None
        if expanded is None or expanded.target is not aten.expand.default:
            return None
        single, order = expanded.args[0], Call(moved)["dims"]
        before, after = (shape_of(n) for n in (single, expanded))
        grown = [d for d, extent in enumerate(after) if len(before) != len(after) or not same(before[d], extent)]
        batch, heads, length, width = shape_of(node)
        shape = shape_of(moved)
        at = order.index(grown[0]) if len(grown) == 1 else len(shape)
        fewer = product(shape[:at])
        if not all_same(shape[at + 1 :], (length, width)) or not same(fewer * shape[at], batch * heads):
            return None
        if not same(batch, 1):
            return None
        with self.graph.inserting_before(moved):
            turned = self.compute(aten.permute.default, (single, list(order)), moved)
            return self.reshaped(turned, (1, fewer, length, width), moved)


def _before_repeat(node: Node) -> Node | None:
    """x, if the node is x with every head repeated r times in place: (B, h, S, D) -> (B, h*r, S, D)."""
    node = origin(node)
    if node.target is aten.repeat_interleave.self_int:
        call = Call(node)
        return call.operands[0] if call["dim"] is not None and call.dim() == call.ndim() + HEADS_DIM else None
    expanded = before_reshapes(node)
    if expanded.target is not aten.expand.default or expanded.meta["val"].ndim != 5:
        return None
    batch, heads, repeats, length, width = shape_of(expanded)
    single = (batch, heads, 1, length, width)
    if not _has_shape(expanded.args[0], single) or not _has_shape(node, (batch, heads * repeats, length, width)):
        return None
    source = origin(expanded.args[0])
    while not _has_shape(source, (batch, heads, length, width)):
        if not keeps_order(source):
            return None
        source = origin(source_of(source))
    return source


def _is_tiled(node: Node) -> bool:
    """Several heads, repeated as a whole?"""
    node = origin(node)
    if node.target is not aten.repeat.default or node.meta["val"].ndim != 4:
        return False
    source = Call(node).operands[0]
    before, after = shape_of(source), shape_of(node)
    heads = before[HEADS_DIM] if len(before) == 4 else 1
    return not same(heads, 1) and not same(heads, after[HEADS_DIM])


def _has_shape(node: Node, wanted: Sequence[Size]) -> bool:
    return all_same(shape_of(node), wanted)
