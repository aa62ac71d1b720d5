"""List the families of each table of `support.docs.families`.

The tables other than "named" contain every class of an auto class of transformers, or every transformer of diffusers,
with the generic sizes of `family_sizes.py`, or those of `diffusion_models.py`. Other classes that need other sizes or
inputs fail to build. The tables from "multimodal" on have one class of each family that is in no earlier table.
"""

import re
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import diffusers
import torch
import transformers
from transformers.models.auto import modeling_auto

from .diffusion_models import SPECIAL, build_special, inputs_by_name
from .family_changes import CHANGES, INPUTS
from .family_inputs import build_model, find_inputs
from .family_models import COLUMNS, DIFFUSION, FRAMES, NAMED, ROWS, TEXT, Built, Family, latents
from .family_sizes import BATCH, VOCABULARY, build_text_model, shrink_arguments, shrink_config
from .partial_families import PARTIAL

AUTO_CLASSES = {
    "causal": ["CAUSAL_LM"],
    "masked": ["MASKED_LM"],
    "images": ["IMAGE_CLASSIFICATION"],
    "translation": ["SEQ_TO_SEQ_CAUSAL_LM"],
    "multimodal": ["MULTIMODAL_LM"],
    "audio": "CTC AUDIO_CLASSIFICATION SPEECH_SEQ_2_SEQ TEXT_TO_SPECTROGRAM TEXT_TO_WAVEFORM RNNT".split(),
    "vision": """
        VIDEO_CLASSIFICATION OBJECT_DETECTION SEMANTIC_SEGMENTATION INSTANCE_SEGMENTATION UNIVERSAL_SEGMENTATION
        DEPTH_ESTIMATION KEYPOINT_DETECTION KEYPOINT_MATCHING MASK_GENERATION POSE_ESTIMATION IMAGE_TO_IMAGE
        ZERO_SHOT_OBJECT_DETECTION IMAGE_MATTING TEXT_RECOGNITION TABLE_RECOGNITION
    """.split(),
    "series": ["TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION"],
    "others": [""],
}
ENDING = re.compile(r"For[A-Z]|Model(?=$|With|For)|LMHead|WithLM")
PARTS = re.compile(r"(Text|Vision|Audio|Encoder|Decoder|Video|VisionTransformer)+$")
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
    listed = _list_classes(table)
    if table not in (*TEXT_TABLES, "images"):
        return [Family(name, "transformers", partial(_build_any, table, name)) for name in _list_new(table)]
    if table == "images":  # not the variants of a family with another head
        listed = [x for x in listed if x.endswith("ForImageClassification")]
    build = _build_text if table in TEXT_TABLES else _build_images
    return [Family(name, "transformers", partial(build, name)) for name in sorted(set(listed))]


def _list_classes(table: str) -> list[str]:
    """Return the names of the classes of the auto classes of a table, each one once."""
    mappings = [f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES" for task in AUTO_CLASSES[table]]
    names = [x for mapping in mappings for x in getattr(modeling_auto, mapping).values()]
    return list(dict.fromkeys(x for y in names for x in ([y] if isinstance(y, str) else y)))


@cache
def _list_new(table: str) -> list[str]:
    """Return a class for each family of a table that has none in an earlier table; parts of such a family have none.

    A model with images or recordings beside a text has a row although its language model has one.
    """
    earlier = list(AUTO_CLASSES)[: list(AUTO_CLASSES).index(table)]
    rows = [family.name for other in ("named", *earlier) for family in families(other)]
    named = [build_class for build_class, _ in TEXT.values()] + ["Whisper"]
    known, chosen = {_prefix(x) for x in (*rows, *named)}, []
    for name in _list_classes(table):
        family = PARTS.sub("", _prefix(name))
        if name not in rows and (table == "multimodal" or not known & {_prefix(name), family}):
            chosen.append(name)
            known.add(_prefix(name))
    return sorted(chosen)


def _prefix(name: str) -> str:
    """Return the name of a class without the task, as in Hubert of HubertForCTC."""
    return ENDING.split(name)[0]


def _build_any(table: str, name: str) -> Built:
    """Build a model with inputs that its forward has; of a vision model without a text the backbone."""
    backbone = getattr(transformers, f"{_prefix(name)}Model", None) if table == "vision" else None
    return build_model(name, backbone, table == "vision")


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
    model = model_class(shrink_config(model_class.config_class, **CHANGES.get(name, {})))
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
    return model, find_inputs(model, (inputs_by_name(model, *form) for form in _forms()))


def _forms() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield latents of videos, images and tokens, with timesteps as integers and as floats."""
    video = latents(frames=FRAMES)
    tokens = torch.randn(BATCH, ROWS * COLUMNS, 8)
    for hidden in (video, latents(), tokens, video.transpose(1, 2).contiguous(), torch.randn(BATCH, 8, 14, 14)):
        yield hidden, torch.tensor([3, 7])
        yield hidden, torch.tensor([0.3, 0.7])
