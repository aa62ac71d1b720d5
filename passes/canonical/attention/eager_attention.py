"""Replace eager attention by scaled_dot_product_attention where the two are equivalent.

    s = matmul(q, k.mT) * scale + bias            also einsum, bmm, baddbmm (and its bias); scale as mul or div
    s = tanh(s / cap) * cap                       before the mask; -> sp.masked_attention(..., score=cap*tanh(s))
    s = s.masked_fill(~allowed, -inf)             also where, and s * allowed - 1e9 * (1 - allowed)
    p = dropout(softmax(s.float(), -1).to(bf16))  also softmax from exponentials (`softmaxes.py`), and nan_to_num
    o = matmul(p, v)                              ->  scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)

    p = softmax(cat([s, sinks], -1), -1)[.., :-1] ->  sp.masked_attention(q, k, v, ..., attn_mask=mask, sinks=sinks)

The *weights* are the probabilities after casts and dropout. *Leading dims* precede queries and keys; an *order* lists
the dims of a value as (leading dims, queries, keys). A *fill* is the number that masked scores get. A *gate* is a
tensor that multiplies the scores, such as a mask of 0 and 1 (`scores.py`).

Scores may be transposed, matmul(k, q.mT) with a softmax along -2, or have permuted dims. A query without any key gets
zeros, as with torch's op and with nan_to_num of a softmax. A scale on q or k remains there, with scale=1. A tensor that
scales the scores scales q instead. Dropout draws other random numbers than the eager form. `sinks.py` describes sinks
and other operands of the softmax. Bytes moved: none.

Unchanged: scores or probabilities with other readers; softmax in less precision than the values (float64 models with a
float32 softmax); parts in different autocast regions; operands that broadcast. Finite fills are unchanged too, unless
every query provably attends to some key or learned sinks absorb the row: a row of fills attends to all keys equally.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import HALF
from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.modes import has_same_autocast, restore_autocast
from sp_compile.passes.graph.sizes import Size, is_same_shape, is_same_size, size_product
from sp_compile.passes.graph.strides import inverse_permutation, is_identity
from sp_compile.passes.sharding.attention_axes import fill_nodes
from sp_compile.passes.sharding.matchers import is_float_cast, move_source, steps_from, value_origin
from sp_compile.passes.sharding.products import ProductMatch, ProductOperand, match_product, transpose_product

from .lse_sinks import match_lse_sinks
from .parse_masks import has_key_per_query, has_unfilled_key_per_query, parse_bias, try_parse_mask
from .score_functions import SCORE, register_expression
from .scores import (
    ScoreChain,
    ScoreOperand,
    is_between_products,
    is_neutral_op,
    match_scores,
    order_after,
    scores_refusal,
)
from .sinks import SinkValue, SoftmaxSource, match_softmax_source
from .softmaxes import SoftmaxMatch, match_softmax

aten, sp = torch.ops.aten, torch.ops.sp


@dataclass
class WeightChain:
    """Ops from the softmax to the product with the values, as far as they match."""

    chain: list[Node] = field(default_factory=list)  # the ops, in graph order
    dropout: float = 0.0  # probability of the dropout among them
    product: ProductMatch | None = None  # product with the values; None if there is none
    last: Node | None = None  # node of that product, or of another product that reads the probabilities


@dataclass
class EagerAttention:
    """An eager attention that may be replaced."""

    scores: ScoreChain  # the input of the softmax
    values: ProductMatch  # the product of the probabilities with the values
    operands: list[ProductOperand]  # queries, keys, values
    sinks: SinkValue | None  # sinks of the softmax, if any
    dropout: float  # probability of the dropout of the weights
    last: Node  # the result
    chain: list[Node]  # all other nodes, which are erased


@register_pass
class FuseEagerAttention(CanonicalPass):
    """Replacement of every eager attention around a softmax."""

    requires = frozenset({"normalized", "rolled loops"})
    provides = frozenset({"canonical", "fused attention"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every eager attention, and report why each other softmax between two products remains."""
        self._may_contain_fills = fill_nodes(gm)
        reasons: dict[Node, str | None] = {}  # result of a softmax -> why it remains, None for a replaced one
        for node in [node for node in self.graph.nodes if match_softmax(node) is not None]:
            softmax = match_softmax(node)  # again, since the replacement of another attention may change its operands
            if softmax is not None:
                reasons[node] = self._rewrite(softmax)
        for node, reason in reasons.items():
            if reason is not None and is_between_products(node):
                self.note_refusal(node, reason)
        return list(reasons.values()).count(None)

    def _rewrite(self, softmax: SoftmaxMatch) -> str | None:
        """Replace the attention around a softmax and return None, or return the reason why it is not replaced."""
        attention = _softmax_refusal(softmax) or _match_attention(softmax)
        if isinstance(attention, str):
            return attention
        with self.graph.inserting_before(attention.last), restore_autocast(attention.last):
            out = self._emit_attention(attention)
        if out is None:  # no attention mask is equivalent to the masks of the scores
            if attention.scores.gate is not None:
                return "it is multiplied by a value that is no mask, or not filled: use masked_fill(mask, -inf)"
            return "a mask of finite fills under which a query may attend to nothing, or a bias that may contain fills"
        attention.last.replace_all_uses_with(out)
        self.erase([*attention.chain, attention.last])
        return None

    def _emit_attention(self, attention: EagerAttention) -> Node | None:
        """Emit the fused attention and return its result, or None if no attention mask is equivalent to its masks.

        The result has the shape and the order of dims of `attention.last`.
        """
        scores, sinks, last, operands = attention.scores, attention.sinks, attention.last, attention.operands
        # The program may merge (batch, heads) to (batch * heads,) for its products, while masks and sinks apply to
        # separate dims. All operands are reshaped to the leading dims of the sinks, or else of the masks.
        value_leading, order = operands[2].shape[:-2], attention.values.order
        leading: tuple[Size, ...] = value_leading
        if sinks is not None:
            leading = sinks.batch_and_heads
        elif scores.masked_shape is not None:
            leading = scores.masked_shape[:-2]
        shape = (*leading, operands[0].shape[-2], operands[1].shape[-2])
        # Sinks without fills keep some weight in every row, so that fills remove all weight of their keys.
        absorbs_fills = sinks is not None and sinks.value not in self._may_contain_fills
        mask, is_equivalent = self._emit_mask(scores, shape, operands[0].node.meta["val"].dtype, absorbs_fills, last)
        if not is_equivalent:
            self.drop(mask)
            return None
        q, k, v = (self.reshape(x.materialize(self, last), (*leading, *x.shape[-2:]), last) for x in operands)
        for factor, divides in scores.factors:
            target = aten.div.Tensor if divides else aten.mul.Tensor
            q = self.compute(target, (q, factor.materialize(self, last)), last)
        out = self._emit_op(attention, (q, k, v), mask)
        out = self.reshape(out, (*value_leading, *node_shape(out)[-2:]), last)
        if is_identity(order):
            return out
        return self.compute(aten.permute.default, (out, inverse_permutation(order)), last)

    def _emit_op(self, attention: EagerAttention, qkv: Sequence[Node], mask: Node | None) -> Node:
        """Emit torch's op on q, k, v and the mask, or sp.masked_attention if there are sinks or a score function.

        A score function, such as a soft cap, applies to the scaled score of each pair of query and key.
        """
        scores, sinks, like = attention.scores, attention.sinks, attention.last
        if sinks is None and scores.score == SCORE:
            args: tuple[Any, ...] = (*qkv, mask, attention.dropout)
            return self.compute(aten.scaled_dot_product_attention.default, args, like, {"scale": scores.scale})
        no_predicate: tuple[Any, ...] = ([], [], [], "")  # rows, cols, sizes, predicate
        enable_gqa = False
        args = (*qkv, *no_predicate, attention.dropout, scores.scale, enable_gqa)
        kwargs: dict[str, Any] = {"attn_mask": mask}
        if scores.score != SCORE:
            kwargs |= {"score": register_expression(scores.score), "heads": []}
        if sinks is not None:
            kwargs["sinks"] = sinks.vector(self, like)
        return self.compute(sp.masked_attention.default, args, like, kwargs)

    def _emit_mask(
        self, scores: ScoreChain, shape: tuple[Size, ...], dtype: torch.dtype, absorbs_fills: bool, like: Node
    ) -> tuple[Node | None, bool]:
        """Emit the mask that combines biases and fills, as attention ops take it.

        A bias is added to scores; a fill replaces masked scores by a number such as -inf. A finite fill differs from a
        mask in a row of fills, which attends to all keys equally.

        Args:
            scores: The scores.
            shape: The shape of the scores, (leading dims, queries, keys).
            dtype: The dtype of q.
            absorbs_fills: True if fills remove all weight even if all keys are filled, since sinks are not filled.
            like: The node whose metadata new nodes copy.

        Returns:
            The mask (None without biases and fills), and whether it is equivalent to the biases and fills.
        """
        if scores.gate is not None:
            return self._emit_gated_mask(scores, scores.gate.materialize(self, like), shape, like)
        bias, allowed, is_equivalent = self._emit_biases(scores, shape, dtype, absorbs_fills, like)
        for condition, filled_value, _ in scores.fills:  # scores are filled where it is `filled_value`
            allowed = self._intersect(allowed, self._emit_condition(condition, not filled_value, like), like)
        if not absorbs_fills and allowed is not None and any(math.isfinite(fill) for *_, fill in scores.fills):
            mask_form = try_parse_mask(allowed, shape)
            is_equivalent = is_equivalent and mask_form is not None and has_key_per_query(mask_form)
        if not absorbs_fills and is_equivalent:
            is_equivalent = self._has_joint_fills(scores, shape, like)
        mask = bias if allowed is None else allowed
        if bias is not None and allowed is not None:
            mask = self.compute(aten.where.ScalarOther, (allowed, bias, -math.inf), like)
        while mask is not None and mask.meta["val"].ndim < 2:  # attention ops need the dims of queries and keys
            mask = self.compute(aten.unsqueeze.default, (mask, 0), like)
        return mask, is_equivalent

    def _emit_biases(
        self, scores: ScoreChain, shape: tuple[Size, ...], dtype: torch.dtype, absorbs_fills: bool, like: Node
    ) -> tuple[Node | None, Node | None, bool]:
        """Emit the biases of the scores as one sum and one condition; arguments as in `_emit_mask`.

        A bias in another dtype than q must consist of zeros and fills, since a cast could round others. It becomes the
        condition that it is 0.

        Returns:
            The sum of the other biases, and the conjunction of the conditions (each None if there is none); and whether
            they are equivalent to the biases.
        """
        total: Node | None = None
        allowed: Node | None = None
        is_equivalent = True
        for operand, factor in scores.biases:
            node = operand.materialize(self, like)
            if operand.dtype != dtype:
                # With a negative factor, fills would be positive.
                is_equivalent &= factor > 0 and try_parse_mask(node, shape, absorbs_fills) is not None
                allowed = self._intersect(allowed, self.compute(aten.eq.Scalar, (node, 0), like), like)
                continue
            term = self._scale(node, factor, like)
            has_no_fills = absorbs_fills or operand.node not in self._may_contain_fills
            is_equivalent = is_equivalent and (has_no_fills or _has_known_fills(term, shape, dtype))
            total = term if total is None else self.compute(aten.add.Tensor, (total, term), like)
        return total, allowed, is_equivalent

    def _emit_condition(self, operand: ScoreOperand, value: bool, like: Node) -> Node:
        """Emit the condition that a mask is True, or that it is False if `value` is; other numbers than 0 are True."""
        node = operand.materialize(self, like)
        if operand.dtype != torch.bool:
            node = self.compute(aten.ne.Scalar, (node, 0), like)
        return node if value else self.compute(aten.logical_not.default, (node,), like)

    def _has_joint_fills(self, scores: ScoreChain, shape: tuple[Size, ...], like: Node) -> bool:
        """Return True if all biases and fills together have the same effect as a mask of -inf.

        Each may leave every query a key, but not the same one. The proof is for their sum, as the program computes it.
        """
        biases = [(x, factor) for x, factor in scores.biases if x.node in self._may_contain_fills]
        if not biases or len(biases) + len(scores.fills) < 2:
            return True
        terms = [self._scale(x.materialize(self, like), factor, like) for x, factor in biases]
        total = terms[0]
        for term in terms[1:]:
            total = self.compute(aten.add.Tensor, (total, term), like)
        for condition, filled_value, fill in scores.fills:
            filled = self._emit_condition(condition, filled_value, like)
            total = self.compute(aten.where.ScalarSelf, (filled, fill, total), like)
        is_known = _has_known_fills(total, shape, total.meta["val"].dtype)
        self.drop(total)  # emitted for the proof only
        return is_known

    def _emit_gated_mask(
        self, scores: ScoreChain, gate: Node, shape: tuple[Size, ...], like: Node
    ) -> tuple[Node, bool]:
        """Emit the mask of scores * gate + (1 - gate) * fill, where the gate is a tensor of 0 and 1.

        Returns the mask, and whether it is equivalent, as `_emit_mask` does. The gate must provably be 0 or 1, and the
        only bias must be 0 where the gate is 1 and a fill elsewhere.
        """
        allowed = self.compute(aten.ne.Scalar, (gate, 0), like)
        if len(scores.biases) != 1 or scores.fills:
            return allowed, False
        ((operand, factor),) = scores.biases
        bias = self._scale(operand.materialize(self, like), factor, like)
        is_one, is_zero = (self.compute(aten.eq.Scalar, (gate, number), like) for number in (1, 0))
        is_binary = self.compute(aten.logical_or.default, (is_zero, is_one), like)
        # Proven by parsing: each becomes a condition over the indices of queries and keys.
        gate_form, bias_form, binary_form = (try_parse_mask(x, shape) for x in (allowed, bias, is_binary))
        self.drop(is_binary, bias)  # emitted for the proof only
        if gate_form is None or bias_form is None or binary_form is None or binary_form.allowed != sympy.true:
            return allowed, False
        return allowed, gate_form.allowed == bias_form.allowed and has_key_per_query(gate_form)

    def _scale(self, x: Node, factor: float, like: Node) -> Node:
        """Return x * factor, the term that scores + factor * x adds; no op is emitted for a factor of 1."""
        if factor == 1:
            return x
        if factor == -1:
            return self.compute(aten.neg.default, (x,), like)
        return self.compute(aten.mul.Tensor, (x, factor), like)

    def _intersect(self, a: Node | None, b: Node, like: Node) -> Node:
        """Return the conjunction of two conditions, or `b` if the first one is None."""
        return b if a is None else self.compute(aten.logical_and.default, (a, b), like)


