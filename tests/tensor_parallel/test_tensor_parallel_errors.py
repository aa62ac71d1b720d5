"""An error of one rank in a tensor-parallel program is raised on every rank, and no rank hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support import ranks as worker
from support.parallel.parallel_models import Split, build, tokens
from support.parallel.parallel_training import message, split
from support.parallel.parallel_variants import DIM, Hidden
from support.ranks import Ranks as Pool
from torch import Tensor

from sp_compile.lowering.base.ranks import Ranks
from sp_compile.passes.tensor_parallel.scatter_layers import SequenceParallelLinear
from sp_compile.runtime import session

OPTIONS = {"compiler": "aot_eager"}


def gradients_of_their_own() -> tuple[str, bool]:
    """Use shared hidden states differently on each rank, which is a wrong gradient in eager mode."""
    run = torch.compile(Hidden(split()), backend="sp", options=OPTIONS)
    x = torch.randn(2, 6, DIM, dtype=torch.float64, requires_grad=True)
    run(x.detach()).sum()
    error = message(lambda: (run(x) * (dist.get_rank() + 1)).sum().backward())
    return error, x.grad is None


@pytest.mark.slow
def test_gradients_of_a_shared_result(ranks: Pool) -> None:
    for error, untouched in ranks.run(2, gradients_of_their_own):
        assert "parallel/parallel_variants.py:" in error
        assert "SP671" in error
        assert untouched


def compared() -> list[str]:
    """The errors for bfloat16 gradients of 128 rows: other last bits on rank 1, or other small rows."""
    group, rank = worker.group(), dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(128, 32, dtype=torch.float64) * torch.linspace(0.01, 1, 128, dtype=torch.float64)[:, None]
    rounding = x * (1 + rank * 1e-3)
    noise = x + rank * 2e-4 * torch.randn_like(x)  # as sums over terms of 1 leave it
    other = torch.cat([x[:64], x[64:] + rank * 1e-2 * torch.randn_like(x[64:])])
    given = [y.bfloat16() for y in (rounding, noise, other)]
    return [message(lambda y=y: torch.ops.sp.shared([y], ["r"], group.size(), group.group_name)) for y in given]


def test_gradients_of_16_bits_are_compared_row_by_row(ranks: Pool) -> None:
    for rounding, noise, other in ranks.run(2, compared):
        assert not rounding
        assert not noise
        assert "SP671" in other


def shared_gradients() -> tuple[float, float, str, bool]:
    """Equal, equal but for the last bit, then each rank's own."""
    tp = split()
    mine, eager = Hidden(tp), Hidden(tp)
    run = torch.compile(mine, backend="sp", options=OPTIONS)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    errors = []
    for rounding in (0.0, tp.rank * 1e-16):
        factor = torch.tensor(1 + 2 * rounding, dtype=torch.float64)
        for model in (run, eager):
            (model(x).sin() * factor).sum().backward()
        pairs = [(a.grad, b.grad) for a, b in zip(mine.parameters(), eager.parameters())]
        errors.append(max((a - b).abs().max().item() for a, b in pairs))
    mine.zero_grad()
    error = message(lambda: (run(x) * (tp.rank + 1)).sum().backward())
    return *errors, error, all(p.grad is None for p in mine.parameters())


def test_gradients_are_compared_in_every_backward(ranks: Pool) -> None:
    for first, second, error, untouched in ranks.run(2, shared_gradients):
        assert max(first, second) < 1e-12
        assert "SP671" in error
        assert untouched


def a_result_of_each_rank() -> float:
    """The local columns are a result, too; its gradient is each rank's own."""
    tp = split()
    mine, eager = Hidden(tp), Hidden(tp)

    def both(model: Hidden) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        return lambda x: (model(x), model.up(tp.f(model.norm(x))))

    run = torch.compile(both(mine), backend="sp", options=OPTIONS)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    for call in (run, both(eager)):
        hidden, columns = call(x)
        (hidden.sin().sum() + (dist.get_rank() + 1) * columns.cos().sum()).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(mine.parameters(), eager.parameters())]
    return max((a - b).abs().max().item() for a, b in pairs)


def test_gradients_of_results_that_differ(ranks: Pool) -> None:
    assert max(ranks.run(2, a_result_of_each_rank)) < 1e-12


def failing(where: str) -> str:
    """The last rank fails while it compiles."""
    name = {"facts": "input_digests", "passes": "graph_digest"}[where]
    plain = getattr(session, name)

    def fail(*args: Any) -> Any:
        raise RuntimeError("out of luck")

    if dist.get_rank() == worker.group().size() - 1:
        setattr(session, name, fail)
    try:
        run = torch.compile(build(split(), head="vocab", layers=1), backend="sp", options=OPTIONS)
        return message(lambda: run(tokens(2, 6)))
    finally:
        setattr(session, name, plain)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("where", ["facts", "passes"])
def test_a_rank_that_fails_to_compile(ranks: Pool, where: str) -> None:
    for error in ranks.run(2, failing, where):
        assert "SP607: rank 1: " in error
        assert "out of luck" in error


