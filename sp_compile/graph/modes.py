"""The modes that a node runs in, which calls of the graph enter and leave: without gradients, and autocast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compile._compat import enter_autocast, exit_autocast, set_grad_enabled


def without_grad(graph: Graph) -> set[Node]:
    """All nodes in regions without gradients, where a graph begins with them."""
    off, grad = set[Node](), True
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            grad = bool(node.args[0])
        if not grad:
            off.add(node)
    return off


def autocast_regions(node: Node) -> list[Any]:
    """(device type, dtype, enabled, cache enabled) of every region that the node is in, the innermost last."""
    entered: dict[Node, Any] = {}
    for other in node.graph.find_nodes(op="call_function", target=enter_autocast):
        if other < node:
            entered[other] = other.args
    for other in node.graph.find_nodes(op="call_function", target=exit_autocast):
        if other < node:
            entered.pop(other.args[0], None)
    return list(entered.values())


def autocast_dtype(node: Node, x: torch.Tensor, device: str) -> torch.dtype:
    """What an op that autocast runs in less precision would compute in at this place on a device, if x is given."""
    found = x.dtype
    if not x.is_floating_point() or x.dtype == torch.float64:
        return found
    for where, dtype, enabled, _ in autocast_regions(node):
        if where == device:
            found = (dtype or torch.get_autocast_dtype(device)) if enabled else x.dtype
    return found


def same_autocast(nodes: Sequence[Node]) -> bool:
    """Would an op compute in the same dtype at the places of all of them?"""
    first = autocast_regions(nodes[0])
    return all(autocast_regions(node) == first for node in nodes[1:])


@contextmanager
def autocast_at(node: Node) -> Iterator[None]:
    """The autocast regions that the node is in, entered."""
    with ExitStack() as regions:
        for device, dtype, enabled, cache in autocast_regions(node):
            regions.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield
