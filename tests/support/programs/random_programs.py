"""Random small programs over ruled ops, drawn by Hypothesis.

A program is a list of steps; each makes a new value from earlier ones. Sizes come from a tiny range, so that dims of
equal size meet all the time: sizes alone do not say which dim is the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor, nn

import sp_compile

LIMIT = 2000  # elements of a value: programs stay quick
Draw = Callable[[st.SearchStrategy], Any]


@dataclass(frozen=True)
class Step:
    """`name(*values at operands, *args)`, in the table of OPS."""

    name: str
    operands: tuple[int, ...]
    args: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join([f'v{i}' for i in self.operands] + [repr(a) for a in self.args])})"


class Program(nn.Module):
    """x is v0; every step appends a value; the last three values are returned."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for step in self.steps:
            values.append(OPS[step.name](weight, ids, *(values[i] for i in step.operands), *step.args))
        return tuple(values[-3:])

    def __repr__(self) -> str:
        return "; ".join(f"v{i} = {step}" for i, step in enumerate(self.steps, 1))


def _table(weight: Tensor, rows: int, columns: int) -> Tensor:
    """A parameter of the asked size."""
    return weight[: rows * columns].view(rows, columns)


def _linear(weight: Tensor, ids: Tensor, x: Tensor, out: int, bias: bool) -> Tensor:
    return F.linear(x, _table(weight, out, x.shape[-1]), weight[-out:] if bias else None)


def _mix(weight: Tensor, ids: Tensor, x: Tensor, dim: int, out: int) -> Tensor:
    return torch.tensordot(x, _table(weight, x.shape[dim], out), ([dim], [0]))


def _norm(weight: Tensor, ids: Tensor, x: Tensor, ndim: int) -> Tensor:
    return F.layer_norm(x, x.shape[x.ndim - ndim :])


def _attention(weight: Tensor, ids: Tensor, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k.sin(), is_causal=causal)


def _masked(weight: Tensor, ids: Tensor, x: Tensor, dim: int, end: int) -> Tensor:
    positions = torch.arange(x.shape[dim]).view([-1 if d == dim else 1 for d in range(x.ndim)])
    return x.masked_fill(positions >= end, 0.5)


def _picked(weight: Tensor, ids: Tensor, x: Tensor, dim: int) -> Tensor:
    return x.index_select(dim, ids % x.shape[dim])


def _class_loss(weight: Tensor, ids: Tensor, x: Tensor, reduction: str) -> Tensor:
    x = x.flatten(0, -2)
    target = torch.arange(x.shape[0]) % x.shape[1]
    return F.cross_entropy(x, target.where(target != 1, -100), reduction=reduction)


def _embedded(weight: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    return F.embedding(x.detach().argmax(-1), _table(weight, x.shape[-1], 3))


SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "prod": lambda x, d: (1 + x.sin() / 4).cumprod(d),
    "logsumexp": lambda x, d: x.logcumsumexp(d),
    "max": lambda x, d: x.cummax(d)[0],
    "index": lambda x, d: x.cummin(d)[1] * x,
    "count": lambda x, d: (x > 0).cumsum(d) * x,
    "exclusive": lambda x, d: x.cumsum(d) - x,
    "reversed": lambda x, d: x.flip(d).cumsum(d).flip(d),
    "recurrence": lambda x, d: sp_compile.linear_scan(x.sigmoid(), x, d),
}


