"""torch.compile(model, backend="sp") on real ranks: loss and every gradient equal a single device's."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.parity import (
    VOCAB,
    Checkpointed,
    Decoder,
    Outcome,
    against_eager,
    build,
    check,
    difference,
    error_text,
    gradients,
    outcome,
    sp,
    text,
    train_step,
)
from support.ranks import Ranks
from support.recording import Recorder
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def one_step(model: type, seq: int = 9, layers: int = 1) -> Outcome:
    return against_eager(build(model, layers=layers), *text(seq), mesh=worker.mesh())


@pytest.mark.as_users_run(n=3)
@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 2, 4])
def test_decoder(ranks: Ranks, n: int) -> None:
    check(ranks.run(n, one_step, Decoder, 13, 2))


def mostly_prompt() -> Outcome:
    return against_eager(build(layers=1), *text(12, prompt=0.9), mesh=worker.mesh())


def test_ranks_without_a_valid_label(ranks: Ranks) -> None:
    check(ranks.run(3, mostly_prompt))


def test_fewer_positions_than_ranks(ranks: Ranks) -> None:
    check(ranks.run(3, one_step, Decoder, 2))


def test_one_device_needs_no_process_group() -> None:
    check([against_eager(build(), *text(9))])


class Counter:
    """A compiler that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.calls += 1
        return gm.forward


def sweep(lengths: list[int]) -> tuple[list[Outcome], int, str]:
    model, counter = build(layers=1), Counter()
    run = sp(model, mesh=worker.mesh(), dynamic=True, compiler=counter)
    outcomes = [against_eager(model, *text(seq), run=run) for seq in lengths]
    calls, rank = counter.calls, worker.mesh().get_rank()
    return outcomes, calls, error_text(lambda: run(*text(20 + 2 * (rank == 1))))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_lengths_share_compilations(ranks: Ranks, n: int) -> None:
    results = ranks.run(n, sweep, [12, 13, 7, 2, 40])
    for outcomes in zip(*(steps for steps, _, _ in results)):
        check(outcomes)
    for _, compiles, refusal in results:
        assert compiles <= 2
        assert refusal.startswith("SP632: ")
        assert "rank 1: ids (2, 22)" in refusal


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


@pytest.mark.as_users_run("slow")
def test_buffers_and_train_eval(ranks: Ranks) -> None:
    for outcomes in zip(*ranks.run(2, toggle)):
        check(outcomes)


class UnusedNorms(nn.Module):
    """Norms with unused results, which only update their running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.batch, self.instance = nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        self.batch(x.mT)
        self.instance(x.mT)
        q = self.inner(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()


def statistics(ranks: int) -> list[float]:
    model = build(UnusedNorms)
    alone, x = copy.deepcopy(model), torch.randn(2, 11, 8, generator=torch.Generator().manual_seed(0)).double()
    run = sp(model, mesh=worker.mesh()) if ranks > 1 else sp(model)
    run(x).backward()
    alone(x).backward()
    return [difference(model.get_buffer(name), buffer) for name, buffer in alone.named_buffers()]


@pytest.mark.as_users_run("slow", n=2)
@pytest.mark.parametrize("n", [1, 2])
def test_statistics_of_norms_whose_results_are_unused(ranks: Ranks, n: int) -> None:
    for found in [statistics(1)] if n == 1 else ranks.run(n, statistics, n):
        assert max(found) < 1e-9


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


@pytest.mark.slow
def test_checkpointed_blocks(ranks: Ranks) -> None:
    check(ranks.run(2, one_step, Checkpointed))


def test_a_checkpoint_around_the_first_call() -> None:
    """Tensors saved by compilation are not those saved by the checkpoint."""
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    loss = checkpoint(sp(net, seq_dims={0: 1}), x, use_reentrant=False).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(net(x).sum(), x))


class Autocast(Decoder):
    def hidden(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().hidden(ids)


def autocast(ambient: bool) -> Outcome:
    model = build(layers=1).float() if ambient else build(Autocast, layers=1).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
        return against_eager(model, *text(12), mesh=worker.mesh())


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("ambient", [True, False], ids=["around the step", "in the model"])
def test_autocast(ranks: Ranks, ambient: bool) -> None:
    check(ranks.run(2, autocast, ambient), tolerance=0.05)


def two_models() -> list[Outcome]:
    """Two halves of the ranks train one model each, and all of them, the default group, a second one."""
    first, second = build(layers=1), build(layers=1, tie=True)
    halves = sp(first, mesh=worker.mesh2d(2, 2)["sp"])
    whole = sp(second)
    outcomes = []
    for seed in (1, 2):
        outcomes.append(against_eager(first, *text(10, seed=seed), run=halves))
        outcomes.append(against_eager(second, *text(10, seed=seed), run=whole))
    return outcomes


@pytest.mark.slow
def test_two_meshes_in_one_process(ranks: Ranks) -> None:
    for outcomes in zip(*ranks.run(4, two_models)):
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


@pytest.mark.slow
def test_graph_breaks(ranks: Ranks) -> None:
    check(ranks.run(2, one_step, Breaks, 9, 2))


class LossInItsOwnFrame(Decoder):
    """A print breaks the outer frame and the loss function's too; neither piece holds attention."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return spoken_loss(self.head(self.hidden(ids)), labels)


