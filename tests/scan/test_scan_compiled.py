"""Scans in models under backend="sp" on real ranks: single-device loss and gradients, one small collective in each direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.parity import VOCAB, Outcome, against_eager, build, check, outcome, sp, text, train_step
from support.ranks import Ranks
from support.recording import Recorder
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.torch_compat import associative_scan_op

WIDTH = 6
ops = torch.ops.sp


class Scanning(nn.Module):
    """Tokens in, a loss out; the scan along dim 1 is the only thing that mixes positions."""

    def __init__(self, scan: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scan = scan
        self.embed, self.inner = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.inner(self.embed(ids))
        logits = self.head(self.scan(x, ids).to(x.dtype))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gate(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


def starts_of(ids: Tensor) -> Tensor:
    """Return the starts of packed sequences."""
    return torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] % 5 == 0], 1)


def with_positions(x: Tensor, ids: Tensor) -> Tensor:
    """Rotate by positions within packed sequences, whose starts the model itself computes."""
    at = torch.arange(x.shape[1])
    begins = x[..., 0] > 0.3
    inside = at - torch.where(begins, at, 0).cummax(1)[0]
    return x * torch.cos(inside.to(x.dtype))[..., None]


def routed(x: Tensor, ids: Tensor) -> Tensor:
    """Route tokens by positions in their experts' queues over the full batch; tokens over the capacity are dropped."""
    tokens = x.flatten(0, 1)
    mask = F.one_hot(tokens.argmax(-1), WIDTH)
    place = ((mask.cumsum(0) - mask) * mask).sum(-1)
    kept = (place < 4).to(x.dtype) / (1 + place)
    return (tokens * kept[:, None]).view_as(x)


def recurrence(x: Tensor, ids: Tensor) -> Tensor:
    rows = [y.movedim(1, 0) for y in (gate(x), x)]
    return associative_scan_op(lambda a, b, c, d: [a * c, b * c + d], rows, ())[1].movedim(0, 1)


SCANS: dict[str, Callable[..., Tensor]] = {
    "cumsum": lambda x, ids: x.cumsum(1),
    "cumsum, dtype": lambda x, ids: x * (x > 0).cumsum(1, dtype=torch.float64) + x.cumsum(-2, dtype=x.dtype),
    "cumsum of a count": lambda x, ids: x * (x > 0).cumsum(1),
    "cumprod": lambda x, ids: (1 + 0.2 * x).cumprod(-2),
    "cumprod through zero": lambda x, ids: torch.where(ids[..., None] % 5 == 0, 0, 1 + 0.2 * x).cumprod(1),
    "cummax": lambda x, ids: x.cummax(1)[0],
    "cummin and its index": lambda x, ids: x.cummin(1)[0] + x.cummin(1)[1] * x,
    "logcumsumexp": lambda x, ids: x.logcumsumexp(1),
    "exclusive": lambda x, ids: x.cumsum(1) - x,
    "pad and slice": lambda x, ids: F.pad(x.cumsum(1), (0, 0, 1, 0))[:, :-1],
    "reversed": lambda x, ids: x.flip(1).cumsum(1).flip(1),
    "what is left": lambda x, ids: x.sum(1, keepdim=True) - x.cumsum(1) + x,
    "masked": lambda x, ids: (x * (ids > 3)[..., None]).cumsum(1),
    "segments": lambda x, ids: ops.scan(x, starts_of(ids).cumsum(1)[..., None], 1, "sum", exclusive=True),
    "positions": with_positions,
    "routing": routed,
    "linear_scan": lambda x, ids: sp_compile.linear_scan(gate(x), x, 1),
    "linear_scan, reversed": lambda x, ids: ops.linear_scan(gate(x), x, x[:, 0], 1, True),
    "extremes": lambda x, ids: ops.extremes(x, 1, "max")[0],
    "inclusive_scan": lambda x, ids: sp_compile.inclusive_scan(x, 1, "logsumexp", reverse=True),
    "two scans": lambda x, ids: (x.cumsum(1)[:, 1:] * 0.1).cumsum(1).sum(1, keepdim=True) + x.cumprod(1),
}


def all_kinds(x: Tensor, ids: Tensor) -> Tensor:
    return sum(SCANS[name](x, ids) for name in ("exclusive", "cummin and its index", "segments", "linear_scan"))


MODELS = {**SCANS, "associative_scan": recurrence, "all kinds": all_kinds}


def one_step(names: list[str], seq: int = 13, **how: Any) -> list[Outcome]:
    mesh = worker.mesh()
    return [against_eager(build(Scanning, scan=MODELS[n]), *text(seq), mesh=mesh, **how) for n in names]


def recurrent() -> Outcome:
    """torch's own gradients of an associative_scan whose leaves mix are wrong, so those of linear_scan are expected."""
    model, alone = (build(Scanning, scan=MODELS[n]) for n in ("associative_scan", "linear_scan"))
    found = train_step(sp(model, mesh=worker.mesh()), model, text(13))
    return outcome(*found, *train_step(alone, alone, text(13)))


@pytest.mark.slow
def test_associative_scan(ranks: Ranks) -> None:
    check(ranks.run(3, recurrent))


def check_all(found: list[list[Outcome]]) -> None:
    for outcomes in zip(*found, strict=True):
        check(outcomes)


@pytest.mark.as_users_run(names=list(SCANS)[4::20])
@pytest.mark.sampled(every=40)
@pytest.mark.parametrize("names", [list(SCANS)[i::20] for i in range(20)], ids=", ".join)
def test_every_scan(ranks: Ranks, names: list[str]) -> None:
    check_all(ranks.run(3, one_step, names))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_numbers_of_ranks(ranks: Ranks, n: int) -> None:
    check_all(ranks.run(n, one_step, ["cumsum", "cumprod", "cummin and its index", "segments", "routing"]))


