"""Mistakes of first programs: the first line of the warning or the error names the cause."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.parity import Sums, build, error_text, sp
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.lowering.base import warn
from sp_compile.lowering.base.error_codes import ERRORS
from sp_compile.lowering.base.errors import SpError
from sp_compile.runtime import session


def warned_with(**options: Any) -> list[str]:
    """Return the warnings of two compilations of a program."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    session.log.addHandler(handler)
    warn._warned.clear()
    torch.compiler.reset()
    try:
        for size in (8, 9):
            sp(build(Sums), **options)(torch.ones(2, size, 16, dtype=torch.float64))
    finally:
        session.log.removeHandler(handler)
    return records


def on_mesh_of_one() -> list[str]:
    mesh = worker.mesh2d(4, 1)["sp"]
    return warned_with(mesh=mesh)


def on_group_of_two() -> list[str]:
    return warned_with(mesh=worker.mesh())


def test_processes_without_a_group_are_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    (text,) = warned_with()
    assert text == session.NO_GROUP % 2
    monkeypatch.setenv("RANK", "1")
    assert warned_with() == []


def test_a_single_device_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert warned_with() == []


def test_a_mesh_axis_of_one_rank_is_warned_of_once(ranks: Ranks) -> None:
    first, *others = ranks.run(4, on_mesh_of_one)
    assert first == [session.ONE_RANK_OF_MESH % (4, 4, 4)]
    assert others == [[]] * 3


def test_two_ranks_are_not_warned_of(ranks: Ranks) -> None:
    assert ranks.run(2, on_group_of_two) == [[], []]


def test_a_group_of_one_rank_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (text,) = warned_with()
        (on_mesh,) = warned_with(mesh=DeviceMesh("cpu", [0], mesh_dim_names=("sp",)))
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()
    assert text == on_mesh == session.ONE_RANK


class Net(nn.Module):
    """A model with dropout, which `eval()` removes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(16, 8), nn.Dropout(0.5), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.embed(ids).cumsum(1))).tanh().sum()


def tokens(rank: int = 0) -> Tensor:
    return torch.randint(0, 16, (1, 8), generator=torch.Generator().manual_seed(rank))


def other_seed(rank: int) -> str:
    torch.manual_seed(rank)
    return error_text(lambda: sp(Net(), mesh=worker.mesh())(tokens()))


def other_dtype(rank: int) -> str:
    net = build(Net).to(torch.bfloat16 if rank else torch.float32)
    return error_text(lambda: sp(net, mesh=worker.mesh())(tokens()))


def eval_at_first(rank: int) -> str:
    net = build(Net).train(rank > 0)
    return error_text(lambda: sp(net, mesh=worker.mesh())(tokens()))


def eval_of_a_module_later(rank: int) -> str:
    net = build(Net)
    run = sp(net, mesh=worker.mesh())
    run(tokens())
    net.drop.train(rank > 0)
    return error_text(lambda: run(tokens()))


def evaluation_without_grad(rank: int) -> str:
    net = build(Net).train(rank > 0)
    with torch.set_grad_enabled(rank > 0):
        return error_text(lambda: sp(net, mesh=worker.mesh())(tokens()))


def sampled_tokens(rank: int) -> str:
    import sp_compile.integrations.transformers  # noqa: F401  (which the program uses)

    return error_text(lambda: sp(build(Net), mesh=worker.mesh())(tokens(rank)))


def partial_without_fsdp(rank: int) -> str:
    net = build(Net)
    net.drop.p = 0.0
    run = sp(net, mesh=worker.mesh(), param_grads="partial", check_every=1)

    def train() -> None:
        for _ in range(3):
            run(tokens()).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None

    return error_text(train)


def of_this_rank(act: Callable[[int], str]) -> str:
    return act(dist.get_rank())


@pytest.mark.parametrize(
    ("act", "first", "words"),
    [
        (other_seed, r"SP642: .*\(embed\.weight\b", ERRORS["SP642"].fix),
        (other_dtype, r"SP640: rank 0 .*float32.* rank 1 .*bfloat16 \(embed\.weight\b", ERRORS["SP640"].fix),
        (eval_at_first, r"SP641: rank 0 .*eval\(\).* rank 1 .*train\(\)", ERRORS["SP641"].fix),
        (eval_of_a_module_later, r"SP641: rank 0 .*train\(\).*drop.*eval\(\).* rank 1 .*train\(\)", "submodule"),
        (evaluation_without_grad, r"SP610: rank 0 .*eval\(\).* rank 1 .*train\(\)", "mode no_grad"),
        (sampled_tokens, r"SP634: .*\(ids\)", "Sample on"),
        (partial_without_fsdp, "SP635: param_grads='partial' ", "fully_shard over"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_the_first_line_is_the_cause(ranks: Ranks, act: Callable[[int], str], first: str, words: str) -> None:
    one, other = ranks.run(2, of_this_rank, act)
    assert one == other
    assert re.match(first, one), one
    assert words in one, one


def _printed_error() -> str:
    """Return the traceback of an error that all ranks have in common, as Python prints it."""
    torch.compiler.reset()
    try:
        sp(build(Sums), mesh=worker.mesh(), atention="ring")(torch.ones(2, 8, 16, dtype=torch.float64))
    except SpError:
        return traceback.format_exc()
    return ""


def test_an_error_on_all_ranks_is_printed_once(ranks: Ranks) -> None:
    for text in ranks.run(2, _printed_error):
        assert text.count("SpError: SP102") == 1
        assert "in of\n" in text  # the line that raised it