def _softmax_refusal(softmax: SoftmaxMatch) -> str | None:
    """Return the reason why a softmax is not that of an attention, from the softmax alone, or None."""
    ndim = softmax.source.meta["val"].ndim
    if softmax.refusal is not None:
        return softmax.refusal
    if ndim < 3:
        return f"a softmax of {ndim} dims"
    return None if len(softmax.result.users) == 1 else "another op reads the probabilities"


def _match_attention(softmax: SoftmaxMatch) -> EagerAttention | str:
    """Return the attention around a softmax, or the reason why it is not replaced."""
    # Backward from the softmax: its log-sum-exp, sinks (logits without a key), then the scores down to q @ k.mT.
    x, keys_dim = softmax.source, softmax.dim
    lse = _match_lse(x, softmax.result) if keys_dim == x.meta["val"].ndim - 1 else None
    readers = [*softmax.readers] if lse is None else [lse, *softmax.readers]
    source = match_softmax_source(x, keys_dim, *readers)
    scores = match_scores(source.scores, keys_dim, *source.readers)
    if scores is None:
        return scores_refusal(source.scores)
    if (source.sinks is not None or lse is not None) and not is_identity(scores.order):
        return "sinks are concatenated to scores whose last dims are not queries and keys"
    # Forward from the softmax: the product with the values, and sinks that are applied to the result.
    weights = _match_weights(softmax.result, source, scores.order)
    if weights.product is None or weights.last is None:
        return _values_refusal(weights.last, scores.order[-1])
    sinks, last = source.head_sinks(), weights.last
    chain = [*scores.chain, *source.chain, *softmax.chain, *weights.chain]
    if lse is not None:
        # With ops between the scores and the softmax, such as `x - max(x)`, the log-sum-exp is not that of the scores.
        sink_attention = match_lse_sinks(last, lse) if not source.chain else None
        if sink_attention is None:
            return f"its log-sum-exp ({lse.name}) is read, and not only as out * sigmoid(lse - sinks)"
        # The result with sinks is now the last node, and the product with the values a node before it.
        chain = sorted({*chain, last, *sink_attention.chain} - {sink_attention.result})
        sinks, last = sink_attention.sinks, sink_attention.result
    operands = _attention_operands(scores.product, weights.product, chain)
    if operands is None:
        return "softmax in less precision than the values, or operands that broadcast"
    if not _has_sink_per_head(sinks, source, scores):
        return "its sinks are not one number per head"
    dtype = operands[0].node.meta["val"].dtype
    # A 0-dim factor does not change the dtype of the scores.
    if any(node_shape(factor.node) and factor.dtype != dtype for factor, _ in scores.factors):
        return "the scores are scaled in another dtype"
    # Autocast changes the dtype in which products of float32 operands are computed.
    if dtype not in HALF and not has_same_autocast([*chain, last]):
        return "its parts are in different autocast regions"
    return EagerAttention(scores, weights.product, operands, sinks, weights.dropout, last, chain)


