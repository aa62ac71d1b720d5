"""Models of this year with every attention strategy and every layout: `explain` has nothing to gather."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.hf.test_hf import COUNTS, SIZES, SMALL, VOCAB, deepseek, gemma3, gpt_oss, qwen3, t5, transformers
from models.hf.test_multimodal import whisper
from support.parity import error_text

import sp_compile
from sp_compile.passes.context import NoteKind
from sp_compile.planner.dry_run import split_kwargs


def gemma2() -> torch.nn.Module:
    """Soft-caps, of scores too, and a window in every other layer."""
    how = {**SMALL, "attn_implementation": "eager"}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **COUNTS, **how, sliding_window=8))


OPTIONS = [
    *({"attention": attention} for attention in ("auto", "ring", "ulysses", "hybrid", "gather")),
    *({"attention": "ring", "layout": layout} for layout in ("zigzag", "balanced")),
]


@pytest.mark.slow
@pytest.mark.sampled(every=36)
@pytest.mark.parametrize("config", OPTIONS, ids=lambda c: " ".join(c.values()))
@pytest.mark.parametrize("make", [gpt_oss, gemma2, gemma3, deepseek, qwen3])
def test_nothing_is_gathered(make: Callable[[], torch.nn.Module], config: dict[str, str]) -> None:
    transformers.logging.set_verbosity_error()
    model, ids = make(), torch.randint(0, VOCAB, (2, 18))
    model.config.use_cache = False
    report = sp_compile.explain(model, ids, labels=ids, sp=4, **config)
    assert not report.fallbacks, report
    assert report.attention


@pytest.mark.slow
def test_a_head_before_a_loss_with_a_warning() -> None:
    """The warning breaks the graph, and a note names its line; with a loss_type, the model is one graph in tiles."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
    model, ids = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), torch.randint(0, 64, (1, 32))
    model.config.use_cache = False
    (broken,) = explained(model, ids).find_notes(NoteKind.GRAPH_BREAK)
    assert "modeling_gpt2.py" in broken.where
    model.loss_type = "ForCausalLM"
    report = explained(model, ids)
    assert not report.find_notes(NoteKind.GRAPH_BREAK)
    assert any("lm_head" in one.where for one in report.tiled), report.tiled


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **COUNTS, **SMALL))


def llama_with_adapter() -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def qwen2_vl() -> torch.nn.Module:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    text = {**SIZES, **COUNTS, "vocab_size": VOCAB, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    )


COMMON = "num_items_in_batch cu_seq_lens_q max_length_k output_attentions output_hidden_states return_dict labels"
NAMES = {  # of arguments that a model reads
    llama: "cache_position position_ids logits_to_keep",
    llama_with_adapter: "cache_position position_ids logits_to_keep adapter_names alora_offsets",
    t5: "decoder_input_ids decoder_attention_mask encoder_outputs",
    lambda: whisper(padded=False)[0]: "input_features decoder_input_ids encoder_outputs",
    qwen2_vl: "cache_position pixel_values image_grid_thw mm_token_type_ids",
}


@pytest.mark.parametrize("make", NAMES, ids=["llama", "adapter", "t5", "whisper", "qwen2_vl"])
def test_names_that_no_module_of_a_model_reads_are_refused(make: Callable[[], torch.nn.Module]) -> None:
    """Wrappers with **kwargs, and `**kwargs: Unpack[...]`, do not accept all names."""
    with torch.device("meta"):
        model = make()
    for name in f"{COMMON} {NAMES[make]}".split():
        assert split_kwargs("explain", model, {name: 1}) == ({}, {name: 1})
    for name, closest in [("bogus_name", ""), ("lables", "'labels'"), ("inputs_embedds", "'inputs_embeds'")]:
        text = error_text(lambda name=name: split_kwargs("explain", model, {name: 1}))
        assert "SP102" in text
        assert closest in text


def explained(model: torch.nn.Module, ids: torch.Tensor) -> sp_compile.Report:
    return sp_compile.explain(model, ids, labels=ids, sp=2, tiles=4)
