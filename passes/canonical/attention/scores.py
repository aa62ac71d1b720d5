"""Match eager attention scores, backward from the softmax: product, scale, soft cap, biases, fills.

    softmax((q @ k.mT * 0.125 + bias).masked_fill(~mask, -inf))
        ->  ScoreChain(q @ k.mT, scale=0.125, biases=(bias,), fills=(mask,))

Queries and keys may be any dims: an `order` lists the dims of a value as (leading dims, queries, keys), so that the
identity order is (B, H, Q, K). To *regroup* leading dims reshapes them only, as (B * H,) to (B, H).

A *bias* is added to scores, and a *fill* is the number that masked scores get, -inf or a large negative one. A *factor*
is a tensor that scales the scores, constant over the keys of a query. A *gate* is any other tensor that multiplies
them, such as a mask of 0 and 1. `eager_attention.py` emits the mask of a matched chain.

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
    is_float_cast,
    is_order_preserving,
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
    **dict.fromkeys(parse_overloads("add.Tensor sub.Tensor"), 0),
    **dict.fromkeys(parse_overloads("mul.Tensor div.Tensor"), 1),
}
SCORE_SCALE_OPS = parse_overloads("mul.Tensor mul.Scalar div.Tensor div.Scalar")
SCORE_OPS = [*SCORE_SCALE_OPS, *parse_overloads("add.Tensor sub.Tensor tanh"), *MASK_OPS]


@dataclass(frozen=True)
class ScoreOperand:
    """Tensor that broadcasts to scores: a factor, a bias, the condition of a fill, or a gate."""

    node: Node  # the tensor
    order: tuple[int, ...]  # dims of the scores as (leading dims, queries, keys)
    leading: tuple[Size, ...] = ()  # leading dims that it is reshaped to, if any

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the tensor."""
        return self.node.meta["val"].dtype

    @property
    def shape(self) -> tuple[Size, ...]:
        """Return the shape (leading dims, queries, keys) that `materialize` gives the tensor.

        It broadcasts to the scores, so that the first dims may be missing.
        """
        node_dims = node_shape(self.node)
        leading = self.leading or node_dims[:-2]
        own_shape = (*leading, *node_dims[-2:])
        if is_identity(self.order):
            return own_shape
        full_shape = (*[1] * (len(self.order) - len(own_shape)), *own_shape)
        return tuple(full_shape[d] for d in self.order)

    def materialize(self, editor: GraphEditor, like: Node) -> Node:
        """Emit the tensor with its dims in the order (leading dims, queries, keys); the first ones may be missing.

        It is reshaped to the dims `leading`, which only operands in this order have (`regroup`), or else permuted.
        """
        x = editor.reshape(self.node, self.shape, like) if self.leading else self.node
        if is_identity(self.order):
            return x
        while x.meta["val"].ndim < len(self.order):
            x = editor.compute(aten.unsqueeze.default, (x, 0), like)
        return editor.compute(aten.permute.default, (x, list(self.order)), like)

    def regroup(self, before: tuple[Size, ...], after: tuple[Size, ...]) -> ScoreOperand | None:
        """Return the operand for scores whose leading dims are reshaped, such as (B * H,) to (B, H).

        A mask (B * H, 1, K), for example, is then read as (B, H, 1, K).

        Args:
            before: The leading dims of the scores that the operand fits.
            after: The leading dims to which it is adapted.

        Returns:
            The operand; None if it has only some of the leading dims, or another order.
        """
        if not is_identity(self.order):
            return None
        shape, order = self.shape, tuple(range(len(after) + 2))
        leading = (*[1] * (len(before) + 2 - len(shape)), *shape)[:-2]  # 1 for missing dims
        if all(is_same_size(extent, 1) for extent in leading):  # it broadcasts to any leading dims
            has_too_many_dims = len(shape) > len(order)
            return ScoreOperand(self.node, order, leading=(1,) * len(after) if has_too_many_dims else ())
        if not is_same_shape(leading, before):
            return None
        source = _undo_merged_batch(self.node, after)  # already has the leading dims, or broadcasts to them
        return ScoreOperand(self.node, order, leading=after) if source is None else ScoreOperand(source, order)


