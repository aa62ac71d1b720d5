"""Compute a result of a program when it is read; the program returns its operands instead.

    (loss, logits)  ->  (loss, hidden)     logits = hidden @ weight.T is computed if the caller reads it

Such logits are next to a loss that is computed in tiles, and may never be read. A small graph computes the result. Its
operands are results of the program or arguments. A gradient of the result becomes a gradient of each operand, stored
for the program's backward. The rows of a rank are its shard of the result; they are deferred until they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import tensor_versions

from .checksums import checksum, is_freed, sample_view

# Number of sampled elements of a tensor. An optimizer step changes at least one of them, in half precision, too.
SAMPLE_ELEMENTS = 4096


class DeferredOperand(NamedTuple):
    """The source of an operand of a deferred graph, in a call of the program."""

    is_argument: bool  # True: an argument of the program; False: one of its results
    position: int  # of the argument or the result
    grad_token: int | None  # index of the result that is the token of the operand's gradient (`grad_tokens.py`)


@dataclass(frozen=True, eq=False)
class DeferredGraph:
    """Graph that computes a deferred result from other values of a call."""

    graph: GraphModule  # operands -> this rank's rows
    like: Tensor  # a value of the dtype and device of the rows
    operands: tuple[DeferredOperand, ...]  # sources of the graph's operands, in order

    def bind(self, arguments: Sequence[Tensor], results: Sequence[Tensor], description: str) -> DeferredRows:
        """Return the deferred rows of one call, which the runtime wraps as a result of the program.

        The state of the operands is recorded, so that a later read detects that they have changed.

        Args:
            arguments: Arguments of the call.
            results: Results of the program.
            description: Description of the result in errors.
        """
        values = [
            (arguments if operand.is_argument else results)[operand.position].detach() for operand in self.operands
        ]
        with_grad = [i for i, operand in enumerate(self.operands) if operand.grad_token is not None]
        versions, samples = tensor_versions(values).tolist(), _sample_elements(values)
        like = values[0].new_empty((), dtype=self.like.dtype)
        return DeferredRows(self.graph, values, versions, samples, with_grad, like, description)


@dataclass(eq=False)
class DeferredRows:
    """Rows of one call that are not computed yet."""

    graph: GraphModule  # operands -> rows
    args: list[Tensor]  # operands of the call
    versions: list[int]  # version counters of the operands at the call
    samples: list[Tensor]  # some elements of each operand at the call
    with_grad: list[int]  # indices of the operands that need a gradient
    like: Tensor  # a value of the dtype and device of the rows
    description: str  # of the result, in errors
    row_ops: tuple[Callable[[Tensor], Tensor], ...] = ()  # functions to apply to the rows

    def map_rows(self, op: Callable[[Tensor], Tensor]) -> DeferredRows:
        """Return deferred rows to which a row-wise function, such as a cast, is applied when computed."""
        return replace(self, like=op(self.like), row_ops=(*self.row_ops, op))

    def compute(self) -> Tensor:
        """Compute the rows, as the result is read now.

        Raises:
            SpError: An operand has changed since the call.
        """
        self._check()
        with torch.no_grad():
            return reduce(lambda rows, op: op(rows), self.row_ops, self._run(self.args))

    def gradients(self, rows: Tensor) -> list[Tensor]:
        """Return the gradients of the operands of `with_grad`; recomputes the rows.

        Called in the backward of the result, before that of the program.

        Args:
            rows: Gradient of the rows.

        Raises:
            SpError: An operand has changed since the call.
        """
        self._check()
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(i in self.with_grad) for i, x in enumerate(self.args)]
            inputs = [leaves[i] for i in self.with_grad]
            return list(torch.autograd.grad(self._run(leaves), inputs, rows, materialize_grads=True))

    def _run(self, arguments: Sequence[Tensor]) -> Tensor:
        """Run the graph on the operands, without the caller's autocast: it contains that of the program."""
        with torch.autocast(self.like.device.type, enabled=False):
            result: Tensor = self.graph(*arguments)
        return result

    def _check(self) -> None:
        """Raise SpError if an operand has changed since the call.

        FSDP gathers the weights of a step into the memory of the last step's, and `.data` changes weights. torch does
        not count either as a new version, so that a few elements are compared, too.
        """
        freed = any(x.numel() and is_freed(x) for x in self.args)
        if freed or tensor_versions(self.args).tolist() != self.versions or self._has_other_samples():
            raise SpError(
                "SP321",
                f"{self.description} is computed from the model's weights when it is read, and these have changed "
                "since (an optimizer's step?) or FSDP has freed them.",
            )

    def _has_other_samples(self) -> bool:
        """Return True if sampled elements of an operand are not bitwise equal to those at the call."""
        samples = _sample_elements(self.args)
        return any(checksum(now) != checksum(before) for now, before in zip(samples, self.samples))


def _sample_elements(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of a few elements of each tensor, to detect changes, without synchronization."""
    return [sample_view(x.detach(), SAMPLE_ELEMENTS, 0).clone() for x in xs]
