"""detach and no_grad inside of a pattern: the gradient of the rewritten op stops at the same place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

from sp_compile import verify

TOLERANCE = 1e-9
WIDTH = 8


class Model(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.f = nn.Linear(WIDTH, WIDTH).double(), f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(3 * self.linear(x)).square().sum()


def without_gradient(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*xs: Tensor) -> Tensor:
        with torch.no_grad():
            return f(*xs)

    return run


def in_inference_mode(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*xs: Tensor) -> Tensor:
        with torch.inference_mode():
            found = f(*xs)
        return found.clone()

    return run


STOPS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "detach": lambda f: lambda *xs: f(*xs).detach(),
    "no_grad": without_gradient,
    "inference_mode": in_inference_mode,
}


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def scores(x: Tensor) -> Tensor:
    return x @ x.mT


def weights(x: Tensor) -> Tensor:
    return scores(x).softmax(-1)


def total(x: Tensor) -> Tensor:
    return x.sum(1, keepdim=True)


def sums(x: Tensor) -> Tensor:
    return x.cumsum(1)


def turned(x: Tensor) -> Tensor:
    return x.flip(1).cumsum(1)


def normal(x: Tensor) -> Tensor:
    s = scores(x)
    return (s - s.amax(-1, keepdim=True)).exp()


Stop = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
PATTERNS: dict[str, Callable[[Stop, Tensor], Tensor]] = {
    "total - cumsum": lambda stop, x: stop(total)(x) - sums(x),
    "total - stopped cumsum": lambda stop, x: total(x) - stop(sums)(x),
    "cumsum - x": lambda stop, x: stop(sums)(x) - x,
    "last row - cumsum": lambda stop, x: stop(lambda y: sums(y)[:, -1:])(x) - sums(x),
    "padded": lambda stop, x: F.pad(stop(sums)(x), (0, 0, 1, -1)) * x,
    "flips": lambda stop, x: stop(turned)(x).flip(1) + x,
    "difference stops": lambda stop, x: stop(lambda y: sums(y) - y)(x) + x,
    "scores": lambda stop, x: stop(scores)(x).softmax(-1) @ x,
    "weights": lambda stop, x: stop(weights)(x) @ x,
    "scaled scores": lambda stop, x: (stop(scores)(x) * 0.5).softmax(-1) @ x,
    "product": lambda stop, x: stop(lambda y: weights(y) @ y)(x) + x,
    "keys": lambda stop, x: (x @ stop(lambda y: y * 2)(x).mT).softmax(-1) @ x,
    "denominator": lambda stop, x: normal(x) / stop(lambda y: normal(y).sum(-1, keepdim=True))(x) @ x,
    "key heads": lambda stop, x: F.scaled_dot_product_attention(
        heads(x), *[stop(lambda y: heads(y)[:, :2].repeat_interleave(2, 1))(x)] * 2
    ),
}


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("name", PATTERNS)
def test_gradients(name: str, how: str) -> None:
    model = Model(lambda x: PATTERNS[name](STOPS[how], x))
    assert verify(model, torch.randn(2, 12, WIDTH).double(), sp=2, seq_dims={"x": 1}).worst <= TOLERANCE


def inside_of_vmap(x: Tensor) -> Tensor:
    return torch.func.vmap(lambda y: y * without_gradient(lambda z: z.cumsum(0))(y))(x)


def inside_of_grad(x: Tensor) -> Tensor:
    return x * torch.func.grad(lambda y: (y * without_gradient(sums)(y)).sum())(x)


def combined(x: Tensor) -> Tensor:
    """Run a torch scan whose combine function detaches its left operand."""
    left = without_gradient(lambda a: a * 1)
    return associative_scan(lambda a, b: left(a) + b, x, 1, combine_mode="generic")


@torch.inference_mode()
def nested(x: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return x.cumsum(1) - x


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("f", [inside_of_vmap, inside_of_grad, combined, nested])
def test_regions_inside_of_others(f: Callable[[Tensor], Tensor]) -> None:
    model = Model(lambda x: x + f(x))
    assert verify(model, torch.randn(2, 6, WIDTH).double(), sp=2, seq_dims={"x": 1}).worst <= TOLERANCE


ITSELF: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda h: h.to(h.dtype),
    "flatten": lambda h: h.flatten(2),
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, h)[0],
    "loss": lambda h: F.mse_loss(h, h, reduction="none"),
    "real": torch.real,
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("op", ITSELF.values(), ids=ITSELF)
def test_a_returned_operand_keeps_its_gradient(op: Callable[[Tensor], Tensor]) -> None:
    """A no-op returns its operand, also under no_grad, and later ops read the operand."""

    def f(h: Tensor) -> Tensor:
        with torch.no_grad():
            found = op(h)
            scale = found.abs() + 1
        return (h * scale + found.sin()).cumsum(1)

    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert verify(Model(f), x, sp=2).worst < TOLERANCE


class FlippedTwice(nn.Module):
    """A reversed sum, flipped twice: a separate value, which may have a hook or be written to."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sums = x.cumsum(1)
        y = sums[:, -1:] - sums + x
        z = y.flip(1).flip(1)
        if z.requires_grad:
            z.register_hook(lambda gradient: gradient * 0.5)
        return y, z


def test_two_flips_make_another_value() -> None:
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    for n in (1, 2):
        assert verify(FlippedTwice(), x, sp=n, seq_dims={"x": 1}).worst < TOLERANCE
    y, z = torch.compile(FlippedTwice(), backend="sp", options={"compiler": "aot_eager"})(x)
    assert y.untyped_storage().data_ptr() != z.untyped_storage().data_ptr()


ON_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "movedim": lambda x: x.movedim(0, 0),
    "softmax": lambda x: (x - x.amax(0)).exp() / (x - x.amax(0)).exp().sum(0),
    "sum": lambda x: x.cumsum(0) - x.sum(0) + x,
}


@pytest.mark.parametrize("name", ON_NUMBERS)
def test_dim_zero_of_a_number(name: str) -> None:
    """torch permits dim 0 for a tensor without dims."""

    class OnNumber(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ON_NUMBERS[name](x.cumsum(1).mean())

    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    assert verify(OnNumber(), x, sp=2, seq_dims={"x": 1}).worst < TOLERANCE
