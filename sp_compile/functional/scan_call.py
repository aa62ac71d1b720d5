"""Validate and run the call of a scan, on unsplit operands or on the shards of one rank.

Segments are runs of equal ids, at which a scan restarts. A row is all elements at one position of the scanned dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.errors import SpError, did_you_mean
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.scan import scan_ops as ops
from sp_compile.lowering.scan.monoids import MONOIDS, accumulate_dtype, is_scannable, result_dtype
from sp_compile.lowering.scan.scan_table import SMALL_SCAN
from sp_compile.passes.cost.scan_cost import INDEX_BYTES

from .rank_call import (
    RankCall,
    can_broadcast_to,
    check_dim,
    check_dtypes,
    check_flags,
    check_float_operands,
    check_tensors,
    needs_gradient,
    op_or_body,
)
from .scan_shards import ScanShardOptions

sp = torch.ops.sp


@dataclass(frozen=True)
class ShardCall(RankCall):
    """Call of a scan along a dim that may be sharded."""

    dim: int  # the scanned dim
    reverse: bool  # True to scan from the last position
    accumulate: torch.dtype | None  # dtype of intermediate results; None for the default
    shards: ScanShardOptions | None  # None if the operands are unsplit

    @property
    def group(self) -> Ranks | None:
        """Return the ranks that share the scanned dim; None if the operands are unsplit.

        Returns:
            The ranks of `shards`.
        """
        return None if self.shards is None else self.shards.ranks

    def shard_rows(self, x: Tensor) -> int:
        """Return the length of the scanned dim on this rank.

        Args:
            x: An operand.

        Returns:
            The rows of this rank; 1 for a tensor without dims.
        """
        return x.shape[self.dim] if x.ndim else 1

    def arguments(self, x: Tensor, element_bytes: int) -> tuple[Any, ...]:
        """Return the arguments of the scan operators that describe the shards.

        Args:
            x: The scanned operand.
            element_bytes: Bytes that a rank sends for each element of a row.

        Returns:
            The frame, the exchange, the number of ranks and the group; empty if the operands are unsplit.
        """
        if self.shards is None:
            return ()
        rows = self.shard_rows(x)
        row_elements = x.numel() // max(rows, 1)
        return self.shards.arguments(rows, row_elements * element_bytes, x.device)

    def wrong_recurrence(self, initial: Tensor | None, **operands: Tensor) -> Iterator[SpError]:
        """Yield errors for wrong types and dtypes of the operands and options of a recurrence.

        Args:
            initial: The state before the first step, or None.
            **operands: The other operands by name.

        Returns:
            SP502, SP505, SP506 and SP526.
        """
        yield from check_tensors(**operands)
        if initial is not None:
            yield from check_tensors(initial=initial)
        yield from check_dtypes(accumulate_dtype=self.accumulate)
        yield from check_flags(reverse=self.reverse)
        yield from check_float_operands(**operands, initial=initial)
        if self.accumulate is not None and not self.accumulate.is_floating_point:
            yield SpError("SP526", f"accumulate_dtype: expected a floating-point dtype, got {self.accumulate}.")


@dataclass(frozen=True)
class ScanCall(ShardCall):
    """Call of `inclusive_scan`, `exclusive_scan` or `segmented_scan`."""

    x: Tensor  # the scanned operand, the shard of this rank
    op: str  # key of `MONOIDS`
    exclusive: bool  # True to combine only the elements before each one
    dtype: torch.dtype | None  # dtype of the result; None for the default
    segments: Tensor | None = None  # segment ids
    indices: bool = False  # True to return the indices of a max or min as well

    @property
    def result(self) -> torch.dtype:
        """Return the dtype of the result.

        Returns:
            `dtype`, or the default for the operation and the dtype of x.
        """
        return self.dtype or result_dtype(self.op, self.x.dtype)

    def run(self) -> Tensor:
        """Validate the call and run the scan.

        Returns:
            A tensor of x's shape with the dtype `result`.

        Raises:
            SpError: The call is invalid on a rank, or differs between the ranks; see `errors`.
        """
        self.require()
        x, dtype, accumulate = self.x, self.dtype, self.accumulate
        if self._can_use_torch():
            return MONOIDS[self.op].cumulative(x, self.dim, dtype=dtype)
        carry_dtype = accumulate_dtype(self.op, self.result, x.device)  # of the carries that ranks send
        if accumulate is not None and not MONOIDS[self.op].has_index:  # a max or min does not use `accumulate`
            carry_dtype = accumulate
        options = self.dim, self.op, self.exclusive, self.reverse, dtype, accumulate
        scan = op_or_body(sp.scan, ops.scan, x)
        return scan(x, self.segments, *options, *self.arguments(x, carry_dtype.itemsize))

    def run_with_indices(self) -> tuple[Tensor, Tensor]:
        """Validate the call and run a max or min scan with indices.

        Returns:
            The running max or min, and its position along the dim, int64.

        Raises:
            SpError: The call is invalid on a rank, or differs between the ranks; see `errors`.
        """
        self.require()
        x = self.x.to(self.result)
        extremes = op_or_body(sp.extremes, ops.extremes, x)  # the op; under `torch.func` its Python body
        shards = self.arguments(x, x.element_size() + INDEX_BYTES)  # a carry has a value and an index per element
        return extremes(x, self.dim, self.op, self.reverse, *shards)

    def description(self) -> str:
        """Return the shapes, dtypes and options of the call as text.

        Returns:
            Text that is equal on all ranks.
        """
        x, ids = self.x, self.segments
        ids_text = "" if ids is None else f", segment_ids {list(ids.shape)} {ids.dtype}"
        return (
            f"x {list(x.shape)} {x.dtype} along {self.dim % x.ndim}{ids_text}, op={self.op}, "
            f"exclusive={self.exclusive}, reverse={self.reverse}, indices={self.indices}, {self.dtype}, "
            f"{self.accumulate}, gradient: {needs_gradient(x)}, {self.shards}"
        )

    def _can_use_torch(self) -> bool:
        """Return True if the call may run torch's scan itself, without the overhead of the operator.

        The operator would run the same scan for a small contiguous tensor on the CPU, forward along its last dim.
        """
        x = self.x
        if self.op not in ("sum", "prod") or self.exclusive or self.reverse:
            return False
        if self.segments is not None or self.shards is not None or self.accumulate is not None:
            return False
        if torch.compiler.is_compiling() or x.device.type != "cpu" or x.numel() > SMALL_SCAN:
            return False
        if x.ndim == 0 or self.dim not in (-1, x.ndim - 1) or not x.is_contiguous():
            return False
        # torch's derivative of a product divides by its factors, which may be zero.
        return self.op == "sum" or not needs_gradient(x)

    def errors(self) -> Iterator[SpError]:
        """Yield an error for each invalid argument; the caller reads the first one only.

        A check may therefore rely on those before it.

        Returns:
            SP454, SP501 to SP507, SP512, SP513, and SP521 to SP526.
        """
        yield from self._wrong_types()
        if self.op not in MONOIDS:
            hint = did_you_mean(self.op, MONOIDS)
            yield SpError("SP501", f"op: expected one of {', '.join(MONOIDS)}, got {self.op!r}{hint}.")
        yield from check_dim(self.x.shape, self.dim)
        if self.indices and not MONOIDS[self.op].has_index:
            yield SpError("SP521", f"indices=True is not supported with op={self.op!r}.")
        yield from self._wrong_dtypes()
        yield from self._wrong_segments()
        if self.shards is not None:
            yield from self.shards.errors(self.x.shape, self.dim)

    def _wrong_types(self) -> Iterator[SpError]:
        """Yield errors for wrong Python types, on which the other checks would raise."""
        yield from check_tensors(x=self.x)
        if self.segments is not None or self.name == "segmented_scan":
            yield from check_tensors(segment_ids=self.segments)
        yield from check_dtypes(dtype=self.dtype, accumulate_dtype=self.accumulate)
        yield from check_flags(exclusive=self.exclusive, reverse=self.reverse)
        if not isinstance(self.op, str):
            yield SpError("SP502", f"op: expected one of {', '.join(MONOIDS)}, got {self.op!r}.")

    def _wrong_dtypes(self) -> Iterator[SpError]:
        """Yield errors for dtypes of x, the result and intermediate results that are not supported together."""
        dtype_of_x, result = self.x.dtype, self.result
        for name, dtype, fix in (("x", dtype_of_x, "Cast x."), ("dtype", result, "Pass another dtype.")):
            if not is_scannable(dtype) and not dtype.is_complex:
                expected = "bool, uint8, int8 to int64, or a floating-point dtype of 16 bits or more"
                yield SpError("SP522", f"{name}: expected {expected}, got {dtype}.", fix)
        has_gradients = result.is_floating_point or result.is_complex
        if dtype_of_x.is_floating_point and not has_gradients and needs_gradient(self.x):
            yield SpError("SP523", f"dtype: x needs a gradient, which a result in {result} does not have.")
        if dtype_of_x.is_complex or result.is_complex:
            yield SpError("SP524", f"x, dtype: {dtype_of_x if dtype_of_x.is_complex else result} is not supported.")
        if MONOIDS[self.op].floating and not result.is_floating_point:
            yield SpError("SP522", f"op={self.op!r} is not supported with {result}.", "Pass dtype=torch.float32.")
        if result is torch.bool and self.op in ("sum", "prod"):
            yield SpError("SP525", f"dtype=torch.bool is not supported with op={self.op!r}.")
        accumulate = self.accumulate
        if accumulate is None:
            return
        if accumulate.is_floating_point != result.is_floating_point or accumulate is torch.bool:
            default = accumulate_dtype(self.op, result, self.x.device)
            yield SpError("SP526", f"accumulate_dtype: expected {default} for a result in {result}, got {accumulate}.")

    def _wrong_segments(self) -> Iterator[SpError]:
        """Yield errors for segment ids that are not integers, on another device or of another shape than x."""
        ids, x = self.segments, self.x
        if ids is None:
            return
        if ids.dtype.is_floating_point or ids.dtype is torch.bool or not is_scannable(ids.dtype):
            fix = "Convert flags of first positions to ids with .cumsum(dim)." if ids.dtype is torch.bool else None
            yield SpError("SP505", f"segment_ids: expected integers, got {ids.dtype}.", fix)
        if ids.device != x.device:
            yield SpError("SP506", f"segment_ids: expected the device of x, {x.device}, got {ids.device}.")
        yield from self._wrong_shape_of(ids)

    def _wrong_shape_of(self, ids: Tensor) -> Iterator[SpError]:
        """Yield an error unless ids have one id per scanned position, or broadcast to x along its other dims."""
        x, length = self.x, self.shard_rows(self.x)
        shape = [1] * (x.ndim - ids.ndim) + list(ids.shape)  # of the ids, with leading dims of size 1
        if ids.ndim <= 1:
            fits = ids.numel() == length and ids.ndim <= x.ndim
        else:
            fits = len(shape) == x.ndim and all(size in (1, size_of_x) for size, size_of_x in zip(shape, x.shape))
            fits = fits and shape[self.dim] == length
        if not fits:
            # Ids of shape (B, S) for x of shape (B, S, D) lack only trailing dims of size 1.
            are_leading_dims = list(ids.shape) == list(x.shape[: ids.ndim]) and self.dim % x.ndim < ids.ndim < x.ndim
            fix = f"View them as {[*ids.shape, *[1] * (x.ndim - ids.ndim)]}." if are_leading_dims else None
            yield SpError(
                "SP504",
                f"segment_ids: expected shape [{length}], one id for each position of dim {self.dim}, or a "
                f"shape that broadcasts to x {list(x.shape)}, got {list(ids.shape)}.",
                fix,
            )


def number_as_tensor(value: Tensor | float | None, like: Tensor) -> Tensor | None:
    """Convert a Python scalar to a tensor without dims.

    Args:
        value: A Python scalar, a tensor, or None.
        like: A tensor with the device of the result. The dtype of the result is its dtype; float32 for bfloat16 and
            float16, in which a factor such as 0.999 would become 1.

    Returns:
        The tensor. Other values are returned unchanged.
    """
    # If `like` is no tensor, as for an invalid call, the checks of the call report that.
    if not (isinstance(value, (int, float)) and isinstance(like, Tensor)):
        return value
    return like.new_full((), value, dtype=accumulation_dtype(like.dtype))


def describe_operands(**operands: Tensor | None) -> str:
    """Return the shapes, dtypes and required gradients of the operands of a recurrence, for `description`.

    Args:
        **operands: The operands by name; None is omitted.

    Returns:
        Text that the ranks compare.
    """
    return ", ".join(
        f"{name} {list(x.shape)} {x.dtype}{' with a gradient' * needs_gradient(x)}"
        for name, x in operands.items()
        if x is not None
    )


@dataclass(frozen=True)
class LinearCall(ShardCall):
    """Call of `linear_scan`."""

    a: Tensor  # factors
    b: Tensor  # summands
    initial: Tensor | None  # the state before the first step; None for zeros
    result: torch.dtype | None  # dtype of the result; None for the common dtype of a and b

    def run(self) -> Tensor:
        """Validate the call and run the scan.

        Returns:
            A tensor with the common shape of a and b, and the dtype `result`.

        Raises:
            SpError: The call is invalid on a rank, or differs between the ranks; see `errors`.
        """
        self.require()
        dtype = torch.promote_types(self.a.dtype, self.b.dtype)  # that of the operator
        result = self.result or dtype
        a, b = torch.broadcast_tensors(self.a.to(dtype), self.b.to(dtype))
        initial = self.initial
        if initial is not None:
            initial = initial.to(dtype).expand(self._shape_of_initial(b.shape))
        linear_scan = op_or_body(sp.linear_scan, ops.linear_scan, a, b, initial)
        carry_dtype = self.accumulate or accumulate_dtype("sum", result, b.device)
        shards = self.arguments(b, 2 * carry_dtype.itemsize)  # a carry has a factor and a summand per element
        accumulate = self.accumulate if result == dtype else carry_dtype
        return linear_scan(a, b, initial, self.dim, self.reverse, accumulate, *shards).to(result)

    def description(self) -> str:
        """Return the shapes, dtypes and options of the call as text.

        Returns:
            Text that is equal on all ranks.
        """
        operands = describe_operands(a=self.a, b=self.b, initial=self.initial)
        dim = self.dim % len(torch.broadcast_shapes(self.a.shape, self.b.shape))
        return f"{operands}, along {dim}, reverse={self.reverse}, {self.accumulate}, {self.shards}"

    def _shape_of_initial(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of one state: that of the operands without the scanned dim."""
        return [size for i, size in enumerate(shape) if i != self.dim % len(shape)]

    def errors(self) -> Iterator[SpError]:
        """Yield an error for each invalid argument; the caller reads the first one only.

        A check may therefore rely on those before it.

        Returns:
            SP454, SP502 to SP507, SP512, SP513, and SP526.
        """
        a, b = self.a, self.b
        yield from self.wrong_recurrence(self.initial, a=a, b=b)
        sizes = zip(reversed(a.shape), reversed(b.shape))  # of each common dim, the last one first
        if any(size_a != size_b and 1 not in (size_a, size_b) for size_a, size_b in sizes):
            got = f"{list(a.shape)} and {list(b.shape)}"
            yield SpError("SP504", f"a, b: expected shapes that broadcast, got {got}.")
        shape = torch.broadcast_shapes(a.shape, b.shape)
        yield from check_dim(shape, self.dim)
        if self.initial is not None:
            yield from self._wrong_initial(self.initial, self._shape_of_initial(shape) if shape else [])
        if self.shards is not None:
            yield from self.shards.errors(shape, self.dim)

    def _wrong_initial(self, initial: Tensor, expected: Sequence[int]) -> Iterator[SpError]:
        """Yield an error if the initial state does not broadcast to the expected shape."""
        shape = list(initial.shape)
        if not can_broadcast_to(shape, expected):
            h_shape = f"{list(expected)}, the shape of h without dim {self.dim}"
            yield SpError("SP504", f"initial: expected {h_shape}, or a shape that broadcasts to it, got {shape}.")
