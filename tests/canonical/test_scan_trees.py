"""Scans by functions of their own: found as sequences, and each leaf gathered once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.parity import Outcome, against_eager, check, sp
from support.ranks import Ranks, mesh
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan
from torch._higher_order_ops.scan import scan

import sp_compile

WIDTH = 4


class Scanned(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.a(x), self.b(x)).sin().sum()


def softmax(a: Tensor, b: Tensor) -> Tensor:
    def combine(x, y):
        top = torch.maximum(x[0], y[0])
        left, right = (x[0] - top).exp(), (y[0] - top).exp()
        return top, x[1] * left + y[1] * right, x[2] * left + y[2] * right

    _, d, o = associative_scan(combine, (a, torch.ones_like(a), b), dim=1, combine_mode="generic")
    return o / d


def argmax(a: Tensor, b: Tensor) -> Tensor:
    def combine(x, y):
        later = y[0] > x[0]
        return torch.where(later, y[0], x[0]), torch.where(later, y[1], x[1])

    return associative_scan(combine, (a, b), dim=1, reverse=True, combine_mode="generic")[1]


def complex_numbers(a: Tensor, b: Tensor) -> Tensor:
    def combine(x, y):
        return x[0] * y[0], y[1] + y[0] * x[1]

    z = torch.polar(torch.full_like(a, 0.9), a), torch.complex(b, a)
    return associative_scan(combine, z, dim=1, combine_mode="generic")[1].real


def other_recurrence(a: Tensor, b: Tensor) -> Tensor:
    """The factors of the rows on the left; the tree of their products is a scan, the other one is not."""
    combine = lambda x, y: (x[0] * y[0], x[0] * y[1] + x[1])  # noqa: E731
    return associative_scan(combine, (a, b), dim=1, combine_mode="generic")[1]


def matrices(a: Tensor, b: Tensor) -> Tensor:
    each = torch.eye(2, dtype=a.dtype) + 0.1 * a.unflatten(-1, (2, 2))
    return associative_scan(lambda x, y: x @ y, each, dim=1, combine_mode="generic").flatten(2) + b


def one_op(a: Tensor, b: Tensor) -> Tensor:
    rows = a.transpose(0, 1)
    last, out = scan(lambda c, x: ((c * 0.5 + x).tanh(), c + x), torch.zeros_like(rows[0]), rows)
    return out.transpose(0, 1) + last[:, None] + b


def twice(a: Tensor, b: Tensor) -> Tensor:
    return argmax(softmax(a, b).cos(), b)


def chained_ops(a: Tensor, b: Tensor) -> Tensor:
    """A scan of the results of another; pytorch/pytorch#153679 has wrong gradients there."""
    rows = a.transpose(0, 1)
    _, first = scan(lambda c, x: (c * 0.5 + x, c.tanh() + x), torch.zeros_like(rows[0]), rows)
    _, out = scan(lambda c, x: (c * x + 1, c + x), torch.ones_like(rows[0]), first.sigmoid())
    return out.transpose(0, 1) + b


LEAVES = {
    one_op: 1,
    chained_ops: 2,
    argmax: 2,
    complex_numbers: 2,
    softmax: 3,
    other_recurrence: 2,
    matrices: 1,
    twice: 5,
}


def made(run: Callable[..., Tensor], length: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Scanned(run).double(), torch.randn(2, length, WIDTH, dtype=torch.float64)


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize("run", LEAVES)
@pytest.mark.parametrize("length", [2, 3, 7])
def test_each_leaf_is_gathered_once(run: Callable[..., Tensor], length: int) -> None:
    report = sp_compile.verify(*made(run, length), sp=2)
    assert report.inputs == {"x": [1]}
    assert report.worst < 1e-12
    assert report.count("unshard") + report.count("all_gather") == LEAVES[run]
    assert {note.label for note in report.fallbacks} == {"gather"}


@pytest.mark.sampled(every=100)
@pytest.mark.parametrize("run", LEAVES)
@pytest.mark.parametrize("length", [7, 10])
def test_a_length_that_is_a_symbol_has_one_tree(run: Callable[..., Tensor], length: int) -> None:
    """The guards allow one length. (If the program reads the length as an int, torch specializes it.)"""
    model, x = made(run, length)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    report = sp_compile.verify(model, x, sp=3)
    assert report.inputs == {"x": [1]}
    assert report.worst < 1e-12
    assert report.count("unshard") + report.count("all_gather") == LEAVES[run]


def test_rotary_positions_are_no_scan() -> None:
    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a.cos() - b, b.sin() + a], -1).flatten(-2).cumsum(1)

    report = sp_compile.verify(Rotary(), torch.randn(2, 7, 4, dtype=torch.float64), sp=2)
    assert report.inputs == {"x": [1]}
    assert not report.fallbacks


