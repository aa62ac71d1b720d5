"""A buffer that is made only to be filled: what is copied into it takes its place.

out = empty_like(x); out.copy_(y); f(out)   ->   f(y)      so Dynamo writes dist.all_to_all_single(out, x)
f(copy(empty_like(x), y))                   ->   f(y)      and AOTAutograd that
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..shapes import sizes
from .moves import name_of, value_of
from .writes import is_write

_MAKERS = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided zeros zeros_like new_zeros full full_like".split()
)


def settle(graph: Graph) -> bool:
    """Edit the graph in place where a collective's result fills a buffer; whether there was one.

    A buffer that is used before it is filled stays.
    """
    changed = False
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or name_of(node) not in ("copy_", "copy"):
            continue
        buffer, source = node.args[:2]
        if not _is_received(source) or not isinstance(buffer, Node) or not _alike(buffer, source):
            continue
        if name_of(node) == "copy_":
            if not _is_fresh(buffer) or any(
                place[user] < place[node] or _changes(user, node) for user in buffer.users
            ):
                continue
            buffer.replace_all_uses_with(source, delete_user_cb=lambda user, copy=node: user is not copy)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        if _is_fresh(buffer) and not buffer.users:
            graph.erase_node(buffer)
        changed = True
    return changed


def _is_received(source: object) -> bool:
    return isinstance(source, Node) and name_of(source) == "wait_tensor"


def _is_fresh(buffer: Node) -> bool:
    return buffer.op in ("call_function", "call_method") and name_of(buffer) in _MAKERS


def _alike(a: Node, b: Node) -> bool:
    x, y = value_of(a), value_of(b)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    shaped = sizes(x.shape) == sizes(y.shape) and sizes(x.stride()) == sizes(y.stride())
    return shaped and (x.dtype, x.device) == (y.dtype, y.device)


def _changes(user: Node, copy: Node) -> bool:
    """Is this user another one that writes?"""
    return user is not copy and is_write(user)
