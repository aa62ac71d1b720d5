"""Measure recurrences of matrices in models of transformers: compile time at two lengths, and the work of all ranks.

    python benchmarks/measuring/scans/recurrences.py [--only compile|ranks|unrolled] [--models qwen3_next mamba2]
        [--compiler aot_eager]

The first table has the nodes of the graph of a rank of 2, and the CPU seconds that compilation adds to a first step of
one layer, at 512 and at 8192 tokens; they should be equal, because no graph depends on the length. The second one has
the CPU seconds of a step of one layer, forward and backward, at 8192 tokens: on a single device, and on all ranks
together. The third one compares a single device with torch.compile in a process that never imports sp_compile, where
Inductor compiles the unrolled loop of transformers, at 2048 tokens. Each number is from a process of its own, with one
thread and without caches. Writes results/recurrences_cpu.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from measuring.gloo_ranks import joined
from measuring.tables import commit, markdown, processor
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

RESULTS = Path(__file__).parents[2] / "results" / "recurrences_cpu.md"
LENGTHS = 512, 8192
RANKS = 2, 4
UNROLLED_LENGTH = 2048  # tokens of the comparison with the unrolled loop, whose compilation grows with the length
STEPS = 7
COMPILER = "SP_BENCHMARK_COMPILER"  # the environment variable with the compiler of the processes that are measured


def qwen3_next() -> nn.Module:
    """Gated delta rule: one decay a head."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    return Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=256, num_hidden_layers=4, **sizes, **dims), 0)


def mamba2() -> nn.Module:
    """Mamba-2: one decay a head, no delta rule."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    return Mamba2Mixer(Mamba2Config(hidden_size=256, num_heads=8, head_dim=64, state_size=64, n_groups=1), 0)


MODELS = {"qwen3_next": qwen3_next, "mamba2": mamba2}


class Layer(nn.Module):
    """One layer and a loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = MODELS[name]()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).float().pow(2).mean()


def cpu_seconds() -> float:
    """CPU time so far of this process and of the children it has waited for."""
    return sum(os.times()[:4])


def step_seconds(name: str, length: int, ours: bool = True) -> tuple[float, float]:
    """CPU seconds that compiling adds to the first step, and those of the fastest step."""
    model = Layer(name)
    x = torch.randn(1, length, 256)
    if ours:
        import sp_compile  # noqa: F401

        compiler = os.environ.get(COMPILER, "inductor")
        compiled = torch.compile(model, backend="sp", options={"seq_dims": {"x": 1}, "compiler": compiler})
    else:
        compiled = torch.compile(model)
    seconds = []
    for _ in range(1 + STEPS):
        start = cpu_seconds()
        compiled(x).backward()
        seconds.append(cpu_seconds() - start)
    return seconds[0] - min(seconds[1:]), min(seconds[1:])


def count_nodes(name: str, length: int) -> int:
    """Number of nodes of the graph of a rank of 2."""
    import sp_compile

    program = torch.export.export(Layer(name), (torch.randn(1, length, 256),))
    return len(sp_compile.parallelize(program, sp=2, seq_dims={"x": 1}).graph.nodes)


def measure(name: str, length: int, ranks: int) -> tuple[float, float]:
    """The largest compile time of a rank, and the sum of the steps of all ranks, from new processes.

    ranks: 0 for torch.compile without sp_compile.
    """
    off = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measure", name, str(length), str(ranks), folder]
        options: dict[str, Any] = {"env": {**os.environ, **off}, "stdout": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen([*command, str(rank)], **options) for rank in range(max(ranks, 1))]
        printed = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit("a rank failed")
    times = [tuple(map(float, text.splitlines()[-1].split())) for text in printed]
    return max(compiling for compiling, _ in times), sum(step for _, step in times)


def print_rank(name: str, length: str, ranks: str, folder: str, rank: str) -> None:
    """Print the seconds of one rank."""
    torch.set_num_threads(1)
    if int(ranks) < 2:
        print(*step_seconds(name, int(length), ours=ranks == "1"))
        return
    with joined(int(rank), int(ranks), folder):
        print(*step_seconds(name, int(length)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", choices=("compile", "ranks", "unrolled"))
    parser.add_argument("--compiler", default="inductor", help="of ours; the unrolled loop is always Inductor's")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault(COMPILER, args.compiler)
    if args.measure:
        print_rank(*args.measure)
        return
    console = Console()
    tables = []
    if args.only in (None, "compile"):
        heads = (f"{n} tokens, {what}" for what in ("nodes", "CPU s") for n in LENGTHS)
        table = Table("layer", *heads, "ratio", title="nodes of a rank of 2, and compile time of 1 rank")
        for name in args.models:
            nodes = (str(count_nodes(name, length)) for length in LENGTHS)
            short, long = (measure(name, length, 1)[0] for length in LENGTHS)
            table.add_row(name, *nodes, f"{short:.1f}", f"{long:.1f}", f"{long / short:.2f}")
        tables.append(table)
    if args.only in (None, "unrolled"):
        heads = (f"{who}, {what}" for what in ("compile s", "step s") for who in ("ours", "unrolled"))
        table = Table("layer", *heads, "steps, ours / unrolled", title=f"a single device, {UNROLLED_LENGTH} tokens")
        for name in args.models:
            ours, unrolled = (measure(name, UNROLLED_LENGTH, ranks) for ranks in (1, 0))
            cells = [f"{ours[0]:.1f}", f"{unrolled[0]:.1f}", f"{ours[1]:.3f}", f"{unrolled[1]:.3f}"]
            table.add_row(name, *cells, f"{ours[1] / unrolled[1]:.2f}")
        tables.append(table)
    if args.only in (None, "ranks"):
        length = LENGTHS[-1]
        table = Table("layer", "ranks", "CPU s a step", "ratio", title=f"steps of {length} tokens, all ranks together")
        for name in args.models:
            single = measure(name, length, 1)[1]
            table.add_row(name, "1", f"{single:.2f}", "1.00")
            for ranks in RANKS:
                seconds = measure(name, length, ranks)[1]
                table.add_row(name, str(ranks), f"{seconds:.2f}", f"{seconds / single:.2f}")
        tables.append(table)
    lines = [f"- {date.today()}, {processor()}, torch {torch.__version__}, commit {commit()}"]
    lines += [
        f"- `python benchmarks/measuring/scans/recurrences.py {' '.join(sys.argv[1:])}`",
        f"- load {os.getloadavg()[0]:.1f}",
        "",
    ]
    for table in tables:
        console.print(table)
        lines += [f"## {table.title}", "", markdown(table), ""]
    RESULTS.write_text("\n".join(["# Recurrences", "", *lines]))


if __name__ == "__main__":
    main()
