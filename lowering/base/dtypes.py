"""Define half-precision dtypes and the dtypes of their accumulators."""

import torch

HALF = frozenset({torch.float16, torch.bfloat16})  # half-precision dtypes
# Smallest absolute value of a finite number that masks a score like infinity.
#
# Next to such a score float32 would lose the low bits of log(number of keys), which merging of blocks adds to it.
MIN_FILL = 1e4


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half-precision dtypes, else the dtype itself."""
    return torch.float32 if dtype in HALF else dtype
