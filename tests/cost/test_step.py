"""The memory of a training step: walks over small graphs and models, compared with live tensors."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers a grouped product)
from support.models import Decoder, seeded, tokens
from support.scans.kernel_package import fla
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import flop_registry

import sp_compile
from sp_compile.lowering.attention.op_args import LocalArgs
from sp_compile.lowering.base.errors import PARAMETERS_LINE, RESULTS_LINE, TANGENTS_LINE, UNKNOWN_LINE, SpError
from sp_compile.lowering.masks.spans import full_span
from sp_compile.lowering.scan.attention_kernels import FUNCTIONS, KERNELS, KernelFunction
from sp_compile.passes.cost.machine import CPU
from sp_compile.passes.cost.step_memory import StepMemory, format_bytes
from sp_compile.passes.cost.walk.liveness import _workspace_bytes, walk
from sp_compile.passes.cost.weight_memory import ADAMW_STATE, ModelBytes, state_per_weight
from sp_compile.planner.report_json import report_json

sp, aten = torch.ops.sp, torch.ops.aten
ROW = 64 * 8 * 4  # bytes of (64, 8) in float32


def walked(fn: Any, *args: Tensor, fused: bool) -> Any:
    return walk(make_fx(fn, tracing_mode="fake")(*args).graph, fused)


def elementwise(x: Tensor, w: Tensor) -> Tensor:
    return (x.sin().cos().exp() @ w).relu()


def test_a_value_lives_until_its_last_reader() -> None:
    """sin and cos, cos and exp, exp and the product, the product and relu: two at a time."""
    x, w = torch.randn(64, 8), torch.randn(8, 8)
    found = walked(elementwise, x, w, fused=False)
    assert [m.nbytes for m in found.moments] == [ROW, 2 * ROW, 2 * ROW, 2 * ROW, 2 * ROW]
    assert found.end == ROW
    assert [held.name for held in found.alive(2)] == ["cos", "exp"]


def test_fused_kernels_have_no_values_between() -> None:
    x, w = torch.randn(64, 8), torch.randn(8, 8)
    found = walked(elementwise, x, w, fused=True)
    assert [(m.name, m.nbytes) for m in found.moments] == [("exp", ROW), ("mm", 2 * ROW), ("relu", ROW)]
    assert found.flops == 2 * 64 * 8 * 8
    assert found.traffic == 2 * ROW + 2 * ROW


def test_views_share_their_base() -> None:
    found = walked(lambda x: x.exp().view(8, 64).t()[:2].sum(), torch.randn(64, 8), fused=False)
    assert max(m.nbytes for m in found.moments) == ROW + 4


def test_queries_may_be_keys() -> None:
    """An attention of one value has one input node, and takes as much inside as one of three."""
    x = torch.randn(1, 2, 64, 8)
    own, others = (
        walked(F.scaled_dot_product_attention, *xs, fused=False).moments[0] for xs in ((x, x, x), (x, x + 1, x + 2))
    )
    assert own.nbytes == others.nbytes


def test_the_optimizer_as_given() -> None:
    assert state_per_weight() == ADAMW_STATE == state_per_weight(torch.optim.AdamW)
    assert state_per_weight(torch.optim.SGD) == 0
    model = nn.Linear(4, 4)
    assert state_per_weight(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) == 1
    assert state_per_weight(torch.optim.SGD([{"params": model.parameters(), "momentum": 0.9}], lr=0.1)) == 1
    for adam in (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam):
        assert state_per_weight(adam(model.parameters())) == ADAMW_STATE
    assert state_per_weight(torch.optim.AdamW(model.parameters(), torch.tensor(0.1), amsgrad=True, fused=True)) == 3
    assert state_per_weight(torch.optim.Adafactor) < 0.01, "a number for each row and each column"


@pytest.mark.parametrize("wrong", [torch.optim.LBFGS, "adamw", 3], ids=str)
def test_an_optimizer_needs_a_step(wrong: Any) -> None:
    with pytest.raises(SpError, match="SP704"):
        state_per_weight(wrong)


def explained(sp: int = 2, **options: Any) -> StepMemory:
    model = seeded(partial(Decoder, layers=2))
    step = sp_compile.explain(model, tokens(64), sp=sp, memory=True, **options).step
    assert step is not None
    return step


@pytest.mark.sampled(every=3)
@torch.backends.mkldnn.flags(enabled=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "width", "packed"),
    [(1024, 4, 2, 32, ""), (2048, 8, 8, 64, ""), (1024, 4, 2, 32, "stack"), (512, 4, 1, 64, "rows")],
)
def test_attention_of_a_rank_takes_the_predicted_bytes(
    examples: None, rows: int, heads: int, key_heads: int, width: int, packed: str, dtype: torch.dtype
) -> None:
    """Forward and backward, on shards, against every allocation; a kernel's own sums of rows are not counted.

    Nor are oneDNN's buffers for half types: some CPUs reorder operands in each product, others do not.
    """
    from peak_memory import peak_activation_bytes

    where = full_span(rows)
    args = LocalArgs(None, [], [], [], [], "k <= q", None, 0.0, 0.25, "", [], [], where, where, 1, "").to_flat()
    sizes = [heads, key_heads, key_heads, heads]
    q, k, v, grad = (torch.randn(1, rows, h, width).to(dtype).transpose(1, 2) for h in sizes)
    out, lse = sp.attend(q, k, v, *args)
    for fn, given in (
        (lambda *xs: sp.attend(*xs, *args), (q, k, v)),
        (lambda *xs: sp.attend_backward(*xs, *args, False, None, packed), (grad, q, k, v, out, lse)),
    ):
        predicted = max(moment.nbytes for moment in walked(fn, *given, fused=False).moments)
        measured = peak_activation_bytes(partial(fn, *given), [])
        assert 0 <= measured - predicted <= 72 << 10, (predicted, measured)


ELEMENTWISE = {
    "dropout": lambda x, mask: aten.native_dropout(x, 0.5, True),
    "its backward": lambda x, mask: aten.native_dropout_backward(x, mask, 2.0),
    "a mask": lambda x, mask: x * mask,
    "a half type": lambda x, mask: x + x.bfloat16(),
    "a row": lambda x, mask: x * mask[:1],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_operands_of_another_dtype_are_copied_to_that_of_the_result(examples: None, name: str) -> None:
    """On a CPU, operator by operator, against every allocation; numbers that an operator makes itself do not count."""
    from peak_memory import peak_activation_bytes

    x = torch.randn(1024, 8)
    given = x, x > 0
    predicted = max(moment.nbytes for moment in walked(ELEMENTWISE[name], *given, fused=False).moments)
    assert 0 <= peak_activation_bytes(partial(ELEMENTWISE[name], *given), []) - predicted <= 64


@pytest.mark.slow
def test_a_step_of_a_decoder() -> None:
    step = explained(compiler="aot_eager")
    nbytes = sum(p.numel() * 8 for p in seeded(partial(Decoder, layers=2)).parameters())
    assert (step.weights.parameters, step.weights.trainable, step.optimizer) == (nbytes, nbytes, 2 * nbytes)
    assert list(step.peaks()) == ["forward", "loss", "backward"]
    assert step.values == max(point.nbytes for point in step.peaks().values())
    for point in step.peaks().values():
        assert sum(held.nbytes for held in step.alive(point)) == point.nbytes
    assert step.sharded_state(2) - step.sharded_state(4) == 3 * nbytes / 4, "weights and the optimizer's two"
    assert 3 * nbytes / 4 <= step.fsdp(2) - step.fsdp(4) <= nbytes, "and gradients, as far as they are made"
    text = step.text(2)
    assert format_bytes(step.saved) in text
    assert "support/models.py" in text


def test_bytes_that_fsdp_shards() -> None:
    """Parameters, gradients and optimizer state are sharded; parts outside of layers and two layers stay gathered."""
    weights = ModelBytes(parameters=1000, trainable=800, buffers=30, unit=100, outside_layers=50)
    assert weights.sharded_bytes(4) == ((1000 + 2 * 800) // 4 + 50 + 2 * 100, 800 // 4 + 50 + 2 * 100)
    small = StepMemory(weights)
    assert small.fsdp(4) == (1000 + 800 + 2 * 800) // 4 + 30, "while the optimizer runs"
    assert re.search(rf"FSDP .*\b4 ranks {re.escape(format_bytes(small.fsdp(4)))}$", small.text(4))
    assert small.peak == 1000 + 30 + 2 * 800 + 800


def test_bytes_that_fsdp_has_sharded() -> None:
    """A sharded model counts the rank's own bytes."""
    model, whole = seeded(Decoder), ModelBytes.of(seeded(Decoder))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        found = ModelBytes.of(model)
    finally:
        dist.destroy_process_group()
    assert 0.5 <= found.parameters / whole.parameters < 0.6
    assert found.trainable == found.parameters


