"""Pack independent exchanges into one, and merge dims before an exchange, an sp::all_to_all_permute.

    q' = exchange(q); k' = exchange(k); v' = exchange(v); attention(q', k', v')

Exchanges are packed if they have the same dims, ranks and dtype, and none depends on another. Dims that are merged
after an exchange are merged before it.

    all_to_all_permute(x [b, S, h, d], 1, 2).flatten(2)   ->   all_to_all_permute(x.flatten(2), 1, 2)

An exchange receives n blocks, one from each rank, whose first dim is the gathered one. With separate h and d, memory
has the dims [n, h, b, s, d] (s = S / n): n * h and d are not adjacent, so that merging them afterwards copies. If they
are merged before the exchange, memory has [n, h * d, b, s], the transposed operand of a matmul, which needs no copy.
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
from sp_compile.passes.graph.mutation import is_mutation, is_pure
from sp_compile.passes.graph.sizes import as_sizes, is_same_size, size_product

from .arrangement import ArrangementTracker, FactorTable
from .match_permutes import PERMUTE, downstream_moves, erase_chain, exclusive_chain

aten = torch.ops.aten


class PackExchanges(Pass):
    """Pass that packs independent exchanges of the same two dims into one sp::all_to_all."""

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Pack all groups of independent exchanges of the same dims, and return the number of groups."""
        groups = _combinable_exchanges(gm.graph)
        for exchanges in groups:
            _move_users_after(exchanges)
            self._combine(exchanges)
        return len(groups)

    def _combine(self, exchanges: Sequence[Node]) -> None:
        """Replace a group of exchanges, all_to_all_permute nodes, by one sp::all_to_all before the last of them."""
        _, scatter, gather, n, group = exchanges[0].args
        frame = [1, n, 0, n]  # a frame of n positions, one for each rank: the shares are equal, of any size
        ndim = exchanges[0].meta["val"].ndim
        with self.graph.inserting_before(exchanges[-1]):
            args = ([node.args[0] for node in exchanges], scatter % ndim, frame, gather % ndim, frame, n, group)
            packed = self.compute(torch.ops.sp.all_to_all.default, args, exchanges[-1])
            results = [self.compute(operator.getitem, (packed, i), node) for i, node in enumerate(exchanges)]
        self.note(packed, f"{len(exchanges)} exchanges in one", "packed")
        for node, result in zip(exchanges, results):
            self.replace(node, result)


def _combinable_exchanges(graph: Graph) -> list[list[Node]]:
    """Return groups of two and more exchanges that can be packed, each in the order of the graph.

    An exchange joins the last group with its key (`_exchange_key`), or starts a new one.
    """
    groups: list[list[Node]] = []
    # A partitioner separates forward and backward, so no group has exchanges of both.
    backward = reachable_set(graph_tangents(graph), lambda n: n.users)
    last_groups: dict[Any, list[Node]] = {}  # the last group of each key
    for node in [n for n in graph.nodes if n.target is PERMUTE]:
        key = (*_exchange_key(node), node in backward)
        if key in last_groups and _can_join(last_groups[key], node):
            last_groups[key].append(node)
        else:
            last_groups[key] = [node]
            groups.append(last_groups[key])
    return [exchanges for exchanges in groups if len(exchanges) > 1]


def _exchange_key(node: Node) -> Any:
    """Return the properties that packed exchanges have in common, as a dict key.

    `sp::all_to_all` sends tensors in one exchange if they also have the same size of the gathered dim.
    """
    x, scatter, gather, n, group = node.args
    value = x.meta["val"]
    scatter, gather = scatter % value.ndim, gather % value.ndim
    rows = as_sizes(value.shape)[gather]
    return value.ndim, scatter, gather, rows, n, group, value.dtype, value.device


def _dependents_before(exchanges: list[Node], last: Node) -> list[Node] | None:
    """Return the nodes before `last` that depend on the exchanges, in order; None if `last` does, too."""
    reached = reachable_set(exchanges, lambda n: [user for user in n.users if user < last])
    if any(x in reached for x in last.all_input_nodes):
        return None
    return sorted(reached - set(exchanges))


def _can_join(exchanges: list[Node], node: Node) -> bool:
    """Return True if the exchanges can run together with a later one, `node`, at its place.

    It must not depend on them. The nodes before it that depend on them are then moved after it.
    """
    dependents = _dependents_before(exchanges, node)
    if dependents is None:
        return False
    # Nodes with effects, and collectives, are not moved.
    return all(is_pure(n) and not is_mutation(n) and not is_collective(n) for n in dependents)


