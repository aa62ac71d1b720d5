"""Measure the agreement of the ranks before every call, next to one all-gather of Gloo of the same number of bytes.

    python benchmarks/agreement.py      writes benchmarks/results/agreement.md

The program computes nothing, so that only the agreement is measured: its inputs are two rows of tokens and 300
weights. Calls with and without it and plain all-gathers take turns; medians over the rounds, of the slowest rank. Then
CPU time alone: of the checksums of weights, which are compared once in `check_every` calls.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring.gloo_ranks import joined
from measuring.tables import markdown, processor
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.lowering.collectives.checksums import checksum
from sp_compile.runtime.fingerprint import ProgramDigest
from sp_compile.runtime.guard import GuardedProgram, ProgramInfo
from sp_compile.runtime.input_checks import ComparedInputs
from sp_compile.runtime.settings_digest import settings_fields

HEADER = 3  # words a rank sends on a call
WIDTH, LAYERS = 64, 75
SHARE = 0.005  # of a step: limit for the comparison of all weights, by which `check_every` was chosen
RESULTS = Path(__file__).parent / "results" / "agreement.md"


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH * k)) for _ in range(LAYERS) for k in (3, 1, 4, 4)]
    return [*torch.randint(1000, (2, 1, 4096)).unbind(), *weights]


def ways() -> dict[str, Callable[[], object]]:
    args, group = inputs(), dist.group.WORLD
    names = [f"x{i}" for i in range(len(args))]
    every, tokens = frozenset(names), frozenset(names[:2])
    program = GuardedProgram(
        lambda *xs: xs[0],
        ranks_of(group),
        ProgramInfo(options=settings_fields({}), check_every=1 << 20),  # after the first call no more
        ProgramDigest(),
        ComparedInputs(names, every, tokens),
    )
    mine = torch.zeros(HEADER, dtype=torch.int64)
    out = [torch.zeros(HEADER, dtype=torch.int64) for _ in range(group.size())]
    return {
        "agreed call": lambda: program(*args),
        "all-gather alone": lambda: dist.all_gather(out, mine),
        "call alone": lambda: program.run(*args),
    }


def measure(rank: int, world: int, folder: str, rounds: int, calls: int) -> None:
    with joined(rank, world, folder):
        found = ways()
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(rounds):
            for name, one in found.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    one()
                times[name].append((time.perf_counter() - start) / calls * 1e3)
        torch.save({name: statistics.median(each[1:]) for name, each in times.items()}, f"{folder}/{rank}.pt")


def cpu_seconds(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    table = Table(
        "ranks", "call alone", "all-gather alone", "agreed call", "added to the all-gather", title="ms a call"
    )
    for world in given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (world, folder, given.rounds, given.calls), nprocs=world)
            each = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]
        alone, gather, agreed = (max(one[k] for one in each) for k in ("call alone", "all-gather alone", "agreed call"))
        table.add_row(str(world), f"{alone:.4f}", f"{gather:.3f}", f"{agreed:.3f}", f"{agreed - alone - gather:.3f}")
    console = Console()
    console.print(table)
    x = torch.randn(1 << 24)
    seconds = cpu_seconds(lambda: checksum(x))
    each, every = 1e9 / x.numel() * seconds, SPConfig.check_every
    sums = (
        f"checksums of a billion weights: {each:.1f} CPU s, once in {every} calls: {each / every * 1e3:.0f} ms a call"
    )
    console.print(sums)
    a = torch.randn(1024, 1024)
    rate = 2 * 1024**3 / statistics.median(cpu_seconds(lambda: a @ a) for _ in range(8))
    tokens = each / every / SHARE * rate / (6 * 1e9)  # a step takes 6 operations a weight and token
    bound = f"that is {SHARE:.1%} of a step on {tokens:.0f} tokens a rank, at {rate / 1e9:.0f} GFLOP a CPU s"
    console.print(bound)
    about = [
        f"- {date.today()}, {processor()}, {os.cpu_count()} CPUs for all ranks; torch {torch.__version__}, Gloo",
        f"- `python benchmarks/agreement.py`: ms a call, the slowest rank's medians of {given.rounds} rounds",
        f"- {sums}",
        f"- {bound}",
    ]
    parts = ["\n".join(about), markdown(table)]
    given.output.write_text("\n\n".join(["# Ranks agree before a call", *parts]) + "\n")


if __name__ == "__main__":
    main()
