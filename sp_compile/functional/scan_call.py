"""One call of a public scan, or of linear_scan: its operands and options, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.scan import scan_ops as ops
from sp_compile.lowering.scan.monoids import MONOIDS, accumulate_dtype, is_scannable, result_dtype
from sp_compile.lowering.scan.scan_table import SMALL_SCAN
from sp_compile.passes.cost.scan_cost import INDEX_BYTES

from .rank_call import (
    RankCall,
    check_dim,
    check_dtypes,
    check_flags,
    check_tensors,
    needs_gradient,
    op_or_body,
    unknown_name,
)
from .scan_shards import ScanShardOptions

sp = torch.ops.sp


@dataclass(frozen=True)
class ShardCall(RankCall):
    """A call along a dim that ranks may share. shards: how; None: operands are whole."""

    dim: int
    reverse: bool
    accumulate: torch.dtype | None
    shards: ScanShardOptions | None

    @property
    def group(self) -> Ranks | None:
        return None if self.shards is None else self.shards.ranks

    def shard_rows(self, x: Tensor) -> int:
        """Of x, along the dim; a number is one row."""
        return x.shape[self.dim] if x.ndim else 1

    def arguments(self, x: Tensor, element: int) -> tuple[Any, ...]:
        """What the sp operators need to know of the shards of x. element: bytes that a rank tells of a column."""
        if self.shards is None:
            return ()
        rows = self.shard_rows(x)
        return self.shards.arguments(rows, x.numel() // max(rows, 1) * element, x.device)


@dataclass(frozen=True)
class ScanCall(ShardCall):
    """A call of inclusive_scan, exclusive_scan or segmented_scan.

    indices: whether those of a max or min are returned, too.
    """

    x: Tensor
    op: str
    exclusive: bool
    dtype: torch.dtype | None
    segments: Tensor | None = None
    indices: bool = False

    @property
    def result(self) -> torch.dtype:
        """The dtype of the result."""
        return self.dtype or result_dtype(self.op, self.x.dtype)

    @property
    def length(self) -> int:
        """Of the scanned dim of x."""
        return self.shard_rows(self.x)

    def run(self) -> Tensor:
        """Return the scan. Raises SpError for a call that does not fit."""
        self.require()
        x, dtype, accumulate = self.x, self.dtype, self.accumulate
        if self._is_torch_scan():
            return MONOIDS[self.op].cumulative(x, self.dim, dtype=dtype)
        usual = accumulate_dtype(self.op, self.result, x.device)
        inner = usual if accumulate is None or MONOIDS[self.op].has_index else accumulate
        how = self.dim, self.op, self.exclusive, self.reverse, dtype, accumulate
        scan = op_or_body(sp.scan, ops.scan, x)
        return scan(x, self.segments, *how, *self.arguments(x, inner.itemsize))

    def run_with_indices(self) -> tuple[Tensor, Tensor]:
        """The running max or min, and where it stands. Raises SpError for a call that does not fit."""
        self.require()
        x = self.x.to(self.result)
        extremes = op_or_body(sp.extremes, ops.extremes, x)
        return extremes(x, self.dim, self.op, self.reverse, *self.arguments(x, x.element_size() + INDEX_BYTES))

    def description(self) -> str:
        x, ids = self.x, self.segments
        of_ids = "" if ids is None else f", segment_ids {list(ids.shape)} {ids.dtype}"
        return (
            f"x {list(x.shape)} {x.dtype} along {self.dim % x.ndim}{of_ids}, op={self.op}, exclusive={self.exclusive}, "
            f"reverse={self.reverse}, indices={self.indices}, {self.dtype}, {self.accumulate}, "
            f"gradient: {needs_gradient(x)}, {self.shards}"
        )

    def _is_torch_scan(self) -> bool:
        """Return whether torch's scan of a few contiguous rows runs in the end, and may as well run at once."""
        x = self.x
        if self.op not in ("sum", "prod") or self.exclusive or self.reverse:
            return False
        if self.segments is not None or self.shards is not None or self.accumulate is not None:
            return False
        if torch.compiler.is_compiling() or x.device.type != "cpu" or x.numel() > SMALL_SCAN:
            return False
        if x.ndim == 0 or self.dim not in (-1, x.ndim - 1) or not x.is_contiguous():
            return False
        # torch's derivative of a product divides by its factors.
        return self.op == "sum" or not needs_gradient(x)

    def errors(self) -> Iterator[SpError]:
        yield from self._wrong_kinds()
        if self.op not in MONOIDS:
            yield unknown_name("op", self.op, MONOIDS)
        yield from check_dim(self.x.shape, self.dim)
        if self.indices and not MONOIDS[self.op].has_index:
            yield SpError("SP521", f"indices=True is not supported with op={self.op!r}.")
        yield from self._wrong_dtypes()
        yield from self._wrong_segments()
        if self.shards is not None:
            yield from self.shards.problems(self.x.shape, self.dim)

    def _wrong_kinds(self) -> Iterator[SpError]:
        """Yield what would make the other checks fail."""
        yield from check_tensors(x=self.x)
        if self.segments is not None or self.name == "segmented_scan":
            yield from check_tensors(segment_ids=self.segments)
        yield from check_dtypes(dtype=self.dtype, accumulate_dtype=self.accumulate)
        yield from check_flags(exclusive=self.exclusive, reverse=self.reverse)
        if not isinstance(self.op, str):
            yield SpError("SP502", f"op: expected one of {', '.join(MONOIDS)}, got {self.op!r}.")

    def _wrong_dtypes(self) -> Iterator[SpError]:
        dtype_of_x, result = self.x.dtype, self.result
        for dtype in (dtype_of_x, result):
            if not is_scannable(dtype) and not dtype.is_complex:
                yield SpError("SP522", f"x, dtype: {dtype} is not supported.")
        if dtype_of_x.is_floating_point and not result.is_floating_point and needs_gradient(self.x):
            yield SpError("SP523", f"dtype: x needs a gradient, which a result in {result} does not have.")
        if dtype_of_x.is_complex or result.is_complex:
            yield SpError("SP524", f"x, dtype: {dtype_of_x if dtype_of_x.is_complex else result} is not supported.")
        if MONOIDS[self.op].floating and not result.is_floating_point:
            yield SpError("SP522", f"op={self.op!r} is not supported with {result}.", "Pass dtype=torch.float32.")
        if result is torch.bool and self.op in ("sum", "prod"):
            yield SpError("SP525", f"dtype=torch.bool is not supported with op={self.op!r}.")
        wanted = self.accumulate
        if wanted is not None and (wanted.is_floating_point != result.is_floating_point or wanted is torch.bool):
            usual = accumulate_dtype(self.op, result, self.x.device)
            yield SpError("SP526", f"accumulate_dtype: expected {usual} for a result in {result}, got {wanted}.")

    def _wrong_segments(self) -> Iterator[SpError]:
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
        x, shape = self.x, [1] * (self.x.ndim - ids.ndim) + list(ids.shape)
        if ids.ndim <= 1:
            fits = ids.numel() == self.length and ids.ndim <= x.ndim
        else:
            fits = len(shape) == x.ndim and all(size in (1, wanted) for size, wanted in zip(shape, x.shape))
            fits = fits and shape[self.dim] == self.length
        if not fits:
            leading = list(ids.shape) == list(x.shape[: ids.ndim]) and self.dim % x.ndim < ids.ndim < x.ndim
            fix = f"View them as {[*ids.shape, *[1] * (x.ndim - ids.ndim)]}." if leading else None
            yield SpError(
                "SP504",
                f"segment_ids: expected shape [{self.length}], one id for each position of dim {self.dim}, or a "
                f"shape that broadcasts to x {list(x.shape)}, got {list(ids.shape)}.",
                fix,
            )


