"""Replace flex_attention by attention with a predicate that is parsed from its mask_mod.

    def mask(b, h, q, k): return (q >= k) & (document[b, q] == document[b, k])
    flex_attention(q, k, v, block_mask=create_block_mask(mask, ..))
        ->  sp.masked_attention(q, k, v, rows=[document], cols=[document], predicate="(k <= q) & Eq(row0, col0)")

The mask_mod is inlined over all indices at once, as vmap would run it, and parsed as any other computed mask. The
tables of a BlockMask follow from its mask_mod, so unused tables are never built. kernel_options only select torch
kernels and are ignored. A score_mod, and masks without a predicate (per-head masks, tables of pairs), become a score
function (`score_functions.py`). Bytes moved: none.

Unchanged, with torch's op on gathered q, k and v: functions that read more than one pair, readers of the maximum score,
and block tables without a mask_mod. Readers of the log-sum-exp may be sinks (`lse_sinks.py`); else it is appended to
each row of the result.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import FakeTensor, flex_attention_op
from sp_compile.passes.base import register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import node_shape, read_results
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.fakes import trace_function
from sp_compile.passes.graph.sizes import Size, as_sizes, is_same_size
from sp_compile.passes.sharding.attention_axes import fill_nodes
from sp_compile.passes.sharding.matchers import constant_value

from .elements import NotSymbolic
from .lse_sinks import SinkAttention, match_lse_sinks
from .parse_masks import (
    AttentionMask,
    RewriteMasks,
    has_same_leading_dims,
    intersect_masks,
    parse_mask,
    require_all_heads,
)
from .score_functions import ScoreOperands, split_conditions, write_score

aten = torch.ops.aten
WHOLE_BLOCK = 1 << 30
"""Block size of the tables that torch builds without a BlockMask: one block."""


@register_pass
class RewriteFlexAttention(RewriteMasks):
    """Replacement of the calls of flex_attention in one graph."""

    requires = frozenset({"normalized"})
    provides = frozenset({"canonical", "fused attention"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        self.written: list[Node] = []
        self._filling: set[Node] | None = None
        found = self.graph.find_nodes(op="call_function", target=flex_attention_op)
        for body in [_graph_body(ref) for node in found for ref in (node.args[3], node.args[4][-1])]:
            _inline_numbers(body)
        changes = sum(self._rewrite_call(n) for n in found)
        self.drop(*self.written)
        return changes

    def _rewrite_call(self, node: Node) -> bool:
        try:
            why = self._refusal(node)
            if why is None:
                self._attention(node, *self._conditions(node))
        except (NotSymbolic, SpError) as error:
            why = error.cause
        if why is not None:
            self.note_refusal(node, f"it runs on gathered q, k and v: {why}")
        return why is None

    def _refusal(self, node: Node) -> str | None:
        """Return a reason against the rewrite that needs no analysis of the mask."""
        q, k, v, _, block_mask, *_ = node.args
        values = [x.meta["val"] for x in (q, k, v)]
        shapes = [as_sizes(x.shape) for x in values]
        if 2 in read_results(node):
            return "its maximum scores are read"
        if len({x.dtype for x in values}) > 1 or not has_same_leading_dims(shapes, grouped=True):
            return "q, k and v have different dtypes or batch sizes"
        if constant_value(_body_result(_graph_body(block_mask[-1]))) is not None and block_mask[-2] != WHOLE_BLOCK:
            return "its BlockMask has tables in place of a mask_mod, which no predicate expresses"
        return None

    def _conditions(self, node: Node) -> tuple[AttentionMask, list[GraphModule]]:
        """Return the predicates of the mask_mod, and the conditions without a predicate."""
        body, found, others = _graph_body(node.args[4][-1]), list[AttentionMask](), list[GraphModule]()
        try:
            return self._mask(node, body), []
        except NotSymbolic:
            pass
        for one in split_conditions(body):
            try:
                found.append(self._mask(node, one))
            except NotSymbolic:
                others.append(one)
        return intersect_masks(found, _scores_shape(node)), others

    def _score(self, node: Node, conditions: list[GraphModule]) -> ScoreOperands:
        """Return the score modification, -inf where a condition fails. Raises NotSymbolic or SpError."""
        # Sinks take their share of a row's weights; fills take none.
        is_fill = self._may_hold_fills if _match_sinks(node) is None else None
        body = _graph_body(node.args[3])
        return write_score(body, node.args[7], conditions, node.args[8], self, node, is_fill)

    def _may_hold_fills(self, value: Node) -> bool:
        """Return True if a value that a score function reads may contain fills."""
        if self._filling is None:
            self._filling = fill_nodes(self.graph.owning_module)
        return value.meta["val"].is_floating_point() and value in self._filling

    def _attention(self, node: Node, mask: AttentionMask, conditions: list[GraphModule]) -> None:
        """Replace the call. Raises NotSymbolic or SpError and leaves the graph unchanged."""
        q, k, v, *_ = node.args
        sunk, results = _match_sinks(node), read_results(node)
        queries, keys = (node_shape(x)[1] for x in (q, k))
        options = {"scale": node.args[5], "enable_gqa": not is_same_size(queries, keys)}
        with self.graph.inserting_before(node):
            score = self._score(node, conditions)
        masked = torch.ops.sp.masked_attention.default, (q, k, v, [], [], [], "", 0.0, *options.values())
        with self.graph.inserting_before(node if sunk is None else sunk.result):
            if sunk is not None:
                fresh = self.compute(*masked, node, {"sinks": sunk.sinks.vector(self, node)})
                read = {sunk.result: fresh}
            elif 1 in results:
                fresh = self.compute(*masked, node, {"lse": True})
                read = self._with_lse(fresh, results, node)
            else:
                fresh = self.compute(aten.scaled_dot_product_attention.default, (q, k, v, None), node, options)
                read = {results[0]: fresh}
        for out, found in read.items():
            found.meta["val"] = out.meta["val"]
            out.replace_all_uses_with(found)
        try:
            self.set_mask(fresh, mask, score)
        except (NotSymbolic, SpError):
            for out, found in read.items():
                found.replace_all_uses_with(out)
            self.drop(*(x for x in read.values() if x is not fresh))
            self.erase([fresh])
            self.drop(*score.heads, *score.tables)
            raise
        self.erase([node, *results.values(), *([] if sunk is None else sunk.chain[1:])])

    def _with_lse(self, both: Node, results: dict[int, Node], node: Node) -> dict[Node, Node]:
        """Map each result that is read to its replacement. torch's log-sum-exps are in base 2."""
        found: dict[Node, Node] = {}
        width, dim = node_shape(node.args[2])[3], both.meta["val"].ndim - 1
        if 0 in results:
            out = self.compute(aten.slice.Tensor, (both, dim, 0, self.sizes(width)), node)
            found[results[0]] = self.cast(out, results[0].meta["val"].dtype, node)
        lse = self.compute(aten.select.int, (both, dim, self.sizes(width)), node)
        found[results[1]] = self.compute(aten.mul.Tensor, (lse, 1 / math.log(2)), node)
        return found

    def _mask(self, node: Node, body: GraphModule) -> AttentionMask:
        """Return the mask of a mask_mod, or of a part of one, for all indices. Raises NotSymbolic or SpError."""
        shape, reads = _scores_shape(node), node.args[8]

        def read() -> AttentionMask:
            """Inline the mask function and parse its result."""
            with self.graph.inserting_before(node):
                indices = [self._indices(length, node) for length in shape]
                allowed = self._inline_body(body, [*indices, *reads], node)
            self.written += [allowed, *indices]
            return require_all_heads(parse_mask(allowed, shape))

        return self.share_form((body.code, *reads, shape), read)

    def _indices(self, length: Size, like: Node) -> Node:
        kind = {"dtype": torch.int64, "device": like.args[0].meta["val"].device}
        return self.compute(aten.arange.default, (self.sizes(length),), like, kind)

    def _inline_body(self, body: GraphModule, operands: list[Any], like: Node) -> Node:
        """Inline the body of b, h, q, k and captured values for all indices: a tensor of four dims."""
        function: Any = body
        for dim in reversed(range(4)):
            dims = [0 if i == dim else None for i in range(len(operands))]
            function = torch.vmap(function, in_dims=tuple(dims))
        values = [x.meta["val"] if isinstance(x, Node) else x for x in operands]
        spread = trace_function(function, values)
        if spread.graph.find_nodes(op="get_attr"):
            raise NotSymbolic("its mask_mod creates a tensor")
        return self.inline(spread, operands, like)


