"""Makes the routes of a local graph's exchanges known: a cache may bring its program back without tracing it."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from .attention import SHARDED
from .call import Call
from .lowering import routes
from .mesh import Ranks
from .scan_cost import SCANS, rounds_of
from .sliding_calls import ON_SHARDS, shifts_of


def declare_routes(local: GraphModule, ranks: Ranks) -> None:
    """Declare, for every op of the graph that talks to some of the ranks only, whom it talks to."""
    for node in local.graph.nodes:
        if node.target in SHARDED:
            call = Call(node)
            stride = call.get("ulysses", 1)
            routes.declare(ranks.group, stride, call.get("steps", ranks.n // stride))
        elif node.target in SCANS:
            routes.declare_shifts(ranks.group, _steps(node, ranks.n))
        elif node.target in ON_SHARDS:
            routes.declare_shifts(ranks.group, [further for further, _ in shifts_of(Call(node), ranks.n)])


def _steps(node: Node, n: int) -> list[int]:
    call = Call(node)
    stepped = call["frame"] is not None and call["exchange"] == "steps"
    return [1 << k for k in range(rounds_of(n))] if stepped else []
