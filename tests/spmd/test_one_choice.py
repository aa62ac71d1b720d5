"""Compilation decisions are equal on all ranks that the program connects, also if their measurements differ.

Python scalars are not compared where each rank has its own data.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from support import ranks as worker
from support.parallel.parallel_models import Split, build, tokens
from support.parallel.parallel_training import Trained, watched
from support.parity import sp
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sp_compile.passes.cost import measure
from sp_compile.passes.cost.machine import Machine

SLOW_ALL_TO_ALL, SLOW_ALL_GATHER = ({f"{op}_latency": 1.0} for op in ("all_to_all", "all_gather"))


def different_measurements() -> list[str]:
    """Measure different link speeds in the two groups of the sequence, as noise or a cold disk would."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    tp = Split(2, mesh.get_local_rank("tp"), mesh.get_group("tp"))
    found = Machine.of("cpu", SLOW_ALL_TO_ALL if tp.rank else SLOW_ALL_GATHER)

    def machine(*_: Any) -> Machine:
        return found

    with mock.patch.object(measure, "machine", machine):
        options = {"compiler": "aot_eager", "mesh": mesh}
        with watched(one := Trained()):
            loss = torch.compile(build(tp, layers=1), backend="sp", options=options)(tokens(2, 8, 0))
    assert torch.allclose(loss, build(tp, layers=1)(tokens(2, 8, 0)))
    return one.modes


@pytest.mark.slow
def test_groups_with_different_measurements_choose_equal_attention(ranks: Ranks) -> None:
    """Otherwise tensor-parallel ranks have two programs, and no layer runs on rows."""
    assert ranks.run(4, different_measurements) == [["ssss"]] * 4


CALLS = 6
NUMBERS = {
    "offsets that part": lambda rank, call: {"start": call * (rank + 1), "heat": 1.0},
    "a request that ends": lambda rank, call: {"start": 2 + call % (3 if rank else CALLS), "heat": 1.0},
    "temperatures": lambda rank, call: {"start": 0, "heat": 1.0 + call + rank},
}


class Experts(nn.Module):
    """One expert per rank for the tokens of all ranks, which start at a different position on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.expert = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, start: int, heat: float) -> Tensor:
        """(tokens, 8) -> (tokens, 8)"""
        x = x * torch.cos(0.1 * (torch.arange(x.shape[0]) + start))[:, None] * heat
        sent = funcol.all_to_all_single_autograd(x, None, None, worker.group())
        return funcol.all_to_all_single_autograd(self.expert(sent).tanh(), None, None, worker.group())


def served(name: str) -> float:
    """The largest error of calls with a rank's own tokens and numbers, forward and backward."""
    rank, model, errors = worker.group().rank(), Experts(), []
    run = sp(model)
    for call in range(CALLS):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * call + rank))
        given, both = NUMBERS[name](rank, call), [x.clone().requires_grad_() for _ in range(2)]
        found, right = run(both[0], **given), model(both[1], **given)
        for one in (found, right):
            one.square().sum().backward()
        errors += [(found - right).abs().max().item(), (both[0].grad - both[1].grad).abs().max().item()]
    return max(errors)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_rank_with_tokens_of_its_own(ranks: Ranks, name: str) -> None:
    """A scale that a schedule changes on one rank is refused where all have the same: see tests/tensor_parallel."""
    assert max(ranks.run(2, served, name)) < 1e-12
