"""Turns symbolic sizes into graph nodes: `S*B` becomes sym_size and mul nodes over the graph's inputs."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from ._compat import FloorDiv
from .errors import SpError
from .shapes import Size, size

_BINARY = {sympy.Add: operator.add, sympy.Mul: operator.mul}


class Sizes:
    """Sizes as arguments of a graph's nodes. Every expression is computed once, right after the inputs."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[Size, Node] = {}
        self.sources: dict[sympy.Symbol, tuple[Node, int | None]] = {}
        self.last: Node | None = None
        for node in graph.find_nodes(op="placeholder"):
            self.last = node
            self._learn(node)

    def _learn(self, node: Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            expr = size(value)
            if isinstance(expr, sympy.Expr):
                self.known.setdefault(expr, node)
        elif isinstance(value, torch.Tensor):
            for d, extent in enumerate(value.shape):
                expr = size(extent)
                if isinstance(expr, sympy.Symbol):
                    self.sources.setdefault(expr, (node, d))

    def __call__(self, value: Size) -> int | Node:
        """The int, or the node that computes the expression at run time."""
        if isinstance(value, int):
            return value
        if value not in self.known:
            self.known[value] = self._build(value)
        return self.known[value]

    def list(self, values: Any) -> list[int | Node]:
        """Each of the values as in a call."""
        return [self(v) for v in values]

    def _build(self, expr: sympy.Expr) -> Node:
        if isinstance(expr, sympy.Symbol):
            if expr not in self.sources:
                raise SpError(
                    f"the size {expr} is not the size of any input, so a rank cannot compute its share of it"
                )
            node, dim = self.sources[expr]
            return self._emit(torch.ops.aten.sym_size.int, (node, dim), expr)
        if isinstance(expr, FloorDiv):
            return self._emit(operator.floordiv, tuple(self(size(a)) for a in expr.args), expr)
        if isinstance(expr, sympy.Mod) or type(expr).__name__ in ("Mod", "PythonMod"):
            return self._emit(operator.mod, tuple(self(size(a)) for a in expr.args), expr)
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return self._fold(operator.mul, [expr.base] * int(expr.exp), expr)
        for kind, op in _BINARY.items():
            if isinstance(expr, kind):
                return self._fold(op, expr.args, expr)
        raise SpError(f"the size {expr} is of a form that cannot be computed in the graph")

    def _fold(self, op: Any, terms: Any, expr: sympy.Expr) -> Node:
        total, so_far = self(size(terms[0])), terms[0]
        for term in terms[1:]:
            so_far = so_far + term if op is operator.add else so_far * term
            total = self._emit(op, (total, self(size(term))), so_far)
        assert isinstance(total, Node), expr
        return total

    def _emit(self, target: Any, args: tuple[Any, ...], expr: sympy.Expr) -> Node:
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        where = (
            self.graph.inserting_after(self.last)
            if self.last is not None
            else self.graph.inserting_before(None)
        )
        with where:
            node = self.graph.call_function(target, args)
        node.meta["val"] = target(*values)
        self.last = node
        return node
