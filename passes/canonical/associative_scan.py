"""Replace torch.associative_scan by a scan, or by a tree of combinations.

    (l, r) -> l + r                              sp.scan(x, None, 0, "sum"), for each leaf; also *, maximum,
                                                 minimum, logaddexp
    (a, b), (a', b') -> a * a', a' * b + b'      sp.scan(a, None, 0, "prod"), sp.linear_scan(a, b, None, 0)
    anything else                                the tree of `emit_scan/kernels/tree.py` with the function inlined

The combine function is read from its graph as an expression of its arguments, so neither its form nor the order of
leaves matters. torch's own backward takes memory quadratic in the length, and is wrong where leaves mix (torch 2.13);
these scans are linear. `ExpandAssociativeScans` inlines the tree. Bytes moved: none. On shards, unrecognized functions
are gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Interpreter, Node

from sp_compile.lowering.scan.kernels import tree
from sp_compile.lowering.scan.monoids import is_scannable
from sp_compile.lowering.torch_compat import associative_scan_op
from sp_compile.passes.base import CanonicalPass, Pass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.sharding.matchers import permutation_of, skip_widening_cast, value_origin

from .scan_calls import emit_scan, flips_along
from .scan_trees import nodes_before

aten, sp = torch.ops.aten, torch.ops.sp


@dataclass(frozen=True)
class CombineOp:
    """Scan of one leaf of the result."""

    op: str  # operation of sp.scan, or "linear" for a recurrence
    leaves: tuple[int, ...]  # indices of the leaves: one, or the factors and the terms of a recurrence


def recognize_combine(function: GraphModule, leaves: int) -> list[CombineOp] | None:
    """Recognize a combine function.

    Args:
        function: Its graph, a function of the left leaves, the right leaves and captured values.
        leaves: The number of leaves.

    Returns:
        One scan per leaf, or None if a leaf is no known scan.
    """
    inputs = function.graph.find_nodes(op="placeholder")
    symbols = [sympy.Symbol(f"x{i}") for i in range(len(inputs))]
    try:
        results = _evaluate_results(function, dict(zip(inputs, symbols)))
    except _UnknownFunctionError:
        return None
    left, right = symbols[:leaves], symbols[leaves : 2 * leaves]
    found = [
        scan_of_leaf(e, i, left, right) or _match_recurrence(results, i, left, right) for i, e in enumerate(results)
    ]
    return [one for one in found if one is not None] if all(found) else None


class _UnknownFunctionError(Exception):
    """Error for a function that no expression describes."""


def _logaddexp(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    return sympy.Function("logaddexp")(*sorted((a, b), key=str))


_COMBINE_OPS: dict[Any, Callable[..., sympy.Expr]] = {
    aten.add.Tensor: lambda a, b: a + b,
    aten.sub.Tensor: lambda a, b: a - b,
    aten.mul.Tensor: lambda a, b: a * b,
    aten.neg.default: lambda a: -a,
    aten.addcmul.default: lambda a, b, c: a + b * c,
    aten.maximum.default: sympy.Max,
    aten.max.other: sympy.Max,
    aten.minimum.default: sympy.Min,
    aten.min.other: sympy.Min,
    aten.logaddexp.default: _logaddexp,
    aten.detach.default: lambda a: a,
}


def _evaluate_results(function: GraphModule, env: dict[Node, sympy.Expr]) -> list[sympy.Expr]:
    for node in function.graph.nodes:
        if node.op == "call_function":
            found = env.get(value_origin(skip_widening_cast(node) or node)) or _evaluate_node(node, env)
            env.update({node: found} if found is not None else {})
        elif node.op not in ("placeholder", "output"):
            raise _UnknownFunctionError
    results = function.graph.output_node().args[0]
    results = results if isinstance(results, (list, tuple)) else [results]
    return [sympy.expand(_read_argument(r, env)) for r in results]


def expression_of(value: Node, symbol: Callable[[Node], sympy.Symbol | None]) -> sympy.Expr | None:
    """Return a value as an expression of the nodes with a symbol, or None if an operation is unknown."""
    env: dict[Node, sympy.Expr] = {}
    for node in sorted(nodes_before(value, lambda n: symbol(n) is not None)):
        try:
            found = symbol(node) or env.get(value_origin(node)) or _evaluate_node(node, env)
        except _UnknownFunctionError:
            found = None
        if found is None:
            return None
        env[node] = found
    return sympy.expand(env[value])


def _evaluate_node(node: Node, env: dict[Node, sympy.Expr]) -> sympy.Expr | None:
    """Return the value of an op. Raises for scaled sums, casts and ops that are not in the table."""
    if node.target not in _COMBINE_OPS or any(v not in (1, None) for v in node.kwargs.values()):
        return None
    dtypes = {o.meta["val"].dtype for o in (node, *OpCall(node).operands)}
    if len(dtypes) != 1:
        return None
    return _COMBINE_OPS[node.target](*(_read_argument(a, env) for a in node.args))


def _read_argument(value: Any, env: dict[Node, sympy.Expr]) -> sympy.Expr:
    if value in env:
        return env[value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return sympy.sympify(value)
    raise _UnknownFunctionError


def scan_of_leaf(e: sympy.Expr, i: int, left: list[Any], right: list[Any]) -> CombineOp | None:
    """Return the scan of leaf `i` whose combine function the expression is, or None."""
    a, b = left[i], right[i]
    known = {a + b: "sum", a * b: "prod", sympy.Max(a, b): "max", sympy.Min(a, b): "min", _logaddexp(a, b): "logsumexp"}
    return CombineOp(known[e], (i,)) if e in known else None


def _match_recurrence(results: list[Any], i: int, left: list[Any], right: list[Any]) -> CombineOp | None:
    """Match b' + a' * b with a leaf a * a'."""
    for j, e in enumerate(results):
        if e == left[j] * right[j] and results[i] == sympy.expand(right[j] * left[i] + right[i]):
            return CombineOp("linear", (j, i))
    return None


