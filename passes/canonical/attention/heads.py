"""One attention per head becomes one attention of all heads, so that ranks can split the heads.

    cat([sdpa(q_i, k_i, v_i) for i in heads], -1)     (B, T, E) each
        ->  out = sdpa(stack(q_i, 1), stack(k_i, 1), stack(v_i, 1));  reshape(transpose(out, 1, 2), (B, T, H * E))
    stack([sdpa(q_i, k_i, v_i) for i in heads], d)    (B, T, E) each:  movedim(out, 1, d)
    sdpa(stack(q_i, 0), stack(k_i, 0), stack(v_i, 0))  (H, B, T, E): transposed(0, 1) around it

Masks that are computed alike stay one; others are stacked, too. Bytes moved: none. Leaves alone: heads of different
shape, scale, dropout or autocast region, results that something else reads, masks of more than (B, T, T).

The repetition of key and value heads moves into the attention op. Part of canonicalize.

    k = reshape(expand(unsqueeze(k, 2)))            HF's repeat_kv, expand by hand
    k = repeat_interleave(k, r, 1)                  torchtune, lit-gpt
    k = reshape(permute(expand(unsqueeze(k, 2))))   OpenAI's own GPT-OSS, (S, H, r, D) at first
    sdpa(q, k, v)                           ->      sdpa(q, k0, v0, enable_gqa=True) on the Hkv heads themselves

so that an exchange before the attention sends Hkv heads and not H. Bytes moved: none. Leaves alone: keys and values
repeated differently, tilings (`repeat`), which pair other heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile._compat import OpOverload, pytree
from sp_compile.graph.call import Call, is_tensor, shape_of
from sp_compile.graph.modes import autocast_at, same_autocast
from sp_compile.graph.mutation import is_pure
from sp_compile.graph.record import mark
from sp_compile.graph.sizes import Size, all_same, product, quotient, same
from sp_compile.passes.base import Spelling, register
from sp_compile.passes.job import Job
from sp_compile.sharding.attention import attention_nodes
from sp_compile.sharding.matchers import before_reshapes, dies_with, keeps_order, origin, source_of, steps_to

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


@register
class StackHeads(Spelling):
    """Rewrites the attentions of one graph that differ in their head alone."""

    requires = frozenset({"attention is fused"})
    provides = frozenset({"canonical", "heads are stacked"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        nodes = list(self.graph.nodes)
        joined = [self._join(n) for n in nodes if n.target in (aten.cat.default, aten.stack.default)]
        turned = [self._turn(n) for n in self.graph.find_nodes(op="call_function", target=SDPA)]
        return sum(joined) + sum(turned)

    def _join(self, cat: Node) -> bool:
        given = Call(cat).operands
        heads = [origin(x) for x in given]
        if len(heads) < 2 or any(h.target is not SDPA or not dies_with(h, cat) for h in heads):
            return False
        if len(set(heads)) < len(heads) or heads[0].meta["val"].ndim != 3:
            return False
        stacked, dim = cat.target is aten.stack.default, Call(cat)["dim"] % cat.meta["val"].ndim
        if not stacked and dim != 2:
            return False
        calls = [Call(h) for h in heads]
        masks = [c["attn_mask"] for c in calls]
        why = next((why for c in calls[1:] if (why := _why_not_alike(calls[0], c))), None)
        if masks[0] is not None and masks[0].meta["val"].ndim > 3:
            why = "their masks have more than three dims"
        if not same_autocast([*heads, cat]):
            why = "they are in different autocast regions"
        if why is not None:
            self.refused(cat, f"{len(heads)} attentions of one head are not one of all heads: {why}")
            return False
        with self.graph.inserting_before(cat), autocast_at(cat):
            operands: list[Node | None] = [self._stack([c.operands[i] for c in calls], 1, cat) for i in range(3)]
            operands.append(self._mask(masks, cat))
            options = {name: calls[0][name] for name in ("dropout_p", "is_causal", "scale")}
            out = self.compute(SDPA, tuple(operands), cat, options)
            if stacked:
                out = self.compute(aten.movedim.int, (out, 1, dim), cat) if dim != 1 else out
            else:
                out = self.compute(aten.transpose.int, (out, 1, 2), cat)
                batch, length, count, width = shape_of(out)
                out = self.reshaped(out, (batch, length, product((count, width))), cat)
        cat.replace_all_uses_with(out)
        self.erase([*heads, *(step for x, h in zip(given, heads) for step in steps_to(x, h)), cat])
        return True

    def _stack(self, xs: Sequence[Node], dim: int, like: Node) -> Node:
        return self.compute(aten.stack.default, (list(xs), dim), like)

    def _mask(self, masks: list[Any], like: Node) -> Node | None:
        """(T, T) of all heads; (B, T, T) and different ones get a dim for the head."""
        first = masks[0]
        if first is None:
            return None
        ndim = first.meta["val"].ndim
        if all(same_value(first, m) for m in masks[1:]):
            return first if ndim < 3 else self.compute(aten.unsqueeze.default, (first, 1), like)
        return self._stack(masks, max(ndim - 2, 0), like)

    def _turn(self, node: Node) -> bool:
        call = Call(node)
        operands = [origin(x) for x in call.operands[:3]]
        if any(not _stacked_first(x) for x in operands) or call["enable_gqa"]:
            return False
        mask = call["attn_mask"]
        if mask is not None and mask.meta["val"].ndim > 2:
            return False
        with self.graph.inserting_before(node), autocast_at(node):
            turned = [self._stack(x.args[0], 1, node) for x in operands]
            args, kwargs = call.rebuild([*turned, *call.operands[3:]])
            out = self.compute(SDPA, args, node, kwargs)
            out = self.compute(aten.transpose.int, (out, 0, 1), node)
        self.replace(node, out)
        return True


def _stacked_first(x: Node) -> bool:
    """Heads stacked in front of the batch."""
    return x.target is aten.stack.default and x.meta["val"].ndim == 4 and Call(x)["dim"] in (0, -4)


def _why_not_alike(a: Call, b: Call) -> str | None:
    """Why they are not the same attention of other operands; None if they are."""
    if not all(a.shape(i) == b.shape(i) and a.ndim(i) == 3 for i in range(3)):
        return "their q, k or v have other shapes"
    for name in ("dropout_p", "is_causal", "scale", "enable_gqa"):
        if a[name] != b[name]:
            return f"{name} is {a[name]} of one and {b[name]} of another"
    kinds = [m if m is None else (m.meta["val"].dtype, shape_of(m)) for m in (a["attn_mask"], b["attn_mask"])]
    return None if kinds[0] == kinds[1] else "their masks have other shapes or dtypes"


def same_value(a: Any, b: Any) -> bool:
    """Are two nodes one value, because the same pure ops make both from the same inputs?"""
    if a is b:
        return True
    if not (is_tensor(a) and is_tensor(b)) or a.op != "call_function" or a.target is not b.target:
        return False
    if not isinstance(a.target, OpOverload) or not (is_pure(a) and is_pure(b)):
        return False
    mine, other = (pytree.tree_flatten((n.args, n.kwargs)) for n in (a, b))
    return mine[1] == other[1] and all(
        same_value(x, y) if isinstance(x, Node) else x == y for x, y in zip(mine[0], other[0])
    )


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