def _match_weights(softmax: Node, source: SoftmaxSource, order: tuple[int, ...]) -> WeightChain:
    """Match the ops from the softmax to the product with the values, each the only user of the one before.

    These are a slice that drops sinks, a dropout, and casts, permutations and ops that change no weight. The chain ends
    without a product at any other op.

    Args:
        softmax: The probabilities.
        source: The scores and the sinks of the softmax.
        order: The dims of the probabilities as (leading dims, queries, keys).
    """
    weights, node, sinks = WeightChain(), softmax, source.sinks
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or not isinstance(user.target, OpOverload):
            break
        product = match_product(user)
        if product is not None:
            weights.last = user
            if sinks is None:  # there were none, or a slice has dropped them
                weights.product = _match_values_product(product, node, order)
            break
        canceling_ops = steps_from(node)  # several ops after which the value is the same, or []
        matched_ops = canceling_ops or [user]
        if sinks is not None and is_identity(order) and source.is_slice_without_sinks(user):
            sinks, matched_ops = None, [user]
        elif user.target is aten.dropout.default and not weights.dropout:
            weights.dropout = user.args[1] if user.args[2] else 0.0  # dropout(x, p, train)
        elif not canceling_ops and not is_float_cast(user) and not _is_identity_on_weights(user, node):
            permuted_order = order_after(user, order)
            if permuted_order is None:
                break
            order = permuted_order
        weights.chain.extend(matched_ops)
        node = weights.chain[-1]
    return weights


