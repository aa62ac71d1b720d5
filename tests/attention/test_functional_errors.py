"""Invalid calls of functional attention: the same SpError on every rank, and no rank that waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks as in_rank
from torch import Tensor

import sp_compile
from sp_compile import SpError, gathered_attention, hybrid_attention, ring_attention, ulysses_attention
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

TIMEOUT = 30.0


def operands(heads: int = 4, kv_heads: int = 4, s: int = 8, t: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, heads, s, 4), torch.randn(1, kv_heads, t, 4), torch.randn(1, kv_heads, t, 4)


def _raised(call: Callable[[int], Any]) -> str:
    """Return the error of this rank's call."""
    try:
        call(dist.get_rank())
    except SpError as error:
        return str(error)
    return "nothing"


# Each call differs from rank to rank, or is wrong on every rank.


def _unequal_queries(rank: int) -> Tensor:
    return ring_attention(*operands(s=8 + 2 * rank), mesh=in_rank.group())


def _unequal_keys(rank: int) -> Tensor:
    return gathered_attention(*operands(t=8 + rank), mesh=in_rank.group())


def _other_dtype(rank: int) -> Tensor:
    dtype = torch.bfloat16 if rank else torch.float32
    return ring_attention(*(x.to(dtype) for x in operands()), mesh=in_rank.group())


def _other_op(rank: int) -> Tensor:
    op = (ring_attention, ulysses_attention)[rank]
    return op(*operands(), mesh=in_rank.group())


def _other_option(rank: int) -> Tensor:
    return ring_attention(*operands(), mesh=in_rank.group(), is_causal=True, window=4 + rank)


def _other_gradients(rank: int) -> Tensor:
    q, k, v = operands()
    return ulysses_attention(q.requires_grad_(), k.requires_grad_(rank == 0), v, mesh=in_rank.group())


def _three_dims_on_one_rank(rank: int) -> Tensor:
    q, k, v = operands()
    return ring_attention(q[0] if rank else q, k, v, mesh=in_rank.group())


def _no_tensor_on_one_rank(rank: int) -> Tensor:
    q, k, v = operands()
    return ring_attention(q, None if rank else k, v, mesh=in_rank.group())  # type: ignore[arg-type]


def _way_home_on_one_rank(rank: int) -> Tensor:
    return ring_attention(*operands(), mesh=in_rank.group(), kv_grads=("travel", "fly")[rank])


def _odd_zigzag(rank: int) -> Tensor:
    return ring_attention(*operands(s=7, t=7), mesh=in_rank.group(), layout="zigzag")


def _heads(rank: int) -> Tensor:
    return ulysses_attention(*operands(heads=3, kv_heads=3), mesh=in_rank.group())


def _no_factor(rank: int) -> Tensor:
    return hybrid_attention(*operands(heads=6, kv_heads=6), mesh=in_rank.group(), ulysses=3)


DIFFER = {
    _unequal_queries: "rank 1: q [1, 4, 10, 4]",
    _unequal_keys: "rank 1: q [1, 4, 8, 4], k [1, 4, 9, 4]",
    _other_dtype: "rank 1: q [1, 4, 8, 4], k [1, 4, 8, 4], v [1, 4, 8, 4], torch.bfloat16",
    _other_op: "ulysses_attention over 2 x 1 ranks",
    _other_option: "window=5",
    _other_gradients: "gradients of q, k, v: [True, False, False]",
}
WRONG = {
    _three_dims_on_one_rank: "SP504: rank 1: attention: q, k, v",
    _no_tensor_on_one_rank: "SP502: rank 1: attention: k: ",
    _way_home_on_one_rank: "SP507: rank 1: attention: kv_grads: ",
    _odd_zigzag: "SP454: rank 0, 1: attention: q, k, v",
    _heads: "SP453: rank 0, 1: attention: ulysses_attention",
    _no_factor: "SP453: rank 0, 1: attention: hybrid_attention",
}


@pytest.mark.parametrize(("call", "error"), [*DIFFER.items(), *WRONG.items()])
def test_every_rank_raises_the_same(ranks, call: Callable[[int], Any], error: str) -> None:
    first, second = ranks.run(2, _raised, call, timeout=TIMEOUT)
    assert first == second
    assert error in first


def _raised_then_right(call: Callable[[int], Any]) -> tuple[str, Tensor]:
    error = _raised(call)
    return error, ring_attention(*operands(), mesh=in_rank.group())


def test_the_group_works_after_an_error(ranks) -> None:
    for error, out in ranks.run(2, _raised_then_right, _unequal_queries, timeout=TIMEOUT):
        assert "SP508" in error
        assert out.shape == (1, 4, 8, 4)


