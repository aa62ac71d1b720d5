"""Slices at a rank's own place and gathered blocks: what a scattered program already holds is not exchanged."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from support.parallel.tensor_parallel import GROUP, WIDTH, Copy, Reduce, cut, joint_graph, on_ranks, spelt, weights
from torch import Tensor

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.tensor_parallel import recognize_blocks as own_rows
from sp_compile.passes.tensor_parallel.recognize_blocks import OwnRows
from sp_compile.passes.tensor_parallel.scatter_layers import SequenceParallelLinear

c10d = torch.ops._c10d_functional


class Scatter(torch.autograd.Function):
    """Into a region of own rows; out of it in the backward."""

    @staticmethod
    def forward(ctx, x, dim, rank, n):
        ctx.where = dim, n
        return x.chunk(n, dim)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, *ctx.where), None, None, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, rank, n):
        ctx.where = dim, rank, n
        return gather(x, dim, n)

    @staticmethod
    def backward(ctx, grad):
        dim, rank, n = ctx.where
        return grad.chunk(n, dim)[rank].clone(), None, None, None


def gather(x: Tensor, dim: int, n: int) -> Tensor:
    out = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), n, GROUP))
    return out if dim == 0 else torch.cat(out.chunk(n, 0), dim)


def mlp(x, w):
    h = F.gelu(Copy.apply(F.rms_norm(x, (WIDTH,), w["norm1"])) @ w["up"])
    return x + Reduce.apply(h @ w["down"])


def block(x, layers, rank, n, dim=0, flat=False):
    """Linears around work that the program itself does on each rank's own rows."""
    first, second = layers
    x = mlp(x, first)
    shape = x.shape
    rows = x.flatten(0, 1) if flat else x
    mine = Scatter.apply(rows, dim, rank, n)
    rows = Gather.apply(F.silu(mine) * second["norm2"], dim, rank, n)
    x = x + (rows.view(shape) if flat else rows)
    return mlp(x, second).square().mean()


def graphs(n, rank_of=lambda rank: rank, **options):
    torch.manual_seed(0)
    whole = weights(2)
    x = torch.randn(4, 12, WIDTH, dtype=torch.float64, requires_grad=True)
    ranks = [cut(whole, rank, n) for rank in range(n)]
    made = [joint_graph(lambda x, ws, r=r: block(x, ws, rank_of(r), n, **options), x, ranks[r]) for r in range(n)]
    given = [[x, *(w for layer in one for w in layer.values()), torch.ones((), dtype=torch.float64)] for one in ranks]
    return made, given


def marked(made, n):
    starts = [[b.start for _, b in (*own_rows._slices(g, n), *own_rows._pads(g, Ranks(n, GROUP)))] for g in made]
    passes = [OwnRows(Ranks(n, GROUP), lambda mine: starts) for _ in made]
    for one, gm in zip(passes, made):
        one(gm)
    return [one.changes for one in passes]


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("options", [{}, {"dim": 1}, {"flat": True}], ids=["batch", "sequence", "flat"])
@pytest.mark.parametrize("n", [2, 4])
def test_blocks_are_what_ranks_hold(n, options):
    expected_graphs, given = graphs(n, **options)
    assert len(set(marked(expected_graphs, n))) == 1  # sp::own_rows runs on simulated ranks; slices would, too
    expected = on_ranks_each([spelt(g, n) for g in expected_graphs], given)
    made, _ = graphs(n, **options)
    assert marked(made, n) == [4] * n
    local = SequenceParallelLinear(Ranks(n, GROUP))(made[0]).graph_module
    targets = Counter(str(node.target) for node in local.graph.nodes)
    assert not targets["sp.own_rows.default"]
    assert not targets["sp.all_rows.default"]
    assert targets["sp.reduce_scatter.default"] == 4
    found = on_ranks(local, given)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def on_ranks_each(made, given):
    from sp_compile.lowering.comm.simulate import run_ranks

    with torch.no_grad():
        return run_ranks(len(given), lambda rank: [t.clone() for t in made[rank](*given[rank]) if t is not None])


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("rank_of", [lambda rank: 0, lambda rank: 1 - rank], ids=["the first", "another's"])
def test_other_slices_stay(rank_of):
    made, _ = graphs(2, rank_of)
    marked(made, 2)
    targets = Counter(str(node.target) for node in made[0].graph.nodes)
    assert not targets["sp.own_rows.default"]
