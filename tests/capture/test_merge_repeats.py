"""Equal calls without gradients are computed once; every other pair of calls stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.lowering.torch_compat import enter_autocast, exit_autocast
from sp_compile.passes.canonical.merge_repeats import MergeRepeats
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.node_info import set_node_info

aten = torch.ops.aten


def merged(fn: Callable[..., object], *args: Tensor) -> torch.fx.GraphModule:
    """Return the captured graph of a function whose last input has a gradient, after the pass."""

    class Program(nn.Module):
        def forward(self, *inputs: Tensor) -> object:
            return fn(*inputs)

    gm = sp_compile.capture_export(torch.export.export(Program(), args))
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), args, strict=True):
        set_node_info(node, requires_grad=x.requires_grad)
    MergeRepeats()(gm)
    return gm


def count(gm: torch.fx.GraphModule, op: object) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=op))


X = torch.randn(2, 6, 8, requires_grad=True)
T = torch.randn(6, 8)


def tables(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x * (torch.arange(6.0)[:, None] * 0.5).cos()
    return x


def test_tables_of_several_layers_are_computed_once() -> None:
    gm = merged(tables, X)
    assert (count(gm, aten.cos.default), count(gm, aten.arange.default), count(gm, aten.mul.Tensor)) == (1, 1, 4)
    torch.testing.assert_close(gm(X), tables(X))


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda t, x: x.cos() * t + x.cos(), aten.cos.default),
        (lambda t, x: x * torch.rand_like(t) + torch.rand_like(t), aten.rand_like.default),
        (lambda t, x: x * F.dropout(t) + F.dropout(t), aten.dropout.default),
        (lambda t, x: x * torch.empty(8).fill_(1) + torch.empty(8).fill_(2), aten.empty.memory_format),
        (lambda t, x: x * torch.zeros(8).normal_() + torch.zeros(8).normal_(), aten.zeros.default),
        (lambda t, x: (x.sum(), t.cos(), t.cos()), aten.cos.default),
        (lambda t, x: (x.sum(), t.cos()[1:], t.cos()[:2]), aten.cos.default),
        (lambda t, x: x * (t * 2).sin() + (t * 2.0).cos(), aten.mul.Tensor),
        (lambda t, x: x.sum() + (t[:, None] * torch.ones(64, 1)).sum() + (t[:, None] * torch.ones(64, 1)).amax(), None),
    ],
    ids=[
        "a gradient",
        "draws",
        "dropouts",
        "memory",
        "operands of draws",
        "results",
        "views are results",
        "an int and a float",
        "large values",
    ],
)
def test_other_pairs_of_calls_stay(fn: Callable[..., object], op: object) -> None:
    gm = merged(fn, T, X)
    assert count(gm, op or aten.mul.Tensor) >= 2


def products(tags: list[dict[str, object]], autocast: bool = False) -> list[int]:
    """Return for each of several equal products with these metadata the number of that which replaces it.

    With `autocast`, the second and the third product are in an autocast region.
    """
    graph = torch.fx.Graph()
    t, x = graph.placeholder("t"), graph.placeholder("x")
    t.meta["val"], x.meta["val"] = T, X
    set_node_info(t, requires_grad=False)
    nodes, region = [], None
    for i, tag in enumerate(tags):
        if autocast and i == 1:
            region = graph.call_function(enter_autocast, ("cpu", torch.bfloat16, True, False))
        if autocast and i == 3:
            graph.call_function(exit_autocast, (region,))
        nodes.append(graph.call_function(aten.matmul.default, (t, t)))
        nodes[-1].meta = {"val": T.clone(), **tag}
    result = graph.call_function(aten.stack.default, (nodes,))
    result.meta["val"] = torch.stack([T] * len(nodes))
    graph.output(result)
    gm = torch.fx.GraphModule({}, graph)
    MergeRepeats().run(gm, PassContext.of(2))
    return [nodes.index(node) for node in result.args[0]]


def test_calls_in_different_autocast_regions_stay() -> None:
    assert products([{}] * 4) == [0, 0, 0, 0]
    assert products([{}] * 4, autocast=True) == [0, 1, 1, 0]


def test_calls_in_different_checkpoint_regions_stay() -> None:
    assert products([{"ac_graph_id": i} for i in (0, 0, 1, 1)]) == [0, 0, 2, 2]


class CheckpointedTables(nn.Module):
    """Attention layers in checkpoints, each of which computes the same table."""

    def forward(self, x: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            q = (x * torch.arange(x.shape[1], dtype=x.dtype)[:, None].cos()).unsqueeze(1)
            return x + F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)

        for _ in range(2):
            x = checkpoint(layer, layer(x), use_reentrant=False)
        return x.sin().sum()


def test_a_model_with_tables_in_checkpoints_equals_one_device() -> None:
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    assert sp_compile.verify(CheckpointedTables(), x, sp=3).worst < 1e-12


FILLS = {
    "exponential_": lambda x: torch.empty(10, 8).exponential_(),
    "uniform_": lambda x: x.new_empty(2, 10, 8).uniform_(),
    "normal_": lambda x: torch.empty(2, 10, 8).normal_(),
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_draws_into_equal_memory_are_independent(fill: Callable[[Tensor], Tensor]) -> None:
    def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
        first = fill(x)
        q = (x * first).unflatten(-1, (2, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        second = fill(x)
        return (y * second).sum(), (first == second).double().mean()

    compiled = torch.compile(noisy, backend="sp", options={"compiler": "aot_eager"})
    assert compiled(torch.randn(2, 10, 8, requires_grad=True))[1] < 0.1
