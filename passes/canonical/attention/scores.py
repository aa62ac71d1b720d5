"""Match eager attention scores, backward from the softmax: product, scale, soft cap, biases, fills.

Queries and keys may be any dims: an `order` lists the dims of a value as (leading dims, queries, keys).

The report names an op between a product and a softmax that is neither a scale nor a bias nor a fill:

    softmax(sin(q @ k.mT)) @ v          "sin (aten.sin.default) is between the product and the softmax"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import sympy
import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape, parse_overloads
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.sizes import Size, as_sizes, is_same_shape, is_same_size, size_product
from sp_compile.passes.graph.strides import is_identity
from sp_compile.passes.sharding.matchers import (
    is_cast_op,
    keeps_order,
    move_source,
    permutation_of,
    scalar_value,
    steps_between,
    value_origin,
)
from sp_compile.passes.sharding.products import ProductMatch, match_product, product_addend, transpose_product

from .parse_masks import MAX_FILL
from .score_functions import SCORE

aten = torch.ops.aten
MASK_OPS = parse_overloads("masked_fill.Scalar masked_fill.Tensor where.ScalarOther where.ScalarSelf where.self")
MAX_STEPS = 12  # between a product and the softmax; attention has half of these
NEUTRAL_NUMBERS = {
    op: n for n, text in enumerate(("add.Tensor sub.Tensor", "mul.Tensor div.Tensor")) for op in parse_overloads(text)
}
SCORE_OPS = [*parse_overloads("mul.Tensor mul.Scalar div.Tensor div.Scalar add.Tensor sub.Tensor tanh"), *MASK_OPS]


@dataclass(frozen=True)
class ScoreOperand:
    """Tensor that broadcasts to scores."""

    node: Node  # the tensor
    order: tuple[int, ...]  # dims of the scores as (leading dims, queries, keys)
    leading: tuple[Size, ...] = ()
    """Leading dims that it is reshaped to, if any."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the tensor."""
        return self.node.meta["val"].dtype

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the shape of the tensor itself; valid only for the identity order."""
        own = (*(self.leading or node_shape(self.node)[:-2]), *node_shape(self.node)[-2:])
        every = (*[1] * (len(self.order) - len(own)), *own)
        return own if is_identity(self.order) else tuple(every[d] for d in self.order)

    def materialize(self, editor: GraphEditor, like: Node) -> Node:
        """Emit a node that broadcasts to (leading dims, queries, keys)."""
        x = editor.reshape(self.node, self.shape, like) if self.leading else self.node
        if is_identity(self.order):
            return x
        while x.meta["val"].ndim < len(self.order):
            x = editor.compute(aten.unsqueeze.default, (x, 0), like)
        return editor.compute(aten.permute.default, (x, list(self.order)), like)

    def regroup(self, before: tuple[Size, ...], after: tuple[Size, ...]) -> ScoreOperand | None:
        """Return the operand for scores with regrouped leading dims, or None if it lacks some of them."""
        own, order = self.shape, tuple(range(len(after) + 2))
        lead = (*[1] * (len(before) + 2 - len(own)), *own)[:-2]
        if not is_identity(self.order):
            return None
        if all(is_same_size(extent, 1) for extent in lead):
            return ScoreOperand(self.node, order, (1,) * len(after) if len(own) > len(order) else ())
        if not is_same_shape(lead, before):
            return None
        source = _undo_batch_repeat(self.node, after)
        return ScoreOperand(source, order) if source is not None else ScoreOperand(self.node, order, after)


def _undo_batch_repeat(x: Node, lead: tuple[Size, ...]) -> Node | None:
    """Return x before its repetition per batch entry or regrouping from the leading dims `lead`, or None."""
    node = value_origin(x)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    if keeps_order(node) and (source := move_source(node)) is not None:
        return source if is_same_shape(node_shape(source), (*lead, *node_shape(x)[-2:])) else None
    if node.target is not aten.repeat.default:
        return None
    (times, *others), source = OpCall(node)["repeats"], OpCall(node).operands[0]
    once = len(others) + 1 == len(node_shape(source)) == 3 and all(is_same_size(t, 1) for t in others)
    heads = is_same_size(node_shape(source)[0], lead[-1]) and is_same_size(
        as_sizes([times])[0], size_product(lead[:-1])
    )
    return source if once and heads else None


@dataclass(frozen=True)
class ScoreChain:
    """Ops between the product and the softmax, in graph order: scale, score function, biases, fills."""

    product: ProductMatch  # product of queries and keys
    scale: float  # number that scales the product
    chain: tuple[Node, ...]  # nodes from the product to the softmax
    order: tuple[int, ...]  # dims of the scores as (leading dims, queries, keys)
    factors: tuple[tuple[ScoreOperand, bool], ...] = ()  # (tensor, True to divide)
    biases: tuple[tuple[ScoreOperand, float], ...] = ()  # (bias, its factor)
    fills: tuple[tuple[ScoreOperand, bool, float], ...] = ()  # (condition, filled value, fill)
    gate: ScoreOperand | None = None  # factor that is not per head
    masked: tuple[Size, ...] | None = None  # shape, in order, at which scores were masked
    score: sympy.Expr = SCORE  # function of the scaled product before biases and fills


def match_scores(x: Any, keys: int, *users: Node) -> ScoreChain | None:
    """Match the scores that end in `x`.

    Args:
        x: The input of the softmax, or the scores in it.
        keys: The dim of `x` along which the softmax reduces.
        users: The only allowed readers of `x` and of the chain.

    Returns:
        The chain, or None.
    """
    if not is_tensor(x) or set(x.users) != set(users) or x.op != "call_function":
        return None
    if keys >= len(node_shape(x)):  # it broadcasts to its reader
        return None
    call = OpCall(x) if isinstance(x.target, OpOverload) else None
    product = match_product(x, with_addend=True)
    if call is None or product is not None:
        seen = [p for p in (product, transpose_product(product)) if p.order[-1] == keys] if product is not None else []
        return _single_rank_models(seen[0], x) if seen else None
    inner, steps = None, steps_between(x, value_origin(x)) or [x]
    if any(set(a.users) != {b} for a, b in pairwise(steps)):
        return None
    if steps != [x] or is_cast_op(x) or is_neutral_op(x):
        inner = match_scores(OpCall(steps[0]).operands[0], keys, steps[0])
    elif permutation_of(x) is not None or is_leading_reshape(x):
        inner = _match_permutation(x, keys)
    elif x.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        inner = _match_scale(call, x, keys)
    elif x.target is aten.tanh.default:
        inner = _match_soft_cap(call, x, keys)
    elif x.target in (aten.add.Tensor, aten.sub.Tensor):
        inner = _match_bias(call, x, keys)
    elif x.target in MASK_OPS:
        inner = _match_fill(call, x, keys)
    return replace(inner, chain=(*inner.chain, *steps)) if inner is not None else None


def _single_rank_models(product: ProductMatch, x: Node) -> ScoreChain | None:
    """Match a product, with the term that it adds itself (baddbmm)."""
    found, added = ScoreChain(product, product.scale, (x,), product.order), product_addend(x)
    if added is None:
        return found
    bias, times = added
    if bias.meta["val"].dtype != x.meta["val"].dtype:
        return None
    return _add_mask(found, x, bias, biases=((ScoreOperand(bias, found.order), times),))


def _match_permutation(x: Node, keys: int) -> ScoreChain | None:
    """Match scores before a permutation, or before a regrouping of the leading dims."""
    source, permuted = OpCall(x).operands[0], permutation_of(x)
    inside = permuted[keys] if permuted is not None else keys - len(node_shape(x)) + len(node_shape(source))
    inner = match_scores(source, inside, x) if inside >= 0 else None
    order = order_before(x, inner.order) if inner is not None else None
    return replace(inner, order=order) if inner is not None and order is not None else None


def order_before(x: Node, order: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order of the operand of `x`, or None if `x` mixes leading dims, queries and keys."""
    permuted = permutation_of(x)
    if permuted is not None:
        return tuple(permuted.index(d) for d in order)
    before, after = len(order), x.meta["val"].ndim
    if not is_leading_reshape(x) or not is_identity(order[:-2]):
        return None
    return (*range(after - 2), *(d - before + after for d in order[-2:]))


