"""Measure the peak memory of a training step: the demo on a single device and on ranks, and models against `explain`.

python benchmarks/memory.py           activations of the demo's model; accepts the flags of examples/train_lm.py
python benchmarks/memory.py --plan [--only "Llama|experts"] [--compilers inductor]
                                       predicted and measured tensors of a step, to results/memory/memory_plan.md
python benchmarks/memory.py --tiles 16 [--tokens 2048] [--ranks 1 2 4] [--repeats 3] [--only "ours|DeepSpeed"]
                                       tiles of this package and of DeepSpeed (see peers.py), to results/memory/tiles.md
python benchmarks/memory.py --growth   peak by tokens and compile time by tiles, to results/memory/tiles_growth.md
"""

import argparse
import re
import sys
from collections.abc import Sequence
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from compare import memory_table, run_alone, run_ranks
from measuring import shards
from measuring.steps import CASES, compare
from measuring.tables import commit, markdown, processor
from measuring.tiled_variants import VOCAB, Run, compared, compile_seconds, growth
from train_lm import parse_args

RESULTS = Path(__file__).parent / "results" / "memory" / "memory_plan.md"
COMPILERS = ("aot_eager", "inductor")
COLUMNS = "model", "ranks", "compiler", "predicted MB", "measured MB", "off by", "made"
WORDS = """# Memory of a training step, predicted and measured

`python benchmarks/memory.py --plan`, {}.

Peak bytes of all tensors that a training step of one rank allocates, gradients included, on a CPU with one thread.
"Predicted" is the estimate of `explain(memory=True)`. "Measured" is the peak of all allocations of a step after
warm-up, the larger one of the first and the last rank. Torch's "fake" process group stands in for the other ranks.
Parameters, inputs and optimizer state are not counted, nor are values offloaded to the host. `aot_eager` runs each
operator by itself; `inductor` fuses operators, and the prediction models that.

"""
SHARDS = f"""

## With FSDP2

A decoder on {shards.RANKS} Gloo ranks, `fully_shard` of each block and of the model, each part compiled by itself. Peak
bytes of a rank in a step after warm-up, everything included: shards of parameters and of AdamW's state, parameters and
gradients that FSDP2 has gathered, values, gradients, inputs. Predicted by `explain(memory=True,
state="sharded")` of the whole model.

"""
"""Introduction of the second table."""

TILES = f"""# Head and MLPs in tiles, of this and of other packages

float32, a vocabulary of {VOCAB}, 4 layers of 256, every block checkpointed, one thread per rank. Peak bytes of all
tensors that a step allocates, gradients included, on the rank with the highest peak. CPU seconds: the sum over ranks,
exchanges included, median of several steps; the first step records allocations instead. Gradients are compared with
those of the first row. "DeepSpeed" is its TiledMLP, TiledFusedLogitsLoss and DistributedAttention; it sums gradients
in place. "Handwritten" recomputes chunks, and exchanges heads for rows. Both are eager; ours is compiled by Inductor.

"""
"""Introduction, before a section for each length and number of ranks."""


def predictions(console: Console, only: str, compilers: Sequence[str]) -> None:
    """Make the rows that a regular expression finds by these compilers, and leave others as they were made."""
    ranks = {name: str(case.ranks) for name, case in CASES.items()} | dict.fromkeys(shards.WAYS, str(shards.RANKS))
    known = _rows_of(RESULTS.read_text()) if RESULTS.exists() else {}
    for compiler, (names, made) in product(compilers, ((CASES, compare), (shards.WAYS, shards.compare))):
        for name in filter(partial(re.search, only), names):
            predicted, measured = made(name, compiler)
            numbers = f"{predicted / 1e6:.2f}", f"{measured / 1e6:.2f}", f"{predicted / measured - 1:+.1%}"
            known[name, compiler] = [name, ranks[name], compiler, *numbers, str(date.today())]
            console.print(*known[name, compiler])
            tables = []
            for rows in (CASES, shards.WAYS):
                tables.append(Table(*COLUMNS))
                for key in product(COMPILERS, rows):
                    if key[::-1] in known:
                        tables[-1].add_row(*known[key[::-1]])
            RESULTS.write_text(WORDS.format(processor()) + SHARDS.join(map(markdown, tables)) + "\n")


def _rows_of(text: str) -> dict[tuple[str, str], list[str]]:
    """The cells of rows that were made before, by name and compiler."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {(row[0], row[2]): row for row in rows if row[2:3] and row[2] in COMPILERS}


def tiles_of_peers(console: Console, given: argparse.Namespace) -> None:
    path = RESULTS.with_name("tiles.md")
    for ranks in given.ranks:
        title = f"{given.tokens} tokens, {ranks} rank{'s' if ranks > 1 else ''}"
        table = compared(Run(given.tokens, given.tiles, ranks, given.repeats, given.only))
        console.print(title, table)
        command = f"--tiles {given.tiles} --tokens {given.tokens} --ranks {ranks} --repeats {given.repeats}"
        about = f"`python benchmarks/memory.py {command}`, {date.today()}, {processor()}, commit {commit()}"
        _, *others = path.read_text().split("\n## ") if path.exists() else [""]
        others = [text.strip() for text in others if not text.startswith(f"{title}\n")]
        sections = [*others, f"{title}\n\n{about}\n\n{markdown(table)}"]
        path.write_text(TILES + "\n\n".join(f"## {text}" for text in sorted(sections, key=_numbers)) + "\n")


GROWTH = """# Peak against tokens, and compile time against tiles

`python benchmarks/memory.py --growth`, {about}. The model of `tiles.md`: a vocabulary of 32,768, 4 layers of 256,
float32, blocks checkpointed, one device, compiled by Inductor without caches. The first table has the CPU seconds of a
first step minus those of a second step. The second table has the peak of all tensors of a step after warm-up, gradients
included, for the model without attention, which tiles do not affect. "bytes per token" is the increase between the two
lengths. "tiled bytes" are those minus those of the last row, which no number of tiles reduces. With few tiles the peak
is in the head, with more tiles in a block's backward, where more values are not tiled; the ratio in the last column is
therefore larger than the number of tiles.

"""


def growing(console: Console) -> None:
    text = GROWTH.format(about=f"{date.today()}, {processor()}, commit {commit()}")
    for made in (compile_seconds, growth):
        table = made()
        console.print(table)
        text += markdown(table) + "\n\n"
        RESULTS.with_name("tiles_growth.md").write_text(text.rstrip() + "\n")


def _numbers(section: str) -> list[int]:
    return [int(word) for word in section.splitlines()[0].split() if word.isdigit()]


def main() -> None:
    console = Console()
    if "--plan" in sys.argv[1:]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--plan", action="store_true")
        parser.add_argument("--only", default="", help="a regular expression of rows")
        parser.add_argument("--compilers", nargs="+", choices=COMPILERS, default=COMPILERS)
        given = parser.parse_args()
        predictions(console, given.only, given.compilers)
        return
    if "--growth" in sys.argv[1:]:
        growing(console)
        return
    if "--tiles" in sys.argv[1:]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--tiles", type=int, required=True)
        parser.add_argument("--tokens", type=int, default=2048)
        parser.add_argument("--ranks", type=int, nargs="+", default=[1])
        parser.add_argument("--repeats", type=int, default=3)
        parser.add_argument("--only", default="", help="a regular expression of variants")
        tiles_of_peers(console, parser.parse_args())
        return
    args = parse_args()
    args.steps = 1  # the measured step comes after it
    console.print(memory_table(run_alone(args, console), run_ranks(args, console)))


if __name__ == "__main__":
    main()
