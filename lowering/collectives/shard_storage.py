"""Store the value of a `Sharded` tensor: its layout, and this rank's rows or the full tensor.

A value is a result of a compiled program that stays sharded until it is read, that is, gathered for eager code. Its
rows are this rank's shard, padding included; its length is that of the sharded dim in the full tensor. Its origin
describes it in messages. Aliases are tensors of one storage, such as y and y.detach(). Deferred rows are computed when
they are first needed (`deferred.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import row_order
from sp_compile.lowering.torch_compat import FakeTensor, use_real_tensors

from .deferred import DeferredRows

sp = torch.ops.sp


@dataclass(frozen=True, eq=False)
class RowPermutation:
    """Order of the balanced layout, computed at run time so that ranks have equal work (``masks/balance_rows.py``)."""

    order: Tensor  # int64 (S,), position of each row, in the order of ranks
    inverse: Tensor  # int64 (S,), row of each position
    chunks: Tensor  # int64, runs of consecutive positions in `order`


@dataclass(frozen=True)
class Layout:
    """Layout of a value whose dim is sharded over the ranks of a group, ceil(S / n) rows each.

    The last rows may be padding. The dim is `outer * S * inner`, for tokens flattened with a batch.
    """

    dim: int  # the sharded dim of the value
    n: int  # number of ranks
    group: str  # name of the process group
    order: tuple[int, ...]  # dims of the full tensor in memory, from the largest stride to the smallest
    folds: int = 1  # row order: 1 contiguous, 2 zigzag, 0 the order of `balanced`
    outer: int = 1  # outer factor of the dim
    inner: int = 1  # inner factor of the dim
    before: int = 0  # rows stored before the S of the value, which is a window
    after: int = 0  # rows stored after them: 1 for `logits[:, :-1]`
    balanced: RowPermutation | None = field(default=None, compare=False)  # run-time order of one call

    def __str__(self) -> str:
        dim = f"dim {self.dim}" if self.is_plain else f"a part of dim {self.dim}"
        return f"along {dim} over {self.n} ranks{row_order(self.folds).label}"

    @property
    def is_plain(self) -> bool:
        """Return True if the dim is exactly the sequence, neither flattened nor a window.

        Only a value with such a layout is the base of views.
        """
        return (self.outer, self.inner, self.before, self.after) == (1, 1, 0, 0)

    @property
    def is_balanced(self) -> bool:
        """Return True if the row order is computed at run time, as `balanced`."""
        return row_order(self.folds).is_balanced

    def frame(self, length: int) -> list[int]:
        """Return the frame (see `base/frames.py`) of a full tensor whose sharded dim has this length."""
        rows = length // (self.outer * self.inner)  # positions of the value
        size = self.before + rows + self.after  # positions of the sequence, of which the value is a window
        # The fifth entry is the number of chunks of a zigzag order. `gather` converts the balanced order separately.
        return [self.outer, size, self.before, rows, *([self.folds] if self.folds > 1 else [])]

    def has_same_rows(self, other: Layout) -> bool:
        """Return True if each rank stores the same rows in both layouts; the order of dims in memory may differ."""
        return self == replace(other, order=self.order) and self.balanced is other.balanced

    def strides(self, shape: Sequence[int]) -> list[int]:
        """Return the strides of a tensor of this shape without gaps in memory, with the dims in `order`."""
        strides, stride = [0] * len(shape), 1
        for dim in reversed(self.order):
            strides[dim], stride = stride, stride * shape[dim]
        return strides

    def gather(self, local: Tensor, length: int) -> Tensor:
        """Return the full tensor, by an all-gather: every rank must call this.

        Args:
            local: This rank's rows.
            length: Length of the dim in the full tensor.
        """
        full = sp.unshard.default(local, self.dim, self.frame(length), self.n, self.group)
        if self.balanced is not None:  # from the balanced order to that of the sequence
            full = sp.reorder.default(full, self.dim, self.frame(length), self.balanced.inverse, self.balanced.order)
        return self.as_dense(full)

    def local_rows(self, full: Tensor) -> Tensor:
        """Return this rank's rows of a full tensor, without an exchange; padding has copies of valid rows."""
        frame = self.frame(full.shape[self.dim])
        if self.balanced is not None:  # from the order of the sequence to the balanced one
            full = sp.reorder.default(full, self.dim, frame, self.balanced.order, self.balanced.inverse)
        return self.as_dense(sp.shard.default(full, self.dim, frame, self.n, self.group))

    def as_dense(self, x: Tensor) -> Tensor:
        """Return x without gaps in memory, with the dims in `order`; a copy if necessary."""
        inverse_order, strides = [self.order.index(dim) for dim in range(x.ndim)], self.strides(x.shape)
        dense = x.permute(self.order).contiguous().permute(inverse_order)
        # `contiguous` preserves other strides of dims of size 1.
        return dense if list(dense.stride()) == strides else dense.as_strided(x.shape, strides)


def _ignore_read(*_: Any) -> None:
    """Ignore a read of a value, as in simulations and while tracing."""


