"""Replace a tensor that a loop writes row by row by the list of its rows.

    y = zeros(B, S, D)                                    ys = []
    for t in range(S):                                    for t in range(S):
        y[:, t] = a[:, t] * y[:, t - 1] + b[:, t]   ->        ys.append(a[:, t] * ys[t - 1] + b[:, t])
                                                          y = stack(ys, 1)

In a functional graph the left side is a *chain* of select_scatter or slice_scatter: each *write* of a row reads the
result of the previous one, its *base*. `reroll.py` then matches the list as a loop. Readers of a row just written read
the row itself. One row at either end may keep its initial value. Bytes moved: none. Unchanged: rows written twice, and
chains with other readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.matchers import value_origin, value_readers

from .steps import match_piece_read

aten = torch.ops.aten
MIN_ROWS = 5  # written by a loop; fewer are columns of boxes and the like
SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default)


@dataclass(frozen=True)
class RowWrite:
    """Write of one row to a tensor; its result is the tensor after the write."""

    base: Node  # tensor before the write
    row: Node  # the row
    dim: int  # dim that counts rows
    index: int  # index of the row, not negative
    keeps_dim: bool  # True if the row has that dim, too


class _WriteChain(NamedTuple):
    """Writes to one tensor, one after the other, along the same dim."""

    rows: dict[int, Node]  # the row of the last write to each index
    first: Node  # the first write of the chain
    written_twice: str | None = None  # reason for a refusal, if a row is written twice
    early_read: str | None = None  # the same, if another op reads the tensor before `first`, where the chain then ends


@register_pass
class StackWrittenRows(CanonicalPass):
    """Replacement of the chains of writes of one graph."""

    requires = frozenset({"normalized"})
    provides = frozenset({"canonical", "stacked rows"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Redirect reads of written rows to the rows, then replace complete chains of writes by stacks.

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

    def _redirect_reads(self, node: Node, write: RowWrite) -> bool:
        """Redirect each read of one row of a tensor after a write.

        A read of the written row becomes that row; a read of another row reads the tensor before the write. A step of a
        loop then reads the value of the previous step itself. Returns True if a read is redirected.
        """
        changed = False
        for user in value_readers(node):
            read = match_piece_read(user)  # its `rows` is 1 if it keeps the dim, as x[:, t : t + 1] does, and else 0
            self.budget -= 1  # limits the time of the pass (`apply`)
            if read is None or (read.dim, read.rows) != (write.dim, int(write.keeps_dim)) or self.budget < 0:
                continue
            if read.position == write.index and write.row.meta["val"].dtype == user.meta["val"].dtype:
                self.replace(user, write.row)
                changed = True
            elif read.position != write.index:
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
        value, last_write, rows = last.meta["val"], self.writes[last], chain.rows
        dim, num_rows = last_write.dim, value.shape[last_write.dim]
        missing = set(range(num_rows)) - set(rows)
        reason = chain.written_twice  # the first reason why the chain is not replaced, or None
        if any(row.meta["val"].dtype != value.dtype for row in rows.values()):
            reason = reason or f"their dtype differs from {value.dtype}, the dtype of the list"
        if len(missing) > 1:
            reason = reason or chain.early_read or f"{len(missing)} rows of {num_rows} are never written"
        if reason is not None and self._is_loop(last):
            self.note_refusal(last, f"rows that are written one by one are not stacked: {reason}")
        if reason is not None or chain.first is last:  # a single write is no list
            return False
        with self.graph.inserting_before(last):
            for index in missing:  # at most one, which keeps its initial value
                rows[index] = self._initial_row(self.writes[chain.first].base, last_write, index)
            target = aten.cat.default if last_write.keeps_dim else aten.stack.default
            self.replace(last, self.compute(target, ([rows[i] for i in sorted(rows)], dim), last))
        return True

    def _read_chain(self, last: Node) -> _WriteChain | None:
        """Return the chain of writes that ends in the write `last`, or None if it contains writes along other dims."""
        last_write, node = self.writes[last], last
        rows: dict[int, Node] = {}
        written_twice: str | None = None
        while True:  # from the last write back
            write = self.writes[node]
            if (write.dim, write.keeps_dim) != (last_write.dim, last_write.keeps_dim):
                return None
            if write.index in rows:
                written_twice = f"row {write.index} is written twice"
            rows.setdefault(write.index, write.row)
            if write.base not in self.writes:
                return _WriteChain(rows, node, written_twice)
            if len(value_readers(write.base)) > 1:
                early_read = f"another op reads {write.base.name} before all rows are written"
                return _WriteChain(rows, node, written_twice, early_read)
            node = write.base

    def _is_loop(self, last: Node) -> bool:
        """Return True if the chain of writes that ends in `last` looks like a loop, so that a refusal is reported.

        It looks like one if it has at least MIN_ROWS writes, which write most rows, and does not continue along another
        dim.
        """
        if any(self.writes[user].base is last for user in value_readers(last) if user in self.writes):
            return False
        dim, num_writes, node = self.writes[last].dim, 0, last
        while node in self.writes and self.writes[node].dim == dim:
            num_writes += 1
            node = self.writes[node].base
        return num_writes >= MIN_ROWS and 2 * num_writes > last.meta["val"].shape[dim]

    def _initial_row(self, base: Node, write: RowWrite, index: int) -> Node:
        """Emit row `index` of the tensor before all writes, with the dims of the rows of a write."""
        if write.keeps_dim:
            return self.compute(aten.slice.Tensor, (base, write.dim, index, index + 1), base)
        return self.compute(aten.select.int, (base, write.dim, index), base)


def _match_write(node: Node) -> RowWrite | None:
    """Match the write of one row by select_scatter or slice_scatter; return None for other nodes or symbolic sizes."""
    if node.op != "call_function" or node.target not in SCATTERS:
        return None
    call = OpCall(node)
    base, row = (value_origin(x) for x in call.operands)  # without copies and views that cancel each other
    dim, keeps_dim = call.dim(), node.target is aten.slice_scatter.default
    extent = node.meta["val"].shape[dim]
    index = (call["start"] or 0) if keeps_dim else call["index"]
    if not isinstance(extent, int) or not isinstance(index, int) or (keeps_dim and row.meta["val"].shape[dim] != 1):
        return None
    if index < 0:
        index = max(index + extent, 0)  # a slice starts at the first row if `start` is before it
    return RowWrite(base, row, dim, index, keeps_dim)
