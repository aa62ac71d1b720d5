"""CPU time of sequence-parallel attention: all ranks together over one device, forward and backward.

    python benchmarks/attention.py [--seq 8192] [--ranks 2 4] [--rounds 5]

A block of attention with its projections and a norm, causal, compiled with backend="sp" for every way of attention,
against backend="inductor" on one process, the ops of sp_compile.functional, and modules written by hand (both in eager
mode; handwritten.py). The variants take turns, in every round the same, and the medians over the rounds of
(CPU time summed over the ranks) / (CPU time of one device in the same round) are printed. All processes share one
core, so that no variant is slowed by more neighbours than another. Writes benchmarks/results/attention_cpu.md.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parent))

from counting import Counts, count
from handwritten import UlyssesAttention, ZigzagRingAttention, zigzag
from tables import markdown, processor

RESULTS = Path(__file__).parent / "results" / "attention_cpu.md"
TARGETS = {"ulysses": 1.05, "ring": 1.15, "gather": 1.10}
TOLERANCE = 1e-3  # float32 sums in another order
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], None]


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """x (B, S, heads * head_dim) -> a loss to which every position contributes. `attend` takes (B, S, H, D)."""

    def __init__(self, heads: int, head_dim: int, attend: Attend = whole_attention) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads, self.attend = heads, attend
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (project(h).unflatten(-1, (self.heads, -1)) for project in (self.q, self.k, self.v))
        return (x + self.out(self.attend(q, k, v).flatten(2))).square().mean()


@dataclass(frozen=True)
class Case:
    """what: "one device", or the way of attention; how: "compiled", "op" (functional), or "by hand"."""

    what: str
    how: str
    ranks: int


def cases(worlds: list[int], heads: int) -> list[Case]:
    out = [Case("one device", "compiled", 1)]
    for n in worlds:
        kinds = ["ulysses", "ring", "gather"] + (["hybrid"] if n > 3 and n % 2 == 0 else [])
        out += [Case(kind, "compiled", n) for kind in kinds if kind != "ulysses" or heads % n == 0]
        out += [Case(kind, how, n) for kind in ("ulysses", "ring") for how in ("op", "by hand")]
    return out


# On a rank.


def build(case: Case, args: argparse.Namespace, rank: int, group: dist.ProcessGroup) -> tuple[Block, Step]:
    """The model with its weights, and what runs one step of it on this rank."""
    torch.manual_seed(0)
    model = Block(args.heads, args.head_dim)
    x = torch.randn(1, args.seq, args.heads * args.head_dim)
    if case.what == "one device":
        return model, _step(torch.compile(model, backend="inductor"), x)
    if case.how == "compiled":
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",))
        options = {"attention": case.what, "mesh": mesh}
        return model, _step(torch.compile(model, backend="sp", options=options), x)
    model.attend = by_hand(case, group)
    shard = zigzag(x, rank, case.ranks) if case.what == "ring" else x.chunk(case.ranks, 1)[rank].contiguous()
    return model, _local_step(model, shard, group)


def by_hand(case: Case, group: dist.ProcessGroup) -> Attend:
    if case.how == "by hand":
        return UlyssesAttention(group) if case.what == "ulysses" else ZigzagRingAttention(group)
    from sp_compile.functional import ring_attention, ulysses_attention

    op, layout = (ulysses_attention, "contiguous") if case.what == "ulysses" else (ring_attention, "zigzag")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return op(q, k, v, mesh=group, layout=layout, is_causal=True, check=False).transpose(1, 2)

    return attend


def _step(model: nn.Module, x: Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


def _local_step(model: nn.Module, shard: Tensor, group: dist.ProcessGroup) -> Step:
    """A shard's part of the mean; loss and gradients summed over the ranks, the gradients as one tensor."""

    def step() -> None:
        model.zero_grad()
        loss = model(shard) / group.size()
        loss.backward()
        dist.all_reduce(loss.detach(), group=group)
        parameters = list(model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=group)
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = grad.view_as(p)

    return step


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    """A rank's life: build every case, run the rounds, save seconds, counts and errors."""
    # Its kernels as events of the profiler, and as many variants of one model as there are cases.
    torch._inductor.config.cpp.enable_kernel_profile = True
    torch._dynamo.config.recompile_limit = 64
    torch.set_num_threads(1)
    world = max(args.ranks)
    init = {"init_method": f"file://{folder}/store", "timeout": timedelta(minutes=30)}
    dist.init_process_group("gloo", rank=rank, world_size=world, **init)
    groups = {n: dist.new_group(range(n)) for n in {1, *args.ranks}}
    steps: dict[Case, Step] = {}
    errors: dict[Case, float] = {}
    expected: list[Tensor] = []
    for case in args.cases:
        dist.barrier()
        if rank < case.ranks:
            model, steps[case] = build(case, args, rank, groups[case.ranks])
            steps[case]()
            grads = [p.grad.clone() for p in model.parameters()]
            expected = expected or grads
            errors[case] = max(_difference(a, b) for a, b in zip(expected, grads))
    seconds = [{case: _turn(steps.get(case)) for case in args.cases} for _ in range(args.rounds)]
    counts: dict[Case, Counts] = {}
    for case, step in steps.items():
        counts[case] = count(step) if rank == 0 else Counts(step() or {})
    torch.save({"seconds": seconds, "counts": counts, "errors": errors}, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _difference(expected: Tensor, found: Tensor) -> float:
    return ((expected - found).abs().max() / expected.abs().max()).item()


def _turn(step: Step | None) -> tuple[float, float]:
    """CPU seconds of this process in one step, all its threads, and those of them in the kernel (sockets, new pages).

    The other ranks have a turn of the same case, or wait.
    """
    dist.barrier()
    if step is None:
        return 0.0, 0.0
    start, before = time.process_time(), os.times().system
    step()
    return time.process_time() - start, os.times().system - before


# In the main process.


def measure(args: argparse.Namespace) -> list[dict]:
    """What each rank saved."""
    with tempfile.TemporaryDirectory(prefix="attention-") as folder:
        torch.multiprocessing.spawn(work, (args, folder), nprocs=max(args.ranks))
        return [torch.load(f"{folder}/rank{r}.pt", weights_only=False) for r in range(max(args.ranks))]


def share_one_core() -> None:
    """This process and its children; hardware threads of one core slow each other down, and CPU time with it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def totals(found: list[dict], which: int = 0) -> dict[Case, list[float]]:
    """case -> in each round, the CPU seconds of all ranks (which = 1: in the kernel)."""
    rounds = list(zip(*(rank["seconds"] for rank in found)))
    return {case: [sum(rank[case][which] for rank in ranks) for ranks in rounds] for case in rounds[0][0]}


def ratios(found: list[dict], over: Case) -> dict[Case, list[float]]:
    """case -> in each round, its CPU time over all ranks / that of `over`."""
    seconds = totals(found)
    return {case: [a / b for a, b in zip(of, seconds[over])] for case, of in seconds.items()}


def time_table(found: list[dict]) -> Table:
    table = Table("ranks", "attention", "how", "CPU / one device", "rounds", "CPU s", "kernel s", "target", "")
    seconds, kernel = totals(found), totals(found, 1)
    for case, values in ratios(found, Case("one device", "compiled", 1)).items():
        median = statistics.median(values)
        target = TARGETS.get(case.what) if case.how == "compiled" else None
        judged = ["", ""] if target is None else [f"{target:.2f}", "met" if median <= target else "MISSED"]
        spread = f"{min(values):.3f} to {max(values):.3f}"
        spent = [f"{statistics.median(of[case]):.2f}" for of in (seconds, kernel)]
        table.add_row(str(case.ranks), case.what, case.how, f"{median:.3f}", spread, *spent, *judged)
    return table


def hand_table(found: list[dict]) -> Table:
    """Ours against the hand-written module of the same kind: time as the median of ratios in a round, and counts."""
    table = Table(
        "ranks", "attention", "how", "CPU / by hand", "collectives", "which", "copies", "copies, ms"
    )
    counts: dict[Case, Counts] = found[0]["counts"]
    for hand in (case for case in counts if case.how == "by hand"):
        against = ratios(found, hand)
        for how in ("compiled", "op", "by hand"):
            case = Case(hand.what, how, hand.ranks)
            if case not in counts:
                continue
            c = counts[case]
            which = ", ".join(f"{number} {name}" for name, number in sorted(c.collectives.items()))
            row = [f"{statistics.median(against[case]):.3f}", str(sum(c.collectives.values())), which]
            table.add_row(str(case.ranks), case.what, how, *row, str(c.copies), f"{c.copy_ms:.0f}")
    return table


def report(args: argparse.Namespace, tables: list[Table]) -> str:
    facts = [
        f"- {date.today()}, {processor()}, {os.cpu_count()} logical CPUs; all ranks on one of them, one thread each",
        f"- torch {torch.__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}",
        f"- `python benchmarks/attention.py {' '.join(sys.argv[1:])}".rstrip() + "`",
        f"- S = {args.seq}, {args.heads} heads of {args.head_dim}, batch 1, float32, causal; {args.rounds} rounds",
        "- CPU seconds summed over the ranks, forward and backward; medians of the ratios within a round",
        "- collectives and copies: of one step of rank 0, from its profile",
    ]
    return "\n\n".join(["# Attention on CPU", "\n".join(facts), *map(markdown, tables)]) + "\n"


def show_heaviest(console: Console, counts: dict[Case, Counts]) -> None:
    for case, c in counts.items():
        console.print(f"\n{case.ranks} ranks, {case.what}, {case.how}: CPU ms of rank 0, by what takes most")
        for name, milliseconds in c.heaviest.items():
            console.print(f"  {milliseconds:9.1f}  {name}", highlight=False, markup=False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="kinds of attention to run")
    parser.add_argument("--profile", action="store_true", help="show what takes rank 0's time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.cases = [
        c for c in cases(args.ranks, args.heads) if c.ranks == 1 or c.what in (args.only or [c.what])
    ]
    return args


def main() -> None:
    args = parse_args()
    share_one_core()
    console = Console()
    found = measure(args)
    errors = [(error, case) for rank in found for case, error in rank["errors"].items()]
    worst, where = max(errors, key=lambda pair: pair[0])
    if worst > TOLERANCE:
        raise SystemExit(f"{where}: the gradients differ from one device's by {worst:.1e} of the largest")
    tables = [time_table(found), hand_table(found)]
    console.print(*tables)
    if args.profile:
        show_heaviest(console, found[0]["counts"])
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(report(args, tables))
    console.print(f"written: {args.output}")


if __name__ == "__main__":
    main()
