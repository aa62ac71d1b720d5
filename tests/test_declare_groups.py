"""declare_groups on real ranks: no communicator too many, constants that all agree on, errors on every rank."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks as worker
import torch
import torch.distributed as dist
from ranks import Ranks
from test_merge_ranks import names, reduced_twice
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compile
from sp_compile._compat import process_groups
from sp_compile.errors import SpError
from sp_compile.passes.merge_reductions import MergeReductions


def declared_again() -> tuple[int, int, bool]:
    """How many communicators there are more: after declaring a mesh, after its axes as groups; one table?"""
    mesh = worker.mesh2d(2, 2)
    before = len(process_groups())
    groups = sp_compile.declare_groups(mesh, measure=False)
    first = len(process_groups())
    again = sp_compile.declare_groups(mesh.get_all_groups(), [("1", "0")], measure=False)
    assert groups[dist.group.WORLD.group_name] == ((0, 1, 2, 3),)
    assert groups[names(mesh)[0]] == ((0, 2), (1, 3))
    assert groups[names(mesh)[1]] == ((0, 1), (2, 3))
    assert all(groups.in_one_node(name) for name in groups.members)
    return first - before, len(process_groups()) - first, groups == again


def test_the_default_group_is_a_union(ranks: Ranks) -> None:
    assert ranks.run(4, declared_again) == [(0, 0, True)] * 4


def fitted(folder: str) -> tuple[dict, int, dict]:
    """(lines by axis, how often they were measured, those of a second declaration)."""
    os.environ["SP_COMPILE_CACHE_DIR"] = folder
    mesh = worker.mesh2d(2, 2)
    labels = dict(zip([*names(mesh), dist.group.WORLD.group_name], "abu"))
    found = [sp_compile.declare_groups(mesh).lines for _ in range(2)]
    return (
        *({labels[name]: line for name, line in lines.items()} for lines in found),
        len(os.listdir(folder)),
    )


def test_lines_are_measured_once_and_alike(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(4, fitted, str(tmp_path))
    assert results == [results[0]] * 4
    first, second, files = results[0]
    assert first == second
    assert files == 1
    assert set(first) == set("abu")
    assert all(0 <= line.latency < 1 and line.bandwidth > 1e6 for line in first.values())


def refused(what: str) -> str:
    mesh: Any = worker.mesh2d(2, 2)
    pair, _ = mesh.get_all_groups()
    mine = dist.get_rank()
    calls: dict[str, Callable[[], Any]] = {
        "union": lambda: sp_compile.declare_groups(mesh, [("dp", "tp")]),
        "no mesh": lambda: sp_compile.declare_groups("dp" if mine else mesh),
        "no grid": lambda: sp_compile.declare_groups([pair, pair], [("0", "1")]),
        "other axes": lambda: sp_compile.declare_groups([pair] if mine else [pair, pair]),
        "overlap": lambda: sp_compile.declare_groups([worker.group(1) if mine == 0 else worker.group(4)]),
    }
    try:
        calls[what]()
    except SpError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("union", "unions: no axis ['tp'], only ['dp', 'sp']"),
        (
            "no mesh",
            "expected a DeviceMesh, or for each axis the process group of this rank, got str (on ranks [1, 2, 3]",
        ),
        ("no grid", "unions: the groups of ('0', '1') are no full grid"),
        (
            "other axes",
            "rank 1 passes axes ('0',) and unions None, rank 0 ('0', '1') and None: all ranks have to",
        ),
        ("overlap", "the groups of axis '0' overlap, [(0,), (0, 1, 2, 3)]: each rank is in one of an axis"),
    ],
)
def test_bad_declarations_raise_on_every_rank(ranks: Ranks, what: str, message: str) -> None:
    for error in ranks.run(4, refused, what, timeout=60):
        assert message in error


def undeclared() -> str:
    """Another group, in a graph made after the declaration."""
    groups = sp_compile.declare_groups([worker.group(4)], measure=False)
    a, b = names(worker.mesh2d(2, 2))
    gm = make_fx(reduced_twice("sum", "sum", a, b), tracing_mode="fake")(torch.ones(4, 4))
    try:
        MergeReductions(groups)(gm)
    except SpError as error:
        return str(error)
    return "no error"


def test_an_undeclared_group(ranks: Ranks) -> None:
    assert all("is not declared" in error for error in ranks.run(4, undeclared))


def test_without_processes() -> None:
    with pytest.raises(SpError, match="there is no process group"):
        sp_compile.declare_groups(None)
