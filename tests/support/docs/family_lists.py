"""List the families of each table of `support.docs.families`.

The tables other than "named" contain every class of an auto class of transformers, or every transformer of diffusers,
with the generic sizes of `family_sizes.py`, or those of `diffusion_models.py`. Other classes that need other sizes or
inputs fail to build.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import diffusers
import torch
import transformers
from transformers.models.auto import modeling_auto

from .diffusion_models import SPECIAL, build_special, inputs_by_name
from .family_changes import CHANGES, INPUTS
from .family_models import COLUMNS, DIFFUSION, FRAMES, NAMED, ROWS, Built, Family, latents
from .family_sizes import BATCH, VOCABULARY, build_text_model, shrink_arguments, shrink_config
from .partial_families import PARTIAL

AUTO_CLASSES = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "images": "IMAGE_CLASSIFICATION",
    "translation": "SEQ_TO_SEQ_CAUSAL_LM",
}
TEXT_TABLES = ("causal", "masked", "translation")


@cache
def families(table: str) -> list[Family]:
    """Return the families of a table.

    Args:
        table: The key of the table.
    """
    if table == "named":
        return [*NAMED, *PARTIAL]
    if table == "diffusion":
        named = {build.__name__.replace("_", "") for build in DIFFUSION.values()}
        names = sorted({x for x in dir(diffusers) if "Transformer" in x and x.endswith("Model")} | set(SPECIAL))
        shown = [name for name in names if _short_name(name) not in named]
        return [Family(name, "diffusers", partial(_build_diffusion, name)) for name in shown]
    names_by_type = getattr(modeling_auto, f"MODEL_FOR_{AUTO_CLASSES[table]}_MAPPING_NAMES")
    listed = [x for names in names_by_type.values() for x in ([names] if isinstance(names, str) else names)]
    if table == "images":  # not the variants of a family with another head
        listed = [x for x in listed if x.endswith("ForImageClassification")]
    build = _build_text if table in TEXT_TABLES else _build_images
    return [Family(name, "transformers", partial(build, name)) for name in sorted(set(listed))]


def _short_name(class_name: str) -> str:
    """Return the name of a class of diffusers without its ending, in lower case."""
    return class_name.split("Transformer")[0].lower()


def _build_text(name: str) -> Built:
    """Build a language model of transformers from token ids and labels."""
    model_class = getattr(transformers, name)
    encodes = model_class.config_class().to_dict().get("is_encoder_decoder")
    has_start = encodes and not name.endswith("ForCausalLM")
    changes = CHANGES.get(name, {}) | ({"decoder_start_token_id": 0} if has_start else {})
    model, inputs = build_text_model(model_class, **changes)
    if has_start:
        inputs["labels"] = torch.randint(3, VOCABULARY, (BATCH, 33))
    return model, _inputs(name, inputs)


def _build_images(name: str) -> Built:
    """Build the backbone of an image model of transformers, with patches of 8 x 8 pixels if they were larger.

    The backbone is a tower if the model encodes texts, too, and the model itself if it has no backbone.
    """
    prefix = name.removesuffix("ForImageClassification")
    names = (f"{prefix}VisionModel", f"{prefix}Model", name)
    model_class = next(getattr(transformers, x) for x in names if hasattr(transformers, x))
    patch = model_class.config_class().to_dict().get("patch_size")
    changes = {"patch_size": 8} if isinstance(patch, int) and patch > 8 else {}
    model = model_class(shrink_config(model_class.config_class, **changes | CHANGES.get(name, {})))
    return model, _inputs(name, {"pixel_values": torch.randn(BATCH, 3, 64, 64)})


def _inputs(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a model of `INPUTS`, or others if it is not in there."""
    return {**{k: v for k, v in inputs.items() if k == "use_cache"}, **INPUTS[name]()} if name in INPUTS else inputs


def _build_diffusion(name: str) -> Built:
    """Build a transformer of diffusers with the first of several forms of inputs with which it runs."""
    if name in SPECIAL:
        return build_special(name)
    model_class = getattr(diffusers, name)
    model = model_class(**shrink_arguments(model_class, {})).eval()
    errors = []
    for hidden, times in _forms():
        inputs = inputs_by_name(model, hidden, times)
        try:
            with torch.no_grad():
                model(**inputs)
            return model, inputs
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _forms() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield latents of videos, images and tokens, with timesteps as integers and as floats."""
    video = latents(frames=FRAMES)
    tokens = torch.randn(BATCH, ROWS * COLUMNS, 8)
    for hidden in (video, latents(), tokens, video.transpose(1, 2).contiguous(), torch.randn(BATCH, 8, 14, 14)):
        yield hidden, torch.tensor([3, 7])
        yield hidden, torch.tensor([0.3, 0.7])
