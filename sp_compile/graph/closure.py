"""All that can be reached from some nodes by one kind of step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node


def closure(seeds: Iterable[Node], through: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The seeds, and every node that `through` leads to from one of them, in any number of steps."""
    seen = set(seeds)
    waiting = list(seen)
    while waiting:
        fresh = set(through(waiting.pop())) - seen
        seen |= fresh
        waiting.extend(fresh)
    return seen
