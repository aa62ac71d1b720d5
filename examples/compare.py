"""Run train_lm.py on a single device and on several ranks, and compare the results."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("train_lm.py")
TOLERANCE = 1e-3  # float32 sums differ in order; a wrong gradient differs by far more
MODEL_FLAGS = ("seq", "steps", "lr", "dim", "layers", "heads", "kv_heads")


def compare(args: argparse.Namespace) -> None:
    """Print losses, gradient difference, peak memory and the plan, and draw a chart.

    Exits with an error if the first step's gradients or the losses disagree.
    """
    console = Console()
    console.print(f"A {args.layers}-layer byte-level decoder, one sequence of {args.seq} bytes a step.\n")
    alone = run_alone(args, console)
    ranks = run_ranks(args, console)
    console.print(loss_table(alone, ranks))
    gradient = max(gradient_difference(alone, rank) for rank in ranks)
    console.print(f"largest relative gradient difference at step 1: {gradient:.1e}\n")
    console.print(memory_table(alone, ranks))
    if args.backend == "sp":
        explain_plan(args)
    draw(alone, ranks, args.chart)
    console.print(f"\nchart: {args.chart}")
    if max(gradient, loss_difference(alone, ranks)) > TOLERANCE:
        raise SystemExit(f"{len(ranks)} ranks disagree with one device by more than {TOLERANCE}")


def run_alone(args: argparse.Namespace, console: Console) -> dict:
    """Run the reference: torch.compile's default backend in one process."""
    command = [sys.executable, str(SCRIPT), "--alone", "--backend", "inductor"]
    return run(command, args, console, "one device")[0]


def run_ranks(args: argparse.Namespace, console: Console) -> list[dict]:
    """Run the training on several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    command = [sys.executable, *launcher, str(SCRIPT), "--backend", args.backend]
    return run(command, args, console, f"{args.ranks} ranks")


def run(command: list[str], args: argparse.Namespace, console: Console, title: str) -> list[dict]:
    """Run a training command, print its lines, and return the saved results of each rank."""
    flags = [f"--{f.replace('_', '-')}={v}" for f in MODEL_FLAGS if (v := getattr(args, f)) is not None]
    flags += ["--tie"] if args.tie else []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        with (
            console.status(f"{title}: compiling"),
            subprocess.Popen(
                [*command, *flags, "--save", folder], stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            for line in process.stdout or ():
                console.print(f"{title}: {line.rstrip()}", highlight=False, markup=False)
        if process.returncode:
            errors.seek(0)
            console.print("".join(errors.readlines()[-60:]), markup=False)
            raise SystemExit(f"{title}: training failed")
        console.print()
        return [torch.load(path) for path in sorted(Path(folder).glob("rank*.pt"))]


def gradient_difference(one: dict, other: dict) -> float:
    """Return the largest difference of a parameter's gradient, relative to its largest entry."""
    pairs = [(g, other["gradients"][name]) for name, g in one["gradients"].items()]
    return max(((g - h).abs().max() / g.abs().max()).item() for g, h in pairs)


def loss_difference(alone: dict, ranks: list[dict]) -> float:
    """Return the largest relative difference of any step's loss on any rank."""
    pairs = [(a, b) for rank in ranks for a, b in zip(alone["losses"], rank["losses"], strict=True)]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def loss_table(alone: dict, ranks: list[dict]) -> Table:
    """Return a table of the losses."""
    table = Table("step", "one device", f"{len(ranks)} ranks", "relative difference", title="loss")
    for step, (a, b) in enumerate(zip(alone["losses"], ranks[0]["losses"], strict=True), start=1):
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b) / abs(a):.1e}")
    return table


def memory_table(alone: dict, ranks: list[dict]) -> Table:
    """Return a table of the peak activation memory."""
    table = Table("", "MB", "share of a single device", title="peak activation memory of a step")
    table.add_row("one device", f"{alone['peak_bytes'] / 1e6:.1f}", "")
    for r, rank in enumerate(ranks):
        share = rank["peak_bytes"] / alone["peak_bytes"]
        table.add_row(f"rank {r} of {len(ranks)}", f"{rank['peak_bytes'] / 1e6:.1f}", f"{share:.2f}")
    return table


def explain_plan(args: argparse.Namespace) -> None:
    """Print the rewrites of this model and their cost. Needs no process group."""
    from train_lm import batches, build_model

    import sp_compile

    ids, labels = batches(1, args.seq, torch.device("cpu"))[0]
    print(sp_compile.explain(build_model(args), ids, labels, sp=args.ranks))


def draw(alone: dict, ranks: list[dict], path: Path) -> None:
    """Draw loss curves on the left, memory bars on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    steps = range(1, len(alone["losses"]) + 1)
    left.plot(steps, alone["losses"], linewidth=5, alpha=0.4, label="one device")
    left.plot(steps, ranks[0]["losses"], "k--", label=f"{len(ranks)} ranks")
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="The same loss")
    left.set_xticks(steps)
    left.legend()
    names = ["one device", *(f"rank {r}" for r in range(len(ranks)))]
    megabytes = [record["peak_bytes"] / 1e6 for record in (alone, *ranks)]
    right.bar_label(right.bar(names, megabytes, color=["C0", *["0.3"] * len(ranks)]), fmt="%.0f")
    right.set(ylabel="MB", title="Peak activation memory of a step")
    figure.savefig(path, dpi=150)
    plt.close(figure)
