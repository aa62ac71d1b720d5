"""capture: the captured program, run by aot_eager, has the same effects on every value as eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.capturing import Backend, assert_same, compile_function, step
from support.programs.kinds import PROGRAMS, D, Model
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.capture.capture import capture, capture_export, fake_inputs

aten = torch.ops.aten
KEEPS_PRIVATE_MUTATION = {"no_functional_form"}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def mutations(gm: GraphModule) -> list[torch.fx.Node]:
    return [
        n
        for n in gm.graph.nodes
        if n.op == "call_function" and hasattr(n.target, "_schema") and n.target._schema.is_mutable
    ]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 8, D)
    model = Model(PROGRAMS[name])
    compiled = copy.deepcopy(model)
    backend = Backend()
    expected = step(model, model, x)
    assert_same(step(torch.compile(compiled, backend=backend), compiled, x), expected)
    assert backend.graphs
    if name not in KEEPS_PRIVATE_MUTATION:
        for graph in backend.graphs:
            changes = mutations(graph)
            assert all(n.target is aten.copy_.default and n.args[0].op == "placeholder" for n in changes)


def test_ops_are_not_decomposed_and_have_their_line() -> None:
    def f(q, w, labels):
        y = F.linear(F.scaled_dot_product_attention(q, q, q, is_causal=True), w)
        return F.cross_entropy(y.flatten(0, -2), labels)

    compiled, backend = compile_function(f)
    compiled(torch.randn(2, 2, 4, 8, requires_grad=True), torch.randn(5, 8), torch.zeros(16, dtype=torch.long))
    calls = [n for n in backend.graphs[0].graph.nodes if n.op == "call_function"]
    assert [n.target for n in calls] == [
        aten.scaled_dot_product_attention.default,
        aten.linear.default,
        aten.flatten.using_ints,
        aten.cross_entropy_loss.default,
    ]
    assert all(__file__ in n.meta["stack_trace"] for n in calls)


def clamp_without_grad(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    with torch.no_grad():
        y.clamp_(-1, 1)
    return y.sum()


def clamp_data(x: torch.Tensor) -> torch.Tensor:
    x.data.clamp_(-1, 1)
    return (x * x).sum()


def assign_data(x: torch.Tensor) -> torch.Tensor:
    x.data = torch.ones(4, 8)
    return (x * x).sum()


def change_unfolded(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(8)
    y.unfold(0, 2, 2).add_(1)
    return (x[0] * y).sum()


def change_strided(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.as_strided((2, 4), (16, 1), 8).zero_()
    return y.sum()


def read_strided(x: torch.Tensor) -> torch.Tensor:
    return x[:, 2:].as_strided((4, 2), (8, 1)).sum()


@pytest.mark.parametrize(
    ("f", "line", "code"),
    [
        (change_strided, "y.as_strided((2, 4), (16, 1), 8).zero_()", "SP225"),
        (read_strided, "x[:, 2:].as_strided((4, 2), (8, 1))", "SP228"),
        (clamp_without_grad, "y.clamp_(-1, 1)", "SP224"),
        (clamp_data, "x.data.clamp_(-1, 1)", "SP224"),
        (assign_data, "x.data = torch.ones(4, 8)", "SP223"),
        (change_unfolded, "y.unfold(0, 2, 2).add_(1)", "SP225"),
    ],
)
def test_error_of_a_view_or_write_names_the_line(f: Callable[..., Any], line: str, code: str) -> None:
    compiled, _ = compile_function(f)
    with pytest.raises(Exception, match=r"WriteError|CaptureError") as caught:
        compiled(torch.randn(4, 8, requires_grad=True))
    assert "test_capture.py:" in str(caught.value)
    assert line in str(caught.value)
    assert f"{code}: " in str(caught.value)


def test_advice_on_assignments_names_no_package() -> None:
    compiled, _ = compile_function(assign_data)
    with pytest.raises(Exception, match=r"SP223.*x\.copy_\(y\)") as caught:
        compiled(torch.randn(4, 8, requires_grad=True))
    assert "bitsandbytes" not in str(caught.value)


def test_refuses_a_changed_input_that_overlaps_another() -> None:
    def f(x, y):
        x.add_(1)
        return x.sum() + y.sum()

    compiled, _ = compile_function(f)
    x = torch.zeros(4, 4)
    with pytest.raises(Exception, match=r"SP221.* the input l_y_"):
        compiled(x, x[0])
    assert compiled(x, x[0].clone()) == 16


def test_capture_needs_a_running_compilation() -> None:
    with pytest.raises(SpError, match="SP203"):
        capture(torch.fx.symbolic_trace(lambda x: x.sin()), [torch.ones(1)])


# ---- models, sizes, exported programs


def tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))
        model.loss_type = "ForCausalLM"  # else its loss logs a warning, at which Dynamo breaks the graph
        return model
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_language_model_with_a_dynamic_sequence(name: str) -> None:
    model = tiny(name)
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    for length in (12, 17):
        ids = torch.randint(0, 64, (2, length))
        torch._dynamo.mark_dynamic(ids, 1)
        outcomes = []
        for run in (model, compiled):
            model.zero_grad()
            torch.manual_seed(1)
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            outcomes.append([loss, *(p.grad for p in model.parameters())])
        assert_same(outcomes[1], outcomes[0])
    assert len(backend.graphs) == 1


def test_capture_for_another_size() -> None:
    shapes = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        mode, fakes = fake_inputs(example_inputs)
        with mode:
            fakes = [torch.empty(2, 6, D) if isinstance(f, torch.Tensor) else f for f in fakes]
        wider = capture(gm, example_inputs, fakes=fakes)
        shapes.extend(n.meta["val"].shape for n in wider.graph.nodes if n.op == "call_function")
        return gm.forward

    torch.compile(lambda x: x.view(2, -1), backend=backend)(torch.randn(2, 3, D))
    assert shapes == [(2, 6 * D)]


def test_unsupported_ops_name_the_line() -> None:
    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        mode, fakes = fake_inputs(example_inputs)
        with mode, pytest.raises(SpError, match=r"SP211.*matmul .*test_capture.py:\d+: return x @ w"):
            capture(gm, example_inputs, fakes=[torch.empty(2, 3) for _ in fakes])
        return gm.forward

    def f(x, w):
        return x @ w

    torch.compile(f, backend=backend)(torch.ones(2, 3), torch.ones(3, 2))


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.bn = nn.Linear(D, D), nn.Linear(D, D), nn.BatchNorm1d(D)
        self.two.weight = self.one.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.count.add_(1)
        with torch.no_grad():
            t = self.one(x).pow(2)
        with torch.autocast("cpu", torch.bfloat16):
            u = self.two(x)
        y = self.two(self.one(x))
        y.mul_(2)
        y[:, :2] = 0
        y = self.bn(y.flatten(0, 1)).view_as(y)
        return {"loss": (y * t + u.float() * scale["k"]).sum() * self.count, "y": [y]}


class Literal(nn.Module):
    """Numbers that the program writes down, and changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.tensor([1, 2])
        at[0] = 3
        return x[:, at]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_literal_is_new_in_each_call(strict: bool) -> None:
    x = torch.randn(2, 6)
    captured = capture_export(torch.export.export(Literal(), (x,), strict=strict))
    for _ in range(2):
        assert_same(captured(x), Literal()(x))


