"""Recurrences of matrices: sp.affine_scan, the loops that become one, and their exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import check
from support.parity import against_eager
from support.parity import check as check_ranks
from support.ranks import Ranks, group, mesh
from torch import Tensor, nn

import sp_compile
from sp_compile.passes.context import NoteKind

sp = torch.ops.sp
WIDTH, HEADS, CHUNK = 8, 2, 4


def step_by_step(m: Tensor, b: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """Compute the recurrence as a loop."""
    state = torch.zeros_like(b[..., 0, :, :]) if initial is None else initial
    rows = range(b.shape[-3])
    states = []
    for i in reversed(rows) if reverse else rows:
        state = m[..., i, :, :] @ state + b[..., i, :, :]
        states.append(state)
    return torch.stack(states[::-1] if reverse else states, -3)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_initial", [False, True])
def test_values_and_gradients(with_initial: bool, reverse: bool) -> None:
    torch.manual_seed(0)
    m = (torch.randn(2, 3, 7, 4, 4, dtype=torch.float64) / 2).requires_grad_()
    b = torch.randn(2, 3, 7, 4, 5, dtype=torch.float64, requires_grad=True)
    initial = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True) if with_initial else None
    found, expected = sp.affine_scan(m, b, initial, 2, reverse), step_by_step(m, b, initial, reverse)
    torch.testing.assert_close(found, expected)
    operands, cotangent = [x for x in (m, b, initial) if x is not None], torch.randn_like(found)
    found_grads = torch.autograd.grad(found, operands, cotangent)
    for x, y in zip(found_grads, torch.autograd.grad(expected, operands, cotangent), strict=True):
        torch.testing.assert_close(x, y)


def test_invalid_calls_are_refused() -> None:
    m, b = torch.randn(2, 5, 3, 3), torch.randn(2, 5, 3, 4)
    for code, call in {
        "SP504: affine_scan: m, b": lambda: sp_compile.affine_scan(m, b[:, :4]),
        "SP504: affine_scan: initial": lambda: sp_compile.affine_scan(m, b, initial=b),
        "SP505: affine_scan": lambda: sp_compile.affine_scan(m.long(), b),
        "SP526: affine_scan": lambda: sp_compile.affine_scan(m, b, accumulate_dtype=torch.int64),
        "SP502: affine_scan": lambda: sp_compile.affine_scan(None, b),
    }.items():
        with pytest.raises(sp_compile.SpError, match=code):
            call()


def _shard_of_rank(length: int, with_initial: bool, reverse: bool) -> list[Tensor]:
    """Return this rank's rows of the result and of the gradients, from a sequence of `length` rows."""
    torch.manual_seed(2)
    n, rank = dist.get_world_size(group()), dist.get_rank()
    rows = -(-length // n)
    m, b, cotangent = (torch.randn(2, n * rows, 3, size, dtype=torch.float64) / 2 for size in (3, 4, 4))
    cotangent[:, length:] = 0
    own = slice(rank * rows, (rank + 1) * rows)
    m, b = m[:, own].clone().requires_grad_(), b[:, own].clone().requires_grad_()
    initial = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True) if with_initial else None
    h = sp_compile.affine_scan(m, b, initial=initial, reverse=reverse, group=group(), length=length)
    operands = [x for x in (m, b, initial) if x is not None]
    return [h.detach(), *torch.autograd.grad(h, operands, cotangent[:, own])]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_initial", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_shards_of_real_ranks(ranks: Ranks, n: int, with_initial: bool, reverse: bool) -> None:
    """Ranks do not compute the maps that no rank reads: those of the first and of the last one, in scan order."""
    length = 7
    torch.manual_seed(2)
    rows = -(-length // n)
    m, b, cotangent = (torch.randn(2, n * rows, 3, size, dtype=torch.float64) / 2 for size in (3, 4, 4))
    m, b = m[:, :length].requires_grad_(), b[:, :length].requires_grad_()
    initial = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True) if with_initial else None
    h = step_by_step(m, b, initial, reverse)
    operands = [x for x in (m, b, initial) if x is not None]
    expected = [h.detach(), *torch.autograd.grad(h, operands, cotangent[:, :length])]
    shards = ranks.run(n, _shard_of_rank, length, with_initial, reverse)
    for i in range(3):
        torch.testing.assert_close(torch.cat([own[i] for own in shards], 1)[:, :length], expected[i])
    for own in shards:
        torch.testing.assert_close(own[3:], expected[3:])


