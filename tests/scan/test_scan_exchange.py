"""Exact bytes and precision of scans of shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attention.attending import randn
from support.scans.scan_shards import DIM, OPS, Case, Recurrence, cut, joined, recur, reference, scan
from torch import Tensor

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.communicator import Communicator, current_communicator, use_communicator
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.scan.monoids import accumulate_dtype

sp = torch.ops.sp


class Counted(Communicator):
    """A communicator that writes down each collective and the bytes that this rank sends."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.sent: list[tuple[str, int]] = []

    def rank(self, group: str) -> int:
        return self.inner.rank(group)

    def start_shift(self, x: Tensor, route: str) -> Tensor:
        self.sent.append(("shift", x.nbytes))
        return self.inner.start_shift(x, route)

    def wait(self, x: Tensor) -> Tensor:
        return self.inner.wait(x)

    def broadcast(self, x: Tensor, group: str) -> Tensor:
        raise AssertionError("no scan broadcasts")

    def _all_reduce(self, x: Tensor, n: int, group: str) -> Tensor:
        raise AssertionError("no scan reduces")

    _reduce_scatter = _all_to_all = _all_reduce

    def _all_gather(self, x: Tensor, n: int, group: str) -> Tensor:
        self.sent.append(("all_gather", (n - 1) * x.nbytes))
        return self.inner.all_gather(x, n, group)


Traffic = tuple[list[tuple[str, int]], list[tuple[str, int]]]


def traffic(fn: Callable[[int, list[Tensor]], Tensor], operands: list[Tensor], n: int) -> Traffic:
    """Return the bytes that each rank sends forward and backward."""

    def live(rank: int) -> Traffic:
        counted = Counted(current_communicator())
        leaves = [x.detach().clone().requires_grad_() for x in operands]
        with use_communicator(counted):
            y = fn(rank, leaves)
            forward = list(counted.sent)
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        return forward, counted.sent[len(forward) :]

    found = run_ranks(n, live)
    assert all(each == found[0] for each in found)
    return found[0]


ROWS, COLUMNS = 8, 2 * 3


@pytest.mark.sampled(every=26)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("op", OPS)
def test_one_collective_each_way_for_every_length(op: str, layout: str, dtype: torch.dtype) -> None:
    chunks = COLUMNS * (2 if layout == "zigzag" else 1)
    inner = accumulate_dtype(op, dtype, "cpu")
    there = back = inner.itemsize
    if op != "sum":
        back = 2 * accumulate_dtype("sum", torch.promote_types(dtype, inner), "cpu").itemsize
    for n in (2, 3, 4, 16):
        for rows in (ROWS, 4 * ROWS):
            case = Case(op, layout=layout, size=rows * n, dtype=dtype)

            def fn(rank: int, leaves: list[Tensor], case: Case = case, n: int = n) -> Tensor:
                return scan(case, leaves[0], None, n)

            forward, backward = traffic(fn, [torch.ones(2, rows, 3, dtype=dtype)], n)
            assert forward == [("all_gather", (n - 1) * chunks * there)]
            assert backward == [("all_gather", (n - 1) * chunks * back)]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_segments_add_two_ids_and_a_flag(op: str, wide: bool) -> None:
    n, ids = 4, COLUMNS if wide else 1
    for rows in (ROWS, 4 * ROWS):
        case = Case(op, runs=(3, 4), wide=wide, size=rows * n)

        def fn(rank: int, leaves: list[Tensor], case: Case = case) -> Tensor:
            whole = case.ids()
            assert whole is not None
            return scan(case, leaves[0], cut(case, whole, rank, n, DIM if wide else 0), n)

        forward, backward = traffic(fn, [torch.ones(2, rows, 3, dtype=torch.float64)], n)
        assert forward == [("all_gather", (n - 1) * (COLUMNS * 8 + ids * 17))]
        back = COLUMNS * 8 + ids if op == "sum" else COLUMNS * 16
        assert backward == [("all_gather", (n - 1) * back)]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 16])
def test_steps(n: int) -> None:
    rounds = math.ceil(math.log2(n))
    for rows in (ROWS, 4 * ROWS):
        case = Recurrence(size=rows * n, exchange="steps")

        def fn(rank: int, leaves: list[Tensor], case: Case = case) -> Tensor:
            return recur(case, leaves[0], leaves[1], None, n)

        operand = torch.ones(2, rows, 3, dtype=torch.float64)
        forward, backward = traffic(fn, [operand, operand], n)
        assert forward == backward == [("shift", COLUMNS * 2 * 8)] * rounds


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_recurrences(layout: str) -> None:
    n, chunks = 4, COLUMNS * (2 if layout == "zigzag" else 1)
    for rows in (ROWS, 4 * ROWS):
        case = Recurrence(size=rows * n, layout=layout)

        def fn(rank: int, leaves: list[Tensor], case: Case = case) -> Tensor:
            return recur(case, leaves[0], leaves[1], leaves[2], n)

        operand = torch.ones(2, rows, 3, dtype=torch.float64)
        forward, backward = traffic(fn, [operand, operand, operand[:, 0]], n)
        assert forward == backward == [("all_gather", (n - 1) * chunks * 2 * 8)]


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes(op: str) -> None:
    n = 4
    for rows in (ROWS, 4 * ROWS):

        def fn(rank: int, leaves: list[Tensor], rows: int = rows) -> Tensor:
            frame = [1, rows * n, 0, rows * n]
            return sp.extremes(leaves[0], DIM, op, False, frame, "gather", n, SIMULATED_GROUP)[0]

        forward, backward = traffic(fn, [torch.ones(2, rows, 3)], n)
        assert forward == [("all_gather", (n - 1) * COLUMNS * (4 + 8))]
        assert backward == [("all_gather", (n - 1) * COLUMNS * 2 * 8)]