UNKNOWN_FUNCTION = "its combine function is not a sum, product, maximum, minimum, log-sum-exp or linear recurrence"

OTHER_DTYPE = "its combine function is not supported for these dtypes: a sum of bools, or a recurrence of two dtypes"


@dataclass
class _ScanOperands:
    """Operands of a scan before torch's permutation and flip."""

    leaves: list[Node]  # values to scan
    dim: int = 0  # dim of the scan
    reverse: bool = False  # True for a scan from the last row to the first
    # ops from the values to the operands of the call
    moved_ops: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)


@register_pass
class RewriteAssociativeScans(CanonicalPass):
    """Replacement of the calls with a recognized combine function."""

    requires = frozenset({"normalized"})
    provides = frozenset({"canonical", "scans"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        changes, calls = 0, _associative_scan_calls(self.gm)
        if calls:
            erase_dead(self.graph)
        for node in calls:
            found = recognize_combine(self.gm.get_submodule(node.args[0].target), len(node.args[1]))
            if found is not None and all(self.fits(node.args[1], one) for one in found):
                self._rewrite(node, found)
                changes += 1
            else:
                set_node_info(node, no_rule=UNKNOWN_FUNCTION if found is None else OTHER_DTYPE)
        return changes

    def fits(self, leaves: Sequence[Node], one: CombineOp) -> bool:
        """Return False for a sum of bools, counted by sp.scan, and for unsupported dtypes of a recurrence."""
        dtypes = [leaves[i].meta["val"].dtype for i in one.leaves]
        if one.op == "linear":
            return dtypes[0] == dtypes[1] and dtypes[0].is_floating_point
        return dtypes[0] != torch.bool and is_scannable(dtypes[0])

    def _rewrite(self, node: Node, found: list[CombineOp]) -> None:
        x = operands_of(list(node.args[1]))
        read = {user.args[1] for user in node.users}
        with self.graph.inserting_before(node):
            fresh = {i: self.restore_dims(self.scan_field(found[i], x, node), x, node) for i in read}
        self.replace(node, fresh)

    def scan_field(self, one: CombineOp, x: _ScanOperands, node: Node) -> Node:
        """Emit the scan of one field of the state before a node, and return its node."""
        rows = [x.leaves[i] for i in one.leaves]
        value = rows[-1].meta["val"]
        if one.op == "linear":
            args = (*rows, None, x.dim, *([True] if x.reverse else []))
            return self.emit(sp.linear_scan.default, args, value, node)
        return emit_scan(self, rows[0], x.dim, one.op, value, node, reverse=x.reverse)

    def restore_dims(self, x: Node, given: _ScanOperands, node: Node) -> Node:
        """Emit the inverse of the dim moves that were removed from the operands, and return its node."""
        for target, args in reversed(given.moved_ops):
            x = self.compute(target, (x, *args), node)
        return x


def _associative_scan_calls(gm: GraphModule) -> list[Node]:
    """Return every associative_scan whose results are read by index only."""
    found = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is associative_scan_op]
    return [n for n in found if all(u.target is operator.getitem for u in n.users)]


def operands_of(leaves: list[Node], dim: int = 0) -> _ScanOperands:
    """Return the operands before torch moved the dim to the front and flipped it for a reverse scan."""
    out = _ScanOperands([value_origin(x) for x in leaves], dim)
    while len({(x.target, str(x.args[1:]), str(x.kwargs)) for x in out.leaves}) == 1:
        first = out.leaves[0]
        source_dim = _source_dim(first, out.dim)
        if source_dim is None:
            break
        out.moved_ops.append((first.target, tuple(first.args[1:])))
        out.reverse ^= first.target is aten.flip.default
        out.leaves, out.dim = [value_origin(x.args[0]) for x in out.leaves], source_dim
    return out


def _source_dim(node: Node, dim: int) -> int | None:
    """Return the dim of the operand if the op permutes dims or flips only this dim, else None."""
    order = permutation_of(node) if not node.kwargs else None
    return dim if flips_along(node, dim) else None if order is None else order[dim]


class ExpandAssociativeScans(Pass):
    """Expansion of the remaining calls, level by level, into functional torch ops.

    Memory is linear in the length. Lengths become constants.
    """

    requires = frozenset({"local"})
    provides = frozenset({"local ops"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        found = _associative_scan_calls(self.gm)
        for node in found:
            run = _build_tree(self.gm.get_submodule(node.args[0].target), len(node.args[1]))
            given = [*node.args[1], *node.args[2]]
            with self.graph.inserting_before(node):
                self.replace(node, self.inline_function(run, given, node, pre_dispatch=True, gradients=True))
        return len(found)


def _build_tree(combine: GraphModule, leaves: int) -> Callable[..., Any]:
    """Return a function that computes the tree over the leaves, followed by captured values."""

    def run(*xs: Any) -> Any:
        """Scan the leaves with the combine function; the other inputs are its constants."""

        def both(left: Any, right: Any) -> Any:
            """Combine two states."""
            return list(Interpreter(combine).run(*left, *right, *xs[leaves:]))

        return tree.tree_inclusive(both, list(xs[:leaves]), 0)

    return run
