"""Overlap collectives with compute in the partitions of a joint graph by reordering nodes.

    before   dx = mm(g, w); dw = mm(x, g); y = wait(exchange(dx)); s = wait(all_reduce(dw)); attention_backward(y)
    after    dx = mm(g, w); t = exchange(dx); dw = mm(x, g); y = wait(t); u = all_reduce(dw); attention_backward(y)
             ... s = wait(u)

The last product before an exchange that does not depend on it moves after the start of the exchange. One product
takes longer than an exchange of its rows where either is slow. Moving more nodes would extend lifetimes, for example of
values inside an MLP. Sums of gradients that only outputs read move there, too, since the exchange is awaited first
and both share a communicator. Each wait is placed before the first read of its value. All ranks have the same graph
and thus the same order of exchanges. DDP overlaps its buckets in the same way (Li et al. 2020, arXiv:2006.15704).
"""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.group_names import is_pending_exchange
from sp_compile.passes.cost.walk.kinds import REDUCTIONS
from sp_compile.passes.cost.walk.liveness import node_flops
from sp_compile.passes.graph.call import WAIT_OPS, OpCall
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.mutation import is_pure


class OverlapCollectives(Pass):
    """Pass that reorders one partition of a joint graph. A change is a moved node."""

    provides = frozenset({"overlapped collectives"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        if not gm.graph.find_nodes(op="call_function", target=WAIT_OPS):
            return 0
        return _delay_waits(gm.graph) + _hoist_exchanges(gm.graph)


def _delay_waits(graph: Graph) -> int:
    """Move waits, and ops that read only waited values, before their first readers."""
    moved = 0
    for node in reversed(list(graph.nodes)):
        if node.users and _waited_exchange(node) and node.next is not (first := min(node.users)):
            first.prepend(node)
            moved += 1
    return moved


def _waited_exchange(node: Node) -> bool:
    while _is_cheap(node):
        node = node.all_input_nodes[0]
    return node.target is WAIT_OPS


def _is_cheap(node: Node) -> bool:
    """Return True if the node is a view, a copy or a cast of one value.

    A sum over rows is not cheap: delayed, as the gradient of a bias could be, it would extend the lifetime of all rows.
    """
    return len(node.all_input_nodes) == 1 and is_pure(node) and not node_flops(node) and node.target not in REDUCTIONS


def _hoist_exchanges(graph: Graph) -> int:
    """Move independent nodes before each exchange after its start: a product, sums and other starts.

    The search ends at the previous wait, since the nodes before it overlap with another exchange. Nodes that write or
    draw are not moved.
    """
    gap: list[Node] = []
    count = 0
    for node in list(graph.nodes):
        if is_pending_exchange(node) and not _is_gradient_sum(node):
            late = _movable_nodes(gap, node)
            count += len(late)
            for place, moved in pairwise([node, *late]):
                place.append(moved)
            gap = [*(n for n in gap if n not in late), node, *late]
        elif node.op == "placeholder" or is_pure(node) or is_pending_exchange(node) or _is_deterministic(node):
            gap.append(node)
        else:
            gap = []
    return count


def _movable_nodes(gap: list[Node], exchange: Node) -> dict[Node, None]:
    """Return the last independent product, all sums, and the readers of these, in order."""
    inside = set(gap)
    needed = reachable_set([exchange], lambda n: (x for x in n.all_input_nodes if x in inside))
    products = [n for n in gap if n not in needed and node_flops(n)]
    late = dict.fromkeys(
        [*products[-1:], *(n for n in gap if n not in needed and is_pending_exchange(n) and _is_gradient_sum(n))]
    )
    for node in gap:
        if node not in needed and not late.keys().isdisjoint(node.all_input_nodes):
            late[node] = None
    return {node: None for node in gap if node in late}


def _is_deterministic(node: Node) -> bool:
    """Return True for attention without dropout, which torch marks as random."""
    return bool(node_flops(node)) and OpCall(node).get("dropout_p") == 0


def _is_gradient_sum(node: Node) -> bool:
    """Return True if the result is only awaited, viewed or cast, and returned."""
    seen = reachable_set([node], lambda n: (u for u in n.users if u.target is WAIT_OPS or _is_cheap(u)))
    return all(u in seen or u.op == "output" for n in seen for u in n.users)
