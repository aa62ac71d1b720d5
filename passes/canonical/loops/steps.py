"""Match the steps of an unrolled loop: equal nodes, and the operands in which they differ.

The *list* is one value per step, which a loop may compute. A *column* (`StepColumn`) has one node of every step,
without the first steps if these are different. For h = tanh(x[:, t]) + h, the columns are the selects, the tanhs and
the sums. An operand of a step is one of

    IndexRead     piece t of a tensor        select(x, dim, t), x[:, t * n : (t + 1) * n], unbind, split
    ColumnRef     a column's node of the same step, or of the previous step (lag 1)
    SeededList    an initial value at the first step, one of the above afterwards
    a node or a constant that all steps share

The *root* is the operand whose values are the list. `reroll.py` runs the matcher and builds the matched loops.

Matching creates no nodes, and takes time linear in the number of nodes of the loop. Any part of the matcher and of the
builder of loops raises `NotALoop` if the nodes are no loop; only `RerollLoops` catches it, and reports the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.graph.call import is_tensor, node_shape
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.sizes import as_sizes, is_same_shape, is_same_size
from sp_compile.passes.sharding.matchers import is_copy, is_same_call, match_piece, value_origin
from sp_compile.passes.sharding.rule import lookup_rule

aten = torch.ops.aten
MAX_LAG = 4  # steps from a value to its last reader
UNMATCHED = object()  # in place of an operand that is not matched yet
COMMUTATIVE_OPS = (aten.add.Tensor, aten.mul.Tensor)


class NotALoop(Exception):
    """Error for a list of values that no loop computes; its message is the reason in the report."""


@dataclass(eq=False)
class StepColumn:
    """Nodes of consecutive steps that call one op, with operands that differ by the step only."""

    nodes: list[Node]  # one node per step
    first: int  # first step with a node
    operands: list[Operand] = field(default_factory=list)  # leaves of the arguments

    @property
    def end(self) -> int:
        """Return the step after the last one."""
        return self.first + len(self.nodes)

    @property
    def node(self) -> Node:
        """Return the node of the last step, as a representative."""
        return self.nodes[-1]


@dataclass(frozen=True)
class IndexRead:
    """Read of one index, or of one piece of several rows, at each step."""

    source: Node  # tensor
    dim: int  # dim that is indexed
    start: int  # index at step 0
    stride: int  # difference of the indices of successive steps, 1 or -1
    rows: int  # rows of a piece, 0 for an index without the dim


@dataclass(frozen=True)
class ColumnRef:
    """Reference to the node of a column at an earlier or the same step."""

    column: StepColumn  # the column
    lag: int  # steps before the current one


@dataclass(frozen=True)
class SeededList:
    """Operand whose first step is different."""

    seed: Any  # value at the first step
    later: IndexRead | ColumnRef | SeededList  # operand from the second step on


class PieceRead(NamedTuple):
    """Read of one index of a dim, or of one of its equal pieces."""

    source: Node  # tensor
    dim: int  # dim that is indexed
    rows: int  # rows of a piece, 0 for an index without the dim
    position: int  # index of the row or of the piece


Operand: TypeAlias = Any  # IndexRead | ColumnRef | SeededList | Node | a constant


class LoopMatcher:
    """Matcher of the columns that compute a list; `read` finds them, for one loop per matcher."""

    def __init__(self, budget: int) -> None:
        self.columns: list[StepColumn] = []  # found columns
        self.owner: dict[Node, tuple[StepColumn, int]] = {}  # node -> its column and step
        self.deferred: list[tuple[StepColumn, int, Sequence[Any]]] = []  # (reader, index of the operand, its values)
        self.budget = budget  # remaining number of nodes to examine
        self.root: Operand = None  # operand whose values are the list
        self.length = 0  # number of steps

    def read(self, values: Sequence[Node]) -> None:
        """Find the columns that compute a list of values, from the list back to what all steps share.

        A column has one equal node of each step, such as all `tanh` of h = tanh(x[:, t]) + h. Sets `columns`, `root`
        (the operand whose values are the list) and `length`.

        Args:
            values: One node per step.

        Raises:
            NotALoop: A node of a step belongs to no column.
        """
        if not values:
            raise NotALoop("no list")
        # `_skip_views` skips views that undo each other, so that nodes with equal values are compared.
        listed = [_skip_views(v) for v in values]
        self.root, self.length = self._match_operand(listed, 0), len(values)
        if self.root is UNMATCHED:
            self.root = self._match_seeded(listed, 0, add=True)
        num_read = 0
        while num_read < len(self.columns) or self._match_deferred():
            for column in self.columns[num_read:]:
                num_read += 1
                self._read_arguments(column)
        for column in self.columns:
            if not all(_can_expand_seeds(column.node, i, x) for i, x in enumerate(column.operands)):
                raise NotALoop("an initial value of another shape")

    def sort_columns(self) -> list[StepColumn]:
        """Return the columns in the order of computation: that of their nodes of one step in the graph."""
        step = min((c.end for c in self.columns), default=1) - 1  # the last step of the column that ends first
        if any(c.first > step for c in self.columns):
            raise NotALoop("columns without a common step")
        return sorted(self.columns, key=lambda c: c.nodes[step - c.first])

    def operands(self) -> Iterator[Operand]:
        """Yield the root and the operands of all columns.

        For a SeededList, these are the value of the first step and the operand of the later ones.
        """
        for operand in (self.root, *(x for c in self.columns for x in c.operands)):
            while isinstance(operand, SeededList):
                yield operand.seed
                operand = operand.later
            yield operand

    def _read_arguments(self, column: StepColumn) -> None:
        """Match the operands of a column: one for each leaf (tensor or constant) of its nodes' arguments.

        New columns among them are appended to `columns`.
        """
        flat = [pytree.tree_flatten((n.args, n.kwargs)) for n in column.nodes]
        structures = [structure for _, structure in flat]
        if any(structure != structures[0] for structure in structures):
            raise NotALoop("steps that differ in the structure of an op's arguments")
        leaves = [[_skip_views(x) for x in step_leaves] for step_leaves, _ in flat]  # by step
        first_leaves, last_leaves = leaves[0], leaves[-1]
        has_number_second = [isinstance(x, Node) for x in first_leaves] == [True, False]
        if column.node.target in COMMUTATIVE_OPS and has_number_second and last_leaves[1] != first_leaves[1]:
            # The initial state 0.0 is a number, and torch traces 0.0 * x as x * 0.0: restore the order of other steps,
            # with the state first.
            first_leaves.reverse()
        for i, values in enumerate(zip(*leaves)):
            column.operands.append(self._match_operand(values, column.first))
            if column.operands[i] is UNMATCHED:
                self.deferred.append((column, i, values))

    def _match_operand(self, values: Sequence[Any], first: int) -> Operand:
        """Return the operand that has these values at the steps first, first + 1, ..., or UNMATCHED.

        It is a value that all steps share, a read of one index after the other, or a reference to a column, which is
        added if it is new.
        """
        seed, later_values = values[0], values[1:]
        if all(_is_same(v, seed) for v in later_values):
            return seed
        operand = self._find_column(values, first) or _match_index_read(values, first)
        if operand is not None:
            return operand
        # The first value may be the last state of another loop, which is similar to the states of this one, or another
        # element of a tensor, as in `last = x[:, 0]` before a loop with `last = x[:, t + 1]`.
        is_known = self._find_column(later_values, first + 1) is not None
        if is_known or not are_similar(values) or _has_other_constants(seed, later_values[0]):
            return UNMATCHED
        return ColumnRef(self._add_column(values, first), lag=0)

    def _match_deferred(self) -> bool:
        """Match the operands whose first value is different; return False if there are none left.

        All columns that the steps read with the same first step are known by now. An operand is a value of one of them
        at an earlier step, if possible. Else one column is added, which starts with the second step.
        """
        for add in (False, True):
            for item in self.deferred:
                column, i, values = item
                operand = self._match_seeded(values, column.first, add)
                if operand is not UNMATCHED:
                    column.operands[i] = operand
                    self.deferred.remove(item)
                    return True
        return False

    def _match_seeded(self, values: Sequence[Any], first: int, add: bool) -> Operand:
        """Return the operand that has another value at the first step, as an initial state, or UNMATCHED.

        Args:
            values: The values at the steps first, first + 1, ...
            first: The first step.
            add: True to add a column if no known one has the later values.

        Raises:
            NotALoop: A column is needed, and the values do not form one.
        """
        seed, later_values = values[0], values[1:]
        later: Operand = self._find_column(later_values, first + 1) or _match_index_read(later_values, first + 1)
        if later is None:
            later = self._find_delayed(later_values, first + 1)  # more than one initial value: h[t] = f(h[t - 2])
        # A single later value is similar to itself only, and would make a column of any two values.
        if later is None and add and are_similar(later_values) and len(later_values) > 1:
            later = ColumnRef(self._add_column(later_values, first + 1), lag=0)
        if later is None and not add:
            return UNMATCHED
        # The initial value must be a tensor (or a constant), as later ones are: a node may also be a list or an int.
        if later is None or (isinstance(seed, Node) and not is_tensor(seed)):
            raise NotALoop("steps that differ")
        return SeededList(seed, later)

    def _find_delayed(self, values: Sequence[Any], first: int) -> SeededList | None:
        """Match a read of a known column two or more steps earlier, after initial values in the first steps.

        In h[t] = f(h[t - 2]), the operand h[t - 2] is an initial value at steps 0 and 1, then h[0], h[1], .... The
        caller has removed the initial value of step 0.

        Args:
            values: The values at the steps first, first + 1, ...
            first: The first step of the values.

        Returns:
            The initial values in `values`, then the column; None if the values are not of this form.
        """
        for num_seeds in range(1, min(MAX_LAG, len(values) - 1)):
            operand: Any = self._find_column(values[num_seeds:], first + num_seeds, lags=(num_seeds + 1,))
            if operand is not None and all(map(is_tensor, values[:num_seeds])):
                for seed in reversed(values[:num_seeds]):
                    operand = SeededList(seed, operand)
                return operand
        return None

    def _find_column(self, values: Sequence[Any], first: int, lags: tuple[int, ...] = (0, 1)) -> ColumnRef | None:
        """Return a reference to the known column that has these nodes, or None.

        Args:
            values: The nodes that are read at the steps first, first + 1, ...
            first: The first step that reads.
            lags: The permitted lags, in steps from a node of the column to the step that reads it.
        """
        owner = self.owner.get(values[0]) if isinstance(values[0], Node) else None
        if owner is None:
            return None
        column, step = owner
        column_values = column.nodes[step - column.first :][: len(values)]
        lag = first - step
        return ColumnRef(column, lag) if lag in lags and column_values == list(values) else None

    def _add_column(self, values: Sequence[Node], first: int) -> StepColumn:
        """Add the column with these nodes at the steps first, first + 1, ..., and return it.

        Raises NotALoop if a node is in a column already, or if the budget of nodes to examine is exceeded.
        """
        self.budget -= len(values)
        if self.budget < 0 or any(v in self.owner for v in values):
            raise NotALoop("a node is in several positions of its steps, or there are too many steps")
        column = StepColumn(list(values), first)
        self.columns.append(column)
        self.owner.update({v: (column, first + i) for i, v in enumerate(values)})
        return column


def _can_expand_seeds(node: Node, leaf: int, operand: Operand) -> bool:
    """Return True if the initial values of an operand may be expanded to the shape of the later values.

    The op must then compute the same as with the initial values themselves: each expanded dim passes through it to the
    results. So it is for a state of shape (1, D) that is added to rows of shape (B, D), but not for a sum over dim 0.

    Args:
        node: The op at the last step.
        leaf: The index of the operand among the leaves of the op's arguments.
        operand: The operand.
    """
    leaves, seeds = pytree.tree_leaves((node.args, node.kwargs)), []
    while isinstance(operand, SeededList):
        seeds.append(operand.seed)
        operand = operand.later
    shape = node_shape(leaves[leaf]) if seeds else ()
    others = [node_shape(x) for x in seeds if is_tensor(x) and not is_same_shape(node_shape(x), shape)]
    if not others:
        return True
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or list(filter(is_tensor, leaves)) != call.operands:
        return False
    names = rule.operands[sum(map(is_tensor, leaves[:leaf]))]  # of the dims, by operand: rules have tensors only
    expanded = {
        name
        for other in others
        for d, name in enumerate(reversed(names))  # broadcasting compares dims from the last one on
        if d >= len(other) or not is_same_size(other[-1 - d], shape[-1 - d])
    }
    passing = {name for name in set.intersection(*map(set, rule.results)) if name and rule.kind(name) == "pass"}
    return expanded <= passing


def are_similar(values: Sequence[Any]) -> bool:
    """Return True for calls of one pure op with results of one shape, dtype and device, as a column needs.

    Args:
        values: Nodes, or constants.
    """
    if any(not isinstance(v, Node) or v.op != "call_function" for v in values):
        return False
    first = values[0]
    if not is_pure(first) or any(v.target is not first.target for v in values):
        return False
    kind = _value_kind(first)
    return all(_value_kind(v) == kind for v in values)


def is_same_seed(a: Any, b: Any) -> bool:
    """Return True if two seeds of a state are the same node or equal constants, also of two types.

    Args:
        a: A node or a constant.
        b: Another one.
    """
    return a is b or (not isinstance(a, Node) and not isinstance(b, Node) and bool(a == b))


def _has_other_constants(a: Node, b: Node) -> bool:
    """Return True if two calls differ in an argument that is a constant in both."""
    leaves = zip(*(pytree.tree_leaves((node.args, node.kwargs)) for node in (a, b)))
    return any(not isinstance(x, Node) and not isinstance(y, Node) and not _is_same(x, y) for x, y in leaves)


def _skip_views(x: Any) -> Any:
    """Return the value before views that undo each other; copies, which are ops of the loop, are not skipped."""
    return x if is_copy(x) else value_origin(x)


def _is_same(a: Any, b: Any) -> bool:
    """Return True for the same node, or equal constants of one type."""
    if isinstance(a, Node) or isinstance(b, Node):
        return a is b
    return type(a) is type(b) and bool(a == b)


def _value_kind(node: Node) -> Any:
    """Return what the values of all nodes of a column must have in common.

    For tensors, it is (shape, dtype, device); for other values, their type.
    """
    value = node.meta.get("val")
    return (as_sizes(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else type(value)


def _match_index_read(values: Sequence[Any], first: int) -> IndexRead | Node | None:
    """Match reads of one dim of one tensor at successive indices, such as x[:, 0], x[:, 1], ..., or in reverse.

    Args:
        values: The values at the steps first, first + 1, ...
        first: The first step.

    Returns:
        The reads as one operand; the first node if all read the same index, as a value that all steps share; or None.
    """
    reads = [read for read in map(match_piece_read, values) if read is not None]
    if len(reads) < len(values):
        return None
    source, dim, rows, start = reads[0]
    if any((read.dim, read.rows) != (dim, rows) or not is_same_call(read.source, source) for read in reads):
        return None
    strides = {b.position - a.position for a, b in pairwise(reads)} or {1}  # a single read has no differences
    if len(strides) > 1 or not strides <= {-1, 0, 1}:
        return None
    stride = strides.pop()
    # The start of an IndexRead is the index that step 0 would read.
    return values[0] if stride == 0 else IndexRead(source, dim, start - stride * first, stride, rows)


def match_piece_read(node: Any) -> PieceRead | None:
    """Match a read of one index of a dim, x[:, t], or of one piece of several rows, x[:, t * n : (t + 1) * n].

    The size of the dim must be an int. Returns None for other nodes.
    """
    piece = match_piece(node)
    if piece is None or not isinstance(piece.start, int) or not isinstance(piece.length, int) or not piece.length:
        return None
    if not isinstance(node_shape(piece.source)[piece.dim], int):
        return None
    rows = piece.length if piece.keeps_dim else 0  # 0: x[:, t], an index without the dim
    if rows > 1 and (piece.step != 1 or piece.start % rows):  # pieces start at multiples of their length
        return None
    # The position counts pieces: x[:, 6:9] is piece 2 of 3 rows. An index is its own position.
    return PieceRead(piece.source, piece.dim, rows, piece.start // max(rows, 1))
