"""One call of a public scan, or of linear_scan: its operands and options, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.config import Ranks
from sp_compile.cost.scan import INDEX_BYTES
from sp_compile.lowering.scan import ops
from sp_compile.lowering.scan.monoids import MONOIDS, accumulate_dtype, result_dtype, scannable
from sp_compile.lowering.scan.table import SMALL_SCAN

from .call import (
    RankCall,
    needs_gradient,
    operator_or_body,
    unknown,
    wrong_dim,
    wrong_dtypes,
    wrong_flags,
    wrong_tensors,
)
from .scan_shards import Shards

sp = torch.ops.sp


@dataclass(frozen=True)
class ShardCall(RankCall):
    """A call along a dim that ranks may share. shards: how; None: operands are whole."""

    dim: int
    reverse: bool
    accumulate: torch.dtype | None
    shards: Shards | None

    @property
    def group(self) -> Ranks | None:
        return None if self.shards is None else self.shards.ranks

    def rows(self, x: Tensor) -> int:
        """Of x, along the dim; a number is one row."""
        return x.shape[self.dim] if x.ndim else 1

    def arguments(self, x: Tensor, element: int) -> tuple[Any, ...]:
        """What the sp operators need to know of the shards of x. element: bytes that a rank tells of a column."""
        if self.shards is None:
            return ()
        rows = self.rows(x)
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
        return self.rows(self.x)

    def run(self) -> Tensor:
        """Return the scan. Raises SpError for a call that does not fit."""
        self.require()
        x, dtype, accumulate = self.x, self.dtype, self.accumulate
        if self._is_torchs():
            return MONOIDS[self.op].cumulative(x, self.dim, dtype=dtype)
        usual = accumulate_dtype(self.op, self.result, x.device)
        inner = usual if accumulate is None or MONOIDS[self.op].selects else accumulate
        how = self.dim, self.op, self.exclusive, self.reverse, dtype, accumulate
        scan = operator_or_body(sp.scan, ops.scan, x)
        return scan(x, self.segments, *how, *self.arguments(x, inner.itemsize))

    def run_with_indices(self) -> tuple[Tensor, Tensor]:
        """The running max or min, and where it stands. Raises SpError for a call that does not fit."""
        self.require()
        x = self.x.to(self.result)
        extremes = operator_or_body(sp.extremes, ops.extremes, x)
        return extremes(x, self.dim, self.op, self.reverse, *self.arguments(x, x.element_size() + INDEX_BYTES))

    def description(self) -> str:
        x, ids = self.x, self.segments
        of_ids = "" if ids is None else f", segment_ids {list(ids.shape)} {ids.dtype}"
        return (
            f"x {list(x.shape)} {x.dtype} along {self.dim % x.ndim}{of_ids}, op={self.op}, exclusive={self.exclusive}, "
            f"reverse={self.reverse}, indices={self.indices}, {self.dtype}, {self.accumulate}, "
            f"gradient: {needs_gradient(x)}, {self.shards}"
        )

    def _is_torchs(self) -> bool:
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

    def problems(self) -> Iterator[str]:
        yield from self._wrong_kinds()
        if self.op not in MONOIDS:
            yield unknown("op", self.op, MONOIDS)
        yield from wrong_dim(self.x.shape, self.dim)
        if self.indices and not MONOIDS[self.op].selects:
            yield f"indices=True is for max and min, a {self.op} is at no index"
        yield from self._wrong_dtypes()
        yield from self._wrong_segments()
        if self.shards is not None:
            yield from self.shards.problems(self.x.shape, self.dim)

    def _wrong_kinds(self) -> Iterator[str]:
        """What the other checks would stumble over."""
        yield from wrong_tensors(x=self.x)
        if self.segments is not None or self.name == "segmented_scan":
            yield from wrong_tensors(segment_ids=self.segments)
        yield from wrong_dtypes(dtype=self.dtype, accumulate_dtype=self.accumulate)
        yield from wrong_flags(exclusive=self.exclusive, reverse=self.reverse)
        if not isinstance(self.op, str):
            yield f"op={self.op!r}: expected one of {', '.join(MONOIDS)}"

    def _wrong_dtypes(self) -> Iterator[str]:
        given, result = self.x.dtype, self.result
        for dtype in (given, result):
            if not scannable(dtype) and not dtype.is_complex:
                yield f"{dtype} is not supported; cast x, or pass dtype="
        if given.is_floating_point and not result.is_floating_point and needs_gradient(self.x):
            yield f"x needs a gradient, which a result in {result} does not have; detach x, or pass another dtype"
        if given.is_complex or result.is_complex:
            yield f"complex numbers are not supported, got {given if given.is_complex else result}"
        if MONOIDS[self.op].floating and not result.is_floating_point:
            yield f"{self.op} is for floating-point numbers, got {result}; pass dtype=torch.float32"
        if result is torch.bool and self.op in ("sum", "prod"):
            yield f"dtype=torch.bool cannot hold a {self.op}; for any and all pass op='max' and op='min'"
        wanted = self.accumulate
        if wanted is not None and (wanted.is_floating_point != result.is_floating_point or wanted is torch.bool):
            usual = accumulate_dtype(self.op, result, self.x.device)
            yield f"accumulate_dtype={wanted} does not go with a result in {result}; usual: {usual}"

    def _wrong_segments(self) -> Iterator[str]:
        ids, x = self.segments, self.x
        if ids is None:
            return
        if ids.dtype.is_floating_point or ids.dtype is torch.bool or not scannable(ids.dtype):
            hint = "; flags of where segments begin become ids by .cumsum(dim)" * (ids.dtype is torch.bool)
            yield f"segment_ids are integers, got {ids.dtype}{hint}"
        if ids.device != x.device:
            yield f"segment_ids and x are on one device, got {ids.device} and {x.device}"
        yield from self._wrong_shape_of(ids)

    def _wrong_shape_of(self, ids: Tensor) -> Iterator[str]:
        x, shape = self.x, [1] * (self.x.ndim - ids.ndim) + list(ids.shape)
        if ids.ndim <= 1:
            fits = ids.numel() == self.length and ids.ndim <= x.ndim
        else:
            fits = len(shape) == x.ndim and all(size in (1, wanted) for size, wanted in zip(shape, x.shape))
            fits = fits and shape[self.dim] == self.length
        if not fits:
            leading = list(ids.shape) == list(x.shape[: ids.ndim]) and self.dim % x.ndim < ids.ndim < x.ndim
            hint = f"; view them as {[*ids.shape, *[1] * (x.ndim - ids.ndim)]}" if leading else ""
            yield (
                f"segment_ids hold one id for each of the {self.length} positions of dim {self.dim}: expected shape "
                f"[{self.length}], or one that broadcasts to x {list(x.shape)}, got {list(ids.shape)}{hint}"
            )


def as_tensor(value: Tensor | float | None, like: Tensor) -> Tensor | None:
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
        linear_scan = operator_or_body(sp.linear_scan, ops.linear_scan, a, b, initial)
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

    def problems(self) -> Iterator[str]:
        yield from self._wrong_kinds()
        a, b, others = self.a, self.b, [] if self.initial is None else [self.initial]
        if not all(x.is_floating_point() for x in (a, b, *others)):
            yield f"a, b and initial are floating-point, got {', '.join(str(x.dtype) for x in (a, b, *others))}"
        if any(x.device != b.device for x in (a, *others)):
            yield f"a, b and initial are on one device, got {', '.join(str(x.device) for x in (a, b, *others))}"
        if any(x != y and 1 not in (x, y) for x, y in zip(reversed(a.shape), reversed(b.shape))):
            yield f"the shapes of a and b do not broadcast: {list(a.shape)} and {list(b.shape)}"
        if self.accumulate is not None and not self.accumulate.is_floating_point:
            yield f"accumulate_dtype={self.accumulate} is not floating-point"

        shape = torch.broadcast_shapes(self.a.shape, self.b.shape)
        yield from wrong_dim(shape, self.dim)
        if self.initial is not None:
            yield from self._wrong_initial(self.initial, self._shape_of_initial(shape) if shape else [])
        if self.shards is not None:
            yield from self.shards.problems(shape, self.dim)

    def _wrong_kinds(self) -> Iterator[str]:
        """What the other checks would stumble over."""
        yield from wrong_tensors(a=self.a, b=self.b)
        if self.initial is not None:
            yield from wrong_tensors(initial=self.initial)
        yield from wrong_dtypes(accumulate_dtype=self.accumulate)
        yield from wrong_flags(reverse=self.reverse)

    def _wrong_initial(self, initial: Tensor, wanted: Sequence[int]) -> Iterator[str]:
        given = list(initial.shape)
        if len(given) > len(wanted) or any(x not in (1, y) for x, y in zip(given[::-1], wanted[::-1])):
            yield f"initial is of h's shape without dim {self.dim}, {wanted}, or broadcasts to it, got {given}"
