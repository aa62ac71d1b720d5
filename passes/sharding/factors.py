"""What an op does at one call: the factors of every dim of its operands and results, and how it treats each.

A dim is its factor, a group of factors in row-major order, "(b s)", or "" if it is of size 1 and broadcasts.
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
    """The factors of a dim: those of a group, the one that it is, or none."""
    return tuple(dim.strip("()").split())


def group_factors(factors: Iterable[str]) -> str:
    """The dim that these are the factors of: what `dim_factors` undoes."""
    found = [f for f in factors if f]
    return f"({' '.join(found)})" if len(found) > 1 else "".join(found)


@lru_cache(maxsize=4096)
def flatten_dims(dims: Dims) -> tuple[str, ...]:
    """The factors of all the dims, in row-major order."""
    return tuple(f for dim in dims for f in (dim_factors(dim) if dim[:1] == "(" else (dim,)) if f)


@dataclass(frozen=True)
class BoundRule:
    """A rule at one call: factor names for every dim of every operand and result, and what mixes them.

    extents: the sizes of the factors that stand in groups.
    sizes: the schema argument that spells the result's sizes (made local when the result is sharded).
    lazy: the op only moves data, so it does not by itself decide that a replicated value is worth sharding.
    starts_sequence: replicated operands are cut for it, whatever their dtype: what it makes of whole ones is none of
        shards, or much wider than they are.
    reshapes: the elements keep their row-major order, so a rank makes its part by a reshape to its local sizes.
    lenders: the operands of which only the shape is read.
    pad: (operand, value): the operand to fill outside the window, and with what, so that a sum ignores padding.
    masks: operands that are only looked up by position; computed whole on every rank as long as that is free.
    normalises: what it needs whole it divides by its total, as softmax does.
    slides: for every factor of kind "halo", the rows that a result reads; its extent may differ in the result.
    spans: (start, length) in the factor of kind "window" for each result, a contiguous piece of the operand.
    picks: factors of a result that hold some positions of an operand's factor, in any order: as long a sequence.
    wants, gives: where the call itself says that its operands and its results lie (an op that does its own exchanges).
    alias: with its operand where the call wants it, what a rank holds of it is what it holds of the result.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)
    sizes: str | None = None
    lazy: bool = False
    starts_sequence: bool = False
    pad: tuple[int, Any] | None = None
    masks: tuple[int, ...] = ()
    normalizes: bool = False
    slides: Mapping[str, SlidingRows] = field(default_factory=dict)
    operand_placements: tuple[Placement, ...] | None = None
    result_placements: Placement | None = None
    alias: bool = False
    reshapes: bool = False
    lenders: tuple[int, ...] = ()
    extents: Mapping[str, Size] = field(default_factory=dict)
    spans: tuple[tuple[Size, Size], ...] = ()
    picks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A factor of no operand can be local only if a size argument makes it so; none may vanish unclassified."""
        named = {f for dims in self.operands for f in flatten_dims(dims)}
        kept = {f for dims in self.results for f in flatten_dims(dims)}
        lost = sorted(named - kept - set(self.kinds))
        if lost:
            raise SpError("SP935", f"rule {self}: {lost} are in no result and are not classified.")
        if self.sizes is None and kept - named:
            object.__setattr__(self, "kinds", {**self.kinds, **dict.fromkeys(sorted(kept - named), "whole")})

    def __str__(self) -> str:
        """The text that `RulePattern.parse` reads; the numbers of windows are the call's."""
        sides = (
            ", ".join(" ".join(dim or "1" for dim in dims) for dims in side) for side in (self.operands, self.results)
        )
        by_kind: dict[str, list[str]] = {}
        for factor, kind in self.kinds.items():
            by_kind.setdefault(kind, []).append(factor)
        said = [f"{kind}={' '.join(factors)}" for kind, factors in by_kind.items()]
        given = {name: getattr(self, name) for name in ("sizes", "pad", "masks", "lenders")}
        said += [f"{name}={value}" for name, value in given.items() if value not in (None, ())]
        flags = [name for name in ("lazy", "starts_sequence", "reshapes") if getattr(self, name)]
        return "; ".join([" -> ".join(sides), *said, *flags])

    def kind(self, factor: str) -> str:
        """How the op treats the factor: one of KINDS, or "pass"."""
        return self.kinds.get(factor, "pass")

    @property
    def window(self) -> int | None:
        """The dim that the op cuts: each result is a contiguous piece of it, as `spans` says."""
        if not self.spans:
            return None
        return next(d for d, f in enumerate(self.operands[0]) if self.kind(f) == "window")

    @property
    def vanishing(self) -> list[str]:
        """The factors of the operands, as often as they stand there, that no result has."""
        kept = {f for dims in self.results for f in flatten_dims(dims)}
        return [f for dims in self.operands for f in flatten_dims(dims) if f not in kept]

    @property
    def is_contraction(self) -> bool:
        """Is it a product that sums over a factor of two operands?"""
        return len(self.vanishing) > len(set(self.vanishing))

    def local_part(self, dims: Dims, shard: Shard) -> tuple[str, Shard]:
        """Which factor of a value of these dims the shard cuts, and how; "" if it cuts no single one.

        In a dim that is the factor alone it is the same shard; in a group, outer and inner count within the factor.
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
            own = replace(shard, outer=outer, inner=inner)
            if is_same_size(size_product((outer, shard.frame.length, inner)), self.extents[factor]):
                return factor, own
        return "", shard

    def dim_shard(self, dim: str, factor: str, shard: Shard) -> Shard:
        """The shard of a factor, as one of the dim that it is in: what `inside` undoes."""
        if dim == factor:
            return shard
        factors = dim_factors(dim)
        at = factors.index(factor)
        before, after = self._size(factors[:at]), self._size(factors[at + 1 :])
        return replace(shard, outer=before * shard.outer, inner=shard.inner * after)

    def window_shard(self, shard: Shard) -> tuple[Shard, ...] | None:
        """Where a shard of the window's factor lies in each result; None if it would have no single place there.

        A piece is the same frame with a shorter window, and no data moves. A short one would have every rank compute on
        mostly invalid rows: gathering is cheaper. A single row may broadcast, which its local shape would not show.
        """
        whole = shard.outer * shard.frame.length * shard.inner
        if all(is_same_size(start, 0) and is_same_size(length, whole) for start, length in self.spans):  # all rows
            return (shard,) * len(self.spans)
        out = []
        for start, length in self.spans:
            if is_same_size(length, 1) or not is_most_of(length, shard.frame.size):
                return None
            frame = replace(shard.frame, start=shard.frame.start + start, length=length)
            out.append(replace(shard, frame=frame))
        return tuple(out) if is_same_size(shard.outer, 1) and is_same_size(shard.inner, 1) else None

    def _size(self, factors: Iterable[str]) -> Size:
        return size_product(self.extents[f] for f in factors)