def _lines(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """A function of (1, C, S) along any dim of any value."""

    def along(x: Tensor, d: int) -> Tensor:
        rows = x.movedim(d, -1)
        found = function(rows.reshape(1, -1, rows.shape[-1]))
        return found.reshape(*rows.shape[:-1], found.shape[-1]).movedim(-1, d)

    return along


def _causal(x: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 3, dtype=x.dtype).expand(x.shape[1], 1, 3)
    return F.conv1d(x, weight, padding=2, groups=x.shape[1])[..., : x.shape[-1]]


WINDOWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "causal": _lines(_causal),
    "mean": _lines(lambda x: F.avg_pool1d(x, 3, 1, 1)),
    "max": _lines(lambda x: F.max_pool1d(F.pad(x, (1, 0)), 2, 1)),
    "pairs": _lines(lambda x: F.avg_pool1d(x, 2)),
    "unfold": lambda x, d: x.unfold(d, 2, 1).sum(-1),
    "shift": lambda x, d: torch.cat([torch.zeros_like(x.narrow(d, 0, 1)), x.narrow(d, 0, x.shape[d] - 1)], d),
    "differences": lambda x, d: x.narrow(d, 1, x.shape[d] - 1) - x.narrow(d, 0, x.shape[d] - 1),
    "last in front": lambda x, d: torch.cat([x.narrow(d, -1, 1), x.narrow(d, 0, x.shape[d] - 1)], d),
}

OPS: dict[str, Callable[..., Tensor]] = {
    "sin": lambda w, i, x: x.sin(),
    "tanh": lambda w, i, x: x.tanh(),
    "detach": lambda w, i, x: x.detach(),
    "add": lambda w, i, x, y: x + y,
    "mul": lambda w, i, x, y: x * y,
    "where": lambda w, i, x, y: torch.where(x > 0, x, y),
    "matmul": lambda w, i, x, y: x @ y,
    "gram": lambda w, i, x, y: x @ y.mT,
    "linear": _linear,
    "mix": _mix,
    "norm": _norm,
    "softmax": lambda w, i, x, d: x.softmax(d),
    "cumsum": lambda w, i, x, d: x.cumsum(d),
    "scan": lambda w, i, x, d, how: SCANS[how](x, d),
    "window": lambda w, i, x, d, how: WINDOWS[how](x, d) if x.shape[d] > 2 else x.sin(),
    "sum": lambda w, i, x, d, keep: x.sum(d, keepdim=keep),
    "mean": lambda w, i, x, d, keep: x.mean(d, keepdim=keep),
    "amax": lambda w, i, x, d, keep: x.amax(d, keepdim=keep),
    "logsumexp": lambda w, i, x, d, keep: x.logsumexp(d, keepdim=keep),
    "var": lambda w, i, x, d, keep: x.var(d, correction=0, keepdim=keep),
    "permute": lambda w, i, x, order: x.permute(order),
    "flatten": lambda w, i, x, d: x.flatten(d, d + 1),
    "unflatten": lambda w, i, x, d, sizes: x.unflatten(d, sizes),
    "reshape": lambda w, i, x, shape: x.reshape(shape),
    "view_as": lambda w, i, x, y: x.reshape(y.shape),
    "unsqueeze": lambda w, i, x, d: x.unsqueeze(d),
    "squeeze": lambda w, i, x, d: x.squeeze(d),
    "expand": lambda w, i, x, shape: x.expand(shape),
    "slice": lambda w, i, x, d, a, b, step: x[(slice(None),) * d + (slice(a, b, step),)],
    "select": lambda w, i, x, d, at: x.select(d, at),
    "chunk": lambda w, i, x, d, n, at: x.chunk(n, d)[at],
    "flip": lambda w, i, x, d: x.flip(d),
    "roll": lambda w, i, x, by, d: x.roll(by, d),
    "pad": lambda w, i, x, d, a, b: F.pad(x, [0, 0] * (x.ndim - 1 - d) + [a, b]),
    "cat": lambda w, i, x, y, d: torch.cat([x, y], d),
    "stack": lambda w, i, x, y, d: torch.stack([x, y], d),
    "repeat": lambda w, i, x, times: x.repeat(times),
    "masked": _masked,
    "picked": _picked,
    "embedded": _embedded,
    "attention": _attention,
    "class_loss": _class_loss,
    "mse": lambda w, i, x, y, how: F.mse_loss(x, y, reduction=how),
}


