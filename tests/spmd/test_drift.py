"""A rank whose weights drift: every rank raises at the next call at which weights are compared."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Ranks as RealRanks
from support.ranks import mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compile import SpError, compare_weights
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.runtime import guard as check_run
from sp_compile.runtime.control import failures
from sp_compile.runtime.control.channel import ControlChannel
from sp_compile.runtime.control.message import Message
from sp_compile.runtime.fingerprint import ProgramDigest
from sp_compile.runtime.guard import GuardedProgram, ProgramInfo
from sp_compile.runtime.input_checks import ComparedInputs

RANKS, STEPS, FAULT = 2, 4, 2


class Threads:
    """Ranks as threads, which exchange messages at a barrier. asked: number of exchanges."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self.said: dict[int, Message] = {}
        self.own = threading.local()
        self.asked = 0

    def exchanged(self, ranks: Ranks, mine: Message) -> list[Message] | None:
        self.said[self.own.rank] = mine
        self.barrier.wait()
        everyone = [Message.read(self.said[rank].body) for rank in range(RANKS)]
        is_equal = len({(self.said[rank].digest, self.said[rank].needs_body) for rank in range(RANKS)}) == 1
        if self.barrier.wait() == 0:
            self.asked += 1
        return None if is_equal else everyone

    def wire(self, ranks: Ranks) -> ControlChannel:
        return self.own.wire

    def run(self, act: Callable[[int], Any]) -> list[Any]:
        """Return the result of `act` on each rank, or the text of its SpError."""
        out: dict[int, Any] = {}

        def live(rank: int) -> None:
            self.own.rank = rank
            self.own.wire = ControlChannel(
                "threads", list(range(RANKS)), None, timedelta(seconds=60), ["joined"] * RANKS
            )
            try:
                out[rank] = act(rank)
            except SpError as error:
                out[rank] = str(error)
            except BaseException as error:
                out[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [out[rank] for rank in range(RANKS)]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    beside = Threads()
    monkeypatch.setattr(check_run, "all_gather_messages", beside.exchanged)
    monkeypatch.setattr(check_run, "channel_of", beside.wire)
    return beside


class Model(nn.Module):
    """(batch, 8) in, a loss out; calls itself as a compiled program would be called."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(8, 8, generator=generator) for _ in range(3))
        self.register_buffer("scale", torch.ones(8))
        names = ["x", "scale", *(f"weights.{i}" for i in range(3))]
        inputs = ComparedInputs(names, frozenset(names), frozenset(["x"]))
        info = ProgramInfo(check_every=how.pop("check_every", 1))
        self.program = GuardedProgram(compute, Ranks(RANKS, "threads"), info, ProgramDigest(), inputs, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.program(x, self.scale, *self.weights)


def compute(x: Tensor, scale: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = torch.tanh(x @ weight * scale)
    return x.square().sum()


class Training:
    """One rank's loop. odd: is something else done on this step?"""

    def __init__(self, rank: int, **how: Any) -> None:
        self.rank, self.odd = rank, False
        self.model = Model(**how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).backward()
        self.optimizer.step()


def skipped_step(one: Training) -> None:
    one.optimizer.zero_grad()
    one.model(one.x).backward()
    if not one.odd:
        one.optimizer.step()


def unused_gradients(one: Training) -> None:
    """Run torch.autograd.grad, which does not set .grad, so that the optimizer changes nothing."""
    one.optimizer.zero_grad()
    loss = one.model(one.x)
    torch.autograd.grad(loss, [*one.model.parameters()]) if one.odd else loss.backward()
    one.optimizer.step()


def scaler_skips(one: Training) -> None:
    """It has found an infinity on one rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    one.optimizer.zero_grad()
    scaler.scale(one.model(one.x)).backward()
    if one.odd:
        next(one.model.parameters()).grad[0, 0] = torch.inf
    scaler.step(one.optimizer)
    scaler.update()


def clipped(one: Training) -> None:
    one.optimizer.zero_grad()
    one.model(one.x).backward()
    if one.odd:
        nn.utils.clip_grad_norm_(one.model.parameters(), 1e-3)
    one.optimizer.step()


def other_rate(one: Training) -> None:
    if one.odd:
        one.optimizer.param_groups[0]["lr"] *= 1.01
    one.step()


def kept_gradients(one: Training) -> None:
    if not one.odd:
        one.optimizer.zero_grad()
    one.model(one.x).backward()
    one.optimizer.step()


def hooked(one: Training) -> None:
    handle = one.model.weights[1].register_hook(lambda gradient: gradient * 2) if one.odd else None
    one.step()
    if handle is not None:
        handle.remove()


def one_entry(one: Training) -> None:
    """Autograd counts it, wherever in the weight it is."""
    one.step()
    if one.odd:
        with torch.no_grad():
            one.model.weights[2][7, 7] += 1


def exchanged_data(one: Training) -> None:
    """Autograd does not count that."""
    one.step()
    if one.odd:
        one.model.weights[2].data = one.model.weights[2].detach() * 2


def buffer_moves(one: Training) -> None:
    one.step()
    if one.odd:
        one.model.scale.mul_(2)


DRIFTS = [
    (skipped_step, r"weights.0 \(8, 8\) with checksum"),
    (unused_gradients, r"weights.0 \(8, 8\) with checksum"),
    (scaler_skips, r"weights.0 \(8, 8\) with checksum"),
    (clipped, r"weights.0 \(8, 8\) with checksum"),
    (other_rate, r"weights.0 \(8, 8\) with checksum"),
    (kept_gradients, r"weights.0 \(8, 8\) with checksum"),
    (hooked, r"weights.1 \(8, 8\) with checksum"),
    (one_entry, r"weights.2 \(8, 8\) with checksum"),
    (exchanged_data, r"weights.2 \(8, 8\) with checksum"),
    (buffer_moves, r"scale \(8,\) with checksum"),
]


def steps(one: Training, how: Callable[[Training], None]) -> tuple[int, str]:
    """Return the step of this rank's error and its text; (STEPS, "") without an error."""
    for number in range(STEPS):
        one.odd = one.rank == 1 and number == FAULT
        try:
            how(one)
        except SpError as error:
            return number, str(error)
    return STEPS, ""


@pytest.mark.parametrize(("how", "words"), DRIFTS, ids=[how.__name__ for how, _ in DRIFTS])
def test_a_drift_raises_at_the_next_comparison(threads: Threads, how: Callable[[Training], None], words: str) -> None:
    first, second = threads.run(lambda rank: steps(Training(rank), how))
    assert first == second
    number, message = first
    assert number == FAULT + 1, message
    assert "SP635" in message
    assert re.search(words, message), message


def test_a_drift_raises_within_check_every_calls(threads: Threads) -> None:
    """The drift of the third step is found on the fourth call, of index 3, where every fourth is compared."""
    for every, expected in ((2, FAULT + 1), (4, FAULT + 1), (3, STEPS), (100, STEPS)):
        first, second = threads.run(lambda rank, every=every: steps(Training(rank, check_every=every), other_rate))
        assert first == second
        assert first[0] == expected, (every, first)


@pytest.mark.parametrize("first", [True, False])
def test_a_drift_raises_until_it_is_repaired(threads: Threads, first: bool) -> None:
    """A loop that catches the error and continues."""

    def act(rank: int) -> list[bool]:
        one, errors = Training(rank), []
        kept = one.model.weights[2].detach().clone()
        for number in range(6):
            if rank == 1 and number == (0 if first else 2):
                one.model.weights[2].data[-1, -1] += 5
            if rank == 1 and number == 4:
                one.model.weights[2].data.copy_(kept)
            try:
                one.model(one.x)
            except SpError as error:
                errors.append(error.code in ("SP635", "SP642"))
            else:
                errors.append(False)
        return errors

    expected = [first, first, True, True, False, False]
    assert threads.run(act) == [expected] * RANKS


def test_a_rank_that_fails_before_an_exchange_publishes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said, text = list[str](), "no memory for a checksum"

    def fails(x: Tensor) -> str:
        raise MemoryError(text)

    monkeypatch.setattr(check_run, "checksum", fails)
    monkeypatch.setattr(
        check_run, "channel_of", lambda ranks: ControlChannel("one", [0, 1], None, timedelta(seconds=60), ["", ""])
    )
    monkeypatch.setattr(failures, "publish_stop", lambda words, **how: said.append(words))
    monkeypatch.setattr(failures.dist, "get_rank", lambda: 0)
    with pytest.raises(MemoryError, match=f"{text}\nrank 0"):
        Training(0).model(torch.ones(4, 8))
    assert re.search(rf"MemoryError: {text}.* calls ", said[0])


def compared_on_request(n: int) -> list[str]:
    """Return errors of comparisons with equal weights, with one that drifts by `.data`, and after its repair."""
    model, errors = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), []
    for name in ("", "0.weight", "", "1.running_mean", ""):
        state = model.state_dict()
        kept = {key: x.clone() for key, x in state.items()}
        if name and dist.get_rank() == n - 1:
            state[name].view(-1)[-1] += 1e-6
        errors.append(compared(torch.compile(model, backend="eager"), n))
        model.load_state_dict(kept)
    return [*errors, compared(nn.ReLU(), n)]


