"""Match the other operands of a softmax over scores: sinks, and their difference to the maximum.

    every = cat([scores, sinks.view(1, H, 1, 1).expand(B, H, Q, 1)], -1)    a logit per head without a key
    every = every - every.max(-1, keepdim=True).values                      changes no probability, and no gradient
    weights = softmax(every, -1)[..., :-1]

For a vector (H,), scores may be (groups, H / groups, Q, K), as in the original GPT-OSS: all heads of one sequence.
Unchanged: sinks that differ between queries or batch entries, and sinks appended after the maximum of the scores was
subtracted, which shifts the sinks too.
"""

from __future__ import annotations

import operator
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
    map_coordinates,
    match_join,
    match_slice,
    move_source,
    skip_reshapes,
)

from .proofs import BATCH_INDEX, HEAD_INDEX, INDICES
from .softmaxes import MAXIMA

aten = torch.ops.aten


@dataclass(frozen=True)
class SoftmaxSource:
    """Scores of a softmax, and the ops between them and the softmax."""

    scores: Any  # input of an equivalent softmax without sinks
    readers: tuple[Node, ...]  # readers of the scores
    chain: tuple[Node, ...] = ()  # nodes between the scores and the softmax
    sinks: Node | None = None  # (..., 1), concatenated to the scores
    first: bool = False  # True if the sinks precede the scores

    def head_sinks(self) -> SinkValue | None:
        """Return the sinks of scores (B, H, Q, K), or None."""
        lead = node_shape(self.sinks)[:-2] if self.sinks is not None else ()
        return sink_index(self.sinks, INDICES, lead) if len(lead) == 2 else None

    def with_readers(self, *chain: Node) -> SoftmaxSource:
        """Return the match with other readers and more nodes in its chain."""
        return replace(self, chain=(*self.chain, *chain))

    def drops_sinks(self, node: Node) -> bool:
        """Return True if the node keeps the weights of the keys and drops that of the sinks."""
        piece = match_slice(node) if self.sinks is not None else None
        if piece is None or piece.dim != piece.source.meta["val"].ndim - 1:
            return False
        every = node_shape(piece.source)[-1]
        return is_same_size(piece.start, int(self.first)) and is_same_size(piece.length, every - 1)


def match_readers(x: Any, keys: int, *readers: Node) -> SoftmaxSource:
    """Match the ops between the scores and the readers of a value; often there are none.

    Args:
        x: The input of the softmax.
        keys: The dim of `x` along which the softmax reduces.
        readers: All readers of `x`.

    Returns:
        The scores, the ops in between, and the sinks if there are any.
    """
    plain = SoftmaxSource(x, readers)
    if not is_tensor(x) or set(x.users) != set(readers) or not isinstance(x.target, OpOverload):
        return plain
    if is_cast_op(x) or is_copy(x):
        inner = match_readers(move_source(x), keys, x)
        return inner.with_readers(x) if inner.chain else plain
    if x.target is aten.sub.Tensor and (greatest := _match_maximum(x, keys)):
        return match_readers(OpCall(x).operands[0], keys, greatest[0], x).with_readers(*greatest, x)
    joined = OpCall(x).operands
    if x.target is aten.cat.default and len(joined) == 2 and _is_along_last_dim(x, keys):
        widths = [node_shape(part)[-1] for part in joined]
        for first in (False, True):
            scores, sinks = joined[::-1] if first else joined
            if is_same_size(widths[1 - first], 1) and not is_same_size(widths[first], 1):
                return SoftmaxSource(scores, (x,), (x,), sinks, first)
    return plain


def _is_along_last_dim(x: Node, keys: int) -> bool:
    return keys == x.meta["val"].ndim - 1 and match_join(x) == (keys, False)


def _match_maximum(difference: Node, keys: int) -> list[Node]:
    """Return the nodes that compute the maximum of the row it is subtracted from, or []."""
    call = OpCall(difference)
    if len(call.operands) != 2 or call["alpha"] != 1:
        return []
    row, node = call.operands
    found: list[Node] = []
    while node.target in (operator.getitem, aten.detach.default):
        if len(node.users) != 1 or node.args[1:] not in ((), (0,)):
            return []
        found.insert(0, node)
        node = node.args[0]
    if node.target not in MAXIMA or node.args[0] is not row or not _reduced_dim(OpCall(node), keys):
        return []
    unread = [user for user in node.users if user not in found and not user.users]  # the indices of the maximum
    return [node, *unread, *found] if len(node.users) == 1 + len(unread) else []


def _reduced_dim(call: OpCall, keys: int) -> bool:
    dims = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    return bool(call["keepdim"]) and [d % call.ndim() for d in dims] == [keys]


@dataclass(frozen=True)
class SinkValue:
    """Sinks with a number per head, or one for all heads."""

    value: Node  # value with one element per head, or one element
    leading: tuple[Size, ...]  # (B, H) of the scores
    groups: bool = False  # True if both leading dims are heads of one sequence

    @property
    def batch_and_heads(self) -> tuple[Size, Size]:
        """Return the batch size and the number of heads of the attention with these sinks."""
        return (1, size_product(self.leading)) if self.groups else (self.leading[0], self.leading[1])

    def vector(self, editor: GraphEditor, like: Node) -> Node:
        """Return the sinks as a vector (H,)."""
        count, (_, heads) = size_product(node_shape(self.value)), self.batch_and_heads
        found = editor.reshape(self.value, (count,), like)
        if is_same_size(count, heads):
            return found
        return editor.compute(aten.expand.default, (found, [editor.sizes(heads)]), like)


def sink_index(sinks: Node, coords: Sequence[Any], lead: tuple[Size, ...]) -> SinkValue | None:
    """Return the sinks that row (b, h, q) of the scores reads at these coordinates, or None."""
    at: tuple[Node, Sequence[Any]] | None = (sinks, coords)
    while at is not None:
        node, coords = at
        shape = node_shape(node)
        own = [c for c, extent in zip(coords, shape, strict=True) if not is_same_size(extent, 1)]
        if own in ([], [HEAD_INDEX]) and (not own or is_same_size(size_product(shape), lead[1])):
            return SinkValue(node, lead)
        if (
            own == [BATCH_INDEX, HEAD_INDEX]
            and is_same_size(size_product(shape), size_product(lead))
            and skip_reshapes(node).meta["val"].ndim == 1
        ):
            return SinkValue(node, lead, groups=True)
        at = map_coordinates(node, coords)
    return None
