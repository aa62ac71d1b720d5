"""Peak activation memory of one training step, counted from every allocation rather than sampled.

On a CPU every tensor allocation goes through PyTorch's allocator, also those of compiled code, and the profiler
records each one. Buffers inside a communication library (Gloo's own) are not tensors and are not counted.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Block:
    """An allocation: its bytes, and how many allocations the step had made when it was freed (None: no record)."""

    size: int
    end: int | None


def peak_activation_bytes(
    step: Callable[[], Any], params: Iterable[Tensor], repeats: int = 1, gradients: bool = False
) -> int:
    """Runs step() (forward and backward) `repeats` times: the largest number of bytes it held at one time.

    Memory held before step() is not counted, so parameters and optimizer state are out. On a CPU the gradients that
    step() leaves in params are out too, unless `gradients` asks for them; on a GPU they are counted, as far as they
    exist at the peak.
    Call it on a warm step, or the compiler's own tensors are counted. More repeats make it exact where another thread
    (a Gloo worker) may be the one that frees a tensor: such a free has no record, but rarely misses every time.
    Raises RuntimeError if the repeats do not make the same allocations.
    """
    params = list(params)
    if any(p.is_cuda for p in params):
        return _cuda_peak(step, params)
    return _peak([_record(step, params, gradients) for _ in range(repeats)])


def _record(step: Callable[[], Any], params: list[Tensor], counted: bool) -> list[Block]:
    """The allocations of one step, in order."""
    for p in params:
        p.grad = None
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            step()
        prof.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    gradients = {p.grad.untyped_storage().data_ptr() for p in params if p.grad is not None}
    return _blocks([e["args"] for e in sorted(events, key=lambda e: e["ts"])], set() if counted else gradients)


def _blocks(events: list[dict[str, Any]], gradients: set[int]) -> list[Block]:
    """Pairs allocations with frees. What still lies at a gradient's address at the end is one, and gets size 0."""
    sizes: list[int] = []
    ends: list[int | None] = []
    live: dict[int, int] = {}
    for event in events:
        address, size = event["Addr"], event["Bytes"]
        block = live.pop(address, None)
        if block is not None:  # freed here, or unseen before its address was given out again
            ends[block] = len(sizes)
        if size > 0:
            live[address] = len(sizes)
            sizes.append(size)
            ends.append(None)
    kept = {live[address] for address in gradients if address in live}
    return [Block(0 if i in kept else size, end) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def _peak(records: list[list[Block]]) -> int:
    """Largest sum of live blocks, each block ending at the earliest end that any repeat has seen."""
    change = [0] * (len(records[0]) + 1)
    for i, repeats in enumerate(zip(*records, strict=True)):
        if len({block.size for block in repeats}) != 1:
            raise RuntimeError("the step does not make the same allocations each time: is it warm?")
        change[i] += repeats[0].size
        change[min(len(change) - 1 if block.end is None else block.end for block in repeats)] -= repeats[0].size
    return max(accumulate(change))


def _cuda_peak(step: Callable[[], Any], params: list[Tensor]) -> int:
    for p in params:
        p.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
