"""What one rank does wrong in a tensor-parallel program is an error on every rank, and no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks as worker
import torch
import torch.distributed as dist
from parallel_models import Split, build, tokens
from parallel_variants import DIM, Hidden
from ranks import Ranks

import sp_compile
from sp_compile import joint

OPTIONS = {"compiler": "aot_eager"}


def split() -> Split:
    return Split(worker.group().size(), dist.get_rank(), worker.group())


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except sp_compile.SpError as error:
        return str(error)
    return ""


def gradients_of_their_own() -> tuple[str, bool]:
    """The hidden states are shared; what each rank makes of them is not. In eager mode that is a wrong gradient."""
    run = torch.compile(Hidden(split()), backend="sp", options=OPTIONS)
    x = torch.randn(2, 6, DIM, dtype=torch.float64, requires_grad=True)
    run(x.detach()).sum()
    error = message(lambda: (run(x) * (dist.get_rank() + 1)).sum().backward())
    return error, x.grad is None


def test_gradients_of_a_shared_result(ranks: Ranks) -> None:
    for error, untouched in ranks.run(2, gradients_of_their_own):
        assert "share the result 0" in error
        assert "different gradients" in error
        assert untouched


def shared_gradients() -> tuple[float, int]:
    """Looked at once: the second backward asks nobody."""
    tp = split()
    mine, eager = Hidden(tp), Hidden(tp)
    run = torch.compile(mine, backend="sp", options=OPTIONS)
    asked = 0
    plain = dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal asked
        asked += 1
        plain(*args, **kwargs)

    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    loss = run(x).sin().sum()
    dist.all_gather_object = counted
    try:
        loss.backward()
        run(x).sin().sum().backward()
    finally:
        dist.all_gather_object = plain
    for _ in range(2):
        eager(x).sin().sum().backward()
    pairs = zip(mine.parameters(), eager.parameters())
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs), asked


def test_gradients_are_compared_once(ranks: Ranks) -> None:
    for error, asked in ranks.run(2, shared_gradients):
        assert error < 1e-12
        assert asked == 1


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


def test_gradients_of_results_that_differ(ranks: Ranks) -> None:
    assert max(ranks.run(2, a_result_of_each_rank)) < 1e-12


def failing(where: str) -> str:
    """The last rank fails while it compiles."""
    owner, name = {"facts": (sp_compile.backend, "known"), "passes": (joint, "text_of")}[where]
    plain = getattr(owner, name)

    def fail(*args: Any) -> Any:
        raise RuntimeError("out of luck")

    if dist.get_rank() == worker.group().size() - 1:
        setattr(owner, name, fail)
    try:
        run = torch.compile(build(split(), head="vocab", layers=1), backend="sp", options=OPTIONS)
        return message(lambda: run(tokens(2, 6)))
    finally:
        setattr(owner, name, plain)


@pytest.mark.parametrize("where", ["facts", "passes"])
def test_a_rank_that_fails_to_compile(ranks: Ranks, where: str) -> None:
    for error in ranks.run(2, failing, where):
        assert "rank 1" in error
        assert "out of luck" in error


def other_layers() -> str:
    tp = split()
    run = torch.compile(build(tp, layers=1 + tp.rank), backend="sp", options=OPTIONS)
    return message(lambda: run(tokens(2, 6)))


def other_sizes() -> str:
    tp = split()
    run = torch.compile(build(tp, layers=1), backend="sp", options=OPTIONS)
    return message(lambda: run(tokens(2, 6 + tp.rank)))


@pytest.mark.parametrize(
    ("program", "expected"), [(other_layers, "different programs"), (other_sizes, "different sizes")]
)
def test_ranks_that_do_not_do_the_same(ranks: Ranks, program: Callable[[], str], expected: str) -> None:
    for error in ranks.run(2, program):
        assert expected in error