def test_matches_are_named() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with pytest.raises(sp_compile.SpError, match=r"SP301.*\bcond\b.*test_scan_trees\.py:\d+"):
        sp_compile.explain(Branches(), torch.randn(2, 4, 4))


def on_ranks(run: Callable[..., Tensor]) -> Outcome:
    return against_eager(*made(run, 7), mesh=mesh())


class AfterAttention(Scanned):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True))


def made_with_attention(run: Callable[..., Tensor], length: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return AfterAttention(run).double(), torch.randn(2, length, WIDTH, dtype=torch.float64)


@pytest.mark.slow
def test_beside_attention_a_symbol_changes_no_exchange() -> None:
    """Each level of the tree was gathered."""

    def looked(of_symbol: bool) -> list[str]:
        torch._dynamo.reset()
        model, x = made_with_attention(softmax, 10)
        if of_symbol:
            torch._dynamo.mark_dynamic(x, 1)
        return [str(one) for one in sp_compile.explain(model, x, sp=3).exchanges]

    assert looked(True) == looked(False)


def at_other_lengths(run: Callable[..., Tensor], attends: bool) -> list[Outcome]:
    model, _ = made_with_attention(run, 7) if attends else made(run, 7)
    compiled = sp(model, mesh=mesh())
    inputs = [torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (7, 10, 4)]
    return [against_eager(model, x, run=compiled) for x in inputs]


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("attends", [False, True])
def test_other_lengths(ranks: Ranks, attends: bool) -> None:
    """The second length of a process is a symbol: a scan alone was no sequence there."""
    for outcomes in zip(*ranks.run(3, at_other_lengths, softmax, attends), strict=True):
        check(outcomes)


def of_slices(compiler: str) -> list[Outcome]:
    """Inputs that are no leaves, and not dense: every second column, and one row for all of a batch."""
    model, _ = made(softmax, 7)
    compiled = sp(model, mesh=mesh(), compiler=compiler)
    torch.manual_seed(1)
    found = []
    for length in (7, 10, 4):
        base = torch.randn(2, length, 2 * WIDTH, dtype=torch.float64, requires_grad=True)
        found += [
            against_eager(model, x, run=compiled) for x in (base[..., ::2], base[:1, :, :WIDTH].expand(2, -1, -1))
        ]
    return found


def after_a_break() -> list[Outcome]:
    """The second graph takes rows of the first, at a length that is a number by then."""

    class Broken(Scanned):
        def forward(self, x: Tensor) -> Tensor:
            x = x.cumsum(1)
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.manual_seed(0)
    model = Broken(softmax).double()
    compiled = sp(model, mesh=mesh())
    inputs = [torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (7, 10, 4)]
    return [against_eager(model, x, run=compiled) for x in inputs]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_other_lengths_of_inputs_that_are_not_dense(ranks: Ranks, compiler: str) -> None:
    for outcomes in zip(*ranks.run(2, of_slices, compiler), strict=True):
        check(outcomes)


@pytest.mark.slow
def test_other_lengths_of_rows(ranks: Ranks) -> None:
    for outcomes in zip(*ranks.run(2, after_a_break), strict=True):
        check(outcomes)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("run", LEAVES)
def test_ranks_agree_with_one_device(ranks: Ranks, run: Callable[..., Tensor]) -> None:
    check(ranks.run(3, on_ranks, run))
