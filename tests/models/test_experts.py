"""Mixtures of experts that sort tokens by expert: each rank sorts its own, in every way to write it; or all are gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers a grouped product that knows float64)
from support import parity
from support.models import BATCH, check, seeded
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.canonical import expert_loops as sorted_rows
from sp_compile.passes.context import NoteKind
from sp_compile.passes.propagation import propagate

WIDTH, INSIDE, EXPERTS, TOP = 12, 8, 3, 2
grouped = torch.ops.transformers.grouped_mm_fallback
Experts = Callable[["Mixture", Tensor, Tensor, Tensor], Tensor]


class Mixture(nn.Module):
    """x + experts(x), each token by the TOP of EXPERTS that a router takes."""

    def __init__(self, experts: Experts, inside: int = INSIDE) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, inside) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, inside, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, ids = self.router(tokens).softmax(-1).topk(TOP)
        return x + self.experts(self, tokens, weights, ids).view_as(x)

    def inside(self, rows: Tensor, keys: Tensor, ends: Tensor) -> Tensor:
        return grouped(grouped(rows, self.up, ends).tanh(), self.down, ends) + self.bias[keys]


def ends_of(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)


def summed(x: Tensor) -> Tensor:
    return x.view(-1, TOP, WIDTH).sum(1)


def inverted(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Route tokens in the form of transformers."""
    keys, order = torch.sort(ids.reshape(-1))
    y = model.inside(x[order // TOP], keys, ends_of(keys)) * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return summed(y[inverse])


def scattered(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Route tokens in the form of torchtitan."""
    flat = ids.view(-1)
    order = torch.argsort(flat, stable=True)
    tokens = (order // TOP).reshape(-1, 1).expand(-1, WIDTH)
    counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS)
    rows = torch.gather(x, 0, tokens)
    y = model.inside(rows, flat[order], counts.cumsum(0, dtype=torch.int32)) * weights.view(-1)[order][:, None]
    return (2 * x).scatter_add(0, tokens, y)


def added(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort(stable=True)
    y = model.inside(x[order // TOP], keys, ends_of(keys)) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // TOP, y)


def written(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort()
    y = model.inside(x[order // TOP], keys, ends_of(keys))
    out = torch.zeros_like(y)
    out[order] = y
    return summed(out * weights.reshape(-1, 1))


def argsorted_twice(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort()
    return summed(model.inside(x[order // TOP], keys, ends_of(keys))[order.argsort()] * weights.reshape(-1, 1))


def without_products(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Largest first, and a matrix read for each row."""
    keys, order = ids.flatten().sort(descending=True)
    y = (x[order // TOP].unsqueeze(1) @ model.up[keys]).tanh() @ model.down[keys]
    return summed(y.squeeze(1)[order.argsort()])


def counted(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """With a penalty for experts that take more than others."""
    keys, order = ids.flatten().sort()
    counts = torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    y = model.inside(x[order // TOP], keys, counts.cumsum(0, dtype=torch.int32)) * weights.flatten()[order, None]
    return summed(y[order.argsort()]) * (1 + counts.to(x.dtype).std())


ROUTINGS = [inverted, scattered, added, written, argsorted_twice, without_products, counted]


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(("ranks", "length"), [(2, 16), (3, 13), (4, 3)])
@pytest.mark.parametrize("experts", ROUTINGS)
def test_each_rank_sorts_its_own(experts: Experts, ranks: int, length: int) -> None:
    model = seeded(partial(Mixture, experts))
    x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64, requires_grad=True)
    report = check(model, x, sp=ranks, seq_dims={"x": 1})
    assert not report.fallbacks, report


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize("experts", [scattered, *(one for one in ROUTINGS if one is not scattered)])
def test_each_rank_sorts_its_own_of_any_length(experts: Experts) -> None:
    model = seeded(partial(Mixture, experts))
    x = torch.randn(BATCH, 13, WIDTH, dtype=torch.float64, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 1)
    report = check(model, x, sp=2, seq_dims={"x": 1})
    assert not report.fallbacks, report


def test_rows_in_the_order_of_keys_are_never_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof refuses a form that was missed before: a full slice of a length that is known only at run time."""
    monkeypatch.setattr(sorted_rows, "_is_full_slice", lambda node: False)
    x = torch.randn(BATCH, 13, WIDTH, dtype=torch.float64)
    torch._dynamo.mark_dynamic(x, 1)
    with pytest.raises(sp_compile.SpError, match="SP309"):
        sp_compile.explain(seeded(partial(Mixture, scattered)), x, sp=2, seq_dims={"x": 1})


class Hashed(Mixture):
    """Routing of DeepSeek V4's first layers: by a table of token ids, which are replicated."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self.embed = nn.Embedding(EXPERTS, WIDTH)
        self.register_buffer("table", torch.stack([torch.arange(EXPERTS), torch.arange(EXPERTS).roll(1)], 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x, ids = self.embed(tokens), self.table[tokens.reshape(-1)]
        q = x[:, None]
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
        rows = x.reshape(-1, WIDTH)
        weights = self.router(rows).softmax(-1).gather(1, ids)
        return x + self.experts(self, rows, weights, ids).view_as(x)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("experts", [inverted, scattered, added])
def test_each_rank_sorts_its_own_by_replicated_keys(experts: Experts) -> None:
    tokens = torch.randint(EXPERTS, (BATCH, 13))
    report = check(seeded(partial(Hashed, experts)), tokens, sp=3)
    assert not report.fallbacks, report


def test_an_order_of_all_rows_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sort of replicated keys with sharded rows is refused."""
    sort, start = torch.ops.sp.sort_rows.default, propagate.start_sharding
    monkeypatch.setattr(
        propagate,
        "start_sharding",
        lambda axes, call, *how: None if call.node.target is sort else start(axes, call, *how),
    )
    with pytest.raises(sp_compile.SpError, match="SP309"):
        sp_compile.explain(seeded(partial(Hashed, inverted)), torch.randint(EXPERTS, (BATCH, 13)), sp=2)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("experts", ROUTINGS)
def test_nothing_is_gathered(experts: Experts) -> None:
    x = torch.randn(BATCH, 8, WIDTH, dtype=torch.float64)
    report = sp_compile.explain(seeded(partial(Mixture, experts)), x, sp=2, seq_dims={"x": 1})
    assert not report.fallbacks, report


def sorted_and_not(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort()
    y = model.inside(x[order // TOP], keys, ends_of(keys)) + weights.reshape(-1, 1)
    return summed(y[order.argsort()])


def place_in_the_order(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort()
    y = model.inside(x[order // TOP], keys, ends_of(keys)) * order[:, None]
    return summed(y[order.argsort()])


def along_the_order(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort()
    return summed(model.inside(x[order // TOP], keys, ends_of(keys)).cumsum(0)[order.argsort()])


def other_ends(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort()
    return summed(model.inside(x[order // TOP], keys, ends_of(keys.clamp(max=1)))[order.argsort()])


def descending(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort(descending=True)
    return summed(model.inside(x[order // TOP], keys, ends_of(keys))[order.argsort()])


def numbers_that_are_no_integers(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = (ids.flatten() + weights.flatten().detach() / 2).sort()
    y = grouped(x[order // TOP], model.up, ends_of(keys.clamp(max=EXPERTS - 1))).tanh()
    return summed(grouped(y, model.down, ends_of(keys))[order.argsort()])


def not_put_back(model: Mixture, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    keys, order = ids.flatten().sort()
    y = model.inside(x[order // TOP], keys, ends_of(keys))
    return summed(y[order.argsort()]) + summed(y)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "experts",
    [
        sorted_and_not,
        place_in_the_order,
        along_the_order,
        other_ends,
        descending,
        numbers_that_are_no_integers,
        not_put_back,
    ],
)
def test_values_that_depend_on_the_order_are_gathered(experts: Experts) -> None:
    model = seeded(partial(Mixture, experts))
    x = torch.randn(BATCH, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    report = check(model, x, sp=2, seq_dims={"x": 1})
    assert report.fallbacks
    assert report.find_notes(NoteKind.DECLINED, subject="rewrite_sorted_rows")


def added_to_some_columns(x: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_add(0, order[:, None].expand(-1, 3), 2 * x[order])


def some_columns_added(x: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter_add(0, order[:, None], 2 * x[order, :1])


def some_columns_read(x: Tensor, order: Tensor) -> Tensor:
    return (x.gather(0, order[:, None].expand(-1, 3)) * 2)[order.argsort()]


def written_to_every_row(x: Tensor, order: Tensor) -> Tensor:
    out = x.new_zeros(len(x), len(x))
    out[order] = 2 * x[order, 0]
    return out


def places_written_to_every_row(x: Tensor, order: Tensor) -> Tensor:
    places = order.new_zeros(len(x), len(x))
    places[order] = torch.arange(len(x))
    return (2 * x[order])[places]


def read_along_a_middle_dim(x: Tensor, order: Tensor) -> Tensor:
    cube = x.view(len(x), 2, 2)  # of two rows
    return (cube.gather(0, order[:, None].expand(2, 2, 2)) * 2)[order.argsort()]


@pytest.mark.parametrize(
    ("move", "rows"),
    [
        (added_to_some_columns, 4),
        (some_columns_added, 4),
        (some_columns_read, 4),
        (written_to_every_row, 4),
        (places_written_to_every_row, 4),
        (read_along_a_middle_dim, 2),
    ],
)
def test_only_complete_rows_are_moved(move: Callable[[Tensor, Tensor], Tensor], rows: int) -> None:
    x, keys = torch.arange(4.0 * rows).view(rows, 4), torch.arange(rows).flip(0)
    found = parity.sp(lambda x, keys: move(x, keys.argsort()))(x, keys)
    torch.testing.assert_close(found, move(x, keys.argsort()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_sums_of_integers_keep_their_dtype(dtype: torch.dtype) -> None:
    def move(x: Tensor, keys: Tensor) -> Tensor:
        token = keys.argsort() // 2
        return torch.zeros_like(x).index_add(0, token, x[token])

    x, keys = torch.full((3, 2), 200, dtype=dtype), torch.arange(6).flip(0)
    torch.testing.assert_close(parity.sp(move)(x, keys), move(x, keys))


def test_counts_of_keys_that_are_rounded() -> None:
    def move(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        keys, order = keys.sort()
        out = torch.empty_like(x)
        out[order] = 2 * x[order]
        return out, torch.histc(keys.int().float(), 4, 0, 3)

    x, keys = torch.arange(6.0)[:, None], torch.tensor([1.7, 0.2, 2.9, 1.7, 0.9, 2.4])
    torch.testing.assert_close(parity.sp(move)(x, keys), move(x, keys))
