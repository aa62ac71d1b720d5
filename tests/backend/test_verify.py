"""verify: all results and mutations of a graph are compared, and the report names graphs without a comparison."""

import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.testing._internal.distributed.fake_pg import FakeStore

import sp_compile

aten = torch.ops.aten


class Counting(nn.Module):
    """Attention, a buffer that is written, and results of two dims."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x):
        self.calls.add_(1)
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2).mean(0) * self.kept.sum()


def unwritten(graph, output, x, kept):
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        graph.erase_node(copy)


def overwritten(graph, output, x, kept):
    graph.call_function(aten.fill_.Scalar, (kept, 2.0))


def scribbled(graph, output, x, kept):
    graph.call_function(aten.mul_.Tensor, (graph.call_function(aten.detach.default, (x,)), 2))


def result(*calls):
    """An edit by which each rank returns its result as these operators make it."""

    def edit(graph, output, x, kept):
        (value,) = output.args[0]
        for op, *args in calls:
            value = graph.call_function(op, (value, *args))
        output.args = ((value,),)

    return edit


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (unwritten, r"mutated input \w*calls\w*"),
        (overwritten, r"mutated input \w*kept\w*"),
        (scribbled, r"mutated input \w*x\w*"),
        (result((aten.to.dtype, torch.float32)), r"result 0: .*float32.*, .*float64.*"),
        (result((aten.unsqueeze.default, 0)), r"result 0: .*\(1, 6, 8\).*, .*\(6, 8\).*"),
        (result((aten.add.Tensor, 1)), "result 0"),
    ],
)
def test_verify_compares_all_that_a_graph_gives_and_writes(monkeypatch, edit, named):
    lowering = sys.modules["sp_compile.backend"]
    plain = lowering.lower

    def lower(*args):
        lowered = plain(*args)
        graph = lowered.graph.graph
        inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        (kept,), (x,) = ([node for name, node in inputs.items() if part in name] for part in ("kept", "x"))
        with graph.inserting_before(graph.output_node()):
            edit(graph, graph.output_node(), x, kept)
        lowered.graph.recompile()
        return lowered

    x = torch.randn(2, 6, 8).double()
    assert sp_compile.verify(Counting().double(), x, sp=2).worst < 1e-12
    monkeypatch.setattr(lowering, "lower", lower)
    report = sp_compile.verify(Counting().double(), x, sp=2)
    wrong = [name for name, error in report.errors if error > 1e-3]
    assert any(re.fullmatch(named, name) for name in wrong), report.errors
    assert len(wrong) == 1 or edit is scribbled


@torch.compiler.disable
def hidden(x):
    return x + 1


class Hidden(nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return x + 1


class Half(Counting):
    def forward(self, x):
        return super().forward(hidden(x))


@pytest.mark.parametrize("entry", [sp_compile.explain, sp_compile.verify])
@pytest.mark.parametrize("model", [Hidden(), nn.Identity(), lambda x: 3])
def test_there_is_nothing_to_compile(entry, model):
    with pytest.raises(sp_compile.SpError, match=f"SP201: {entry.__name__}"):
        entry(model, torch.randn(2, 6, 8), sp=2)
    report = entry(Half(), torch.randn(2, 6, 8), sp=2)
    assert (report.n, len(report.inputs)) == (2, 1), "what is left is compiled"


class Alone(nn.Module):
    """A program with process groups of its own, which are not simulated."""

    def forward(self, x):
        return all_reduce(x.sin(), "sum", "0").cos()


def test_a_program_of_its_own_groups_is_not_compared():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        with pytest.raises(sp_compile.SpError, match="SP716"):
            sp_compile.verify(Alone(), torch.randn(2, 6, 8), sp=2)
    finally:
        dist.destroy_process_group()


def test_a_compiler_is_refused_where_nothing_is_compiled():
    x = torch.randn(2, 6, 8)
    for entry, compiler in ((sp_compile.explain, "eager"), (sp_compile.verify, "aot_eager")):
        with pytest.raises(sp_compile.SpError, match=f"SP109: compiler='{compiler}': {entry.__name__}"):
            entry(Counting(), x, sp=2, compiler=compiler)
    assert sp_compile.explain(Counting(), x, sp=2, compiler="inductor").n == 2, "the default"


@pytest.mark.parametrize("attention", ["ulysses", "ring", "gather", "hybrid"])
def test_attention_results_have_single_device_strides(attention):
    """A view after a graph break relies on these strides."""

    def heads(x):
        q = (x * 2).unflatten(-1, (4, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q)

    x = torch.randn(2, 6, 8, dtype=torch.float64)
    assert sp_compile.verify(heads, x, sp=4, attention=attention).worst < 1e-12


def test_nothing_is_compared_on_the_meta_device() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.zeros(1, 8, 4)
    for args in ((model, x), (model, torch.zeros(1, 8, 4)), (lambda y: y.cumsum(1), x)):
        with pytest.raises(sp_compile.SpError, match="SP715"):
            sp_compile.verify(*args, sp=2)


class Projected(nn.Module):
    """Attention and a product, whose result has the dtype of the surrounding autocast region."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


def test_ranks_run_in_the_autocast_of_the_caller():
    """Threads of ranks start without autocast, so a bfloat16 result would have another dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        found = sp_compile.verify(Projected(), torch.randn(2, 8, 8), sp=2)
    assert found.worst < 0.1


class HalfInside(Projected):
    """A product under its own autocast, whose sums outside have more precision than its dtype."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            z = super().forward(x)
        return self.loss(z)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: (z + 9).mean(),
        lambda z: F.mse_loss(z, torch.full_like(z, 4)),
        lambda z: F.cross_entropy(z.flatten(0, 1), torch.arange(2048) % 8),
    ],
    ids=["mean", "squares", "classes"],
)
@pytest.mark.parametrize("tiles", ["never", 3])
def test_means_of_half_types_that_autocast_makes(loss, tiles):
    """They are sums in float32, and of the dtype that one device gives."""
    torch.manual_seed(0)
    found = sp_compile.verify(HalfInside(loss), torch.randn(1, 2048, 8), sp=2, tiles=tiles)
    assert found.worst < 1e-2


def test_gradients_that_are_zero_up_to_rounding_are_no_errors():
    """A norm after it cancels the bias of a convolution, so that its gradient is a sum of rounding errors."""

    class Normalized(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)

        def forward(self, x):
            return self.norm(self.conv(x.transpose(1, 2))).sin()

    torch.manual_seed(0)
    report = sp_compile.verify(Normalized(), torch.randn(4, 61, 8), sp=4, seq_dims={"x": 1})
    assert "gradient of conv.bias" in dict(report.errors)
    assert report.worst < 1e-4
