"""What the scan kernels combine, in Triton: one function an operation, and one for segments laid over it.

A state is one tensor, or two: (maximum, sum of exponentials relative to it), (h, factor) or (value, index). The
left operand is the earlier state. In a segmented state a flag comes first: nothing is carried into a state that
holds the start of a segment. Importing this needs triton.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@triton.jit
def _sum(a, b):  # type: ignore[no-untyped-def]
    return a + b


@triton.jit
def _prod(a, b):  # type: ignore[no-untyped-def]
    return a * b


@triton.jit
def _max(a, b):  # type: ignore[no-untyped-def]
    return tl.where((b >= a) | (b != b), b, a)


@triton.jit
def _min(a, b):  # type: ignore[no-untyped-def]
    return tl.where((b <= a) | (b != b), b, a)


@triton.jit
def _logsumexp(top_a, a, top_b, b):  # type: ignore[no-untyped-def]
    top = tl.where(top_b >= top_a, top_b, top_a)
    # The weight of the larger is 1 by choice: two infinities have no difference.
    a = a * tl.where(top_a == top, 1.0, tl.exp(top_a - top))
    b = b * tl.where(top_b == top, 1.0, tl.exp(top_b - top))
    return top, a + b


@triton.jit
def _linear(h_a, factor_a, h_b, factor_b):  # type: ignore[no-untyped-def]
    return factor_b * h_a + h_b, factor_a * factor_b


@triton.jit
def _argmax(a, at_a, b, at_b):  # type: ignore[no-untyped-def]
    later = (b >= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, at_b, at_a)


@triton.jit
def _argmin(a, at_a, b, at_b):  # type: ignore[no-untyped-def]
    later = (b <= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, at_b, at_a)


@triton.jit
def _segmented_sum(start_a, a, start_b, b):  # type: ignore[no-untyped-def]
    return start_a | start_b, tl.where(start_b != 0, b, a + b)


@triton.jit
def _segmented_prod(start_a, a, start_b, b):  # type: ignore[no-untyped-def]
    return start_a | start_b, tl.where(start_b != 0, b, a * b)


@triton.jit
def _segmented_max(start_a, a, start_b, b):  # type: ignore[no-untyped-def]
    return start_a | start_b, tl.where(start_b != 0, b, _max(a, b))


@triton.jit
def _segmented_min(start_a, a, start_b, b):  # type: ignore[no-untyped-def]
    return start_a | start_b, tl.where(start_b != 0, b, _min(a, b))


@triton.jit
def _segmented_logsumexp(start_a, top_a, a, start_b, top_b, b):  # type: ignore[no-untyped-def]
    top, both = _logsumexp(top_a, a, top_b, b)
    return start_a | start_b, tl.where(start_b != 0, top_b, top), tl.where(start_b != 0, b, both)


@triton.jit
def _segmented_argmax(start_a, a, at_a, start_b, b, at_b):  # type: ignore[no-untyped-def]
    later = (start_b != 0) | (b >= a) | (b != b)
    return start_a | start_b, tl.where(later, b, a), tl.where(later, at_b, at_a)


@triton.jit
def _segmented_argmin(start_a, a, at_a, start_b, b, at_b):  # type: ignore[no-untyped-def]
    later = (start_b != 0) | (b <= a) | (b != b)
    return start_a | start_b, tl.where(later, b, a), tl.where(later, at_b, at_a)


@dataclass(frozen=True)
class Operator:
    """combine: of two states. segmented: of two with flags. leaf: what makes the state of one element, see `scan_parts`."""

    combine: Callable[..., Any]
    segmented: Callable[..., Any]
    leaf: str = "value"

    @property
    def pair(self) -> bool:
        return self.leaf != "value"


OPERATORS = {
    "sum": Operator(_sum, _segmented_sum),
    "prod": Operator(_prod, _segmented_prod),
    "max": Operator(_max, _segmented_max),
    "min": Operator(_min, _segmented_min),
    "logsumexp": Operator(_logsumexp, _segmented_logsumexp, "exponentials"),
    "linear": Operator(_linear, _linear, "linear"),
    "argmax": Operator(_argmax, _segmented_argmax, "indexed"),
    "argmin": Operator(_argmin, _segmented_argmin, "indexed"),
}
