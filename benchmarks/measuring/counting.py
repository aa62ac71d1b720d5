"""Count the collectives and copies of a step, and its heaviest operations, from a profile of one rank."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.profiler import ProfilerActivity, profile

COPIES = ("aten::copy_", "aten::cat", "aten::index_select", "aten::constant_pad_nd", "aten::flip")
MOVING = (
    "cat|clone|contiguous|copy|index_select|index|constant_pad_nd|flip|stack|split_with_sizes|split|_unsafe_view"
    "|unsafe_view|view|reshape|permute|transpose|slice|select|expand|unsqueeze|squeeze|narrow|movedim|t|unbind"
    # Sources or users of copies: buffers of collectives, and a rank's place in them.
    "|all_to_all_single|all_gather_into_tensor|reduce_scatter_tensor|wait_tensor|arange|floor_divide|remainder|sub"
)
FUSED = re.compile(rf"(?:graph_\d+_)?cpp_fused((?:_(?:{MOVING}))+)_\d+")
SMALL = 1024
"""Elements; copies of fewer are indices, log-sum-exps of nothing and the like, and not counted."""


@dataclass
class Counts:
    """Counts of one step on one rank. heaviest: self time in ms by name, in descending order."""

    collectives: dict[str, int] = field(default_factory=dict)
    copies: int = 0
    heaviest: dict[str, float] = field(default_factory=dict)


def count(step: Callable[[], object]) -> Counts:
    """Profile one call. Inductor's kernels are seen if `torch._inductor.config.cpp.enable_kernel_profile` is set."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    counts = Counts()
    own: dict[str, float] = {}
    for event in found.events():
        own[event.name] = own.get(event.name, 0.0) + event.self_cpu_time_total / 1000
        if event.name.startswith("c10d::") and event.name not in ("c10d::recv_", "c10d::barrier"):
            name = event.name.removeprefix("c10d::").strip("_")
            counts.collectives[name] = counts.collectives.get(name, 0) + 1
        if _is_copy(event):
            counts.copies += 1
    counts.heaviest = dict(sorted(own.items(), key=lambda item: -item[1])[:12])
    return counts


def _is_copy(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    """Return True if the event only moves data."""
    if FUSED.fullmatch(event.name):
        return True
    if event.name not in COPIES:
        return False
    shapes = [shape for shape in event.input_shapes if shape and all(isinstance(s, int) for s in shape)]
    return not shapes or max(map(_numel, shapes)) >= SMALL


def _numel(shape: list[int]) -> int:
    return torch.Size(shape).numel()
