"""Replace a tensor that a loop writes piece by piece by the list of its pieces, each one row or several.

    y = zeros(B, S, D)                                    ys = []
    for t in range(S):                                    for t in range(S):
        y[:, t] = a[:, t] * y[:, t - 1] + b[:, t]   ->        ys.append(a[:, t] * ys[t - 1] + b[:, t])
                                                          y = stack(ys, 1)

In a functional graph the left side is a *chain* of select_scatter or slice_scatter: each *write* of a piece reads the
result of the previous one, its *base*. `reroll.py` then matches the list as a loop. Readers of a piece just written
read the piece itself. One piece may keep its initial value, and the last one may have fewer rows. Bytes moved: none.
Unchanged: pieces written twice, and chains with other readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.sharding.matchers import value_origin, value_readers

from .steps import match_piece_read

aten = torch.ops.aten
MIN_ROWS = 5  # written by a loop; fewer are columns of boxes and the like
MIN_PIECES = 3  # of several rows; fewer are the parts of a joined sequence
LISTS = (aten.stack.default, aten.cat.default)  # ops that make a list
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)


@dataclass(frozen=True)
class PieceWrite:
    """Write of one row or several to a tensor; its result is the tensor after the write."""

    base: Node  # tensor before the write
    piece: Node  # the rows
    dim: int  # dim that counts rows
    start: int  # index of the first row, not negative
    rows: int  # number of rows; 0 for one row without the dim


class _WriteChain(NamedTuple):
    """Writes to one tensor, one after the other, along the same dim."""

    pieces: dict[int, Node]  # the piece of the last write to each start
    size: int  # rows of a piece; the last one may have fewer
    first: Node  # the first write of the chain
    written_twice: str | None = None  # reason for a refusal, if a piece is written twice
    early_read: str | None = None  # the same, if another op reads the tensor before `first`, where the chain then ends


@register_pass
class StackWrittenRows(CanonicalPass):
    """Replacement of the chains of writes of one graph."""

    requires = frozenset({"normalized"})
    provides = frozenset({"canonical", "stacked rows"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Redirect reads of written pieces to the pieces, then replace complete chains of writes by stacks.

        A chain is y.select_scatter(row, dim, index) for one index after the other, as `y[:, t] = row` in a loop gives.
        """
        matches = {n: _match_write(n) for n in gm.graph.nodes}
        self.writes = {n: write for n, write in matches.items() if write is not None}
        self.budget = 4 * len(gm.graph.nodes)  # remaining number of readers to examine, to limit the time of the pass
        # The last write first: a read of another row moves to the tensor before that write, which is examined next.
        redirected = [self._redirect_reads(n, write) for n, write in reversed(self.writes.items())]
        # A chain ends in a write that is not continued by a next write.
        stacked = [self._stack_chain(n) for n in self.writes if n.users and not self._is_continued(n)]
        return sum(redirected) + sum(stacked)

    def _redirect_reads(self, node: Node, write: PieceWrite) -> bool:
        """Redirect each read of one piece of a tensor after a write of such a piece.

        A read of the written piece becomes that piece; a read of another one reads the tensor before the write. A step
        of a loop then reads the value of the previous step itself. Returns True if a read is redirected.
        """
        changed = False
        for user in value_readers(node):
            read = match_piece_read(user)  # its `rows` is 0 if it has no dim of the rows, as x[:, t]
            self.budget -= 1  # limits the time of the pass (`apply`)
            if read is None or (read.dim, read.rows) != (write.dim, write.rows) or self.budget < 0:
                continue
            start = read.position * max(read.rows, 1)  # pieces of reads begin at multiples of their size
            if start == write.start and write.piece.meta["val"].dtype == user.meta["val"].dtype:
                self.replace(user, write.piece)
                changed = True
            elif abs(start - write.start) >= max(write.rows, 1):  # without a common row
                user.replace_input_with(user.args[0], write.base)
                changed = True
        return changed

    def _is_continued(self, node: Node) -> bool:
        """Return True if the only reader of a tensor after a write is the next write to it."""
        next_writes = [self.writes.get(user) for user in value_readers(node)]
        return len(next_writes) == 1 and next_writes[0] is not None and next_writes[0].base is node

    def _stack_chain(self, last: Node) -> bool:
        """Replace the chain of writes that ends in the write `last` by a stack or cat of its rows.

        Returns False if the chain is not replaced. The reason is reported only for a chain that looks like a loop.
        """
        chain = self._read_chain(last)
        if chain is None:
            return False
        value, last_write, pieces = last.meta["val"], self.writes[last], chain.pieces
        dim, extent = last_write.dim, value.shape[last_write.dim]
        starts = range(0, extent, chain.size)
        missing = set(starts) - set(pieces)
        reason = chain.written_twice  # the first reason why the chain is not replaced, or None
        if any(piece.meta["val"].dtype != value.dtype for piece in pieces.values()):
            reason = reason or f"their dtype differs from {value.dtype}, the dtype of the list"
        if len(missing) > 1:
            reason = reason or chain.early_read or f"{len(missing)} pieces of {len(starts)} are never written"
        if reason is not None and self._is_loop(last, chain.size):
            self.note_refusal(last, f"pieces that are written one by one are not stacked: {reason}")
        is_list = chain.first is not last and (chain.size == 1 or len(starts) >= MIN_PIECES)  # not a single write
        if reason is not None or not is_list:
            return False
        with self.graph.inserting_before(last):
            for start in missing:  # at most one, which keeps its initial value
                bounds = start, min(start + chain.size, extent)
                pieces[start] = self._initial_piece(self.writes[chain.first].base, last_write, *bounds)
            target = aten.cat.default if last_write.rows else aten.stack.default
            self.replace(last, self.compute(target, ([pieces[i] for i in sorted(pieces)], dim), last))
        return True

    def _read_chain(self, last: Node) -> _WriteChain | None:
        """Return the chain of writes that ends in the write `last`, or None if it contains writes of other kinds.

        All pieces have a number of rows and a dim, or no dim, and begin at multiples of this number. A piece at the end
        of the tensor may have fewer rows.
        """
        last_write, node = self.writes[last], last
        extent = last.meta["val"].shape[last_write.dim]
        rows = max(last_write.rows, self._rows_before(last))
        pieces: dict[int, Node] = {}
        written_twice: str | None = None
        while True:  # from the last write back
            write = self.writes[node]
            is_whole = write.rows == rows or (write.rows < rows and write.start + write.rows == extent)
            has_dim = bool(write.rows) == bool(rows)
            if write.dim != last_write.dim or not is_whole or not has_dim or write.start % max(rows, 1):
                return None
            if write.start in pieces:
                written_twice = f"the piece at {write.start} is written twice"
            pieces.setdefault(write.start, write.piece)
            chain = _WriteChain(pieces, max(rows, 1), node, written_twice)
            if write.base not in self.writes:
                return chain
            if len(value_readers(write.base)) > 1:
                early_read = f"another op reads {write.base.name} before all pieces are written"
                return chain._replace(early_read=early_read)
            node = write.base

    def _rows_before(self, node: Node) -> int:
        """Return the number of rows of the write before a write, 0 if there is none; a last piece may have fewer."""
        before = self.writes.get(self.writes[node].base)
        return before.rows if before is not None else 0

    def _is_loop(self, last: Node, size: int) -> bool:
        """Return True if the chain of writes that ends in `last` looks like a loop, so that a refusal is reported.

        It looks like one if it has at least MIN_ROWS writes, which write most rows, and does not continue along another
        dim.

        Args:
            last: The last write.
            size: The number of rows of a piece.
        """
        if any(self.writes[user].base is last for user in value_readers(last) if user in self.writes):
            return False
        dim, num_writes, node = self.writes[last].dim, 0, last
        while node in self.writes and self.writes[node].dim == dim:
            num_writes += 1
            node = self.writes[node].base
        return num_writes >= MIN_ROWS and 2 * num_writes * size > last.meta["val"].shape[dim]

    def _initial_piece(self, base: Node, write: PieceWrite, start: int, end: int) -> Node:
        """Emit the rows `start` to `end` of the tensor before all writes, with the dims of the piece of a write."""
        if write.rows:
            return self.compute(aten.slice.Tensor, (base, write.dim, start, end), base)
        return self.compute(aten.select.int, (base, write.dim, start), base)


