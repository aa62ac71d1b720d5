"""A Llama of 8B at a million tokens on 8 ranks: bytes that live along Inductor's wrappers of a GPU, and predicted.

    python tests/support/cuda/live_bytes.py [--layers 1 2 3] [--offload never 0.3] [--attention ulysses] [--tiles 16]

No GPU is needed: the wrappers run on fake tensors (`steps.py`). Prints each row, and writes
benchmarks/results/live_bytes.md once all are there. Half a minute a row.
"""

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

RANKS, DEPTH, ROOM = 8, 32, 80e9
PATIENCE = 1800.0
"""Seconds for one step on a machine that has other work."""
WORDS = """# Live bytes of an 8B model at a million tokens on 8 ranks

`python tests/support/cuda/live_bytes.py`, {today}: a Llama (4096 wide, 32 heads over 8, an MLP of 14336, a vocabulary of
128256, bfloat16), each block checkpointed, {attention}, {tiles} tiles, 1,048,576 tokens. GB of a rank at the peak. "live":
all values and gradients along the wrappers that Inductor writes for an H100, on fake tensors, forward and backward one
behind the other; attention's backward has its workspace as PyTorch's source has it, and tiles are run one by one.
"predicted": by `explain(memory=True)` on the meta device. "values": without gradients of parameters, which FSDP takes
away layer by layer. "never" is told of a device as small as {depth} layers leave of one, so that attention is computed again
in the backward; where what is kept may wait on the host, its results are kept. {depth} layers: live is what the last layer
adds, times the others; predicted is `explain` of all {depth} on a device of {room} GB; both beside FSDP's shares of parameters,
gradients and AdamW's state, and the weights and gradients that it has whole.

"""


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def main() -> None:
    # Not above: the process that has the absent GPU imports this file, and torch only behind the guard.
    from measuring.tables import markdown
    from rich.console import Console
    from rich.table import Table
    from support.cuda.guard import built
    from support.cuda.llama import LLAMA_8B, OF_MANY, compiled_step, predicted
    from support.cuda.worker import AbsentGpu
    from torch._inductor.cpp_builder import get_cpp_compiler

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--offload", nargs="+", default=["never", "0.3"])
    parser.add_argument("--attention", default="ulysses")
    parser.add_argument("--tiles", type=int, default=16)
    args = parser.parse_args()
    names = "live", "predicted", "off by", "live values", "predicted values", "off by", "kept", "on the host"
    table = Table("offload", "layers", *names)
    console, state = Console(width=160), LLAMA_8B.state(RANKS)

    def add(*row: str) -> None:
        table.add_row(*row)
        console.print(*row)

    with tempfile.TemporaryDirectory() as folder:
        gpu = AbsentGpu(str(built(Path(folder), get_cpp_compiler())), PATIENCE)
        for share in args.offload:
            ways: dict[str, Any] = {"attention": args.attention, "tiles": args.tiles}
            options = ways | (OF_MANY if share == "never" else {"offload": float(share)})
            live = []
            for layers in args.layers:
                of = LLAMA_8B.of(layers)
                step, likely = gpu.run(compiled_step, of, RANKS, **options), predicted(of, RANKS, **options)
                live.append(step.values)
                numbers = *beside(step.peak, likely.values), *beside(step.values, likely.peak_without_gradients)
                add(share, str(layers), *numbers, gb(step.kept), gb(step.host))
            if share == "never" and len(live) > 1:
                each = (live[-1] - live[-2]) / (args.layers[-1] - args.layers[-2])
                whole = live[-1] + (DEPTH - args.layers[-1]) * each + state
                numbers = beside(whole, predicted(LLAMA_8B, RANKS, **ways).peak_without_gradients + state)
                add(share, f"{DEPTH} and {gb(state)} of state", "", "", "", *numbers, "", "")
                console.print(f"{gb(whole)} of {gb(ROOM)} GB")
        gpu.close()
    about = {"today": date.today(), "attention": args.attention, "tiles": args.tiles, "depth": DEPTH, "room": gb(ROOM)}
    (ROOT / "benchmarks/results/live_bytes.md").write_text(WORDS.format(**about) + markdown(table) + "\n")


def beside(live: float, predicted: float) -> tuple[str, str, str]:
    return gb(live), gb(predicted), f"{predicted / live - 1:+.1%}"


if __name__ == "__main__":
    main()
