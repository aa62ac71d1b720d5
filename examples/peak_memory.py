"""Count the peak activation memory of one training step from every allocation.

On a CPU every tensor allocation uses PyTorch's allocator, including those of compiled code, and the profiler records
each one. Buffers inside a communication library (Gloo) are not tensors and are not counted.
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
    """An allocation."""

    size: int  # bytes
    end: int | None  # number of allocations before it was freed; None without a record


def peak_activation_bytes(
    step: Callable[[], Any], params: Iterable[Tensor], repeats: int = 1, gradients: bool = False
) -> int:
    """Return the peak number of bytes that a step allocates.

    Memory that exists before the step, such as parameters and optimizer state, is not counted. Run a warm step, or the
    compiler's tensors are counted. More repeats are exact where another thread (a Gloo worker) may free a tensor: such
    a free has no record, but it is rarely missing in every repeat.

    Args:
        step: The forward and backward.
        params: The parameters, whose gradients are reset.
        repeats: The number of runs.
        gradients: True to count gradients on a CPU; on a GPU they are always counted if they exist at the peak.

    Returns:
        The peak in bytes.

    Raises:
        RuntimeError: The repeats do not have the same allocations.
    """
    params = list(params)
    if any(p.is_cuda for p in params):
        return _cuda_peak(step, params)
    return _peak([_record(step, params, gradients) for _ in range(repeats)])


def _record(step: Callable[[], Any], params: list[Tensor], counted: bool) -> list[Block]:
    """Return the allocations of one step, in order."""
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
    """Match allocations with frees. Blocks at the address of a gradient at the end have size 0."""
    sizes: list[int] = []
    ends: list[int | None] = []
    live: dict[int, int] = {}
    for event in events:
        address, size = event["Addr"], event["Bytes"]
        block = live.pop(address, None)
        if block is not None:  # freed here, or without a record before its address was used again
            ends[block] = len(sizes)
        if size > 0:
            live[address] = len(sizes)
            sizes.append(size)
            ends.append(None)
    kept = {live[address] for address in gradients if address in live}
    return [Block(0 if i in kept else size, end) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def _peak(records: list[list[Block]]) -> int:
    """Return the largest sum of live blocks; a block ends at the earliest end of all repeats."""
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
