"""``sp::tap``: a result that lies in shards has a gradient only if somebody reads it.

    y, ticket = tap(x);  return detach(y), ticket        and the program goes on with y

AOTAutograd compiles one backward, in which every result has a gradient: zeros, as large as the result, if nobody read
it, as of the logits that are returned beside a loss. Here the result itself has none. Beside it comes a ticket of one
number, whose gradient says which gradient has been left for the backward; 0: none.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.library import composite, opaque

_pending_grads: dict[int, Tensor] = {}
"""Gradients that wait for the backward that takes them, which comes right behind: by number."""
_token_numbers = itertools.count(1)

sp = torch.ops.sp


@torch.compiler.disable
def store_grad(grad: Tensor) -> Tensor:
    """Leave a gradient for the backward; the gradient of the ticket."""
    number = next(_token_numbers)
    _pending_grads[number] = grad
    return torch.tensor([number], dtype=torch.float64, device="cpu")


@opaque("ticket(Tensor x) -> Tensor", lambda x: torch.empty(1, dtype=torch.float64, device="cpu"))
def ticket(x: Tensor) -> Tensor:
    """One number on the CPU, made where x is. Shapes: any -> (1,), float64. Backward: none."""
    return torch.zeros(1, dtype=torch.float64, device="cpu")


@opaque("add_left(Tensor(a!) grad, Tensor number) -> ()", lambda grad, number: None, replays=False)
def add_stored_grad(grad: Tensor, number: Tensor) -> None:
    """Add the gradient that was left under this number to another one, in place; nothing if it is 0."""
    key = int(number.item())
    if key:
        grad.add_(_pending_grads.pop(key))  # which is there: no gradient is lost without an error


class _TapFunction(torch.autograd.Function):
    """The identity, whose gradient is that of its value and what was left under the number on the ticket."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.like = x.shape, x.dtype, x.device
        return x.view_as(x), sp.ticket.default(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, number: Tensor | None) -> Tensor | None:
        if number is None:
            return grad
        shape, dtype, device = ctx.like
        own = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.clone()
        sp.add_left.default(own, number)
        return own


@composite("tap(Tensor x) -> (Tensor, Tensor)")
def tap(x: Tensor) -> tuple[Tensor, Tensor]:
    """The value, and a ticket for a gradient that comes from elsewhere.

    Shapes: any -> same, a view, and (1,). Bytes: none. Backward: the gradient of the value, to which is added what was
    left under the number that is the ticket's gradient, in place. Source: view_as.
    """
    value, own = _TapFunction.apply(x)
    return value, own
