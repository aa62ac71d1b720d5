"""How long a sequence gets: the longest that trains within a limit on each process, with and without what saves memory.

    python examples/frontier.py [--limit 64] [--ranks 1 2 4]       a table, and frontier.png

A small decoder with a large vocabulary trains on ranks of this machine. Once it is compiled, each process may take so
many MiB more and no byte beyond (RLIMIT_DATA, of Linux); sequences grow step by step until a rank dies of it, which
lifts its limit to say so, and the others are ended. A step that takes longer than five minutes ends its rank, too, with
a traceback of every thread. What `explain` predicts is drawn beside it.

On a CPU the host's memory is the device's. To draw what `offload` gives where it is another, what waits there is in
mapped files here, which the limit does not count: all else is under it, as it would be on a device.
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
"""The first length, of what is predicted; each next one, of the one before; and what divides all."""
SHORT = 256  # tokens of the step that compiles
LONGEST_STEP = 300  # seconds; no rank waits longer for one that is stuck
LOOKED = 8192, 16384  # lengths at which memory is predicted; it grows evenly between and beyond
ROOM = 0.2  # of a number in the chart, as a logarithm
OF_MEMORY = "memory", "alloc", "MemoryError"


@dataclass(frozen=True)
class Way:
    """again: are blocks computed again in the backward? tiles: of the head and the MLPs. offload: waits on the host."""

    again: bool
    tiles: int | str
    offload: float | str = "never"


FEATURES = "checkpoints", "tiles", "offload"


def way_of(features: tuple[str, ...]) -> Way:
    tiles, offload = 32 if "tiles" in features else "never", 1.0 if "offload" in features else "never"
    return Way("checkpoints" in features, tiles, offload)


SETS = [features for n in range(len(FEATURES) + 1) for features in combinations(FEATURES, n)]
WAYS = {" and ".join(features) or "as written": way_of(features) for features in SETS}


class Again(nn.Module):
    """A block that keeps its input, and computes the rest again."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False)


def model_of(way: Way) -> nn.Module:
    torch.manual_seed(0)
    model = DecoderLM(vocab=VOCAB, dim=DIM, layers=LAYERS, heads=HEADS)
    if way.again:
        model.blocks = nn.ModuleList(map(Again, model.blocks))
    return model


def options(way: Way) -> dict:
    return {"tiles": way.tiles, "offload": way.offload, "compiler": "aot_eager", "cost": {}}


def host_apart(folder: str) -> torch.library.Library:
    """While this is held, copies that wait on the host are mapped files, memory that no limit on data counts."""
    from sp_compile.lowering import offload_ops as offload  # noqa: F401  (registers the operator)

    def to_host(x: Tensor) -> Tensor:
        path = Path(folder) / f"host{os.getpid()}"
        host = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype)
        path.unlink()  # it lives until nobody maps it
        return host.as_strided(x.shape, x.stride()).copy_(x)

    library = torch.library.Library("sp", "IMPL")
    library.impl("offload", to_host, "CPU")
    return library


def text(tokens: int) -> Tensor:
    return torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def predicted(way: Way, ranks: int, limit: int) -> int:
    """Tokens whose step takes so many bytes, by two looks at shorter ones. Nothing runs."""
    model, looks = model_of(way), {}
    for tokens in LOOKED:
        report = sp_compile.explain(model, text(tokens), text(tokens), sp=ranks, memory=True, **options(way))
        looks[tokens] = report.step.values
    (x, low), (y, high) = looks.items()
    return int(x + (limit - low) * (y - x) / (high - low))


def longest(way: Way, ranks: int, limit: int, start: int) -> int:
    """Tokens of the last step that all ranks did within the limit. start: of the first, if it fits."""
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
    """One rank's life, which ends when its memory does."""
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
                    # Without it there may be no memory to open a file, and others would wait for this rank.
                    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                    Path(f"{folder}/error{rank}").write_text(str(error) or type(error).__name__)
                finally:
                    os._exit(1)  # what others would be told is not the point


def lengths(start: int) -> Iterator[int]:
    tokens = start
    while True:
        yield max(STRIDE, tokens // STRIDE * STRIDE)
        tokens = max(int(tokens * GROWS), tokens + STRIDE)


def limit_memory(nbytes: int) -> None:
    """Of this process: what it has now, and so many bytes more."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + nbytes, resource.RLIM_INFINITY))


def draw(found: dict[str, dict[int, tuple[int, int]]], limit: int, path: Path) -> None:
    """Tokens against ranks, a line for each way: measured, and predicted."""
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
        if all(abs(math.log(last[1] / one)) > ROOM for one in written):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=64, help="MiB of a process, once it is compiled")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--chart", type=Path, default=Path("frontier.png"))
    args = parser.parse_args()
    # Every freed tensor goes back to the system, or what a shorter sequence left would count; so does what MKL has kept
    # for the next product of its kind.
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
