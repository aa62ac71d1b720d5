"""What stands behind a value in shards: how it lies over the ranks, this rank's rows, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import row_order
from sp_compile.lowering.torch_compat import FakeTensor, real_tensors

from .deferred import LateRows

sp = torch.ops.sp


@dataclass(frozen=True, eq=False)
class Orders:
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
    dealt: Orders | None = field(default=None, compare=False)

    def __str__(self) -> str:
        part = "a part of " if not self.is_plain else ""
        return f"along {part}dim {self.dim} over {self.n} ranks{row_order(self.folds).said}"

    @property
    def is_plain(self) -> bool:
        """Is the sequence all of the dim, and the dim all of the sequence?"""
        return (self.outer, self.inner, self.before, self.after) == (1, 1, 0, 0)

    @property
    def is_dealt(self) -> bool:
        """Does each call tell the order?"""
        return row_order(self.folds).dealt

    def frame(self, length: int) -> list[int]:
        """The frame of a whole whose dim is `length` long, as sp:: ops take it."""
        rows = length // (self.outer * self.inner)
        size = self.before + rows + self.after
        return [self.outer, size, self.before, rows, *([self.folds] if self.folds > 1 else [])]

    def same_rows(self, other: Layout) -> bool:
        """Does each rank hold the same rows in both?"""
        return self == replace(other, order=self.order) and self.dealt is other.dealt

    def strides(self, shape: Sequence[int]) -> list[int]:
        """Those of a whole of this shape, without gaps."""
        out, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            out[dim], step = step, step * shape[dim]
        return out

    def whole(self, local: Tensor, length: int) -> Tensor:
        """All ranks' rows: an all-gather."""
        whole = sp.unshard.default(local, self.dim, self.frame(length), self.n, self.group)
        if self.dealt is not None:
            whole = sp.reorder.default(whole, self.dim, self.frame(length), self.dealt.inverse, self.dealt.order)
        return self.dense(whole)

    def empty(self, local: Tensor, length: int) -> Tensor:
        """One like all ranks' rows, whatever stands in it."""
        shape = [length if dim == self.dim else extent for dim, extent in enumerate(local.shape)]
        return local.new_empty_strided(shape, self.strides(shape))

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole; padding holds copies of others."""
        frame = self.frame(whole.shape[self.dim])
        if self.dealt is not None:
            whole = sp.reorder.default(whole, self.dim, frame, self.dealt.order, self.dealt.inverse)
        return self.dense(sp.shard.default(whole, self.dim, frame, self.n, self.group))

    def dense(self, x: Tensor) -> Tensor:
        """The same values without gaps in memory, in its order; also along dims of one element."""
        back, strides = [self.order.index(dim) for dim in range(x.ndim)], self.strides(x.shape)
        found = x.permute(self.order).contiguous().permute(back)
        return found if list(found.stride()) == strides else found.as_strided(x.shape, strides)


def _nobody(words: str) -> None:
    """Ranks that are simulated, or trace, need not be asked."""


@dataclass(frozen=True)
class Origin:
    """Where a value comes from, in words. meet: ranks tell each other that they read it; raises SpError.

    looked: is told of what reads it where it is whole already, as in a look at a program.
    """

    words: str = "a value in shards"
    meet: Callable[[str], None] = _nobody
    looked: Callable[[str], None] = _nobody


class HeldValue(Protocol):
    """What stands behind a value: rows of it, or the whole."""

    layout: Layout

    def rows(self) -> Tensor: ...

    def read(self) -> Tensor: ...


@dataclass(eq=False)
class HeldRows:
    """What stands behind a value and all its aliases: this rank's rows, or the whole once somebody has read it.

    The rows are gone then: eager code may write to the whole, and a graph that takes the value cuts its own.
    late: what makes the rows when they are first asked for.
    """

    layout: Layout
    length: int
    local: Tensor | None
    origin: Origin = field(default_factory=Origin)
    whole: Tensor | None = None
    late: LateRows | None = None

    @property
    def near(self) -> Tensor:
        """Of the same dtype, on the same device: what there is of it."""
        found = self.late.like if self.late is not None else self.local if self.local is not None else self.whole
        assert found is not None
        return found

    @property
    def _is_traced(self) -> bool:
        """Is it a compiler's stand-in?"""
        return type(self.near) is not Tensor

    def rows(self) -> Tensor:
        """This rank's, for real while something is traced. Raises SpError: they are made late, of what is no more."""
        for_real = nullcontext() if self._is_traced else real_tensors()
        with torch.no_grad(), for_real:
            if self.late is not None:
                self.local, self.late = self.late.make(), None
            return self.local if self.local is not None else self.layout.rows(self._known())

    def read(self) -> Tensor:
        """The whole; every rank comes here. Raises SpError, on every rank that comes, if one does not.

        Of a compiler's stand-in nothing is kept, and of a fake one only the shape is known: no guard is added on it.
        """
        if self.whole is not None:
            self.origin.looked(self.origin.words)
            return self.whole
        local, traced = self.rows(), self._is_traced
        if not traced:
            self.origin.meet(f"{self.origin.words} ({local.dtype} of {self.length} rows)")
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(local, FakeTensor):
                return self.layout.empty(local, self.length)
            whole = self.layout.whole(local, self.length)
        if not traced:
            self.whole, self.local = whole, None
        return whole

    def become(self, new: Tensor, held: HeldValue | None) -> None:
        """Hold what was written to the value, and so to all its aliases. held: of a new value in shards, its own.

        Rows are replaced: graphs have kept the old ones for their backwards. Plain tensors share the memory of a whole.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self.whole is None and held is not None and held.layout.same_rows(self.layout):
                self.local = self.layout.dense(held.rows())
                return
            whole = new if held is None else held.read()
            if self.whole is None:
                self.whole, self.local = self.layout.dense(whole.clone()), None
            else:
                self.whole.copy_(whole)

    def _known(self) -> Tensor:
        assert self.whole is not None
        return self.whole

    def mapped(self, op: Callable[[Tensor], Tensor], name: str) -> HeldRows:
        """The same of another value, made of this one row by row."""
        origin = replace(self.origin, words=f"{name} of {self.origin.words}")
        if self.whole is not None:
            return HeldRows(self.layout, self.length, None, origin, op(self.whole))
        if self.late is not None:
            return HeldRows(self.layout, self.length, None, origin, late=self.late.then(op))
        return HeldRows(self.layout, self.length, op(self.rows()), origin)
