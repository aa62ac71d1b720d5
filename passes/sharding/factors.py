"""Bind rules to calls: the factors of every dim of operands and results, and their kinds.

For x (2, 8, 16) and w (32, 16), linear has the operands (("~1", "~0", "i"), ("o", "i")), the result ("~1", "~0", "o")
and the kind "sum" for i: the result is partial if i is sharded. `rule.py` explains the kinds.

A factor is a named dim, or a part of one: equal names in operands and results are the same positions. `FACTOR_KINDS`
has the kinds; a factor without one passes through. A dim is one factor, a group of factors in row-major order, "(b s)",
or "" if it has size 1 and broadcasts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_most_of, is_same_size, size_product

from .placement import Placement, Shard
from .window_rules import SlidingRows

FACTOR_KINDS = ("sum", "mean", "total", "replicate", "attend", "scan", "halo", "window")
Dims = tuple[str, ...]


def rename_kind(kind: str) -> str:
    """Return a kind of `FACTOR_KINDS`; for "whole", the deprecated name of "replicate", warn.

    Raises:
        SpError: The kind is unknown.
    """
    if kind == "whole":
        warnings.warn("sharding rule: 'whole' is deprecated; use 'replicate'.", FutureWarning, stacklevel=2)
        return "replicate"
    if kind not in FACTOR_KINDS:
        raise SpError("SP932", f"rule: expected a kind out of {FACTOR_KINDS}, got {kind!r}.")
    return kind


@cache
def dim_factors(dim: str) -> tuple[str, ...]:
    """Return the factors of a dim: "(b s)" has b and s, "d" has d, and "" (size 1) has none."""
    return tuple(dim.strip("()").split())


def group_factors(factors: Iterable[str]) -> str:
    """Return the dim with these factors, "(b s)" for b and s or "b" for b alone: the inverse of `dim_factors`."""
    names = [f for f in factors if f]
    return f"({' '.join(names)})" if len(names) > 1 else "".join(names)


@lru_cache(maxsize=4096)
def flatten_dims(dims: Dims) -> tuple[str, ...]:
    """Return the factors of all dims in order: ("(b s)", "", "d") has b, s and d."""
    return tuple(f for dim in dims for f in dim_factors(dim))


@dataclass(frozen=True)
class BoundRule:
    """Rule bound to one call: factor names for every dim of operands and results, and their kinds.

    From some fields, propagation knows where a sequence starts: at a call with replicated operands, if each rank
    computes only its own rows of the result.
    """

    operands: tuple[Dims, ...]  # factors of each dim of each operand
    results: tuple[Dims, ...]  # factors of each dim of each result
    kinds: Mapping[str, str] = field(default_factory=dict)  # kinds by factor; other factors pass
    sizes: str | None = None  # schema argument with the sizes of the result, localized if the result is sharded
    lazy: bool = False  # no sequence starts at the op: it moves data (a view, a cat), or is a collective
    # a sequence starts at the op: each rank must read only its rows (a sort by expert), or its result is much wider
    # than its operands (one_hot)
    starts_sequence: bool = False
    pad: tuple[int, Any] | None = None  # (operand, value): fill outside the window, so that a sum ignores padding
    # operands that are only indexed by position, as an attention mask: no sequence starts at the op that computes one
    masks: tuple[int, ...] = ()
    normalizes: bool = False  # divides a gathered factor by its total, as softmax does
    # the windows of rows that a result reads, by "halo" factor, which may have another size in the result
    slides: Mapping[str, SlidingRows] = field(default_factory=dict)
    # placements that the call defines for its operands (ops with exchanges)
    operand_placements: tuple[Placement, ...] | None = None
    result_placements: Placement | None = None  # placement that the call defines for its results
    reshapes: bool = False  # elements keep their row-major order, so the local result is a local reshape
    lenders: tuple[int, ...] = ()  # operands of which only the shape is read
    extents: Mapping[str, Size] = field(default_factory=dict)  # sizes of the factors in groups
    # (start, length) of each result in the "window" factor, of which it is a contiguous piece
    spans: tuple[tuple[Size, Size], ...] = ()
    # result factor -> operand factor from which it selects positions, in any order
    picks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that each factor of an operand is in a result or has a kind; give new factors of results a kind.

        A factor that only a result has, such as the new dim of one_hot, is not sharded (kind "replicate"), because the
        local call would create all of it. An op with an argument for sizes (`sizes`) can create a part of it.
        """
        object.__setattr__(self, "kinds", {f: rename_kind(k) for f, k in self.kinds.items()})  # the dataclass is frozen
        operand_factors = {f for dims in self.operands for f in flatten_dims(dims)}
        result_factors = {f for dims in self.results for f in flatten_dims(dims)}
        unclassified = sorted(operand_factors - result_factors - set(self.kinds))
        if unclassified:
            cause = f"expected a kind for each factor that is in no result, got none for {unclassified}."
            raise SpError("SP935", f"rule {str(self)!r}: {cause}")
        new_factors = sorted(result_factors - operand_factors)
        if self.sizes is None and new_factors:
            kinds = {**self.kinds, **dict.fromkeys(new_factors, "replicate")}
            object.__setattr__(self, "kinds", kinds)

    def __str__(self) -> str:
        """Format the rule as text for `RulePattern.parse`, without the sizes of windows."""

        def format_side(tensors: tuple[Dims, ...]) -> str:
            """Return the text of the dims of all operands or of all results."""
            return ", ".join(" ".join(dim or "1" for dim in dims) for dims in tensors)

        kinds = dict.fromkeys(self.kinds.values())  # without duplicates
        options = [f"{kind}={' '.join(f for f, k in self.kinds.items() if k == kind)}" for kind in kinds]
        values = {name: getattr(self, name) for name in ("sizes", "pad", "masks", "lenders")}
        options += [f"{name}={value}" for name, value in values.items() if value not in (None, ())]
        flags = [name for name in ("lazy", "starts_sequence", "reshapes") if getattr(self, name)]
        return "; ".join([f"{format_side(self.operands)} -> {format_side(self.results)}", *options, *flags])

    def kind(self, factor: str) -> str:
        """Return how the op treats the factor: one of FACTOR_KINDS, or "pass"."""
        return self.kinds.get(factor, "pass")

    @property
    def window_dim(self) -> int | None:
        """Return the dim of the first operand that the op cuts into contiguous pieces, as a slice or split, or None."""
        if not self.spans:
            return None
        return next(d for d, f in enumerate(self.operands[0]) if self.kind(f) == "window")

    @property
    def vanishing(self) -> list[str]:
        """Return the factors of the operands that no result has: for "n i, i m -> n m", ["i", "i"].

        A factor of several operands is repeated, which distinguishes a product from a reduction of one operand.
        """
        result_factors = {f for dims in self.results for f in flatten_dims(dims)}
        return [f for dims in self.operands for f in flatten_dims(dims) if f not in result_factors]

    @property
    def is_contraction(self) -> bool:
        """Return True if the op is a product that sums over a factor of two operands, such as i in "n i, i -> n"."""
        return len(self.vanishing) > len(set(self.vanishing))

    def local_part(self, dims: Dims, shard: Shard) -> tuple[str, Shard]:
        """Return the factor along which a value is sharded, and the shard as one of that factor.

        A shard describes its dim as outer * rows * inner. In a group "(b s d)" with b = 2 and d = 3, a shard with
        outer 2 and inner 3 splits s, and the shard of s has outer 1 and inner 1. A dim of one factor has that factor,
        and the same shard. If the rows are several factors, such as chunks and the rows of a chunk, `_chunk_part`
        returns the result. It is ("", shard) if the shard splits no factor.

        Args:
            dims: The dims of the value in the rule.
            shard: The placement of the value.
        """
        dim = dims[shard.dim]
        if dim[:1] != "(":
            return dim, shard
        factors = dim_factors(dim)
        for i, factor in enumerate(factors):
            # The shard splits this factor if all slower factors are in its `outer` and all faster ones in its `inner`.
            outer = exact_quotient(shard.outer, self._size_of(factors[:i]))
            inner = exact_quotient(shard.inner, self._size_of(factors[i + 1 :]))
            if outer is None or inner is None:
                continue
            if is_same_size(size_product((outer, shard.frame.length, inner)), self.extents[factor]):
                return factor, replace(shard, outer=outer, inner=inner)
        return self._chunk_part(factors, shard)

    def _chunk_part(self, factors: tuple[str, ...], shard: Shard) -> tuple[str, Shard]:
        """Return (factor, its shard), as `local_part`, if the rows are several factors: chunks, and rows of a chunk.

        For a sequence of 12 rows and the group "(c r)" with c = 3 chunks of r = 4 rows, the factor is c, and the frame
        of its shard counts chunks in place of rows. The result is ("", shard) if a chunk could be on two ranks, or if
        the rows are no product of factors.
        """
        # Find the factors[first : last + 1] whose product is the number of rows. Those before them are `outer`, those
        # after them `inner`.
        for first, chunk_factor in enumerate(factors):
            if not is_same_size(shard.outer, self._size_of(factors[:first])):
                continue
            rows_and_inner = size_product((shard.frame.length, shard.inner))
            if not is_same_size(rows_and_inner, self._size_of(factors[first:])):
                continue
            for last in range(first + 1, len(factors)):
                if is_same_size(shard.inner, self._size_of(factors[last + 1 :])):
                    chunk_rows = self._size_of(factors[first + 1 : last + 1])
                    frame = shard.frame.split(chunk_rows)
                    return (chunk_factor, Shard(shard.dim, frame)) if frame is not None else ("", shard)
        return "", shard

    def dim_shard(self, dim: str, factor: str, shard: Shard) -> Shard:
        """Convert a shard of a factor to a shard of its dim, the inverse of `local_part`.

        In "(b s d)" with b = 2 and d = 3, a shard of s becomes one of the dim with outer 2 and inner 3. In "(c r)" with
        chunks c of r = 4 rows, a shard of c, whose frame counts chunks (`Frame.block` is 4), becomes one that counts
        rows.
        """
        if dim == factor:
            return shard
        factors = dim_factors(dim)
        i = factors.index(factor)
        before, after = self._size_of(factors[:i]), self._size_of(factors[i + 1 :])
        if shard.frame.block > 1:
            # factors[i + 1 : end] may be the rows of a chunk. `merge` returns a frame that counts rows (block 1), if
            # they are all rows of a chunk.
            for end in range(i + 1, len(factors) + 1):
                merged = shard.frame.merge(self._size_of(factors[i + 1 : end]))
                if merged is not None and merged.block == 1 and is_same_size(shard.inner, 1):
                    return Shard(shard.dim, merged, before * shard.outer, self._size_of(factors[end:]))
        return replace(shard, outer=before * shard.outer, inner=shard.inner * after)

    def window_shard(self, shard: Shard) -> tuple[Shard, ...] | None:
        """Return the shards of the results of a slice or split along the sharded dim, or None to gather the operand.

        A piece (`spans`: start and length for each result) keeps its rows on their ranks: its frame is that of the
        operand with another first valid row and another number of rows.

        Args:
            shard: The placement of the operand.
        """
        rows = shard.outer * shard.frame.length * shard.inner
        if all(is_same_size(start, 0) and is_same_size(length, rows) for start, length in self.spans):
            return (shard,) * len(self.spans)  # every piece is the complete dim
        if not shard.is_only_factor:
            return None  # a piece of a flattened dim is no range of the sequence
        for _, length in self.spans:
            # A piece of one row, such as h[:, :1], may broadcast in later ops, but its shard would have the s rows of a
            # rank, which do not. For a short piece, most ranks have no valid rows, so gathering is cheaper.
            if is_same_size(length, 1) or not is_most_of(length, shard.frame.size):
                return None
        frames = [replace(shard.frame, start=shard.frame.start + start, length=length) for start, length in self.spans]
        return tuple(replace(shard, frame=frame) for frame in frames)

    def _size_of(self, factors: Iterable[str]) -> Size:
        """Return the product of the sizes of factors in a group."""
        return size_product(self.extents[f] for f in factors)
