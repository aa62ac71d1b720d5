"""Rewrite unrolled loops over time as scans and batched ops.

    for t in range(S):                                   h = sp.linear_scan(a, b, h0, 1)     (B, S, D)
        h = a[:, t] * h + b[:, t]                  ->    y = h * c                           (B, S, D)
        ys.append(h * c[:, t])
    y = stack(ys, 1)

S equal nodes of a list become one node on all steps (steps.py, vectorize.py). A state that is affine in the previous
state becomes a scan (recurrence.py). Steps are read by select, slices, unbind or split, in order or in reverse. The
first step may be different (an initial state). Rows written into a tensor form a list, too (lists.py). Other readers of
the value of one step select it. Takes time linear in the number of nodes. Bytes moved: none.

Unchanged: steps that differ, states that are not affine in the previous state, random draws, changes of the grad mode
between steps, lists without a recurrence, and loops of which only the last state is used.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import PYTHON_STATE_CALLS, enter_autocast, exit_autocast, set_grad_enabled
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.modes import restore_autocast
from sp_compile.passes.graph.mutation import is_written

from .recurrence import AffineValue, ScanBuilder
from .steps import ColumnRef, IndexRead, LoopMatcher, NotALoop, Operand, SeededList, StepColumn, indexed_read
from .vectorize import BatchedValue, Value

aten = torch.ops.aten
PENDING = object()


class LoopBuilder:
    """Builder of one loop at the insertion point: scans for states, batched ops for all else.

    A column that reads the previous state waits for the scan of that state. If the state depends on the column, the
    column is represented as an affine function of the state.

    The dim of the steps is in the order of the tensors they read; `reverse` is True if the last step comes first.
    """

    def __init__(self, editor: ScanBuilder, loop: LoopMatcher) -> None:
        self.editor, self.loop = editor, loop
        reads = [x for x in loop.operands() if isinstance(x, IndexRead)]
        self.reverse = bool(reads) and all(x.stride < 0 for x in reads)
        self.scans = 0
        self.values: dict[StepColumn, Value] = {}
        self.forms: dict[StepColumn, AffineValue] = {}
        self.seeds: dict[StepColumn, Any] = {}
        self.known: dict[Any, Value] = {}
        self.columns: list[StepColumn] = []
        for column in loop.sort_columns():
            if all(self._is_shared(x) for x in column.operands):
                self.values[column] = column.nodes[0]
            else:
                self.columns.append(column)

    def _is_shared(self, x: Operand) -> bool:
        """Return True if the operand is constant over the steps."""
        if isinstance(x, ColumnRef):
            return isinstance(self.values.get(x.column), Node)
        return not isinstance(x, IndexRead | SeededList)

    def compute_shared(self) -> set[Node]:
        """Return the nodes that must be computed before any step."""
        found = [x.source if isinstance(x, IndexRead) else x for x in self.loop.operands()]
        return {x for x in (*found, *self.values.values()) if isinstance(x, Node)}

    def run(self) -> BatchedValue:
        """Compute every column and return the list of the loop.

        Raises:
            NotALoop: A column cannot be computed.
        """
        waiting = self.columns
        while waiting:
            left = [c for c in waiting if not self._compute_column(c)]
            if len(left) == len(waiting):
                raise NotALoop("a state that is not affine in the previous state")
            waiting = left
        found = self.value(self.loop.root, 0, self.loop.length)
        if not isinstance(found, BatchedValue):
            raise NotALoop("the same at every step")
        return found

    def step(self, node: Node) -> Node:
        """Select the node of one step from its column."""
        column, step = self.loop.owner[node]
        batched = self.values[column]
        if not isinstance(batched, BatchedValue):
            raise NotALoop("an op outside the loop reads an op with several results")
        index = column.end - 1 - step if self.reverse else step - column.first
        return self.editor.compute(aten.select.int, (batched.node, batched.time, index), node)

    def _compute_column(self, column: StepColumn) -> bool:
        form = self.forms.get(column)
        if form is not None and form.state not in self.values:
            return False
        leaves = [self._leaf(x, column) for x in column.operands]
        if any(x is PENDING for x in leaves):
            return False
        if not any(isinstance(x, AffineValue) for x in leaves):
            self.values[column] = self.editor.batch(column.node, leaves)
            return True
        form = self.editor.affine(column.node, leaves)
        if form is None:
            return False
        self.forms[column] = form
        if form.state is not column:
            return False
        self.values[column] = self.editor.scan_states(form, self.seeds[column], self.reverse)
        self.scans += 1
        return True

    def _leaf(self, x: Operand, column: StepColumn) -> Any:
        """Return a value, an AffineValue, or NOT_YET."""
        rest = x.rest if isinstance(x, SeededList) else x
        if not isinstance(rest, ColumnRef) or rest.column in self.values:
            return self.value(x, column.first, column.end)
        source = rest.column
        if isinstance(x, SeededList):
            before = self.seeds.setdefault(source, x.seed)
            starts = rest.lag == 1 and source.first == column.first and _is_same_value(before, x.seed)
            return AffineValue(source, 1, 0) if starts else PENDING
        together = rest.lag == 0 and (source.first, source.end) == (column.first, column.end)
        return self.forms.get(source, PENDING) if together else PENDING

    def value(self, x: Operand, first: int, end: int) -> Value:
        """Return an operand at the steps first, ..., end - 1."""
        key = (x, first, end)
        if isinstance(x, IndexRead | ColumnRef | SeededList) and key not in self.known:
            self.known[key] = self._materialize(x, first, end)
        return self.known[key] if isinstance(x, IndexRead | ColumnRef | SeededList) else x

    def _materialize(self, x: Operand, first: int, end: int) -> Value:
        if isinstance(x, IndexRead):
            return self._read_column(x, first, end)
        if isinstance(x, SeededList):
            rest = self.value(x.rest, first + 1, end)
            if not isinstance(rest, BatchedValue):
                raise NotALoop("a single first step")
            return self.editor.append_step(x.seed, rest, self.reverse)
        found, column = self.values[x.column], x.column
        first, end = first - x.lag, end - x.lag
        if (first, end) == (column.first, column.end) or isinstance(found, Node):
            return found
        if not isinstance(found, BatchedValue) or first < column.first or end > column.end:
            raise NotALoop("steps outside the loop")
        start = column.end - end if self.reverse else first - column.first
        return self.editor.narrow(found, start, end - first)

    def _read_column(self, x: IndexRead, first: int, end: int) -> BatchedValue:
        ends = sorted((x.start + x.stride * first, x.start + x.stride * (end - 1)))
        rows = max(x.rows, 1)
        batched = BatchedValue(x.source, x.dim)
        found = self.editor.narrow(batched, ends[0] * rows, (ends[1] + 1 - ends[0]) * rows)
        if x.rows:
            found = self.editor.split_rows(found, x.rows)
        return self.editor.flip(found) if (x.stride > 0) == self.reverse else found


def _is_same_value(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Node) and not isinstance(b, Node) and bool(a == b))


STATE_OPS = {set_grad_enabled, enter_autocast, exit_autocast, *PYTHON_STATE_CALLS}


@register_pass
class RerollLoops(CanonicalPass, ScanBuilder):
    """Replacement of the unrolled loops of one graph."""

    requires = frozenset({"normalized", "stacked rows"})
    provides = frozenset({"canonical", "rolled loops"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        self.budget = 4 * len(gm.graph.nodes)
        self.emitted: list[Node] = []
        self.rolled: set[Node] = set()  # nodes that replaced loops
        lists = [n for n in self.graph.nodes if n.target in (aten.stack.default, aten.cat.default)]
        lists.sort(key=lambda n: -len(n.args[0]))  # an outer loop before the lists of its body
        return sum(bool(n.users) and self._roll(n) for n in lists)

    def emit(self, *args: Any, **kwargs: Any) -> Node:
        """Append a node and record it."""
        self.emitted.append(super().emit(*args, **kwargs))
        return self.emitted[-1]

    def _roll(self, listed: Node) -> bool:
        values, reasons = _listed_values(listed), []
        for turned in (False, True):
            loop, self.emitted = LoopMatcher(self.budget), []
            try:
                loop.read(values[::-1] if turned else values)
                self._rewrite(listed, loop, turned)
                return True
            except NotALoop as reason:
                self._erase_unused()
                reasons.append(str(reason))  # the exception itself would keep every frame of the compilation alive
            finally:
                self.budget = loop.budget
        if _is_chain(values):
            self.note_refusal(listed, f"{len(values)} steps are not a scan: {reasons[values[0] > values[-1]]}")
        return False

    def _erase_unused(self) -> None:
        """Erase the emitted nodes that have no users."""
        for node in reversed(self.emitted):
            if not node.users:
                self.graph.erase_node(node)

    def _rewrite(self, listed: Node, loop: LoopMatcher, turned: bool) -> None:
        operands = list(loop.operands())
        reads_rolled = any(isinstance(x, IndexRead) and x.source in self.rolled for x in operands)
        if not reads_rolled and not any(isinstance(x, ColumnRef) and x.lag for x in operands):
            raise NotALoop("no recurrence")
        roll = LoopBuilder(self, loop)
        steps = [n for c in roll.columns for n in c.nodes]
        owned = set(steps)
        readers = [(u, n) for n in steps for u in n.users if u is not listed and u not in owned]
        anchor = _find_anchor(roll.compute_shared(), owned, [listed, *(u for u, _ in readers)])
        with self.insert_after(anchor), restore_autocast(anchor):
            found = roll.run()
            if not reads_rolled and not roll.scans:
                raise NotALoop("no recurrence")
            result = self._arrange(found if turned == roll.reverse else self.flip(found), listed)
            fresh = [roll.step(n) for _, n in readers]
        for (user, node), one in zip(readers, fresh):
            user.replace_input_with(node, one)
        listed.replace_all_uses_with(result)
        self._erase_steps(listed, loop)

    def _arrange(self, found: BatchedValue, listed: Node) -> Node:
        """Return the values of all steps in the layout of the list."""
        dim = OpCall(listed)["dim"] % listed.meta["val"].ndim
        stacked = self.move_steps(found, dim).node
        if listed.target is aten.stack.default:
            return stacked
        if stacked.target is aten.unsqueeze.default and stacked.args[1] == dim + 1:
            return stacked.args[0]
        return self.compute(aten.flatten.using_ints, (stacked, dim, dim + 1), listed)

    def _erase_steps(self, listed: Node, loop: LoopMatcher) -> None:
        """Erase the steps and the nodes that only they read."""
        self.graph.erase_node(listed)
        inputs = [i for n in loop.owner for i in n.all_input_nodes if i not in loop.owner]
        for node in sorted(loop.owner, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        self._erase_unused()
        cut = {i.args[0]: None for i in inputs if i.target is operator.getitem}
        self.drop(*inputs)
        for pieces in cut:
            self._split_pieces(pieces)
        self.rolled.update(n for n in self.emitted if n.users)

    def _split_pieces(self, pieces: Node) -> None:
        """Let remaining readers of an unbind or a split select their piece, so that no rank needs all pieces."""
        for user in list(pieces.users):
            found = indexed_read(user)
            if found is not None:
                source, dim, rows, index = found
                args = (index * rows, (index + 1) * rows) if rows else (index,)
                target = aten.slice.Tensor if rows else aten.select.int
                with self.insert_after(pieces):
                    self.replace(user, self.compute(target, (source, dim, *args), user))


def _listed_values(listed: Node) -> list[Node]:
    """Return the values of a stack, or of a cat of pieces of one size."""
    values = list(listed.args[0])
    if listed.target is aten.cat.default:
        dim = OpCall(listed)["dim"]
        if len({node_shape(v)[dim] for v in values}) > 1:
            return []
    return values if len(set(values)) == len(values) > 1 else []


def _is_chain(values: list[Node]) -> bool:
    """Return True if the last value depends on the previous one through nodes made for the previous one."""
    if len(values) < 3 or any(v.op != "call_function" for v in values):
        return False
    first, before, last = sorted(values)[-3:]
    node = before.next
    while True:
        if any(first < i <= before for i in node.all_input_nodes):
            return True
        if node is last:
            return False
        node = node.next


def _find_anchor(shared: set[Node], owned: set[Node], readers: list[Node]) -> Node:
    """Return the last shared node; after it, and before any reader, all steps can be computed at once."""
    if not shared:
        raise NotALoop("its steps read nothing")
    if any(is_written(node) for node in shared):
        raise NotALoop("a shared value is written in place")
    anchor, tainted = max(shared), set(owned)
    if any(reader < anchor for reader in readers):
        raise NotALoop("a step is read before all shared values are computed")
    node, last = min(anchor, *owned), max(readers)
    while node is not last:
        if node.target in STATE_OPS:
            raise NotALoop("grad mode or autocast changes between its steps")
        if node not in owned and any(i in tainted for i in node.all_input_nodes):
            tainted.add(node)
        node = node.next
    if tainted & shared:
        raise NotALoop("a shared value depends on a step")
    return anchor
