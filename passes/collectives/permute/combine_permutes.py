"""Pack independent exchanges into one, and merge dims before an exchange.

    q' = exchange(q); k' = exchange(k); v' = exchange(v); attention(q', k', v')

Exchanges are packed if they have the same dims, ranks and dtype, and none depends on another. Dims that are merged
after an exchange are merged before it.

    all_to_all_permute(x [b, S, h, d], 1, 2).flatten(2)   ->   all_to_all_permute(x.flatten(2), 1, 2)

An exchange receives n blocks of the gathered dims, [n, h * d, b * s]: transposed, the operand of a matmul. With
separate h and d they are [n, h, b, s, d]. There, n * h * d positions have no common stride, so that flatten copies.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.group_names import is_collective
from sp_compile.passes.graph.call import graph_tangents
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.edit import GraphEditor
from sp_compile.passes.graph.mutation import is_mutation, is_pure
from sp_compile.passes.graph.sizes import as_sizes, is_same_size, size_product

from .arrangement import ArrangementTracker, IndexMap
from .match_permutes import PERMUTE, downstream_moves, erase_chain, exclusive_chain

aten = torch.ops.aten


class PackExchanges(Pass):
    """Pass that packs independent exchanges of the same two dims, at the position of the last one."""

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        groups = _combinable_exchanges(gm.graph)
        for members in groups:
            _move_users_after(members)
            self._combine(members)
        return len(groups)

    def _combine(self, members: Sequence[Node]) -> None:
        _, scatter, gather, n, group = members[0].args
        frame = [1, n, 0, n]  # n positions, one per rank: equal shares of any size
        ndim = members[0].meta["val"].ndim
        with self.graph.inserting_before(members[-1]):
            args = ([m.args[0] for m in members], scatter % ndim, frame, gather % ndim, frame, n, group)
            both = self.compute(torch.ops.sp.all_to_all.default, args, members[-1])
            fresh = [self.compute(operator.getitem, (both, i), m) for i, m in enumerate(members)]
        self.note(both, f"{len(members)} exchanges in one", "packed")
        for member, piece in zip(members, fresh):
            self.replace(member, piece)


def _combinable_exchanges(graph: Graph) -> list[list[Node]]:
    """Return groups of exchanges that can be packed: no node between them depends on a member."""
    done = []
    backward = reachable_set(graph_tangents(graph), lambda n: n.users)  # which will be partitioned
    open_groups: dict[Any, list[Node]] = {}
    for node in [n for n in graph.nodes if n.target is PERMUTE]:
        key = (*_exchange_key(node), node in backward)
        if key in open_groups and _can_join(open_groups[key], node):
            open_groups[key].append(node)
        else:
            open_groups[key] = [node]
            done.append(open_groups[key])
    return [members for members in done if len(members) > 1]


def _exchange_key(node: Node) -> Any:
    """Return a key; exchanges with different keys need different messages."""
    x, scatter, gather, n, group = node.args
    value = x.meta["val"]
    scatter, gather = scatter % value.ndim, gather % value.ndim
    rows = as_sizes(value.shape)[gather]
    return value.ndim, scatter, gather, rows, n, group, value.dtype, value.device


def _first_dependent(members: list[Node], last: Node) -> list[Node] | None:
    """Return the dependents of the members before the last exchange, or None if it is one of them."""
    found = reachable_set(members, lambda n: [user for user in n.users if user < last])
    return None if any(i in found for i in last.all_input_nodes) else sorted(found - set(members))


def _can_join(members: list[Node], node: Node) -> bool:
    waiting = _first_dependent(members, node)
    # Nodes with effects, and collectives, are not moved.
    return waiting is not None and all(is_pure(n) and not is_mutation(n) and not is_collective(n) for n in waiting)


def _move_users_after(members: list[Node]) -> None:
    """Move the users of the first members after the last one."""
    last = members[-1]
    for node in _first_dependent(members[:-1], last) or ():
        last.append(node)
        last = node


class MergeDimsBeforeExchange(Pass):
    """Pass that merges dims before an exchange in place of after it."""

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        return sum(self._rewrite(node) for node in gm.graph.find_nodes(op="call_function", target=PERMUTE))

    def _rewrite(self, node: Node) -> bool:
        for result in downstream_moves(node)[::-1]:
            chain = exclusive_chain(node, result)
            returned = any(user.op == "output" for user in result.users)  # an output keeps its layout
            groups = _merged_dims(node, result) if chain is not None and not returned else None
            if groups is not None and chain is not None and _rewrite_exchange(self, node, result, groups):
                erase_chain(self.graph, frozenset(chain))
                return True
        return False


def _merged_dims(node: Node, result: Node) -> list[list[int]] | None:
    """Return the exchange's result dims that form each dim of `result`, if gathered ones lead a merged dim."""
    index = IndexMap()
    before = index.tensor(as_sizes(node.meta["val"].shape))
    after = ArrangementTracker(index, {node: before}).tensor(result)
    if after is None or after.fixed:
        return None
    resolved = [index.resolve(dim) for dim in before.dims]
    place = {factors[0]: d for d, factors in enumerate(resolved) if len(factors) == 1}
    groups = [[place.get(factor, -1) for factor in index.resolve(dim)] for dim in after.dims]
    scatter, gather = (d % len(resolved) for d in node.args[1:3])
    leads = {group[0] for group in groups if group}
    merged = any(group[0] == gather and len(group) > 1 for group in groups if group)
    complete = all(groups) and sorted(d for group in groups for d in group) == list(range(len(resolved)))
    return groups if complete and merged and scatter in leads else None


def _rewrite_exchange(editor: GraphEditor, node: Node, result: Node, groups: list[list[int]]) -> bool:
    x, scatter, gather, n, group = node.args
    shape, order = as_sizes(x.meta["val"].shape), [d for dims in groups for d in dims]
    if all(is_same_size(size, 1) for size in shape[: scatter % len(shape)]):
        return False  # x is sent without a copy, and copied after it is received
    leads = [dims[0] for dims in groups]
    merged = [size_product(shape[d] for d in dims) for dims in groups]
    with editor.graph.inserting_before(node):
        try:
            if order != sorted(order):
                x = editor.compute(aten.permute.default, (x, order), node)
            x = editor.compute(aten.view.default, (x, editor.sizes.list(merged)), node)
        except (RuntimeError, ValueError):  # this would need a copy of x
            editor.drop(x)
            return False
        dims = [leads.index(d % len(shape)) for d in (scatter, gather)]
        fresh = editor.compute(PERMUTE, (x, *dims, n, group), result)
    result.replace_all_uses_with(fresh)
    return True
