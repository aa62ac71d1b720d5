"""Unmodified vision-language and audio models of transformers with tiny random weights, with and without images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ranks as worker
from support.parity import Outcome, against_eager, check
from support.ranks import Ranks

import sp_compile
from sp_compile.passes.context import NoteKind
from sp_compile.passes.sharding import output_rules

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-6  # transformers computes losses, norms and rotary positions in float32 for every dtype of the model
LENGTH, IMAGE, START, END = 41, 90, 92, 93  # tokens of a row, and ids of an image token and of those around an image
TEXT = {
    **{"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "use_cache": False},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURE = {**VISION, "image_size": 16, "patch_size": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": START, "vision_end_token_id": END}

Batch = dict[str, Any]
Build = Callable[[bool], tuple[torch.nn.Module, Batch]]


def tokens(*images: int) -> Batch:
    """Return a batch of rows with an image of that number of tokens each; 0 is a row of text."""
    rows = []
    for lead, count in enumerate(images, 5):
        image = [START, *[IMAGE] * count, END] if count else []
        others = torch.randint(5, 80, (LENGTH - len(image),)).tolist()
        rows.append([*others[:lead], *image, *others[lead:]])
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.where(ids < IMAGE, -100)}


def qwen3_vl(images: bool) -> tuple[torch.nn.Module, Batch]:
    """Features of vision layers are added to hidden states of text layers."""
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
        vision_config={
            **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4},
            **{"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        },
        **QWEN_IDS,
    )
    return transformers.Qwen3VLForConditionalGeneration(config), qwen_batch(images)


def qwen25_vl(images: bool) -> tuple[torch.nn.Module, Batch]:
    """Vision attention in windows."""
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4},
            **{"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        **QWEN_IDS,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), qwen_batch(images)


def qwen_batch(images: bool) -> Batch:
    """Two images of different sizes, of which four patches are one token."""
    if not images:
        return tokens(0, 0)
    batch, grid = tokens(4, 8), torch.tensor([[1, 4, 4], [1, 4, 8]])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, dtype=torch.float64)
    types = (batch["input_ids"] == IMAGE).int()
    return {**batch, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


def gemma3(images: bool) -> tuple[torch.nn.Module, Batch]:
    """Tokens of an image attend to each other in both directions."""
    config = transformers.Gemma3Config(
        text_config={**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**PICTURE, "vision_use_head": False},
        **{"mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END},
    )
    batch = picture_batch(images, 4, 4)
    batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    return transformers.Gemma3ForConditionalGeneration(config), batch


def llava(images: bool) -> tuple[torch.nn.Module, Batch]:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**{**PICTURE, "num_hidden_layers": 2}, projection_dim=32),
        **{"image_token_index": IMAGE, "vision_feature_layer": -1},
    )
    return transformers.LlavaForConditionalGeneration(config), picture_batch(images, 16, 16)


def smolvlm(images: bool, name: str = "SmolVLM") -> tuple[torch.nn.Module, Batch]:
    """One row has two images, the other one and padding."""
    config = getattr(transformers, f"{name}Config")(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=PICTURE,
        **{"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0},
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    if not images:
        return model, tokens(0, 0)
    pixels = torch.randn(2, 2, 3, 16, 16, dtype=torch.float64)
    valid = torch.ones(2, 2, 16, 16, dtype=torch.int64)
    pixels[1, 1], valid[1, 1] = 0, 0
    return model, {**tokens(8, 4), "pixel_values": pixels, "pixel_attention_mask": valid}


def idefics3(images: bool) -> tuple[torch.nn.Module, Batch]:
    return smolvlm(images, "Idefics3")


def picture_batch(images: bool, *counts: int) -> Batch:
    if not images:
        return tokens(*[0] * len(counts))
    return {**tokens(*counts), "pixel_values": torch.randn(len(counts), 3, 16, 16, dtype=torch.float64)}


def whisper(padded: bool) -> tuple[torch.nn.Module, Batch]:
    """An encoder and a decoder, whose inputs are its labels, shifted."""
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 16}
    counts = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    lengths = {"vocab_size": 99, "max_source_positions": 35, "max_target_positions": 40, "dropout": 0.0}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**sizes, **counts, **lengths, **ids)
    )
    sound, labels = torch.randn(2, 16, 70, dtype=torch.float64), torch.randint(5, 99, (2, 17))
    labels[1, 12:] = -100 if padded else 7
    return model, {"input_features": sound, "labels": labels, "use_cache": False}


def wav2vec2(padded: bool, name: str = "Wav2Vec2") -> tuple[torch.nn.Module, Batch]:
    """Padded frames are set to zero, x[~mask] = 0."""
    drops = (
        "hidden_dropout attention_dropout feat_proj_dropout activation_dropout layerdrop mask_time_prob final_dropout"
    )
    config = getattr(transformers, f"{name}Config")(
        **{**VISION, "num_attention_heads": 4, "vocab_size": 20, "pad_token_id": 0},
        **{"conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 2)},
        **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
        **dict.fromkeys(drops.split(), 0.0),
    )
    model, mask = getattr(transformers, f"{name}ForCTC")(config), torch.ones(2, 810, dtype=torch.int64)
    mask[1, 600:] = 0
    batch = {"input_values": torch.randn(2, 810, dtype=torch.float64), "labels": torch.randint(1, 20, (2, 7))}
    return model, {**batch, "attention_mask": mask} if padded else batch


def hubert(padded: bool) -> tuple[torch.nn.Module, Batch]:
    return wav2vec2(padded, "Hubert")


class Loss(torch.nn.Module):
    """The loss alone. Weights on which only other results depend get zeros from torch.compile, and None from eager."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


