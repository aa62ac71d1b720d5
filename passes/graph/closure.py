"""Search a graph for all nodes that are reachable from some seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")  # of the nodes, usually torch.fx.Node


def iterate_reachable(seeds: Iterable[T], through: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Iterate over the seeds and all nodes reachable from them in breadth-first order.

    Args:
        seeds: Nodes to start from.
        through: Returns the nodes to continue with from a node, such as its users or its operands.
    """
    queue = list(dict.fromkeys(seeds))
    queued = set(queue)
    for node in queue:  # which grows in this loop
        yield node
        successors = [n for n in dict.fromkeys(through(node)) if n not in queued]
        queued.update(successors)
        queue += successors


def reachable_set(seeds: Iterable[T], through: Callable[[T], Iterable[T]]) -> set[T]:
    """Return the seeds and all nodes reachable from them as a set, see `iterate_reachable`."""
    return set(iterate_reachable(seeds, through))
