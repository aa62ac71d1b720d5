"""Match all_to_all_single ops that, with the moves around them, are an all_to_all_permute.

    x  (b, s, n * h, d)  -> any views, permutes and copies ->  (n, ...)   all_to_all_single   (n, ...)  -> any ->  y

`arrangement.py` tracks the factors of x. In dim 0 of the operand, the leading factors of product n are the sent ones:
block p is for rank p. In the result, a new factor takes their place, the received one: block r is from rank r. The
chain exchanges dim a (scatter) for dim b (gather) under two conditions: the sent factors lead x's dim a, and y has the
other factors of x in their order, with the received factor before those of dim b. A move is a node that only moves data
(`is_move`), and a chain has moves on both sides. An exact chain has the dims of the result, not only its elements.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from sp_compile.lowering.comm.routes import route_kind
from sp_compile.passes.cost.group_names import exchange_group
from sp_compile.passes.graph.call import WAIT_OP, OpCall, is_tensor, node_packet
from sp_compile.passes.graph.closure import iterate_reachable, reachable_set
from sp_compile.passes.graph.sizes import as_sizes, is_same_size

from .arrangement import Arrangement, ArrangementTracker, FactorIds, FactorTable, is_move, is_view, moved_operands

c10d = torch.ops._c10d_functional
PERMUTE = torch.ops.sp.all_to_all_permute.default
ALL_TO_ALLS = (c10d.all_to_all_single, torch.ops._c10d_functional_autograd.all_to_all_single)
MAX_CANDIDATES = 64  # maximum number of nodes of a chain


@dataclass(frozen=True)
class AllToAllMatch:
    """An all_to_all_single of equal shares."""

    sent: Node  # the operand
    node: Node  # the all_to_all_single
    wait: Node  # its wait_tensor
    n: int  # number of shares
    group: str  # name of the process group


@dataclass(frozen=True)
class PermuteMatch:
    """A chain x -> y that is all_to_all_permute(x, scatter_dim, gather_dim)."""

    x: Node  # operand of the exchange of two dims
    y: Node  # its result
    scatter_dim: int  # dim of x
    gather_dim: int  # dim of x
    exact: bool  # False: y is a reshape of the result
    chain: frozenset[Node]  # all nodes after x, up to y


class ExchangedFactors(NamedTuple):
    """The factors, of product n each, that an exchange of a scatter and a gather dim removes and adds."""

    sent: FactorIds  # that lead the scatter dim of the operand: block p is for rank p
    received: FactorIds  # that lead the gather dim of the result: block r is from rank r


def is_all_to_all(node: Node) -> bool:
    """Return True if the node is torch's functional all_to_all_single."""
    return node_packet(node) in ALL_TO_ALLS


def match_all_to_all(node: Node) -> AllToAllMatch | str:
    """Return the all-to-all, or the reason for which it is not one of equal shares between all ranks.

    The reason is "", which is not reported, if there is one share only, and for the exchanges that this package sends
    between pairs of ranks (`lowering/comm/routes.py`).
    """
    call, group = OpCall(node), exchange_group(node)
    sent, received_sizes, sent_sizes = (call[name] for name in ("input", "output_split_sizes", "input_split_sizes"))
    if group is None:
        return "its group has no name"
    # The kind of a process group is "", that of a part of one with adjacent ranks "among", and with every k-th rank
    # "across". Other kinds are the package's own, for exchanges between pairs of ranks.
    if route_kind(group) not in ("", "among", "across") or len(sent_sizes) == 1:
        return ""
    shares = [*as_sizes(received_sizes), *as_sizes(sent_sizes)]
    if not shares or not all(is_same_size(share, shares[0]) for share in shares):
        return "the shares are not equal"
    waits = [user for user in node.users if user.target is WAIT_OP]
    if len(waits) != 1 or len(node.users) != 1:
        return "the result does not have exactly one wait_tensor"
    return AllToAllMatch(sent, node, waits[0], len(sent_sizes), group)


def match_permute(exchange: AllToAllMatch) -> PermuteMatch | None:
    """Return the longest chain x -> exchange -> y of nodes that is an all_to_all_permute of x, or None.

    `FusePermutes` replaces the chain. Chains that have exactly its result are preferred to those of which y is a
    reshape of the result.
    """
    sources = [exchange.sent, *_upstream_moves(exchange.sent)][::-1]  # candidates for x, the farthest first
    results = [exchange.wait, *downstream_moves(exchange.wait)][::-1]  # candidates for y, the farthest first
    chains_before = {x: _upstream_chain(exchange.sent, x) for x in sources}
    chains_after = {y: exclusive_chain(exchange.wait, y) for y in results}
    for exact, x, y in itertools.product((True, False), sources, results):
        before, after = chains_before[x], chains_after[y]
        if before is None or after is None:
            continue
        dims = _exchange_dims(exchange, x, y, exact)
        if dims is not None:
            return PermuteMatch(x, y, *dims, exact, frozenset((*before, exchange.node, *after)) - {x})
    return None