def _is_identity_on_weights(user: Node, weights: Node) -> bool:
    """Return True if an op does not change the weights: x * 1, x + 0, ..., or nan_to_num to 0.

    nan_to_num changes the rows of queries without keys, for which torch's attention op returns 0, too.
    """
    if user.target is aten.nan_to_num.default:
        return OpCall(user)["nan"] in (None, 0)
    return is_neutral_op(user) and user.args[0] is weights


def _match_values_product(product: ProductMatch, weights: Node, order: tuple[int, ...]) -> ProductMatch | None:
    """Return a product with the weights as its left operand, or None if it is no unscaled product weights @ values.

    The dims of the weights, (leading dims, queries, keys), must have the given order.
    """
    for candidate in (product, transpose_product(product)):
        left, right = candidate.left, candidate.right
        if left.node is weights and left.order == order and right.node is not weights:
            return candidate if candidate.scale == 1 else None
    return None


def _values_refusal(last: Node | None, keys_dim: int) -> str:
    """Return the reason why the probabilities are not multiplied by values in a way that an attention op does.

    Args:
        last: The product that reads the probabilities; None if another op does.
        keys_dim: The dim along which the probabilities sum to 1.
    """
    product = match_product(last) if last is not None else None
    if product is not None:
        operands = (product.left, product.right)
        summed_dims = {x.order[-1] for x in operands if match_softmax(value_origin(x.node)) is not None}
        if summed_dims and keys_dim not in summed_dims:
            return f"the softmax is along dim {keys_dim}, and the product with the probabilities along another"
    return "an operand other than the values is multiplied by the probabilities, or another op reads them"


