"""Replace torch.associative_scan by a scan, or by a tree of combinations.

A call `associative_scan(f, leaves, dim)` folds the rows of a tuple of tensors, its *leaves*. The *combine function*
f(left leaves, right leaves) returns the leaves of the combined rows, and may read other, *captured* values:

    (l, r) -> l + r                              sp.scan(x, None, 0, "sum"), for each leaf; also *, maximum,
                                                 minimum, logaddexp
    (a, b), (a', b') -> a * a', a' * b + b'      sp.scan(a, None, 0, "prod"), sp.linear_scan(a, b, None, 0)
    anything else                                the tree of `lowering/scan/kernels/tree.py` with the function inlined

The combine function is read from its graph as an expression of its arguments, so neither its form nor the order of
leaves matters. torch's own backward takes memory quadratic in the length, and is wrong where leaves mix (torch 2.13);
these scans are linear. `ExpandAssociativeScans` inlines the tree. Bytes moved: none. On shards, unrecognized functions
are gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
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
    """Scan that computes one leaf of the result."""

    op: str  # operation of sp.scan, or "linear" for a recurrence
    leaves: tuple[int, ...]  # indices of the leaves: one, or the factors and the terms of a recurrence


def recognize_combine(function: GraphModule, num_leaves: int) -> list[CombineOp] | None:
    """Recognize a combine function, and return the scans that compute the same leaves.

    Args:
        function: Its graph, a function of the left leaves, the right leaves and captured values.
        num_leaves: The number of leaves.

    Returns:
        One scan per leaf, or None if a leaf is no known scan.
    """
    symbols = {node: sympy.Symbol(f"x{i}") for i, node in enumerate(function.graph.find_nodes(op="placeholder"))}
    output = function.graph.output_node().args[0]
    results = [expression_of(x, symbols.get) for x in (output if isinstance(output, (list, tuple)) else [output])]
    inputs = list(symbols.values())
    left, right = inputs[:num_leaves], inputs[num_leaves : 2 * num_leaves]
    scans = [
        scan_of_leaf(e, i, left, right) or _match_recurrence(results, i, left, right) for i, e in enumerate(results)
    ]
    return [scan for scan in scans if scan is not None] if all(scans) else None


def _logaddexp(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Return logaddexp(a, b) as a term that is equal for both orders, so that expressions can be compared."""
    return sympy.Function("logaddexp")(*sorted((a, b), key=str))


# ops that a recognized combine function may contain, as functions of expressions
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


def expression_of(value: Node, symbol: Callable[[Node], sympy.Symbol | None]) -> sympy.Expr | None:
    """Return a value as an expanded expression of symbols, to compare functions; None if an op is unknown.

    Args:
        value: The tensor.
        symbol: Returns the symbol of a node, or None for a node that is computed from others.
    """
    expressions: dict[Node, sympy.Expr] = {}
    for node in sorted(nodes_before(value, lambda n: symbol(n) is not None)):
        copied = value_origin(skip_widening_cast(node) or node)
        expression = symbol(node) or expressions.get(copied) or _evaluate_node(node, expressions)
        if expression is not None:
            expressions[node] = expression
    return sympy.expand(expressions[value]) if value in expressions else None


def _evaluate_node(node: Node, expressions: Mapping[Node, sympy.Expr]) -> sympy.Expr | None:
    """Return the expression of a call; None for ops without an entry, scaled sums and mixed dtypes."""
    combine = _COMBINE_OPS.get(node.target)
    if combine is None or any(option not in (1, None) for option in node.kwargs.values()):
        return None
    operands = [expressions.get(a) if isinstance(a, Node) else sympy.sympify(a) for a in node.args]
    dtypes = {x.meta["val"].dtype for x in (node, *OpCall(node).operands)}
    return combine(*operands) if len(dtypes) == 1 and all(isinstance(x, sympy.Expr) for x in operands) else None


def scan_of_leaf(e: sympy.Expr | None, i: int, left: list[Any], right: list[Any]) -> CombineOp | None:
    """Return the scan of leaf `i` whose combine function is the expression `e`, or None.

    Args:
        e: The result of the combine function for the leaf; None if it is unknown.
        i: The index of the leaf.
        left: The symbols of the left leaves.
        right: The symbols of the right leaves.
    """
    a, b = left[i], right[i]
    ops = {a + b: "sum", a * b: "prod", sympy.Max(a, b): "max", sympy.Min(a, b): "min", _logaddexp(a, b): "logsumexp"}
    return CombineOp(ops[e], (i,)) if e in ops else None


def _match_recurrence(results: list[Any], i: int, left: list[Any], right: list[Any]) -> CombineOp | None:
    """Return the recurrence that computes leaf i, right[i] + right[j] * left[i], or None.

    Leaf j contains the factors: it must be computed as their product, left[j] * right[j].
    """
    for j, factors in enumerate(results):
        if factors == left[j] * right[j] and results[i] == sympy.expand(right[j] * left[i] + right[i]):
            return CombineOp("linear", (j, i))
    return None


# Reasons in the report why a call is gathered.
UNKNOWN_FUNCTION = "its combine function is not a sum, product, maximum, minimum, log-sum-exp or linear recurrence"

OTHER_DTYPE = "its combine function is not supported for these dtypes: a sum of bools, or a recurrence of two dtypes"


@dataclass
class _ScanOperands:
    """Leaves of a scan without the dim moves and flips that torch applied to all of them."""

    leaves: list[Node]  # values to scan
    dim: int = 0  # dim of the scan
    reverse: bool = False  # True for a scan from the last row to the first
    # (op, arguments after the first) of the removed moves, from the operands of the call back to `leaves`
    moved_ops: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)