def compared(model: Any, n: int) -> str:
    try:
        compare_weights(model, mesh=mesh(n))
    except SpError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("n", [2, 3])
def test_weights_are_compared_on_request(ranks: RealRanks, n: int) -> None:
    errors = ranks.run(n, compared_on_request, n)
    assert errors == [errors[0]] * n
    before, weight, between, buffer, after, nothing = errors[0]
    assert before == between == after == ""
    assert re.search(f"SP651.*rank {n - 1}: 0.weight torch.float32", weight, re.DOTALL)
    assert "0.bias" not in weight
    assert re.search(f"rank {n - 1}: 1.running_mean torch.float32", buffer)
    assert "SP652" in nothing


def compared_on_another_axis() -> str:
    """Return the error if rank 1 names an unknown mesh axis and makes no further call, after which the group breaks."""
    own = DeviceMesh.from_group(dist.new_group([0, 1], timeout=timedelta(seconds=2)), "cpu", mesh_dim_names=("sp",))
    try:
        compare_weights(nn.Linear(2, 2), mesh=own, mesh_dim="sq" if dist.get_rank() else None)
    except SpError as error:
        return str(error)
    finally:
        time.sleep(6 * dist.get_rank())
    return ""


@pytest.mark.slow
def test_a_rank_that_compares_over_an_axis_that_is_none(ranks: RealRanks) -> None:
    messages = ranks.run(2, compared_on_another_axis)
    for message, code in zip(messages, ("SP621", "SP114"), strict=True):
        assert message.startswith(f"{code}: ")
        assert "SP114: " in message
        assert "'sq'" in message


