"""Whether ranks are given the same gradients of results that they share: looked at once, at the first backward.

A backward on shards cuts the gradient of a shared result into rows, one rank's from its own copy. Where the ranks'
copies differ the sum would be nobody's, so that is an error on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .alike import digests
from .errors import SpError
from .lockstep import exchanges
from .mesh import Ranks

Gradients = tuple[torch.Tensor | None, ...]


class SharedResults:
    """Calls `run`; the first backward of what it returns compares the ranks' gradients of equal results.

    names: of the results, for the error. Every rank of the group has to come to a backward, as its collectives demand.
    Raises SpError out of that backward, on every rank.
    """

    def __init__(self, run: Callable[..., Any], ranks: Ranks, names: Sequence[str]) -> None:
        self.run, self.ranks, self.names = run, ranks, names
        self.looking = ranks.process_group is not None and exchanges(ranks.process_group)
        self.calls = 0
        self.looked_at: int | None = None

    def __call__(self, *args: Any) -> Any:
        results = self.run(*args)
        if self.looking and self.looked_at is None:
            self.calls += 1
            self._watch(results if isinstance(results, Sequence) else [results])
        return results

    def _watch(self, results: Sequence[Any]) -> None:
        """One look for all results of a node of autograd; the values now, for they may be changed in place later."""
        made: dict[Any, dict[int, tuple[str, str]]] = {}
        for name, x in zip(self.names, results):
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                made.setdefault(x.grad_fn, {})[x.output_nr] = (name, digests([_local(x)])[0])
        for node, shared in made.items():
            node.register_prehook(
                lambda grads, shared=shared, call=self.calls: self._compare(grads, shared, call)
            )

    def _compare(self, grads: Gradients, shared: dict[int, tuple[str, str]], call: int) -> None:
        if self.looked_at is None:
            self.looked_at = call
        if self.looked_at != call:
            return
        mine = {name: (value, *digests([_local(grads[i])])) for i, (name, value) in shared.items()}
        everyone: list[Any] = [None] * self.ranks.n
        dist.all_gather_object(everyone, mine, group=self.ranks.process_group)
        for name, (value, _) in mine.items():
            theirs = [one.get(name, ("", "")) for one in everyone]
            if all(other == value for other, _ in theirs) and len({gradient for _, gradient in theirs}) > 1:
                raise SpError(
                    f"the ranks of this tensor-parallel group share the result {name}, but were given different "
                    "gradients of it, which a backward on shards cannot add up. Compute its loss alike on every rank, "
                    "or sum the gradient over the group before it comes here"
                )


def _local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x
