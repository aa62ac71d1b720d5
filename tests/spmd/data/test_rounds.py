"""Assignment of batches to replicas: every batch once a round, equal numbers, the same order on all ranks."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sp_compile.data.rounds import rank_batches

SIZES = st.integers(0, 12), st.integers(1, 4)


@given(*SIZES)
def test_only_the_last_round_is_dropped(batches: int, n: int) -> None:
    each = [list(rank_batches(range(batches), rank, n, drop_last=True)) for rank in range(n)]
    rounds = batches // n
    assert sorted(chain(*each)) == list(range(rounds * n))
    assert {len(one) for one in each} == {rounds}


@given(*SIZES)
def test_only_the_last_round_is_filled(batches: int, n: int) -> None:
    each = [list(rank_batches(range(batches), rank, n, drop_last=False)) for rank in range(n)]
    assert {len(one) for one in each} == {-(-batches // n)}
    assert set(chain(*each)) == set(range(batches))
    spare = -batches % n
    assert sorted(chain(*each)) == sorted(
        [*range(batches), *(i % max(batches, 1) for i in range(spare))] if batches else []
    )


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_stream_without_an_end(n: int) -> None:
    def stream():
        number = 0
        while True:
            yield number
            number += 1

    batches = rank_batches(stream(), n - 1, n, drop_last=False)
    assert [next(batches) for _ in range(3)] == [n - 1, 2 * n - 1, 3 * n - 1]
