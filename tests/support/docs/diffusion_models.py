"""Build small models of diffusers whose sizes or inputs differ from the generic ones.

A row of `SPECIAL` names the class of a model and returns the arguments of its constructor and its inputs that differ.
"""

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from .family_models import COLUMNS, FRAMES, ROWS, Built, image_ids, latents, prompt, prompt_padding
from .family_sizes import BATCH, HEAD_DIM, HEADS, TEXT_TOKENS, VOCABULARY, WIDTH, has_parameter, shrink_arguments

Special = tuple[dict[str, Any], dict[str, Any]]  # arguments of the constructor, and inputs

IMAGE, VIDEO, AUDIO = ROWS * COLUMNS, FRAMES * ROWS * COLUMNS, 9  # tokens
TIMES = (0.3, 0.7)
ROPE = (4, 6, 6)  # channels of a head by axis
KANDINSKY = {
    **{"in_visual_dim": 8, "out_visual_dim": 8, "in_text_dim": WIDTH, "in_text_dim2": WIDTH, "time_dim": 32},
    **{"axes_dims": ROPE, "num_text_blocks": 1, "num_visual_blocks": 2, "visual_cond": False},
}
AUDIO_SIZES = {
    **{"audio_in_channels": 8, "audio_out_channels": 8, "audio_num_attention_heads": HEADS},
    **{"audio_attention_head_dim": HEAD_DIM, "audio_cross_attention_dim": WIDTH},
}
WITHOUT_GRADIENTS = ("AnyFlowFARTransformer3DModel", "Kandinsky6SRTransformer3DModel")  # flex_attention on the CPU
UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": WIDTH}


def inputs_by_name(model: torch.nn.Module, hidden: torch.Tensor, times: torch.Tensor) -> dict[str, Any]:
    """Return the inputs of a model of diffusers by the names of its parameters.

    Args:
        model: The model.
        hidden: Its latents.
        times: A timestep for each row of the batch.
    """
    axes = len(model.config.get("axes_dims_rope", ROPE))
    pooled, sizes = torch.randn(BATCH, WIDTH), torch.tensor([[10.0, 14.0]] * BATCH)
    known = {
        **{"hidden_states": hidden, "timestep": times, "t": times, "timestep_r": times, "r_timestep": times},
        **{"encoder_hidden_states": prompt(), "encoder_attention_mask": prompt_padding(), "timesteps": times},
        **{"encoder_hidden_states_mask": prompt_padding(), "pooled_projections": pooled, "img_ids": image_ids(axes)},
        **{"txt_ids": torch.zeros(TEXT_TOKENS, axes), "guidance": times.float(), "global_hidden_states": pooled},
        **{"original_size": sizes, "target_size": sizes, "crop_coords": sizes * 0, "class_labels": times.long()},
        **{"img_shapes": [[(1, ROWS, COLUMNS)]] * BATCH, "num_frames": FRAMES, "height": ROWS, "width": COLUMNS},
        **{"encoder_mask": prompt_padding(), "mask": prompt_padding(), "return_dict": False},
    }
    parameters = inspect.signature(model.forward).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty} | {"encoder_hidden_states", "return_dict"}
    optional = {"timestep", "img_ids", "txt_ids", "pooled_projections", "img_shapes", "mask", "timesteps"}
    optional |= {"guidance"} if model.config.get("guidance_embeds") else set()
    return {name: known[name] for name in known if name in required | optional and has_parameter(model.forward, name)}


def build_special(name: str) -> Built:
    """Build a model of `SPECIAL`.

    Args:
        name: The name of its class.
    """
    changes, inputs = SPECIAL[name]()
    model_class = getattr(diffusers, name)
    model = model_class(**shrink_arguments(model_class, changes)).requires_grad_(name not in WITHOUT_GRADIENTS)
    named = inputs_by_name(model, _tokens(), torch.tensor(TIMES))
    return model, {**named, **inputs}


def _tokens(count: int = IMAGE, channels: int = 8) -> torch.Tensor:
    return torch.randn(BATCH, count, channels)


def _grid(*sizes: int) -> torch.Tensor:
    """Return the positions of a grid, one row for each."""
    return torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"), dim=-1).flatten(0, -2)


