"""Replace flex_attention by attention with a predicate that is parsed from its mask_mod.

    def mask(b, h, q, k): return (q >= k) & (document[b, q] == document[b, k])
    flex_attention(q, k, v, block_mask=create_block_mask(mask, ..))
        ->  sp.masked_attention(q, k, v, rows=[document], cols=[document], predicate="(k <= q) & Eq(row0, col0)")

The mask_mod is inlined over all indices at once, as vmap would run it, and parsed as any other computed mask. The
tables of a BlockMask follow from its mask_mod, so unused tables are never built. kernel_options only select torch
kernels and are ignored. A score_mod, and masks without a predicate (per-head masks, tables of pairs), become a score
function (`score_functions.py`). Bytes moved: none.

A *body* is the graph of a mask_mod or score_mod. A *pair* is a query and a key. A mask_mod is split into *conditions*,
all of which must hold; each becomes part of the predicate or of the score function. A *fill* is a large negative finite
number in place of -inf.

Unchanged, with torch's op on gathered q, k and v: functions that read more than one pair, readers of the maximum score,
and block tables without a mask_mod. Readers of the log-sum-exp may be sinks (`lse_sinks.py`); else it is appended to
each row of the result.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import FakeTensor, flex_attention_op
from sp_compile.passes.base import register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import node_shape, read_results
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.fakes import trace_function
from sp_compile.passes.graph.sizes import Size, is_same_size
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
NO_MASK_BLOCK_SIZE = 1 << 30  # block size of the tables that torch builds without a BlockMask: one block


class _FlexCall(NamedTuple):
    """Arguments of torch's flex_attention op, `_FlexCall(*node.args)`."""

    q: Node  # (B, H, Q, D)
    k: Node  # (B, Hkv, K, D)
    v: Node  # (B, Hkv, K, E)
    score_mod: Node  # reference to the graph of the function
    block_mask: tuple[Any, ...]  # (sizes and tables of blocks, block size, reference to the graph of the mask_mod)
    scale: float  # factor of the scores
    kernel_options: Any  # options of torch's kernels
    score_captured: tuple[Any, ...]  # values that the score_mod captures
    mask_captured: tuple[Any, ...]  # values that the mask_mod captures

    @property
    def score_body(self) -> GraphModule:
        """Return the graph of the score_mod."""
        return _graph_body(self.score_mod)

    @property
    def mask_body(self) -> GraphModule:
        """Return the graph of the mask_mod."""
        return _graph_body(self.block_mask[-1])


