"""Functions of flex_attention that no text and no predicate says: they run as they are, on shards.

Learned biases, masks by head, tables of pairs; loss and every gradient are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention.masks.test_flex_attention import DOCUMENTS, LENGTH, PADDING, UNFIT, WAYS, canonical, causal, qkv
from support.attention.fused import fused_here
from support.models import Decoder, check, rotated, seeded, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sp_compile._compat import flex_on_any_device
from sp_compile.graph.call import Call
from sp_compile.sharding.attention import attention_nodes, predicate_of

HEADS = 4


@pytest.fixture(autouse=True)
def backward_on_a_cpu() -> Iterator[None]:
    with flex_on_any_device():
        yield


def bucket(q: Tensor, k: Tensor) -> Tensor:
    """T5's of a distance: exact up to 4, then logarithmic."""
    distance = (q - k).clamp(min=0)
    far = 4 + (torch.log(distance.float() / 4) / 1.4 * 4).to(torch.long)
    return torch.where(distance < 4, distance, torch.minimum(far, torch.full_like(far, 7)))


def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & ((h % 2 == 0) | (q - k < 3))


Kind = Callable[[nn.Parameter, Tensor], tuple[Any, Any]]
# name: (shape of what is learned, the score_mod of it and of documents, the mask_mod)
KINDS: dict[str, tuple[tuple[int, ...], Kind]] = {
    "distances": (
        (HEADS, 2 * LENGTH - 1),
        lambda w, d: (lambda s, b, h, q, k: s + w[h, k - q + LENGTH - 1], causal),
    ),
    "buckets": ((8, HEADS), lambda w, d: (lambda s, b, h, q, k: s + w[bucket(q, k), h], causal)),
    "pairs": ((HEADS, LENGTH, LENGTH), lambda w, d: (lambda s, b, h, q, k: s + w[h, q, k], None)),
    "slopes": ((HEADS,), lambda w, d: (lambda s, b, h, q, k: s * w[h].exp() - w[h] * (q - k), causal)),
    "a cap": ((1,), lambda w, d: (lambda s, b, h, q, k: 3 * w.exp()[h - h] * torch.tanh(s / w[h - h].exp()), causal)),
    "documents": (
        (4, 4),
        lambda w, d: (lambda s, b, h, q, k: s + w[d[b, q], d[b, k]], lambda b, h, q, k: (q >= k) & (d[b, k] < 3)),
    ),
    "a mask by head": ((HEADS,), lambda w, d: (lambda s, b, h, q, k: s * w[h], by_head)),
    "a table of pairs": (
        (1,),
        lambda w, d: (None, lambda b, h, q, k: (q >= k) & (_ALLOWED[q, k] | (q - k == h))),
    ),
}
_ALLOWED = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
_DOCUMENTS = DOCUMENTS.clamp(max=3)
WITHOUT_FILLS = [name for name in KINDS if name != "a table"]


class Learned(Decoder):
    """With one weight for its attention; forward(ids, documents)."""

    def __init__(self, kind: str, heads: tuple[int, int] = (HEADS, 2)) -> None:
        super().__init__(_attend, *heads)
        shape, self.mods = KINDS[kind]
        self.weight = nn.Parameter(torch.randn(shape) / 2)

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        self.documents = documents
        return super().forward(ids)


def _attend(model: Learned, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    score_mod, mask_mod = model.mods(model.weight, model.documents)
    grouped, length = q.shape[1] != k.shape[1], q.shape[2]
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, q.shape[0], q.shape[1], length, length, device="cpu")
    found = flex_attention(rotated(q), rotated(k), v, score_mod, mask, enable_gqa=grouped)
    return found * model.weight.sum().exp() if score_mod is None else found


def run(kind: str, ranks: int, length: int = LENGTH, heads: tuple[int, int] = (HEADS, 2), **config: Any) -> None:
    inputs = tokens(length), _DOCUMENTS[:, :length]
    report = check(seeded(lambda: Learned(kind, heads)), *inputs, sp=ranks, **config)
    assert not report.fallbacks, report
    assert not any("flex_attention" in note.done for note in report.notes), report


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid", "gather"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_device(kind: str, strategy: str) -> None:
    run(kind, 4, attention=strategy)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("strategy", ["ring", "gather"])
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
@pytest.mark.parametrize("kind", ["distances", "documents", "a mask by head"])
def test_in_other_orders(kind: str, layout: str, strategy: str) -> None:
    run(kind, 3, attention=strategy, layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [way for way in WAYS if way not in UNFIT])
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind: str, strategy: str, ranks: int) -> None:
    run(kind, ranks, attention=strategy)
    run(kind, ranks, 11, (HEADS, HEADS), attention=strategy)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "hybrid", "gather"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_kernel_equals_one_device(kind: str, strategy: str) -> None:
    """The graphs that a GPU compiles, gradients of tables included, in the place of dense arithmetic."""
    with fused_here() as programs:
        run(kind, 4, attention=strategy)
    assert len(programs.made) >= 2
