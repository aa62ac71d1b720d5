"""Random small programs over ruled ops, each made from the number of its seed alone.

A program is a list of steps; each makes a new value from earlier ones. Sizes come from a tiny range, so that dims of
equal size meet all the time: sizes alone do not say which dim is the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from support.fuzz.simulated.stops import AROUND, IDIOMS, STOPS, idiom
from torch import Tensor, nn

import sp_compile

Sizes = tuple[int, int, int]
LIMIT = 2000  # elements of a value: programs stay quick


@dataclass(frozen=True)
class Step:
    """`name(*values at operands, *args)`, in the table of OPS; around: the one of STOPS that it runs in."""

    name: str
    operands: tuple[int, ...]
    args: tuple[Any, ...] = ()
    around: str = ""

    def __repr__(self) -> str:
        call = f"{self.name}({', '.join([f'v{i}' for i in self.operands] + [repr(a) for a in self.args])})"
        return f"{self.around}: {call}" if self.around else call


class Program(nn.Module):
    """x is v0; every step appends a value; the last ones are returned. Neighbours share what is around them."""

    def __init__(
        self, steps: list[Step], ops: Mapping[str, Callable[..., Tensor]] | None = None, last: int = 3
    ) -> None:
        super().__init__()
        self.steps, self.ops, self.last = steps, OPS if ops is None else ops, last
        self.regions = [(around, list(some)) for around, some in groupby(steps, lambda step: step.around)]

    def forward(self, x: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        values: tuple[Tensor, ...] = (x,)
        for around, steps in self.regions:

            def run(weight: Tensor, *given: Tensor, steps: list[Step] = steps) -> tuple[Tensor, ...]:
                made = list(given)
                for step in steps:
                    made.append(self.ops[step.name](weight, ids, *(made[i] for i in step.operands), *step.args))
                return tuple(made[len(given) :])

            values = (*values, *STOPS[around](run, weight, *values))
        return values[-self.last :]

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


MASKS = ["none", "causal", "window", "prefix", "padding", "bias"]


def _heads(weight: Tensor, ids: Tensor, x: Tensor, dim: int, heads: int, kv_heads: int, mask: str) -> Tensor:
    """Attention of several heads along any dim but the last, as models write it, under one of MASKS."""
    rows = x.movedim(dim, -2)
    flat = rows.reshape(-1, *rows.shape[-2:])
    size, width = flat.shape[1], flat.shape[2]
    q, k, v = (
        F.linear(flat, _table(weight[100 * i :], 2 * n, width)).unflatten(-1, (n, 2)).transpose(1, 2)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    at = torch.arange(size)
    distance = at[:, None] - at
    masks = {
        "window": (distance >= 0) & (distance < 3),
        "prefix": (distance >= 0) | (at < 2),
        "padding": (at < max(size - 1, 1)).expand(size, size),
        "bias": -0.5 * distance.abs().to(x.dtype),
    }
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=masks.get(mask), is_causal=mask == "causal", enable_gqa=heads != kv_heads
    )
    return y.transpose(1, 2).flatten(2).reshape(*rows.shape[:-1], 2 * heads).movedim(-2, dim)


def _add(x: Tensor, d: int) -> Tensor:
    x.narrow(d, 0, 1).add_(1)
    return x


def _copy(x: Tensor, d: int) -> Tensor:
    x.narrow(d, 1, x.shape[d] - 1).copy_(x.narrow(d, 0, x.shape[d] - 1) * 0.5)
    return x


def _fill(x: Tensor, d: int) -> Tensor:
    x.select(d, -1).zero_()
    return x


def _index(x: Tensor, d: int) -> Tensor:
    rows = x.movedim(d, 0)
    rows[torch.tensor([0])] = 2.0
    return x


WRITES: dict[str, Callable[[Tensor, int], Tensor]] = {"add": _add, "copy": _copy, "fill": _fill, "index": _index}
"""What changes a value in place along a dim."""


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
    "last moved first": lambda x, d: torch.cat([x.narrow(d, -1, 1), x.narrow(d, 0, x.shape[d] - 1)], d),
}


def _mixed_channels(x: Tensor) -> Tensor:
    channels = x.shape[1]
    weight = torch.linspace(-1, 1, 3 * channels * channels, dtype=x.dtype).view(channels, channels, 3)
    return F.conv1d(x, weight, padding=1)


CONVOLVED = _lines(_mixed_channels)


def _loop(x: Tensor, d: int) -> Tensor:
    """A recurrence that a model writes as a loop over time."""
    state = torch.zeros_like(x.select(d, 0))
    out = []
    for row in x.unbind(d):
        state = row.sigmoid() * state + row
        out.append(state)
    return torch.stack(out, d)


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
    "heads": _heads,
    "idiom": idiom,
    "written": lambda w, i, x, d, how: WRITES[how](x.clone(), d),
    "sorted": lambda w, i, x, d: x.sort(d)[0],
    "gathered": lambda w, i, x, d: x.gather(d, x.detach().argsort(d)),
    "highest": lambda w, i, x, d: x.topk(1, d)[0],
    "normalized": lambda w, i, x, d: F.normalize(x, dim=d),
    "einsum": lambda w, i, x, d: torch.einsum("...a,...a->...", x.movedim(d, -1), x.movedim(d, -1).cos()),
    "loop": lambda w, i, x, d: _loop(x, d),
    "triangle": lambda w, i, x, d: x.tril() + x.triu(1).sin(),
    "convolved": lambda w, i, x, d: CONVOLVED(x, d),
    "class_loss": _class_loss,
    "mse": lambda w, i, x, y, how: F.mse_loss(x, y, reduction=how),
}


def random_program(random: Random, steps: int) -> tuple[Program, Sizes]:
    """Return a program of at most `steps` steps, which run on meta tensors, and the sizes (B, S, D) of its input.

    Every second program stops gradients.
    """
    stops = random.random() < 0.5
    sizes = random.randint(1, 3), random.randint(2, 7), random.randint(1, 5)
    made: list[Step] = []
    with torch.device("meta"):
        values = [torch.empty(sizes, dtype=torch.float64)]
        context = torch.empty(4000, dtype=torch.float64), torch.empty(4, dtype=torch.int64)
        wanted = random.randint(1, steps)
        while len(made) < wanted:
            step = _step(random, values)
            if stops and random.random() < 0.5:
                step = _stopping(random, values, step, made)
            try:
                value = OPS[step.name](*context, *(values[i] for i in step.operands), *step.args)
            except (RuntimeError, IndexError, ValueError):
                continue  # the shapes do not fit
            if 0 < value.numel() <= LIMIT and value.ndim <= 5:
                values.append(value)
                made.append(step)
    return Program(made), sizes


def _step(random: Random, values: list[Tensor]) -> Step:
    name = random.choice(sorted(OPS))
    newest = [len(values) - 1 - back for back in range(min(len(values), 4))]
    first = random.choice(newest)
    x = values[first]
    same_shape = [i for i, v in enumerate(values) if v.shape == x.shape]
    dim = random.randrange(max(x.ndim, 1))
    extent = x.shape[dim] if x.ndim else 1
    keep = random.random() < 0.5
    if name in ("add", "mul", "where", "matmul", "gram", "view_as"):
        return Step(name, (first, random.choice(newest)))
    if name in ("cat", "stack", "mse", "attention"):
        how = random.choice(["mean", "sum", "none"])
        return Step(name, (first, random.choice(same_shape)), ({"mse": how, "attention": keep}.get(name, dim),))
    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "linear": lambda: (random.randint(1, 5), keep),
        "mix": lambda: (dim, random.randint(1, 5)),
        "norm": lambda: (random.randint(1, 2),),
        "permute": lambda: (tuple(random.sample(range(x.ndim), x.ndim)),),
        "unflatten": lambda: (dim, random.choice(_divisions(extent))),
        "reshape": lambda: (random.choice(_shapes(tuple(x.shape))),),
        "expand": lambda: (tuple(3 if s == 1 else s for s in x.shape),),
        "slice": lambda: (dim, *_bounds(random, extent), random.choice([1, 1, 1, 2])),
        "select": lambda: (dim, random.randint(-extent, extent - 1)),
        "chunk": lambda: (dim, 2, random.randint(0, 1)),
        "roll": lambda: (random.randint(-2, 2), dim),
        "pad": lambda: (dim, random.randint(-1, 2), random.randint(-1, 2)),
        "repeat": lambda: (tuple(2 if d == dim else 1 for d in range(x.ndim)),),
        "masked": lambda: (dim, random.randint(0, extent)),
        "scan": lambda: (dim, random.choice(sorted(SCANS))),
        "window": lambda: (dim, random.choice(sorted(WINDOWS))),
        "heads": lambda: (dim, *random.choice([(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (6, 2)]), random.choice(MASKS)),
        "written": lambda: (dim, random.choice(sorted(WRITES))),
        "class_loss": lambda: (random.choice(["mean", "sum", "none"]),),
        "idiom": lambda: (dim, random.choice(sorted(IDIOMS)), "", "", ""),
    }
    if name in ("sum", "mean", "amax", "logsumexp", "var"):
        return Step(name, (first,), (dim, keep))
    if name in ("sin", "tanh", "detach", "embedded"):
        return Step(name, (first,))
    return Step(name, (first,), arguments.get(name, lambda: (dim,))())


def _stopping(random: Random, values: list[Tensor], step: Step, made: list[Step]) -> Step:
    """An idiom with stops in it, or the step in a region: its own, or that of the step before."""
    if random.random() < 0.5:
        dim = random.randrange(max(values[step.operands[0]].ndim, 1))
        stops = [random.choice(["", random.choice(sorted(STOPS))]) for _ in range(3)]
        step = Step("idiom", step.operands[:1], (dim, random.choice(sorted(IDIOMS)), *stops))
    before = made[-1].around if made else ""
    return replace(step, around=before or random.choice(AROUND))


def _bounds(random: Random, extent: int) -> tuple[int | None, int | None]:
    return random.choice([None, random.randint(-extent, extent)]), random.choice(
        [None, random.randint(-extent, extent)]
    )


def _divisions(extent: int) -> list[tuple[int, int]]:
    return [(a, extent // a) for a in range(1, extent + 1) if extent % a == 0]


def _shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shape with its dims in other orders, and flat: a reshape that is no view of dims."""
    numel = 1
    for s in shape:
        numel *= s
    return [shape[::-1], (numel,), (*shape[1:], *shape[:1]), (numel, 1)]


def inputs_of(sizes: Sizes, frozen: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """x of these sizes, the weights and the ids of a program, in float64; frozen: x or weight, without a gradient."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, dtype=torch.float64, generator=generator)
    weight = torch.randn(4000, dtype=torch.float64, generator=generator) / 2
    return x.requires_grad_(frozen != "x"), weight.requires_grad_(frozen != "weight"), torch.tensor([0, 2, 1, 3])
