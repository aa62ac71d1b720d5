"""Compare two all_reduces over the axes of a mesh with one over all its ranks, and check the cost model's decision.

    python benchmarks/merge_reductions.py [--mesh 2 2] [--rounds 60]

Ranks are Gloo processes of one thread. First, declare_groups fits the constants of the cost model. Then both programs
run in turn for every size, and the slowest rank of each round counts. Regret is the relative extra time of the decision
over the better program. Writes benchmarks/results/merge_reductions_cpu.md.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parent))

from measuring.gloo_ranks import joined
from measuring.tables import commit, markdown

RESULTS = Path(__file__).parent / "results" / "merge_reductions_cpu.md"
TARGET = 0.10
SMALL, SMALL_ROUNDS = (1 << 20, 5)  # bytes below which processes that wait for each other vary most; times the rounds
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Row:
    """Measured and predicted seconds of both programs for a size, and the decision to merge."""

    nbytes: int
    apart: float
    merged: float
    predicted_apart: float
    predicted_merged: float
    merges: bool

    @property
    def regret(self) -> float:
        """Return the relative extra time of the decision over the better program."""
        return (self.merged if self.merges else self.apart) / min(self.merged, self.apart) - 1


def program(nbytes: int, names: list[str]) -> GraphModule:
    """Return the graph of all-reduces of x (`nbytes` of float32) over one axis after the other."""

    def fn(x: Tensor) -> Tensor:
        for name in names:
            x = c10d.wait_tensor(c10d.all_reduce(x, "sum", name))
        return x

    return make_fx(fn, tracing_mode="fake")(torch.ones(nbytes // 4))


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Measure all cases on one rank."""
    from sp_compile import declare_groups
    from sp_compile.passes.collectives.merge.merge_reductions import MergeReductions
    from sp_compile.passes.cost.collective_time import collective_bytes

    with joined(rank, args.mesh[0] * args.mesh[1], folder):
        mesh = init_device_mesh("cpu", tuple(args.mesh), mesh_dim_names=("a", "b"))
        axes = [group.group_name for group in mesh.get_all_groups()]
        os.environ["SP_COMPILE_CACHE_DIR"] = f"{folder}/cache"
        groups = declare_groups(mesh)
        rows = []
        for nbytes in args.sizes:
            apart, merged, chosen = (program(nbytes, axes) for _ in range(3))
            MergeReductions(groups, "always", strict=False)(merged)
            merges = MergeReductions(groups, strict=False)(chosen).modified
            rounds = args.rounds * (SMALL_ROUNDS if nbytes < SMALL else 1)
            times = in_turn([apart, merged], torch.ones(nbytes // 4), rounds)
            (union,) = set(groups.members) - set(axes)
            sent = {name: collective_bytes("all_reduce", nbytes, groups.size(name)) for name in (*axes, union)}
            predicted = sum(groups.lines[axis].seconds(sent[axis]) for axis in axes)
            rows.append(Row(nbytes, *times, predicted, groups.lines[union].seconds(sent[union]), merges))
        if rank == 0:
            lines = [groups.lines[name] for name in (*axes, union)]
            torch.save((rows, lines), f"{folder}/result.pt")


def in_turn(jobs: list[GraphModule], x: Tensor, rounds: int) -> list[float]:
    """The slowest rank's seconds, the mean of the middle half of the rounds; the first one does not count."""
    from sp_compile.passes.cost.measure import mean_of_middle

    found = torch.zeros(rounds + 1, len(jobs), dtype=torch.float64)
    for times in found:
        for i, job in enumerate(jobs):
            dist.barrier()
            start = time.perf_counter()
            job(x)
            times[i] = time.perf_counter() - start
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return mean_of_middle(found[1:]).tolist()


def table(rows: list[Row]) -> Table:
    out = Table("bytes", "sequential ms", "merged ms", "ratio", "predicted", "", "decided", "regret")
    for row in rows:
        out.add_row(
            f"{row.nbytes / 1024:g} KB",
            f"{row.apart * 1e3:.2f}",
            f"{row.merged * 1e3:.2f}",
            f"{row.apart / row.merged:.2f}",
            f"{row.predicted_apart * 1e3:.2f}",
            f"{row.predicted_merged * 1e3:.2f}",
            "merged" if row.merges else "sequential",
            f"{row.regret:.1%}",
        )
    return out


def verdicts(rows: list[Row]) -> Table:
    """The regret of the decisions, and of two fixed ones."""
    out = Table("policy", "worst regret", "mean regret", "target", "")
    policies = {
        "auto": [row.regret for row in rows],
        "always": [row.merged / min(row.merged, row.apart) - 1 for row in rows],
        "never": [row.apart / min(row.merged, row.apart) - 1 for row in rows],
    }
    for name, regrets in policies.items():
        judged = (f"{TARGET:.0%}", "met" if max(regrets) <= TARGET else "MISSED") if name == "auto" else ("", "")
        out.add_row(name, f"{max(regrets):.1%}", f"{statistics.mean(regrets):.1%}", *judged)
    return out


def fits(lines: list) -> Table:
    out = Table("communicator", "latency ms", "bandwidth MB/s")
    for name, line in zip(("axis a", "axis b", "both"), lines):
        out.add_row(name, f"{line.latency * 1e3:.2f}", f"{line.bandwidth / 1e6:.0f}")
    return out


def report(args: argparse.Namespace, tables: list[Table]) -> str:
    facts = [
        f"- {date.today()}, {os.cpu_count()} vCPU, {args.mesh[0]} x {args.mesh[1]} Gloo processes of one thread",
        f"- commit {commit()}",
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        f"- `python benchmarks/merge_reductions.py {' '.join(sys.argv[1:])}".rstrip() + "`",
        f"- float32; {args.rounds} rounds, the slowest rank of each, the mean of their middle half",
        "- predicted: sequential and merged, in ms",
        "- the constants of the cost model were fitted before, in the same run",
    ]
    return "\n\n".join(["# Merged all_reduces on CPU", "\n".join(facts), *map(markdown, tables)]) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs=2, default=[2, 2])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << k for k in range(10, 25)], help="bytes")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="merge-") as folder:
        torch.multiprocessing.spawn(work, (args, folder), nprocs=args.mesh[0] * args.mesh[1])
        rows, lines = torch.load(f"{folder}/result.pt", weights_only=False)
    tables = [table(rows), verdicts(rows), fits(lines)]
    Console().print(*tables)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(report(args, tables))


if __name__ == "__main__":
    main()
