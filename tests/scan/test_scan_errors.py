"""Calls of the public scans of local tensors that raise SpError."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sp_compile import SpError, exclusive_scan, inclusive_scan, linear_scan, segmented_scan


def refusals() -> list[tuple[Callable[[], Any], str]]:
    x, n = torch.rand(3, 5, 2), torch.ones(3, 5, 2, dtype=torch.int32)
    ids = torch.tensor([0, 0, 1, 1, 2])
    return [
        (lambda: inclusive_scan(x, 3), "inclusive_scan: dim 3 is out of range for x of shape [3, 5, 2]"),
        (lambda: exclusive_scan(x, -4), "exclusive_scan: dim -4 is out of range"),
        (lambda: exclusive_scan(torch.tensor(1.0), 1), "expected -1 to 0"),
        (lambda: inclusive_scan(x, 1, "logsumexps"), "(did you mean 'logsumexp'?)"),
        (lambda: inclusive_scan(x, 1, "mean"), "unknown op 'mean'; known: sum, prod"),
        (lambda: inclusive_scan(x, 1, indices=True), "indices=True is for max and min, a sum is at no index"),
        (lambda: inclusive_scan(n, 1, "logsumexp"), "got torch.int32; pass dtype=torch.float32"),
        (lambda: inclusive_scan(x.cfloat(), 1), "complex numbers are not supported, got torch.complex64"),
        (lambda: inclusive_scan(x, 1, dtype=torch.bool), "dtype=torch.bool cannot hold a sum"),
        (lambda: inclusive_scan(n, 1, accumulate_dtype=torch.float32), "with a result in torch.int64; usual:"),
        (lambda: segmented_scan(x, ids[:4], 1), "shape [5], or one that broadcasts to x [3, 5, 2], got [4]"),
        (lambda: segmented_scan(x, n[..., 0], 1), "got [3, 5]; view them as [3, 5, 1]"),
        (lambda: segmented_scan(x, n[:, :1], 1), "got [3, 1, 2]"),
        (lambda: segmented_scan(x, ids.float(), 1), "segment_ids are integers, got torch.float32"),
        (lambda: segmented_scan(x, ids > 1, 1), "segment_ids are integers, got torch.bool; flags"),
        (lambda: segmented_scan(x, ids.to("meta"), 1), "on one device, got meta and cpu"),
        (lambda: linear_scan(n, n, 1), "a, b and initial are floating-point, got torch.int32, torch.int32"),
        (lambda: linear_scan(x, x[:2], 1), "do not broadcast: [3, 5, 2] and [2, 5, 2]"),
        (lambda: linear_scan(x, x, 3), "linear_scan: dim 3 is out of range"),
        (lambda: linear_scan(x, x, 1, initial=x), "without dim 1, [3, 2], or broadcasts to it, got [3, 5, 2]"),
        (lambda: linear_scan(x, x, 1, initial=x[0, 0].to("meta")), "on one device, got cpu, cpu, meta"),
        (lambda: linear_scan(x, x, 1, accumulate_dtype=torch.int64), "torch.int64 is not floating-point"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), refusals())
def test_refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpError, match=re.escape(message)):
        call()