def spoken_loss(logits: Tensor, labels: Tensor) -> Tensor:
    print("logits", logits.shape)  # noqa: T201  (the graph break)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))


@pytest.mark.slow
def test_pieces_without_a_sequence_are_no_error(ranks: Ranks) -> None:
    check(ranks.run(2, one_step, LossInItsOwnFrame))


def recomputes() -> tuple[Outcome, int]:
    """Also: exchanges in the backward graph."""
    recorder = Recorder()
    found = against_eager(build(Checkpointed, layers=1), *text(9), mesh=worker.mesh(), compiler=recorder)
    return found, len(recorder.collectives("backward", "all_to_all_single"))


def test_checkpointed_blocks_run_again_in_the_backward(ranks: Ranks) -> None:
    """The program has four collectives with recomputation, and two without it: test_generated.py counts them."""
    outcomes, exchanges = zip(*ranks.run(2, recomputes))
    check(outcomes)
    assert exchanges == (4, 4)


def shards(seq: int, outputs: str) -> tuple[list[Outcome], str]:
    """Each rank passes its part of the tokens and targets, and gets its part of the hidden states, or all of them.

    At last it passes a part of another length than the others do.
    """
    mesh = worker.mesh()
    model = build(Shards, layers=1)
    alone = copy.deepcopy(model)
    run = sp(model, mesh=mesh, inputs="local", outputs=outputs)
    outcomes = []
    for seed in (1, 2):
        ids, targets = text(seq * seed, seed=seed)
        mine = slice(mesh.get_rank() * ids.shape[1] // mesh.size(), (mesh.get_rank() + 1) * ids.shape[1] // mesh.size())
        for m in (model, alone):
            m.zero_grad()
        loss, hidden = run(ids[:, mine].clone(), targets[:, mine].clone())
        right, whole = alone(ids, targets)
        assert difference(hidden, whole[:, mine] if outputs == "local" else whole) < 1e-9
        loss.backward()
        right.backward()
        outcomes.append(outcome(loss, gradients(model), right, gradients(alone)))
    model.zero_grad()  # as on the first call, or Dynamo recompiles
    return outcomes, error_text(lambda: run(*text(9 - mesh.get_rank())))


class Shards(Decoder):
    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.hidden(ids)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), x.detach()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "outputs"),
    [
        (2, "lazy"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, "local"), (3, "local"), (3, "gather")]),
    ],
)
def test_local_inputs_and_outputs(ranks: Ranks, n: int, outputs: str) -> None:
    results = ranks.run(n, shards, 12, outputs)
    for outcomes in zip(*(steps for steps, _ in results)):
        check(outcomes)
    for _, refusal in results:
        assert refusal.startswith("SP632: ")
        assert "rank 1: ids (2, 8)" in refusal
