"""Where the factor that one value is sharded on lies in another value of the same op."""

from __future__ import annotations

from collections.abc import Sequence

from ..call import Call
from ..layout import Frame, Shard
from ..rule import Dims
from ..shapes import Size, divides, product, same


def located(base: Shard, dims: Dims, shape: Sequence[Size], factor: str, n: int) -> Shard | None:
    """Where a tensor of these dims lies if `factor` is sharded as in `base`; None without the factor."""
    if factor not in dims:
        return None
    at = dims.index(factor)
    return _scaled(base, at, shape[at], n)


def same_place(call: Call, i: int, have: Shard, base: Shard, n: int) -> bool:
    """Do an operand's shards hold the positions that those in `base` do?"""
    return have.matches(base) or have.matches(_scaled(base, have.dim, call.shape(i)[have.dim], n) or base)


def _scaled(base: Shard, dim: int, extent: Size, n: int) -> Shard | None:
    """The same factor in a dim of another extent (grouped heads): whole multiples only."""
    if same(extent, product((base.outer, base.frame.length, base.inner))):
        return base.on(dim)
    total = product((base.outer, base.frame.size, base.inner))
    if (
        base.frame.folds == 1
        and base.frame.exact(n)
        and same(base.outer, 1)
        and divides(n, total)
        and divides(n, extent)
    ):
        return Shard(dim, Frame.full(extent))
    return None
