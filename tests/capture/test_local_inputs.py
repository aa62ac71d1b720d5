"""Shards as inputs (inputs="local"): the program of a shard must equal that of the full sequence, or it is refused."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from support import ranks as worker
from support.parity import Outcome, against_eager, check, error_text, sp
from support.ranks import Ranks
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan

WIDTH = 4


class Program(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.steps = STEPS[name]

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.steps(self.a(inputs[0]), self.b(inputs[-1])).sin().sum()


def loop(a: Tensor, b: Tensor) -> Tensor:
    h, rows = torch.zeros_like(a[:, 0]), []
    for t in range(a.shape[1]):
        h = a[:, t].sigmoid() * h + b[:, t]
        rows.append(h)
    return torch.stack(rows, 1)


def rounds(a: Tensor, b: Tensor) -> Tensor:
    step = 1
    while step < a.shape[1]:
        a, step = a + nn.functional.pad(a, (0, 0, step, 0))[:, :-step], step * 2
    return a


def tree(a: Tensor, b: Tensor) -> Tensor:
    def combine(x: list[Tensor], y: list[Tensor]) -> list[Tensor]:
        return [x[0] * y[0].cos(), x[1] + y[1] * x[0]]

    return associative_scan(combine, [a, b], dim=1, combine_mode="generic")[1]


def one_op(a: Tensor, b: Tensor) -> Tensor:
    return scan(lambda h, x: ((h + x).tanh(), h + x), torch.zeros_like(a[:, 0]), a, dim=1)[1] * b


def branch(a: Tensor, b: Tensor) -> Tensor:
    return a.cumsum(1) if a.shape[1] < 14 else b.cumsum(1)


def rounds_of_sums(a: Tensor, b: Tensor) -> Tensor:
    return rounds(a.cumsum(1), b)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    return a.cumsum(1) / b.shape[1] + b * torch.arange(b.shape[1])[:, None].cos()


def attended(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def padded(a: Tensor, b: Tensor) -> Tensor:
    return attended(nn.functional.pad(a, (0, 0, 0, 1)))


def after_a_token(a: Tensor, b: Tensor) -> Tensor:
    return attended(torch.cat([a[:, :1] * 0 + 1, b], 1))


def patches(a: Tensor, b: Tensor) -> Tensor:
    return attended(a.unflatten(1, (-1, 2)).flatten(2))


def padded_sums(a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.pad(a, (0, 0, 1, 0)).cumsum(1)


def weighted(a: Tensor, b: Tensor) -> Tensor:
    return attended(a) / b.square().sum()


def first_half(a: Tensor, b: Tensor) -> Tensor:
    return attended(a)[:, : a.shape[1] // 2] + attended(b).chunk(2, 1)[1]


def table(a: Tensor, b: Tensor) -> Tensor:
    return attended(a) * b[:, : a.shape[1]]


STEPS = {
    f.__name__: f
    for f in (
        *(loop, tree, one_op, branch, rounds_of_sums, scaled),
        *(padded, after_a_token, patches, padded_sums, weighted, first_half, table),
    )
}


def given(*lengths: int) -> list[Tensor]:
    """Return inputs of full sequences."""
    torch.manual_seed(0)
    return [torch.randn(2, length, WIDTH, dtype=torch.float64) for length in lengths]


def of_this_rank(x: Tensor) -> Tensor:
    return x.chunk(worker.mesh().size(), 1)[worker.mesh().get_local_rank()].contiguous()


def made(name: str) -> Program:
    torch.manual_seed(0)
    return Program(name).double()


def errors(name: str) -> list[str]:
    run = sp(made(name), mesh=worker.mesh(), inputs="local")
    return [error_text(functools.partial(run, of_this_rank(x))) for x in given(16, 20)]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", ["loop", "tree", "one_op"])
def test_loops_over_a_shard_are_refused(ranks: Ranks, name: str) -> None:
    """A sequence that only a rewrite finds would be taken as complete, with each rank's rows separate."""
    for found in ranks.run(2, errors, name):
        for one in found:
            assert "SP306" in one
            assert "dim 1 of 'inputs[0]'" in one


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["branch", "rounds_of_sums"])
def test_guards_on_the_length_hold_for_the_full_sequence(ranks: Ranks, name: str) -> None:
    (first, second), again = ranks.run(2, errors, name)
    assert [first, second] == again
    assert "SP235" in first
    assert "SP235" in second
    assert "inputs='local'" in first
    assert "length < 14 holds" in first or name != "branch"


