"""Tensor-parallel training graphs on shards of rows between their linears: same results, gathered where needed."""

import copy
from collections import Counter

import pytest
import torch
from support.golden import captured
from support.parallel.tensor_parallel import (
    GROUP,
    WIDTH,
    all_reduce,
    cut,
    decoder,
    joint_graph,
    on_ranks,
    simulate_reductions,
    weights,
)

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.tensor_parallel.scatter_layers import SequenceParallelLinear


def loss(x, layers, n):
    return decoder(x, layers, n).square().mean()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def flat(x, layers):
    return [x, *(w for layer in layers for w in layer.values())]


def graphs(n, batch, length, layers=2):
    whole = weights(layers)
    x = torch.randn(batch, length, WIDTH, dtype=torch.float64, requires_grad=True)
    ranks = [cut(whole, rank, n) for rank in range(n)]
    gm = joint_graph(lambda x, layers: loss(x, layers, n), x, ranks[0])
    inputs = [[*flat(x, one), torch.ones((), dtype=torch.float64)] for one in ranks]
    return gm, inputs, x, whole


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(("n", "batch", "length"), [(2, 2, 6), (2, 1, 7), (3, 2, 7), (4, 3, 5), (4, 4, 9), (2, 3, 1)])
def test_equals_the_untouched_graph_and_one_device(n, batch, length):
    gm, inputs, x, whole = graphs(n, batch, length)
    expected = on_ranks(simulate_reductions(copy.deepcopy(gm), n), inputs)
    one = SequenceParallelLinear(Ranks(n, GROUP))
    local = one(gm).graph_module
    found = on_ranks(local, inputs)
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    alone = cut(whole, 0, 1)
    total = loss(x, alone, 1)
    total.backward()
    torch.testing.assert_close(found[0][0], total.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(found[0][1], x.grad, rtol=1e-9, atol=1e-12)


def test_counts():
    gm, *_ = graphs(2, 2, 6, layers=3)
    one = SequenceParallelLinear(Ranks(2, GROUP))
    local = one(gm).graph_module
    targets = Counter(str(n.target) for n in local.graph.nodes)
    assert targets["sp.reduce_scatter.default"] == 12  # two a layer, there and back
    assert targets["sp.all_gather.default"] == 13  # the same number, and the gradient of the input
    assert targets["sp.all_reduce.default"] == 1  # the gradients of norm weights and of biases, together


def modes(program, *operands):
    one = SequenceParallelLinear(Ranks(2, GROUP))
    one(captured(program, *operands))
    return [layer.mode for layer in one.layers]


def test_exchanges_over_another_group_are_no_work_on_rows():
    """A value that is summed again and returned has no ops between that could run on a share of the rows."""
    x, w, v = torch.randn(2, 4, 3), torch.randn(3, 5), torch.randn(5, 3)
    assert modes(lambda x, w: all_reduce(all_reduce(x @ w), "dp"), x, w) == ["full"]
    assert modes(lambda x, w, v: torch.relu(all_reduce(x @ w)) @ v, x, w, v) == ["scattered"]


def test_a_weight_from_another_group_is_a_weight():
    c10d = torch.ops._c10d_functional
    sent = lambda w: c10d.wait_tensor(c10d.broadcast(w, 0, "dp"))  # noqa: E731
    x, w, v = torch.randn(2, 4, 3), torch.randn(3, 5), torch.randn(5, 3)
    assert modes(lambda x, w, v: torch.relu(all_reduce(x @ sent(w))) @ v, x, w, v) == ["scattered"]
