"""Loops of which only the last state, or a sum over the steps, is read: one scan, no gather, and the values of eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import sp_compile

WIDTH, LENGTH, CHUNK = 6, 23, 4
Loop = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of a gate, inputs, other inputs and the initial state


def decayed(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
    return h


def reverse(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    state: Tensor | float = 0.0
    for t in reversed(range(a.shape[1])):
        state = a[:, t] * state + b[:, t]
    return h + state


def of_rows(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    rows: Iterable[tuple[Tensor, Tensor]] = zip(a.unbind(1), b.unbind(1), strict=True)
    for x, y in rows:
        h = x * h + y
    return h


def delta_rule(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    state = h.unsqueeze(-1).expand(-1, -1, WIDTH)
    for t in range(a.shape[1]):
        new = b[:, t] - torch.einsum("bij,bi->bj", state, c[:, t] / WIDTH)
        state = state + c[:, t, :, None] * new.unsqueeze(1)
    return state.mean(1)


def chunks(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    state = h.unsqueeze(-1).expand(-1, -1, WIDTH)
    for i in range(0, a.shape[1], CHUNK):
        state = state * a[:, i : i + CHUNK].prod(1).unsqueeze(-1) + b[:, i : i + CHUNK].mT @ c[:, i : i + CHUNK]
    return state.mean(1)


def sums(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    loss: Tensor | float = 0.0
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        loss = loss + (h - c[:, t]).square().mean()
    return h * loss


def two_states(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    total = h + 1
    for t in range(a.shape[1]):
        h, total = a[:, t] * h + b[:, t], a[:, t] * total + c[:, t].exp()
    return h / total


def two_loops(a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> Tensor:
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
    results = []
    for t in range(a.shape[1]):
        h = c[:, t].sigmoid() * h + b[:, t]
        results.append(h)
    return torch.stack(results, 1)


SCANS = {decayed: 1, reverse: 1, of_rows: 1, delta_rule: 1, chunks: 1, sums: 1, two_states: 2, two_loops: 2}


class Summary(nn.Module):
    """A loop over projections of the tokens."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loop, self.project, self.out = loop, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2)
        self.initial = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.project(x).chunk(3, -1)
        return self.out(self.loop(a.sigmoid(), b, c, self.initial.expand(len(x), WIDTH)))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("loop", SCANS, ids=lambda loop: loop.__name__)
@pytest.mark.sampled(every=2)
def test_a_loop_without_a_list(loop: Loop, n: int) -> None:
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    report = sp_compile.verify(Summary(loop).double(), x, sp=n)
    assert max(error for _, error in report.errors) < 1e-12
    assert report.count("linear_scan") + report.count("affine_scan") == SCANS[loop]
    assert not report.fallbacks
    assert report.work.flops_share > 0.95


class Stream(nn.Module):
    """Linear attention with a state that is passed in and returned, resets between chunks, and a loss summed by chunk."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.gate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor, h: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x).chunk(3, -1)
        decay, loss = -self.gate(x).exp(), x.new_zeros(())
        for i in range(0, x.shape[1], CHUNK):
            rows = slice(i, i + CHUNK)
            log = decay[:, rows].cumsum(1)
            h = torch.where(resets[:, i // CHUNK, None, None], torch.zeros_like(h), h)
            within = (q[:, rows] @ k[:, rows].mT * (log - log.mT).tril().exp()).tril()
            y = self.out(q[:, rows] * log.exp() @ h + within @ v[:, rows])
            loss = loss + nn.functional.cross_entropy(y.mT, labels[:, rows], reduction="sum")
            h = h * log[:, -1:].exp() + (k[:, rows] * (log[:, -1:] - log).exp()).mT @ v[:, rows]
        return loss / labels.numel(), h


@pytest.mark.parametrize("length", [24, 30])
def test_a_stream_with_resets(length: int) -> None:
    x = torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True)
    h = torch.randn(2, WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)
    labels, resets = torch.randint(5, (2, length)), torch.rand(2, -(-length // CHUNK)) < 0.3
    report = sp_compile.verify(Stream().double(), x, labels, h, resets, sp=3)
    assert report.worst < 1e-12
    assert report.work.flops_share > 0.8  # a short last chunk is computed on every rank


class Layers(nn.Module):
    """Layers with stacked weights: each is affine in the result of the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = (nn.Parameter(torch.randn(6, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(6):
            x = x * self.scale[i] + self.bias[i]
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_loops_over_weights_are_kept() -> None:
    program = torch.export.export(Layers(), (torch.randn(2, LENGTH, WIDTH),))
    graph = sp_compile.parallelize(program, sp=2).graph
    assert not [n for n in graph.nodes if "scan" in str(n.target)]


class Codes(nn.Module):
    """A sum of embeddings, one of each codebook, and attention over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = nn.ModuleList(nn.Embedding(8, WIDTH) for _ in range(9))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embeddings[0](codes[:, 0])
        for i, embedding in enumerate(self.embeddings):
            x = x + embedding(codes[:, i])
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_sums_without_a_state_are_kept() -> None:
    report = sp_compile.explain(Codes(), torch.randint(8, (2, 9, LENGTH)), sp=2, seq_dims={"codes": 2})
    assert report.count("linear_scan") == 0
    assert not report.fallbacks


def loops_that_share_reads(x: Tensor) -> Tensor:
    """Each step reads its token twice, both loops read all tokens, and the second loop continues the first one."""
    h = torch.zeros_like(x[:, 0])
    for _ in range(2):
        for t in range(x.shape[1]):
            h = x[:, t].sigmoid() * h + x[:, t]
    return h


def final_states_of_layers(x: Tensor) -> Tensor:
    for _ in range(3):
        h = x.mean(1)
        for t in reversed(range(x.shape[1])):
            h = x[:, t].sigmoid() * h + x[:, t]
        x = x + h.unsqueeze(1)
    return x


@pytest.mark.parametrize(("loop", "scans"), [(loops_that_share_reads, 2), (final_states_of_layers, 3)])
def test_loops_over_one_tensor(loop: Callable[[Tensor], Tensor], scans: int) -> None:
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    report = sp_compile.verify(loop, x, sp=2)
    assert report.count("linear_scan") == scans
    assert max(error for _, error in report.errors) < 1e-12
    assert not report.fallbacks
