"""Exchanges leave early and are waited for late: the order of nodes in the halves of a joint graph, and nothing else."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support import models
from support.capturing import compile_halves
from support.parity import Checkpointed, Decoder, build, text
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from sp_compile.passes.cost.walk.liveness import WAIT_OP, node_flops
from sp_compile.passes.joint.partitioned import PartitionedPasses
from sp_compile.passes.localize import reduce_gradients as gradients


class Separate(nn.Module):
    """Queries, keys and values have a projection each, those of queries and values with a bias."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = models.Decoder(layers=layers)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids % models.VOCABULARY).flatten(0, 1), labels.flatten() % models.VOCABULARY)


def backward(model: type, strategy: str, layers: int = 2) -> tuple[Graph, Graph]:
    """Return the backward in AOTAutograd's order and in the order of the pass."""
    found: list[Graph] = []
    plain = PartitionedPasses.run_training

    def seen(given: PartitionedPasses, forward: GraphModule, backward: GraphModule, results: int) -> None:
        found.append(Graph())
        found[0].output(found[0].graph_copy(backward.graph, {}))
        plain(given, forward, backward, results)
        found.append(backward.graph)

    with mock.patch.object(PartitionedPasses, "run_training", seen):
        compile_halves(build(model, layers=layers), text(32), 2, attention=strategy)
    return found[0], found[1]


def words(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("strategy", ["ulysses", pytest.param("ring", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [Decoder, pytest.param(Checkpointed, marks=pytest.mark.slow)])
def test_only_the_order_changes(model: type, strategy: str) -> None:
    before, after = (words(graph) for graph in backward(model, strategy))
    assert before != after
    assert Counter(before) == Counter(after)


def test_every_wait_is_where_its_value_is_read() -> None:
    _, graph = backward(Decoder, "ulysses", layers=1)
    nodes = list(graph.nodes)
    for wait in graph.find_nodes(op="call_function", target=WAIT_OP):
        between = nodes[nodes.index(wait) : nodes.index(min(wait.users))]
        assert not any(node_flops(node) for node in between), wait


def test_an_exchange_leaves_before_products_that_it_does_not_read() -> None:
    _, graph = backward(Decoder, "ulysses")
    found = words(graph)
    starts = [i for i, word in enumerate(found) if "all_to_all_single" in word]
    hidden = [any("aten.mm" in word for word in found[i : found.index(str(WAIT_OP), i)]) for i in starts]
    assert any(hidden)


def test_sums_of_gradients_leave_before_the_backward_of_the_layer_before() -> None:
    with mock.patch.object(gradients, "BUCKET_BYTES", 1 << 12):
        _, graph = backward(Decoder, "ulysses")
    sums = [i for i, word in enumerate(words(graph)) if "all_reduce" in word]
    waits = [i for i, word in enumerate(words(graph)) if "wait" in word]
    layers = [i for i, word in enumerate(words(graph)) if "attention" in word and "backward" in word]
    assert len(layers) == 2
    assert sums[0] < layers[1] < waits[-1]
    assert all("wait" not in words(graph)[i + 1] for i in sums[:-1])


def test_a_sum_over_rows_does_not_wait_for_the_end() -> None:
    """The bias gradient of queries and values sums received rows, which would otherwise stay in memory until the end."""

    def summed(graph: Graph) -> list[str]:
        """Beside the first attention's backward, before the second one's."""
        found = words(graph)
        first, second = (i for i, word in enumerate(found) if "attention" in word and "backward" in word)
        return [word for word in found[first:second] if "aten.sum" in word]

    before, after = (summed(graph) for graph in backward(Separate, "ulysses"))
    assert len(after) == len(before) >= 3


@pytest.mark.slow
def test_a_bucket_is_a_small_share_of_all_gradients() -> None:
    """While it is filled, its gradients are in memory twice."""
    with mock.patch.object(gradients, "SMALL_BUCKET", 0):
        _, graph = backward(Decoder, "ulysses", layers=4)
    summed = [node.args[0] for node in graph.nodes if "all_reduce" in str(node.target)]
    buckets = [node.meta["val"].nbytes for node in summed if node.target is torch.ops.aten.cat.default]
    assert buckets
    assert max(buckets) <= sum(node.meta["val"].nbytes for node in summed) / 16
