"""generate() with a cache whose positions are sharded: tokens and logits of a single device, and 1 / n of the bytes on each rank."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from support.ranks import Ranks, mesh, mesh2d
from torch._dynamo.utils import counters

import sp_compile
from sp_compile import SpError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TOKENS = 9
HEADS, WIDTH = 2, 8  # of the cached keys
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "pad_token_id": 0,
    "eos_token_id": 1, "max_position_embeddings": 64, "num_key_value_heads": HEADS, "head_dim": WIDTH,
}  # fmt: skip
WINDOW = {"sliding_window": 5}
# Arguments of the configuration of each family.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Qwen3": SIZES,
    "Mistral": SIZES | WINDOW,
    "Gemma2": SIZES | WINDOW | {"attn_logit_softcapping": 1.0},
    "Gemma3Text": SIZES | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_positions": 64, "pad_token_id": 0, "eos_token_id": 1},
    "GptOss": SIZES | WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Llama4Text": SIZES
    | {"attention_chunk_size": 5, "intermediate_size_mlp": 64, "num_local_experts": 2}
    | {"layer_types": ["chunked_attention", "full_attention"]},
}


def make(family: str = "Llama", layers: int = 1) -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=layers, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model if family == "GptOss" else model.double()  # its experts have no kernel for float64


def prompt(length: int, rows: int = 2, padding: int = 0) -> dict[str, torch.Tensor]:
    """Return ids and mask; the first row has padding on its left."""
    ids = torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"do_sample": False, "max_new_tokens": TOKENS, **options}
    return model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **options)


def shared(model: Any, **options: Any) -> Any:
    return sp_compile.shard_cache(model, mesh(), **{"compiler": "aot_eager", **options})


def check(found: Any, expected: Any) -> None:
    """Logits have the precision of float32, to which transformers casts them."""
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.sequences.unique().numel() > 3  # a model that repeats one token would pass
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def cache_of(out: Any) -> Any:
    return out.get("cache") or out.past_key_values


def tensors_of(cache: Any) -> list[torch.Tensor]:
    rows = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return [getattr(x, "plain", x) for x in rows]


def count_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def run_family(family: str, layers: int, length: int, padding: int, options: dict[str, Any]) -> tuple[Any, Any, int]:
    """Return the bytes of each tensor of the cache on this rank and on a single device, and the number of graphs."""
    model, inputs, graphs = make(family, layers), prompt(length, padding=padding), count_graphs()
    expected = generate(model, inputs)
    with shared(model, **options):
        found = generate(model, inputs)
    check(found, expected)
    occupied = [x.untyped_storage().nbytes() for x in tensors_of(cache_of(found))]
    return occupied, [(x.nbytes, x[:, :, :1].nbytes) for x in tensors_of(cache_of(expected))], count_graphs() - graphs


def check_bytes(results: list[tuple[Any, Any, int]], graphs: int = 1) -> None:
    """Each rank has its share of each tensor, rounded up to a row for the prompt and to one for new tokens."""
    for found, totals, compiled in results:
        for occupied, (total, row) in zip(found, totals, strict=True):
            assert occupied < total / len(results) + 2 * row
        assert compiled == graphs
    all_ranks = [sum(parts) for parts in zip(*(found for found, _, _ in results))]
    assert all_ranks == [total for total, _ in results[0][1]]  # no row is missing or twice


def test_tokens_and_bytes(ranks: Ranks) -> None:
    check_bytes(ranks.run(2, run_family, "Llama", 1, 7, 3, {}))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(ranks: Ranks, family: str, n: int) -> None:
    """In float64 the eager attention of Gemma 2 itself is NaN for padded queries."""
    check_bytes(ranks.run(n, run_family, family, 2, 11, 0 if family == "Gemma2" else 3, {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"attention": "ring", "layout": "zigzag"},
        {"attention": "gather"},
        {"attention": "ulysses"},
        {"layout": "balanced"},
        {"compiler": "inductor"},
    ],
    ids=str,
)
def test_options_of_the_prompt(ranks: Ranks, options: dict[str, Any]) -> None:
    check_bytes(ranks.run(2, run_family, "Llama", 1, 11, 3, options))


def test_prompts_of_few_tokens(ranks: Ranks) -> None:
    """At most one position a rank: the prompt runs as a step, and nothing is compiled."""
    for length in (1, 3, 4):
        check_bytes(ranks.run(4, run_family, "Gemma3Text", 2, length, length // 3, {}), graphs=0)


def run_calls() -> list[int]:
    """Check several calls in one context and in another; return the graphs after each."""
    model, start, graphs, turns = make(), count_graphs(), [], []
    calls = [
        (prompt(7), {}),
        (prompt(7), {}),
        (prompt(11), {}),
        (prompt(13), {"do_sample": True, "temperature": 2.0}),
        (prompt(7, rows=4), {}),
        (prompt(12), {"num_beams": 2, "num_return_sequences": 2}),
        (prompt(12), {"prefill_chunk_size": 5}),
        (prompt(12), {"use_cache": False}),
    ]
    expected = [generate(model, inputs, **options) for inputs, options in calls]
    for part in (slice(0, 3), slice(3, None)):
        with shared(model):
            for (inputs, options), result in zip(calls[part], expected[part]):
                check(generate(model, inputs, **options), result)
                graphs.append(count_graphs() - start)
    # Two turns with one cache: the second prompt is a step of several queries.
    for context in (False, True):
        cache, inputs = transformers.DynamicCache(), prompt(7)
        with shared(model) if context else torch.no_grad():
            turns.append([generate(model, inputs, cache=cache)])
            longer = torch.cat([turns[-1][0].sequences, torch.full((2, 3), 7)], 1)
            turns[-1].append(generate(model, {"input_ids": longer}, cache=cache))
    for a, b in zip(*turns):
        check(b, a)
    return graphs


@pytest.mark.slow
def test_several_calls(ranks: Ranks) -> None:
    """The first two lengths and the number of sequences compile; the second context uses the graphs of the first."""
    for graphs in ranks.run(3, run_calls):
        assert (graphs[0], graphs[1], graphs[2], graphs[3], graphs[-1] <= 6) == (1, 1, 2, 2, True), graphs


def message_of(call: Any) -> str:
    try:
        call()
    except SpError as error:
        return str(error)
    return ""


def run_refusals() -> dict[str, str]:
    """Return the message of each refused call, all of which run no model and compile nothing."""
    rank, graphs = torch.distributed.get_rank(), count_graphs()
    found: dict[str, str] = {}
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1}
    t5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    models = {
        "encoder-decoder": transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
        "mamba": transformers.MambaForCausalLM(transformers.MambaConfig(**small)),
        "own attention": transformers.BloomForCausalLM(transformers.BloomConfig(n_head=4, **small)),
        "no generation": torch.nn.Linear(2, 2),
    }
    for name, model in models.items():
        found[name] = message_of(lambda model=model: shared(model).__enter__())
    latent = {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
        "num_key_value_heads": 4,
    }  # fmt: skip
    config = transformers.DeepseekV3Config(num_hidden_layers=1, **(SIZES | latent))
    compressed, model, inputs = transformers.AutoModelForCausalLM.from_config(config), make(), prompt(7)
    with shared(compressed):
        found["compressed keys"] = message_of(lambda: generate(compressed, inputs))
    filled = transformers.DynamicCache()
    filled.update(torch.ones(2, HEADS, 3, WIDTH), torch.ones(2, HEADS, 3, WIDTH), 0)
    other = {**inputs, "input_ids": inputs["input_ids"] + rank}
    with shared(model):
        found["filled cache"] = message_of(lambda: generate(model, inputs, cache=filled))
        found["static cache"] = message_of(lambda: generate(model, inputs, cache_implementation="static"))
        found["assistant"] = message_of(lambda: generate(model, inputs, assistant_model=model))
        found["one rank"] = message_of(lambda: generate(model, inputs, cache_implementation="static" if rank else None))
        found["inputs"] = message_of(lambda: generate(model, other))
        torch.manual_seed(rank)
        sampled = {"do_sample": True, "max_new_tokens": 1}
        found["seeds"] = message_of(lambda: model.generate(**inputs, **sampled))
        found["settings"] = message_of(lambda: model.generate(**inputs, max_new_tokens=2 + rank))
        found["clock"] = message_of(lambda: model.generate(**inputs, max_time=1.0))
        config = transformers.GenerationConfig(max_new_tokens=2, eos_token_id=[1, 2 + rank])
        found["given configuration"] = message_of(lambda: model.generate(**inputs, generation_config=config))
        with mock.patch.object(model.generation_config, "max_new_tokens", 2 + rank):
            found["own configuration"] = message_of(lambda: model.generate(**inputs))
        last = [lambda ids, scores: scores.roll(rank, -1)]
        ones = {"do_sample": False, "max_new_tokens": 1}
        found["last token"] = message_of(lambda: model.generate(**prompt(1), **ones, logits_processor=last))
    for option in ({"inputs": "local"}, {"outputs": "local"}, {"outputs": {"logits": "local"}}):
        found[str(option)] = message_of(lambda option=option: shared(model, **option).__enter__())
    outside = make()
    short = prompt(2)
    with shared(outside):
        cache = cache_of(generate(outside, short))
    found["cache outside"] = message_of(lambda: outside(input_ids=short["input_ids"][:, :1], cache=cache))
    assert not {"forward", "generate"} & {*vars(model)}
    assert count_graphs() == graphs
    return found


def run_registered(kind: str) -> str:
    """Return the message for an attention or a mask function of a user: under a name of transformers, or another."""
    import functools

    from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
    from transformers.models.llama import modeling_llama

    @functools.wraps(sdpa_attention_forward)
    def attend(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, 3 * query, *args, **kwargs)

    def mask_first(*args: Any, **kwargs: Any) -> Any:
        return None

    model, inputs = make(), prompt(7)
    names = {"name": "user", "eager": "eager"}
    if kind == "name":
        AttentionInterface.register("user", attend)
        AttentionMaskInterface.register("user", sdpa_mask)
    model.set_attn_implementation(names.get(kind, "sdpa"))
    tables = {"attention": AttentionInterface._global_mapping, "mask": AttentionMaskInterface._global_mapping}
    tables["instance"] = modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping
    replaced = {"sdpa": mask_first if kind == "mask" else attend}
    own = attend if kind == "eager" else modeling_llama.eager_attention_forward
    with (
        mock.patch.dict(tables.get(kind, {}), replaced),
        mock.patch.object(modeling_llama, "eager_attention_forward", own),
        shared(model),
    ):
        return message_of(lambda: generate(model, inputs))


@pytest.mark.parametrize("kind", ["attention", "mask", "instance", "name", "eager"])
def test_functions_of_users_are_refused(ranks: Ranks, kind: str) -> None:
    """A step calls another attention function, so that the result would not be that of the user's."""
    for message in ranks.run(2, run_registered, kind):
        assert message.startswith("SP843")


