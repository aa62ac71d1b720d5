"""The op of every registered strategy on local shards, against single-device attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.attention import toy_strategy
from torch import Tensor

from sp_compile.lowering.base.ranks import STRATEGIES
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

sp = torch.ops.sp
BATCH, DIM = 2, 4
Mask = tuple[Tensor | None, list[Tensor], list[Tensor], list[int], str]
MASKS = {
    "full": lambda s, t: (None, [], [], [], ""),
    "causal": lambda s, t: (None, [], [], [], "k <= q"),
    "window": lambda s, t: (None, [], [], [], "(k <= q) & (q - k < 4)"),
    "padding": lambda s, t: (None, [], [(torch.arange(t) < t - 3).expand(BATCH, t)], [], "Ne(col0, 0) & (k <= q)"),
    "documents": lambda s, t: (None, [_documents(s)], [_documents(t)], [], "Eq(row0, col0)"),
    "packed": lambda s, t: (None, _packed(s, 1), _packed(t, 1), [], "Eq(row0, col0) & (col1 <= row1)"),
    "packed apart": lambda s, t: (None, _packed(s), _packed(t), [], "Eq(row0, col0) & (col1 <= row1)"),
    "prefix": lambda s, t: (None, [], [], [3], "(k <= q) | (k < n0)"),
    "bias": lambda s, t: (_random(1, 4, s, t, seed=9), [], [], [], "k <= q"),
    "keys only": lambda s, t: (_random(BATCH, 1, 1, t, seed=9), [], [], [], ""),
}


def _documents(length: int) -> Tensor:
    return (torch.arange(length) // 5).expand(BATCH, length)


def _packed(length: int, batch: int = BATCH) -> list[Tensor]:
    """Documents of five tokens and positions in them; batch entries begin within another one's documents."""
    at = torch.arange(length) + 2 * torch.arange(batch)[:, None]
    return [at // 5, at % 5]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, allowed: Tensor) -> Tensor:
    """Return plain attention over full sequences, in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def allowed(lookups: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[int], str], s: int, t: int) -> Tensor:
    """Return the predicate as a full mask, evaluated by Python."""
    rows, cols, sizes, predicate = lookups
    names = {"q": torch.arange(s)[:, None], "k": torch.arange(t), "Eq": torch.eq, "Ne": torch.ne}
    names |= {f"row{i}": x[:, None, :, None] for i, x in enumerate(rows)}
    names |= {f"col{i}": x[:, None, None, :] for i, x in enumerate(cols)}
    names |= {f"n{i}": x for i, x in enumerate(sizes)}
    true = torch.ones(1, 1, s, t, dtype=torch.bool)
    return true & eval(predicate, {}, names) if predicate else true


def cut(x: Tensor, frame: list[int], n: int) -> Tensor:
    return sp.shard(x, 2, frame, n, SIMULATED_GROUP)


OWN: dict[str, tuple[Any, ...]] = {
    "steps": ("all",),
    "ulysses": (2,),
    "grads": ("travel", "scatter"),
    "orders": (None,),
    "mask_rows": (False,),  # True in masks/test_sparse_masks.py
}
"""Values of the arguments that only some ops have, after the common ones; "all" is the number of ranks."""


def _calls() -> Iterator[tuple[str, tuple[Any, tuple[Any, ...]]]]:
    """Every op with all combinations of its own arguments."""
    for name, strategy in STRATEGIES.items():
        if strategy.op is not None:
            arguments = [a.name for a in strategy.op._schema.arguments]
            for own in itertools.product(*(OWN[a] for a in arguments[arguments.index("balance") + 1 :])):
                yield ", ".join([name, *map(str, own)]), (strategy.op, own)


with toy_strategy.registered():
    OPS = dict(_calls())


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    with toy_strategy.registered():
        yield


def check(
    op: str,
    mask: str,
    n: int,
    s: int,
    t: int,
    kv_heads: int,
    folds: list[int],
    balance: bool = False,
    with_sinks: bool = False,
) -> None:
    """Value and every gradient of the op on n simulated ranks, against `dense`."""
    given, rows, cols, sizes, predicate = MASKS[mask](s, t)
    q, k, v = (_random(BATCH, h, x, DIM, seed=i) for i, (h, x) in enumerate([(4, s), (kv_heads, t), (kv_heads, t)]))
    grad = _random(BATCH, 4, s, DIM, seed=3)
    sinks = _random(4, seed=4) if with_sinks else None
    leaves = [x.requires_grad_() for x in (q, k, v, sinks, given) if x is not None]
    whole = dense(q, k, v, sinks, given, allowed((rows, cols, sizes, predicate), s, t))
    expected = torch.autograd.grad(whole, leaves, grad)
    frames = [1, s, 0, s, *folds], [1, t, 0, t, *folds]
    run, own = OPS[op]
    last = [n if x == "all" else x for x in own]

    def live(rank: int) -> list[Tensor]:
        mine = [x.detach().clone().requires_grad_() for x in leaves]
        shards = [cut(x, f, n) for x, f in zip(mine, (frames[0], frames[1], frames[1]))]
        shared = sp.reduce_grad(mine[3:], "reduce", n, SIMULATED_GROUP) if mine[3:] else []
        logits = shared.pop(0) if with_sinks else None
        bias = shared.pop(0) if given is not None else None
        scores = (bias, rows, cols, [], sizes, predicate, None, 0.0, None, "", [], [], logits, False)
        out = run(*shards, *scores, *frames, n, SIMULATED_GROUP, balance, *last)
        out = sp.unshard(out, 2, frames[0], n, SIMULATED_GROUP)
        return [out.detach(), *torch.autograd.grad(out, mine, grad)]

    for results in run_ranks(n, live):
        for found, wanted in zip(results, [whole.detach(), *expected], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("folds", [[], [2]], ids=["contiguous", "zigzag"])
def test_equals_one_device(op: str, mask: str, folds: list[int]) -> None:
    check(op, mask, 4, 16, 16, 2, folds)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("n", "s"), [(2, 13), (4, 19), (6, 16), (8, 21), (4, 3)])
@pytest.mark.parametrize("folds", [[], [2]], ids=["contiguous", "zigzag"])
def test_any_heads_and_lengths(op: str, kv_heads: int, n: int, s: int, folds: list[int]) -> None:
    check(op, "causal", n, s, s, kv_heads, folds)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("s", "t"), [(16, 9), (7, 18)])
@pytest.mark.parametrize("mask", ["full", "causal", "keys only"])
def test_cross_attention(op: str, s: int, t: int, mask: str) -> None:
    check(op, mask, 2, s, t, 2, [])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [2, 4])
def test_balanced_inside(op: str, n: int) -> None:
    check(op, "causal", n, 16, 16, 2, [], balance=True)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("n", "s"), [(2, 13), (4, 19), (4, 3)])
@pytest.mark.parametrize("folds", [[], [2]], ids=["contiguous", "zigzag"])
def test_sinks(op: str, mask: str, n: int, s: int, folds: list[int]) -> None:
    check(op, mask, n, s, s, 2, folds, with_sinks=True)


@pytest.mark.parametrize("op", OPS)
def test_sinks_balanced_inside(op: str) -> None:
    check(op, "causal", 4, 16, 16, 1, [], balance=True, with_sinks=True)