def _undo_merged_batch(x: Node, leading: tuple[Size, ...]) -> Node | None:
    """Return the mask or bias that a program reshaped or repeated to x (B * H, Q, K), or None if it did neither.

    It is (B, H, Q, K) before a reshape, or (H, Q, K) before a repetition for each batch entry.

    Args:
        x: The tensor.
        leading: The leading dims (B, H) of the scores.
    """
    node = value_origin(x)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    before_reshape = move_source(node) if is_order_preserving(node) else None
    if before_reshape is not None:
        expected_shape = (*leading, *node_shape(x)[-2:])
        return before_reshape if is_same_shape(node_shape(before_reshape), expected_shape) else None
    if node.target is not aten.repeat.default:
        return None
    # x = source.repeat(B, 1, 1) of a source (H, Q, K), for leading dims (B, H)
    repeats, source = as_sizes(OpCall(node)["repeats"]), OpCall(node).operands[0]
    shape = node_shape(source)
    if len(shape) != 3 or not is_same_shape(repeats, (size_product(leading[:-1]), 1, 1)):
        return None
    return source if is_same_size(shape[0], leading[-1]) else None


@dataclass(frozen=True)
class ScoreChain:
    """Ops between the product and the softmax, in graph order: scale, score function, biases, fills."""

    product: ProductMatch  # product of queries and keys
    scale: float  # number that scales the product
    chain: tuple[Node, ...]  # nodes from the product to the softmax
    order: tuple[int, ...]  # dims of the scores as (leading dims, queries, keys)
    factors: tuple[tuple[ScoreOperand, bool], ...] = ()  # (tensor, True to divide)
    biases: tuple[tuple[ScoreOperand, float], ...] = ()  # (bias, its factor)
    fills: tuple[tuple[ScoreOperand, bool, float], ...] = ()  # (condition, its value where scores are filled, fill)
    gate: ScoreOperand | None = None  # tensor by which scores are multiplied and which is no factor of a head
    # shape (leading dims, queries, keys) of the scores that the last operand is applied to; None without operands
    masked_shape: tuple[Size, ...] | None = None
    score: sympy.Expr = SCORE  # function of the scaled product before biases and fills


def match_scores(x: Any, keys_dim: int, *users: Node) -> ScoreChain | None:
    """Match the ops that compute the scores `x`, from a softmax back to the product of queries and keys.

    Each call matches one op, and the operand of the op by a recursive call.

    Args:
        x: The input of the softmax, or the scores before one of the ops.
        keys_dim: The dim of `x` along which the softmax reduces.
        users: The nodes that may read `x`; None is returned if others do.

    Returns:
        The chain of ops, or None if one of them is not supported.
    """
    if not is_tensor(x) or set(x.users) != set(users) or x.op != "call_function":
        return None
    if keys_dim >= len(node_shape(x)):  # it broadcasts to its reader
        return None
    product = match_product(x, with_addend=True)
    if product is not None:
        candidates = (product, transpose_product(product))
        product = next((candidate for candidate in candidates if candidate.order[-1] == keys_dim), None)
        return _match_score_product(product, x) if product is not None else None
    if not isinstance(x.target, OpOverload):
        return None
    call, inner = OpCall(x), None
    steps = steps_between(x, value_origin(x)) or [x]  # x, or several ops that cancel
    if any(set(a.users) != {b} for a, b in pairwise(steps)):  # another op reads the scores between the steps
        return None
    if steps != [x] or is_float_cast(x) or is_neutral_op(x):  # the scores do not change
        inner = match_scores(OpCall(steps[0]).operands[0], keys_dim, steps[0])
    elif permutation_of(x) is not None or is_leading_reshape(x):
        inner = _match_permutation(x, keys_dim)
    elif x.target in SCORE_SCALE_OPS:
        inner = _match_scale(call, x, keys_dim)
    elif x.target is aten.tanh.default:
        inner = _match_soft_cap(call, x, keys_dim)
    elif x.target in (aten.add.Tensor, aten.sub.Tensor):
        inner = _match_bias(call, x, keys_dim)
    elif x.target in MASK_OPS:
        inner = _match_fill(call, x, keys_dim)
    return replace(inner, chain=(*inner.chain, *steps)) if inner is not None else None


