"""Losses as libraries and papers write them: single-device results for every split.

From TRL (row-wise likelihoods, DPO variants, GRPO), transformers (label smoothing, shifts), distillation, heads with more
than a product, and sums of losses. Each runs with other settings: ranks, tiles, length, order of rows.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from sharding.tiles.losses import HEADS, VOCAB, WIDTH, Loss, Model, batch, flat, reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile


def likely(z: Tensor, y: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def both(h: Tensor, head: nn.Linear, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return likelihoods of the next tokens by the model and by another one."""
    return likely(head(h)[:, :-1], ids[:, 1:]), likely(reference(h, ids)[:, :-1], ids[:, 1:])


def rolled(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    y = ids.roll(-1, 1)
    y[:, -1] = -100
    return F.cross_entropy(head(h).view(-1, VOCAB), y.view(-1))


def written(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    y = torch.full_like(ids, -100)
    y[:, :-1] = ids[:, 1:]
    return F.cross_entropy(head(h).flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum()


def smoother(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """transformers' LabelSmoother."""
    z, y = -head(h)[..., :-1, :].contiguous().log_softmax(-1), ids[..., 1:].unsqueeze(-1)
    padding = y.eq(3)
    nll, smoothed = z.gather(-1, y.clamp(min=0)), z.sum(-1, keepdim=True, dtype=torch.float64)
    nll.masked_fill_(padding, 0.0)
    smoothed.masked_fill_(padding, 0.0)
    count = padding.numel() - padding.long().sum()
    return 0.9 * nll.sum() / count + 0.1 * smoothed.sum() / (count * VOCAB)


def by_logsumexp(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """TRL's selective_log_softmax: a loop over the batch."""
    z = head(h)[:, :-1]
    picked = z.gather(-1, ids[:, 1:, None]).squeeze(-1) - torch.stack([one.logsumexp(-1) for one in z])
    return -(picked * weights[:, 1:]).sum() / weights[:, 1:].sum()


def by_rows(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Return likelihoods row by row, for half types."""
    pairs = zip(head(h)[:, :-1], ids[:, 1:])
    return -torch.stack([likely(z, y) for z, y in pairs]).mean()


def kept(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """The logits of a completion, at a temperature."""
    each = likely(head(h)[:, -6:][:, :-1] / 0.7, ids[:, -5:])
    return -(each * weights[:, -5:]).sum() / weights[:, -5:].sum().clamp(min=1)


def odds(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """ORPO."""
    counts = (ids[:, 1:] > 5).double()
    a, b = ((likely(head(h)[:, :-1], ids[:, 1:]) * counts).sum(-1) / counts.sum(-1)).chunk(2)
    ratio = (a - b) - (torch.log1p(-a.exp()) - torch.log1p(-b.exp()))
    return F.cross_entropy(*flat(h, head, ids)) - F.logsigmoid(ratio).mean()


def kto(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    new, old = both(h, head, ids)
    ratio = new.sum(-1) - old.sum(-1)
    apart, (a, b) = ratio.mean().detach().clamp(min=0), ratio.chunk(2)
    return torch.cat([1 - torch.sigmoid(0.1 * (a - apart)), 1 - torch.sigmoid(0.1 * (apart - b))]).nanmean()


def of_sequences(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """GSPO: one ratio a sequence."""
    new, old = both(h, head, ids)
    counts = (ids[:, 1:] > 4).double()
    ratio = (((new - old) * counts).sum(-1) / counts.sum(-1)).clamp(-2, 2).exp()
    return -(ratio * (weights.mean(1) - 0.4)).mean()


def least_sure(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Tokens of high entropy only, which is measured without gradients."""
    z = head(h)[:, :-1]
    each = likely(z, ids[:, 1:])
    with torch.no_grad():
        entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
        chosen = (entropy > entropy.mean()).double()
    return -(each * chosen).sum() / chosen.sum().clamp(min=1)


def advantages(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute PPO's loss with token values and returns."""
    values, returns = h[:, :-1].mean(-1), weights[:, 1:].flip(1).cumsum(1).flip(1)
    gain = (returns - values).detach()
    return -(likely(head(h)[:, :-1], ids[:, 1:]) * gain).mean() + 0.5 * F.mse_loss(values, returns)


def generalized(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """TRL's GKD: a share of both models, which is a tensor."""
    share = torch.tensor(0.3, dtype=h.dtype)
    ours, theirs = (head(h) / 0.9).log_softmax(-1), (reference(h, ids) / 0.9).log_softmax(-1)
    middle = torch.logsumexp(torch.stack([ours + torch.log(1 - share), theirs + torch.log(share)]), dim=0)
    apart = [F.kl_div(middle, one, reduction="none", log_target=True) for one in (theirs, ours)]
    counts = ids != 3
    return ((share * apart[0] + (1 - share) * apart[1]) * counts[..., None]).sum() / counts.sum()


def of_the_best(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Distilled from a teacher's best classes."""
    best, at = reference(h, ids).topk(4, -1)
    return F.kl_div(head(h).gather(-1, at).log_softmax(-1), best.softmax(-1), reduction="batchmean")


def focal(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    z, y = flat(h, head, ids)
    sure, share = z.softmax(-1)[torch.arange(y.shape[0]), y], torch.linspace(0.1, 1, VOCAB, dtype=h.dtype)
    return -(share[y] * (1 - sure).pow(1.5) * sure.log()).sum() / share[y].sum()


def shifted(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute an explicit log-sum-exp with its z-loss."""
    z, y = flat(h, head, ids)
    most = z.amax(-1, keepdim=True).detach()
    lse = (z - most).exp().sum(-1).log() + most.squeeze(-1)
    return (lse - z.gather(-1, y[:, None])[:, 0]).mean() + torch.tensor(1e-3, dtype=h.dtype) * lse.pow(2).mean()


def unlikely(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    z, y = flat(h, head, ids)
    wrong = torch.eye(VOCAB, dtype=h.dtype)[(y + 1) % VOCAB]
    return F.cross_entropy(z, y) - ((1 - z.softmax(-1)).clamp(min=1e-5).log() * wrong).sum(-1).mean()


def uncertain(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Add several losses, each multiplied with a learned coefficient."""
    a, b, s = F.cross_entropy(*flat(h, head, ids)), h[:, :-1].square().mean(), head.weight[0, :2]
    return (-s[0]).exp() * a + s[0] + (-s[1]).exp() * b + s[1]


def by_frequency(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute a loss with class weights by frequency."""
    ones = torch.ones(ids.numel(), dtype=h.dtype)
    counts = torch.zeros(VOCAB, dtype=h.dtype).scatter_add_(0, ids.flatten(), ones)
    return F.cross_entropy(*flat(h, head, ids), weight=1 / (counts + 1))


def ahead(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Several tokens ahead."""
    return sum(0.5**k * F.cross_entropy(head(h)[:, :-k].flatten(0, 1), ids[:, k:].flatten()) for k in (1, 2, 3))


def codebooks(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Several tokens at each position."""
    z, y = head(h).unflatten(-1, (4, 8))[:, :-1], torch.stack([(ids[:, 1:] + k) % 8 for k in range(4)], -1)
    return F.cross_entropy(z.permute(0, 3, 1, 2), y)


def clustered(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Rare classes as one."""
    z = head(h)
    both = torch.cat([z[..., :8], z[..., 8:].logsumexp(-1, keepdim=True)], -1)
    return F.cross_entropy(both.flatten(0, 1), ids.clamp(max=8).flatten())


def adapted(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """A frozen head with a LoRA."""
    low = F.linear(F.linear(h, head.weight[:2]), head.weight[:, :2])
    z = F.linear(h, head.weight.detach()) + 2 * low
    return F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def normed(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    z = F.linear(F.normalize(h, dim=-1), F.normalize(head.weight, dim=-1)) * 10
    return F.cross_entropy(z.mT, ids)


def product(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    z = torch.addmm(torch.ones(VOCAB, dtype=h.dtype), h[:, :-1].reshape(-1, WIDTH), head.weight.t())
    return F.cross_entropy(z, ids[:, 1:].reshape(-1))


def changed(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Logits that are written in place."""
    z = head(h).clone()
    z.div_(2.0)
    z[..., :3] = -5.0
    return F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten().clamp(min=3))


def chunked(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute a loss in explicit chunks, each checkpointed."""

    def one(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(x).flatten(0, 1), y.flatten(), reduction="sum")

    pairs = zip(h[:, :-1].chunk(3, 1), ids[:, 1:].chunk(3, 1))
    return sum(checkpoint(one, x, y, use_reentrant=False) for x, y in pairs) / ids.numel()


def of_each_sequence(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Positions that each sequence has of its own."""
    at, rows = weights.argsort(1)[:, :4], torch.arange(ids.shape[0])[:, None]
    return F.cross_entropy(head(h)[rows, at].flatten(0, 1), ids.gather(1, at).flatten())


def hardest(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(*flat(h, head, ids), reduction="none").topk(5)[0].mean()


def nothing_counts(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    y = ids.where(ids > 100, -100)
    found = F.cross_entropy(head(h).flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum()
    return torch.nan_to_num(found) + h.mean()


LOSSES: tuple[Loss, ...] = (
    *(rolled, written, smoother, by_logsumexp, by_rows, kept, odds, kto, of_sequences, least_sure, advantages),
    *(generalized, of_the_best, focal, shifted, unlikely, uncertain, by_frequency, ahead, codebooks, clustered),
    *(adapted, normed, product, changed, chunked, of_each_sequence, hardest, nothing_counts),
)
NOT_BALANCED = {advantages: "SP411", **dict.fromkeys((kept, focal, chunked), r"SP411.*\b17\b")}
"""Need their rows in the program's order, or have rows that are a sequence of their own: refused, and said."""
WAYS = [(n, tiles, seq) for n in (1, 2, 3) for tiles in (2, 3) for seq in (13, 17)]


def each_in_turn() -> list[object]:
    ways = itertools.cycle(WAYS)
    return [pytest.param(loss, *next(ways), id=loss.__name__) for loss in LOSSES]


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(("loss", "n", "tiles", "seq"), each_in_turn())
def test_one_device(loss: Loss, n: int, tiles: int, seq: int) -> None:
    assert sp_compile.verify(Model(loss).double(), *batch(seq, 4), sp=n, tiles=tiles).worst < 1e-9


@pytest.mark.sampled(every=88)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_orders_of_rows(loss: Loss, n: int, layout: str) -> None:
    if loss in NOT_BALANCED and layout == "balanced" and n > HEADS:  # with a head a rank there is nothing to balance
        with pytest.raises(sp_compile.SpError, match=NOT_BALANCED[loss]):
            sp_compile.verify(Model(loss).double(), *batch(17), sp=n, tiles=3, layout=layout)
        return
    found = sp_compile.verify(Model(loss, tied=True, bias=True).double(), *batch(17), sp=n, tiles=3, layout=layout)
    assert found.worst < 1e-9