def _upstream_moves(node: Node) -> list[Node]:
    """Return the operands of the node and of the nodes before it, as long as these only move data, nearest first."""

    def operands(n: Node) -> Sequence[Node]:
        """Return the operands that a move has moved; none for a wait, whose operand is not complete."""
        return moved_operands(n) if is_move(n) and n.target is not WAIT_OP else ()

    nearest = itertools.islice(iterate_reachable([node], operands), 1, MAX_CANDIDATES + 1)  # from 1 on: without `node`
    return [x for x in nearest if is_tensor(x)]


def downstream_moves(node: Node) -> list[Node]:
    """Return the nodes after this one that only move its data, from the nearest to the farthest."""
    moves, queue = {node: None}, list(node.users)  # found nodes, as an ordered set, and nodes to visit
    while queue and len(moves) < MAX_CANDIDATES:
        user = queue.pop(0)
        # All data of a move must come from `node`: a concatenation with another value ends the search.
        if user not in moves and is_move(user) and all(x in moves for x in moved_operands(user)):
            moves[user] = None
            queue += user.users
    return [x for x in list(moves)[1:] if is_tensor(x)]


def _upstream_chain(sent: Node, x: Node) -> set[Node] | None:
    """Return all nodes from x to the sent value, or None if the exchange cannot replace them.

    It cannot if one of them is no move, such as an add, or if another node reads a copy among them: the copy would
    remain. A view with other readers costs nothing.
    """
    chain = reachable_set([sent], lambda n: moved_operands(n) if n is not x and is_move(n) else ()) | {x}
    for node in chain - {x}:
        # The exchange itself, which reads the sent value, is not in the chain.
        has_other_users = any(user not in chain and not is_all_to_all(user) for user in node.users)
        if not is_move(node) or (has_other_users and not is_view(node)):
            return None
    return chain


def exclusive_chain(first: Node, y: Node) -> set[Node] | None:
    """Return all nodes from `first` to y, or None if another node reads one of them before y, so that it must remain.

    Args:
        first: An exchange, or its wait.
        y: A node after it, with only moves in between.
    """
    chain = reachable_set([y], lambda n: moved_operands(n) if n is not first else ())
    users = {user for node in chain - {y} for user in node.users if not is_unused(user)}
    return chain if users <= chain else None


def is_unused(node: Node) -> bool:
    """Return True if the node is a getitem, one of several results of an op, without users."""
    return node.target is operator.getitem and not node.users


def _exchange_dims(exchange: AllToAllMatch, x: Node, y: Node, exact: bool) -> tuple[int, int] | None:
    """Return the scatter and the gather dim if x -> y is an exchange of two dims, else None.

    The result is (2, 1) for these four steps on n ranks: x [b, s, n * h, d]; a permute to the operand [n, b, s, h, d];
    the all-to-all, which replaces the sent n by the received n; a permute to y [b, n * s, h, d].

    Args:
        exchange: The all-to-all between x and y.
        x: A value that is moved to its operand.
        y: A value that its result is moved to.
        exact: False to accept a y that is only a reshape of the result of the exchange of two dims.
    """
    # An arrangement describes each dim of a value as factors (parts of dims) of x.
    table = FactorTable()
    before = table.new_tensor(as_sizes(x.meta["val"].shape))
    sent = ArrangementTracker(table, {x: before}).arrangement(exchange.sent)
    # `fixed` is not empty if the sent value is only a piece of x, such as one of the chunks of a dim.
    if sent is None or not sent.dims or sent.fixed:
        return None
    cut = table.split_leading(sent.dims[0], exchange.n)  # the all-to-all splits dim 0 into n shares
    if cut is None:
        return None
    sent_factors, share = cut  # of dim 0: those that count the shares, and those of the rows of one share
    factors = ExchangedFactors(sent_factors, (table.new_factor(exchange.n),))
    received = Arrangement((factors.received + share, *sent.dims[1:]))
    after = ArrangementTracker(table, {exchange.wait: received}).arrangement(y)
    if after is None or after.fixed:
        return None
    if table.order(sent) == table.order(before) and table.order(after) == table.order(received):
        return None  # views only, without a permute: the chain is a plain all-to-all
    return _match_dims(table, factors, before, after, exact)


