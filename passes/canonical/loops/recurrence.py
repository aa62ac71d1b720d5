"""A step's value as a * state + b, where the state is that of the step before; then all steps are one scan.

    h = a * h + b     addcmul(b, a, h)     lerp(h, x, w)     h + w * (x - h)     where(reset, b, a * h + b)
                  ->  sp.linear_scan(a, b, initial, time)
    h = h + b     ->  cumsum(b, time) + initial
    h = h * a     ->  cumprod(a, time) * initial

Bytes moved: none. Leaves alone: states that are not affine in the one before, element by element (tanh, matmul), and
casts of the state, which round it at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import pytree, schema_of
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.sizes import sizes
from sp_compile.passes.sharding.matchers import constant_of, is_copy

from .steps import Column, NotALoop
from .vectorize import BatchedOps, Steps, Value

aten = torch.ops.aten
LINEAR_SCAN = torch.ops.sp.linear_scan.default


@dataclass(frozen=True)
class Affine:
    """a * state + b, element by element; a coefficient may be a number."""

    state: Column
    a: Value
    b: Value


class Scans(BatchedOps):
    """Affine arithmetic on the values of steps, and the scans of states."""

    def affine(self, node: Node, leaves: list[Value]) -> Affine | None:
        """`node` at every step, where some leaves of its arguments are Affine; None if it is not affine in a state."""
        states = list({id(x.state): x.state for x in leaves if isinstance(x, Affine)}.values())
        if len(states) != 1 or not _like(node, states[0].node):
            return None
        if is_copy(node):
            return next(x for x in leaves if isinstance(x, Affine))
        rule = _RULES.get(getattr(node.target, "overloadpacket", None))
        if rule is None or any(isinstance(x, Node) and not is_tensor(x) for x in leaves):
            return None
        args, kwargs = pytree.tree_unflatten(leaves, pytree.tree_flatten((node.args, node.kwargs))[1])
        schema = schema_of(node.target).arguments
        named = {a.name: a.default_value for a in schema if a.has_default_value()}
        named.update(zip((a.name for a in schema), args), **kwargs)
        pair = rule(_Arithmetic(self, node), named)
        return None if pair is None else Affine(states[0], *pair)

    def scanned(self, affine: Affine, seed: Value, reverse: bool) -> Steps:
        """The state of every step, which is `affine` in the one before; `seed`: the one before the first."""
        like, a, b = affine.state.node, affine.a, affine.b
        value = like.meta["val"]
        guides = [x for x in (b, a) if isinstance(x, Steps) and x.ndim == value.ndim]
        time = guides[0].time if guides else 0
        shape = sizes(value.shape)
        whole = (*shape[:time], len(affine.state.nodes), *shape[time:])
        state = None if _is(seed, 0) else self.shaped(seed, shape, like)

        def every(x: Value) -> Node:
            return self.shaped(self.aligned(x, value.ndim - time), whole, like)

        if _is(a, 1) and not _is(b, 0):
            out = self._folded("sum", every(b), time, reverse, like)
            out = self._with(aten.add.Tensor, out, state, time, like) if state else out
        elif not value.is_floating_point():
            raise NotALoop("a recurrence of integers")
        elif _is(b, 0):
            out = self._folded("prod", every(a), time, reverse, like)
            if not _is(seed, 1):
                out = self._with(aten.mul.Tensor, out, self.shaped(seed, shape, like), time, like)
        else:
            out = self.compute(LINEAR_SCAN, (every(a), every(b), state, time, reverse), like)
        return Steps(out, time)

    def _folded(self, op: str, x: Node, time: int, reverse: bool, like: Node) -> Node:
        if reverse:
            return self.compute(torch.ops.sp.scan.default, (x, None, time, op, False, True), like)
        target = {"sum": aten.cumsum.default, "prod": aten.cumprod.default}[op]
        return self.compute(target, (x, time), like, {"dtype": x.meta["val"].dtype})

    def _with(self, target: Any, out: Node, state: Node, time: int, like: Node) -> Node:
        return self.compute(target, (out, self.unsqueezed(state, time)), like)


Coefficients = tuple[Value, Value]


class _Arithmetic:
    """Arithmetic that folds numbers."""

    def __init__(self, scans: Scans, like: Node) -> None:
        self.scans, self.like = scans, like

    def of(self, x: Value) -> Coefficients:
        """a and b of any operand."""
        return (x.a, x.b) if isinstance(x, Affine) else x if isinstance(x, tuple) else (0, x)

    def times(self, x: Value, y: Value) -> Value:
        if _is_number(x):
            x, y = y, x
        if _is_number(y):
            if y == 0 or _is_number(x):
                return 0 if y == 0 else x * y
            if y == 1:
                return x
        return self.scans.pointwise(aten.mul.Tensor, x, y, like=self.like)

    def plus(self, x: Value, y: Value) -> Value:
        if _is_number(x):
            x, y = y, x
        if _is_number(y) and (y == 0 or _is_number(x)):
            return x + y if _is_number(x) else x
        return self.scans.pointwise(aten.add.Tensor, x, y, like=self.like)

    def over(self, x: Value, y: Value) -> Value:
        if _is(x, 0) or (_is_number(x) and _is_number(y)):
            return x / y if _is_number(y) else 0
        if _is_number(x):
            return self.times(x, self.scans.pointwise(aten.reciprocal.default, y, like=self.like))
        return self.scans.pointwise(aten.div.Tensor, x, y, like=self.like)

    def pick(self, condition: Value, x: Value, y: Value) -> Value:
        if _is_number(x) and _is_number(y) and x == y:
            return x
        overload = {(0, 0): "self", (1, 0): "ScalarSelf", (0, 1): "ScalarOther", (1, 1): "Scalar"}
        target = getattr(aten.where, overload[_is_number(x), _is_number(y)])
        return self.scans.pointwise(target, condition, x, y, like=self.like)


Rule = Callable[[_Arithmetic, dict[str, Any]], Coefficients | None]


def _sum(p: _Arithmetic, x: Value, y: Value, alpha: Value = 1) -> Coefficients:
    (a, b), (c, d) = p.of(x), p.of(y)
    return p.plus(a, p.times(c, alpha)), p.plus(b, p.times(d, alpha))


def _scaled(p: _Arithmetic, x: Value, y: Value) -> Coefficients | None:
    if isinstance(x, Affine) and isinstance(y, Affine):
        return None
    if isinstance(y, Affine):
        x, y = y, x
    a, b = p.of(x)
    return p.times(a, y), p.times(b, y)


def _divided(p: _Arithmetic, x: dict[str, Any]) -> Coefficients | None:
    if isinstance(x["other"], Affine) or x.get("rounding_mode") is not None:
        return None
    return p.over(x["self"].a, x["other"]), p.over(x["self"].b, x["other"])


def _addcmul(p: _Arithmetic, x: dict[str, Any]) -> Coefficients | None:
    scaled = _scaled(p, x["tensor1"], x["tensor2"])
    return _sum(p, x["self"], scaled, x["value"]) if scaled is not None else None


def _lerp(p: _Arithmetic, x: dict[str, Any]) -> Coefficients | None:
    weight = x["weight"]
    if isinstance(weight, Affine):
        return None
    rest = p.plus(1, p.times(weight, -1))
    return _sum(p, _scaled(p, x["self"], rest), _scaled(p, x["end"], weight))


def _picked(p: _Arithmetic, condition: Value, x: Value, y: Value) -> Coefficients | None:
    if isinstance(condition, Affine):
        return None
    (a, b), (c, d) = p.of(x), p.of(y)
    return p.pick(condition, a, c), p.pick(condition, b, d)


_RULES: dict[Any, Rule] = {  # for every overload
    aten.add: lambda p, x: _sum(p, x["self"], x["other"], x["alpha"]),
    aten.sub: lambda p, x: _sum(p, x["self"], x["other"], -x["alpha"]),
    aten.rsub: lambda p, x: _sum(p, x["other"], x["self"], -x["alpha"]),
    aten.neg: lambda p, x: _scaled(p, x["self"], -1),
    aten.mul: lambda p, x: _scaled(p, x["self"], x["other"]),
    aten.div: _divided,
    aten.addcmul: _addcmul,
    aten.lerp: _lerp,
    aten.where: lambda p, x: _picked(p, x["condition"], x["self"], x["other"]),
    aten.masked_fill: lambda p, x: _picked(p, x["mask"], x["value"], x["self"]),
}


def _like(node: Node, other: Node) -> bool:
    x, y = node.meta["val"], other.meta["val"]
    return is_tensor(node) and x.dtype == y.dtype and sizes(x.shape) == sizes(y.shape)


def _is_number(x: Value) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _is(x: Value, number: int) -> bool:
    """Is it the number, or a tensor full of it?"""
    return x == number if _is_number(x) else is_tensor(x) and constant_of(x) == number
