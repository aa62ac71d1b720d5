"""Exchanges are under way while others compute: in the halves of a joint graph, by the order of nodes alone.

    before   dx = mm(g, w); dw = mm(x, g); y = wait(exchange(dx)); s = wait(all_reduce(dw)); attention_backward(y)
    after    dx = mm(g, w); t = exchange(dx); dw = mm(x, g); y = wait(t); u = all_reduce(dw); attention_backward(y)
             ... s = wait(u)

The last product in front of an exchange that this does not read goes behind its start. One takes longer than an
exchange of its rows where either takes long, and what others read would live longer: the inside of an MLP, say. A sum
that nothing but results reads, of gradients, goes there too: somebody waits for the exchange, and both share a
communicator. Every wait is where its value is read. Exchanges are in one order on all ranks, since all have the same
graph. torch's DDP hides its buckets likewise (Li et al. 2020, arXiv:2006.15704).
"""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Graph, GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.cost.walk.kinds import REDUCTIONS
from sp_compile.passes.cost.walk.liveness import node_flops
from sp_compile.passes.graph.call import WAIT_OPS, OpCall
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.sharding.group_names import is_pending_exchange


class OverlapCollectives(Pass):
    """One half of a joint graph, by the order of its nodes; a change is a node that goes elsewhere."""

    provides = frozenset({"exchanges are hidden"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        if not gm.graph.find_nodes(op="call_function", target=WAIT_OPS):
            return 0
        return _delay_waits(gm.graph) + _hoist_exchanges(gm.graph)


def _delay_waits(graph: Graph) -> int:
    """Waits, and what is made of nothing but what was waited for, in front of their first readers."""
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
    """Is the node a view, a copy or a cast: little work on one value?

    A sum over rows is none: made late, as the gradient of a bias could be, it would keep all of them until then.
    """
    return len(node.all_input_nodes) == 1 and is_pure(node) and not node_flops(node) and node.target not in REDUCTIONS


def _hoist_exchanges(graph: Graph) -> int:
    """Behind the start of each exchange a product, the sums and other starts in front of it that it does not need.

    As far back as the wait before: what is in front of that hides an exchange already. What writes or draws stays.
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
    """The last product that the exchange does not need, all sums, and what reads these; in order."""
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
    """Is this attention without dropout? To torch it is a random op."""
    return bool(node_flops(node)) and OpCall(node).get("dropout_p") == 0


def _is_gradient_sum(node: Node) -> bool:
    """Is what the exchange gives only waited for, viewed or cast, and returned?"""
    seen = reachable_set([node], lambda n: (u for u in n.users if u.target is WAIT_OPS or _is_cheap(u)))
    return all(u in seen or u.op == "output" for n in seen for u in n.users)
