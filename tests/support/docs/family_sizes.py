"""Shrink configurations of transformers and diffusers by the names of their fields.

One set of sizes serves all families: 4 heads of 16 channels, 64 channels, 2 layers. Layers of several types are
shrunk to the fewest that contain each type.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

TOKENS = 133  # tokens of a text: odd, more than two chunks of 64
TEXT_TOKENS = 11  # tokens of the prompt of a diffusion model
BATCH = 2
WIDTH, HEADS, HEAD_DIM, VOCABULARY = 64, 4, 16, 256
ROPE_DIMS = {2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}  # channels of a head by the number of positions

# size: names of the fields that receive it
NAMES_BY_SIZE: dict[Any, str] = {
    2: """
        num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_key_value_heads num_encoder_layers num_single_layers num_experts_per_tok num_experts_per_token moe_topk
        moe_k moe_top_k top_k_experts num_kv_heads n_kv_heads num_mmdit_layers num_single_dit_layers num_hidden_groups
        linear_num_key_heads experts_per_token
    """,
    1: """
        n_group topk_group num_refiner_layers n_refiner_layers n_shared_experts num_shared_experts
        moe_num_shared_experts first_k_dense_replace bos_token_id moe_num_dense_layers num_dense_layers num_expert_group
    """,
    0: "pad_token_id num_nextn_predict_layers",
    HEADS: """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts
        num_local_experts n_routed_experts moe_num_experts num_cross_attention_heads linear_num_value_heads
        linear_num_heads mamba_n_heads index_n_heads norm_num_groups depth nheads
    """,
    8: "qk_rope_head_dim qk_nope_head_dim index_topk in_channels out_channels rotary_dim",
    HEAD_DIM: """
        head_dim attention_head_dim v_head_dim kv_lora_rank d_kv linear_key_head_dim linear_value_head_dim
        linear_head_dim cross_attention_head_dim index_head_dim state_size ssm_state_size mamba_d_state chunk_size
        mamba_chunk_size kv_channels hidden_size_per_head global_head_dim swa_head_dim
    """,
    32: """
        moe_intermediate_size shared_expert_intermediate_size q_lora_rank freq_dim frequency_embedding_size
        mlp_dim_per_expert moe_shared_expert_intermediate_size shared_intermediate_size timestep_size
    """,
    WIDTH: """
        hidden_size d_model n_embd embed_dim embedding_size word_embed_proj_dim projection_dim lru_width dim text_dim
        joint_attention_dim cross_attention_dim caption_channels caption_projection_dim pooled_projection_dim
        text_embed_dim cap_feat_dim time_embed_dim context_in_dim text_hidden_dim adaln_lora_dim hidden_dim model_dim
        emb_dim text_states_dim encoder_hidden_states_channels attention_hidden_size time_step_emb_dim adaln_embed_dim
        text_in_dim text_feature_dim text_embed_2_dim siglip_feat_dim image_size hidden_size_global
        out_hidden_size vision_hidden_size adapter_in_dim output_channels fpn_hidden_size
        adapter_input_size upsample_groups codebook_dim cross_hidden_size
    """,
    96: """
        intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size mlp_hidden_size
        dense_intermediate_size ff_dim expert_ffn_hidden_size moe_ffn_hidden_size intermediate_size_mlp
    """,
    VOCABULARY: """
        vocab_size vocab_size_per_layer_input max_position_embeddings n_positions n_ctx max_source_positions
        max_target_positions max_sequence_length max_seq_len
    """,
}
SIZES = {name: size for size, names in NAMES_BY_SIZE.items() for name in names.split()}
# fields that depend on the number of layers, or are not arguments
NOT_KEPT = (
    "layer_types",
    "mlp_layer_types",
    "model_type",
    "transformers_version",
    "stage_names",
    "dtype",
    "_name_or_path",
)
SPECIAL_TOKENS = ("eos_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id", "mask_token_id")


def shrink_config(config_class: type, keeps_widths: bool = False, **changes: Any) -> Any:
    """Return a small configuration of a class of transformers.

    Args:
        config_class: The class.
        keeps_widths: True to reduce only the number of layers.
        **changes: Fields with other values than those of `SIZES`; for a nested configuration a dict of its fields.
    """
    default = config_class()
    fields = default.to_dict()
    values = {name: _smaller(name, value) for name, value in fields.items() if _is_reducible(name, value)}
    values = {name: value for name, value in values.items() if "layers" in name} if keeps_widths else values
    values |= {name: 2 for name in SPECIAL_TOKENS if fields.get(name) is not None}
    values |= _shrink_layers(default, fields)
    values |= ({} if keeps_widths else _shrink_lists(fields)) | _shrink_outputs(fields)
    large = [name for name, value in fields.items() if _is_large_id(name, value)]
    values |= {name: 3 + index for index, name in enumerate(sorted(set(large) - set(SPECIAL_TOKENS)))}
    if not keeps_widths and fields.get("num_key_value_heads") == fields.get("num_attention_heads") is not None:
        values["num_key_value_heads"] = HEADS
    if fields.get("head_dim") == fields.get("qk_rope_head_dim") is not None:
        values["head_dim"] = values["qk_rope_head_dim"]
    for name in getattr(config_class, "sub_configs", {}):
        if hasattr(nested := getattr(default, name, None), "sub_configs") and isinstance(changes.get(name, {}), dict):
            own = _own_fields(nested) | _shrink_outputs(nested.to_dict())
            values[name] = shrink_config(type(nested), keeps_widths, **own | changes.pop(name, {}))
    for name in ("layer_types", "layers_block_type"):
        values |= {"num_hidden_layers": len(changes[name])} if name in changes else {}
    return config_class(**values | changes)


def shrink_arguments(model_class: type, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return small arguments of the constructor of a model of diffusers.

    Args:
        model_class: The class of the model.
        changes: Arguments with other values than those of `SIZES`.
    """
    parameters = inspect.signature(model_class.__init__).parameters.values()
    values = {p.name: SIZES[p.name] for p in parameters if p.name in SIZES and _is_reducible(p.name, p.default)}
    for p in parameters:
        if p.name in ("axes_dims_rope", "rope_axes_dim", "axes_dims", "axes_dim_rope", "rope_dim_list"):
            values[p.name] = ROPE_DIMS[3 if p.default is None else len(p.default)]
        if p.name == "vace_layers":
            values[p.name] = [0, 1]
    return {**values, **changes}


