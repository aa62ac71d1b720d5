"""Heads with their losses, as people write them: functions of hidden values, the head's weight, tokens and weights."""

from __future__ import annotations

from collections.abc import Callable

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
    """The likelihood of each sequence, as preferences are learnt from: a sum over the tokens, not over the batch."""
    picked = head(h)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return -F.logsigmoid(picked.sum(-1)).mean()


def distilled(h: Tensor, head: nn.Linear, ids: Tensor, weights: Tensor) -> Tensor:
    """From the probabilities of a teacher, which is the same head on other values."""
    with torch.no_grad():
        teacher = head(h.roll(1, 2)).softmax(-1)
    return F.kl_div(head(h).log_softmax(-1), teacher, reduction="sum") / ids.shape[1]


LOSSES: tuple[Loss, ...] = (
    *(mean, total, ignored, smoothed, of_classes, transformers),
    *(capped, scaled, with_z, of_tokens, per_sequence, distilled),
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
