"""Float8 and int8 training, and quantized frozen weights, of torchao: as on a single device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import Outcome, against_eager, check, outcome
from support.ranks import Ranks, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.capture.tensor_subclasses import MARK, mark_subclass

torchao = pytest.importorskip("torchao")

WIDTH, HEADS = 64, 4


class Attention(nn.Module):
    """A projection, causal attention and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.inner(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).square().mean()


class Layer(Attention):
    """A residual layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


class Layered(nn.Module):
    """A layer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Adapted(nn.Module):
    """LoRA beside a frozen NF4 weight, as in QLoRA."""

    def __init__(self, base: nn.Linear) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        self.weight = nn.Parameter(to_nf4(base.weight.detach(), 32, 2), requires_grad=False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight) + self.up(self.down(x))


def quantized(kind: str, make: Callable[[], nn.Module] = Attention) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype import quantized_training
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    model: Any = make()
    if kind == "int8":
        quantize_(model, quantized_training.int8_weight_only_quantized_training())
    elif kind in ("int8 products", "int8 class"):
        config = quantized_training.Int8MixedPrecisionTrainingConfig(module_swap=kind == "int8 products")
        quantize_(model, config)
    elif kind == "frozen int8":
        quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name in ("qkv", "out"))
        for layer in (model.qkv, model.out):
            layer.weight.requires_grad_(False)
    elif kind == "nf4":
        for layer in model.modules():
            if isinstance(layer, Attention):
                layer.qkv, layer.out = Adapted(layer.qkv), Adapted(layer.out)
    elif kind == "gathered in float8":
        convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    else:
        config = Float8LinearConfig.from_recipe_name(kind)
        convert_to_float8_training(model, config=dataclasses.replace(config, emulate=True))
    return model


