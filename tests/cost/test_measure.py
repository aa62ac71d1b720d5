"""The constants of the cost model on real ranks: equal everywhere, measured once, for any cache contents."""

import json
import math
import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.parity import error_text
from support.ranks import Ranks

from sp_compile.lowering.base.ranks import Ranks as Group
from sp_compile.lowering.base.ranks import resolve
from sp_compile.passes.cost import measure
from sp_compile.passes.cost.collective_time import LatencyBandwidth, collective_bytes, fit_line
from sp_compile.passes.cost.machine import CPU, GPU, Machine
from sp_compile.runtime.agreement import make_exchange
from sp_compile.runtime.control.message import MEASURE_MESSAGE

DEVICE = torch.device("cpu")
EVERYONE = ((0, 1),)
KEYS = [repr(("all_to_all", "cpu", EVERYONE)), repr(("all_gather", "cpu", EVERYONE)), repr(("attention", "cpu"))]
MARK = [[0.5, 2e3], [0.25, 3e3], [1 / 128, math.inf]]  # what no measurement gives
MARKED = replace(
    CPU,
    flops=128.0,
    block_keys=0.0,
    all_to_all_latency=0.5,
    all_to_all_bandwidth=2e3,
    all_gather_latency=0.25,
    all_gather_bandwidth=3e3,
    hop_latency=0.5,
    hop_bandwidth=2e3,
    ranks_per_node=2,
)


def measured(folders: list[str]) -> tuple[Machine, int, list[str]]:
    """Return the constants of this rank, the number of its measurements, and its cache files (one folder per rank)."""
    folder = folders[dist.get_rank()]
    measure._measured.pop(worker.group(), None)  # what all of a group know, all of it must forget
    with (
        mock.patch.dict(os.environ, {"SP_COMPILE_CACHE_DIR": folder}),
        mock.patch.object(measure, "_measure_and_fit", wraps=measure._measure_and_fit) as fit,
    ):
        ranks = resolve(worker.mesh(), None)
        found = measure.machine(ranks, DEVICE, make_exchange(ranks, MEASURE_MESSAGE))
        assert measure.machine(ranks, DEVICE, make_exchange(ranks, MEASURE_MESSAGE)) == found
    return found, fit.call_count, sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _never_called(error: Exception | None, value: object) -> list:
    raise AssertionError("there is no other rank")


def fails(where: str, folder: str) -> str:
    """Return the error if the last rank has no disk, or no memory for the timed values."""
    ranks = resolve(worker.mesh(), None)
    measure._measured.pop(worker.group(), None)
    odd = (
        mock.patch.object(measure, where, side_effect=MemoryError("no memory"))
        if dist.get_rank() == 1
        else nullcontext()
    )
    with odd, mock.patch.dict(os.environ, {"SP_COMPILE_CACHE_DIR": folder}):
        return error_text(lambda: measure.machine(ranks, DEVICE, make_exchange(ranks, MEASURE_MESSAGE)))


@pytest.mark.parametrize("where", ["_cache_path", "full_span"])
def test_a_rank_that_cannot_measure(ranks: Ranks, tmp_path: Path, where: str) -> None:
    """Every rank raises at once, and the next collective of the group works."""
    for _ in range(2):
        first, second = ranks.run(2, fails, where, str(tmp_path))
        assert first == second
        assert first.startswith("SP608: rank 1: MemoryError: no memory")


def two(tmp_path: Path) -> list[str]:
    return [str(tmp_path / "rank0"), str(tmp_path / "rank1")]


@pytest.mark.slow
def test_measured_once_and_kept(ranks: Ranks, tmp_path: Path) -> None:
    (first, fits, files), (other, other_fits, other_files) = ranks.run(2, measured, two(tmp_path))
    assert first == other
    assert (fits, other_fits) == (1, 1)
    assert len(files) == 1
    assert other_files == []  # rank 0 writes
    assert first.ranks_per_node == 2
    assert 1e8 < first.flops < 1e14
    assert 1e6 < first.all_to_all_bandwidth < 1e12
    assert 1e6 < first.all_gather_bandwidth < 1e12
    assert list(json.loads((tmp_path / "rank0" / files[0]).read_text())) == KEYS
    assert [r[:2] for r in ranks.run(2, measured, two(tmp_path))] == [(first, 0)] * 2


