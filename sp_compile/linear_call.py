"""One call of the public linear_scan: its operands, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import SpError
from .scan_call import wrong_dim

sp = torch.ops.sp


@dataclass(frozen=True)
class LinearCall:
    """A call of linear_scan."""

    a: Tensor
    b: Tensor
    dim: int
    initial: Tensor | None
    reverse: bool
    accumulate: torch.dtype | None

    def run(self) -> Tensor:
        """The scan. Raises SpError for a call that does not fit."""
        _raise(self._problems())
        dtype = torch.promote_types(self.a.dtype, self.b.dtype)
        a, b = torch.broadcast_tensors(self.a.to(dtype), self.b.to(dtype))
        _raise(wrong_dim(b, self.dim))
        initial = self.initial
        if initial is not None:
            shape = [size for i, size in enumerate(b.shape) if i != self.dim % b.ndim]
            _raise(self._wrong_initial(initial, shape))
            initial = initial.to(dtype).expand(shape)
        return sp.linear_scan(a, b, initial, self.dim, self.reverse, self.accumulate)

    def _problems(self) -> Iterator[str]:
        a, b, others = self.a, self.b, [] if self.initial is None else [self.initial]
        if not all(x.is_floating_point() for x in (a, b, *others)):
            yield f"a, b and initial are floating-point, got {', '.join(str(x.dtype) for x in (a, b, *others))}"
        if any(x.device != b.device for x in (a, *others)):
            yield f"a, b and initial are on one device, got {', '.join(str(x.device) for x in (a, b, *others))}"
        if any(x != y and 1 not in (x, y) for x, y in zip(reversed(a.shape), reversed(b.shape))):
            yield f"the shapes of a and b do not broadcast: {list(a.shape)} and {list(b.shape)}"
        if self.accumulate is not None and not self.accumulate.is_floating_point:
            yield f"accumulate_dtype={self.accumulate} is not floating-point"

    def _wrong_initial(self, initial: Tensor, shape: Sequence[int]) -> Iterator[str]:
        given, wanted = list(initial.shape), list(shape)
        if len(given) > len(wanted) or any(x not in (1, y) for x, y in zip(given[::-1], wanted[::-1])):
            yield f"initial is of h's shape without dim {self.dim}, {wanted}, or broadcasts to it, got {given}"


def _raise(problems: Iterator[str]) -> None:
    for problem in problems:
        raise SpError(f"linear_scan: {problem}")
