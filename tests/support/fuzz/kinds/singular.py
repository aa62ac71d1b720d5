"""Functions of rows that are singular somewhere: at zero, at equal or negative numbers, at the end of the sequence.

Values that no row of a single device has, such as padding, become NaN or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from support.fuzz.kinds.scene import WIDTH, attend
from torch import Tensor

Op = Callable[..., Tensor]


def _positions(x: Tensor) -> Tensor:
    """(S, 1): 0, 1, ..."""
    return torch.arange(x.shape[1], dtype=x.dtype)[:, None]


def _energy(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def _cosine(x: Tensor) -> Tensor:
    y = x.roll(1, -1)
    return (x * y).sum(-1, keepdim=True) / (x.norm(dim=-1, keepdim=True) * y.norm(dim=-1, keepdim=True))


def _squares(x: Tensor) -> Tensor:
    """Each row as a matrix that has an inverse unless the row is of equal numbers."""
    return x.unflatten(-1, (2, 2))


def _count(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Divide running sums by the number of nonzero ids so far; the first token counts."""
    counted = (ids > 0) | (torch.arange(ids.shape[1]) == 0)
    return x.cumsum(1) / counted.cumsum(1)[..., None]


def _left(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Return the mean of later rows."""
    total = x.sum(1, keepdim=True)
    return (total - x.cumsum(1) + x) / (x.shape[1] - _positions(x))


def _pairs(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Inverse distances of all pairs."""
    apart = (x[:, :, None] - x[:, None]).square().sum(-1) + torch.eye(x.shape[1], dtype=x.dtype)
    return apart.rsqrt() @ x


def _sorted_gaps(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    rows = x.sort(1)[0]
    return (rows - torch.cat([rows[:, :1] - 1, rows[:, :-1]], 1)).log()


def _shifted(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _reflected(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    y = x.roll(1, -1).sin()
    return y - 2 * x * (x * y).sum(-1, keepdim=True) / _energy(x)


def _cut_off(w: Tensor, ids: Tensor, x: Tensor, how: tuple[int, str]) -> Tensor:
    """Rows that a slice cuts off, at the front or at the end, have no norm, no logarithm, or no angle."""
    count, function = how
    count = max(min(abs(count), x.shape[1] - 1), 1) * (1 if count > 0 else -1)
    place, length = _positions(x), x.shape[1]
    rows = x.masked_fill(place < count if count > 0 else place >= length + count, 0)
    if function == "norm":
        y = rows / rows.norm(dim=-1, keepdim=True)
    elif function == "log":
        y = rows.abs().log()
    else:
        y = torch.atan2(rows, rows.roll(1, -1))
    if count > 0:
        return torch.cat([x[:, :count], y[:, count:]], 1)
    return torch.cat([y[:, :count], x[:, count:]], 1)


def _surprise(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Multiply rows by the log-probability of their class, computed without log_softmax."""
    probability = x.exp() / x.exp().sum(-1, keepdim=True)
    return x * probability.gather(-1, ids[..., None]).log()


OPS: Mapping[str, Op] = {
    # At zero.
    "over norm": lambda w, i, x, p: x / x.norm(p=p, dim=-1, keepdim=True),
    "over norm of sequence": lambda w, i, x: x / x.norm(dim=1, keepdim=True),
    "over deviation": lambda w, i, x: x / x.std(-1, keepdim=True),
    "over sum": lambda w, i, x: x.exp() / x.abs().sum(-1, keepdim=True),
    "over largest": lambda w, i, x: (x / (1.1 * x.abs().amax(-1, keepdim=True))).atanh(),
    "log energy": lambda w, i, x: x * _energy(x).log(),
    "log of numbers": lambda w, i, x: x.abs().log(),
    "root": lambda w, i, x: x.abs().sqrt(),
    "root of energy": lambda w, i, x: x + _energy(x).sqrt(),
    "inverse root": lambda w, i, x: x * _energy(x).rsqrt(),
    "rms norm": lambda w, i, x: F.rms_norm(x, (WIDTH,), eps=0.0),
    "layer norm": lambda w, i, x: F.layer_norm(x, (WIDTH,), eps=0.0),
    "power": lambda w, i, x, e: x.abs().pow(e),
    "power of energy": lambda w, i, x, e: x * _energy(x).pow(e),
    "to its own power": lambda w, i, x: x.abs() ** x.tanh(),
    "angle": lambda w, i, x: torch.atan2(x, x.roll(1, -1)),
    "length": lambda w, i, x: torch.hypot(x, x.roll(1, -1)),
    "arc": lambda w, i, x: x + (0.99 * _cosine(x)).acos(),
    "similarity": lambda w, i, x: x * F.cosine_similarity(x, x.roll(1, -1).exp(), -1, eps=0.0)[..., None],
    "gamma": lambda w, i, x: torch.lgamma(x.abs()),
    "inverse": lambda w, i, x: _squares(x).inverse().flatten(-2),
    "solved": lambda w, i, x: torch.linalg.solve(_squares(x), _squares(x).mT.cos()).flatten(-2),
    "determinant": lambda w, i, x: x * torch.linalg.slogdet(_squares(x))[1][..., None, None].flatten(-2),
    "reflected": _reflected,
    "surprise": _surprise,
    "cut off": _cut_off,
    "unit attention": lambda w, i, x: attend(x / x.norm(dim=-1, keepdim=True), is_causal=True),
    # At equality, and between running values.
    "gap to maximum": lambda w, i, x: 1 / (x - x.cummax(1)[0] - 0.1),
    "log gap to maximum": lambda w, i, x: (x.cummax(1)[0] - x + 0.1).log(),
    "log gap to minimum": lambda w, i, x: (x - x.cummin(1)[0] + 0.1).log(),
    "root of what came before": lambda w, i, x: (x.square().cumsum(1) - x.square() + 1e-6).sqrt(),
    "log share": lambda w, i, x: (x.exp() / x.exp().cumsum(1)).log(),
    "gap to logsumexp": lambda w, i, x: (x.logcumsumexp(1) - x + 0.1).log(),
    "running norm": lambda w, i, x: x / x.square().cumsum(1).sqrt(),
    "ratio of products": lambda w, i, x: ((1 + x.tanh().square()).cumprod(1) - x.tanh().square()).log(),
    "gap to neighbor": lambda w, i, x: 1 / (x - _shifted(x)),
    "pairs": _pairs,
    "sorted gaps": _sorted_gaps,
    # Counts and places.
    "running mean": _count,
    "mean of the rest": _left,
    "by place": lambda w, i, x: x / (_positions(x) + 1),
    "by place from the end": lambda w, i, x: x / (x.shape[1] - _positions(x)),
    "log place": lambda w, i, x: x * (_positions(x) + 1).log(),
    "log place from the end": lambda w, i, x: x * (x.shape[1] - _positions(x)).log(),
    "root of place from the end": lambda w, i, x: x * (x.shape[1] - 1 - _positions(x)).sqrt(),
}
ARGUMENTS: Mapping[str, Sequence[Any]] = {
    "over norm": [1.0, 2.0, 3.0, float("inf")],
    "cut off": [(count, function) for count in (-4, -1, 1, 3) for function in ("norm", "log", "angle")],
    "power": [-1.5, -1.0, -0.5, 0.3, 1.5],
    "power of energy": [-1.5, -1, -0.5, 0.25],
}
