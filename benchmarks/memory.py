"""Peak memory of a training step: the demo on one device and on ranks, and what `explain` predicts of ten models.

python benchmarks/memory.py           activations of the demo's model; takes the flags of examples/train_lm.py
python benchmarks/memory.py --plan    predicted against measured tensors of a step, to results/memory_plan.md
python benchmarks/memory.py --tiles 16 [TOKENS]    work in tiles beside DeepSpeed's (see peers.py), to results/tiles.md
"""

import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from compare import memory_table, run_alone, run_ranks
from measuring.steps import CASES, RANKS, compare
from measuring.tables import markdown, processor
from measuring.tiled_ways import VOCAB, compared
from train_lm import parse_args

RESULTS = Path(__file__).parent / "results" / "memory_plan.md"
COMPILERS = ("aot_eager", "inductor")
WORDS = f"""# Memory of a training step, predicted and measured

`python benchmarks/memory.py --plan`: bytes of all tensors that a step of one of {RANKS} ranks makes, gradients
included, at their peak, on a CPU and one thread. Predicted by `explain(memory=True)`, measured by every allocation of a
warm step of the first and the last rank, whose others are torch's "fake" group; the larger counts. Parameters, inputs
and the optimizer's state are known beforehand and not counted. `aot_eager` runs each operator by itself; `inductor`
fuses them, which is modelled.

"""

TILES = """# Head and MLPs in tiles beside peers

`python benchmarks/memory.py --tiles {tiles} {tokens}` on {processor}: one process and thread, float32, {tokens} tokens,
a vocabulary of {vocab}, 4 layers of 256, every block checkpointed, {tiles} tiles where there are any. Peak of all
tensors that a step makes, gradients included; CPU seconds: medians of turns in one run. DeepSpeed: its TiledMLP and
TiledFusedLogitsLoss. By hand: chunks, each computed again.

"""


def predictions(console: Console) -> None:
    table = Table("model", "compiler", "predicted MB", "measured MB", "off by")
    for compiler in COMPILERS:
        for name in CASES:
            predicted, measured = compare(name, compiler)
            numbers = f"{predicted / 1e6:.2f}", f"{measured / 1e6:.2f}", f"{predicted / measured - 1:+.1%}"
            table.add_row(name, compiler, *numbers)
            console.print(name, compiler, *numbers)
            RESULTS.write_text(WORDS + markdown(table) + "\n")


def beside_peers(console: Console, tiles: int = 16, tokens: int = 32768) -> None:
    torch.set_num_threads(1)
    table = compared(tokens, tiles, repeats=3)
    console.print(table)
    words = TILES.format(tiles=tiles, tokens=tokens, processor=processor(), vocab=VOCAB)
    RESULTS.with_name("tiles.md").write_text(words + markdown(table) + "\n")


def main() -> None:
    console = Console()
    if "--plan" in sys.argv[1:]:
        predictions(console)
        return
    if "--tiles" in sys.argv[1:]:
        beside_peers(console, *map(int, sys.argv[sys.argv.index("--tiles") + 1 :]))
        return
    args = parse_args()
    args.steps = 1  # the measured step comes after it
    console.print(memory_table(run_alone(args, console), run_ranks(args, console)))


if __name__ == "__main__":
    main()