def test_refusals(ranks: Ranks) -> None:
    """A code each, on every rank, before the prompt is run or compiled."""
    expected = {
        "encoder-decoder": "SP841", "mamba": "SP841", "own attention": "SP841", "no generation": "SP841",
        "compressed keys": "SP843", "filled cache": "SP842", "static cache": "SP842", "assistant": "SP842",
        "one rank": "SP842", "inputs": "SP844", "seeds": "SP844", "settings": "SP844", "last token": "SP844", "cache outside": "SP843",
        "clock": "SP842", "given configuration": "SP844", "own configuration": "SP844", "{'inputs': 'local'}": "SP845",
        "{'outputs': 'local'}": "SP845", "{'outputs': {'logits': 'local'}}": "SP845",
    }  # fmt: skip
    for found in ranks.run(2, run_refusals):
        assert {name: message[:5] for name, message in found.items()} == expected


def run_with_images() -> None:
    """The images, whose tokens attend to each other, are a part of the prompt."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    text = FAMILIES["Gemma3Text"] | {"num_hidden_layers": 2}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokens = {"mm_tokens_per_image": 4, "image_token_id": 60, "boi_token_id": 61, "eoi_token_id": 62}
    vision |= {"image_size": 28, "patch_size": 7}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **tokens)
    model, inputs = transformers.Gemma3ForConditionalGeneration(config).eval().double(), prompt(13)
    ids = inputs["input_ids"].clamp(max=59)
    ids[:, 3:7] = 60
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs |= {"input_ids": ids, "pixel_values": pixels, "token_type_ids": (ids == 60).long()}
    expected = generate(model, inputs)
    with shared(model):
        check(generate(model, inputs), expected)


def run_with_shared_keys() -> None:
    """Two of four layers attend to the keys of others, and have none in the cache."""
    sizes = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
    config = transformers.Gemma3nTextConfig(
        num_hidden_layers=4, num_kv_shared_layers=2, **(SIZES | WINDOW | sizes | layers)
    )
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model, inputs = transformers.AutoModelForCausalLM.from_config(config).eval().double(), prompt(11, padding=3)
    expected = generate(model, inputs)
    with shared(model):
        check(generate(model, inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_with_images, run_with_shared_keys])
def test_other_models(ranks: Ranks, run: Any) -> None:
    ranks.run(2, run)


def run_with_sharded_weights() -> None:
    """Two replicas with other prompts and numbers of tokens, and FSDP2 over all ranks, which run until the last stops."""
    from torch.distributed.fsdp import fully_shard

    model, replica = make(layers=2), torch.distributed.get_rank() // 2
    inputs, options = prompt(11 + replica, padding=3), {"max_new_tokens": TOKENS + 3 * replica}
    expected = generate(model, inputs, **options)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh())
    for _ in range(2):
        with sp_compile.shard_cache(model, mesh2d(2, 2)["sp"], compiler="aot_eager"):
            check(generate(model, inputs, **options), expected)


@pytest.mark.slow
def test_sharded_weights(ranks: Ranks) -> None:
    ranks.run(4, run_with_sharded_weights)


def run_wrapped(way: str) -> None:
    plain, inputs = make(), prompt(7)
    expected = generate(plain, inputs)
    model = make()
    options = {"mesh": mesh(), "compiler": "aot_eager"}
    if way == "wrapped":
        model = torch.compile(model, backend="sp", options=options)
    elif way == "in place":
        model.compile(backend="sp", options=options)
    elif way == "eager attention":
        model.set_attn_implementation("eager")
    else:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, config).double().eval()
        expected = generate(model, inputs)
    with shared(model), shared(model):  # a nested context has no effect
        check(generate(model, inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrapped", "in place", "eager attention", "peft"])
def test_wrapped_models(ranks: Ranks, way: str) -> None:
    ranks.run(2, run_wrapped, way)


def run_long_prompt() -> list[list[int]]:
    """Return the shapes of all tensors with keys of more rows than a rank has, after a prompt."""
    model, inputs = make(layers=2), prompt(31)
    with shared(model), torch.no_grad():
        out = model(**inputs, cache=transformers.DynamicCache(), use_cache=True, logits_to_keep=1)
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.ndim == 4]  # not those of a trace
    assert sum(x.shape[2] in (15, 16) for x in tensors) >= len(tensors_of(cache_of(out)))
    return [[*x.shape] for x in tensors if x.shape[1] in (HEADS, 2 * HEADS) and x.shape[2] > 16]


@pytest.mark.slow
def test_no_full_keys_are_left_after_a_prompt(ranks: Ranks) -> None:
    assert ranks.run(2, run_long_prompt) == [[], []]


def test_a_single_process_generates_as_before() -> None:
    model, inputs = make(), prompt(7)
    with sp_compile.shard_cache(model) as yielded:
        assert yielded is model
        check(generate(model, inputs), generate(model, inputs))
        assert "forward" not in vars(model)
