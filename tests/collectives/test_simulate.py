"""Simulated ranks: turns, random numbers, and errors instead of hangs."""

import pytest
import torch

import sp_compile.lowering  # noqa: F401
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, SimulationError, run_ranks

sp = torch.ops.sp


def test_results_come_in_rank_order() -> None:
    assert run_ranks(3, lambda rank: rank * rank) == [0, 1, 4]


def test_an_error_is_raised_with_its_rank() -> None:
    def live(rank: int) -> torch.Tensor:
        if rank == 1:
            raise KeyError("boo")
        return sp.all_reduce(torch.ones(2), 3, SIMULATED_GROUP)

    with pytest.raises(KeyError, match="boo") as caught:
        run_ranks(3, live)
    (note,) = caught.value.__notes__
    assert "rank 1 of 3" in note


def test_an_error_in_backward_ends_the_other_ranks() -> None:
    def live(rank: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = sp.reduce_grad([x], "reduce", 2, SIMULATED_GROUP)[0]
        if rank == 1:
            y.register_hook(lambda grad: 1 / 0)
        y.sum().backward()

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, live)


def test_a_collective_during_unwinding_does_not_wait() -> None:
    def live(rank: int) -> None:
        try:
            assert rank != 1, "boo"
            sp.all_reduce(torch.ones(2), 3, SIMULATED_GROUP)
        finally:
            sp.all_reduce(torch.ones(2), 3, SIMULATED_GROUP)

    with pytest.raises(AssertionError, match="boo"):
        run_ranks(3, live)


@pytest.mark.parametrize("last", [False, True])
def test_a_rank_that_returns_early_is_noticed(last: bool) -> None:
    def live(rank: int) -> None:
        if (rank == 2) != last:
            sp.all_reduce(torch.ones(2), 3, SIMULATED_GROUP)

    with pytest.raises(SimulationError, match="rank 2: " + ("finished" if last else "all_reduce")):
        run_ranks(3, live)


def test_different_calls_are_named() -> None:
    with pytest.raises(SimulationError) as caught:
        run_ranks(2, lambda rank: sp.all_reduce(torch.ones(2 + rank), 2, SIMULATED_GROUP))
    assert caught.value.code == "SP571"
    assert caught.value.cause.endswith("\n  rank 0: all_reduce of float32[2]\n  rank 1: all_reduce of float32[3]")


def test_each_rank_draws_the_callers_random_numbers() -> None:
    torch.manual_seed(3)
    expected = [torch.rand(2), torch.rand(2)]
    after = torch.rand(1)
    torch.manual_seed(3)

    def live(rank: int) -> list[torch.Tensor]:
        first = torch.rand(2)
        sp.all_reduce(first, 3, SIMULATED_GROUP)
        return [first, torch.rand(2)]

    for drawn in run_ranks(3, live):
        assert all(map(torch.equal, drawn, expected))
    assert torch.equal(torch.rand(1), after)


def test_grad_mode_is_the_callers() -> None:
    with torch.no_grad():
        assert run_ranks(2, lambda rank: torch.is_grad_enabled()) == [False, False]
