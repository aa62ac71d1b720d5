"""Where a sharded sequence lies in a dim, as tensor code: padding, trimming, row order.

A frame argument is ``[outer, size, start, length]``. The dim is a product outer * window * inner; the sequence has
``size`` positions, rank r of n holds the s = ceil(size / n) from r * s on, and the positions of the value itself are
``start <= position < start + length``. ``inner`` follows from the dim's length. All sizes may be symbolic.

A fifth number 2 makes the frame zigzag: the sequence is cut into 2n chunks, and rank r holds chunks r and
2n - 1 - r, so that ranks share causal attention's work equally (zhuzilin/ring-flash-attention's layout). A fifth
number 0 says that positions are those of another order, which the program knows when it runs; shapes do not notice.
`LAYOUTS` has what else is to be known of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.lowering.torch_compat import statically_known_true

from .registry import Table


@dataclass(frozen=True)
class RowOrder:
    """An order in which ranks hold the rows of a sequence, under its name a row of `LAYOUTS`.

    folds: the fifth number of its frames. chunks: how many a rank holds. dealt: a table deals positions to ranks when
    the program runs, so nothing else knows them. evens: have all ranks as much to do of causal attention? in_order: is
    what a rank holds one run of the sequence? said: of values that lie so, behind the number of ranks.
    """

    name: str
    folds: int
    label: str = ""

    @property
    def chunks(self) -> int:
        return self.folds or 1

    @property
    def is_balanced(self) -> bool:
        return self.folds == 0

    @property
    def is_in_order(self) -> bool:
        return self.folds == 1

    def balances_causal(self, documents: bool) -> bool:
        """documents: queries attend to keys of their own document."""
        return self.is_balanced or (self.chunks > 1 and not documents)


CONTIGUOUS = RowOrder("contiguous", 1)
BALANCED = RowOrder("balanced", 0, " in an order of its own")
LAYOUTS: Table[RowOrder] = Table("layout")
"""By the value of the option that asks for them, those first that are taken where two are as fast."""
for _row in (CONTIGUOUS, RowOrder("zigzag", 2, " in zigzag order"), BALANCED):
    LAYOUTS.register(_row.name, _row)


def row_order(folds: int) -> RowOrder:
    """The one of frames with this fifth number."""
    return next(row for row in LAYOUTS.values() if row.folds == folds)


FrameArg = Sequence[int]  # as an operator takes a `Frame`, and the factor outside of it


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether the condition holds for every size; asking adds no guard."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def frame_folds(frame: FrameArg) -> int:
    """Chunks that a rank holds: 1, or 2 in a zigzag frame."""
    return frame[4] or 1 if len(frame) == 5 else 1


def local_row_count(frame: FrameArg, n: int) -> int:
    """Positions of the frame that each of ``n`` ranks holds, padding included: ceil(size / n) in one chunk."""
    chunks = frame_folds(frame) * n
    return frame_folds(frame) * ((frame[1] + chunks - 1) // chunks)


def inner_rows(extent: int, rows: int) -> int:
    """extent / rows, the inner factor of a dim; 1 wherever that is known, so that shapes stay simple."""
    return 1 if is_known(extent == rows) else extent // rows


def is_padded(frame: FrameArg, n: int) -> bool:
    """Whether some rank may hold positions outside the window; False only when proved."""
    _, size, start, length = frame[:4]
    return not (is_known(start == 0) and is_known(length == size) and is_known(n * local_row_count(frame, n) == size))


def row_of_position(position: int, frame: FrameArg, n: int) -> tuple[int, int]:
    """(rank that holds the position, its row there)."""
    chunks, folds = frame_folds(frame) * n, frame_folds(frame)
    chunk_rows = local_row_count(frame, n) // folds
    chunk = position // chunk_rows
    if n == 1:
        return 0, position
    if folds == 1:
        return chunk, position - chunk * chunk_rows
    rank = torch.sym_min(chunk, chunks - 1 - chunk)
    second = 1 - (chunks - 1 - chunk) // n  # 0 in the first chunk of a rank, 1 in the second
    return rank, position - chunk * chunk_rows + second * chunk_rows


def has_remote_edges(frame: FrameArg, n: int) -> tuple[bool, bool]:
    """Does a rank hold padded rows, before or after the window, without its first or its last valid row?

    Only of sequences of a few rows for each rank, and of windows that cut off all rows of one. For symbolic sizes the
    answer becomes a guard.
    """
    if n == 1:
        return False, False
    _, _, start, length = frame[:4]
    chunks = frame_folds(frame) * n
    chunk_rows = local_row_count(frame, n) // frame_folds(frame)
    before = not is_known(start < chunk_rows) and bool(start >= chunk_rows)
    end = (chunks - 1) * chunk_rows
    return before, not is_known(start + length > end) and bool(start + length <= end)


def own_positions(frame: FrameArg, n: int, group: str, device: torch.device, stride: int = 1) -> Tensor:
    """The positions this rank holds, int64 (s,), or those of its neighbourhood of ``stride`` ranks, in order.

    The rank is read at run time: no graph holds it.
    """
    s = local_row_count(frame, n) * stride
    n = n // stride
    if n == 1:
        return torch.arange(s, device=device)
    rank = torch.ops.sp.rank(group, device) // stride if stride > 1 else torch.ops.sp.rank(group, device)
    if frame_folds(frame) == 1:
        return torch.arange(s, device=device) + rank * s
    chunk = torch.arange(s // 2, device=device)
    return torch.cat([chunk + rank * (s // 2), chunk + (2 * n - 1 - rank) * (s // 2)])


def to_sequence_order(rows: Tensor, frame: FrameArg, n: int) -> Tensor:
    """All ranks' rows, (n * s * inner, ...) in rank order -> in the sequence's order."""
    if frame_folds(frame) == 1 or n == 1:
        return rows
    chunks = rows.unflatten(0, (n, 2, rows.shape[0] // (2 * n)))
    return torch.cat([chunks[:, 0].flatten(0, 1), chunks[:, 1].flip(0).flatten(0, 1)])


def to_rank_order(rows: Tensor, frame: FrameArg, n: int) -> Tensor:
    """All rows, (n * s * inner, ...) in the sequence's order -> rank 0's first, then rank 1's."""
    if frame_folds(frame) == 1 or n == 1:
        return rows
    first, second = rows.unflatten(0, (2, n, rows.shape[0] // (2 * n))).unbind(0)
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)


def nearest_rows(positions: Tensor, frame: FrameArg, inner: int) -> Tensor:
    """Indices into a dim of outer * length * inner, int64 (outer * k * inner,), of k positions.

    A position outside the window is given the nearest one inside: the definition of what a padded row holds, see
    ``collectives/pad_rows.py``.
    """
    outer, _, start, length = frame[:4]
    offsets = positions if is_known(start == 0) else positions - start
    rows = offsets.clamp(0, length - 1)
    if is_known(outer * inner == 1):
        return rows
    blocks = torch.arange(outer, device=rows.device) * length
    within = torch.arange(inner, device=rows.device)
    return ((blocks[:, None] + rows)[:, :, None] * inner + within).reshape(-1)


def column_along(vector: Tensor, dim: int, ndim: int) -> Tensor:
    """A vector as a tensor of so many dims, all but this one of size 1: a view."""
    return vector.view([-1 if d == dim else 1 for d in range(ndim)])


def outside_window(x: Tensor, dim: int, frame: FrameArg, n: int, group: str) -> Tensor:
    """Bool, broadcastable to the sharded ``x``: True at positions that the window does not hold."""
    outer, _, start, length = frame[:4]
    inner = inner_rows(x.shape[dim], outer * local_row_count(frame, n))
    positions = own_positions(frame, n, group, x.device)
    outside = positions >= start + length
    if not is_known(start == 0):
        outside = outside | (positions < start)
    if not is_known(outer * inner == 1):
        outside = outside[:, None].expand(outer, -1, inner).reshape(-1)
    return column_along(outside, dim, x.ndim)


def to_rows_first(x: Tensor, dim: int, outer: int) -> Tensor:
    """View (..., outer * rows, ...) as (rows, ..., outer, ...), or (rows, ...) when outer is 1."""
    if is_known(outer == 1):
        return x.movedim(dim, 0)
    return x.unflatten(dim, (outer, x.shape[dim] // outer)).movedim(dim + 1, 0)


def from_rows_first(y: Tensor, dim: int, outer: int) -> Tensor:
    """Undo ``to_rows_first``; a view when outer is 1."""
    if is_known(outer == 1):
        return y.movedim(0, dim)
    return y.movedim(0, dim + 1).flatten(dim, dim + 1)


def trim(x: Tensor, dim: int, frame: FrameArg, n: int, inner: int) -> Tensor:
    """View the window's rows of a dim that holds all n * s * inner of them, in order (outer 1)."""
    start, length = frame[2:4]
    return x.narrow(dim, start * inner, length * inner) if is_padded(frame, n) else x


def pad_to_frame(x: Tensor, dim: int, frame: FrameArg, n: int, edge: bool) -> Tensor:
    """Extend a dim of the window's rows to all n * s * inner (outer 1).

    The new rows repeat the nearest of the window when ``edge``, as padded positions do; a cotangent's are zero.
    """
    if not is_padded(frame, n):
        return x
    start, length = frame[2:4]
    inner = inner_rows(x.shape[dim], length)
    total = n * local_row_count(frame, n)
    if edge:
        return x.index_select(dim, nearest_rows(torch.arange(total, device=x.device), frame, inner))
    widths = [0, 0] * (x.ndim - 1 - dim) + [start * inner, (total - start - length) * inner]
    if not is_known(total > length):  # by nothing, a kernel keeps x's strides, and fake tensors are contiguous
        x = x.contiguous()
    return torch.constant_pad_nd(x, widths)
