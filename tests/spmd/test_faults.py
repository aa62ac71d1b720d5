"""A training loop in which one rank does something else: an SpError on every rank, on the step where it happens."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks as worker
from support.parity import VOCAB, Sums, build, sp, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sp_compile import SpError
from sp_compile.integrations.ddp import compile_under_ddp

RANKS = 2
STEPS = 4
FAULT = 2  # the step on which rank 1 does something else


class Model(nn.Module):
    """A small model from tokens and labels to a loss, with an untrained scale; quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.inner(self.embed(ids) * self.scale).cumsum(1).tanh()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def is_odd_rank() -> bool:
    return worker.mesh().get_rank() == 1


def loop(step: Callable[[Any, nn.Module, int], None], **how: Any) -> tuple[int, str]:
    """Return the step of this rank's error and its text; (STEPS, "") without an error."""
    torch.manual_seed(0)
    net = build(Model)
    run = sp(net, mesh=worker.mesh(), check_every=1, **how)
    for number in range(STEPS):
        try:
            step(run, net, number)
        except SpError as error:
            return number, str(error)
    return STEPS, ""


def other_tokens(run: Any, net: nn.Module, number: int) -> None:
    run(*text(8, seed=number + 100 * (is_odd_rank() and number == FAULT))).backward()


def skipped_batch(run: Any, net: nn.Module, number: int) -> None:
    run(*text(8, seed=number + (is_odd_rank() and number >= FAULT))).backward()


def skipped_backward(run: Any, net: nn.Module, number: int) -> None:
    loss = run(*text(8, seed=number))
    if not (is_odd_rank() and number == FAULT):
        loss.backward()


def backward_twice(run: Any, net: nn.Module, number: int) -> None:
    loss = run(*text(8, seed=number))
    loss.backward(retain_graph=is_odd_rank() and number == FAULT)
    if is_odd_rank() and number == FAULT:
        loss.backward()


def other_scale(run: Any, net: nn.Module, number: int) -> None:
    loss = run(*text(8, seed=number))
    (loss * (2 if is_odd_rank() and number == FAULT else 1)).backward()


def no_grad(run: Any, net: nn.Module, number: int) -> None:
    with torch.set_grad_enabled(not (is_odd_rank() and number == FAULT)):
        loss = run(*text(8, seed=number))
    if loss.requires_grad:
        loss.backward()


def frozen_later(run: Any, net: nn.Module, number: int) -> None:
    if is_odd_rank() and number == FAULT:
        net.head.weight.requires_grad_(False)
    run(*text(8, seed=number)).backward()


def compiled_again(run: Any, net: nn.Module, number: int) -> None:
    """Nothing is wrong with that: it becomes the same program."""
    if is_odd_rank() and number == FAULT:
        torch._dynamo.reset()
    run(*text(8, seed=number)).backward()


def weights_drift(run: Any, net: nn.Module, number: int) -> None:
    if is_odd_rank() and number == FAULT:
        with torch.no_grad():
            net.head.weight.add_(1)
    run(*text(8, seed=number)).backward()


def unused_gradients(run: Any, net: nn.Module, number: int) -> None:
    """Run torch.autograd.grad, which does not set .grad, so that the optimizer changes nothing."""
    loss = run(*text(8, seed=number))
    if is_odd_rank() and number == FAULT:
        torch.autograd.grad(loss, [*net.parameters()])
    else:
        loss.backward()
    torch.optim.AdamW(net.parameters()).step()
    net.zero_grad()


def buffer_differs(run: Any, net: nn.Module, number: int) -> None:
    if is_odd_rank() and number == 0:
        net.scale.add_(1)
    run(*text(8, seed=number)).backward()


CASES: dict[Callable[..., None], tuple[int, str, dict[str, Any]]] = {
    other_tokens: (FAULT, "SP634: .*ids ", {}),
    skipped_batch: (FAULT, "SP634: .*ids ", {}),
    skipped_backward: (FAULT, r"rank 0 runs .*backward .*Model at .*number 3.*rank 1 calls Model at.*number 4", {}),
    backward_twice: (FAULT, r"rank 0 calls Model at .*number 4.*rank 1 runs .*backward .*number 3", {}),
    other_scale: (FAULT, r"SP637.*rank 0: .*gradient .* 0 .* 1\.0.*rank 1: .* 2\.0", {}),
    no_grad: (FAULT, r"mode grad.*mode no_grad", {}),
    frozen_later: (FAULT, r"SP639.*rank 0: head.weight requires_grad=True", {}),
    compiled_again: (STEPS, "^$", {}),
    weights_drift: (FAULT, r"SP635.*head.weight", {}),
    unused_gradients: (FAULT + 1, r"SP635.*weight", {}),
    buffer_differs: (0, "SP642: .*scale", {}),
}


