"""A rank that runs a compiled model in another way says so, and those that wait for it in vain hear why."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.parity import error_text, sp
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

SECONDS = 30  # the group's timeout, which nobody waits for


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).cumsum(1).sin().sum()


def first_two(name: str) -> DeviceMesh | None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS), group_desc=name)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",)) if dist.get_rank() < 2 else None


def trained(run: Callable[..., Any], model: nn.Module, x: Tensor) -> float:
    """One step of training."""
    loss = run(x)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.item()


def with_stance(run: Any, model: nn.Module, x: Tensor) -> None:
    with torch.compiler.set_stance("force_eager"):
        trained(run, model, x)


def with_forced_backend(run: Any, model: nn.Module, x: Tensor) -> None:
    with torch.compiler.set_stance(force_backend="eager"):
        trained(run, model, x)


def disabled(run: Any, model: nn.Module, x: Tensor) -> None:
    trained(torch.compiler.disable(run), model, x)


def by_another_backend(run: Any, model: nn.Module, x: Tensor) -> None:
    torch._dynamo.reset()
    trained(torch.compile(model, backend="eager"), model, x)


def beyond_the_limit(run: Any, model: nn.Module, x: Tensor) -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        run(x[:, :4])


def counting_flops(run: Any, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), FlopCounterMode(display=False):
        run(x)


HOW: dict[str, tuple[Callable[..., None], str]] = {
    "force_eager": (with_stance, "torch.compiler.set_stance"),
    "force_backend": (with_forced_backend, "torch.compiler.set_stance"),
    "disable": (disabled, "torch.compiler.disable"),
    "another backend": (by_another_backend, "torch.compile(backend='eager')"),
    "the recompile limit": (beyond_the_limit, "torch._dynamo hit config.recompile_limit"),
    "a flop counter": (counting_flops, ""),
}


def strayed(how: str) -> tuple[str, float]:
    """What rank 0 hears of a step that rank 1 makes in another way, after so many seconds."""
    mesh = first_two(how)
    if mesh is None:
        return "", 0.0
    model, x = Sums(), torch.ones(2, 9, 8, dtype=torch.float64)
    run = sp(model, mesh=mesh, compiler="aot_eager", dynamic=False)
    trained(run, model, x)
    begun = time.monotonic()
    if dist.get_rank() == 1:
        HOW[how][0](run, model, x)
        return "", 0.0
    return error_text(lambda: run(x)), time.monotonic() - begun


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("how", HOW)
def test_a_rank_that_runs_the_model_otherwise(ranks: Ranks, how: str) -> None:
    (told, seconds), *_ = ranks.run(4, strayed, how)
    assert "for ranks that did not come" in told, told
    assert f"rank 1 stopped: it runs Sums otherwise than compiled with backend='sp' ({HOW[how][1]}" in told, told
    assert seconds < SECONDS / 2


def beside() -> tuple[list[float], list[float]]:
    """Losses of every rank's steps, between which rank 1 looks at the model in other ways, and takes its time for it."""
    mesh = first_two("beside")
    if mesh is None:
        return [], []
    model, x = Sums(), torch.ones(2, 9, 8, dtype=torch.float64)
    run = sp(model, mesh=mesh, compiler="aot_eager", dynamic=False)
    losses = [trained(run, model, x)]
    if dist.get_rank() == 1:
        with torch.compiler.set_stance("force_eager"):
            losses += [run(x).item()]
        with torch.no_grad():
            losses += [torch.compile(model, backend="eager")(x).item()]
        time.sleep(4)
    return [trained(run, model, x), trained(run, model, x)], losses


def test_a_rank_that_runs_the_model_once_more_is_waited_for(ranks: Ranks) -> None:
    (first, _), (second, other), *_ = ranks.run(4, beside)
    assert first == second
    assert other[1:] == pytest.approx([first[0]] * 2, rel=1e-12)


def eager_together() -> list[float]:
    """Losses of steps that all ranks make eagerly, then compiled, one of them late."""
    mesh = first_two("together")
    if mesh is None:
        return []
    model, x = Sums(), torch.ones(2, 9, 8, dtype=torch.float64)
    run = sp(model, mesh=mesh, compiler="aot_eager", dynamic=False)
    losses = [trained(run, model, x)]
    with torch.compiler.set_stance("force_eager"):
        losses.append(trained(run, model, x))
    time.sleep(4 * dist.get_rank())
    return [*losses, trained(run, model, x)]


def test_ranks_that_all_train_eagerly_do_not_stop_each_other(ranks: Ranks) -> None:
    first, second, *_ = ranks.run(4, eager_together)
    assert first == pytest.approx(second, rel=1e-12)
    model, x = Sums(), torch.ones(2, 9, 8, dtype=torch.float64)
    assert first == pytest.approx([trained(model, model, x) for _ in range(3)], rel=1e-12)
