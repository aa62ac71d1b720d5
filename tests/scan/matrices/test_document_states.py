"""Linear attention with an initial and a final state for each document."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
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

WIDTH, HEADS, SIZE, LENGTH = 12, 2, 4, 37
# Documents that end at a cut of 2 ranks (19), have one or no token, or span all cuts of 3 and 4 ranks.
DOCUMENTS = {"cut": [0, 5, 19, 20, 37], "long": [0, 1, 3, 36, 37], "empty": [0, 0, 4, 4, 4, 19, 37, 37], "one": [0, 37]}


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


KERNELS: dict[str, Any] = {
    "chunk_gated_delta_rule": lambda x: (x["q"], _unit(x["k"]), x["v"], x["g"], x["beta"]),
    "chunk_kda": lambda x: (x["q"], _unit(x["k"]), x["v"], F.logsigmoid(x["a"]), x["beta"]),
    "chunk_simple_gla": lambda x: (x["q"], x["k"], x["v"], x["g"]),
    "chunk_gla": lambda x: (x["q"], x["k"], x["v"], F.logsigmoid(x["a"])),
    "chunk_rwkv7": lambda x: (x["q"], F.logsigmoid(x["a"]), x["k"], x["v"], -_unit(x["b"]), _unit(x["b"]) / 2),
}


class Mixer(nn.Module):
    """A layer that calls a kernel with states, and a loss of its result and its states."""

    def __init__(self, kernel: str, documents: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kernel = kernel
        self.project = nn.Linear(WIDTH, 5 * HEADS * SIZE).double()
        self.gates = nn.Linear(WIDTH, 2 * HEADS).double()
        self.initial = nn.Parameter(torch.randn(len(DOCUMENTS[documents]) - 1, HEADS, SIZE, SIZE).double())

    def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
        """x (1, S, WIDTH), bounds (number of documents + 1) -> a loss."""
        q, k, v, a, b = (y.unflatten(-1, (HEADS, SIZE)) for y in self.project(x).chunk(5, -1))
        g, beta = self.gates(x).chunk(2, -1)
        inputs = {"q": q, "k": k, "v": v, "a": a, "b": b, "g": F.logsigmoid(g), "beta": beta.sigmoid()}
        options = {"initial_state": self.initial, "output_final_state": True, "cu_seqlens": bounds}
        out, states = getattr(fla, self.kernel)(*KERNELS[self.kernel](inputs), **options)
        return (out.flatten(2) * x[..., : HEADS * SIZE]).mean() + states.pow(2).mean() + states.sum() / 9


def _train(kernel: str, documents: str) -> tuple[Any, list[str]]:
    """Compare a layer on the ranks with eager code; return the kernels that ran."""
    torch.manual_seed(1)
    CALLS.clear()
    x, bounds = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64), torch.tensor(DOCUMENTS[documents])
    return against_eager(Mixer(kernel, documents), x, bounds, mesh=mesh(), seq_dims={"x": 1}), CALLS[:]


# Documents that end at a cut; documents of one token and of all ranks. Other cases are slow.
FAST = [("chunk_gated_delta_rule", "cut", 2), ("chunk_gla", "long", 3)]


def _cases() -> Iterator[Any]:
    """Yield every kernel with all documents on every number of ranks."""
    for case in product(KERNELS, DOCUMENTS, (1, 2, 3, 4)):
        yield pytest.param(*case, marks=() if case in FAST else pytest.mark.slow, id="-".join(map(str, case)))


@pytest.mark.parametrize(("kernel", "documents", "n"), [*_cases()])
def test_states_of_documents_are_on_shards(ranks: Ranks, kernel: str, documents: str, n: int) -> None:
    answers = ranks.run(n, _train, kernel, documents)
    check_ranks([answer for answer, _ in answers])
    assert all(calls == [kernel] for _, calls in answers), "only the eager model calls the package"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.sampled(every=6)
def test_nothing_is_gathered(kernel: str) -> None:
    x, bounds = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64), torch.tensor(DOCUMENTS["cut"])
    report = sp_compile.explain(Mixer(kernel, "cut"), x, bounds, sp=2, seq_dims={"x": 1})
    assert not report.fallbacks
    assert report.work.flops_share == 1.0


@pytest.mark.parametrize("kernel", ["chunk_gated_delta_rule", "chunk_gla"])
@pytest.mark.slow
def test_simulated_ranks(kernel: str) -> None:
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    for documents, bounds in DOCUMENTS.items():
        report = sp_compile.verify(Mixer(kernel, documents), x, torch.tensor(bounds), sp=3, seq_dims={"x": 1})
        assert max(error for _, error in report.errors) < 1e-11
