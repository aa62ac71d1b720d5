"""Measure the longest sequence that trains within a memory limit, for several options.

    python examples/frontier.py [--limit 64] [--ranks 1 2 4]       a table, and frontier.png

A small decoder with a large vocabulary trains on ranks of this machine. After compilation, each process may allocate
a limited number of MiB more (RLIMIT_DATA, of Linux). Sequences grow step by step until a rank runs out of memory. That
rank removes its limit to write the error, and the others are terminated. A step of more than five minutes also
terminates its rank, with a traceback of every thread. The chart includes the predictions of `explain`.

On a CPU, host and device memory are the same. To show the effect of `offload` on a device, offloaded values are in
mapped files, which the limit does not count; all other memory is limited, as it would be on a device.
"""

import argparse
import ctypes
import faulthandler
import math
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import DecoderLM
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile

VOCAB, DIM, LAYERS, HEADS = 8192, 64, 2, 4
FIRST, GROWS, STRIDE = 0.88, 1.06, 32
"""First length as a share of the prediction; ratio of successive lengths; divisor of all lengths."""
SHORT = 256  # tokens of the step that compiles
LONGEST_STEP = 300  # seconds until a step is terminated
LOOKED = 8192, 16384  # lengths at which memory is predicted; it is linear in the length
LABEL_DISTANCE = 0.2  # minimum distance of labels in the chart, as a logarithm
OF_MEMORY = "memory", "alloc", "MemoryError"


@dataclass(frozen=True)
class Way:
    """A combination of options."""

    again: bool  # blocks are recomputed in the backward
    tiles: int | str  # of the head and the MLPs
    offload: float | str = "never"  # share of saved values in host memory


FEATURES = "checkpoints", "tiles", "offload"


def way_of(features: tuple[str, ...]) -> Way:
    """Return the options for a set of features."""
    tiles, offload = 32 if "tiles" in features else "never", 1.0 if "offload" in features else "never"
    return Way("checkpoints" in features, tiles, offload)


SETS = [features for n in range(len(FEATURES) + 1) for features in combinations(FEATURES, n)]
WAYS = {" and ".join(features) or "as written": way_of(features) for features in SETS}


class Again(nn.Module):
    """A block that saves only its input and recomputes the rest in the backward."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        """Run the block under a checkpoint."""
        return checkpoint(self.inside, x, use_reentrant=False)


def model_of(way: Way) -> nn.Module:
    """Return the model, with checkpoints if requested."""
    torch.manual_seed(0)
    model = DecoderLM(vocab=VOCAB, dim=DIM, layers=LAYERS, heads=HEADS)
    if way.again:
        model.blocks = nn.ModuleList(map(Again, model.blocks))
    return model


def options(way: Way) -> dict:
    """Return the options of the backend."""
    return {"tiles": way.tiles, "offload": way.offload, "compiler": "aot_eager", "cost": {}}


def host_apart(folder: str) -> torch.library.Library:
    """Store offloaded values in mapped files, which RLIMIT_DATA does not count.

    Returns the library; the replacement is active as long as it is referenced.
    """
    from sp_compile.lowering import offload_ops as offload  # noqa: F401  (registers the operator)

    def to_host(x: Tensor) -> Tensor:
        """Copy x to a mapped file."""
        path = Path(folder) / f"host{os.getpid()}"
        host = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype)
        path.unlink()  # it exists until it is unmapped
        return host.as_strided(x.shape, x.stride()).copy_(x)

    library = torch.library.Library("sp", "IMPL")
    library.impl("offload", to_host, "CPU")
    return library


def text(tokens: int) -> Tensor:
    """Return random tokens (1, tokens), int64."""
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def predicted(way: Way, ranks: int, limit: int) -> int:
    """Return the predicted length of the longest sequence, from the memory of two shorter ones."""
    model, looks = model_of(way), {}
    for tokens in LOOKED:
        report = sp_compile.explain(model, text(tokens), text(tokens), sp=ranks, memory=True, **options(way))
        looks[tokens] = report.step.values
    (x, low), (y, high) = looks.items()
    return int(x + (limit - low) * (y - x) / (high - low))


def longest(way: Way, ranks: int, limit: int, start: int) -> int:
    """Return the tokens of the last step that all ranks completed within the limit.

    start: the tokens of the first step.
    """
    with tempfile.TemporaryDirectory() as folder:
        world = mp.start_processes(
            train, (way, ranks, limit, start, folder), ranks, join=False, start_method="forkserver"
        )
        try:
            while not world.join():
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            words = " ".join([str(error), *(path.read_text() for path in Path(folder).glob("error*"))])
            if not any(word in words for word in OF_MEMORY):
                raise
        done = [path.read_text().split() for path in sorted(Path(folder).glob("done*"))]
    if len(done) < ranks or not all(done):
        if start <= STRIDE:
            raise SystemExit(f"not one step of {start} tokens on {ranks} ranks fits {limit >> 20} MiB")
        return longest(way, ranks, limit, start // 2)
    return min(int(steps[-1]) for steps in done)


def train(rank: int, way: Way, ranks: int, limit: int, start: int, folder: str) -> None:
    """Train on one rank, until its memory limit is reached."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=2),
    )
    model, _held = model_of(way), host_apart(folder)
    run = torch.compile(model, backend="sp", options=options(way))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: int) -> float:
        """Train one step and return the loss."""
        ids, labels = text(tokens), text(tokens)
        torch._dynamo.mark_dynamic(ids, 1)  # one program for every length
        torch._dynamo.mark_dynamic(labels, 1)
        loss = run(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for tokens in (SHORT, SHORT + STRIDE):
        step(tokens)
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)  # a handler in Python might never run
    limit_memory(limit)
    with Path(f"{folder}/done{rank}").open("w", buffering=1) as done:
        for tokens in lengths(start):
            signal.alarm(LONGEST_STEP)
            try:
                step(tokens)
                done.write(f"{tokens}\n")
            except BaseException as error:
                try:
                    # With the limit, opening a file may fail, and the other ranks would wait.
                    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    Path(f"{folder}/error{rank}").write_text(str(error) or type(error).__name__)
                finally:
                    os._exit(1)  # without messages to other ranks


