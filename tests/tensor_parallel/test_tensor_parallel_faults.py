"""Training loops of a tensor-parallel model in which one rank diverges: every rank raises on that step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from support.fuzz.fault_parallel import Scanned
from support.fuzz.fault_replicas import impatient_mesh
from support.fuzz.loop import TIMEOUT
from support.parallel.parallel_models import Split
from support.parallel.parallel_training import message, split
from support.parallel.parallel_variants import DIM, Hidden
from support.ranks import Ranks as Pool
from torch import Tensor, nn

from sp_compile import SpError
from sp_compile.runtime import session
from sp_compile.runtime.control import channel

STEPS, FAULT = 4, 2
Step = Callable[[Any, nn.Module, Tensor, bool], None]
"""One step: the compiled model, the model, its input, and whether this rank does something else now."""


def skipped_backward(run: Any, model: nn.Module, x: Tensor, odd: bool) -> None:
    loss = run(x).sum()
    if not odd:
        loss.backward()


def backward_twice(run: Any, model: nn.Module, x: Tensor, odd: bool) -> None:
    loss = run(x).sum()
    loss.backward(retain_graph=odd)
    if odd:
        loss.backward()


def skipped_call(run: Any, model: nn.Module, x: Tensor, odd: bool) -> None:
    if not odd:
        run(x).sum().backward()


def no_grad(run: Any, model: nn.Module, x: Tensor, odd: bool) -> None:
    with torch.set_grad_enabled(not odd):
        loss = run(x).sum()
    if loss.requires_grad:
        loss.backward()


def weight_differs(run: Any, model: Hidden, x: Tensor, odd: bool) -> None:
    if odd:
        with torch.no_grad():
            model.after.weight.add_(1)
    run(x).sum().backward()


def other_option(run: Any, model: nn.Module, x: Tensor, odd: bool) -> None:
    budget = 0.5 if dist.get_rank() else None
    other = torch.compile(model, backend="sp", options={"compiler": "aot_eager", "activation_memory_budget": budget})
    other(x[:, :4]).sum().backward()


def other_setting(run: Any, model: nn.Module, x: Tensor, odd: bool) -> None:
    with functorch_config.patch(activation_memory_budget=0.5 if dist.get_rank() else 1.0):
        run(x[:, :4]).sum().backward()


def first_error(step: Step, options: dict[str, Any]) -> tuple[int, str]:
    """Return the step of this rank's error and its text."""
    torch.manual_seed(0)
    model = Hidden(split())
    run = torch.compile(model, backend="sp", options={"compiler": "aot_eager", "check_every": 1, **options})
    given = torch.randn(STEPS, 2, 6, DIM, dtype=torch.float64)
    with functorch_config.patch(donated_buffer=False):  # or torch refuses a second backward by itself
        for number, x in enumerate(given):
            try:
                step(run, model, x, number == FAULT and dist.get_rank() == 1)
            except SpError as error:
                return number, str(error)
    return STEPS, ""


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize(
    ("step", "when", "words", "options"),
    [
        (skipped_backward, FAULT, r"rank 0 runs .*backward .* at .*number 3.*rank 1 calls ", {}),
        (weight_differs, FAULT, r"SP63[35].*after.*weight.*sequence_parallel_linear='never'", {}),
        *(
            pytest.param(*case, {}, marks=pytest.mark.slow)
            for case in [
                (backward_twice, FAULT, r"rank 0 calls .* at .*number 4.*rank 1 runs .*backward .*number 3"),
                (skipped_call, FAULT, r"SP63[34].*x "),
                (no_grad, FAULT, r"SP602.*rank 1 .*no_grad"),
                (other_option, 0, r"option activation_memory_budget None.*option activation_memory_budget 0.5"),
                (other_setting, 0, r"activation_memory_budget 1.0.*activation_memory_budget 0.5"),
            ]
        ),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_every_rank_raises_on_that_step(
    ranks: Pool, step: Step, when: int, words: str, options: dict[str, Any]
) -> None:
    everyone = ranks.run(2, first_error, step, options)
    for number, text in everyone:
        assert number in (when, when + 1), text  # a rank that has skipped something is one step ahead
        assert re.search(words, text, re.DOTALL), text
    first, second = (text.partition("\n\n")[0] for _, text in everyone)  # Dynamo appends its own text
    assert first == second


def compiles_on_a_grid(fault: str) -> str:
    """Return the error of this rank for a fault on rank 3 of a mesh ("sp", "tp"); "" on rank 3 if interrupted."""
    mesh, is_odd = impatient_mesh(("sp", "tp")), dist.get_rank() == 3
    tp = mesh.get_group("tp")
    options = {"compiler": "aot_eager", "cost": {}, "mesh": mesh, "mesh_dim": "sp"}
    if is_odd and fault == "option":
        options["sequence_parallel_linear"] = "never"
    run = torch.compile(Scanned(Split(2, dist.get_rank(tp), tp)), backend="sp", options=options)
    ids, noise = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, 8, dtype=torch.float64)
    if is_odd and fault != "option":
        error = MemoryError if fault == "memory" else KeyboardInterrupt
        with mock.patch.object(session, "input_digests", side_effect=error("of the fault")):
            try:
                return message(lambda: run(ids, ids, noise))
            except KeyboardInterrupt:
                return ""
    return message(lambda: run(ids, ids, noise))


def continues() -> None:
    """Withdraw a published stop, which would affect the next test."""
    channel.publish_stop("", continues=True)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("option", "SP610.*'sequence_parallel_linear': 'never'"),
        pytest.param("interrupt", "rank 3 .*KeyboardInterrupt .*compiles", marks=pytest.mark.slow),
        pytest.param("memory", "SP607.*MemoryError: of the fault", marks=pytest.mark.slow),
    ],
)
def test_every_rank_of_a_grid_raises_the_cause(ranks: Pool, fault: str, words: str) -> None:
    """Ranks of its own group, and the ranks that share a sequence with them."""
    try:
        for text in ranks.run(4, compiles_on_a_grid, fault)[: 3 if fault == "interrupt" else 4]:
            assert re.search(words, text, re.DOTALL), text
            assert all(int(seconds) < TIMEOUT for seconds in re.findall(r"\bafter (\d+) s\b", text)), text
    finally:
        ranks.run(4, continues)
