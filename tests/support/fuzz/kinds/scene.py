"""Scenes, the cases on real ranks: made from a seed, and run on a single device and on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile

Values = dict[str, Any]
Run = Callable[..., Any]
Compile = Callable[..., Run]
Body = Callable[[Tensor], Tensor]

WIDTH = 4
WEIGHTS = 400
INDUCTOR = 0.15  # the share of cases that Inductor compiles, with default options
OPTIONS: list[dict[str, Any]] = [
    *[{}] * 5,
    {"attention": "ring"},
    {"attention": "ring", "layout": "zigzag"},
    {"attention": "gather"},
    {"layout": "zigzag"},
]


@dataclass(frozen=True)
class Scene:
    """A case. world: ranks. inductor: use all default options, else `options` with aot_eager."""

    world: int
    inductor: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_strict(self) -> bool:
        """Return True if a difference is a fault even if torch.compile without ranks has it."""
        return False

    def inputs(self) -> list[Tensor]:
        """Return the inputs, equal in every process."""
        raise NotImplementedError

    def play(self, compiled: Compile, inputs: Sequence[Tensor]) -> Values:
        """Run the scene with models compiled by `compiled`; return the values to compare, by name.

        Values whose name contains "gradient" are compared relative to the largest of them.
        """
        raise NotImplementedError


def drawn_world(random: Random) -> dict[str, Any]:
    """Return random fields of Scene."""
    if random.random() < INDUCTOR:
        return {"world": random.choice([2, 2, 3]), "inductor": True}
    return {"world": random.choice([2, 2, 3, 3, 4]), "options": random.choice(OPTIONS)}


def drawn_length(random: Random, world: int, least: int = 1) -> int:
    """Return a random length of a sequence, which the ranks rarely divide."""
    length = random.randint(least, 17)
    return length + 1 if length % world == 0 and random.random() < 0.8 else length


class Net(nn.Module):
    """A function of (weight, *inputs) as a model of one parameter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WEIGHTS, dtype=torch.float64, generator=generator) / 2)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.weight, *inputs)


def matrix(weight: Tensor, at: int = 0, rows: int = WIDTH, columns: int = WIDTH) -> Tensor:
    """Return one of the parameter's matrices."""
    return weight[at : at + rows * columns].view(rows, columns)


def attend(x: Tensor, **how: Any) -> Tensor:
    """(B, S, D) -> (B, S, D): attention of two heads."""
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q.sin(), q, **how).transpose(1, 2).flatten(2)


def _same_sign(x: Tensor) -> Tensor:
    """Attention to tokens of the same kind."""
    kind = x.detach()[..., 0] > 0
    return attend(x, attn_mask=(kind[:, :, None] == kind[:, None, :])[:, None])


def _causal_window(x: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 3, dtype=x.dtype).expand(x.shape[-1], 1, 3)
    return F.conv1d(F.pad(x.mT, (2, 0)), weight, groups=x.shape[-1]).mT + attend(x)


BODIES: dict[str, Body] = {
    "attention": attend,
    "causal": lambda x: attend(x, is_causal=True),
    "same sign": _same_sign,
    "sum": lambda x: x.cumsum(1),
    "max": lambda x: x.cummax(1)[0] + x,
    "logsumexp": lambda x: x.logcumsumexp(1),
    "recurrence": lambda x: sp_compile.linear_scan(x.sigmoid(), x, 1),
    "window": _causal_window,
}
"""Functions along the sequence: (B, S, D) -> (B, S, D)."""


def normal(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


def leaves(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]


def plain(x: Any) -> Any:
    """Return a full detached copy of a result."""
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    return torch.as_tensor(x.full() if hasattr(x, "full") else x).clone()
