"""Where a graph that is not functional writes to memory: reads do not cross that.

y = x.movedim(2, 0).contiguous(); x.add_(1); all_to_all_single(y)   sends x as it was before
"""

from __future__ import annotations

import inspect
import operator

from torch.fx import Graph, Node

from ..inplace import is_mutation
from .moves import name_of

# x += 1 and the like, and x[i] = y.
_ASSIGNMENTS = frozenset(
    getattr(operator, f"i{name}")
    for name in "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
) | {operator.setitem}


def writes_of(graph: Graph) -> frozenset[Node]:
    """The nodes that change memory, or may."""
    return frozenset(node for node in graph.nodes if is_write(node))


def is_write(node: Node) -> bool:
    """Might it change a tensor that it is given? Of ATen ops, functions, methods and modules."""
    if node.op == "call_module":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node)
    named = name.endswith("_") and not name.endswith("__")
    return is_mutation(node) or node.target in _ASSIGNMENTS or named or "out" in node.kwargs or _inplace(node)


def _inplace(node: Node) -> bool:
    """As torch.nn.functional has it."""
    if not inspect.isfunction(node.target):
        return False
    try:
        return bool(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace"))
    except (TypeError, ValueError):
        return False


def between(writes: frozenset[Node], first: Node, last: Node) -> bool:
    """Is anything written from the first node on, before the last?"""
    node = first
    while writes and node is not last:
        if node in writes:
            return True
        node = node.next
    return False