def _angles(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of rotary positions."""
    angles = torch.randn(count, HEAD_DIM)
    return angles.cos(), angles.sin()


def _ace_step() -> Special:
    sizes = {"audio_acoustic_hidden_dim": 4, "sliding_window": 16}
    return sizes, {"hidden_states": _tokens(133, 4), "context_latents": _tokens(133, 4)}


def _anyflow() -> Special:
    return {}, {"hidden_states": latents(frames=FRAMES).transpose(1, 2), **_times_of_frames()}


def _anyflow_far() -> Special:
    video = latents(patch=4, frames=FRAMES).transpose(1, 2)
    return {"full_chunk_limit": 2}, {"hidden_states": video, **_times_of_frames(), "chunk_partition": [1] * FRAMES}


def _times_of_frames() -> dict[str, torch.Tensor]:
    times = torch.tensor(TIMES)[:, None].expand(BATCH, FRAMES)
    return {"timestep": times, "r_timestep": times / 2}


def _bria_fibo() -> Special:
    layers = [torch.randn(BATCH, TEXT_TOKENS, 32) for _ in range(4)]
    return {"text_encoder_dim": 32}, {"text_encoder_layers": layers}


def _bria_fibo2() -> Special:
    sizes = {"min_num_gist_tokens": 8, "max_num_gist_tokens": 16, "gist_step": 4, "gist_min_text_len": 8}
    sizes |= {"gist_max_text_len": 32, "injection_layer_ids": (1,), "perceiver_num_layers": 1, "n_heads": HEADS}
    return {**sizes}, {"hidden_states": latents(), "encoder_hidden_states": torch.randn(BATCH, 2, TEXT_TOKENS, WIDTH)}


def _consisid() -> Special:
    inputs = {"hidden_states": latents(frames=FRAMES).transpose(1, 2).contiguous(), "image_rotary_emb": _angles(VIDEO)}
    return {"max_text_seq_length": TEXT_TOKENS, "use_rotary_positional_embeddings": True}, inputs


def _ernie_image() -> Special:
    inputs = {"hidden_states": latents(patch=1), "text_bth": prompt(), "text_lens": torch.tensor([TEXT_TOKENS, 7])}
    return {"rope_axes_dim": ROPE}, inputs


def _glm_image() -> Special:
    prior = {
        "prior_token_id": torch.randint(VOCABULARY, (BATCH, IMAGE)),
        "prior_token_drop": torch.rand(BATCH, IMAGE) < 0.3,
    }
    return {"prior_vq_quantizer_codebook_size": VOCABULARY, "condition_dim": 32}, {"hidden_states": latents(), **prior}


def _helios() -> Special:
    history = {"short": 2, "mid": 2, "long": 4}
    inputs: dict[str, Any] = {"hidden_states": latents(frames=FRAMES)}
    for name, frames in history.items():
        inputs[f"latents_history_{name}"] = latents(frames=frames)
        inputs[f"indices_latents_history_{name}"] = torch.arange(frames).expand(BATCH, -1)
    return {"rope_dim": ROPE}, inputs


def _hidream() -> Special:
    sizes = {"patch_size": 2, "axes_dims_rope": ROPE, "caption_channels": [WIDTH, WIDTH], "text_emb_dim": WIDTH}
    sizes |= {"llama_layers": list(range(4)), "max_resolution": (32, 32), "force_inference_output": True}
    inputs = {"hidden_states": torch.randn(BATCH, 8, 14, 14), "encoder_hidden_states_t5": prompt()}
    inputs |= {
        "encoder_hidden_states_llama3": torch.randn(4, BATCH, TEXT_TOKENS, WIDTH),
        "pooled_embeds": prompt()[:, 0],
    }
    return sizes, {**inputs, "img_ids": None}


def _hunyuan_video15() -> Special:
    inputs = {"hidden_states": latents(frames=FRAMES), "encoder_hidden_states_2": prompt(5)}
    inputs |= {"encoder_attention_mask_2": torch.ones(BATCH, 5).long(), "image_embeds": prompt(3)}
    return {"image_embed_dim": WIDTH, "patch_size": 2}, inputs


def _framepack() -> Special:
    sizes = {"has_image_proj": True, "image_proj_dim": WIDTH, "has_clean_x_embedder": True}
    inputs = {"hidden_states": latents(frames=FRAMES), "image_embeds": prompt(3)}
    inputs["indices_latents"] = torch.arange(FRAMES)
    for name, frames in {"clean": 2, "history_2x": 2, "history_4x": 4}.items():
        inputs[f"latents_{name}"] = latents(frames=frames)
        inputs[f"indices_latents_{name}"] = torch.arange(frames)
    return sizes, inputs


def _ideogram() -> Special:
    count = TEXT_TOKENS + IMAGE
    indicator = torch.tensor([3] * TEXT_TOKENS + [2] * IMAGE).expand(BATCH, -1)
    inputs = {"hidden_states": _tokens(count), "encoder_hidden_states": _tokens(count, WIDTH), "indicator": indicator}
    inputs |= {"position_ids": torch.arange(count)[:, None].expand(BATCH, -1, 3)}
    inputs |= {"segment_ids": torch.zeros(BATCH, count, dtype=torch.long)}
    return {"adaln_dim": WIDTH, "llm_features_dim": WIDTH, "mrope_section": (4, 2, 2)}, inputs


def _joy_image() -> Special:
    patches = torch.randn(BATCH, IMAGE, 8, 1, 2, 2)
    return {}, {"hidden_states": patches, "shape_list": [[(1, ROWS, COLUMNS)]] * BATCH}


def _kandinsky5() -> Special:
    positions = tuple(torch.arange(size) for size in (FRAMES, ROWS, COLUMNS))
    inputs = {"hidden_states": latents(frames=FRAMES).movedim(1, -1), "text_rope_pos": torch.arange(TEXT_TOKENS)}
    return KANDINSKY, {**inputs, "visual_rope_pos": positions}


def _kandinsky6() -> Special:
    return {**KANDINSKY, "in_audio_dim": 8, "out_audio_dim": 8}, {
        "hidden_states": latents(frames=FRAMES).movedim(1, -1),
        "audio_hidden_states": _tokens(AUDIO),
    }


def _kandinsky6_sr() -> Special:
    names = ("in_visual_dim", "out_visual_dim", "time_dim", "axes_dims", "num_visual_blocks")
    sizes = {name: KANDINSKY[name] for name in names} | {"nabla_window": (3, 3, 3)}
    return sizes, {"hidden_states": torch.randn(BATCH, FRAMES, 16, 24, 17)}


def _krea() -> Special:
    sizes = {"timestep_embed_dim": 32, "num_text_layers": 2, "text_num_attention_heads": HEADS}
    sizes |= {"text_num_key_value_heads": 2, "text_intermediate_size": 96, "num_layerwise_text_blocks": 1}
    inputs = {"encoder_hidden_states": torch.randn(BATCH, TEXT_TOKENS, 2, WIDTH)}
    inputs["position_ids"] = torch.cat([torch.zeros(TEXT_TOKENS, 3), image_ids()])
    return {**sizes, "num_refiner_text_blocks": 1}, inputs


def _ltx2() -> Special:
    inputs = {"hidden_states": _tokens(VIDEO), "audio_hidden_states": _tokens(AUDIO), "audio_num_frames": AUDIO}
    inputs |= {"audio_encoder_hidden_states": prompt(), "num_frames": FRAMES, "height": ROWS, "width": COLUMNS}
    return AUDIO_SIZES, inputs


def _minimax() -> Special:
    count = TEXT_TOKENS + VIDEO + AUDIO
    parts = torch.arange(count).split([TEXT_TOKENS, VIDEO, AUDIO])
    tags = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])
    inputs = {"hidden_states": _tokens(VIDEO, 32), "audio_hidden_states": _tokens(AUDIO), "token_tags": tags}
    inputs |= {f"{name}_indices": part for name, part in zip(("text", "video", "audio"), parts)}
    inputs |= {"timestep_indices": tags.clamp(max=1), "position_ids": torch.arange(count)[:, None].expand(-1, 3)}
    return {"audio_in_channels": 8, "time_embed_hidden_dim": WIDTH, "rope_freq_dim": 2}, inputs


def _minimax_music() -> Special:
    inputs = {"hidden_states": torch.randn(BATCH, 8, 133), "encoder_hidden_states": _tokens(133, WIDTH)}
    return {"condition_dim": WIDTH, "ff_inner_dim": 96, "rotary_dim": 8, "fourier_embedding_dim": 32}, inputs


def _omnigen() -> Special:
    count = TEXT_TOKENS + 1 + IMAGE
    inputs = {"hidden_states": latents(), "input_ids": torch.randint(VOCABULARY, (BATCH, TEXT_TOKENS))}
    inputs |= {"input_img_latents": [], "input_image_sizes": {}, "attention_mask": torch.ones(BATCH, count, count)}
    inputs["position_ids"] = torch.arange(count).expand(BATCH, -1)
    return {"rope_scaling": {"short_factor": [1] * 8, "long_factor": [1] * 8}, "num_key_value_heads": HEADS}, inputs


def _qwen_image21() -> Special:
    slots = torch.tensor([[False] * TEXT_TOKENS + [True] * 9] * BATCH)
    inputs = {"hidden_states": _tokens(36), "img_shapes": [[(1, 6, 6)]] * BATCH, "img_mask": slots}
    return {}, inputs


def _sana_refiner() -> Special:
    return AUDIO_SIZES, {"hidden_states": _tokens(VIDEO), "video_rotary_emb": (_tokens(VIDEO, 64), _tokens(VIDEO, 64))}


def _sana_wm() -> Special:
    sizes = {"softmax_every_n": 2, "mlp_ratio": 2.0, "fp32_attention": False}
    text = {"encoder_hidden_states": prompt()[:, None], "timestep": torch.tensor([[[3.0] * FRAMES], [[7.0] * FRAMES]])}
    return sizes, {"hidden_states": latents(patch=1, frames=FRAMES), **text}


def _temporal() -> Special:
    video = torch.randn(BATCH * 13, 8, ROWS, COLUMNS)
    return {"norm_num_groups": 4}, {"hidden_states": video, "num_frames": 13, "encoder_hidden_states": None}


def _wan_animate() -> Special:
    sizes = {"in_channels": 20, "latent_channels": 8, "motion_encoder_size": 8, "motion_style_dim": 16, "motion_dim": 4}
    sizes |= {"motion_encoder_channel_sizes": {"4": 8, "8": 8}, "motion_encoder_dim": 16, "image_dim": WIDTH}
    sizes |= {"face_encoder_hidden_dim": 16, "inject_face_latents_blocks": 1}
    inputs = {"hidden_states": latents(20, frames=FRAMES), "pose_hidden_states": latents(frames=FRAMES - 1)}
    inputs |= {"encoder_hidden_states_image": prompt(5), "face_pixel_values": torch.randn(BATCH, 3, 8, 8, 8)}
    return sizes, inputs


def _wan_animate2() -> Special:
    videos, conditions = (list(latents(frames=FRAMES)) for _ in range(2))
    grid = torch.tensor([[FRAMES, ROWS, COLUMNS]] * BATCH)
    inputs = {"hidden_states": videos, "condition_latents": conditions, "encoder_hidden_states": list(prompt())}
    inputs |= {"kv_cache": WanAnimate2KVCache(2), "kv_cache_mode": "extract", "seq_len": VIDEO}
    return {"in_dim": 16, "out_dim": 8, "use_img_emb": False, "text_len": 16}, {**inputs, "offset_grid_sizes": grid}


def _wan_vace() -> Special:
    video = {"hidden_states": latents(frames=FRAMES), "control_hidden_states": latents(frames=FRAMES)}
    return {"vace_in_channels": 8}, video


def _stable_audio() -> Special:
    sizes = {"num_key_value_attention_heads": 2, "time_proj_dim": 32, "global_states_input_dim": WIDTH}
    inputs = {"hidden_states": torch.randn(BATCH, 8, 133), "global_hidden_states": torch.randn(BATCH, 1, WIDTH)}
    return {**sizes, "cross_attention_input_dim": WIDTH}, {**inputs, "rotary_embedding": _angles(134)}


def _stable_audio3() -> Special:
    sizes = {"io_channels": 8, "depth": 2, "cond_token_dim": WIDTH, "global_cond_dim": WIDTH, "num_memory_tokens": 4}
    return {**sizes, "timestep_features_dim": 32}, {"hidden_states": torch.randn(BATCH, 8, 133)}


def _hunyuan_dit() -> Special:
    sizes = {"patch_size": 2, "sample_size": 14, "cross_attention_dim_t5": WIDTH, "text_len": TEXT_TOKENS}
    sizes |= {"text_len_t5": 7, "use_style_cond_and_image_meta_size": False}
    inputs = {
        "hidden_states": latents(),
        "text_embedding_mask": prompt_padding(),
        "encoder_hidden_states_t5": prompt(7),
    }
    inputs |= {"text_embedding_mask_t5": torch.ones(BATCH, 7).long(), "image_rotary_emb": _angles(IMAGE)}
    return {**sizes, "num_layers": 4}, inputs


def _prior() -> Special:
    inputs = {"hidden_states": torch.randn(BATCH, WIDTH), "proj_embedding": torch.randn(BATCH, WIDTH)}
    return {"embedding_dim": WIDTH, "num_embeddings": 133}, {
        **inputs,
        "encoder_hidden_states": prompt(133),
        "attention_mask": torch.ones(BATCH, 133, dtype=torch.bool),
    }


def _lumina_next() -> Special:
    angles = torch.randn(ROWS, COLUMNS, HEAD_DIM // 2)
    inputs = {"hidden_states": latents(), "image_rotary_emb": torch.polar(torch.ones_like(angles), angles)}
    inputs["cross_attention_kwargs"] = {}
    return {"num_kv_heads": 2, "multiple_of": 32}, inputs


def _unet() -> Special:
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return {**UNET, **blocks, "attention_head_dim": 4, "num_attention_heads": None}, {
        "sample": torch.randn(BATCH, 8, 16, 16)
    }


SPECIAL: dict[str, Callable[[], Special]] = {
    "AceStepTransformer1DModel": _ace_step,
    "AnyFlowFARTransformer3DModel": _anyflow_far,
    "AnyFlowTransformer3DModel": _anyflow,
    "BriaFibo2Transformer2DModel": _bria_fibo2,
    "BriaFiboTransformer2DModel": _bria_fibo,
    "ConsisIDTransformer3DModel": _consisid,
    "DreamLiteTransformer2DModel": lambda: ({"num_kv_heads": None}, {"hidden_states": latents()}),
    "EasyAnimateTransformer3DModel": lambda: (
        {"patch_size": 2, "mmdit_layers": 1},
        {"hidden_states": latents(frames=FRAMES)},
    ),
    "ErnieImageTransformer2DModel": _ernie_image,
    "GlmImageTransformer2DModel": _glm_image,
    "HeliosTransformer3DModel": _helios,
    "HiDreamImageTransformer2DModel": _hidream,
    "HunyuanVideo15Transformer3DModel": _hunyuan_video15,
    "HunyuanVideoFramepackTransformer3DModel": _framepack,
    "Ideogram4Transformer2DModel": _ideogram,
    "JoyImageEditPlusTransformer3DModel": _joy_image,
    "Kandinsky5Transformer3DModel": _kandinsky5,
    "Kandinsky6SRTransformer3DModel": _kandinsky6_sr,
    "Kandinsky6Transformer3DModel": _kandinsky6,
    "Krea2Transformer2DModel": _krea,
    "LTX2VideoTransformer3DModel": _ltx2,
    "MiniMaxH3Transformer3DModel": _minimax,
    "MiniMaxMusic3Transformer1DModel": _minimax_music,
    "OmniGenTransformer2DModel": _omnigen,
    "PRXTransformer2DModel": lambda: ({"axes_dim": [8, 8]}, {"hidden_states": latents()}),
    "QwenImage21Transformer2DModel": _qwen_image21,
    "SanaWMLTX2RefinerTransformer3DModel": _sana_refiner,
    "SanaWMTransformer3DModel": _sana_wm,
    "TransformerTemporalModel": _temporal,
    "WanAnimate2Transformer3DModel": _wan_animate2,
    "WanAnimateTransformer3DModel": _wan_animate,
    "WanVACETransformer3DModel": _wan_vace,
    "StableAudioDiTModel": _stable_audio,
    "StableAudio3DiTModel": _stable_audio3,
    "HunyuanDiT2DModel": _hunyuan_dit,
    "PriorTransformer": _prior,
    "LuminaNextDiT2DModel": _lumina_next,
    "UNet2DConditionModel": _unet,
}
