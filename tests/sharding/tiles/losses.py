"""Heads with their losses, as people write them: functions of hidden values, the head's weight, tokens and weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCAB, HEADS = 8, 32, 2
Loss = Callable[[Tensor, nn.Linear, Tensor, Tensor], Tensor]


def flat(h: Tensor, head: nn.Linear, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and the next tokens, one row each."""
    return head(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()


def mean(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(*flat(h, head, ids))


def total(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(*flat(h, head, ids), reduction="sum")


def ignored(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(*flat(h, head, ids.where(ids % 3 > 0, -1)), ignore_index=-1)


def smoothed(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(*flat(h, head, ids), label_smoothing=0.1)


def of_classes(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(*flat(h, head, ids), weight=torch.linspace(0.5, 1.5, VOCAB, dtype=h.dtype))


def transformers(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Upcast logits, padded labels, a sum over num_items_in_batch."""
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    logits = head(h).double().view(-1, VOCAB)
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / (ids > 3).sum()


def capped(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Gemma's."""
    z, y = flat(h, head, ids)
    return F.cross_entropy(torch.tanh(z / 3.0) * 3.0, y)


def scaled(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    z, y = flat(h, head, ids)
    return F.cross_entropy(z * 0.25, y)


def with_z(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Two sums with a gradient."""
    z, y = flat(h, head, ids)
    return F.cross_entropy(z, y) + 1e-2 * z.logsumexp(-1).square().mean()


def of_tokens(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """A weight for each token."""
    each = F.cross_entropy(*flat(h, head, ids), reduction="none")
    w = weights[:, 1:].flatten()
    return (each * w).sum() / w.sum()


def per_sequence(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """The likelihood of each sequence, as preferences are learned from: a sum over the tokens, not over the batch."""
    picked = head(h)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -F.logsigmoid(picked.sum(-1)).mean()


def distilled(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """From the probabilities of a teacher, which is the same head on other values."""
    with torch.no_grad():
        teacher = head(h.roll(1, 2)).softmax(-1)
    return F.kl_div(head(h).log_softmax(-1), teacher, reduction="sum") / ids.shape[1]


def each(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the mean of squared losses per token."""
    return F.cross_entropy(*flat(h, head, ids), reduction="none").square().mean()


def of_all(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute a loss with class weights, smoothing and ignored tokens, and a weighted mean."""
    z, y = flat(h, head, ids.where(ids % 3 > 0, -100))
    return F.cross_entropy(z, y, weight=torch.linspace(0.5, 1.5, VOCAB, dtype=h.dtype), label_smoothing=0.2)


def of_all_summed(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    z, y = flat(h, head, ids.where(ids % 3 > 0, -100))
    classes = torch.linspace(0.5, 1.5, VOCAB, dtype=h.dtype)
    return F.cross_entropy(z, y, weight=classes, label_smoothing=0.2, reduction="sum") / ids.numel()


def likelihood(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    z, y = flat(h, head, ids)
    return F.nll_loss(z.log_softmax(-1), y)


def with_z_summed(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute PaLM's z-loss over counted tokens from one log-sum-exp."""
    z, y = flat(h, head, ids)
    lse = z.logsumexp(-1)
    picked = z.gather(-1, y[:, None]).squeeze(-1)
    counts = (y > 3).to(h.dtype)
    return ((lse - picked + 1e-3 * lse.square()) * counts).sum() / counts.sum()


def reference(h: Tensor, ids: Tensor) -> Tensor:
    """Logits of another model, whose head has weights of its own."""
    weight = torch.arange(VOCAB * WIDTH, dtype=h.dtype).cos().view(VOCAB, WIDTH)
    return F.linear(h.detach().roll(1, 2), weight)


def divergence(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """From another model, at a temperature, for each token."""
    ours, theirs = (head(h) / 2).log_softmax(-1), (reference(h, ids) / 2).log_softmax(-1)
    return 4 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).mean()


def of_mixture(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """The Jensen-Shannon divergence: of both models from their mean."""
    ours, theirs = head(h).log_softmax(-1), reference(h, ids).log_softmax(-1)
    middle = torch.logaddexp(ours, theirs) - math.log(2)
    pairs = (F.kl_div(middle, one, reduction="batchmean", log_target=True) for one in (ours, theirs))
    return sum(pairs) / 2


def soft_targets(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Probabilities in the place of classes."""
    return F.cross_entropy(head(h).flatten(0, 1), reference(h, ids).softmax(-1).flatten(0, 1), label_smoothing=0.1)


def preferred(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """DPO: two models, and the first half of the batch preferred to the second."""
    likely = [
        z[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1) for z in (head(h), reference(h, ids))
    ]
    chosen, rejected = (likely[0] - likely[1]).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def one_hot(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute a loss with smoothed targets of the width of logits."""
    targets = F.one_hot(ids[:, 1:], VOCAB) * 0.9 + 0.1 / VOCAB
    return -(targets * head(h)[:, :-1].log_softmax(-1)).sum(-1).mean()


def compared(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute smoothed targets by a comparison with all classes."""
    targets = (ids[:, 1:, None] == torch.arange(VOCAB)).to(h.dtype) * 0.9 + 0.1 / VOCAB
    return -(targets * head(h)[:, :-1].log_softmax(-1)).sum(-1).mean()


def scattered(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Written into a constant, as in the Transformer's first loss: a class of its own is padding."""
    y = ids[:, 1:].flatten()
    targets = torch.full((y.numel(), VOCAB), 0.1 / (VOCAB - 2), dtype=h.dtype)
    targets.scatter_(1, y[:, None], 0.9)
    targets[:, 0] = 0
    targets = targets.masked_fill((y == 0)[:, None], 0.0)
    return F.kl_div(head(h)[:, :-1].flatten(0, 1).log_softmax(-1), targets, reduction="sum") / (y != 0).sum()


def picked(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Elements of a table of probabilities at two indices, and at three."""
    z, y = flat(h, head, ids)
    first = z.log_softmax(-1)[torch.arange(y.shape[0]), y]
    rows, places = torch.arange(ids.shape[0])[:, None], torch.arange(ids.shape[1] - 1)
    again = head(h)[:, :-1].softmax(-1)[rows, places, ids[:, 1:] - VOCAB]
    return again.square().mean() - first.mean()


def of_table(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Rows of an identity matrix, at classes that count from its end, too."""
    table = torch.eye(VOCAB).to(h.dtype)
    smooth = 0.1 * table.index_select(0, ids[:, 1:].flatten()).view(*ids[:, 1:].shape, VOCAB)
    targets = smooth + 0.8 * table[ids[:, 1:]] + 0.1 * table[ids[:, 1:] - VOCAB]
    return F.cross_entropy(head(h)[:, :-1].flatten(0, 1), targets.flatten(0, 1))


def policy(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Clipped ratios to an older policy, advantages of tokens, a penalty of divergence, and the entropy."""
    new, old = (z[:, :-1].log_softmax(-1) for z in (head(h), reference(h, ids)))
    entropy = -(new.exp() * new).sum(-1)
    taken, before = (x.gather(-1, ids[:, 1:, None]).squeeze(-1) for x in (new, old))
    ratio, gain = (taken - before).exp(), weights[:, 1:] - 0.5
    clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return -(clipped - 0.04 * ((before - taken).exp() - (before - taken) - 1) + 0.01 * entropy).mean()


def of_groups(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute GRPO's loss from per-token values of two models' logits, with a mean over each sequence."""
    new, old = (
        z[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) for z in (head(h), reference(h, ids))
    )
    ratio, gain = (new - new.detach()).exp(), weights.mean(1, keepdim=True) - 0.5
    each = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) + 0.04 * ((old - new).exp() - (old - new) - 1)
    counts = (ids[:, 1:] > 3).to(h.dtype)
    return ((each * counts).sum(-1) / counts.sum(-1)).mean()


LOSSES: tuple[Loss, ...] = (
    *(mean, total, each, ignored, smoothed, of_classes, of_all, of_all_summed, likelihood, transformers),
    *(capped, scaled, with_z, with_z_summed, of_tokens, per_sequence),
    *(
        distilled,
        divergence,
        of_mixture,
        soft_targets,
        one_hot,
        compared,
        scattered,
        of_table,
        picked,
        preferred,
        policy,
        of_groups,
    ),
)


class Model(nn.Module):
    """Attention and a head with a loss; tied: the head is the embedding."""

    def __init__(self, loss: Loss, tied: bool = False, bias: bool = False, vocab: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.embed, self.mix = nn.Embedding(vocab, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """(batch, seq) int64, (batch, seq) -> a number."""
        x = self.embed(ids)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        h = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.loss(h, self.head, ids, weights)


def batch(seq: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens and their weights."""
    generator = torch.Generator().manual_seed(seq)
    ids = torch.randint(0, VOCAB, (rows, seq), generator=generator)
    return ids, torch.rand(rows, seq, generator=generator, dtype=torch.float64)


def alive(run: Callable[[], Any]) -> int:
    """Bytes of tensors alive at the peak of a run."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
