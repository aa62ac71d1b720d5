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
    batch      passes through all ops, and a coefficient of the states has it: m differs along the dim
    repeated   passes through all ops, and no coefficient has it: the same m is applied to each element

Bytes moved: none. Unchanged: states of different shapes, more than `MAX_ROWS` mixed elements, and symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.graph.call import is_tensor, node_shape
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.fakes import trace_function
from sp_compile.passes.sharding.factors import BoundRule, Dims
from sp_compile.passes.sharding.matchers import constant_value
from sp_compile.passes.sharding.rule import lookup_rule

from .recurrence import has_rounded_numbers, refuse_infinite_factor
from .steps import ColumnRef, NotALoop, SeededList, StepColumn
from .vectorize import BatchedOps, BatchedValue, Value, leaf_names

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
    "alias clone contiguous cumsum expand flatten flip mean movedim mT permute reshape roll select slice squeeze sum t "
    "transpose unflatten unsqueeze view"
)
TERMS |= {getattr(aten, name): ("self",) for name in UNIFORM_OPS.split()}


def find_cycle(columns: Sequence[StepColumn]) -> list[StepColumn]:
    """Return the columns of the smallest cycle: a state and all columns by which it depends on its earlier values.

    A column has one node of each step of a loop. A state is a column that is read in a later step.

    Args:
        columns: The columns whose values are not computed yet, in the order of computation.

    Returns:
        The columns of the cycle, in the same order.

    Raises:
        NotALoop: No state depends on itself.
    """
    # For each column: all its references, and the columns among `columns` that it reads by them.
    references = {c: [x for x in map(reference_of, c.operands) if x is not None] for c in columns}
    sources = {c: {x.column for x in read if x.column in references} for c, read in references.items()}
    read_later = {x.column for read in references.values() for x in read if x.lag}
    states = [c for c in columns if c in read_later]
    # All columns from which a state is computed, over any number of steps; itself only if it depends on itself.
    dependencies = [reachable_set(sources[state], sources.__getitem__) for state in states]
    cycles = [found for state, found in zip(states, dependencies) if state in found]
    if not cycles:
        raise NotALoop("a state that is not affine in the previous state")
    cycle = min(cycles, key=len)
    return [c for c in columns if c in cycle]


def reference_of(operand: Any) -> ColumnRef | None:
    """Return the reference to the column that an operand of a step reads, or None if it reads no column.

    Initial values, which the first steps read in its place, are skipped.
    """
    while isinstance(operand, SeededList):
        operand = operand.later
    return operand if isinstance(operand, ColumnRef) else None


@dataclass(frozen=True)
class BodyOp:
    """One op of a body."""

    column: StepColumn  # its nodes
    leaves: list[Value | ColumnRef]  # of its arguments; a ColumnRef is a column of the body
    zeroed: list[int]  # indices of the leaves in terms without a state


