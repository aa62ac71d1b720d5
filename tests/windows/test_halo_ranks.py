"""Windows along the sequence on real ranks: compiled training steps, and the collectives that AOTAutograd sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.parity import VOCAB, Outcome, against_eager, build, check, sp, text, train_step
from support.ranks import Ranks
from support.recording import Recorder
from torch import Tensor, nn
from torch._C._distributed_c10d import _unregister_process_group

from sp_compile.lowering.comm import routes

WIDTH = 8


class Gated(nn.Module):
    """The convolution of a Mamba block as transformers writes it: 3 extra rows, and a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.inner(x).mT.chunk(2, 1)
        return self.out((F.silu(self.conv(x)[..., : x.shape[-1]]) * F.silu(gate)).mT)


class TokenShift(nn.Module):
    """RWKV's channel mixing: every position also sees the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mixed = x * self.mix + self.shift(x) * (1 - self.mix)
        return torch.sigmoid(self.value(x)) * self.key(mixed).relu().square()


class Pooled(nn.Module):
    """Local context by pools, centered, and the row before from a learned first one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([self.first.expand(x.shape[0], -1, -1), x[:, :-1]], 1)
        return self.linear((F.avg_pool1d(x.mT, 3, 1, 1) + F.max_pool1d(before.mT, 3, 1, 1)).mT)


BLOCKS = {"conv": Gated, "shift": TokenShift, "pools": Pooled}


class Model(nn.Module):
    """A residual block and a loss over tokens."""

    def __init__(self, block: str) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, WIDTH), BLOCKS[block]()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


ALONG = {"seq_dims": {"ids": 1, "labels": 1}}


def step(block: str, seq: int, how: dict[str, Any]) -> Outcome:
    return against_eager(build(Model, block=block), *text(seq), mesh=worker.mesh(), **ALONG, **how)


@pytest.mark.as_users_run(n=3, block="conv", seq=13)
@pytest.mark.sampled(every=36)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("seq", [16, 13])
def test_training_step(ranks: Ranks, block: str, n: int, seq: int) -> None:
    check(ranks.run(n, step, block, seq, {}))


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("seq", [9, 8])
def test_shards_shorter_than_a_window(ranks: Ranks, block: str, seq: int) -> None:
    """9 positions on 4 ranks: 3, 3, 3 and none; the convolution reaches three rows back."""
    check(ranks.run(4, step, block, seq, {}))


@pytest.mark.slow
@pytest.mark.parametrize("block", [b if b == "shift" else pytest.param(b, marks=pytest.mark.slow) for b in BLOCKS])
def test_inductor(ranks: Ranks, block: str) -> None:
    check(ranks.run(2, step, block, 12, {"compiler": "inductor"}))


def dynamic(block: str, compiler: str) -> list[tuple[Outcome, int]]:
    """Several lengths through one compiled model, and how many graphs it took so far."""
    graphs: list[Any] = []

    def counting(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return torch._dynamo.lookup_backend(compiler)(gm, inputs)

    model = build(Model, block=block)
    run = sp(model, dynamic=True, compiler=counting, mesh=worker.mesh(), **ALONG)
    return [(against_eager(model, *text(seq), run=run), len(graphs)) for seq in (16, 24, 13, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("block", ["shift", "conv"])
def test_dynamic_lengths(ranks: Ranks, block: str) -> None:
    """One graph for all lengths whose shards are as long as a window reaches. (torch's max_pool1d fixes lengths.)"""
    results = ranks.run(3, dynamic, block, "aot_eager", timeout=300)
    for one in zip(*results, strict=True):
        check([outcome for outcome, _ in one])
    assert len({made for found in results for _, made in found}) == 1


def from_shards(block: str) -> Outcome:
    """Train on each rank's part of the tokens with the loss of all tokens."""
    model, mesh, at = build(Model, block=block), worker.mesh(), worker.mesh().get_local_rank()

    def run(*whole: Tensor) -> Tensor:
        parts = [x.chunk(mesh.size(), 1)[at] for x in whole]
        return sp(model, mesh=mesh, dynamic=True, inputs="local", **ALONG)(*parts)

    return against_eager(model, *text(18), run=run)


@pytest.mark.slow
@pytest.mark.parametrize("block", ["conv", "shift"])
def test_local_inputs(ranks: Ranks, block: str) -> None:
    check(ranks.run(3, from_shards, block, timeout=300))


def again_from_the_cache() -> list[Outcome]:
    """Run twice, the second time from the cache and without registered routes."""
    found = []
    for _ in range(2):
        for name in list(routes._routes):
            _unregister_process_group(name)
        routes._routes.clear()
        torch._dynamo.reset()
        found.append(step("conv", 12, {"compiler": "inductor"}))
    return found


@pytest.mark.slow
def test_a_cached_program_knows_its_routes(ranks: Ranks) -> None:
    for outcomes in zip(*ranks.run(2, again_from_the_cache, timeout=300), strict=True):
        check(outcomes)


def counted(block: str, seq: int) -> tuple[dict[str, list[tuple[str, int]]], list[str]]:
    recorder, model = Recorder(), build(Model, block=block)
    train_step(sp(model, compiler=recorder, mesh=worker.mesh(), **ALONG), model, text(seq))
    sent = {}
    for name in ("forward", "backward"):
        nodes = recorder.collectives(name)
        values = [n.args[0].meta["val"] for n in nodes]
        sent[name] = [
            (str(n.target).split(".")[1], v.numel() * v.element_size()) for n, v in zip(nodes, values, strict=True)
        ]
    return sent, recorder.text()


ROW = 2 * WIDTH * 8  # bytes of a position: batch, width, float64


@pytest.mark.sampled(every=36)
@pytest.mark.parametrize(
    ("block", "rows"), [("conv", [3]), ("shift", [1]), ("pools", [1, 1, 1, 1, 1])], ids=list(BLOCKS)
)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("seq", [16, 64, 61])
def test_one_shift_for_each_direction(ranks: Ranks, block: str, rows: list[int], n: int, seq: int) -> None:
    """Only rows of the halo are sent, for every length; all ranks run the same program."""
    results = ranks.run(n, counted, block, seq)
    for name in ("forward", "backward"):
        sent = [size for op, size in results[0][0][name] if op == "all_to_all_single"]
        assert sorted(sent) == sorted(count * ROW for count in rows), name
        others = [op for op, _ in results[0][0][name] if op != "all_to_all_single"]
        assert set(others) <= {"all_reduce"}
    assert all(found == results[0] for found in results)