def text_inputs(length: int = TOKENS, **more: Any) -> dict[str, Any]:
    """Return token ids with labels, and other keyword arguments of a language model.

    Args:
        length: The number of tokens.
        **more: The other arguments.
    """
    ids = torch.randint(3, VOCABULARY, (BATCH, length))
    return {"input_ids": ids, "labels": ids.clone(), **more}


def build_text_model(model_class: type, length: int = TOKENS, **changes: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a small language model of transformers and its keyword arguments.

    Args:
        model_class: The class of the model.
        length: The number of tokens.
        **changes: Fields of its configuration.
    """
    model = model_class(shrink_config(model_class.config_class, **changes))
    cached = {"use_cache": False} if has_parameter(model.forward, "use_cache") else {}
    return model, text_inputs(length, **cached)


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has a parameter with a name.

    Args:
        function: The function.
        name: The name.
    """
    return name in inspect.signature(function).parameters


def _is_reducible(name: str, value: Any) -> bool:
    """Return True if a field has a size of `SIZES` that replaces its default."""
    return name in SIZES and (value is None or isinstance(value, int)) and not isinstance(value, bool)


def _is_large_id(name: str, value: Any) -> bool:
    """Return True if a field is the id of a token that is not in the small vocabulary."""
    return name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY


def _smaller(name: str, value: int | None) -> int | None:
    """Return the size of a field, which remains None if it is None and derived from others."""
    derived = ("q_lora_rank", "lru_width", "n_inner", "global_head_dim")
    return value if value is None and (name in derived or name in ("pad_token_id", "bos_token_id")) else SIZES[name]


def _own_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a nested configuration without a generic size that differ from the defaults of its class."""
    usual = type(config)().to_dict()
    own = {name: value for name, value in config.to_dict().items() if name in usual and value != usual[name]}
    kept = (str, bool, float, list, tuple)
    return {name: value for name, value in own.items() if isinstance(value, kept) and name not in NOT_KEPT}


def _shrink_lists(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of rotary embeddings, and the sizes of images, that fit the generic sizes."""
    values: dict[str, Any] = {"in_channels": 3} if fields.get("in_channels") == 3 else {}  # those of an image
    rope = fields.get("rope_parameters")
    if rope and "mrope_section" in rope:
        values["rope_parameters"] = rope | {"mrope_section": [2, 3, 3]}
    if fields.get("image_grid_pinpoints"):
        values["image_grid_pinpoints"] = [[WIDTH, 2 * WIDTH], [2 * WIDTH, WIDTH]]
    if isinstance(patch := fields.get("patch_size"), int) and patch > 8:
        values["patch_size"] = 8
    for name, size in (("image_size", WIDTH), ("patch_size", 8)):
        values |= {name: [size, size]} if isinstance(fields.get(name), (list, tuple)) and len(fields[name]) == 2 else {}
    return values


def _shrink_outputs(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fewest layers with which a backbone has its number of results, one after each of the last layers."""
    outputs = [x for x in fields.get("out_indices") or () if x > 0]
    if not outputs or "num_hidden_layers" not in fields:
        return {}
    layers = max(2, len(outputs))
    last = list(range(layers - len(outputs) + 1, layers + 1))
    return {"num_hidden_layers": layers, "out_indices": last, "out_features": None}


def _shrink_layers(default: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the lists of layer types, and the number of layers, of the fewest layers that contain each type."""
    count = getattr(default, "num_hidden_layers", None)
    lists = {name: value for name, value in fields.items() if isinstance(value, (list, tuple)) and len(value) == count}
    kinds = list(zip(*lists.values()))
    if not kinds or any(isinstance(x, (list, dict)) for kind in kinds for x in kind):
        return {}
    chosen: list[int] = []
    for values in lists.values():
        for kind in dict.fromkeys(values):
            if not any(values[i] == kind for i in chosen):
                chosen.append(values.index(kind))
    chosen = sorted([*chosen, *(i for i in range(len(kinds)) if i not in chosen)][: max(2, len(chosen))])
    return {name: [values[i] for i in chosen] for name, values in lists.items()} | {"num_hidden_layers": len(chosen)}
