"""declare_groups on real ranks: no communicator too many, constants that all agree on, errors on every rank."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collectives.merge.test_merge_ranks import names, reduced_twice
from support import ranks as worker
from support.ranks import Ranks
from torch.fx.experimental.proxy_tensor import make_fx

import sp_compile
from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.lowering.torch_compat import process_groups
from sp_compile.passes.collectives.merge.merge_reductions import MergeReductions
from sp_compile.passes.cost import measure


def declared_again() -> tuple[int, int, bool]:
    """Return the numbers of new communicators after declaring a mesh and its axes as groups, and if both share a table."""
    mesh = worker.mesh2d(2, 2)
    before = len(process_groups())
    groups = sp_compile.declare_groups(mesh, measure=False)
    first = len(process_groups())
    again = sp_compile.declare_groups(mesh.get_all_groups(), measure=False)
    assert groups[dist.group.WORLD.group_name] == ((0, 1, 2, 3),)
    assert groups[names(mesh)[0]] == ((0, 2), (1, 3))
    assert groups[names(mesh)[1]] == ((0, 1), (2, 3))
    assert all(groups.is_in_one_node(name) for name in groups.members)
    return first - before, len(process_groups()) - first, groups == again


def test_the_default_group_is_a_union(ranks: Ranks) -> None:
    assert ranks.run(4, declared_again) == [(0, 0, True)] * 4


def fitted(folder: str) -> tuple[list[dict], int, list[int]]:
    """(lines by axis of three declarations, files that they left, how many communicators each measured)."""
    os.environ["SP_COMPILE_CACHE_DIR"] = folder
    measure._measured.clear()
    mesh = worker.mesh2d(2, 2)
    labels = dict(zip([*names(mesh), dist.group.WORLD.group_name], "abu"))
    timed: list[int] = []
    plain = measure._measure_and_fit
    lines = []
    with mock.patch.object(measure, "_measure_and_fit", lambda jobs, *a: timed.append(len(jobs)) or plain(jobs, *a)):
        for axes in (mesh, mesh.get_all_groups(), mesh):
            lines.append(sp_compile.declare_groups(axes).lines)
            if len(lines) == 2:
                measure._measured.clear()
    return [{labels[k]: v for k, v in found.items()} for found in lines], len(os.listdir(folder)), timed


@pytest.mark.slow
def test_cost_lines_are_measured_once_and_equal(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(4, fitted, str(tmp_path))
    assert results == [results[0]] * 4
    (mesh, again, from_disk), files, timed = results[0]
    assert timed == [3]
    assert files == 1
    assert set(mesh) == set("abu")
    assert mesh == again == from_disk
    assert all(0 <= line.latency < 1 and line.bandwidth > 1e6 for line in mesh.values())


def refused(what: str) -> str:
    mesh: Any = worker.mesh2d(2, 2)
    pair, _ = mesh.get_all_groups()
    mine = dist.get_rank()
    calls: dict[str, Callable[[], Any]] = {
        "no mesh": lambda: sp_compile.declare_groups("dp" if mine else mesh),
        "other axes": lambda: sp_compile.declare_groups([pair] if mine else [pair, pair]),
        "measure": lambda: sp_compile.declare_groups(mesh, measure=mine > 1),
        "left out": lambda: sp_compile.declare_groups([pair, None if mine == 2 else pair]),
        "empty axis": lambda: sp_compile.declare_groups([pair, None]),
        "no axes": lambda: sp_compile.declare_groups([]),
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
        ("no mesh", "SP615: declare_groups: rank 1, 2, 3: mesh: "),
        ("other axes", r"SP617: .*rank 1 .*\('0',\).*True.*rank 0 .*\('0', '1'\).*True"),
        ("measure", "SP617: .*rank 2 .*True.*rank 0 .*False"),
        ("left out", r"SP618: .*'1'.*None.* rank 2\b.*\[\(0, 2\), \(1, 3\)\]"),
        ("empty axis", r"SP618: .*'1'.*None.* rank 0\b.*\[\]"),
        ("no axes", "SP615: declare_groups: rank 0, 1, 2, 3: mesh: "),
        ("overlap", r"SP618: .*'0'.*\(0,\).* rank 0\b.*\[\(0,\), \(0, 1, 2, 3\)\]"),
    ],
)
def test_bad_declarations_raise_on_every_rank(ranks: Ranks, what: str, message: str) -> None:
    for error in ranks.run(4, refused, what, timeout=60):
        assert re.match(message, error), error


def declared_twice() -> tuple[bool, int]:
    """Declare equal groups as two axes, such as expert parallelism over the tensor-parallel groups."""
    dp, tp = worker.mesh2d(2, 2).get_all_groups()
    before = len(process_groups())
    groups = sp_compile.declare_groups([dp, tp, tp], measure=False)
    return set(groups.members) == {dp.group_name, tp.group_name, dist.group.WORLD.group_name}, len(
        process_groups()
    ) - before


def test_the_same_groups_as_two_axes(ranks: Ranks) -> None:
    assert ranks.run(4, declared_twice) == [(True, 0)] * 4


def merge_errors(op: str) -> str:
    """Return the error for undeclared groups in a graph after a declaration, or for an unknown reduction."""
    declared = worker.mesh2d(2, 2) if op != "sum" else [worker.group(4)]
    groups = sp_compile.declare_groups(declared, measure=False)
    a, b = names(worker.mesh2d(2, 2))
    gm = make_fx(reduced_twice(op, op, a, b), tracing_mode="fake")(torch.ones(4, 4))
    try:
        MergeReductions(groups)(gm)
    except SpError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("op", "message"), [("sum", "SP611"), ("median", "SP561")])
def test_bad_graphs_raise_on_every_rank(ranks: Ranks, op: str, message: str) -> None:
    assert all(message in error for error in ranks.run(4, merge_errors, op))


def test_without_processes() -> None:
    with pytest.raises(SpError, match="SP614"):
        sp_compile.declare_groups(None)


def tensors_of_a_gpu() -> str:
    ranks = ranks_of(worker.group())
    ranks.check_backend(torch.device("cpu"))
    with pytest.raises(SpError) as error:
        ranks.check_backend(torch.device("cuda", 0))
    return str(error.value)


def test_gloo_does_not_move_gpu_tensors(ranks: Ranks) -> None:
    words = "SP117"
    assert words in ranks.run(2, tensors_of_a_gpu)[0]
