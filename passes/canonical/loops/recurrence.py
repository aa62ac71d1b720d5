"""Express a step as a * state + b in the previous state, and compute all steps by one scan.

    h = a * h + b     addcmul(b, a, h)     lerp(h, x, w)     h + w * (x - h)     where(reset, b, a * h + b)
                  ->  sp.linear_scan(a, b, initial, time)
    h = h + b     ->  cumsum(b, time) + initial
    h = h * a     ->  cumprod(a, time) * initial

Bytes moved: none. Unchanged: states that are not element-wise affine in the previous state (tanh, matmul), and casts of
the state, which round it at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import pytree, schema_of
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import as_sizes
from sp_compile.passes.sharding.matchers import constant_value, is_copy

from .steps import NotALoop, StepColumn
from .vectorize import BatchedOps, BatchedValue, Value

aten = torch.ops.aten
LINEAR_SCAN = torch.ops.sp.linear_scan.default


@dataclass(frozen=True)
class AffineValue:
    """Value a * state + b, element by element."""

    state: StepColumn  # column of the state
    a: Value  # factor, possibly a number
    b: Value  # term, possibly a number


class ScanBuilder(BatchedOps):
    """Affine arithmetic on the values of steps, and scans of states."""

    def affine(self, node: Node, leaves: list[Value]) -> AffineValue | None:
        """Return the value of `node` at every step, affine in a state.

        Args:
            node: The op of one step.
            leaves: Values in place of the leaves of its arguments, some of them affine in a state.

        Returns:
            The value, or None if it is not affine in a state.
        """
        states = list({id(x.state): x.state for x in leaves if isinstance(x, AffineValue)}.values())
        if len(states) != 1 or not _matches(node, states[0].node):
            return None
        if is_copy(node):
            return next(x for x in leaves if isinstance(x, AffineValue))
        rule = _AFFINE_RULES.get(getattr(node.target, "overloadpacket", None))
        if rule is None or any(isinstance(x, Node) and not is_tensor(x) for x in leaves):
            return None
        args, kwargs = pytree.tree_unflatten(leaves, pytree.tree_flatten((node.args, node.kwargs))[1])
        schema = schema_of(node.target).arguments
        named = {a.name: a.default_value for a in schema if a.has_default_value()}
        named.update(zip((a.name for a in schema), args), **kwargs)
        pair = rule(_FoldingArithmetic(self, node), named)
        return None if pair is None else AffineValue(states[0], *pair)

    def scan_states(self, affine: AffineValue, seed: Value, reverse: bool) -> BatchedValue:
        """Scan a recurrence.

        Args:
            affine: The state as a function of the previous state.
            seed: The state before the first step.
            reverse: True if the last step is computed first.

        Returns:
            The state of every step.

        Raises:
            NotALoop: The recurrence has an integer dtype.
        """
        like, a, b = affine.state.node, affine.a, affine.b
        value = like.meta["val"]
        guides = [x for x in (b, a) if isinstance(x, BatchedValue) and x.ndim == value.ndim]
        time = guides[0].time if guides else 0
        shape = as_sizes(value.shape)
        stacked_shape = (*shape[:time], len(affine.state.nodes), *shape[time:])
        state = None if _is_constant(seed, 0) else self.expand_to(seed, shape, like)

        def every(x: Value) -> Node:
            """Expand a value to all steps."""
            return self.expand_to(self.align(x, value.ndim - time), stacked_shape, like)

        if _is_constant(a, 1) and not _is_constant(b, 0):
            out = self._fold_constants("sum", every(b), time, reverse, like)
            out = self._with_terms(aten.add.Tensor, out, state, time, like) if state else out
        elif not value.is_floating_point():
            raise NotALoop("a recurrence of integers")
        elif _is_constant(b, 0):
            out = self._fold_constants("prod", every(a), time, reverse, like)
            if not _is_constant(seed, 1):
                out = self._with_terms(aten.mul.Tensor, out, self.expand_to(seed, shape, like), time, like)
        else:
            out = self.compute(LINEAR_SCAN, (every(a), every(b), state, time, reverse), like)
        return BatchedValue(out, time)

    def _fold_constants(self, op: str, x: Node, time: int, reverse: bool, like: Node) -> Node:
        if reverse:
            return self.compute(torch.ops.sp.scan.default, (x, None, time, op, False, True), like)
        target = {"sum": aten.cumsum.default, "prod": aten.cumprod.default}[op]
        return self.compute(target, (x, time), like, {"dtype": x.meta["val"].dtype})

    def _with_terms(self, target: Any, out: Node, state: Node, time: int, like: Node) -> Node:
        return self.compute(target, (out, self.unsqueeze(state, time)), like)


Coefficients = tuple[Value, Value]


class _FoldingArithmetic:
    """Arithmetic with constant folding."""

    def __init__(self, scans: ScanBuilder, like: Node) -> None:
        self.scans, self.like = scans, like

    def coefficients(self, x: Value) -> Coefficients:
        """Return (a, b) of any operand."""
        return (x.a, x.b) if isinstance(x, AffineValue) else x if isinstance(x, tuple) else (0, x)

    def multiply(self, x: Value, y: Value) -> Value:
        """Return x * y."""
        if _is_number(x):
            x, y = y, x
        if _is_number(y):
            if y == 0 or _is_number(x):
                return 0 if y == 0 else x * y
            if y == 1:
                return x
        return self.scans.pointwise(aten.mul.Tensor, x, y, like=self.like)

    def add(self, x: Value, y: Value) -> Value:
        """Return x + y."""
        if _is_number(x):
            x, y = y, x
        if _is_number(y) and (y == 0 or _is_number(x)):
            return x + y if _is_number(x) else x
        return self.scans.pointwise(aten.add.Tensor, x, y, like=self.like)

    def divide(self, x: Value, y: Value) -> Value:
        """Return x / y."""
        if _is_constant(x, 0) or (_is_number(x) and _is_number(y)):
            return x / y if _is_number(y) else 0
        if _is_number(x):
            return self.multiply(x, self.scans.pointwise(aten.reciprocal.default, y, like=self.like))
        return self.scans.pointwise(aten.div.Tensor, x, y, like=self.like)

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        """Return x where the condition is true, else y."""
        if _is_number(x) and _is_number(y) and x == y:
            return x
        overload = {(0, 0): "self", (1, 0): "ScalarSelf", (0, 1): "ScalarOther", (1, 1): "Scalar"}
        target = getattr(aten.where, overload[_is_number(x), _is_number(y)])
        return self.scans.pointwise(target, condition, x, y, like=self.like)


AffineRule = Callable[[_FoldingArithmetic, dict[str, Any]], Coefficients | None]


def _affine_sum(p: _FoldingArithmetic, x: Value, y: Value, alpha: Value = 1) -> Coefficients:
    (a, b), (c, d) = p.coefficients(x), p.coefficients(y)
    return p.add(a, p.multiply(c, alpha)), p.add(b, p.multiply(d, alpha))


def _affine_scale(p: _FoldingArithmetic, x: Value, y: Value) -> Coefficients | None:
    if isinstance(x, AffineValue) and isinstance(y, AffineValue):
        return None
    if isinstance(y, AffineValue):
        x, y = y, x
    a, b = p.coefficients(x)
    return p.multiply(a, y), p.multiply(b, y)


def _affine_divide(p: _FoldingArithmetic, x: dict[str, Any]) -> Coefficients | None:
    if isinstance(x["other"], AffineValue) or x.get("rounding_mode") is not None:
        return None
    return p.divide(x["self"].a, x["other"]), p.divide(x["self"].b, x["other"])


def _affine_addcmul(p: _FoldingArithmetic, x: dict[str, Any]) -> Coefficients | None:
    scaled = _affine_scale(p, x["tensor1"], x["tensor2"])
    return _affine_sum(p, x["self"], scaled, x["value"]) if scaled is not None else None


def _affine_lerp(p: _FoldingArithmetic, x: dict[str, Any]) -> Coefficients | None:
    weight = x["weight"]
    if isinstance(weight, AffineValue):
        return None
    rest = p.add(1, p.multiply(weight, -1))
    return _affine_sum(p, _affine_scale(p, x["self"], rest), _affine_scale(p, x["end"], weight))


def _affine_select(p: _FoldingArithmetic, condition: Value, x: Value, y: Value) -> Coefficients | None:
    if isinstance(condition, AffineValue):
        return None
    (a, b), (c, d) = p.coefficients(x), p.coefficients(y)
    return p.select(condition, a, c), p.select(condition, b, d)


_AFFINE_RULES: dict[Any, AffineRule] = {  # for every overload
    aten.add: lambda p, x: _affine_sum(p, x["self"], x["other"], x["alpha"]),
    aten.sub: lambda p, x: _affine_sum(p, x["self"], x["other"], -x["alpha"]),
    aten.rsub: lambda p, x: _affine_sum(p, x["other"], x["self"], -x["alpha"]),
    aten.neg: lambda p, x: _affine_scale(p, x["self"], -1),
    aten.mul: lambda p, x: _affine_scale(p, x["self"], x["other"]),
    aten.div: _affine_divide,
    aten.addcmul: _affine_addcmul,
    aten.lerp: _affine_lerp,
    aten.where: lambda p, x: _affine_select(p, x["condition"], x["self"], x["other"]),
    aten.masked_fill: lambda p, x: _affine_select(p, x["mask"], x["value"], x["self"]),
}


def _matches(node: Node, other: Node) -> bool:
    x, y = node.meta["val"], other.meta["val"]
    return is_tensor(node) and x.dtype == y.dtype and as_sizes(x.shape) == as_sizes(y.shape)


def _is_number(x: Value) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _is_constant(x: Value, number: int) -> bool:
    """Return True for the number, or a tensor filled with it."""
    return x == number if _is_number(x) else is_tensor(x) and constant_value(x) == number
