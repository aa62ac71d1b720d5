"""The constants of the cost model on real ranks: equal everywhere, measured once, whatever the disks hold."""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.ranks import Ranks

from sp_compile.config import Ranks as Group
from sp_compile.config import resolve
from sp_compile.cost import measure
from sp_compile.cost.machine import CPU, GPU, Machine
from sp_compile.errors import SpError

DEVICE = torch.device("cpu")
MARK = {"flops": 123.0, "ranks_per_node": 2.0}  # what no measurement gives


def asked(folders: list[str], override: dict | None = None) -> tuple[Machine, int, list[str]]:
    """What this rank is told, how often it measured, and the files of its folder (one folder per rank)."""
    folder = folders[dist.get_rank()]
    measure._known.clear()
    with (
        mock.patch.dict(os.environ, {"SP_COMPILE_CACHE_DIR": folder}),
        mock.patch.object(measure, "fit", wraps=measure.fit) as fit,
    ):
        ranks = resolve(worker.mesh(), None)
        found = measure.machine(ranks, DEVICE, override)
        assert measure.machine(ranks, DEVICE, override) == found
    return found, fit.call_count, sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def two(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "rank0"), str(tmp_path / "rank1")]


def test_measured_once_and_kept(ranks: Ranks, tmp_path: Path) -> None:
    (first, fits, files), (other, other_fits, other_files) = ranks.run(2, asked, two(tmp_path))
    assert first == other
    assert (fits, other_fits) == (1, 1)
    assert len(files) == 1
    assert other_files == []  # rank 0 writes
    assert first.ranks_per_node == 2
    assert 1e8 < first.flops < 1e14
    assert 1e6 < first.all_to_all_bandwidth < 1e12
    assert 1e6 < first.all_gather_bandwidth < 1e12
    assert json.loads((tmp_path / "rank0" / files[0]).read_text()) == asdict(first)
    assert [r[:2] for r in ranks.run(2, asked, two(tmp_path))] == [(first, 0)] * 2


def test_what_rank_0_reads_counts(ranks: Ranks, tmp_path: Path) -> None:
    folders = two(tmp_path)
    _, _, (name,) = ranks.run(2, asked, folders)[0]
    (tmp_path / "rank0" / name).write_text(json.dumps(asdict(replace(CPU, **MARK))))
    (tmp_path / "rank1").mkdir()
    (tmp_path / "rank1" / name).write_text(json.dumps(asdict(replace(CPU, flops=7.0))))
    assert [r[:2] for r in ranks.run(2, asked, folders)] == [(replace(CPU, **MARK), 0)] * 2
    (tmp_path / "rank0" / name).unlink()  # now only rank 1 has a file: both measure
    (first, *_), (other, *_) = results = ranks.run(2, asked, folders)
    assert [r[1] for r in results] == [1, 1]
    assert first == other
    assert first.flops > 1e8


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"flops": 1}', "\x00"])
def test_a_corrupt_file_is_measured_again(ranks: Ranks, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "rank0"
    folder.mkdir()
    with mock.patch.object(measure, "_known", {}):
        name = ranks.run(2, path_of)[0]
    (folder / name).write_text(text)
    (first, fits, files), (other, _, _) = ranks.run(2, asked, two(tmp_path))
    assert first == other
    assert fits == 1
    assert json.loads((folder / files[0]).read_text()) == asdict(first)


def path_of() -> str:
    return measure._path(resolve(worker.mesh(), None), DEVICE).name


def test_values_out_of_range_are_no_constants(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for changes in ({"flops": -1.0}, {"flops": "fast"}, {"overlap": 2}, {"flops": math.nan}):
        path.write_text(json.dumps({**asdict(CPU), **changes}))
        assert measure._read(path) is None
    measure._write(path, CPU)
    assert measure._read(path) == CPU  # infinite values too
    assert os.listdir(tmp_path) == ["machine.json"]


def test_a_disk_that_refuses(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (first, fits, _), (other, _, _) = ranks.run(2, asked, [str(file / "no"), str(file / "no")])
    assert first == other
    assert fits == 1


def test_overrides_measure_nothing(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(2, asked, two(tmp_path), {"flops": 5.0})
    assert results == [(replace(CPU, flops=5.0), 0, [])] * 2
    assert ranks.run(2, asked, two(tmp_path), {}) == [(CPU, 0, [])] * 2


def test_without_processes() -> None:
    assert measure.machine(Group(1, ""), DEVICE) == CPU
    assert measure.machine(Group(8, ""), DEVICE) == CPU
    assert measure.machine(Group(8, ""), torch.device("cuda")) == GPU
    assert measure.machine(Group(8, ""), DEVICE, {"overlap": 1}) == replace(CPU, overlap=1)
    with pytest.raises(SpError, match="did you mean 'overlap'"):
        measure.machine(Group(8, ""), DEVICE, {"overlaps": 1})


def test_constants_from_times() -> None:
    plan = measure.CPU_PLAN
    small, large = plan.sizes
    links = [1e-4 + 0.75 * x / 2e9 for x in plan.sizes] + [2e-4 + 0.75 * x / 1e9 for x in plan.sizes]
    rates = [plan.flops(keys) / 1e10 * (1 + 300 / keys) for keys in plan.lengths]
    fitted = measure.constants(links + rates, plan, 4, 4, CPU)
    expected = replace(
        CPU,
        flops=1e10,
        block_keys=300,
        all_to_all_bandwidth=2e9,
        all_to_all_latency=1e-4,
        all_gather_bandwidth=1e9,
        all_gather_latency=2e-4,
        hop_bandwidth=2e9,
        hop_latency=1e-4,
        ranks_per_node=4,
    )
    assert asdict(fitted) == pytest.approx(asdict(expected))
    nodes = measure.constants(links + rates, plan, 4, 2, GPU)  # half of an all-to-all leaves its node
    assert nodes.inter_node_bandwidth == pytest.approx(0.5 * 2e9 / 0.75)
    assert nodes.all_to_all_bandwidth == GPU.all_to_all_bandwidth
    noisy = measure.constants([2.0, 1.0, 2.0, 1.0, 1e-9, 1.0], plan, 4, 4, CPU)
    assert noisy.all_to_all_bandwidth == 0.75 * large
    assert (noisy.all_to_all_latency, noisy.block_keys) == (0, 0)
    assert noisy.flops == plan.flops(1024)
    assert small < large
