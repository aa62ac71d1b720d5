"""Models that predict several tokens at each position: windows of one sequence side by side."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import VOCABULARY, WIDTH, Decoder, Layer, causal, check, seeded, tokens
from torch import Tensor, nn

from sp_compile.lowering.base.errors import SpError

DEPTH = 2


class MultiToken(Decoder):
    """A trunk with modules, of which the i-th predicts the token i positions after the trunk's.

    way: "windows", DeepSeek-V3's: a module takes the previous module's states without the last row, and embeddings i positions
    further, as a window of those of the trunk; "embeddings first", the same side by side otherwise; "windows of ids", that are embedded again; "rolled", Megatron's: ids and
    labels move on by a place, and the last ones count for nothing; "heads", Medusa's: all read the trunk.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.out = way, nn.Linear(WIDTH, VOCABULARY)
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(DEPTH))
        self.blocks = nn.ModuleList(Layer(4, 4) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * DEPTH))

    def forward(self, ids: Tensor) -> Tensor:
        embedded, labels = self.embed(ids), ids
        h = self.layers[0](embedded, self._attend)
        loss = self._loss(h[:, :-1], labels[:, 1:])
        for i in range(DEPTH):
            if self.way == "heads":
                loss = loss + self._loss((h + self.joins[i](torch.cat([h, h], -1)))[:, : -i - 2], labels[:, i + 2 :])
                continue
            if self.way == "rolled":
                ids = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
                last, more = h, self.embed(ids)
            else:
                last = h[:, :-1]
                more = embedded[:, i + 1 :] if self.way != "windows of ids" else self.embed(ids[:, i + 1 :])
            both = [self.norms[2 * i](last), self.norms[2 * i + 1](more)]
            both = both[::-1] if self.way == "embeddings first" else both
            h = self.blocks[i](self.joins[i](torch.cat(both, -1)), self._attend)
            if self.way == "rolled":
                labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
                wanted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
                loss = loss + self._loss(h, wanted)
            else:
                loss = loss + self._loss(h[:, :-1], labels[:, i + 2 :])
        return loss

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(self, q, k, v)

    def _loss(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.out(h).flatten(0, 1), labels.flatten())


def run(way: str, ranks: int, length: int, **config: str) -> None:
    """Compare with one device; outside the contiguous layout, windows of embeddings are gathered or refused."""
    layout = config.get("layout", "contiguous") if ranks > 1 else "contiguous"
    shifted = way in ("windows", "embeddings first") and layout != "contiguous"
    if shifted and layout == "balanced":
        with pytest.raises(SpError, match=r"SP411.*aten\.cat\.default"):
            check(seeded(lambda: MultiToken(way)), tokens(length), sp=ranks, **config)
        return
    report = check(seeded(lambda: MultiToken(way)), tokens(length), sp=ranks, **config)
    assert [note.node.partition("_")[0] for note in report.fallbacks] == ["cat"] * (DEPTH * shifted), report


WAYS = ["windows", "embeddings first", "windows of ids", "rolled", "heads"]
CONFIGS = [
    *({"attention": attention} for attention in ("auto", "ring", "gather", "ulysses", "hybrid")),
    *({"attention": "ring", "layout": layout} for layout in ("zigzag", "balanced")),
]


@pytest.mark.slow
@pytest.mark.sampled(every=1000)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: " ".join(c.values()))
@pytest.mark.parametrize("way", WAYS)
def test_each_way(way: str, config: dict[str, str]) -> None:
    run(way, 4, 17, **config)


@pytest.mark.slow
def test_windows_of_embeddings_in_zigzag_order_are_gathered() -> None:
    run("windows", 4, 17, attention="ring", layout="zigzag")


def test_windows_of_embeddings_in_balanced_order_are_refused() -> None:
    run("windows", 4, 17, attention="ring", layout="balanced")


@pytest.mark.slow
@pytest.mark.parametrize("config", [c for c in CONFIGS if c["attention"] in ("auto", "ring")], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_all(way: str, ranks: int, config: dict[str, str]) -> None:
    for length in (12, 13):
        run(way, ranks, length, **config)
