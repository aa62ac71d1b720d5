"""Calls of the public scans of local tensors that raise SpError."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sp_compile import SpError, exclusive_scan, inclusive_scan, linear_scan, segmented_scan


def refusals() -> list[tuple[Callable[[], Any], str]]:
    x, n = torch.rand(3, 5, 2), torch.ones(3, 5, 2, dtype=torch.int32)
    ids = torch.tensor([0, 0, 1, 1, 2])
    return [
        (lambda: inclusive_scan(x, 3), r"SP503: inclusive_scan: dim: .*-3\b.*\b2\b.*\[3, 5, 2\].*\b3\b"),
        (lambda: exclusive_scan(x, -4), "SP503: exclusive_scan"),
        (lambda: exclusive_scan(torch.tensor(1.0), 1), r"SP503: exclusive_scan: dim: .*-1\b.*\b0\b"),
        (lambda: inclusive_scan(x, 1, "logsumexps"), "SP501: inclusive_scan: .*'logsumexps'.*'logsumexp'"),
        (lambda: inclusive_scan(x, 1, "mean"), "SP501: inclusive_scan: .*'mean'"),
        (lambda: inclusive_scan(x, 1, indices=True), "SP521"),
        (lambda: inclusive_scan(n, 1, "logsumexp"), "SP522: inclusive_scan: op='logsumexp'.*torch.int32"),
        (lambda: inclusive_scan(x.cfloat(), 1), "SP524: inclusive_scan: x, dtype: .*torch.complex64"),
        (lambda: inclusive_scan(x, 1, dtype=torch.bool), "SP525"),
        (lambda: inclusive_scan(n, 1, accumulate_dtype=torch.float32), "SP526: inclusive_scan: accumulate_dtype: .*torch.int64"),
        (lambda: segmented_scan(x, ids[:4], 1), r"SP504: segmented_scan: segment_ids: .*\[5\]"),
        (lambda: segmented_scan(x, n[..., 0], 1), r"SP504: segmented_scan: .*\[3, 5\].*\[3, 5, 1\]"),
        (lambda: segmented_scan(x, n[:, :1], 1), r"SP504: segmented_scan: .*\[3, 1, 2\]"),
        (lambda: segmented_scan(x, ids.float(), 1), "SP505: segmented_scan: segment_ids: .*torch.float32"),
        (lambda: segmented_scan(x, ids > 1, 1), "SP505: segmented_scan: .*torch.bool"),
        (lambda: segmented_scan(x, ids.to("meta"), 1), "SP506: segmented_scan"),
        (lambda: linear_scan(n, n, 1), "SP505: linear_scan"),
        (lambda: linear_scan(x, x[:2], 1), r"SP504: linear_scan: a, b: .*\[3, 5, 2\].*\[2, 5, 2\]"),
        (lambda: linear_scan(x, x, 3), "SP503: linear_scan"),
        (lambda: linear_scan(x, x, 1, initial=x), r"SP504: linear_scan: initial: .*\[3, 2\]"),
        (lambda: linear_scan(x, x, 1, initial=x[0, 0].to("meta")), "SP506: linear_scan: a, b, initial: .*cpu, cpu, meta"),
        (lambda: linear_scan(x, x, 1, accumulate_dtype=torch.int64), "SP526: linear_scan"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), refusals())
def test_refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpError, match=message):
        call()
