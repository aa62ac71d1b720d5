"""One call of a public scan: its operands and options, and what is wrong with them.

One call of the public linear_scan: its operands, and what is wrong with them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import SpError
from sp_compile.lowering.scan import ops
from sp_compile.lowering.scan.monoids import MONOIDS, accumulate_dtype, result_dtype, scannable
from sp_compile.lowering.scan.table import SMALL

from .scan_shards import Shards, may_overflow, never_overflows, observable, transformed, ungrouped, wrapped

sp = torch.ops.sp
INDEX = 8  # bytes
UNGROUPED = (
    "segment_ids are not grouped: an id comes again after another one. Sort x by them or, if every run of equal ids is "
    "a segment of its own, pass runs=True"
)
_SYNONYMS = {
    **dict.fromkeys(("add", "plus", "cumsum"), "sum"),
    **dict.fromkeys(("mul", "product", "cumprod"), "prod"),
    **dict.fromkeys(("maximum", "amax", "cummax", "or", "any"), "max"),
    **dict.fromkeys(("minimum", "amin", "cummin", "and", "all"), "min"),
    **dict.fromkeys(("lse", "logaddexp", "logcumsumexp"), "logsumexp"),
}


@dataclass(frozen=True)
class ScanCall:
    """A call of inclusive_scan, exclusive_scan or segmented_scan.

    runs: may an id come again as another segment? shards: how ranks share the dim; None: x is whole.
    """

    name: str
    x: Tensor
    dim: int
    op: str
    exclusive: bool
    reverse: bool
    dtype: torch.dtype | None
    accumulate: torch.dtype | None
    check: bool
    segments: Tensor | None = None
    runs: bool = False
    shards: Shards | None = None

    @property
    def result(self) -> torch.dtype:
        """The dtype of the result."""
        return self.dtype or result_dtype(self.op, self.x.dtype)

    @property
    def length(self) -> int:
        """Of the scanned dim of x."""
        return self.x.shape[self.dim] if self.x.ndim else 1

    @property
    def among_ranks(self) -> Shards | None:
        """The shards, if ranks can stop for what other ranks say: a traced program cannot."""
        alone = self.shards is None or self.shards.ranks.n == 1 or torch.compiler.is_compiling()
        return None if alone or not self.check else self.shards

    def run(self) -> Tensor:
        """The scan. Raises SpError for a call that does not fit, or an integer that overflows."""
        self._require()
        out = self._scan(self.x, self.dtype, self.accumulate)
        self._require_in_range(out)
        return out

    def run_with_indices(self) -> tuple[Tensor, Tensor]:
        """The running max or min, and where it stands. Raises SpError for a call that does not fit."""
        self._require(indices=True)
        x = self.x.to(self.result)
        extremes = ops.extremes if transformed(x) else sp.extremes
        return extremes(x, self.dim, self.op, self.reverse, *self._arguments(x.element_size() + INDEX))

    def _require(self, indices: bool = False) -> None:
        problem = next(self._problems(indices), None)
        problem = None if problem is None else f"{self.name}: {problem}"
        shards, ids = self.among_ranks, self.segments
        if shards is not None:
            shards.agree(self.name, problem, "" if problem else self._description(indices))
            if ids is not None and not self.runs and observable(ids) and self.length:
                # All ranks see the same ids, so all of them raise.
                again = shards.ungrouped(ids, self._dim_of(ids))
                problem = f"{self.name}: {UNGROUPED}" if again else None
        if problem is not None:
            raise SpError(problem)

    def _description(self, indices: bool) -> str:
        """What must be the same on every rank, or exchanges would not meet."""
        x, ids = self.x, self.segments
        wants = needs_gradient(x)
        of_ids = "" if ids is None else f", segment_ids {list(ids.shape)} {ids.dtype}, runs={self.runs}"
        return (
            f"x {list(x.shape)} {x.dtype} along {self.dim % x.ndim}{of_ids}, op={self.op}, exclusive={self.exclusive}, "
            f"reverse={self.reverse}, indices={indices}, {self.dtype}, {self.accumulate}, gradient: {wants}"
        )

    def _arguments(self, element: int) -> tuple[Any, ...]:
        """What the sp operators need to know of the shards. element: bytes that a rank tells of a column."""
        if self.shards is None:
            return ()
        columns = self.x.numel() // max(self.length, 1)
        return self.shards.arguments(self.length, columns * element, self.x.device)

    def _scan(self, x: Tensor, dtype: torch.dtype | None, accumulate: torch.dtype | None) -> Tensor:
        if self._is_torchs(x, accumulate):
            return MONOIDS[self.op].cumulative(x, self.dim, dtype=dtype)
        usual = accumulate_dtype(self.op, self.result, x.device)
        inner = usual if accumulate is None or MONOIDS[self.op].selects else accumulate
        how = self.dim, self.op, self.exclusive, self.reverse, dtype, accumulate
        scan = ops.scan if transformed(x) else sp.scan
        return scan(x, self.segments, *how, *self._arguments(inner.itemsize))

    def _is_torchs(self, x: Tensor, accumulate: torch.dtype | None) -> bool:
        """Would torch's scan run in the end? Then it may as well run at once: of a few contiguous rows."""
        if self.op not in ("sum", "prod") or self.exclusive or self.reverse:
            return False
        if self.segments is not None or self.shards is not None:
            return False
        plain = accumulate is None and x.device.type == "cpu" and not torch.compiler.is_compiling()
        if (
            not plain
            or x.numel() > SMALL
            or x.ndim == 0
            or self.dim not in (-1, x.ndim - 1)
            or not x.is_contiguous()
        ):
            return False
        # torch's derivative of a product divides by its factors.
        return self.op == "sum" or not needs_gradient(x)

    def _require_in_range(self, out: Tensor) -> None:
        checked = self.check and self.op in ("sum", "prod") and not out.dtype.is_floating_point
        if not checked or not observable(self.x) or not observable(out):
            return
        x, shards = self.x.to(self.result) if self.x.is_floating_point() else self.x, self.among_ranks
        dtype = min(out.dtype, self.accumulate or out.dtype, key=lambda each: torch.iinfo(each).bits)
        length = self.length * (shards.ranks.n if shards else 1)
        if never_overflows(x, self.op, length, dtype):
            return
        risk = may_overflow(x, self.op, length, dtype)
        if shards.any(risk) if shards else risk:
            exact = self._scan(x.double(), None, None)
            places = wrapped(out, exact, dtype).nonzero().tolist()
            problem = f"{self.name}: {self._overflow(exact, places[0], dtype)}" if places else None
            if shards is not None:
                shards.raise_together(self.name, problem)
            elif problem is not None:
                raise SpError(problem)

    def _overflow(self, exact: Tensor, index: list[int], dtype: torch.dtype) -> str:
        value, where = f"{exact[tuple(index)].item():.6g}", f"at index {tuple(index)}"
        wider = "torch.int64" if dtype is not torch.int64 else "torch.float64, which rounds,"
        hint = f"pass dtype={wider} or check=False to let it wrap round"
        return f"the {self.op} is about {value} {where}, which {dtype} cannot hold; {hint}"

    def _problems(self, indices: bool = False) -> Iterator[str]:
        yield from self._wrong_kinds()
        yield from self._wrong_op()
        yield from wrong_dim(self.x.shape, self.dim)
        if indices and not MONOIDS[self.op].selects:
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
        for name, value in (("dtype", self.dtype), ("accumulate_dtype", self.accumulate)):
            if value is not None and not isinstance(value, torch.dtype):
                yield f"{name}={value!r}: expected a torch.dtype"
        for name, flag in (("exclusive", self.exclusive), ("reverse", self.reverse), ("runs", self.runs)):
            if not isinstance(flag, bool):
                yield f"{name}={flag!r}: expected True or False"
        if not isinstance(self.op, str):
            yield f"op={self.op!r}: expected one of {', '.join(MONOIDS)}"

    def _wrong_op(self) -> Iterator[str]:
        if self.op not in MONOIDS:
            close = (
                [_SYNONYMS[self.op]]
                if self.op in _SYNONYMS
                else difflib.get_close_matches(str(self.op), MONOIDS)
            )
            guess = f" (did you mean {close[0]!r}?)" if close else ""
            yield f"unknown op {self.op!r}{guess}; known: {', '.join(MONOIDS)}"

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
        if wanted is not None and (
            wanted.is_floating_point != result.is_floating_point or wanted is torch.bool
        ):
            usual = accumulate_dtype(self.op, result, self.x.device)
            yield f"accumulate_dtype={wanted} does not go with a result in {result}; usual: {usual}"

    def _wrong_segments(self) -> Iterator[str]:
        ids, x = self.segments, self.x
        if ids is None:
            return
        if ids.dtype.is_floating_point or ids.dtype is torch.bool or not scannable(ids.dtype):
            hint = (
                "; flags of where segments begin become ids by .cumsum(dim)"
                if ids.dtype is torch.bool
                else ""
            )
            yield f"segment_ids are integers, got {ids.dtype}{hint}"
        if ids.device != x.device:
            yield f"segment_ids and x are on one device, got {ids.device} and {x.device}"
        yield from self._wrong_shape_of(ids)
        if (
            self.check
            and not self.runs
            and ids.ndim
            and self.among_ranks is None
            and observable(ids)
            and ungrouped(ids, self._dim_of(ids))
        ):
            yield UNGROUPED

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

    def _dim_of(self, ids: Tensor) -> int:
        """The dim of the ids that runs along the scanned one."""
        return 0 if ids.ndim <= 1 else self.dim % self.x.ndim - self.x.ndim