def number_as_tensor(value: Tensor | float | None, like: Tensor) -> Tensor | None:
    """A number as a tensor of no dims; all else as it is."""
    is_number = isinstance(value, (int, float)) and isinstance(like, Tensor)
    return like.new_full((), value) if is_number else value


@dataclass(frozen=True)
class LinearCall(ShardCall):
    """A call of linear_scan."""

    a: Tensor
    b: Tensor
    initial: Tensor | None

    def run(self) -> Tensor:
        """The scan. Raises SpError for a call that does not fit."""
        self.require()
        dtype = torch.promote_types(self.a.dtype, self.b.dtype)
        a, b = torch.broadcast_tensors(self.a.to(dtype), self.b.to(dtype))
        initial = self.initial
        if initial is not None:
            initial = initial.to(dtype).expand(self._shape_of_initial(b.shape))
        linear_scan = op_or_body(sp.linear_scan, ops.linear_scan, a, b, initial)
        inner = self.accumulate or accumulate_dtype("sum", dtype, b.device)
        shards = self.arguments(b, 2 * inner.itemsize)
        return linear_scan(a, b, initial, self.dim, self.reverse, self.accumulate, *shards)

    def description(self) -> str:
        each = [
            f"{name} {list(x.shape)} {x.dtype}{' with a gradient' * needs_gradient(x)}"
            for name, x in (("a", self.a), ("b", self.b), ("initial", self.initial))
            if x is not None
        ]
        how = f"along {self.dim}, reverse={self.reverse}, {self.accumulate}"
        return f"{', '.join(each)}, {how}, {self.shards}"

    def _shape_of_initial(self, shape: Sequence[int]) -> list[int]:
        return [size for i, size in enumerate(shape) if i != self.dim % len(shape)]

    def errors(self) -> Iterator[SpError]:
        yield from self._wrong_kinds()
        a, b, others = self.a, self.b, [] if self.initial is None else [self.initial]
        if not all(x.is_floating_point() for x in (a, b, *others)):
            got = ", ".join(str(x.dtype) for x in (a, b, *others))
            yield SpError("SP505", f"a, b, initial: expected floating-point dtypes, got {got}.")
        if any(x.device != b.device for x in (a, *others)):
            got = ", ".join(str(x.device) for x in (a, b, *others))
            yield SpError("SP506", f"a, b, initial: expected one device, got {got}.")
        if any(x != y and 1 not in (x, y) for x, y in zip(reversed(a.shape), reversed(b.shape))):
            got = f"{list(a.shape)} and {list(b.shape)}"
            yield SpError("SP504", f"a, b: expected shapes that broadcast, got {got}.")
        if self.accumulate is not None and not self.accumulate.is_floating_point:
            yield SpError("SP526", f"accumulate_dtype: expected a floating-point dtype, got {self.accumulate}.")
        shape = torch.broadcast_shapes(self.a.shape, self.b.shape)
        yield from check_dim(shape, self.dim)
        if self.initial is not None:
            yield from self._wrong_initial(self.initial, self._shape_of_initial(shape) if shape else [])
        if self.shards is not None:
            yield from self.shards.problems(shape, self.dim)

    def _wrong_kinds(self) -> Iterator[SpError]:
        """Yield what would make the other checks fail."""
        yield from check_tensors(a=self.a, b=self.b)
        if self.initial is not None:
            yield from check_tensors(initial=self.initial)
        yield from check_dtypes(accumulate_dtype=self.accumulate)
        yield from check_flags(reverse=self.reverse)

    def _wrong_initial(self, initial: Tensor, wanted: Sequence[int]) -> Iterator[SpError]:
        found = list(initial.shape)
        if len(found) > len(wanted) or any(x not in (1, y) for x, y in zip(found[::-1], wanted[::-1])):
            shape = f"{list(wanted)}, the shape of h without dim {self.dim}"
            yield SpError("SP504", f"initial: expected {shape}, or a shape that broadcasts to it, got {found}.")
