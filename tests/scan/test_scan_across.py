"""Scans over simulated ranks: values and gradients of the full scan, and exchanged bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.scans.scan_shards import (
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

from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

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


@pytest.mark.sampled(every=46)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients(op: str, layout: str, n: int) -> None:
    for runs in RUNS.values():
        for case in every(Case(op, runs=runs, layout=layout)):
            close(simulated(case, n), expected(case))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_segments_that_differ_between_columns(layout: str, op: str) -> None:
    for case in every(Case(op, runs=(4, 1, 7), wide=True, layout=layout)):
        close(simulated(case, 4), expected(case))


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window: str, layout: str, n: int) -> None:
    """Padding may have any values, and is finite after the scan."""
    for op in OPS:
        for runs in ((), (2, 3)):
            for case in every(Case(op, runs=runs, layout=layout, **WINDOWS[window])):
                close(simulated(case, n, fill=math.nan), expected(case))
                shards = run_ranks(n, lambda rank, case=case: on_rank(case, rank, n, fill=math.nan))
                for rank, (y, _) in enumerate(shards):
                    rows = y[:, ~inside(case, rank, n)]
                    assert case.exclusive or op == "logsumexp" or rows.isfinite().all()


STEPS = [(op, n) for op in OPS for n in (2, 3, 4, 7, 16)]


@pytest.mark.sampled(every=28)
@pytest.mark.parametrize(("op", "n"), STEPS)
def test_exchange_in_steps(op: str, n: int) -> None:
    for runs in RUNS.values():
        for case in every(Case(op, runs=runs, wide=bool(runs), exchange="steps")):
            close(simulated(case, n), expected(case))


RECURRENCES = [("contiguous", "gather"), ("zigzag", "gather"), ("contiguous", "steps")]


@pytest.mark.sampled(every=24)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 16])
@pytest.mark.parametrize(("layout", "exchange"), RECURRENCES)
def test_recurrences(layout: str, exchange: str, n: int) -> None:
    for window in ({}, *WINDOWS.values()):
        for initial in (False, True):
            for reverse in (False, True):
                case = Recurrence(reverse=reverse, layout=layout, exchange=exchange, initial=initial, **window)
                found = run_ranks(n, lambda rank, case=case: case.on_rank(rank, n, fill=math.nan))
                whole = [joined(case, [shards[i] for shards in found]) for i in range(3)]
                close([*whole, *found[-1][3:]], case.expected())
                for shards in found:
                    assert all(torch.equal(*pair) for pair in zip(shards[3:], found[0][3:]))


# Extremes with their positions.


def _extremes(case: Case, rank: int, n: int) -> list[Tensor]:
    x = cut(case, case.operand(), rank, n, fill=math.nan).requires_grad_()
    y, index = sp.extremes(x, DIM, case.op, case.reverse, case.frame(), case.exchange, n, SIMULATED_GROUP)
    assert not index.requires_grad
    grad = cut(case, case.cotangent(), rank, n, fill=0.0)
    return [y.detach(), index, torch.autograd.grad(y, x, grad)[0]]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("n", [1, 2, 4, 16])
@pytest.mark.parametrize(("layout", "exchange"), RECURRENCES)
@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes(op: str, layout: str, exchange: str, n: int) -> None:
    for window in ({}, *WINDOWS.values()):
        for reverse in (False, True):
            case = Case(op, reverse=reverse, layout=layout, exchange=exchange, **window)
            found = run_ranks(n, lambda rank, case=case: _extremes(case, rank, n))
            y, index, grad = (joined(case, list(shards)) for shards in zip(*found))
            x = case.operand().requires_grad_()
            wanted, position = getattr(torch, f"cum{op}")(x.flip(DIM) if reverse else x, DIM)
            if reverse:
                wanted, position = wanted.flip(DIM), case.window - 1 - position.flip(DIM)
            assert torch.equal(y, wanted)
            assert torch.equal(index, position)
            close([grad], list(torch.autograd.grad(wanted, x, case.cotangent())))
            for shards in found:
                assert ((shards[1] >= 0) & (shards[1] < case.window)).all()


def test_nan_is_an_extreme() -> None:
    x = torch.tensor([1.0, math.nan, 3.0, math.nan, 0.0, 7.0])
    case = Case("max", size=6)
    for reverse in (False, True):
        wanted = torch.cummax(x.flip(0) if reverse else x, 0)

        def live(rank: int, reverse: bool = reverse) -> tuple[Tensor, Tensor]:
            return sp.extremes(
                x[rank * 2 : rank * 2 + 2], 0, "max", reverse, case.frame(), "gather", 3, SIMULATED_GROUP
            )

        y, index = (torch.cat(shards) for shards in zip(*run_ranks(3, live)))
        torch.testing.assert_close(y.flip(0) if reverse else y, wanted[0], equal_nan=True)
        assert torch.equal(5 - index.flip(0) if reverse else index, wanted[1])


# Second derivatives.


def _twice(case: Case, fn: Callable[..., Tensor], leaves: list[Tensor], sharded: int, n: int) -> list[Tensor]:
    """Return the full second-order gradient: of the sum of squares of the gradient of the sum of cubes."""

    def live(rank: int) -> list[Tensor]:
        own = [cut(case, x, rank, n) if i < sharded else x for i, x in enumerate(leaves)]
        own = [x.detach().clone().requires_grad_() for x in own]
        y = finite(fn(case, *own, rank, n))
        first = torch.autograd.grad(y, own, cut(case, y_squares, rank, n, fill=0.0) * y, create_graph=True)
        sums = [g * cut(case, torch.ones(2, case.window, 3), rank, n, fill=0.0) for g in first[:sharded]]
        # What is the same on all ranks has a cotangent that is, too.
        loss = sum((g * g).sum() for g in [*sums, *first[sharded:]])
        return list(torch.autograd.grad(loss, own))

    y_squares = case.cotangent()
    found = run_ranks(n, live)
    whole = [joined(case, [shards[i] for shards in found]) for i in range(sharded)]
    return [*whole, *found[-1][sharded:]]


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(op: str, layout: str, n: int) -> None:
    for runs in ((), (2, 3)):
        for case in every(Case(op, runs=runs, size=7, layout=layout)):
            x, ids = case.operand().nan_to_num(neginf=0.0), case.ids()

            def fn(case: Case, x: Tensor, rank: int, n: int, ids: Tensor | None = ids) -> Tensor:
                return scan(case, x, ids if ids is None else cut(case, ids, rank, n, 0), n)

            close(_twice(case, fn, [x], 1, n), _twice(replace(case, layout="contiguous"), fn, [x], 1, 1))


@pytest.mark.parametrize(("layout", "exchange"), RECURRENCES)
def test_second_derivatives_of_recurrences(layout: str, exchange: str) -> None:
    for reverse in (False, True):
        case = Recurrence(reverse=reverse, layout=layout, exchange=exchange, size=7)

        def fn(case: Case, a: Tensor, b: Tensor, first: Tensor, rank: int, n: int) -> Tensor:
            return recur(case, a, b, first, n)

        wanted = _twice(replace(case, layout="contiguous"), fn, case.operands(), 2, 1)
        close(_twice(case, fn, case.operands(), 2, 3), wanted)