def _match_score_product(product: ProductMatch, x: Node) -> ScoreChain | None:
    """Return the chain that consists of the product x, with the term that x itself adds (baddbmm) as a bias.

    Returns None if that term has another dtype than x, to which the op casts it.
    """
    scores = ScoreChain(product, scale=product.scale, chain=(x,), order=product.order)
    addend = product_addend(x)
    if addend is None:
        return scores
    bias, factor = addend
    if bias.meta["val"].dtype != x.meta["val"].dtype:
        return None
    return _add_operand(scores, x, bias, biases=((ScoreOperand(bias, scores.order), factor),))


def _match_permutation(x: Node, keys_dim: int) -> ScoreChain | None:
    """Match scores that x permutes, or whose leading dims it reshapes; `keys_dim` is the dim of keys in x."""
    source, permuted = OpCall(x).operands[0], permutation_of(x)
    added_dims = len(node_shape(x)) - len(node_shape(source))  # a reshape of leading dims shifts the others by these
    source_dim = permuted[keys_dim] if permuted is not None else keys_dim - added_dims  # the dim of keys in the source
    inner = match_scores(source, source_dim, x) if source_dim >= 0 else None
    if inner is None:
        return None
    order = order_after(x, inner.order)
    return replace(inner, order=order) if order is not None else None


