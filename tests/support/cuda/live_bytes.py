"""A Llama of 8B at a million tokens on 8 ranks: bytes that live along Inductor's wrappers of a GPU, and predicted.

    python tests/support/cuda/live_bytes.py [--layers 1 2 3] [--offload never 0.3] [--attention ulysses] [--tiles 16]

No GPU is needed: the wrappers run on fake tensors (`steps.py`). Writes benchmarks/results/live_bytes.md, anew with every
row. Minutes on an idle machine.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

RANKS, DEPTH, ROOM = 8, 32, 80e9
PATIENCE = 1800.0
"""Seconds for one step on a machine that has other work."""
WORDS = """# Live bytes of an 8B model at a million tokens on 8 ranks

`python tests/support/cuda/live_bytes.py`: a Llama (4096 wide, 32 heads over 8, an MLP of 14336, a vocabulary of 128256,
bfloat16), each block checkpointed, {attention}, {tiles} tiles, 1,048,576 tokens. GB of a rank at the peak. "live": all
values and gradients along the wrappers that Inductor writes for an H100, on fake tensors, forward and backward one
behind the other; attention's backward has its workspace as PyTorch's source has it, and tiles are run one by one.
"predicted": by `explain(memory=True)` on the meta device. "values": without gradients of parameters, which FSDP takes
away layer by layer. {depth} layers, where none waits on the host: what the last of these adds, times the others; then
FSDP's shares of parameters, gradients and AdamW's state, and the weights and gradients that it has whole.

"""


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def main() -> None:
    # Not above: the process that has the absent GPU imports this file, and torch only behind the guard.
    from measuring.tables import markdown
    from rich.console import Console
    from rich.table import Table
    from support.cuda.guard import built
    from support.cuda.llama import LLAMA_8B, compiled_step, predicted
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
    words = WORDS.format(attention=args.attention, tiles=args.tiles, depth=DEPTH)
    console, state = Console(width=160), LLAMA_8B.state(RANKS)

    def add(share: str, layers: str, *numbers: str) -> None:
        table.add_row(share, layers, *numbers)
        (ROOT / "benchmarks/results/live_bytes.md").write_text(words + markdown(table) + "\n")
        console.print(share, layers, *numbers)

    def off(found: float, measured: float) -> str:
        return f"{found / measured - 1:+.1%}"

    with tempfile.TemporaryDirectory() as folder:
        gpu = AbsentGpu(str(built(Path(folder), get_cpp_compiler())), PATIENCE)
        for share in args.offload:
            options: dict[str, Any] = {"attention": args.attention, "tiles": args.tiles}
            options["offload"] = share if share == "never" else float(share)
            found = []
            for layers in args.layers:
                of = LLAMA_8B.of(layers)
                live, step = gpu.run(compiled_step, of, RANKS, **options), predicted(of, RANKS, **options)
                peaks = live.peak, step.values
                values = live.values, max(point.nbytes - point.gradients for point in step.points())
                found.append(values)
                shown = [(gb(one), gb(two), off(two, one)) for one, two in (peaks, values)]
                add(share, str(layers), *shown[0], *shown[1], gb(live.kept), gb(live.host))
            if share == "never" and len(found) > 1:
                more = DEPTH - args.layers[-1]
                whole = [last + more * (last - before) + state for before, last in zip(found[-2], found[-1])]
                ends = f"{DEPTH} and {gb(state)} of state"
                add(share, ends, "", "", "", *map(gb, whole), off(whole[1], whole[0]), "", "")
                console.print(f"fits into {gb(ROOM)} GB: {whole[0] < ROOM}")
        gpu.close()


if __name__ == "__main__":
    main()
