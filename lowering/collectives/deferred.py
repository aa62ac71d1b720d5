"""Compute a result when it is read: the graph returns its operands instead.

    h, w -> logits      next to a loss with tiled logits: the logits may never be read

A small graph of tensors computes the result. Its operands are results of the program, which returns them anyway, or
arguments. A gradient of the result becomes a gradient of each operand, stored for the program's backward.
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

# Number of sampled elements. An optimizer step changes at least one of them, in half precision, too.
SAMPLE_ELEMENTS = 4096


@dataclass(frozen=True, eq=False)
class DeferredGraph:
    """Graph of a deferred result."""

    graph: GraphModule  # operands -> this rank's rows
    like: Tensor  # a value of the dtype and device of the rows
    operands: tuple[tuple[bool, int], ...]  # (True if an argument of the program, else a result; its index)
    # Index of the result that is the token of the operand's gradient (`grad_tokens.py`).
    tickets: tuple[int | None, ...]

    def of(self, arguments: Sequence[Tensor], results: Sequence[Tensor], text: str) -> DeferredRows:
        """Return the deferred rows of one call.

        Args:
            arguments: Arguments of the call.
            results: Results of the program.
            text: Description of the result in errors.
        """
        operands = [(arguments if is_argument else results)[i].detach() for is_argument, i in self.operands]
        wanted = [i for i, ticket in enumerate(self.tickets) if ticket is not None]
        like = operands[0].new_empty((), dtype=self.like.dtype)
        return DeferredRows(
            self.graph, operands, tensor_versions(operands).tolist(), _sample_elements(operands), wanted, like, text
        )


@dataclass(eq=False)
class DeferredRows:
    """Rows of one call that are not computed yet."""

    graph: GraphModule  # operands -> rows
    args: list[Tensor]  # operands of the call
    versions: list[int]  # version counters of the operands at the call
    samples: list[Tensor]  # some elements of each operand at the call
    wanted: list[int]  # indices of the operands with a gradient
    like: Tensor  # a value of the dtype and device of the rows
    text: str  # description in errors
    after: tuple[Callable[[Tensor], Tensor], ...] = ()  # functions to apply to the rows

    def map_rows(self, op: Callable[[Tensor], Tensor]) -> DeferredRows:
        """Return deferred rows to which a row-wise function is applied."""
        return replace(self, like=op(self.like), after=(*self.after, op))

    def compute(self) -> Tensor:
        """Compute the rows.

        Raises:
            SpError: An operand has changed since the call.
        """
        self._check()
        with torch.no_grad():
            return reduce(lambda rows, op: op(rows), self.after, self._run(self.args))

    def gradients(self, rows: Tensor) -> list[Tensor]:
        """Return the gradients of the wanted operands; recomputes the rows.

        Args:
            rows: Gradient of the rows.

        Raises:
            SpError: An operand has changed since the call.
        """
        self._check()
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(i in self.wanted) for i, x in enumerate(self.args)]
            result = self._run(leaves)
            return list(torch.autograd.grad(result, [leaves[i] for i in self.wanted], rows, materialize_grads=True))

    def _run(self, arguments: Sequence[Tensor]) -> Tensor:
        with torch.autocast(self.like.device.type, enabled=False):
            result: Tensor = self.graph(*arguments)
        return result

    def _check(self) -> None:
        """Raise SpError if an operand has changed since the call.

        FSDP gathers the weights of a step into the memory of the last step's, and `.data` changes weights. torch does
        not count either as a new version, so that a few elements are compared, too.
        """
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
    """Return copies of a few elements of each tensor on its device, without synchronization."""
    return [sample_view(x.detach(), SAMPLE_ELEMENTS, 0).clone() for x in xs]


def _is_unchanged(some: Tensor, x: Tensor) -> bool:
    """Return True if the sampled elements of x are bitwise equal to earlier ones."""
    (now,) = _sample_elements([x])
    return checksum(now) == checksum(some)
