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

from sp_compile.lowering.torch_compat import is_in_backward

from .deferred import DeferredRows
from .shard_storage import Layout, Origin, ShardStorage, StoredValue


@dataclass(eq=False)
class ViewStorage:
    """What stands behind a view, as `ShardStorage` behind a value.

    base, shape: of the value. like: the view of the whole, as a meta tensor. layout: of the view.
    """

    base: ShardStorage
    shape: Sequence[int]
    like: Tensor
    layout: Layout

    @property
    def length(self) -> int:
        return self.like.shape[self.layout.dim]

    @property
    def origin(self) -> Origin:
        return replace(self.base.origin, text=f"a view of {self.base.origin.text}")

    @property
    def local_like(self) -> Tensor:
        return self.base.local_like

    @property
    def deferred(self) -> DeferredRows | None:
        return self.base.deferred

    @property
    def full(self) -> Tensor | None:
        found = self.base.full
        return None if found is None else self._local_view(found)

    def rows(self) -> Tensor:
        """This rank's; a view of the value's, as long as that is in shards."""
        with torch.no_grad():
            whole = self.full
            if whole is not None:
                return self.layout.local_rows(whole)
            rows = self.base.layout.as_dense(self.base.rows())
            return rows.as_strided(*self._local_geometry(rows))

    def read(self) -> Tensor:
        """The whole, in the memory of the value's, which is read."""
        return self._local_view(self.base.read())

    def assign(self, new: Tensor, held: StoredValue | None) -> None:
        """Write it into the value, which is read for that."""
        with torch.inference_mode(False), torch.no_grad():
            whole = new if held is None else held.read()
            self.read().copy_(whole)

    def map_rows(self, op: Callable[[Tensor], Tensor], name: str) -> ShardStorage:
        """The same of another value, made of this one row by row."""
        origin = replace(self.origin, text=f"{name} of {self.origin.text}")
        whole = self.full
        rows = None if whole is not None else op(self.rows())
        return ShardStorage(self.layout, self.length, rows, origin, None if whole is None else op(whole))

    def _local_view(self, whole: Tensor) -> Tensor:
        start = int(whole.storage_offset()) + int(self.like.storage_offset())
        return whole.as_strided(self.like.shape, self.like.stride(), start)

    def _local_geometry(self, rows: Tensor) -> tuple[list[int], list[int], int]:
        """Shape, strides and beginning of a rank's rows of the view among its rows of the value."""
        dim, own = self.base.layout.dim, self.layout
        step, held = self.base.layout.strides(self.shape)[dim], rows.shape[dim]
        block, there = step * self.shape[dim], step * held
        shape, start = list(self.like.shape), int(self.like.storage_offset())
        shape[own.dim] = own.outer * held * own.inner
        strides = [x // block * there + x % block for x in self.like.stride()]
        start = start // block * there + start % step
        return shape, strides, int(rows.storage_offset()) + start


_views_enabled: ContextVar[bool] = ContextVar("makes_views", default=False)


def make_view(base: Tensor, steps: Iterable[Callable[[Any], Any]]) -> Any:
    """A result that is a view of another on one device, by the views in between; of one in shards it stays in shards
    where that can be, and otherwise it is read.
    """
    token = _views_enabled.set(True)
    try:
        return reduce(lambda x, step: step(x), steps, base)
    finally:
        _views_enabled.reset(token)


def can_keep_views() -> bool:
    """Do views of values in shards stay in shards now? Those of gradients, and of results that share memory."""
    return _views_enabled.get() or is_in_backward()


def view_storages(held: ShardStorage | ViewStorage, shape: Sequence[int], op: Callable[[Tensor], Any]) -> Any:
    """What stands behind the view, or the views, that an op makes of a value of this shape.

    None if one is of some positions alone, or of others than dims of the whole, or where nothing runs.
    """
    if any(isinstance(x, torch.SymInt) for x in shape) or type(held.local_like) is not Tensor:
        return None
    if isinstance(held, ViewStorage):
        base, whole, like = held.base, held.shape, held.like
    else:
        strides = held.layout.strides(shape)
        base, whole = held, shape
        like = torch.empty_strided(shape, strides, dtype=held.local_like.dtype, device="meta")
    found = op(like)
    made = [_view_storage(base, whole, one) for one in ([found] if isinstance(found, Tensor) else found)]
    if None in made:
        return None
    return made[0] if isinstance(found, Tensor) else made


def _view_storage(base: ShardStorage, shape: Sequence[int], like: Tensor) -> ViewStorage | None:
    """One of them. like: the view, as a meta tensor, of the whole in the memory of a value without gaps."""
    layout = (
        _view_layout(base.layout, shape, like) if base.layout.is_plain and like.dtype == base.local_like.dtype else None
    )
    return None if layout is None else ViewStorage(base, shape, like, layout)


def _view_layout(base: Layout, shape: Sequence[int], like: Tensor) -> Layout | None:
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
