"""Keep views of sharded values sharded, as storages that refer to the storage of their base.

    h: [B, S, D] along dim 1      h.flatten(0, 1): [B * S, D] along a part of dim 0      h[:, 1:]: a window of dim 1
    h[:, 0]                       no such view: the value is read

The base is the value that a view is created from. A view has no storage of its own. It refers to the storage of its
base, before and after that is read or written. A position is one index of the sharded dim of the base, as of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.torch_compat import OpOverload, is_batch, is_in_backward, is_in_transform

from .shard_storage import Layout, Origin, ShardStorage


@dataclass(eq=False)
class ViewStorage:
    """Storage of a view, with the interface of `ShardStorage`."""

    base: ShardStorage  # storage of the viewed value
    shape: Sequence[int]  # shape of the full viewed value
    like: Tensor  # the full view on the meta device: its shape, strides and offset in a base of offset 0
    layout: Layout  # layout of the view

    @property
    def length(self) -> int:
        """Return the length of the sharded dim in the full view."""
        return self.like.shape[self.layout.dim]

    @property
    def origin(self) -> Origin:
        """Return the origin of the view."""
        return replace(self.base.origin, description=f"a view of {self.base.origin.description}")

    @property
    def local_like(self) -> Tensor:
        """Return a tensor of the value's dtype and device, without a read; its shape has no meaning."""
        return self.base.local_like

    @property
    def full(self) -> Tensor | None:
        """Return the full view, in the memory of its base, or None if the base is not gathered yet."""
        return None if self.base.full is None else self._view_of(self.base.full)

    def rows(self) -> Tensor:
        """Return this rank's rows: a view of the base's rows, or rows of the full view once that is read."""
        with torch.no_grad():
            if self.full is not None:
                return self.layout.local_rows(self.full)
            rows = self.base.layout.as_dense(self.base.rows())  # without gaps, as `_local_geometry` assumes
            return rows.as_strided(*self._local_geometry(rows))

    def read(self, is_trained: bool = False) -> Tensor:
        """Return the full view, in the memory of its base, which is read."""
        return self._view_of(self.base.read(is_trained=is_trained))

    def assign(self, new: Tensor, storage: ShardStorage | ViewStorage | None) -> None:
        """Write a value into the view, and thus into its base, which is gathered (read) for that on every rank.

        Args:
            new: The new value.
            storage: Storage of the new value if it is sharded.
        """
        # Without inference mode: what `read` gathers is kept, and autograd cannot use tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.read().copy_(new if storage is None else storage.read())

    def map_rows(self, op: Callable[[Tensor], Tensor], name: str) -> ShardStorage:
        """Return the storage of the result of a row-wise function, such as a cast, without a read.

        Args:
            op: The function, applied to the full view if the base is gathered, else to the rows of the view.
            name: Description of the function in messages.
        """
        local = self.rows() if self.full is None else None
        return ShardStorage(self.layout, self.length, local, self.origin, self.full).map_rows(op, name)

    def _view_of(self, full: Tensor) -> Tensor:
        """Return the view of a full base, in its memory."""
        start = int(full.storage_offset()) + int(self.like.storage_offset())
        return full.as_strided(self.like.shape, self.like.stride(), start)

    def _local_geometry(self, rows: Tensor) -> tuple[list[int], list[int], int]:
        """Return the shape, strides and offset of this rank's rows of the view, in the memory of its rows of the base.

        In memory the base is a sequence of blocks, each of all positions of the sharded dim; a position is `step`
        adjacent elements. A base [B, S, H] has B blocks of S positions with step H. The rows of this rank have s in
        place of S positions, so that the part of a stride or an offset that counts blocks shrinks: h[1, :, 2] of a full
        base starts at S * H + 2, and at s * H + 2 here. The part within a position stays.
        """
        dim, layout = self.base.layout.dim, self.layout
        step, local_rows = self.base.layout.strides(self.shape)[dim], rows.shape[dim]
        block, local_block = step * self.shape[dim], step * local_rows  # elements of a block
        shape, start = list(self.like.shape), int(self.like.storage_offset())
        shape[layout.dim] = layout.outer * local_rows * layout.inner
        strides = [stride // block * local_block + stride % block for stride in self.like.stride()]
        # The view has all rows of this rank: its first position is not in the offset, but `before` in its layout.
        local_start = start // block * local_block + start % step
        return shape, strides, int(rows.storage_offset()) + local_start


_views_enabled: ContextVar[bool] = ContextVar("makes_views", default=False)


def make_view(base: Tensor, steps: Iterable[Callable[[Any], Any]]) -> Any:
    """Apply view functions to a result and return the view, as single-device code does.

    The runtime calls it for results that are views of another result. A view of a sharded value stays sharded if
    possible; otherwise the value is read, and the view is a plain tensor.

    Args:
        base: The viewed result.
        steps: View functions, applied in order.
    """
    token = _views_enabled.set(True)  # elsewhere, a view op of eager code reads the value
    try:
        return reduce(lambda x, step: step(x), steps, base)
    finally:
        _views_enabled.reset(token)


def can_keep_views() -> bool:
    """Return True inside `make_view` and in a backward, where views of sharded values stay sharded."""
    return _views_enabled.get() or is_in_backward()


def refuse_shape_change(op: OpOverload, args: Sequence[Any]) -> None:
    """Raise SpError if an in-place op changes the shape or strides of a sharded x, as `x.t_()` does.

    Aliases have a shape of their own, but share the storage.

    Args:
        op: An op; those without torch's tag `inplace_view` keep the shape.
        args: Its arguments; the first one is x. () if that is not sharded.
    """
    if not args or torch.Tag.inplace_view not in op.tags:
        return
    x, *others = args
    if op.overloadpacket is not torch.ops.aten.set_:
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        changed = op(like, *others)
        if (changed.shape, changed.stride()) == (x.shape, x.stride()):  # such as squeeze_() without dims of size 1
            return
    cause = f"x.{op.overloadpacket.__name__}: expected an op that keeps the shape and strides of x, as x is sharded"
    raise SpError("SP324", f"{cause}, got {op}.")


def refuse_transforms(grads: Sequence[Any] = ()) -> None:
    """Raise SpError inside of a torch.func transform or for a batch of gradients (`is_grads_batched`).

    Compiled programs, and the backwards of their results with `grads`, call it before they run.

    Args:
        grads: Gradients of results; others than tensors are ignored.
    """
    if is_in_transform() or any(isinstance(grad, Tensor) and is_batch(grad) for grad in grads):
        raise SpError(
            "SP323",
            "a transform of torch.func (vmap, grad, vjp, jacrev, is_grads_batched, jacobian(vectorize=True)) is not "
            "supported over a program that was compiled with backend='sp'.",
        )


def view_storages(storage: ShardStorage | ViewStorage, shape: Sequence[int], op: Callable[[Tensor], Any]) -> Any:
    """Return the storage of the view that an op creates of a value, or a list of storages if it creates several.

    The op runs on the meta device, which shows the strides and the offset of each view.

    Args:
        storage: Storage of the value.
        shape: Shape of the value.
        op: The view op.

    Returns:
        None if a view selects single positions or combines other dims, and while a program is traced: the value is
        then read.
    """
    is_traced = any(isinstance(size, torch.SymInt) for size in shape) or type(storage.local_like) is not Tensor
    if is_traced:
        return None
    if isinstance(storage, ViewStorage):  # a view of a view is one of the same base
        base, base_shape, like = storage.base, storage.shape, storage.like
    else:
        base, base_shape = storage, shape
        strides, dtype = storage.layout.strides(shape), storage.local_like.dtype
        like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    views = op(like)
    storages = [_view_storage(base, base_shape, view) for view in ([views] if isinstance(views, Tensor) else views)]
    if None in storages:
        return None
    return storages[0] if isinstance(views, Tensor) else storages


def _view_storage(base: ShardStorage, shape: Sequence[int], like: Tensor) -> ViewStorage | None:
    """Return the storage of one view, or None if it has no layout or another dtype than its base.

    A base whose sharded dim is flattened or a window (not `is_plain`) has no such views either.

    Args:
        base: Storage of the base.
        shape: Shape of the full base.
        like: The view of a full base on the meta device.
    """
    if not base.layout.is_plain or like.dtype != base.local_like.dtype:
        return None
    layout = _view_layout(base.layout, shape, like)
    return None if layout is None else ViewStorage(base, shape, like, layout)


def _view_layout(base: Layout, shape: Sequence[int], like: Tensor) -> Layout | None:
    """Return the layout of a view, derived from its strides and offset, or None if it has none.

    In memory the base is a sequence of blocks, each of all positions of the sharded dim; a position is `step` adjacent
    elements. A base [B, S, H] has B blocks of S positions with step H. The view has a layout if exactly one of its dims
    selects positions: the sequence dim. Its stride is `step`, or a divisor of it where it is flattened with later dims.
    The view h[:, 1:].flatten(1, 2) of a base [B, 6, 4], with step 4, has a dim of 20 entries of stride 1: 5 positions
    of `inner` 4, from position 1 on. The view h.flatten(1, 2)[:, 1:9] has no layout: its groups of 4 entries begin in
    the middle of a position. If the dim is flattened with earlier ones, as in h.flatten(0, 1), it selects all
    positions of `outer` blocks.

    Args:
        base: Layout of the base.
        shape: Shape of the full base.
        like: The view of a full base on the meta device.
    """
    length, step = shape[base.dim], base.strides(shape)[base.dim]
    block, start = step * length, int(like.storage_offset())
    if length < 2 or 0 in like.shape:  # strides do not show which dim is the sequence
        return None
    strides = {dim: like.stride(dim) for dim, extent in enumerate(like.shape) if extent > 1}
    spans = {dim: (like.shape[dim] - 1) * stride for dim, stride in strides.items()}  # from the first entry to the last
    inside_block = [dim for dim, stride in strides.items() if stride % block]  # the others select blocks only
    sequence_dims = [dim for dim in inside_block if spans[dim] >= step]  # the others stay within a position
    if len(sequence_dims) != 1:
        return None
    (dim,) = sequence_dims
    extent, stride = like.shape[dim], strides[dim]
    inner = step // stride  # entries of the dim in each position
    # Last element that the start and the other dims select in an entry of the dim; one of the next entry is too far.
    last_offset = sum(spans[other] for other in inside_block if other != dim) + start % step
    if inner * stride != step or extent % inner or last_offset >= stride:
        return None
    rows, first = extent // inner, start // step % length  # positions of the view, and the first of them in its block
    outer, remaining_rows = divmod(rows, length)
    order = tuple(sorted(range(like.ndim), key=lambda d: -like.stride(d)))
    layout = replace(base, dim=dim, order=order, inner=inner)
    if outer and not remaining_rows and not first:  # all positions, of one or several blocks
        return replace(layout, outer=outer)
    if first + rows > length:  # parts of several blocks
        return None
    return replace(layout, before=first, after=length - first - rows)
