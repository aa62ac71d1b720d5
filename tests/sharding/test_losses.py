"""Loss and gradients equal a single device's, for every kind of loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.models import BATCH, SIZES, VOCABULARY, Decoder, check, floats, seeded, tokens
from torch import Tensor

import sp_compile

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], object]
IGNORED = -100
WEIGHTS = torch.linspace(0.5, 1.5, VOCABULARY, dtype=torch.float64)


class Model(Decoder):
    """loss(logits (B, S, V), labels (B, S), mask (B, S) floats, targets (B, S, V) that add up to 1)"""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("class_weights", WEIGHTS)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor, targets: Tensor) -> object:
        return self.loss(super().forward(ids), labels, mask, targets)


def sliced(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The label shift by slices of both."""
    return logits[..., :-1, :].contiguous().view(-1, VOCABULARY), labels[..., 1:].contiguous().view(-1)


def padded(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Shift labels by padding them; logits are not sliced."""
    labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return logits.view(-1, VOCABULARY), labels.view(-1)


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])
    return picked.squeeze(-1)


def chunked(z: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    pairs = zip(*(v.split(5) for v in sliced(z, y)), strict=True)
    return sum(F.cross_entropy(a, b, reduction="sum") for a, b in pairs) / (y[:, 1:] != IGNORED).sum()


def ppo(z: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    new = log_likelihood(z, y)
    ratio, advantage = (new - new.detach() + 0.1).exp(), m[:, 1:] - 0.3
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(gain * m[:, 1:]).sum() / m[:, 1:].sum()


def dpo(z: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    each = (log_likelihood(z, y) * m[:, 1:]).sum(-1)
    return -F.logsigmoid(each[:1] - each[1:]).mean()


def focal(z: Tensor, y: Tensor, m: Tensor, t: Tensor) -> Tensor:
    logits, labels = padded(z, y)
    each = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).sum() / (labels != IGNORED).sum()


def ignoring(index: int, **options: object) -> Loss:
    return lambda z, y, m, t: F.cross_entropy(z.mT, y.where(y >= 0, index), ignore_index=index, **options)


CLASSES: dict[str, Loss] = {
    "sliced": lambda z, y, m, t: F.cross_entropy(*sliced(z, y)),
    "padded": lambda z, y, m, t: F.cross_entropy(*padded(z, y)),
    "sum": lambda z, y, m, t: F.cross_entropy(*sliced(z, y), reduction="sum"),
    "none": lambda z, y, m, t: F.cross_entropy(*sliced(z, y), reduction="none"),
    "none viewed": lambda z, y, m, t: F.cross_entropy(*padded(z, y), reduction="none").view_as(y),
    "class weights": lambda z, y, m, t: F.cross_entropy(*sliced(z, y), weight=WEIGHTS),
    "class weights, sum": lambda z, y, m, t: F.cross_entropy(*sliced(z, y), weight=WEIGHTS, reduction="sum"),
    "smoothing": lambda z, y, m, t: F.cross_entropy(*sliced(z, y), label_smoothing=0.1),
    "smoothing, weights": lambda z, y, m, t: F.cross_entropy(*padded(z, y), label_smoothing=0.1, weight=WEIGHTS),
    "smoothing, sum": lambda z, y, m, t: F.cross_entropy(*padded(z, y), label_smoothing=0.1, reduction="sum"),
    "ignoring 0": ignoring(0),
    "ignoring -1, weights": ignoring(-1, weight=WEIGHTS),
    "ignoring 255, weights, smoothing": ignoring(255, weight=WEIGHTS, label_smoothing=0.2),
    "classes second": lambda z, y, m, t: F.cross_entropy(z[:, :-1].transpose(1, 2), y[:, 1:]),
    "per batch item": lambda z, y, m, t: torch.stack(
        [F.cross_entropy(z[b, :-1], y[b, 1:]) for b in range(BATCH)]
    ).mean(),
    "nll": lambda z, y, m, t: F.nll_loss(z.log_softmax(-1).view(-1, VOCABULARY), y.view(-1)),
    "nll, classes second": lambda z, y, m, t: F.nll_loss(z.log_softmax(-1).mT, y, weight=WEIGHTS),
    "nll, sum": lambda z, y, m, t: F.nll_loss(z.log_softmax(-1).mT, y, reduction="sum"),
    "float32 logits": lambda z, y, m, t: F.cross_entropy(*[v.double() for v in padded(z, y)[:1]], padded(z, y)[1]),
    "sum over count": lambda z, y, m, t: F.cross_entropy(*sliced(z, y), reduction="sum") / (y[:, 1:] != IGNORED).sum(),
    "perplexity": lambda z, y, m, t: F.cross_entropy(*sliced(z, y)).exp(),
    "two targets ahead": lambda z, y, m, t: F.cross_entropy(*sliced(z, y)) + F.cross_entropy(z[:, :-2].mT, y[:, 2:]),
    "focal": focal,
    "chunked": chunked,
}

OTHERS: dict[str, Loss] = {
    "probabilities": lambda z, y, m, t: F.cross_entropy(z.view(-1, VOCABULARY), t.view(-1, VOCABULARY)),
    "probabilities, sum": lambda z, y, m, t: F.cross_entropy(z.mT, t.mT, reduction="sum"),
    "probabilities, none": lambda z, y, m, t: F.cross_entropy(z.mT, t.mT, reduction="none"),
    "probabilities, smoothing, weights": lambda z, y, m, t: F.cross_entropy(
        z.mT, t.mT, label_smoothing=0.1, weight=WEIGHTS
    ),
    "masked mean": lambda z, y, m, t: (F.cross_entropy(z.mT, y.clamp(min=0), reduction="none") * m).sum() / m.sum(),
    "masked mean of each item": lambda z, y, m, t: (
        (F.cross_entropy(z.mT, y.clamp(min=0), reduction="none") * m).sum(1) / m.sum(1)
    ).mean(),
    "log likelihood": lambda z, y, m, t: -(log_likelihood(z, y) * m[:, 1:]).sum() / m[:, 1:].sum(),
    "ppo": ppo,
    "dpo": dpo,
    "z-loss": lambda z, y, m, t: F.cross_entropy(*sliced(z, y)) + 0.01 * z.logsumexp(-1).square().mean(),
    "two losses": lambda z, y, m, t: F.cross_entropy(*sliced(z, y)) + 0.5 * F.mse_loss(z, t),
    "distillation": lambda z, y, m, t: F.kl_div(
        (z / 2).log_softmax(-1), t.log(), log_target=True, reduction="batchmean"
    ),
    "next logits": lambda z, y, m, t: F.mse_loss(z[:, :-1], z[:, 1:].detach()),
    "entropy": lambda z, y, m, t: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "loss, logits, accuracy": lambda z, y, m, t: {
        "loss": F.cross_entropy(*sliced(z, y)),
        "logits": z,
        "accuracy": (z[:, :-1].argmax(-1) == y[:, 1:]).double().mean(),
    },
    "last token": lambda z, y, m, t: F.cross_entropy(z[:, -1], y[:, -1].clamp(min=0)),
    "pooled": lambda z, y, m, t: F.cross_entropy(z.mean(1), y[:, -1].clamp(min=0)),
    "pooled by mask": lambda z, y, m, t: F.cross_entropy(
        (z * m[..., None]).sum(1) / m.sum(1, keepdim=True), y[:, -1].clamp(min=0)
    ),
    "all ignored": lambda z, y, m, t: F.cross_entropy(z.mT, torch.full_like(y, IGNORED)),
    "all ignored, sum": lambda z, y, m, t: F.cross_entropy(z.mT, torch.full_like(y, IGNORED), reduction="sum"),
}

ELEMENTWISE: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "mse": lambda z, t, how: F.mse_loss(z, t, reduction=how),
    "l1": lambda z, t, how: F.l1_loss(z, t, reduction=how),
    "smooth l1": lambda z, t, how: F.smooth_l1_loss(z, t, beta=0.5, reduction=how),
    "huber": lambda z, t, how: F.huber_loss(z, t, reduction=how),
    "bce": lambda z, t, how: F.binary_cross_entropy(z.sigmoid(), t, reduction=how),
    "bce, logits": lambda z, t, how: F.binary_cross_entropy_with_logits(z, t, pos_weight=WEIGHTS, reduction=how),
    "kl": lambda z, t, how: F.kl_div(z.log_softmax(-1), t, reduction=how),
    "margins": lambda z, t, how: F.multi_margin_loss(
        z.flatten(0, 1), t.argmax(-1).flatten(), weight=WEIGHTS, reduction=how
    ),
    "margins of labels": lambda z, t, how: F.multilabel_margin_loss(
        z.flatten(0, 1), t.argsort(-1).where(t > t.mean(-1, keepdim=True), -1).flatten(0, 1), reduction=how
    ),
    "margins of triplets": lambda z, t, how: F.triplet_margin_loss(z, t, z.detach().roll(1, 2), reduction=how),
    "poisson": lambda z, t, how: F.poisson_nll_loss(z, t, reduction=how),
}


def run(loss: Loss, ranks: int, length: int, prompt: int, **config: object) -> object:
    labels, mask = tokens(length, seed=3), (floats(BATCH, length) > 0.4).double()
    labels[:, :prompt] = IGNORED
    mask[:, :2] = 1
    targets = floats(BATCH, length, VOCABULARY, seed=4) + 0.01
    targets = targets / targets.sum(-1, keepdim=True)
    model = seeded(lambda: Model(loss))
    return check(model, tokens(length), labels, mask, targets, sp=ranks, **config)


def spread(table: dict[str, Loss]) -> list[object]:
    """Every loss at one of the sizes, in turn."""
    return [pytest.param(loss, *size, id=name) for (name, loss), size in zip(table.items(), itertools.cycle(SIZES))]


@pytest.mark.sampled(every=28)
@pytest.mark.parametrize(("loss", "ranks", "length"), spread(CLASSES))
def test_class_losses_under_prompt_masking(loss: Loss, ranks: int, length: int) -> None:
    """The prompt is most of the sequence, so that a rank has no valid token."""
    length = max(length, 3)
    run(loss, ranks, length, prompt=length * 5 // 8)


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize(("loss", "ranks", "length"), spread(OTHERS))
def test_other_losses(loss: Loss, ranks: int, length: int) -> None:
    run(loss, ranks, length, prompt=0)


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses(name: str, how: str) -> None:
    """Without a position whose loss is zero, padding must not be counted."""
    run(lambda z, y, m, t: ELEMENTWISE[name](z, t, how), 3, 13, prompt=0)


def test_all_ignored_is_not_a_number_as_in_torch() -> None:
    model = seeded(lambda: Model(OTHERS["all ignored"]))
    assert model(tokens(4), tokens(4), floats(BATCH, 4), floats(BATCH, 4, VOCABULARY)).isnan()
    assert run(OTHERS["all ignored"], 2, 16, prompt=0).errors[0] == ("result 0", 0.0)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("shift", ["padded", "sliced"])
def test_label_shift_costs_no_exchange(shift: str) -> None:
    report = run(CLASSES[shift], 2, 16, prompt=4)
    assert {e.op: report.count(e.op) for e in report.exchanges} == {
        "shard": report.count("shard"),  # of ids, labels and positions: slices of what every rank has
        "reduce_grad": 1,
        "all_to_all": 2,
        "all_reduce": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", [*CLASSES.values(), *OTHERS.values()], ids=[*CLASSES, *OTHERS])
def test_every_loss_at_every_size(loss: Loss, size: tuple[int, int]) -> None:
    run(loss, size[0], max(size[1], 3), prompt=size[1] // 2)


def test_means_of_integers_and_bools() -> None:
    def model(x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x = x.cumsum(1)
        is_right = x.argmax(-1) == labels
        return x.sum(), is_right.mean(dtype=torch.float32), labels.mean(dtype=torch.float64)

    x, labels = torch.randn(2, 7, 5, dtype=torch.float64), torch.arange(14).view(2, 7) % 5
    report = sp_compile.verify(model, x, labels, sp=2, seq_dims={"x": 1})
    assert not report.fallbacks, report
    assert report.worst < 1e-6
