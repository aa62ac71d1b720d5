"""Recomputation of checkpointed blocks: attention results are saved, and selective policies are called as by torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import parity
from support import ranks as worker
from support.capturing import compile_halves
from support.parity import Checkpointed, Decoder, Outcome, against_eager, build, check, text
from support.ranks import Ranks
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sp_compile
from sp_compile.lowering import torch_compat
from sp_compile.passes.context import NoteKind
from sp_compile.passes.graph.call import WAIT_OP

aten, sp = torch.ops.aten, torch.ops.sp
FLASH = aten._scaled_dot_product_flash_attention.default
CHECKPOINTS: dict[str, dict[str, Any]] = {"without a policy": {}}
SHARES = 1.0, 0.5, 0.25, 0.0
"""Of what is kept."""


MUST = CheckpointPolicy.MUST_SAVE


def all_but(again: Sequence[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save all values except results of these ops."""
    return CheckpointPolicy.MUST_RECOMPUTE if op in again else MUST


def policy(saved: Sequence[Any], stays: Any, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
    """Return `stays` for saved ops, and recomputation in the same form for others; never called on backward ops."""
    assert "backward" not in str(op)
    again = False if stays is True else CheckpointPolicy.PREFER_RECOMPUTE
    return stays if op in saved else again


def selective(*saved: Any, stays: CheckpointPolicy | bool = MUST) -> dict[str, Any]:
    return {"context_fn": partial(create_selective_checkpoint_contexts, partial(policy, saved, stays))}


CHECKPOINTS |= {
    "products stay": selective(aten.mm.default, aten.addmm.default, stays=True),
    "attention stays": selective(FLASH),
    "both had better stay": selective(FLASH, aten.mm.default, aten.addmm.default, stays=CheckpointPolicy.PREFER_SAVE),
    "nothing stays": selective(),
    "all stays but attention": {"context_fn": partial(create_selective_checkpoint_contexts, partial(all_but, [FLASH]))},
}


def cut(how: str, attention: str, **options: Any) -> tuple[Counter[Any], Counter[Any]]:
    """Count each op in forward and backward of a rank of four, without running them."""
    model = build(Checkpointed, layers=1)
    model.given = CHECKPOINTS[how]
    return halves_of(model, 16, bool(CHECKPOINTS[how]), attention=attention, **options)


def halves_of(model: nn.Module, seq: int, policies: bool, **options: Any) -> tuple[Counter[Any], Counter[Any]]:
    """policies: has it some?"""
    found, real = [], partitioners.min_cut_rematerialization_partition

    def partition(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        assert not (policies and functorch_config.enable_autograd_cache), "a cache knows no policies"
        halves = real(*args, **kwargs)
        found.extend(Counter(node.target for node in half.graph.nodes) for half in halves)
        return halves

    with mock.patch.object(partitioners, "min_cut_rematerialization_partition", partition):
        compile_halves(model, text(seq), 4, **options)
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("attention", ["gather", "ring"])
def test_a_memory_budget_recomputes_cheap_ops_first(attention: str) -> None:
    """Elementwise ops first, then products; attention and collectives run twice only if nothing may be saved."""
    model = build(Decoder, layers=2)
    parts = {
        share: halves_of(model, 64, False, attention=attention, activation_memory_budget=share) for share in SHARES
    }
    forward, _ = parts[1.0]
    calls = forward[sp.attend.default]
    assert calls == (8 if attention == "ring" else 2)
    assert [back[sp.attend.default] for _, back in parts.values()] == [0, 0, 0, calls]
    assert [back[aten.addmm.default] > 0 for _, back in parts.values()] == [False, False, True, True]
    some, quarter, none = (sum(map(_is_exchange, back.elements())) for _, back in [*parts.values()][1:])
    assert some == quarter == sum(map(_is_exchange, parts[1.0][1].elements())) < none


def _is_exchange(target: Any) -> bool:
    return "_c10d_functional" in str(target) and target is not WAIT_OP


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("how", "attends", "multiplies"),
    [
        ("without a policy", False, True),
        pytest.param("attention stays", False, True, marks=pytest.mark.slow),
        ("products stay", True, False),
        ("both had better stay", False, False),
        pytest.param("nothing stays", True, True, marks=pytest.mark.slow),
    ],
)
def test_recomputed_ops(how: str, attends: bool, multiplies: bool) -> None:
    forward, again = cut(how, "ring")
    assert forward[sp.attend.default] == 4
    assert again[sp.attend.default] == (4 if attends else 0)
    assert (again[aten.addmm.default] > 0) == multiplies


def test_attention_alone_is_computed_again() -> None:
    """Only the attention kernel is recomputed; a ring's merged result comes from other ops, which are saved."""
    forward, again = cut("all stays but attention", "gather")
    assert (forward[sp.attend.default], again[sp.attend.default]) == (1, 1)
    assert not again[aten.addmm.default]


class Sunk(parity.Block):
    """With a logit of each head beside its keys."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sinks = nn.Parameter(torch.randn(self.heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        sinks = self.sinks.view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        y = torch.cat([q @ k.mT, sinks], -1).softmax(-1)[..., :-1] @ v
        return x + self.mlp(self.norm2(x + self.out(y.transpose(1, 2).flatten(2))))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("how", ["without a policy", "attention stays"])
def test_results_with_sinks_stay(how: str) -> None:
    with mock.patch.object(parity, "Block", Sunk):
        forward, again = cut(how, "ring")
    assert (forward[sp.attend.default], again[sp.attend.default]) == (4, 0)


def test_attention_beyond_the_memory_is_computed_again() -> None:
    _, again = cut("without a policy", "ring", cost={"memory": 1e3})
    assert again[sp.attend.default] == 4


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("how", ["without a policy", "products stay"])
def test_a_policy_saves_nothing_of_a_tile_with_a_note(how: str) -> None:
    model = build(Checkpointed, layers=1)
    model.given = CHECKPOINTS[how]
    report = sp_compile.explain(model, *text(16), sp=2, tiles=2)
    assert report.find_notes(NoteKind.REWRITTEN, subject="run_in_tiles")
    assert bool(report.find_notes(NoteKind.DECLINED, subject="checkpoint_policy")) == (how == "products stay")


def test_lists_of_ops_are_policies() -> None:
    asked = torch_compat.policy_of(partial(create_selective_checkpoint_contexts, [aten.mm.default]))
    assert asked is not None
    assert asked(None, aten.mm.default) is CheckpointPolicy.MUST_SAVE


class Normed(nn.Module):
    """(2, S, 8) -> a scalar: a norm over batch and sequence, and dropout in attention and an MLP."""

    given: Mapping[str, Any] = {}

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(dropout)

    def block(self, x: Tensor) -> Tensor:
        q = self.norm(x.flatten(0, 1)).view_as(x).unflatten(-1, (4, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout.p, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2)
        return x + self.down(self.dropout(F.gelu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, **self.given).square().sum()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("tiles", ["never", 3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_statistics_in_a_checkpoint(n: int, tiles: int | str) -> None:
    """Statistics and gradients count one run of the block; eager code counts a checkpointed block's tokens twice."""
    found = sp_compile.verify(Normed().double(), torch.randn(2, 13, 8, dtype=torch.float64), sp=n, tiles=tiles)
    assert sum(name.startswith("mutated") for name, _ in found.errors) == 3, "mean, variance, and how many calls"
    assert found.worst < 1e-9


def dropped(attention: str, tiles: int | str, offload: str | float, how: str, compiler: str) -> bool:
    """The gradient along a direction is the loss's difference there, under the same draws; ranks have draws of their own."""
    model = Normed(dropout=0.5).double()
    model.given = CHECKPOINTS[how]
    options = {"mesh": worker.mesh(), "cost": {}, "attention": attention, "compiler": compiler}
    options |= {"tiles": tiles, "offload": offload}
    run = torch.compile(model, backend="sp", options=options)
    x, along = (torch.randn(2, 13, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))

    def at(moved: float, seed: int = 5) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed + worker.dist.get_rank())
        y = (x + moved * along).requires_grad_()
        return run(y), y

    loss, y = at(0.0)
    torch.rand(7)  # the draws that a backward begins at are those of its forward
    loss.backward()
    difference = (at(1e-5)[0] - at(-1e-5)[0]).detach() / 2e-5
    torch.testing.assert_close((y.grad * along).sum(), difference, rtol=1e-6, atol=0)
    assert at(0.0, seed=6)[0] != loss
    return True


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("n", "attention", "tiles", "offload", "how"),
    [
        (2, "ring", "never", "never", "without a policy"),
        (2, "ulysses", 3, "never", "without a policy"),
        (2, "ring", 3, 1.0, "without a policy"),
        (2, "ring", 3, "never", "products stay"),
        (1, "ring", "never", "never", "products stay"),
    ],
)
def test_dropout_in_a_checkpoint(
    ranks: Ranks, n: int, attention: str, tiles: int | str, offload: str | float, how: str, compiler: str
) -> None:
    assert all(ranks.run(n, dropped, attention, tiles, offload, how, compiler))


