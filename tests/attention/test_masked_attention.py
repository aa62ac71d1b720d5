"""sp::masked_attention against scaled_dot_product_attention, in eager and compiled."""

from typing import Any

import pytest
import torch
from support.attention.attending import SIZES, Problem, leaves, randn
from torch import Tensor

from sp_compile.lowering.masks.spans import full_span

sp = torch.ops.sp


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("predicate", ["k <= q", "(k <= q) & (q - k < 40)", "Ne(col0, 0) & (k <= q)"])
def test_half_precision(dtype: torch.dtype, predicate: str) -> None:
    """At most twice the error that SDPA makes in the same dtype."""
    xs = [randn(1, 4, 300, 16, seed=i) for i in range(4)]
    grad = xs.pop()
    pad = torch.arange(300)[None] < 280
    i = torch.arange(300)
    mask = {"k": i <= i[:, None], "(": (i <= i[:, None]) & (i[:, None] - i < 40), "N": (i <= i[:, None]) & pad}
    allowed = mask[predicate[0]]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def errors(fn: Any) -> list[float]:
        given = leaves(*(x.to(dtype) for x in xs))
        out = fn(*given)
        out.backward(grad.to(dtype))
        return [float((a - b).detach().norm()) for a, b in zip([out, *(x.grad for x in given)], expected)]

    exact = leaves(*xs)
    whole_out = sdpa(*exact, attn_mask=allowed)
    whole_out.backward(grad)
    expected = [whole_out, *(x.grad for x in exact)]
    ours = errors(lambda q, k, v: sp.masked_attention(q, k, v, [], [pad], [], predicate, 0.0, None, False))
    theirs = errors(lambda q, k, v: sdpa(q, k, v, attn_mask=allowed))
    assert all(a <= 2 * b + 1e-12 for a, b in zip(ours, theirs)), (ours, theirs)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_masked_attention(compiled: bool, dropout_p: float) -> None:
    """In eager and compiled: the values and gradients of the operator below, in the operands' dtypes."""
    p = Problem("all", 9, 11, key_heads=2)
    q, k, v = leaves(*(x.float() for x in (p.q, p.k, p.v)))

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sp.masked_attention(q, k, v, p.rows, p.cols, SIZES, p.predicate, dropout_p, 0.3, True)

    torch.manual_seed(3)
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    arguments = p.arguments(full_span(9), full_span(11), seed=seed, dropout_p=dropout_p)
    out, lse = sp.attend(q.detach(), k.detach(), v.detach(), *arguments)
    grads = sp.attend_backward(p.grad.float(), q.detach(), k.detach(), v.detach(), out, lse, *arguments, False)
    torch.manual_seed(3)
    run = torch.compile(fn, backend="aot_eager" if dropout_p else "inductor", fullgraph=True) if compiled else fn
    got = run(q, k, v)
    got.backward(p.grad.float())
    torch.testing.assert_close(got, out)
    for x, wanted in zip((q, k, v), grads):
        torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape", "gqa"),
    [
        ((5, 4), (6, 4), (6, 3), False),
        ((2, 5, 4), (2, 6, 4), (2, 6, 3), False),
        ((2, 5, 4), (6, 4), (6, 3), False),
        ((2, 3, 5, 4), (3, 6, 4), (1, 6, 3), False),
        ((2, 3, 5, 4), (2, 1, 6, 4), (2, 1, 6, 4), False),
        ((3, 2, 1, 5, 4), (1, 2, 4, 6, 4), (3, 1, 4, 6, 4), False),
        ((3, 2, 4, 5, 4), (3, 2, 2, 6, 4), (3, 2, 2, 6, 4), True),
        ((4, 5, 4), (2, 6, 4), (2, 6, 4), True),
        ((2, 3, 0, 4), (2, 3, 6, 4), (2, 3, 6, 4), False),
        ((0, 3, 5, 4), (0, 3, 6, 4), (0, 3, 6, 4), False),
    ],
)
def test_shapes_of_masked_attention(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], v_shape: tuple[int, ...], gqa: bool
) -> None:
    xs = [randn(*shape, seed=i) for i, shape in enumerate((q_shape, k_shape, v_shape))]
    ours, theirs = leaves(*xs), leaves(*xs)
    got = sp.masked_attention(*ours, [], [], [], "k <= q", 0.0, None, gqa)
    i, j = torch.arange(q_shape[-2]), torch.arange(k_shape[-2])
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = sdpa(*theirs, attn_mask=j <= i[:, None], enable_gqa=gqa)
    torch.testing.assert_close(got, expected)
    grad = randn(*expected.shape)
    got.backward(grad)
    expected.backward(grad)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_gradcheck(dropout_p: float) -> None:
    p = Problem("all", 4, 5, heads=2, key_heads=1, width=3, v_width=2)

    def fn(*xs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return sp.masked_attention(*xs, p.rows, p.cols, SIZES, p.predicate, dropout_p, None, True)

    assert torch.autograd.gradcheck(fn, leaves(p.q, p.k, p.v))
