"""Masks of transformers with FSDP2 on each layer: they are computed in the layers, and no value has S x S elements; neither has the position bias of T5."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.parity import step_errors
from support.ranks import Ranks, mesh
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import sp_compile

transformers = pytest.importorskip("transformers")

LENGTH, LOSS, GRADIENT = 93, 2e-6, 2e-9  # transformers computes losses, and norms of Gemma, in float32
SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "use_cache": False},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "windows": ("Mistral", {"sliding_window": 8}),
    "two masks": (
        "Gemma3",
        {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "eager": ("GptOss", {"head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "intermediate_size": 32}),
    "names": (
        "DeepseekV32",
        {
            **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
            **{"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, "mlp_layer_types": ["dense"] * 2},
            **{"num_key_value_heads": 4, "layer_types": ["indexed_attention"] * 2},
        },
    ),
    "biases": (
        "T5",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "num_decoder_layers": 2,
        },
    ),
}


def build(name: str) -> nn.Module:
    prefix, changes = MODELS[name]
    config = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    kind = "ConditionalGeneration" if name == "biases" else "CausalLM"
    model = getattr(transformers, f"{prefix}For{kind}")(config(**{**SIZES, **changes}))
    model.set_experts_implementation("batched_mm")  # the default does not support float64
    double: nn.Module = model.double()
    return double


def batch(kind: str) -> dict[str, Tensor]:
    """Return two sequences: of two documents each, or with padding at their ends."""
    ids = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if kind == "packed":
        positions = torch.cat([torch.arange(31), torch.arange(LENGTH - 31)])
        return {"input_ids": ids, "labels": ids, "position_ids": positions.expand(2, -1)}
    mask = torch.ones_like(ids)
    mask[0, -9:] = 0
    mask[1, :4] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def train(name: str, kind: str, checkpoint: bool) -> tuple[float, float, int]:
    """Return the errors of the loss and of the worst gradient, and the number of values of S x S in the graphs."""
    squares: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Record the values with two dims of the sequence."""
        for node in graph.graph.nodes:
            value = node.meta.get("val", node.meta.get("example_value"))
            if isinstance(value, Tensor) and sum(int(size) >= LENGTH for size in value.shape) > 1:
                squares.append(f"{node} {tuple(value.shape)}")
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.manual_seed(0)
    single = build(name)
    model = sp_compile.fully_shard_and_compile(
        copy.deepcopy(single), mesh(), compiler=compiler, cost={}, checkpoint=checkpoint
    )
    return *step_errors(model, single, batch(kind)), len(squares)


def test_code_may_use_the_mask_as_a_tensor() -> None:
    """As models do that concatenate masks, or read their dtype: in eager code, and in a traced program."""
    from transformers.masking_utils import sdpa_mask

    from sp_compile.integrations._compat.attention_names import MaskArguments

    def read(mask: Any) -> Tensor:
        bias = torch.zeros(2, 1, 5, 5).masked_fill(mask, 1.0)
        joined = torch.cat([mask, mask[..., :2]], dim=-1)
        return torch.cat([bias, joined.float()], dim=-1) if mask.dtype == torch.bool else bias

    padding = torch.ones(2, 5, dtype=torch.bool)
    padding[0, -2:] = False
    arguments = {"batch_size": 2, "q_length": 5, "kv_length": 5, "attention_mask": padding}
    mask = MaskArguments(sdpa_mask, arguments)
    causal = torch.ones(5, 5, dtype=torch.bool).tril() & padding[:, None, None]
    assert copy.copy(mask).arguments is arguments
    assert len(mask) == 2
    operators: list[Callable[[Any], Tensor]] = [
        lambda x: ~x, lambda x: 1.0 - x * 2.0, lambda x: x == 0, lambda x: x != 0, lambda x: 1.0 + x, lambda x: x < 1,
        lambda x: x >= 1, lambda x: x / 2, lambda x: x * 1.0 - 1, lambda x: x & x[:1], lambda x: causal ^ x,
    ]  # fmt: skip
    for operator in operators:
        assert torch.equal(operator(mask), operator(causal))
    for function in (read, torch.compile(read, backend="eager", fullgraph=True)):
        assert torch.equal(function(mask), read(causal))


