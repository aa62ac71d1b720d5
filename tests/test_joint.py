"""Passes over AOTAutograd's joint graph through backend="sp", on real ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sp_compile
from sp_compile import joint

EXCHANGES = re.compile(r"_c10d_functional\.(\w+)\.default")


class Summed(nn.Module):
    """Values that are summed over both axes of a mesh, one behind the other, and a swap of the halves of two dims."""

    def __init__(self, names: list[str], swap: bool) -> None:
        super().__init__()
        self.names, self.swap, self.weight = names, swap, nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if self.swap:  # as DeepSpeed spells it: (batch, rows, heads, width), heads to ranks
            b, s, h, d = x.shape
            sent = x.reshape(b, s, 2, h // 2, d).permute(2, 0, 1, 3, 4).contiguous()
            got = funcol.all_to_all_single(sent.flatten(0, 1), None, None, self.names[0])
            x = got.view(2, b, s, h // 2, d).permute(1, 0, 2, 3, 4).reshape(b, 2 * s, h // 2, d)
        for name in self.names:
            x = funcol.all_reduce(x, "sum", name)
        return x.square().sum()


def summed(policy: str, swap: bool) -> tuple[float, float, list[str], list[str]]:
    """(error of the loss, error of its gradient, what was exchanged before the passes, and after)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    sp_compile.declare_groups(mesh, measure=False)
    model = Summed([group.group_name for group in mesh.get_all_groups()], swap)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 4, 2, 8, dtype=torch.float64)
    expected = model(x)
    expected.backward()
    right, model.weight.grad = model.weight.grad, None
    seen: list[list[str]] = []
    plain = joint.JointPasses.__call__

    def watched(self: Any, gm: torch.fx.GraphModule) -> None:
        seen.append(EXCHANGES.findall(gm.code))
        plain(self, gm)
        seen.append(EXCHANGES.findall(gm.code))

    joint.JointPasses.__call__ = watched
    try:
        options = {"compiler": "aot_eager", "merge_reductions": policy}
        loss = torch.compile(model, backend="sp", options=options)(x)
        loss.backward()
    finally:
        joint.JointPasses.__call__ = plain
    error = (model.weight.grad - right).abs().max() / right.abs().max()
    return (loss / expected - 1).abs().item(), error.item(), *seen


@pytest.mark.parametrize(("policy", "left"), [("always", 1), ("never", 2)])
def test_reductions_over_two_axes(ranks: Ranks, policy: str, left: int) -> None:
    for loss, gradient, before, after in ranks.run(4, summed, policy, False):
        assert max(loss, gradient) < 1e-12
        assert (before.count("all_reduce"), after.count("all_reduce")) == (4, 2 * left)


def test_a_permute_around_an_exchange(ranks: Ranks) -> None:
    for loss, gradient, before, after in ranks.run(4, summed, "never", True):
        assert max(loss, gradient) < 1e-12
        assert before.count("all_to_all_single") == after.count("all_to_all_single") == 2