@dataclass(frozen=True)
class Origin:
    """Description of a value for messages, and functions that are called when it is read.

    The runtime sets them. A read is collective, so that ranks first compare the descriptions of what they read.
    """

    description: str = "a sharded tensor"  # subject of messages
    check_read: Callable[[str], None] = _ignore_read  # compares the reads of all ranks; raises SpError
    # records a read of a value that is full already, as all values of a dry run are (`from_replicated`)
    record_read: Callable[[str], None] = _ignore_read
    # counts a read of a number of bytes, by differentiated code if the flag is True
    count_read: Callable[[str, int, bool], None] = _ignore_read


@dataclass(eq=False)
class ShardStorage:
    """Storage of a value and its aliases: this rank's rows, or the full tensor once it is read.

    A read drops the rows, since eager code may write to the full tensor. A graph that consumes the value later slices
    the full tensor.
    """

    layout: Layout  # layout of the value
    length: int  # length of the sharded dim in the full tensor
    local: Tensor | None  # this rank's rows
    origin: Origin = field(default_factory=Origin)  # origin of the value
    full: Tensor | None = None  # the full tensor, once it is read
    deferred: DeferredRows | None = None  # computation of the rows, until they are first read

    @property
    def local_like(self) -> Tensor:
        """Return a tensor of the value's dtype and device, without a read; its shape has no meaning."""
        if self.deferred is not None:
            return self.deferred.like
        return self.local if self.local is not None else self._require_full()

    @property
    def _is_traced(self) -> bool:
        """Return True if the value is a fake or traced tensor, whose reads are not checked or cached."""
        return type(self.local_like) is not Tensor

    def rows(self) -> Tensor:
        """Return this rank's rows. Deferred rows are computed and stored, also while Dynamo traces another program.

        Raises:
            SpError: The rows are deferred and their operands have changed.
        """
        # While Dynamo traces another program, its modes are active, in which real rows would become fake ones.
        fake_mode = nullcontext() if self._is_traced else use_real_tensors()
        with torch.no_grad(), fake_mode:
            if self.deferred is not None:
                self.local, self.deferred = self.deferred.compute(), None
            if self.local is not None:
                return self.local
            return self.layout.local_rows(self._require_full())

    def read(self, is_trained: bool = False) -> Tensor:
        """Return the full tensor, and store it in place of the rows. Every rank must call this.

        The result for a traced value is not stored, since it belongs to the trace, and the value itself is not read.
        That for a fake value has only a shape, computed without guards.

        Args:
            is_trained: True if the reading code is differentiated.

        Raises:
            SpError: A rank does not read the value. All reading ranks raise.
        """
        if self.full is not None:  # nothing is gathered; a dry run records the read, which would gather on real ranks
            self.origin.record_read(self.origin.description)
            return self.full
        local, is_traced = self.rows(), self._is_traced
        if not is_traced:
            self.origin.check_read(f"{self.origin.description} ({local.dtype} of {self.length} rows)")
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(local, FakeTensor):
                shape = [*local.shape]
                shape[self.layout.dim] = self.length
                return local.new_empty_strided(shape, self.layout.strides(shape))
            full = self.layout.gather(local, self.length)
        if not is_traced:
            self.full, self.local = full, None
            self.origin.count_read(self.origin.description, full.nbytes, is_trained)
        return full

    def assign(self, new: Tensor, storage: Any) -> None:
        """Assign a value to this one and all its aliases, as an in-place op does.

        Rows are replaced and not overwritten: graphs may have saved the old ones for their backwards. A full tensor is
        overwritten, as plain tensors share its memory.

        Args:
            new: The new value.
            storage: The `ShardStorage` or `ViewStorage` of the new value if it is sharded, else None.
        """
        with torch.inference_mode(False), torch.no_grad():
            if self.full is None and storage is not None and storage.layout.has_same_rows(self.layout):
                self.local, self.deferred = self.layout.as_dense(storage.rows()), None
                return
            full = new if storage is None else storage.read()
            if self.full is None:
                self.full, self.local, self.deferred = self.layout.as_dense(full.clone()), None, None
            else:
                self.full.copy_(full)

    def _require_full(self) -> Tensor:
        """Return the full tensor of a value without rows: it has been read already."""
        assert self.full is not None, "a storage has rows, deferred rows or the full tensor"
        return self.full

    def map_rows(self, op: Callable[[Tensor], Tensor], name: str) -> ShardStorage:
        """Return the storage of the result of a row-wise function, such as a cast, without a read.

        Args:
            op: The function, applied to the full tensor if there is one, else to the rows, now or when computed.
            name: Description of the function in messages.
        """
        origin = replace(self.origin, description=f"{name} of {self.origin.description}")
        if self.full is not None:
            return ShardStorage(self.layout, self.length, local=None, origin=origin, full=op(self.full))
        if self.deferred is not None:
            deferred = self.deferred.map_rows(op)
            return ShardStorage(self.layout, self.length, local=None, origin=origin, deferred=deferred)
        return ShardStorage(self.layout, self.length, local=op(self.rows()), origin=origin)
