"""Passes over AOTAutograd's joint graph through backend="sp", on real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support import ranks as worker
from support.parallel.parallel_training import message
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sp_compile
from sp_compile.lowering.base.library import SOURCE_FILES, _hash_sources, sources_digest
from sp_compile.passes.context import Note
from sp_compile.passes.joint import joint
from sp_compile.unsplit import UNSPLIT_NOTE

EXCHANGES = re.compile(r"_c10d_functional\.(\w+)\.default")


class Summed(nn.Module):
    """Values that are summed over both axes of a mesh in sequence, and a swap of the halves of two dims."""

    def __init__(self, names: list[str], swap: bool) -> None:
        super().__init__()
        self.names, self.swap, self.weight = names, swap, nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        if self.swap:  # as in DeepSpeed: (batch, rows, heads, width), heads to ranks
            b, s, h, d = x.shape
            sent = x.reshape(b, s, 2, h // 2, d).permute(2, 0, 1, 3, 4).contiguous()
            got = funcol.all_to_all_single(sent.flatten(0, 1), None, None, self.names[0])
            x = got.view(2, b, s, h // 2, d).permute(1, 0, 2, 3, 4).reshape(b, 2 * s, h // 2, d)
        for name in self.names:
            x = funcol.all_reduce(x, "sum", name)
        return x.square().sum()


def summed(policy: str, swap: bool) -> tuple[float, float, list[str], list[str]]:
    """Return (error of the loss, error of its gradient, collectives before the passes, collectives after)."""
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


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("policy", "left"), [("always", 1), ("never", 2)])
def test_reductions_over_two_axes(ranks: Ranks, policy: str, left: int) -> None:
    for loss, gradient, before, after in ranks.run(4, summed, policy, False):
        assert max(loss, gradient) < 1e-12
        assert (before.count("all_reduce"), after.count("all_reduce")) == (4, 2 * left)


def test_a_permute_around_an_exchange(ranks: Ranks) -> None:
    for loss, gradient, before, after in ranks.run(4, summed, "never", True):
        assert max(loss, gradient) < 1e-12
        assert before.count("all_to_all_single") == after.count("all_to_all_single") == 2


class Ulysses(nn.Module):
    """Attention on each rank's own rows, with explicit all-to-all exchanges of heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(8, 24).double(), nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        group = worker.group()
        q, k, v = (
            sp_compile.all_to_all_permute(t.unflatten(-1, (4, 2)).transpose(1, 2), 1, 2, group)
            for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(sp_compile.all_to_all_permute(y, 2, 1, group).transpose(1, 2).flatten(2))


def explicit_exchange() -> float:
    mine, plain = Ulysses(), Ulysses()
    run = torch.compile(mine, backend="sp", options={"compiler": "aot_eager"})
    torch.manual_seed(dist.get_rank())
    for _ in range(2):  # each rank's own values in each call
        x = torch.randn(2, 6, 8, dtype=torch.float64)
        found, expected = run(x), plain(x)
        (found.square().sum() + expected.square().sum()).backward()
        worst = (found - expected).abs().max().item()
    pairs = zip(mine.parameters(), plain.parameters())
    return max([worst, *((a.grad - b.grad).abs().max().item() for a, b in pairs)])


@pytest.mark.slow
def test_a_program_that_only_exchanges(ranks: Ranks) -> None:
    assert max(ranks.run(2, explicit_exchange)) < 1e-12


def logged_loss() -> tuple[list[float], list[Note]]:
    """Data parallelism: batches of any size, and the loss summed over the ranks."""
    group = worker.group()
    weight = torch.ones(8, 8, dtype=torch.float64, requires_grad=True)

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        mine = F.silu(x @ weight).square().mean()
        return mine, funcol.all_reduce(mine.detach(), "sum", group)

    run = torch.compile(loss, backend="sp", options={"compiler": "aot_eager"})
    errors = []
    for rows in ((4, 4), (4, 3), (3, 4)):  # one rank recompiles without the others
        x = torch.randn(rows[dist.get_rank()], 8, dtype=torch.float64)
        found, expected = run(x), loss(x)
        found[0].backward()
        errors += [abs(a.item() - b.item()) for a, b in zip(found, expected)]
    return errors, sp_compile.explain(loss, x).notes


def test_a_program_that_only_sums_its_loss(ranks: Ranks) -> None:
    for errors, notes in ranks.run(2, logged_loss):
        assert max(errors) < 1e-12
        assert UNSPLIT_NOTE in notes


def reduced_otherwise() -> str:
    op = "max" if dist.get_rank() else "sum"
    run = torch.compile(
        lambda x: funcol.all_reduce(x @ x.t(), op, worker.group()), backend="sp", options={"compiler": "aot_eager"}
    )
    return message(lambda: run(torch.ones(4, 6)))


def test_ranks_that_reduce_otherwise_meet(ranks: Ranks) -> None:
    for error in ranks.run(2, reduced_otherwise):
        assert error.startswith("SP631: ")
        assert "rank 0: _c10d_functional.all_reduce sum at backend/test_joint.py:" in error
        assert "rank 1: _c10d_functional.all_reduce max at backend/test_joint.py:" in error


def over_a_group_of_no_such_name() -> str:
    c10d = torch.ops._c10d_functional
    run = torch.compile(
        lambda x: c10d.wait_tensor(c10d.all_reduce(x @ x.t(), "sum", "absent")),
        backend="sp",
        options={"compiler": "aot_eager"},
    )
    return message(lambda: run(torch.ones(4, 6)))


def test_a_group_of_no_such_name(ranks: Ranks) -> None:
    for error in ranks.run(2, over_a_group_of_no_such_name):
        assert re.search("SP612: .*'absent'", error)
        assert "backend/test_joint.py:" in error


def no_exchanges() -> str:
    return message(
        lambda: torch.compile(lambda x: x.relu(), backend="sp", options={"compiler": "aot_eager"})(torch.randn(3, 4))
    )


def test_a_program_without_exchanges_and_without_a_sequence(ranks: Ranks) -> None:
    for error in ranks.run(4, no_exchanges):
        assert "SP301" in error


def test_cached_code_is_forgotten_when_a_pass_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("a = 1")
    monkeypatch.setattr(sp_compile.passes, "__path__", [str(tmp_path)])
    before = joint.JointPasses().key()
    _hash_sources.cache_clear()
    assert joint.JointPasses().key() == before
    (tmp_path / "one.py").write_text("a = 2")
    _hash_sources.cache_clear()
    assert joint.JointPasses().key() != before


def test_an_operator_from_outside_the_package_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import support.attention.toy_strategy as toy

    assert Path(toy.__file__).resolve() in SOURCE_FILES
    monkeypatch.setattr(sp_compile.lowering.base.library, "SOURCE_FILES", {tmp_path / "op.py"})
    (tmp_path / "op.py").write_text("a = 1")
    before = sources_digest()
    (tmp_path / "op.py").write_text("a = 2")
    _hash_sources.cache_clear()
    assert sources_digest() != before