@pytest.mark.parametrize("as_module", [False, True])
def test_exported_program(as_module: bool) -> None:
    model = Exported()
    x, scale = torch.randn(2, 6, D), {"k": torch.tensor(2.0)}
    sequence = torch.export.Dim("sequence", min=4, max=64)
    shapes = {"x": {1: sequence}, "scale": {"k": None}}
    program = torch.export.export(copy.deepcopy(model), (x,), {"scale": scale}, dynamic_shapes=shapes)
    given = program.module() if as_module else program
    before = str(given.graph)
    captured = capture_export(given)
    assert str(given.graph) == before
    assert all("val" in n.meta for n in captured.graph.nodes)
    assert not captured.graph.find_nodes(op="call_module")
    assert {n.target for n in mutations(captured)} == {aten.copy_.default}
    for length in (6, 9):
        x = torch.randn(2, length, D)
        outcomes = []
        for run in (model, captured):
            run.zero_grad()
            loss, y = (out := run(x, scale=scale))["loss"], out["y"][0]
            loss.backward()
            grads = {k: p.grad for k, p in run.named_parameters() if k != "one.weight" and k != "two.weight"}
            state = dict(run.named_buffers())
            tensors = [grads[k] for k in sorted(grads)] + [state["count"], state["bn.running_mean"]]
            outcomes.append([loss, y, *tensors])
        assert_same(outcomes[1], outcomes[0])
    assert len(list(captured.parameters())) == len(list(model.parameters()))


