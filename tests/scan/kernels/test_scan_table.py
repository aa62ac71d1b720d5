"""Selection of the lowering table's row for a scan; `toy_lowering` is a row from outside the package."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.scans import toy_lowering
from support.scans.local_scans import has_native

import sp_compile
from sp_compile import SpError
from sp_compile.lowering.base.registry import Table
from sp_compile.lowering.scan.kernels import native
from sp_compile.lowering.scan.scan_table import LOWERINGS, ScanProblem, choose_lowering, using_lowering

sp = torch.ops.sp


def problem(**changes: Any) -> ScanProblem:
    base = ScanProblem("scan", "cpu", 4, 100, 1, torch.float32, torch.float32, torch.float64, "sum", total=False)
    return base._replace(**changes)


def test_torch_runs_small_scans_along_the_last_dim() -> None:
    assert choose_lowering(problem()) == "aten"
    assert choose_lowering(problem(exclusive=True, reverse=True)) == "aten"
    assert choose_lowering(problem(dtype=torch.int32, result=torch.int64, accumulate=torch.int64, total=True)) == "aten"


@pytest.mark.parametrize(
    "changes",
    [
        {"inner": 64},
        {"segmented": True},
        {"total": True},
        {"result": torch.bfloat16, "dtype": torch.bfloat16},
        {"kind": "linear"},
        {"kind": "linear_total"},
    ],
)
def test_torch_does_not_run_the_rest(changes: dict[str, Any]) -> None:
    """Other dims, other kinds, and scans that torch would round: totals to the result, half types below double."""
    with using_lowering("aten"), pytest.raises(SpError, match="SP903"):
        choose_lowering(problem(**changes))


def test_large_scans_are_compiled() -> None:
    large = problem(length=1 << 20)
    assert choose_lowering(large) == ("native" if has_native() else "aten")
    assert choose_lowering(large._replace(inner=64)) == ("native" if has_native() else "blocked")


def test_torch_runs_many_short_lines() -> None:
    short = problem(outer=1 << 16, length=63)
    compiled = "native" if has_native() else "aten"
    assert choose_lowering(short) == "aten"
    assert choose_lowering(short._replace(length=64)) == compiled
    assert choose_lowering(short._replace(op="logsumexp")) == compiled


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOWERINGS, "native", native.NATIVE_LOWERING._replace(can_run=lambda problem: False))
    assert choose_lowering(problem(length=1 << 20)) == "aten"
    for changes in ({"inner": 64}, {"segmented": True}, {"kind": "linear"}, {"total": True}):
        assert choose_lowering(problem(**changes)) == "blocked"


def test_a_row_can_be_forced() -> None:
    with using_lowering("blocked"):
        assert choose_lowering(problem()) == "blocked"
    assert choose_lowering(problem()) == "aten"


def test_a_row_that_does_not_fit_is_refused() -> None:
    with using_lowering("aten"), pytest.raises(SpError, match=r"SP903: .*'aten'"):
        sp.local_linear_total(*torch.rand(2, 3), 0, False, False, torch.float64)
    with pytest.raises(SpError, match=r"SP902: .*'fast'"), using_lowering("fast"):
        pass


@pytest.fixture
def toy() -> Iterator[None]:
    with toy_lowering.registered():
        yield


with toy_lowering.registered():
    EVERY = tuple(LOWERINGS)


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("length", [1, 7])
def test_every_row_equals_the_blocks(way: str, length: int, toy: None) -> None:
    x, a, starts = torch.randn(2, length, 3), torch.rand(2, length, 3), torch.rand(length) < 0.3
    narrow, wide = (torch.float32, torch.float64)
    for kind, op, operands in (
        ("scan", sp.local_scan, (x, starts, 1, "sum", False, True, narrow, wide)),
        ("extremes", sp.local_extremes, (x, starts, 1, "max", False)),
        ("linear", sp.local_linear_scan, (a, x, x[:, 0].double(), 1, False, True, narrow, wide)),
        ("linear_total", sp.local_linear_total, (a, x, 1, False, False, wide)),
    ):
        rows = {"outer": 2, "length": length, "inner": 3, "segmented": kind in ("scan", "extremes")}
        if not LOWERINGS[way].can_run(
            problem(kind=kind, total=True, op="max" if kind == "extremes" else "sum", **rows)
        ):
            continue
        with using_lowering("blocked"):
            expected = op(*operands)
        with using_lowering(way):
            torch.testing.assert_close(op(*operands), expected)


def test_a_way_from_outside_takes_its_turn() -> None:
    x = torch.randn(2, 9, dtype=torch.float64)
    with toy_lowering.registered(priority=-1):
        assert choose_lowering(problem()) == "toy"
        assert choose_lowering(problem(length=1 << 20)) == "toy"
        torch.testing.assert_close(sp_compile.inclusive_scan(x, 1), x.cumsum(1))
    with toy_lowering.registered(), pytest.raises(SpError, match=r"SP901: .*'toy'"):
        toy_lowering.registered()
    assert "toy" not in LOWERINGS
    assert choose_lowering(problem()) == "aten"


def test_a_replaced_row_is_restored_with_its_priority() -> None:
    table: Table[Any] = Table("rows", replace=True)
    always = SimpleNamespace(can_run=lambda problem: True)
    table.register("first", always, lambda problem: 1)
    table.register("second", always, lambda problem: 2)
    with table.register("first", always, lambda problem: 3):
        assert table.choose(None) == "second"
    assert table.choose(None) == "first"
