"""How programs gather and scatter along another dim than the first: by chunks that are moved beside the collective.

all_gather(x) -> wait -> split(dim 0) -> cat(dim d)             split(x, dim d) -> cat(dim 0) -> reduce_scatter -> wait
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from .._compat import statically_known_true
from ..call import Call

aten = torch.ops.aten


@dataclass(frozen=True)
class Chunks:
    """`count` equal chunks of one dim, put side by side along another: source is before, result behind."""

    split: Node
    pieces: tuple[Node, ...]
    cat: Node
    away: int  # the dim that the chunks were taken from
    onto: int  # the dim along which they lie now

    @property
    def source(self) -> Node:
        """What is split."""
        return Call(self.split)["self"]

    @property
    def nodes(self) -> list[Node]:
        """All nodes, in the graph's order."""
        return [self.split, *self.pieces, self.cat]


def chunks_of(cat: Node) -> Chunks | None:
    """The move that ends with this node, if it is one, and if nothing else reads the chunks."""
    if cat.target is not aten.cat.default:
        return None
    call = Call(cat)
    pieces = tuple(call["tensors"])
    split = pieces[0].args[0] if pieces[0].target is operator.getitem else None
    if (
        not isinstance(split, Node)
        or split.target is not aten.split.Tensor
        or len(split.users) != len(pieces)
    ):
        return None
    in_order = all(p.target is operator.getitem and p.args == (split, i) for i, p in enumerate(pieces))
    taken = Call(split)
    whole, size = taken["self"].meta["val"].shape[taken.dim()], taken["split_size"]
    size = size.meta["val"] if isinstance(size, Node) else size
    equal = bool(statically_known_true(whole == size * len(pieces)))
    if not in_order or not equal or any(len(p.users) != 1 for p in pieces):
        return None
    return Chunks(split, pieces, cat, taken.dim(), call.dim("dim", 0))


def chunks_behind(node: Node) -> Chunks | None:
    """The move that is all that reads the node."""
    for split in node.users:
        for piece in split.users:
            for cat in piece.users:
                found = chunks_of(cat) if len(node.users) == 1 else None
                return found if found is not None and found.source is node else None
    return None
