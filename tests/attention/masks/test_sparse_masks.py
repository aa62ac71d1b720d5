"""Masks that a program computes from its data or from a table, by rows: indexers, and blocks of keys for each query.

EXPECTTEST_ACCEPT=1 rewrites the goldens.
"""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from support.golden import captured, show
from support.models import check, floats, seeded
from support.parity import against_eager
from support.parity import check as check_ranks
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.passes.context import NoteKind
from sp_compile.passes.report import Report

WIDTH, HEADS, BLOCK, KEPT = 16, 4, 3, 2
NEVER = float("-inf")


def block_means(x: Tensor) -> Tensor:
    """(B, H, S, D) -> (B, H, blocks, D)."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK)).mean(3)


def best(scores: Tensor) -> Tensor:
    """Return the bool mask of the largest scores of each row."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(KEPT, -1).indices, True)


class Sparse(nn.Module):
    """Attention whose mask a subclass computes, and the mean square of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.index, self.weights = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)
        table = torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) > 0.6
        self.register_buffer("table", table | torch.eye(9, dtype=torch.bool))

    def mask(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = self.attend(q, k, v, self.mask(x, q, k))
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def causal(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()


class Indexer(Sparse):
    """The keys of the largest weighted scores of each query, as DeepSeek-V3.2 selects them."""

    def mask(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            queries, keys = self.index(x).split((2 * WIDTH, WIDTH), -1)
            scores = (queries.unflatten(-1, (2, WIDTH)) @ keys.transpose(1, 2).unsqueeze(1)).relu()
            scores = (self.weights(x).unsqueeze(-2) @ scores).squeeze(-2)
            return (best(scores.masked_fill(~causal(x), NEVER)) & causal(x)).unsqueeze(1)


class KeyBlocks(Sparse):
    """The blocks of keys whose means have the largest scores with a query, as MoBA selects them."""

    def mask(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            scores, positions = q @ block_means(k).transpose(-1, -2), torch.arange(x.shape[1])
            scores = scores.masked_fill(torch.arange(scores.shape[-1]) > (positions // BLOCK)[:, None], NEVER)
            chosen = best(scores).repeat_interleave(BLOCK, -1)[..., : x.shape[1]]
            return chosen & (positions <= positions[:, None])


class BlockPairs(Sparse):
    """Pairs of blocks whose means have the largest scores, as NSA selects them."""

    def mask(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        with torch.no_grad():
            chosen = best(block_means(q) @ block_means(k).transpose(-1, -2))
            chosen = chosen.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
            return (chosen[..., : x.shape[1], : x.shape[1]] & causal(x)) | torch.eye(x.shape[1], dtype=torch.bool)


class IndexedBlocks(Sparse):
    """Pairs of blocks, expanded to positions by indices; attention as two products."""

    def mask(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        chosen, block = best(block_means(q) @ block_means(k).transpose(-1, -2)), torch.arange(x.shape[1]) // BLOCK
        return chosen[..., block[:, None], block]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).masked_fill(~mask, NEVER).softmax(-1) @ v


class FixedBlocks(Sparse):
    """A table of blocks, which does not depend on the data."""

    def mask(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = torch.arange(x.shape[1]) // BLOCK
        return self.table[block[:, None], block]


class Biased(Sparse):
    """A learned bias of each pair of positions, for causal attention."""

    def mask(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        a, b, _ = self.index(x).chunk(3, -1)
        return (a @ b.transpose(1, 2)).tanh().unsqueeze(1).masked_fill(~causal(x), NEVER)


PROGRAMS = [Indexer, KeyBlocks, BlockPairs, IndexedBlocks, FixedBlocks, Biased]


def one_step(program: type[Sparse], length: int) -> Any:
    return against_eager(seeded(program), floats(2, length, WIDTH), mesh=mesh())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_training_step(ranks: Ranks, program: type[Sparse], n: int) -> None:
    check_ranks(ranks.run(n, one_step, program, 23))


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_rank_has_all_pairs(program: type[Sparse]) -> None:
    model, length = seeded(program), 23
    local = sp_compile.parallelize(torch.export.export(model, (floats(2, length, WIDTH),)), sp=3)
    values = {n.name: n.meta["val"] for n in local.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    assert not {name: x.shape for name, x in values.items() if sum(size >= length for size in x.shape) > 1}
    report: Report = local.meta["sp_report"]
    gathers = [(note.subject, note.node) for note in report.find_notes(NoteKind.GATHERED)]
    assert gathers == ([("gather_operands", "index")] if program is IndexedBlocks else [])
    assert [decision.chosen.kind for decision in report.attention] == ["gather"]


@pytest.mark.parametrize("layout", ["auto", "zigzag", "balanced"])
@pytest.mark.parametrize("attention", ["ring", "gather", "hybrid", "ulysses"])
@pytest.mark.parametrize("program", [Indexer, Biased])
@pytest.mark.sampled(every=3)
def test_strategies(program: type[Sparse], attention: str, layout: str) -> None:
    if layout != "auto" and attention == "ulysses":
        pytest.skip("full sequences are in contiguous order")
    check(seeded(program), floats(2, 22, WIDTH), sp=4, attention=attention, layout=layout)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("op", ["ring", "gathered"])
def test_operators_with_rows_of_a_mask(op: str, balance: bool) -> None:
    """A rank with the rows of a mask for its own queries; `balance` exchanges them for zigzag rows."""
    operands = [floats(1, 2, 8, 4, seed=i) for i in range(3)] + [floats(1, 1, 8, 8, seed=3)]
    leaves = [x.requires_grad_() for x in operands]
    expected = F.scaled_dot_product_attention(
        *leaves[:3], leaves[3].masked_fill(~torch.ones(8, 8).tril().bool(), NEVER)
    )
    expected_grads = torch.autograd.grad(expected.sin().sum(), leaves)

    def live(rank: int) -> list[Tensor]:
        q, k, v, mask = (x.detach().chunk(2, 2)[rank].requires_grad_() for x in leaves)
        scores = mask, [], [], [], [], "k <= q", None, 0.0, None, "", [], [], None, False
        shards = [1, 8, 0, 8], [1, 8, 0, 8], 2, SIMULATED_GROUP, balance, *([2, "travel"] if op == "ring" else [])
        out = getattr(torch.ops.sp, f"{op}_attention")(q, k, v, *scores, *shards, mask_rows=True)
        return [out, *torch.autograd.grad(out.sin().sum(), (q, k, v, mask))]

    for found, right in zip(zip(*run_ranks(2, live)), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(torch.cat(found, 2), right, rtol=1e-9, atol=1e-12)


def triangles(x: Tensor) -> Tensor:
    scores = (x @ x.transpose(1, 2)).tril(-1)
    return F.scaled_dot_product_attention(x, x, x).sum() + (scores * torch.eye(x.shape[1])).sum()


def weighted_rows(x: Tensor) -> Tensor:
    y = x.sin()
    return F.scaled_dot_product_attention(x, x, x) + (y @ y.transpose(1, 2)).sigmoid() @ y


class Goldens(expecttest.TestCase):
    """Each pass alone."""

    def test_triangles_are_comparisons(self) -> None:
        gm = captured(triangles, torch.randn(2, 8, 4))
        sp_compile.passes.ComparePositions(2)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2, 8, 4] = placeholder
transpose: [2, 4, 8] = aten.transpose.int(x, 1, 2)
matmul: [2, 8, 8] = aten.matmul(x, transpose)
arange_default: [8] = aten.arange(8, device=cpu)
arange_default_1: [8] = aten.arange(8, device=cpu)
unsqueeze_default: [8, 1] = aten.unsqueeze(arange_default_1, 1)
add_tensor: [8, 1] = aten.add.Tensor(unsqueeze_default, -1)
gt_tensor: [8, 8] = aten.gt.Tensor(arange_default, add_tensor)
masked_fill_scalar: [2, 8, 8] = aten.masked_fill.Scalar(matmul, gt_tensor, 0)
scaled_dot_product_attention: [2, 8, 4] = aten.scaled_dot_product_attention(x, x, x)
sum_1: [] = aten.sum(scaled_dot_product_attention)
arange_default_2: [8] = aten.arange(8, device=cpu)
arange_default_3: [8] = aten.arange(8, device=cpu)
unsqueeze_default_1: [8, 1] = aten.unsqueeze(arange_default_3, 1)
eq_tensor: [8, 8] = aten.eq.Tensor(arange_default_2, unsqueeze_default_1)
to_dtype: [8, 8] = aten.to.dtype(eq_tensor, float32)
mul: [2, 8, 8] = aten.mul.Tensor(masked_fill_scalar, to_dtype)
sum_2: [] = aten.sum(mul)
add: [] = aten.add.Tensor(sum_1, sum_2)
return (add,)""",
        )

    def test_one_operand_of_all_pairs_is_gathered(self) -> None:
        gm = captured(weighted_rows, torch.randn(2, 8, 4))
        sp_compile.passes.GatherPairs(2)(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [2, 8, 4] = placeholder
sin: [2, 8, 4] = aten.sin(x)
all_gather_default_1: [2, 8, 4] = sp.all_gather(sin, 1, [1, 8, 0, 8], 2, )
scaled_dot_product_attention: [2, 8, 4] = aten.scaled_dot_product_attention(x, x, x)
transpose: [2, 4, 8] = aten.transpose.int(sin, 1, 2)
all_gather_default: [2, 4, 8] = sp.all_gather(transpose, 2, [1, 8, 0, 8], 2, )
matmul: [2, 8, 8] = aten.matmul(sin, all_gather_default)
sigmoid: [2, 8, 8] = aten.sigmoid(matmul)
matmul_1: [2, 8, 4] = aten.matmul(sigmoid, all_gather_default_1)
add: [2, 8, 4] = aten.add.Tensor(scaled_dot_product_attention, matmul_1)
return (add,)""",
        )
