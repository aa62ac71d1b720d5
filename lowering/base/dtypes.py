"""The dtypes of half precision, what their sums are kept in, and what these lose."""

import torch

HALF = frozenset({torch.float16, torch.bfloat16})
MIN_FILL = 1e4
"""A number of so much that stands for infinity: a float32 loses some of log(count) beside it."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half types, else the type itself."""
    return torch.float32 if dtype in HALF else dtype
