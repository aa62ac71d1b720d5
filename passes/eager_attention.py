"""Attention that is spelled out becomes scaled_dot_product_attention, where that says exactly the same.

    s = matmul(q, k.mT) * scale + bias            also einsum, bmm, baddbmm; scale as mul or div; leading dims regrouped
    s = s.masked_fill(~allowed, -inf)             also where
    p = dropout(softmax(s.float(), -1).to(bf16))
    o = matmul(p, v)                              ->  scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)

A scale on q or k stays there, with scale=1. Dropout draws other numbers than the eager spelling. Bytes moved: none.
Leaves alone: scores or probabilities that something else reads, soft-caps, softmax in less precision than the values
(float64 models with a float32 softmax), fills with a finite number unless every query provably attends to some key
(a row of nothing but fills attends to all keys alike), and operands that broadcast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..call import Call, is_tensor
from ..shapes import Size, same, sizes
from .edit import Editor
from .masks import always_attends, recognise
from .products import Factor, Product, product_of, transposed
from .scores import CASTS, SAME, Scores, keeps_matrices, scores_of

aten = torch.ops.aten
SOFTMAX = (aten.softmax.int, aten._softmax.default, aten.special_softmax.default)
HALF = (torch.bfloat16, torch.float16)


@dataclass
class Weights:
    """What becomes of the probabilities, up to the product with the values."""

    chain: list[Node] = field(default_factory=list)
    dropout: float = 0.0
    product: Product | None = None
    last: Node | None = None


class EagerAttention(Editor):
    """Rewrites every attention of one graph that is spelled out around a softmax."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.edit(gm.graph)

    def run(self) -> bool:
        """True if the graph changed."""
        found = [n for n in self.graph.nodes if n.op == "call_function" and n.target in SOFTMAX]
        changed = [self._rewrite(n) for n in found]
        return any(changed)

    def _rewrite(self, softmax: Node) -> bool:
        call = Call(softmax)
        if call.ndim() < 3 or call.dim() != call.ndim() - 1 or len(softmax.users) != 1:
            return False
        scores, weights = scores_of(call.operands[0], softmax), _weights(softmax)
        if scores is None or weights.product is None or weights.last is None:
            return False
        chain = [*scores.chain, softmax, *weights.chain]
        operands = _operands(scores.product, weights.product, chain)
        if operands is None:
            return False
        return self._replace(weights.last, scores, weights, operands)

    def _replace(self, last: Node, scores: Scores, weights: Weights, operands: list[Factor]) -> bool:
        product = weights.product
        assert product is not None
        front = operands[0].shape[:-2]
        lead = front if scores.masked is None else scores.masked[:-2]
        shape = (*lead, operands[0].shape[-2], operands[1].shape[-2])
        with self.graph.inserting_before(last):
            mask, fits = self._mask(scores, shape, last)
            if not fits:
                self.drop(mask)
                return False
            q, k, v = (self._led(f, lead, last) for f in operands)
            options = {"scale": scores.scale}
            args = (q, k, v, mask, weights.dropout)
            out = self.compute(aten.scaled_dot_product_attention.default, args, last, options)
            if front != lead:
                wanted = self.sizes.list((*front, *sizes(out.meta["val"].shape)[-2:]))
                out = self.compute(aten.reshape.default, (out, wanted), last)
            back = [product.order.index(d) for d in range(len(product.order))]
            if back != sorted(back):
                out = self.compute(aten.permute.default, (out, back), last)
        self.replace(last, out)
        return True

    def _led(self, factor: Factor, lead: tuple[Size, ...], like: Node) -> Node:
        node = factor.made(self, like)
        if sizes(node.meta["val"].shape)[:-2] == lead:
            return node
        wanted = self.sizes.list((*lead, *factor.shape[-2:]))
        return self.compute(aten.reshape.default, (node, wanted), like)

    def _mask(self, scores: Scores, shape: tuple[Size, ...], like: Node) -> tuple[Node | None, bool]:
        """(the mask of biases and fills, whether it says the same as they do)"""
        bias = None
        for node, negative in scores.biases:
            term = self.compute(aten.neg.default, (node,), like) if negative else node
            bias = term if bias is None else self.compute(aten.add.Tensor, (bias, term), like)
        allowed = None
        for condition, filled, _ in scores.fills:
            term = self._allows(condition, filled, like)
            allowed = (
                term if allowed is None else self.compute(aten.logical_and.default, (allowed, term), like)
            )
        fits = True
        if any(math.isfinite(number) for *_, number in scores.fills):
            assert allowed is not None
            known = recognise(allowed, shape)
            fits = known is not None and always_attends(known)
        if bias is not None and allowed is not None:
            return self.compute(aten.where.ScalarOther, (allowed, bias, -math.inf), like), fits
        return (bias if allowed is None else allowed), fits

    def _allows(self, condition: Node, filled: bool, like: Node) -> Node:
        if condition.meta["val"].dtype != torch.bool:
            condition = self.compute(aten.ne.Scalar, (condition, 0), like)
        return self.compute(aten.logical_not.default, (condition,), like) if filled else condition


def _weights(softmax: Node) -> Weights:
    found, node = Weights(), softmax
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or not isinstance(user.target, torch._ops.OpOverload):
            break
        product = product_of(user)
        if product is not None:
            found.product, found.last = _times_values(product, node), user
            break
        if user.target is aten.dropout.default and not found.dropout:
            found.dropout = user.args[1] if user.args[2] else 0.0
        elif user.target not in (*SAME, *CASTS) and not keeps_matrices(user):
            break
        found.chain.append(user)
        node = user
    return found


def _times_values(product: Product, weights: Node) -> Product | None:
    """The product with the weights on the left, if they are its operand in their own order and only once."""
    for one in (product, transposed(product)):
        ndim = len(one.left.order)
        if (
            one.left.node is weights
            and one.left.order == tuple(range(ndim))
            and one.right.node is not weights
        ):
            return one if one.scale == 1 else None
    return None


def _operands(scores: Product, values: Product, chain: list[Node]) -> list[Factor] | None:
    """q, k (..., n, d) and v (..., n, e) of one dtype, if nothing in between is less precise than SDPA would be."""
    dtype = values.right.node.meta["val"].dtype
    between = {n.meta["val"].dtype for n in chain}
    if not between <= ({dtype, torch.float32} if dtype in HALF else {dtype}):
        return None
    query, key = (_uncast(f.settled(), dtype) for f in (scores.left, scores.right))
    value = values.right.swapped().settled()
    if query is None or key is None or not same(key.shape[-2], value.shape[-2]):
        return None
    fits = len(value.shape) == len(key.shape) and all(same(a, b) for a, b in zip(value.shape[:-2], key.shape))
    return [query, key, value] if fits else None


def _uncast(factor: Factor, dtype: torch.dtype) -> Factor | None:
    """The factor in the dtype, by leaving out a cast to a wider one."""
    node = factor.node
    if node.meta["val"].dtype == dtype:
        return factor
    source = node.args[0] if node.target in CASTS else None
    if dtype in HALF and is_tensor(source) and source.meta["val"].dtype == dtype:
        return Factor(source, factor.order)
    return None