def stacked_values(stack: Node) -> tuple[list[Node], Node | None]:
    """Return the operands of a stack, or of a cat of pieces of one size, as the values of a loop's steps.

    A last piece of a cat that has fewer rows is returned apart, else None. The list is [] if it has fewer than two
    values, or if some are the same node.

    Args:
        stack: The stack or cat.
    """
    values, short = list(stack.args[0]), None
    if stack.target is aten.cat.default:
        dim, shapes = OpCall(stack)["dim"], [node_shape(v) for v in values]
        if len(set(map(len, shapes))) > 1:  # empty 1d tensors, which torch ignores
            return [], None
        sizes = [shape[dim] for shape in shapes]
        if all(isinstance(size, int) for size in sizes) and sizes[-1] < sizes[0]:
            short = values.pop()
            sizes.pop()
        if len(set(sizes)) > 1:
            return [], None
    are_distinct = len(set(values)) == len(values)
    return (values, short) if are_distinct and len(values) > 1 else ([], None)


def is_loop_like(values: list[Node]) -> bool:
    """Return True if the last step reads a node of the step before, as in a loop with a state.

    The nodes of a step are those after the value of the step before and up to its own, in the order of the graph. Only
    such a list is reported if it is not replaced.

    Args:
        values: The list.
    """
    if len(values) < 3 or any(v.op != "call_function" for v in values):
        return False
    third_last, second_last, last = sorted(values)[-3:]
    node = second_last.next
    while True:  # over the nodes of the last step
        if any(third_last < x <= second_last for x in node.all_input_nodes):
            return True
        if node is last:
            return False
        node = node.next


def _match_write(node: Node) -> PieceWrite | None:
    """Match a write by select_scatter or slice_scatter of neighboring rows; return None for symbolic sizes."""
    if node.op != "call_function" or node.target not in SCATTERS:
        return None
    call = OpCall(node)
    base, piece = (value_origin(x) for x in call.operands)  # without copies and views that cancel each other
    dim, keeps_dim = call.dim(), node.target is aten.slice_scatter.default
    extent, rows = node.meta["val"].shape[dim], piece.meta["val"].shape[dim] if keeps_dim else 0
    start = (call["start"] or 0) if keeps_dim else call["index"]
    if not all(isinstance(x, int) for x in (extent, rows, start)) or (keeps_dim and (not rows or call["step"] != 1)):
        return None
    if start < 0:
        start = max(start + extent, 0)  # a slice starts at the first row if `start` is before it
    return PieceWrite(base, piece, dim, start, rows)
