"""Match the other operands of a softmax over scores: sinks, and their difference to the maximum.

    every = cat([scores, sinks.view(1, H, 1, 1).expand(B, H, Q, 1)], -1)    a logit per head without a key
    every = every - every.max(-1, keepdim=True).values                      changes no probability, and no gradient
    weights = softmax(every, -1)[..., :-1]

A *sink* is a learned logit that takes a share of the weights of a row (one query) and has no value. A reader of the
weights *drops* it by a slice of the keys. For a vector (H,), scores may be
(groups, H / groups, Q, K), as in the original GPT-OSS: all heads of one sequence. Unchanged: sinks that differ between
queries or batch entries, and sinks appended after the maximum of the scores was subtracted, which shifts the sinks too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.sizes import Size, is_same_size, size_product
from sp_compile.passes.sharding.matchers import (
    is_cast_op,
    is_copy,
    is_float_cast,
    map_coordinates,
    match_join,
    match_slice,
    move_source,
    skip_reshapes,
)

from .proofs import BATCH_INDEX, HEAD_INDEX, INDICES
from .softmaxes import MAXIMA, match_between, match_difference

aten = torch.ops.aten


@dataclass(frozen=True)
class SoftmaxSource:
    """Scores of a softmax without sinks, and the ops between them and the input of the softmax."""

    scores: Any  # input of an equivalent softmax without sinks
    readers: tuple[Node, ...]  # readers of the scores
    chain: tuple[Node, ...] = ()  # nodes between the scores and the softmax
    sinks: Node | None = None  # (..., 1), concatenated to the scores
    first: bool = False  # True if the sinks precede the scores

    def head_sinks(self) -> SinkValue | None:
        """Return the sinks of scores (B, H, Q, K); None without sinks, or if they are not one number per head."""
        if self.sinks is None:
            return None
        leading = node_shape(self.sinks)[:-2]
        # INDICES: row (b, h, q) reads element (b, h, q, k) of the sinks, whose last dim has size 1.
        return match_sink_value(self.sinks, INDICES, leading) if len(leading) == 2 else None

    def is_slice_without_sinks(self, node: Node) -> bool:
        """Return True if a node slices the weights of the keys, such as [..., :-1], from those of keys and sinks."""
        piece = match_slice(node) if self.sinks is not None else None
        if piece is None or piece.dim != piece.source.meta["val"].ndim - 1:
            return False
        num_keys = node_shape(piece.source)[-1] - 1
        first_key = int(self.first)  # 1 if the sinks precede the keys
        return is_same_size(piece.start, first_key) and is_same_size(piece.length, num_keys)


def match_softmax_source(x: Any, keys_dim: int, *readers: Node) -> SoftmaxSource:
    """Match the ops between the scores and the input of a softmax; often there are none.

    They may concatenate sinks, learned logits without a key, to the scores, and subtract the maximum of each row.

    Args:
        x: The input of the softmax.
        keys_dim: The dim of `x` along which the softmax reduces.
        readers: The only nodes that may read `x`: the ops of the softmax, and of its log-sum-exp.

    Returns:
        The scores, the ops in between, and the sinks if there are any.
    """
    no_ops = SoftmaxSource(x, readers)
    if not is_tensor(x) or set(x.users) != set(readers) or not isinstance(x.target, OpOverload):
        return no_ops
    if is_float_cast(x) or is_copy(x):
        inner = match_softmax_source(move_source(x), keys_dim, x)
        # Only a cast after a cat or subtraction is part of the chain. One that reads the scores directly belongs to the
        # scores, which are matched elsewhere.
        return replace(inner, chain=(*inner.chain, x)) if inner.chain else no_ops
    subtraction = None
    difference = match_difference(x, MAXIMA)
    if difference is not None:
        row, dim = difference  # x is row - maximum(row, dim)
        subtraction = match_between(row, dim, x) if dim == keys_dim else None
    if subtraction is not None:
        inner = match_softmax_source(subtraction.source, keys_dim, *subtraction.readers)
        return replace(inner, chain=(*inner.chain, *subtraction.chain))
    operands = OpCall(x).operands
    is_last_dim = keys_dim == x.meta["val"].ndim - 1
    joined_along_keys = (keys_dim, False)  # False: it is no new dim, as that of a stack is
    if x.target is aten.cat.default and len(operands) == 2 and is_last_dim and match_join(x) == joined_along_keys:
        # The sinks are the operand with one column.
        first_is_sinks, last_is_sinks = (is_same_size(node_shape(operand)[-1], 1) for operand in operands)
        if first_is_sinks != last_is_sinks:
            sinks, scores = operands if first_is_sinks else operands[::-1]
            return SoftmaxSource(scores, readers=(x,), chain=(x,), sinks=sinks, first=first_is_sinks)
    return no_ops


@dataclass(frozen=True)
class SinkValue:
    """Sinks with a number per head, or one for all heads."""

    value: Node  # value with one element per head, or one element
    leading: tuple[Size, ...]  # (B, H) of the scores
    groups: bool = False  # True if both leading dims are heads of one sequence

    @property
    def batch_and_heads(self) -> tuple[Size, Size]:
        """Return (batch size, number of heads) of the attention: (1, H) if both leading dims are heads."""
        return (1, size_product(self.leading)) if self.groups else (self.leading[0], self.leading[1])

    def vector(self, editor: GraphEditor, like: Node) -> Node:
        """Emit the sinks as a vector (H,), the form that sp.masked_attention takes."""
        _, num_heads = self.batch_and_heads
        sinks = editor.reshape(self.value, (size_product(node_shape(self.value)),), like)
        return editor.expand(sinks, (num_heads,), like)  # from one sink for all heads


def match_sink_value(sinks: Node, coords: Sequence[Any], leading: tuple[Size, ...]) -> SinkValue | None:
    """Return the value with one sink per head (or one for all) from which `sinks` is computed, or None.

    For sinks.view(1, H, 1, 1).expand(B, H, Q, 1) it is the view (1, H, 1, 1): the search goes back through views and
    copies to the first value of which the rows (b, h, q) of the scores read an element that depends on h only.

    Args:
        sinks: A value that is computed from the sinks by views and copies.
        coords: The coordinates in it that row (b, h, q) reads, as expressions of the indices.
        leading: The leading dims (B, H) of the scores.
    """
    element: tuple[Node, Sequence[Any]] | None = (sinks, coords)
    while element is not None:
        node, coords = element
        shape = node_shape(node)
        indices = [c for c, extent in zip(coords, shape, strict=True) if not is_same_size(extent, 1)]
        # One element for all heads, or a vector with an element per head.
        if not indices or (indices == [HEAD_INDEX] and is_same_size(size_product(shape), leading[1])):
            return SinkValue(node, leading)
        # Scores (groups, H / groups, Q, K): both leading dims index a vector of all heads.
        has_all_heads = is_same_size(size_product(shape), size_product(leading))
        if indices == [BATCH_INDEX, HEAD_INDEX] and has_all_heads and skip_reshapes(node).meta["val"].ndim == 1:
            return SinkValue(node, leading, groups=True)
        if is_cast_op(node) and not is_float_cast(node):
            return None
        element = map_coordinates(node, coords)  # the operand, and the coordinates that are read there
    return None
