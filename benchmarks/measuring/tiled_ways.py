"""A training step whose head and MLPs run in tiles, ours, DeepSpeed's (ALST) and by hand: peak of tensors, CPU time.

One model and one process. Every way checkpoints its blocks. DeepSpeed's are functions that a model calls; ours and the
plain model are the model as it is.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from models import IGNORE, Block, DecoderLM
from peak_memory import peak_activation_bytes
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, LAYERS, HEADS = 32768, 256, 4, 4
Step = Callable[[], Tensor]
Made = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]
"""A model, and what is called."""


class CheckpointedLM(nn.Module):
    """The decoder of the examples, its blocks computed again. tiles: of the head and of MLPs by `mlp` and `loss`."""

    def __init__(self, tiles: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.tiles = DecoderLM(vocab=VOCAB, dim=DIM, layers=LAYERS, heads=HEADS), tiles

    def block(self, block: Block, x: Tensor) -> Tensor:
        x = x + block.attention(block.norm1(x))
        return x + self.mlp(block.mlp, block.norm2(x))

    def mlp(self, mlp: nn.Module, x: Tensor) -> Tensor:
        return mlp(x)

    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner.head(h).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.inner.embed(ids)
        for one in self.inner.blocks:
            x = checkpoint(self.block, one, x, use_reentrant=False)
        return self.loss(self.inner.norm(x), F.pad(labels, (0, 1), value=IGNORE)[:, 1:])


class ByHand(CheckpointedLM):
    """Chunks of the sequence, each computed again, as one writes it."""

    def mlp(self, mlp: nn.Module, x: Tensor) -> Tensor:
        parts = [checkpoint(mlp, part, use_reentrant=False) for part in x.chunk(self.tiles, 1)]
        return torch.cat(parts, 1)

    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        pairs = zip(h.chunk(self.tiles, 1), labels.chunk(self.tiles, 1), strict=True)
        total = sum(checkpoint(self.part, *pair, use_reentrant=False) for pair in pairs)
        return total / (labels != IGNORE).sum()

    def part(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner.head(h).float().flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


class DeepSpeed(CheckpointedLM):
    """Its TiledMLP and its TiledFusedLogitsLoss, which makes gradients in the forward.

    The head's for a cotangent of 1, whatever is done to the loss behind it: what the sum is divided by stands inside.
    """

    def mlp(self, mlp: nn.Module, x: Tensor) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        return TiledMLP.apply(lambda self, x: self(x), mlp, x, self.tiles, list(mlp.parameters()))

    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        head, count = self.inner.head, (labels != IGNORE).sum()

        def part(head: nn.Linear, h: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(head(h).float(), labels, ignore_index=IGNORE, reduction="sum") / count

        return TiledFusedLogitsLoss.apply(part, head, h, labels, None, self.tiles, [head.weight], "sum")


def ours(tiles: int) -> Made:
    model = CheckpointedLM()
    return model, torch.compile(model, backend="sp", options={"tiles": tiles, "cost": {}}, dynamic=False)


def plain(kind: type[CheckpointedLM], compiled: bool = False) -> Callable[[int], Made]:
    def make(tiles: int) -> Made:
        model = kind(tiles)
        return model, torch.compile(model, dynamic=False) if compiled else model

    return make


WAYS = {
    "no tiles": plain(CheckpointedLM),
    "no tiles, Inductor": plain(CheckpointedLM, compiled=True),
    "ours": ours,
    "DeepSpeed": plain(DeepSpeed),
    "by hand": plain(ByHand),
}


@dataclass
class Seen:
    loss: float = 0.0
    gradient: float = 0.0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


def compared(tokens: int, tiles: int, repeats: int) -> Table:
    """All ways in one process, in turns."""
    os.environ.update(DS_ACCELERATOR="cpu")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (1, tokens), generator=generator)
    jobs: dict[str, Step] = {}
    seen: dict[str, Seen] = {}
    first: list[Tensor] = []
    for name, make in WAYS.items():
        model, run = make(tiles)
        mine = seen[name] = Seen()

        def job(model: nn.Module = model, run: Callable[..., Tensor] = run) -> Tensor:
            for p in model.parameters():
                p.grad = None
            loss = run(ids, ids)
            loss.backward()
            return loss.detach()

        jobs[name] = job
        mine.loss = job().item()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        first = first or gradients
        mine.gradient = max(_error(a, b) for a, b in zip(first, gradients, strict=True))
        mine.peak = peak_activation_bytes(lambda job=job: job(), model.parameters(), gradients=True)
    for _ in range(repeats):
        for name, job in jobs.items():
            begin = time.process_time()
            job()
            seen[name].seconds.append(time.process_time() - begin)
    table = Table("", "loss", "gradients off by", "peak MB", "over ours", "CPU s", "over ours")
    mine = seen["ours"]
    for name, one in seen.items():
        ratio = statistics.median(a / b for a, b in zip(one.seconds, mine.seconds, strict=True))
        table.add_row(
            name, f"{one.loss:.6f}", f"{one.gradient:.0e}", f"{one.peak / 1e6:.1f}", f"{one.peak / mine.peak:.2f}",
            f"{statistics.median(one.seconds):.1f}", f"{ratio:.2f}",
        )  # fmt: skip
    return table


def _error(true: Tensor, found: Tensor) -> float:
    return float((true - found).abs().max() / true.abs().max())