@pytest.mark.parametrize("name", ["patches"])
def test_a_sequence_that_is_not_followed_to_an_input_is_named(ranks: Ranks, name: str) -> None:
    """Each rank took its rows for all there are. Named, the sequence is found."""
    for found in ranks.run(2, errors, name):
        assert all("SP307" in one for one in found)
    for outcomes in zip(*ranks.run(2, exact, name, [8, 16], 1, True), strict=True):
        check(outcomes)


def whole_table() -> tuple[str, Outcome]:
    x, rows = given(12, 20)
    refused, run = (
        sp(model := made("table"), mesh=worker.mesh(), inputs="local", **how) for how in ({}, {"seq_dims": {0: 1}})
    )
    return error_text(lambda: refused(of_this_rank(x), rows)), against_eager(
        model, x, rows, run=lambda x, t: run(of_this_rank(x), t)
    )


def test_a_replicated_table_with_sharded_inputs(ranks: Ranks) -> None:
    """Rows of a replicated table would be taken for shards."""
    answers = ranks.run(2, whole_table)
    assert all(
        re.match(r"SP234: .*\bdim 1 .*inputs\[0\].*\bdim 1 .*inputs\[1\].*\b6 and 20\b", error) for error, _ in answers
    )
    check([outcome for _, outcome in answers])


def other_rows() -> list[str]:
    x, y = given(12, 12)
    run, named = (sp(made("weighted"), mesh=worker.mesh(), inputs="local", **how) for how in ({}, {"seq_dims": {0: 1}}))
    return [error_text(functools.partial(run, *map(of_this_rank, (x, y)))) for run in (run, named)]


def test_an_input_that_is_no_sequence_is_the_same_on_every_rank(ranks: Ranks) -> None:
    """An input that no scan or attention reaches would be taken as complete, with other losses on each rank."""
    for found in ranks.run(2, other_rows):
        for one in found:
            assert "SP636" in one


def exact(name: str, lengths: list[int], inputs: int, named: bool = False) -> list[Outcome]:
    options = {"seq_dims": dict.fromkeys(range(inputs), 1)} if named else {}
    run = sp(model := made(name), mesh=worker.mesh(), inputs="local", **options)
    shards = lambda *whole: run(*map(of_this_rank, whole))  # noqa: E731
    return [against_eager(model, *given(*[length] * inputs), run=shards) for length in lengths]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("name", "inputs"), [("branch", 1), ("scaled", 1), ("first_half", 1), ("padded", 1), ("scaled", 2)]
)
def test_shards_match_the_full_sequence(ranks: Ranks, name: str, inputs: int) -> None:
    """The program has no guard on its length, or a branch that shards and the full length both take."""
    lengths = [8, 12, 32] if name == "branch" else [12, 20]
    for outcomes in zip(*ranks.run(2, exact, name, lengths, inputs), strict=True):
        check(outcomes)


def own_slice_of_a_batch() -> float:
    """Pass rows that are a slice of the full batch: a guard compares their strides with their length."""

    def program(x: Tensor) -> Tensor:
        h = x + nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return nn.functional.rms_norm(h - h.square().mean(2, keepdim=True), (8,))

    mesh = worker.mesh()
    x = torch.randn(2, 1, 4 * mesh.size(), 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    run = sp(program, mesh=mesh, inputs="local", outputs="local")
    torch._dynamo.config.assume_static_by_default = False
    try:
        return (run(x[:, :, rows]) - program(x)[:, :, rows]).abs().max().item()
    finally:
        torch._dynamo.config.assume_static_by_default = True


def test_strides_of_shards_are_no_lengths(ranks: Ranks) -> None:
    assert max(ranks.run(2, own_slice_of_a_batch)) < 1e-12
