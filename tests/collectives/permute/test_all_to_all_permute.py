"""all_to_all_permute on simulated ranks: every pair of dims, dtypes and strides, gradients, out=, and errors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sp_compile
from sp_compile import SpError, all_to_all_permute
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives import all_to_all_permute as lowering
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, SimulationError, run_ranks

DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int64, torch.complex64]
ODD_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.complex128]


def shards(n: int, shape: list[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * 3).to(dtype) for _ in range(n)]


def bits(x: Tensor) -> Tensor:
    """torch.equal does not know every dtype."""
    return x.contiguous().view(torch.uint8) if x.dtype in ODD_DTYPES else x


def expected(xs: list[Tensor], rank: int, scatter: int, gather: int) -> Tensor:
    """The definition."""
    return torch.cat([x.chunk(len(xs), scatter)[rank] for x in xs], gather)


def exchanged(xs: list[Tensor], scatter: int, gather: int, **options: Any) -> list[Tensor]:
    ranks = Ranks(len(xs), SIMULATED_GROUP)
    return run_ranks(len(xs), lambda r: all_to_all_permute(xs[r], scatter, gather, ranks, **options))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_every_pair_of_dims(n: int, ndim: int) -> None:
    for scatter, gather in itertools.permutations(range(ndim), 2):
        for first in (1, 2):
            shape = [first, 3, 2, 5][:ndim]
            shape[scatter] = 2 * n
            xs = shards(n, shape)
            for rank, y in enumerate(exchanged(xs, scatter, gather - ndim)):
                assert torch.equal(y, expected(xs, rank, scatter, gather))


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("dtype", DTYPES + ODD_DTYPES)
@pytest.mark.parametrize(("scatter", "gather"), [(2, 1), (1, 2), (1, 0), (0, 1)])
def test_dtypes_and_strides(dtype: torch.dtype, scatter: int, gather: int) -> None:
    for xs in (shards(2, [4, 6, 4], dtype), shards(2, [2, 4, 4, 3], dtype)):
        kinds: list[Callable[[Tensor], Tensor]] = [
            lambda x: x,
            lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
            lambda x: x[:1].expand(x.shape),
            lambda x: torch.stack([x, x], -1)[..., 0],
        ]
        for kind in kinds:
            given = [kind(x) for x in xs]
            for rank, y in enumerate(exchanged(given, scatter, gather)):
                assert y.dtype is dtype
                assert torch.equal(bits(y), bits(expected(given, rank, scatter, gather)))


@pytest.mark.parametrize("empty", [0, 2])
def test_empty(empty: int) -> None:
    shape = [3, 4, 5]
    shape[empty] = 0
    xs = shards(2, shape)
    for rank, y in enumerate(exchanged(xs, 1, 0)):
        assert y.shape == expected(xs, rank, 1, 0).shape


@pytest.mark.parametrize(("scatter", "gather"), [(2, 1), (1, 2), (1, 0), (0, 2)])
def test_gradients_and_their_gradients(scatter: int, gather: int) -> None:
    n = 2
    xs = shards(n, [2, 4, 4])
    weights = shards(n, list(expected(xs, 0, scatter, gather).shape))

    def live(rank: int) -> tuple[Tensor, ...]:
        x = xs[rank].clone().requires_grad_()
        y = all_to_all_permute(x, scatter, gather, Ranks(n, SIMULATED_GROUP))
        (first,) = torch.autograd.grad((y.square() * weights[rank]).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return y.detach(), first.detach(), second

    for rank, (_, first, second) in enumerate(run_ranks(n, live)):
        back = expected(weights, rank, gather, scatter)  # the adjoint is the way back
        torch.testing.assert_close(first, 2 * back * xs[rank])
        torch.testing.assert_close(second, 8 * back.square() * xs[rank])


def test_the_adjoint_identity_in_bfloat16() -> None:
    """<A x, y> = <x, A* y>: exact, since nothing is added."""
    xs, ys = shards(3, [2, 6, 4], torch.bfloat16), shards(3, [6, 2, 4], torch.bfloat16)

    def live(rank: int) -> Tensor:
        x = xs[rank].clone().requires_grad_()
        all_to_all_permute(x, 1, 0, Ranks(3, SIMULATED_GROUP)).backward(ys[rank])
        return x.grad

    for rank, grad in enumerate(run_ranks(3, live)):
        assert torch.equal(grad, expected(ys, rank, 0, 1))


@pytest.mark.parametrize(("scatter", "gather"), [(2, 1), (0, 1)])
def test_there_and_back(scatter: int, gather: int) -> None:
    xs = shards(4, [8, 2, 4])
    ranks = Ranks(4, SIMULATED_GROUP)

    def live(rank: int) -> Tensor:
        return all_to_all_permute(all_to_all_permute(xs[rank], scatter, gather, ranks), gather, scatter, ranks)

    assert all(torch.equal(x, y) for x, y in zip(xs, run_ranks(4, live)))


def test_conjugates_and_negatives_that_are_not_written_out() -> None:
    xs = shards(2, [4, 2, 4], torch.complex64)
    for kind in (lambda x: x.conj(), lambda x: x.conj().imag, lambda x: torch._neg_view(x)):
        given = [kind(x) for x in xs]
        for rank, y in enumerate(exchanged(given, 2, 0)):
            assert not y.is_conj()
            assert not y.is_neg()
            assert torch.equal(y, expected(given, rank, 2, 0))


@pytest.mark.parametrize(("scatter", "gather"), [(2, 1), (0, 1)])
def test_torch_func(scatter: int, gather: int) -> None:
    """The gradient is the way back, a batch goes at once. (jvp is for ranks of their own: threads share its levels.)"""
    n = 2
    xs = shards(n, [2, 4, 4])

    def live(rank: int) -> list[Any]:
        def swap(x: Tensor, scatter: int = scatter, gather: int = gather) -> Tensor:
            return all_to_all_permute(x, scatter, gather, Ranks(n, SIMULATED_GROUP))

        grad = torch.func.grad(lambda x: swap(x).pow(3).sum())(xs[rank])
        second = torch.func.grad(lambda x: torch.func.grad(lambda x: swap(x).pow(3).sum())(x).sum())(xs[rank])
        batch = torch.vmap(lambda x: swap(x.sin()), in_dims=3, out_dims=3)(xs[rank][..., None])
        return [grad, second, batch]

    for rank, (grad, second, batch) in enumerate(run_ranks(n, live)):
        torch.testing.assert_close(grad, 3 * xs[rank].square())
        torch.testing.assert_close(second, 6 * xs[rank])
        assert torch.equal(batch[..., 0], expected([x.sin() for x in xs], rank, scatter, gather))


def test_the_result_may_be_changed_in_place() -> None:
    xs = shards(2, [2, 4])

    def live(rank: int) -> Tensor:
        x = xs[rank].clone().requires_grad_()
        y = all_to_all_permute(x * 1, 1, 0, Ranks(2, SIMULATED_GROUP))
        y.mul_(y.detach().clone())
        y.sum().backward()
        return x.grad

    assert all(torch.equal(grad, x) for grad, x in zip(run_ranks(2, live), xs))


def test_meta() -> None:
    x = torch.empty(2, 4, 6, device="meta")
    y = run_ranks(2, lambda r: all_to_all_permute(x, 2, 0, Ranks(2, SIMULATED_GROUP)))[1]
    assert (y.shape, y.device.type) == ((4, 4, 3), "meta")
    with pytest.raises(SpError, match=r"SP508.*\n.*meta.*\n.*cpu"):
        run_ranks(2, lambda r: all_to_all_permute((x, torch.zeros(2, 4, 6))[r], 2, 0, Ranks(2, SIMULATED_GROUP)))


def test_one_collective_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = sp_compile.lowering.comm.simulate._SimulatedWorld.exchange

    def counted(world: Any, rank: int, name: str, *args: Any) -> Tensor:
        calls.append(name)
        return real(world, rank, name, *args)

    monkeypatch.setattr(sp_compile.lowering.comm.simulate._SimulatedWorld, "exchange", counted)

    def live(rank: int) -> None:
        x = torch.randn(2, 4, 6, requires_grad=True)
        all_to_all_permute(x, 2, 1, Ranks(2, SIMULATED_GROUP), check=False).sum().backward()

    run_ranks(2, live)
    assert calls == ["all_to_all"] * 4  # two ranks, there and back


@pytest.mark.parametrize("n", [1, 2])
def test_out(n: int) -> None:
    xs = shards(n, [2, 4, 3])
    wanted = [expected(xs, rank, 1, 2) for rank in range(n)]
    ranks = Ranks(n, SIMULATED_GROUP)
    for transposed in (False, True):
        outs = [torch.empty_like(y.mT).mT if transposed else torch.empty_like(y) for y in wanted]
        found = run_ranks(n, lambda r, outs=outs: all_to_all_permute(xs[r], 1, 2, ranks, outs[r]))
        assert all(y is out and torch.equal(y, w) for y, out, w in zip(found, outs, wanted))


def test_out_may_be_a_transposed_view_of_x() -> None:
    x = torch.arange(9.0).view(3, 3)
    wanted = x.clone()
    assert torch.equal(all_to_all_permute(x, 0, 1, out=x.mT), wanted)


def test_out_is_for_no_gradient() -> None:
    x, out = torch.randn(2, 4, requires_grad=True), torch.empty(2, 4)
    with pytest.raises(SpError, match="SP545"):
        all_to_all_permute(x, 1, 0, out=out)
    with torch.no_grad():
        assert torch.equal(all_to_all_permute(x, 1, 0, out=out), x)


X = torch.zeros(3, 6, 4)
WRONG: dict[str, tuple[Any, ...]] = {
    r"SP503: .*scatter_dim: .*-3\b.*\b2\b.*\[3, 6, 4\]": (X, 3, 0),
    r"SP503: .*gather_dim: .*-4": (X, 0, -4),
    "SP542": (X, 1, -2),
    r"SP502: .*gather_dim: .*\b1\.0": (X, 0, 1.0),
    "SP502: all_to_all_permute: x: ": ([1.0], 0, 1),
    r"SP503: .*gather_dim: .*-1\b.*\b0\b": (torch.zeros(()), 0, 1),
    r"SP542: .*\[\]": (torch.zeros(()), 0, 0),
    r"SP542: .*\b0\b.*\[2\]": (torch.zeros(2), 0, -1),
    r"SP543: .*scatter_dim: .*\b3\b.*\[3, 6, 4\].*\[3, 12, 4\].*\b4\b": (X, 0, 1),
    r"SP504: .*out: .*\[6, 3, 4\].*\[6, 3, 4\] torch\.float64": (X, 1, 0, torch.zeros(6, 3, 4, dtype=torch.float64)),
    r"SP504: .*out: .*\[6, 3, 4\].*\[3, 6, 4\]": (X, 1, 0, torch.zeros(3, 6, 4)),
    "SP502: all_to_all_permute: out": (X, 1, 0, "somewhere"),
    r"SP544: .*\[0, 4, 1\]": (X, 1, 0, torch.zeros(1, 3, 4).expand(6, 3, 4)),
    r"SP544: .*\[1, 1, 1\]": (X, 1, 0, torch.zeros(20).as_strided((6, 3, 4), (1, 1, 1))),
}


@pytest.mark.parametrize("error", WRONG)
def test_invalid_arguments(error: str) -> None:
    x, scatter, gather, *out = WRONG[error]

    def live(rank: int) -> None:
        all_to_all_permute(x, scatter, gather, Ranks(2, SIMULATED_GROUP), *out)

    with pytest.raises(SpError) as failure:
        run_ranks(2, live)
    assert failure.value.cause.startswith("rank 0, 1: ")
    assert re.match(error, str(failure.value).replace("rank 0, 1: ", ""))


def test_ranks_that_differ_raise() -> None:
    xs = [torch.zeros(2, 4), torch.zeros(2, 6)]
    with pytest.raises(SpError, match=r"SP508.*\n.*\[2, 4\].*\n.*\[2, 6\]"):
        exchanged(xs, 1, 0)
    with pytest.raises(SpError, match=r"SP508.*\n.*\n.*scatter_dim=1, gather_dim=0"):
        run_ranks(2, lambda r: all_to_all_permute(torch.zeros(2, 2), r, 1 - r, Ranks(2, SIMULATED_GROUP)))
    with pytest.raises(SimulationError):  # what check=False is for those who know
        exchanged(xs, 1, 0, check=False)


def test_the_operator_refuses_too() -> None:
    with pytest.raises(SpError, match="SP542"):
        torch.ops.sp.all_to_all_permute(torch.zeros(2, 2), 1, -1, 2, SIMULATED_GROUP)
    with pytest.raises(SpError, match="SP543"):
        torch.ops.sp.all_to_all_permute(torch.zeros(2, 3), 1, 0, 2, SIMULATED_GROUP)
    with pytest.raises(ValueError, match=r"SP902: .*'fast'"), lowering.PERMUTE_KERNELS.use_row("fast"):
        pass


def test_without_a_process_group_it_is_x() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(all_to_all_permute(x, 1, 0), x)
    assert sp_compile.declare_symmetric_memory(1 << 20) is False
    with pytest.raises(SpError, match="SP507: declare_symmetric_memory: size"):
        sp_compile.declare_symmetric_memory(0)


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.sp.all_to_all_permute(x.sin(), 2, 1, 2, SIMULATED_GROUP)

    x = torch.randn(2, 3, 4)
    program = torch.export.export(Model(), (x,), dynamic_shapes={"x": {1: torch.export.Dim("s", min=2)}})
    assert "all_to_all_single" in program.run_decompositions().graph_module.code
    xs = shards(2, [2, 5, 4])
    found = run_ranks(2, lambda r: program.module()(xs[r]))
    assert all(torch.equal(y, expected([x.sin() for x in xs], r, 2, 1)) for r, y in enumerate(found))
