"""Replace eager attention by scaled_dot_product_attention where the two are equivalent.

    s = matmul(q, k.mT) * scale + bias            also einsum, bmm, baddbmm (and its bias); scale as mul or div
    s = tanh(s / cap) * cap                       before the mask; -> sp.masked_attention(..., score=cap*tanh(s))
    s = s.masked_fill(~allowed, -inf)             also where, and s * allowed - 1e9 * (1 - allowed)
    p = dropout(softmax(s.float(), -1).to(bf16))  also softmax from exponentials (`softmaxes.py`), and nan_to_num
    o = matmul(p, v)                              ->  scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)

    p = softmax(cat([s, sinks], -1), -1)[.., :-1] ->  sp.masked_attention(q, k, v, ..., attn_mask=mask, sinks=sinks)

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
from sp_compile.passes.sharding.matchers import is_cast_op, move_source, steps_from, value_origin
from sp_compile.passes.sharding.products import ProductMatch, ProductOperand, match_product, transpose_product

from .lse_sinks import match_lse_sinks
from .parse_masks import has_key_per_query, keeps_a_key, parse_bias, try_parse_mask
from .score_functions import SCORE, register_expression
from .scores import ScoreChain, is_between_products, is_neutral_op, match_scores, order_before, scores_refusal
from .sinks import SinkValue, SoftmaxSource, match_readers
from .softmaxes import SoftmaxMatch, match_softmax

aten, sp = torch.ops.aten, torch.ops.sp


@dataclass
class WeightChain:
    """Ops between the softmax and the product with the values."""

    chain: list[Node] = field(default_factory=list)
    dropout: float = 0.0
    product: ProductMatch | None = None
    last: Node | None = None


@dataclass
class EagerAttention:
    """An eager attention that may be replaced."""

    scores: ScoreChain
    values: ProductMatch  # the product of the probabilities with the values
    operands: list[ProductOperand]  # queries, keys, values
    sinks: SinkValue | None
    dropout: float
    last: Node  # the result
    chain: list[Node]  # all other nodes


@register_pass
class FuseEagerAttention(CanonicalPass):
    """Replacement of every eager attention around a softmax."""

    requires = frozenset({"normalized", "rolled loops"})
    provides = frozenset({"canonical", "fused attention"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        self._filling = fill_nodes(gm)
        found = [node for node in self.graph.nodes if match_softmax(node) is not None]
        refusals = {node: self._rewrite(softmax) for node in found if (softmax := match_softmax(node)) is not None}
        for node, why in refusals.items():
            if why is not None and is_between_products(node):
                self.note_refusal(node, why)
        return sum(why is None for why in refusals.values())

    def _rewrite(self, softmax: SoftmaxMatch) -> str | None:
        """Replace one attention and return None, or return the reason why it is not replaced."""
        found = _softmax_refusal(softmax) or _match_attention(softmax)
        if isinstance(found, str):
            return found
        with self.graph.inserting_before(found.last), restore_autocast(found.last):
            out = self._attention(found)
        if out is None:
            if found.scores.gate is not None:
                return "it is multiplied by a value that is no mask, or not filled: use masked_fill(mask, -inf)"
            return "a mask of finite fills under which a query may attend to nothing, or a bias that may contain fills"
        found.last.replace_all_uses_with(out)
        self.erase([*found.chain, found.last])
        return None

    def _attention(self, found: EagerAttention) -> Node | None:
        """Return the result of the fused attention, or None if its mask is not equivalent."""
        scores, sinks, last, operands = found.scores, found.sinks, found.last, found.operands
        front, order = operands[2].shape[:-2], found.values.order
        lead = scores.masked[:-2] if scores.masked is not None else front
        lead = lead if sinks is None else sinks.batch_and_heads
        shape = (*lead, operands[0].shape[-2], operands[1].shape[-2])
        settled = sinks is not None and sinks.value not in self._filling
        mask, fits = self._mask(scores, shape, operands[0].node.meta["val"].dtype, settled, last)
        if not fits:
            self.drop(mask)
            return None
        q, k, v = (self.reshape(f.materialize(self, last), (*lead, *f.shape[-2:]), last) for f in operands)
        for factor, dividing in scores.factors:
            q = self.compute(
                aten.div.Tensor if dividing else aten.mul.Tensor, (q, factor.materialize(self, last)), last
            )
        out = self._op(found, (q, k, v), mask)
        out = self.reshape(out, (*front, *node_shape(out)[-2:]), last)
        return (
            out if is_identity(order) else self.compute(aten.permute.default, (out, inverse_permutation(order)), last)
        )

    def _op(self, found: EagerAttention, qkv: Sequence[Node], mask: Node | None) -> Node:
        scores, sinks, dropout, like = found.scores, found.sinks, found.dropout, found.last
        if sinks is None and scores.score == SCORE:
            args: tuple[Any, ...] = (*qkv, mask, dropout)
            return self.compute(aten.scaled_dot_product_attention.default, args, like, {"scale": scores.scale})
        args = (*qkv, [], [], [], "", dropout, scores.scale, False)
        kwargs: dict[str, Any] = {"attn_mask": mask}
        if scores.score != SCORE:
            kwargs |= {"score": register_expression(scores.score), "heads": []}
        if sinks is not None:
            kwargs["sinks"] = sinks.vector(self, like)
        return self.compute(sp.masked_attention.default, args, like, kwargs)

    def _mask(
        self, scores: ScoreChain, shape: tuple[Size, ...], dtype: torch.dtype, settled: bool, like: Node
    ) -> tuple[Node | None, bool]:
        """Return the mask of biases and fills, and whether it is equivalent to them.

        `settled`: fills remove all weight even if all keys are filled, since sinks are not filled.
        """
        bias, allowed, fits = None, None, True
        if scores.gate is not None:
            return self._gated_mask(scores, scores.gate.materialize(self, like), shape, like)
        for each, times in scores.biases:
            node = each.materialize(self, like)
            if each.dtype != dtype:  # a bias of zeros and fills needs no cast
                fits = fits and times > 0 and try_parse_mask(node, shape, settled) is not None
                allowed = self._intersect(allowed, self.compute(aten.eq.Scalar, (node, 0), like), like)
                continue
            term = self._combine_factors(node, times, like)
            fits = fits and (settled or each.node not in self._filling or _has_known_fills(term, shape, dtype))
            bias = term if bias is None else self.compute(aten.add.Tensor, (bias, term), like)
        for condition, filled, _ in scores.fills:
            allowed = self._intersect(allowed, self._allows(condition.materialize(self, like), filled, like), like)
        if not settled and allowed is not None and any(math.isfinite(number) for *_, number in scores.fills):
            known = try_parse_mask(allowed, shape)
            fits = fits and known is not None and has_key_per_query(known)
        mask = bias if allowed is None else allowed
        if bias is not None and allowed is not None:
            mask = self.compute(aten.where.ScalarOther, (allowed, bias, -math.inf), like)
        while mask is not None and mask.meta["val"].ndim < 2:
            mask = self.compute(aten.unsqueeze.default, (mask, 0), like)
        return mask, fits

    def _gated_mask(self, scores: ScoreChain, gate: Node, shape: tuple[Size, ...], like: Node) -> tuple[Node, bool]:
        """Return the mask of scores that are multiplied with 0 or 1 and filled where they are 0; see `_mask`."""
        allowed = self.compute(aten.ne.Scalar, (gate, 0), like)
        if len(scores.biases) != 1 or scores.fills:
            return allowed, False
        ((each, times),) = scores.biases
        fill = self._combine_factors(each.materialize(self, like), times, like)
        is_one = self.compute(aten.eq.Scalar, (gate, 1), like)
        either = self.compute(aten.logical_or.default, (self.compute(aten.eq.Scalar, (gate, 0), like), is_one), like)
        mask, filled, binary = (try_parse_mask(x, shape) for x in (allowed, fill, either))
        self.drop(either, fill)
        if mask is None or filled is None or binary is None or binary.allowed != sympy.true:
            return allowed, False
        return allowed, mask.allowed == filled.allowed and has_key_per_query(mask)

    def _combine_factors(self, x: Node, times: float, like: Node) -> Node:
        if times in (1, -1):
            return x if times == 1 else self.compute(aten.neg.default, (x,), like)
        return self.compute(aten.mul.Tensor, (x, times), like)

    def _intersect(self, a: Node | None, b: Node, like: Node) -> Node:
        return b if a is None else self.compute(aten.logical_and.default, (a, b), like)

    def _allows(self, condition: Node, filled: bool, like: Node) -> Node:
        if condition.meta["val"].dtype != torch.bool:
            condition = self.compute(aten.ne.Scalar, (condition, 0), like)
        return self.compute(aten.logical_not.default, (condition,), like) if filled else condition


def _softmax_refusal(found: SoftmaxMatch) -> str | None:
    """Return the reason why a softmax is not one of an attention, or None."""
    ndim = found.source.meta["val"].ndim
    if found.refusal is not None:
        return found.refusal
    if ndim < 3:
        return f"a softmax of {ndim} dims"
    return None if len(found.result.users) == 1 else "another op reads the probabilities"


def _match_attention(found: SoftmaxMatch) -> EagerAttention | str:
    """Return the attention around a softmax, or the reason why it is not replaced."""
    x, keys = found.source, found.dim
    lse = _match_lse(x, found.result) if keys == x.meta["val"].ndim - 1 else None
    reading = match_readers(x, keys, *([lse] if lse is not None else []), *found.readers)
    scores = match_scores(reading.scores, keys, *reading.readers)
    if scores is None:
        return scores_refusal(reading.scores)
    if (reading.sinks is not None or lse is not None) and not is_identity(scores.order):
        return "sinks are concatenated to scores whose last dims are not queries and keys"
    weights = _match_weights(found.result, reading, scores.order)
    if weights.product is None or weights.last is None:
        return _values_refusal(weights.last, scores.order[-1])
    sinks, last = reading.head_sinks(), weights.last
    chain = [*scores.chain, *reading.chain, *found.chain, *weights.chain]
    if lse is not None:
        sunk = match_lse_sinks(last, lse) if not reading.chain else None
        if sunk is None:
            return f"its log-sum-exp ({lse.name}) is read, and not only as out * sigmoid(lse - sinks)"
        chain, sinks, last = sorted({*chain, last, *sunk.chain} - {sunk.result}), sunk.sinks, sunk.result
    operands = _attention_operands(scores.product, weights.product, chain)
    if operands is None:
        return "softmax in less precision than the values, or operands that broadcast"
    if not _has_sink_per_head(sinks, reading, scores):
        return "its sinks are not one number per head"
    if not _can_scale_query(scores, operands[0]):
        return "the scores are scaled in another dtype"
    if operands[0].node.meta["val"].dtype not in HALF and not has_same_autocast([*chain, last]):
        return "its parts are in different autocast regions"
    return EagerAttention(scores, weights.product, operands, sinks, weights.dropout, last, chain)


def _match_weights(softmax: Node, reading: SoftmaxSource, order: tuple[int, ...]) -> WeightChain:
    """Match the ops from the softmax to the product with the values.

    `order`: the dims of the probabilities as (leading dims, queries, keys).
    """
    found, node, sinks = WeightChain(), softmax, reading.sinks
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or not isinstance(user.target, OpOverload):
            break
        product = match_product(user)
        if product is not None:
            found.product, found.last = _match_values_product(product, node, order) if sinks is None else None, user
            break
        steps, turned = steps_from(node), order_before(user, order)
        if sinks is not None and is_identity(order) and reading.drops_sinks(user):
            sinks, steps = None, [user]
        elif user.target is aten.dropout.default and not found.dropout:
            found.dropout = user.args[1] if user.args[2] else 0.0
        elif not steps and not is_cast_op(user) and not _keeps_weights(user, node):
            if turned is None:
                break
            order = turned
        found.chain.extend(steps or [user])
        node = found.chain[-1]
    return found


def _keeps_weights(user: Node, weights: Node) -> bool:
    """Return True for an identity of the weights. For a row without keys softmax gives NaN, torch's op 0."""
    if user.target is aten.nan_to_num.default:
        return OpCall(user)["nan"] in (None, 0)
    return is_neutral_op(user) and user.args[0] is weights