def run_case(name: str) -> tuple[int, str]:
    step = next(one for one in CASES if one.__name__ == name)
    with functorch_config.patch(donated_buffer=False):  # or torch refuses a second backward by itself
        return loop(step, **CASES[step][2])


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", [one.__name__ for one in CASES])
def test_every_rank_raises_on_that_step(ranks: Ranks, name: str) -> None:
    step = next(one for one in CASES if one.__name__ == name)
    when, words, _ = CASES[step]
    results = ranks.run(RANKS, run_case, name)
    for number, message in results:
        assert number in (when, when + 1), message  # a rank that has skipped something is one step ahead
        assert re.search(words, message, re.DOTALL), message
    assert results[0][1] == results[1][1]


def budgets() -> str:
    with functorch_config.patch(activation_memory_budget=0.5 if is_odd_rank() else 1.0):
        return loop(other_tokens)[1]


def options() -> str:
    return loop(other_tokens, fallback="error" if is_odd_rank() else "gather")[1]


def requires_grad() -> str:
    net = build(Sums)
    run = sp(net, mesh=worker.mesh())
    x = torch.ones(2, 8, 16, dtype=torch.float64, requires_grad=is_odd_rank())
    try:
        run(x).backward()
    except SpError as error:
        return str(error)
    return ""


def two_models(tied: bool = False) -> str:
    """Call two models of one class in another order."""
    first, second = build(Sums), build(Sums)
    if tied:
        second.inner.weight = first.inner.weight
    runs = [sp(net, mesh=worker.mesh()) for net in (first, second)]
    x = torch.ones(2, 8, 16, dtype=torch.float64)
    for run in runs:
        run(x).backward()
    try:
        for run in reversed(runs) if is_odd_rank() else runs:
            run(x).backward()
    except SpError as error:
        return str(error)
    return ""


def two_tied_models() -> str:
    return two_models(tied=True)


def two_threads() -> str:
    net = build(Sums)
    run, errors = sp(net, mesh=worker.mesh()), []
    x = torch.ones(2, 8, 16, dtype=torch.float64)
    run(x).backward()

    def other() -> None:
        try:
            run(x)
        except SpError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return errors[0] if errors else ""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (budgets, r"activation_memory_budget 1.0.*activation_memory_budget 0.5"),
        (options, r"option fallback 'gather'.*option fallback 'error'"),
        (requires_grad, r"^SP63[19]\b"),
        (two_models, r"rank 0 calls Sums .*rank 1 calls Sums .*of model"),
        (two_tied_models, r"rank 0 calls Sums .*rank 1 calls Sums .*of model"),
        (two_threads, r"^SP624\b"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_every_rank_raises(ranks: Ranks, case: Callable[[], str], words: str) -> None:
    results = ranks.run(RANKS, case)
    assert len(set(results)) == 1
    assert re.search(words, results[0], re.DOTALL), results[0]


def of_replicas() -> tuple[int, str]:
    """Run `loop` under DDP: two replicas of two ranks with their own tokens; one has different tokens on a rank in the step of the fault."""
    torch.manual_seed(0)
    net, replica = build(Model), dist.get_rank() // 2
    compile_under_ddp(net, worker.mesh2d(2, 2)["sp"], compiler="aot_eager", cost={})
    ddp = DistributedDataParallel(net, process_group=worker.group(), broadcast_buffers=False)
    for number in range(STEPS):
        if number == FAULT and replica:
            break
        try:
            ddp(*text(8, seed=2 * number + replica + 100 * (is_odd_rank() and number == FAULT))).backward()
        except SpError as error:
            return number, str(error)
    return STEPS, ""


def test_a_replica_under_ddp_raises(ranks: Ranks) -> None:
    first, second, *others = ranks.run(4, of_replicas)
    assert first == second
    assert first[0] == FAULT
    assert re.search(r"SP634.*ids ", first[1], re.DOTALL), first[1]
    assert others == [(STEPS, "")] * 2
