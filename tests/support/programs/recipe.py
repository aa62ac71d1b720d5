"""Runs the first program of a page of docs/ and keeps what came of it: `python recipe.py PAGE RESULT [OLD NEW]...`.

OLD is replaced by NEW in the code first. Rank 0 saves `losses`, the mean of what the ranks say, the weights of `model`,
`bytes`, what the rank that stores most has of the weights and the state of its optimizer, and `ends`, the time after each
step of an optimizer. RECIPE_COMPILER names what compiles each rank's graph; Inductor takes a minute longer.
"""

import os
import re
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from sp_compile import SPConfig


def main(page: str, result: str, *changes: str) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in code, old
        code = code.replace(old, new)
    SPConfig.__init__.__kwdefaults__["compiler"] = os.environ.get("RECIPE_COMPILER", "aot_eager")
    ends, optimizers = list[float](), list[Optimizer]()

    def note(optimizer: Optimizer, *_: Any) -> None:
        ends.append(time.time())
        optimizers[:] = [optimizer]

    register_optimizer_step_post_hook(note)
    script = Path(f"{Path(page).stem}.py")
    mine = script.with_suffix(f".{os.environ.get('RANK', '0')}")
    mine.write_text(code)
    mine.replace(script)  # replaced atomically: each rank writes it, and another one may read it
    names = runpy.run_path(str(script), run_name="__main__")
    weights = {name: p.detach() for name, p in names["model"].named_parameters()}
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in weights.items()}
    losses = torch.tensor([float(one) for one in names["losses"]], dtype=torch.float64)
    stored = torch.tensor(stored_bytes(optimizers[0]))
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        dist.all_reduce(stored, dist.ReduceOp.MAX)
        dist.destroy_process_group()  # or a thread of this exchange may come back from C++ when Python has ended
    if os.environ.get("RANK", "0") == "0":
        torch.save({"losses": losses.tolist(), "weights": weights, "ends": ends, "bytes": stored.item()}, result)


def stored_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the weights of an optimizer and of its state on this rank, without counters of steps."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in (*weights, *(m for m in moments if m.ndim))]
    return sum(t.nbytes for t in tensors)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
