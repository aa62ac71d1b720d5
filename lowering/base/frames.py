"""Compute with frames: the description of how one dim of a tensor is sharded over the ranks.

A frame is ``[outer, size, start, length]``, an argument of the ``sp::`` operators. The sequence has ``size`` positions.
Rank r of n stores s = ceil(size / n) of them, from r * s on; the last ranks may store padding. A row is the storage of
one position. The value itself has the positions ``start <= position < start + length``, its window: x[:, 1:] of 8
positions has the frame [1, 8, 1, 7]. Rows of the window are valid, all others are padded. The dim is the product outer
* rows * inner, where rows are s on a shard and ``length`` in the full tensor. ``outer`` above 1 is a dim flattened
before the sequence, as of (B, S) -> (B * S,); ``inner`` follows from the dim's length. Sizes may be symbolic.

A fifth entry of 2 selects the zigzag order: the sequence is split into 2n chunks, and rank r stores the chunks r and
2n - 1 - r. Ranks then share the work of causal attention equally (layout of zhuzilin/ring-flash-attention). A fifth
entry of 0 selects a permutation that is computed at run time and does not affect shapes. `LAYOUTS` lists the other
properties of each order. Rank order has the rows of rank 0, then those of rank 1, and so on, as a gather returns them;
sequence order has all rows by position.

In all functions, `n` is the number of ranks and `group` the name of their process group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.lowering.torch_compat import statically_known_true

from .registry import Table


@dataclass(frozen=True)
class RowOrder:
    """Order in which ranks store the rows of a sequence; an entry of `LAYOUTS`."""

    name: str  # key in `LAYOUTS`
    folds: int  # fifth entry of the frames; 0: the program computes the order at run time
    label: str = ""  # text after the number of ranks in descriptions of a value

    @property
    def chunks(self) -> int:
        """Return the number of chunks that a rank stores."""
        return self.folds or 1

    @property
    def is_balanced(self) -> bool:
        """Return True if the program computes the order at run time."""
        return self.folds == 0

    @property
    def is_in_order(self) -> bool:
        """Return True if a rank stores one contiguous run of the sequence."""
        return self.folds == 1

    def has_equal_causal_work(self, documents: bool) -> bool:
        """Return True if all ranks have about equal work in causal attention, for the cost model.

        Zigzag order balances one triangle of pairs over the full sequence, but not one triangle per document.

        Args:
            documents: True if queries attend only to keys of their own document.
        """
        return self.is_balanced or (self.chunks > 1 and not documents)


CONTIGUOUS = RowOrder("contiguous", 1)
BALANCED = RowOrder("balanced", 0, " in balanced order")
# Row orders by value of the option `layout`; of two equally fast ones, the first is chosen.
LAYOUTS: Table[RowOrder] = Table("layout")
for _order in (CONTIGUOUS, RowOrder("zigzag", 2, " in zigzag order"), BALANCED):
    LAYOUTS.register(_order.name, _order)


def row_order(folds: int) -> RowOrder:
    """Return the row order whose frames have this fifth entry (`RowOrder.folds`)."""
    return next(order for order in LAYOUTS.values() if order.folds == folds)


FrameArg = Sequence[int]  # form of a frame, without its inner factor, in operator schemas


def is_known(condition: bool | torch.SymBool) -> bool:
    """Return True if the condition holds for every size, False if it may fail. Adds no guard."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def frame_folds(frame: FrameArg) -> int:
    """Return the number of contiguous chunks per rank: 2 in a zigzag frame, else 1."""
    return (frame[4] or 1) if len(frame) == 5 else 1  # a balanced frame ends in 0: its order does not affect shapes


