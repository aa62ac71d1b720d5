"""What attention's softmax reads beside scores: sinks, and their difference to the greatest. Part of `eager_attention.py`.

    every = cat([scores, sinks.view(1, H, 1, 1).expand(B, H, Q, 1)], -1)    a logit of each head that no key has
    every = every - every.max(-1, keepdim=True).values                      changes no probability, and no gradient
    weights = softmax(every, -1)[..., :-1]

Of a vector (H,) the scores may be (groups, H / groups, Q, K), as in GPT-OSS of its authors: all heads of one sequence.
Leaves alone: sinks that differ from query to query or between batch entries, and those beside scores whose greatest has
been subtracted already: that moves them, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.graph.call import Call, is_tensor, shape_of
from sp_compile.passes.graph.edit import Editor
from sp_compile.passes.graph.sizes import Size, product, same
from sp_compile.passes.sharding.matchers import (
    before_reshapes,
    element_of,
    is_cast,
    is_copy,
    join_of,
    slice_of,
    source_of,
)

from .proofs import BATCH, HEAD, INDICES
from .softmaxes import MAXIMA

aten = torch.ops.aten


@dataclass(frozen=True)
class SoftmaxSource:
    """scores: what a softmax without all this would read; readers: who reads them; chain: the nodes in between.

    sinks: (..., 1) beside the scores. first: they stand in front of them.
    """

    scores: Any
    readers: tuple[Node, ...]
    chain: tuple[Node, ...] = ()
    sinks: Node | None = None
    first: bool = False

    def of_heads(self) -> Sinks | None:
        """The sinks of scores (B, H, Q, K)."""
        lead = shape_of(self.sinks)[:-2] if self.sinks is not None else ()
        return of_heads(self.sinks, INDICES, lead) if len(lead) == 2 else None

    def behind(self, *chain: Node) -> SoftmaxSource:
        return replace(self, chain=(*self.chain, *chain))

    def drops_sinks(self, node: Node) -> bool:
        """Does it take the weights of the keys, and leave that of the sinks?"""
        piece = slice_of(node) if self.sinks is not None else None
        if piece is None or piece.dim != piece.source.meta["val"].ndim - 1:
            return False
        every = shape_of(piece.source)[-1]
        return same(piece.start, int(self.first)) and same(piece.length, every - 1)


def read_by(x: Any, keys: int, *readers: Node) -> SoftmaxSource:
    """What stands between the scores and these readers of x, which are all that it has; often nothing.

    keys: the dim of x along which the softmax goes.
    """
    plain = SoftmaxSource(x, readers)
    if not is_tensor(x) or set(x.users) != set(readers) or not isinstance(x.target, OpOverload):
        return plain
    if is_cast(x) or is_copy(x):
        inner = read_by(source_of(x), keys, x)
        return inner.behind(x) if inner.chain else plain
    if x.target is aten.sub.Tensor and (greatest := _greatest(x, keys)):
        return read_by(Call(x).operands[0], keys, greatest[0], x).behind(*greatest, x)
    joined = Call(x).operands
    if x.target is aten.cat.default and len(joined) == 2 and _along_last(x, keys):
        widths = [shape_of(part)[-1] for part in joined]
        for first in (False, True):
            scores, sinks = joined[::-1] if first else joined
            if same(widths[1 - first], 1) and not same(widths[first], 1):
                return SoftmaxSource(scores, (x,), (x,), sinks, first)
    return plain


def _along_last(x: Node, keys: int) -> bool:
    return keys == x.meta["val"].ndim - 1 and join_of(x) == (keys, False)


def _greatest(difference: Node, keys: int) -> list[Node]:
    """What computes the greatest of the row that it is subtracted from, and nothing else; [] if it is not."""
    call = Call(difference)
    if len(call.operands) != 2 or call["alpha"] != 1:
        return []
    row, node = call.operands
    found: list[Node] = []
    while node.target in (operator.getitem, aten.detach.default):
        if len(node.users) != 1 or node.args[1:] not in ((), (0,)):
            return []
        found.insert(0, node)
        node = node.args[0]
    if node.target not in MAXIMA or node.args[0] is not row or not _along(Call(node), keys):
        return []
    unread = [user for user in node.users if user not in found and not user.users]  # where the greatest stands
    return [node, *unread, *found] if len(node.users) == 1 + len(unread) else []


def _along(call: Call, keys: int) -> bool:
    dims = call["dim"] if isinstance(call["dim"], (list, tuple)) else [call["dim"]]
    return bool(call["keepdim"]) and [d % call.ndim() for d in dims] == [keys]


@dataclass(frozen=True)
class Sinks:
    """held: a value that has nothing but a number for each head, or one for all; lead: (B, H) of the scores.

    groups: both dims of `lead` are heads, of one sequence.
    """

    held: Node
    lead: tuple[Size, ...]
    groups: bool = False

    @property
    def batch_and_heads(self) -> tuple[Size, Size]:
        """The leading dims of an attention of which these are the sinks."""
        return (1, product(self.lead)) if self.groups else (self.lead[0], self.lead[1])

    def vector(self, editor: Editor, like: Node) -> Node:
        """(H,)."""
        count, (_, heads) = product(shape_of(self.held)), self.batch_and_heads
        found = editor.reshaped(self.held, (count,), like)
        if same(count, heads):
            return found
        return editor.compute(aten.expand.default, (found, [editor.sizes(heads)]), like)


def of_heads(sinks: Node, coords: Sequence[Any], lead: tuple[Size, ...]) -> Sinks | None:
    """What row (b, h, q) of the scores reads at these coords."""
    at: tuple[Node, Sequence[Any]] | None = (sinks, coords)
    while at is not None:
        node, coords = at
        shape = shape_of(node)
        held = [c for c, extent in zip(coords, shape, strict=True) if not same(extent, 1)]
        if held in ([], [HEAD]) and (not held or same(product(shape), lead[1])):
            return Sinks(node, lead)
        if (
            held == [BATCH, HEAD]
            and same(product(shape), product(lead))
            and before_reshapes(node).meta["val"].ndim == 1
        ):
            return Sinks(node, lead, groups=True)
        at = element_of(node, coords)
    return None
