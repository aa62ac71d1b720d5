"""The masks that transformers builds, in graphs as they are captured: recognized, and never S x S."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention.score_texts import score_of
from support.capturing import Backend
from torch import Tensor

from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.sharding.attention_axes import ATTENTION

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, WINDOW = 2, 19, 6
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EVERY_SECOND = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 8, "sliding_window": WINDOW, "layer_types": EVERY_SECOND}),
    "gemma3": ("Gemma3", {**SIZES, "head_dim": 8, "sliding_window": WINDOW, "layer_types": EVERY_SECOND}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 8}),
    "phi": ("Phi", SIZES),
    "gpt-neox": ("GPTNeoX", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "gpt2": ("GPT2", {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
CAUSAL = "k <= q"
SLIDING = f"(k <= q) & (-k + q < {WINDOW})"
PADDED = {CAUSAL: "(k <= q) & Ne(col0, 0)", SLIDING: f"(k <= q) & Ne(col0, 0) & (-k + q < {WINDOW})"}
PACKED = {
    CAUSAL: "Eq(row0, col0) & (col1 <= row1)",
    SLIDING: f"Eq(row0, col0) & (col1 <= row1) & (-col1 + row1 < {WINDOW})",
}
SLIDES = {"mistral": [SLIDING, SLIDING], "gemma2": [SLIDING, CAUSAL], "gemma3": [SLIDING, CAUSAL]}


def decoder(name: str, attention: str) -> torch.nn.Module:
    transformers.logging.set_verbosity_error()
    family, sizes = CONFIGS[name]
    config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    model = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    made = getattr(transformers, config)(**sizes, attn_implementation=attention, use_cache=False)
    torch.manual_seed(0)
    return getattr(transformers, model)(made)


def masks(name: str, attention: str = "sdpa", dynamic: bool = False, **inputs: Tensor) -> list[str]:
    """The predicates of the model's attentions, after a check that nothing is S x S."""
    torch._dynamo.reset()
    backend = Backend(lambda gm, _: gm.forward)
    for tensor in inputs.values() if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 1)
    torch.compile(decoder(name, attention), backend=backend, fullgraph=True)(**inputs)
    torch._dynamo.reset()
    (gm,) = backend.graphs
    Canonicalize()(gm)
    length = next(n.meta["val"] for n in gm.graph.nodes if n.target in ATTENTION).shape[2]
    assert dynamic == isinstance(length, torch.SymInt)
    large = [n.name for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor) and _is_square(n, length)]
    assert not large
    return [_predicate(n) for n in gm.graph.nodes if n.target in ATTENTION]


def _is_square(node: torch.fx.Node, length: Any) -> bool:
    return [str(s) for s in node.meta["val"].shape].count(str(length)) > 1


def _predicate(node: torch.fx.Node) -> str:
    if node.target is torch.ops.sp.masked_attention.default:
        return str(node.args[6])
    return CAUSAL if node.kwargs.get("is_causal") or True in node.args[5:6] else str(node.args[3])


def inputs(*names: str) -> dict[str, Tensor]:
    padding = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    padding[1, -5:] = 0
    half = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])
    every = {
        "input_ids": torch.randint(48, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)),
        "attention_mask": padding,
        "position_ids": half[None].repeat(BATCH, 1),
    }
    return {name: every[name] for name in ("input_ids", *names)}


HAVE_SDPA = sorted(set(CONFIGS) - {"gemma2"})


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("name", HAVE_SDPA)
def test_decoder(name: str) -> None:
    assert masks(name, **inputs()) == SLIDES.get(name, [CAUSAL, CAUSAL])


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("name", HAVE_SDPA)
def test_decoder_of_padded_inputs(name: str) -> None:
    plain = SLIDES.get(name, [CAUSAL, CAUSAL])
    assert masks(name, **inputs("attention_mask")) == [PADDED[p] for p in plain]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_decoder_of_packed_inputs(name: str) -> None:
    plain = SLIDES.get(name, [CAUSAL, CAUSAL])
    assert masks(name, **inputs("position_ids")) == [PACKED[p] for p in plain]


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("given", [(), ("attention_mask",), ("position_ids",)], ids="".join)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_decoder_of_dynamic_length(name: str, given: tuple[str, ...]) -> None:
    plain = SLIDES.get(name, [CAUSAL, CAUSAL])
    predicates = {(): {p: p for p in plain}, ("attention_mask",): PADDED, ("position_ids",): PACKED}[given]
    assert masks(name, dynamic=True, **inputs(*given)) == [predicates[p] for p in plain]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gpt-neox"])
def test_eager_decoder(name: str) -> None:
    assert masks(name, "eager", **inputs()) == SLIDES.get(name, [CAUSAL, CAUSAL])


def test_soft_capped_scores() -> None:
    torch._dynamo.reset()
    backend = Backend(lambda gm, _: gm.forward)
    torch.compile(decoder("gemma2", "eager"), backend=backend, fullgraph=True)(**inputs())
    torch._dynamo.reset()
    (gm,) = backend.graphs
    Canonicalize()(gm)
    found = [OpCall(n) for n in gm.graph.nodes if n.target in ATTENTION]
    assert [call["score"] for call in found] == [score_of("50*tanh(s)")] * 2
    assert [call["predicate"] for call in found] == SLIDES["gemma2"]
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.softmax.int)