def _move_users_after(exchanges: list[Node]) -> None:
    """Move the nodes that depend on one of the exchanges after the last exchange, where all are packed."""
    position = exchanges[-1]
    for node in _dependents_before(exchanges[:-1], position) or ():
        position.append(node)
        position = node


class MergeDimsBeforeExchange(Pass):
    """Pass that merges dims before an exchange in place of after it, where a merge would copy."""

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Move merges of dims after an exchange before it, and return the number of changed exchanges."""
        return sum(self._rewrite(node) for node in gm.graph.find_nodes(op="call_function", target=PERMUTE))

    def _rewrite(self, node: Node) -> bool:
        """Move the merge of dims after an exchange to its operand; return False if there is none.

        The exchange and the nodes after it that only move data are replaced, up to the farthest one whose dims are
        permuted or merged dims of the exchange.
        """
        for result in reversed(downstream_moves(node)):  # the farthest first
            chain = exclusive_chain(node, result)  # None if other nodes read a value in between
            if chain is None or any(user.op == "output" for user in result.users):  # an output keeps its strides
                continue
            groups = _merged_dims(node, result)  # for each dim of the result, the dims that it merges: [[0], [1, 2]]
            if groups is not None and self._exchange_merged(node, result, groups):
                erase_chain(self.graph, frozenset(chain))
                return True
        return False

    def _exchange_merged(self, node: Node, result: Node, groups: list[list[int]]) -> bool:
        """Merge the dims of the operand of an exchange, exchange the merged one, and replace `result` by that.

        Args:
            node: The exchange.
            result: Its result with merged dims.
            groups: The dims of the exchange that form each dim of `result`.

        Returns:
            True if `result` is replaced. False, without a change, if the merge would copy the operand, or if the
            operand can be sent without a copy as it is.
        """
        x, scatter, gather, n, group = node.args
        shape, order = as_sizes(x.meta["val"].shape), [dim for dims in groups for dim in dims]
        # If the scattered dim is the outermost (dims before it have size 1), each rank's block of x is contiguous: it
        # is sent without a copy, and the received blocks are copied in any case.
        if all(is_same_size(size, 1) for size in shape[: scatter % len(shape)]):
            return False
        merged_shape = [size_product(shape[dim] for dim in dims) for dims in groups]
        with self.graph.inserting_before(node):
            try:
                if order != sorted(order):
                    x = self.compute(aten.permute.default, (x, order), node)
                x = self.compute(aten.view.default, (x, self.sizes.list(merged_shape)), node)
            except (RuntimeError, ValueError):  # a view cannot merge these dims: this would need a copy of x
                self.drop(x)  # the permute; an operand that has users remains
                return False
            # The exchanged dims are the first ones of their groups: in [[0], [1, 2], [3]], 1 and 3 become 1 and 2.
            leading_dims = [dims[0] for dims in groups]
            merged_dims = [leading_dims.index(dim % len(shape)) for dim in (scatter, gather)]
            exchanged = self.compute(PERMUTE, (x, *merged_dims, n, group), result)
        result.replace_all_uses_with(exchanged)
        return True


def _merged_dims(node: Node, result: Node) -> list[list[int]] | None:
    """Return for each dim of `result` the dims of the exchange `node` that it merges, such as [[0], [1], [2, 3]].

    Returns None unless `result` only permutes and merges dims, the gathered dim is the first one of merged dims, and
    the scattered dim is the first one of a dim of `result`. Both must be first, because an exchange of a merged dim
    splits and joins its outermost part.
    """
    # Track the factors of each dim from `node` to `result`: merged dims have several, a split dim has its parts.
    table = FactorTable()
    before = table.new_tensor(as_sizes(node.meta["val"].shape))
    after = ArrangementTracker(table, {node: before}).arrangement(result)
    if after is None or after.fixed:  # not only moves of data, or `result` is a piece without some of the factors
        return None
    resolved = [table.resolve(dim) for dim in before.dims]
    dim_of = {factors[0]: dim for dim, factors in enumerate(resolved) if len(factors) == 1}  # dims that are not split
    # The dims that each dim of the result merges; -1 for a part of a dim.
    groups = [[dim_of.get(factor, -1) for factor in table.resolve(dim)] for dim in after.dims]
    is_complete = all(groups) and sorted(dim for dims in groups for dim in dims) == list(range(len(resolved)))
    scatter, gather = (dim % len(resolved) for dim in node.args[1:3])
    merges_gathered = any(len(dims) > 1 and dims[0] == gather for dims in groups)
    leads_scattered = any(dims and dims[0] == scatter for dims in groups)
    return groups if is_complete and merges_gathered and leads_scattered else None
