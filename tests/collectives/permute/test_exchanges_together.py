"""Exchanges that do not wait for each other go together: q, k and v of an attention, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from support.golden import notes_of, show
from support.variants.exchange_variants import deepspeed_heads, four_d_rows, swap_functional
from support.variants.tracing_exchanges import N, aot, count, one_of, traced
from torch import Tensor

import sp_compile
from sp_compile.lowering.comm.simulate import run_ranks
from sp_compile.passes.collectives.permute.fuse_permute import FuseAllToAllPermutes, FusePermutes


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with one_of(N) as ranks:
        yield ranks


def attention(x: Tensor, w: Tensor, group: Any) -> Tensor:
    """x (b, s, 40), w (40, 40 + 2 * m): 8 heads of 5 numbers, and m / 5 heads of keys and of values."""
    b, s, _ = x.shape
    m = (w.shape[1] - 40) // 2
    q, k, v = (x @ w).split([40, m, m], -1)
    q, k, v = (deepspeed_heads(t.reshape(b, s, -1, 5), N, group).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return four_d_rows(out.transpose(1, 2), N, group).flatten(2)


def test_q_k_and_v_go_together(group: Any) -> None:
    x, w = torch.randn(2, 3, 40), torch.randn(40, 80)
    gm = traced(lambda x, w: attention(x, w, group), x, w)
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["permute_all_to_all"] * 4 + ["packed"]
    assert_expected_inline(
        show(gm),
        """\
l_x_: [2, 3, 40] = placeholder
l_w_: [40, 80] = placeholder
matmul: [2, 3, 80] = aten.matmul(l_x_, l_w_)
split_with_sizes:  = aten.split_with_sizes(matmul, [40, 20, 20], -1)
getitem: [2, 3, 40] = getitem(split_with_sizes, 0)
getitem_1: [2, 3, 20] = getitem(split_with_sizes, 1)
getitem_2: [2, 3, 20] = getitem(split_with_sizes, 2)
reshape: [2, 3, 8, 5] = aten.reshape(getitem, [2, 3, -1, 5])
reshape_3: [2, 3, 4, 5] = aten.reshape(getitem_1, [2, 3, -1, 5])
reshape_6: [2, 3, 4, 5] = aten.reshape(getitem_2, [2, 3, -1, 5])
all_to_all_default:  = sp.all_to_all([reshape, reshape_3, reshape_6], 2, [1, 4, 0, 4], 1, [1, 4, 0, 4], 4, 0)
getitem_3: [2, 12, 2, 5] = getitem(all_to_all_default, 0)
getitem_4: [2, 12, 1, 5] = getitem(all_to_all_default, 1)
getitem_5: [2, 12, 1, 5] = getitem(all_to_all_default, 2)
transpose: [2, 2, 12, 5] = aten.transpose.int(getitem_3, 1, 2)
transpose_1: [2, 1, 12, 5] = aten.transpose.int(getitem_4, 1, 2)
transpose_2: [2, 1, 12, 5] = aten.transpose.int(getitem_5, 1, 2)
scaled_dot_product_attention: [2, 2, 12, 5] = aten.scaled_dot_product_attention(transpose, transpose_1, transpose_2, enable_gqa=True)
transpose_3: [2, 12, 2, 5] = aten.transpose.int(scaled_dot_product_attention, 1, 2)
all_to_all_permute_default_3: [2, 3, 8, 5] = sp.all_to_all_permute(transpose_3, 1, 2, 4, 0)
flatten: [2, 3, 40] = aten.flatten.using_ints(all_to_all_permute_default_3, 2)
return (flatten,)""",
    )
    apart = traced(lambda x, w: attention(x, w, group), x, w)
    FusePermutes()(apart)
    xs = [torch.randn(2, 3, 40) for _ in range(N)]
    together, each = (run_ranks(N, lambda r, g=g: g(xs[r], w)[0]) for g in (gm, apart))
    assert all(torch.equal(y, z) for y, z in zip(together, each))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("kv", "backward"), [(40, 2), (20, 3)], ids=["MHA", "GQA"])
def test_collectives_of_an_attention(group: Any, kv: int, backward: int) -> None:
    """Gradients of fewer heads have fewer rows to gather, and take a message of their own."""
    x, w = torch.randn(2, 3, 40, requires_grad=True), torch.randn(40, 40 + 2 * kv, requires_grad=True)
    graphs = aot(lambda x, w: attention(x, w, group), x, w)
    assert [count(graphs[part], "all_to_all_single") for part in ("forward", "backward")] == [2, backward]


def test_dependent_exchanges_are_not_packed(group: Any) -> None:
    def layers(x: Tensor) -> Tensor:
        first = deepspeed_heads(x, N, group)
        second = deepspeed_heads(x + first.sum(), N, group)
        return first + second

    gm = traced(layers, torch.randn(2, 3, 8, 5))
    FuseAllToAllPermutes()(gm)
    assert count(gm, "sp.all_to_all_permute") == 2


def test_a_collective_between_keeps_its_place(group: Any) -> None:
    """The user of the first result is a collective, so it cannot move after the second exchange."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = deepspeed_heads(x, N, group)
        mixed = swap_functional(first.movedim(1, 0).contiguous(), N, group)
        return mixed, deepspeed_heads(y, N, group)

    gm = traced(step, torch.randn(2, 3, 8, 5), torch.randn(2, 3, 8, 5))
    FuseAllToAllPermutes()(gm)
    assert count(gm, "sp.all_to_all_permute") == 2


def test_a_program_of_the_function(group: Any) -> None:
    """The pass inserts the operator all_to_all_permute, and packs explicit calls of it as well."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        return sp_compile.all_to_all_permute(x, 2, 1) * sp_compile.all_to_all_permute(y, 2, 1)

    gm = traced(step, torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    assert [n.label for n in notes_of(FuseAllToAllPermutes(), gm)] == ["packed"]
    assert count(gm, "sp.all_to_all.default") == 1
