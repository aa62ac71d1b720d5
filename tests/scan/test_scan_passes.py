"""The scan passes: collectives, gathered scans, and restored padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.golden import captured
from torch import Tensor, nn

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.passes.context import NoteKind, PassContext
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.scan_cost import choose_exchange
from sp_compile.passes.strategies.scan_demands import ShardScans

TWO = Ranks(2, SIMULATED_GROUP)
sp = torch.ops.sp
x = torch.randn(1, 7, 4)


def test_one_rank_in_the_pipeline():
    gm = captured(lambda x: (x * 2).cumsum(0), torch.randn(4096, 8))
    local = sp_compile.parallelize(gm, sp=1)
    assert sp.scan.default in [n.target for n in local.graph.nodes]
    values = torch.randn(4096, 8)
    torch.testing.assert_close(local(values), (values * 2).cumsum(0))


def test_scans_without_a_split_are_gathered():
    gm = captured(lambda x: (x * 2).flatten(0, 1).cummax(0)[0], torch.randn(3, 7, 4))
    local = sp_compile.parallelize(gm, sp=2)
    report = local.meta["sp_report"]
    assert [len(report.find_notes(kind)) for kind in (NoteKind.GATHERED, NoteKind.DECLINED)] == [1, 1]
    assert report.find_notes(NoteKind.DECLINED, subject="split_nested_scans")
    values = torch.randn(3, 7, 4)
    for out in run_ranks(2, lambda rank: local(values)):
        assert torch.equal(out, (values * 2).flatten(0, 1).cummax(0)[0])


def test_complex_numbers_are_gathered():
    gm = captured(lambda x: (x * 2j).cumsum(1), x)
    local = sp_compile.parallelize(gm, sp=2)
    assert local.meta["sp_report"].count("unshard") == 1
    (note,) = local.meta["sp_report"].find_notes(NoteKind.DECLINED)
    assert "torch.complex64" in note.text
    with pytest.raises(SpError, match=r"SP305.*cumsum"):
        sp_compile.parallelize(captured(lambda x: (x * 2j).cumsum(1), x), sp=2, fallback="error")


NESTED: list[tuple[str, Any]] = [
    ("sum", lambda y: y.cumsum(0)),
    ("exclusive", lambda y: y.cumsum(0) - y),
    ("reversed", lambda y: y.flip(0).cumsum(0).flip(0)),
    ("prod", lambda y: (1 + y / 8).cumprod(0)),
    ("exclusive, reversed", lambda y: sp.scan(1 + y / 8, None, 0, "prod", exclusive=True, reverse=True)),
    ("max of counts", lambda y: (y * 8).long().cummax(0)[0].to(y.dtype) * y),
]


@pytest.mark.sampled(every=22)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("name", "scan"), NESTED, ids=[name for name, _ in NESTED])
def test_nested_scans_are_right(name: str, scan: Any, n: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4, dtype=torch.float64) / 4)

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight
            rows = torch.stack([y, y * y], 2).flatten(0, 2)
            return (scan(y.flatten(0, 1)).exp().mean() + scan(rows).sin()).sum()

    values = torch.randn(3, 7, 4, dtype=torch.float64)
    report = sp_compile.verify(Model(), values, sp=n, seq_dims={"x": 1}, fallback="error")
    assert report.worst < 1e-9
    assert report.count("scan") == 2


def test_exchanges() -> None:
    """An all-gather until its bytes outweigh the latencies of the steps; never steps for the same bytes."""
    machine = Machine.of("cpu", {"all_gather_latency": 1e-3, "hop_latency": 1e-6})
    few, many = (choose_exchange(nbytes, 16, machine) for nbytes in (64, 64 << 20))
    assert (few.exchange, many.exchange) == ("gather", "steps")
    assert many.steps < many.gather
    assert few.rounds == 4
    assert choose_exchange(64 << 20, 16, machine, folds=2).exchange == "gather"
    assert [choose_exchange(1 << 40, n, machine).exchange for n in (1, 2, 3)] == ["gather"] * 3


def test_the_sequence_is_the_largest_scanned_dim():
    """Counts per expert are also scanned; the longest part of a flattened dim is the sequence."""

    def routing(x):
        one_hot = torch.nn.functional.one_hot((x * 2).flatten(0, 1).argmax(-1), 4)
        offsets = one_hot.sum(0).cumsum(0)
        return one_hot.cumsum(0) + offsets

    gm = captured(routing, torch.randn(2, 16, 4))
    axes = PassContext.of(TWO).axes(gm)
    (given,) = gm.graph.find_nodes(op="placeholder")
    assert axes.sequence_dims(given) == [1]


def test_steps_declare_their_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[str] = []
    monkeypatch.setattr(routes, "ensure_route", known.append)
    gm = captured(lambda x: (x * 2).cumsum(1), torch.randn(1, 32, 4))
    ShardScans(Ranks(8, SIMULATED_GROUP), machine=Machine.of("cpu", {"all_gather_bandwidth": 1.0}))(gm)
    sp_compile.passes.cost.exchange_cost.declare_routes(gm, Ranks(8, SIMULATED_GROUP))
    assert known == [f"sim/shift:{offset}:1" for offset in (1, -1, 2, -2, 4, -4)]
