"""Replace torch.associative_scan by a scan, or by a tree of combinations.

A call `associative_scan(f, leaves, dim)` folds the rows of a tuple of tensors, its *leaves*. The *combine function*
f(left leaves, right leaves) returns the leaves of the combined rows, and may read other, *captured* values:

    (l, r) -> l + r                              sp.scan(x, None, 0, "sum"), for each leaf; also *, maximum,
                                                 minimum, logaddexp
    (a, b), (a', b') -> a * a', a' * b + b'      sp.scan(a, None, 0, "prod"), sp.linear_scan(a, b, None, 0)
    anything else                                torch's tree of combinations, with the function inlined

The combine function is read from its graph as an expression of its arguments, so neither its form nor the order of
leaves matters. torch's own backward takes memory quadratic in the length, and is wrong where leaves mix (torch 2.13);
these scans are linear. `ExpandAssociativeScans` inlines the tree. Bytes moved: none. On shards, unrecognized functions
are gathered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Interpreter, Node

from sp_compile.lowering.scan.monoids import is_scannable
from sp_compile.lowering.torch_compat import associative_scan_op, generic_associative_scan
from sp_compile.passes.base import CanonicalPass, Pass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.graph.node_info import set_node_info
from sp_compile.passes.sharding.matchers import is_gradient_stop, permutation_of, skip_widening_cast, value_origin

from .scan_calls import emit_scan, is_flip_along
from .scan_trees import nodes_before

aten, sp = torch.ops.aten, torch.ops.sp


@dataclass(frozen=True)
class CombineOp:
    """Scan that computes one leaf of the result."""

    op: str  # operation of sp.scan, or "linear" for a recurrence
    leaves: tuple[int, ...]  # indices of the leaves: one, or the factors and the terms of a recurrence


def recognize_combine(function: GraphModule, num_leaves: int) -> list[CombineOp] | None:
    """Recognize the combine function of an associative_scan, and return the scans that compute the same results.

    The graph of (l, r) -> l + r, for example, gives [CombineOp("sum", (0,))]: a cumulative sum of leaf 0.

    Args:
        function: The graph of the function, of which the inputs are the left leaves, the right leaves and captured
            values.
        num_leaves: The number of leaves, the tensors that the call scans together.

    Returns:
        One scan for each leaf, or None if a leaf is computed otherwise, or without the gradients of a scan.
    """
    if any(map(is_gradient_stop, function.graph.nodes)):
        return None
    symbols = {node: sympy.Symbol(f"x{i}") for i, node in enumerate(function.graph.find_nodes(op="placeholder"))}
    output = function.graph.output_node().args[0]
    outputs = output if isinstance(output, (list, tuple)) else [output]
    expressions = [expression_of(x, symbols.get) for x in outputs]  # None for a leaf with other ops
    inputs = list(symbols.values())
    left, right = inputs[:num_leaves], inputs[num_leaves : 2 * num_leaves]
    scans: list[CombineOp] = []
    for i, expression in enumerate(expressions):
        scan = scan_of_leaf(expression, i, left, right) or _match_recurrence(expressions, i, left, right)
        if scan is None:
            return None
        scans.append(scan)
    return scans


def _logaddexp(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Return the symbolic term logaddexp(a, b), with sorted arguments, so that logaddexp(b, a) is the same term."""
    return sympy.Function("logaddexp")(*sorted((a, b), key=str))