def _match_dims(
    table: FactorTable, exchanged: ExchangedFactors, before: Arrangement, after: Arrangement, exact: bool
) -> tuple[int, int] | None:
    """Return (scatter dim, gather dim) of the exchange of two dims that turns `before` into `after`, or None.

    The scatter dim is the one that starts with the sent factors; each other dim is tried as the gather dim.

    Args:
        table: The factors of all arrangements.
        exchanged: The factors that the exchange sends and receives.
        before: The arrangement of x.
        after: The arrangement of y.
        exact: As in `_exchange_dims`.
    """

    def is_leading(factors: list[int], dim: FactorIds) -> bool:
        """Return True if the dim starts with these factors."""
        return table.resolve(dim)[: len(factors)] == factors

    sent = table.resolve(exchanged.sent)
    scatter_dims = [d for d, dim in enumerate(before.dims) if is_leading(sent, dim)]
    if len(scatter_dims) != 1:
        return None
    (scatter,) = scatter_dims
    for gather in range(len(before.dims)):
        if gather == scatter:
            continue
        result = exchange_factors(table, exchanged, before, scatter, gather)
        # `rows` are the factors of the gather dim of x, `block` those of the scatter dim of y; none if it has size 1.
        # If both have size 1, the exchange only renames a dim, and any dim of size 1 would match.
        rows, block = table.resolve(before.dims[gather]), table.resolve(result.dims[scatter])
        if exact:
            is_match = bool(rows or block) and table.are_equal(result, after)
        else:
            # y has the elements in the same order, and one of its dims starts with the factors of the gather dim. Dims
            # of size 1 have no factors, by which they could be found in y.
            gathered = table.resolve(result.dims[gather])
            starts_dim = any(is_leading(gathered, dim) for dim in after.dims)
            is_match = bool(rows and block) and starts_dim and table.order(result) == table.order(after)
        if is_match:
            return scatter, gather
    return None


def exchange_factors(
    table: FactorTable, exchanged: ExchangedFactors, x: Arrangement, scatter: int, gather: int
) -> Arrangement:
    """Return the arrangement (the factors of each dim) of all_to_all_permute(x, scatter, gather).

    The sent factors are removed from the start of the scatter dim; the gather dim starts with the received ones: for
    scatter dim 2 and gather dim 1, (b, s, n * h, d) becomes (b, n * s, h, d).
    """
    dims = list(x.dims)
    dims[scatter] = tuple(table.resolve(dims[scatter])[len(table.resolve(exchanged.sent)) :])
    dims[gather] = (*exchanged.received, *dims[gather])
    return Arrangement(tuple(dims))


def _is_inverse(first: Node, second: Node) -> bool:
    """Return True if the second all_to_all_permute restores the operand of the first, up to a reshape.

    Both are then removed. Between them there may be nodes that only move data. The second one must send back what the
    first one received: its scatter dim starts with the received factors, and the result has the factors of the first
    operand in their order.
    """
    x, scatter, gather, n, group = first.args
    if tuple(second.args[3:]) != (n, group):
        return False
    table = FactorTable()
    before = table.new_tensor(as_sizes(x.meta["val"].shape))
    ndim = len(before.dims)
    cut = table.split_leading(before.dims[scatter % ndim], n)  # the factors that count the n blocks, and the others
    if cut is None:
        return False
    factors = ExchangedFactors(cut[0], (table.new_factor(n),))
    result = exchange_factors(table, factors, before, scatter % ndim, gather % ndim)
    operand = ArrangementTracker(table, {first: result}).arrangement(second.args[0])  # of the second, in factors of x
    if operand is None or operand.fixed:  # fixed: a piece of x only
        return False
    scatter, gather = (dim % len(operand.dims) for dim in second.args[1:3])
    cut = table.split_leading(operand.dims[scatter], n)
    # The blocks from rank r must return to rank r, so that this rank receives its own blocks again.
    if cut is None or not table.are_same_factors(cut[0], factors.received):
        return False
    inverse_factors = ExchangedFactors(factors.received, factors.sent)
    returned = exchange_factors(table, inverse_factors, operand, scatter, gather)
    return table.order(returned) == table.order(before)


def undone_exchange(node: Node) -> Node | None:
    """Return an earlier exchange whose operand this one restores, or None; nodes in between may move data."""
    x = node.args[0]
    earlier = (n for n in (x, *_upstream_moves(x)) if n.target is PERMUTE)
    return next((exchange for exchange in earlier if _is_inverse(exchange, node)), None)


def is_input_alias(node: Node) -> bool:
    """Return True if the node shares storage with an input of the graph.

    Such a node must not become an output in place of a node with memory of its own, to which callers may write.
    """
    while is_view(node):
        node = node.all_input_nodes[0]
    return node.op in ("placeholder", "get_attr")


def erase_chain(graph: Graph, chain: frozenset[Node]) -> None:
    """Erase the nodes of a replaced chain that no node reads now, and their unused results (getitem nodes)."""
    for node in reversed(graph.nodes):
        is_result = is_unused(node) and node.args[0] in chain
        if (node in chain or is_result) and not node.users:
            graph.erase_node(node)
