"""merge_reductions through backend="sp" on a 2 x 2 mesh: reductions that DTensor emits, and ones that cannot be merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from support.parallel.merging import count, unflattened
from support.ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

import sp_compile
from sp_compile.passes.joint.joint import JointPasses

SIZES = (4, 6)


def compiled(fn: Callable[[Tensor], Tensor]) -> tuple[float, list[int], list[str]]:
    """(error of result and gradient against eager mode, collectives before and after, notes)."""
    seen: list[int] = []
    notes: list[str] = []
    plain = JointPasses.__call__

    def watched(self: Any, gm: torch.fx.GraphModule) -> None:
        seen.append(count(gm))
        plain(self, gm)
        seen.append(count(gm))
        notes.extend(note.label for note in self.report.notes)

    torch.manual_seed(dist.get_rank())
    x = torch.randn(SIZES, dtype=torch.float64)
    run = torch.compile(fn, backend="sp", options={"compiler": "aot_eager", "merge_reductions": "always"})
    results = []
    with mock.patch.object(JointPasses, "__call__", watched):
        for f in (run, fn):
            leaf = x.clone().requires_grad_()
            result = f(leaf)
            results.append((result.detach(), *torch.autograd.grad(result.square().sum(), leaf)))
    worst = max((a - b).abs().max().item() for a, b in zip(*results))
    return worst, seen, notes


def axes() -> list[dist.ProcessGroup]:
    mesh = unflattened()
    sp_compile.declare_groups(mesh, measure=False)
    return mesh.get_all_groups()


def in_turn(op: str, groups: list[Any], factor: float = 0.5) -> Callable[[Tensor], Tensor]:
    weight = torch.ones(6, 6, dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        h = funcol.all_reduce(F.silu(x) @ weight, op, groups[0])
        return funcol.all_reduce(h * factor, op, groups[1]).sin()

    return fn


def redistributed() -> tuple[float, list[int], list[str]]:
    axes()
    mesh = unflattened()

    def fn(x: Tensor) -> Tensor:
        partial = DTensor.from_local(x.sin(), mesh, [Partial()] * 2, run_check=False)
        return partial.redistribute(mesh, [Replicate()] * 2).to_local().sin()

    return compiled(fn)


def test_dtensor_partials(ranks: Ranks) -> None:
    for error, seen, notes in ranks.run(4, redistributed):
        assert error < 1e-12
        assert seen == [2, 1]
        assert "merge_reductions" in notes


def by_rank() -> tuple[float, list[int], list[str]]:
    return compiled(in_turn("sum", axes(), dist.get_rank() + 1.0))


def test_a_factor_of_each_ranks_own_is_left_where_it_is(ranks: Ranks) -> None:
    for error, (before, after), notes in ranks.run(4, by_rank):
        assert error < 1e-12
        assert before <= after
        assert "not sequence_parallel_linear" in notes  # collectives stay where programs or groups differ


def of_no_mesh() -> tuple[float, list[int], list[str]]:
    first, _ = axes()
    halves = [dist.new_group(pair) for pair in ([0, 3], [1, 2])]
    return compiled(in_turn("sum", [first, halves[dist.get_rank() in (1, 2)]]))


def test_a_group_of_no_declared_mesh_is_left_alone(ranks: Ranks) -> None:
    for error, (before, after), notes in ranks.run(4, of_no_mesh):
        assert error < 1e-12
        assert before <= after
        assert "not sequence_parallel_linear" in notes  # collectives stay where programs or groups differ


def unknown(everywhere: bool) -> str:
    groups = axes()
    op = "median" if everywhere or dist.get_rank() == 1 else "sum"
    run = torch.compile(in_turn(op, groups), backend="sp", options={"compiler": "aot_eager"})
    try:
        run(torch.ones(SIZES, dtype=torch.float64))
    except sp_compile.SpError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_unknown_reduction_is_an_error_on_every_rank(ranks: Ranks, everywhere: bool) -> None:
    """In eager mode it is one on the ranks that write it, and the others wait."""
    for error in ranks.run(4, unknown, everywhere, timeout=60):
        assert "SP561" in error or (not everywhere and "SP603" in error)
        assert "'median'" in error or not everywhere
        assert everywhere or "rank 1" in error or "rank 0:" in error