def test_simulated_ranks_raise_as_well() -> None:
    def live(rank: int) -> Tensor:
        return ring_attention(*operands(s=8 + rank), mesh=Ranks(2, SIMULATED_GROUP))

    with pytest.raises(SpError, match="SP508"):
        run_ranks(2, live)


@pytest.mark.parametrize("name", ["attn_mask", "documents", "sinks"])
def test_dtypes_of_options_are_compared(name: str) -> None:
    def live(rank: int) -> Tensor:
        options = {
            "attn_mask": torch.zeros(16, 16, dtype=torch.float32 if rank else torch.bool),
            "documents": torch.zeros(1, 16, dtype=torch.int32 if rank else torch.int64),
            "sinks": torch.zeros(4, dtype=torch.float64 if rank else torch.float32),
        }
        return ring_attention(*operands(), mesh=Ranks(2, SIMULATED_GROUP), **{name: options[name]})

    with pytest.raises(SpError, match=rf"(?s)SP508: .*{name} \[[\d, ]+\] torch\."):
        run_ranks(2, live)


# One rank is enough for what does not depend on the others.


WHOLE = (1, 4, 8, 8)
ALONE: list[tuple[str, str, dict[str, Any]]] = [
    ("SP507", "layout", {"layout": "zigzags"}),
    ("SP507", "window", {"window": 0}),
    ("SP507", "length", {"length": 10}),
    ("SP509", "kv_length", {"length": 6}),
    ("SP504", "documents", {"documents": torch.zeros(1, 4, dtype=torch.int64)}),
    ("SP505", "documents", {"documents": torch.zeros(1, 8)}),
    ("SP504", "attn_mask", {"attn_mask": torch.ones(1, 1, 4, 8)}),
    ("SP505", "attn_mask", {"attn_mask": torch.ones(WHOLE, dtype=torch.int64)}),
    ("SP507", "dropout_p", {"dropout_p": 1.0}),
    ("SP504", "sinks", {"sinks": torch.zeros(2)}),
    ("SP505", "sinks", {"sinks": torch.zeros(4, dtype=torch.int64)}),
    ("SP502", "seed", {"dropout_p": 0.1, "seed": torch.tensor([1])}),
    ("SP502", "seed", {"dropout_p": 0.1, "seed": 1.5}),
    ("SP502", "attn_mask", {"attn_mask": [[True]]}),
    ("SP502", "documents", {"documents": [0] * 8}),
    ("SP502", "sinks", {"sinks": 0.0}),
    ("SP502", "length", {"length": "8"}),
    ("SP502", "kv_length", {"kv_length": 8.0}),
    ("SP502", "dropout_p", {"dropout_p": None}),
]


@pytest.mark.parametrize(("code", "name", "options"), ALONE)
def test_options(code: str, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(SpError, match=f"{code}: attention: {name}:"):
        sp_compile.ring_attention(*operands(), **options)


def test_operands() -> None:
    q, k, v = operands()
    for wrong, error in (
        ((q, k, v[:, :, :4]), "SP504"),
        ((None, k, v), "SP502: attention: q: "),
        ((q, k.tolist(), v), "SP502: attention: k"),
        ((q, k.double(), v), "SP505"),
        ((q.long(), k.long(), v.long()), "SP505"),
        ((q, k.to("meta"), v), "SP506"),
        (operands(kv_heads=3), r"SP451.*\b4\b.*\b3\b"),
    ):
        with pytest.raises(SpError, match=error):
            sp_compile.gathered_attention(*wrong)


def test_shapes_alone() -> None:
    operands_without_data = (x.to("meta") for x in operands(kv_heads=2))
    assert sp_compile.ring_attention(*operands_without_data, is_causal=True).shape == (1, 4, 8, 4)


def test_a_hybrid_needs_its_width() -> None:
    def live(rank: int, **options: Any) -> Tensor:
        return hybrid_attention(*operands(), mesh=Ranks(2, SIMULATED_GROUP), **options)

    with pytest.raises(SpError, match="SP452"):
        run_ranks(2, live)
    with pytest.raises(SpError, match=r"SP502.*ulysses: "):
        run_ranks(2, lambda rank: live(rank, ulysses=2.0))
    assert hybrid_attention(*operands(), ulysses=2).shape == (1, 4, 8, 4)  # one rank needs none


def _outside() -> str:
    group = dist.new_group([0])
    return _raised(lambda rank: ring_attention(*operands(), mesh=group))


def test_a_rank_outside_the_group(ranks) -> None:
    assert "SP112" in ranks.run(4, _outside, timeout=TIMEOUT)[1]