def _attention_operands(scores: ProductMatch, values: ProductMatch, chain: list[Node]) -> list[ProductOperand] | None:
    """Return q, k (..., n, d) and v (..., n, e) of one dtype, or None.

    None if they broadcast, or if the program computes its softmax in another precision than an attention op does.

    Args:
        scores: The product of queries and keys.
        values: The product of the weights and the values.
        chain: The nodes between and around the two products.
    """
    dtype = values.right.node.meta["val"].dtype
    chain_dtypes = {n.meta["val"].dtype for n in chain if is_tensor(n) and n.meta["val"].is_floating_point()}
    # For half precision, attention ops compute the softmax in float32, and a program may, too.
    if not chain_dtypes <= ({dtype, torch.float32} if dtype in HALF else {dtype}):
        return None
    # A product multiplies rows of its left operand by rows of its right one: k (..., n, d), but v.mT (..., e, n).
    query, key = (_uncast_operand(x.simplify(), dtype) for x in (scores.left, scores.right))
    value = values.right.transpose().simplify()
    if query is None or key is None or not is_same_size(key.shape[-2], value.shape[-2]):
        return None
    batches = (size_product(x.shape[:-2]) for x in (key, value))  # possibly grouped differently, but in the same order
    return [query, key, value] if is_same_size(*batches) else None


