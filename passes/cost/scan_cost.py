"""What the ranks tell each other of their parts of a scan, in bytes, and how: all at once, or in steps.

    gather   alpha + (n - 1) * C / beta                  one all-gather of everyone's C bytes
    steps    ceil(log2 n) * (alpha + C / beta)           step k: to the rank 2^k further on

One alpha for both, so that measured latencies, which are noisy, never decide: only bytes do. A vector of carries
is gathered; matrices of state on many ranks go in steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.scan.monoids import accumulate_dtype
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size, as_size, size_product

from .collective_time import collective_bytes
from .machine import Machine

sp = torch.ops.sp
COSTED_SCAN_OPS = (sp.scan.default, sp.extremes.default, sp.linear_scan.default)
INDEX_BYTES = 8  # of a position


@dataclass(frozen=True)
class CarryExchangeCost:
    """One scan's exchange: bytes of one rank's part, predicted seconds each way, rounds of "steps", the choice."""

    nbytes: int
    gather: float
    steps: float
    rounds: int
    exchange: str

    def __str__(self) -> str:
        if self.exchange == "gather":
            return f"1 all-gather of {self.nbytes} B a rank"
        return f"{self.rounds} steps of {self.nbytes} B a rank, predicted to be faster than an all-gather"


def choose_exchange(nbytes: int, n: int, machine: Machine, folds: int = 1) -> CarryExchangeCost:
    """How `nbytes` a rank travel. folds: chunks a rank holds; steps need contiguous ones (1)."""
    lines = {"gather": machine.line("all_gather", n), "steps": machine.line("shift", n)}
    alpha, rounds = max(line.latency for line in lines.values()), num_rounds(n)
    beta = {exchange: bytes_to_send(exchange, nbytes, n) / line.bandwidth for exchange, line in lines.items()}
    gather = alpha + beta["gather"] + machine.copy(2 * n * nbytes)
    stepped = beta["steps"] + rounds * (alpha + machine.copy(3 * nbytes))
    exchange = "steps" if folds == 1 and rounds < n - 1 and stepped < gather else "gather"
    return CarryExchangeCost(nbytes, gather, stepped, rounds, exchange)


def bytes_to_send(exchange: str, nbytes: Any, n: int) -> Any:
    """What one rank sends for all to know `nbytes` of each."""
    if exchange == "gather":
        return collective_bytes("all_gather", nbytes, n)
    return num_rounds(n) * collective_bytes("shift", nbytes, n)


def num_rounds(n: int) -> int:
    """ceil(log2 n)."""
    return (n - 1).bit_length()


def step_offsets(n: int) -> list[int]:
    """How many ranks further on each step of a scan in steps reaches."""
    return [1 << k for k in range(num_rounds(n))]


def message_bytes(call: OpCall, folds: int, extent: Callable[[Any], Size] = as_size) -> tuple[Size, Size]:
    """Bytes that one rank has to say of its part of a scan, forward and backward; see lowering/scan/scan_ops.py.

    extent: the number that stands for a size; by default its expression.
    """
    result = call.results()[0]
    linear = call.node.target is sp.linear_scan.default
    op, dim = call.get("op", "sum"), call.dim(operand=int(linear))
    rows = _row_elements(result, dim, extent) * folds
    inner = call.get("accumulate") or accumulate_dtype(op, result.dtype, result.device)
    # The other way most scans are recurrences, of which factor and state are sent, in what sums are added in.
    wide = accumulate_dtype("sum", torch.promote_types(result.dtype, inner), result.device)
    recurrence = 2 * wide.itemsize * rows
    if linear:
        return 2 * inner.itemsize * rows, recurrence
    if call.node.target is sp.extremes.default:
        return (inner.itemsize + INDEX_BYTES) * rows, recurrence
    forward, flags = inner.itemsize * rows, _segment_bytes(call, dim, folds, extent)
    backward = forward + flags[1] if op == "sum" else recurrence
    return forward + sum(flags), backward


def _segment_bytes(call: OpCall, dim: int, folds: int, extent: Callable[[Any], Size]) -> tuple[Size, Size]:
    """Bytes of the first and last ids, and of the flags that say whether a segment begins."""
    node: Node | None = call.get("segments")
    if node is None:
        return 0, 0
    ids = node.meta["val"]
    at = 0 if ids.ndim == 1 else dim - call.ndim() + ids.ndim
    count = _row_elements(ids, at, extent) * folds
    return 2 * ids.element_size() * count, count


def _row_elements(value: torch.Tensor, dim: int, extent: Callable[[Any], Size]) -> Size:
    """Elements of a tensor's one row."""
    return size_product(extent(s) for d, s in enumerate(value.shape) if d != dim)
