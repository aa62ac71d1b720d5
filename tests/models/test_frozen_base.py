"""A frozen base in quantized weights under adapters that are trained (QLoRA), on real ranks against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks as worker
from support.parity import VOCAB, Outcome, against_eager, check, compile_options, outcome, sp, text, train_step
from support.ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters

import sp_compile
from sp_compile.passes.capture.tensor_subclasses import MARK, Subclass, call_with_subclass

aten = torch.ops.aten


@torch.library.custom_op("sp_tests::dequantized", mutates_args=())
def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantize weights like an operator of a quantization library, for which no rule exists."""
    return codes.to(scale.dtype) * scale[:, None]


@dequantized.register_fake
def _(codes: Tensor, scale: Tensor) -> Tensor:
    return torch.empty(codes.shape, dtype=scale.dtype, device=codes.device)


class Int8(Tensor):
    """A weight that any op dequantizes on use, like torchao's."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Int8:
        made: Int8 = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Int8:
        return Int8(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return Int8(args[0].codes, args[0].scale)

        def dequantize(x: Int8) -> Tensor:
            return x.codes.to(x.scale.dtype) * x.scale[:, None]

        args, kwargs = torch.utils._pytree.tree_map_only(Int8, dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


class Codes(nn.Module):
    """8 bits a weight in a buffer, a scale a row."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.abs().amax(1) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (weight / scale[:, None]).round().to(torch.int8))

    def forward(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale[:, None]


class ByAnOp(Codes):
    """A frozen weight of int8 codes that a library's op dequantizes."""

    def forward(self) -> Tensor:
        return dequantized(self.codes, self.scale)


class BySubclass(Codes):
    """A frozen weight of int8 codes in a Tensor subclass."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.weight = nn.Parameter(Int8(self.codes, self.scale), requires_grad=False)

    def forward(self) -> Tensor:
        return self.weight


class Table(nn.Module):
    """4 bits a weight, two in a byte, which number the entries of a table; a scale for every 8 weights."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = weight.shape
        groups, table = weight.reshape(-1, 8), torch.linspace(-1, 1, 16, dtype=weight.dtype).pow(3)
        scale = groups.abs().amax(1, keepdim=True)
        codes = (groups / scale).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8).flatten()
        for name, value in {"table": table, "scale": scale, "codes": codes[::2] * 16 + codes[1::2]}.items():
            self.register_buffer(name, value)

    def forward(self) -> Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1).flatten()
        return (self.table[codes.int()].reshape(-1, 8) * self.scale).reshape(self.shape)