@register_pass
class RewriteAssociativeScans(CanonicalPass):
    """Replacement of the associative_scan calls with a recognized combine function."""

    requires = frozenset({"normalized"})
    provides = frozenset({"canonical", "scans"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Replace each recognized associative_scan by one sp scan per leaf; record why others are gathered."""
        changes, calls = 0, _associative_scan_calls(self.gm)
        if calls:
            erase_dead(self.graph)
        for node in calls:
            scans = recognize_combine(self.gm.get_submodule(node.args[0].target), len(node.args[1]))
            if scans is not None and all(self.supports_dtypes(node.args[1], scan) for scan in scans):
                self._rewrite(node, scans)
                changes += 1
            else:
                set_node_info(node, no_rule=UNKNOWN_FUNCTION if scans is None else OTHER_DTYPE)
        return changes

    def supports_dtypes(self, leaves: Sequence[Node], scan: CombineOp) -> bool:
        """Return True if sp ops scan these leaves; not sums of bools, which sp.scan counts.

        Args:
            leaves: All leaves.
            scan: The scan and the indices of its leaves; a recurrence needs two leaves of one floating dtype.
        """
        dtypes = [leaves[i].meta["val"].dtype for i in scan.leaves]
        if scan.op == "linear":
            return dtypes[0] == dtypes[1] and dtypes[0].is_floating_point
        return dtypes[0] != torch.bool and is_scannable(dtypes[0])

    def _rewrite(self, node: Node, scans: list[CombineOp]) -> None:
        """Replace the results of an associative_scan that are read by scans; `scans` has one entry per leaf."""
        operands = unmoved_operands(list(node.args[1]))
        read_indices = {user.args[1] for user in node.users}
        with self.graph.inserting_before(node):
            self.replace(node, {i: self.emit_leaf_scan(scans[i], operands, node) for i in read_indices})

    def emit_leaf_scan(self, scan: CombineOp, operands: _ScanOperands, like: Node) -> Node:
        """Emit the scan of one leaf, and move and flip its result as torch moved the operands of the call.

        Args:
            scan: The scan and the indices of its leaves.
            operands: The leaves before torch's moves.
            like: The replaced node.

        Returns:
            The result in the layout of the replaced call.
        """
        leaves = [operands.leaves[i] for i in scan.leaves]
        value, dim = leaves[-1].meta["val"], operands.dim
        if scan.op == "linear":
            args = (*leaves, None, dim, *([True] if operands.reverse else []))
            out = self.emit(sp.linear_scan.default, args, value, like)
        else:
            out = emit_scan(self, leaves[0], dim, scan.op, value, like, reverse=operands.reverse)
        for target, args in reversed(operands.moved_ops):
            out = self.compute(target, (out, *args), like)
        return out


def _associative_scan_calls(gm: GraphModule) -> list[Node]:
    """Return every associative_scan whose results are read by index only, so that each can be replaced."""
    calls = gm.graph.find_nodes(op="call_function", target=associative_scan_op)
    return [n for n in calls if all(user.target is operator.getitem for user in n.users)]


def unmoved_operands(leaves: list[Node], dim: int = 0) -> _ScanOperands:
    """Return the leaves before torch moved the dim to the front and flipped it for a reverse scan.

    Args:
        leaves: The leaves as torch scans them.
        dim: The dim along which it does.
    """
    operands = _ScanOperands([value_origin(x) for x in leaves], dim)
    while len({(x.target, str(x.args[1:]), str(x.kwargs)) for x in operands.leaves}) == 1:  # one op on all leaves
        moved = operands.leaves[0]
        source_dim = _source_dim(moved, operands.dim)
        if source_dim is None:
            break
        operands.moved_ops.append((moved.target, tuple(moved.args[1:])))
        operands.reverse ^= moved.target is aten.flip.default
        operands.leaves, operands.dim = [value_origin(x.args[0]) for x in operands.leaves], source_dim
    return operands


def _source_dim(node: Node, dim: int) -> int | None:
    """Return the dim of the operand of a permutation or flip that is dim `dim` of its result; else None."""
    if flips_along(node, dim):
        return dim
    order = permutation_of(node) if not node.kwargs else None
    return None if order is None else order[dim]


class ExpandAssociativeScans(Pass):
    """Expansion of the remaining associative_scan calls, on gathered leaves, into functional torch ops.

    Memory is linear in the length. Lengths become constants.
    """

    requires = frozenset({"local"})
    provides = frozenset({"local ops"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Replace every remaining associative_scan by the ops of a tree of combinations."""
        calls = _associative_scan_calls(self.gm)
        for node in calls:
            run = _build_tree(self.gm.get_submodule(node.args[0].target), len(node.args[1]))
            operands = [*node.args[1], *node.args[2]]
            with self.graph.inserting_before(node):
                self.replace(node, self.inline_function(run, operands, node, pre_dispatch=True, gradients=True))
        return len(calls)


def _build_tree(combine: GraphModule, num_leaves: int) -> Callable[..., Any]:
    """Return a function that scans the leaves along dim 0, for a trace.

    Its arguments are the leaves and the captured values.
    """

    def run(*inputs: Any) -> Any:
        """Scan the first `num_leaves` inputs; the others are the captured values."""

        def combine_states(left: Any, right: Any) -> Any:
            """Return the leaves of the rows combined from left and right ones, by the graph of the function."""
            return list(Interpreter(combine).run(*left, *right, *inputs[num_leaves:]))

        return tree.tree_inclusive(combine_states, list(inputs[:num_leaves]), 0)

    return run
