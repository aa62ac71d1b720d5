"""``sp::to_bytes`` and ``sp::from_bytes``: values of several dtypes in one buffer, so that one collective carries them.

Opaque, because what a compiler makes of reading bytes as numbers depends on their alignment. Not differentiable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..library import opaque


def _width(part: Tensor) -> int:
    return math.prod(part.shape[1:]) * part.element_size()  # Size.numel would make symbolic sizes constants


def _fake_to_bytes(parts: list[Tensor]) -> Tensor:
    width = sum(_width(part) for part in parts)
    return parts[0].new_empty((parts[0].shape[0], width), dtype=torch.uint8)


@opaque("to_bytes(Tensor[] parts) -> Tensor", _fake_to_bytes)
def to_bytes(parts: list[Tensor]) -> Tensor:
    """Rows of several tensors side by side: (k, ...) of any dtypes -> (k, bytes) uint8. Source: views and one copy."""
    rows = [part.reshape(part.shape[0], part.shape[1:].numel()) for part in parts]
    return torch.cat([_aligned(row).view(torch.uint8) for row in rows if row.numel()] or [_none(parts[0])], 1)


def _fake_from_bytes(message: Tensor, parts: list[Tensor]) -> list[Tensor]:
    return [part.new_empty((message.shape[0], *part.shape[1:])) for part in parts]


@opaque("from_bytes(Tensor message, Tensor[] parts) -> Tensor[]", _fake_from_bytes)
def from_bytes(message: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Undo `to_bytes`: (m, bytes) -> tensors (m, ...) with the further sizes and the dtypes of `parts`."""
    rows = message.split([_width(part) for part in parts], 1)
    shapes = [(message.shape[0], *part.shape[1:]) for part in parts]
    return [
        _aligned(row).view(p.dtype).view(shape) if row.numel() else p.new_empty(shape)
        for row, p, shape in zip(rows, parts, shapes, strict=True)
    ]


def _none(part: Tensor) -> Tensor:
    """As many rows of no bytes."""
    return part.new_empty((part.shape[0], 0), dtype=torch.uint8)


def _aligned(rows: Tensor) -> Tensor:
    """A copy that starts where numbers may start, with the strides that reading other numbers needs even of one row."""
    return rows.clone(memory_format=torch.contiguous_format)