def local_row_count(frame: FrameArg, n: int) -> int:
    """Return the rows per rank, padding included.

    It is ceil(size / n), and 2 * ceil(size / 2n) for zigzag frames: size 6 on n = 2 ranks has 3, or 2 chunks of 2 rows.

    Args:
        frame: The frame, see the module.
        n: Number of ranks.
    """
    chunks = frame_folds(frame) * n
    return frame_folds(frame) * ((frame[1] + chunks - 1) // chunks)


def inner_rows(extent: int, rows: int) -> int:
    """Return the inner factor of a dim of length outer * positions * inner.

    The result is the constant 1 if this is known, which keeps symbolic shapes simple.

    Args:
        extent: Length of the dim.
        rows: outer * positions. The positions are s on a shard, and those of the window in the full tensor.
    """
    if is_known(rows == 1):  # such as ceil(size / n) under the guard that it is 1, which the extent does not contain
        return extent
    return 1 if is_known(extent == rows) else extent // rows


def is_padded(frame: FrameArg, n: int) -> bool:
    """Return False if it is known that no rank stores rows outside the window, else True.

    Callers then skip the work on padded rows.
    """
    _, size, start, length = frame[:4]
    return not (is_known(start == 0) and is_known(length == size) and is_known(n * local_row_count(frame, n) == size))


def row_of_position(position: int, frame: FrameArg, n: int) -> tuple[int, int]:
    """Return the rank that stores a position, and the index of its row on that rank.

    For a sequence of 8 on 2 ranks, position 5 is row 1 of rank 1; in zigzag order, with chunks of 2 rows, it is row 3
    of rank 1. Positions may be symbolic: a comparison, which would add a guard, is avoided.
    """
    if n == 1:
        return 0, position
    folds = frame_folds(frame)
    chunk_rows = local_row_count(frame, n) // folds
    chunk = position // chunk_rows
    row = position - chunk * chunk_rows  # in the chunk
    if folds == 1:
        return chunk, row
    mirrored = 2 * n - 1 - chunk  # the other chunk of the rank in zigzag order
    is_second = 1 - mirrored // n  # 0 for chunk < n, the first chunk of a rank; 1 for the second
    return torch.sym_min(chunk, mirrored), row + is_second * chunk_rows


def has_remote_edges(frame: FrameArg, n: int) -> tuple[bool, bool]:
    """Return True for each side of the window on which a rank has padding, but the nearest valid row is on another.

    Filling such padding needs an exchange. This happens only for sequences of a few rows per rank, as 5 positions on 4
    ranks (2, 2, 1, 0), and for windows that exclude all rows of a rank. For symbolic sizes the answer becomes a guard.

    Returns:
        One flag for the padding before the first valid row, and one for the padding after the last.
    """
    if n == 1:
        return False, False
    _, _, start, length = frame[:4]
    chunk_rows = local_row_count(frame, n) // frame_folds(frame)
    last_chunk_start = (frame_folds(frame) * n - 1) * chunk_rows
    # All positions of the first chunk are padding, or all of the last. `is_known` avoids a guard where possible.
    first_is_remote = not is_known(start < chunk_rows) and bool(start >= chunk_rows)
    last_is_remote = not is_known(start + length > last_chunk_start) and bool(start + length <= last_chunk_start)
    return first_is_remote, last_is_remote


def own_positions(frame: FrameArg, n: int, group: str, device: torch.device, stride: int = 1) -> Tensor:
    """Return the positions of the rows of this rank, in their order: int64 (s * stride,).

    The rank is read at run time, so that one graph serves all ranks.

    Args:
        frame: The frame, see the module.
        n: Number of ranks.
        group: Name of the process group.
        device: Device of the result.
        stride: Number of adjacent ranks whose rows are joined, as those that exchange heads in hybrid attention: ranks
            0 and 1 both have the positions 0 to 2s - 1 for a stride of 2. 1 for the rows of this rank only.
    """
    # Adjacent ranks that are joined count as one rank from here on.
    rows, n = local_row_count(frame, n) * stride, n // stride
    if n == 1:
        return torch.arange(rows, device=device)
    rank = torch.ops.sp.rank(group, device)
    if stride > 1:
        rank = rank // stride
    if frame_folds(frame) == 1:
        return torch.arange(rows, device=device) + rank * rows
    # Zigzag order: rank r has the chunks r and 2n - 1 - r.
    chunk_rows = rows // 2
    offsets = torch.arange(chunk_rows, device=device)
    return torch.cat([offsets + rank * chunk_rows, offsets + (2 * n - 1 - rank) * chunk_rows])


def to_sequence_order(rows: Tensor, frame: FrameArg, n: int) -> Tensor:
    """Reorder gathered rows of all ranks, (n * s * inner, ...), from rank order to sequence order."""
    if frame_folds(frame) == 1 or n == 1:
        return rows
    chunks = rows.unflatten(0, (n, 2, rows.shape[0] // (2 * n)))  # rank, first or second chunk, row
    # The second chunks are in descending order: rank 0 stores the last chunk of the sequence.
    return torch.cat([chunks[:, 0].flatten(0, 1), chunks[:, 1].flip(0).flatten(0, 1)])


def to_rank_order(rows: Tensor, frame: FrameArg, n: int) -> Tensor:
    """Reorder all rows, (n * s * inner, ...), from sequence order to rank order before a scatter."""
    if frame_folds(frame) == 1 or n == 1:
        return rows
    # Rank r stores chunk r of the first half of the sequence, and chunk n - 1 - r of the second.
    first, second = rows.unflatten(0, (2, n, rows.shape[0] // (2 * n))).unbind(0)
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)


def nearest_rows(positions: Tensor, frame: FrameArg, inner: int) -> Tensor:
    """Return the indices at which k positions are read from a full dim: int64 (outer * k * inner,).

    A position outside the window reads the nearest valid row: this defines the contents of padded rows, see
    ``collectives/pad_rows.py``. With a window of positions 1 to 3, the positions 0, 1, 2 have the indices 0, 0, 1.

    Args:
        positions: (k,), int64.
        frame: The frame of the dim, of length outer * length * inner.
        inner: The inner factor of the dim.
    """
    outer, _, start, length = frame[:4]
    offsets = positions if is_known(start == 0) else positions - start
    rows = offsets.clamp(0, length - 1)
    if is_known(outer * inner == 1):
        return rows
    outer_starts = torch.arange(outer, device=rows.device) * length
    inner_offsets = torch.arange(inner, device=rows.device)
    return ((outer_starts[:, None] + rows)[:, :, None] * inner + inner_offsets).reshape(-1)


def column_along(vector: Tensor, dim: int, ndim: int) -> Tensor:
    """View a vector as a tensor of `ndim` dims along `dim`, so that it broadcasts over the others."""
    return vector.view([-1 if d == dim else 1 for d in range(ndim)])


def outside_window(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Return a bool mask, broadcastable to the sharded ``x``, that is True in padded rows."""
    outer, _, start, length = frame[:4]
    inner = inner_rows(x.shape[dim], outer * local_row_count(frame, n))
    positions = own_positions(frame, n, group, x.device)
    outside = positions >= start + length
    if not is_known(start == 0):
        outside = outside | (positions < start)
    if not is_known(outer * inner == 1):  # repeat the mask of rows for the factors before and after them
        outside = outside[:, None].expand(outer, -1, inner).reshape(-1)
    return column_along(outside, dim, x.ndim)


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Return True if torch can add values of the dtype and fill them by a mask; False for uint16 to uint64 and float8.

    Rows of other dtypes can only be moved.
    """
    is_wide_unsigned = not (dtype.is_floating_point or dtype.is_signed or dtype in (torch.bool, torch.uint8))
    return not is_wide_unsigned and not (dtype.is_floating_point and dtype.itemsize == 1)


def fill_rows(x: Tensor, is_filled: Tensor, value: float) -> Tensor:
    """Return x with ``value`` where ``is_filled``, for any dtype."""
    if has_arithmetic(x.dtype):
        return x.masked_fill(is_filled, value)
    return torch.where(is_filled, x.new_full((), value), x)


def to_rows_first(x: Tensor, dim: int, outer: int) -> Tensor:
    """View (..., outer * rows, ...) as (rows, ..., outer, ...), or (rows, ...) when outer is 1.

    Collectives gather and scatter along dim 0; `from_rows_first` converts their result back.
    """
    if is_known(outer == 1):
        return x.movedim(dim, 0)
    return x.unflatten(dim, (outer, x.shape[dim] // outer)).movedim(dim + 1, 0)


def from_rows_first(y: Tensor, dim: int, outer: int) -> Tensor:
    """Undo ``to_rows_first``; a view when outer is 1."""
    if is_known(outer == 1):
        return y.movedim(0, dim)
    return y.movedim(0, dim + 1).flatten(dim, dim + 1)


def trim(x: Tensor, dim: int, frame: FrameArg, n: int, inner: int) -> Tensor:
    """View the rows of the window in a dim that has the rows of all ranks, in sequence order.

    The dim has n * s * inner rows, and `outer` is 1. Gathers call this to drop the padding.
    """
    start, length = frame[2:4]
    return x.narrow(dim, start * inner, length * inner) if is_padded(frame, n) else x


def pad_to_frame(x: Tensor, dim: int, frame: FrameArg, n: int, edge: bool) -> Tensor:
    """Extend a dim that has the window's rows to the rows of all ranks, n * s * inner, before a scatter.

    The frame's `outer` is 1.

    Args:
        x: The dim has length * inner rows.
        dim: The dim.
        frame: The frame of the dim.
        n: Number of ranks.
        edge: True to repeat the nearest row of the window, as padded rows of values do. False to add zeros, as padded
            rows of gradients have.
    """
    if not is_padded(frame, n):
        return x
    start, length = frame[2:4]
    inner = inner_rows(x.shape[dim], length)
    total = n * local_row_count(frame, n)
    if edge:
        return x.index_select(dim, nearest_rows(torch.arange(total, device=x.device), frame, inner))
    widths = [0, 0] * (x.ndim - 1 - dim) + [start * inner, (total - start - length) * inner]  # from the last dim
    # If a symbolic size turns out to need no padding, the kernel preserves x's strides, but its fake result, with which
    # the graph was traced, is contiguous. A contiguous x makes both equal.
    if not is_known(total > length):
        x = x.contiguous()
    return torch.constant_pad_nd(x, widths)
