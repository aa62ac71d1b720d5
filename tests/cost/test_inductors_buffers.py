"""Placement and lifetime of values in Inductor's buffers: walks over small graphs, and a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import seeded
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compile
from sp_compile.lowering.torch_compat import auto_functionalized_v2
from sp_compile.passes.cost.walk.liveness import LivenessWalk, walk

ROW = 64 * 8 * 4  # bytes of (64, 8) in float32


def walked(fn: Callable[..., Any], saved: str = "", **inputs: Tensor) -> LivenessWalk:
    """Walk a graph with inputs of these names. saved: inputs that are freed."""
    graph = make_fx(fn, tracing_mode="fake")(*inputs.values()).graph
    nodes = dict(zip(inputs, graph.find_nodes(op="placeholder")))
    for name, node in nodes.items():
        node.name = node.target = name
    return walk(graph, fused=True, saved=[nodes[name] for name in saved.split()])


def test_gradients_of_results_are_not_written_over() -> None:
    """AOTAutograd donates only saved values to Inductor."""
    x, w = torch.randn(64, 8), torch.randn(8, 8)
    held = [
        walked(lambda x, w: x.exp() @ w, name, **{name: x}, primals_1=w).moments[0].nbytes
        for name in ("view_1", "tangents_1")
    ]
    assert held == [ROW, 2 * ROW]


def waiting(make: Callable[[Tensor, Tensor], Tensor], device: str = "cpu", **first: Tensor) -> int:
    """Return idle bytes between the last use of the result of `make` and a product of its size."""

    def fn(first: Tensor, x: Tensor, w: Tensor) -> Any:
        total, a = first.sum(), make(x, w)
        small = a[:8] @ w
        return total, small @ w, x @ w

    *_, between, _ = walked(
        fn,
        **{name: value.to(device) for name, value in first.items()},
        primals_1=torch.randn(64, 8, device=device),
        primals_2=torch.randn(8, 8, device=device),
    ).moments
    assert between.name == "mm_1" or between.name == "mm_2"
    return between.idle


def test_a_value_waits_for_a_buffer_of_its_size() -> None:
    """A value waits for the buffer of an input that Inductor frees, not of one that the caller owns."""
    product, large = torch.mm, torch.randn(256, 8)
    assert waiting(product, view_9=large) == ROW
    assert waiting(product, primals_9=large) == waiting(product, tangents_9=large) == 0


def test_unaligned_buffers_are_not_reused() -> None:
    """On a CPU, inputs and results of fallback operators on inputs may be unaligned."""
    large = torch.randn(256, 8)
    assert waiting(lambda x, w: x.cumsum(0), view_9=large) == 0
    assert waiting(lambda x, w: x.cumsum(0), "meta", view_9=large) == ROW
    assert waiting(lambda x, w: (x @ w).cumsum(0), view_9=large) == ROW


def test_a_product_runs_where_the_sum_does_that_alone_reads_it() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> Any:
        product = x.t() @ y
        return z @ z, product + z.exp()

    inputs = {"view_1": torch.randn(64, 8), "view_2": torch.randn(64, 8), "primals_1": torch.randn(8, 8)}
    found = walked(fn, "view_1 view_2", **inputs)
    assert [(m.name, m.product, m.flops) for m in found.moments] == [
        ("mm_1", True, 2 * 8**3),
        ("exp", False, 0),
        ("add", True, 2 * 64 * 8**2),
    ]
    assert [m.nbytes - 2 * ROW for m in found.moments] == [256, 512, 768]


def test_a_gpu_adds_in_the_next_kernel() -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor, then: Callable[[Tensor], Tensor]) -> Tensor:
        return then(x.t() @ y + z)

    inputs = {"x": torch.randn(64, 8), "y": torch.randn(64, 8), "z": torch.randn(8, 8)}
    for device, then, names in (
        ("cpu", torch.relu, ["add", "relu"]),
        ("meta", torch.relu, ["mm", "relu"]),
        ("meta", lambda x: x, ["add"]),
    ):
        on_it = {name: x.to(device) for name, x in inputs.items()}
        assert [m.name for m in walked(partial(fn, then=then), **on_it).moments] == names


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_saved_values_equal_inductors(device: str) -> None:
    """Attention's result is saved once; Inductor's passes remove AOTAutograd's alias of it."""

    def fn(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x + 1, x + 2).exp()

    x = torch.randn(1, 2, 64, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    step = sp_compile.explain(fn, x, sp=1, memory=True, compiler="inductor").step
    assert step is not None
    kept = {held.name for graph in step.graphs for _, held in graph.saved_bytes}
    assert {"add", "add_1", "getitem", "getitem_1"} <= kept
    assert not [name for name in kept if name.startswith(("alias", "detach"))]


class Tied(nn.Module):
    """A decoder with a tied head that returns the input of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        x = x + self.down(F.silu(self.up(x)))
        logits = F.linear(x, self.embed.weight)
        return F.cross_entropy(logits, ids), logits


@pytest.mark.slow
def test_a_step_that_inductor_compiles(examples: None) -> None:
    """On one device, against every allocation."""
    from peak_memory import peak_activation_bytes

    model, ids = seeded(Tied), torch.arange(256)
    step = sp_compile.explain(model, ids, sp=1, memory=True, compiler="inductor", tiles="never").step
    assert step is not None
    torch.compiler.reset()
    run = torch.compile(model, backend="sp", options={"compiler": "inductor", "tiles": "never"})
    for _ in range(2):
        run(ids)[0].backward()
    measured = peak_activation_bytes(lambda: run(ids)[0].backward(), model.parameters(), gradients=True)
    assert abs(step.values - measured) <= 8


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mutation_is_a_kernel_between_the_kernels_that_use_its_operand(device: str) -> None:
    """Its other operands end there, and kernels before and after it are not fused: on "meta" as on a GPU."""

    def fn(x: Tensor, w: Tensor, rows: Tensor) -> Any:
        total = x / x.sum(-1, keepdim=True)
        part = (x[0, 0] @ w).view_as(x)
        _, total = auto_functionalized_v2(
            torch.ops.sp.add_rows_into.default,
            parts=[part],
            rows=rows,
            _total_base_index=0,
            _total_alias=True,
            _all_bases=[total],
        )
        return total / total.sum(-1, keepdim=True), x[0, 0] @ w

    x, w = torch.randn(1, 1, 4096, 64, device=device), torch.randn(64, 64, device=device)
    found = walked(fn, primals_1=x, primals_2=w, primals_3=torch.ones(4096, dtype=torch.bool))
    names = [moment.name for moment in found.moments]
    before, mutation, after = (names.index(name) for name in ("mm", "auto_functionalized_v2", "mm_1"))
    assert before < mutation < after
    assert "sum_1" in names[:mutation]
    assert "sum_2" in names[mutation:]
    assert [found.moments[i].nbytes for i in (mutation, after)] == [2 * x.nbytes, 2 * x.nbytes]


def test_a_graph_without_kernels_has_no_live_values() -> None:
    assert walked(lambda x: x.view(-1), primals_1=torch.randn(4, 4)).alive(0) == []
