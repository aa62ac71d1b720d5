"""Check a long training run for leaks: memory, threads, open files, keys in the group's store, process groups.

    python benchmarks/long_run.py [--ranks 2] [--steps 1000] [--lengths 200]

A small decoder trains on ranks of this machine over sequences of many lengths in turn. The table has the
counts of rank 0 and of the last rank after each tenth of the steps. After the first tenth, the graphs are compiled, and
no count may grow.
Writes benchmarks/results/checks/long_run.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring.gloo_ranks import joined
from measuring.tables import commit, markdown, processor
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from models import DecoderLM

VOCAB = 256
SHORTEST = 32  # tokens
STRIDE = 7  # between the lengths of two steps, of which all come where the number of lengths is no multiple
TENTHS = 10
HEADER = ["rank", "steps", "RSS, MiB", "threads", "open files", "keys of the store", "process groups", "graphs"]
RESULTS = Path(__file__).parent / "results" / "checks" / "long_run.md"


def held(store: dist.Store) -> list[int]:
    """Return the counts of this process, in the order of the table's columns."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return [
        pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
        len(list(Path("/proc/self/task").iterdir())),
        len(list(Path("/proc/self/fd").iterdir())),
        store.num_keys(),
        dist.distributed_c10d.get_pg_count(),
        counters["stats"]["unique_graphs"],
    ]


def train(rank: int, given: argparse.Namespace, folder: str) -> None:
    with joined(rank, given.ranks, folder) as store:
        mesh = init_device_mesh("cpu", (given.ranks,), mesh_dim_names=("sp",))
        torch.manual_seed(0)
        model = DecoderLM(layers=2)
        run = torch.compile(model, backend="sp", dynamic=True, options={"mesh": mesh, "cost": {}})
        optimizer = torch.optim.AdamW(model.parameters())
        rows = []
        for step in range(given.steps):
            length = SHORTEST + step * STRIDE % given.lengths
            ids = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(step))
            run(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % (given.steps // TENTHS) == 0:
                rows.append([rank, step + 1, *held(store)])
        torch.save(rows, f"{folder}/{rank}.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lengths", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (given, folder), nprocs=given.ranks)
        rows = [row for rank in (0, given.ranks - 1) for row in torch.load(f"{folder}/{rank}.pt")]
    table = Table(*HEADER)
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)
    about = [
        "# A long run",
        f"- {time.strftime('%Y-%m-%d')}, {processor()}; torch {torch.__version__}; commit {commit()}",
        f"- `python benchmarks/long_run.py --ranks {given.ranks} --steps {given.steps} --lengths {given.lengths}`: "
        f"{time.monotonic() - begun:.0f} s",
    ]
    given.output.write_text("\n\n".join([about[0], "\n".join(about[1:]), markdown(table)]) + "\n")


if __name__ == "__main__":
    main()