# ops that a recognized combine function may contain, as functions of expressions
_OP_EXPRESSIONS: dict[Any, Callable[..., sympy.Expr]] = {
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
    """Return a value as an expanded expression of a function's arguments, such as x0*x3 + x2, to compare functions.

    Args:
        value: The node whose value is the result of the function.
        symbol: Returns the symbol of a node that is an argument of the function, or None for other nodes.

    Returns:
        The expression of the symbols, or None if it contains an op that is not in _OP_EXPRESSIONS.
    """
    expressions: dict[Node, sympy.Expr] = {}
    for node in sorted(nodes_before(value, lambda n: symbol(n) is not None)):  # in the order of the graph
        # The node of which this one is a copy, possibly by a cast to a wider dtype and back; itself if it is none.
        copied = value_origin(skip_widening_cast(node) or node)
        expression = symbol(node) or expressions.get(copied) or _evaluate_node(node, expressions)
        if expression is not None:
            expressions[node] = expression
    return sympy.expand(expressions[value]) if value in expressions else None


def _evaluate_node(node: Node, expressions: Mapping[Node, sympy.Expr]) -> sympy.Expr | None:
    """Return the expression of a call, or None if it is unknown.

    Unknown are ops that are not in _OP_EXPRESSIONS, sums with a factor (`alpha`), mixed dtypes, and unknown operands.

    Args:
        node: The call.
        expressions: The expressions of the nodes before it, as far as they are known.
    """
    combine = _OP_EXPRESSIONS.get(node.target)
    if combine is None or any(option not in (1, None) for option in node.kwargs.values()):
        return None
    operands = [expressions.get(a) if isinstance(a, Node) else sympy.sympify(a) for a in node.args]
    dtypes = {x.meta["val"].dtype for x in (node, *OpCall(node).operands)}
    if len(dtypes) > 1 or not all(isinstance(x, sympy.Expr) for x in operands):
        return None
    return combine(*operands)


def scan_of_leaf(expression: sympy.Expr | None, i: int, left: list[Any], right: list[Any]) -> CombineOp | None:
    """Return the scan, such as a sum, that computes leaf `i` from this leaf alone, or None if there is none.

    Args:
        expression: The result of the combine function for the leaf; None if it is unknown.
        i: The index of the leaf.
        left: The symbols of the left leaves.
        right: The symbols of the right leaves.
    """
    a, b = left[i], right[i]
    ops = {a + b: "sum", a * b: "prod", sympy.Max(a, b): "max", sympy.Min(a, b): "min", _logaddexp(a, b): "logsumexp"}
    return CombineOp(ops[expression], (i,)) if expression in ops else None


def _match_recurrence(results: list[Any], i: int, left: list[Any], right: list[Any]) -> CombineOp | None:
    """Return the linear recurrence that computes leaf i, or None.

    The combine function must compute leaf i as right[j] * left[i] + right[i], where leaf j contains the factors, which
    are multiplied: left[j] * right[j].

    Args:
        results: The results of the combine function, one expression (or None) for each leaf.
        i: The index of the leaf.
        left: The symbols of the left leaves.
        right: The symbols of the right leaves.
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

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace each recognized associative_scan by one sp scan per leaf; record why others are gathered."""
        changes, calls = 0, _associative_scan_calls(self.gm)
        if calls:
            erase_dead(self.graph)  # results without readers need no scan
        for node in calls:
            function, leaves = node.args[:2]  # the get_attr of the combine function's graph, and the scanned tensors
            scans = recognize_combine(self.gm.get_submodule(function.target), len(leaves))
            if scans is not None and all(self.can_scan_dtypes(leaves, scan) for scan in scans):
                self._rewrite(node, scans)
                changes += 1
            else:
                set_node_info(node, no_rule=UNKNOWN_FUNCTION if scans is None else OTHER_DTYPE)
        return changes

    def can_scan_dtypes(self, leaves: Sequence[Node], scan: CombineOp) -> bool:
        """Return True if the sp op of a scan supports the dtypes of its leaves.

        Args:
            leaves: All leaves.
            scan: The scan and the indices of its leaves; a recurrence needs two leaves of one floating dtype.
        """
        dtypes = [leaves[i].meta["val"].dtype for i in scan.leaves]
        if scan.op == "linear":
            return dtypes[0] == dtypes[1] and dtypes[0].is_floating_point
        return dtypes[0] != torch.bool and is_scannable(dtypes[0])  # sp.scan would count bools, as torch.cumsum does

    def _rewrite(self, node: Node, scans: list[CombineOp]) -> None:
        """Replace an associative_scan by one scan for each result that has a reader.

        Args:
            node: The associative_scan, whose readers are getitems.
            scans: The scan that computes each result.
        """
        operands = unmoved_operands(list(node.args[1]))
        read_indices = {user.args[1] for user in node.users}
        with self.graph.inserting_before(node):
            self.replace(node, {i: self.emit_leaf_scan(scans[i], operands, node) for i in read_indices})

    def emit_leaf_scan(self, scan: CombineOp, operands: _ScanOperands, like: Node) -> Node:
        """Emit the scan of one leaf, then permute and flip its result as torch did with the leaves before its scan.

        The rows are thus scanned in the dim and direction of the user's program, and the pairs of permutations and
        flips cancel in later passes.

        Args:
            scan: The scan and the indices of its leaves.
            operands: The leaves before torch's permutations and flips.
            like: The replaced node.

        Returns:
            The result, with the dims and the order of rows of the replaced call.
        """
        leaves = [operands.leaves[i] for i in scan.leaves]
        value, dim = leaves[-1].meta["val"], operands.dim  # the last leaf has the terms of a recurrence
        if scan.op == "linear":
            flags = (True,) if operands.reverse else ()  # `reverse`; the default, False, is omitted
            args = (*leaves, None, dim, *flags)  # factors, terms, initial state, dim
            out = self.emit(sp.linear_scan.default, args, value, like)
        else:
            out = emit_scan(self, leaves[0], dim, scan.op, value, like, reverse=operands.reverse)
        for target, args in reversed(operands.moved_ops):  # found from the scan backwards: here in torch's order
            out = self.compute(target, (out, *args), like)
        return out


def _associative_scan_calls(gm: GraphModule) -> list[Node]:
    """Return every associative_scan whose only readers are getitems, so that each result can be replaced."""
    calls = gm.graph.find_nodes(op="call_function", target=associative_scan_op)
    return [n for n in calls if all(user.target is operator.getitem for user in n.users)]


def unmoved_operands(leaves: list[Node], dim: int = 0) -> _ScanOperands:
    """Return the leaves before torch permuted the dim to the front, and flipped it for a reverse scan.

    Args:
        leaves: The leaves as torch scans them.
        dim: The dim along which torch scans them.

    Returns:
        The leaves, the dim and direction of the scan in these, and the removed ops.
    """
    operands = _ScanOperands([value_origin(x) for x in leaves], dim)
    # Go back from the leaves to their operands while all leaves are computed by the same permutation or flip. Arguments
    # are compared as text, because lists are not hashable.
    while len({(x.target, str(x.args[1:]), str(x.kwargs)) for x in operands.leaves}) == 1:
        moved = operands.leaves[0]
        source_dim = _source_dim(moved, operands.dim)
        if source_dim is None:
            break
        operands.moved_ops.append((moved.target, tuple(moved.args[1:])))
        operands.reverse ^= moved.target is aten.flip.default
        operands.leaves, operands.dim = [value_origin(x.args[0]) for x in operands.leaves], source_dim
    return operands


def _source_dim(node: Node, dim: int) -> int | None:
    """Return the dim of the operand of a permutation or flip that becomes dim `dim` of its result.

    None for other ops, for a flip of other dims, and for ops with keyword arguments, such as a copy to another layout.
    """
    if is_flip_along(node, dim):
        return dim
    order = permutation_of(node)
    return None if order is None or node.kwargs else order[dim]


class ExpandAssociativeScans(Pass):
    """Expansion of the remaining associative_scan calls, on gathered leaves, into functional torch ops.

    Memory is linear in the length. Lengths become constants.
    """

    requires = frozenset({"local"})
    provides = frozenset({"local ops"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every remaining associative_scan by the ops of a tree of combinations; return their number."""
        calls = _associative_scan_calls(self.gm)
        for node in calls:
            function, leaves, captured_values = node.args[:3]
            run = partial(_scan_as_tree, self.gm.get_submodule(function.target), len(leaves))
            operands = [*leaves, *captured_values]
            # Traced as the graph itself: ops before dispatch, with autograd enabled.
            with self.graph.inserting_before(node):
                self.replace(node, self.inline_function(run, operands, node, pre_dispatch=True, gradients=True))
        return len(calls)


def _scan_as_tree(combine: GraphModule, num_leaves: int, *operands: Any) -> Any:
    """Scan leaves along dim 0 by torch's tree of combinations, whose ops can be traced.

    Args:
        combine: The graph of the combine function.
        num_leaves: The number of leaves.
        operands: The leaves, and then the captured values, the other inputs of the combine function.
    """
    leaves, captured_values = list(operands[:num_leaves]), operands[num_leaves:]
    return generic_associative_scan(Interpreter(combine).run, leaves, additional_inputs=captured_values)
