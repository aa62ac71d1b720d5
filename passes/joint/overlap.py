"""Overlap collectives with compute in the partitions of a joint graph by reordering nodes.

A node that starts a collective is called an exchange here; the node `wait_tensor` waits for its result. A product is a
matrix product or attention, which hides an exchange. A gradient sum is an exchange whose result is only returned.

    before   dx = mm(g, w); dw = mm(x, g); y = wait(exchange(dx)); s = wait(all_reduce(dw)); attention_backward(y)
    after    dx = mm(g, w); t = exchange(dx); dw = mm(x, g); y = wait(t); u = all_reduce(dw); attention_backward(y)
             ... s = wait(u)

The last product before an exchange that does not depend on it moves after the start of the exchange. One product
takes longer than an exchange of its rows where either is slow. Moving more nodes would extend lifetimes, for example of
values inside an MLP. Sums of gradients over the ranks that only outputs read move there, too, since the exchange is
awaited first and both share a communicator. Each wait is placed before the first read of its value. All ranks have the
same graph and thus the same order of exchanges. DDP overlaps its buckets in the same way (Li et al. 2020,
arXiv:2006.15704).
"""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.group_names import is_pending_exchange
from sp_compile.passes.cost.walk.kinds import REDUCTIONS
from sp_compile.passes.cost.walk.liveness import node_flops
from sp_compile.passes.graph.call import WAIT_OP, OpCall
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.mutation import is_pure


class OverlapCollectives(Pass):
    """Pass that reorders one partition of a joint graph. A change is a moved node."""

    provides = frozenset({"overlapped collectives"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Reorder the nodes in place, and return the number of moved nodes."""
        if not gm.graph.find_nodes(op="call_function", target=WAIT_OP):
            return 0
        return _delay_waits(gm.graph) + _move_compute_after_exchanges(gm.graph)


def _delay_waits(graph: Graph) -> int:
    """Move waits, and cheap ops on waited values, directly before their first readers; return the number of moves.

    The compute between the start of a collective and the first reader of its result then overlaps with the collective.
    """
    moves = 0
    # In reverse order: a view of a waited value moves to its reader first, then the wait moves to the view.
    for node in reversed(list(graph.nodes)):
        if node.users and _is_waited_value(node):
            first_reader = min(node.users)  # nodes compare by their position in the graph
            if node.next is not first_reader:
                first_reader.prepend(node)
                moves += 1
    return moves


def _is_waited_value(node: Node) -> bool:
    """Return True if the node is a wait for a collective, or a wait followed by cheap ops such as views and casts."""
    while _is_cheap(node):
        node = node.all_input_nodes[0]
    return node.target is WAIT_OP


def _is_cheap(node: Node) -> bool:
    """Return True if the node is a view, a copy or a cast of one value, or another op as cheap as these.

    Cheap ops after a wait move with it. A reduction is not cheap: if the sum over rows that is the gradient of a bias
    were delayed, all rows would remain in memory.
    """
    return len(node.all_input_nodes) == 1 and is_pure(node) and not node_flops(node) and node.target not in REDUCTIONS


def _move_compute_after_exchanges(graph: Graph) -> int:
    """Move compute on which an exchange (the start of a collective) does not depend to directly after it.

    The moved nodes are those of `_movable_nodes`, such as the last matrix product: they then run during the exchange.
    Only nodes after the previous wait may move, since earlier ones overlap with another exchange. No node moves past
    one that mutates a value or draws random numbers.

    Returns:
        The number of moves.
    """
    moves, candidates = 0, list[Node]()  # nodes before the current one that may move
    for node in list(graph.nodes):
        if is_pending_exchange(node) and not _is_only_returned(node):
            movable = _movable_nodes(candidates, node)
            moves += len(movable)
            for previous, moved in pairwise([node, *movable]):
                previous.append(moved)  # moves the node to directly after `previous`
            moved_nodes = set(movable)
            candidates = [*(n for n in candidates if n not in moved_nodes), node, *movable]
        elif node.op == "placeholder" or is_pure(node) or is_pending_exchange(node) or _is_deterministic(node):
            candidates.append(node)
        else:  # a wait, or a node that mutates a value or draws random numbers
            candidates = []
    return moves


def _movable_nodes(candidates: list[Node], exchange: Node) -> list[Node]:
    """Return the nodes to move after the start of an exchange, so that they run during it, in order.

    These are the last matrix product or attention on which it does not depend, all exchanges whose results are only
    returned, and the candidates that read these, which must stay after them. One product takes long enough; moving more
    would extend the lifetime of values.

    Args:
        candidates: Nodes before the exchange, in order.
        exchange: The start of a collective.
    """
    candidate_set = set(candidates)
    needed = reachable_set([exchange], lambda n: (x for x in n.all_input_nodes if x in candidate_set))
    independent = [n for n in candidates if n not in needed]
    last_product = [n for n in independent if node_flops(n)][-1:]  # empty without products
    movable = {*last_product, *(n for n in independent if is_pending_exchange(n) and _is_only_returned(n))}
    for node in independent:
        if not movable.isdisjoint(node.all_input_nodes):
            movable.add(node)
    return [node for node in candidates if node in movable]


def _is_deterministic(node: Node) -> bool:
    """Return True for attention without dropout: torch marks it as random, but it draws no random numbers."""
    return bool(node_flops(node)) and OpCall(node).get("dropout_p") == 0


def _is_only_returned(node: Node) -> bool:
    """Return True if the result of an exchange is only awaited, viewed or cast, and returned: a gradient sum.

    No node of the graph computes with the result of the all_reduce of a weight's gradient, for example.
    """
    values = reachable_set([node], lambda n: (u for u in n.users if u.target is WAIT_OP or _is_cheap(u)))
    return all(user in values or user.op == "output" for value in values for user in value.users)