def order_after(x: Node, order: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the dims of x as (leading dims, queries, keys), for a permutation or reshape x of scores.

    Args:
        x: The permutation or reshape.
        order: The same dims of its operand.

    Returns:
        The dims; None if x mixes leading dims, queries and keys. For (B * H, K, Q) -> (B, H, K, Q), the order
        (0, 2, 1) becomes (0, 1, 3, 2).
    """
    permuted = permutation_of(x)
    if permuted is not None:
        return tuple(permuted.index(d) for d in order)
    if not is_leading_reshape(x) or not is_identity(order[:-2]):
        return None
    before, after = len(order), x.meta["val"].ndim
    return (*range(after - 2), *(d - before + after for d in order[-2:]))  # dims of queries and keys are the last two


def is_neutral_op(x: Node) -> bool:
    """Return True for y * 1, y / 1, y + 0 and y - 0, which equal y except for the sign of zero."""
    number = NEUTRAL_NUMBERS.get(x.target)
    if number is None or not is_tensor(x.args[0]):
        return False
    value, operand = x.meta["val"], OpCall(x).operands[0].meta["val"]
    has_same_type = value.dtype == operand.dtype and value.ndim == operand.ndim
    return has_same_type and scalar_value(OpCall(x)["other"], value.dtype) == number


def is_leading_reshape(x: Node) -> bool:
    """Return True if the node reshapes only dims before the last two, such as (B * H, Q, K) to (B, H, Q, K)."""
    source = move_source(x) if is_order_preserving(x) else None
    if source is None:
        return False
    before, after = (node_shape(n) for n in (source, x))
    return min(len(before), len(after)) >= 3 and is_same_shape(before[-2:], after[-2:])


def _match_scale(call: OpCall, x: Node, keys_dim: int) -> ScoreChain | None:
    """Match scores that x multiplies or divides, or return None; `keys_dim` is the dim of keys in x.

    A positive number changes the scale of the product or, after the tanh of a soft cap, the score function. A tensor
    with one number for all queries and keys of a head becomes one of the factors. Another tensor, such as a mask of 0
    and 1, is a gate.
    """
    divides, dtype = x.target in (aten.div.Tensor, aten.div.Scalar), x.meta["val"].dtype
    pairs = [(call["self"], call["other"]), (call["other"], call["self"])]
    for scores, factor in pairs[:1] if divides else pairs:
        inner = match_scores(scores, keys_dim, x) if is_tensor(scores) else None
        # A factor scales biases and finite fills, too, which a scale of the product would not. The last element of an
        # entry of `fills` is the number.
        if inner is None or inner.biases or any(math.isfinite(fill) for *_, fill in inner.fills):
            continue
        number = scalar_value(factor, dtype)  # None for a tensor of unknown values
        if number is not None and not math.isfinite(number):
            continue
        # `inner.score` is a function of the scaled product: SCORE itself, or with a tanh.
        if number and inner.score != SCORE and not inner.fills:  # tanh(..) * c; a fill would be multiplied, too
            exact_number = sympy.Rational(repr(float(number)))
            return replace(inner, score=inner.score / exact_number if divides else inner.score * exact_number)
        if inner.score == SCORE and number is not None and number > 0:  # a negative one would change the sign of -inf
            return replace(inner, scale=inner.scale / number if divides else inner.scale * number)
        if not is_tensor(factor) or inner.fills:  # a tensor may have negative numbers or 0, which change fills
            continue
        operand = ScoreOperand(factor, inner.order)
        is_per_head = set(operand.shape[-2:]) <= {1}  # one number for all (queries, keys)
        if inner.score == SCORE and is_per_head:
            return _add_operand(inner, x, factor, factors=((operand, divides),))
        if inner.gate is None and not divides:
            return _add_operand(inner, x, factor, gate=operand)
    return None


def _match_soft_cap(call: OpCall, x: Node, keys_dim: int) -> ScoreChain | None:
    """Match the tanh of a soft cap c * tanh(scores / c), before any bias or fill; `_match_scale` matches both c."""
    inner = match_scores(call["self"], keys_dim, x)
    if inner is None or inner.biases or inner.fills:
        return None
    return replace(inner, score=sympy.tanh(inner.score))


def _match_bias(call: OpCall, x: Node, keys_dim: int) -> ScoreChain | None:
    """Match scores + bias, bias + scores or scores - bias, or return None; `keys_dim` is the dim of keys in x."""
    if len(call.operands) != 2 or call["alpha"] != 1:
        return None
    a, b = call.operands
    is_difference = x.target is aten.sub.Tensor
    factor = -1.0 if is_difference else 1.0
    for scores, bias in [(a, b)] if is_difference else [(a, b), (b, a)]:
        inner = match_scores(scores, keys_dim, x)
        # A bias that the op casts to the dtype of the result is not matched.
        if inner is not None and bias.meta["val"].dtype == x.meta["val"].dtype:
            return _add_operand(inner, x, bias, biases=((ScoreOperand(bias, inner.order), factor),))
    return None


def _match_fill(call: OpCall, x: Node, keys_dim: int) -> ScoreChain | None:
    """Match masked_fill(scores, condition, number), where(condition, scores, number) and where(.., number, scores).

    None if the number is no fill: -inf or a large negative number. `keys_dim` is the dim of keys in x.
    """
    dtype = x.meta["val"].dtype
    # `filled_value`: the value of the condition, True or False, where scores are filled
    if "mask" in call.args:
        scores, condition, number, filled_value = call["self"], call["mask"], call["value"], True
    else:
        condition, filled_value = call["condition"], scalar_value(call["self"], dtype) is not None
        scores, number = (call["other"], call["self"]) if filled_value else (call["self"], call["other"])
    fill = scalar_value(number, dtype)
    if fill is None or (fill > MAX_FILL and fill != torch.finfo(dtype).min):  # that of float16 is -65504
        return None
    inner = match_scores(scores, keys_dim, x)
    if inner is None:
        return None
    return _add_operand(inner, x, condition, fills=((ScoreOperand(condition, inner.order), filled_value, fill),))


def _add_operand(
    inner: ScoreChain, x: Node, operand: Node, gate: ScoreOperand | None = None, **new_entries: Any
) -> ScoreChain | None:
    """Return the chain with one more operand, a tensor that the op x applies to the scores.

    The program may reshape the leading dims of scores between operands, as (B * H,) to (B, H). The operands of the
    chain are adapted to the leading dims at which the last one is applied.

    Args:
        inner: The scores before the op.
        x: The op.
        operand: The tensor.
        gate: The tensor if it multiplies each score, as a mask of 0 and 1 does.
        new_entries: The tensor as an entry of the field `factors`, `biases` or `fills`.

    Returns:
        The chain; None if scores broadcast to the tensor, or if operands cannot be adapted.
    """
    shape = node_shape(x)
    if node_shape(inner.chain[-1]) != shape or operand.meta["val"].ndim > len(shape):
        return None
    # The chain's `masked_shape` is the shape (leading dims, queries, keys) of the scores at the last operand.
    masked_shape = tuple(shape[d] for d in inner.order)
    regrouped = inner if inner.masked_shape in (None, masked_shape) else _regroup_chain(inner, masked_shape)
    if regrouped is None:
        return None
    fields: dict[str, Any] = {name: (*getattr(regrouped, name), *entries) for name, entries in new_entries.items()}
    return replace(regrouped, masked_shape=masked_shape, gate=gate or regrouped.gate, **fields)


def _regroup_chain(inner: ScoreChain, shape: tuple[Size, ...]) -> ScoreChain | None:
    """Return the chain with its operands reshaped to the leading dims of `shape`, or None if one cannot be.

    Chains with a gate are not supported. `shape` is that of the scores, as (leading dims, queries, keys).
    """
    assert inner.masked_shape is not None
    if inner.gate is not None:
        return None
    fields: dict[str, Any] = {}
    for name in ("factors", "biases", "fills"):  # entries (operand, ...)
        entries = [(x.regroup(inner.masked_shape[:-2], shape[:-2]), *others) for x, *others in getattr(inner, name)]
        if any(x is None for x, *_ in entries):
            return None
        fields[name] = tuple(entries)
    return replace(inner, **fields)


def is_between_products(softmax: Node) -> bool:
    """Return True if a softmax is between two matrix products, so that a report on it is of interest."""
    return _has_product_after(softmax, lambda n: n.all_input_nodes) and _has_product_after(
        softmax, lambda n: list(n.users)
    )


def _has_product_after(start: Node, neighbors: Callable[[Node], Sequence[Node]]) -> bool:
    """Return True if one of the next MAX_STEPS nodes from `start` on is a matrix product.

    `neighbors` returns the next nodes of a node: its operands, or its users.
    """

    def tensor_neighbors(node: Node) -> Iterable[Node]:
        """Return the neighbors that compute tensors."""
        return [n for n in neighbors(node) if is_tensor(n) and n.op == "call_function"]

    next_nodes = islice(iterate_reachable([start], tensor_neighbors), 1, MAX_STEPS + 1)  # without `start` itself
    return any(_is_batched_product(node) for node in next_nodes)


def _is_batched_product(node: Node) -> bool:
    """Return True for a batched matrix product, possibly with a term that it adds."""
    return match_product(node, with_addend=True) is not None


def scores_refusal(x: Node) -> str:
    """Return the reason for the report why `match_scores` rejected x, the input of a softmax.

    It names the first op, from the softmax back to the product, that is no scale, bias or fill or has other readers.
    """
    node = x
    while not _is_batched_product(node):
        if len(node.users) > 1:
            return f"another op reads the scores ({node.name})"
        operands = [n for n in node.all_input_nodes if is_tensor(n) and n.op == "call_function"]
        # The operand that is computed from a product; others are factors, biases and masks.
        scores = [n for n in operands if _is_batched_product(n) or _has_product_after(n, lambda n: n.all_input_nodes)]
        # Follow ops that only move elements: views and permutes are not pointwise; copies and casts have a move_source.
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) and move_source(node) is None
        if not scores or (is_pointwise and node.target not in SCORE_OPS):
            return f"{node.name} ({node.target}) is between the product and the softmax"
        node = scores[0]
    return f"another op reads the scores ({node.name})" if len(node.users) > 1 else "an unsupported scale, bias or fill"