@st.composite
def programs(draw: Draw, steps: int = 8) -> tuple[Program, tuple[int, int, int]]:
    """A program and the sizes (B, S, D) of its input; every step was tried on meta tensors."""
    sizes = draw(st.tuples(st.integers(1, 3), st.integers(2, 6), st.integers(1, 5)))
    with torch.device("meta"):
        values = [torch.empty(sizes, dtype=torch.float64)]
        context = torch.empty(4000, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
        made: list[Step] = []
        for _ in range(draw(st.integers(1, steps))):
            step = _step(draw, values)
            try:
                value = OPS[step.name](*context, *(values[i] for i in step.operands), *step.args)
            except (RuntimeError, IndexError, ValueError):
                continue  # the shapes do not fit
            if 0 < value.numel() <= LIMIT and value.ndim <= 5:
                values.append(value)
                made.append(step)
    assume(made)
    return Program(made), sizes


def _step(draw: Draw, values: list[Tensor]) -> Step:
    name = draw(st.sampled_from(sorted(OPS)))
    newest = st.integers(0, min(len(values) - 1, 3)).map(lambda back: len(values) - 1 - back)
    first = draw(newest)
    x = values[first]
    alike = [i for i, v in enumerate(values) if v.shape == x.shape]
    dim = draw(st.integers(0, max(x.ndim - 1, 0)))
    extent = x.shape[dim] if x.ndim else 1
    keep = draw(st.booleans())
    if name in ("add", "mul", "where", "matmul", "gram", "view_as"):
        return Step(name, (first, draw(newest)))
    if name in ("cat", "stack", "mse", "attention"):
        second = draw(st.sampled_from(alike))
        how = draw(st.sampled_from(["mean", "sum", "none"]))
        return Step(name, (first, second), ({"mse": how, "attention": keep}.get(name, dim),))
    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "linear": lambda: (draw(st.integers(1, 5)), keep),
        "mix": lambda: (dim, draw(st.integers(1, 5))),
        "norm": lambda: (draw(st.integers(1, 2)),),
        "permute": lambda: (tuple(draw(st.permutations(range(x.ndim)))),),
        "unflatten": lambda: (dim, draw(st.sampled_from(_divisions(extent)))),
        "reshape": lambda: (draw(st.sampled_from(_shapes(tuple(x.shape)))),),
        "expand": lambda: (tuple(3 if s == 1 else s for s in x.shape),),
        "slice": lambda: (dim, *_bounds(draw, extent), draw(st.sampled_from([1, 1, 1, 2]))),
        "select": lambda: (dim, draw(st.integers(-extent, extent - 1))),
        "chunk": lambda: (dim, 2, draw(st.integers(0, 1))),
        "roll": lambda: (draw(st.integers(-2, 2)), dim),
        "pad": lambda: (dim, *draw(st.tuples(st.integers(-1, 2), st.integers(-1, 2)))),
        "repeat": lambda: (tuple(2 if d == dim else 1 for d in range(x.ndim)),),
        "masked": lambda: (dim, draw(st.integers(0, extent))),
        "scan": lambda: (dim, draw(st.sampled_from(sorted(SCANS)))),
        "window": lambda: (dim, draw(st.sampled_from(sorted(WINDOWS)))),
        "class_loss": lambda: (draw(st.sampled_from(["mean", "sum", "none"])),),
    }
    if name in ("sum", "mean", "amax", "logsumexp", "var"):
        return Step(name, (first,), (dim, keep))
    if name in ("sin", "tanh", "detach", "embedded"):
        return Step(name, (first,))
    return Step(name, (first,), arguments.get(name, lambda: (dim,))())


def _bounds(draw: Draw, extent: int) -> tuple[int | None, int | None]:
    ends = st.one_of(st.none(), st.integers(-extent, extent))
    return draw(ends), draw(ends)


def _divisions(extent: int) -> list[tuple[int, int]]:
    return [(a, extent // a) for a in range(1, extent + 1) if extent % a == 0]


def _shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shape with its dims in other orders, and flat: a reshape that is no view of dims."""
    numel = 1
    for s in shape:
        numel *= s
    return [shape[::-1], (numel,), (*shape[1:], *shape[:1]), (numel, 1)]


def _inputs(sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, dtype=torch.float64, generator=generator)
    weight = torch.randn(4000, dtype=torch.float64, generator=generator) / 2
    return x.requires_grad_(), weight.requires_grad_(), torch.tensor([0, 2, 1, 3])