def _kept(rows: int, op: str) -> int:
    """Elements that a rank's backward keeps, without x."""

    def live(rank: int) -> int:
        x = torch.ones(2, rows, 3, requires_grad=True)
        kept: dict[int, int] = {}

        def pack(y: Tensor) -> Tensor:
            storage = y.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes() // y.element_size()
            return y

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
            scan(Case(op, size=rows * 16), x, None, 16)
        kept.pop(x.untyped_storage().data_ptr(), None)
        return sum(kept.values())

    return max(run_ranks(16, live))


@pytest.mark.parametrize("op", OPS)
def test_the_backward_keeps_a_shard_and_a_carry(op: str) -> None:
    for rows in (64, 256):
        assert _kept(rows, op) <= (0 if op == "sum" else rows * COLUMNS + COLUMNS)


def test_the_faster_exchange_is_taken() -> None:
    """Vectors are gathered, large states of many ranks go in steps."""

    def live(rank: int) -> list[str]:
        names = []
        for columns in (4, 1 << 20):
            counted = Counted(current_communicator())
            with use_communicator(counted):
                sp_compile.inclusive_scan(
                    torch.ones(1, columns),
                    0,
                    group=Ranks(16, SIMULATED_GROUP),
                    check=False,
                    accumulate_dtype=torch.float32,
                )
            names.append(sorted({name for name, _ in counted.sent}))
        return names

    assert run_ranks(16, live)[0] == [["all_gather"], ["shift"]]


# Precision.


@pytest.mark.sampled(every=26)
@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_integers_are_exact(op: str, dtype: torch.dtype, n: int) -> None:
    values = torch.randint(0, 4, (2, 61, 3), generator=torch.Generator().manual_seed(n))
    values = (values if op == "sum" else values + 1).to(dtype)
    for layout in ("contiguous", "zigzag"):
        for runs in ((), (5, 2)):
            case = Case(op, runs=runs, layout=layout, size=61)
            ids = case.ids()

            def live(rank: int, case: Case = case, ids: Tensor | None = ids) -> Tensor:
                own = ids if ids is None else cut(case, ids, rank, n, 0)
                return scan(case, cut(case, values, rank, n), own, n)

            wanted = reference(case, values)
            found = joined(case, run_ranks(n, live))
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)


def _errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [(a.double() - b).abs().max().item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("op", ["sum", "logsumexp", "prod"])
def test_as_precise_as_torch(op: str, n: int, dtype: torch.dtype) -> None:
    x = randn(4, 256, 5).to(dtype)
    x = 1 + x / 16 if op == "prod" else x
    grad = randn(4, 256, 5, seed=2).to(dtype)
    case = Case(op, size=256)

    def one_device(x: Tensor) -> list[Tensor]:
        x = x.detach().clone().requires_grad_()
        y = OPS[op][0](x.movedim(1, 0)).movedim(0, 1)
        return [y.detach(), *torch.autograd.grad(y, x, grad.to(x.dtype))]

    def live(rank: int) -> list[Tensor]:
        own = cut(case, x, rank, n).requires_grad_()
        y = scan(case, own, None, n)
        return [y.detach(), *torch.autograd.grad(y, own, cut(case, grad, rank, n))]

    found = [joined(case, list(shards)) for shards in zip(*run_ranks(n, live))]
    assert all(y.dtype == dtype for y in found)
    exact = one_device(x.double())
    for ours, theirs in zip(_errors(found, exact), _errors(one_device(x), exact)):
        assert ours <= 2 * theirs


# The adjoint identity <A g, dx> = <g, A dx>, which takes no differences.


@pytest.mark.parametrize("n", [2, 3, 16])
@pytest.mark.parametrize("exchange", ["gather", "steps"])
def test_adjoint_identity(exchange: str, n: int) -> None:
    for exclusive in (False, True):
        for runs in ((), (5, 2, 1)):
            case = Case("sum", exclusive=exclusive, runs=runs, exchange=exchange, size=37)
            x, g = randn(2, 37, 3, seed=1), randn(2, 37, 3, seed=2)
            forward, backward = _linear_map(case, x, g, n)
            torch.testing.assert_close((forward * g).sum(), (x * backward).sum(), rtol=1e-12, atol=1e-12)
            recurrence = Recurrence(exchange=exchange, size=37)
            forward, backward = _linear_map(recurrence, x, g, n)
            torch.testing.assert_close((forward * g).sum(), (x * backward).sum(), rtol=1e-12, atol=1e-12)


def _linear_map(case: Case, x: Tensor, g: Tensor, n: int) -> tuple[Tensor, Tensor]:
    ids = case.ids()

    def live(rank: int) -> list[Tensor]:
        own = cut(case, x, rank, n).requires_grad_()
        if isinstance(case, Recurrence):
            y = recur(case, cut(case, case.operands()[0], rank, n), own, None, n)
        else:
            y = scan(case, own, ids if ids is None else cut(case, ids, rank, n, 0), n)
        return [y.detach(), *torch.autograd.grad(y, own, cut(case, g, rank, n, fill=0.0))]

    forward, backward = (joined(case, list(shards)) for shards in zip(*run_ranks(n, live)))
    return forward, backward


def test_exchanges_that_do_not_fit() -> None:
    x: Any = torch.ones(4)
    for how, message in (
        (([1, 4, 0, 4, 2], "steps", 2), "SP551: exchange: 'steps'"),
        (([1, 4, 0, 4], "ring", 2), "SP551: exchange: .*'ring'"),
    ):
        with pytest.raises(SpError, match=message):
            sp.scan(x, None, 0, "sum", False, False, None, None, *how, SIMULATED_GROUP)
