"""The dtypes of half precision, and what their sums are kept in."""

import torch

HALF = frozenset({torch.float16, torch.bfloat16})


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half types, else the type itself."""
    return torch.float32 if dtype in HALF else dtype