class DeltaRule(nn.Module):
    """The gated delta rule over chunks, as Qwen3-Next writes it."""

    def __init__(self, seed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.gate, self.out = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(WIDTH, HEADS),
            nn.Linear(WIDTH, WIDTH),
        )
        self.state = nn.Parameter(torch.randn(1, HEADS, WIDTH // HEADS, WIDTH // HEADS)) if seed else None

    def chunks(self, x: Tensor) -> Tensor:
        """(B, S, HEADS, D) -> (B, HEADS, N, CHUNK, D)."""
        x = F.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % CHUNK))
        return x.unflatten(2, (-1, CHUNK))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v, w = (self.chunks(y.unflatten(-1, (HEADS, -1))) / 3 for y in self.project(x).chunk(4, -1))
        decay = self.chunks(self.gate(x).sigmoid()[..., None]).mean(-2, keepdim=True)
        inside = (q @ k.transpose(-1, -2)).tril()
        zeros = x.new_zeros(batch, HEADS, q.shape[-1], v.shape[-1])
        state = zeros if self.state is None else self.state.expand(batch, -1, -1, -1)
        out = torch.zeros_like(v)
        for i in range(v.shape[2]):
            new = v[:, :, i] - w[:, :, i] @ state
            out[:, :, i] = q[:, :, i] @ state + inside[:, :, i] @ new
            state = state * decay[:, :, i] + k[:, :, i].transpose(-1, -2) @ new
        y = out.flatten(2, 3)[:, :, :length].transpose(1, 2).flatten(2)
        return self.out(y)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [13, 16, 31])
@pytest.mark.sampled(every=5)
def test_a_delta_rule_is_on_shards(length: int, n: int) -> None:
    report = check(DeltaRule().double(), torch.randn(2, length, WIDTH, dtype=torch.float64, requires_grad=True), sp=n)
    if n > 1:
        assert report.count("affine_scan") == 1
        assert report.work.flops_share == 1.0
        assert not report.fallbacks


def test_an_initial_state_is_read() -> None:
    check(DeltaRule(seed=True).double(), torch.randn(2, 13, WIDTH, dtype=torch.float64), sp=2)


def test_nodes_and_bytes_do_not_depend_on_the_length() -> None:
    reports = []
    for length in (32, 64):
        program = torch.export.export(DeltaRule(), (torch.randn(1, length, WIDTH),))
        local = sp_compile.parallelize(program, sp=2)
        report = local.meta["sp_report"]
        (scan,) = [e for e in report.exchanges if e.op == "affine_scan"]
        reports.append((len(local.graph.nodes), scan.forward, scan.backward))
    assert reports[0] == reports[1]


def test_a_state_that_is_not_linear_is_refused() -> None:
    class Right(DeltaRule):
        def forward(self, x: Tensor) -> Tensor:
            state, states = x.new_zeros(2, 4, 4), []
            for t in range(x.shape[1]):
                state = state.tanh() @ x[:, t].view(2, 4, 2).repeat(1, 1, 2) + 1
                states.append(state)
            return torch.stack(states, 1)

    report = sp_compile.explain(Right(), torch.randn(2, 6, WIDTH), sp=2, seq_dims={"x": 1})
    assert report.find_notes(NoteKind.DECLINED, subject="reroll_loops")


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = DeltaRule().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).pow(2).mean()


def _train(length: int) -> object:
    torch.manual_seed(1)
    return against_eager(Loss(), torch.randn(2, length, WIDTH, dtype=torch.float64), mesh=mesh())


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.sampled(every=3)
def test_on_real_ranks(ranks: Ranks, n: int) -> None:
    check_ranks(ranks.run(n, _train, 21))
