"""Measure a training step whose head and MLPs run in tiles: ours, DeepSpeed's (ALST) and a handwritten model.

One model runs on one process or on ranks, which take turns at every variant. Every variant checkpoints its blocks. Ours
and the plain model are unmodified, and take the full sequence. DeepSpeed's are functions that a model calls. Its ranks
and those of the handwritten model take their rows, exchange heads for rows around attention (Ulysses), and sum
gradients in place. Peaks of tensors and CPU times are reported.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from measuring.gloo_ranks import joined
from measuring.handwritten import UlyssesAttention, causal
from models import IGNORE, Attention, Block, DecoderLM, rope
from peak_memory import peak_activation_bytes
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, LAYERS, HEADS = 32768, 256, 4, 4
SHORT = 2048
"""Tokens of a first step of variants that are not compiled, for allocations of the first step only."""
Step = Callable[[], Tensor]
Made = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]
"""A model and its callable."""


class CheckpointedLM(nn.Module):
    """The decoder of the examples with checkpointed blocks; returns the mean loss of full ids and labels, (1, S)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = DecoderLM(vocab=VOCAB, dim=DIM, layers=LAYERS, heads=HEADS)

    def block(self, block: Block, x: Tensor) -> Tensor:
        x = x + self.attention(block.attention, block.norm1(x))
        return x + self.mlp(block.mlp, block.norm2(x))

    def attention(self, attention: Attention, x: Tensor) -> Tensor:
        return attention(x)

    def mlp(self, mlp: nn.Module, x: Tensor) -> Tensor:
        return mlp(x)

    def loss(self, h: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        logits = self.inner.head(h).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        labels = F.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        return self.of_rows(ids, labels, (labels != IGNORE).sum())

    def of_rows(self, ids: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        x = self.inner.embed(ids)
        for one in self.inner.blocks:
            x = checkpoint(self.block, one, x, use_reentrant=False)
        return self.loss(self.inner.norm(x), labels, count)


def rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of the full sequence for some heads, (B, H, S, D) each."""
    return causal(rope(q), rope(k), v)


class HandwrittenTiles(CheckpointedLM):
    """Checkpointed chunks of the sequence, written directly; on ranks, of this rank's rows."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.tiles = tiles
        self.split = self.exchanged() if dist.is_initialized() else None

    def exchanged(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention of q, k, v on this rank, (B, s, H, D) each."""
        return UlyssesAttention(dist.group.WORLD, rotated)

    def attention(self, attention: Attention, x: Tensor) -> Tensor:
        if self.split is None:
            return attention(x)
        q, k, v = (made(x).unflatten(-1, (-1, attention.head_dim)) for made in (attention.q, attention.k, attention.v))
        return attention.out(self.split(q, k, v).flatten(2))

    def mlp(self, mlp: nn.Module, x: Tensor) -> Tensor:
        parts = [checkpoint(mlp, part, use_reentrant=False) for part in x.chunk(self.tiles, 1)]
        return torch.cat(parts, 1)

    def loss(self, h: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        pairs = zip(h.chunk(self.tiles, 1), labels.chunk(self.tiles, 1), strict=True)
        total = sum(checkpoint(self.part, *pair, use_reentrant=False) for pair in pairs)
        return total / count

    def part(self, h: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner.head(h).float().flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.split is None:
            return super().forward(ids, labels)
        labels = F.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        mine = (x.chunk(dist.get_world_size(), 1)[dist.get_rank()] for x in (ids, labels))
        return self.of_rows(*mine, (labels != IGNORE).sum())


class DeepSpeed(HandwrittenTiles):
    """DeepSpeed's DistributedAttention, TiledMLP and TiledFusedLogitsLoss, which computes gradients in the forward.

    The gradients of the head are those for a cotangent of 1, so the sum is divided by the count inside the function.
    """

    def exchanged(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        import deepspeed.comm
        from deepspeed.sequence.layer import DistributedAttention

        if not deepspeed.comm.is_initialized():
            deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

        class Local(nn.Module):
            def forward(self, *operands: Tensor) -> Tensor:
                return rotated(*(x.transpose(1, 2) for x in operands)).transpose(1, 2)

        split = DistributedAttention(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return lambda q, k, v: split(q, k, v, 0)

    def mlp(self, mlp: nn.Module, x: Tensor) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        return TiledMLP.apply(lambda self, x: self(x), mlp, x, self.tiles, list(mlp.parameters()))

    def loss(self, h: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

        head = self.inner.head

        def part(head: nn.Linear, h: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(head(h).float(), labels, ignore_index=IGNORE, reduction="sum") / count

        return TiledFusedLogitsLoss.apply(part, head, h, labels, None, self.tiles, [head.weight], "sum")


@dataclass(frozen=True)
class TiledVariant:
    """One variant. make: takes the number of tiles. compiled: for one length. sums: ranks sum loss and gradients."""

    make: Callable[[int], Made]
    compiled: bool = False
    sums: bool = False


def ours(tiles: int) -> Made:
    model = CheckpointedLM()
    return model, torch.compile(model, backend="sp", options={"tiles": tiles, "cost": {}}, dynamic=False)


def plain(compiled: bool) -> Callable[[int], Made]:
    def make(tiles: int) -> Made:
        model = CheckpointedLM()
        return model, torch.compile(model, dynamic=False) if compiled else model

    return make


def called(kind: type[HandwrittenTiles]) -> Callable[[int], Made]:
    def make(tiles: int) -> Made:
        model = kind(tiles)
        return model, model

    return make


ALONE = {"no tiles": TiledVariant(plain(False)), "no tiles, Inductor": TiledVariant(plain(True), compiled=True)}
VARIANTS = {
    "ours": TiledVariant(ours, compiled=True),
    "DeepSpeed": TiledVariant(called(DeepSpeed), sums=True),
    "handwritten": TiledVariant(called(HandwrittenTiles), sums=True),
}


@dataclass
class Seen:
    """Measurements of one rank. seconds: CPU time of each repeat, all threads."""

    loss: float = 0.0
    gradient: float = 0.0
    peak: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """only: a regular expression of variants. repeats: turns; peaks are of the first."""

    tokens: int
    tiles: int
    ranks: int
    repeats: int
    only: str = ""


def compared(run: Run) -> Table:
    """All variants in turns, on processes of their own where there are several ranks."""
    with tempfile.TemporaryDirectory() as folder:
        if run.ranks == 1:
            found = [_seen(run)]
        else:
            mp.spawn(_rank_of_many, (run, folder), nprocs=run.ranks)
            found = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(run.ranks)]
    return _report(found)


def _rank_of_many(rank: int, run: Run, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.ranks), LOCAL_SIZE=str(run.ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip
    with joined(rank, run.ranks, folder, timedelta(minutes=30)):
        torch.save(_seen(run), f"{folder}/{rank}.pt")


def _seen(run: Run) -> dict[str, Seen]:
    warnings.simplefilter("ignore")
    os.environ.update(DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    variants = {
        name: variant
        for name, variant in {**(ALONE if run.ranks == 1 else {}), **VARIANTS}.items()
        if re.search(run.only, name)
    }
    ids = torch.randint(VOCAB, (1, run.tokens), generator=torch.Generator().manual_seed(0))
    models, jobs = {}, {}
    for name, variant in variants.items():
        models[name], call = variant.make(run.tiles)
        jobs[name] = _step(variant, models[name], call)
        jobs[name](ids if variant.compiled else ids[:, :SHORT])
    seen = {name: Seen() for name in variants}
    first: list[Tensor] = []
    for turn in range(run.repeats):
        for name, job in jobs.items():
            mine, parameters = seen[name], list(models[name].parameters())

            def step(job: Callable[[Tensor], Tensor] = job, mine: Seen = mine) -> None:
                begin = time.process_time()
                mine.loss = job(ids).item()
                mine.seconds.append(time.process_time() - begin)

            _together()
            if turn:
                step()
            else:
                mine.peak = peak_activation_bytes(step, parameters, gradients=True)
                gradients = [p.grad for p in parameters if p.grad is not None]
                first = first or [g.clone() for g in gradients]
                mine.gradient = max(_error(a, b) for a, b in zip(first, gradients, strict=True))
            for p in parameters:
                p.grad = None
            if not dist.is_initialized() or dist.get_rank() == 0:  # printed early, since this takes hours
                sys.stderr.write(f"{name}, turn {turn}: {mine.peak / 1e6:.1f} MB, {mine.seconds[-1]:.1f} CPU s\n")
    return seen


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def _step(
    variant: TiledVariant, model: nn.Module, call: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return a function that runs forward and backward; every rank has the loss and gradients of the full sequence."""

    def step(ids: Tensor) -> Tensor:
        loss = call(ids, ids)
        loss.backward()
        loss = loss.detach()
        if variant.sums and dist.is_initialized():
            dist.all_reduce(loss)
            for p in model.parameters():
                dist.all_reduce(p.grad)
        return loss

    return step


def _report(found: Sequence[dict[str, Seen]]) -> Table:
    """Return a table of all ranks: the largest peak and the sum of CPU seconds."""
    table = Table("", "loss", "gradients off by", "peak MB", "over ours", "CPU s", "over ours")
    peak = {name: max(one[name].peak for one in found) for name in found[0]}
    seconds = {name: [sum(turn) for turn in zip(*(one[name].seconds for one in found))] for name in found[0]}
    for name, one in found[0].items():
        ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["ours"], strict=True))
        table.add_row(
            name, f"{one.loss:.6f}", f"{one.gradient:.0e}", f"{peak[name] / 1e6:.1f}",
            f"{peak[name] / peak['ours']:.2f}", f"{statistics.median(seconds[name]):.1f}", f"{ratio:.2f}",
        )  # fmt: skip
    return table


def _error(true: Tensor, found: Tensor) -> float:
    return float((true - found).abs().max() / true.abs().max())


# Growth of the peak with the sequence by the number of tiles, and compile time.

LENGTHS = 8192, 16384
TILES: tuple[int | str, ...] = "never", 4, 16, 64
FINEST = 1024
"""Tiles whose inside is next to nothing."""


class TokenWise(CheckpointedLM):
    """The decoder without attention, which does not run in tiles."""

    def attention(self, attention: Attention, x: Tensor) -> Tensor:
        return x


def step_of(model: nn.Module, tiles: int | str, tokens: int) -> Callable[[], None]:
    """A step by Inductor, forward and backward."""
    torch.compiler.reset()
    options = {"tiles": tiles, "cost": {}, "seq_dims": {"labels": 1}}
    run = torch.compile(model, backend="sp", options=options, dynamic=False)
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
    return lambda: run(ids, ids).backward()


def peak(tiles: int | str, tokens: int) -> int:
    """Bytes of all tensors of a warm step at their peak, gradients included."""
    model = TokenWise()
    step = step_of(model, tiles, tokens)
    for _ in range(2):
        model.zero_grad()
        step()
    return peak_activation_bytes(step, model.parameters(), gradients=True)


def growth(lengths: Sequence[int] = LENGTHS) -> Table:
    """Return peaks at two lengths, and the bytes per token that tiles affect.

    The lengths are so large that values of tokens, not gradients of parameters, make the peak. Bytes that no number of
    tiles makes smaller are those with `FINEST` tiles.
    """
    columns = [f"peak MB, {n:,} tokens" for n in lengths]
    table = Table("tiles", *columns, "bytes per token", "tiled bytes", "of those without tiles")
    peaks = {tiles: [peak(tiles, n) for n in lengths] for tiles in (*TILES, FINEST)}
    slopes = {tiles: (found[-1] - found[0]) / (lengths[-1] - lengths[0]) for tiles, found in peaks.items()}
    for tiles, found in peaks.items():
        falls = slopes[tiles] - slopes[FINEST]
        part = f"1 / {(slopes['never'] - slopes[FINEST]) / falls:.1f}" if falls >= 1 else "nothing"
        numbers = f"{slopes[tiles]:,.0f}", f"{falls:,.0f}", part
        table.add_row(str(tiles), *(f"{nbytes / 1e6:.1f}" for nbytes in found), *numbers)
    return table


def compile_seconds(tiles: Sequence[int] = (4, 64), tokens: int = 1024, rounds: int = 2) -> Table:
    """CPU seconds of a first step by Inductor without caches, less those of a second step: the least of some rounds."""
    table = Table("tiles", "CPU s of compiling", "of the first")
    least: dict[int, float] = {}
    step_of(CheckpointedLM(), tiles[0], tokens)()  # work of a process's first compilation
    for one in list(tiles) * rounds:
        with torch._inductor.config.patch(force_disable_caches=True):
            step = step_of(CheckpointedLM(), one, tokens)
            times = []
            for _ in range(2):
                begin = time.process_time()
                step()
                times.append(time.process_time() - begin)
        least[one] = min(least.get(one, float("inf")), times[0] - times[1])
    for one, seconds in least.items():
        table.add_row(str(one), f"{seconds:.1f}", f"{seconds / least[tiles[0]]:.2f}")
    return table
