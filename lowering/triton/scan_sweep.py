"""One scan as the kernels take it, and the size of their tiles. Importing this needs triton."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .scan_operators import LEAVES

TYPES = {
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
RUN_BYTES = 128
"""Of neighbouring lines a tile is at least this wide, where the tensor is."""


@dataclass(frozen=True)
class State:
    """Of some places of every line, (places, lines): what `scan_parts.value_of` gives, and what an operator adds.

    second: factor of a recurrence, or index. flag: int8, whether a segment begins there.
    """

    value: Tensor
    second: Tensor | None = None
    flag: Tensor | None = None

    def rows(self, begin: int, end: int | None = None) -> State:
        return State(*(x if x is None else x[begin:end] for x in (self.value, self.second, self.flag)))


@dataclass(frozen=True)
class Tile:
    """STEPS places by LINES lines, and the warps that hold them."""

    steps: int
    lines: int
    warps: int


@dataclass(frozen=True)
class Sweep:
    """An inclusive scan over places of x (outer, length, inner), or of what lies a place earlier if shift.

    op: "sum", "prod", "max", "min", or one of LEAVES. neutral: its identity in x; of "linear", whose x are the
    factors, 1. second: what a recurrence adds, or the indices of x where they are not its times. compute: a key of
    TYPES, of all states. index: int32 or int64. starts: bool or int8, (outer|1, length, inner|1).
    """

    x: Tensor
    op: str
    neutral: float
    compute: torch.dtype
    index: torch.dtype
    second: Tensor | None = None
    starts: Tensor | None = None
    shift: bool = False
    reverse: bool = False

    @property
    def leaf(self) -> str:
        return LEAVES.get(self.op, "value")

    @property
    def length(self) -> int:
        return self.x.shape[1]

    @property
    def lines(self) -> int:
        return self.x.shape[0] * self.x.shape[2]

    @property
    def start(self) -> float:
        """The value of the neutral state."""
        return 0 if self.op == "linear" else self.neutral

    def totals(self) -> Sweep:
        """The sweep whose last state is the total: shift moves results, and what a lagged recurrence multiplies."""
        return replace(self, shift=self.shift and self.op == "linear")

    def over(self, parts: State) -> Sweep:
        """The scan of the parts' totals, in scan order."""
        x, second = parts.value, parts.second
        if self.op == "linear":
            x, second = second, x
        return replace(
            self,
            x=_line_up(x),
            second=_line_up(second),
            starts=_line_up(parts.flag),
            shift=False,
            reverse=False,
        )

    def states(self, places: int, whole: bool = False) -> State:
        """Memory for what states stand for, of every line at some places; whole: for both tensors of a state."""
        pair = self.leaf in ("linear", "indexed") or (whole and self.leaf != "value")
        second_dtype = self.index if self.leaf == "indexed" else self.compute
        empty, shape = self.x.new_empty, (places, self.lines)
        return State(
            empty(shape, dtype=self.compute),
            empty(shape, dtype=second_dtype) if pair else None,
            empty(shape, dtype=torch.int8) if self.starts is not None else None,
        )

    @property
    def state_bytes(self) -> int:
        """Of one element, in registers."""
        second = {"value": 0, "indexed": self.index.itemsize}.get(self.leaf, self.compute.itemsize)
        return self.compute.itemsize + second + (4 if self.starts is not None else 0)

    def tile(self, elements: int, warps: int) -> Tile:
        """Whole runs of memory first, then as many places as there are, then more lines."""
        runs = RUN_BYTES // self.x.element_size()
        lines = min(triton.next_power_of_2(self.x.shape[2]), max(runs, 16), elements)
        steps = min(triton.next_power_of_2(self.length), elements // lines)
        lines = max(lines, min(triton.next_power_of_2(self.lines), elements // steps))
        return Tile(steps, lines, warps)

    def tensors(self) -> list[Tensor]:
        return self.pointers(self.x, self.second, self.starts)

    def pointers(self, *tensors: Tensor | None) -> list[Tensor]:
        """For a kernel: bools as the bytes they are, and x in the place of those that there are not."""
        given = (self.x if x is None else x for x in tensors)
        return [x.view(torch.uint8) if x.dtype is torch.bool else x for x in given]

    def sizes(self) -> tuple[int, int, int]:
        return self.lines, self.length, self.x.shape[2]

    def strides(self) -> tuple[int, int, int]:
        """Of starts: per row of lines, place and column; 0 where they are the same for all."""
        if self.starts is None:
            return 0, 0, 0
        outer, length, inner = self.starts.shape
        return (length * inner if outer > 1 else 0), inner, int(inner > 1)

    def options(self, tile: Tile) -> dict[str, Any]:
        """What the kernels are compiled for."""
        return {
            "OP": self.op,
            "LEAF": self.leaf,
            "PAIR": self.leaf != "value",
            "NEUTRAL": self.neutral,
            "ACC": TYPES[self.compute],
            "INDEX": TYPES[self.index],
            "GIVEN": self.leaf == "indexed" and self.second is not None,
            "UNIT": math.gcd(self.x.shape[2], 16),
            "FLAT": self.x.shape[0] == 1,
            "EVEN": self.lines % tile.lines == 0,
            "SHARED": self.starts is not None and self.starts.shape[0] == self.starts.shape[2] == 1,
            "SEGMENTED": self.starts is not None,
            "SHIFT": self.shift,
            "REVERSE": self.reverse,
            "STEPS": tile.steps,
            "LINES": tile.lines,
            "num_warps": tile.warps,
        }


def _line_up(x: Tensor | None) -> Tensor | None:
    """(places, lines) as (1, length, inner)."""
    return x if x is None else x.unsqueeze(0)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
