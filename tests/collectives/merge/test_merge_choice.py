"""Over which groups merge_reductions merges, in which order of ranks, and when the cost model lets it."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.golden import notes_of
from support.parallel.merging import (
    GRID,
    X,
    ag,
    ar,
    c10d,
    check_unchanged,
    collectives,
    merged,
    mesh_groups,
    rs,
    traced,
    two,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.base import CollectivePass
from sp_compile.passes.collectives.merge.merge_reductions import MergeReductions
from sp_compile.passes.cost.collective_time import LatencyBandwidth, collective_bytes, fit_line
from sp_compile.passes.cost.known_groups import KnownGroups, declared_groups
from sp_compile.passes.cost.machine import Machine

# Groups.

OVERLAPPING = KnownGroups(
    {"p": ((0, 1), (2, 3)), "q": ((1, 2), (3, 0)), "r": ((0, 2), (1, 3)), "all": ((0, 1, 2, 3),), "some": ((0, 2),)},
    dict.fromkeys(range(4), 0),
)


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_groups_that_are_no_grid(op: str) -> None:
    for one, other in (("p", "p"), ("all", "p"), ("p", "all")):
        check_unchanged(two(op, op, one, other), X, OVERLAPPING)
    for one, other in (("p", "q"), ("q", "r")):  # no rows and columns, but every rank counts once
        gm, _ = merged(two(op, op, one, other), X, OVERLAPPING)
        assert collectives(gm) == ["all_reduce all"]
    gm = traced(two(op, op, "p", "some"), X)
    assert not MergeReductions(OVERLAPPING, "always")(gm).modified


def test_undeclared() -> None:
    def fn(x: Tensor) -> Tensor:
        return ar(ar(x, "sum", "a"), "sum", "z")

    gm = traced(fn, X)
    with pytest.raises(SpError, match=r"SP611: group 'z' of all_reduce_1"):
        MergeReductions(GRID)(gm)
    (note,) = notes_of(MergeReductions(GRID, "always", strict=False), gm)
    assert note.label == "not merge_reductions"
    (note,) = notes_of(MergeReductions(declared_groups(), strict=False), gm)
    assert note.label == "not merge_reductions"
    only_axes = KnownGroups({k: GRID.members[k] for k in "ab"}, GRID.nodes)
    check_unchanged(two("sum", "sum"), X, only_axes)


def test_bad_input() -> None:
    with pytest.raises(SpError, match=r"SP905: .*'auto', 'always'.*'sometimes'"):
        MergeReductions(GRID, "sometimes")
    with pytest.raises(SpError, match=r"SP561: .*sum, avg.*'median'"):
        MergeReductions(GRID)(traced(lambda x: ar(x, "median", "a"), X))
    (note,) = notes_of(MergeReductions(GRID, "always", strict=False), traced(two("band", "band"), X))
    assert note.label == "not merge_reductions"
    gm = traced(two("sum", "sum"), X)
    for node in gm.graph.nodes:
        node.meta.clear()
    with pytest.raises(SpError, match="SP906"):
        MergeReductions(GRID)(gm)
    with pytest.raises(SpError, match="SP702: cost: all_reduce_bandwidth"):
        MergeReductions(GRID, cost={"all_reduce_bandwidth": 0})(traced(two("sum", "sum"), X))


# Gathering and scattering.


def test_order_of_chunks() -> None:
    x = torch.ones(12, 2, dtype=torch.float64)
    gm, _ = merged(lambda x: rs(rs(x, "sum", 2, "a"), "avg", 3, "b"), x)
    assert collectives(gm) == ["reduce_scatter a+b"]
    assert gm.graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default)[0].args[2] == 6
    check_unchanged(lambda x: rs(rs(x, "sum", 3, "b"), "sum", 2, "a"), x)
    gm, _ = merged(lambda x: ag(ag(x, 3, "b") * 2, 2, "a"), x)
    assert collectives(gm) == ["all_gather a+b"]
    check_unchanged(lambda x: ag(ag(x, 2, "a"), 3, "b"), x)


def test_rows_that_the_ranks_do_not_divide() -> None:
    """Tracing accepts a reduce_scatter with such rows; torch raises only when it runs."""
    gm = traced(lambda x: rs(rs(x, "sum", 2, "a"), "sum", 3, "b"), torch.ones(10, 2))
    rewrite = MergeReductions(GRID, "always")
    assert not rewrite(gm).modified
    assert rewrite.notes[0].label == "not merge_reductions"


def test_kinds_do_not_mix() -> None:
    gm = traced(lambda x: ar(rs(ar(ag(x, 3, "b"), "sum", "a"), "sum", 3, "b"), "sum", "a"), X)
    assert not MergeReductions(GRID, "always")(gm).modified
    gm = traced(lambda x: rs(rs(x, "sum", 2, "a").view(12), "sum", 3, "b"), X)
    assert not MergeReductions(GRID, "always")(gm).modified  # a view may move rows between chunks


# Policies.

SLOW_UNION = {
    "a": LatencyBandwidth(1e-3, 1e9),
    "b": LatencyBandwidth(1e-3, 4e9 / 3),
    "a+b": LatencyBandwidth(3e-3, 5 / 3 * 1.9e9),
}


def sized(rows: int) -> Callable[[Tensor], Tensor]:
    return lambda x: ar(ar(x.expand(rows, 1 << 10), "sum", "a"), "sum", "b")


def test_auto_follows_the_sizes() -> None:
    """1 ms less to start with, half of the time for every byte: 2 + 2 M = 3 + M / 1.9 where M is 0.68 MB.

    Of M bytes one of 2, 3 and 6 ranks sends M, 4 / 3 M and 5 / 3 M.
    """
    groups = KnownGroups(GRID.members, GRID.nodes, SLOW_UNION)
    x = torch.ones(1, 1, dtype=torch.float64)
    for rows, expected in ((1, 2), (40, 2), (80, 1), (120, 1)):
        gm = traced(sized(rows), x)
        (note,) = notes_of(MergeReductions(groups, strict=False), gm)
        assert len(collectives(gm)) == expected, rows
        assert note.label == ("merge_reductions" if expected == 1 else "not merge_reductions")
        for policy, count in (("always", 1), ("never", 2), ("intra_node", 1)):
            gm = traced(sized(rows), x)
            MergeReductions(groups, policy, strict=False)(gm)
            assert len(collectives(gm)) == count


def test_ties_take_fewer_collectives() -> None:
    near = {
        "a": LatencyBandwidth(1e-3, math.inf),
        "b": LatencyBandwidth(1e-3, math.inf),
        "a+b": LatencyBandwidth(2.09e-3, math.inf),
    }
    gm = traced(sized(1), torch.ones(1, 1))
    MergeReductions(KnownGroups(GRID.members, GRID.nodes, near), strict=False)(gm)
    assert len(collectives(gm)) == 1


def test_machines() -> None:
    """Two machines of four: a crosses them, b and c do not."""
    groups = mesh_groups((2, 2, 2), ("a", "b", "c"), ranks_per_node=4)

    def fn(x: Tensor) -> Tensor:
        return ar(ar(ar(x, "sum", "b"), "sum", "a"), "sum", "c")

    gm, notes = merged(fn, X, groups, "intra_node")
    assert collectives(gm) == ["all_reduce a", "all_reduce b+c"]
    assert [note.label for note in notes] == ["merge_reductions"]
    check_unchanged(lambda x: ar(ar(x, "sum", "b"), "sum", "a"), X, groups, "intra_node")
    # Inside 100 times as fast as between: of a large value only the inner two are worth merging.
    fast = {
        "all_reduce_latency": 1e-5,
        "step_latency": 0,
        "all_reduce_bandwidth": 1e11,
        "inter_node_step_latency": 0,
        "inter_node_bandwidth": 1e9,
    }
    gm = traced(lambda x: fn(x.expand(1 << 14, 1 << 10)), torch.ones(1, 1))
    MergeReductions(groups, "auto", cost=fast)(gm)
    assert collectives(gm) == ["all_reduce a", "all_reduce b+c"]
    gm = traced(fn, torch.ones(2))
    MergeReductions(groups, "auto", cost=fast)(gm)
    assert collectives(gm) == ["all_reduce a+b+c"]


def test_dynamic_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        return ar(ar(x, "sum", "a").view(-1), "sum", "b")

    gm = make_fx(fn, tracing_mode="symbolic")(torch.ones(1 << 10, 80, dtype=torch.float64))
    MergeReductions(KnownGroups(GRID.members, GRID.nodes, SLOW_UNION), strict=False)(gm)
    assert collectives(gm) == ["all_reduce a+b"]
    gm = make_fx(fn, tracing_mode="symbolic")(torch.ones(8, 8, dtype=torch.float64))
    MergeReductions(KnownGroups(GRID.members, GRID.nodes, SLOW_UNION), strict=False)(gm)
    assert len(collectives(gm)) == 2


def test_fitted_lines() -> None:
    sizes = (1 << 10, 1 << 16, 1 << 20)
    exact = fit_line(sizes, [2e-4 + size / 5e8 for size in sizes])
    assert (exact.latency, exact.bandwidth) == pytest.approx((2e-4, 5e8))
    assert fit_line(sizes, [3e-3, 2e-3, 1e-3]) == LatencyBandwidth(2e-3, math.inf)  # noise
    from_zero = fit_line(sizes, [size / 1e9 - 1e-7 for size in sizes])
    assert from_zero.latency == 0
    assert from_zero.bandwidth > 1e9


def test_rings() -> None:
    """call + 2 (k - 1) hop + 2 M (k - 1) / k / bandwidth, and half of it to gather or scatter."""
    cost = {
        "all_reduce_latency": 1e-3,
        "step_latency": 1e-4,
        "all_reduce_bandwidth": 1e9,
        "inter_node_step_latency": 2e-4,
        "inter_node_bandwidth": 1e8,
    }
    machine = Machine.of("cpu", cost)
    sent = collective_bytes("all_reduce", 1e6, 4)
    assert machine.line("all_reduce", 4, inside=True).seconds(sent) == pytest.approx(1e-3 + 6e-4 + 1.5e-3)
    assert machine.line("all_reduce", 4, inside=False).seconds(sent) == pytest.approx(1e-3 + 12e-4 + 15e-3)
    assert machine.line("all_reduce", 1, inside=True).seconds(collective_bytes("all_reduce", 1e6, 1)) == 1e-3


# The example of a pass for contributors.


def twice(op: str, group: str, *, is_returned: bool = False, is_written: bool = False) -> Callable[[Tensor], Any]:
    def program(x: Tensor) -> Any:
        first = ar(x, "max", "a")
        second = ar(first, op, group)
        if is_written:
            first.add_(1)
        return (first, second) if is_returned else second + 1

    return program


@pytest.mark.parametrize(
    ("program", "count"),
    [
        (twice("max", "a"), 1),
        (twice("max", "b"), 2),
        (twice("sum", "a"), 2),
        (twice("max", "a", is_returned=True), 2),
        (twice("max", "a", is_written=True), 2),
    ],
)
def test_example_in_the_docstring(program: Callable[[Tensor], Any], count: int) -> None:
    text = inspect.cleandoc(CollectivePass.__doc__ or "")
    code = inspect.cleandoc(text.partition("that maximum.\n")[2].partition("\n`DropRepeatedMax()")[0])
    names: dict[str, Any] = {"torch": torch, "CollectivePass": CollectivePass, "register_pass": lambda cls: cls}
    exec(code, names)
    gm = traced(program, X)
    before = collectives(gm)
    rewrite = names["DropRepeatedMax"]()
    rewrite(gm)
    assert len(before) == 2
    assert len(collectives(gm)) == count == 2 - rewrite.changes
