"""torch.compile(model, backend="sp") on real ranks: the loss and every gradient of one device."""

import copy
from functools import partial
from typing import Any

import pytest
import ranks as worker
import torch
import torch.nn.functional as F
from parity import (
    Decoder,
    Outcome,
    against_eager,
    build,
    check,
    difference,
    gradients,
    outcome,
    sp,
    text,
    train_step,
)
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile  # noqa: F401


def one_step(seq: int, dynamic: bool | None = None, compiler: str = "aot_eager", **model: Any) -> Outcome:
    return against_eager(build(**model), *text(seq), mesh=worker.mesh(), dynamic=dynamic, compiler=compiler)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_decoder(ranks: Ranks, n: int) -> None:
    check(ranks.run(n, one_step, 13))


def test_fewer_positions_than_ranks(ranks: Ranks) -> None:
    check(ranks.run(3, one_step, 2))


def test_one_device_needs_no_process_group() -> None:
    check([against_eager(build(), *text(9))])


def test_inductor(ranks: Ranks) -> None:
    check(ranks.run(2, partial(one_step, compiler="inductor"), 13))


class Counter:
    """A compiler that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.calls += 1
        return gm.forward


def sweep(lengths: list[int]) -> tuple[list[Outcome], int]:
    model, counter = build(layers=1), Counter()
    run = sp(model, mesh=worker.mesh(), dynamic=True, compiler=counter)
    return [against_eager(model, *text(seq), run=run) for seq in lengths], counter.calls


@pytest.mark.parametrize("n", [2, 3])
def test_lengths_share_compilations(ranks: Ranks, n: int) -> None:
    results = ranks.run(n, sweep, [12, 13, 7, 30, 18, 2, 31, 40])
    for outcomes in zip(*(steps for steps, _ in results)):
        check(outcomes)
    assert all(compiles <= 2 for _, compiles in results)


class Toggled(nn.Module):
    """BatchNorm over batch and sequence, a moving average, and dropout that eval turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(layers=1)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.decoder.hidden(ids)
        if self.training:
            self.steps += 1
            self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        x = self.norm(x.flatten(0, 1)).view_as(x)
        logits = self.decoder.head(x + self.average)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def toggle() -> list[Outcome]:
    model = build(Toggled)
    alone, run = copy.deepcopy(model), sp(model, mesh=worker.mesh())
    outcomes = []
    for step, training in enumerate((True, False, True)):
        model.train(training)
        alone.train(training)
        batch = text(11, seed=step)
        outcomes.append(outcome(*train_step(run, model, batch), *train_step(alone, alone, batch)))
        for name, buffer in alone.named_buffers():
            assert difference(model.get_buffer(name), buffer) < 1e-9, name
    return outcomes


def test_buffers_and_train_eval(ranks: Ranks) -> None:
    for outcomes in zip(*ranks.run(2, toggle)):
        check(outcomes)


def accumulate() -> Outcome:
    model = build(layers=1, tie=True)
    alone, run = copy.deepcopy(model), sp(model, mesh=worker.mesh())
    losses = []
    for step in (run, alone):
        losses.append(sum(step(*text(10, seed=seed)) for seed in (1, 2)))
        losses[-1].backward()
        step(*text(10, seed=3)).backward()
    return outcome(losses[0], gradients(model), losses[1], gradients(alone))


def test_gradients_accumulate_and_tied_weights(ranks: Ranks) -> None:
    check(ranks.run(2, accumulate))


class Checkpointed(Decoder):
    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


def test_checkpointed_blocks(ranks: Ranks) -> None:
    check(ranks.run(2, one_step_of, Checkpointed))


def one_step_of(model: type, seq: int = 9, **how: Any) -> Outcome:
    return against_eager(build(model), *text(seq), mesh=worker.mesh(), **how)


class Autocast(Decoder):
    def hidden(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().hidden(ids)


def autocast(ambient: bool) -> Outcome:
    model = build(layers=1).float() if ambient else build(Autocast, layers=1).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
        return against_eager(model, *text(12), mesh=worker.mesh())


@pytest.mark.parametrize("ambient", [True, False], ids=["around the step", "in the model"])
def test_autocast(ranks: Ranks, ambient: bool) -> None:
    check(ranks.run(2, autocast, ambient), tolerance=0.05)


def two_models() -> list[Outcome]:
    """The dp halves of a 2 x 2 mesh train one model each; then all four ranks share one."""
    first, second = build(layers=1), build(layers=1, tie=True)
    halves = sp(first, mesh=worker.mesh2d(2, 2), mesh_dim="sp")
    whole = sp(second, mesh=worker.mesh(4))
    outcomes = []
    for seed in (1, 2):
        outcomes.append(against_eager(first, *text(10, seed=seed), run=halves))
        outcomes.append(against_eager(second, *text(10, seed=seed), run=whole))
    return outcomes


def test_two_meshes_in_one_process(ranks: Ranks) -> None:
    for outcomes in zip(*ranks.run(4, two_models)):
        check(outcomes)


def default_mesh_and_slice() -> list[Outcome]:
    model = build(layers=1)
    mesh = worker.mesh2d(2, 2)
    return [against_eager(model, *text(10)), against_eager(model, *text(10), mesh=mesh["sp"]), against_eager(model, *text(10), mesh=mesh, mesh_dim="dp")]


def test_every_way_to_name_the_ranks(ranks: Ranks) -> None:
    for outcomes in zip(*ranks.run(4, default_mesh_and_slice)):
        check(outcomes)


class Breaks(Decoder):
    """Three graph breaks: a printed value, an .item(), and a branch on data."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        scale = x.detach().abs().max().item()
        x = self.blocks[1](x / scale)
        if x.sum() > 1e6:
            x = x * 2
        logits = self.head(self.norm(x))
        return self.loss(logits, labels)

    @torch._dynamo.disable
    def note(self, logits: Tensor) -> None:
        self.seen = logits.shape

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.note(logits)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_graph_breaks(ranks: Ranks) -> None:
    check(ranks.run(2, one_step_of, Breaks))
