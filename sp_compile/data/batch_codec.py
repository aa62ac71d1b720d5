"""A batch as text and tensors: how one rank hands it to others.

Tensors and numpy arrays travel as their bytes. What holds them (dicts and other mappings, which arrive as dicts, lists,
tuples) and what stands beside them (str, int, float, bool, None) travel as JSON, which cannot execute anything. Nothing
is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sp_compile.lowering.base.errors import SpError

NUMBERS = "biufc"  # kinds of numpy's types
JSON_TYPES = (str, int, float, bool, type(None))


def encode_batch(batch: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The text of a batch and its tensors, contiguous on the CPU, in the order in which the text names them.

    Raises SpError: it holds something else; the message names where and what.
    """
    tensors: list[torch.Tensor] = []

    def text(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in NUMBERS):
            kind = "tensor" if isinstance(value, torch.Tensor) else "array"
            tensor = torch.as_tensor(value).detach().cpu().contiguous()
            tensors.append(tensor)
            return {"of": kind, "is": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}
        if type(value) in JSON_TYPES:
            return value
        if isinstance(value, Mapping):
            return {"of": "dict", "is": [[text(k, where), text(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if type(value) in (list, tuple):
            return {"of": type(value).__name__, "is": [text(v, f"{where}[{i}]") for i, v in enumerate(value)]}
        raise SpError(
            "SP805",
            f"{where}: expected tensors, numpy arrays, dicts, lists, tuples, str, int, float, bool or None, got "
            f"{type(value).__name__}.",
        )

    return json.dumps(text(batch, "batch")).encode(), tensors


def decode_batch(text: bytes) -> tuple[Any, list[torch.Tensor]]:
    """The batch of a text and its tensors, which are empty: whoever fills them fills the batch."""
    tensors: list[torch.Tensor] = []

    def value(told: Any) -> Any:
        if not isinstance(told, dict):
            return told
        kind, parts = told["of"], told["is"]
        if kind in ("tensor", "array"):
            tensor = torch.empty(parts[1], dtype=getattr(torch, parts[0]))
            tensors.append(tensor)
            return tensor if kind == "tensor" else tensor.numpy()
        if kind == "dict":
            return {value(k): value(v) for k, v in parts}
        return {"list": list, "tuple": tuple}[kind](map(value, parts))

    return value(json.loads(text)), tensors


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as uint8."""
    return tensor.reshape(-1).view(torch.uint8)