def budgeted(attention: str) -> Outcome:
    options = {"mesh": worker.mesh(), "attention": attention, "activation_memory_budget": 0.25}
    return against_eager(build(Decoder, layers=2), *text(21), **options)


@pytest.mark.as_users_run("slow", attention="ring")
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_within_a_memory_budget_equals_one_device(ranks: Ranks, attention: str) -> None:
    check(ranks.run(2, budgeted, attention))


def test_a_checkpoint_that_keeps_nothing_may_draw() -> None:
    """Under no_grad it is no checkpoint, as in torch; torch refuses random ops in a checkpoint under inference mode."""
    model, x = Normed(dropout=0.5).double(), torch.randn(2, 13, 8, dtype=torch.float64)
    run = torch.compile(model, backend="sp", options={"cost": {}, "compiler": "aot_eager"})
    with torch.no_grad():
        assert run(x).isfinite()


def trained(how: str, attention: str) -> Outcome:
    model = build(Checkpointed, layers=2)
    model.given = CHECKPOINTS[how]
    return against_eager(model, *text(9), mesh=worker.mesh(), attention=attention)


@pytest.mark.as_users_run(how="products stay", attention="ring")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "attention"),
    [
        ("products stay", "ring"),
        pytest.param("attention stays", "ring", marks=pytest.mark.slow),
        pytest.param("without a policy", "ring", marks=pytest.mark.slow),
        pytest.param("without a policy", "ulysses", marks=pytest.mark.slow),
        pytest.param("products stay", "gather", marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(ranks: Ranks, how: str, attention: str) -> None:
    check(ranks.run(2, trained, how, attention))