def _has_sink_per_head(sinks: SinkValue | None, source: SoftmaxSource, scores: ScoreChain) -> bool:
    """Return True if there are no sinks, or one per head, with leading dims that fit those of masks and biases.

    Args:
        sinks: The matched sinks; None if there are none, or if they are not one per head.
        source: The input of the softmax, with the sinks as the program concatenates them.
        scores: The scores with their masks and biases.
    """
    if sinks is None:
        return source.sinks is None
    masks = [mask for mask, _ in scores.biases] + [condition for condition, *_ in scores.fills]
    masks += [scores.gate] if scores.gate is not None else []
    # `groups`: the leading dims are not (batch, heads) but (key heads, queries per key head) of one sequence. A mask
    # must then have 1 in both of them: it would be read as a mask of (batch, heads).
    if sinks.groups and any(not is_same_size(size_product(mask.shape[:-2]), 1) for mask in masks):
        return False
    # The shape of the scores to which masks and biases are applied; None without any.
    return scores.masked_shape is None or is_same_shape(scores.masked_shape[:-2], sinks.leading)


def _has_known_fills(bias: Node, shape: tuple[Size, ...], dtype: torch.dtype) -> bool:
    """Return True if a bias that may contain finite fills has the same effect as a mask of -inf.

    It has if every query provably keeps a key, or if later passes replace the bias by a predicate or score function.
    """
    if has_unfilled_key_per_query(bias, shape) or try_parse_mask(bias, shape) is not None:
        return True
    return parse_bias(bias, shape, dtype) is not None


def _match_lse(scores: Any, softmax: Node) -> Node | None:
    """Return the log-sum-exp of the scores along their last dim, from which a program may compute sinks, or None.

    Only the softmax and the log-sum-exp may read the scores.
    """
    readers = [n for n in scores.users if n is not softmax] if is_tensor(scores) else []
    if len(readers) != 1 or readers[0].target is not aten.logsumexp.default:
        return None
    ndim = scores.meta["val"].ndim
    return readers[0] if [d % ndim for d in OpCall(readers[0])["dim"]] == [ndim - 1] else None


def _uncast_operand(operand: ProductOperand, dtype: torch.dtype) -> ProductOperand | None:
    """Return q or k in the dtype of v, before a cast to float32 if there is one; None if it has another dtype.

    Eager code may cast half-precision q and k for their product, which an attention op need not do.
    """
    if operand.node.meta["val"].dtype == dtype:
        return operand
    cast = value_origin(operand.node)
    source = move_source(cast) if dtype in HALF and is_float_cast(cast) else None
    return ProductOperand(source, operand.order) if source is not None and source.meta["val"].dtype == dtype else None
