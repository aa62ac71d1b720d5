"""Define half-precision dtypes, the dtypes of their accumulators, and the size of fills.

A fill is a large negative finite score that a model writes into a mask in place of -inf.
"""

import torch

HALF = frozenset({torch.float16, torch.bfloat16})  # half-precision dtypes
# Smallest absolute value of a fill. Smaller finite numbers are ordinary scores. Merging of blocks adds log(number of
# keys) to a score; at this size and above, float32 loses the low bits of that sum.
MIN_FILL = 1e4


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of values of a dtype accumulate, and log-sum-exps are stored.

    It is float32 for half-precision dtypes, else the dtype itself.
    """
    return torch.float32 if dtype in HALF else dtype


def has_gradient_dtype(value: torch.Tensor) -> bool:
    """Return True if the dtype of a tensor has gradients: real or complex floating point."""
    return value.is_floating_point() or value.is_complex()
