"""Every private torch name that the package uses, in one place."""

from torch.utils._sympy.functions import FloorDiv  # tried on 2.13

__all__ = ["FloorDiv"]
