"""all_to_all_permute and its pass on real ranks: values, gradients, compiled programs, and errors without a hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support import ranks as in_rank
from support.golden import notes_of
from support.ranks import Ranks
from support.variants.exchange_variants import EXCHANGES, four_d_heads, four_d_rows
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from sp_compile import SpError, all_to_all_permute, declare_symmetric_memory
from sp_compile.passes.capture.capture import capture
from sp_compile.passes.collectives.permute.fuse_permute import FuseAllToAllPermutes

TIMEOUT = 60.0
CASES = [((2, 3, 8, 5), 2, 1), ((2, 8, 3, 5), 1, 2), ((8, 3), 0, 1), ((3, 8), 1, 0), ((1, 8, 3), 1, 2)]


def inputs(shape: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype) for _ in range(n)]


def true(xs: list[Tensor], rank: int, scatter: int, gather: int) -> Tensor:
    return torch.cat([x.chunk(len(xs), scatter)[rank] for x in xs], gather)


def _values() -> None:
    """Eager and compiled, with gradients and out=, and dtypes that no backend has."""
    group, rank = in_rank.group(), dist.get_rank()
    compiled = torch.compile(all_to_all_permute, backend="aot_eager", fullgraph=True)
    for shape, scatter, gather in CASES:
        xs = inputs(shape, group.size())
        expected = true(xs, rank, scatter, gather)
        for fn in (all_to_all_permute, compiled):
            x = xs[rank].clone().requires_grad_()
            y = fn(x, scatter, gather, group)
            assert torch.equal(y, expected)
            y.backward(y.detach() * 2)
            assert torch.equal(x.grad, 2 * xs[rank])
        out = torch.empty_like(expected)
        assert all_to_all_permute(xs[rank], scatter, gather, in_rank.mesh(), out) is out
        assert torch.equal(out, expected)
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int32, torch.int16, torch.float8_e4m3fn):
        xs = inputs((2, 3, 8), group.size(), dtype)
        for fn in (all_to_all_permute, compiled) if dtype is torch.float8_e4m3fn else (all_to_all_permute,):
            y = fn(xs[rank], -1, 0, group)
            assert torch.equal(y.view(torch.uint8), true(xs, rank, 2, 0).view(torch.uint8))
    xs = inputs((2, 8), group.size(), torch.complex128)
    assert torch.equal(all_to_all_permute(xs[rank].conj(), 1, 0, group), true(xs, rank, 1, 0).conj())
    for pair in torch.func.jvp(lambda x: all_to_all_permute(x, 1, 0, group), (xs[rank],), (xs[rank],)):
        assert torch.equal(pair, true(xs, rank, 1, 0))
    assert declare_symmetric_memory(1 << 16, group) is False  # these ranks have no GPU


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values(ranks: Ranks, n: int) -> None:
    ranks.run(n, _values)


def _inductor() -> None:
    group, rank = in_rank.group(), dist.get_rank()
    xs = inputs((2, 3, 4, 5), 2)

    def step(x: Tensor) -> Tensor:
        y = all_to_all_permute(x.sin(), 2, 1, group).cumsum(1)
        return all_to_all_permute(y, 1, 2, group)

    results = []
    for fn in (step, torch.compile(step, fullgraph=True)):
        x = xs[rank].clone().requires_grad_()
        y = fn(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_inductor(ranks: Ranks) -> None:
    ranks.run(2, _inductor)


# The pass.


def _before_autograd(gm: GraphModule, examples: list[Tensor]) -> Any:
    graph = capture(gm, examples)
    assert "permute_all_to_all" in [n.label for n in notes_of(FuseAllToAllPermutes(), graph)]
    return graph.forward


def _joint(joint: GraphModule, examples: Any, **options: Any) -> Any:
    assert "permute_all_to_all" in [n.label for n in notes_of(FuseAllToAllPermutes(decomposed=True), joint)]
    return min_cut_rematerialization_partition(joint, examples, **options)


def _kept(gm: GraphModule, examples: list[Tensor]) -> Any:
    return make_boxed_func(gm.forward)


BACKENDS: dict[str, Callable[..., Any]] = {
    "graph of one pass": _before_autograd,
    "joint graph": aot_autograd(fw_compiler=_kept, bw_compiler=_kept, partition_fn=_joint),
}


def _compare_forms(names: list[str]) -> None:
    """Compare each form with the function, forward and backward."""
    group, rank = in_rank.group(), dist.get_rank()
    for name in names:
        form = EXCHANGES[name]
        xs = inputs(form.shape, 4)
        for backend in BACKENDS.values():
            torch._dynamo.reset()
            fn = torch.compile(lambda x, f=form.fn: f(x, 4, group).sin(), backend=backend, fullgraph=True)
            x = xs[rank].clone().requires_grad_()
            y = fn(x)
            expected = true(xs, rank, form.scatter, form.gather).sin()
            torch.testing.assert_close(y, expected.reshape(y.shape), rtol=1e-12, atol=1e-12)
            y.square().sum().backward()
            there = (2 * x.detach().sin() * x.detach().cos()).detach()
            torch.testing.assert_close(x.grad, there, rtol=1e-12, atol=1e-12)


QUICK = ["4D, heads", "blog, rows"]


def test_forms(ranks: Ranks) -> None:
    ranks.run(4, _compare_forms, QUICK)


@pytest.mark.slow
def test_all_forms(ranks: Ranks) -> None:
    ranks.run(4, _compare_forms, [name for name in EXCHANGES if name not in QUICK])


def _attention(backend: str) -> None:
    """q, k and v in one exchange, and back: the loss and the gradients of the same program without the pass."""
    group, rank = in_rank.group(), dist.get_rank()
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(12, 36, generator=generator, dtype=torch.float64)
    x = inputs((2, 3, 12), 2)[rank]

    def step(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (four_d_heads(t.unflatten(2, (4, 3)), 2, group) for t in (x @ w).chunk(3, -1))
        out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return four_d_rows(out.transpose(1, 2), 2, group).flatten(2).square().sum()

    results = []
    for chosen in ("aot_eager", BACKENDS[backend]):
        torch._dynamo.reset()
        given = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = torch.compile(step, backend=chosen, fullgraph=True)(*given)
        loss.backward()
        results.append([loss.detach(), given[0].grad, given[1].grad])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(ranks: Ranks, backend: str) -> None:
    ranks.run(2, _attention, backend)


# What does not fit.


def _unequal(rank: int, group: Any) -> Tensor:
    return all_to_all_permute(torch.zeros(2 + rank, 4), 1, 0, group)


def _other_dims(rank: int, group: Any) -> Tensor:
    return all_to_all_permute(torch.zeros(2, 2), rank, 1 - rank, group)


def _indivisible(rank: int, group: Any) -> Tensor:
    return all_to_all_permute(torch.zeros(2, 5), 1, 0, group)


def _wrong_on_one_rank(rank: int, group: Any) -> Tensor:
    return all_to_all_permute(torch.zeros(2, 4), (1, 2)[rank], 0, group)


def _no_dims(rank: int, group: Any) -> Tensor:
    return all_to_all_permute(torch.zeros((2, 2) if rank else ()), rank, 0, group)


def _on_meta(rank: int, group: Any) -> Tensor:
    return all_to_all_permute(torch.zeros(2, 2, device=("meta", "cpu")[rank]), 1, 0, group)


def _dtensor(rank: int, group: Any) -> Tensor:
    whole = DTensor.from_local(torch.zeros(2, 2), in_rank.mesh())
    return all_to_all_permute(whole if rank else whole.to_local(), 1, 0, group)


def _other_sizes_declared(rank: int, group: Any) -> bool:
    return declare_symmetric_memory(64 + rank, group)


WRONG = {
    _unequal: "rank 1: all_to_all_permute of x [3, 4]",
    _other_dims: "scatter_dim=1, gather_dim=0",
    _indivisible: "SP543: rank 0, 1: all_to_all_permute",
    _wrong_on_one_rank: "SP503: rank 1: all_to_all_permute: scatter_dim",
    _no_dims: "SP542: rank 0: all_to_all_permute",
    _on_meta: "rank 0: all_to_all_permute of x [2, 2] torch.float32 on meta",
    _dtensor: "SP541: rank 1: all_to_all_permute",
    _other_sizes_declared: "rank 1: size=65",
}


def _raised(wrong: Callable[[int, Any], Any]) -> tuple[str, Tensor]:
    group, message = in_rank.group(), "nothing"
    try:
        wrong(dist.get_rank(), group)
    except SpError as error:
        message = str(error)
    return message, all_to_all_permute(torch.ones(1, 2), 1, 0, group)


@pytest.mark.parametrize(("wrong", "error"), WRONG.items())
def test_every_rank_raises(ranks: Ranks, wrong: Callable[[int, Any], Any], error: str) -> None:
    first, second = ranks.run(2, _raised, wrong, timeout=TIMEOUT)
    assert first[0] == second[0]
    assert error in first[0]
    assert torch.equal(first[1], torch.ones(2, 1))


def _outside() -> str:
    pair = dist.new_group([0, 1])
    try:
        return str(all_to_all_permute(torch.ones(1, 2), 1, 0, pair).shape)
    except SpError as error:
        return str(error)


def test_a_rank_outside_the_group(ranks: Ranks) -> None:
    results = ranks.run(4, _outside, timeout=TIMEOUT)
    assert results[:2] == ["torch.Size([2, 1])"] * 2
    assert all("SP112" in error for error in results[2:])
