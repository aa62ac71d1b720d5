"""Validate and run the call of a recurrence of matrices, on unsplit operands or on the shards of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.scan import affine_scan as ops

from .rank_call import can_broadcast_to, check_flags, op_or_body
from .scan_call import ShardCall, describe_operands

sp = torch.ops.sp
ROWS_FROM_END = -3  # the scanned dim: that before the dims of the matrices


@dataclass(frozen=True)
class AffineCall(ShardCall):
    """Call of `affine_scan`."""

    m: Tensor  # matrices
    b: Tensor  # summands
    initial: Tensor | None  # the state before the first step; None for zeros
    exclusive: bool  # True to return the state before each step

    def run(self) -> Tensor:
        """Validate the call and run the scan.

        Returns:
            A tensor of b's shape with the common dtype of m and b.

        Raises:
            SpError: The call is invalid on a rank, or differs between the ranks; see `errors`.
        """
        self.require()
        m, b, initial = self.m, self.b, self.initial
        if 0 in (*b.shape[:ROWS_FROM_END], *b.shape[-2:]):  # on all ranks: the states have no elements
            dtype = torch.promote_types(m.dtype, b.dtype)
            return m.to(dtype) @ b.to(dtype)
        if initial is not None:
            initial = initial.expand(*b.shape[:ROWS_FROM_END], *b.shape[-2:])
        # torch.func cannot transform the operator: for tensors that it wraps, the Python function is called instead.
        affine_scan = op_or_body(sp.affine_scan, ops.affine_scan, m, b, initial)
        options = self.dim, self.reverse, self.accumulate, self.exclusive
        shards = self.arguments(b, element_bytes=1)  # the bytes are not needed: the exchange is always "gather"
        result: Tensor = affine_scan(m, b, initial, *options, *shards)
        return result

    def description(self) -> str:
        """Return the shapes, dtypes and options of the call as text.

        Returns:
            Text that is equal on all ranks.
        """
        operands = describe_operands(m=self.m, b=self.b, initial=self.initial)
        return f"{operands}, exclusive={self.exclusive}, reverse={self.reverse}, {self.accumulate}, {self.shards}"

    def errors(self) -> Iterator[SpError]:
        """Yield an error for each invalid argument; the caller reads the first one only.

        Returns:
            SP454, SP502, SP504 to SP507, SP512, SP513, and SP526.
        """
        yield from self.wrong_recurrence(self.initial, m=self.m, b=self.b)
        yield from check_flags(exclusive=self.exclusive)
        yield from self._wrong_shapes()
        # The rows are checked only if b has their dim, the third from the end (ROWS_FROM_END is -3).
        if self.shards is not None and self.b.ndim >= -ROWS_FROM_END:
            yield from self.shards.errors(self.b.shape, self.dim)

    def _wrong_shapes(self) -> Iterator[SpError]:
        """Yield an error for each operand whose shape does not match that of b, (..., S, K, V)."""
        m, b = self.m, self.b
        # With b of shape (..., S, K, V), m has shape (..., S, K, K).
        if b.ndim < -ROWS_FROM_END or list(m.shape) != [*b.shape[:-1], b.shape[-2]]:
            got = f"{list(m.shape)} and {list(b.shape)}"
            yield SpError(
                "SP504", f"m, b: expected shapes (..., S, K, K) and (..., S, K, V) with equal other dims, got {got}."
            )
            return
        if self.initial is not None:
            shape, expected = list(self.initial.shape), [*b.shape[:ROWS_FROM_END], *b.shape[-2:]]  # (..., K, V)
            if not can_broadcast_to(shape, expected):
                yield SpError("SP504", f"initial: expected {expected}, or a shape that broadcasts to it, got {shape}.")
