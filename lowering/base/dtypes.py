"""Define half-precision dtypes and the dtypes of their accumulators."""

import torch

HALF = frozenset({torch.float16, torch.bfloat16})
MIN_FILL = 1e4
"""Lower bound on a fill value that masks like infinity: next to it, float32 loses part of log(count)."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half-precision dtypes, else the dtype itself."""
    return torch.float32 if dtype in HALF else dtype
