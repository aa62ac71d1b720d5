"""What stands behind a value in shards: how it lies over the ranks, this rank's rows, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import row_order
from sp_compile.lowering.torch_compat import FakeTensor, use_real_tensors

from .deferred import DeferredRows

sp = torch.ops.sp


@dataclass(frozen=True, eq=False)
class RowPermutation:
    """The order in which ranks hold positions, its inverse, int64 (S,) each, and its runs: of ``sp::deal``."""

    order: Tensor
    inverse: Tensor
    chunks: Tensor


@dataclass(frozen=True)
class Layout:
    """Dim `dim` lies over the `n` ranks of a group: ceil(S / n) rows each, of which the last ranks' may be padding.

    folds: 1, a run of rows; 2, zigzag; 0, a run of the rows in the order of `dealt`, which each call tells.
    order: the dims of the whole in memory, from the largest stride to the smallest.
    outer, inner: the dim is `outer * S * inner`, of tokens that were flattened with a batch. before, after: rows that
    ranks hold around the S of the value, which is a window: 0, 1 of `logits[:, :-1]`.
    """

    dim: int
    n: int
    group: str
    order: tuple[int, ...]
    folds: int = 1
    outer: int = 1
    inner: int = 1
    before: int = 0
    after: int = 0
    balanced: RowPermutation | None = field(default=None, compare=False)

    def __str__(self) -> str:
        part = "a part of " if not self.is_plain else ""
        return f"along {part}dim {self.dim} over {self.n} ranks{row_order(self.folds).label}"

    @property
    def is_plain(self) -> bool:
        """Is the sequence all of the dim, and the dim all of the sequence?"""
        return (self.outer, self.inner, self.before, self.after) == (1, 1, 0, 0)

    @property
    def is_balanced(self) -> bool:
        """Does each call tell the order?"""
        return row_order(self.folds).is_balanced

    def frame(self, length: int) -> list[int]:
        """The frame of a whole whose dim is `length` long, as sp:: ops take it."""
        rows = length // (self.outer * self.inner)
        size = self.before + rows + self.after
        return [self.outer, size, self.before, rows, *([self.folds] if self.folds > 1 else [])]

    def has_same_rows(self, other: Layout) -> bool:
        """Does each rank hold the same rows in both?"""
        return self == replace(other, order=self.order) and self.balanced is other.balanced

    def strides(self, shape: Sequence[int]) -> list[int]:
        """Those of a whole of this shape, without gaps."""
        out, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            out[dim], step = step, step * shape[dim]
        return out

    def gather(self, local: Tensor, length: int) -> Tensor:
        """All ranks' rows: an all-gather."""
        whole = sp.unshard.default(local, self.dim, self.frame(length), self.n, self.group)
        if self.balanced is not None:
            whole = sp.reorder.default(whole, self.dim, self.frame(length), self.balanced.inverse, self.balanced.order)
        return self.as_dense(whole)

    def empty(self, local: Tensor, length: int) -> Tensor:
        """One like all ranks' rows, whatever stands in it."""
        shape = [length if dim == self.dim else extent for dim, extent in enumerate(local.shape)]
        return local.new_empty_strided(shape, self.strides(shape))

    def local_rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole; padding holds copies of others."""
        frame = self.frame(whole.shape[self.dim])
        if self.balanced is not None:
            whole = sp.reorder.default(whole, self.dim, frame, self.balanced.order, self.balanced.inverse)
        return self.as_dense(sp.shard.default(whole, self.dim, frame, self.n, self.group))

    def as_dense(self, x: Tensor) -> Tensor:
        """The same values without gaps in memory, in its order; also along dims of one element."""
        back, strides = [self.order.index(dim) for dim in range(x.ndim)], self.strides(x.shape)
        found = x.permute(self.order).contiguous().permute(back)
        return found if list(found.stride()) == strides else found.as_strided(x.shape, strides)


def _skip_meet(words: str) -> None:
    """Ranks that are simulated, or trace, need not be asked."""


@dataclass(frozen=True)
class Origin:
    """Where a value comes from, in words. meet: ranks tell each other that they read it; raises SpError.

    looked: is told of what reads it where it is whole already, as in a look at a program.
    """

    text: str = "a value in shards"
    meet: Callable[[str], None] = _skip_meet
    simulated: Callable[[str], None] = _skip_meet


class StoredValue(Protocol):
    """What stands behind a value: rows of it, or the whole."""

    layout: Layout

    def rows(self) -> Tensor: ...

    def read(self) -> Tensor: ...


@dataclass(eq=False)
class ShardStorage:
    """What stands behind a value and all its aliases: this rank's rows, or the whole once somebody has read it.

    The rows are gone then: eager code may write to the whole, and a graph that takes the value cuts its own.
    late: what makes the rows when they are first asked for.
    """

    layout: Layout
    length: int
    local: Tensor | None
    origin: Origin = field(default_factory=Origin)
    full: Tensor | None = None
    deferred: DeferredRows | None = None

    @property
    def local_like(self) -> Tensor:
        """Of the same dtype, on the same device: what there is of it."""
        found = self.deferred.like if self.deferred is not None else self.local if self.local is not None else self.full
        assert found is not None
        return found

    @property
    def _is_traced(self) -> bool:
        """Is it a compiler's stand-in?"""
        return type(self.local_like) is not Tensor

    def rows(self) -> Tensor:
        """This rank's, for real while something is traced. Raises SpError: they are made late, of what is no more."""
        for_real = nullcontext() if self._is_traced else use_real_tensors()
        with torch.no_grad(), for_real:
            if self.deferred is not None:
                self.local, self.deferred = self.deferred.compute(), None
            return self.local if self.local is not None else self.layout.local_rows(self._check_known())

    def read(self) -> Tensor:
        """The whole; every rank comes here. Raises SpError, on every rank that comes, if one does not.

        Of a compiler's stand-in nothing is kept, and of a fake one only the shape is known: no guard is added on it.
        """
        if self.full is not None:
            self.origin.simulated(self.origin.text)
            return self.full
        local, traced = self.rows(), self._is_traced
        if not traced:
            self.origin.meet(f"{self.origin.text} ({local.dtype} of {self.length} rows)")
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(local, FakeTensor):
                return self.layout.empty(local, self.length)
            whole = self.layout.gather(local, self.length)
        if not traced:
            self.full, self.local = whole, None
        return whole

    def assign(self, new: Tensor, held: StoredValue | None) -> None:
        """Hold what was written to the value, and so to all its aliases. held: of a new value in shards, its own.

        Rows are replaced: graphs have kept the old ones for their backwards. Plain tensors share the memory of a whole.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self.full is None and held is not None and held.layout.has_same_rows(self.layout):
                self.local = self.layout.as_dense(held.rows())
                return
            whole = new if held is None else held.read()
            if self.full is None:
                self.full, self.local = self.layout.as_dense(whole.clone()), None
            else:
                self.full.copy_(whole)

    def _check_known(self) -> Tensor:
        assert self.full is not None
        return self.full

    def map_rows(self, op: Callable[[Tensor], Tensor], name: str) -> ShardStorage:
        """The same of another value, made of this one row by row."""
        origin = replace(self.origin, text=f"{name} of {self.origin.text}")
        if self.full is not None:
            return ShardStorage(self.layout, self.length, None, origin, op(self.full))
        if self.deferred is not None:
            return ShardStorage(self.layout, self.length, None, origin, deferred=self.deferred.map_rows(op))
        return ShardStorage(self.layout, self.length, op(self.rows()), origin)
