"""FSDP2 by blocks on real Gloo ranks: what `explain` predicts that a rank holds, and all tensors of a warm step.

Counted: shards of parameters and of optimizer state, what FSDP2 has gathered, values, gradients, inputs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import sp_compile

from .gloo_ranks import joined

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from models import Block
from peak_memory import peak_activation_bytes

RANKS, VOCAB = 2, 1024


class Tokens(nn.Embedding):
    """A class of ours: torch.compile leaves the code of torch's own to Python."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)


class Tail(nn.Module):
    """The final norm, the head and the loss."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Parts(nn.Module):
    """A decoder of parts that are compiled separately. again: recompute its blocks in the backward."""

    def __init__(self, dim: int, layers: int, again: bool) -> None:
        super().__init__()
        self.again = again
        self.embed = Tokens(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 64, dim // 64) for _ in range(layers))
        self.tail = Tail(dim)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.tail(x, labels)


WAYS: dict[str, tuple[int, int, bool, int, Mapping[str, Any]]] = {
    "decoder, 4 layers of 512, 1,024 tokens": (512, 4, False, 1024, {}),
    "decoder, 4 layers of 256, 2,048 tokens": (256, 4, False, 2048, {}),
    "decoder, 4 layers of 512, 2,048 tokens, checkpointed blocks": (512, 4, True, 2048, {}),
    "the same, and head and MLPs in 4 tiles": (512, 4, True, 2048, {"tiles": 4}),
    "decoder, 2 layers of 128, 512 tokens": (128, 2, False, 512, {}),
}
"""Width, layers, are blocks computed again, tokens, and options."""


def made(way: str) -> tuple[Parts, Tensor, dict[str, Any]]:
    dim, layers, again, length, options = WAYS[way]
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (1, length))
    return Parts(dim, layers, again), ids, {"cost": {}, "attention": "ulysses", "param_grads": "partial", **options}


def compare(way: str, compiler: str) -> tuple[float, int]:
    """Bytes of a rank at the peak of a step: (predicted, measured)."""
    return predicted(way, compiler), measured(way, compiler)


def predicted(way: str, compiler: str) -> float:
    model, ids, options = made(way)
    options |= {"compiler": compiler, "state": "sharded"}
    step = sp_compile.explain(model, ids, ids, sp=RANKS, memory=True, optimizer=torch.optim.AdamW, **options).step
    return step.fsdp(RANKS)


def measured(way: str, compiler: str) -> int:
    """Return the largest peak of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (way, compiler, folder), nprocs=RANKS)
        return max(int(Path(folder, f"{rank}").read_text()) for rank in range(RANKS))


def _rank(rank: int, way: str, compiler: str, folder: str) -> None:
    with joined(rank, RANKS, folder):
        Path(folder, f"{rank}").write_text(str(held(way, compiler, init_device_mesh("cpu", (RANKS,)))))


def held(way: str, compiler: str, mesh: DeviceMesh) -> int:
    """Bytes of this rank at the peak of a warm step."""
    model, ids, options = made(way)
    options |= {"compiler": compiler, "mesh": mesh, "outputs": "lazy"}
    model.embed.compile(backend="sp", options={**options, "seq_dims": {"ids": 1}})
    for part in (*model.blocks, model.tail):
        part.compile(backend="sp", options=options)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    state = [x for held in optimizer.state.values() for x in held.values()]
    beside = _local_bytes([*model.parameters(), *state, ids])
    return beside + peak_activation_bytes(step, [], repeats=2)


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum((x.to_local() if hasattr(x, "to_local") else x).untyped_storage().nbytes() for x in tensors)
