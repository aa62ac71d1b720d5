"""Random heads with losses, and MLPs, in tiles: rows, logits of them, numbers of each token, and sums of these.

A value's shape says what it is: (B, S, D) rows, (..., V) logits, (B, S) or flat numbers of tokens, and single numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
import torch.nn.functional as F
from support.fuzz.oracle import SESSION
from support.fuzz.outcomes import Result
from support.fuzz.simulated.programs import Setting, shrunk
from support.fuzz.simulated.random_programs import LIMIT, Program, Sizes, Step, inputs_of
from support.fuzz.simulated.stops import AROUND
from torch import Tensor

D, V = 3, 17
RANKS = [(2,), (3,), (2,), (1,), (4,), (2, 3)]
WAYS = [{}, {"attention": "ring"}, {"attention": "ring", "layout": "zigzag"}, {"layout": "balanced"}, {}]
IGNORED = -100


def _labels(ids: Tensor, x: Tensor) -> Tensor:
    """Of logits' rows, the last of each sequence; some are ignored."""
    kept = x.numel() // x.shape[-1] // ids.shape[0]
    found = ids[:, ids.shape[1] - kept :]
    return found.reshape(x.shape[:-1])


def _known(ids: Tensor, x: Tensor) -> Tensor:
    return _labels(ids, x).clamp(min=0)


def _counts(ids: Tensor, x: Tensor) -> Tensor:
    """Which of these tokens count, as numbers."""
    kept = x.numel() // ids.shape[0]
    return (ids[:, ids.shape[1] - kept :] >= 0).reshape(x.shape).to(x.dtype)


def _heads(w: Tensor, ids: Tensor, x: Tensor, at: int, bias: bool) -> Tensor:
    return F.linear(x, w[at : at + V * x.shape[-1]].view(V, -1), w[:V] if bias else None)


def _mlp(w: Tensor, ids: Tensor, x: Tensor, way: str) -> Tensor:
    d, wide = x.shape[-1], 4 * x.shape[-1]
    up, gate, down = (w[100 * i : 100 * i + d * wide] for i in (1, 2, 3))
    inside = F.linear(x, up.view(wide, d), w[:wide] if "bias" in way else None)
    if "gated" in way:
        inside = F.silu(F.linear(x, gate.view(wide, d))) * inside
    y = F.linear(F.gelu(inside), down.view(d, wide))
    return x + y if "residual" in way else y


