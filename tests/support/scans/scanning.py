"""Reference scans: one element after another, in float64 or int64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sp_compile import SpError
from sp_compile.lowering.scan.scan_table import using_lowering

OPS = ("sum", "prod", "max", "min", "logsumexp")
COMBINE = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "logsumexp": torch.logaddexp,
}
TORCH = {
    "sum": torch.cumsum,
    "prod": torch.cumprod,
    "max": lambda x, dim: torch.cummax(x, dim).values,
    "min": lambda x, dim: torch.cummin(x, dim).values,
    "logsumexp": torch.logcumsumexp,
}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTS, torch.bool)
LENGTHS = (0, 1, 2, 3, 7, 8, 1000)


def identity(op: str, dtype: torch.dtype) -> float:
    """Return the first value of an exclusive scan."""
    if op in ("sum", "prod"):
        return op == "prod"
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return torch.inf if op == "min" else -torch.inf
    return torch.iinfo(dtype).max if op == "min" else torch.iinfo(dtype).min


def ids_of(length: int) -> Tensor:
    """Return ids of segments of one to four positions."""
    return torch.repeat_interleave(torch.arange(length), torch.arange(length) % 4 + 1)[:length]


def scan_by_loop(
    x: Tensor, dim: int, op: str, exclusive: bool = False, reverse: bool = False, starts: Tensor | None = None
) -> Tensor:
    """Return the scan of x in its dtype. starts: bool in the shape of x."""
    if x.ndim == 0:
        return torch.full_like(x, identity(op, x.dtype)) if exclusive else x
    steps = range(x.shape[dim])
    first = torch.full_like(x.sum(dim), identity(op, x.dtype), dtype=x.dtype)
    run, out = first, [first] * len(steps)
    for i in reversed(steps) if reverse else steps:
        if starts is not None:
            run = torch.where(starts.select(dim, i), first, run)
        after = COMBINE[op](run, x.select(dim, i))
        out[i] = run if exclusive else after
        run = after
    return torch.stack(out, dim) if out else x.clone()


def linear_scan_by_loop(a: Tensor, b: Tensor, dim: int, initial: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Return h_i = a_i * h_(i-1) + b_i."""
    h, out = torch.zeros_like(b.sum(dim)) if initial is None else initial, [b] * b.shape[dim]
    for i in reversed(range(b.shape[dim])) if reverse else range(b.shape[dim]):
        h = a.select(dim, i) * h + b.select(dim, i)
        out[i] = h
    return torch.stack(out, dim) if out else b.clone()


def sample(shape: tuple[int, ...], dtype: torch.dtype, op: str = "sum", seed: int = 0) -> Tensor:
    """Return random values whose products stay in range; some integers are equal."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if op == "prod" and dtype.is_floating_point:
        x = 1 + 0.1 * x
    if dtype is torch.uint8:
        x = x.abs()
    return (x > 0) if dtype is torch.bool else x.to(dtype) if dtype.is_floating_point else (2 * x).to(dtype)


def starts_like(x: Tensor, seed: int = 0) -> Tensor:
    """True at about every fifth element."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.2


def is_as_exact_as(ours: Tensor, torchs: Tensor, exact: Tensor) -> bool:
    """Return True if our error is at most twice torch's, plus one unit in the last place of the largest value.

    For float64, the dtype of `exact`, a thousand units are allowed.
    """
    if not exact.numel():
        return True
    if not ours.dtype.is_floating_point:
        return torch.equal(ours.to(exact.dtype), exact)
    finite = exact.isfinite() & torchs.isfinite()
    if not torch.equal(ours[~finite].double().nan_to_num(7), exact[~finite].nan_to_num(7)):
        return False
    if not finite.any():
        return True
    digits = 1000 if ours.dtype is torch.float64 else 1
    digit = digits * torch.finfo(ours.dtype).eps * exact[finite].abs().max()
    errors = [(x[finite].double() - exact[finite]).abs().max() for x in (ours, torchs)]
    return bool(errors[0] <= 2 * errors[1] + digit)


def run(row: str, op: Callable[..., Any], *operands: Any) -> Any:
    """Return the operator's results by one row of the lowering table; None if the row does not fit."""
    with using_lowering(row):
        try:
            return op(*operands)
        except SpError:
            return None