def test_a_loss_on_the_meta_device_has_its_backward() -> None:
    """torch ends it there, at `cross_entropy`, unless composite operators are looked into."""

    class Learning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())

    def products(device: str) -> int:
        model, given = Learning().to(device), [tokens(64, seed).to(device) for seed in (1, 2)]
        options = {"seq_dims": {"ids": 1, "labels": 1}, "tiles": "never"}
        step = sp_compile.explain(model, *given, sp=2, memory=True, **options).step
        assert step is not None
        (graph,) = step.graphs
        assert graph.backward is not None
        return sum(moment.product for moment in graph.backward.moments)

    assert products("meta") == products("cpu") > 0


def test_values_without_a_line_have_a_name() -> None:
    """Gradients that the caller passes or that are sent together, and results being returned."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = Decoder()

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            h = self.decoder(ids)
            return h.square().mean(), h.sin()

    step = (report := sp_compile.explain(Two(), tokens(16), sp=2, memory=True)).step
    assert step is not None
    (graph,) = step.graphs
    assert graph.backward is not None
    alive = [
        held for walk in (graph.forward, graph.backward) for i in range(len(walk.moments)) for held in walk.alive(i)
    ]
    assert {TANGENTS_LINE, PARAMETERS_LINE} <= {held.where for held in alive}
    assert not [held for held in alive if held.where == UNKNOWN_LINE]
    assert not [m for walk in (graph.forward, graph.backward) for m in walk.moments if m.where == UNKNOWN_LINE]
    where = {exchange.op: exchange.where for exchange in report.exchanges}
    assert (where["reduce_grad"], where["unshard"]) == (PARAMETERS_LINE, RESULTS_LINE)
    kept = {block["where"]: block["kept_bytes"] for block in report_json(report)["blocks"]}
    assert kept.get(TANGENTS_LINE, 0) == 0 < sum(kept.values()) <= step.saved


def test_flops_of_grouped_products() -> None:
    """Each row counts like a row of a product, in any group; torch's own counters do not change."""
    x, w = torch.randn(64, 8, dtype=torch.bfloat16), torch.randn(4, 8, 16, dtype=torch.bfloat16)
    ends = torch.tensor([16, 16, 40, 64], dtype=torch.int32)
    torchs = torch.ops.aten._grouped_mm.default
    rows, matrices, pairs = (
        walked(torchs, *given, fused=False)
        for given in ((x, w, ends), (x.t(), torch.randn(64, 16, dtype=torch.bfloat16), ends), (w.mT, w))
    )
    theirs = walked(torch.ops.transformers.grouped_mm_fallback_backward, x, w, ends, x @ w[0], fused=False)
    assert [one.flops for one in (rows, matrices)] == [2 * 64 * 8 * 16] * 2
    assert theirs.flops == 2 * rows.flops
    assert pairs.flops == 4 * 2 * 16 * 8 * 16
    assert all(one.moments[0].product for one in (rows, matrices, pairs))
    assert torch.ops.aten._grouped_mm not in flop_registry


