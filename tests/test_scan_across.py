"""Scans over simulated ranks: values and gradients of the whole, and what travels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attending import randn
from scan_shards import (
    DIM,
    OPS,
    Case,
    Recurrence,
    cut,
    every,
    expected,
    finite,
    inside,
    joined,
    on_rank,
    recur,
    scan,
    simulated,
)
from torch import Tensor
from torch.autograd import gradgradcheck

from sp_compile.simulate import GROUP, run_ranks

sp = torch.ops.sp
LAYOUTS = ["contiguous", "zigzag"]
RUNS = {"whole": (), "short": (1, 2, 1, 3), "long": (9, 1, 30), "all alone": (1,)}
WINDOWS = {
    "later start": {"size": 24, "start": 5, "length": 17},
    "starts on the second rank": {"size": 24, "start": 9, "length": 4},
    "one row": {"size": 1},
    "one row of many": {"size": 16, "start": 7, "length": 1},
    "fewer rows than ranks": {"size": 3},
    "even": {"size": 32},
}
SEGMENTED = {"segments": (), "short": (1, 2, 1, 3)}


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(op: str, layout: str, n: int) -> None:
    for runs in RUNS.values():
        for case in every(Case(op, runs=runs, layout=layout)):
            close(simulated(case, n), expected(case))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_that_differ_between_columns(layout: str, op: str) -> None:
    for case in every(Case(op, runs=(4, 1, 7), wide=True, layout=layout)):
        close(simulated(case, 4), expected(case))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window: str, layout: str, n: int) -> None:
    """Padding may hold anything; what stands there afterwards is finite."""
    for op in OPS:
        for runs in ((), (2, 3)):
            for case in every(Case(op, runs=runs, layout=layout, **WINDOWS[window])):
                close(simulated(case, n, fill=math.nan), expected(case))
                shards = run_ranks(n, lambda rank, case=case: on_rank(case, rank, n, fill=math.nan))
                for rank, (y, _) in enumerate(shards):
                    rows = y[:, ~inside(case, rank, n)]
                    assert case.exclusive or op == "logsumexp" or rows.isfinite().all()


STEPS = [(op, n) for op in OPS for n in (2, 3, 4, 7, 16)]


@pytest.mark.parametrize(("op", "n"), STEPS)
def test_exchange_in_steps(op: str, n: int) -> None:
    for runs in RUNS.values():
        for case in every(Case(op, runs=runs, wide=bool(runs), exchange="steps")):
            close(simulated(case, n), expected(case))


RECURRENCES = [("contiguous", "gather"), ("zigzag", "gather"), ("contiguous", "steps")]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 16])
@pytest.mark.parametrize(("layout", "exchange"), RECURRENCES)
def test_recurrences(layout: str, exchange: str, n: int) -> None:
    for window in ({}, *WINDOWS.values()):
        for initial in (False, True):
            for reverse in (False, True):
                case = Recurrence(
                    reverse=reverse, layout=layout, exchange=exchange, initial=initial, **window
                )
                found = run_ranks(n, lambda rank, case=case: case.on_rank(rank, n, fill=math.nan))
                whole = [joined(case, [shards[i] for shards in found]) for i in range(3)]
                close([*whole, *found[-1][3:]], case.expected())
                for shards in found:
                    assert all(torch.equal(*pair) for pair in zip(shards[3:], found[0][3:]))
