"""Match the steps of an unrolled loop: equal nodes, and the operands in which they differ.

A `StepColumn` has one node of every step. An operand of a step is one of

    IndexRead     piece t of a tensor        select(x, dim, t), x[:, t * n : (t + 1) * n], unbind, split
    ColumnRef     a column's node of the same step, or of the previous step (lag 1)
    SeededList    an initial value at the first step, one of the above afterwards
    a node or a constant that all steps share

Matching creates no nodes, and takes time linear in the number of nodes of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.graph.call import is_tensor, node_shape
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.sizes import as_sizes
from sp_compile.passes.sharding.matchers import is_copy, is_same_call, match_piece, value_origin

aten = torch.ops.aten
COMMUTATIVE_OPS = (aten.add.Tensor, aten.mul.Tensor)


class NotALoop(Exception):
    """Error for values that are not those of a loop."""


@dataclass(eq=False)
class StepColumn:
    """Equal nodes of consecutive steps."""

    nodes: list[Node]  # one node per step
    first: int  # first step
    operands: list[Operand] = field(default_factory=list)  # leaves of the arguments

    @property
    def end(self) -> int:
        """Return the step after the last one."""
        return self.first + len(self.nodes)

    @property
    def node(self) -> Node:
        """Return a representative node."""
        return self.nodes[-1]


@dataclass(frozen=True)
class IndexRead:
    """Read of one index, or of one piece of several rows, at each step."""

    source: Node  # tensor
    dim: int  # dim that is indexed
    start: int  # index at step 0
    stride: int  # difference of the indices of successive steps
    rows: int  # rows of a piece, 0 for an index without the dim


@dataclass(frozen=True)
class ColumnRef:
    """Reference to the node of a column at an earlier or the same step."""

    column: StepColumn  # the column
    lag: int  # steps before the current one, 0 or 1


@dataclass(frozen=True)
class SeededList:
    """Operand whose first step is different."""

    seed: Any  # value at the first step
    rest: IndexRead | ColumnRef  # operand from the second step on


Operand: TypeAlias = Any  # IndexRead | ColumnRef | SeededList | Node | a constant


class LoopMatcher:
    """Matcher of the columns that compute a list of step values; `root` is the operand of the list."""

    def __init__(self, budget: int) -> None:
        self.columns: list[StepColumn] = []
        self.owner: dict[Node, tuple[StepColumn, int]] = {}
        self.budget = budget  # maximum number of nodes to examine
        self.root: Operand = None
        self.length = 0

    def read(self, values: Sequence[Node]) -> None:
        """Find the columns of a list of values.

        Args:
            values: One node per step.

        Raises:
            NotALoop: A node of a step belongs to no column.
        """
        if not values:
            raise NotALoop("no list")
        self.root, self.length = self._operand([_skip_views(v) for v in values], 0), len(values)
        for column in self.columns:  # grows during the loop
            self._read_arguments(column)

    def sort_columns(self) -> list[StepColumn]:
        """Return the columns in topological order within a step."""
        last = min((c.end for c in self.columns), default=1) - 1
        if any(c.first > last for c in self.columns):
            raise NotALoop("steps apart")
        return sorted(self.columns, key=lambda c: c.nodes[last - c.first])

    def operands(self) -> Iterator[Operand]:
        """Yield the operands of the root and of all columns; a SeededList yields its parts."""
        for operand in (self.root, *(x for c in self.columns for x in c.operands)):
            yield from (operand.seed, operand.rest) if isinstance(operand, SeededList) else (operand,)

    def _read_arguments(self, column: StepColumn) -> None:
        flat = [pytree.tree_flatten((n.args, n.kwargs)) for n in column.nodes]
        if any(spec != flat[0][1] for _, spec in flat[1:]):
            raise NotALoop("steps that differ in the structure of an op's arguments")
        leaves = [[_skip_views(x) for x in found] for found, _ in flat]
        if column.node.target in COMMUTATIVE_OPS and [isinstance(x, Node) for x in leaves[0]] == [True, False]:
            leaves[0] = leaves[0] if leaves[-1][1] == leaves[0][1] else leaves[0][::-1]  # 0.0 * x is x * 0.0
        column.operands = [self._operand(values, column.first) for values in zip(*leaves)]

    def _operand(self, values: Sequence[Any], first: int) -> Operand:
        head = values[0]
        if all(_is_same(v, head) for v in values[1:]):
            return head
        found = self._find_column(values, first) or _match_reading(values, first)
        if found is None and not self._are_similar(values):
            rest = values[1:]
            found = self._find_column(rest, first + 1) or _match_reading(rest, first + 1)
            if found is None and self._are_similar(rest) and len(rest) > 1:
                found = ColumnRef(self._column(rest, first + 1), 0)
            if found is None or (isinstance(head, Node) and not is_tensor(head)):
                raise NotALoop("steps that differ")
            return SeededList(head, found)
        return found or ColumnRef(self._column(values, first), 0)

    def _find_column(self, values: Sequence[Any], first: int) -> ColumnRef | None:
        """Return a reference to the column of the nodes, at the same or the previous step, or None."""
        owner = self.owner.get(values[0]) if isinstance(values[0], Node) else None
        if owner is None:
            return None
        column, step = owner
        column_values = column.nodes[step - column.first :][: len(values)]
        lag = first - step
        return ColumnRef(column, lag) if lag in (0, 1) and column_values == list(values) else None

    def _column(self, values: Sequence[Node], first: int) -> StepColumn:
        self.budget -= len(values)
        if self.budget < 0 or any(v in self.owner for v in values):
            raise NotALoop("a node is in several positions of its steps, or there are too many steps")
        column = StepColumn(list(values), first)
        self.columns.append(column)
        self.owner.update({v: (column, first + i) for i, v in enumerate(values)})
        return column

    def _are_similar(self, values: Sequence[Any]) -> bool:
        """Return True for calls of one pure op with results of one kind."""
        if any(not isinstance(v, Node) or v.op != "call_function" for v in values):
            return False
        head = values[0]
        if not is_pure(head) or any(v.target is not head.target for v in values):
            return False
        kind = _value_kind(head)
        return all(_value_kind(v) == kind for v in values)


def _skip_views(x: Any) -> Any:
    """Return the value before views that undo each other; copies are ordinary ops of the loop."""
    return x if is_copy(x) else value_origin(x)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    return type(a) is type(b) and bool(a == b)


def _value_kind(node: Node) -> Any:
    value = node.meta.get("val")
    return (as_sizes(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else type(value)


def _match_reading(values: Sequence[Any], first: int) -> IndexRead | Node | None:
    """Return reads of one dim of one tensor, in order or reverse; the node if all indices are equal."""
    reads = [indexed_read(v) for v in values]
    head = reads[0]
    if head is None or any(r is None or r[1:3] != head[1:3] or not is_same_call(r[0], head[0]) for r in reads):
        return None
    at = [r[3] for r in reads if r is not None]
    stride = at[1] - at[0] if len(at) > 1 else 1
    if any(b - a != stride for a, b in pairwise(at)) or stride not in (-1, 0, 1):
        return None
    source, dim, rows = head[:3]
    return values[0] if stride == 0 else IndexRead(source, dim, at[0] - stride * first, stride, rows)


def indexed_read(node: Any) -> tuple[Node, int, int, int] | None:
    """Return (source, dim, rows, index) of a node that reads one index (rows = 0) or one piece of a dim."""
    piece = match_piece(node)
    if piece is None or not isinstance(piece.start, int) or not isinstance(piece.length, int) or not piece.length:
        return None
    if not isinstance(node_shape(piece.source)[piece.dim], int):
        return None
    rows = piece.length if piece.keeps_dim else 0
    if rows > 1 and (piece.step != 1 or piece.start % rows):
        return None
    return piece.source, piece.dim, rows, piece.start // max(rows, 1)