def other_layers() -> str:
    tp = split()
    run = torch.compile(build(tp, layers=1 + tp.rank), backend="sp", options=OPTIONS)
    return message(lambda: run(tokens(2, 6)))


def other_sizes() -> str:
    tp = split()
    run = torch.compile(build(tp, layers=1), backend="sp", options=OPTIONS)
    return message(lambda: run(tokens(2, 6 + tp.rank)))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("program", "expected"), [(other_layers, "SP631"), (other_sizes, "SP632")])
def test_ranks_that_do_not_do_the_same(ranks: Pool, program: Callable[[], str], expected: str) -> None:
    for error in ranks.run(2, program):
        assert expected in error


def numbers(first: float, then: float) -> str:
    """Return the error of the second call; a third call with equal numbers on both ranks is correct."""
    tp = split()
    model = Hidden(tp)
    run = torch.compile(lambda x, k: model(x * k) * k, backend="sp", options=OPTIONS)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    run(x, first)
    error = message(lambda: run(x, then))
    assert torch.allclose(run(x, 7.5), model(x * 7.5) * 7.5)
    return error


def own_number_first() -> str:
    return numbers(3.5 + dist.get_rank(), 4.5)


@pytest.mark.slow
def test_a_number_that_differs_and_then_does_not(ranks: Pool) -> None:
    """The rank that knows the number runs its program, the other compiles."""
    for error in ranks.run(2, own_number_first):
        assert "SP602: rank 0 of 2 compiles" in error


def own_number_later() -> str:
    tp = split()
    model = Hidden(tp)
    run = torch.compile(lambda x, k: model(x * k), backend="sp", options=OPTIONS)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    run(x, torch.tensor(3.5))
    return message(lambda: run(x, torch.tensor(3.5 + dist.get_rank())))


def test_numbers_that_differ_later(ranks: Pool) -> None:
    for error in ranks.run(2, own_number_later):
        assert "SP632" in error
        assert "rank 1: k 4.5" in error


def other_ops() -> str:
    tp = split()
    model = Hidden(tp)
    return message(
        lambda: torch.compile(lambda x: model(model(x.sin()) if tp.rank else x.cos()), backend="sp", options=OPTIONS)(
            torch.randn(2, 6, DIM, dtype=torch.float64)
        )
    )


def test_programs_that_differ_say_where(ranks: Pool) -> None:
    for error in ranks.run(2, other_ops):
        assert "SP631" in error
        assert "rank 0: cos at tensor_parallel/test_tensor_parallel_errors.py:" in error
        assert "rank 1: sin at tensor_parallel/test_tensor_parallel_errors.py:" in error


def other_reductions() -> str:
    tp = split()
    model, op = Hidden(tp).requires_grad_(False), "max" if tp.rank else "sum"
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    run = torch.compile(lambda x: funcol.all_reduce(model(x), op, tp.group), backend="sp", options=OPTIONS)
    return message(lambda: run(x))


def test_reductions_that_differ_say_where(ranks: Pool) -> None:
    for error in ranks.run(2, other_reductions):
        assert error.startswith("SP631: ")
        assert "rank 0: _c10d_functional.all_reduce sum at tensor_parallel/test_tensor_parallel_errors.py:" in error
        assert "rank 1: _c10d_functional.all_reduce max at tensor_parallel/test_tensor_parallel_errors.py:" in error


def ranks_that_the_group_lacks() -> str:
    model = Hidden(split()).requires_grad_(False)
    gm = torch.export.export(model, (torch.randn(2, 6, DIM, dtype=torch.float64),)).module()
    wrong = Ranks(3, worker.group().group_name)
    return message(lambda: SequenceParallelLinear(wrong)(gm))


def test_ranks_that_the_group_lacks(ranks: Pool) -> None:
    for error in ranks.run(2, ranks_that_the_group_lacks):
        assert "SP907: ranks: expected 2" in error


def on_two_axes(how: str) -> str:
    """The first rank goes its own way; the last shares no group with it."""
    mesh = worker.mesh2d(2, 2)
    rows, columns = (mesh.get_group(name) for name in ("dp", "sp"))
    tp = Split(2, mesh.get_local_rank("sp"), columns)
    model, first = Hidden(tp), dist.get_rank() == 0

    def compiler(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if first and how == "fails":
            raise MemoryError("no memory for the code")
        return gm.forward

    options = {"compiler": compiler} if how == "fails" else OPTIONS
    if how == "merges":
        options = {**OPTIONS, "merge_reductions": "always" if first else "never"}
    run = torch.compile(lambda x: funcol.all_reduce(model(x), "sum", rows), backend="sp", options=options)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    if how == "recompiles":
        run(x)
    return message(lambda: run(x[:, : 5 if first and how == "recompiles" else 6]))


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    ("how", "expected"), [("recompiles", "SP602"), ("fails", "SP607: rank 0: "), ("merges", "SP610")]
)
def test_ranks_of_other_groups_raise(ranks: Pool, how: str, expected: str) -> None:
    errors = ranks.run(4, on_two_axes, how)
    elsewhere = expected if how == "merges" else "SP603"  # raised while they compile
    for rank, error in enumerate(errors):
        assert (expected if rank < 2 else elsewhere) in error, (rank, error)