class CoupledStates:
    """States that depend on each other, or of which a step mixes the elements; one scan computes all of them.

    A column of the loop (`StepColumn`) is one op of its body: the nodes of this op at all steps. A `ColumnRef` is its
    value at the same or an earlier step.

    Args:
        editor: Emits the ops.
        body: The columns of the cycle, in the order of computation.
        leaves: The flattened arguments of each column: nodes, constants and references to columns.
        seeds: The values before the first step, by column and lag. Each key is one of the states: with the keys
            (p, lag 1) and (p, lag 2), these are p of the previous step and p of the step before that.
    """

    def __init__(
        self, editor: BatchedOps, body: Sequence[StepColumn], leaves: Sequence[list[Any]], seeds: dict[ColumnRef, Value]
    ) -> None:
        self.editor, self.seeds, self.states = editor, seeds, list(seeds)
        self.like = self.states[0].column.node
        value = self.like.meta["val"]
        self.shape, self.dtype, self.state_dtype = node_shape(self.like), value.dtype, value.dtype
        if has_rounded_numbers([x for operands in leaves for x in operands], value.dtype):
            self.dtype = accumulation_dtype(value.dtype)  # of the scan, as for a recurrence (`recurrence.py`)
        self.options = {"dtype": self.dtype, "device": value.device}
        if any(node_shape(x.column.node) != self.shape for x in self.states) or not value.is_floating_point():
            raise NotALoop("states of different shapes, or of integers")
        if not all(is_tensor(x.node) for x in body):
            raise NotALoop("an op with several results")
        if not all(isinstance(size, int) for x in body for size in node_shape(x.node)):
            raise NotALoop("a state that is mixed and has a symbolic size")
        # column -> for each dim of its value, the dim of the states that passes to it through all ops, or None
        self.state_dims: dict[StepColumn, list[int | None]] = {}
        self.coefficient_dims: set[int] = set()  # dims of the states that the other factor of a product has
        self.body = [self._read_op(column, operands) for column, operands in zip(body, leaves)]
        # A dim that passes through all ops is no dim of m. If a coefficient has it, m differs along it (a batch of
        # matrices); else the same m is applied to each of its elements. All other dims are rows and columns of m.
        passing = {d for d in range(len(self.shape)) if all(self.state_dims[x.column][d] == d for x in self.states)}
        self.batch_dims = sorted(passing & self.coefficient_dims)
        self.repeated_dims = sorted(passing - self.coefficient_dims)
        self.mixed_dims = [d for d in range(len(self.shape)) if d not in passing]
        self.rows = math.prod(self.shape[d] for d in self.mixed_dims)  # of one state
        if self.rows * len(self.states) > MAX_ROWS:
            raise NotALoop(f"{self.rows} mixed elements of a state")

    def _read_op(self, column: StepColumn, leaves: list[Any]) -> BodyOp:
        """Return an op of the body (all ops between the states of two steps), and record the dims of its value.

        The op must be a sum of terms, products of arguments (`TERMS`), in each of which at most one factor depends on
        the states. Otherwise NotALoop is raised.

        Args:
            column: The nodes of the op.
            leaves: The leaves of its arguments; those that depend on the states are ColumnRefs.
        """
        node = column.node
        terms = TERMS.get(getattr(node.target, "overloadpacket", None))
        call, rule = lookup_rule(node) or (None, None)
        nodes = pytree.tree_leaves((node.args, node.kwargs))  # the arguments of one step, in the order of leaves
        tensor_indices = [i for i, x in enumerate(nodes) if is_tensor(x)]
        refuse_infinite_factor(node)
        error = NotALoop(f"a state that is not affine in the previous state ({node.target})")
        if terms is None or call is None or rule is None or len(rule.results) != 1:
            raise error
        # `_record_dims` assigns the operands of the rule to the tensor leaves, one by one in this order.
        if [nodes[i] for i in tensor_indices] != call.operands or node.meta["val"].dtype != self.state_dtype:
            raise error
        state_leaves = {i for i, x in enumerate(leaves) if isinstance(x, ColumnRef)}
        # The leaves of terms without a state, which are 0 in the linear part; None if the op is not affine in a state.
        zeroed = _stateless_leaves(terms, leaf_names(node), state_leaves)
        if zeroed is None or node.kwargs.get("rounding_mode") is not None:  # div that rounds is not linear
            raise error
        coefficients = set(range(len(leaves))) - state_leaves - set(zeroed)
        self._record_dims(column, leaves, rule, dict(zip(tensor_indices, rule.operands)), coefficients)
        return BodyOp(column, leaves, zeroed)

    def _record_dims(
        self,
        column: StepColumn,
        leaves: list[Any],
        rule: BoundRule,
        operand_dims: dict[int, Dims],
        coefficients: set[int],
    ) -> None:
        """Record which dims of an op's value are dims of the states, and which of these its coefficients have.

        Args:
            column: The nodes of the op.
            leaves: The leaves of its arguments.
            rule: Its sharding rule, which names dims.
            operand_dims: The names of the dims of each tensor, by leaf index.
            coefficients: The indices of the leaves that multiply a state.
        """
        state_leaves = [i for i, x in enumerate(leaves) if isinstance(x, ColumnRef)]

        def state_dim(name: str) -> int | None:
            """Return the dim of the states that becomes the result's dim of this name in the rule, or None.

            It is None if the op mixes elements along it, or if it is no dim of the states. All operands with a state
            (`state_leaves`) must have the same dim of the states there.
            """
            if not name or rule.kind(name) != "pass":  # such as a dim along which the op is a cumulative sum
                return None
            found: set[int | None] = set()
            for i in state_leaves:
                reference = leaves[i]  # one with a lag is to a state itself, which has all dims of the states in order
                dims = range(len(self.shape)) if reference.lag else self.state_dims[reference.column]
                names = operand_dims[i]
                found.add(dims[names.index(name)] if name in names else None)
            return found.pop() if len(found) == 1 else None  # several in h + h.T, which mixes rows and columns

        result_dims = {name: state_dim(name) for name in rule.results[0]}
        self.state_dims[column] = [result_dims[name] for name in rule.results[0]]
        for i in coefficients:
            dims_of_coefficient = (result_dims.get(name) for name in operand_dims.get(i, ()) if name)
            self.coefficient_dims |= {dim for dim in dims_of_coefficient if dim is not None}

    def scan(self, reverse: bool) -> dict[StepColumn, BatchedValue]:
        """Emit the scan h' = m @ h + b of the stacked states, and return the values of their columns at all steps.

        The operands have the dims m (batch, steps, rows, rows), b (batch, steps, rows, columns) and h (batch, rows,
        columns), where the rows are the mixed elements of all states, one state after the other. The columns are the
        elements of the repeated dims, as the V columns of h (B, K, V) in h' = m @ h + b with m (B, K, K).
        """
        num_rows = self.rows * len(self.states)
        terms, maps = self._terms_and_maps()
        time = len(self.batch_dims)  # the dim of the steps in the scan
        batch, steps = [self.shape[d] for d in self.batch_dims], self.body[0].column.end - self.body[0].column.first
        num_columns = math.prod(self.shape[d] for d in self.repeated_dims)
        # b of each state, (steps, *shape) -> (batch, steps, rows, columns). In the order, a number is a dim of the
        # state, which is one later in b, and None is the dim of the steps.
        order = [*self.batch_dims, None, *self.mixed_dims, *self.repeated_dims]
        b = [self._arrange(x, [0 if d is None else d + 1 for d in order]) for x in terms]
        b = [self.editor.reshape(x, (*batch, steps, self.rows, num_columns), self.like) for x in b]
        # m of each state, (steps, basis, *shape) -> (batch, steps, rows, basis). In this order, -1 is the dim of the
        # basis, dim 1 of m, and a dim of the state is two later in m.
        order = [*self.batch_dims, None, *self.mixed_dims, -1, *self.repeated_dims]
        m = [self._arrange(x, [0 if d is None else d + 2 for d in order]) for x in maps]
        m = [self.editor.reshape(x, (*batch, steps, self.rows, num_rows), self.like) for x in m]
        initial = None
        if any(not _is_zero(seed) for seed in self.seeds.values()):
            seeds = [self.editor.expand_to(seed, self.shape, self.like, self.dtype) for seed in self.seeds.values()]
            seeds = [self._arrange(x, [*self.batch_dims, *self.mixed_dims, *self.repeated_dims]) for x in seeds]
            initial = self._join([self.editor.reshape(x, (*batch, self.rows, num_columns), self.like) for x in seeds])
        out = self._compute(torch.ops.sp.affine_scan.default, self._join(m), self._join(b), initial, time, reverse)
        return self._split_states(self.editor.cast(out, self.state_dtype, self.like), steps)

    def _split_states(self, out: Node, steps: int) -> dict[StepColumn, BatchedValue]:
        """Return the values of each state at all steps, by its column: one tensor with an additional dim of the steps.

        Args:
            out: The result of the scan, (batch, steps, mixed elements of all states, repeated elements).
            steps: The number of steps.
        """
        values = {}
        ndim, steps_dim = len(self.shape), len(self.batch_dims)  # the dim of the steps in `out`
        position = min(1, ndim)  # of the steps in each value: after the first dim, which usually is the batch
        scan_order = [*self.batch_dims, None, *self.mixed_dims, *self.repeated_dims]  # None: the dim of the steps
        value_order: list[int | None] = list(range(ndim))
        value_order.insert(position, None)
        sizes = [steps if d is None else self.shape[d] for d in scan_order]
        for i, state in enumerate(self.states):
            if state.lag > 1:  # an earlier value of the same column
                continue
            # The rows of this state among the mixed elements of all states, which are the dim after the steps.
            x = self._compute(aten.slice.Tensor, out, steps_dim + 1, i * self.rows, (i + 1) * self.rows)
            node = self._arrange(self.editor.reshape(x, sizes, self.like), map(scan_order.index, value_order))
            values[state.column] = BatchedValue(node, position)
        return values

    def _terms_and_maps(self) -> tuple[list[Node], list[Node]]:
        """Return b of each state, (steps, ...), and m of each state, (steps, basis, ...) with size 1 in repeated dims.

        m is the same for each element of a repeated dim. So these dims have size 1 in the linear part, but the last of
        them, along which the vectors of the basis are: w @ h is then one product w @ basis.
        """
        num_states, dims_to_cut = len(self.states), list[int]()
        try:
            sizes: dict[Any, int] = dict.fromkeys(self.repeated_dims, 1)
            if sizes:
                sizes[self.repeated_dims[-1]] = self.rows * num_states
            results = self._evaluate(sizes)
        except (RuntimeError, ValueError, NotALoop):
            # An op of the body, such as an expand, has the sizes of repeated dims as arguments, so that it fails for
            # others: compute m for all elements, and keep the first.
            results, dims_to_cut = self._evaluate({}), self.repeated_dims
        terms, maps = results[:num_states], results[num_states:]
        for d in dims_to_cut:  # the dims of the states follow steps and basis
            maps = [self._compute(aten.slice.Tensor, x, d + 2, 0, 1) for x in maps]
        return terms, maps

    def _evaluate(self, linear_sizes: Mapping[Any, int]) -> list[Node]:
        """Emit the body of all steps on states of zeros, and its linear part on the vectors of a basis.

        These are b and the columns of m in h' = m @ h + b: for the body w @ (h + x), w @ x and w @ each basis vector.

        Args:
            linear_sizes: The sizes of the repeated dims in the linear part: 1, and the number of vectors of the basis
                in the last one. Empty if the linear part has all sizes, and is run for one vector after the other.

        Returns:
            The results for each state: those for zeros, (steps, ...), then those for the basis, (steps, basis, ...).
        """
        leaves: list[Any] = [x for op in self.body for x in op.leaves]
        # The values of the body that are not states, by identity, as one value may be read in several places.
        operands = {id(x): x for x in leaves if isinstance(x, BatchedValue) or is_tensor(x)}
        if not any(isinstance(x, BatchedValue) for x in operands.values()):
            raise NotALoop("a body that is equal at all steps")
        nodes = [self.editor.move_steps(x, 0).node if isinstance(x, BatchedValue) else x for x in operands.values()]
        dims = tuple(0 if isinstance(x, BatchedValue) else None for x in operands.values())
        shape = [1 if d in linear_sizes else size for d, size in enumerate(self.shape)]
        num_rows = self.rows * len(self.states)

        def run_step(*values: torch.Tensor) -> list[torch.Tensor]:
            """Return the results of one step, in which `operands` have these values, for zeros and for the basis."""
            coefficients = {key: x.to(self._operand_dtype(x.dtype)) for key, x in zip(operands, values)}
            zeros = [torch.zeros(self.shape, **self.options) for _ in self.states]
            terms = self._run_body(coefficients, zeros, linear_sizes=None)
            basis = self._basis_vectors(shape)

            def run_linear(*vectors: torch.Tensor) -> list[torch.Tensor]:
                """Return the linear part of the body on one vector of the basis, or on all along a repeated dim."""
                return self._run_body(coefficients, vectors, linear_sizes=linear_sizes)

            if not linear_sizes:
                return [*terms, *torch.func.vmap(run_linear)(*basis)]
            dim = self.repeated_dims[-1]
            maps = run_linear(*(x.squeeze(dim + 1).movedim(0, dim) for x in basis))
            return [*terms, *(x.movedim(dim, 0).unsqueeze(dim + 1) for x in maps)]

        fakes = [x.meta["val"].detach() for x in nodes]
        body = trace_function(torch.func.vmap(run_step, in_dims=dims), fakes)
        if any(n.op not in ("placeholder", "call_function", "output") for n in body.graph.nodes):
            raise NotALoop("a body that contains constants")
        results: list[Node] = list(self.editor.inline(body, nodes, self.like))
        expected = [self.shape] * len(self.states) + [(num_rows, *shape)] * len(self.states)
        if any(node_shape(x)[1:] != tuple(y) for x, y in zip(results, expected, strict=True)):
            raise NotALoop("a body with other shapes")
        return results

    def _basis_vectors(self, shape: Sequence[Any]) -> list[torch.Tensor]:
        """Return the part of each state in the vectors of a basis, (number of vectors, *shape).

        Vector i has a 1 in one mixed element of one state, and 0 in all others: for two states p and q of shape (B, 1)
        with mixed dim 1, vector 0 is p = 1, q = 0 and vector 1 is p = 0, q = 1. All elements of the other dims have the
        same vector, as m maps each of them separately.

        Args:
            shape: The shape of a state in the linear part of the body.
        """
        num_rows = self.rows * len(self.states)
        mixed_shape = [size if d in self.mixed_dims else 1 for d, size in enumerate(shape)]
        identity = torch.eye(num_rows, **self.options)  # row i is vector i
        parts = identity.split(self.rows, 1)  # of each state: (num_rows, mixed elements)
        return [x.reshape(num_rows, *mixed_shape).expand(num_rows, *shape) for x in parts]

    def _run_body(
        self,
        coefficients: dict[int, torch.Tensor],
        states: Sequence[torch.Tensor],
        linear_sizes: Mapping[Any, int] | None,
    ) -> list[torch.Tensor]:
        """Run the body, or its linear part, on tensors of one step, and return the new states.

        Args:
            coefficients: The operands that are no states, by identity of the leaf.
            states: The previous states.
            linear_sizes: For the linear part, the sizes in `states` of dims with another size; None for the body.
        """
        values: dict[StepColumn, torch.Tensor] = {}
        previous = dict(zip(self.states, states))
        for op in self.body:
            leaves: list[Any] = []
            for i, x in enumerate(op.leaves):
                if isinstance(x, ColumnRef):
                    leaves.append(previous[x] if x.lag else values[x.column])
                elif linear_sizes is not None and i in op.zeroed:
                    leaves.append(self._make_zeros(op, i, linear_sizes))
                else:
                    leaves.append(coefficients.get(id(x), x))  # x itself if it is a constant
            node = op.column.node
            _, structure = pytree.tree_flatten((node.args, node.kwargs))
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            values[op.column] = node.target(*args, **kwargs)
            # A reshape to (-1, 4) accepts other sizes, too, and reorders elements.
            dims = zip(self.state_dims[op.column], node_shape(node), strict=True)
            sizes = [size if linear_sizes is None else linear_sizes.get(d, size) for d, size in dims]
            if tuple(values[op.column].shape) != tuple(sizes):
                raise NotALoop("an op whose arguments have the sizes of other dims")
        # In the next step, the state p of lag 1 is the new value of p, and that of lag 2 is the present one of lag 1.
        return [values[x.column] if x.lag == 1 else previous[ColumnRef(x.column, x.lag - 1)] for x in self.states]

    def _make_zeros(self, op: BodyOp, leaf: int, linear_sizes: Mapping[Any, int]) -> Any:
        """Return zeros in place of a term without a state, for the linear part of the body.

        Args:
            op: The op.
            leaf: The index of the leaf of its arguments that is the term.
            linear_sizes: The sizes of repeated dims in the states of the linear part, which the zeros must have in the
                dims to which these pass.

        Returns:
            A tensor, the number 0 in place of a number, or None in place of None.
        """
        node = op.column.node
        nodes = pytree.tree_leaves((node.args, node.kwargs))
        x = nodes[leaf]
        if not is_tensor(x):
            return None if x is None else 0
        _, rule = lookup_rule(node) or (None, None)
        assert rule is not None
        num_tensors_before = sum(map(is_tensor, nodes[:leaf]))  # rules have operands for tensors only
        names = rule.operands[num_tensors_before]
        state_dim_of = dict(zip(rule.results[0], self.state_dims[op.column]))  # by name of a dim of the result
        sizes = [linear_sizes.get(state_dim_of.get(name), size) for name, size in zip(names, node_shape(x))]
        return torch.zeros(sizes, dtype=self._operand_dtype(x.meta["val"].dtype), device=x.meta["val"].device)

    def _operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of an operand in the scan: that of the scan for the dtype of the states, else the same."""
        return self.dtype if dtype == self.state_dtype else dtype

    def _compute(self, target: Any, *args: Any) -> Node:
        """Emit an op with the metadata of a state."""
        return self.editor.compute(target, args, self.like)

    def _arrange(self, x: Node, order: Iterable[int]) -> Node:
        """Return x with its dims in another order; no op is emitted if they are in order."""
        dims = list(order)
        return x if dims == sorted(dims) else self._compute(aten.permute.default, x, dims)

    def _join(self, parts: list[Node]) -> Node:
        """Return the rows of all states (dim -2), one state after the other, as one tensor."""
        return parts[0] if len(parts) == 1 else self._compute(aten.cat.default, parts, -2)


def _stateless_leaves(terms: Sequence[str], names: Sequence[str], states: set[int]) -> list[int] | None:
    """Return the leaves of an op that are in its terms without a state; they are zero in the linear part of the op.

    Of addmm(m, x, h) with the terms m and x * h, and the state h, this is the leaf of m.

    Args:
        terms: The terms of the op, from `TERMS`.
        names: The argument name of each leaf, from `leaf_names`.
        states: The leaves that depend on the states.

    Returns:
        None if the op is not linear in the states: a term has several of them, or one is in no term.
    """
    zeroed, states_in_terms = list[int](), set[int]()
    for term in terms:
        members = [i for i, name in enumerate(names) if name in term.split(" * ")]
        # "self * other" is one product; an argument like the `tensors` of a cat has one term for each tensor
        products = [members] if "*" in term else [[i] for i in members]
        for product in products:
            states_in_product = states.intersection(product)
            if len(states_in_product) > 1:
                return None
            states_in_terms |= states_in_product
            if not states_in_product:
                zeroed += product
    return zeroed if states <= states_in_terms else None


def _is_zero(x: Value) -> bool:
    """Return True for the number 0, or a tensor filled with it."""
    return bool((constant_value(x) if isinstance(x, Node) else x) == 0)
