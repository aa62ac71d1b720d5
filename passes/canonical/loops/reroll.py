"""Rewrite unrolled loops over time as scans and batched ops.

    for t in range(S):                                   h = sp.linear_scan(a, b, h0, 1)     (B, S, D)
        h = a[:, t] * h + b[:, t]                  ->    y = h * c                           (B, S, D)
        ys.append(h * c[:, t])
    y = stack(ys, 1)

The operands of a stack or cat are the *list* of a loop, one value per *step*. S equal nodes of the steps are a *column*
and become one node on all steps (steps.py, vectorize.py). A *state* is a column that reads its own node of the previous
step, and a value at the first one, its *seed*. If it is affine in the previous state, a * state + b, it becomes a scan
(recurrence.py). Nodes that the steps read and that no step computes are *shared*. Steps are read by select, slices,
unbind or split, in order or in reverse. The first step may be different (an initial state). Rows written into a tensor
form a list, too (lists.py), and so do states and sums of which only the last value is read (final_states.py). Other
readers of the value of one step select it. A last piece of fewer rows, as a loop over chunks has, is no step: it reads
the state after the others. Takes time linear in the number of nodes. Bytes moved: none.

Unchanged: steps that differ, states that are not affine in the previous state, random draws, changes of the grad mode
between steps, and lists without a recurrence.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import PYTHON_STATE_CALLS, enter_autocast, exit_autocast, set_grad_enabled
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape, parse_overloads
from sp_compile.passes.graph.modes import restore_autocast
from sp_compile.passes.graph.mutation import is_written
from sp_compile.passes.sharding.matchers import constant_value, match_piece

from .coupled import CoupledStates, find_cycle, reference_of
from .final_states import StateChain, find_state_chains
from .lists import LISTS, MIN_ROWS, is_loop_like, stacked_values
from .recurrence import AffineValue, ScanBuilder
from .steps import ColumnRef, IndexRead, LoopMatcher, NotALoop, Operand, SeededList, StepColumn, is_same_seed
from .vectorize import BatchedValue, Value

aten = torch.ops.aten
PENDING = object()  # in place of an operand whose value is not emitted yet and that is not affine in a state


class LoopBuilder:
    """Builder of one loop at the insertion point: scans for states, batched ops for all other columns.

    `RerollLoops` creates one per matched loop. A *batched* value is that of all steps as one tensor. A column that
    reads the previous state waits for the scan of that state. If the state depends on the column, the column is
    represented as an affine function of the state.

    The dim of the steps is in the order of the tensors they read; `reverse` is True if the last step comes first.
    """

    def __init__(self, editor: ScanBuilder, loop: LoopMatcher) -> None:
        self.editor, self.loop = editor, loop
        reads = [x for x in loop.operands() if isinstance(x, IndexRead)]
        self.reverse = bool(reads) and all(x.stride < 0 for x in reads)
        self.scans = 0  # number of emitted scans
        # Values of computed columns: a BatchedValue; a list of these for an op with several results; or a node if the
        # value is equal at all steps.
        self.values: dict[StepColumn, Value] = {}
        self.forms: dict[StepColumn, AffineValue] = {}  # of columns that are affine in a state, before its scan
        self.seeds: dict[StepColumn, Any] = {}  # initial values of states
        self.operand_values: dict[Any, Value] = {}  # (operand, first step, end) -> its value at these steps
        self.columns: list[StepColumn] = []  # columns whose values differ between the steps
        for column in loop.sort_columns():
            if all(self._is_shared(x) for x in column.operands):
                self.values[column] = column.nodes[0]
            else:
                self.columns.append(column)

    def shared_nodes(self) -> set[Node]:
        """Return the nodes outside of the loop that its steps read; the batched ops must be inserted after them."""
        sources = [x.source if isinstance(x, IndexRead) else x for x in self.loop.operands()]
        return {x for x in (*sources, *self.values.values()) if isinstance(x, Node)}

    def _is_shared(self, x: Operand) -> bool:
        """Return True if the operand has the same value at every step."""
        if isinstance(x, ColumnRef):
            # A column that differs between steps has a BatchedValue, or no value yet.
            return isinstance(self.values.get(x.column), Node)
        return not isinstance(x, IndexRead | SeededList)

    def run(self) -> BatchedValue:
        """Emit the ops that compute every column for all steps, and return the list of the loop as one value.

        Its entries are in the order of the tensors that the steps read.

        Raises:
            NotALoop: A column cannot be computed.
        """
        waiting = self.columns
        while waiting:
            still_waiting = [c for c in waiting if not self._compute_column(c)]
            if len(still_waiting) == len(waiting):  # no column can be computed alone: states depend on each other
                self._scan_together(waiting)
            waiting = [c for c in still_waiting if c not in self.values]
        result = self.value(self.loop.root, 0, self.loop.length)
        if not isinstance(result, BatchedValue):
            raise NotALoop("the same at every step")
        return result

    def select_step(self, node: Node) -> Node:
        """Emit the value of one step, from that of all steps, for a reader outside of the loop.

        Args:
            node: The node of the step, which the loop replaces.
        """
        column, step = self.loop.owner[node]
        batched = self.values[column]
        if isinstance(batched, list):  # one BatchedValue for each result of an op such as topk
            raise NotALoop("an op outside the loop reads an op with several results")
        # The column has the steps first, ..., end - 1; find the index of this step in the dim of the steps.
        index = column.end - 1 - step if self.reverse else step - column.first
        return self.editor.compute(aten.select.int, (batched.node, batched.time, index), node)

    def _compute_column(self, column: StepColumn) -> bool:
        """Compute a column for all steps and record its value in `values`; return False if it has to wait.

        If an operand is the previous value of a state, which is not known yet, the column first gets a form in `forms`,
        a * state + b. The form of the state itself, in its previous value, defines its scan. After the scan, the other
        columns are computed from its values.
        """
        form = self.forms.get(column)
        if form is not None and form.state not in self.values:  # it waits for the scan of the state
            return False
        operands = [self._operand_value(x, column) for x in column.operands]
        if any(x is PENDING for x in operands):
            return False
        if not any(isinstance(x, AffineValue) for x in operands):
            self.values[column] = self.editor.batch(column.node, operands)
            return True
        form = self.editor.affine(column.node, operands)
        if form is None:  # not affine in the state: the column waits, and `_scan_together` may compute it
            return False
        self.forms[column] = form
        is_recurrence = form.state is column and form.lag == 1
        if not is_recurrence:
            return False
        self.values[column] = self.editor.scan_states(form, self.seeds[column], self.reverse)
        self.scans += 1
        return True

    def _scan_together(self, waiting: list[StepColumn]) -> None:
        """Compute states that depend on each other by one scan, and record their values.

        Raises NotALoop if there are none, or if an op between them is not linear.

        Args:
            waiting: The columns without a value.
        """
        body = find_cycle(waiting)
        seeds: dict[ColumnRef, Any] = {}  # (column, lag) -> the value that many steps before the first one
        if len({(column.first, column.end) for column in body}) > 1:
            raise NotALoop("a state that some steps do not have")
        # `_body_operand` also adds the initial values to `seeds`.
        operands = [[self._body_operand(x, column, body, seeds) for x in column.operands] for column in body]
        self.values.update(CoupledStates(self.editor, body, operands, seeds).scan(self.reverse))
        self.scans += 1

    def _body_operand(self, x: Operand, column: StepColumn, body: list[StepColumn], seeds: dict[ColumnRef, Any]) -> Any:
        """Return an operand of a column for `CoupledStates`: a reference if it is a column of the body, else its value.

        For h[t] = f(h[t - 2]), the operand is SeededList(s2, SeededList(s1, reference to h with lag 2)): the values of
        h two steps and one step before the first one, which are added to `seeds`, and then h itself. Raises NotALoop if
        the initial values are missing, or if another operand has others.

        Args:
            x: The operand.
            column: The column that reads it.
            body: The columns that one scan computes.
            seeds: The initial values that are known so far, by (column, lag).
        """
        reference = reference_of(x)
        if reference is None or reference.column not in body:
            return self.value(x, column.first, column.end)
        for lag in range(reference.lag, 0, -1):
            if not isinstance(x, SeededList):
                raise NotALoop("a state without an initial value")
            seed = seeds.setdefault(ColumnRef(reference.column, lag), x.seed)
            if not is_same_seed(seed, x.seed):
                raise NotALoop("a state with several initial values")
            x = x.later
        if x is not reference:  # more initial values than the lag has
            raise NotALoop("a state with several initial values")
        return reference

    def _operand_value(self, x: Operand, column: StepColumn) -> Any:
        """Return the value of an operand at all steps of a column if it is known, or else its form.

        The form is an AffineValue, a * state + b, where the state is that of the same step or the previous one (lag 1).
        PENDING if neither is known yet.

        For h = c * h + x, the operand h of the product, the previous state, has the form 1 * state + 0, and the operand
        c * h of the sum has that of the product, c * state + 0.
        """
        reference = reference_of(x)
        if reference is None or reference.column in self.values:
            return self.value(x, column.first, column.end)
        source, lag = reference.column, reference.lag
        if lag > 1:
            return PENDING
        if isinstance(x, SeededList):
            # The first step reads an initial value, the seed, and later steps the source. It is a state if the seed is
            # in place of the value before the first step of the source, and all readers have the same seed.
            seed = self.seeds.setdefault(source, x.seed)
            is_state = column.first - lag == source.first - 1 and is_same_seed(seed, x.seed)
            return AffineValue(source, 1, 0, lag=lag) if is_state else PENDING
        # Another column, which depends on a state: its form at the steps that this column reads.
        form, first, end = self.forms.get(source), column.first - lag, column.end - lag
        if form is None or form.lag + lag > 1 or first < source.first or source.end < end:
            return PENDING
        return replace(self._narrow_form(form, source, first, end), lag=form.lag + lag)

    def _narrow_form(self, form: AffineValue, source: StepColumn, first: int, end: int) -> AffineValue:
        """Return the form of a column, a * state + m @ state + b, for its steps first, ..., end - 1 only."""
        start = source.end - end if self.reverse else first - source.first  # index of the first one in the values

        def narrow(x: Value) -> Value:
            """Return a coefficient at these steps; numbers and shared nodes are equal at all steps."""
            return self.editor.narrow(x, start, end - first) if isinstance(x, BatchedValue) else x

        return replace(form, a=narrow(form.a), b=narrow(form.b), m=narrow(form.m))

    def value(self, x: Operand, first: int, end: int) -> Value:
        """Return the value of an operand at the steps first, ..., end - 1; its ops are emitted once for all columns."""
        if not isinstance(x, IndexRead | ColumnRef | SeededList):
            return x
        key = (x, first, end)
        if key not in self.operand_values:
            self.operand_values[key] = self._materialize(x, first, end)
        return self.operand_values[key]

    def _materialize(self, x: IndexRead | ColumnRef | SeededList, first: int, end: int) -> Value:
        """Emit the ops that compute an operand at the steps first, ..., end - 1, and return its value."""
        if isinstance(x, IndexRead):
            return self._read_steps(x, first, end)
        if isinstance(x, SeededList):
            later = self.value(x.later, first + 1, end)
            if not isinstance(later, BatchedValue):  # a node: all steps but the first one have the same value
                raise NotALoop("a single first step")
            return self.editor.add_first_step(x.seed, later, is_last=self.reverse)
        # A column, of which the operand reads the steps `lag` earlier.
        value, column = self.values[x.column], x.column
        first, end = first - x.lag, end - x.lag
        if (first, end) == (column.first, column.end) or isinstance(value, Node):  # a node is equal at all steps
            return value
        if not isinstance(value, BatchedValue) or first < column.first or end > column.end:
            raise NotALoop("steps outside the loop")
        start = column.end - end if self.reverse else first - column.first
        return self.editor.narrow(value, start, end - first)

    def _read_steps(self, x: IndexRead, first: int, end: int) -> BatchedValue:
        """Emit the slice of a tensor that the steps first, ..., end - 1 read, as one value of these steps.

        Each step reads one index of the tensor (`x.rows` is 0), or a piece of several rows. Successive steps read
        neighboring indices or pieces: `x.stride` is 1 or -1.
        """
        lowest, highest = sorted((x.start + x.stride * first, x.start + x.stride * (end - 1)))  # of the indices
        rows, pieces = max(x.rows, 1), BatchedValue(x.source, x.dim)
        missing = -node_shape(x.source)[x.dim] % rows  # rows that the last piece lacks
        if missing:  # pad it: shards of all pieces are cut between pieces, those of some pieces are not
            pieces = self.editor.split_rows(self.editor.append_zeros(pieces, missing), rows)
            pieces = self.editor.narrow(pieces, lowest, highest + 1 - lowest)
        else:
            pieces = self.editor.narrow(pieces, lowest * rows, (highest + 1 - lowest) * rows)
            pieces = self.editor.split_rows(pieces, rows) if x.rows else pieces
        is_opposite_order = (x.stride > 0) == self.reverse  # to that of the loop's other values
        return self.editor.flip(pieces) if is_opposite_order else pieces


CONSTANTS_LIKE = parse_overloads("zeros_like ones_like full_like new_zeros new_ones new_full")
# Ops that change the state of the interpreter, between which no step may move.
STATE_OPS = {set_grad_enabled, enter_autocast, exit_autocast, *PYTHON_STATE_CALLS}


@register_pass
class RerollLoops(CanonicalPass, ScanBuilder):
    """Replacement of the unrolled loops of one graph."""

    requires = frozenset({"normalized", "stacked rows"})
    provides = frozenset({"canonical", "rolled loops"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace every stack or cat of values that the steps of a loop compute; return the number of loops."""
        self.budget = 4 * len(gm.graph.nodes)  # remaining number of nodes to examine
        self.emitted: list[Node] = []  # nodes of the loop in progress
        self.rolled: set[Node] = set()  # nodes that replaced loops
        self._separate_constants()
        lists = [n for n in self.graph.nodes if n.target in LISTS]
        # Longer lists first: an outer loop usually has more steps than a list in its body has values. If a recurrence
        # in the body were replaced first, each step would have its own scan, and a state that passes through a scan is
        # not known to be affine in its previous value, so that the outer loop would remain.
        lists.sort(key=lambda n: -len(n.args[0]))
        # A list without users is unused, or was erased with the steps of a replaced loop.
        replaced = sum(bool(n.users) and self._replace_loop(n) for n in lists)
        self.budget = 4 * len(gm.graph.nodes)
        for chains in find_state_chains(self.graph.nodes):
            refusals: dict[Node, str] = {}  # by the last value of a possible state
            count = sum(self._replace_chain(chain, refusals) for chain in chains)
            replaced += count
            if refusals and not count:  # the values between states have states only as they are read
                node = max(refusals, key=lambda x: "affine" in refusals[x])
                self.note_refusal(node, refusals[node])
        return replaced

    def _separate_constants(self) -> None:
        """Replace constants of which each step has one, such as zeros_like(h), by ones that do not read the state."""
        constants: dict[Any, list[Node]] = {}
        for node in self.graph.nodes:
            if node.target in CONSTANTS_LIKE and all(isinstance(size, int) for size in node_shape(node)):
                kind = constant_value(node), node_shape(node), node.meta["val"].dtype
                constants.setdefault(kind, []).append(node)
        for (number, shape, dtype), nodes in constants.items():
            for node in nodes if len(nodes) >= MIN_ROWS and number is not None else ():
                options = {"dtype": dtype, "device": node.meta["val"].device}
                with self.graph.inserting_before(node):
                    self.replace(node, self.compute(aten.full.default, (list(shape), number), node, options))

    def emit(self, *args: Any, **kwargs: Any) -> Node:
        """Append a node as `GraphEditor.emit` does, and record it for `_erase_unused`."""
        self.emitted.append(super().emit(*args, **kwargs))
        return self.emitted[-1]

    def _replace_loop(self, stack: Node, refusals: dict[Node, str] | None = None) -> bool:
        """Replace the loop that computes the operands of a stack or cat; return False if no loop does.

        Args:
            stack: The stack or cat.
            refusals: Receives the reason for a refusal; None to note it.
        """
        values, short = stacked_values(stack)
        reasons: dict[bool, str] = {}  # why each attempt fails, by `reverse`
        splits: list[Node] = []  # of states
        for reverse in (False, True):  # the first step computes the first operand, or the last one
            loop, self.emitted = LoopMatcher(self.budget), []
            try:
                loop.read(values[::-1] if reverse else values)
                self._rewrite(stack, loop, reverse, short)
                return True
            except NotALoop as reason:
                self._erase_unused()
                reasons[reverse] = str(reason)  # the exception itself would keep every frame of the compilation alive
                splits += [node for column in loop.columns if not is_tensor(column.node) for node in column.nodes]
            finally:
                self.budget = loop.budget
        selected = [self._select_pieces(split) for split in splits]  # an op with several results is not linear
        if any(selected):
            return self._replace_loop(stack, refusals)
        if is_loop_like(values):
            is_reverse = values[0] > values[-1]  # the order in which the program computes them
            text = f"{len(values)} steps are not a scan: {reasons[is_reverse]}"
            if refusals is None:
                self.note_refusal(stack, text)
            else:
                refusals[max(values)] = text
        return False

    def _replace_chain(self, chain: StateChain, refusals: dict[Node, str]) -> bool:
        """Replace a loop without a list; return False if its states or summands are no loop."""
        last = chain.values[-1]
        if not all(value.users for value in chain.values):  # erased with another state of the loop
            return False
        stack, final = chain.add_list(self)
        last.replace_all_uses_with(final, delete_user_cb=lambda user: user is not stack and user is not final)
        if not self._replace_loop(stack, refusals):
            self.replace(final, last)
            return False
        if chain.is_sum:  # no step of the loop reads it
            self.drop(last)
        return True

    def _erase_unused(self) -> None:
        """Erase the emitted nodes without users: all nodes if the loop is not replaced, else unused ones."""
        for node in reversed(self.emitted):
            if not node.users:
                self.graph.erase_node(node)

    def _rewrite(self, stack: Node, loop: LoopMatcher, reverse: bool, short: Node | None) -> None:
        """Replace a matched loop. Raises NotALoop if it has no state, or a column cannot be computed.

        Args:
            stack: The stack or cat of the list.
            loop: The columns of the loop.
            reverse: True if the first step computes the last operand of the stack.
            short: A last piece of fewer rows than those of the steps, or None.
        """
        operands = list(loop.operands())
        # Steps without a state are replaced only if they read the results of a replaced loop.
        reads_rolled = any(isinstance(x, IndexRead) and x.source in self.rolled for x in operands)
        if not reads_rolled and not any(isinstance(x, ColumnRef) and x.lag for x in operands):
            raise NotALoop("no recurrence")
        builder = LoopBuilder(self, loop)
        steps = [n for c in builder.columns for n in c.nodes]
        step_set = set(steps)
        # (reader, node): reads of a node of one step outside of the loop
        outer_reads = [(user, n) for n in steps for user in n.users if user is not stack and user not in step_set]
        anchor = _find_anchor(builder.shared_nodes(), step_set, [stack, *(user for user, _ in outer_reads)])
        with self.insert_after(anchor), restore_autocast(anchor):
            values = builder.run()
            if not reads_rolled and not builder.scans:  # steps read earlier ones, as y[t] + y[t - 1], without a state
                raise NotALoop("no recurrence")
            # `reverse`: the list has the last step first; `builder.reverse`: `values` have it first.
            result = self._arrange(values if reverse == builder.reverse else self.flip(values), stack, short)
            step_values = [builder.select_step(n) for _, n in outer_reads]
        for (user, node), step_value in zip(outer_reads, step_values):
            user.replace_input_with(node, step_value)
        stack.replace_all_uses_with(result)
        self._erase_steps(stack, loop)

    def _arrange(self, values: BatchedValue, stack: Node, short: Node | None) -> Node:
        """Return the values of all steps, and of the short last piece if any, with the dims of their stack or cat."""
        dim = OpCall(stack)["dim"] % stack.meta["val"].ndim
        stacked = self.move_steps(values, dim).node
        if short is not None:
            return self._append_piece(stacked, short, dim, stack)
        if stack.target is aten.stack.default:
            return stacked
        # A cat joins the dim of the steps and the rows of each step, dims `dim` and `dim + 1`.
        if stacked.target is aten.unsqueeze.default and stacked.args[1] == dim + 1:  # one row per step
            return stacked.args[0]
        return self.compute(aten.flatten.using_ints, (stacked, dim, dim + 1), stack)

    def _append_piece(self, pieces: Node, short: Node, dim: int, stack: Node) -> Node:
        """Return the rows of pieces, which have the dims `dim` (their number) and `dim + 1`, and of a last, short one.

        The short piece is padded and becomes one more piece, so that shards can be cut between pieces.
        """
        rows, total = node_shape(pieces)[dim + 1], node_shape(stack)[dim]
        with self.graph.inserting_before(stack):  # after the short piece
            last = self.append_zeros(BatchedValue(short, dim), rows - node_shape(short)[dim]).node
            last = self.compute(aten.unsqueeze.default, (last, dim), short)
            joined = self.compute(aten.cat.default, ([pieces, last], dim), stack)
            joined = self.compute(aten.flatten.using_ints, (joined, dim, dim + 1), stack)
            return self.compute(aten.slice.Tensor, (joined, dim, 0, total), stack)

    def _erase_steps(self, stack: Node, loop: LoopMatcher) -> None:
        """Erase the replaced stack, the steps without other readers, and the nodes that only they read."""
        self.graph.erase_node(stack)
        inputs = [i for n in loop.owner for i in n.all_input_nodes if i not in loop.owner]
        for node in sorted(loop.owner, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        self._erase_unused()
        # The unbinds and splits whose results the steps read, each once, in order.
        splits = {i.args[0]: None for i in inputs if i.target is operator.getitem}
        self.drop(*inputs)  # those that no other node reads
        for split in splits:
            self._select_pieces(split)
        self.rolled.update(n for n in self.emitted if n.users)

    def _select_pieces(self, split: Node) -> bool:
        """Replace each result of an unbind or split by a select or slice, so that no rank needs all pieces."""
        users = list(split.users)
        for user in users:
            piece = match_piece(user)  # of several rows, or an index of an unbind, which removes the dim
            if piece is not None:
                positions = (piece.start, piece.start + piece.length) if piece.keeps_dim else (piece.start,)
                target = aten.slice.Tensor if piece.keeps_dim else aten.select.int
                with self.insert_after(split):
                    self.replace(user, self.compute(target, (piece.source, piece.dim, *positions), user))
        return bool(users) and not split.users


def _find_anchor(shared: set[Node], steps: set[Node], readers: list[Node]) -> Node:
    """Return the node after which all steps can be computed at once: the last shared node.

    Args:
        shared: The nodes outside of the loop that the steps read.
        steps: The nodes of all steps.
        readers: The nodes outside of the loop that read a step.

    Raises:
        NotALoop: A shared node depends on a step, a reader precedes a shared node, or the interpreter's state changes.
    """
    if not shared:
        raise NotALoop("its steps read nothing")
    if any(is_written(node) for node in shared):
        raise NotALoop("a shared value is written in place")
    anchor, dependent = max(shared), set(steps)  # fx compares nodes by their position in the graph
    if any(reader < anchor for reader in readers):
        raise NotALoop("a step is read before all shared values are computed")
    node, last = min([anchor, *steps]), max(readers)  # a list of pieces of a replaced loop has no steps
    while node is not last:  # over the nodes from the first step to the last reader
        if node.target in STATE_OPS:
            raise NotALoop("grad mode or autocast changes between its steps")
        if node not in steps and any(i in dependent for i in node.all_input_nodes):
            dependent.add(node)
        node = node.next
    if dependent & shared:
        raise NotALoop("a shared value depends on a step")
    return anchor