def _match_values_product(product: ProductMatch, weights: Node, order: tuple[int, ...]) -> ProductMatch | None:
    """Return the product if the weights are its left operand, in order and only once."""
    for one in (product, transpose_product(product)):
        if one.left.node is weights and one.left.order == order and one.right.node is not weights:
            return one if one.scale == 1 else None
    return None


def _values_refusal(last: Node | None, keys: int) -> str:
    """Return the reason why `last`, the reader of the probabilities, is not a product with values."""
    product = match_product(last) if last is not None else None
    along = {f.order[-1] for f in (product.left, product.right) if _is_softmax(f.node)} if product is not None else ()
    if along and keys not in along:
        return f"the softmax is along dim {keys}, and the product with the probabilities along another"
    return "an operand other than the values is multiplied by the probabilities, or another op reads them"


def _is_softmax(node: Node) -> bool:
    return match_softmax(value_origin(node)) is not None


def _attention_operands(scores: ProductMatch, values: ProductMatch, chain: list[Node]) -> list[ProductOperand] | None:
    """Return q, k (..., n, d) and v (..., n, e) of one dtype, or None if SDPA would be more precise."""
    dtype = values.right.node.meta["val"].dtype
    between = {n.meta["val"].dtype for n in chain if is_tensor(n) and n.meta["val"].is_floating_point()}
    if not between <= ({dtype, torch.float32} if dtype in HALF else {dtype}):
        return None
    query, key = (_uncast_factor(f.simplify(), dtype) for f in (scores.left, scores.right))
    value = values.right.transpose().simplify()
    if query is None or key is None or not is_same_size(key.shape[-2], value.shape[-2]):
        return None
    batches = (size_product(f.shape[:-2]) for f in (key, value))  # possibly grouped differently, but in the same order
    return [query, key, value] if is_same_size(*batches) else None


