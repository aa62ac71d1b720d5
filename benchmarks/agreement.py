"""Measure the checks of the ranks before every call, and simulate them for many ranks.

    python benchmarks/agreement.py      writes benchmarks/results/agreement.md

The program computes nothing, so that only the checks are measured: its inputs are two rows of tokens and 300 weights.
Calls with and without checks, the exchange of a check alone, and an all-gather of Gloo of the same number of bytes take
turns; medians over the calls, of the slowest rank. CPU time is that of all threads of a rank. Then CPU time alone: of
the checksums of weights, which are compared once in `check_every` calls. The simulation (`measuring/exchange_model.py`)
takes its CPU time a message from the measured exchange of two ranks, and is compared with the measured ones of more. A
step of 100 graphs is simulated with the measured CPU time of a call.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring.exchange_model import (
    DelayModel,
    StepModel,
    exposed_microseconds,
    exposed_step_microseconds,
    ring_distances,
    round_distances,
)
from measuring.gloo_ranks import joined
from measuring.tables import describe_run, markdown
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.lowering.collectives.checksums import checksum
from sp_compile.runtime.control.channel import channel_of
from sp_compile.runtime.fingerprint import ProgramDigest
from sp_compile.runtime.guard import GuardedProgram, ProgramInfo
from sp_compile.runtime.input_checks import ComparedInputs
from sp_compile.runtime.settings_digest import settings_fields

HEADER = 3  # words a rank sends on a call
WIDTH, LAYERS = 64, 75
SHARE = 0.005  # of a step: limit for the comparison of all weights, by which `check_every` was chosen
NETWORK = 25.0  # us, latency of a TCP message between hosts of a data center, with waking the receiving process
SIMULATED_RANKS = (8, 64, 512)
FORMS = {"all-gather of Gloo": ring_distances, "exchange": round_distances}
DEVICE_TIMES = (0, 500, 1000, 2000, 5000)  # us, of a graph on the device; 0 if it waits for the host
WAYS = ("call alone", "all-gather of Gloo", "exchange", "agreed call")
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
    program(*args)  # connects
    channel = channel_of(ranks_of(group))
    assert channel is not None
    assert channel.links is not None
    mine, links = torch.zeros(HEADER, dtype=torch.int64), channel.links
    out = [torch.zeros(HEADER, dtype=torch.int64) for _ in range(group.size())]
    return {
        "call alone": lambda: program.run(*args),
        "all-gather of Gloo": lambda: dist.all_gather(out, mine),
        "exchange": lambda: links.are_all_equal(1, False, lambda: None),
        "agreed call": lambda: program(*args),
    }


def measure(rank: int, world: int, folder: str, rounds: int, calls: int) -> None:
    """Save the medians of wall time a call, over all calls, and of CPU time a call, over the rounds, in us."""
    with joined(rank, world, folder):
        found = ways()
        walls: dict[str, list[float]] = {name: [] for name in found}
        cpus: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(rounds):
            for name, one in found.items():
                dist.barrier()
                cpu, last = time.process_time(), time.perf_counter()
                for _ in range(calls):
                    one()
                    now = time.perf_counter()
                    walls[name].append((now - last) * 1e6)
                    last = now
                cpus[name].append((time.process_time() - cpu) / calls * 1e6)
        medians = {name: (statistics.median(walls[name][calls:]), statistics.median(cpus[name][1:])) for name in found}
        torch.save(medians, f"{folder}/{rank}.pt")


def measured(world: int, rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """Return wall and CPU time of each way in us a call, of the slowest rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (world, folder, rounds, calls), nprocs=world)
        each = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(world)]
    return {name: (max(one[name][0] for one in each), max(one[name][1] for one in each)) for name in WAYS}


