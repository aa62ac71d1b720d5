"""Attentions over the parts of a sequence, joined, are one attention with a predicate over the parts.

EXPECTTEST_ACCEPT=1 rewrites the goldens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from support.golden import captured, show
from torch import Tensor

import sp_compile
from sp_compile.passes.canonical.split_attention import JoinSplitAttention
from sp_compile.passes.context import FALLBACKS

sdpa = F.scaled_dot_product_attention
QKV = tuple(torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in "qkv")
LENGTHS = [4, 3, 2]


def attend_parts(q: Tensor, k: Tensor, v: Tensor, lengths: list[int] = LENGTHS, **options: Any) -> Tensor:
    """As the vision towers of Qwen-VL: the parts of (1, H, S, D) are images."""
    parts = zip(*(x.split(lengths, dim=2) for x in (q, k, v)))
    return torch.cat([sdpa(*part, **options).transpose(1, 2).contiguous() for part in parts], dim=1)


def attend_slices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Slices that are joined in the layout of attention, with more keys than queries in the first part."""
    return torch.cat([sdpa(q[:, :, :2], k[:, :, :5], v[:, :, :5]), sdpa(q[:, :, 2:], k[:, :, 5:], v[:, :, 5:])], 2)


class Goldens(expecttest.TestCase):
    """The pass alone."""

    def test_split_attention(self) -> None:
        gm = captured(attend_parts, *QKV)
        JoinSplitAttention()(gm)
        self.assertExpectedInline(
            show(gm),
            """\
x: [1, 2, 9, 4] = placeholder
y: [1, 2, 9, 4] = placeholder
z: [1, 2, 9, 4] = placeholder
full_default: [1] = aten.full([1], 4, dtype=int64, device=cpu)
full_default_1: [1] = aten.full([1], 7, dtype=int64, device=cpu)
full_default_2: [1] = aten.full([1], 9, dtype=int64, device=cpu)
cat_default: [3] = aten.cat([full_default, full_default_1, full_default_2])
arange_default: [9] = aten.arange(9, dtype=int64, device=cpu)
bucketize_tensor: [9] = aten.bucketize.Tensor(arange_default, cat_default, right=True)
unsqueeze_default: [1, 9] = aten.unsqueeze(bucketize_tensor, 0)
masked_attention_default: [1, 2, 9, 4] = sp.masked_attention(x, y, z, [unsqueeze_default], [unsqueeze_default], [], Eq(row0, col0), 0.0, None, False)
permute_default: [1, 9, 2, 4] = aten.permute(masked_attention_default, [0, 2, 1, 3])
return (permute_default,)""",
        )


@pytest.mark.parametrize("program", [attend_parts, partial(attend_parts, is_causal=True, scale=0.3), attend_slices])
def test_the_same_values(program: Callable[..., Tensor]) -> None:
    gm = captured(program, *QKV)
    JoinSplitAttention()(gm)
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    assert gm.graph.find_nodes(op="call_function", target=torch.ops.sp.masked_attention.default)
    torch.testing.assert_close(gm(*QKV), program(*QKV), rtol=1e-12, atol=1e-12)


def attend_other_scales(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = [x.split(LENGTHS, 2) for x in (q, k, v)]
    return torch.cat([sdpa(*part, scale=1.0 / i) for i, part in enumerate(zip(*parts), 1)], 2)


def attend_reversed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = [x.split(LENGTHS, 2) for x in (q, k, v)]
    return torch.cat([sdpa(*part) for part in reversed([*zip(*parts)])], 2)


def attend_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([sdpa(*part) for part in zip(*(x.split(1, 1) for x in (q, k, v)))], 1)


def attend_some(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([sdpa(*part) for part in zip(*(x.split([5, 2, 2], 2)[:2] for x in (q, k, v)))], 2)


def attend_in_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        parts = [sdpa(*part) for part in zip(*(x.split(LENGTHS, 2) for x in (q, k, v)))]
    return torch.cat(parts, 2)


@pytest.mark.parametrize(
    "program",
    [
        partial(attend_parts, dropout_p=0.1),
        attend_in_autocast,
        partial(attend_parts, attn_mask=torch.zeros(1, 1)),
        lambda q, k, v: torch.cat([sdpa(*part) for part in zip(*(x.split([5, 4], 2) for x in (q, k, v)))][:1], 2),
        lambda q, k, v: torch.cat([sdpa(q[:, :, :5], k, v), sdpa(q[:, :, 5:], k, v)], 2),
        lambda q, k, v: torch.cat([sdpa(q[:, :, :5], k, v, is_causal=True), sdpa(q[:, :, 5:], k, v)], 2),
        attend_other_scales,
        attend_reversed,
        attend_heads,
        attend_some,
    ],
)
def test_other_attentions_stay(program: Callable[..., Tensor]) -> None:
    gm = captured(program, *QKV)
    before = show(gm)
    JoinSplitAttention()(gm)
    assert show(gm) == before


@pytest.mark.parametrize("attention", ["gather", "ring", "ulysses"])
def test_parts_on_shards(attention: str) -> None:
    """The bounds of the parts and of the ranks' rows differ."""
    weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    report = sp_compile.verify(
        lambda x: attend_parts(x @ weight, (x @ weight).sin(), (x @ weight).cos()), x, sp=2, attention=attention
    )
    assert not report.find_notes(*FALLBACKS)
    assert report.work.flops_share > 0.95
