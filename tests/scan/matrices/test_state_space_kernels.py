"""Kernels of state spaces with their options and states: short convolutions, selective scans and Mamba-2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.parity import against_eager
from support.parity import check as check_ranks
from support.ranks import Ranks, mesh
from support.scans.kernel_package import CALLS, fla
from torch import Tensor, nn

import sp_compile

WIDTH, STATES, KERNEL, HEADS, LENGTH = 8, 3, 4, 2, 37
BOUNDS = [0, 5, 19, 20, 37]  # documents; one ends at the cut of 2 ranks, one has 1 token
Program = Callable[["Layer", Tensor], Any]


def _documents(x: Tensor) -> Tensor:
    """Return the numbers of the documents of tokens, (B, S)."""
    bounds = torch.tensor(BOUNDS, device=x.device)
    return torch.bucketize(torch.arange(x.shape[1], device=x.device), bounds[1:], right=True).expand(x.shape[0], -1)


def _scan(layer: Layer, x: Tensor, rows: Tensor | None = None, **options: Any) -> Any:
    """Call a selective scan; rows (B, S, N or G, N) replace the vectors that are read."""
    write, read = (F.linear(x, w).mT for w in layer.vectors)
    read = read if rows is None else rows
    return fla.selective_scan_fn(x.mT, layer.step(x).mT, -layer.rates.exp(), write, read, **options)


def _chunk_scan(layer: Layer, x: Tensor, **options: Any) -> Any:
    write, read = (F.linear(x, w).unsqueeze(2) for w in layer.vectors)
    heads, step = x.unflatten(-1, (HEADS, -1)), layer.step(x)[..., :HEADS]
    rates = -layer.rates[:HEADS, 0].exp()
    return fla.mamba_chunk_scan_combined(heads, step, rates, write, read, 16, dt_softplus=True, **options)


PROGRAMS: dict[str, Program] = {
    "conv with a state": lambda m, x: fla.causal_conv1d_fn(
        x.mT, m.kernel, m.bias, initial_states=m.before[..., 1:], activation="silu"
    ),
    "conv with both states": lambda m, x: fla.causal_conv1d_fn(
        x.mT, m.kernel, None, initial_states=m.before[..., 1:], return_final_states=True, activation="swish"
    ),
    "conv with a final state": lambda m, x: fla.causal_conv1d_fn(x.mT, m.kernel, m.bias, return_final_states=True),
    "short conv": lambda m, x: m.short(x)[0],
    "short conv with a residual": lambda m, x: m.short(x * 1, residual=x.tanh(), mask=x[..., 0] > -2)[0],
    "short conv with states": lambda m, x: m.short(x, cache=m.before, output_final_state=True),
    "short conv of documents": lambda m, x: m.short(x[:1], cu_seqlens=torch.tensor(BOUNDS, device=x.device))[0],
    "selective scan": lambda m, x: _scan(m, x),
    "selective scan with all": lambda m, x: _scan(
        m, x, D=m.bias, z=x.mT, delta_bias=m.bias, delta_softplus=True, return_last_state=True
    ),
    "selective scan of groups": lambda m, x: _scan(
        m, x, F.linear(x, torch.cat([*m.vectors])).unflatten(-1, (2, -1)).permute(0, 2, 3, 1), delta_softplus=True
    ),
    "selective scan of constants": lambda m, x: _scan(m, x, m.rates.sin(), delta_softplus=True),
    "selective scan of documents": lambda m, x: _scan(
        m, x[:1], delta_softplus=True, cu_seqlens=torch.tensor(BOUNDS, device=x.device)
    ),
    "chunk scan continues document 0": lambda m, x: _chunk_scan(
        m, x, initial_states=m.state, seq_idx=_documents(x), return_final_states=True
    ),
    "chunk scan does not continue others": lambda m, x: _chunk_scan(
        m, x, initial_states=m.state, seq_idx=_documents(x) + 1, D=m.bias[:HEADS], z=x.unflatten(-1, (HEADS, -1))
    ),
}


class Layer(nn.Module):
    """A layer that calls a kernel, and a loss of all its results."""

    def __init__(self, program: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.project, self.step = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.vectors = nn.Parameter(torch.randn(2, STATES, WIDTH) / 3)
        self.rates = nn.Parameter(torch.randn(WIDTH, STATES))
        self.kernel, self.bias = nn.Parameter(torch.randn(WIDTH, KERNEL)), nn.Parameter(torch.randn(WIDTH))
        self.before = nn.Parameter(torch.randn(2, WIDTH, KERNEL))
        self.state = nn.Parameter(torch.randn(2, HEADS, WIDTH // HEADS, STATES))
        self.short = fla.ShortConvolution(WIDTH, KERNEL)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, WIDTH) -> a loss."""
        results = PROGRAMS[self.program](self, self.project(x))
        results = results if isinstance(results, tuple) else (results,)
        return sum((y.sin().mean() + y.pow(2).sum() / 99 for y in results), torch.zeros(()))


def _inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def _train(program: str) -> tuple[Any, list[str]]:
    CALLS.clear()
    return against_eager(Layer(program), _inputs(), mesh=mesh(), seq_dims={"x": 1}), CALLS[:]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.sampled(every=9)
def test_kernels_with_options_are_on_shards(ranks: Ranks, program: str, n: int) -> None:
    answers = ranks.run(n, _train, program)
    check_ranks([answer for answer, _ in answers])
    assert all(len(calls) == 1 for _, calls in answers), "only the eager model calls the package"


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_gathered(program: str) -> None:
    report = sp_compile.explain(Layer(program), _inputs(), sp=2, seq_dims={"x": 1})
    assert not report.fallbacks
    assert report.work.flops_share > 0.95
