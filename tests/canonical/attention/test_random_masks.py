"""Random programs that compute masks from positions: each predicate is exactly the mask that torch computes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from sp_compile.lowering.masks.predicate import evaluate_mask
from sp_compile.passes.canonical.attention.parse_masks import try_parse_mask

S = 7
NUMBERS = [0, 1, 2, 3, 5, 127, 128, 255, 256, 257, 300, 2049, 4097, 65536, 2**24 + 1, 2**31 - 1, -1, -2, -300]
FRACTIONS = [0.5, 2.5, 2.9999999999, 300.3]
DTYPES = [
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16,
    torch.float16,
]  # fmt: skip
COMPARISONS = [torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne]
# functions of a tensor and a tensor or number
OPS: list[Callable[[Tensor, Any], Tensor]] = [
    *COMPARISONS, *(getattr(operator, name) for name in "add sub mul and_ or_ xor".split()), torch.rsub,
    torch.maximum, torch.minimum, torch.logical_and, torch.logical_xor,
    lambda a, b: torch.add(a, b, alpha=-3),
    lambda a, b: a // 3,
    lambda a, b: a % 100,
    lambda a, b: torch.div(a, 2, rounding_mode="trunc"),
    lambda a, b: -abs(a),
    lambda a, b: a.clamp(2, 200),
    lambda a, b: a.cumsum(-1),
    lambda a, b: torch.diff(a, prepend=a[..., :1]),
    lambda a, b: torch.where(a > 2, a, b),
    lambda a, b: a.masked_fill(a == 3, 300),
    lambda a, b: torch.cat([a[..., 1:], a[..., :1]], -1),
    lambda a, b: a.expand(S, S).tril(),
]  # fmt: skip


def random_vector(r: Random) -> Tensor:
    choices = (
        lambda: torch.arange(S),
        lambda: torch.arange(S + 3)[3:],
        lambda: (torch.arange(S + 3) >= 3).cumsum(0)[3:],
        lambda: torch.full((S,), float(r.choice(NUMBERS)), dtype=r.choice([torch.float32, torch.bfloat16])),
        lambda: torch.ones(S, dtype=torch.long),
    )
    vector = r.choice(choices)()
    return vector[:, None] if r.random() < 0.5 else vector


def random_value(r: Random, depth: int) -> Tensor:
    value = random_vector(r)
    for _ in range(depth):
        if r.random() < 0.3:
            value = value.to(r.choice(DTYPES))
        number = r.choice(NUMBERS if r.random() < 0.8 else FRACTIONS)
        value = r.choice(OPS)(value, number if r.random() < 0.6 else random_value(r, depth - 1))
    return value


def random_mask(seed: int) -> Tensor:
    r = Random(seed)
    a, b = random_value(r, r.randrange(1, 3)), random_value(r, r.randrange(2))
    return a if a.dtype == torch.bool else r.choice(COMPARISONS)(a, b if r.random() < 0.5 else r.choice(NUMBERS))


def masks_of(seeds: range) -> dict[int, Tensor]:
    """Return the masks of the seeds whose programs torch can run."""
    masks = {}
    for seed in seeds:
        try:
            masks[seed] = random_mask(seed)
        except (RuntimeError, TypeError):  # a dtype that an op does not support
            continue
    return masks


def test_predicates_are_exact() -> None:
    expected = masks_of(range(120))
    gm = make_fx(lambda: [random_mask(seed) for seed in expected], tracing_mode="fake", pre_dispatch=True)()
    q, k, parsed = torch.arange(S)[:, None], torch.arange(S)[None], 0
    for seed, node in zip(expected, gm.graph.output_node().args[0]):
        mask = try_parse_mask(node, (1, 1, S, S))
        if mask is None or mask.leaves:
            continue
        allowed = evaluate_mask("" if mask.allowed == sympy.true else str(mask.allowed), {"q": q, "k": k})
        assert torch.equal(torch.as_tensor(allowed).expand(S, S), expected[seed].expand(S, S)), seed
        parsed += 1
    assert parsed > 15
