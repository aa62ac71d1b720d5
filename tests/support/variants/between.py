"""Ops that may be between two ops of a pattern and change no value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
Between = Callable[[Tensor], Tensor]


def plain(x: Tensor) -> Tensor:
    return x


def folded(x: Tensor) -> Tensor:
    return x.reshape(-1).view(x.shape)


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, -1).transpose(-1, 0)


def turned_around(x: Tensor) -> Tensor:
    """Copy x between two permutations, and add and remove a dim."""
    order = list(range(x.ndim))
    return x.permute(order[1:] + order[:1]).contiguous().unsqueeze(0).squeeze(0).permute(order[-1:] + order[:-1])


BETWEEN: dict[str, Between] = {
    "nothing": plain,
    "view": lambda x: x.view(x.shape),
    "folded": folded,
    "unsqueezed": lambda x: x.unsqueeze(1).squeeze(1),
    "turned": turned,
    "turned around": turned_around,
    "clone": lambda x: x.clone(),
    "its own order": lambda x: x.permute([*range(x.ndim)]),
    "repeated once": lambda x: x.repeat([1] * x.ndim),
    "to": lambda x: x.to(x.dtype, copy=True),
    "wider": lambda x: x.double().to(x.dtype),
    "detach": lambda x: aten.alias(x.detach()),
    "expand": lambda x: x.expand(x.shape),
    "all rows": lambda x: x[:, :],
    "two copies": lambda x: x.clone().view(x.shape).contiguous(),
}
