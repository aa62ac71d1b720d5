"""A buffer that is made only to be filled: what is copied into it takes its place.

out = empty_like(x); out.copy_(y); f(out)   ->   f(y)      so Dynamo writes dist.all_to_all_single(out, x)
f(copy(empty_like(x), y))                   ->   f(y)      and AOTAutograd that
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..shapes import sizes
from .exchanges import is_exchange
from .moves import name_of, value_of
from .writes import is_write

_MAKERS = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided zeros zeros_like new_zeros full full_like".split()
)


def settle(graph: Graph) -> bool:
    """Edit the graph in place where an exchange's result fills a buffer; whether there was one.

    A buffer that is used before it is filled stays, and one that is not the only reader of what came: either may be
    written later.
    """
    changed = False
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not is_filling(node):
            continue
        buffer, source = node.args[:2]
        if name_of(node) == "copy_":
            if not _is_fresh(buffer) or any(place[user] < place[node] for user in buffer.users):
                continue
            buffer.replace_all_uses_with(source, delete_user_cb=lambda user, copy=node: user is not copy)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        if _is_fresh(buffer) and not buffer.users:
            graph.erase_node(buffer)
        changed = True
    return changed


def is_filling(node: Node) -> bool:
    """Does it copy all that an exchange brought, and nothing else reads, to a tensor like it?"""
    if node.op not in ("call_function", "call_method") or name_of(node) not in ("copy_", "copy"):
        return False
    if len(node.args) < 2 or not all(isinstance(x, Node) for x in node.args[:2]):
        return False
    buffer, source = node.args[:2]
    # Of what came, a buffer that is made like it reads the shape only.
    return _is_received(source) and set(source.users) <= {node, *_only(buffer)} and _alike(buffer, source)


def _is_received(source: Node) -> bool:
    if name_of(source) != "wait_tensor" or not source.args:
        return False
    return is_exchange(source.args[0]) and len(source.args[0].users) == 1


def _only(buffer: Node) -> list[Node]:
    return [buffer] if _is_fresh(buffer) else []


def _is_fresh(buffer: Node) -> bool:
    return (
        buffer.op in ("call_function", "call_method") and name_of(buffer) in _MAKERS and not is_write(buffer)
    )


def _alike(a: Node, b: Node) -> bool:
    x, y = value_of(a), value_of(b)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    shaped = sizes(x.shape) == sizes(y.shape) and sizes(x.stride()) == sizes(y.stride())
    return shaped and (x.dtype, x.device) == (y.dtype, y.device)