@pytest.mark.slow
def test_constants_of_rank_0_are_used(ranks: Ranks, tmp_path: Path) -> None:
    folders = two(tmp_path)
    _, _, (name,) = ranks.run(2, measured, folders)[0]
    (tmp_path / "rank0" / name).write_text(json.dumps(dict(zip(KEYS, MARK))))
    (tmp_path / "rank1").mkdir()
    (tmp_path / "rank1" / name).write_text(json.dumps(dict(zip(KEYS, [[7.0, 7.0]] * 3))))
    assert [r[:2] for r in ranks.run(2, measured, folders)] == [(MARKED, 0)] * 2
    (tmp_path / "rank0" / name).write_text(json.dumps({KEYS[0]: MARK[0]}))  # the others are measured
    (first, fits, _), (other, *_) = ranks.run(2, measured, folders)
    assert first == other
    assert (first.all_to_all_bandwidth, fits) == (2e3, 1)
    assert 1e6 < first.all_gather_bandwidth < 1e12
    (tmp_path / "rank0" / name).unlink()  # now only rank 1 has a file: both measure
    (first, *_), (other, *_) = results = ranks.run(2, measured, folders)
    assert [r[1] for r in results] == [1, 1]
    assert first == other
    assert first.flops > 1e8


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"attention": 1}', "\x00"])
def test_a_corrupt_file_is_measured_again(ranks: Ranks, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "rank0"
    folder.mkdir()
    with mock.patch.object(measure, "_measured", {}):
        name = ranks.run(2, path_of)[0]
    (folder / name).write_text(text)
    (first, fits, files), (other, _, _) = ranks.run(2, measured, two(tmp_path))
    assert first == other
    assert fits == 1
    assert list(json.loads((folder / files[0]).read_text())) == KEYS


def path_of() -> str:
    return measure._cache_path(resolve(worker.mesh(), None).process_group, DEVICE).name


def test_values_out_of_range_are_no_constants(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    for wrong in ([-1.0, 1.0], [1.0, 0.0], [1.0, "fast"], [1.0], [1.0, math.nan], 1.0):
        path.write_text(json.dumps({"a": wrong}))
        assert measure._read_cache(path) == {}
    lines = {"a": LatencyBandwidth(1.0, 2.0), "b": LatencyBandwidth(0.0, math.inf)}
    measure._write_cache(path, lines)
    assert measure._read_cache(path) == lines  # infinite values too
    assert os.listdir(tmp_path) == ["lines.json"]


@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"a": [1{"0" * 400}, 1]}}', '{"a": [' * 40_000, "\ud800"])
def test_no_text_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.json"
    path.write_text(text, errors="surrogatepass")
    assert measure._read_cache(path) == {}


def test_nothing_is_left_where_the_file_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.mkdir()
    assert measure._read_cache(path) == {}
    measure._write_cache(path, {"a": LatencyBandwidth(1.0, 2.0)})
    assert os.listdir(tmp_path) == ["lines.json"]


def test_a_disk_that_refuses(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (first, fits, _), (other, _, _) = ranks.run(2, measured, [str(file / "no"), str(file / "no")])
    assert first == other
    assert fits == 1


def test_without_processes() -> None:
    assert measure.machine(Group(1, ""), DEVICE, _never_called) == CPU
    assert measure.machine(Group(8, ""), DEVICE, _never_called) == CPU
    assert measure.machine(Group(8, ""), torch.device("cuda"), _never_called) == GPU


def test_constants_from_lines() -> None:
    lines = [LatencyBandwidth(1e-4, 2e9), LatencyBandwidth(2e-4, 1e9), LatencyBandwidth(1e-10, 1e10 / 300)]
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
    assert asdict(measure.fit_constants(lines, 4, 4, CPU)) == pytest.approx(asdict(expected))
    nodes = measure.fit_constants(lines, 4, 2, GPU)  # two thirds of what a rank sends leave its node
    assert nodes.inter_node_bandwidth == pytest.approx(2e9 * 2 / 3)
    assert nodes.all_to_all_bandwidth == GPU.all_to_all_bandwidth
    assert nodes.seconds("all_to_all", 8.0, 4) == pytest.approx(1e-4 + collective_bytes("all_to_all", 8.0, 4) / 2e9)
    noisy = measure.fit_constants([*lines[:2], LatencyBandwidth(0.0, 1e10)], 4, 4, CPU)
    assert (noisy.flops, noisy.block_keys) == (CPU.flops, CPU.block_keys)


@pytest.mark.parametrize("keys", [0, 300])
def test_attention_times_are_a_line(keys: float) -> None:
    """Seconds per FLOP over one over the length: from zero on the rate, and how much more short ones take."""
    measurement = measure._measure_attention(DEVICE)
    rates = [1e-10 * (1 + keys / length) for length in measurement.sizes]
    flops = [2 * 4 * 64 * length**2 for length in measurement.sizes]
    line = fit_line(*zip(*(measurement.point(s, r * f) for s, r, f in zip(measurement.sizes, rates, flops))))
    found = measure.fit_constants([LatencyBandwidth(1.0, 1.0), LatencyBandwidth(1.0, 1.0), line], 4, 4, CPU)
    assert (found.flops, found.block_keys) == (pytest.approx(1e10), pytest.approx(keys, abs=1e-3))
