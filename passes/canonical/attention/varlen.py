"""Replace torch's varlen_attn of packed documents by attention with a predicate over documents.

    varlen_attn(q, k, v, ends, ends, most, most, window_size=(-1, 0))           q: (T, H, D), ends: (documents + 1,)
        ->  document = bucketize(arange(T), ends[1:], right=True)
            sp.masked_attention(q, k, v, rows=[document], cols=[document], predicate="Eq(row0, col0) & (k <= q)")

T tokens are the *documents* in order, packed without padding; their *ends* are cumulative, from 0 on. The replacement
transposes: (T, H, D) becomes (1, H, T, D). If keys have other document ends than queries, a window is aligned to the
last query and the last key of each document. Then row1 is the key at a query's own position. Tokens after the last
document form one more document, for which torch's kernels define no result. Bytes moved: none.

Unchanged, with torch's op on gathered q, k and v: readers of the log-sum-exp (torch's backward ignores its gradient, so
sinks on it train differently), and paged keys (block_table, seqused_k), which have no gradient either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.lowering.torch_compat import varlen_attention
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, read_results
from sp_compile.passes.graph.sizes import is_same_size

aten, sp = torch.ops.aten, torch.ops.sp


@register_pass
class RewriteVarlenAttention(CanonicalPass):
    """Replacement of the calls of varlen_attn in one graph.

    `flash_attention.py` uses `emit_attention`, too.
    """

    provides = frozenset({"canonical", "mask predicates"})

    def edit(self, graph: Graph) -> Self:
        """Bind the pass to a graph, with an empty cache of the values that its layers share."""
        self.token_indices: dict[Any, Node] = {}  # document or aligned key of each token, by the ends it depends on
        return super().edit(graph)

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every call of varlen_attn, and report the reason for those that remain."""
        changes = 0
        # `varlen_attention` is None if this torch has no such op.
        calls = list(self.graph.find_nodes(op="call_function", target=varlen_attention)) if varlen_attention else []
        for node in calls:
            reason = _varlen_refusal(node)
            if reason is None:
                self._rewrite(node)
                changes += 1
            else:
                self.note_refusal(node, f"it runs on gathered q, k and v: {reason}")
        return changes

    def _rewrite(self, node: Node) -> None:
        """Replace a call of varlen_attn by attention with a predicate.

        Only its first result is read (`_varlen_refusal`), so that its one user is a getitem, which is replaced, too.
        """
        call = OpCall(node)
        q, k, v = (call[name] for name in ("query", "key", "value"))
        q_ends, k_ends = call["cu_seq_q"], call["cu_seq_k"]
        left, right = call.get("window_size") or (-1, -1)
        (out,) = node.users
        with self.graph.inserting_before(node):
            ends = (q_ends, q_ends if k_ends is None else k_ends)
            window = (left, 0 if call["is_causal"] else right)  # causal: no key after the query
            out.replace_all_uses_with(self.emit_attention((q, k, v), ends, window, call["scale"], node))
        self.erase([node, out])

    def emit_attention(
        self, qkv: Sequence[Node], ends: tuple[Node, Node], window: tuple[int, int], scale: Any, like: Node,
        dropout_p: float = 0.0, **more: Any,
    ) -> Node:  # fmt: skip
        """Emit attention over packed documents, in which a query attends to the keys of its own document only.

        Args:
            qkv: q (T, H, D), k and v, any floating dtype.
            ends: The cumulative ends of the documents of queries and of keys, (documents + 1,) each, from 0 on.
            window: The number of keys before and after a query's position to which it attends, -1 for all.
            scale: The factor of the scores, None for 1 / sqrt(D).
            like: The node whose metadata new nodes copy.
            dropout_p: The dropout probability.
            more: Keyword arguments of `sp.masked_attention`.

        Returns:
            The attention (T, H, E).
        """
        (q, k, _), (q_ends, k_ends) = qkv, ends
        rows, cols = [self._document_index(q, q_ends, like)], [self._document_index(k, k_ends, like)]
        position = "q"  # text of the key at the query's own position
        if window != (-1, -1) and q_ends is not k_ends:
            rows.append(self._aligned_keys(rows[0], q_ends, k_ends, like))
            position = "row1"
        heads_first = [self._to_sdpa_layout(x, like) for x in qkv]
        predicate = " & ".join(["Eq(row0, col0)", *window_predicate(position, *window)])
        enable_gqa = not is_same_size(node_shape(q)[1], node_shape(k)[1])
        sizes: list[Node] = []  # numbers that the predicate reads: none
        args = (*heads_first, rows, cols, sizes, predicate, dropout_p, scale, enable_gqa)
        attention = self.compute(sp.masked_attention.default, args, like, more)  # (1, H, T, E)
        attention = self.compute(aten.squeeze.dims, (attention, [0]), like)
        return self.compute(aten.transpose.int, (attention, 0, 1), like)

    def _to_sdpa_layout(self, x: Node, like: Node) -> Node:
        """Transpose q, k or v from (T, H, D) to (1, H, T, D), the layout of sp.masked_attention."""
        heads_first = self.compute(aten.transpose.int, (x, 0, 1), like)
        return self.compute(aten.unsqueeze.default, (heads_first, 0), like)

    def _document_index(self, x: Node, ends: Node, like: Node) -> Node:
        """Return the index of each token's document, int64 (1, T), emitted once for all layers.

        Args:
            x: The queries or keys (T, H, D).
            ends: The cumulative ends of their documents, (documents + 1,).
            like: The node whose metadata new nodes copy.
        """
        length = node_shape(x)[0]
        if (ends, length) not in self.token_indices:
            options = {"dtype": ends.meta["val"].dtype, "device": x.meta["val"].device}
            tokens = self.compute(aten.arange.default, (self.sizes(length),), like, options)
            later_ends = self.compute(aten.slice.Tensor, (ends, 0, 1), like)
            index = self.compute(aten.bucketize.Tensor, (tokens, later_ends), like, {"right": True})
            self.token_indices[ends, length] = self.compute(aten.unsqueeze.default, (index, 0), like)
        return self.token_indices[ends, length]

    def _aligned_keys(self, documents: Node, q_ends: Node, k_ends: Node, like: Node) -> Node:
        """Return for each query the index of the key at the same distance from the end of its document, int64 (1, T).

        It is the index of the query plus an offset, k_end - q_end, of its document.

        Args:
            documents: The index of each query's document, (1, T).
            q_ends: The cumulative ends of the documents of queries, (documents + 1,).
            k_ends: Those of keys.
            like: The node whose metadata new nodes copy.
        """
        key = (documents, q_ends, k_ends)
        if key not in self.token_indices:
            length = node_shape(documents)[1]
            options = {"dtype": torch.int64, "device": documents.meta["val"].device}
            tokens = self.compute(aten.arange.default, (self.sizes(length),), like, options)
            differences = self.compute(aten.sub.Tensor, (k_ends, q_ends), like)
            offsets = self.compute(aten.slice.Tensor, (differences, 0, 1), like)  # of each document
            # Tokens after the last document form one more document, with the offset of the last one.
            last_offset = self.compute(aten.slice.Tensor, (offsets, 0, -1), like)
            offsets = self.compute(aten.cat.default, ([offsets, last_offset],), like)
            token_offsets = self.compute(aten.index.Tensor, (offsets, [documents]), like)
            self.token_indices[key] = self.compute(aten.add.Tensor, (token_offsets, tokens), like)
        return self.token_indices[key]


def _varlen_refusal(node: Node) -> str | None:
    """Return the reason why a call of varlen_attn is not replaced, for the report, or None."""
    call = OpCall(node)
    if set(read_results(node)) != {0} or len(node.users) != 1:
        return "its log-sum-exp is read, for example by sinks, and its backward has no gradient for it"
    if call.get("seqused_k") is not None or call.get("block_table") is not None:
        return "its keys are paged (block_table, seqused_k)"
    return None


def window_predicate(position: str, left: int, right: int) -> Iterator[str]:
    """Yield the text of the conditions that limit attention to a window of keys, as parts of a predicate.

    For ("q", 3, 0), these are "(k <= q)" and "(q - k <= 3)".

    Args:
        position: The text of the key at the query's own position.
        left: The number of keys before that position, -1 for all.
        right: The number of keys after it, -1 for all.
    """
    if right >= 0:
        yield f"(k <= {position})" if right == 0 else f"(k - {position} <= {right})"
    if left >= 0:
        yield f"({position} - k <= {left})"