class Adapted(nn.Module):
    """A quantized linear with an adapter of rank 2."""

    def __init__(self, wide: int, base: Callable[[Tensor], nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base(torch.randn(wide, wide, dtype=torch.float64) / wide**0.5)
        self.down = nn.Parameter(torch.randn(2, wide, dtype=dtype))
        self.up = nn.Parameter(torch.randn(wide, 2, dtype=dtype) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base()) + F.linear(F.linear(x.to(self.down.dtype), self.down), self.up).to(x.dtype)


class Tuned(nn.Module):
    """Tokens in, a loss out; nothing but the adapters is trained."""

    def __init__(self, base: Callable[[Tensor], nn.Module], dtype: torch.dtype, wide: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, wide).double(), nn.Linear(wide, VOCAB).double()
        self.requires_grad_(False)
        self.inner, self.outer = Adapted(wide, base, dtype), Adapted(wide, base, dtype)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.outer(F.gelu(self.inner(x.cumsum(1))))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def tuned(base: Callable[[Tensor], nn.Module], dtype: torch.dtype) -> Outcome:
    torch.manual_seed(0)
    model = Tuned(base, dtype)
    return against_eager(model, *text(9), run=sp(model, mesh=worker.mesh()))


@pytest.mark.as_users_run(base=Codes)
@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("base", [BySubclass, Table, ByAnOp, Codes])
def test_adapters_of_a_frozen_base(ranks: Ranks, base: Callable[[Tensor], nn.Module]) -> None:
    check(ranks.run(2, tuned, base, torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("base", [BySubclass, Table])
def test_adapters_in_bf16(ranks: Ranks, base: Callable[[Tensor], nn.Module]) -> None:
    """Gradients of ranks are rounded to bfloat16 before their sum."""
    check(ranks.run(2, tuned, base, torch.bfloat16), tolerance=3e-2)


def test_a_linear_layer_of_keyword_arguments() -> None:
    x, w = torch.randn(2, 4), torch.randn(3, 4)
    subclass = Subclass("Int8", has_row_linear=True)
    setattr(w, MARK, subclass)
    found = call_with_subclass(torch.nn.functional.linear, (), {"input": x, "weight": w}, subclass)
    torch.testing.assert_close(found, x @ w.mT)


class Packed(nn.Module):
    """Adapters beside layers of bitsandbytes in 4 bits; the first layer's input has no gradient."""

    def __init__(self, nested: bool, kind: str, wide: int = 64) -> None:
        from bitsandbytes.nn import Linear4bit

        super().__init__()
        options = {"compute_dtype": torch.float32, "compress_statistics": nested, "quant_type": kind}
        self.bases = nn.ModuleList(Linear4bit(wide, wide, bias=kind == "fp4", **options) for _ in range(2))
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(wide, 2, bias=False), nn.Linear(2, wide, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        for base in self.bases:
            x = x.cumsum(1).tanh()
            x = base(x) + self.up(self.down(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).square().mean()


class PackedLayer(Packed):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PackedLayer(True, "nf4") for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def packed(nested: bool, kind: str) -> tuple[Packed, Tensor]:
    torch.manual_seed(0)
    return Packed(nested, kind).to("cpu"), torch.randn(2, 9, 64)


def tuned_packed(nested: bool, kind: str) -> Outcome:
    model, x = packed(nested, kind)
    return against_eager(model, x, run=sp(model, mesh=worker.mesh()))


PACKED = pytest.mark.parametrize(("nested", "kind"), [(True, "nf4"), (False, "fp4")])


@PACKED
def test_layers_in_4_bits_are_on_shards(nested: bool, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    model, x = packed(nested, kind)
    report = sp_compile.verify(model, x, sp=2)
    assert report.worst < 2e-6
    assert not report.fallbacks
    assert report.work.flops_share == 1


@pytest.mark.parametrize("kind", ["LinearNF4", "LinearFP4"])
def test_modules_named_like_a_function_of_torchao(kind: str) -> None:
    """torchao has an autograd.Function LinearNF4, which has a stand-in; this module is one of bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes")
    model, x = packed(True, "nf4")
    torch.manual_seed(0)
    layer = getattr(bnb.nn, kind)(64, 64, bias=False, compute_dtype=torch.float32).requires_grad_(False)
    model.bases[1] = layer.to("cpu")
    torch._dynamo.reset()
    counters.clear()
    report = sp_compile.verify(model, x, sp=2)
    assert report.worst < 2e-6
    assert not report.fallbacks
    assert report.work.flops_share == 1
    assert not counters["graph_break"]


@PACKED
@pytest.mark.sampled(every=2)
def test_layers_in_4_bits(ranks: Ranks, nested: bool, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    check(ranks.run(2, tuned_packed, nested, kind), tolerance=2e-6)


@PACKED
def test_a_gathered_layer_in_4_bits_is_in_one_graph(nested: bool, kind: str) -> None:
    """FSDP gathers a plain parameter, by which it replaces the weight with its state; the bias has another dtype."""
    pytest.importorskip("bitsandbytes")
    model, x = packed(nested, kind)
    expected, found = [], []
    for base in model.bases:
        if base.bias is not None:
            base.bias.data = base.bias.data.bfloat16()
        base.weight = nn.Parameter(base.weight.detach().as_subclass(Tensor), requires_grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="sp", fullgraph=True, options={"compiler": "aot_eager"})
    for run, results in ((compiled, found), (model, expected)):  # the latter changes the parameters
        model.zero_grad()
        loss = run(x)
        loss.backward()
        results += [loss.detach(), model.up.weight.grad, model.down.weight.grad]
    torch.testing.assert_close(found, expected)


def tuned_gathered() -> tuple[Outcome, list[str]]:
    torch.manual_seed(0)
    alone, x = Layered().to("cpu"), torch.randn(2, 9, 64)
    torch.manual_seed(0)
    model = Layered().to("cpu")
    expected = train_step(alone, alone, (x,))
    torch._dynamo.reset()
    counters.clear()
    run = sp_compile.fully_shard_and_compile(model, worker.mesh(), layers=[PackedLayer], **compile_options())
    loss, grads = train_step(run, model, (x,))
    breaks = [text for text in counters["graph_break"] if "Linear4bit" in text or "data" in text]
    return outcome(loss, [None if g is None else g.full_tensor() for g in grads], *expected), breaks  # type: ignore[attr-defined]


def test_layers_in_4_bits_that_fsdp_gathers(ranks: Ranks) -> None:
    pytest.importorskip("bitsandbytes")
    outcomes, breaks = zip(*ranks.run(2, tuned_gathered))
    check(outcomes, tolerance=2e-6)
    assert not any(breaks)
