"""A view of a value in shards that stays in shards: which rows of a rank are its rows, and how it is sharded.

    h: [B, S, D] along dim 1      h.flatten(0, 1): [B * S, D] along a part of dim 0      h[:, 1:]: a window of dim 1
    h[:, 0]                       no such view: the value is read

It keeps nothing of its own. Whether the value is read, is written, or is in shards, the view is of what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.torch_compat import in_backward

from .deferred import LateRows
from .shard_storage import HeldRows, HeldValue, Layout, Origin


@dataclass(eq=False)
class HeldView:
    """What stands behind a view, as `HeldRows` behind a value.

    base, shape: of the value. like: the view of the whole, as a meta tensor. layout: of the view.
    """

    base: HeldRows
    shape: Sequence[int]
    like: Tensor
    layout: Layout

    @property
    def length(self) -> int:
        return self.like.shape[self.layout.dim]

    @property
    def origin(self) -> Origin:
        return replace(self.base.origin, words=f"a view of {self.base.origin.words}")

    @property
    def near(self) -> Tensor:
        return self.base.near

    @property
    def late(self) -> LateRows | None:
        return self.base.late

    @property
    def whole(self) -> Tensor | None:
        found = self.base.whole
        return None if found is None else self._of(found)

    def rows(self) -> Tensor:
        """This rank's; a view of the value's, as long as that is in shards."""
        with torch.no_grad():
            whole = self.whole
            if whole is not None:
                return self.layout.rows(whole)
            rows = self.base.layout.dense(self.base.rows())
            return rows.as_strided(*self._among(rows))

    def read(self) -> Tensor:
        """The whole, in the memory of the value's, which is read."""
        return self._of(self.base.read())

    def become(self, new: Tensor, held: HeldValue | None) -> None:
        """Write it into the value, which is read for that."""
        with torch.inference_mode(False), torch.no_grad():
            whole = new if held is None else held.read()
            self.read().copy_(whole)

    def mapped(self, op: Callable[[Tensor], Tensor], name: str) -> HeldRows:
        """The same of another value, made of this one row by row."""
        origin = replace(self.origin, words=f"{name} of {self.origin.words}")
        whole = self.whole
        rows = None if whole is not None else op(self.rows())
        return HeldRows(self.layout, self.length, rows, origin, None if whole is None else op(whole))

    def _of(self, whole: Tensor) -> Tensor:
        start = int(whole.storage_offset()) + int(self.like.storage_offset())
        return whole.as_strided(self.like.shape, self.like.stride(), start)

    def _among(self, rows: Tensor) -> tuple[list[int], list[int], int]:
        """Shape, strides and beginning of a rank's rows of the view among its rows of the value."""
        dim, own = self.base.layout.dim, self.layout
        step, held = self.base.layout.strides(self.shape)[dim], rows.shape[dim]
        block, there = step * self.shape[dim], step * held
        shape, start = list(self.like.shape), int(self.like.storage_offset())
        shape[own.dim] = own.outer * held * own.inner
        strides = [x // block * there + x % block for x in self.like.stride()]
        start = start // block * there + start % step
        return shape, strides, int(rows.storage_offset()) + start


_makes_views: ContextVar[bool] = ContextVar("makes_views", default=False)


def make_view(base: Tensor, steps: Iterable[Callable[[Any], Any]]) -> Any:
    """A result that is a view of another on one device, by the views in between; of one in shards it stays in shards
    where that can be, and otherwise it is read.
    """
    token = _makes_views.set(True)
    try:
        return reduce(lambda x, step: step(x), steps, base)
    finally:
        _makes_views.reset(token)


def keeps_views() -> bool:
    """Do views of values in shards stay in shards now? Those of gradients, and of results that share memory."""
    return _makes_views.get() or in_backward()


def views_held(held: HeldRows | HeldView, shape: Sequence[int], op: Callable[[Tensor], Any]) -> Any:
    """What stands behind the view, or the views, that an op makes of a value of this shape.

    None if one is of some positions alone, or of others than dims of the whole, or where nothing runs.
    """
    if any(isinstance(x, torch.SymInt) for x in shape) or type(held.near) is not Tensor:
        return None
    if isinstance(held, HeldView):
        base, whole, like = held.base, held.shape, held.like
    else:
        strides = held.layout.strides(shape)
        base, whole = held, shape
        like = torch.empty_strided(shape, strides, dtype=held.near.dtype, device="meta")
    found = op(like)
    made = [_view_held(base, whole, one) for one in ([found] if isinstance(found, Tensor) else found)]
    if None in made:
        return None
    return made[0] if isinstance(found, Tensor) else made


def _view_held(base: HeldRows, shape: Sequence[int], like: Tensor) -> HeldView | None:
    """One of them. like: the view, as a meta tensor, of the whole in the memory of a value without gaps."""
    layout = _layout(base.layout, shape, like) if base.layout.is_plain and like.dtype == base.near.dtype else None
    return None if layout is None else HeldView(base, shape, like, layout)


def _layout(base: Layout, shape: Sequence[int], like: Tensor) -> Layout | None:
    """How a view lies over the ranks, by where its elements are in memory."""
    length, step = shape[base.dim], base.strides(shape)[base.dim]
    block, start = step * length, int(like.storage_offset())
    if length < 2 or 0 in like.shape:
        return None
    dims = [(d, extent, stride) for d, (extent, stride) in enumerate(zip(like.shape, like.stride())) if extent > 1]
    along = [(d, extent, stride) for d, extent, stride in dims if stride % block and (extent - 1) * stride >= step]
    if len(along) != 1:
        return None
    ((dim, extent, stride),) = along
    within = sum((n - 1) * x for d, n, x in dims if d != dim and x % block) + start % step
    inner = step // stride
    if inner * stride != step or extent % inner or within >= stride:
        return None
    rows, first = extent // inner, start // step % length
    outer, more = divmod(rows, length)
    order = tuple(sorted(range(like.ndim), key=lambda d: -like.stride(d)))
    found = replace(base, dim=dim, order=order, inner=inner)
    if outer and not more and not first:
        return replace(found, outer=outer)
    return replace(found, before=first, after=length - first - rows) if first + rows <= length else None
