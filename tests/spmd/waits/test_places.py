"""The timeout of a wait in a compiled program names its collective and the user's line, forward and backward."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.parity import error_text, sp
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

SECONDS = 5
STOPS = {"forward": False, "backward": False}


def rest(x: Tensor, where: str) -> Tensor:
    if STOPS[where] and dist.get_rank() == 1:
        time.sleep(1.5 * SECONDS)
    return x.clone()


@torch.library.custom_op("test_places::rests", mutates_args=())
def rests(x: Tensor) -> Tensor:
    """One rank may stop in it, for which sp_compile has no rule."""
    return rest(x, "forward")


@torch.library.custom_op("test_places::rests_backward", mutates_args=())
def rests_backward(x: Tensor) -> Tensor:
    return rest(x, "backward")


rests.register_fake(torch.empty_like)
rests_backward.register_fake(torch.empty_like)
rests.register_autograd(lambda ctx, grad: rests_backward(grad))


class Stops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        h = h * rests(h)
        h = h.cumsum(1)
        return h.sin().sum()


def stopped(compiler: str, where: str) -> str:
    """Return the error of rank 0 in a step in which rank 1 stops in the program."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS), group_desc=f"places {compiler} {where}")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",)) if dist.get_rank() < 2 else None
    if mesh is None:
        return ""
    run, x = sp(Stops(), mesh=mesh, compiler=compiler), torch.ones(2, 9, 8, dtype=torch.float64)
    run(x).backward()
    STOPS[where] = True
    message = error_text(lambda: run(x).backward())
    STOPS[where] = False
    return message if dist.get_rank() == 0 else ""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_wait_inside_of_a_program_names_the_line(ranks: Ranks, compiler: str, where: str) -> None:
    message, *_ = ranks.run(4, stopped, compiler, where, timeout=300)
    waits = {
        "forward": r"in scan_default of waits/test_places.py:\d+: h = h.cumsum\(1\)",
        "backward": "in reduce_grad_default of weight",
    }
    assert re.match(rf"SP621: rank 1 .*: rank 0 .*\b{SECONDS} s, {waits[where]}\n", message), message
