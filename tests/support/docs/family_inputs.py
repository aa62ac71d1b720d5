"""Build small models of any auto class of transformers with inputs that are chosen by the parameters of their forward.

Inputs of a kind, such as an image, have several forms. A model is given the first combination with which it runs.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import transformers

from .family_changes import CHANGES, INPUTS
from .family_models import Built
from .family_sizes import BATCH, TOKENS, VOCABULARY, has_parameter, shrink_config

PATCH, GRID = 8, 8  # pixels of a patch, and patches of a row and of a column of an image
FIRST_ID = 48  # lower ids are those of special tokens
SAMPLES, FRAMES, MELS = 14800, 130, 16  # of a recording, of its spectrogram
LABELS = 5
Inputs = dict[str, Any]


def build_model(name: str, model_class: type | None = None, allows_widths: bool = False) -> Built:
    """Build a model of transformers and find inputs for it.

    Args:
        name: The name of the class in its auto class.
        model_class: The class that is built; by default the one with the name.
        allows_widths: True to try a model with its own widths, too.

    Raises:
        Exception: The model runs with none of the forms of inputs: the error of the first one.
    """
    model_class = model_class or getattr(transformers, name)
    encodes = model_class.config_class().to_dict().get("is_encoder_decoder")
    changes = CHANGES.get(name, {}) | ({"decoder_start_token_id": 0, "pad_token_id": 0} if encodes else {})
    errors = []
    for keeps_widths in (False, True)[: 1 + allows_widths]:
        try:
            config = shrink_config(model_class.config_class, keeps_widths, **copy.deepcopy(changes))
            model = model_class(config).eval()
        except Exception as error:
            errors.append(error)
            continue
        try:
            return model, find_inputs(model, [INPUTS[name]()] if name in INPUTS else list_inputs(model))
        except Exception as error:
            errors.append(error)
    raise errors[0]


def find_inputs(model: torch.nn.Module, candidates: Iterable[Inputs]) -> Inputs:
    """Return the first of several forms of inputs with which a model runs.

    Args:
        model: The model.
        candidates: The forms, at least one.

    Raises:
        Exception: The model runs with none of them: the error of the first one.
    """
    errors = []
    for inputs in candidates:
        try:
            with torch.no_grad():
                model(**inputs)
            return inputs
        except Exception as error:
            errors.append(error)
    raise errors[0]


def list_inputs(model: torch.nn.Module) -> Iterator[Inputs]:
    """Yield combinations of inputs of a model.

    Args:
        model: The model.
    """
    kinds = [(name, forms) for name, forms in FORMS.items() if has_parameter(model.forward, name)]
    if any(name in ("pixel_values", "input_features") for name, _ in kinds):  # not a second form of the same content
        kinds = [(name, forms) for name, forms in kinds if name not in ("pixel_values_videos", "input_values")]
    if preferred := [forms for name, forms in PREFERRED.items() if has_parameter(model.forward, name)]:
        kinds = [(name, preferred[0] if name == "pixel_values" else forms) for name, forms in kinds]
    for choice in itertools.product(*[forms for _, forms in kinds]):
        inputs = {name: value for form in choice for name, value in form(model).items()}
        inputs = _add_places(model, inputs)
        yield {name: value for name, value in inputs.items() if has_parameter(model.forward, name)}


def find_field(config: Any, *names: str) -> Any:
    """Return the first field with one of some names in a configuration or in those nested in it; None without one.

    Args:
        config: The configuration.
        *names: The names, the preferred one first.
    """
    nested = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for name in names:
        for place in (config, *nested):
            if isinstance(value := getattr(place, name, None), int):
                return value
    return next((x for y in nested if y is not None and (x := find_field(y, *names)) is not None), None)


def _add_places(model: torch.nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs with a place in the text for each row of the features of images and recordings."""
    if "input_ids" not in inputs:
        return inputs
    ids, kinds = inputs["input_ids"], torch.zeros_like(inputs["input_ids"])
    for kind, (method, names) in enumerate(FEATURES.items(), 1):
        token = find_field(model.config, *names)
        rows = _count_rows(model, method, inputs)
        if token is None or not rows:
            continue
        places = torch.full((BATCH, rows // BATCH), token)
        ids = torch.cat([ids[:, :5], places, ids[:, 5:]], 1)
        kinds = torch.cat([kinds[:, :5], torch.full_like(places, kind), kinds[:, 5:]], 1)
    encodes = getattr(model.config, "is_encoder_decoder", False)
    labels = _decoder(model)["decoder_input_ids"] if encodes else ids.clone()
    return {**inputs, "labels": labels, "input_ids": ids, "token_type_ids": kinds, "mm_token_type_ids": kinds}


def _count_rows(model: torch.nn.Module, method: str, inputs: Inputs) -> int:
    """Return the number of rows that a method of a model makes of the inputs; 0 if it does not run."""
    function = getattr(model, method, None) or getattr(getattr(model, "model", None), method, None)
    if function is None:
        return 0
    try:
        with torch.no_grad():
            features = function(**{name: value for name, value in inputs.items() if has_parameter(function, name)})
    except Exception:
        return 0
    pooled = getattr(features, "pooler_output", None)
    features = features[0] if pooled is None and not isinstance(features, torch.Tensor) else pooled
    parts = features if isinstance(features, (list, tuple)) else [features]
    return sum(x.shape[:-1].numel() for x in parts)


def _text(model: torch.nn.Module) -> Inputs:
    return {"input_ids": torch.randint(FIRST_ID, VOCABULARY, (BATCH, TOKENS)), "use_cache": False}


def _image(model: torch.nn.Module) -> Inputs:
    """Return square images of the size of the configuration, else of more pixels for a model with convolutions."""
    size = find_field(model.config, "image_size") or 192
    pixels = torch.randn(BATCH, 3, size, size)
    places = (torch.arange(TOKENS) - 5).clamp(-1, GRID * GRID) % (GRID * GRID + 1) != GRID * GRID
    return {
        **{"pixel_values": pixels, "high_res_pixel_values": pixels, "image_sizes": torch.full((BATCH, 2), size)},
        **{"image_embeds_position_mask": places.expand(BATCH, TOKENS)},
    }


def _unsized(model: torch.nn.Module) -> Inputs:
    return {"pixel_values": _image(model)["pixel_values"]}


def _images(model: torch.nn.Module) -> Inputs:
    """Return one image, or one frame, in a dim of its own."""
    inputs = _image(model)
    mask = torch.ones(BATCH, TOKENS, 1, dtype=torch.int64)
    return {**inputs, "pixel_values": inputs["pixel_values"][:, None], "image_attention_mask": mask}


def _crops(model: torch.nn.Module) -> Inputs:
    """Return an image of two crops after the complete image."""
    size = PATCH * GRID
    return {
        "pixel_values": torch.randn(BATCH, 3, 3, size, size),
        "image_sizes": torch.tensor([[size, 2 * size]] * BATCH),
    }


def _patches(model: torch.nn.Module) -> Inputs:
    """Return the patches of all images in one dim, with the grids of the images."""
    frames = find_field(model.config, "temporal_patch_size") or 1
    patch = find_field(model.config, "patch_size") or PATCH
    grid = torch.tensor([[1, GRID, GRID]] * BATCH)
    rows = torch.randn(BATCH * GRID * GRID, 3 * frames * patch**2)
    merged = torch.ones(BATCH, dtype=torch.int64)
    return {"pixel_values": rows, "image_grid_thw": grid, "grid_thw": grid, "image_merge_sizes": merged}


def _squares(model: torch.nn.Module) -> Inputs:
    """Return the patches of all images as squares of pixels."""
    inputs = _patches(model)
    patch = find_field(model.config, "patch_size") or PATCH
    return {**inputs, "pixel_values": inputs["pixel_values"].unflatten(1, (-1, 3, patch, patch)).flatten(0, 1)}


def _row_of_squares(model: torch.nn.Module) -> Inputs:
    inputs = _squares(model)
    return {**inputs, "pixel_values": inputs["pixel_values"][None]}


def _packed(model: torch.nn.Module) -> Inputs:
    """Return the patches of each image in a dim of their own, with the shapes of the images."""
    patch = find_field(model.config, "patch_size") or PATCH
    mask, shapes = torch.ones(BATCH, GRID * GRID, dtype=torch.int64), torch.tensor([[GRID, GRID]] * BATCH)
    return {
        "pixel_values": torch.randn(BATCH, GRID * GRID, 3 * patch**2),
        **{"pixel_attention_mask": mask, "spatial_shapes": shapes},
    }


def _video(model: torch.nn.Module) -> Inputs:
    frames = find_field(model.config, "num_frames", "frames_per_clip") or 4
    video = torch.randn(BATCH, frames, 3, PATCH * GRID, PATCH * GRID)
    return {"pixel_values": video, "pixel_values_videos": video}


def _recording(model: torch.nn.Module) -> Inputs:
    labels = {} if has_parameter(model.forward, "input_ids") else {"labels": _labels(model)}
    return {"input_values": torch.randn(BATCH, SAMPLES), **labels}


def _channel(model: torch.nn.Module) -> Inputs:
    return {"input_values": torch.randn(BATCH, 1, SAMPLES)}


def _spectrum(model: torch.nn.Module) -> Inputs:
    mels = find_field(model.config, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim") or MELS
    mask = torch.ones(BATCH, FRAMES, dtype=torch.int64)
    has_text = has_parameter(model.forward, "input_ids")
    labels = {} if has_text else {"labels": _labels(model), "attention_mask": mask}
    return {"input_features": torch.randn(BATCH, mels, FRAMES), "feature_attention_mask": mask, **labels}


def _frames(model: torch.nn.Module) -> Inputs:
    inputs = _spectrum(model)
    return {**inputs, "input_features": inputs["input_features"].transpose(1, 2).contiguous()}


def _series(model: torch.nn.Module) -> Inputs:
    return {"past_values": torch.randn(BATCH, find_field(model.config, "context_length") or 64)}


def _channels(model: torch.nn.Module) -> Inputs:
    length, channels = (find_field(model.config, x) for x in ("context_length", "num_input_channels"))
    return {"past_values": torch.randn(BATCH, length or 64, channels or 1)}


def _mel_values(model: torch.nn.Module) -> Inputs:
    length = find_field(model.config, "max_length") or FRAMES
    return {"input_values": torch.randn(BATCH, length, find_field(model.config, "num_mel_bins") or MELS)}


def _query(model: torch.nn.Module) -> Inputs:
    return {"qformer_input_ids": torch.randint(FIRST_ID, VOCABULARY, (BATCH, 11))}


def _boxes(model: torch.nn.Module) -> Inputs:
    corners = torch.randint(0, 100, (BATCH, TOKENS, 2))
    return {"bbox": torch.cat([corners, corners + torch.randint(1, 100, (BATCH, TOKENS, 2))], 2)}


def _labels(model: torch.nn.Module) -> torch.Tensor:
    return torch.randint(FIRST_ID, VOCABULARY, (BATCH, LABELS))


def _decoder(model: torch.nn.Module) -> Inputs:
    return {"decoder_input_ids": torch.randint(FIRST_ID, VOCABULARY, (BATCH, 33))}


Form = Callable[[torch.nn.Module], Inputs]
FORMS: dict[str, tuple[Form, ...]] = {
    "input_ids": (_text,),
    "bbox": (_boxes,),
    "pixel_values": (_image, _unsized, _patches, _images, _video, _crops, _packed),
    "pixel_values_videos": (_video,),
    "hidden_states": (lambda model: {**_patches(model), "hidden_states": _patches(model)["pixel_values"]},),
    "input_features": (_spectrum, _frames),
    "input_values": (_recording, _channel, _mel_values),
    "qformer_input_ids": (_query,),
    "past_values": (_series, _channels),
    "decoder_input_ids": (lambda model: {}, _decoder),
}
# parameter of forward: the form of images of which it is a part
GRIDS = (_patches, _squares, _row_of_squares)
PREFERRED: dict[str, tuple[Form, ...]] = {"image_grid_thw": GRIDS, "grid_thw": GRIDS, "spatial_shapes": (_packed,)}
# method that returns rows of features: names of the id of the tokens in their places
FEATURES = {
    "get_image_features": ("image_token_id", "image_token_index"),
    "get_audio_features": ("audio_token_id", "audio_token_index"),
}