def _has_sink_per_head(sinks: SinkValue | None, reading: SoftmaxSource, scores: ScoreChain) -> bool:
    """Return True if there are no sinks or they belong to the heads of the scores."""
    if sinks is None:
        return reading.sinks is None
    masks = [mask for mask, _ in scores.biases] + [condition for condition, *_ in scores.fills]
    masks += [scores.gate] if scores.gate is not None else []
    if sinks.groups and any(not is_same_size(size_product(mask.shape[:-2]), 1) for mask in masks):
        return False
    return scores.masked is None or is_same_shape(scores.masked[:-2], sinks.leading)


def _has_known_fills(bias: Node, shape: tuple[Size, ...], dtype: torch.dtype) -> bool:
    """Return True if the fills of a bias are known and every query attends to some key."""
    return (
        keeps_a_key(bias, shape)
        or try_parse_mask(bias, shape) is not None
        or parse_bias(bias, shape, dtype) is not None
    )


def _match_lse(scores: Any, softmax: Node) -> Node | None:
    """Return the log-sum-exp of the softmax input if nothing else reads that input."""
    found = [n for n in scores.users if n is not softmax] if is_tensor(scores) else []
    if len(found) != 1 or found[0].target is not aten.logsumexp.default:
        return None
    ndim = scores.meta["val"].ndim
    return found[0] if [d % ndim for d in OpCall(found[0])["dim"]] == [ndim - 1] else None


def _can_scale_query(scores: ScoreChain, query: ProductOperand) -> bool:
    """Return True if the factors can scale the query without a change of its dtype."""
    dtype = query.node.meta["val"].dtype
    return all(not node_shape(f.node) or f.dtype == dtype for f, _ in scores.factors)


def _uncast_factor(factor: ProductOperand, dtype: torch.dtype) -> ProductOperand | None:
    """Return the factor in the dtype, without its cast to a wider one."""
    node = factor.node
    if node.meta["val"].dtype == dtype:
        return factor
    source = move_source(value_origin(node)) if dtype in HALF and is_cast_op(value_origin(node)) else None
    return ProductOperand(source, factor.order) if source is not None and source.meta["val"].dtype == dtype else None
