"""Functions of the flash_attn package, replaced by reference code: their rewritten ops, and single-device results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from support.attention import flash_package
from support.attention.flash_package import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from support.attention.flexible import canonical
from support.attention.score_texts import score_of
from support.golden import show
from support.models import check
from torch import Tensor, nn

from sp_compile import verify
from sp_compile.passes.cost.decision import merge_decisions
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.attention_axes import attention_nodes

LENGTH, WIDTH, HEADS = 13, 16, 4
ENDS = torch.tensor([0, 4, 5, 5, 11, LENGTH], dtype=torch.int32)
FEWER = torch.tensor([0, 3, 5, 7, 9, 11], dtype=torch.int32)
"""Of keys, for documents that are shorter or longer than those of the queries."""
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """(2, S, WIDTH) -> the same. attend: of q (2, S, HEADS, D) and of k and v with `key_heads`."""

    def __init__(self, attend: Attend, key_heads: int = HEADS, head: int = 8) -> None:
        super().__init__()
        self.attend, self.key_heads = attend, key_heads
        self.before = nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, HEADS * head), nn.Linear(WIDTH, 2 * key_heads * head)
        self.out = nn.Linear(HEADS * head, WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = self.before(x)
        q = self.q(y).unflatten(-1, (HEADS, -1))
        k, v = self.kv(y if context is None else context).unflatten(-1, (self.key_heads, -1)).chunk(2, -1)
        return x + self.out(self.attend(q, k, v).flatten(-2))


def build(attend: Attend, **sizes: int) -> Model:
    torch.manual_seed(0)
    return Model(attend, **sizes).double()


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[-2]))


CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (3, 3)},
    "both sides": {"window_size": (2, 1)},
    "soft-cap": {"causal": True, "softcap": 1.5},
    "slopes": {"causal": True, "alibi_slopes": SLOPES},
    "all of it": {"window_size": (5, 2), "softcap": 1.5, "alibi_slopes": SLOPES, "softmax_scale": 0.3},
}
WAYS = [(strategy, ranks) for strategy in ("ulysses", "ring", "hybrid", "gather") for ranks in (1, 2, 3, 4)]
UNFIT = [("ulysses", 3), ("hybrid", 2), ("hybrid", 3)]


def run(case: str, strategy: str, ranks: int, length: int = LENGTH, **sizes: int) -> None:
    model = build(lambda q, k, v: flash_attn_func(q, k, v, **CASES[case]), **sizes)
    assert not check(model, floats(2, length, WIDTH), sp=ranks, attention=strategy).fallbacks


@pytest.mark.sampled(every=47)
@pytest.mark.parametrize(("strategy", "ranks"), [way for way in WAYS if way not in UNFIT])
@pytest.mark.parametrize("case", CASES)
def test_one_device(case: str, strategy: str, ranks: int) -> None:
    run(case, strategy, ranks)
    run(case, strategy, ranks, length=12, key_heads=2)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("case", ["causal", "all of it"])
def test_heads_that_it_pads(case: str) -> None:
    """Heads padded to a multiple of 8 for the kernels use the scale of the width before padding."""
    run(case, "ring", 2, head=6)


@pytest.mark.parametrize("case", ["window", pytest.param("both sides", marks=pytest.mark.slow)])
def test_other_keys_count_from_the_last(case: str) -> None:
    model = build(lambda q, k, v: flash_attn_func(q, k, v, **CASES[case]))
    assert not check(model, floats(2, 9, WIDTH), floats(2, LENGTH, WIDTH), sp=2, attention="ring").fallbacks


def test_one_tensor_of_all_three() -> None:
    """Its forward detaches the parts, and its backward has their gradients all the same."""
    model = build(lambda q, k, v: flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True))
    assert not check(model, floats(2, LENGTH, WIDTH), sp=2, attention="ulysses").fallbacks


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "gather"])
@pytest.mark.parametrize("case", ["all", "causal", "window", "soft-cap"])
@pytest.mark.parametrize("ends", ["the same", "others"])
def test_documents(ends: str, case: str, strategy: str) -> None:
    """Ends of queries and of keys are two tensors: torch breaks the graph at a Function that is given one twice."""
    k_ends = ENDS.clone() if ends == "the same" else FEWER
    context = () if ends == "the same" else (floats(11, WIDTH),)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, ENDS, k_ends, LENGTH, LENGTH, **CASES[case])

    assert not check(build(attend), floats(LENGTH, WIDTH), *context, sp=2, attention=strategy).fallbacks


def test_without_gradients_it_is_the_kernel_alone() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_package.ops._flash_attn_forward(q, k, v, 0.0, 0.3, True, -1, -1, 0.0, None, False)[0]

    graph, _ = canonical(lambda x: attend(*x), floats(3, 1, LENGTH, 4, 8))
    (node,) = attention_nodes(graph)
    assert OpCall(node)["is_causal"]


def test_one_kernel_with_documents_and_without() -> None:
    """FlashAttention-3's."""

    def attend(x: Tensor, q_ends: Tensor | None, k_ends: Tensor | None) -> Tensor:
        return flash_package.ops_3._flash_attn_forward(*x, q_ends, k_ends, 0.3, True)[0]

    x = floats(3, LENGTH, 4, 8)
    graph, _ = canonical(attend, x, ENDS, ENDS)
    (node,) = attention_nodes(graph)
    assert OpCall(node)["predicate"] == "Eq(row0, col0) & (k <= q)"
    (found,) = graph(x, ENDS)
    torch.testing.assert_close(found, attend(x, ENDS, ENDS), rtol=1e-9, atol=1e-9)
    graph, (note,) = canonical(attend, x, ENDS, None)
    assert not attention_nodes(graph)
    assert note.label == "not replace_flash_functions"