def simulation(found: dict[int, dict[str, tuple[float, float]]]) -> tuple[str, Table, Table]:
    """Return the delay model as text, exposed times of many ranks, and those of this machine next to measured ones.

    The model of this machine is fitted to the measured exchanges of two ranks: CPU time a message is half of the CPU
    time, and the latency is the rest of the wall time. Ranks share the cores.

    Args:
        found: `measured` by number of ranks, with an entry for 2.
    """
    # A rank of two sends one message and receives one. Gloo's threads may take more CPU time than wall time.
    cpus = {name: min(found[2][name]) / 2 for name in FORMS}
    far = Table("ranks", *(f"{name}, median (99 %)" for name in FORMS))
    # The same CPU time a message for both forms: that of the package's exchange, of which Gloo takes a multiple.
    network = DelayModel(NETWORK, cpus["exchange"])
    for n in SIMULATED_RANKS:
        results = [exposed_microseconds(n, distances(n), network) for distances in FORMS.values()]
        far.add_row(str(n), *(f"{median:,.0f} ({high:,.0f})" for median, high in results))
    near = Table("ranks", *(f"{name}, {kind}" for name in FORMS for kind in ("simulated", "measured")))
    for n in sorted(found):
        row = [str(n)]
        for name, distances in FORMS.items():
            latency = max(0.0, found[2][name][0] - 2 * cpus[name])
            here = DelayModel(latency, cpus[name], jitter=0.0, skew=0.0, cores=os.cpu_count())
            row += [f"{exposed_microseconds(n, distances(n), here)[0]:.0f}", f"{found[n][name][0]:.0f}"]
        near.add_row(*row)
    return network.description, far, near


def simulated_step(message: float, call: float) -> tuple[str, Table]:
    """Return the model of a step as text, and the exposed time of the checks of many ranks in ms a step.

    Args:
        message: CPU time of a message in us.
        call: CPU time of a call without its exchange in us.
    """
    network, steps = DelayModel(NETWORK, message), [StepModel(device, check=call) for device in DEVICE_TIMES]
    columns = ["device waits" if device == 0 else f"{device / 1e3:.1f} ms a graph" for device in DEVICE_TIMES]
    table = Table("ranks", "form", *columns)
    for n in SIMULATED_RANKS:
        for name, distances in FORMS.items():
            times = [exposed_step_microseconds(n, distances(n), network, step) / 1e3 for step in steps]
            table.add_row(str(n), name, *(f"{x:,.1f}" for x in times))
    return steps[0].description, table


def cpu_seconds(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    loads = [f"{os.getloadavg()[0]:.1f}"]
    found = {world: measured(world, given.rounds, given.calls) for world in given.ranks}
    loads.append(f"{os.getloadavg()[0]:.1f}")
    table = Table(
        "ranks", *WAYS, "added to the exchange", "CPU of the all-gather", "CPU of the exchange", "CPU of the call"
    )
    for world, each in found.items():
        wall = [each[name][0] for name in WAYS]
        cpu = [each[name][1] for name in WAYS[1:]]
        table.add_row(str(world), *(f"{x:.0f}" for x in [*wall, wall[3] - wall[2] - wall[0], *cpu]))
    console = Console()
    console.print(table)
    model, far, near = simulation(found)
    one = found[2]
    step, of_step = simulated_step(one["exchange"][1] / 2, one["agreed call"][1] - one["exchange"][1])
    console.print(model, far, near, step, of_step)
    x = torch.randn(1 << 24)
    seconds = cpu_seconds(lambda: checksum(x))
    each, every = 1e9 / x.numel() * seconds, SPConfig.check_every
    sums = (
        f"checksums of a billion weights: {each:.1f} CPU s, once in {every} calls: {each / every * 1e3:.0f} ms per call"
    )
    console.print(sums)
    a = torch.randn(1024, 1024)
    rate = 2 * 1024**3 / statistics.median(cpu_seconds(lambda: a @ a) for _ in range(8))
    tokens = each / every / SHARE * rate / (6 * 1e9)  # a step takes 6 operations a weight and token
    bound = f"this is {SHARE:.1%} of a step on {tokens:.0f} tokens per rank, at {rate / 1e9:.0f} GFLOP per CPU s"
    console.print(bound)
    about = [
        f"{describe_run('cpu')}, Gloo",
        f"- {os.cpu_count()} CPUs for all ranks; load {loads[0]} at the start, {loads[1]} at the end",
        "- `python benchmarks/agreement.py`: us per call, medians of the slowest rank",
        f"- {sums}",
        f"- {bound}",
    ]
    parts = [
        "\n".join(about),
        markdown(table),
        "## Exposed time of an exchange, simulated",
        f"us from the arrival of the last rank to the end of the slowest one. The delays of both forms: {model}.",
        markdown(far),
        "The same simulation with the delays of this machine, fitted to two ranks, next to the measured times in us:",
        markdown(near),
        "## Exposed time of a step of 100 graphs, simulated",
        f"ms that 200 checks, forward and backward, add to a step: {step}.",
        markdown(of_step),
    ]
    given.output.write_text("\n\n".join(["# Checks between ranks before a call", *parts]) + "\n")


if __name__ == "__main__":
    main()
