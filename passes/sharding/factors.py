"""What an op does at one call: the factors of every dim of its operands and results, and how it treats each.

A dim is its factor, a group of factors in row-major order, "(b s)", or "" if it is of size 1 and broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.graph.sizes import Size, mostly, product, quotient, same

from .placement import Placement, Shard
from .window_rules import SlidingRows

KINDS = ("sum", "mean", "total", "whole", "attend", "scan", "halo", "window")
Dims = tuple[str, ...]


@cache
def parts(dim: str) -> tuple[str, ...]:
    """The factors of a dim: those of a group, the one that it is, or none."""
    return tuple(dim.strip("()").split())


def group(factors: Iterable[str]) -> str:
    """The dim that these are the factors of: what `parts` undoes."""
    found = [f for f in factors if f]
    return f"({' '.join(found)})" if len(found) > 1 else "".join(found)


@lru_cache(maxsize=4096)
def flat(dims: Dims) -> tuple[str, ...]:
    """The factors of all the dims, in row-major order."""
    return tuple(f for dim in dims for f in (parts(dim) if dim[:1] == "(" else (dim,)) if f)


@dataclass(frozen=True)
class Factors:
    """A rule at one call: factor names for every dim of every operand and result, and what mixes them.

    extents: the sizes of the factors that stand in groups.
    sizes: the schema argument that spells the result's sizes (made local when the result is sharded).
    lazy: the op only moves data, so it does not by itself decide that a replicated value is worth sharding.
    begins: replicated operands are cut for it, whatever their dtype: what it makes of whole ones is none of shards, or
        much wider than they are.
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
    begins: bool = False
    pad: tuple[int, Any] | None = None
    masks: tuple[int, ...] = ()
    normalises: bool = False
    slides: Mapping[str, SlidingRows] = field(default_factory=dict)
    wants: tuple[Placement, ...] | None = None
    gives: Placement | None = None
    alias: bool = False
    reshapes: bool = False
    lenders: tuple[int, ...] = ()
    extents: Mapping[str, Size] = field(default_factory=dict)
    spans: tuple[tuple[Size, Size], ...] = ()
    picks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A factor of no operand can be local only if a size argument makes it so; none may vanish unclassified."""
        named = {f for dims in self.operands for f in flat(dims)}
        kept = {f for dims in self.results for f in flat(dims)}
        lost = sorted(named - kept - set(self.kinds))
        if lost:
            raise SpError("SP935", f"rule {self}: {lost} are in no result and are not classified.")
        if self.sizes is None and kept - named:
            object.__setattr__(self, "kinds", {**self.kinds, **dict.fromkeys(sorted(kept - named), "whole")})

    def __str__(self) -> str:
        """The text that `Pattern.parse` reads; the numbers of windows are the call's."""
        sides = (
            ", ".join(" ".join(dim or "1" for dim in dims) for dims in side) for side in (self.operands, self.results)
        )
        by_kind: dict[str, list[str]] = {}
        for factor, kind in self.kinds.items():
            by_kind.setdefault(kind, []).append(factor)
        said = [f"{kind}={' '.join(factors)}" for kind, factors in by_kind.items()]
        given = {name: getattr(self, name) for name in ("sizes", "pad", "masks", "lenders")}
        said += [f"{name}={value}" for name, value in given.items() if value not in (None, ())]
        flags = [name for name in ("lazy", "begins", "reshapes") if getattr(self, name)]
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
    def lost(self) -> list[str]:
        """The factors of the operands, as often as they stand there, that no result has."""
        kept = {f for dims in self.results for f in flat(dims)}
        return [f for dims in self.operands for f in flat(dims) if f not in kept]

    @property
    def contracts(self) -> bool:
        """Is it a product that sums over a factor of two operands?"""
        return len(self.lost) > len(set(self.lost))

    def inside(self, dims: Dims, shard: Shard) -> tuple[str, Shard]:
        """Which factor of a value of these dims the shard cuts, and how; "" if it cuts no single one.

        In a dim that is the factor alone it is the same shard; in a group, outer and inner count within the factor.
        """
        dim = dims[shard.dim]
        if dim[:1] != "(":
            return dim, shard
        factors = parts(dim)
        for i, factor in enumerate(factors):
            outer = quotient(shard.outer, self._size(factors[:i]))
            inner = quotient(shard.inner, self._size(factors[i + 1 :]))
            if outer is None or inner is None:
                continue
            own = replace(shard, outer=outer, inner=inner)
            if same(product((outer, shard.frame.length, inner)), self.extents[factor]):
                return factor, own
        return "", shard

    def outside(self, dim: str, factor: str, shard: Shard) -> Shard:
        """The shard of a factor, as one of the dim that it is in: what `inside` undoes."""
        if dim == factor:
            return shard
        factors = parts(dim)
        at = factors.index(factor)
        before, after = self._size(factors[:at]), self._size(factors[at + 1 :])
        return replace(shard, outer=before * shard.outer, inner=shard.inner * after)

    def cut(self, shard: Shard) -> tuple[Shard, ...] | None:
        """Where a shard of the window's factor lies in each result; None if it would have no single place there.

        A piece is the same frame with a shorter window, and no data moves. A short one would have every rank compute on
        mostly invalid rows: gathering is cheaper. A single row may broadcast, which its local shape would not show.
        """
        whole = shard.outer * shard.frame.length * shard.inner
        if all(same(start, 0) and same(length, whole) for start, length in self.spans):  # all rows
            return (shard,) * len(self.spans)
        out = []
        for start, length in self.spans:
            if same(length, 1) or not mostly(length, shard.frame.size):
                return None
            frame = replace(shard.frame, start=shard.frame.start + start, length=length)
            out.append(replace(shard, frame=frame))
        return tuple(out) if same(shard.outer, 1) and same(shard.inner, 1) else None

    def _size(self, factors: Iterable[str]) -> Size:
        return product(self.extents[f] for f in factors)
