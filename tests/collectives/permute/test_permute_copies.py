"""Inductor's kernels around exchanges of two dims: kernels that only move data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measuring.counting import FUSED
from support.variants.exchange_variants import deepspeed_heads, deepspeed_rows
from support.variants.tracing_exchanges import one_of
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from torch.fx import GraphModule

from sp_compile import all_to_all_permute
from sp_compile.lowering.torch_compat import has_cpp_compiler
from sp_compile.passes.capture.capture import capture
from sp_compile.passes.collectives.permute.combine_permutes import PackExchanges
from sp_compile.passes.collectives.permute.fuse_permute import FuseAllToAllPermutes

pytestmark = pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler")
N, ROWS, HEADS, WIDTH = 2, 32, 8, 16
Exchange = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    with one_of(N) as ranks:
        yield ranks


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def attention(there: Exchange, back: Exchange, rotate: bool, flat: bool = False) -> Callable[..., Tensor]:
    """Projections, RoPE, exchange, attention, exchange, projection, on local rows.

    flat: v and the result are exchanged with their heads side by side, as their projections have them.
    """

    def fn(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(2, (HEADS, WIDTH)) for w in (wq, wk, wv))
        if rotate:
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        q, k = there(q), there(k)
        v = there(v.flatten(2)).unflatten(2, (-1, WIDTH)) if flat else there(v)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        out = out.transpose(1, 2)
        return (back(out.flatten(2)) if flat else back(out).flatten(2)) @ wo

    return fn


def generated(fn: Callable[..., Tensor], batch: int, backend: Any = "inductor") -> list[str]:
    """The calls of kernels in the forward's code and in the backward's, by name."""
    size = HEADS * WIDTH
    weights = [torch.randn(size, size, requires_grad=True) for _ in range(4)]
    inputs = (torch.randn(batch, ROWS, size), *weights, torch.randn(ROWS, 1, WIDTH), torch.randn(ROWS, 1, WIDTH))
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        compiled = torch.compile(fn, fullgraph=True, backend=backend)
        _, code = run_and_get_code(lambda: compiled(*inputs).sum().backward())
    assert len(code) == 2
    return code


def copies(code: str) -> list[str]:
    """Kernels that are called and only move data."""
    called = re.findall(r"^ +(cpp_fused_\w+)\(", code, re.MULTILINE)
    return [name for name in called if FUSED.fullmatch(name)]


def sends(code: str) -> list[str]:
    """Return the kernel that writes each sent buffer, or "" where the buffer is sent without a copy."""
    calls = re.findall(r"^ +(cpp_fused_\w+)\((.*)\)$", code, re.MULTILINE)
    out = []
    for sent in re.findall(r"all_to_all_single\.default\((\w+),", code):
        out.append(next((name for name, given in calls if sent in given.split(", ")), ""))
    return out


def by_function() -> tuple[Exchange, Exchange]:
    return lambda t: all_to_all_permute(t, 2, 1), lambda t: all_to_all_permute(t, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_q_and_k_are_packed_by_rope(group: Any, batch: int) -> None:
    """No copy of q and k, one of v, and of the result one each time it changes its place in memory."""
    forward, backward = generated(attention(*by_function(), rotate=True), batch)
    q, k, *_ = sends(forward)
    assert "mul" in q
    assert "mul" in k
    # v; the result: sent as attention left it where there is one sequence, and copied for the projection.
    assert len(copies(forward)) == 1 + batch
    # Of the result, q, k and v. With batch 1 they are sent without a copy, and RoPE's backward reads received rows.
    assert len(copies(backward)) == (1 if batch == 1 else 4)


@pytest.mark.slow
def test_flat_heads_are_copied_once(group: Any) -> None:
    """For batch 2, v and the result are copied once in each direction: a projection reads the received rows transposed."""
    forward, backward = generated(attention(*by_function(), rotate=True, flat=True), 2)
    assert (len(copies(forward)), len(copies(backward))) == (2, 4)  # both; gradients of the result, q, k and v
    assert all("mul" in kernel for kernel in sends(forward)[:2])
    (last,) = re.findall(r"extern_kernels.mm\(reinterpret_tensor\((\w+), \(64, 128\), \(1, 64\)", forward)
    assert f"wait_tensor.default({last})" in forward


class Unpacked(FuseAllToAllPermutes):
    steps = tuple(step for step in FuseAllToAllPermutes.steps if step is not PackExchanges)


def _with_the_pass(gm: GraphModule, examples: list[Tensor]) -> Any:
    graph = capture(gm, examples)
    Unpacked()(graph)
    return compile_fx(graph, examples)


@pytest.mark.slow
def test_the_pass_takes_copies_away(group: Any) -> None:
    """DeepSpeed's form: fewer kernels that only move data than without the pass, at most one per tensor."""
    program = attention(lambda t: deepspeed_heads(t, N, group), lambda t: deepspeed_rows(t, N, group), rotate=True)
    plain, rewritten = (generated(program, 2, backend) for backend in ("inductor", _with_the_pass))
    assert [len(copies(part)) for part in rewritten] == [2, 4]  # as in test_flat_heads_are_copied_once
    assert len(copies(rewritten[0])) < len(copies(plain[0]))
    assert len(copies(rewritten[1])) <= len(copies(plain[1]))  # RoPE's backward reads what comes in any order
    assert all("mul" in kernel for kernel in sends(rewritten[0])[:2])
