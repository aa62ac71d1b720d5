"""The pool of real ranks: answers, errors, silence."""

import time

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.ranks import Ranks, RanksError


def total(x: float) -> tuple[int, float]:
    value = torch.tensor(x + dist.get_rank())
    dist.all_reduce(value, group=worker.group())
    return worker.mesh().size(), float(value)


def axes() -> list[list[int]]:
    mesh = worker.mesh2d(2, 2)
    return [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("dp", "sp")]


def fails_on_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boo")


def sleeps_on_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_answers(ranks: Ranks) -> None:
    assert ranks.run(3, total, 1.0) == [(3, 6.0)] * 3
    assert ranks.run(4, axes)[3] == [[1, 3], [2, 3]]


def test_errors_name_the_rank(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match=r"rank 1 of 2:[\s\S]*ValueError: boo"):
        ranks.run(2, fails_on_1)


@pytest.mark.slow
def test_silent_ranks_are_named_and_replaced(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match=r"no answer from ranks \[1\] of 2"):
        ranks.run(2, sleeps_on_1, timeout=1.0)
    assert ranks.run(2, total, 0.0) == [(2, 1.0)] * 2