def _match_sinks(node: Node) -> SinkAttention | None:
    """Return the attention with sinks if only sinks read the log-sum-exp (base 2 in torch's op)."""
    results = read_results(node)
    (natural,) = results[1].users if set(results) == {0, 1} and len(results[1].users) == 1 else (None,)
    if natural is None or natural.target is not aten.mul.Tensor or natural.args != (results[1], math.log(2)):
        return None
    found = match_lse_sinks(results[0], natural)
    return None if found is None else replace(found, chain=(results[1], *found.chain))


def _scores_shape(node: Node) -> tuple[Size, ...]:
    """Return (B, H, Q, K)."""
    q, k = node.args[:2]
    return (*node_shape(q)[:3], node_shape(k)[2])


def _graph_body(ref: Node) -> GraphModule:
    module = ref.graph.owning_module.get_submodule(ref.target)
    assert isinstance(module, GraphModule)
    return module


def _inline_numbers(body: GraphModule) -> None:
    """Replace tensors that a trace created for numbers by numbers: documents[0] looks up row tensor(0)."""
    for node in body.graph.find_nodes(op="get_attr"):
        constant = operator.attrgetter(node.target)(body)
        if isinstance(constant, torch.Tensor) and not constant.ndim and not isinstance(constant, FakeTensor):
            editor = GraphEditor().edit(body.graph)
            with body.graph.inserting_before(node):
                kind = {"dtype": constant.dtype, "device": constant.device}
                written = editor.emit(aten.full.default, ([], constant.item()), node.meta.get("val"), node, kind)
            node.replace_all_uses_with(written)
            body.graph.erase_node(node)
    body.recompile()


def _body_result(body: GraphModule) -> Any:
    return body.graph.output_node().args[0]