def rows(length: int) -> Tensor:
    """(2, length, WIDTH), with the largest values in one row, which is of one rank."""
    torch.manual_seed(1)
    x = torch.randn(2, length, WIDTH)
    x[:, length // 3] *= 8
    return x


FLOAT8 = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
INT8 = ["int8", "frozen int8", "int8 products", "int8 class"]
ROUNDING = 2e-6  # float32: another order of sums


@pytest.mark.parametrize("kind", [*FLOAT8, *INT8])
@pytest.mark.sampled(every=3)
def test_linears_are_on_shards(kind: str) -> None:
    report = sp_compile.verify(quantized(kind), rows(33), sp=2 if kind in FLOAT8[1:] else 3)
    assert report.worst < ROUNDING
    assert not report.fallbacks
    assert report.work.flops_share == 1


@pytest.mark.parametrize("kind", ["tensorwise", "int8 products"])
def test_scales_are_of_all_ranks(kind: str) -> None:
    """The largest values of one rank set the scale of the others: without their exchange the results differ."""
    report = sp_compile.explain(quantized(kind), rows(33), sp=2)
    assert report.count("extreme") == 3


@pytest.mark.parametrize(("granularity", "is_split"), [("PerTensor", False), ("PerRow", True)])
def test_scales_of_inputs(granularity: str, is_split: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A frozen layer that casts its input by one scale of all rows runs whole, unless it stores the scale."""
    from torchao import quantization

    model, x = Attention(), rows(33)
    config = quantization.Int8DynamicActivationInt8WeightConfig(granularity=getattr(quantization, granularity)())
    quantization.quantize_(model, config, filter_fn=lambda _, name: name in ("qkv", "out"))
    with torch.no_grad():
        expected = model(x)
        found = torch.compile(model, backend="sp", options={"compiler": "aot_eager", "cost": {}})(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    assert ("SP229" in caplog.text) != is_split


@pytest.mark.parametrize(("dim", "is_scaled"), [(-1, False), (0, True), (None, False)])
def test_scales_over_rows(dim: int | None, is_scaled: bool) -> None:
    """`PerRow(dim=0)` has a scale for each column, of all rows."""
    from torchao.quantization import Float8Tensor
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    settings = None if dim is None else QuantizeTensorToFloat8Kwargs(granularity=PerRow(dim=dim))
    weight = Float8Tensor.from_hp(torch.randn(WIDTH, WIDTH), act_quant_kwargs=settings)
    mark = getattr(mark_subclass(torch.empty(WIDTH, WIDTH), weight), MARK)
    assert mark.has_row_linear
    assert mark.is_scaled_by_all_rows == is_scaled


def test_an_observer_reads_all_rows() -> None:
    from torchao.prototype.gptq.observer import GPTQObserverTensor

    weight = GPTQObserverTensor.from_hp(torch.randn(WIDTH, WIDTH))
    assert not getattr(mark_subclass(torch.empty(WIDTH, WIDTH), weight), MARK).has_row_linear


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_class_that_may_read_all_rows_runs_whole(recipe: str) -> None:
    """This class computes float8 products in F.linear, tensorwise with scales of all rows; half of them are large."""
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(1, 64, WIDTH)
    config = Float8TrainingOpConfig(out_dtype=torch.float32, float8_linear_recipe=recipe)
    for layer in (model.qkv, model.out):
        layer.weight = nn.Parameter(Float8TrainingWeightWrapperTensor(layer.weight.detach(), config))
    x[:, :32] *= 100
    report = sp_compile.verify(model, x.requires_grad_(), sp=2)
    assert report.worst < ROUNDING
    assert report.fallbacks


def _compare_all(kinds: list[str]) -> list[Outcome]:
    outcomes = []
    for kind in kinds:
        torch.compiler.reset()
        outcomes.append(_compare(quantized(kind), rows(33)))
    return outcomes


def _compare(model: nn.Module, x: Tensor) -> Outcome:
    """Compare a step with eager code; NF4 weights are shared, since torchao copies them by another quantization."""
    memo = {id(p): p for p in model.parameters() if not p.requires_grad}
    alone = copy.deepcopy(model, memo)
    expected = alone(x)
    expected.backward()
    run = torch.compile(model, backend="sp", options={"compiler": "aot_eager", "cost": {}, "mesh": mesh()})
    found = run(x)
    found.backward()
    grads = [[p.grad for p in one.parameters() if p.requires_grad] for one in (model, alone)]
    return outcome(found, grads[0], expected, grads[1])


@pytest.mark.parametrize(
    "kinds",
    [["tensorwise", "int8 products"], pytest.param(["rowwise", "nf4", "int8", "int8 class"], marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_real_ranks(ranks: Ranks, kinds: list[str]) -> None:
    for outcomes in zip(*ranks.run(2, _compare_all, kinds)):
        check(outcomes, ROUNDING)


def _compare_sharded(kinds: list[str]) -> list[Outcome]:
    outcomes = []
    for kind in kinds:
        torch.compiler.reset()
        single, model = (quantized(kind, Layered) for _ in range(2))
        expected = single(rows(33))
        expected.backward()
        sp_compile.fully_shard_and_compile(model, mesh(), layers=[Layer], compiler="aot_eager", cost={})
        found = model(rows(33))
        found.backward()
        grads = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
        outcomes.append(outcome(found, grads, expected, [p.grad for p in single.parameters() if p.requires_grad]))
    return outcomes


@pytest.mark.parametrize(
    "kinds",
    [["gathered in float8"], pytest.param(["rowwise", "nf4", "int8", "int8 products"], marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_sharded_weights(ranks: Ranks, kinds: list[str]) -> None:
    """FSDP gathers weights of these classes in low precision."""
    for outcomes in zip(*ranks.run(2, _compare_sharded, kinds)):
        check(outcomes, ROUNDING)


class Scaled(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.out.weight * 1.0).sum()


class Detached(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.out.weight.detach()).sum()


@pytest.mark.parametrize("other", [Scaled, Detached])
def test_other_calls_with_a_quantized_weight_run_whole(
    other: type[Attention], caplog: pytest.LogCaptureFixture
) -> None:
    """A call that is no linear layer is named, and the program runs as it is written."""
    model = quantized("int8")
    model.__class__ = other
    run = torch.compile(model, backend="sp", options={"compiler": "aot_eager"})
    check([against_eager(model, rows(32), run=run)], ROUNDING)
    assert "SP229" in caplog.text
    assert "Int8QuantizedTrainingLinearWeight" in caplog.text


def test_a_trained_weight_without_views_runs_whole(caplog: pytest.LogCaptureFixture) -> None:
    """FSDP gathers weights of BitNet as such a class."""
    from torchao.prototype.quantized_training.bitnet import BitNetPacked2bitLinearWeight

    model = Attention()
    codes = torch.randint(-128, 128, (WIDTH, WIDTH // 4), dtype=torch.int8)
    model.out.weight = nn.Parameter(BitNetPacked2bitLinearWeight(codes, torch.tensor(0.1)))
    run = torch.compile(model, backend="sp", options={"compiler": "aot_eager", "cost": {}})
    torch.testing.assert_close(run(rows(33)), model(rows(33)))
    assert "SP229" in caplog.text
