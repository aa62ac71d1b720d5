"""The sp:: collectives on real ranks: the same numbers as simulated ones, in eager and compiled."""

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from support import ranks as worker
from support.ranks import Ranks
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

import sp_compile.lowering  # noqa: F401
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

sp = torch.ops.sp
HEADS, WIDTH = 4, 8
Results = tuple[Tensor, ...]


def program(x: Tensor, w: Tensor, n: int, group: str) -> Results:
    """Every operator once: a loss, an output, and integer and bool results. x: (batch, S, WIDTH)."""
    size = x.shape[1]
    frame, heads = [1, size, 0, size], [1, HEADS, 0, HEADS]
    w, _ = sp.reduce_grad([w, w * 2], "reduce", n, group)
    h = sp.shard(x, 1, frame, n, group)
    q = (h @ w).unflatten(-1, (HEADS, -1))
    q, k, v = sp.all_to_all([q, q.cos(), q.sin()], 2, heads, 1, frame, n, group)
    (o,) = sp.all_to_all([q * k + v.cumsum(1)], 1, frame, 2, heads, n, group)
    o = o.flatten(2)
    keys = sp.all_gather(o, 1, frame, n, group)
    mixed = sp.mask(o @ keys.mT, 1, frame, 0.0, n, group).tanh()
    out = sp.unshard(o, 1, frame, n, group)
    loss = sp.all_reduce(mixed.sum(), n, group)
    rows = [x.shape[0], size, 0, size]
    positive = sp.shard(x.flatten(0, 1), 0, rows, n, group) > 0
    count = sp.all_reduce(sp.mask(positive, 0, rows, False, n, group).sum(), n, group)
    return loss, sp.broadcast(out * 2, group), sp.unshard(positive, 0, rows, n, group), count


def shifted(x: Tensor, w: Tensor, n: int, group: str) -> Results:
    """Drop the first position as a window of the full frame: no row changes its rank."""
    size = x.shape[1]
    window, heads = [1, size, 1, size - 1], [1, HEADS, 0, HEADS]
    (w,) = sp.reduce_grad([w], "reduce", n, group)
    h = sp.shard(x[:, 1:], 1, window, n, group) @ w
    (late,) = sp.all_to_all([h.unflatten(-1, (HEADS, -1))], 2, heads, 1, window, n, group)
    (late,) = sp.all_to_all([late.cumsum(1)], 1, window, 2, heads, n, group)
    late = late.flatten(2) * h
    loss = sp.all_reduce(sp.mask(late, 1, window, 0.0, n, group).sum(), n, group)
    keys = sp.all_gather(h, 1, window, n, group)
    return loss, sp.unshard(late @ keys.mT, 1, window, n, group)


PROGRAMS = (program, shifted)


def inputs(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64)
    w = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), w.requires_grad_()


def run(fn, size: int, n: int, group: str) -> list[Tensor]:
    """Results and gradients of a program."""
    x, w = inputs(size)
    loss, out, *rest = fn(x, w, n, group)
    (loss + out.pow(2).sum()).backward()
    return [loss.detach(), out.detach(), *rest, x.grad, w.grad]


def simulated(fn, size: int, n: int) -> list[list[Tensor]]:
    return run_ranks(n, lambda rank: run(fn, size, n, SIMULATED_GROUP))


def in_eager(fn, sizes: list[int]) -> list[list[Tensor]]:
    group = worker.group()
    return [run(fn, size, group.size(), group.group_name) for size in sizes]


def compiled(fn, backend: str, dynamic: bool, sizes: list[int]) -> list[list[Tensor]]:
    group = worker.group()
    fn = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return [run(fn, size, group.size(), group.group_name) for size in sizes]


def aot_graphs(size: int) -> list[str]:
    """The forward and backward graphs of an exchange of three tensors and back, as text."""
    graphs: list[str] = []

    def record(gm: fx.GraphModule, example: list[Tensor]):
        graphs.append(gm.print_readable(print_output=False))
        return gm.forward

    def attend(x: Tensor, n: int, group: str) -> Tensor:
        frame = [1, size, 0, size]
        q, k, v = sp.all_to_all([x, x.sin(), x.cos()], 2, [1, 4, 0, 4], 1, frame, n, group)
        return (q * k * v).sum() + sp.shard(q, 1, frame, n, group).sum()

    backend = aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition)
    group = worker.group()
    local = -(-size // group.size())
    x = torch.randn(1, local, 4, 2, requires_grad=True)
    torch.compile(attend, backend=backend, fullgraph=True)(x, group.size(), group.group_name).backward()
    return graphs


def check(fn, real: list[list[list[Tensor]]], sizes: list[int]) -> None:
    """Compare each rank's results for each size with the simulated ones."""
    for i, size in enumerate(sizes):
        for results, expected in zip(real, simulated(fn, size, len(real)), strict=True):
            torch.testing.assert_close(results[i], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fn", PROGRAMS)
def test_simulated_ranks_equal_a_single_one(fn) -> None:
    (alone,) = simulated(fn, 7, 1)
    for n in (2, 3, 4):
        for results in simulated(fn, 7, n):
            torch.testing.assert_close(results, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fn", PROGRAMS)
@pytest.mark.parametrize("n", [2, 3])
def test_eager(ranks: Ranks, fn, n: int) -> None:
    sizes = [2, 6, 7]
    check(fn, ranks.run(n, in_eager, fn, sizes), sizes)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("fn", PROGRAMS)
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
def test_aot_eager(ranks: Ranks, fn, dynamic: bool) -> None:
    sizes = [7, 12] if dynamic else [7]
    check(fn, ranks.run(2, compiled, fn, "aot_eager", dynamic, sizes), sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("fn", "dynamic"), [(program, True), (shifted, False)], ids=["dynamic", "static"])
def test_inductor(ranks: Ranks, fn, dynamic: bool) -> None:
    sizes = [7, 12] if dynamic else [7]
    check(fn, ranks.run(2, compiled, fn, "inductor", dynamic, sizes), sizes)


@pytest.mark.parametrize("size", [6, 7])
def test_aot_graphs_hold_one_exchange_each_and_no_rank(ranks: Ranks, size: int) -> None:
    graphs, others = ranks.run(2, aot_graphs, size)
    assert graphs == others
    assert [graph.count("all_to_all_single.default(") for graph in graphs] == [1, 1]
