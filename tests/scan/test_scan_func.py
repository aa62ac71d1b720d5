"""Scans of full tensors inside torch.func."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.attention.attending import randn
from torch import Tensor

from sp_compile import exclusive_scan, inclusive_scan, linear_scan, segmented_scan

IDS = torch.tensor([0, 0, 1, 1, 1])
SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: inclusive_scan(x, 0, reverse=True),
    "prod": lambda x: exclusive_scan(x, 0, "prod"),
    "max": lambda x: inclusive_scan(x, 0, "max"),
    "max with indices": lambda x: inclusive_scan(x, 0, "max", indices=True)[0],
    "logsumexp": lambda x: inclusive_scan(x, 0, "logsumexp"),
    "segments": lambda x: segmented_scan(x, IDS, 0, "prod"),
    "recurrence": lambda x: linear_scan(x, x.cos(), 0, initial=x[0]),
}
SLOW = "ignore:There is a performance drop because we have not yet implemented the batching rule"


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("name", SCANS)
def test_grad_and_vmap(name: str) -> None:
    def loss(x: Tensor) -> Tensor:
        return (SCANS[name](x) ** 2).sum()

    x = randn(2, 5, 3)
    leaves = [row.clone().requires_grad_() for row in x]
    wanted = torch.stack([torch.autograd.grad(loss(row), row)[0] for row in leaves])
    of_whole = x.clone().requires_grad_()
    torch.vmap(loss)(of_whole).sum().backward()
    assert of_whole.grad is not None
    for found in (
        torch.func.grad(loss)(x[0])[None],
        torch.vmap(torch.func.grad(loss))(x),
        torch.func.grad(lambda x: torch.vmap(loss)(x).sum())(x),
        of_whole.grad,
    ):
        torch.testing.assert_close(found, wanted[: len(found)])


@pytest.mark.filterwarnings(SLOW)
@pytest.mark.parametrize("name", SCANS)
def test_jacobians(name: str) -> None:
    x = randn(5, 3)
    found = torch.func.jacrev(SCANS[name])(x)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(SCANS[name], x))
