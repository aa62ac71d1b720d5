"""The examples run."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_single_passes():
    out = run("examples/run_passes.py")
    assert "== AttendWithUlysses: rewrote the graph" in out
    losses = re.findall(r"rank \d: (\S+) +one device: (\S+)", out)
    assert len(losses) == 2
    assert all(found == expected for found, expected in losses)


def torchrun(processes, *command):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port)]
    return run(*launch, *command)


def errors_of(output: str) -> list[float]:
    """Return the errors that an example prints at the ends of its lines."""
    return [float(error) for error in re.findall(r"error .*: ([\d.]+e[-+]\d+)$", output, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_data_and_sequence(kind):
    out = torchrun(4, "examples/data_and_sequence.py", kind)
    assert kind in out
    assert errors_of(out)


@pytest.mark.slow
def test_functional_attention():
    assert len(errors_of(torchrun(2, "examples/manual_attention.py"))) == 3


@pytest.mark.slow
def test_attention_strategies():
    out = run("examples/attention_strategies.py")
    assert out.count("chosen: fastest") == 2
    assert re.search(r"\b64 ranks .*\b16 .*heads", out)
    assert re.findall(r"(\w+) +on 4 ranks", out) == ["ulysses", "ring", "hybrid", "gather", "auto"]


# Each compares some values directly, and one compiled model with a single device.
SCANS = {"moe_routing": 4, "packed_sequences": 5, "cumulative_masks": 6, "batch_slicing": 3, "distributed_softmax": 3}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANS)
def test_scans_alone(name):
    out = run(f"examples/{name}.py")
    assert out.count("4 ranks ") == len(errors_of(out)) == SCANS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "moe_routing" else pytest.mark.slow) for n in SCANS])
def test_scans_of_processes(name):
    out = torchrun(2, f"examples/{name}.py")
    assert out.count("2 ranks ") == len(errors_of(out)) == SCANS[name]


@pytest.mark.slow
def test_demo(tmp_path):
    """`make demo` in small."""
    small = ["--seq", "256", "--steps", "2", "--dim", "32", "--layers", "1", "--chart", str(tmp_path / "chart.png")]
    out = run("examples/train_lm.py", *small)
    assert re.search(r"gradient .*: [\d.]+e[-+]\d+$", out, re.MULTILINE)
    assert (tmp_path / "chart.png").exists()


ALL, STRIDE = "checkpoints and tiles and offload", 32
"""Of the frontier's ways the one with all features, and what divides the lengths that it tries."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_frontier(ranks, tmp_path):
    """Tiles take longer sequences into the same memory, checkpoints beside them longer ones, and the host still longer."""
    chart, ways = tmp_path / "frontier.png", ("as written", "tiles", "checkpoints and tiles", ALL)
    out = run("examples/frontier.py", *f"--limit 32 --ranks {ranks} --chart {chart} --ways".split(), *ways)
    rows = re.findall(rf"([\w ]+), {ranks} ranks: ([\d,]+) tokens; predicted ([\d,]+)", out)
    tokens, likely = ({row[0]: int(row[i].replace(",", "")) for row in rows} for i in (1, 2))
    assert tokens[ALL] > tokens["checkpoints and tiles"] > tokens["tiles"] > 2 * tokens["as written"]
    for name, found in tokens.items():
        assert 0.9 * likely[name] - STRIDE < found < 1.05 * likely[name]
    assert chart.exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [4, 2])
def test_expert_parallel(processes):
    assert errors_of(torchrun(processes, "examples/expert_parallel.py"))
