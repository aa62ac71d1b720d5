"""Replace attentions over the parts of a sequence, which are joined, by one attention with a predicate over the parts.

    q0, q1 = split(q, [5, 3], dim=2); k0, k1 = ...; v0, v1 = ...
    cat([sdpa(q0, k0, v0).transpose(1, 2), sdpa(q1, k1, v1).transpose(1, 2)], dim=1)
        ->  part = bucketize(arange(8), [5, 8], right=True)
            sp.masked_attention(q, k, v, rows=[part], cols=[part], predicate="Eq(row0, col0)").transpose(1, 2)

Models for images attend to one image, frame or window at a time in this form. After it, the number of nodes does not
depend on the number of parts, and no part is distributed by itself. Bytes moved: none. Unchanged: parts that are not
all rows in order, and attentions with masks, dropout or different scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.modes import has_same_autocast
from sp_compile.passes.sharding.matchers import match_join, match_slice, permutation_of

aten, sp = torch.ops.aten, torch.ops.sp
ROWS_DIM = 2  # of q, k and v, (B, H, S, D)


class _Parts(NamedTuple):
    """Attentions over all parts of q, k and v, in order."""

    calls: list[OpCall]  # the attentions
    order: tuple[int, ...]  # dims of an attention in the order of the joined results
    qkv: list[Node]  # the tensors that are split
    lengths: list[list[int]]  # of the parts of queries, and of those of keys


@register_pass
class JoinSplitAttention(CanonicalPass):
    """Replacement of attentions over parts in one graph."""

    requires = frozenset({"fused attention"})
    provides = frozenset({"canonical", "mask predicates"})

    def edit(self, graph: Graph) -> Self:
        """Bind the pass to a graph, with an empty cache of the values that its layers share."""
        self.part_indices: dict[Any, Node] = {}  # part of each row, by the lengths of the parts
        return super().edit(graph)

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace all attentions over parts whose results are joined; return the number of joins."""
        joins = gm.graph.find_nodes(op="call_function", target=aten.cat.default)
        found = [(node, parts) for node in joins if (parts := _match_parts(node)) is not None]
        for node, parts in found:
            self._rewrite(node, parts)
        return len(found)

    def _rewrite(self, node: Node, parts: _Parts) -> None:
        """Replace a join of attentions by one attention in which a query attends to the keys of its own part."""
        call = parts.calls[0]
        rows, cols = parts.lengths
        predicate = "Eq(row0, col0) & (k <= q)" if call["is_causal"] else "Eq(row0, col0)"
        with self.graph.inserting_before(node):
            q_parts, k_parts = ([self._emit_part_index(lengths, node)] for lengths in (rows, cols))
            args = (*parts.qkv, q_parts, k_parts, [], predicate, 0.0, call["scale"], call["enable_gqa"])
            attention = self.compute(sp.masked_attention.default, args, parts.calls[0].node)
            node.replace_all_uses_with(self.compute(aten.permute.default, (attention, list(parts.order)), node))
        replaced = {step for x in node.args[0] for step in _iterate_steps(x)}
        self.erase([*sorted(replaced), node])  # attentions draw dropout, so that they are not erased as unused

    def _emit_part_index(self, lengths: list[int], like: Node) -> Node:
        """Return the index of the part of each row, int64 (1, S), emitted once for all layers."""
        device = like.meta["val"].device
        key = (*lengths, device)
        if key not in self.part_indices:
            options = {"dtype": torch.int64, "device": device}
            ends = [self.compute(aten.full.default, ([1], end), like, options) for end in accumulate(lengths)]
            ends_of_parts = self.compute(aten.cat.default, (ends,), like)
            rows = self.compute(aten.arange.default, (sum(lengths),), like, options)
            index = self.compute(aten.bucketize.Tensor, (rows, ends_of_parts), like, {"right": True})
            self.part_indices[key] = self.compute(aten.unsqueeze.default, (index, 0), like)
        return self.part_indices[key]


def _match_parts(node: Node) -> _Parts | None:
    """Match a cat of attentions over all parts of q, k and v, in order, or return None."""
    join = match_join(node)
    matched = [_match_unmasked_attention(x) for x in node.args[0]]
    found = [x for x in matched if x is not None]
    if join is None or len(found) < 2 or len(found) < len(matched):
        return None
    calls, orders = [call for call, _ in found], {order for _, order in found}
    if len(orders) > 1 or found[0][1][join[0]] != ROWS_DIM:
        return None
    if not has_same_autocast([*(call.node for call in calls), node]):  # it casts the operands of attention
        return None
    options = {tuple(call[name] for name in ("is_causal", "scale", "enable_gqa")) for call in calls}
    sources = [_match_pieces([call[name] for call in calls]) for name in ("query", "key", "value")]
    if len(options) > 1 or any(source is None for source in sources):
        return None
    (q, rows), (k, cols), (v, of_values) = (source for source in sources if source is not None)
    if cols != of_values or (calls[0]["is_causal"] and rows != cols):  # causal from the first row of each part on
        return None
    return _Parts(calls, found[0][1], [q, k, v], [rows, cols])


def _iterate_steps(node: Node) -> Iterator[Node]:
    """Yield a node and, while these are permutes of one reader, their operands: the last one is no permute."""
    while permutation_of(node) is not None and len(node.users) == 1:
        yield node
        node = node.all_input_nodes[0]
    yield node


def _match_unmasked_attention(node: Node) -> tuple[OpCall, tuple[int, ...]] | None:
    """Match an attention without a mask and dropout; return its call and its dims in the order of the node's."""
    *permutes, attention = _iterate_steps(node)
    if attention.target is not aten.scaled_dot_product_attention.default or attention.meta["val"].ndim != 4:
        return None
    order = tuple(range(4))
    for permute in reversed(permutes):
        order = tuple(order[d] for d in permutation_of(permute) or ())
    call = OpCall(attention)
    is_plain = call["attn_mask"] is None and call["dropout_p"] == 0 and len(attention.users) == 1
    return (call, order) if is_plain else None


def _match_pieces(pieces: Sequence[Node]) -> tuple[Node, list[int]] | None:
    """Return the tensor whose rows are these pieces in order, and their lengths, if it has no other rows; or None."""
    slices = [match_slice(piece) for piece in pieces]
    found = [piece for piece in slices if piece is not None and piece.dim == ROWS_DIM]
    if len(found) < len(slices) or len({piece.source for piece in found}) > 1:
        return None
    starts = [0, *accumulate(piece.length for piece in found)]
    if not all(isinstance(start, int) for start in starts) or starts[:-1] != [piece.start for piece in found]:
        return None
    if node_shape(found[0].source)[ROWS_DIM] != starts[-1]:
        return None
    return found[0].source, [end - start for start, end in pairwise(starts)]
