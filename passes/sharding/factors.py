"""Bind rules to calls: the factors of every dim of operands and results, and their kinds.

For x (2, 8, 16) and w (32, 16), linear has the operands (("~1", "~0", "i"), ("o", "i")), the result ("~1", "~0", "o")
and the kind "sum" for i: the result is partial if i is sharded. `rule.py` explains the kinds.

A factor is a named dim, or a part of one: equal names in operands and results are the same positions. `FACTOR_KINDS`
has the kinds; a factor without one passes through. A dim is one factor, a group of factors in row-major order, "(b s)",
or "" if it has size 1 and broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_most_of, is_same_size, size_product

from .placement import Placement, Shard
from .window_rules import SlidingRows

FACTOR_KINDS = ("sum", "mean", "total", "whole", "attend", "scan", "halo", "window")
Dims = tuple[str, ...]


@cache
def dim_factors(dim: str) -> tuple[str, ...]:
    """Return the factors of a dim: those of a group, a single factor, or none."""
    return tuple(dim.strip("()").split())


def group_factors(factors: Iterable[str]) -> str:
    """Return the dim with these factors, the inverse of `dim_factors`."""
    names = [f for f in factors if f]
    return f"({' '.join(names)})" if len(names) > 1 else "".join(names)


@lru_cache(maxsize=4096)
def flatten_dims(dims: Dims) -> tuple[str, ...]:
    """Return the factors of all dims in row-major order."""
    return tuple(f for dim in dims for f in (dim_factors(dim) if dim[:1] == "(" else (dim,)) if f)


@dataclass(frozen=True)
class BoundRule:
    """Rule bound to one call: factor names for every dim of operands and results, and their kinds."""

    operands: tuple[Dims, ...]  # factors of each dim of each operand
    results: tuple[Dims, ...]  # factors of each dim of each result
    kinds: Mapping[str, str] = field(default_factory=dict)  # kinds by factor; other factors pass
    sizes: str | None = None  # schema argument with the sizes of the result, localized if the result is sharded
    lazy: bool = False  # the op only moves data, so it is no reason to shard a replicated value
    # replicated operands are sharded for it: its result differs on full values, or is much wider
    starts_sequence: bool = False
    pad: tuple[int, Any] | None = None  # (operand, value): fill outside the window, so that a sum ignores padding
    masks: tuple[int, ...] = ()  # operands that are only indexed by position, replicated while that is free
    normalizes: bool = False  # divides a gathered factor by its total, as softmax does
    # rows that a result reads, by "halo" factor, whose extent may differ in the result
    slides: Mapping[str, SlidingRows] = field(default_factory=dict)
    # placements that the call defines for its operands (ops with exchanges)
    operand_placements: tuple[Placement, ...] | None = None
    result_placements: Placement | None = None  # placement that the call defines for its results
    alias: bool = False  # with an operand placed as required, a rank's part of it is its part of the result
    reshapes: bool = False  # elements keep their row-major order, so the local result is a local reshape
    lenders: tuple[int, ...] = ()  # operands of which only the shape is read
    extents: Mapping[str, Size] = field(default_factory=dict)  # sizes of the factors in groups
    # (start, length) in the "window" factor for each result, a contiguous piece
    spans: tuple[tuple[Size, Size], ...] = ()
    # result factor -> operand factor from which it selects positions, in any order
    picks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate that no factor vanishes unclassified.

        A factor that no operand has needs a size argument to be local; without one its kind is "whole".
        """
        operand_factors = {f for dims in self.operands for f in flatten_dims(dims)}
        result_factors = {f for dims in self.results for f in flatten_dims(dims)}
        unclassified = sorted(operand_factors - result_factors - set(self.kinds))
        if unclassified:
            raise SpError("SP935", f"rule {self}: {unclassified} are in no result and are not classified.")
        new_factors = sorted(result_factors - operand_factors)
        if self.sizes is None and new_factors:
            object.__setattr__(self, "kinds", {**self.kinds, **dict.fromkeys(new_factors, "whole")})

    def __str__(self) -> str:
        """Format the rule as text for `RulePattern.parse`, without the sizes of windows."""
        sides = (
            ", ".join(" ".join(dim or "1" for dim in dims) for dims in side) for side in (self.operands, self.results)
        )
        by_kind: dict[str, list[str]] = {}
        for factor, kind in self.kinds.items():
            by_kind.setdefault(kind, []).append(factor)
        options = [f"{kind}={' '.join(factors)}" for kind, factors in by_kind.items()]
        values = {name: getattr(self, name) for name in ("sizes", "pad", "masks", "lenders")}
        options += [f"{name}={value}" for name, value in values.items() if value not in (None, ())]
        flags = [name for name in ("lazy", "starts_sequence", "reshapes") if getattr(self, name)]
        return "; ".join([" -> ".join(sides), *options, *flags])

    def kind(self, factor: str) -> str:
        """Return how the op treats the factor: one of FACTOR_KINDS, or "pass"."""
        return self.kinds.get(factor, "pass")

    @property
    def window(self) -> int | None:
        """Return the dim that the op cuts into contiguous pieces (see `spans`), or None."""
        if not self.spans:
            return None
        return next(d for d, f in enumerate(self.operands[0]) if self.kind(f) == "window")

    @property
    def vanishing(self) -> list[str]:
        """Return the factors of the operands that no result has, with repetitions."""
        result_factors = {f for dims in self.results for f in flatten_dims(dims)}
        return [f for dims in self.operands for f in flatten_dims(dims) if f not in result_factors]

    @property
    def is_contraction(self) -> bool:
        """Return True if the op is a product that sums over a factor of two operands."""
        return len(self.vanishing) > len(set(self.vanishing))

    def local_part(self, dims: Dims, shard: Shard) -> tuple[str, Shard]:
        """Return the factor that the shard splits, and the shard within it.

        The result is ("", shard) if the shard splits no single factor. If the dim is one factor, the shard is
        unchanged; in a group, outer and inner are relative to the factor.
        """
        dim = dims[shard.dim]
        if dim[:1] != "(":
            return dim, shard
        factors = dim_factors(dim)
        for i, factor in enumerate(factors):
            outer = exact_quotient(shard.outer, self._size(factors[:i]))
            inner = exact_quotient(shard.inner, self._size(factors[i + 1 :]))
            if outer is None or inner is None:
                continue
            if is_same_size(size_product((outer, shard.frame.length, inner)), self.extents[factor]):
                return factor, replace(shard, outer=outer, inner=inner)
        return self._chunk_part(factors, shard)

    def _chunk_part(self, factors: tuple[str, ...], shard: Shard) -> tuple[str, Shard]:
        """Return the factor of chunks of a shard that spans several factors, and its shard, or ("", shard)."""
        for i, factor in enumerate(factors):
            if not is_same_size(shard.outer, self._size(factors[:i])):
                continue
            for j in range(i + 1, len(factors)):
                rows = size_product((shard.frame.length, shard.inner))
                if is_same_size(rows, self._size(factors[i:])) and is_same_size(
                    shard.inner, self._size(factors[j + 1 :])
                ):
                    frame = shard.frame.split(self._size(factors[i + 1 : j + 1]))
                    return (factor, Shard(shard.dim, frame)) if frame is not None else ("", shard)
        return "", shard

    def dim_shard(self, dim: str, factor: str, shard: Shard) -> Shard:
        """Convert a shard of a factor to a shard of its dim, the inverse of `local_part`."""
        if dim == factor:
            return shard
        factors = dim_factors(dim)
        i = factors.index(factor)
        before, after = self._size(factors[:i]), self._size(factors[i + 1 :])
        for j in range(i + 1, len(factors) + 1) if shard.frame.block > 1 else ():  # the chunks and their rows
            merged = shard.frame.merge(self._size(factors[i + 1 : j]))
            if merged is not None and merged.block == 1 and is_same_size(shard.inner, 1):
                return Shard(shard.dim, merged, before * shard.outer, self._size(factors[j:]))
        return replace(shard, outer=before * shard.outer, inner=shard.inner * after)

    def window_shard(self, shard: Shard) -> tuple[Shard, ...] | None:
        """Return the shard of the window factor in each result, or None if it has no single position there.

        A piece has the same frame with a shorter window, and no data moves. For a short piece most ranks would compute
        invalid rows, so gathering is cheaper. A single row may broadcast, which its local shape would not show.
        """
        rows = shard.outer * shard.frame.length * shard.inner
        if all(is_same_size(start, 0) and is_same_size(length, rows) for start, length in self.spans):  # all rows
            return (shard,) * len(self.spans)
        if not is_same_size(shard.outer, 1) or not is_same_size(shard.inner, 1):
            return None
        if any(is_same_size(length, 1) or not is_most_of(length, shard.frame.size) for _, length in self.spans):
            return None
        frames = [replace(shard.frame, start=shard.frame.start + start, length=length) for start, length in self.spans]
        return tuple(replace(shard, frame=frame) for frame in frames)

    def _size(self, factors: Iterable[str]) -> Size:
        return size_product(self.extents[f] for f in factors)
