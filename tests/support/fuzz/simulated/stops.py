"""Stop or change gradients: between the ops of a canonical form, and around any steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Any]
Stop = Callable[..., Any]
"""A function that calls its first argument on the others."""


class _StraightThrough(torch.autograd.Function):
    """Round values, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Scaled(torch.autograd.Function):
    """Return the value unchanged, with half of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


def each(change: Callable[[Tensor], Tensor], found: Any) -> Any:
    """Apply `change` to a tensor, or to each of a tuple."""
    return tuple(map(change, found)) if isinstance(found, tuple) else change(found)


def _no_grad(f: Function, *xs: Tensor) -> Any:
    with torch.no_grad():
        return f(*xs)


def _enable_grad(f: Function, *xs: Tensor) -> Any:
    with torch.no_grad(), torch.enable_grad():
        return f(*xs)


def _hooked(f: Function, *xs: Tensor) -> Any:
    def hook(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return x

    return each(hook, f(*xs))


def _written(f: Function, *xs: Tensor) -> Any:
    """Change the results in place under no_grad."""

    def write(x: Tensor) -> Tensor:
        x = x.clone()
        with torch.no_grad():
            x.mul_(0.5)
        return x

    return each(write, f(*xs))


# No inference_mode: after torch.compile without ranks, nothing runs in the process any more (torch 2.13).
STOPS: dict[str, Stop] = {
    "": lambda f, *xs: f(*xs),
    "detach": lambda f, *xs: each(torch.detach, f(*xs)),
    "no_grad": _no_grad,
    "enable_grad": _enable_grad,
    "hooked": _hooked,
    "written": _written,
    "checkpoint": lambda f, *xs: checkpoint(f, *xs, use_reentrant=False),
    "straight through": lambda f, *xs: each(_StraightThrough.apply, f(*xs)),
    "scaled": lambda f, *xs: each(_Scaled.apply, f(*xs)),
}
AROUND = [name for name in STOPS if name not in ("straight through", "scaled", "written")]  # any steps


def _matrices(x: Tensor, d: int) -> Tensor:
    """Return the rows along a dim as (B, S, E)."""
    rows = x.movedim(d, -2)
    return rows.reshape(-1, *rows.shape[-2:])


def _exp(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    e = a(lambda y: y - b(lambda z: z.amax(d, keepdim=True), y), x).exp()
    return e / c(lambda y: y.sum(d, keepdim=True), e)


def _attention(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    rows = _matrices(x, d)
    scores = a(lambda q, k: 0.5 * (q @ k.mT), rows, b(torch.sin, rows))
    return F.dropout(c(lambda y: y.softmax(-1), scores), 0.0) @ rows


def _elementary_attention(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    rows = _matrices(x, d)
    return _exp(rows @ rows.mT, -1, a, b, c) @ rows


def _log_softmax(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    rows = _matrices(x, d)
    scores = a(lambda y: y @ y.mT, rows)
    return c(torch.exp, b(lambda y: y.log_softmax(-1), scores)) @ rows


def _key_heads(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    rows = _matrices(x, d)
    q, k = (torch.stack([rows * (i + 1) for i in range(n)], 1) for n in (4, 2))
    each = a(lambda y: y[:, :, None], k)
    repeated = b(lambda y: y.expand(-1, -1, 2, -1, -1).reshape(q.shape), each)
    values = c(lambda y: y.repeat_interleave(2, 1), k)
    return F.scaled_dot_product_attention(q, repeated, values).transpose(1, 2).flatten(2)


def _single_heads(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    rows = _matrices(x, d)
    keys = [stop(torch.sin, rows * i) for i, stop in enumerate((a, b, c))]
    return torch.cat([F.scaled_dot_product_attention(k + rows, k, rows) for k in keys], -1)


def _window(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    rows = _matrices(x, d)
    padded = a(lambda y: F.pad(y, (0, 0, 2, 0)), rows)
    moved = b(lambda y: y[:, :-2], padded)
    weight = torch.linspace(-1, 1, 3, dtype=x.dtype).expand(rows.shape[-1], 1, 3)
    return c(lambda y: F.conv1d(y.mT, weight, groups=rows.shape[-1]).mT, padded) * moved


def _shifted(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    sums = a(lambda y: y.cumsum(d), x)
    zeros = torch.zeros_like(x.narrow(d, 0, 1))
    longer = b(lambda y: torch.cat([zeros, y], d), sums)
    before, last = c(lambda y: y.split([x.shape[d], 1], d), longer)
    return before * x + last


def _loop(x: Tensor, d: int, a: Stop, b: Stop, c: Stop) -> Tensor:
    state, out = torch.zeros_like(x.select(d, 0)), []
    for row in x.unbind(d):
        state = a(torch.sigmoid, row) * b(torch.neg, state) + row
        out.append(c(lambda y: y * 2, state))
    return torch.stack(out, d)


IDIOMS: dict[str, Callable[[Tensor, int, Stop, Stop, Stop], Tensor]] = {
    "exp": _exp,
    "attention": _attention,
    "by elementary ops": _elementary_attention,
    "log_softmax": _log_softmax,
    "key heads": _key_heads,
    "single heads": _single_heads,
    "window": _window,
    "shifted": _shifted,
    "loop": _loop,
    "total - cumsum": lambda x, d, a, b, c: (
        a(lambda y: y.sum(d, keepdim=True), x) - b(lambda y: y.cumsum(d), x) + c(lambda y: y * 1, x)
    ),
    "total - cumsum + x": lambda x, d, a, b, c: (
        a(lambda y: y.sum(d, keepdim=True), x) - b(lambda y: y.cumsum(d), x) + x
    ),
    "cumsum - x": lambda x, d, a, b, c: c(lambda y, z: y - z, a(lambda y: y.cumsum(d), x), b(lambda y: y + 0, x)),
    "flips": lambda x, d, a, b, c: c(lambda y: y.flip(d), b(lambda y: y.cumsum(d), a(lambda y: y.flip(d), x))) * x,
    "last - cumsum": lambda x, d, a, b, c: (
        (lambda s: b(lambda y: y.narrow(d, -1, 1), s) - c(lambda y: y * 1, s))(a(lambda y: y.cumsum(d), x)) + x
    ),
}


def idiom(weight: Tensor, ids: Tensor, x: Tensor, d: int, name: str, *stops: str) -> Tensor:
    """Return one of IDIOMS along a dim, with stops at its three places."""
    return IDIOMS[name](x, d, *(STOPS[stop] for stop in stops))