@pytest.mark.parametrize("name", ["Llama", "GptOss", "Falcon", "DeepseekV32"])
def test_layers_get_masks_of_the_selected_attention(name: str) -> None:
    """Of any name, which does not change; a copy of the model, and eager code, get masks as before."""
    from transformers.masking_utils import create_causal_mask

    from sp_compile.integrations._compat.attention_names import MaskArguments, compute_masks_in_layers

    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(num_hidden_layers=2)
        model_class = getattr(transformers, f"{name}Model")
        model = nn.Sequential(model_class(config))
    layers = getattr(model[0], "layers", None) or model[0].h
    model[0].__class__ = type(f"FSDP{name}", (FSDPModule, model_class), {})  # as fully_shard does
    selected, other = config._attn_implementation, copy.deepcopy(config)
    compute_masks_in_layers(model, [model[0], layers[0]])

    def make_mask(config: Any) -> Any:
        x = torch.ones(2, 5, 8, dtype=torch.float64)
        mask = create_causal_mask(config, x, None, None, position_ids=torch.arange(5).expand(2, -1) % 3)
        return mask.compute_mask() if isinstance(mask, MaskArguments) else mask

    def is_delayed(config: Any) -> Any:
        return isinstance(create_causal_mask(config, torch.ones(2, 5, 8), None, None), MaskArguments)

    assert config._attn_implementation == selected
    assert "forward" in vars(layers[0])
    assert "forward" in vars(layers[1])  # of the same class
    assert not is_delayed(config)
    assert torch.compile(is_delayed, backend="eager", fullgraph=True)(config)
    assert not torch.compile(is_delayed, backend="eager", fullgraph=True)(other)
    assert torch.equal(torch.compile(make_mask, backend="eager", fullgraph=True)(config), make_mask(other))


def test_a_layer_writes_to_the_callers_arguments() -> None:
    """As to a cache that pytree can rebuild, of which the next token is computed."""
    from sp_compile.integrations._compat.attention_names import (
        MaskArguments,
        _compute_masks_before,
        compute_masks_in_layers,
    )

    class Cache(transformers.DynamicCache):  # type: ignore[misc, name-defined]
        """A cache that pytree copies, as it does those of transformers once they can be exported."""

    def rebuild(layers: Any, context: Any) -> Any:
        cache = Cache()
        cache.layers = [copy.copy(layer) for layer in layers]
        return cache

    def generate() -> list[int]:
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        tokens: list[int] = model.generate(ids, cache=Cache(), use_cache=True, **options)[0].tolist()
        return tokens

    torch.utils._pytree.register_pytree_node(Cache, lambda cache: (list(cache.layers), None), rebuild)
    torch.manual_seed(0)
    model: Any = build("llama").eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    ids = torch.arange(3, 15)[None]
    expected = generate()
    compute_masks_in_layers(model, [model.model.layers[0]])
    assert generate() == expected

    layer, given = nn.Module(), ([1], {"mask": None}, (2,))
    layer.forward = lambda *args, **kwargs: (*args, *kwargs.values())  # type: ignore[method-assign]
    _compute_masks_before(layer)
    assert all(x is y for x, y in zip(layer(*given, states=given[0]), (*given, given[0]), strict=True))
    mask = MaskArguments(int, {})
    assert layer({"full": mask, "window": None}, mask) == ({"full": 0, "window": None}, 0)


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_registered_mask_function_is_kept(name: str, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the user, for models that are prepared and others, eager and compiled: here the mask of a prefix."""
    from transformers import masking_utils

    from sp_compile.integrations._compat.attention_names import MASK_FUNCTIONS, compute_masks_in_layers

    table = {**masking_utils.AttentionMaskInterface._global_mapping, **MASK_FUNCTIONS}
    monkeypatch.setattr(masking_utils.AttentionMaskInterface, "_global_mapping", table)

    def mask_prefix(*args: Any, **kwargs: Any) -> Tensor:
        mask: Tensor = MASK_FUNCTIONS[name](*args, **{**kwargs, "allow_is_causal_skip": False}).clone()
        mask[..., :4] = True if name == "sdpa" else 0.0
        return mask

    def read_loss(model: Any) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss.detach()

    def prepare() -> None:
        compute_masks_in_layers(prepared, [prepared.model.layers[0]])

    torch.manual_seed(0)
    user: Any = build("llama")
    user.set_attn_implementation(name)
    prepared, ids = copy.deepcopy(user), torch.arange(12)[None]
    causal = read_loss(user)
    if not is_first:
        prepare()
    masking_utils.AttentionMaskInterface.register(name, mask_prefix)
    expected = read_loss(user)
    assert abs(expected - causal) > 1e-4
    prepare()
    compiled = torch.compile(prepared, backend="eager")
    for model in (user, prepared, compiled):
        assert abs(read_loss(model) - expected) < LOSS


CASES = [
    pytest.param("llama", "packed", False),
    pytest.param("eager", "packed", False),
    pytest.param("biases", "padded", False),
    *[
        pytest.param(name, kind, False, marks=pytest.mark.slow)
        for name in MODELS
        for kind in ("packed", "padded")
        if (name, kind) not in {("llama", "packed"), ("eager", "packed"), ("biases", "packed"), ("biases", "padded")}
    ],
    pytest.param("two masks", "packed", True, marks=pytest.mark.slow, id="checkpoint"),
    pytest.param("biases", "padded", True, marks=pytest.mark.slow, id="checkpoint of biases"),
]


@pytest.mark.parametrize(("name", "kind", "checkpoint"), CASES)
def test_masks_are_computed_in_layers(ranks: Ranks, name: str, kind: str, checkpoint: bool) -> None:
    for loss, gradient, squares in ranks.run(2, train, name, kind, checkpoint):
        assert loss < LOSS
        assert gradient < GRADIENT
        assert squares == 0
