"""Mistakes of first programs: the first line of the warning or the error names the cause."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.parity import Sums, build, sp
from support.ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh

from sp_compile.runtime import one_rank


def warned_with(**options: Any) -> list[str]:
    """Return the warnings of two compilations of a program."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    one_rank.log.addHandler(handler)
    one_rank._warned_reasons.clear()
    torch.compiler.reset()
    try:
        for size in (8, 9):
            sp(build(Sums), **options)(torch.ones(2, size, 16, dtype=torch.float64))
    finally:
        one_rank.log.removeHandler(handler)
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
    assert text.startswith("torchrun started 2 processes and this program has no process group")
    assert "Call torch.distributed.init_process_group()" in text
    monkeypatch.setenv("RANK", "1")
    assert warned_with() == []


def test_a_single_device_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert warned_with() == []


def test_a_mesh_axis_of_one_rank_is_warned_of_once(ranks: Ranks) -> None:
    first, *others = ranks.run(4, on_mesh_of_one)
    assert len(first) == 1
    assert first[0].startswith("The axis of the mesh that splits the sequence has one rank, and the program has 4")
    assert "(1, 4)" in first[0]
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
    assert text == on_mesh
    assert text.startswith("The process group has one rank")
    assert "torchrun" in text
