"""The public scans of local tensors: their gradients, first and second, and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.scans.scanning import OPS, TORCH, ids_of, sample
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from sp_compile import exclusive_scan, inclusive_scan, linear_scan, segmented_scan

# Gradients.


def calls() -> dict[str, Callable[..., Any]]:
    """A function of x (2, 6, 2), for each thing that has a formula of its own."""
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    found: dict[str, Callable[..., Any]] = {}
    for op in OPS:
        for reverse in (False, True):
            found[f"{op}, {reverse}"] = lambda x, op=op, r=reverse: inclusive_scan(x, 1, op, reverse=r)
            found[f"exclusive {op}, {reverse}"] = lambda x, op=op, r=reverse: finite(
                exclusive_scan(x, 1, op, reverse=r)
            )
            found[f"segmented {op}, {reverse}"] = lambda x, op=op, r=reverse: segmented_scan(x, ids, 1, op, reverse=r)
    found["last dim"] = lambda x: inclusive_scan(x, -1)
    found["last dim, prod"] = lambda x: inclusive_scan(x, -1, "prod")
    found["indices"] = lambda x: inclusive_scan(x, 1, "max", indices=True)[0]
    found["cast"] = lambda x: inclusive_scan(x.float(), 1, dtype=torch.float64)
    found["linear"] = lambda x: linear_scan(x.sigmoid(), x, 1)
    found["linear, reverse"] = lambda x: linear_scan(x.sigmoid(), x, 1, initial=x[:, 0], reverse=True)
    found["linear, broadcast"] = lambda x: linear_scan(x[:, :, :1], x, 1, initial=x[:1, 0])
    return found


def finite(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), 0)


CALLS = calls()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", [name for name in CALLS if name != "cast"])
def test_gradients(name: str) -> None:
    x = sample((2, 6, 2), torch.float64, seed=3).requires_grad_()
    assert gradcheck(CALLS[name], x)
    assert gradgradcheck(CALLS[name], x)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_torchs_where_elements_are_equal_or_zero(op: str) -> None:
    """Zeros in products, ties and NaN in extremes, -inf in logsumexps."""
    inf, nan = torch.inf, torch.nan
    values = {
        "prod": [2.0, 0.0, 3.0, 0.0, 4.0],
        "max": [1.0, 2.0, 2.0, nan, 1.0],
        "min": [2.0, 1.0, 1.0, nan, nan],
        "logsumexp": [-inf, -inf, 1.0, -inf, 2.0],
        "sum": [1.0, 0.0, 2.0, -1.0, 3.0],
    }[op]
    weights = torch.arange(1.0, 6).double()
    grads = []
    for scan in (inclusive_scan, lambda x, dim, op: TORCH[op](x, dim)):
        x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        y = scan(x, 0, op)
        (y.masked_fill(~y.isfinite(), 0) * weights).sum().backward()
        grads.append(x.grad)
    ours, torchs = grads
    if op == "logsumexp":
        assert ours[:2].tolist() == [0, 0]  # torch has NaN here
        ours, torchs = ours[2:], torchs[2:]
    torch.testing.assert_close(ours, torchs, equal_nan=True)


@pytest.mark.slow
def test_gradients_of_half_precision_stay_close() -> None:
    for op in OPS:
        x = sample((2, 300, 3), torch.bfloat16, op).requires_grad_()
        wide = x.detach().double().requires_grad_()
        for tensor in (x, wide):
            inclusive_scan(tensor, 1, op).double().mul(0.01).sum().backward()
        assert x.grad is not None
        assert wide.grad is not None
        error = (x.grad.double() - wide.grad).abs().max()
        assert error <= 0.02 * wide.grad.abs().max(), op


# Compiled.


def all_of_them(x: Tensor, ids: Tensor) -> Tensor:
    total = inclusive_scan(x, 1) + exclusive_scan(x, -2, "logsumexp", reverse=True).exp()
    total = total + segmented_scan(x, ids, 1, "prod") + linear_scan(x.sigmoid(), x, 1)
    best, where = inclusive_scan(x, 2, "max", indices=True)
    return (total * best + where).square().mean()


def two_of_them(x: Tensor, ids: Tensor) -> Tensor:
    return (segmented_scan(x, ids, 1) * linear_scan(x.sigmoid(), x, 1)).square().mean()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("loss", "backend", "dynamic"),
    [(all_of_them, "aot_eager", False), (all_of_them, "aot_eager", True), (two_of_them, "inductor", True)],
)
def test_compiles_without_graph_breaks(loss: Callable[..., Tensor], backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, dynamic=dynamic, fullgraph=True)
    for length in (7, 12):
        x = sample((2, length, 3), torch.float32, seed=length).requires_grad_()
        expected, found = loss(x, ids_of(length)), compiled(x, ids_of(length))
        torch.testing.assert_close(found, expected)
        (ours,), (theirs,) = torch.autograd.grad(found, x), torch.autograd.grad(expected, x)
        torch.testing.assert_close(ours, theirs)


def test_checks_of_values_are_left_out_of_graphs() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def scan(x: Tensor, ids: Tensor) -> Tensor:
        return segmented_scan(x, ids, 0)

    assert scan(torch.ones(3), torch.tensor([0, 1, 0])).tolist() == [1, 1, 1]
    assert inclusive_scan(torch.full((4,), 1 << 62, device="meta"), 0).is_meta
