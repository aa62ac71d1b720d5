"""All that can be reached from some nodes by one kind of step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch.fx import Node


def iterate_reachable(seeds: Iterable[Node], through: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """The seeds, and every node that `through` leads to from one of them in any number of steps; the nearest first."""
    found = list(dict.fromkeys(seeds))
    known = set(found)
    for node in found:
        yield node
        fresh = [n for n in dict.fromkeys(through(node)) if n not in known]
        known.update(fresh)
        found += fresh


def reachable_set(seeds: Iterable[Node], through: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """All that is `iterate_reachable`."""
    return set(iterate_reachable(seeds, through))
