"""One call of the public linear_scan: its operands, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import SpError
from .lowering.scan import operators
from .lowering.scan.monoids import accumulate_dtype
from .scan_call import wrong_dim, wrong_tensors
from .scan_shards import Shards
from .scan_values import transformed

sp = torch.ops.sp


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
        linear_scan = operators.linear_scan if transformed(a, b, initial) else sp.linear_scan
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
