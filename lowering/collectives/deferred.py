"""Compute a result of a program when it is read; the program returns its operands instead.

    (loss, logits)  ->  (loss, hidden)     logits = hidden @ weight.T is computed if the caller reads it

Such logits are next to a loss that is computed in tiles, and may never be read. A small graph computes the result. Its
operands are results of the program or arguments. A gradient of the result becomes a gradient of each operand, stored
for the program's backward. The rows of a rank are its shard of the result; they are deferred until they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

        Versions and samples of the operands are recorded, by which a later read detects that they have changed.

        Args:
            arguments: Arguments of the call.
            results: Results of the program.
            description: Description of the result in errors.
        """
        values: list[Tensor] = []
        for operand in self.operands:
            sources = arguments if operand.is_argument else results
            values.append(sources[operand.position].detach())
        # The operands that receive a gradient: the program has a token for it among its results.
        with_grad = [i for i, operand in enumerate(self.operands) if operand.grad_token is not None]
        versions, samples = tensor_versions(values).tolist(), _sample_elements(values)
        like = values[0].new_empty((), dtype=self.like.dtype)  # `self.like` is a fake tensor of the compilation
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
        """Return deferred rows to which a row-wise function, such as a cast, is applied once they are computed."""
        return replace(self, like=op(self.like), row_ops=(*self.row_ops, op))

    def compute(self) -> Tensor:
        """Compute and return the rows, when the result is read.

        Raises:
            SpError: An operand has changed since the call.
        """
        self._check()
        with torch.no_grad():
            rows = self._run(self.args)
            for op in self.row_ops:
                rows = op(rows)
            return rows

    def gradients(self, rows_grad: Tensor) -> list[Tensor]:
        """Return the gradients of the operands in `with_grad`, by recomputing the rows with autograd.

        Called in the backward of the result, before that of the program. `row_ops` are not repeated here: autograd
        applies their derivatives before this.

        Args:
            rows_grad: Gradient of the rows.

        Raises:
            SpError: An operand has changed since the call.
        """
        self._check()
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(i in self.with_grad) for i, x in enumerate(self.args)]
            inputs = [leaves[i] for i in self.with_grad]
            return list(torch.autograd.grad(self._run(leaves), inputs, rows_grad, materialize_grads=True))

    def _run(self, arguments: Sequence[Tensor]) -> Tensor:
        """Run the graph on operands and return the rows.

        The caller's autocast is disabled, since the graph contains the casts of the program's own autocast.
        """
        with torch.autocast(self.like.device.type, enabled=False):
            return self.graph(*arguments)

    def _check(self) -> None:
        """Raise SpError if an operand has changed since the call.

        A few elements are compared in addition to version counters, because torch counts no new version when FSDP
        gathers the weights of the next step into the same memory, or when code assigns to `.data`.
        """
        has_changed = any(x.numel() and is_freed(x) for x in self.args)
        has_changed = has_changed or tensor_versions(self.args).tolist() != self.versions
        if has_changed or [*map(checksum, _sample_elements(self.args))] != [*map(checksum, self.samples)]:
            raise SpError(
                "SP321",
                f"{self.description} is computed from the model's weights when it is read, but since the call the "
                "weights have changed (for example in an optimizer step), or FSDP has freed them.",
            )


def _sample_elements(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of a few elements of each tensor, to detect changes, without synchronization."""
    return [sample_view(x.detach(), SAMPLE_ELEMENTS, 0).clone() for x in xs]
