"""What the public scans of local tensors refuse: calls that do not fit, and integers that overflow."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile import SpError, exclusive_scan, inclusive_scan, linear_scan, segmented_scan


def refusals() -> list[tuple[Callable[[], Any], str]]:
    x, n = torch.rand(3, 5, 2), torch.ones(3, 5, 2, dtype=torch.int32)
    ids = torch.tensor([0, 0, 1, 1, 2])
    return [
        (lambda: inclusive_scan(x, 3), "SP503: inclusive_scan: dim: expected -3 to 2 for x of shape [3, 5, 2], got 3"),
        (lambda: exclusive_scan(x, -4), "SP503: exclusive_scan"),
        (lambda: exclusive_scan(torch.tensor(1.0), 1), "SP503: exclusive_scan: dim: expected -1 to 0"),
        (lambda: inclusive_scan(x, 1, "add"), "SP501: inclusive_scan: Unknown op 'add' (did you mean 'sum'?), expected one of sum, prod"),
        (lambda: inclusive_scan(x, 1, "logsumexps"), "(did you mean 'logsumexp'?)"),
        (lambda: inclusive_scan(x, 1, "mean"), "SP501: inclusive_scan: Unknown op 'mean'"),
        (lambda: inclusive_scan(x, 1, indices=True), "SP521"),
        (lambda: inclusive_scan(n, 1, "logsumexp"), "SP522: inclusive_scan: op='logsumexp' is not supported with torch.int32"),
        (lambda: inclusive_scan(x.cfloat(), 1), "SP524: inclusive_scan: x, dtype: torch.complex64"),
        (lambda: inclusive_scan(x, 1, dtype=torch.bool), "SP525"),
        (lambda: inclusive_scan(n, 1, accumulate_dtype=torch.float32), "SP526: inclusive_scan: accumulate_dtype: expected torch.int64 for a result in torch.int64"),
        (lambda: segmented_scan(x, ids[:4], 1), "SP504: segmented_scan: segment_ids: expected shape [5]"),
        (lambda: segmented_scan(x, n[..., 0], 1), "got [3, 5]. View them as [3, 5, 1]."),
        (lambda: segmented_scan(x, n[:, :1], 1), "got [3, 1, 2]"),
        (lambda: segmented_scan(x, ids.float(), 1), "SP505: segmented_scan: segment_ids: expected integers, got torch.float32"),
        (lambda: segmented_scan(x, ids > 1, 1), "got torch.bool. Make ids of the flags"),
        (lambda: segmented_scan(x, ids.to("meta"), 1), "SP506: segmented_scan"),
        (lambda: segmented_scan(x, torch.tensor([0, 1, 0, 2, 2]), 1), "SP527"),
        (lambda: segmented_scan(n, n.cumsum(0) * ids[:, None] % 2, 1), "SP527"),
        (lambda: linear_scan(n, n, 1), "SP505: linear_scan"),
        (lambda: linear_scan(x, x[:2], 1), "SP504: linear_scan: a, b: expected shapes that broadcast, got [3, 5, 2] and [2, 5, 2]"),
        (lambda: linear_scan(x, x, 3), "SP503: linear_scan"),
        (lambda: linear_scan(x, x, 1, initial=x), "SP504: linear_scan: initial: expected [3, 2]"),
        (lambda: linear_scan(x, x, 1, initial=x[0, 0].to("meta")), "SP506: linear_scan: a, b, initial: expected one device, got cpu, cpu, meta"),
        (lambda: linear_scan(x, x, 1, accumulate_dtype=torch.int64), "SP526: linear_scan"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), refusals())
def test_refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpError, match=re.escape(message)):
        call()


# Integers that overflow.

BIG = 1 << 62


@pytest.mark.parametrize(
    ("values", "op", "options", "index"),
    [
        ([BIG, BIG - 1, 1], "sum", {}, (2,)),
        ([-BIG, -BIG, -1], "sum", {}, (2,)),
        ([1 << 32, 1 << 31, 2], "prod", {}, (1,)),
        ([-2] * 64, "prod", {}, (63,)),
        ([100, 27, 1], "sum", {"dtype": torch.int8}, (2,)),
        ([300, 1], "sum", {"dtype": torch.int8}, (0,)),
        ([100, 100, 100], "sum", {"dtype": torch.uint8}, (2,)),
        ([1 << 31, 0], "sum", {"dtype": torch.int32}, (0,)),
        ([BIG, BIG, 1], "sum", {"reverse": True}, (0,)),
    ],
)
def test_tells_of_integers_that_overflow(
    values: list[int], op: str, options: dict[str, Any], index: tuple[int, ...]
) -> None:
    x = torch.tensor(values)
    with pytest.raises(
        SpError, match=rf"SP528.* the {op} is about .* at index {re.escape(str(index))}, which torch.u?int"
    ):
        inclusive_scan(x, 0, op, **options)
    assert inclusive_scan(x, 0, op, check=False, **options).shape == x.shape


@pytest.mark.parametrize(
    ("values", "op", "options"),
    [
        ([BIG, BIG - 1, -BIG], "sum", {}),
        ([-BIG, -BIG, 1], "sum", {}),
        ([-2] * 63, "prod", {}),
        ([BIG, 0, BIG, BIG], "prod", {}),
        ([100, 27, -100], "sum", {"dtype": torch.int8}),
        ([100, 100, 55], "sum", {"dtype": torch.uint8}),
        ([BIG, BIG, BIG], "max", {}),
        ([BIG] * 5, "sum", {"dtype": torch.float64}),
    ],
)
def test_integers_that_only_might_overflow_pass(values: list[int], op: str, options: dict[str, Any]) -> None:
    found, run = inclusive_scan(torch.tensor(values), 0, op, **options), None
    for value, each in zip(values, found.tolist()):
        run = value if run is None else {"sum": int.__add__, "prod": int.__mul__, "max": max}[op](run, value)
        assert each == run


def test_exclusive_and_segmented_sums_are_judged_by_what_is_in_them() -> None:
    x = torch.tensor([BIG, BIG - 1, BIG, BIG])
    assert exclusive_scan(x[:3], 0).tolist() == [0, BIG, 2 * BIG - 1]
    assert segmented_scan(x, torch.tensor([0, 0, 1, 2]), 0).tolist() == [BIG, 2 * BIG - 1, BIG, BIG]
    with pytest.raises(SpError, match=r"SP528: segmented_scan: x: the sum is about 9\.22337e\+18 at index \(3,\)"):
        segmented_scan(x, torch.tensor([0, 0, 1, 1]), 0)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), st.sampled_from(("sum", "prod")))
@settings(max_examples=100)
def test_overflow_is_told_exactly(values: list[int], op: str) -> None:
    expected, run = [], None
    for value in values:
        run = value if run is None else run + value if op == "sum" else run * value
        expected.append(run)
    fits = all(-(2**63) <= each < 2**63 for each in expected)
    try:
        assert inclusive_scan(torch.tensor(values), 0, op).tolist() == expected
        assert fits
    except SpError:
        assert not fits
