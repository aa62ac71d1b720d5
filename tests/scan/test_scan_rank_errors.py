"""Scans of shards that do not fit: a clear SpError on every rank, and never a rank that waits for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks as in_rank
from torch import Tensor

import sp_compile
from sp_compile import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

TIMEOUT = 30.0


def _raised(wrong: Callable[[int, Any], Any]) -> tuple[str, Tensor]:
    """Return the error of this rank's call, and the result of a later call on the group."""
    group, message = in_rank.group(), "nothing"
    try:
        wrong(dist.get_rank(), group)
    except SpError as error:
        message = str(error)
    return message, sp_compile.inclusive_scan(torch.ones(2), 0, group=group)


def _unequal_shards(rank: int, group: Any) -> Tensor:
    return sp_compile.inclusive_scan(torch.ones(4 + rank), 0, group=group)


def _bad_op(rank: int, group: Any) -> Tensor:
    return sp_compile.inclusive_scan(torch.ones(4), 0, ("sum", "summ")[rank], group=group)


def _other_op(rank: int, group: Any) -> Tensor:
    return sp_compile.exclusive_scan(torch.ones(4), 0, ("sum", "max")[rank], group=group)


def _other_function(rank: int, group: Any) -> Tensor:
    if rank:
        return sp_compile.linear_scan(torch.ones(4), torch.ones(4), 0, group=group)
    return sp_compile.inclusive_scan(torch.ones(4), 0, group=group)


def _attention_on_one_rank(rank: int, group: Any) -> Tensor:
    x = torch.ones(1, 1, 4, 2)
    if rank:
        return sp_compile.ring_attention(x, x, x, mesh=group)
    return sp_compile.inclusive_scan(x, 2, group=group)


def _other_gradients(rank: int, group: Any) -> Tensor:
    return sp_compile.inclusive_scan(torch.ones(4).requires_grad_(rank == 0), 0, group=group)


def _ids_of_another_shape(rank: int, group: Any) -> Tensor:
    return sp_compile.segmented_scan(torch.ones(4), torch.zeros(4 + rank, dtype=torch.int64), 0, group=group)


def _ids_of_another_dtype(rank: int, group: Any) -> Tensor:
    ids = torch.zeros(4, dtype=(torch.int64, torch.int32)[rank])
    return sp_compile.segmented_scan(torch.ones(4), ids, 0, group=group)


def _odd_zigzag(rank: int, group: Any) -> Tensor:
    return sp_compile.inclusive_scan(torch.ones(3), 0, group=group, layout="zigzag")


def _too_long(rank: int, group: Any) -> Tensor:
    return sp_compile.inclusive_scan(torch.ones(3), 0, group=group, length=7)


def _zigzag_steps(rank: int, group: Any) -> Tensor:
    return sp_compile.inclusive_scan(torch.ones(4), 0, group=group, layout="zigzag", exchange="steps")


def _initial_on_one_rank(rank: int, group: Any) -> Tensor:
    first = torch.ones(2) if rank else None
    return sp_compile.linear_scan(torch.ones(4, 2), torch.ones(4, 2), 0, initial=first, group=group)


def _no_dims(rank: int, group: Any) -> Tensor:
    return sp_compile.inclusive_scan(torch.ones(()), 0, group=group)


WRONG = {
    _unequal_shards: ("SP508: inclusive_scan: ", "rank 1: x [5] torch.float32"),
    _bad_op: ("SP501: rank 1: inclusive_scan: op: ", "'summ'"),
    _other_op: ("SP508: exclusive_scan: ", "op=max"),
    _other_function: ("SP601: ", "rank 1 calls linear_scan: a [4] torch.float32"),
    _attention_on_one_rank: ("SP601: ", "rank 0 calls inclusive_scan: "),
    _other_gradients: ("SP508: inclusive_scan: ", "gradient: False"),
    _ids_of_another_shape: ("SP504: rank 1: segmented_scan: segment_ids: ", "[5]"),
    _ids_of_another_dtype: ("SP508: segmented_scan: ", "segment_ids [4] torch.int32"),
    _odd_zigzag: ("SP454: rank 0, 1: inclusive_scan: x: ", "'zigzag'"),
    _too_long: ("SP507: rank 0, 1: inclusive_scan: length: ", "0 to 6"),
    _zigzag_steps: ("SP513: rank 0, 1: inclusive_scan: exchange='steps' ", "'zigzag'"),
    _initial_on_one_rank: ("SP508: linear_scan: ", "initial [2] torch.float32"),
    _no_dims: ("SP512: rank 0, 1: inclusive_scan: x: ", ""),
}
"""The first words of the error with its code, and a value in it."""


@pytest.mark.parametrize(("wrong", "expected"), WRONG.items())
def test_every_rank_raises(ranks, wrong: Callable[[int, Any], Any], expected: tuple[str, str]) -> None:
    first_words, value = expected
    for error, after in ranks.run(2, _raised, wrong, timeout=TIMEOUT):
        assert error.startswith(first_words)
        assert value in error
        assert after.tolist()[0] in (1, 3)


def test_options_of_shards_need_a_group() -> None:
    for options in ({"length": 3}, {"layout": "zigzag"}, {"exchange": "gather"}):
        with pytest.raises(SpError, match="SP511"):
            sp_compile.inclusive_scan(torch.ones(4), 0, **options)


IDS = torch.zeros(3, dtype=torch.int64)
DIM_CALLS: dict[str, Callable[[Tensor, int, Ranks], Tensor]] = {
    "inclusive": lambda x, dim, group: sp_compile.inclusive_scan(x, dim, group=group),
    "segmented": lambda x, dim, group: sp_compile.segmented_scan(x, IDS, dim, group=group),
    "linear": lambda x, dim, group: sp_compile.linear_scan(x[0], x, dim, group=group),  # factors without the first dim
}


@pytest.mark.parametrize("name", DIM_CALLS)
def test_ranks_may_count_dims_from_either_end(name: str) -> None:
    """One call with dim=-1 on a rank and dim=1 on another."""
    x, group = torch.arange(6.0).view(2, 3), Ranks(2, SIMULATED_GROUP)
    expected = run_ranks(2, lambda _: DIM_CALLS[name](x, 1, group))
    for found, right in zip(run_ranks(2, lambda rank: DIM_CALLS[name](x, (-1, 1)[rank], group)), expected, strict=True):
        assert found.equal(right)
