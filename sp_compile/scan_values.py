"""Checks of a scan that need its values: done in eager mode only, and not on a tensor without values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._compat import FakeTensor, is_functorch_tensor


def observable(x: Tensor) -> bool:
    """May Python look at the values of x?"""
    if torch.compiler.is_compiling():
        return False
    return not (x.is_meta or isinstance(x, FakeTensor) or is_functorch_tensor(x))


def transformed(*xs: Tensor | None) -> bool:
    """Is one of them inside torch.func, which does not see into the body of an operator?"""
    if torch.compiler.is_compiling():
        return False
    return any(is_functorch_tensor(x) for x in xs if x is not None)


def ungrouped(ids: Tensor, dim: int) -> bool:
    """Does an id come again along dim after another one? Ids that are not in order are sorted."""
    before, after = _neighbours(ids, dim)
    if bool((before <= after).all()) or bool((before >= after).all()):
        return False
    changes = (before != after).sum(dim)
    before, after = _neighbours(ids.sort(dim).values, dim)
    return bool((changes != (before != after).sum(dim)).any())


def _neighbours(ids: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    pairs = max(ids.shape[dim] - 1, 0)
    return ids.narrow(dim, 0, pairs), ids.narrow(dim, ids.shape[dim] - pairs, pairs)


def never_overflows(x: Tensor, op: str, length: int, dtype: torch.dtype) -> bool:
    """Does the dtype hold every sum or product of `length` numbers of x's own dtype, bool or integers?"""
    if x.dtype is torch.bool:
        return not _exceeds(1, op, length, torch.iinfo(dtype).max)
    own = torch.iinfo(x.dtype)
    return not _exceeds(max(-own.min, own.max), op, length, torch.iinfo(dtype).max)


def may_overflow(x: Tensor, op: str, length: int, dtype: torch.dtype) -> bool:
    """Can a sum or product of `length` numbers as large as those of an integer x leave the dtype?"""
    if never_overflows(x, op, length, dtype) or not x.numel():
        return False
    ends = (x.to(torch.uint8) if x.dtype is torch.bool else x).aminmax()
    least, greatest = (int(end) for end in ends)
    return _exceeds(max(-least, greatest), op, length, torch.iinfo(dtype).max)


def _exceeds(magnitude: int, op: str, length: int, limit: int) -> bool:
    if op == "sum":
        return magnitude * length > limit
    return magnitude > 1 and length * math.log2(magnitude) >= math.log2(limit)


def wrapped(out: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the integers of out have wrapped round in dtype, told by the same numbers in float64.

    A number that wraps is off by a multiple of 2**bits, and float64 by much less than half of that, or it is so large
    that one before it has wrapped.
    """
    return ((exact - out.double()).abs() >= 2.0 ** (torch.iinfo(dtype).bits - 1)) | ~exact.isfinite()