def lengths(start: int) -> Iterator[int]:
    """Yield growing lengths."""
    tokens = start
    while True:
        yield max(STRIDE, tokens // STRIDE * STRIDE)
        tokens = max(int(tokens * GROWS), tokens + STRIDE)


def limit_memory(nbytes: int) -> None:
    """Limit the data of this process to its current size plus `nbytes`."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + nbytes, resource.RLIM_INFINITY))


def draw(found: dict[str, dict[int, tuple[int, int]]], limit: int, path: Path) -> None:
    """Draw tokens against ranks, measured and predicted, with a line for each combination."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(figsize=(7, 5.5), layout="constrained")
    written: list[int] = []
    for i, (name, of_ranks) in enumerate(sorted(found.items(), key=lambda one: -max(one[1].values())[0])):
        ranks = list(of_ranks)
        axes.plot(ranks, [made for made, _ in of_ranks.values()], "o-", color=f"C{i}", label=name)
        axes.plot(ranks, [likely for _, likely in of_ranks.values()], ":", color=f"C{i}")
        last = ranks[-1], of_ranks[ranks[-1]][0]
        if all(abs(math.log(last[1] / one)) > LABEL_DISTANCE for one in written):
            axes.annotate(f"{last[1]:,}", last, xytext=(6, 0), textcoords="offset points", va="center", color=f"C{i}")
            written.append(last[1])
    axes.plot([], [], "k:", label="predicted by explain")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="tokens of the longest sequence")
    axes.set_title(f"What trains in {limit >> 20} MiB a process")
    shown = sorted({ranks for of_ranks in found.values() for ranks in of_ranks})
    axes.set_xticks(shown, labels=shown)
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.15)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure all combinations, print a table, and draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=64, help="MiB of a process, once it is compiled")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--chart", type=Path, default=Path("frontier.png"))
    args = parser.parse_args()
    # Return every freed tensor to the system, so that memory of shorter sequences does not count; also disable MKL's
    # buffer cache.
    os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536", MKL_DISABLE_FAST_MM="1")
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.set_forkserver_preload(["torch", "sp_compile", "sp_compile.backend", "torch._dynamo", "models"])
    limit, console, found = args.limit << 20, Console(), {}
    table = Table("", *(f"{n} rank{'s' if n > 1 else ''}" for n in args.ranks), title=f"tokens in {args.limit} MiB")
    for name in args.ways:
        way, found[name] = WAYS[name], {}
        for ranks in args.ranks:
            likely = predicted(way, ranks, limit)
            made = longest(way, ranks, limit, int(FIRST * likely))
            found[name][ranks] = made, likely
            console.print(f"{name}, {ranks} ranks: {made:,} tokens; predicted {likely:,}", highlight=False)
        table.add_row(name, *(f"{made:,}" for made, _ in found[name].values()))
    console.print(table)
    draw(found, limit, args.chart)
    console.print(f"chart: {args.chart}")


if __name__ == "__main__":
    main()
