"""Cost of exchanging the carries of a scan: all at once, or in steps.

A carry is what a rank adds to the rows of later ranks: the total of its rows for a cumulative sum, a pair (factor,
state) for a linear recurrence. C is its size in bytes, n the number of ranks.

    gather   alpha + (n - 1) * C / beta                  one all-gather of C bytes per rank
    steps    ceil(log2 n) * (alpha + C / beta)           step k: to the rank 2^k after this one

Both use one alpha, so that noisy latencies never decide, only bytes. Vectors of carries are gathered; long ones on many
ranks are sent in steps. Recurrences of matrices and linear attention have no steps: their carries are gathered.

A segment is a run of equal ids; a segmented scan restarts at each. A fold is one of the chunks of rows that a rank has:
one, or two in a zigzag layout. A row is all elements with one index of the scanned dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.scan.linear_attention import LINEAR_ATTENTION_OPS
from sp_compile.lowering.scan.monoids import accumulate_dtype
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size, as_size, size_product

from .collective_time import collective_bytes
from .machine import Machine

sp = torch.ops.sp
# cumulative sums and the like, cumulative maxima with positions, linear recurrences of numbers and of matrices
COSTED_SCAN_OPS = (
    sp.scan.default,
    sp.extremes.default,
    sp.linear_scan.default,
    sp.affine_scan.default,
    *LINEAR_ATTENTION_OPS,
)
INDEX_BYTES = 8  # bytes of the position that a cumulative maximum or minimum returns


@dataclass(frozen=True)
class CarryExchangeCost:
    """Exchange of one scan."""

    nbytes: int  # bytes of one rank's carry
    gather: float  # predicted seconds of an all-gather
    steps: float  # predicted seconds of steps
    rounds: int  # number of steps
    exchange: str  # choice, "gather" or "steps"

    def __str__(self) -> str:
        if self.exchange == "gather":
            return f"1 all-gather of {self.nbytes} B a rank"
        return f"{self.rounds} steps of {self.nbytes} B a rank, predicted to be faster than an all-gather"


def choose_exchange(
    nbytes: int, n: int, machine: Machine, folds: int = 1, supports_steps: bool = True
) -> CarryExchangeCost:
    """Choose the faster exchange of carries: one all-gather, or steps in which ranks send to the rank 2^k after them.

    Args:
        nbytes: Bytes of a rank's carry, what it adds to the rows of later ranks.
        n: Number of ranks.
        machine: Constants of the ranks.
        folds: Chunks of rows per rank: 1, or 2 in a zigzag layout, for which there are no steps.
        supports_steps: True if the op can exchange in steps.
    """
    lines = {"gather": machine.line("all_gather", n), "steps": machine.line("shift", n)}
    # One latency for both, so that noise in measured latencies does not decide.
    alpha, rounds = max(line.latency for line in lines.values()), num_rounds(n)
    transfer = {exchange: bytes_to_send(exchange, nbytes, n) / line.bandwidth for exchange, line in lines.items()}
    # Gathered carries are written and read; in each step two are read, and their combination is written.
    gather = alpha + transfer["gather"] + machine.copy(2 * n * nbytes)
    steps = transfer["steps"] + rounds * (alpha + machine.copy(3 * nbytes))
    can_step = supports_steps and folds == 1 and rounds < n - 1  # in n - 1 steps a rank sends what an all-gather sends
    exchange = "steps" if can_step and steps < gather else "gather"
    return CarryExchangeCost(nbytes, gather, steps, rounds, exchange)


def bytes_to_send(exchange: str, nbytes: Any, n: int) -> Any:
    """Return the bytes that one rank sends to exchange carries of `nbytes` by "gather" or "steps"."""
    if exchange == "gather":
        return collective_bytes("all_gather", nbytes, n)
    return num_rounds(n) * collective_bytes("shift", nbytes, n)


def num_rounds(n: int) -> int:
    """Return the number of steps over n ranks, ceil(log2 n)."""
    return (n - 1).bit_length()


def step_offsets(n: int) -> list[int]:
    """Return for each step the distance of the ranks that send to each other, for routes."""
    return [1 << k for k in range(num_rounds(n))]


def message_bytes(call: OpCall, folds: int, extent: Callable[[Any], Size] = as_size) -> tuple[Size, Size]:
    """Return the bytes of the carries that a rank exchanges in forward and backward; see lowering/scan/scan_ops.py.

    A carry is what a rank adds to the rows of later ranks: the total of its rows for a cumulative sum, a pair (factor,
    state) for a linear recurrence.

    Args:
        call: Call of one of `COSTED_SCAN_OPS`.
        folds: Chunks of rows per rank: 1, or 2 in a zigzag layout.
        extent: Converts the size of a dim; by default to a number or an expression of symbols.
    """
    result = call.results()[0]
    # The backwards of these two are scans of the same kind, with carries of the same size.
    if call.node.target is sp.affine_scan.default:
        return (_affine_bytes(call, folds, extent),) * 2
    if call.node.target in LINEAR_ATTENTION_OPS:
        return (_linear_attention_bytes(call, folds, extent),) * 2
    is_linear_scan = call.node.target is sp.linear_scan.default
    # Operand 0 of a linear scan is the factor, which may have fewer dims than operand 1, the summand.
    op, dim = call.get("op", "sum"), call.dim(operand=1 if is_linear_scan else 0)
    elements = _row_elements(result, dim, extent) * folds  # of a carry, which has one row for each chunk
    dtype = call.get("accumulate") or accumulate_dtype(op, result.dtype, result.device)
    # The backward of most scans is a recurrence, which sends factor and state in the accumulation dtype.
    backward_dtype = accumulate_dtype("sum", torch.promote_types(result.dtype, dtype), result.device)
    recurrence_bytes = 2 * backward_dtype.itemsize * elements
    if is_linear_scan:
        return 2 * dtype.itemsize * elements, recurrence_bytes
    if call.node.target is sp.extremes.default:
        return (dtype.itemsize + INDEX_BYTES) * elements, recurrence_bytes
    forward = dtype.itemsize * elements
    id_bytes, flag_bytes = _segment_bytes(call, dim, folds, extent)
    # The backward of a cumulative sum is a cumulative sum, too, of the same segments.
    backward = forward + flag_bytes if op == "sum" else recurrence_bytes
    return forward + id_bytes + flag_bytes, backward


def _affine_bytes(call: OpCall, folds: int, extent: Callable[[Any], Size]) -> Size:
    """Return the bytes of a carry in a recurrence of matrices, h = A h + b: the product of A, and the state."""
    result = call.results()[0]
    dtype = call["accumulate"] or accumulation_dtype(result.dtype)
    # The scanned dim is the one before those of the matrices.
    elements = sum(_row_elements(x, x.ndim - 3, extent) for x in (call.operands[0].meta["val"], result))
    return elements * folds * dtype.itemsize


def _linear_attention_bytes(call: OpCall, folds: int, extent: Callable[[Any], Size]) -> Size:
    """Return the bytes of a carry in linear attention: a factor (K, K) and a state (K, V) per head.

    The state after the last token is gathered, too, for ``sp::linear_attention_state``. `extent` returns the size to
    assume for a dim, which may be symbolic.
    """
    k, v = (x.meta["val"] for x in call.operands[1:3])  # (B, S, H, K) and (B, S, H, V)
    batch, heads, size, columns = map(extent, (k.shape[0], *k.shape[2:], v.shape[-1]))
    states = 2 if call.node.target is sp.linear_attention_state.default else 1
    itemsize = accumulation_dtype(v.dtype).itemsize
    return batch * heads * size * (size + states * columns) * folds * itemsize


def _segment_bytes(call: OpCall, dim: int, folds: int, extent: Callable[[Any], Size]) -> tuple[Size, Size]:
    """Return the bytes that a segmented scan sends in addition to carries: (ids, flags).

    A segment is a run of equal ids, at the start of which the scan restarts. Sent are the ids of the first and last row
    of each fold (chunk of rows of a rank), and a flag: True if a segment starts in it. (0, 0) for a scan without
    segments. `dim` is the scanned dim of the operand; ids may have fewer dims. `extent` returns the size to assume for
    a dim of a shape, which may be symbolic.
    """
    node: Node | None = call.get("segments")
    if node is None:
        return 0, 0
    ids = node.meta["val"]
    ids_dim = 0 if ids.ndim == 1 else dim - call.ndim() + ids.ndim  # their last dims are those of the operand
    count = _row_elements(ids, ids_dim, extent) * folds
    return 2 * ids.element_size() * count, count  # a flag is one byte


def _row_elements(value: torch.Tensor, dim: int, extent: Callable[[Any], Size]) -> Size:
    """Return the number of elements in one row of a tensor, that is for one index of `dim`."""
    return size_product(extent(size) for d, size in enumerate(value.shape) if d != dim)