def needs_gradient(x: Tensor) -> bool:
    """Will anybody ask for the gradient of x?"""
    return x.requires_grad and torch.is_grad_enabled()


def wrong_tensors(**given: object) -> Iterator[str]:
    """Is each a strided tensor?"""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            yield f"{name} is a tensor, got {type(x).__name__}"
        elif x.layout is not torch.strided:
            yield f"{name} is a strided tensor, got {x.layout}"


def wrong_dim(shape: Sequence[int], dim: int) -> Iterator[str]:
    """Is dim one of the shape's?"""
    ndim = max(len(shape), 1)
    if not isinstance(dim, int):
        yield f"dim is an int, got {type(dim).__name__}"
    if not -ndim <= dim < ndim:
        yield f"dim {dim} is out of range for x of shape {list(shape)}: expected {-ndim} to {ndim - 1}"


def as_tensor(value: Tensor | float | None, like: Tensor) -> Tensor | None:
    """A number as a tensor of no dims; all else as it is."""
    is_number = isinstance(value, (int, float)) and isinstance(like, Tensor)
    return like.new_full((), value) if is_number else value


@dataclass(frozen=True)
class LinearCall:
    """A call of linear_scan."""

    a: Tensor
    b: Tensor
    dim: int
    initial: Tensor | None
    reverse: bool
    accumulate: torch.dtype | None
    check: bool = True
    shards: Shards | None = None

    def run(self) -> Tensor:
        """The scan. Raises SpError for a call that does not fit."""
        self._require()
        dtype = torch.promote_types(self.a.dtype, self.b.dtype)
        a, b = torch.broadcast_tensors(self.a.to(dtype), self.b.to(dtype))
        initial = self.initial
        if initial is not None:
            initial = initial.to(dtype).expand(self._shape_of_initial(b.shape))
        how = self.dim, self.reverse, self.accumulate
        linear_scan = ops.linear_scan if transformed(a, b, initial) else sp.linear_scan
        return linear_scan(a, b, initial, *how, *self._arguments(b))

    def _arguments(self, b: Tensor) -> tuple[Any, ...]:
        """What the operator needs to know of the shards."""
        if self.shards is None:
            return ()
        inner = self.accumulate or accumulate_dtype("sum", b.dtype, b.device)
        rows = b.shape[self.dim]
        return self.shards.arguments(rows, b.numel() // max(rows, 1) * 2 * inner.itemsize, b.device)

    def _require(self) -> None:
        problem = next(self._problems(), None)
        problem = None if problem is None else f"linear_scan: {problem}"
        shards = self.shards
        if shards is not None and self.check and shards.ranks.n > 1 and not torch.compiler.is_compiling():
            shards.agree("linear_scan", problem, "" if problem else self._description())
        if problem is not None:
            raise SpError(problem)

    def _description(self) -> str:
        """What must be the same on every rank, or exchanges would not meet."""
        given = {"a": self.a, "b": self.b, "initial": self.initial}
        grads = torch.is_grad_enabled()
        each = [
            f"{name} {list(x.shape)} {x.dtype}{' with a gradient' * (x.requires_grad and grads)}"
            for name, x in given.items()
            if x is not None
        ]
        return f"{', '.join(each)}, along {self.dim}, reverse={self.reverse}, {self.accumulate}"

    def _shape_of_initial(self, shape: Sequence[int]) -> list[int]:
        return [size for i, size in enumerate(shape) if i != self.dim % len(shape)]

    def _problems(self) -> Iterator[str]:
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
        if self.accumulate is not None and not isinstance(self.accumulate, torch.dtype):
            yield f"accumulate_dtype={self.accumulate!r}: expected a torch.dtype"
        if not isinstance(self.reverse, bool):
            yield f"reverse={self.reverse!r}: expected True or False"

    def _wrong_initial(self, initial: Tensor, wanted: Sequence[int]) -> Iterator[str]:
        given = list(initial.shape)
        if len(given) > len(wanted) or any(x not in (1, y) for x, y in zip(given[::-1], wanted[::-1])):
            yield f"initial is of h's shape without dim {self.dim}, {wanted}, or broadcasts to it, got {given}"