def is_neutral_op(x: Node) -> bool:
    """Return True for x * 1, x / 1, x + 0 and x - 0, which are x except for the sign of zero."""
    number = NEUTRAL_NUMBERS.get(x.target)
    if number is None or not is_tensor(x.args[0]):
        return False
    mine, its = x.meta["val"], OpCall(x).operands[0].meta["val"]
    return mine.dtype == its.dtype and mine.ndim == its.ndim and scalar_value(OpCall(x)["other"], mine.dtype) == number


def is_leading_reshape(x: Node) -> bool:
    """Return True if the node regroups the leading dims only."""
    source = move_source(x) if keeps_order(x) else None
    if source is None:
        return False
    before, after = (node_shape(n) for n in (source, x))
    return min(len(before), len(after)) >= 3 and all(is_same_size(a, b) for a, b in zip(before[-2:], after[-2:]))


def _match_scale(call: OpCall, x: Node, keys: int) -> ScoreChain | None:
    """Match a scale by a positive number, or by a tensor constant over the keys (and queries) of a head."""
    dividing, dtype = x.target in (aten.div.Tensor, aten.div.Scalar), x.meta["val"].dtype
    for scores, factor in [(call["self"], call["other"]), (call["other"], call["self"])][: 1 if dividing else 2]:
        inner = match_scores(scores, keys, x) if is_tensor(scores) else None
        if inner is None or inner.biases or any(math.isfinite(number) for *_, number in inner.fills):
            continue
        number = scalar_value(factor, dtype)
        if number and inner.score != SCORE and not inner.fills:
            times = sympy.Rational(repr(float(number)))
            return replace(inner, score=inner.score / times if dividing else inner.score * times)
        if inner.score == SCORE and number is not None and number > 0:
            return replace(inner, scale=inner.scale / number if dividing else inner.scale * number)
        if not is_tensor(factor) or inner.fills:
            continue
        other = ScoreOperand(factor, inner.order)
        if inner.score == SCORE and set(other.shape[-2:]) <= {1}:
            return _add_mask(inner, x, factor, factors=((other, dividing),))
        if inner.gate is None and not dividing:
            return _add_mask(inner, x, factor, gate=other)
    return None


