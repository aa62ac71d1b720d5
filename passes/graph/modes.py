"""Track the grad and autocast modes that calls in a graph enter and exit.

Captured programs contain the modes as calls: `set_grad_enabled(False)`, or `a = enter_autocast("cpu", bfloat16, ..)`
with a later `exit_autocast(a)`. A region is the nodes between such a call and the one that ends it. Passes that move,
merge or trace nodes use these functions to preserve the mode in which each node computes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

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
    """Return all nodes between set_grad_enabled(False) and set_grad_enabled(True), whose results have no gradient.

    A graph starts with gradients enabled.
    """
    without_grad, is_enabled = set[Node](), True
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            is_enabled = bool(node.args[0])
        if not is_enabled:
            without_grad.add(node)
    return without_grad


class AutocastRegion(NamedTuple):
    """Arguments of a call that enters autocast."""

    device: str  # device type
    dtype: torch.dtype | None  # None for the default of the device type
    enabled: bool  # False for a region without casts
    cache_enabled: bool  # True if casts of weights are cached


def autocast_regions(node: Node) -> list[AutocastRegion]:
    """Return the autocast regions that the node is in, as arguments of torch.autocast, innermost last."""
    enters, exits = (
        [n for n in node.graph.find_nodes(op="call_function", target=target) if n < node]
        for target in (enter_autocast, exit_autocast)
    )
    ended = {exit_node.args[0] for exit_node in exits}  # exit_autocast takes the node that entered the region
    return [AutocastRegion(*enter.args) for enter in enters if enter not in ended]


def autocast_dtype(node: Node, x: torch.Tensor, device: str) -> torch.dtype:
    """Return the dtype in which an op that autocast lowers, such as a matmul, would compute at this node.

    Args:
        node: Position in the graph.
        x: Operand, any dtype. Autocast does not change integers and float64.
        device: Device type.
    """
    regions = [region for region in autocast_regions(node) if region.device == device]
    if not regions or not regions[-1].enabled or not x.is_floating_point() or x.dtype == torch.float64:
        return x.dtype
    return regions[-1].dtype or torch.get_autocast_dtype(device)


def has_same_autocast(nodes: Sequence[Node]) -> bool:
    """Return True if all nodes are in equal autocast regions, so that one node may replace them."""
    first = autocast_regions(nodes[0])
    return all(autocast_regions(node) == first for node in nodes[1:])


@contextmanager
def restore_autocast(node: Node) -> Iterator[None]:
    """Enter the autocast regions of the node, to run or trace its op with the casts of the program."""
    with ExitStack() as contexts:
        for region in autocast_regions(node):
            contexts.enter_context(torch.autocast(*region))
        yield


@contextmanager
def disable_autocast(device: str) -> Iterator[None]:
    """Disable autocast on a type of device, as in a backward; no effect on types without autocast, such as "meta"."""
    has_autocast = torch.amp.is_autocast_available(device)
    with torch.autocast(device, enabled=False) if has_autocast else nullcontext():
        yield


def settle_dtypes(graph: Graph) -> None:
    """Set `meta["val"]` of nodes to the dtypes in which they compute under the autocast regions of the graph.

    Passes add nodes with the dtypes without autocast. Passes that depend on dtypes call this function first. A node
    outside of the regions changes only if the dtype of an operand did.
    """
    if not graph.find_nodes(op="call_function", target=enter_autocast):
        return
    mode = detect_fake_mode([v for node in graph.nodes for v in node_tensors(node)])
    if mode is None:
        return
    changed_nodes: set[Node] = set()
    with mode, enable_python_dispatcher(), torch.no_grad():
        for node in filter(_has_tensor_results, graph.nodes):
            if changed_nodes.isdisjoint(node.all_input_nodes) and not autocast_regions(node):
                continue
            args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            with restore_autocast(node), disable_autocast_cache():
                result = node.target(*args, **kwargs)
            dtypes_before = [x.dtype for x in node_tensors(node)]
            node.meta["val"] = pytree.tree_map(_with_dtype, node.meta["val"], result)
            if dtypes_before != [x.dtype for x in node_tensors(node)]:
                changed_nodes.add(node)


def _has_tensor_results(node: Node) -> bool:
    """Return True if the node is an op or getitem that returns tensors."""
    return bool(node_tensors(node)) and (isinstance(node.target, OpOverload) or node.target is operator.getitem)


def _with_dtype(x: Any, like: Any) -> Any:
    """Return an empty tensor like x in the dtype of `like`; x itself if it has the dtype or is no tensor."""
    if not isinstance(x, torch.Tensor) or x.dtype == like.dtype:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=like.dtype, device=x.device)


@contextmanager
def disable_autocast_cache() -> Iterator[None]:
    """Disable the autocast weight cache, so that the program does not reuse weights cast during a trace."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
