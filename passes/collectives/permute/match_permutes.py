"""Match exchanges that are an all_to_all_permute.

    x  (b, s, n * h, d)  -> any views, permutes and copies ->  (n, ...)   all_to_all_single   (n, ...)  -> any ->  y

In dim 0 of the operand, the leading factor of n is `sent`: block p goes to rank p. In the result it is `came`: block r
is from rank r. The chain exchanges dim a for dim b under two conditions: `sent` is the leading factor of x's dim a, and
y has the other factors of x in their order, with `came` before the factors of dim b.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch.fx import Graph, Node

from sp_compile.passes.cost.group_names import exchange_group
from sp_compile.passes.graph.call import WAIT_OPS, OpCall, is_tensor, node_packet
from sp_compile.passes.graph.closure import iterate_reachable, reachable_set
from sp_compile.passes.graph.sizes import as_sizes, is_same_size

from .arrangement import Arrangement, ArrangementTracker, FactorIds, IndexMap, is_move, is_view, moved_operands

c10d = torch.ops._c10d_functional
PERMUTE = torch.ops.sp.all_to_all_permute.default
ALL_TO_ALLS = (c10d.all_to_all_single, torch.ops._c10d_functional_autograd.all_to_all_single)
MAX_CANDIDATES = 64  # maximum number of nodes of a chain


@dataclass(frozen=True)
class AllToAllMatch:
    """An all_to_all_single of equal shares."""

    sent: Node  # the operand
    node: Node  # the all_to_all_single
    wait: Node
    n: int  # number of shares
    group: str


@dataclass(frozen=True)
class PermuteMatch:
    """A chain x -> y that is all_to_all_permute(x, scatter_dim, gather_dim)."""

    x: Node
    y: Node
    scatter_dim: int
    gather_dim: int
    exact: bool  # False: up to a reshape
    chain: frozenset[Node]  # all nodes after x, up to y


def is_all_to_all(node: Node) -> bool:
    """Return True if the node is torch's functional all_to_all_single."""
    return node_packet(node) in ALL_TO_ALLS


def match_all_to_all(node: Node) -> AllToAllMatch | str:
    """Return the exchange, or the reason for which it is not one of equal shares between all ranks.

    The reason is "" for an exchange of another kind.
    """
    call, group = OpCall(node), exchange_group(node)
    sent, received_sizes, sent_sizes = (call[name] for name in ("input", "output_split_sizes", "input_split_sizes"))
    if group is None:
        return "its group has no name"
    if group.partition("/")[2].partition(":")[0] not in ("", "among", "across") or len(sent_sizes) == 1:
        return ""
    shares = [*as_sizes(received_sizes), *as_sizes(sent_sizes)]
    if not shares or not all(is_same_size(share, shares[0]) for share in shares):
        return "the shares are not equal"
    waits = [user for user in node.users if user.target is WAIT_OPS]
    if len(waits) != 1 or len(node.users) != 1:
        return "the result does not have exactly one wait_tensor"
    return AllToAllMatch(sent, node, waits[0], len(sent_sizes), group)


def match_permute(exchange: AllToAllMatch) -> PermuteMatch | None:
    """Return the longest chain around the exchange that is an all_to_all_permute, or None."""
    sources = [exchange.sent, *_upstream_moves(exchange.sent)][::-1]
    results = [exchange.wait, *downstream_moves(exchange.wait)][::-1]
    for exact in (True, False):
        for x in sources:
            before = _upstream_chain(exchange.sent, x)
            if before is None:
                continue
            for y in results:
                after = exclusive_chain(exchange.wait, y)
                dims = _exchange_dims(exchange, x, y, exact) if after is not None else None
                if dims is not None and after is not None:
                    chain = frozenset((*before, exchange.node, *after)) - {x}
                    return PermuteMatch(x, y, *dims, exact, chain)
    return None


def _upstream_moves(node: Node) -> list[Node]:
    """Return the values that the node moves, from the nearest to the farthest."""
    # The operand of a wait is not complete.
    moved = iterate_reachable([node], lambda n: moved_operands(n) if is_move(n) and n.target is not WAIT_OPS else ())
    return [x for x in islice(moved, 1, MAX_CANDIDATES + 1) if is_tensor(x)]


def downstream_moves(node: Node) -> list[Node]:
    """Return the nodes that only move the node's data, from the nearest to the farthest."""
    found, waiting = {node: None}, list(node.users)
    while waiting and len(found) < MAX_CANDIDATES:
        nearest = waiting.pop(0)
        if nearest not in found and is_move(nearest) and all(x in found for x in moved_operands(nearest)):
            found[nearest] = None
            waiting += nearest.users
    return [x for x in list(found)[1:] if is_tensor(x)]


def _upstream_chain(sent: Node, x: Node) -> set[Node] | None:
    """Return all nodes from x to the sent value, or None if a copy in between has other users."""
    chain = reachable_set([sent], lambda n: moved_operands(n) if n is not x and is_move(n) else ()) | {x}
    for node in chain - {x}:
        elsewhere = any(user not in chain and not is_all_to_all(user) for user in node.users)
        if not is_move(node) or (elsewhere and not is_view(node)):
            return None
    return chain