class Affine(nn.Module):
    """A recurrence of matrices of 4 x 4 and states of 4 x 5."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.b = nn.Linear(16, 16), nn.Linear(16, 20)

    def forward(self, x: Tensor) -> Tensor:
        return sp_compile.affine_scan(self.m(x).unflatten(-1, (4, 4)), self.b(x).unflatten(-1, (4, 5))).pow(2).mean()


class LinearAttention(nn.Module):
    """A gated delta rule of 2 heads with states of 4 x 5."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = ""
        self.parts = nn.ModuleList(nn.Linear(16, size) for size in (8, 8, 10, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, decay, beta = (part(x) for part in self.parts)
        heads = [y.unflatten(-1, (2, -1)) for y in (q, k, v, F.logsigmoid(decay))]
        absent = [None] * 6  # no low rank, no documents and no initial state
        return sp.linear_attention(*heads, beta.sigmoid(), *absent, 1.0, self.kernel).pow(2).mean()


# Constants of a machine on which the seconds of a step are its FLOPs
FLOPS_ONLY = {f.name: math.inf for f in fields(CPU) if f.name.endswith("bandwidth")} | {
    **{f.name: 0.0 for f in fields(CPU) if f.name.endswith("latency")},
    **{"flops": 1.0, "call": 0.0, "block_keys": 0.0},
}


def test_a_recurrence_of_matrices_to_the_flop() -> None:
    """4 ranks of 32 tokens in a batch of 2. A map of the rows is a product of 4 x 4 and 4 x 9 for each."""
    model, x, rows = Affine(), torch.randn(2, 128, 16), 2 * 32
    report = sp_compile.explain(model, x, sp=4, memory=True)
    linears, scan, total = rows * 16 * 36, rows * 4 * 4 * 5, rows * 4 * 4 * 9
    carries = 3 * 2 * 4 * 4 * 5  # the states before ranks 1 to 3
    assert report.work.flops == 4 * 2 * (linears + scan)
    (graph,) = report.step.graphs
    assert graph.backward is not None
    assert graph.forward.flops == 2 * (linears + scan + total + carries)
    # The gradients of the weights, the scan in the other direction, and w h^T for each row.
    assert graph.backward.flops == 2 * (linears + scan + total + carries + rows * 4 * 5 * 4)
    (carry,) = (e for e in report.exchanges if e.op == "affine_scan")
    assert carry.forward == carry.backward == 3 * 2 * (4 * 4 + 4 * 5) * 4
    # x, m, the states, two states before the rows, and the number of the rank
    assert report.step.saved == (rows * (16 + 16 + 20) + 2 * 2 * 20) * 4 + 8
    (best, *_) = sp_compile.plan(model, x, ranks=4, memory="1GB", cost=FLOPS_ONLY).rows
    assert (best.seconds, best.kept) == (graph.forward.flops + graph.backward.flops, report.step.saved)


def test_flops_and_bytes_of_linear_attention() -> None:
    """Chunks of 64 tokens: products within a chunk, a solve with 4 + 4 + 5 columns, reads and updates of the state."""
    model, x, tokens = LinearAttention(), torch.randn(2, 128, 16), 2 * 128
    report = sp_compile.explain(model, x, sp=4, memory=True)
    head = 64 * (4 + 5) + 2 * 4 * 5 + 64 * (4 + 4 + 5) + 4 * 4
    assert report.work.flops == 2 * tokens * (16 * 30 + 2 * head)
    (carry,) = (e for e in report.exchanges if e.op == "linear_attention")
    assert carry.forward == carry.backward == 3 * 2 * 2 * 4 * (4 + 5) * 4
    (graph,) = report.step.graphs
    assert graph.backward is not None
    (best, *_) = sp_compile.plan(model, x, ranks=4, memory="1GB", cost=FLOPS_ONLY).rows
    assert (best.seconds, best.kept) == (graph.forward.flops + graph.backward.flops, report.step.saved)


def test_flops_of_an_installed_kernel() -> None:
    """A kernel has K = 4 columns more than V = 5 on ranks: scores, values, a solve, and products with the state."""
    model, x, tokens = LinearAttention(), torch.randn(2, 128, 16), 2 * 32
    model.kernel = "a kernel of tests"
    with (
        KERNELS.register(model.kernel, KERNELS["chunk_gated_delta_rule"]),
        mock.patch.dict(FUNCTIONS, {model.kernel: KernelFunction(fla.chunk_gated_delta_rule, frozenset({"cpu"}))}),
    ):
        report = sp_compile.explain(model, x, sp=4, memory=True)
        (best, *_) = sp_compile.plan(model, x, ranks=4, memory="1GB", cost=FLOPS_ONLY).rows
    (graph,) = report.step.graphs
    assert graph.backward is not None
    linears, kernel = tokens * 16 * 30, 2 * tokens * (64 * (4 + 9) + 2 * 4 * 9 + 64 * (4 + 4 + 9) + 4 * 9)
    reads = 2 * tokens * 4 * 5
    states = graph.forward.flops // 2 - linears - kernel - reads  # products of 4 x 4 and 4 x 9 of ranks and heads
    assert 0 < states < 4 * 2 * 2 * 4 * 4 * 9
    assert graph.backward.flops // 2 >= linears + 3 * kernel + 2 * reads  # the kernel runs again
    assert graph.backward.flops // 2 < linears + 3 * kernel + 2 * reads + 2 * states
    assert best.seconds == graph.forward.flops + graph.backward.flops


def test_flops_of_triangular_solves() -> None:
    def solve(a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(a, b, upper=False)

    assert walked(solve, torch.eye(8).expand(3, 8, 8), torch.randn(3, 8, 5), fused=False).flops == 3 * 8 * 8 * 5


def test_flops_of_tiles() -> None:
    """FLOPs of the head do not change; a backward recomputes the first half of an MLP."""
    made = {}
    for tiles in ("never", 4):
        (graph,) = sp_compile.explain(Tiled(), torch.randn(1, 128, 16), sp=1, memory=True, tiles=tiles).step.graphs
        made[tiles] = graph.forward.flops + graph.backward.flops
    assert made[4] - made["never"] == 2 * 128 * 16 * 64


@pytest.mark.slow
def test_ranks_share_values_and_not_state() -> None:
    two, four = explained(2), explained(4)
    assert two.state == four.state
    assert 1.5 < two.saved / four.saved <= 2


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x)).cumsum(1)
        return self.last(h).pow(2).mean()


class Tiled(nn.Module):
    """An MLP and a head, which run in tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 512, bias=False)
        self.register_buffer("labels", torch.arange(128) * 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.down(F.silu(self.up(x))).cumsum(1)
        return F.cross_entropy(self.head(h).flatten(0, 1), self.labels)


@pytest.mark.parametrize(("make", "tiles"), [(Measured, "never"), (Tiled, 4)])
def test_a_single_device_step_to_the_byte(examples: None, make: type[nn.Module], tiles: str | int) -> None:
    """Memory of eager kernels is exact except for the initial gradient of autograd."""
    from peak_memory import peak_activation_bytes

    model, x = make(), torch.randn(1, 128, 16)
    step = sp_compile.explain(model, x, sp=1, memory=True, compiler="aot_eager", tiles=tiles).step
    assert step is not None
    torch.compiler.reset()
    run = torch.compile(model, backend="sp", options={"compiler": "aot_eager", "tiles": tiles})
    for _ in range(2):
        run(x).backward()
    measured = peak_activation_bytes(lambda: run(x).backward(), model.parameters(), gradients=True)
    assert abs(step.values - measured) <= 8


def test_state_of_an_optimizer_needs_memory() -> None:
    with pytest.raises(SpError, match="SP714"):
        sp_compile.explain(seeded(Decoder), tokens(8), sp=2, optimizer=torch.optim.SGD)


def test_memory_is_a_question_and_no_size() -> None:
    """`plan` takes a size of that name."""
    with pytest.raises(sp_compile.SpError, match=r"SP713.*'80GB'"):
        sp_compile.explain(seeded(Decoder), tokens(8), sp=2, memory="80GB")


def test_a_function_has_no_weights() -> None:
    assert ModelBytes.of(lambda x: x) == ModelBytes(0, 0, 0, 0)


def test_an_operand_without_a_value_takes_nothing() -> None:
    """A subgraph operand of an op has no value."""
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.mul.Tensor, (graph.get_attr("part"), graph.placeholder("x")))
    node.meta["val"] = torch.ones(4)
    assert _workspace_bytes(node, fused=False) == 0
