"""Peak activation memory of one training step, counted exactly.

On a CPU every tensor allocation goes through PyTorch's allocator, also those of compiled code, and the profiler
records each one with the running total. Nothing is sampled, so two runs of one program give one number.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def peak_activation_bytes(step: Callable[[], Any], params: Iterable[Tensor]) -> int:
    """Runs step() (forward and backward) once: the largest number of bytes it held at one time.

    Memory held before step() is not counted, so parameters and optimizer state are out. On a CPU the gradients that
    step() leaves in params are out too; on a GPU they are counted, as far as they exist at the peak.
    Call it on a warm step: the first call of a compiled model would count the compiler's tensors.
    """
    params = list(params)
    for p in params:
        p.grad = None
    if any(p.is_cuda for p in params):
        return _cuda_peak(step)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            step()
        prof.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    gradients = {p.grad.untyped_storage().data_ptr() for p in params if p.grad is not None}
    return _cpu_peak([e for e in events if e.get("name") == "[memory]"], gradients)


def _cpu_peak(events: list[dict[str, Any]], gradients: set[int]) -> int:
    """Peak of the allocator's running total, less the storages that became gradients.

    The total is read rather than summed up from the events: a tensor freed on another thread (a Gloo worker) has no
    event of its own, but leaves the total right.
    """
    events = sorted(events, key=lambda e: e["ts"])
    allocations = [e["args"] for e in events if e["args"]["Device Type"] == 0]
    if not allocations:
        return 0
    became_gradient = {}
    for i, a in enumerate(allocations):
        if a["Bytes"] > 0 and a["Addr"] in gradients:
            became_gradient[a["Addr"]] = i
    start = allocations[0]["Total Allocated"] - allocations[0]["Bytes"]
    peak = held_by_gradients = 0
    for i, a in enumerate(allocations):
        if became_gradient.get(a["Addr"]) == i:
            held_by_gradients += a["Bytes"]
        peak = max(peak, a["Total Allocated"] - start - held_by_gradients)
    return peak


def _cuda_peak(step: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
