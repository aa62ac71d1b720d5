"""Counts of communication, computation and saved bytes on tensor-parallel graphs of both directions."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.parallel.tensor_parallel import GROUP, WIDTH, cut, decoder, weights
from torch import Tensor
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.graph.inline import lower_exchanges
from sp_compile.passes.joint.joint import replace_nodes
from sp_compile.passes.tensor_parallel.scatter_layers import SequenceParallelLinear

LAYERS, BATCH, LENGTH = 3, 4, 6


class _Stop(Exception):
    pass


def both_ways(f: Callable[..., Tensor], args: Any, n: int, scatter: bool) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph of one rank, as they are run."""
    found: list[GraphModule] = []

    def partition(gm: GraphModule, inputs: Any, **options: Any) -> Any:
        if scatter:
            replace_nodes(gm, SequenceParallelLinear(Ranks(n, GROUP))(gm).graph_module)
            lower_exchanges(gm)
        found.extend(min_cut_rematerialization_partition(gm, inputs, **options))
        raise _Stop

    with contextlib.suppress(_Stop):
        aot_function(f, make_boxed_func, make_boxed_func, partition_fn=partition)(*args)
    return found[0], found[1]


@functools.cache
def graphs(n: int, scatter: bool) -> tuple[GraphModule, GraphModule]:
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    layers = cut(weights(LAYERS), 0, n)
    return both_ways(lambda x, layers: decoder(x, layers, n).square().mean(), (x, layers), n, scatter)


def exchanges(gm: GraphModule) -> list[Node]:
    named = [node for node in gm.graph.nodes if "c10d" in str(node.target)]
    return [node for node in named if "wait" not in str(node.target)]


def counted(gm: GraphModule) -> dict[str, int]:
    return dict(Counter(node.target.__name__.partition(".")[0] for node in exchanges(gm)))


def sent(gm: GraphModule, n: int) -> int:
    """Return bytes of one rank: a ring sends 2 (n - 1) / n of an all-reduce, and half of it for a scatter or a gather."""
    total = 0
    for node in exchanges(gm):
        given, got = (v.numel() * v.element_size() for v in (node.args[0].meta["val"], node.meta["val"]))
        total += (n - 1) * (2 * got if "all_reduce" in str(node.target) else max(given, got)) // n
    return total


def values(gm: GraphModule, op: str) -> list[tuple[int, ...]]:
    found = [node for node in gm.graph.nodes if op in str(node.target)]
    return [tuple(v.shape) for node in found for v in [node.meta["val"]] if isinstance(v, Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_two_exchanges_a_layer_and_direction(n: int) -> None:
    plain, scattered = graphs(n, False), graphs(n, True)
    each = {"reduce_scatter_tensor": 2 * LAYERS, "all_gather_into_tensor": 2 * LAYERS}
    assert [counted(gm) for gm in plain] == [{"all_reduce": 2 * LAYERS}] * 2
    assert counted(scattered[0]) == each
    assert counted(scattered[1]) == {**each, "all_reduce": 1}


@pytest.mark.slow
@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("n", [2, 4])
def test_no_byte_more(n: int) -> None:
    plain, scattered = graphs(n, False), graphs(n, True)
    assert sent(scattered[0], n) == sent(plain[0], n)
    weights_of_norms = (3 * LAYERS + LAYERS) * WIDTH * 8  # two norms, a bias of one of them, a bias after the sum
    assert sent(scattered[1], n) == sent(plain[1], n) + 2 * (n - 1) * weights_of_norms // n


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("n", [2, 4])
def test_norms_and_saved_rows(n: int) -> None:
    """All norms except the first, whose input is replicated, run on 1/n of the rows, as are saved residuals."""
    plain, scattered = graphs(n, False), graphs(n, True)
    rows, part = (BATCH, LENGTH, 1), (BATCH // n, LENGTH, 1)
    assert values(plain[0], "rsqrt") == [rows] * LAYERS
    assert values(scattered[0], "rsqrt") == [rows] + [part] * (LAYERS - 1)
    saved = [common_rows(gm) for gm, _ in (plain, scattered)]
    assert set(saved[0]) == {(BATCH, LENGTH)}
    assert set(saved[1]) == {(BATCH // n, LENGTH)}
    assert len(saved[0]) == len(saved[1])


def common_rows(forward: GraphModule) -> list[tuple[int, ...]]:
    """Return the rows of saved activations that are equal on all ranks, of shape (batch, length, width or 1)."""
    handed = [node for node in forward.graph.output_node().args[0][1:] if isinstance(node, Node)]
    made = [node.meta["val"] for node in handed if node.op != "placeholder"]
    tensors = [v for v in made if isinstance(v, Tensor) and v.ndim == 3 and v.shape[-1] in (1, WIDTH)]
    return [tuple(v.shape[:2]) for v in tensors]


@pytest.mark.slow
def test_nothing_is_gathered_twice() -> None:
    """q, k and v read one gathered value, and the backward the one that the forward has saved."""
    forward, backward = graphs(2, True)
    gathered = [node for gm in (forward, backward) for node in exchanges(gm) if "gather" in str(node.target)]
    assert len({node.args[0] for node in gathered}) == len(gathered) == 4 * LAYERS
