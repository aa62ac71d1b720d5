"""Find loops that have no list of results, and add the list of the states or of the summands of all steps.

    for t in range(S):                                    for t in range(S):
        h = a[:, t] * h + b[:, t]                ->           hs.append(a[:, t] * hs[t - 1] + b[:, t])
        loss = loss + f(h, x[:, t])                           losses.append(f(hs[t], x[:, t]))
    return h, loss                                        return stack(hs)[-1], loss + stack(losses).sum(0)

`reroll.py` matches the list as a loop, or removes it. A *state* reads the same node of the previous step through the
same operands of the same ops, its *path*. From a node after the read of the last index, such as b[:, S - 1], the path
leads back through all steps. A path of one addition belongs to a sum. Takes time linear in the number of nodes. Bytes
moved: none.

Unchanged: states that the program puts into a list, sums of several summands a step, and loops that read only weights,
as those over layers do.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.node_info import is_weight
from sp_compile.passes.graph.sizes import as_sizes

from .lists import LISTS, MIN_ROWS
from .steps import are_similar, match_piece_read

aten = torch.ops.aten
MAX_NODES = 96  # nodes of one step that are examined
MAX_CHAINS = 3  # of one loop
READS = (aten.select.int, aten.slice.Tensor, operator.getitem)


class _Move(NamedTuple):
    """One op of a path, and the index of the operand through which the path continues."""

    target: Any  # op
    operand: int  # index in its input nodes


class StateChain(NamedTuple):
    """Values of one state, first step first."""

    values: list[Node]  # value of each step
    is_sum: bool  # True if each value is the previous one plus a summand, and is read by the next one only
    is_reverse: bool  # True if the first step reads the last index

    def add_list(self, editor: GraphEditor) -> tuple[Node, Node]:
        """Emit the list of the chain after its last value, and the last value as a function of the list.

        Args:
            editor: The editor of the graph.

        Returns:
            The stack and the value, which no node reads yet.
        """
        last = self.values[-1]
        with editor.insert_after(last):
            if not self.is_sum:
                stack = self._stack(editor, self.values)
                return stack, editor.compute(aten.select.int, (stack, 0, 0 if self.is_reverse else -1), last)
            initial, summands = self._summands()
            stack = self._stack(editor, summands)
            total = editor.compute(aten.sum.dim_IntList, (stack, [0]), last)
            return stack, editor.compute(aten.add.Tensor, (total, initial), last)

    def _stack(self, editor: GraphEditor, values: list[Node]) -> Node:
        """Emit the stack of values in the order of the indices that their steps read."""
        ordered = values[::-1] if self.is_reverse else values
        return editor.compute(aten.stack.default, (ordered, 0), self.values[-1])

    def is_exact(self) -> bool:
        """Return True if the summands are floating-point tensors of one shape and dtype, and all factors are 1."""
        _, summands = self._summands()
        if any(value.kwargs for value in self.values) or not all(map(is_tensor, summands)):
            return False
        kinds = {(as_sizes(x.meta["val"].shape), x.meta["val"].dtype) for x in (*summands, *self.values)}
        return len(kinds) == 1 and self.values[-1].meta["val"].is_floating_point()

    def _summands(self) -> tuple[Any, list[Any]]:
        """Return the value before the first step, a number or a node, and the summand of each step."""
        operand = int(self.values[1].args[0] is not self.values[0])  # index of the argument that is the previous value
        summands = [value.args[1 - operand] for value in self.values]
        initial = self.values[0].args[operand]
        if not isinstance(summands[0], Node):  # torch traces 0.0 + x as x + 0.0
            initial, summands[0] = summands[0], initial
        return initial, summands


def find_state_chains(nodes: Iterable[Node]) -> list[list[StateChain]]:
    """Return the states and sums of loops that no list of the graph contains, the likeliest one of each loop first.

    Args:
        nodes: The nodes of the graph, in order.
    """
    reads: dict[tuple[Any, ...], list[tuple[int, Node]]] = {}  # of one dim of one tensor: (index of the piece, node)
    for node in nodes:
        read = match_piece_read(node) if node.target in READS and node.users else None
        if read is not None and not is_weight(read.source):
            reads.setdefault((read.source, read.dim, read.rows), []).append((read.position, node))
    found, seen = [], set[Node]()  # seen: last values, as a loop reads several tensors
    for group in reads.values():
        for steps, stride in _split_loops(sorted(group, key=lambda read: min(read[1].users))):
            chains = [chain for chain in _match_states(steps, is_reverse=stride < 0) if chain.values[-1] not in seen]
            seen.update(chain.values[-1] for chain in chains)
            found += [chains] if chains else []
    return found


def _split_loops(reads: list[tuple[int, Node]]) -> Iterator[tuple[list[list[Node]], int]]:
    """Yield the reads of each loop over one tensor, by step, and the stride of their indices, 1 or -1.

    A step may read its index or piece several times.

    Args:
        reads: The index and the node of each read, in the order of the steps.
    """
    steps: list[list[Node]] = []  # of the loop in progress
    stride = last_index = 0
    for index, node in reads:
        difference = index - last_index
        if steps and not difference:
            steps[-1].append(node)
        elif steps and abs(difference) == 1 and stride in (0, difference):
            steps.append([node])
            stride = difference
        else:
            if len(steps) >= MIN_ROWS:
                yield steps, stride
            steps, stride = [[node]], 0
        last_index = index
    if len(steps) >= MIN_ROWS:
        yield steps, stride


def _match_states(steps: list[list[Node]], is_reverse: bool) -> list[StateChain]:
    """Return possible states of the loop whose steps have these reads, the last one in the graph first."""
    chains: dict[Node, StateChain] = {}  # by last value
    start, end = _find_bounds(steps)
    for node in _reach_readers(steps[-1], end):
        for path in _find_paths(node, start):
            values = _follow_path(node, path, len(steps))
            if len(values) < max(MIN_ROWS, len(steps) - 1) or any(u.target in LISTS for v in values for u in v.users):
                continue
            # A value after the last one of a known state is of a loop after it, or of a last step with fewer rows.
            is_sum = all(move.target is aten.add.Tensor for move in path)
            is_sum = is_sum and all(len(value.users) == 1 for value in values[:-1])
            chain = StateChain(values, is_sum, is_reverse)
            if not chains.keys() & values and (not is_sum or (len(path) == 1 and chain.is_exact())):
                chains[node] = chain
    return sorted(chains.values(), key=lambda chain: chain.values[-1], reverse=True)[:MAX_CHAINS]


def _find_bounds(steps: list[list[Node]]) -> tuple[Node, Node]:
    """Return a node before those of the last two steps, and one after those of the last step.

    These limit the search. The number of nodes is equal in all steps, so the last step ends before the second one.
    """
    third_last, second_last, last = (min(min(read.users) for read in step) for step in steps[-3:])
    node = end = last
    while node is not second_last and end.op != "output":
        node, end = node.prev, end.next
    return third_last, end


def _reach_readers(starts: list[Node], end: Node) -> Iterator[Node]:
    """Yield up to MAX_NODES nodes up to `end` that depend on some nodes, the nearest ones first."""
    waiting, seen = deque(starts), {*starts}
    while waiting and len(seen) <= MAX_NODES:
        for node in waiting.popleft().users:
            if node not in seen and node.op == "call_function" and node <= end:
                seen.add(node)
                waiting.append(node)
                yield node


def _find_paths(node: Node, start: Node) -> Iterator[tuple[_Move, ...]]:
    """Yield the paths from a node to the nearest nodes from `start` on that may be its value of the previous step."""
    paths: dict[Node, tuple[_Move, ...]] = {node: ()}
    waiting = deque([node])
    while waiting and len(paths) <= MAX_NODES:
        reader = waiting.popleft()
        for i, operand in enumerate(reader.all_input_nodes):
            if operand in paths or operand.op != "call_function" or operand < start:
                continue
            paths[operand] = (*paths[reader], _Move(reader.target, i))
            waiting.append(operand)
            if _is_same_kind(operand, node):
                yield paths[operand]


def _follow_path(node: Node, path: tuple[_Move, ...], length: int) -> list[Node]:
    """Return the nodes that a path passes from step to step, first step first, `length` nodes at most."""
    values = [node]
    while len(values) < length:
        value = values[-1]
        for move in path:
            operands = value.all_input_nodes
            if value.target is not move.target or move.operand >= len(operands):
                return values[::-1]
            value = operands[move.operand]
        if not _is_same_kind(value, node):
            break
        values.append(value)
    return values[::-1]


def _is_same_kind(a: Node, b: Node) -> bool:
    """Return True for tensors that one column of a loop may have."""
    return is_tensor(a) and are_similar((a, b))
