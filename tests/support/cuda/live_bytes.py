"""Compare the predicted memory of a Llama of 8B at a million tokens on 8 ranks with Inductor's wrappers of a GPU.

    python tests/support/cuda/live_bytes.py [--layers 1 2 3] [--offload never 0.3] [--attention ulysses] [--tiles 16]

No GPU is needed: the wrappers run on fake tensors (`steps.py`). Prints each row, and writes
benchmarks/results/memory/live_bytes.md at the end. A row takes half a minute.
"""

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

RANKS, DEPTH, DEVICE_BYTES = 8, 32, 80e9
PATIENCE = 1800.0
"""Seconds for one step on a busy machine."""
WORDS = """# Live bytes of an 8B model at a million tokens on 8 ranks

`python tests/support/cuda/live_bytes.py`, {today}: a Llama (4096 wide, 32 heads over 8, an MLP of 14336, a vocabulary of
128256, bfloat16), each block checkpointed, {attention}, {tiles} tiles, 1,048,576 tokens. GB of a rank at the peak.

- "live": all values and gradients of the wrappers that Inductor generates for an H100, run on fake tensors. Forward and
  backward run in sequence, and tiles one by one. Attention's backward has the workspace of PyTorch's source.
- "predicted": by `explain(memory=True)` on the meta device
- "values": without gradients of parameters, which FSDP frees layer by layer
- "never": the memory of the device is set as small as with {depth} layers, so that attention is recomputed in the
  backward. With offloading, its results are saved.
- {depth} layers: "live" is extrapolated by the last layer; "predicted" is `explain` of all {depth} on a device of
  {device} GB. Both include FSDP's shards of parameters, gradients and AdamW's state, and its unsharded weights and
  gradients.

"""


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f}"


def main() -> None:
    # Imported here: the process of the absent GPU imports this file, and must load the guard before torch.
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
                numbers = *compared(step.peak, likely.values), *compared(step.values, likely.peak_without_gradients)
                add(share, str(layers), *numbers, gb(step.kept), gb(step.host))
            if share == "never" and len(live) > 1:
                each = (live[-1] - live[-2]) / (args.layers[-1] - args.layers[-2])
                total = live[-1] + (DEPTH - args.layers[-1]) * each + state
                numbers = compared(total, predicted(LLAMA_8B, RANKS, **ways).peak_without_gradients + state)
                add(share, f"{DEPTH} and {gb(state)} of state", "", "", "", *numbers, "", "")
                console.print(f"{gb(total)} of {gb(DEVICE_BYTES)} GB")
        gpu.close()
    about = {"today": date.today(), "attention": args.attention, "tiles": args.tiles, "depth": DEPTH}
    about["device"] = gb(DEVICE_BYTES)
    (ROOT / "benchmarks/results/memory/live_bytes.md").write_text(WORDS.format(**about) + markdown(table) + "\n")


def compared(live: float, predicted: float) -> tuple[str, str, str]:
    """Return both numbers in GB, and the relative error of the prediction."""
    return gb(live), gb(predicted), f"{predicted / live - 1:+.1%}"


if __name__ == "__main__":
    main()
