"""Compute states that one step mixes, or that depend on each other, by one scan: any body that is linear in them.

    h = einsum("bij,bjk->bik", A, h) + N        h = h @ A + N        h = linear(h, w) + x        h = baddbmm(N, A, h)
    u = v - (h * k[..., None]).sum(-2);  h = h + k[..., None] * u[..., None, :]
    p, q = c * p - d * q + k, d * p + c * q        p, q = c * p + d * q + k, p
        ->  h' = m @ h + b for the stacked states: sp.affine_scan

`recurrence.py` evaluates one op after the other with formulas of its own; here, the *body* (all ops between the states
of two steps) is evaluated on all steps. It is linear if each op is a sum of terms in which one factor depends on the
states (`TERMS`). Then b is the body on states of zeros, and the columns of m are the linear part of the body on the
vectors of a basis: every op with zeros in place of the terms without a state.

Dims of a state, by the names of dims in the sharding rules of the ops:

    mixed      an element of the new state reads other elements of the dim: a dim of m
    batch      passes through all ops, and a factor has it: m differs along the dim
    columns    passes through all ops, and no factor has it: m is applied to each column

Bytes moved: none. Unchanged: states of different shapes, more than `MAX_ROWS` mixed elements, and symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import pytree, schema_of
from sp_compile.passes.graph.call import is_tensor, node_shape
from sp_compile.passes.graph.fakes import trace_function
from sp_compile.passes.sharding.matchers import constant_value
from sp_compile.passes.sharding.rule import lookup_rule

from .steps import ColumnRef, NotALoop, SeededList, StepColumn
from .vectorize import BatchedOps, BatchedValue, Value

aten = torch.ops.aten
MAX_ROWS = 512  # of m
# For each op, its terms: products of arguments. Arguments in no term may not depend on a state.
TERMS: dict[Any, tuple[str, ...]] = {
    aten.add: ("self", "other"),
    aten.sub: ("self", "other"),
    aten.rsub: ("self", "other"),
    aten.neg: ("self",),
    aten.mul: ("self * other",),
    aten.div: ("self",),
    aten.where: ("self", "other"),
    aten.masked_fill: ("self", "value"),
    aten.lerp: ("self", "end"),
    aten.addcmul: ("self", "tensor1 * tensor2"),
    aten.matmul: ("self * other",),
    aten.mm: ("self * mat2",),
    aten.bmm: ("self * mat2",),
    aten.mv: ("self * vec",),
    aten.linear: ("input * weight", "bias"),
    aten.addmm: ("self", "mat1 * mat2"),
    aten.baddbmm: ("self", "batch1 * batch2"),
    aten.einsum: ("tensors * tensors",),
    aten.cat: ("tensors",),
    aten.stack: ("tensors",),
}
UNIFORM_OPS = (
    "alias clone contiguous expand flatten mean movedim mT permute reshape select slice squeeze sum t transpose "
    "unflatten unsqueeze view"
)
TERMS |= {getattr(aten, name): ("self",) for name in UNIFORM_OPS.split()}


def find_cycle(columns: Sequence[StepColumn]) -> list[StepColumn]:
    """Return the columns of the smallest cycle over steps, in their order.

    Raises:
        NotALoop: There is no cycle.
    """
    references = {c: [x for x in map(reference_of, c.operands) if x is not None] for c in columns}
    sources = {c: {x.column for x in found if x.column in references} for c, found in references.items()}
    states = [c for c in columns if any(x.lag and x.column is c for found in references.values() for x in found)]
    reached = [_reach(state, sources) for state in states]
    cycles = [found for state, found in zip(states, reached) if state in found]
    if not cycles:
        raise NotALoop("a state that is not affine in the previous state")
    cycle = min(cycles, key=len)
    return [c for c in columns if c in cycle]


def reference_of(operand: Any) -> ColumnRef | None:
    """Return the column that an operand reads after the first steps, or None."""
    while isinstance(operand, SeededList):
        operand = operand.later
    return operand if isinstance(operand, ColumnRef) else None


def _reach(start: StepColumn, sources: dict[StepColumn, set[StepColumn]]) -> set[StepColumn]:
    """Return all columns from which a column is computed."""
    found: set[StepColumn] = set()
    pending = [start]
    while pending:
        new = sources[pending.pop()] - found
        found |= new
        pending.extend(new)
    return found


@dataclass(frozen=True)
class BodyOp:
    """One op of a body."""

    column: StepColumn  # its nodes
    leaves: list[Value | ColumnRef]  # of its arguments; references are to the body
    zeroed: list[int]  # leaves of the terms without a state


class CoupledStates:
    """States of one cycle, which are scanned together.

    Args:
        editor: Emits the ops.
        body: The columns of the cycle, in the order of computation.
        leaves: The leaves of the arguments of each column.
        seeds: The values before the first step, by columns and lags: states are the values of the previous steps.
    """

    def __init__(
        self, editor: BatchedOps, body: Sequence[StepColumn], leaves: Sequence[list[Any]], seeds: dict[ColumnRef, Value]
    ) -> None:
        self.editor, self.seeds, self.states = editor, seeds, list(seeds)
        self.like = self.states[0].column.node
        value = self.like.meta["val"]
        self.shape, self.options = node_shape(self.like), {"dtype": value.dtype, "device": value.device}
        if any(node_shape(x.column.node) != self.shape for x in self.states) or not value.is_floating_point():
            raise NotALoop("states of different shapes, or of integers")
        if not all(isinstance(size, int) for x in body for size in node_shape(x.node)):
            raise NotALoop("a state that is mixed and has a symbolic size")
        self.labels: dict[StepColumn, list[int | None]] = {}  # for each dim of a value, the dim of the states, if any
        self.touched: set[int] = set()  # dims of the states that a factor has
        self.body = [self._read_op(column, operands) for column, operands in zip(body, leaves)]
        passing = {d for d in range(len(self.shape)) if all(self.labels[x.column][d] == d for x in self.states)}
        self.batch = sorted(passing & self.touched)
        self.columns = sorted(passing - self.touched)
        self.mixed = [d for d in range(len(self.shape)) if d not in passing]
        self.rows = math.prod(self.shape[d] for d in self.mixed)
        if self.rows * len(self.states) > MAX_ROWS:
            raise NotALoop(f"{self.rows} mixed elements of a state")

    def _read_op(self, column: StepColumn, leaves: list[Any]) -> BodyOp:
        """Return an op of the body, and record the dims of its value. Raises NotALoop if it is not linear."""
        node = column.node
        terms = TERMS.get(getattr(node.target, "overloadpacket", None))
        call, rule = lookup_rule(node) or (None, None)
        nodes = pytree.tree_leaves((node.args, node.kwargs))
        tensors = [i for i, x in enumerate(nodes) if is_tensor(x)]
        error = NotALoop(f"a state that is not affine in the previous state ({node.target})")
        if terms is None or call is None or rule is None or len(rule.results) != 1:
            raise error
        if [nodes[i] for i in tensors] != call.operands or node.meta["val"].dtype != self.options["dtype"]:
            raise error
        names = _leaf_names(node)
        affine = [i for i, x in enumerate(leaves) if isinstance(x, ColumnRef)]
        zeroed, factors = [], set(range(len(leaves)))
        for term in terms:
            members = [i for i, name in enumerate(names) if name in term.split(" * ")]
            groups = [members] if "*" in term else [[i] for i in members]
            for group in groups:
                count = sum(i in affine for i in group)
                if count > 1:
                    raise error
                if not count:
                    zeroed += group
                    factors -= set(group)
        in_terms = {name for term in terms for name in term.split(" * ")}
        if any(names[i] not in in_terms for i in affine) or node.kwargs.get("rounding_mode") is not None:
            raise error
        dims = dict(zip(tensors, rule.operands))
        self.labels[column] = [self._label(name, affine, dims, leaves, rule) for name in rule.results[0]]
        for i in factors - set(affine):
            label_of = dict(zip(rule.results[0], self.labels[column]))
            self.touched |= {label for name in dims.get(i, ()) if name and (label := label_of.get(name)) is not None}
        return BodyOp(column, leaves, zeroed)

    def _label(self, name: str, affine: list[int], dims: Any, leaves: list[Any], rule: Any) -> int | None:
        """Return the dim of the states that a dim of a result is, or None if it is another one."""
        if not name or rule.kind(name) != "pass":
            return None
        found: set[int | None] = set()
        for i in affine:
            labels = self._labels_of(leaves[i])
            found.add(labels[dims[i].index(name)] if name in dims[i] else None)
        return found.pop() if len(found) == 1 else None

    def _labels_of(self, reference: ColumnRef) -> list[int | None]:
        """Return the dims of the states that the dims of a value are."""
        return list(range(len(self.shape))) if reference.lag else self.labels[reference.column]

    def scan(self, reverse: bool) -> dict[StepColumn, BatchedValue]:
        """Emit the scan, and return the values of the states' columns at all steps."""
        count, num_rows = len(self.states), self.rows * len(self.states)
        try:
            results = self._evaluate(frozenset(self.columns))
            reduced = True
        except (RuntimeError, ValueError, NotALoop):  # an op with the sizes of all columns
            results = self._evaluate(frozenset())
            reduced = False
        terms, maps = results[:count], results[count:]
        if not reduced:
            for d in self.columns:
                maps = [self._compute(aten.slice.Tensor, x, d + 2, 0, 1) for x in maps]
        ndim, time = len(self.shape), len(self.batch)
        batch, steps = [self.shape[d] for d in self.batch], self.body[0].column.end - self.body[0].column.first
        columns = math.prod(self.shape[d] for d in self.columns)
        order = [*self.batch, None, *self.mixed, *self.columns]
        b = [self._arrange(x, [0 if d is None else d + 1 for d in order]) for x in terms]
        b = [self._reshape(x, (*batch, steps, self.rows, columns)) for x in b]
        order = [*self.batch, None, *self.mixed, -1, *self.columns]
        m = [self._arrange(x, [0 if d is None else d + 2 for d in order]) for x in maps]
        m = [self._reshape(x, (*batch, steps, self.rows, num_rows)) for x in m]
        initial = None
        if any(not _is_zero(seed) for seed in self.seeds.values()):
            seeds = [self.editor.expand_to(seed, self.shape, self.like) for seed in self.seeds.values()]
            seeds = [self._arrange(x, [*self.batch, *self.mixed, *self.columns]) for x in seeds]
            initial = self._join([self._reshape(x, (*batch, self.rows, columns)) for x in seeds])
        out = self._compute(torch.ops.sp.affine_scan.default, self._join(m), self._join(b), initial, time, reverse)
        values = {}
        position = min(1, ndim)
        stored = [*self.batch, None, *self.mixed, *self.columns]
        wanted: list[int | None] = list(range(ndim))
        wanted.insert(position, None)
        for i, state in enumerate(self.states):
            if state.lag > 1:
                continue
            x = self._compute(aten.slice.Tensor, out, time + 1, i * self.rows, (i + 1) * self.rows)
            sizes = [steps if d is None else self.shape[d] for d in stored]
            node = self._arrange(self._reshape(x, sizes), map(stored.index, wanted))
            values[state.column] = BatchedValue(node, position)
        return values

    def _evaluate(self, columns: frozenset[int]) -> list[Node]:
        """Emit the body on zeros, (S, ...) for each state, and its linear part on a basis, (S, rows, ...).

        Args:
            columns: The dims of the states that have size 1 in the linear part.
        """
        leaves: list[Any] = [x for op in self.body for x in op.leaves]
        operands = {id(x): x for x in leaves if isinstance(x, BatchedValue) or is_tensor(x)}
        nodes = [self.editor.move_steps(x, 0).node if isinstance(x, BatchedValue) else x for x in operands.values()]
        dims = tuple(0 if isinstance(x, BatchedValue) else None for x in operands.values())
        shape = [1 if d in columns else size for d, size in enumerate(self.shape)]
        sizes = [shape[d] if d in self.mixed else 1 for d in range(len(shape))]
        num_rows = self.rows * len(self.states)

        def run_step(*values: torch.Tensor) -> list[torch.Tensor]:
            """Return the terms of all states, and their maps."""
            coefficients = dict(zip(operands, values))
            zeros = [torch.zeros(self.shape, **self.options) for _ in self.states]
            terms = self._run(coefficients, zeros, None)
            identity = torch.eye(num_rows, **self.options)
            parts = identity.split(self.rows, 1)
            basis = [x.reshape(num_rows, *sizes).expand(num_rows, *shape) for x in parts]

            def run_linear(*vectors: torch.Tensor) -> list[torch.Tensor]:
                """Return the linear part on one vector of the basis."""
                return self._run(coefficients, vectors, columns)

            return [*terms, *torch.func.vmap(run_linear)(*basis)]

        fakes = [x.meta["val"].detach() for x in nodes]
        body = trace_function(torch.func.vmap(run_step, in_dims=dims), fakes)
        if any(n.op not in ("placeholder", "call_function", "output") for n in body.graph.nodes):
            raise NotALoop("a body that contains constants")
        results: list[Node] = list(self.editor.inline(body, nodes, self.like))
        expected = [self.shape] * len(self.states) + [(num_rows, *shape)] * len(self.states)
        if any(node_shape(x)[1:] != tuple(y) for x, y in zip(results, expected, strict=True)):
            raise NotALoop("a body with other shapes")
        return results

    def _run(
        self, coefficients: dict[int, torch.Tensor], states: Sequence[torch.Tensor], columns: frozenset[int] | None
    ) -> list[torch.Tensor]:
        """Return the new states, from tensors of one step.

        Args:
            coefficients: The other operands.
            states: The states.
            columns: For the linear part, the dims of the states that have size 1; None for the body itself.
        """
        values: dict[StepColumn, torch.Tensor] = {}
        previous = dict(zip(self.states, states))
        for op in self.body:
            leaves: list[Any] = []
            for i, x in enumerate(op.leaves):
                if isinstance(x, ColumnRef):
                    leaves.append(previous[x] if x.lag else values[x.column])
                elif columns is not None and i in op.zeroed:
                    leaves.append(self._zeros(op, i, columns))
                else:
                    leaves.append(coefficients.get(id(x), x))
            node = op.column.node
            args, kwargs = pytree.tree_unflatten(leaves, pytree.tree_flatten((node.args, node.kwargs))[1])
            values[op.column] = node.target(*args, **kwargs)
        # A state of lag 2 is the state of lag 1 one step later.
        return [values[x.column] if x.lag == 1 else previous[ColumnRef(x.column, x.lag - 1)] for x in self.states]

    def _zeros(self, op: BodyOp, leaf: int, columns: frozenset[int]) -> Any:
        """Return zeros in place of a leaf, of size 1 in the dims of columns."""
        node = op.column.node
        nodes = pytree.tree_leaves((node.args, node.kwargs))
        x = nodes[leaf]
        if not is_tensor(x):
            return None if x is None else 0
        _, rule = lookup_rule(node) or (None, None)
        assert rule is not None
        names = rule.operands[sum(map(is_tensor, nodes[:leaf]))]
        label_of = dict(zip(rule.results[0], self.labels[op.column]))
        sizes = [1 if label_of.get(name) in columns else size for name, size in zip(names, node_shape(x))]
        return torch.zeros(sizes, dtype=x.meta["val"].dtype, device=x.meta["val"].device)

    def _compute(self, target: Any, *args: Any) -> Node:
        """Emit an op."""
        return self.editor.compute(target, args, self.like)

    def _arrange(self, x: Node, order: Iterable[int]) -> Node:
        """Emit a permutation of dims."""
        dims = list(order)
        return x if dims == sorted(dims) else self._compute(aten.permute.default, x, dims)

    def _reshape(self, x: Node, shape: Sequence[Any]) -> Node:
        """Emit a reshape, if the shape is another one."""
        return x if node_shape(x) == tuple(shape) else self.editor.reshape(x, list(shape), self.like)

    def _join(self, parts: list[Node]) -> Node:
        """Emit the rows of all states as one matrix."""
        return parts[0] if len(parts) == 1 else self._compute(aten.cat.default, parts, -2)


def _leaf_names(node: Node) -> list[str]:
    """Return the name of the argument of each leaf of a node's arguments."""
    schema = [x.name for x in schema_of(node.target).arguments]
    named = [*zip(schema, node.args), *node.kwargs.items()]
    return [name for name, value in named for _ in pytree.tree_leaves(value)]


def _is_zero(x: Value) -> bool:
    """Return True for the number 0, or a tensor filled with it."""
    return bool((constant_value(x) if isinstance(x, Node) else x) == 0)
