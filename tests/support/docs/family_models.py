"""Build small models of the families of transformers and diffusers that the documents name.

Each builder returns a model and its keyword arguments: a batch of two, odd numbers of tokens, float32, no dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers

from .family_sizes import (
    BATCH,
    HEAD_DIM,
    HEADS,
    TEXT_TOKENS,
    VOCABULARY,
    WIDTH,
    build_text_model,
    shrink_arguments,
    shrink_config,
    text_inputs,
)

Built = tuple[torch.nn.Module, dict[str, Any]]

FRAMES, ROWS, COLUMNS = 3, 5, 7  # patches of a video; of an image without the frames
MAMBA = {"mamba_d_head": 32, "mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 16}
MAMBA_NAMES = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16}
ZAMBA = {"attention_hidden_size": 128, "attention_head_dim": 32}
HYBRID = ["linear_attention", "full_attention"]
SPARSE = {"num_key_value_heads": HEADS, "mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}

# family: class, and fields of the configuration that differ from the generic sizes
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen3-Next": ("Qwen3Next", {"layer_types": HYBRID}),
    "Qwen3.5 (text)": ("Qwen3_5", {"layer_types": HYBRID}),
    "Mamba2": ("Mamba2", {"num_heads": 8, "n_groups": 1}),
    "Bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "Falcon-H1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128}),
    "Nemotron-H": (
        "NemotronH",
        {**MAMBA_NAMES, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    ),
    "Zamba2": ("Zamba2", {**ZAMBA, "n_mamba_heads": 4, "layers_block_type": ["mamba", "hybrid", "mamba"]}),
    "GraniteMoeHybrid": ("GraniteMoeHybrid", {**MAMBA, "layer_types": HYBRID}),
    "OlmoHybrid": ("OlmoHybrid", {"layer_types": HYBRID, "linear_num_key_heads": 4, "linear_num_value_heads": 4}),
    "MiniMax": ("MiniMax", {"layer_types": HYBRID, "block_size": 32}),
    "RecurrentGemma": ("RecurrentGemma", {"num_hidden_layers": 3, "attention_window_size": 32}),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "DeepSeek-V3.2": ("DeepseekV32", {**SPARSE, "layer_types": ["indexed_attention"] * 2, "v_head_dim": 16}),
    "GLM-MoE-DSA": ("GlmMoeDsa", {**SPARSE, "layer_types": ["indexed_attention"] * 2}),
    "Kimi-Linear": ("KimiLinear", {**SPARSE, "layer_types": HYBRID}),
}


@dataclass(frozen=True)
class Family:
    """A family of models, with a builder of a small one."""

    name: str  # name in the table
    library: str  # "transformers" or "diffusers"
    build: Callable[[], Built]


def _text(name: str) -> Built:
    """Build a language model of `TEXT`."""
    prefix, changes = TEXT[name]
    names = (f"{prefix}ForCausalLM", f"{prefix}TextForCausalLM")
    model_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    return build_text_model(model_class, **changes)


def _vision(prefix: str, image: tuple[int, ...], **changes: Any) -> Built:
    """Build a vision transformer with patches of 8 x 8 pixels, and images after the batch."""
    model_class = getattr(transformers, f"{prefix}Model")
    config = shrink_config(model_class.config_class, **{"patch_size": 8, "num_channels": 3, **changes})
    return model_class(config), {"pixel_values": torch.randn(BATCH, *image)}


def _whisper() -> Built:
    config = shrink_config(transformers.WhisperConfig, num_mel_bins=16, max_source_positions=65)
    labels = torch.randint(3, VOCABULARY, (BATCH, 33))
    features = torch.randn(BATCH, 16, 130)
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": features,
        "labels": labels,
        "use_cache": False,
    }


def _t5() -> Built:
    model, inputs = build_text_model(transformers.T5ForConditionalGeneration, decoder_start_token_id=0)
    return model, {**inputs, "labels": torch.randint(3, VOCABULARY, (BATCH, 33))}


def _bert() -> Built:
    return transformers.BertForMaskedLM(shrink_config(transformers.BertConfig)), text_inputs()


def _diffusion(name: str, inputs: dict[str, Any], **changes: Any) -> Built:
    """Build a model of diffusers with the generic sizes and the arguments that differ from them."""
    model_class = getattr(diffusers, name)
    return model_class(**shrink_arguments(model_class, changes)), {**inputs, "return_dict": False}


def latents(channels: int = 8, patch: int = 2, frames: int | None = None) -> torch.Tensor:
    """Return the latents of an image, or of a video, of 5 x 7 patches a frame."""
    depth = () if frames is None else (frames,)
    return torch.randn(BATCH, channels, *depth, ROWS * patch, COLUMNS * patch)


def prompt(length: int = TEXT_TOKENS) -> torch.Tensor:
    return torch.randn(BATCH, length, WIDTH)


def prompt_padding() -> torch.Tensor:
    """Return the mask of prompts of 11 and 6 tokens."""
    return (torch.arange(TEXT_TOKENS) < torch.tensor([[TEXT_TOKENS], [6]])).long()


def _times() -> torch.Tensor:
    return torch.tensor([3, 7])


def image_ids(axes: int = 3) -> torch.Tensor:
    """Return the positions (zeros, row, column) of the tokens of an image."""
    grid = torch.meshgrid(*[torch.arange(1)] * (axes - 2), torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    return torch.stack([x.flatten().float() for x in grid], -1)


def _text_and_times(mask: str | None = None) -> dict[str, Any]:
    """Return the prompts, the timesteps, and the mask of the prompts by its name."""
    shared = {"encoder_hidden_states": prompt(), "timestep": _times()}
    return shared | ({mask: prompt_padding()} if mask else {})


def _dit() -> Built:
    square = torch.randn(BATCH, 8, 14, 14)
    inputs = {"hidden_states": square, "timestep": _times(), "class_labels": torch.tensor([1, 2])}
    return _diffusion("DiTTransformer2DModel", inputs, sample_size=14, norm_num_groups=4, num_embeds_ada_norm=1000)


def _pixart() -> Built:
    inputs = {"hidden_states": latents(), **_text_and_times("encoder_attention_mask")}
    inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    return _diffusion("PixArtTransformer2DModel", inputs, sample_size=14, norm_num_groups=4, out_channels=16)


def _wan() -> Built:
    return _diffusion("WanTransformer3DModel", {"hidden_states": latents(frames=FRAMES), **_text_and_times()})


def _ltx_video() -> Built:
    tokens = torch.randn(BATCH, FRAMES * ROWS * COLUMNS, 8)
    inputs = {"hidden_states": tokens, **_text_and_times("encoder_attention_mask")}
    inputs |= {"num_frames": FRAMES, "height": ROWS, "width": COLUMNS}
    return _diffusion("LTXVideoTransformer3DModel", inputs)


def _flux() -> Built:
    tokens, pooled = torch.randn(BATCH, ROWS * COLUMNS, 8), torch.randn(BATCH, WIDTH)
    inputs = {"hidden_states": tokens, **_text_and_times(), "pooled_projections": pooled}
    inputs |= {"img_ids": image_ids(), "txt_ids": torch.zeros(TEXT_TOKENS, 3)}
    return _diffusion("FluxTransformer2DModel", inputs)


def _sd3() -> Built:
    inputs = {"hidden_states": latents(), **_text_and_times(), "pooled_projections": torch.randn(BATCH, WIDTH)}
    return _diffusion("SD3Transformer2DModel", inputs, sample_size=16, pos_embed_max_size=16)


def _cogvideox() -> Built:
    video = latents(frames=FRAMES).transpose(1, 2).contiguous()
    angles = torch.randn(FRAMES * ROWS * COLUMNS, HEAD_DIM)
    inputs = {"hidden_states": video, **_text_and_times(), "image_rotary_emb": (angles.cos(), angles.sin())}
    return _diffusion(
        "CogVideoXTransformer3DModel", inputs, max_text_seq_length=TEXT_TOKENS, use_rotary_positional_embeddings=True
    )


def _hunyuan_video() -> Built:
    inputs = {"hidden_states": latents(frames=FRAMES), **_text_and_times("encoder_attention_mask")}
    inputs |= {"pooled_projections": torch.randn(BATCH, WIDTH), "guidance": torch.tensor([1.0, 2.0])}
    return _diffusion("HunyuanVideoTransformer3DModel", inputs)


def _qwen_image() -> Built:
    inputs = {"hidden_states": torch.randn(BATCH, ROWS * COLUMNS, 8), **_text_and_times("encoder_hidden_states_mask")}
    inputs["img_shapes"] = [[(1, ROWS, COLUMNS)]] * BATCH
    return _diffusion("QwenImageTransformer2DModel", inputs)


def _auraflow() -> Built:
    inputs = {"hidden_states": latents(), **_text_and_times()}
    return _diffusion("AuraFlowTransformer2DModel", inputs, sample_size=16, pos_embed_max_size=64)


def _lumina2() -> Built:
    inputs = {"hidden_states": latents(), **_text_and_times()}
    inputs["encoder_attention_mask"] = torch.ones(BATCH, TEXT_TOKENS, dtype=torch.bool)
    return _diffusion("Lumina2Transformer2DModel", inputs, axes_lens=(64, 64, 64), multiple_of=32)


def _sana() -> Built:
    inputs = {"hidden_states": latents(patch=1), **_text_and_times("encoder_attention_mask")}
    return _diffusion("SanaTransformer2DModel", inputs, sample_size=8)


def _mochi() -> Built:
    inputs = {"hidden_states": latents(frames=FRAMES), **_text_and_times("encoder_attention_mask")}
    inputs["encoder_attention_mask"] = inputs["encoder_attention_mask"].bool()
    return _diffusion("MochiTransformer3DModel", inputs)


def _allegro() -> Built:
    grid = torch.meshgrid(torch.arange(FRAMES), torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    positions = [x.flatten()[None] for x in grid]
    angles = [torch.randn(length, 8) for length in (FRAMES, ROWS, COLUMNS)]
    rotary = [(x.cos(), x.sin()) for x in angles]
    inputs = {"hidden_states": latents(frames=FRAMES), **_text_and_times("encoder_attention_mask")}
    inputs["image_rotary_emb"] = (rotary, positions)
    sizes = {"sample_height": ROWS * 2, "sample_width": COLUMNS * 2, "sample_frames": FRAMES}
    return _diffusion("AllegroTransformer3DModel", inputs, attention_head_dim=24, cross_attention_dim=96, **sizes)


def _latte() -> Built:
    inputs = {"hidden_states": latents(frames=FRAMES), **_text_and_times()}
    sizes = {"sample_size": 14, "patch_size": 2, "in_channels": 8, "video_length": FRAMES, "num_embeds_ada_norm": 1000}
    return _diffusion("LatteTransformer3DModel", inputs, norm_type="ada_norm_single", **sizes)


def _chroma() -> Built:
    inputs = {"hidden_states": torch.randn(BATCH, ROWS * COLUMNS, 8), **_text_and_times()}
    inputs |= {"img_ids": image_ids(), "txt_ids": torch.zeros(TEXT_TOKENS, 3)}
    sizes = {"approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 1}
    return _diffusion("ChromaTransformer2DModel", inputs, **sizes)


def _z_image() -> Built:
    images = [torch.randn(8, 1, ROWS * 2, COLUMNS * 2) for _ in range(BATCH)]
    inputs = {"x": images, "t": torch.tensor([0.3, 0.7]), "cap_feats": list(prompt())}
    return _diffusion("ZImageTransformer2DModel", inputs, n_kv_heads=HEADS, axes_lens=[64, 64, 64])


def _cosmos() -> Built:
    inputs = {"hidden_states": latents(frames=FRAMES), **_text_and_times()}
    inputs["fps"] = 24
    sizes = {"max_size": (8, 16, 16), "concat_padding_mask": False}  # resizing the mask needs torchvision
    return _diffusion("CosmosTransformer3DModel", inputs, **sizes)


IMAGE = (3, 64, 64)
VISION: dict[str, Callable[[], Built]] = {
    "ViT": lambda: _vision("ViT", IMAGE),
    "SigLIP vision": lambda: _vision("SiglipVision", (3, 56, 56), image_size=56),
    "VideoMAE": lambda: _vision("VideoMAE", (6, 3, 56, 56), image_size=56, num_frames=6, tubelet_size=2),
    "DINOv3 ViT": lambda: _vision("DINOv3ViT", IMAGE, num_register_tokens=4),
    "CLIP vision": lambda: _vision("CLIPVision", IMAGE),
    "Whisper": _whisper,
    "T5": _t5,
    "BERT": _bert,
}
DIFFUSION: dict[str, Callable[[], Built]] = {
    "DiT": _dit,
    "PixArt": _pixart,
    "Wan": _wan,
    "LTX": _ltx_video,
    "Flux": _flux,
    "SD3": _sd3,
    "CogVideoX": _cogvideox,
    "HunyuanVideo": _hunyuan_video,
    "Qwen-Image": _qwen_image,
    "AuraFlow": _auraflow,
    "Lumina2": _lumina2,
    "Sana": _sana,
    "Mochi": _mochi,
    "Allegro": _allegro,
    "Latte": _latte,
    "Chroma": _chroma,
    "Z-Image": _z_image,
    "Cosmos": _cosmos,
}
NAMED = [
    *(Family(name, "transformers", lambda name=name: _text(name)) for name in TEXT),
    *(Family(name, "transformers", build) for name, build in VISION.items()),
    *(Family(name, "diffusers", build) for name, build in DIFFUSION.items()),
]
