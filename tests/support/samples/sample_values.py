"""Random values of each dtype from one seed, and the list of sample calls that the sample files fill."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Sample = tuple[tuple[Any, ...], dict[str, Any]]
SAMPLES: dict[Any, list[Sample]] = {}
_generator = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def unit(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    return i(2, *shape).bool()


def c(*shape: int) -> Tensor:
    return torch.complex(f(*shape), f(*shape))


def one(op: Any, *args: Any, **kwargs: Any) -> None:
    for each in op if isinstance(op, tuple) else (op,):
        SAMPLES.setdefault(each, []).append((args, kwargs))
