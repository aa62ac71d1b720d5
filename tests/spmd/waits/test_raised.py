"""An exception at any op of any rank: every rank raises within seconds, and names rank, line and cause."""

from __future__ import annotations

import pytest
from support.parallel.raising import Injected, problems, raises
from support.ranks import Ranks

QUICK, ALL, INDUCTOR = 4, 40, 10


def check(ranks: Ranks, one: Injected) -> None:
    told = [x for x in ranks.run(4, raises, one, timeout=300) if x is not None]
    assert not problems(one, told), (one, told)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] * (i >= QUICK)) for i in range(ALL)])
def test_every_rank_raises(ranks: Ranks, seed: int) -> None:
    check(ranks, Injected.of(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ALL, ALL + INDUCTOR))
def test_every_rank_raises_under_inductor(ranks: Ranks, seed: int) -> None:
    check(ranks, Injected.of(seed, "inductor"))
