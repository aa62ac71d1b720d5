"""The repetition of key and value heads moves into the attention op. Part of canonicalize.

    k = reshape(expand(unsqueeze(k, 2)))            HF's repeat_kv, expand by hand
    k = repeat_interleave(k, r, 1)                  torchtune, lit-gpt
    sdpa(q, k, v)                           ->      sdpa(q, k0, v0, enable_gqa=True) on the Hkv heads themselves

so that an exchange before the attention sends Hkv heads and not H. Bytes moved: none. Leaves alone: keys and values
repeated differently, tilings (`repeat`), which pair other heads.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..call import Call, is_tensor
from ..shapes import Size, quotient, same, sizes

aten = torch.ops.aten
COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default)
RESHAPES = (aten.reshape.default, aten.view.default, aten.flatten.using_ints, aten._unsafe_view.default)
HEADS = -3


def group_heads(node: Node) -> bool:
    """Give an attention the key and value heads before their repetition; True if it changed."""
    call = Call(node)
    if call["enable_gqa"] or call.ndim() != 4:
        return False
    key, value = (_before_repeat(operand) for operand in call.operands[1:3])
    if key is None or value is None or not same(_heads(key), _heads(value)):
        return False
    if quotient(_heads(call.operands[0]), _heads(key)) is None:
        return False
    node.args, node.kwargs = call.rebuild([call.operands[0], key, value, *call.operands[3:]], enable_gqa=True)
    node.meta["sp_grouped"] = True  # by us, so that passes/expand_heads.py may undo it
    return True


def _heads(node: Node) -> Size:
    return sizes(node.meta["val"].shape)[HEADS]


def _before_repeat(node: Node) -> Node | None:
    """x, if the node is x with every head repeated r times in place: (B, h, S, D) -> (B, h*r, S, D)."""
    node = _through_copies(node)
    if node.target is aten.repeat_interleave.self_int:
        call = Call(node)
        return call.operands[0] if call["dim"] is not None and call.dim() == call.ndim() + HEADS else None
    if node.target not in RESHAPES or not is_tensor(node.args[0]):
        return None
    expanded = _through_copies(node.args[0])
    if expanded.target is not aten.expand.default or expanded.meta["val"].ndim != 5:
        return None
    source = _through_copies(expanded.args[0])
    if source.target is not aten.unsqueeze.default or source.args[1] % 5 != 2:
        return None
    inner = source.args[0]
    batch, heads, repeats, length, width = sizes(expanded.meta["val"].shape)
    wanted = (batch, heads * repeats, length, width)
    fits = all(same(a, b) for a, b in zip(sizes(node.meta["val"].shape), wanted))
    fits = fits and all(
        same(a, b) for a, b in zip(sizes(inner.meta["val"].shape), (batch, heads, length, width))
    )
    return inner if fits and node.meta["val"].ndim == 4 else None


def _through_copies(node: Node) -> Node:
    """Skip copies and slices that keep everything."""
    while node.target in (*COPIES, aten.slice.Tensor) and is_tensor(node.args[0]):
        before, after = (sizes(n.meta["val"].shape) for n in (node.args[0], node))
        if len(before) != len(after) or not all(same(a, b) for a, b in zip(before, after)):
            break
        node = node.args[0]
    return node
