"""The benchmarks of attention run, at sizes whose times mean nothing; that they compare right values, they check."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *flags: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, f"benchmarks/{script}", *flags]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_attention(tmp_path: Path) -> None:
    report = tmp_path / "attention.md"
    tiny = ["--seq", "64", "--heads", "4", "--head-dim", "8", "--ranks", "2", "--rounds", "1"]
    run("attention.py", *tiny, "--output", str(report))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.read_text().splitlines()]
    collectives = {tuple(row[1:3]): int(row[4]) for row in rows if len(row) == 7 and row[0] == "2"}
    assert set(collectives) == {
        (kind, how) for kind in ("ulysses", "ring") for how in ("compiled", "op", "handwritten")
    }
    for kind in ("ulysses", "ring"):
        assert collectives[kind, "compiled"] < collectives[kind, "handwritten"]


@pytest.mark.slow
def test_gpu_attention(tmp_path: Path) -> None:
    run("gpu/gpu_attention.py", "--device", "cpu", "--small", "--output", str(tmp_path))
    (report,) = tmp_path.glob("attention_*.md")
    text = report.read_text()
    assert all(f"| {way} | both |" in text for way in ("ulysses", "ring", "gathered"))


@pytest.mark.slow
def test_scans(tmp_path: Path) -> None:
    report = tmp_path / "scans.md"
    run("scans.py", "--small", "--length", "64", "--rounds", "1", "--output", str(report))
    text = report.read_text()
    parts = ("sum along another dim", "sum along the last dim", "others", "recurrence", "torch.compile", "(S, 8)")
    assert all(f"\n| {part}" in text for part in parts)
    assert "| target | 4, slope 1.05: met |" in text


@pytest.mark.slow
def test_gpu_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "tiny values are right" in run("gpu/gpu_scans.py")


@pytest.mark.slow
def test_merge_reductions(tmp_path: Path) -> None:
    report = tmp_path / "merge.md"
    run("merge_reductions.py", "--sizes", "1024", "65536", "--rounds", "3", "--output", str(report))
    text = report.read_text()
    assert text.count("| sequential |") + text.count("| merged |") == 2
    assert all(f"\n| {policy} |" in text for policy in ("auto", "always", "never"))


@pytest.mark.slow
def test_gpu_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "copies are right" in run("gpu/gpu_collectives.py", "--smoke")


@pytest.mark.slow
def test_gpu_models(tmp_path: Path) -> None:
    report = tmp_path / "models.md"
    run("gpu/gpu_models.py", "--device", "cpu", "--small", "--only", "^decoder, ulysses$", "--output", str(report))
    assert "| decoder, ulysses |" in report.read_text()


@pytest.mark.slow
def test_plans() -> None:
    """The busiest rank's work in the balanced layout is within its bound for every kind of documents."""
    rows = [line.split("│") for line in run("plans.py", "--tokens", "131072", "--documents", "30").splitlines()]
    balanced = [row for row in rows if len(row) > 5 and row[3].strip() == "balanced"]
    assert len(balanced) == 6
    assert all(float(row[4]) <= 1.05 for row in balanced), balanced


@pytest.mark.slow
@pytest.mark.parametrize(("call", "report", "rows"), [("nccl", "nccl.md", 8), ("million", "one_rank.md", 1)])
def test_gpu_all_on_a_cpu(tmp_path: Path, call: str, report: str, rows: int) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DEVICE": "cpu",
        "OUT": str(tmp_path),
        "PYTHON": sys.executable,
    }
    command = ["bash", "benchmarks/gpu/gpu_all.sh", call]
    # The script cuts long lines of a log, possibly inside of a character.
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, errors="replace", timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    text = (tmp_path / report).read_text()
    assert "commit" in text.partition("|")[0]
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(cells) == 1 + rows
    if call == "nccl":
        assert all(row[2] == "True" for row in cells[1:])


def test_gpu_all_names_its_calls() -> None:
    done = subprocess.run(["bash", "benchmarks/gpu/gpu_all.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "values|nccl|million|times" in done.stderr