@pytest.mark.slow
def test_one_device() -> None:
    outcomes = [against_eager(build(Scanning, scan=SCANS[n]), *text(9)) for n in ("cumsum", "segments", "routing")]
    check(outcomes[:1])
    assert max(one.error for one in outcomes) < 1e-9


def inductor(names: list[str]) -> list[Outcome]:
    return one_step(names, compiler="inductor")


@pytest.mark.slow
def test_inductor(ranks: Ranks) -> None:
    check_all(ranks.run(2, inductor, ["all kinds"], timeout=300))


def test_one_device_gets_the_fast_scan() -> None:
    """A long one, off the last dim: torch walks down its columns."""
    recorder, model = Recorder(), build(Scanning, scan=SCANS["cumsum"])
    train_step(sp(model, compiler=recorder), model, text(2048))
    targets = {n.target for way in ("forward", "backward") for n in recorder.graphs[way].graph.nodes}
    assert ops.local_scan.default in targets
    assert torch.ops.aten.cumsum.default not in targets


def zigzag(names: list[str], seq: int) -> list[Outcome]:
    return one_step(names, seq, layout="zigzag")


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("seq", [13, 16])
def test_zigzag(ranks: Ranks, seq: int) -> None:
    check_all(ranks.run(2, zigzag, ["cumsum", "logcumsumexp", "linear_scan", "reversed"], seq))


def local_shards() -> Outcome:
    """Train on each rank's shard with the loss of the full batch."""
    model, (ids, labels) = build(Tagging), text(12)
    at = worker.mesh().get_local_rank()

    def run(ids: Tensor, labels: Tensor) -> Tensor:
        compiled = sp(model, mesh=worker.mesh(), dynamic=True, inputs="local", seq_dims={"ids": 1, "labels": 1})
        return compiled(*(x.chunk(worker.mesh().size(), 1)[at] for x in (ids, labels)))

    return against_eager(model, ids, labels, run=run)


class Tagging(Scanning):
    """Without the label shift."""

    def __init__(self) -> None:
        super().__init__(SCANS["positions"])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.scan(self.inner(self.embed(ids)), ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.slow
def test_local_inputs(ranks: Ranks) -> None:
    check(ranks.run(3, local_shards))


def lengths(seqs: list[int]) -> list[Outcome]:
    model = build(Scanning, scan=SCANS["exclusive"])
    run = sp(model, mesh=worker.mesh(), dynamic=True)
    return [against_eager(model, *text(seq), run=run) for seq in seqs]


@pytest.mark.slow
def test_dynamic_lengths(ranks: Ranks) -> None:
    check_all(ranks.run(2, lengths, [12, 13]))


@dataclass
class Recorded:
    """Collectives of forward and backward, bytes that one rank gathers from the others, the text of the graphs."""

    forward: list[str]
    backward: list[str]
    gathered: list[int]
    text: list[str]


def recorded(name: str, seq: int = 13, **options: Any) -> Recorded:
    recorder, model = Recorder(), build(Scanning, scan=MODELS[name])
    run = sp(model, mesh=worker.mesh(), compiler=recorder, **options)
    train_step(run, model, text(seq))
    kinds = [
        [str(n.target).removeprefix("_c10d_functional.").split(".")[0] for n in recorder.collectives(way)]
        for way in ("forward", "backward")
    ]
    messages = [
        n.args[0].meta["val"] for way in ("forward", "backward") for n in recorder.collectives(way, "all_gather")
    ]
    others = worker.mesh().size() - 1
    return Recorded(*kinds, [others * x.numel() * x.element_size() for x in messages], recorder.text())


LOSS = ["all_reduce"]  # forward: of the loss; backward: of the parameters' gradients, in one bucket


COUNTED = ["cumsum", "cumprod", "cummax", "extremes", "logcumsumexp", "segments", "exclusive", "linear_scan"]


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("name", COUNTED)
def test_one_exchange_each_way(ranks: Ranks, name: str) -> None:
    found = ranks.run(3, recorded, name)
    assert all(one == found[0] for one in found), "the ranks' graphs differ"
    assert sorted(found[0].forward) == ["all_gather_into_tensor", *LOSS]
    assert sorted(found[0].backward) == ["all_gather_into_tensor", *LOSS]
    report = sp_compile.explain(build(Scanning, scan=MODELS[name]), *text(39), sp=3)
    (scan,) = (e for e in report.exchanges if e.op in ("scan", "extremes", "linear_scan"))
    assert found[0].gathered == [scan.forward, scan.backward], "bytes do not depend on the length"


@pytest.mark.slow
def test_large_carries_go_in_steps(ranks: Ranks) -> None:
    """log2(P) shifts if an all-gather of everyone's carry is predicted to take longer."""
    slow = {"all_gather_bandwidth": 1.0, "hop_bandwidth": 1e9, "all_to_all_bandwidth": 1e9}
    found = ranks.run(4, recorded, "cumsum", 13)[0]
    assert "all_to_all_single" not in found.forward + found.backward
    for found in ranks.run(4, stepped, slow):
        assert found[0] == found[1] == 2
        check([found[2]])


def stepped(cost: dict[str, float]) -> tuple[int, int, Outcome]:
    found = recorded("cumsum", cost=cost)
    (one,) = one_step(["linear_scan"], cost=cost)
    return found.forward.count("all_to_all_single"), found.backward.count("all_to_all_single"), one
