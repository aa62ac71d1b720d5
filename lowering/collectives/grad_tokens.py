"""Pass gradients of sharded results to the backward with ``sp::tap``, only for results that are read.

    y, token = tap(x);  return detach(y), token        and the program continues with y

AOTAutograd compiles one backward, in which every result has a gradient: full-size zeros for results without readers,
such as logits that are returned next to a loss. With ``tap`` the result itself has no gradient. A token, a tensor of
one element, is returned next to it. The gradient of the token is the number of a gradient that `store_grad` has stored
for the backward, or 0 for none; ``sp::add_stored_grad`` adds it there.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.library import composite, opaque

# Stored gradients by number. The backward that follows immediately removes them.
_pending_grads: dict[int, Tensor] = {}
_grad_numbers = itertools.count(1)  # 0: no gradient

sp = torch.ops.sp


@torch.compiler.disable
def store_grad(grad: Tensor) -> Tensor:
    """Store a gradient for the backward of the program that follows, and return its number: (1,) float64.

    The number is the gradient of the token: `add_stored_grad` finds the stored gradient by it.
    """
    number = next(_grad_numbers)
    _pending_grads[number] = grad
    return torch.tensor([number], dtype=torch.float64, device="cpu")


@opaque("grad_token(Tensor x) -> Tensor", lambda x: torch.empty(1, dtype=torch.float64, device="cpu"))
def new_token(x: Tensor) -> Tensor:
    """Return a new token on the CPU. Shapes: any -> (1,), float64. Backward: none."""
    return torch.zeros(1, dtype=torch.float64, device="cpu")


@opaque("add_stored_grad(Tensor(a!) grad, Tensor number) -> ()", lambda grad, number: None, replays=False)
def add_stored_grad(grad: Tensor, number: Tensor) -> None:
    """Remove a gradient from those that `store_grad` has stored, and add it to `grad` in place.

    The number, (1,) float64, is the gradient of a token: the number under which the gradient was stored for this
    backward, as a float because only floats have gradients. It is 0 if none was stored; then this does nothing. The
    operator is opaque, and no CUDA graph replays it, as the number is read on the host when the backward runs.
    """
    stored = int(number.item())
    if stored:
        grad.add_(_pending_grads.pop(stored))


class _TapFunction(torch.autograd.Function):
    """Identity whose gradient is that of its value plus the stored gradient of its token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a view of x, and a token for a gradient that is stored later."""
        ctx.set_materialize_grads(False)
        ctx.like = x.shape, x.dtype, x.device
        return x.view_as(x), sp.grad_token.default(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, number: Tensor | None) -> Tensor | None:
        """Return the gradient of the value plus the stored gradient, if the token has received its number."""
        if number is None:
            return grad
        shape, dtype, device = ctx.like
        total = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad.clone()
        sp.add_stored_grad.default(total, number)
        return total


@composite("tap(Tensor x) -> (Tensor, Tensor)")
def tap(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value, and a token for a gradient that is computed outside of the graph.

    Such a gradient is stored by `store_grad`, which returns its number as the gradient of the token.
    Shapes: any -> same, a view, and (1,). Bytes: none.
    Backward: the gradient of the value plus the stored gradient, if any.
    Runs: view_as.
    """
    return _TapFunction.apply(x)
