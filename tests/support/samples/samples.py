"""Sample calls of every op that has a rule: sizes that 2 and 3 divide, one of a kind with a broadcast or a default.

The first sample of an op is the canonical one, printed in the golden table. Pointwise ops get theirs from their schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from support.samples import samples_compute, samples_data
from support.samples.sample_values import SAMPLES, Sample, b, f, unit

__all__ = ["Sample", "build", "f", "of_pointwise"]

_BY_NAME = {
    "condition": b,
    "decimals": 1,
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "mask": b,
    "rounding_mode": "floor",
    "train": False,
}
_DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)


def of_pointwise(op: Any) -> list[Sample]:
    """Return required arguments of a pointwise op in a dtype that it accepts: of equal shapes, and broadcasting."""
    out = []
    for shapes in [((2, 6), (2, 6), (2, 6)), ((4, 1), (6,), (2, 1, 1)), ((6,), (4, 6), (2, 4, 1))]:
        for dtype in _DTYPES:
            sample = _pointwise_sample(op, shapes, dtype)
            try:
                op(*sample[0], **sample[1])
            except (RuntimeError, NotImplementedError):
                continue
            out.append(sample)
            break
    return out


def _pointwise_sample(op: Any, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> Sample:
    given = iter(shapes)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        if argument.has_default_value():
            continue
        kind = str(argument.type)
        value = _BY_NAME.get(argument.name, 0.5 if kind == "float" else 2)
        if kind == "Tensor":
            value = b(*next(given)) if value is b else (unit(*next(given)) * 3).to(dtype)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def build() -> Mapping[Any, list[Sample]]:
    for family in (*samples_compute.FAMILIES, *samples_data.FAMILIES):
        family()
    return SAMPLES