def _match_soft_cap(call: OpCall, x: Node, keys: int) -> ScoreChain | None:
    """Match a soft cap before any mask: c * tanh(score / c)."""
    inner = match_scores(call["self"], keys, x)
    if inner is None or inner.biases or inner.fills:
        return None
    return replace(inner, score=sympy.tanh(inner.score))


def _match_bias(call: OpCall, x: Node, keys: int) -> ScoreChain | None:
    if len(call.operands) != 2 or call["alpha"] != 1:
        return None
    a, b = call.operands
    negative = x.target is aten.sub.Tensor
    for scores, bias in [(a, b)] if negative else [(a, b), (b, a)]:
        inner = match_scores(scores, keys, x)
        if inner is not None and bias.meta["val"].dtype == x.meta["val"].dtype:
            times = -1.0 if negative else 1.0
            return _add_mask(inner, x, bias, biases=((ScoreOperand(bias, inner.order), times),))
    return None


def _match_fill(call: OpCall, x: Node, keys: int) -> ScoreChain | None:
    """Match masked_fill(scores, condition, number), and where with the number on either side."""
    if "mask" in call.args:
        scores, condition, number, filled = call["self"], call["mask"], call["value"], True
    else:
        condition = call["condition"]
        swapped = scalar_value(call["self"], x.meta["val"].dtype) is not None
        scores, number = (call["other"], call["self"]) if swapped else (call["self"], call["other"])
        filled = swapped
    number = scalar_value(number, x.meta["val"].dtype)
    if number is None or MAX_FILL < number != torch.finfo(x.meta["val"].dtype).min:
        return None
    inner = match_scores(scores, keys, x)
    if inner is None:
        return None
    return _add_mask(inner, x, condition, fills=((ScoreOperand(condition, inner.order), filled, number),))


def _add_mask(
    inner: ScoreChain, x: Node, mask: Node, gate: ScoreOperand | None = None, **more: Any
) -> ScoreChain | None:
    """Append a tensor that broadcasts to the scores; `more` names its field.

    All operands are regrouped to the leading dims at which the last one is applied.
    """
    shape, own = node_shape(x), node_shape(mask)
    before = as_sizes(inner.chain[-1].meta["val"].shape)
    masked = tuple(shape[d] for d in inner.order)
    if before != shape or len(own) > len(shape):
        return None
    known = inner if inner.masked in (None, masked) else _regroup_chain(inner, masked)
    if known is None:
        return None
    added: dict[str, Any] = {role: (*getattr(known, role), *new) for role, new in more.items()}
    return replace(known, masked=masked, gate=gate or known.gate, **added)


def _regroup_chain(inner: ScoreChain, masked: tuple[Size, ...]) -> ScoreChain | None:
    assert inner.masked is not None
    roles: dict[str, Any] = {}
    for role in ("factors", "biases", "fills"):
        turned = [(x.regroup(inner.masked[:-2], masked[:-2]), *rest) for x, *rest in getattr(inner, role)]
        if any(x is None for x, *_ in turned):
            return None
        roles[role] = tuple(turned)
    return replace(inner, **roles) if inner.gate is None else None


def is_between_products(softmax: Node) -> bool:
    """Return True if the softmax is computed from a product and a product is computed from it."""
    return _can_reach(softmax, lambda n: n.all_input_nodes) and _can_reach(softmax, lambda n: list(n.users))


def _can_reach(start: Node, following: Callable[[Node], Sequence[Node]]) -> bool:
    def onwards(node: Node) -> Iterable[Node]:
        """Return the next nodes that compute tensors."""
        return [n for n in following(node) if is_tensor(n) and n.op == "call_function"]

    near = islice(iterate_reachable([start], onwards), 1, MAX_STEPS + 1)
    return any(match_product(node, with_addend=True) is not None for node in near)


def scores_refusal(x: Node) -> str:
    """Return the reason why `match_scores` rejected the input of a softmax that follows a product."""
    node = x
    while match_product(node, with_addend=True) is None:
        if len(node.users) > 1:
            return f"another op reads the scores ({node.name})"
        inner = [i for i in node.all_input_nodes if is_tensor(i) and i.op == "call_function" and _match_node(i)]
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and move_source(node) is None
        if not inner or (node.target not in SCORE_OPS and pointwise):
            break
        node = inner[0]
    if match_product(node, with_addend=True) is not None:
        read = len(node.users) > 1
        return f"another op reads the scores ({node.name})" if read else "an unsupported scale, bias or fill"
    return f"{node.name} ({node.target}) is between the product and the softmax"


def _match_node(node: Node) -> bool:
    return match_product(node, with_addend=True) is not None or _can_reach(node, lambda n: n.all_input_nodes)
