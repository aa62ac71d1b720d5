"""Rules of ops that only regroup or cut dims: where a sharded factor goes, worked out from sizes and strides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sp_compile.graph.sizes import Size, mostly, product, quotient, same

from .placement import Shard


@dataclass(frozen=True)
class Reshape:
    """Row-major regrouping of dims (view, flatten, unflatten, ...): a sharded factor keeps its strides."""

    before: tuple[Size, ...]
    after: tuple[Size, ...]
    sizes: str | None = None


@dataclass(frozen=True)
class Window:
    """Contiguous pieces of one dim (slice, narrow, split, chunk): (start, length) per result.

    On the sharded dim a piece is the same frame with a shorter window, and no data moves.
    """

    dim: int
    spans: tuple[tuple[Size, Size], ...] | None  # None: not contiguous or not provable


def move(rule_: Reshape | Window, shard: Shard) -> tuple[Shard, ...] | None:
    """Where the sharded factor lies in each result of a reshape or window; None if it has no single place."""
    if isinstance(rule_, Window):
        return _windowed(rule_, shard)
    moved = _regroup(rule_, shard)
    return (moved,) if moved is not None else None


def _windowed(rule_: Window, shard: Shard) -> tuple[Shard, ...] | None:
    if rule_.spans is None:
        return None
    if rule_.dim != shard.dim:
        return tuple(shard for _ in rule_.spans)
    if not (same(shard.outer, 1) and same(shard.inner, 1)):
        return None
    frame = shard.frame
    out = []
    for start, length in rule_.spans:
        # A short window would have every rank compute on mostly invalid rows: gathering is cheaper. A single row
        # may broadcast, which its local shape would not show.
        if same(length, 1) or not mostly(length, frame.size):
            return None
        out.append(Shard(shard.dim, replace(frame, start=frame.start + start, length=length)))
    return tuple(out)


def _regroup(rule_: Reshape, shard: Shard) -> Shard | None:
    """Find the result dim that holds outer' * window * inner' with the same row-major strides."""
    before = product(rule_.before[: shard.dim]) * shard.outer
    after = product(rule_.before[shard.dim + 1 :]) * shard.inner
    for dim, extent in enumerate(rule_.after):
        outer = quotient(before, product(rule_.after[:dim]))
        inner = quotient(after, product(rule_.after[dim + 1 :]))
        if (
            outer is not None
            and inner is not None
            and same(extent, product((outer, shard.frame.length, inner)))
        ):
            return Shard(dim, shard.frame, outer, inner)
    return None