def test_slopes_of_documents() -> None:
    """If both end tensors are equal, distances within a document equal differences of positions."""

    graph, _ = canonical(lambda x, ends: _with_slopes(x, ends, ends), floats(3, LENGTH, 4, 8), ENDS)
    (node,) = attention_nodes(graph)
    assert OpCall(node)["predicate"] == "Eq(row0, col0) & (k <= q)"
    assert OpCall(node)["score"] == score_of("s - head0*Abs(q - k)")
    graph, (note,) = canonical(_with_slopes, floats(3, LENGTH, 4, 8), ENDS, FEWER)
    assert not attention_nodes(graph)
    assert note.label == "not replace_flash_functions"


def _with_slopes(x: Tensor, ends: Tensor, k_ends: Tensor) -> Tensor:
    given = *x, ends, k_ends, LENGTH, LENGTH, 0.0, 0.3, True
    return flash_package.ops._flash_attn_varlen_forward(*given, alibi_slopes=SLOPES)[0]


Stays = Callable[[Tensor, Tensor, Tensor], Any]


class OneWay(torch.autograd.Function):
    """Keys have no gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return flash_package.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        dq, _, dv = flash_package.backward(ctx, dout)
        return dq, None, dv, *[None] * 8


class Doubled(torch.autograd.Function):
    """The gradient of twice the result."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return flash_package.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return *flash_package.backward(ctx, 2 * dout), *[None] * 8


OPTIONS = (0.0, None, True, (-1, -1), 0.0, None, False)
STAY: dict[str, Stays] = {
    "no gradient": lambda *qkv: OneWay.apply(*qkv, *OPTIONS, False),
    "computes besides": lambda *qkv: Doubled.apply(*qkv, *OPTIONS, False),
    "log-sum-exp is read": lambda *qkv: flash_attn_func(*qkv, return_attn_probs=True)[1],
    "both": lambda *qkv: flash_attn_func(*qkv, return_attn_probs=True)[:2],
    "slopes of batch entries": lambda *qkv: flash_attn_func(*qkv, alibi_slopes=SLOPES.expand(2, 4)),
}


@pytest.mark.parametrize("case", STAY)
def test_unmatched_calls_are_reported(case: str) -> None:
    qkv = [floats(2, LENGTH, 4, 8).requires_grad_() for _ in range(3)]
    graph, (note,) = canonical(STAY[case], *qkv)
    assert not attention_nodes(graph)
    assert note.label == "not replace_flash_functions"


class TestFlashGraph(expecttest.TestCase):
    def test_window(self) -> None:
        qkv = [floats(2, LENGTH, heads, 6).requires_grad_() for heads in (4, 2, 2)]
        graph, _ = canonical(lambda *qkv: flash_attn_func(*qkv, causal=True, window_size=(3, 3), softcap=30.0), *qkv)
        self.assertExpectedInline(
            show(graph),
            """\
l_qkv_0_: [2, 13, 4, 6] = placeholder
l_qkv_1_: [2, 13, 2, 6] = placeholder
l_qkv_2_: [2, 13, 2, 6] = placeholder
pad_default: [2, 13, 4, 8] = aten.pad(l_qkv_0_, [0, 2])
pad_default_1: [2, 13, 2, 8] = aten.pad(l_qkv_1_, [0, 2])
pad_default_2: [2, 13, 2, 8] = aten.pad(l_qkv_2_, [0, 2])
transpose_int: [2, 4, 13, 8] = aten.transpose.int(pad_default, 1, 2)
transpose_int_1: [2, 2, 13, 8] = aten.transpose.int(pad_default_1, 1, 2)
transpose_int_2: [2, 2, 13, 8] = aten.transpose.int(pad_default_2, 1, 2)
masked_attention_default: [2, 4, 13, 8] = sp.masked_attention(transpose_int, transpose_int_1, transpose_int_2, [], [], [], (k <= q) & (q - k <= 3), 0.0, 0.408248290463863, True, score=(tanh((s * 0.03333333333333333)) * 30.0))
transpose_int_3: [2, 13, 4, 8] = aten.transpose.int(masked_attention_default, 1, 2)
slice_tensor: [2, 13, 4, 6] = aten.slice.Tensor(transpose_int_3, 3, 0, 6)
return (slice_tensor,)""",
        )


@pytest.mark.slow
def test_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """attn_implementation="flash_attention_2", with its package there: no code of the model is other than it was."""
    import transformers
    from transformers import modeling_flash_attention_utils as utils

    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda *_: True)
    for name, module in {"flash_attn": flash_package, "flash_attn.bert_padding": flash_package}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("pad_input", "unpad_input", "flash_attn_with_kvcache"):
        monkeypatch.setattr(flash_package, name, None, raising=False)
    utils.lazy_import_flash_attention("flash_attention_2")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "sliding_window": 5}
    torch.manual_seed(0)
    config = transformers.MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = transformers.MistralForCausalLM(config).double()
    model.config._attn_implementation = "flash_attention_2"
    ids = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    report = verify(model, ids, kwargs={"labels": ids}, sp=2, attention="ring")
    assert report.worst <= 1e-6  # transformers computes the loss in float32
    assert not report.fallbacks
    (decision,) = merge_decisions(report.attention)
    shape = decision.shape
    assert (decision.nodes, shape.batch, shape.heads, shape.kv_heads, shape.head_dim) == (2, 2, 4, 2, 8)
    assert (shape.q_len, shape.causal, shape.window) == (LENGTH, True, 5)
    assert str(decision) in str(report)