class HookedLate(nn.Module):
    """A hook on a value that has been used already sees the gradient of that use, too; one on an input as well."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input = of_input

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.of_input else x.sin()
        before = y.cumsum(1)
        y.register_hook(lambda gradient: gradient * 0.5)
        return (before * 3 + y.cos()).square().sum()


@pytest.mark.parametrize("of_input", [False, True])
def test_a_hook_gets_the_complete_gradient(of_input: bool) -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(1, 6, 4).requires_grad_()
    for ranks in (1, 2):
        torch._dynamo.reset()
        assert sp_compile.verify(HookedLate(of_input), x, sp=ranks, seq_dims={"x": 1}).worst < 1e-12


class HookedWithoutGradients(nn.Module):
    """A hook of a value outside that is registered under no_grad, as one that only looks is."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        with torch.no_grad():
            y.register_hook(lambda gradient: gradient * 0.5)
        return y.cumsum(1)


class HookedForNothing(nn.Module):
    """A view of a leaf under no_grad has requires_grad set, but passes no gradient on."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            view = x.expand(2, *x.shape[1:])
        largest = view.amax(2, keepdim=True)
        if largest.requires_grad:
            largest.register_hook(lambda gradient: gradient * 0.5)
        return (view - largest).exp() + x.cumsum(1)


@pytest.mark.parametrize("model", [HookedWithoutGradients(), HookedForNothing()])
def test_hooks_and_regions_without_gradients(model: nn.Module) -> None:
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 6, 4).requires_grad_()
    assert sp_compile.verify(model, x, sp=2, seq_dims={"x": 1}).worst < 1e-12


class FloatProduct(torch.autograd.Function):
    """x @ w as a float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


def multiply_disabled(h: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return h.float() @ w


# (x @ w in bfloat16, x, w) -> values inside of a region of autocast
CAST: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a copy in another dtype": lambda h, x, w: (h, h.float()),
    "a write to a copy in another dtype": lambda h, x, w: (h.float().mul_(3), h * 1),
    "a write to an alias": lambda h, x, w: (h.to(torch.bfloat16).mul_(2), h * 1),
    "writes of float32": lambda h, x, w: (h.add_(x), torch.zeros_like(h).add_(x), h.new_zeros(4, 8).copy_(x)),
    "a write to float32": lambda h, x, w: torch.zeros(4, 8).copy_(h) / 3,
    "a vmap": lambda h, x, w: torch.vmap(lambda row: (row.float() * 3).cumsum(0))(h),
    "a vmap without autocast": lambda h, x, w: torch.vmap(lambda row: multiply_disabled(row, w))(h),
    "a function": lambda h, x, w: FloatProduct.apply(x, w),
    "a region without autocast": lambda h, x, w: (multiply_disabled(h, w), multiply_disabled(h, w) @ w),
}


@pytest.mark.parametrize("name", CAST)
def test_values_in_an_autocast_region_have_the_dtypes_of_the_run(name: str) -> None:
    def run(x: Tensor, w: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            results = CAST[name](x @ w, x, w)
        return list(results) if isinstance(results, tuple) else [results]

    outcomes = []
    for f in (run, torch.compile(run, backend=Backend())):
        inputs = [torch.linspace(-1, 1, 4 * 8).view(4, 8), torch.linspace(-2, 1, 64).view(8, 8)]
        results = f(*(x.requires_grad_() for x in inputs))
        sum(x.float().pow(2).sum() for x in results).backward()
        outcomes.append([*results, *(x.grad for x in inputs)])
    for expected, got in zip(*outcomes, strict=True):
        assert expected.dtype == got.dtype
        assert (expected - got).abs().max() <= 1e-2 * expected.abs().max()
