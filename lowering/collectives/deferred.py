"""A result that is made when somebody reads it: the graph returns what it is made of, and not itself.

    h, w -> logits      beside a loss whose logits went through tiles: nobody may ever read these

What makes it is a small graph of tensors, which runs as it is. Its operands are results of the program, which keeps
them, or arguments. A gradient of the result becomes one of each operand, which is left for the program's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import tensor_versions

from .checksums import checksum, is_freed, sample_view

SAMPLE_ELEMENTS = (
    4096  # elements that are looked at: an optimizer's step changes some of so many, in half precision too
)


@dataclass(frozen=True, eq=False)
class DeferredGraph:
    """graph: of operands -> a rank's rows. like: a value of the dtype and on the device of these.

    operands: where each is: (is it an argument of the program, or else a result; its number). tickets: the number of
    the result that is a ticket for its gradient (`grad_tokens.py`), or None.
    """

    graph: GraphModule
    like: Tensor
    operands: tuple[tuple[bool, int], ...]
    tickets: tuple[int | None, ...]

    def of(self, arguments: Sequence[Tensor], results: Sequence[Tensor], words: str) -> DeferredRows:
        """Of one call."""
        given = [(arguments if is_argument else results)[i].detach() for is_argument, i in self.operands]
        wanted = [i for i, ticket in enumerate(self.tickets) if ticket is not None]
        like = given[0].new_empty((), dtype=self.like.dtype)
        return DeferredRows(
            self.graph, given, tensor_versions(given).tolist(), _sample_elements(given), wanted, like, words
        )


@dataclass(eq=False)
class DeferredRows:
    """The rows of one call, which are not made yet.

    versions, some: of the operands, at that call. wanted: those that have a gradient. after: what is done to the rows.
    """

    graph: GraphModule
    args: list[Tensor]
    versions: list[int]
    samples: list[Tensor]
    wanted: list[int]
    like: Tensor
    text: str
    after: tuple[Callable[[Tensor], Tensor], ...] = ()

    def map_rows(self, op: Callable[[Tensor], Tensor]) -> DeferredRows:
        """What is made of these row by row, as late."""
        return replace(self, like=op(self.like), after=(*self.after, op))

    def compute(self) -> Tensor:
        """The rows. Raises SpError: an operand is not what it was."""
        self._check()
        with torch.no_grad():
            return reduce(lambda rows, op: op(rows), self.after, self._run(self.args))

    def gradients(self, rows: Tensor) -> list[Tensor]:
        """Of the operands that want one, from the rows' gradient; what is made of them is made again."""
        self._check()
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(i in self.wanted) for i, x in enumerate(self.args)]
            made = self._run(leaves)
            return list(torch.autograd.grad(made, [leaves[i] for i in self.wanted], rows, materialize_grads=True))

    def _run(self, given: Sequence[Tensor]) -> Tensor:
        with torch.autocast(self.like.device.type, enabled=False):
            made: Tensor = self.graph(*given)
        return made

    def _check(self) -> None:
        """FSDP gathers a step's weights into the memory of the last one's, and `.data` changes them, and torch counts
        neither as a new version: then a few of the elements say it."""
        freed = any(x.numel() and is_freed(x) for x in self.args)
        if (
            freed
            or tensor_versions(self.args).tolist() != self.versions
            or not all(map(_is_unchanged, self.samples, self.args))
        ):
            raise SpError(
                "SP321",
                f"{self.text} is computed from the model's weights when it is read, and these have changed since "
                "(an optimizer's step?) or FSDP has freed them.",
            )


def _sample_elements(xs: Sequence[Tensor]) -> list[Tensor]:
    """Copies of a few elements of each, on their device: nobody waits for them."""
    return [sample_view(x.detach(), SAMPLE_ELEMENTS, 0).clone() for x in xs]


def _is_unchanged(some: Tensor, x: Tensor) -> bool:
    """Are these elements what they were, to the bit?"""
    (now,) = _sample_elements([x])
    return checksum(now) == checksum(some)