def _attend(w: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    q = x[:, None]
    return x + F.scaled_dot_product_attention(q, q.sin(), q, is_causal=True)[:, 0]


def _cross_entropy(w: Tensor, ids: Tensor, z: Tensor, reduction: str, smoothing: float, weighted: bool) -> Tensor:
    rows, labels = z.reshape(-1, z.shape[-1]), _labels(ids, z).reshape(-1)
    weight = (1 + w[:V].detach().abs()) if weighted else None
    loss = F.cross_entropy(rows, labels, weight, reduction=reduction, label_smoothing=smoothing, ignore_index=IGNORED)
    return loss.view(z.shape[:-1]) if reduction == "none" else loss


def _put(z: Tensor, way: str) -> Tensor:
    """Changed in place, as models ban classes."""
    z = z * 1
    if way == "column":
        z[..., 0] = -9.0
    elif way == "columns":
        z[..., V // 2 :] -= 3
    elif way == "rows":
        z[:1] = 0.5
    else:
        z.div_(0.7)
    return z


def _one_hot(ids: Tensor, z: Tensor) -> Tensor:
    return F.one_hot(_known(ids, z), z.shape[-1]).to(z.dtype)


def _kl(w: Tensor, ids: Tensor, z: Tensor, other: Tensor) -> Tensor:
    return F.kl_div(z.log_softmax(-1), other.detach().log_softmax(-1), reduction="none", log_target=True).sum(-1)


def _clipped(w: Tensor, ids: Tensor, x: Tensor, y: Tensor) -> Tensor:
    ratio = (x - y.detach()).exp()
    return torch.minimum(ratio * y, ratio.clamp(0.8, 1.2) * y)


Op = Callable[..., Tensor]
ROWS: dict[str, Op] = {
    "mlp": _mlp,
    "attend": _attend,
    "rms": lambda w, i, x: F.rms_norm(x, x.shape[-1:]) * w[: x.shape[-1]],
    "sum so far": lambda w, i, x: x.cumsum(1) / 4,
    "sum of both": lambda w, i, x, y: x + y,
    "embedded": lambda w, i, x, at: x + F.embedding(i.clamp(min=0), w[at : at + V * D].view(V, D)),
}
HEADS: dict[str, Op] = {"head": _heads}
WIDE: dict[str, Op] = {
    "cap": lambda w, i, z: 2 * (z / 2).tanh(),
    "scaled": lambda w, i, z, by: z * by,
    "temperature": lambda w, i, z: z / (1 + w[0].abs()),
    "biased": lambda w, i, z: z + w[50 : 50 + V],
    "banned": lambda w, i, z: z.masked_fill(torch.arange(V) % 5 == 2, -8.0),
    "put": lambda w, i, z, way: _put(z, way),
    "counted rows": lambda w, i, z: torch.where((_labels(i, z) >= 0)[..., None], z, 0.25),
    "label lowered": lambda w, i, z: z.scatter_add(-1, _known(i, z)[..., None], -torch.ones_like(z[..., :1])),
    "less its largest": lambda w, i, z: z - z.detach().amax(-1, keepdim=True),
    "log_softmax": lambda w, i, z: z.log_softmax(-1),
    "softmax": lambda w, i, z: z.softmax(-1),
    "of two": lambda w, i, z, other, how: torch.lerp(z, other, 0.3) if how else z * other,
    "alone": lambda w, i, z: z.detach() * 0.5 + z,
    "shifted": lambda w, i, z: z[:, :-1] if z.ndim == 3 else z.sin(),
    "window": lambda w, i, z, n: z[:, -n:] if z.ndim == 3 else z.sin(),
    "flat": lambda w, i, z: z.reshape(-1, z.shape[-1]),
    "so far": lambda w, i, z: z.cumsum(-1) / 4,
    "turned": lambda w, i, z: z.mT.contiguous().sin().mT if z.ndim == 3 else z.cos(),
    "copied": lambda w, i, z: z.clone(),
}
EACH: dict[str, Op] = {
    "cross entropy": _cross_entropy,
    "picked": lambda w, i, z: z.log_softmax(-1).gather(-1, _known(i, z)[..., None])[..., 0],
    "lse": lambda w, i, z: z.logsumexp(-1),
    "entropy": lambda w, i, z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "largest": lambda w, i, z: z.amax(-1),
    "right": lambda w, i, z: (z.argmax(-1) == _labels(i, z)).double(),
    "kl": _kl,
    "column": lambda w, i, z, at: z[..., at],
    "length": lambda w, i, z: z.norm(dim=-1),
    "spread": lambda w, i, z: z.var(-1),
    "best": lambda w, i, z: z.topk(3, -1)[0].sum(-1),
    "one hot": lambda w, i, z: (z * _one_hot(i, z)).sum(-1),
    "squares": lambda w, i, z: (z - _one_hot(i, z)).square().mean(-1),
    "bce": lambda w, i, z: F.binary_cross_entropy_with_logits(z, _one_hot(i, z), reduction="none").sum(-1),
    "margin": lambda w, i, z: (z - (z * _one_hot(i, z)).sum(-1, keepdim=True) + 1).clamp(min=0).mean(-1),
    "rank": lambda w, i, z: (z.detach() > z.detach().gather(-1, _known(i, z)[..., None])).double().sum(-1),
}
TOKENS: dict[str, Op] = {
    "counted": lambda w, i, x: x * _counts(i, x),
    "exp": lambda w, i, x: (x / 4).exp(),
    "square": lambda w, i, x: x.square(),
    "sigmoid": lambda w, i, x: (x / 4).sigmoid(),
    "clamp": lambda w, i, x: x.clamp(-1, 1),
    "difference": lambda w, i, x, y: x - y,
    "product": lambda w, i, x, y: x * y.tanh(),
    "clipped": _clipped,
    "sum over time": lambda w, i, x: x.cumsum(-1) / 4 if x.ndim == 2 else x.sin(),
    "next": lambda w, i, x: F.pad(x[:, 1:], (0, 1)) if x.ndim == 2 else x.cos(),
    "focal": lambda w, i, x: (1 - (-x.abs()).exp()).square() * x,
    "of each sequence": lambda w, i, x: x.sum(-1, keepdim=True).expand(x.shape) if x.ndim == 2 else x.tanh(),
    "held": lambda w, i, x: x.detach(),
    "normalized": lambda w, i, x: (x - 0.9 * x.mean()) / (x.std(correction=0) + 1),
}
SUMS: dict[str, Op] = {
    "sum": lambda w, i, x: x.sum(),
    "mean": lambda w, i, x: x.mean(),
    "mean of counted": lambda w, i, x: (x * _counts(i, x)).sum() / _counts(i, x).sum().clamp(min=1),
    "mean of means": lambda w, i, x: x.mean(-1).mean(),
    "preferred": lambda w, i, x: -F.logsigmoid(x.sum(-1)).mean(),
    "of those chosen": lambda w, i, x: x[_counts(i, x) > 0].sum(),
    "largest": lambda w, i, x: x.amax(),
}
NUMBERS: dict[str, Op] = {
    "added": lambda w, i, a, b: a + 0.1 * b,
    "times": lambda w, i, a, b: a * b.sigmoid(),
    "scaled": lambda w, i, a: a * 0.3,
    "per item": lambda w, i, a: a / (i >= 0).sum().clamp(min=1),
}
STAGES = {"rows": ROWS, "head": HEADS, "wide": WIDE, "each": EACH, "tokens": TOKENS, "sum": SUMS, "number": NUMBERS}
OPS = {f"{stage} {name}": op for stage, ops in STAGES.items() for name, op in ops.items()}
OF = {
    **{"rows": "rows", "head": "rows", "wide": "wide", "each": "wide"},
    **{"tokens": "tokens", "sum": "tokens", "number": "number"},
}
"""What kind of value each stage takes."""


def _kind(x: Tensor, sizes: Sizes) -> str:
    if x.ndim == 0:
        return "number"
    if x.shape == sizes:
        return "rows"
    return "wide" if x.ndim > 1 and x.shape[-1] == V else "tokens"


@dataclass(frozen=True)
class TiledSetting(Setting):
    """results: how many of the last values are returned."""

    results: int = 1

    def program(self, steps: Sequence[Step]) -> Program:
        return Program(list(steps), OPS, self.results)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return given(self.sizes, self.frozen)


def given(sizes: Sizes, frozen: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """x, the weights and labels, of which a quarter is ignored."""
    x, weight, _ = inputs_of(sizes, frozen)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(V, sizes[:2], generator=generator)
    return x, weight, ids.masked_fill(torch.rand(sizes[:2], generator=generator) < 0.25, IGNORED)


def cases(seed: int = 0) -> Iterator[str]:
    """Without end."""
    return (f"tiles:{number}" for number in itertools.count(seed * SESSION))


def made(seed: int) -> tuple[TiledSetting, list[Step]]:
    """The program of a seed, and where it runs."""
    random = Random(seed)
    sizes = random.randint(1, 3), random.randint(5, 13), D
    options = {**random.choice(WAYS), "tiles": random.choice([2, 3, 5, 40])}
    setting = TiledSetting(sizes, random.choice(RANKS), 1, random.random() < 0.2, options)
    if random.random() < 0.2:
        setting = replace(setting, frozen=random.choice(["x", "weight"]))
    return replace(setting, results=random.choice([1, 1, 2, 3])), _steps(random, sizes)


def run(name: str) -> Result:
    return shrunk(name, *made(int(name.partition(":")[2])))


def _steps(random: Random, sizes: Sizes) -> list[Step]:
    """From rows to a number; one or two heads, some of what there is of each stage."""
    with torch.device("meta"):
        x, w, ids = (torch.empty_like(x) for x in given(sizes))
    values, steps = [x], list[Step]()

    def add(stage: str) -> None:
        """One more value of a stage, if there is a kind of it."""
        for _ in range(20):
            step = _step(random, stage, values, sizes)
            if step is None:
                return
            try:
                with torch.device("meta"):
                    value = OPS[step.name](w, ids, *(values[i] for i in step.operands), *step.args)
            except (RuntimeError, IndexError, ValueError):
                continue
            if 0 < value.numel() <= LIMIT and value.dtype == torch.float64:
                values.append(value)
                steps.append(step)
                return

    for _ in range(random.choice([1, 1, 2])):
        for stage, most in (("rows", 3), ("head", 1), ("wide", 3), ("each", 2), ("tokens", 3)):
            for _ in range(random.randint(1 if stage in ("head", "each") else 0, most)):
                add(stage)
        add("sum")
    for _ in range(random.randint(1, 2)):
        add("number")
    return steps


def _step(random: Random, stage: str, values: Sequence[Tensor], sizes: Sizes) -> Step | None:
    name = random.choice(sorted(STAGES[stage]))
    fitting = [i for i, value in enumerate(values) if _kind(value, sizes) == OF[stage]]
    if not fitting:
        return None
    first = random.choice(fitting[-2:])
    same_shape = [i for i in fitting if values[i].shape == values[first].shape]
    operands: tuple[int, ...] = (first,)
    if name in ("sum of both", "of two", "kl", "difference", "product", "clipped", "added", "times"):
        operands = first, random.choice(same_shape)
    arguments = {
        "mlp": lambda: (" ".join(word for word in ("bias", "gated", "residual") if random.random() < 0.5),),
        "embedded": lambda: (random.choice([0, 700]),),
        "head": lambda: (random.choice([0, 700]), random.random() < 0.3),
        "put": lambda: (random.choice(["column", "columns", "rows", "all"]),),
        "window": lambda: (random.randint(1, 4),),
        "of two": lambda: (random.random() < 0.5,),
        "column": lambda: (random.choice([0, -1, 5]),),
        "cross entropy": lambda: (
            random.choice(["none", "none", "sum", "mean"]),
            random.choice([0.0, 0.0, 0.1]),
            random.random() < 0.3,
        ),
    }
    args = (random.choice([0.5, 3.0]),) if (stage, name) == ("wide", "scaled") else arguments.get(name, tuple)()
    return Step(f"{stage} {name}", operands, args, random.choice(AROUND) if random.random() < 0.06 else "")