@register_pass
class RewriteFlexAttention(RewriteMasks):
    """Replacement of the calls of flex_attention in one graph."""

    requires = frozenset({"normalized"})
    provides = frozenset({"canonical", "fused attention"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every call of flex_attention whose mask_mod and score_mod are functions of one query and one key."""
        self.mask_nodes: list[Node] = []  # inlined masks, which are erased at the end
        self._nodes_with_fills: set[Node] | None = None  # nodes that may contain fills, computed at the first use
        calls = self.graph.find_nodes(op="call_function", target=flex_attention_op)
        for node in calls:  # make constants such as the 0 of documents[0] readable for the passes
            _inline_numbers(_FlexCall(*node.args).score_body)
            _inline_numbers(_FlexCall(*node.args).mask_body)
        changes = sum(self._rewrite_call(node) for node in calls)
        self.drop(*self.mask_nodes)
        return changes

    def _rewrite_call(self, node: Node) -> bool:
        """Replace one call of flex_attention; return False, and report the reason, if it remains."""
        try:
            reason = self._refusal(node)
            if reason is None:
                self._replace_call(node, *self._parse_conditions(node))
        except (NotSymbolic, SpError) as error:
            reason = error.cause
        if reason is not None:
            self.note_refusal(node, f"it runs on gathered q, k and v: {reason}")
        return reason is None

    def _parse_conditions(self, node: Node) -> tuple[AttentionMask, list[GraphModule]]:
        """Return the mask of the conditions that have a predicate, and the graphs of the other conditions.

        A mask_mod is an `and` of conditions. One without a predicate, such as a lookup in a table of pairs, becomes a
        part of the score function.
        """
        body = _FlexCall(*node.args).mask_body
        try:
            return self._parse_mask_body(node, body), []
        except NotSymbolic:
            pass
        masks: list[AttentionMask] = []
        other_conditions: list[GraphModule] = []
        for condition in split_conditions(body):
            try:
                masks.append(self._parse_mask_body(node, condition))
            except NotSymbolic:
                other_conditions.append(condition)
        return intersect_masks(masks, _scores_shape(node)), other_conditions

    def _write_score(self, node: Node, conditions: list[GraphModule]) -> ScoreOperands:
        """Register the score function of the score_mod, which is -inf where one of the conditions fails.

        Returns its name and the vectors and tables that it reads. Raises NotSymbolic or SpError if there is none.
        """
        call = _FlexCall(*node.args)
        # If all scores of a query are a finite fill, it attends to all keys equally; with -inf, it attends to none. So
        # `write_score` needs the values that may contain fills. With sinks it does not (None): they take all of the
        # weight of such a query, as with -inf.
        is_fill = self._may_contain_fills if _match_sinks(node) is None else None
        return write_score(call.score_body, call.score_captured, conditions, call.mask_captured, self, node, is_fill)

    def _may_contain_fills(self, value: Node) -> bool:
        """Return True if a value that a score function reads may contain fills, large negative finite numbers."""
        if self._nodes_with_fills is None:
            self._nodes_with_fills = fill_nodes(self.graph.owning_module)
        return value in self._nodes_with_fills

    def _replace_call(self, node: Node, mask: AttentionMask, conditions: list[GraphModule]) -> None:
        """Replace a call by attention with a mask and a score function.

        If the call's output and log-sum-exp are only read to apply sinks (learned logits that take a share of the
        weights), `_match_sinks` returns them with their result, which is replaced, too.

        Raises NotSymbolic or SpError, and leaves the graph unchanged, if no predicate describes the mask.

        Args:
            node: The call of flex_attention.
            mask: The mask of the conditions that have a predicate.
            conditions: The graphs of the other conditions, which become a part of the score function.
        """
        q, k, v, *_ = node.args
        sink_attention, results = _match_sinks(node), read_results(node)
        query_heads, key_heads = (node_shape(x)[1] for x in (q, k))
        options = {"scale": _FlexCall(*node.args).scale, "enable_gqa": not is_same_size(query_heads, key_heads)}
        self.emit_predicate(mask, node)  # raises before the graph changes; `set_mask` reuses what it emits
        with self.graph.inserting_before(node):
            score = self._write_score(node, conditions)
        # Emit attention without a mask, in one of three forms, and map each result of the call to its replacement.
        # The empty arguments are rows, cols, sizes and the predicate, which `set_mask` adds; 0.0 is dropout_p. The last
        # two, the values of `options`, are scale and enable_gqa.
        masked_attention = torch.ops.sp.masked_attention.default
        masked_args = (q, k, v, [], [], [], "", 0.0, *options.values())
        with self.graph.inserting_before(node if sink_attention is None else sink_attention.result):
            if sink_attention is not None:
                sinks = sink_attention.sinks.vector(self, node)
                attention = self.compute(masked_attention, masked_args, node, {"sinks": sinks})
                replacements = {sink_attention.result: attention}
            elif 1 in results:
                attention = self.compute(masked_attention, masked_args, node, {"lse": True})
                replacements = self._split_lse(attention, results, node)
            else:
                attention = self.compute(aten.scaled_dot_product_attention.default, (q, k, v, None), node, options)
                replacements = {results[0]: attention}
        for result, replacement in replacements.items():
            replacement.meta["val"] = result.meta["val"]
            result.replace_all_uses_with(replacement)
        self.set_mask(attention, mask, score)
        sink_nodes = [] if sink_attention is None else sink_attention.chain[1:]  # chain[0] is among the results
        self.erase([node, *results.values(), *sink_nodes])

    def _split_lse(self, attention: Node, results: dict[int, Node], node: Node) -> dict[Node, Node]:
        """Map each result of the call that is read, the output and the log-sum-exp, to its replacement.

        Args:
            attention: sp.masked_attention with lse=True, (B, H, Q, E + 1): the last column is the log-sum-exp.
            results: The results of the call by index; 1, the log-sum-exp, is among them.
            node: The call of flex_attention.
        """
        replacements: dict[Node, Node] = {}
        width, dim = node_shape(_FlexCall(*node.args).v)[3], attention.meta["val"].ndim - 1
        if 0 in results:
            out = self.compute(aten.slice.Tensor, (attention, dim, 0, self.sizes(width)), node)
            replacements[results[0]] = self.cast(out, results[0].meta["val"].dtype, node)
        lse = self.compute(aten.select.int, (attention, dim, self.sizes(width)), node)
        # flex_attention's log-sum-exps are in base 2
        replacements[results[1]] = self.compute(aten.mul.Tensor, (lse, 1 / math.log(2)), node)
        return replacements

    def _parse_mask_body(self, node: Node, body: GraphModule) -> AttentionMask:
        """Return the mask that a mask_mod computes, or one condition of it.

        Args:
            node: The call of flex_attention.
            body: The graph of the function of b, h, q, k and captured values.

        Raises:
            NotSymbolic: No predicate describes the mask.
            SpError: The graph cannot compute a size.
        """
        shape, captured = _scores_shape(node), _FlexCall(*node.args).mask_captured

        def parse() -> AttentionMask:
            """Emit the function's result for all indices at once, and parse it as a mask tensor."""
            options = {"dtype": torch.int64, "device": node.args[0].meta["val"].device}
            with self.graph.inserting_before(node):
                indices = [self.compute(aten.arange.default, (self.sizes(n),), node, options) for n in shape]
                allowed = self._inline_body(body, [*indices, *captured], node)
            self.mask_nodes += [allowed, *indices]
            return require_all_heads(parse_mask(allowed, shape))

        return self.share_mask((body.code, *captured, shape), parse)  # parsed once for all calls with equal masks

    def _refusal(self, node: Node) -> str | None:
        """Return the reason why attention cannot replace a call, from its arguments and readers, or None."""
        call = _FlexCall(*node.args)
        qkv = (call.q, call.k, call.v)
        if 2 in read_results(node):
            return "its maximum scores are read"
        dtypes = {x.meta["val"].dtype for x in qkv}
        if len(dtypes) > 1 or not has_same_leading_dims([node_shape(x) for x in qkv], grouped=True):
            return "q, k and v have different dtypes or batch sizes"
        mask_result, block_size = call.mask_body.graph.output_node().args[0], call.block_mask[-2]
        # A constant mask_mod with tables of blocks, which are not those that torch builds without a BlockMask.
        if constant_value(mask_result) is not None and block_size != NO_MASK_BLOCK_SIZE:
            return "its BlockMask has tables in place of a mask_mod, which no predicate expresses"
        return None

    def _inline_body(self, body: GraphModule, operands: list[Any], like: Node) -> Node:
        """Emit the result of a mask function for all indices b, h, q and k at once, a tensor (B, H, Q, K).

        Args:
            body: The graph of the function.
            operands: The vectors of all indices b, h, q and k, and captured values.
            like: The node whose metadata new nodes copy.
        """
        function: Any = body
        for dim in reversed(range(4)):  # map over one vector of indices after the other, b outermost
            function = torch.vmap(function, in_dims=tuple(0 if i == dim else None for i in range(len(operands))))
        values = [x.meta["val"] if isinstance(x, Node) else x for x in operands]
        batched_body = trace_function(function, values)
        if batched_body.graph.find_nodes(op="get_attr"):
            raise NotSymbolic("its mask_mod creates a tensor")
        return self.inline(batched_body, operands, like)


def _match_sinks(node: Node) -> SinkAttention | None:
    """Return the attention with sinks that a call of flex_attention and its readers compute, or None.

    It is out * sigmoid(lse - sinks), as `match_lse_sinks` describes, and nothing else reads the log-sum-exp.
    """
    results = read_results(node)
    if set(results) != {0, 1} or len(results[1].users) != 1:
        return None
    # The log-sum-exp of torch's op has base 2; FlexAttention multiplies it by ln(2).
    (natural_lse,) = results[1].users
    if natural_lse.target is not aten.mul.Tensor or natural_lse.args != (results[1], math.log(2)):
        return None
    attention = match_lse_sinks(results[0], natural_lse)
    # The chain has the nodes from the log-sum-exp on that the attention with sinks replaces.
    return None if attention is None else replace(attention, chain=(results[1], *attention.chain))


def _scores_shape(node: Node) -> tuple[Size, ...]:
    """Return the shape (B, H, Q, K) of the scores of a flex_attention call."""
    q, k = node.args[:2]
    return (*node_shape(q)[:3], node_shape(k)[2])


def _graph_body(ref: Node) -> GraphModule:
    """Return the graph of a mask_mod or a score_mod, to which a get_attr node refers."""
    module = ref.graph.owning_module.get_submodule(ref.target)
    assert isinstance(module, GraphModule), ref
    return module


def _inline_numbers(body: GraphModule) -> None:
    """Replace constant 0-dim tensors in the graph of a mask_mod or score_mod by aten.full, in place.

    Such a tensor is the index in documents[0], for example. Passes read the value of aten.full from the graph.
    """
    for node in body.graph.find_nodes(op="get_attr"):
        constant = operator.attrgetter(node.target)(body)
        if isinstance(constant, torch.Tensor) and not constant.ndim and not isinstance(constant, FakeTensor):
            editor = GraphEditor().edit(body.graph)
            options = {"dtype": constant.dtype, "device": constant.device}
            with body.graph.inserting_before(node):
                full = editor.emit(aten.full.default, ([], constant.item()), node.meta.get("val"), node, options)
            node.replace_all_uses_with(full)
            body.graph.erase_node(node)
    body.recompile()