def test_a_loop_without_faults_exchanges_once_a_call(threads: Threads) -> None:
    assert threads.run(lambda rank: steps(Training(rank), Training.step)) == [(STEPS, "")] * RANKS
    assert threads.asked == STEPS


def test_never_is_never(threads: Threads) -> None:
    errors = threads.run(lambda rank: steps(Training(rank, check_every=0), skipped_step))
    assert errors == [(STEPS, "")] * RANKS


def test_a_drift_on_a_device_raises_one_call_later(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses CPU tensors in place of device tensors."""
    monkeypatch.setattr(check_run, "is_on_accelerator", lambda a: isinstance(a, Tensor))
    first, second = threads.run(lambda rank: steps(Training(rank), skipped_step))
    assert first == second
    assert first[0] == STEPS, first  # one more call is needed
    monkeypatch.setattr(f"{__name__}.STEPS", STEPS + 1)
    for how, weight in ((skipped_step, 0), (exchanged_data, 2)):
        first, second = threads.run(lambda rank, how=how: steps(Training(rank), how))
        assert first == second
        assert first[0] == FAULT + 2, first
        assert re.search(rf"\bweights\.{weight} .*\(number 4\)", first[1]), first[1]


def test_large_floats_are_compared_in_part_on_every_call(threads: Threads) -> None:
    def act(rank: int) -> tuple[int, str]:
        one = Training(rank, check_every=100)
        one.x = torch.randn(2, 3000, 8, generator=torch.Generator().manual_seed(1))

        def other_rows(one: Training) -> None:
            if one.odd:
                one.x = torch.randn(2, 3000, 8, generator=torch.Generator().manual_seed(2))
            one.step()

        return steps(one, other_rows)

    first, second = threads.run(act)
    assert first == second
    assert first[0] == FAULT
    assert re.search("SP634.*rank 1: part of x ", first[1], re.DOTALL), first[1]
