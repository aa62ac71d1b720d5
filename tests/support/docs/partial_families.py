"""Build small models of families that were on shards only in part, or that were refused, when they were first examined."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import transformers

from .family_models import Built, Family
from .family_sizes import BATCH, VOCABULARY, text_inputs

VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {**VISION, "intermediate_size": 128}


def _images(name: str, size: int = 64, **sizes: Any) -> Built:
    """Build an image model with its configuration and square images."""
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}Model")(config), {"pixel_values": torch.randn(BATCH, 3, size, size)}


def _swin() -> Built:
    stages = {"depths": [2, 2], "num_heads": [2, 4], "drop_path_rate": 0.0}
    return _images("Swin", image_size=64, patch_size=4, embed_dim=32, window_size=4, **stages)


def _hiera() -> Built:
    stages = {"depths": [1, 2, 2], "num_heads": [1, 2, 4], "num_query_pool": 2, "drop_path_rate": 0.0}
    units = {"patch_size": [7, 7], "patch_stride": [4, 4], "masked_unit_size": [4, 4]}
    return _images("Hiera", image_size=[64, 64], embed_dim=32, **stages, **units)


def _timesformer() -> Built:
    config = transformers.TimesformerConfig(image_size=48, patch_size=16, num_frames=5, **SIZES)
    return transformers.TimesformerModel(config), {"pixel_values": torch.randn(BATCH, 5, 3, 48, 48)}


def _segformer() -> Built:
    stages = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 2], "hidden_sizes": [32, 64]}
    patches = {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    return _images("Segformer", **stages, **patches, drop_path_rate=0.0)


def _sam() -> Built:
    windows = {"window_size": 3, "global_attn_indexes": [1], "mlp_dim": 128, "output_channels": 16}
    return _images("SamVision", image_size=64, patch_size=8, **VISION, **windows)


def _mobilevit() -> Built:
    return _images("MobileViT", image_size=64, hidden_sizes=[32, 48, 64], neck_hidden_sizes=[8, 16, 24, 32, 40, 48, 64])


def _grids(package: str, config: Any, model: str) -> Built:
    """Build a vision tower for two images of different sizes, which it reads from their grids.

    Args:
        package: The package of the model in transformers.models.
        config: The configuration of the complete model.
        model: The class of the tower.
    """
    vision = config.vision_config
    sizes = {"depth": 2, "hidden_size": 64, "embed_dim": 64, "num_heads": 4, "intermediate_size": 128, "mlp_ratio": 2}
    patches = {"patch_size": 4, "num_position_embeddings": 256, "window_size": 24, "image_size": 64}
    layers = {"fullatt_block_indexes": [1], "deepstack_visual_indexes": [1], "out_hidden_size": 64}
    for name, value in {**sizes, **patches, **layers}.items():
        if hasattr(vision, name):
            setattr(vision, name, value)
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    grid = torch.tensor([[1, 14, 10], [1, 6, 8]])
    rows = torch.randn(int(grid.prod(1).sum()), 3 * vision.temporal_patch_size * vision.patch_size**2)
    return getattr(module, model)(vision), {"hidden_states": rows, "grid_thw": grid}


def _siglip2() -> Built:
    config = transformers.Siglip2VisionConfig(num_patches=64, patch_size=4, **SIZES)
    sizes, mask = torch.tensor([[8, 7], [6, 5]]), torch.ones(2, 56, dtype=torch.int64)
    mask[1, 30:] = 0
    inputs = {"pixel_values": torch.randn(2, 56, 48), "pixel_attention_mask": mask, "spatial_shapes": sizes}
    return transformers.Siglip2VisionModel(config), inputs


def _mimi() -> Built:
    codes = {"codebook_size": 32, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16, "num_quantizers": 4}
    config = transformers.MimiConfig(
        num_filters=8, num_key_value_heads=4, head_dim=16, upsample_groups=64, **SIZES, **codes
    )
    return transformers.MimiModel(config), {"input_values": torch.randn(BATCH, 1, 1920 * 13)}


def _rwkv() -> Built:
    config = transformers.RwkvConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, context_length=64)
    return transformers.RwkvForCausalLM(config), text_inputs(35, use_cache=False)


def _fnet() -> Built:
    config = transformers.FNetConfig(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, intermediate_size=128)
    return transformers.FNetModel(config), {"input_ids": torch.randint(3, VOCABULARY, (BATCH, 35))}


def _focalnet() -> Built:
    levels = {"depths": [2, 2], "focal_levels": [2, 2], "focal_windows": [3, 3], "hidden_sizes": [32, 64]}
    return _images("FocalNet", image_size=64, embed_dim=32, **levels)


def _perceiver() -> Built:
    heads = {"num_self_attention_heads": 4, "num_cross_attention_heads": 4}
    sizes = {"num_latents": 17, "d_latents": 32, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2}
    return transformers.PerceiverModel(transformers.PerceiverConfig(**sizes, **heads)), {
        "inputs": torch.randn(BATCH, 75, 32)
    }


BUILDERS: dict[str, Callable[[], Built]] = {
    "Swin": _swin,
    "Hiera": _hiera,
    "TimeSformer": _timesformer,
    "SegFormer": _segformer,
    "ViT-MAE": lambda: _images("ViTMAE", 72, image_size=72, patch_size=8, **SIZES),
    "SAM vision": _sam,
    "MobileViT": _mobilevit,
    "Qwen2-VL vision": lambda: _grids(
        "qwen2_vl", transformers.Qwen2VLConfig(), "Qwen2VisionTransformerPretrainedModel"
    ),
    "Qwen2.5-VL vision": lambda: _grids(
        "qwen2_5_vl", transformers.Qwen2_5_VLConfig(), "Qwen2_5_VisionTransformerPretrainedModel"
    ),
    "Qwen3-VL vision": lambda: _grids("qwen3_vl", transformers.Qwen3VLConfig(), "Qwen3VLVisionModel"),
    "Qwen3.5 vision": lambda: _grids("qwen3_5", transformers.Qwen3_5Config(), "Qwen3_5VisionModel"),
    "GLM-4V vision": lambda: _grids("glm4v", transformers.Glm4vConfig(), "Glm4vVisionModel"),
    "SigLIP2": _siglip2,
    "Mimi": _mimi,
    "DPT": lambda: _images("DPT", 72, image_size=72, patch_size=8, backbone_out_indices=[0, 1], **SIZES),
    "RWKV-4": _rwkv,
    "FNet": _fnet,
    "FocalNet": _focalnet,
    "Perceiver": _perceiver,
}
PARTIAL = [Family(name, "transformers", build) for name, build in BUILDERS.items()]