def exclusive_chain(wait: Node, y: Node) -> set[Node] | None:
    """Return all nodes from the wait to y, or None if a node before y has other users."""
    chain = reachable_set([y], lambda n: moved_operands(n) if n is not wait else ())
    users = {user for node in chain - {y} for user in node.users if not is_unused(user)}
    return chain if users <= chain else None


def is_unused(node: Node) -> bool:
    """Return True if the node is one of several results and has no users."""
    return node.target is operator.getitem and not node.users


def _exchange_dims(exchange: AllToAllMatch, x: Node, y: Node, exact: bool) -> tuple[int, int] | None:
    """Return the scatter and the gather dim if x -> y is an exchange of these, else None."""
    index = IndexMap()
    before = index.tensor(as_sizes(x.meta["val"].shape))
    sent = ArrangementTracker(index, {x: before}).tensor(exchange.sent)
    cut = index.take(sent.dims[0], exchange.n) if sent is not None and sent.dims and not sent.fixed else None
    if sent is None or cut is None:
        return None
    received_factors = (index.factor(exchange.n),)
    # The shape is the same on both sides, so that the factors after the leading one do not move.
    received = Arrangement((received_factors + cut[1], *sent.dims[1:]))
    after = ArrangementTracker(index, {exchange.wait: received}).tensor(y)
    if after is None or after.fixed:
        return None
    trivial = index.order(sent) == index.order(before) and index.order(after) == index.order(received)
    return None if trivial else _canonical_dims(index, before, cut[0], received_factors, after, exact)


def _canonical_dims(
    index: IndexMap, before: Arrangement, sent: FactorIds, received_factors: FactorIds, after: Arrangement, exact: bool
) -> tuple[int, int] | None:
    first = index.resolve(sent)
    leading = [d for d, dim in enumerate(before.dims) if index.resolve(dim)[: len(first)] == first]
    if len(leading) != 1:
        return None
    scatter = leading[0]
    for gather in range(len(before.dims)):
        if gather == scatter:
            continue
        dims = dims_after(index, before, scatter, gather, sent, received_factors)
        rows, block = index.resolve(before.dims[gather]), index.resolve(dims[scatter])
        if exact and (rows or block) and index.equal(Arrangement(dims), after):
            return scatter, gather
        lead = index.resolve(dims[gather])
        is_leading = any(index.resolve(dim)[: len(lead)] == lead for dim in after.dims)
        if not exact and rows and block and is_leading and index.order(Arrangement(dims)) == index.order(after):
            return scatter, gather
    return None


def dims_after(
    index: IndexMap, before: Arrangement, scatter: int, gather: int, sent: FactorIds, received_factors: FactorIds
) -> tuple[FactorIds, ...]:
    """Return the dims after the exchange, where `sent` leads the scatter dim."""
    dims = list(before.dims)
    dims[scatter] = tuple(index.resolve(dims[scatter])[len(index.resolve(sent)) :])
    dims[gather] = (*received_factors, *dims[gather])
    return tuple(dims)


def is_inverse(first: Node, second: Node) -> bool | None:
    """Return True if the second all_to_all_permute restores the operand of the first.

    Returns False if it does so up to a reshape, and None if it does not.
    """
    x, scatter, gather, n, group = first.args
    if tuple(second.args[3:]) != (n, group):
        return None
    index = IndexMap()
    before = index.tensor(as_sizes(x.meta["val"].shape))
    cut = index.take(before.dims[scatter % len(before.dims)], n)
    if cut is None:
        return None
    ndim, received_factors = len(before.dims), (index.factor(n),)
    dims = dims_after(index, before, scatter % ndim, gather % ndim, cut[0], received_factors)
    there = ArrangementTracker(index, {first: Arrangement(dims)}).tensor(second.args[0])
    if there is None or there.fixed:
        return None
    scatter, gather = (d % len(there.dims) for d in second.args[1:3])
    back = index.take(there.dims[scatter], n)
    # Data from rank r returns to rank r, so that this rank receives its own blocks again.
    if back is None or not index.same_factors(back[0], received_factors):
        return None
    returned = Arrangement(dims_after(index, there, scatter, gather, back[0], cut[0]))
    if index.equal(returned, before):
        return True
    return False if index.order(returned) == index.order(before) else None


def source_exchanges(node: Node) -> Sequence[Node]:
    """Return the exchanges whose results are moved to this one's operand."""
    x = node.args[0]
    return [n for n in [x, *_upstream_moves(x)] if n.target is PERMUTE]


def aliases_input(node: Node) -> bool:
    """Return True if the node shares storage with an input of the graph."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr")


def erase_chain(graph: Graph, chain: frozenset[Node]) -> None:
    """Erase the nodes that have no other users."""
    for node in reversed(graph.nodes):
        unread = is_unused(node) and node.args[0] in chain
        if (node in chain or unread) and not node.users:
            graph.erase_node(node)
