"""Track the grad and autocast modes that calls in a graph enter and exit."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node, map_arg

from sp_compile.lowering.torch_compat import (
    OpOverload,
    detect_fake_mode,
    enable_python_dispatcher,
    enter_autocast,
    exit_autocast,
    pytree,
    set_grad_enabled,
)

from .call import node_tensors


def no_grad_nodes(graph: Graph) -> set[Node]:
    """Return all nodes in no-grad regions; a graph starts with gradients enabled."""
    off, grad = set[Node](), True
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            grad = bool(node.args[0])
        if not grad:
            off.add(node)
    return off


def autocast_regions(node: Node) -> list[Any]:
    """Return (device type, dtype, enabled, cache enabled) of each autocast region of the node, innermost last."""
    entered: dict[Node, Any] = {}
    for other in node.graph.find_nodes(op="call_function", target=enter_autocast):
        if other < node:
            entered[other] = other.args
    for other in node.graph.find_nodes(op="call_function", target=exit_autocast):
        if other < node:
            entered.pop(other.args[0], None)
    return list(entered.values())


def autocast_dtype(node: Node, x: torch.Tensor, device: str) -> torch.dtype:
    """Return the dtype in which a lower-precision autocast op would compute at this node.

    Args:
        node: Position in the graph.
        x: Operand, any dtype. Autocast does not change integers and float64.
        device: Device type.
    """
    found = x.dtype
    if not x.is_floating_point() or x.dtype == torch.float64:
        return found
    for where, dtype, enabled, _ in autocast_regions(node):
        if where == device:
            found = (dtype or torch.get_autocast_dtype(device)) if enabled else x.dtype
    return found


def has_same_autocast(nodes: Sequence[Node]) -> bool:
    """Return True if all nodes are in equal autocast regions."""
    first = autocast_regions(nodes[0])
    return all(autocast_regions(node) == first for node in nodes[1:])


@contextmanager
def restore_autocast(node: Node) -> Iterator[None]:
    """Enter the autocast regions of the node."""
    with ExitStack() as regions:
        for device, dtype, enabled, cache in autocast_regions(node):
            regions.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


@contextmanager
def disable_autocast(device: str) -> Iterator[None]:
    """Disable autocast on a device; a no-op on devices without autocast, such as "meta"."""
    known = torch.amp.is_autocast_available(device)
    with torch.autocast(device, enabled=False) if known else nullcontext():
        yield


def settle_dtypes(graph: Graph) -> None:
    """Set the dtypes of values according to the autocast regions; capture records them without autocast."""
    if not graph.find_nodes(op="call_function", target=enter_autocast):
        return
    mode = detect_fake_mode([v for node in graph.nodes for v in node_tensors(node)])
    if mode is None:
        return
    other: set[Node] = set()
    with mode, enable_python_dispatcher(), torch.no_grad():
        for node in filter(_returns_tensors, graph.nodes):
            if other.isdisjoint(node.all_input_nodes) and not autocast_regions(node):
                continue
            args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            with restore_autocast(node), disable_autocast_cache():
                found = node.target(*args, **kwargs)
            before = node_tensors(node)
            node.meta["val"] = pytree.tree_map(_cast_like, node.meta["val"], found)
            if [x.dtype for x in before] != [x.dtype for x in node_tensors(node)]:
                other.add(node)


def _returns_tensors(node: Node) -> bool:
    """Return True if the node is an op or getitem that returns tensors."""
    return bool(node_tensors(node)) and (isinstance(node.target, OpOverload) or node.target is operator.getitem)


def _cast_like(x: Any, like: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.dtype == like.dtype:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=like.dtype, device=x.device)


@contextmanager
def disable_autocast_cache() -> Iterator[None]:
    """Disable the autocast weight cache, so that weights cast during a trace are not reused by the program."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
