"""List the fields and inputs of models of transformers that differ from the generic ones of `family_sizes.py`.

A key is the name of a class in an auto class of transformers. A nested configuration is a dict of its own changes.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import ResNetConfig

from .family_models import HYBRID, TEXT
from .family_sizes import BATCH, HEAD_DIM, HEADS, TOKENS, VOCABULARY, WIDTH, text_inputs

SWIN = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
INDEXER = {"indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM, "indexer_compress_ratio": 4}
LATENT = {
    **{"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "v_head_dim": HEAD_DIM},
    **{"q_lora_rank": 32, "kv_lora_rank": HEAD_DIM, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
}
SHARED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
REFORMER = {
    **{"attn_layers": ["local", "lsh"], "axial_pos_shape": [16, 10], "axial_pos_embds_dim": [16, 48], "num_buckets": 4},
    **{"lsh_attn_chunk_length": 16, "local_attn_chunk_length": 16, "hash_seed": 0},
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
RESNET = {
    **{"backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_kwargs": None},
    "backbone_config": ResNetConfig(depths=[1, 1, 1, 1], out_features=["stage2", "stage3", "stage4"]),
}
SECTIONS = {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}}
SECTIONED = ("Glm46V", "Glm4v", "GlmOcr", "PaddleOCRVL", "Qwen2VL", "Qwen2_5_VL", "Qwen2_5OmniThinker")
FORECAST = {"prediction_length": 8, "context_length": 32, "lags_sequence": [1, 2, 3], "num_time_features": 2}
DETR = ("ConditionalDetr", "DabDetr", "DeformableDetr", "Detr", "TableTransformer")
PLAIN = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 2,
    "global_head_dim": HEAD_DIM,
}

CHANGES: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"layer_types": HYBRID, "mlp_layer_types": ["dense", "sparse"]},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 64},
    "CohereCompassForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {**ROPE, "mrope_section": [4, 2, 2]}, "full_attention": None},
    },
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "Dots3NoteForCausalLM": {f"swa_{name}": value for name, value in LATENT.items()},
    "EncoderDecoderModel": {"pad_token_id": 0},
    "EsmForMaskedLM": {"mask_token_id": 2, "pad_token_id": 0},
    "Gemma3nForCausalLM": {
        **{**SHARED, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
        "intermediate_size": 96,
    },
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": PLAIN, "backbone_hidden_size": WIDTH},
    "GraniteMoeHybridForCausalLM": TEXT["GraniteMoeHybrid"][1],
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": TEXT["Mamba2"][1],
    "Qwen4ExpForCausalLM": {
        **INDEXER,
        "indexer_budget": 16,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_lowrank": 16,
    },
    "ReformerForMaskedLM": REFORMER,
    "ReformerModelWithLMHead": {**REFORMER, "is_decoder": True},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": TEXT["Zamba2"][1],
    "ZambaForCausalLM": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 128},
        "attention_head_dim": 32,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "DonutSwinForImageClassification": SWIN,
    "EfficientNetForImageClassification": {"hidden_dim": 2560, "depth_coefficient": 1.0},
    "HieraForImageClassification": {
        **{"image_size": [64, 64], "embed_dim": 32, "depths": [1, 2, 2], "num_heads": [1, 2, 4], "num_query_pool": 2},
        **{"masked_unit_size": [4, 4]},
    },
    "LevitForImageClassification": {"patch_size": 16},
    "ShieldGemma2ForImageClassification": {"yes_token_index": 7, "no_token_index": 8},
    "SwinForImageClassification": SWIN,
    **{f"{name}ForObjectDetection": RESNET for name in DETR},
    **{f"{name}ForConditionalGeneration": SECTIONS for name in SECTIONED},
    "AriaForConditionalGeneration": {"projector_patch_to_query_dict": {64: 16}},
    "AutoformerModel": FORECAST,
    "Blip2ForConditionalGeneration": {"image_token_index": 3},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 3}},
    "CohereCompassForConditionalGeneration": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": {**ROPE, "mrope_section": [4, 2, 2]}, "full_attention": None},
        }
    },
    "DepthAnythingForDepthEstimation": {"reassemble_hidden_size": WIDTH},
    "PromptDepthAnythingForDepthEstimation": {"reassemble_hidden_size": WIDTH},
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "DeepseekVLHybridForConditionalGeneration": {"high_res_vision_config": {"global_attn_indexes": [0, 1]}},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 3, "<|extra_200|>": 4}},
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}}
    },
    "FunAsrNanoForConditionalGeneration": {"adaptor_config": {"intermediate_size": HEAD_DIM}},
    "Glm5NextForConditionalGeneration": {"text_config": {"index_kpool": 4}},
    "HYV4VLForConditionalGeneration": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}},
    "InformerModel": FORECAST,
    "InstructBlipForConditionalGeneration": {"image_token_index": 3},
    "InstructBlipVideoForConditionalGeneration": {"video_token_index": 3},
    "Llama4ForConditionalGeneration": {
        "vision_config": {
            **{"intermediate_size": 256, "projector_input_dim": WIDTH},
            **{"projector_output_dim": WIDTH, "vision_output_dim": WIDTH},
        }
    },
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "NemotronH_Omni_Reasoning_V3": {"vision_config": {"video_temporal_patch_size": 2}},
    "PPFormulaNetForConditionalGeneration": {"post_conv_in_channels": WIDTH},
    "Qwen4ExpForConditionalGeneration": {
        "text_config": {
            **{**INDEXER, "indexer_budget": 16, "hc_lowrank": 16},
            "layer_types": ["linear_attention", "indexed_attention"],
        }
    },
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 32}},
    "TimeSeriesTransformerModel": FORECAST,
    "VJEPA2ForVideoClassification": {"frames_per_clip": 4},
    "VipLlavaForConditionalGeneration": {"vision_feature_layers": [-2, -1]},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}},
    "Swinv2ForImageClassification": {**SWIN, "pretrained_window_sizes": [0, 0]},
}


def _codes() -> dict[str, Any]:
    """Return the codes of four codebooks, and their labels."""
    codes = torch.randint(3, VOCABULARY, (BATCH * HEADS, TOKENS))
    return {"input_ids": codes, "labels": codes.unflatten(0, (BATCH, HEADS)).transpose(1, 2)}


def _shared_states() -> dict[str, Any]:
    """Return the keys and values of a larger model, by the type of its layers."""
    states = {name: tuple(torch.randn(BATCH, 2, TOKENS, HEAD_DIM) for _ in "kv") for name in SHARED["layer_types"]}
    return {"inputs_embeds": torch.randn(BATCH, TOKENS, 2 * WIDTH), "shared_kv_states": states}


def _patches() -> dict[str, Any]:
    """Return the patches of two images of 8 x 7 and 6 x 5 patches."""
    mask = (torch.arange(56) < torch.tensor([[56], [30]])).long()
    sizes = torch.tensor([[8, 7], [6, 5]])
    return {"pixel_values": torch.randn(BATCH, 56, 192), "pixel_attention_mask": mask, "spatial_shapes": sizes}


def _pixels_and_text() -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": torch.randn(BATCH, 3, 64, 64)}


def _tiles() -> dict[str, Any]:
    """Return a text with an image of four tiles for each row."""
    ratios = torch.ones(BATCH, 1, dtype=torch.int64)
    return {
        **text_inputs(),
        **{"pixel_values": torch.randn(BATCH, 1, 4, 3, 64, 64), "aspect_ratio_ids": ratios},
        **{"aspect_ratio_mask": torch.ones(BATCH, 1, 4, dtype=torch.int64)},
        **{"cross_attention_mask": torch.ones(BATCH, TOKENS, 1, 4, dtype=torch.int64)},
    }


def _flattened_patches() -> dict[str, Any]:
    """Return the patches of an image, each after its row and its column, and labels."""
    places = torch.cartesian_prod(torch.arange(1, 8), torch.arange(1, 10)).float().expand(BATCH, 63, 2)
    patches = torch.cat([places, torch.randn(BATCH, 63, 768)], 2)
    return {"flattened_patches": patches, "labels": torch.randint(3, VOCABULARY, (BATCH, 33))}


def _forecast() -> dict[str, Any]:
    """Return past values with the lags of a forecast, and the values to forecast."""
    past, future = torch.randn(BATCH, 35), torch.randn(BATCH, 8)
    return {
        **{"past_values": past, "past_time_features": torch.randn(BATCH, 35, 2), "future_values": future},
        **{"past_observed_mask": torch.ones(BATCH, 35), "future_time_features": torch.randn(BATCH, 8, 2)},
    }


# all inputs of a model
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "GitForCausalLM": _pixels_and_text,
    "Gemma4UnifiedAssistantForCausalLM": _shared_states,
    **dict.fromkeys(("AutoformerModel", "InformerModel", "TimeSeriesTransformerModel"), _forecast),
    **dict.fromkeys(("ChameleonForConditionalGeneration", "Emu3ForConditionalGeneration"), text_inputs),
    "MllamaForConditionalGeneration": _tiles,
    "Pix2StructForConditionalGeneration": _flattened_patches,
    "VitsModel": lambda: {"input_ids": torch.randint(3, 38, (BATCH, TOKENS))},
    "Pop2PianoForConditionalGeneration": lambda: {
        "input_features": torch.randn(BATCH, TOKENS, WIDTH),
        "labels": torch.randint(3, VOCABULARY, (BATCH, 33)),
    },
    "ImageGPTForImageClassification": lambda: {"input_ids": torch.randint(3, VOCABULARY, (BATCH, TOKENS))},
    "MusicgenForCausalLM": _codes,
    "MusicgenMelodyForCausalLM": _codes,
    "PerceiverForMaskedLM": lambda: text_inputs(VOCABULARY),  # all positions
    "Qwen4ExpForCausalLM": lambda: text_inputs(11),  # its indexer is a Python loop over the batch and the tokens
    "ReformerForMaskedLM": lambda: text_inputs(144),  # a multiple of the chunks, else a pass through numpy pads it
    "ReformerModelWithLMHead": lambda: text_inputs(144),
    "ShieldGemma2ForImageClassification": lambda: {"input_ids": torch.randint(3, VOCABULARY, (BATCH, TOKENS))},
    "Siglip2ForImageClassification": _patches,
}
