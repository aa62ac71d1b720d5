"""What a combine function does, as expressions of its arguments: which scans it makes of which leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..call import Call

aten = torch.ops.aten


@dataclass(frozen=True)
class Combining:
    """A leaf of the result: scan `op` of a leaf, or the "linear" recurrence of two, the factors first."""

    op: str
    leaves: tuple[int, ...]


def combining(function: GraphModule, leaves: int) -> list[Combining] | None:
    """One entry a leaf; None if some leaf is no known scan.

    function: of the leaves on the left, those on the right, and what else it reads.
    """
    inputs = function.graph.find_nodes(op="placeholder")
    symbols = [sympy.Symbol(f"x{i}") for i in range(len(inputs))]
    try:
        results = _results(function, dict(zip(inputs, symbols)))
    except _Unknown:
        return None
    left, right = symbols[:leaves], symbols[leaves : 2 * leaves]
    found = [_scan(e, i, left, right) or _recurrence(results, i, left, right) for i, e in enumerate(results)]
    return [one for one in found if one is not None] if all(found) else None


class _Unknown(Exception):
    """No expression describes the function."""


def _function(name: str) -> Callable[..., sympy.Expr]:
    """One that commutes."""
    return lambda a, b: sympy.Function(name)(*sorted((a, b), key=str))


_MAXIMUM, _MINIMUM, _LOGADDEXP = (_function(name) for name in ("maximum", "minimum", "logaddexp"))
_OPS: dict[Any, Callable[..., sympy.Expr]] = {
    aten.add.Tensor: lambda a, b: a + b,
    aten.sub.Tensor: lambda a, b: a - b,
    aten.mul.Tensor: lambda a, b: a * b,
    aten.neg.default: lambda a: -a,
    aten.addcmul.default: lambda a, b, c: a + b * c,
    aten.maximum.default: _MAXIMUM,
    aten.max.other: _MAXIMUM,
    aten.minimum.default: _MINIMUM,
    aten.min.other: _MINIMUM,
    aten.logaddexp.default: _LOGADDEXP,
    aten.alias.default: lambda a: a,
    aten.clone.default: lambda a: a,
    aten.detach.default: lambda a: a,
}


def _results(function: GraphModule, env: dict[Node, sympy.Expr]) -> list[sympy.Expr]:
    for node in function.graph.nodes:
        if node.op == "call_function":
            env[node] = _value(node, env)
        elif node.op not in ("placeholder", "output"):
            raise _Unknown
    results = function.graph.output_node().args[0]
    results = results if isinstance(results, (list, tuple)) else [results]
    return [sympy.expand(_read(r, env)) for r in results]


def _value(node: Node, env: dict[Node, sympy.Expr]) -> sympy.Expr:
    """The op's value; scaled sums, casts and whatever is not in the table are unknown."""
    if node.target not in _OPS or any(v not in (1, None) for v in node.kwargs.values()):
        raise _Unknown
    dtypes = {o.meta["val"].dtype for o in (node, *Call(node).operands)}
    if len(dtypes) != 1:
        raise _Unknown
    return _OPS[node.target](*(_read(a, env) for a in node.args))


def _read(value: Any, env: dict[Node, sympy.Expr]) -> sympy.Expr:
    if isinstance(value, Node):
        return env[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return sympy.sympify(value)
    raise _Unknown


def _scan(e: sympy.Expr, i: int, left: list[Any], right: list[Any]) -> Combining | None:
    a, b = left[i], right[i]
    known = {
        a + b: "sum",
        a * b: "prod",
        _MAXIMUM(a, b): "max",
        _MINIMUM(a, b): "min",
        _LOGADDEXP(a, b): "logsumexp",
    }
    return Combining(known[e], (i,)) if e in known else None


def _recurrence(results: list[Any], i: int, left: list[Any], right: list[Any]) -> Combining | None:
    """b' + a' * b, beside a leaf a * a'."""
    for j, e in enumerate(results):
        if e == left[j] * right[j] and results[i] == sympy.expand(right[j] * left[i] + right[i]):
            return Combining("linear", (j, i))
    return None
