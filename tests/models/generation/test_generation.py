"""generate() on compiled models: the tokens of the module as written, no graph, and no other rank that has to take part."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import Ranks, mesh
from torch._dynamo.utils import counters

from sp_compile import generation
from sp_compile.generation import is_decoding_step, must_run_eagerly, wrap_generation

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TOKENS = 9


def llama() -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=1, pad_token_id=0, eos_token_id=1, **SIZES)
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(dropout_rate=0.0, **sizes, **tokens))


def prompt(rows: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def compiled(model: Any, way: str) -> Any:
    options = {"mesh": mesh(), "compiler": "aot_eager"}
    if way == "wrapped":
        return torch.compile(model, backend="sp", options=options)
    for module in model.model.layers if way == "layers" else [model]:
        module.compile(backend="sp", options=options)
    return model


def count_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


WAYS_TO_GENERATE: tuple[dict[str, Any], ...] = ({}, {"use_cache": False}, {"num_beams": 2}, {"do_sample": True})


def generated(make: Any, way: str) -> tuple[list[bool], int, int]:
    """Return whether tokens equal those of a plain model before and after a step, on rank 0 alone; graphs of both."""
    plain, model, ids = make(), compiled(make(), way), prompt()

    def is_right(**options: Any) -> bool:
        found = []
        for one in (plain, model):
            torch.manual_seed(5)
            found.append(one.generate(ids, max_new_tokens=TOKENS, **{"do_sample": False, **options}))
        return found[0].shape[1] > 3 and found[0].equal(found[1])

    start = count_graphs()
    right = [is_right()]
    before, loss = count_graphs() - start, model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    trained = count_graphs()
    assert trained > start
    if torch.distributed.get_rank() == 0:
        right += [is_right(**options) for options in WAYS_TO_GENERATE]
    return right, before, count_graphs() - trained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "way"),
    [
        (llama, "in place"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(llama, "wrapped"), (llama, "layers"), (t5, "in place")]
        ),
    ],
    ids=["llama", "wrapped", "layers", "t5"],
)
def test_generation_is_that_of_the_plain_module(ranks: Ranks, make: Any, way: str) -> None:
    """Rank 0 also generates alone after the step: the others would have to be in its collectives."""
    for right, before, after in ranks.run(2, generated, make, way):
        assert all(right), right
        assert (before, after) == (0, 0)


def decoded() -> tuple[bool, list[int]]:
    """Return whether a loop of one's own finds the right tokens, and the graphs after the prefill and at its end."""
    plain, model, ids = llama(), compiled(llama(), "in place"), prompt()
    expected = plain.generate(ids, max_new_tokens=TOKENS, do_sample=False)
    tokens, step, cache, graphs = ids, ids, None, []
    with torch.no_grad():
        while tokens.shape[1] < expected.shape[1]:
            out = model(input_ids=step, past_key_values=cache, use_cache=True)
            cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, step], 1)
            graphs.append(count_graphs())
    return tokens.equal(expected), graphs


@pytest.mark.slow
def test_a_loop_of_ones_own_compiles_no_decoding_step(ranks: Ranks) -> None:
    for is_right, graphs in ranks.run(2, decoded):
        assert is_right
        assert len({*graphs}) == 1


def test_callers_whose_code_has_no_hash() -> None:
    """Such as code that Dynamo has made, with a dict among its constants."""
    wrap_generation()
    frame = sys._getframe()
    caller = SimpleNamespace(f_code=frame.f_code.replace(co_consts=({},)), f_back=None)
    with pytest.raises(TypeError):
        hash(caller.f_code)
    assert not must_run_eagerly(frame.f_code, {}, caller)


def test_generation_of_a_class_that_is_no_module() -> None:
    """Such as a model that another runtime computes."""

    class Elsewhere(transformers.GenerationMixin):
        def generate(self) -> str:
            return "tokens"

    generation._wrap_generate(Elsewhere, "generate")
    assert Elsewhere.generate.must_run_eagerly  # type: ignore[attr-defined]
    assert Elsewhere().generate() == "tokens"


def test_decoding_steps() -> None:
    """One query row and a cache with keys, in arguments by name and by position; not a prefix that is trained."""
    empty, filled = transformers.DynamicCache(), transformers.DynamicCache()
    filled.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    one, many = torch.ones(2, 1).long(), torch.ones(2, 5).long()
    assert is_decoding_step({"input_ids": one, "past_key_values": filled})
    assert is_decoding_step({"args": (one,), "kwargs": {"past_key_values": filled, "attention_mask": many}})
    assert is_decoding_step({"self": 1, "kwargs": {"decoder_input_ids": one, "input_ids": many, "cache": filled}})
    assert is_decoding_step({"hidden_states": torch.ones(2, 1, 8), "cache": filled})
    assert not is_decoding_step({"input_ids": many, "past_key_values": filled})
    assert not is_decoding_step({"input_ids": one, "past_key_values": empty})
    assert not is_decoding_step({"input_ids": one, "past_key_values": None})
    assert not is_decoding_step({"past_key_values": filled})
    unfinished = transformers.DynamicCache.__new__(transformers.DynamicCache)  # its constructor runs
    assert not is_decoding_step({"input_ids": one, "self": unfinished})


def test_a_class_with_its_own_generate_compiles_nothing() -> None:
    """Whisper detects the language by a call of the model, before it calls transformers' method."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.WhisperConfig(
        **sizes, **heads, vocab_size=64, num_mel_bins=8, max_source_positions=20, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config.update(
        lang_to_id={"<|en|>": 5, "<|de|>": 6}, is_multilingual=True, no_timestamps_token_id=9
    )
    model.generation_config.update(task_to_id={"transcribe": 7}, max_length=12)
    features = torch.randn(1, 8, 40)
    expected = model.generate(features)
    model.compile(backend="sp", options={"compiler": "aot_eager"})
    torch.compiler.reset()
    counters.clear()
    assert torch.equal(model.generate(features), expected)
    assert not counters["stats"]["unique_graphs"]
