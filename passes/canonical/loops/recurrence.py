"""Express a step as a * state + b in the previous state, and compute all steps by one scan.

    h = a * h + b     addcmul(b, a, h)     lerp(h, x, w)     h + w * (x - h)     where(reset, b, a * h + b)
                  ->  sp.linear_scan(a, b, initial, time)
    h = h + b     ->  cumsum(b, time) + initial
    h = h * a     ->  cumprod(a, time) * initial
    h = a * h + k.mT @ (v - w @ h)   ->  sp.affine_scan(a * 1 - k.mT @ w, k.mT @ v, initial, time)

The *state* is the column (one node of every step) that reads its own node of the previous step. `LoopBuilder`
(reroll.py) calls `affine` for each op between the previous state and the state, and then `scan_states`.
`ScanBuilder.affine` evaluates one op on operands that are affine in the state: the state itself is 1 * state + 0, and
an operand x without the state is 0 * state + x. A matrix product from the left adds a matrix m, which multiplies the
columns of the state: a * state + m @ state + b. Factors, matrices and terms are values of all steps at once, or
numbers. `time` is the dim of the steps.

Bytes moved: none. Unchanged: states that are not affine in the previous state (tanh), and casts of the state, which
round it at every step. Other linear ops, and states that depend on each other, are left to `coupled.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape
from sp_compile.passes.graph.sizes import Size, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import constant_value, is_copy

from .steps import NotALoop, StepColumn
from .vectorize import MATMULS, BatchedOps, BatchedValue, Value, leaf_names, step_ndim

aten = torch.ops.aten
LINEAR_SCAN, AFFINE_SCAN = torch.ops.sp.linear_scan.default, torch.ops.sp.affine_scan.default


@dataclass(frozen=True)
class AffineValue:
    """Value a * state + m @ state + b."""

    state: StepColumn  # column of the state
    a: Value  # factor of each element, possibly a number
    b: Value  # term, possibly a number
    m: Value = 0  # matrix (..., R, K) of a state (..., K, V), or the number 0
    shape: tuple[Size, ...] = ()  # shape of the value at one step; () for that of the state
    lag: int = 1  # steps from the state to the value: 1 for the previous state, 0 for that of the same step

    @property
    def step_shape(self) -> tuple[Size, ...]:
        """Return the shape of the value at one step."""
        return self.shape or node_shape(self.state.node)


class ScanBuilder(BatchedOps):
    """Editor that evaluates ops on values that are affine in a state, and emits the scans of states."""

    def affine(self, node: Node, leaves: list[Value]) -> AffineValue | None:
        """Return the value of an op at every step as an affine function of a state, a * state + m @ state + b.

        For h * c + x with the state h, the leaves of the sum are the AffineValue c * h + 0 and x; the result is the
        AffineValue c * h + x. Its lag is the number of steps from the state to the value: 1 for a function of the
        previous state, 0 of the state of the same step. Values of different lags are not combined.

        Args:
            node: The op of one step.
            leaves: Values in place of the leaves of its arguments (tensors and constants); at least one is an
                AffineValue, and the others are values of all steps.

        Returns:
            The value, or None if the op is not affine in one state.
        """
        refuse_infinite_factor(node)
        affine_leaves = [x for x in leaves if isinstance(x, AffineValue)]
        state, lag = affine_leaves[0].state, affine_leaves[0].lag
        if any(x.state is not state or x.lag != lag for x in affine_leaves) or not is_tensor(node):
            return None
        if node.meta["val"].dtype != state.node.meta["val"].dtype:
            return None
        if node.target in MATMULS:
            return self._multiply_matrix(node, leaves)
        if any(not is_same_shape(node_shape(node), x.step_shape) for x in affine_leaves):
            return None
        if is_copy(node):
            return affine_leaves[0]
        rule = _AFFINE_RULES.get(getattr(node.target, "overloadpacket", None))
        # A leaf that is a node but no tensor is a symbolic number, which the rules do not support.
        if rule is None or any(isinstance(x, Node) and not is_tensor(x) for x in leaves):
            return None
        # The arguments by name, as the rules read them: defaults, then those of the call.
        named_leaves = {name: self._cast_leaf(name, x, node) for name, x in zip(leaf_names(node), leaves)}
        arguments = OpCall(node).args | named_leaves
        coefficients = rule(_FoldingArithmetic(self, node), arguments)  # (a, b, m)
        return None if coefficients is None else AffineValue(state, *coefficients, shape=node_shape(node), lag=lag)

    def _cast_leaf(self, name: str, x: Value, node: Node) -> Value:
        """Return an argument of an op in the dtype of the op's result, as the op computes with it.

        Coefficients are then computed in this dtype, too: two masks of bools are added as numbers, and products of
        integers do not overflow. Conditions, affine values and constants are unchanged.
        """
        dtype = node.meta["val"].dtype
        if name in ("condition", "mask"):
            return x
        if isinstance(x, BatchedValue):
            return BatchedValue(self.cast(x.node, dtype, node), x.time)
        return self.cast(x, dtype, node) if is_tensor(x) else x

    def _multiply_matrix(self, node: Node, leaves: list[Value]) -> AffineValue | None:
        """Return the matrix product left @ right, where `right` is affine in the state; None for other products.

        left @ (a * state + m @ state + b) = (left * a.T + left @ m) @ state + left @ b, if `a` is a factor of rows,
        (..., K, 1): then left @ (a * state) = (left * a.T) @ state.
        """
        left, right = leaves
        if isinstance(left, AffineValue) or min(len(right.step_shape), step_ndim(left)) < 2:
            return None
        ops, m = _FoldingArithmetic(self, node), 0
        if not _is_filled_with(right.a, 0):
            if not _is_row_factor(right.a):
                return None
            m = ops.multiply(left, right.a if _is_number(right.a) else self._transpose(right.a))
        if not _is_number(right.m):  # the only number that is a matrix is 0
            m = ops.add(m, self._matmul(left, right.m, node))
        if _is_number(right.b) and right.b != 0:  # left @ b would be a product with a constant matrix
            return None
        b = 0 if _is_number(right.b) else self._matmul(left, right.b, node)
        return replace(right, a=0, b=b, m=m, shape=node_shape(node))

    def _matmul(self, left: Value, right: Value, like: Node) -> Value:
        """Emit the matrix product of two values of all steps, of which one may be equal for all steps."""
        return self.compute_steps(aten.matmul.default, left, right, like=like, fixed_dims=2)

    def _transpose(self, x: Value) -> Value:
        """Return factors (..., K, 1) as (..., 1, K), for all steps; values of fewer than two dims are unchanged."""
        if step_ndim(x) < 2:
            return x
        if isinstance(x, BatchedValue):
            x = BatchedValue(self.align(x, 2), x.ndim - 2)  # the steps before the last two dims
            return BatchedValue(self.compute(aten.transpose.int, (x.node, -1, -2), x.node), x.time)
        return self.compute(aten.transpose.int, (x, -1, -2), x)

    def scan_states(self, affine: AffineValue, seed: Value, reverse: bool) -> BatchedValue:
        """Emit the scan that computes a state at every step.

        Args:
            affine: The state as a function of the previous state, a * state + m @ state + b.
            seed: The state before the first step.
            reverse: True if the last step is computed first.

        Returns:
            The state of every step.

        Raises:
            NotALoop: No scan computes the recurrence, such as one of integers.
        """
        like, a, b = affine.state.node, affine.a, affine.b
        value, shape = like.meta["val"], node_shape(like)
        if value.dtype == torch.bool:
            raise NotALoop("a recurrence of bools")
        # Select the dim of the steps in the result: that of b, or else of a, if it has all dims of the state. That
        # coefficient is then read as it is, without a permutation.
        times = [x.time for x in (b, a) if isinstance(x, BatchedValue) and x.ndim == value.ndim]
        time = times[0] if times else 0
        stacked_shape = (*shape[:time], len(affine.state.nodes), *shape[time:])
        dtype = _scan_dtype(affine)

        def expand_steps(x: Value) -> Node:
            """Expand a coefficient to the shape of all steps, as scans require."""
            return self.expand_to(self.align(x, trailing_dims=value.ndim - time), stacked_shape, like, dtype)

        initial = None if _is_filled_with(seed, 0) else self.expand_to(seed, shape, like, dtype)
        if not _is_number(affine.m):
            return self._scan_matrices(affine, initial, reverse)
        if _is_filled_with(a, 1) and not _is_filled_with(b, 0):  # state + b
            out = self._emit_cumulative("sum", expand_steps(b), time, reverse, like)
            if initial is not None:
                out = self.compute(aten.add.Tensor, (out, self.unsqueeze(initial, time)), like)
        elif not value.is_floating_point():
            raise NotALoop("a recurrence of integers")
        elif _is_filled_with(b, 0):  # a * state
            out = self._emit_cumulative("prod", expand_steps(a), time, reverse, like)
            if not _is_filled_with(seed, 1):  # also for zeros, for which `initial` is None
                initial = self.expand_to(seed, shape, like, dtype)
                out = self.compute(aten.mul.Tensor, (out, self.unsqueeze(initial, time)), like)
        else:
            out = self.compute(LINEAR_SCAN, (expand_steps(a), expand_steps(b), initial, time, reverse), like)
        return BatchedValue(self.cast(out, value.dtype, like), time)

    def _scan_matrices(self, affine: AffineValue, initial: Node | None, reverse: bool) -> BatchedValue:
        """Emit the scan of a state (..., K, V) that matrices multiply: (m + a * identity) @ state + b.

        Args:
            affine: The state as a function of the previous state.
            initial: The state before the first step; None for zeros.
            reverse: True if the last step is computed first.

        Returns:
            The state of every step, (..., steps, K, V).
        """
        like, ops = affine.state.node, _FoldingArithmetic(self, affine.state.node)
        steps = len(affine.state.nodes)  # the state is a column of one node per step; `node` is one of them
        *batch, rows, columns = node_shape(like)
        if not _is_row_factor(affine.a):
            raise NotALoop("a state whose factor differs between the columns that a matrix multiplies")
        m, value, dtype = affine.m, like.meta["val"], _scan_dtype(affine)
        if not _is_filled_with(affine.a, 0):
            options = {"dtype": dtype, "device": value.device}
            identity = self.compute(aten.eye.default, (self.sizes(rows),), like, options)
            m = ops.add(ops.multiply(identity, affine.a), m)
        # `align` moves the dim of the steps before the two dims of a matrix.
        maps = self.expand_to(self.align(m, 2), (*batch, steps, rows, rows), like, dtype)
        terms = self.expand_to(self.align(affine.b, 2), (*batch, steps, rows, columns), like, dtype)
        time = len(batch)
        out = self.compute(AFFINE_SCAN, (maps, terms, initial, time, reverse), like)
        return BatchedValue(self.cast(out, value.dtype, like), time)

    def _emit_cumulative(self, op: str, x: Node, time: int, reverse: bool, like: Node) -> Node:
        """Emit the cumulative sum or product (`op`) of x along the dim `time`, from the last step on if `reverse`."""
        if reverse:
            segments, exclusive = None, False
            return self.compute(torch.ops.sp.scan.default, (x, segments, time, op, exclusive, reverse), like)
        target = {"sum": aten.cumsum.default, "prod": aten.cumprod.default}[op]
        return self.compute(target, (x, time), like, {"dtype": x.meta["val"].dtype})


Coefficients = tuple[Value, Value, Value]  # (a, b, m) of a * state + m @ state + b


class _FoldingArithmetic:
    """Arithmetic on values of all steps that emits ops, except where the result is known: x * 1, x + 0, 2 * 3.

    Args:
        scans: Emits the ops.
        like: The node whose metadata the emitted ops copy.
    """

    def __init__(self, scans: ScanBuilder, like: Node) -> None:
        self.scans, self.like = scans, like

    def coefficients(self, x: Value) -> Coefficients:
        """Return (a, b, m) of an operand a * state + m @ state + b; for a value without the state (0, x, 0).

        A tuple is returned unchanged: it is the coefficients of an intermediate result.
        """
        if isinstance(x, AffineValue):
            return x.a, x.b, x.m
        return x if isinstance(x, tuple) else (0, x, 0)

    def multiply(self, x: Value, y: Value) -> Value:
        """Return x * y for values without the state."""
        if _is_number(x):
            x, y = y, x  # if one is a number, it is y
        if _is_number(y) and y == 0:
            return 0
        if _is_number(x):  # both are
            return x * y
        if _is_number(y) and y == 1:
            return x
        return self.scans.compute_steps(aten.mul.Tensor, x, y, like=self.like)

    def add(self, x: Value, y: Value) -> Value:
        """Return x + y for values without the state."""
        if _is_number(x):
            x, y = y, x  # if one is a number, it is y
        if _is_number(x):  # both are
            return x + y
        if _is_number(y) and y == 0:
            return x
        return self.scans.compute_steps(aten.add.Tensor, x, y, like=self.like)

    def divide(self, x: Value, y: Value) -> Value:
        """Return x / y for values without the state."""
        if _is_number(x) and _is_number(y):
            return x / y
        if _is_filled_with(x, 0):
            return 0
        if _is_number(x):
            return self.multiply(x, self.scans.compute_steps(aten.reciprocal.default, y, like=self.like))
        return self.scans.compute_steps(aten.div.Tensor, x, y, like=self.like)

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        """Return x where the condition is true, else y, for values without the state."""
        if _is_number(x) and _is_number(y) and x == y:
            return x
        if _is_number(x) and _is_number(y):  # torch would select from two numbers in the default dtype
            value = self.like.meta["val"]
            options = {"dtype": accumulation_dtype(value.dtype), "device": value.device}
            x = self.scans.compute(aten.full.default, ([], x), self.like, options)
        # `where` has an overload for each combination of tensors and numbers.
        overloads = {(0, 0): "self", (1, 0): "ScalarSelf", (0, 1): "ScalarOther"}
        target = getattr(aten.where, overloads[_is_number(x), _is_number(y)])
        return self.scans.compute_steps(target, condition, x, y, like=self.like)


# function of the arithmetic and of an op's arguments, by schema name; its result is None if it is not affine
AffineRule = Callable[[_FoldingArithmetic, dict[str, Any]], Coefficients | None]


def _affine_sum(ops: _FoldingArithmetic, x: Value, y: Value, alpha: Value = 1) -> Coefficients:
    """Return the coefficients (a, b, m) of x + alpha * y: each is the sum of those of x and of alpha * y."""
    return tuple(ops.add(p, ops.multiply(q, alpha)) for p, q in zip(ops.coefficients(x), ops.coefficients(y)))


def _affine_scale(ops: _FoldingArithmetic, x: Value, y: Value, divides: bool = False) -> Coefficients | None:
    """Return the coefficients (a * y, b * y, m * y) of x * y, where x is a * state + m @ state + b, or y is.

    If `divides`, return those of x / y for a y without the state, (a / y, b / y, m / y).

    None if both contain the state, or if m is not 0 and the factor y differs between columns of the state (..., K, V):
    (m @ state) * y is (m * y) @ state only if y has size 1 in the dim V, which m (..., R, K) does not have.
    """
    if isinstance(x, AffineValue) and isinstance(y, AffineValue):
        return None
    if isinstance(y, AffineValue):
        x, y = y, x
    a, b, m = ops.coefficients(x)
    if not _is_number(m) and not _is_row_factor(y):
        return None
    scale = ops.divide if divides else ops.multiply
    return scale(a, y), scale(b, y), scale(m, y)


def _affine_divide(ops: _FoldingArithmetic, args: dict[str, Any]) -> Coefficients | None:
    """Return the coefficients of args["self"] / args["other"], as `_affine_scale` does.

    None also if the divisor contains the state, or if the quotient is rounded to an integer.
    """
    if isinstance(args["other"], AffineValue) or args.get("rounding_mode") is not None:
        return None
    return _affine_scale(ops, args["self"], args["other"], divides=True)


def _affine_addcmul(ops: _FoldingArithmetic, args: dict[str, Any]) -> Coefficients | None:
    """Return the coefficients (a, b, m) of self + value * tensor1 * tensor2, or None if the product has none."""
    product = _affine_scale(ops, args["tensor1"], args["tensor2"])
    return _affine_sum(ops, args["self"], product, args["value"]) if product is not None else None


def _affine_lerp(ops: _FoldingArithmetic, args: dict[str, Any]) -> Coefficients | None:
    """Return the coefficients (a, b, m) of (1 - weight) * self + weight * end.

    None if the weight contains the state, or if a product has no coefficients.
    """
    weight = args["weight"]
    if isinstance(weight, AffineValue):
        return None
    complement = ops.add(1, ops.multiply(weight, -1))
    products = _affine_scale(ops, args["self"], complement), _affine_scale(ops, args["end"], weight)
    return None if None in products else _affine_sum(ops, *products)


def _affine_select(ops: _FoldingArithmetic, condition: Value, x: Value, y: Value) -> Coefficients | None:
    """Return the coefficients (a, b, m) of where(condition, x, y): each is selected.

    None if the condition contains the state, or if it differs between the columns that a matrix m multiplies.
    """
    if isinstance(condition, AffineValue):
        return None
    (a_x, b_x, m_x), (a_y, b_y, m_y) = ops.coefficients(x), ops.coefficients(y)
    if not (_is_number(m_x) and _is_number(m_y)) and not _is_row_factor(condition):
        return None
    return ops.select(condition, a_x, a_y), ops.select(condition, b_x, b_y), ops.select(condition, m_x, m_y)


_AFFINE_RULES: dict[Any, AffineRule] = {  # by op, for every overload
    aten.add: lambda ops, args: _affine_sum(ops, args["self"], args["other"], args["alpha"]),
    aten.sub: lambda ops, args: _affine_sum(ops, args["self"], args["other"], -args["alpha"]),
    aten.rsub: lambda ops, args: _affine_sum(ops, args["other"], args["self"], -args["alpha"]),
    aten.neg: lambda ops, args: _affine_scale(ops, args["self"], -1),
    aten.mul: lambda ops, args: _affine_scale(ops, args["self"], args["other"]),
    aten.div: _affine_divide,
    aten.addcmul: _affine_addcmul,
    aten.lerp: _affine_lerp,
    aten.where: lambda ops, args: _affine_select(ops, args["condition"], args["self"], args["other"]),
    aten.masked_fill: lambda ops, args: _affine_select(ops, args["mask"], args["value"], args["self"]),
}


def refuse_infinite_factor(node: Node) -> None:
    """Raise NotALoop for an op of a step that multiplies by an infinite number or divides by 0.

    (h + x) / 0 is inf where inf * h + inf * x is NaN, the sum of inf and -inf.
    """
    op, args = getattr(node.target, "overloadpacket", None), (*node.args, *node.kwargs.values())
    is_infinite = op in _SCALES and any(_is_number(x) and not math.isfinite(x) for x in args)
    if is_infinite or (op is aten.div and _is_number(node.args[1]) and node.args[1] == 0):
        raise NotALoop("a factor that is infinite")


def has_rounded_numbers(values: Iterable[Value], dtype: torch.dtype) -> bool:
    """Return True if a Python number among the values is rounded in a dtype of 16 bits, as 0.999 in bfloat16."""
    numbers = [torch.tensor(x, dtype=accumulation_dtype(dtype)) for x in values if _is_number(x)]
    return any(bool(x.to(dtype) != x) for x in numbers)


def _scan_dtype(affine: AffineValue) -> torch.dtype:
    """Return the dtype of a scan: that of the state, or float32 for 16 bits that would round a number or coefficient.

    bfloat16 and float16 do not represent 0.999, for example. A single step reads it in float32, and rounds its result
    only; with a rounded factor, the errors of all steps would have the same sign.
    """
    dtype: torch.dtype = affine.state.node.meta["val"].dtype
    coefficients = affine.a, affine.b, affine.m
    nodes = [x.node if isinstance(x, BatchedValue) else x for x in coefficients if not _is_number(x)]
    is_wider = any(
        x.meta["val"].ndim and x.meta["val"].dtype == accumulation_dtype(dtype) for x in nodes if is_tensor(x)
    )
    return accumulation_dtype(dtype) if is_wider or has_rounded_numbers(coefficients, dtype) else dtype


def _is_row_factor(x: Value) -> bool:
    """Return True if a factor of a state (..., K, V) has one value per row: its last dim has the size 1.

    Then x * (m @ state) = (x * m) @ state for a matrix m.
    """
    if isinstance(x, BatchedValue):
        return x.ndim == 0 or is_same_size(x.shape[-1], 1)
    return _is_number(x) or (is_tensor(x) and (x.meta["val"].ndim == 0 or is_same_size(node_shape(x)[-1], 1)))


_SCALES = {aten.mul, aten.div, aten.addcmul, aten.lerp}  # ops with a factor


def _is_number(x: Value) -> bool:
    """Return True for a Python number, but not for a bool."""
    return isinstance(x, int | float) and not isinstance(x, bool)


def _is_filled_with(x: Value, number: int) -> bool:
    """Return True for the number, or a tensor filled with it."""
    if _is_number(x):
        return x == number
    return is_tensor(x) and constant_value(x) == number
