"""Ops that mix tokens in a decoder: exact results, and reports that name gathered ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.models import BATCH, SIZES, VOCABULARY, WIDTH, Decoder, check, floats, seeded, tokens
from torch import Tensor, nn

from sp_compile.lowering.base.errors import SpError

Op = Callable[["Model", Tensor, Tensor], object]
LONGEST = 20


class Model(Decoder):
    """A decoder that applies op(model, x, ids) to the states x (B, S, WIDTH) after a layer, with parameters for op."""

    def __init__(self, op: Op) -> None:
        super().__init__(heads=12)  # all numbers of ranks here divide them
        self.op = op
        self.mix = nn.Parameter(torch.randn(LONGEST, LONGEST))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, ids: Tensor) -> object:
        x = self.states(ids)
        return self.head(x).logsumexp(-1).mean(), self.op(self, x, ids)


def square(m: Model, x: Tensor) -> Tensor:
    """A learned (S, S) matrix."""
    return m.mix[: x.shape[1], : x.shape[1]]


def with_class_token(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    y = torch.cat([m.first.expand(x.shape[0], -1, -1), x], 1)
    return m.layers[0](y, lambda q, k, v: F.scaled_dot_product_attention(q, k, v))


def shifted_by_writes(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :-1] = x[:, 1:]
    return y * x


def zeroed(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    y = x.clone()
    y[ids == 3] = 0.0
    return y * x


def recurrent(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    state, states = x.new_zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):
        state = torch.tanh(state @ m.weight + x[:, t])
        states.append(state)
    return torch.stack(states, 1)


def moving_average(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    m.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
    return x * m.average


def eager_token_mixing(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return (x @ x.mT).masked_fill(hidden, -1e9).softmax(-1) @ x


def eager_capped_mixing(m: Model, x: Tensor, ids: Tensor) -> Tensor:
    """Attention whose scores are capped, written as products."""
    return (x @ x.mT).tanh().softmax(-1) @ x


def halves_of_a_weight(m: Model, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """One half is used on shards, the other equally on every rank."""
    left, right = m.weight.exp().split(WIDTH // 2, 1)
    return x @ left, right.sin()


# The sequence is mixed, and the op named is done on the whole.
GATHERED: dict[str, Op] = {
    "max": lambda m, x, ids: x.max(1),
    "amax": lambda m, x, ids: x.amax(1),
    "argmax": lambda m, x, ids: x.argmax(1),
    "softmax": lambda m, x, ids: x.softmax(1),
    "logsumexp": lambda m, x, ids: x.logsumexp(1),
    "prod": lambda m, x, ids: x.prod(1),
    "any": lambda m, x, ids: (x > 0).any(1),
    "median": lambda m, x, ids: x.median(1).values,
    "var": lambda m, x, ids: x.var(1),
    "std": lambda m, x, ids: x / x.std(1, keepdim=True),
    "linalg_vector_norm": lambda m, x, ids: F.normalize(x, dim=1),
    "flip": lambda m, x, ids: x.flip(1),
    "cat ": with_class_token,
    "diff": lambda m, x, ids: x.diff(dim=1),
    "layer_norm": lambda m, x, ids: F.layer_norm(x.mT, x.shape[1:2]).mT,
    "batch_norm": lambda m, x, ids: m.batch_norm(x.mT).mT * x,
    "batch_norm ": lambda m, x, ids: m.batch_norm(x.flatten(0, 1)).view_as(x) * x,
    "index": lambda m, x, ids: x[torch.arange(x.shape[0]), (ids > 2).sum(1) - 1],
    "gather": lambda m, x, ids: x.gather(1, (ids % x.shape[1])[..., None].expand_as(x)),
    "index_select": lambda m, x, ids: x.index_select(1, ids[0] % x.shape[1]) @ m.weight,
    "slice": lambda m, x, ids: x[:, ::2] @ m.weight,
    "topk": lambda m, x, ids: x.topk(2, 1),
    "sort": lambda m, x, ids: x.sort(1),
    "kthvalue": lambda m, x, ids: x.kthvalue(2, 1),
    "repeat": lambda m, x, ids: x.repeat(1, 2, 1) @ m.weight,
    "split": lambda m, x, ids: [piece @ m.weight for piece in x.split(1, 1)],
    "scatter_add": lambda m, x, ids: x.new_zeros(BATCH, VOCABULARY, WIDTH).scatter_add(
        1, ids[..., None].expand_as(x), x
    ),
    "index_add": lambda m, x, ids: x.new_zeros(VOCABULARY, WIDTH).index_add(0, ids.flatten(), x.flatten(0, 1)),
    "slice_scatter": shifted_by_writes,
    "cdist": lambda m, x, ids: torch.cdist(x, x),
    "einsum": lambda m, x, ids: torch.einsum("bsd,btd->bst", x, x.exp()),
    "linear": lambda m, x, ids: F.linear(x.mT, square(m, x), m.mix[0, : x.shape[1]]).mT,
    "avg_pool1d": lambda m, x, ids: F.avg_pool1d(x.mT, 3, 1, 1, count_include_pad=False).mT @ m.weight,
    "tril": lambda m, x, ids: x.tril(),
    "unflatten": lambda m, x, ids: x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).sum(2) @ m.weight,
}

# The sequence passes, or is reduced by a sum that the ranks share.
SHARDED: dict[str, Op] = {
    "mean": lambda m, x, ids: x.mean(1) @ m.weight,
    "mean, kept": lambda m, x, ids: x - x.mean(1, keepdim=True),
    "mean of all": lambda m, x, ids: x.mean(),
    "sum": lambda m, x, ids: x.sum((1, 2)),
    "count": lambda m, x, ids: (x > 0).sum(1),
    "masked mean": lambda m, x, ids: (x * (ids > 3)[..., None]).sum(1) / (ids > 3).sum(1, keepdim=True).clamp(min=1),
    "last": lambda m, x, ids: x[:, -1] @ m.weight,
    "first": lambda m, x, ids: x[:, 0],
    "recurrence": recurrent,
    "tail": lambda m, x, ids: x[:, 1:] @ m.weight,
    "window": lambda m, x, ids: x[:, 1:-1].softmax(-1),
    "top of the width": lambda m, x, ids: x.topk(2, -1),
    "greedy": lambda m, x, ids: m.head(x).argmax(-1),
    "repeated batch": lambda m, x, ids: x.repeat(2, 1, 1).repeat_interleave(2, 0),
    "repeated rows": lambda m, x, ids: x.repeat_interleave(2, 1) @ m.weight,
    "cat of the width": lambda m, x, ids: torch.cat([x, x * 2], -1),
    "cat of the batch": lambda m, x, ids: torch.cat([x, x * 2], 0),
    "stack": lambda m, x, ids: torch.stack([x, x.exp()], 1),
    "interleaved": lambda m, x, ids: torch.stack([x, x.exp()], 2).flatten(1, 2) @ m.weight,
    "contracted": lambda m, x, ids: torch.einsum("bsd,bsd->bd", x, x.exp()),
    "gram": lambda m, x, ids: x.mT @ x,
    "mixer": lambda m, x, ids: square(m, x) @ x + x,
    "mixer, few rows": lambda m, x, ids: F.gelu(F.linear(x.mT, m.mix[:3, : x.shape[1]])),
    "one hot": lambda m, x, ids: F.one_hot(ids, VOCABULARY).to(x) @ m.embed.weight * x,
    "counts of classes": lambda m, x, ids: torch.einsum("bsv,bsd->bvd", F.one_hot(ids, VOCABULARY).to(x), x),
    "halves of a weight": halves_of_a_weight,
    "masked fill": lambda m, x, ids: x.masked_fill((ids == 2)[..., None], -1.0) @ m.weight,
    "where": lambda m, x, ids: torch.where((ids > 4)[..., None], x, m.first),
    "masked write": zeroed,
    "moving average": moving_average,
    "learned positions": lambda m, x, ids: x + m.mix[: x.shape[1], :1],
    "positions": lambda m, x, ids: x * torch.arange(x.shape[1]).to(x).sin()[:, None],
    "flat": lambda m, x, ids: (x.reshape(-1, WIDTH) @ m.weight).view(x.shape),
    "sequence first": lambda m, x, ids: x.permute(1, 0, 2).reshape(-1, WIDTH) @ m.weight,
    "width first": lambda m, x, ids: x.permute(2, 1, 0).flatten(1).exp(),
    "likelihood": lambda m, x, ids: m.head(x)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).sum(1),
    "sizes": lambda m, x, ids: x * x.shape[1] / x.numel(),
    "expanded": lambda m, x, ids: x[:, None].expand(-1, 3, -1, -1).flatten(0, 1) @ m.weight,
    "roll": lambda m, x, ids: x.roll(1, 1) @ m.weight,
    "pad": lambda m, x, ids: F.pad(x, (0, 0, 1, 0))[:, :-1] * x,
    "cat": lambda m, x, ids: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) * x,
    "sub": lambda m, x, ids: x[:, 1:] - x[:, :-1],
    "conv1d": lambda m, x, ids: F.conv1d(x.mT, m.conv.weight, padding=2)[..., : x.shape[1]].mT * x,
    "pad ": lambda m, x, ids: m.conv(F.pad(x.mT, (2, 0))).mT * x,
    "unfold": lambda m, x, ids: x.unfold(1, 2, 1).mean(-1) @ m.weight,
    "cat of the first": lambda m, x, ids: torch.cat([x[:, :1], x[:, :-1]], 1) * x,
    "cat of a parameter": lambda m, x, ids: torch.cat([x[:, 1:], m.first.expand(x.shape[0], 1, -1)], 1) * x,
    "mean pool": lambda m, x, ids: F.avg_pool1d(x.mT, 3, 1, 1).mT @ m.weight,
    "max pool": lambda m, x, ids: F.max_pool1d(F.pad(x.mT, (1, 0)), 2, 1).mT @ m.weight,
    "eager attention": eager_token_mixing,
    "capped attention": eager_capped_mixing,
    "cumsum": lambda m, x, ids: x.cumsum(1),
    "cumprod": lambda m, x, ids: x.cumprod(1),
    "logcumsumexp": lambda m, x, ids: x.logcumsumexp(1),
    "cummax": lambda m, x, ids: x.cummax(1),
    "cumsum of all": lambda m, x, ids: x.flatten().cumsum(0),
    "exclusive": lambda m, x, ids: x.cumsum(1) - x,
    "reversed sum": lambda m, x, ids: x.flip(1).cumsum(1).flip(1) * x,
}


def run(op: Op, ranks: int, length: int, **config: object) -> object:
    return check(seeded(lambda: Model(op)), tokens(length), sp=ranks, **config)


def spread(table: dict[str, Op]) -> list[object]:
    """Return every op with one size of several ranks in turn; sliding windows span half of the sequence."""
    several = itertools.cycle([(n, max(length, 5)) for n, length in SIZES if n > 1])
    return [pytest.param(name, *size, id=f"{name}-{size[0]}-{size[1]}") for name, size in zip(table, several)]


@pytest.mark.sampled(every=44)
@pytest.mark.parametrize(("name", "ranks", "length"), spread(GATHERED))
def test_mixing_ops_are_exact_and_reported(name: str, ranks: int, length: int) -> None:
    report = run(GATHERED[name], ranks, length)
    gathered = {note.node for note in report.fallbacks}
    assert any(node.startswith(name.strip()) for node in gathered), gathered


@pytest.mark.sampled(every=92)
@pytest.mark.parametrize(("name", "ranks", "length"), spread(SHARDED))
def test_other_ops_stay_sharded(name: str, ranks: int, length: int) -> None:
    assert not run(SHARDED[name], ranks, length).fallbacks


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", ["prod", "flip", "avg_pool1d", "slice"])
def test_fallback_error_names_the_op_and_the_line(name: str) -> None:
    with pytest.raises(SpError, match=rf"SP305.*{name}.*test_zoo\.py"):
        run(GATHERED[name], 2, 16, fallback="error")


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("op", [lambda m, x, ids: x[ids > 3].sum(0), lambda m, x, ids: x.sum() + torch.nonzero(ids)])
def test_results_of_unknown_size(op: Op) -> None:
    """Dynamo breaks the graph there, and values that cross the break are gathered."""
    run(op, 2, 16)


class Input(nn.Module):
    """Attention straight on an input whose dims are all of one size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.scaled_dot_product_attention(x @ self.weight, x, x.mT.contiguous().mT, is_causal=True)
        return y.mT @ y, y.permute(2, 0, 1).cumsum(1), y.sum(0), y.flatten(1) @ self.weight.repeat(4, 1)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dims_of_equal_sizes_are_distinguished(ranks: int) -> None:
    check(seeded(lambda: Input(4)), floats(4, 4, 4).requires_grad_(), sp=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [*GATHERED.values(), *SHARDED.values()], ids=[*GATHERED, *SHARDED])
def test_every_op_at_every_size(op: Op, size: tuple[int, int]) -> None:
    run(op, size[0], max(size[1], 3))