def made(build: Build, images: bool) -> tuple[torch.nn.Module, Batch]:
    """Return the model after a call, on which transformers installs hooks of its vision models, between graphs."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model, batch = build(images)
    with torch.no_grad():
        model.double()(**batch)
    return Loss(model), batch


def one_step(build: Build, images: bool) -> Outcome:
    model, batch = made(build, images)
    return against_eager(model, kwargs=batch, mesh=worker.mesh())


# The least shares of a step's FLOPs and of its activations on shards, and the number of graph breaks, as measured.
WORK: dict[Build, tuple[float, float, int]] = {
    llava: (0.99, 0.99, 0),
    gemma3: (0.99, 0.99, 0),
    smolvlm: (0.99, 0.96, 1),
    idefics3: (0.99, 0.96, 1),
    qwen3_vl: (0.99, 0.96, 1),
    qwen25_vl: (0.99, 0.95, 1),
    whisper: (0.99, 0.99, 0),
    wav2vec2: (0.99, 0.91, 2),
    hubert: (0.99, 0.91, 2),
}


@pytest.mark.slow
@pytest.mark.sampled(every=40)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
@pytest.mark.parametrize("build", WORK)
def test_training_step(ranks: Ranks, build: Build, images: bool, n: int) -> None:
    check(ranks.run(n, one_step, build, images), TOLERANCE)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("build", WORK)
def test_work_on_shards(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vision tower or encoder, the merge of its features, the text layers and the loss.

    Results between graphs are sharded, as those of more than 1 MiB.
    """
    monkeypatch.setattr(output_rules, "LARGE_OUTPUT", 1024)
    flops, activations, breaks = WORK[build]
    model, batch = made(build, True)
    report = sp_compile.explain(model, sp=2, **batch)
    assert len(report.find_notes(NoteKind.GRAPH_BREAK)) == breaks
    assert report.work.flops_share >= flops
    assert report.work.activations_share >= activations


def test_positions_between_graphs() -> None:
    """The method that computes positions of image tokens in Python is at most one graph break."""
    model, _ = qwen25_vl(True)
    batch = tokens(4, 8)
    image = {
        "mm_token_type_ids": (batch["input_ids"] == IMAGE).int(),
        "image_grid_thw": qwen_batch(True)["image_grid_thw"],
    }
    expected = model.model.get_rope_index(batch["input_ids"], **image)

    def find(**arguments: Any) -> torch.Tensor:
        positions, _ = model.model.get_rope_index(batch["input_ids"], **arguments)
        return positions + 1

    compiled = torch.compile(find, backend="sp", options={"compiler": "eager"})
    assert torch.equal(compiled(**image), expected[0] + 1)
    explanation = torch._dynamo.explain(find)(**image)
    assert explanation.graph_break_count <= 1
    assert explanation.op_count <= 1


def test_features_of_vision_layers_are_added_in_one_graph() -> None:
    """As eager code adds them; an error if their number is not that of the mask."""
    model, _ = qwen3_vl(True)
    torch.compile(lambda x: x + 1, backend="sp", options={"compiler": "eager"})(torch.ones(1))  # replaces methods
    add = model.model.language_model._deepstack_process
    compiled = torch.compile(add, backend="eager", fullgraph=True)
    mask, hidden = torch.tensor([[True, False, True], [False, False, True]]), torch.randn(2, 3, 4)
    hidden[0, 1] = -0.0
    inputs = [x.requires_grad_() for x in (hidden, torch.randn(3, 4))]
    expected, found = (f(inputs[0], mask, inputs[1]) for f in (add, compiled))
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())
    weights = torch.randn(2, 3, 4)
    for x, y in zip(
        *(torch.autograd.grad(r, inputs, weights, retain_graph=True) for r in (found, expected)), strict=True
    ):
        assert torch.equal(x, y)
    for rows in (2, 4):
        with pytest.raises(RuntimeError):
            compiled(hidden, mask, torch.randn(rows, 4))


@pytest.mark.parametrize("module", ["user", "transformers.models.other"])
def test_a_method_with_another_body_is_called(module: str) -> None:
    """Also one with lines of the original, of a user or of another version of transformers."""
    from sp_compile.passes.capture.stand_ins.image_stand_ins import replace_methods

    class Model:
        def _deepstack_process(self, hidden_states: Any, visual_pos_masks: Any, visual_embeds: Any) -> Any:
            hidden_states = hidden_states.clone()
            local_this = hidden_states[visual_pos_masks, :] + 2 * visual_embeds
            hidden_states[visual_pos_masks, :] = local_this
            return hidden_states

    Model._deepstack_process.__module__ = module
    replace_methods(Model)
    model, mask, features = Model(), torch.tensor([[True, False, True]]), torch.ones(2, 4)
    compiled = torch.compile(model._deepstack_process, backend="eager")
    found = compiled(torch.zeros(1, 3, 4), mask, features)
    assert torch.equal(found, mask[..., None] * torch.full((4,), 2.0))
