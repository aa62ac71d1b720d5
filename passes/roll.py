"""The columns of a loop, each computed for all steps at once: states by scans, everything else by one op.

A column that reads a state of the step before waits for the scan of that state, unless the state is made of it: then
it is kept as an affine function of the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .affine import Affine, Scans
from .batch import Steps, Value
from .steps import Column, Loop, NotALoop, Operand, Read, Ref, Seeded

aten = torch.ops.aten
WAITS = object()


class Roll:
    """One loop, rolled up at the editor's insertion point.

    The dim that counts steps has the order of what they read: `reverse` if that is the last step first.
    """

    def __init__(self, editor: Scans, loop: Loop) -> None:
        self.editor, self.loop = editor, loop
        reads = [x for x in loop.operands() if isinstance(x, Read)]
        self.reverse = bool(reads) and all(x.stride < 0 for x in reads)
        self.scans = 0
        self.values: dict[Column, Value] = {}
        self.forms: dict[Column, Affine] = {}
        self.seeds: dict[Column, Any] = {}
        self.known: dict[Any, Value] = {}
        self.columns: list[Column] = []
        for column in loop.ordered():
            if all(self._is_shared(x) for x in column.operands):
                self.values[column] = column.nodes[0]
            else:
                self.columns.append(column)

    def _is_shared(self, x: Operand) -> bool:
        """Is it the same at every step?"""
        if isinstance(x, Ref):
            return isinstance(self.values.get(x.column), Node)
        return not isinstance(x, Read | Seeded)

    def shared(self) -> set[Node]:
        """What has to be computed before any step."""
        found = [x.source if isinstance(x, Read) else x for x in self.loop.operands()]
        return {x for x in (*found, *self.values.values()) if isinstance(x, Node)}

    def run(self) -> Steps:
        """Compute every column; the list of the loop. Raises NotALoop where that cannot be done."""
        waiting = self.columns
        while waiting:
            left = [c for c in waiting if not self._computed(c)]
            if len(left) == len(waiting):
                raise NotALoop("a state that is not affine in the one before")
            waiting = left
        found = self.value(self.loop.root, 0, self.loop.length)
        if not isinstance(found, Steps):
            raise NotALoop("the same at every step")
        return found

    def step(self, node: Node) -> Node:
        """The node of one step, taken from its column."""
        column, step = self.loop.owner[node]
        whole = self.values[column]
        if not isinstance(whole, Steps):
            raise NotALoop("several results")
        index = column.end - 1 - step if self.reverse else step - column.first
        return self.editor.compute(aten.select.int, (whole.node, whole.time, index), node)

    def _computed(self, column: Column) -> bool:
        form = self.forms.get(column)
        if form is not None and form.state not in self.values:
            return False
        leaves = [self._leaf(x, column) for x in column.operands]
        if any(x is WAITS for x in leaves):
            return False
        if not any(isinstance(x, Affine) for x in leaves):
            self.values[column] = self.editor.apply(column.node, leaves)
            return True
        form = self.editor.affine(column.node, leaves)
        if form is None:
            return False
        self.forms[column] = form
        if form.state is not column:
            return False
        self.values[column] = self.editor.scanned(form, self.seeds[column], self.reverse)
        self.scans += 1
        return True

    def _leaf(self, x: Operand, column: Column) -> Any:
        """A value, an Affine, or WAITS."""
        rest = x.rest if isinstance(x, Seeded) else x
        if not isinstance(rest, Ref) or rest.column in self.values:
            return self.value(x, column.first, column.end)
        source = rest.column
        if isinstance(x, Seeded):
            before = self.seeds.setdefault(source, x.seed)
            starts = rest.lag == 1 and source.first == column.first and _is(before, x.seed)
            return Affine(source, 1, 0) if starts else WAITS
        together = rest.lag == 0 and (source.first, source.end) == (column.first, column.end)
        return self.forms.get(source, WAITS) if together else WAITS

    def value(self, x: Operand, first: int, end: int) -> Value:
        """An operand of steps first, ..., end - 1."""
        key = (x, first, end)
        if isinstance(x, Read | Ref | Seeded) and key not in self.known:
            self.known[key] = self._made(x, first, end)
        return self.known[key] if isinstance(x, Read | Ref | Seeded) else x

    def _made(self, x: Operand, first: int, end: int) -> Value:
        if isinstance(x, Read):
            return self._reading(x, first, end)
        if isinstance(x, Seeded):
            rest = self.value(x.rest, first + 1, end)
            if not isinstance(rest, Steps):
                raise NotALoop("a first step alone")
            return self.editor.joined(x.seed, rest, self.reverse)
        found, column = self.values[x.column], x.column
        first, end = first - x.lag, end - x.lag
        if (first, end) == (column.first, column.end) or isinstance(found, Node):
            return found
        if not isinstance(found, Steps) or first < column.first or end > column.end:
            raise NotALoop("steps that were not taken")
        start = column.end - end if self.reverse else first - column.first
        return self.editor.narrowed(found, start, end - first)

    def _reading(self, x: Read, first: int, end: int) -> Steps:
        ends = sorted((x.start + x.stride * first, x.start + x.stride * (end - 1)))
        rows = max(x.rows, 1)
        whole = Steps(x.source, x.dim)
        found = self.editor.narrowed(whole, ends[0] * rows, (ends[1] + 1 - ends[0]) * rows)
        if x.rows:
            found = self.editor.in_pieces(found, x.rows)
        return self.editor.flipped(found) if (x.stride > 0) == self.reverse else found


def _is(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Node) and not isinstance(b, Node) and bool(a == b))
