"""Which exchanges may become one: the same dims, ranks and dtype, none of them waiting for another.

q' = exchange(q); k' = exchange(k); v' = exchange(v); attention(q', k', v')
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from ..inplace import is_mutation, is_pure
from ..shapes import sizes
from .moves import value_of
from .writes import between

if TYPE_CHECKING:
    from .permute_all_to_all import PermuteAllToAll

sp = torch.ops.sp


def gather_exchanges(rewrite: PermuteAllToAll, writes: frozenset[Node]) -> list[Node]:
    """Have the pass put groups of exchanges together, moving what used the first of them behind the last.

    writes: the graph's nodes that do, which no operand's reading is moved across.
    """
    graph, done = rewrite.graph, []
    backward = _of_tangents(graph)
    open_groups: dict[Any, list[Node]] = {}
    for node in [n for n in graph.nodes if n.target is sp.all_to_all_permute.default]:
        key = (*_key(node), node in backward)
        near = key in open_groups and not between(writes, open_groups[key][0], node)
        if near and _may_join(open_groups[key], node):
            open_groups[key].append(node)
        else:
            open_groups[key] = [node]
            done.append(open_groups[key])
    groups = [members for members in done if len(members) > 1]
    for members in groups:
        _make_room(members)
        rewrite.together(members)
    return [members[0] for members in groups]


def _key(node: Node) -> Any:
    """Exchanges that differ in this need different messages."""
    x, scatter, gather, n, group = node.args
    value = value_of(x)
    scatter, gather = scatter % value.ndim, gather % value.ndim
    rows = sizes(value.shape)[gather]
    return value.ndim, scatter, gather, rows, n, group, value.dtype, value.device


def _of_tangents(graph: Graph) -> set[Node]:
    """The backward part of AOTAutograd's joint graph, which will be cut off: what its tangents are needed for."""
    found: set[Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _dependent(members: list[Node], last: Node) -> list[Node] | None:
    """What uses the members' results and comes before the last exchange; None if that exchange is among it."""
    found = set(members)
    out = []
    node = members[0].next
    while node is not last:
        if node not in found and any(i in found for i in node.all_input_nodes):
            found.add(node)
            out.append(node)
        node = node.next
    return None if any(i in found for i in last.all_input_nodes) else out


def _may_join(members: list[Node], node: Node) -> bool:
    waiting = _dependent(members, node)
    # What has effects, or takes part in a collective, keeps its place.
    return waiting is not None and all(
        is_pure(n) and not is_mutation(n) and not _communicates(n) for n in waiting
    )


def _communicates(node: Node) -> bool:
    text = str(node.target)
    return "c10d" in text or text.startswith("sp.")


def _make_room(members: list[Node]) -> None:
    last = members[-1]
    behind = last
    for node in _dependent(members[:-1], last) or ():
        behind.append(node)
        behind = node
