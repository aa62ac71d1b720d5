"""An exception at any op of any rank: every rank raises within seconds, and names rank, line and cause."""

from __future__ import annotations

import re

import pytest
import torch
from support.parallel.raising import SEEDS, SOON, Injected, problems, raised, raises, small_group
from support.parity import VOCAB, build, sp
from support.ranks import Ranks
from torch import Tensor, nn

from sp_compile.runtime.control.channel import GROUP_ENDED

QUICK = 1  # of SEEDS, of which the others are slow


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] * (i >= QUICK)) for i in SEEDS])
def test_every_rank_raises(ranks: Ranks, seed: int) -> None:
    one = Injected.of(seed, SEEDS[seed])
    raised_errors = [x for x in ranks.run(4, raises, one, timeout=300) if x is not None]
    assert not problems(one, raised_errors), (one, raised_errors)


def test_a_group_without_waits_continues(ranks: Ranks) -> None:
    """The rank that raised in a graph without exchanges makes its next call, while the others raise before the next graph."""
    one = Injected("broken", "aot_eager", 3, 0, "forward", 0.0, 0)
    raised_errors = [x for x in ranks.run(4, raises, one) if x is not None]
    assert not problems(one, raised_errors), raised_errors
    assert [x.then for x in raised_errors] == [""] * 3


@pytest.mark.slow
def test_a_rank_that_raised_after_its_last_exchange_and_does_not_come_again(ranks: Ranks) -> None:
    """The others raise in their next step, with its rank, line and cause."""
    one = Injected.of(9)
    raised_errors = [x for x in ranks.run(4, raises, one, 2 * SOON, timeout=300) if x is not None]
    others = [x for rank, x in enumerate(raised_errors) if rank != one.odd]
    assert [x.kind for x in others] == [""] * len(others)
    for x in others:
        assert x.then_seconds < SOON
        # The op of the seed has no line of its own, so the line of the call is named.
        call = r".*backward .*\w+ at support/parity.py:\d+"
        assert re.search(rf"rank {one.odd} raised ValueError: injected, {call}", x.then), x.then


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x.cumsum(1).tanh().sum()


def with_tokens(wrong: list[int], compiler: str) -> list[tuple[str, str, float]]:
    """Return a rank's error if these of nine tokens, three a rank, are not in the vocabulary, and the next step's."""
    mesh = small_group(3, f"{wrong} {compiler}")
    if mesh is None:
        return []
    run, ids = sp(build(Tokens), mesh=mesh, compiler=compiler), torch.arange(9)[None]
    run(ids).backward()
    found = ids.clone()
    found[:, wrong] = VOCAB
    return [raised(lambda given=given: run(given).backward()) for given in (found, ids)]


def test_ranks_with_equal_errors_raise_their_own(ranks: Ranks) -> None:
    """All ranks raise at once, and the next step is correct."""
    for (kind, words, seconds), then in ranks.run(4, with_tokens, [*range(9)], "aot_eager")[:3]:
        assert (kind, then[0]) == ("IndexError", "")
        assert seconds < 2
        assert re.match(r"index .*\nrank \d .* at waits/test_raised.py:\d+: x = self.emb", words)


def test_two_ranks_raise_and_a_third_waits(ranks: Ranks) -> None:
    first, second, third, _ = ranks.run(4, with_tokens, [0, 3], "aot_eager")
    assert [first[0][0], second[0][0], third[0][0]] == ["IndexError", "IndexError", "SpError"]
    assert re.search(r"rank [01] .*IndexError: .* at waits/test_raised.py", third[0][1])
    for raised_errors in (first, second, third):
        assert GROUP_ENDED in raised_errors[1][1]
        assert max(seconds for *_, seconds in raised_errors) < SOON


@pytest.mark.slow
def test_a_kernel_of_inductor_names_the_lines_that_it_may_be_of(ranks: Ranks) -> None:
    (_, words, _), _ = ranks.run(4, with_tokens, [0], "inductor", timeout=300)[1]
    assert re.match(r"SP661: rank 0 .*RuntimeError: .* at waits/test_raised.py:\d+: x = self.emb", words)
