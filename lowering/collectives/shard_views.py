"""Keep views of sharded values sharded.

    h: [B, S, D] along dim 1      h.flatten(0, 1): [B * S, D] along a part of dim 0      h[:, 1:]: a window of dim 1
    h[:, 0]                       no such view: the value is read

A view has no storage of its own. It refers to the storage of its base, before and after that is read or written.
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
    """Storage of a view, with the interface of `ShardStorage`."""

    base: ShardStorage  # storage of the viewed value
    shape: Sequence[int]  # shape of the viewed value
    like: Tensor  # view of the full tensor, on the meta device
    layout: Layout  # layout of the view

    @property
    def length(self) -> int:
        """Return the length of the sharded dim in the full view."""
        return self.like.shape[self.layout.dim]

    @property
    def origin(self) -> Origin:
        """Return the origin of the view."""
        return replace(self.base.origin, text=f"a view of {self.base.origin.text}")

    @property
    def local_like(self) -> Tensor:
        """Return a tensor of the value's dtype and device."""
        return self.base.local_like

    @property
    def deferred(self) -> DeferredRows | None:
        """Return the deferred rows of the base, if any."""
        return self.base.deferred

    @property
    def full(self) -> Tensor | None:
        """Return the full view, or None if the base is not gathered."""
        found = self.base.full
        return None if found is None else self._local_view(found)

    def rows(self) -> Tensor:
        """Return this rank's rows; a view of the base's rows while that is sharded."""
        with torch.no_grad():
            full = self.full
            if full is not None:
                return self.layout.local_rows(full)
            rows = self.base.layout.as_dense(self.base.rows())
            return rows.as_strided(*self._local_geometry(rows))

    def read(self) -> Tensor:
        """Return the full view, in the memory of its base, which is read."""
        return self._local_view(self.base.read())

    def assign(self, new: Tensor, storage: StoredValue | None) -> None:
        """Write a value into the base, which is read for that.

        Args:
            new: The new value.
            storage: Storage of the new value if it is sharded.
        """
        with torch.inference_mode(False), torch.no_grad():
            full = new if storage is None else storage.read()
            self.read().copy_(full)

    def map_rows(self, op: Callable[[Tensor], Tensor], name: str) -> ShardStorage:
        """Return the storage of the result of a row-wise function.

        Args:
            op: The function, applied to the full view or to its rows.
            name: Description of the function in messages.
        """
        origin = replace(self.origin, text=f"{name} of {self.origin.text}")
        full = self.full
        rows = None if full is not None else op(self.rows())
        return ShardStorage(self.layout, self.length, rows, origin, None if full is None else op(full))

    def _local_view(self, full: Tensor) -> Tensor:
        start = int(full.storage_offset()) + int(self.like.storage_offset())
        return full.as_strided(self.like.shape, self.like.stride(), start)

    def _local_geometry(self, rows: Tensor) -> tuple[list[int], list[int], int]:
        """Return shape, strides and offset of the view's rows within this rank's rows of the base."""
        dim, own = self.base.layout.dim, self.layout
        step, local_rows = self.base.layout.strides(self.shape)[dim], rows.shape[dim]
        block, there = step * self.shape[dim], step * local_rows
        shape, start = list(self.like.shape), int(self.like.storage_offset())
        shape[own.dim] = own.outer * local_rows * own.inner
        strides = [x // block * there + x % block for x in self.like.stride()]
        start = start // block * there + start % step
        return shape, strides, int(rows.storage_offset()) + start


_views_enabled: ContextVar[bool] = ContextVar("makes_views", default=False)


def make_view(base: Tensor, steps: Iterable[Callable[[Any], Any]]) -> Any:
    """Apply view functions to a result, as single-device code does.

    A view of a sharded value stays sharded if possible; otherwise the value is read.

    Args:
        base: The viewed result.
        steps: View functions, applied in order.
    """
    token = _views_enabled.set(True)
    try:
        return reduce(lambda x, step: step(x), steps, base)
    finally:
        _views_enabled.reset(token)


def can_keep_views() -> bool:
    """Return True if views of sharded values stay sharded: gradients, and results that share memory."""
    return _views_enabled.get() or is_in_backward()


def view_storages(storage: ShardStorage | ViewStorage, shape: Sequence[int], op: Callable[[Tensor], Any]) -> Any:
    """Return the storage of the view or views that an op creates of a value.

    Args:
        storage: Storage of the value.
        shape: Shape of the value.
        op: The view op.

    Returns:
        None if a view selects single positions or combines other dims, and while a program is traced.
    """
    if any(isinstance(x, torch.SymInt) for x in shape) or type(storage.local_like) is not Tensor:
        return None
    if isinstance(storage, ViewStorage):
        base, full, like = storage.base, storage.shape, storage.like
    else:
        strides = storage.layout.strides(shape)
        base, full = storage, shape
        like = torch.empty_strided(shape, strides, dtype=storage.local_like.dtype, device="meta")
    found = op(like)
    storages = [_view_storage(base, full, one) for one in ([found] if isinstance(found, Tensor) else found)]
    if None in storages:
        return None
    return storages[0] if isinstance(found, Tensor) else storages


def _view_storage(base: ShardStorage, shape: Sequence[int], like: Tensor) -> ViewStorage | None:
    """Return the storage of one view, or None.

    Args:
        base: Storage of the value.
        shape: Shape of the value.
        like: View of the full tensor, without gaps in memory, on the meta device.
    """
    layout = (
        _view_layout(base.layout, shape, like) if base.layout.is_plain and like.dtype == base.local_like.dtype else None
    )
    return None if layout is None else ViewStorage(base, shape, like, layout)


def _view_layout(base: Layout, shape: Sequence[int], like: Tensor) -> Layout | None:
    """Return the layout of a view, derived from its strides and offset, or None if it has none."""
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
