"""Exchange halos: the rows that a window reads beyond a rank's own shard, and their cotangents.

    rank r stores positions [r * s, (r + 1) * s) and reads [r * s + low, r * s + high)

A causal convolution of width k reads low = 1 - k, high = s: one shift of k - 1 rows to the next rank. The backward
shifts the cotangents of these rows back, and adds them to those of their owner. A ``HaloPart`` contains the rows of one
rank, and takes one shift. Frames have one fold: in the zigzag layout adjacent chunks are not on adjacent ranks.

    s          rows per rank, including padding; n is the number of ranks
    frame      how the dim is sharded; its window are the valid positions, all others are padding (``base/frames.py``)
    part       the rows [first, last) of one rank that this rank reads; ``hop`` is how many ranks before it that is
    piece      the tensor of a part: received, own rows, or ``fill`` beyond the first or the last rank
    wraps      whether the ranks form a ring, so that the rows after the last are those of rank 0 (for rolls)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, column_along, fill_rows, is_known, local_row_count
from sp_compile.lowering.base.library import LinearMap
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.communicator import current_communicator, from_sendable, to_sendable


class HaloPart(NamedTuple):
    """Rows [first, last) of the rank `hop` ranks before this one."""

    hop: int  # distance to the owner, in ranks; negative for an owner after this rank
    first: int  # first local row of the owner
    last: int  # end of the local rows, exclusive

    @property
    def rows(self) -> int:
        """Return the number of rows that are read from the owner."""
        return self.last - self.first

    def is_exchanged(self, n: int, wraps: bool) -> bool:
        """Return True if the ranks exchange the rows of this part by a ring shift. It is the same on every rank.

        Without `wraps`, the first ranks then receive rows of the last ones (or the reverse), which `_fill_outside`
        replaces. Rows that are not exchanged are a rank's own, or beyond the ends of the sequence on every rank.

        Args:
            n: Number of ranks.
            wraps: True if rank 0 follows the last rank.
        """
        return self.hop % n != 0 if wraps else 0 < abs(self.hop) < n


def split_by_owner(low: int, high: int, s: int) -> list[HaloPart]:
    """Split the positions [low, high) that a rank reads by the ranks that own them, in order.

    A causal convolution of width 4 with s = 10 reads [-3, 10): rows [7, 10) of the previous rank (hop 1), and the rows
    [0, 10) of this rank (hop 0).

    Args:
        low: First position, relative to a rank's first.
        high: End of the positions, relative to a rank's first.
        s: Rows per rank. May be symbolic: the number of ranks in between becomes a guard.
    """
    owners = range(int(low // s), int((high - 1) // s) + 1)  # relative to the reading rank
    return [HaloPart(-owner, max(low - owner * s, 0), min(high - owner * s, s)) for owner in owners]


def read_around(x: Tensor, dim: int, low: int, high: int, frame: FrameArg, fill: float, n: int, group: str) -> Tensor:
    """Return the rows [low, high), relative to this rank's first row, differentiably.

    They may belong to other ranks. Positions that are padding, or before or after the sequence, are ``fill``.

    Shapes: dim of s -> high - low; the dim contains only the sequence. Bytes: those of the rows that other ranks own,
    in the forward and in the backward.
    """
    parts = split_by_owner(low, high, local_row_count(frame, n))
    pieces = _collect_parts(x, dim, parts, n, group, wraps=False, fill=fill)
    filled, first = [], low  # the first position of each piece, relative to this rank's first row
    for part, piece in zip(parts, pieces):
        filled.append(_fill_outside(piece, dim, first, first + part.rows, frame, fill, n, group))
        first = first + part.rows
    return _join_pieces(filled, dim)


def read_around_ring(x: Tensor, dim: int, low: int, high: int, s: int, n: int, group: str) -> Tensor:
    """Return the rows [low, high), relative to this rank's first row, on a ring, differentiably.

    As ``read_around``, but rank 0 follows the last rank and every row is valid.
    """
    return _join_pieces(_collect_parts(x, dim, split_by_owner(low, high, s), n, group, wraps=True), dim)


def _join_pieces(pieces: list[Tensor], dim: int) -> Tensor:
    """Concatenate the pieces; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _collect_parts(
    x: Tensor, dim: int, parts: list[HaloPart], n: int, group: str, wraps: bool, fill: float = 0.0
) -> list[Tensor]:
    """Return one tensor for each part: local rows, rows of another rank, or ``fill`` beyond the ends of the sequence.

    The rows of all other ranks are fetched in one differentiable map, so that their shifts overlap.

    Args:
        x: This rank's rows.
        dim: The dim of the rows.
        parts: The rows to read, by their owners.
        n: Number of ranks.
        group: Name of the process group.
        wraps: True if rank 0 follows the last rank. The sequence then has no ends.
        fill: Value of positions beyond the ends.
    """
    remote_parts = tuple(part for part in parts if part.is_exchanged(n, wraps))
    received: Iterator[Tensor] = iter(())
    if remote_parts:
        rows = LinearMap.apply(x, _fetch_parts, _return_parts, dim, x.shape[dim], remote_parts, n, group)
        received = iter(rows.split([part.rows for part in remote_parts], dim))
    pieces: list[Tensor] = []
    for part in parts:
        if part.is_exchanged(n, wraps):
            pieces.append(next(received))
        elif wraps or part.hop == 0:
            is_full = is_known(part.first == 0) and is_known(part.last == x.shape[dim])
            pieces.append(x if is_full else x.narrow(dim, part.first, part.rows))
        else:
            pieces.append(x.new_full([*x.shape[:dim], part.rows, *x.shape[dim + 1 :]], fill))
    return pieces


def _fill_outside(x: Tensor, dim: int, low: int, high: int, frame: FrameArg, fill: float, n: int, group: str) -> Tensor:
    """Replace the rows of x that are padding or beyond the sequence by ``fill``.

    The rows have the positions [low, high) relative to this rank's first; valid positions are [start, start + length)
    of the sequence. A comparison with an end is omitted if all ranks are known to read within it.
    """
    s, (start, length) = local_row_count(frame, n), frame[2:4]
    may_precede = not is_known(low >= start)  # on rank 0, whose rows are the first
    may_exceed = not is_known((n - 1) * s + high <= start + length)  # on the last rank
    if not may_precede and not may_exceed:
        return x
    positions = torch.arange(low, high, device=x.device)
    if n > 1:
        positions = positions + torch.ops.sp.rank(group, x.device) * s
    precedes = [positions < start] if may_precede else []
    exceeds = [positions >= start + length] if may_exceed else []
    return fill_rows(x, column_along(reduce(or_, precedes + exceeds), dim, x.ndim), fill)


# Two adjoint linear maps, for `LinearMap`: fetch rows, and return their cotangents. Both have the same arguments.


def _fetch_parts(x: Tensor, dim: int, s: int, parts: tuple[HaloPart, ...], n: int, group: str) -> Tensor:
    """Fetch the rows of all parts from other ranks: (.., s, ..) -> (.., rows of all parts, ..).

    All ranks read the same rows relative to their own: a rank that receives rows [first, last) of another rank sends
    its own rows [first, last) to a third one. The adjoint, for the backward, is `_return_parts`.
    """
    local_rows = [x.narrow(dim, part.first, part.rows) for part in parts]
    return _join_pieces(_shift_all(local_rows, dim, [part.hop for part in parts], n, group), dim)


def _return_parts(grad: Tensor, dim: int, s: int, parts: tuple[HaloPart, ...], n: int, group: str) -> Tensor:
    """Send cotangents back to the owners of the rows, and add them: (.., rows of all parts, ..) -> (.., s, ..).

    This is the adjoint of `_fetch_parts`. Rows of x in no part have a cotangent of zero.
    """
    part_grads = list(grad.split([part.rows for part in parts], dim))
    received = _shift_all(part_grads, dim, [-part.hop for part in parts], n, group)
    inner_dims = [0, 0] * (grad.ndim - 1 - dim)  # no padding of the dims after `dim`
    padded = (torch.constant_pad_nd(x, [*inner_dims, p.first, s - p.last]) for p, x in zip(parts, received))
    return reduce(add, padded)


def _shift_all(xs: list[Tensor], dim: int, hops: list[int], n: int, group: str) -> list[Tensor]:
    """Send each x to the rank that is `hop` ranks after this one on the ring, and return the received tensors.

    All sends start before the first wait, so that they overlap.
    """
    communicator = current_communicator()
    shifts = [
        communicator.start_shift(to_sendable(x.movedim(dim, 0)), routes.shift_route(group, _ring_offset(hop, n)))
        for x, hop in zip(xs, hops, strict=True)
    ]
    return [from_sendable(communicator.wait(shift), x).movedim(0, dim) for x, shift in zip(xs, shifts, strict=True)]


def _ring_offset(hop: int, n: int) -> int:
    """Return hop modulo n in the shorter direction of a ring of n ranks: 3 of 4 ranks forward is -1."""
    hop %= n
    return hop if 2 * hop <= n else hop - n


def ring_shifts(low: int, high: int, s: int, n: int, wraps: bool = False) -> list[tuple[int, Any]]:
    """Return (offset in ranks, number of rows) of each shift of a forward, for cost estimates and routes.

    The backward negates the offsets.

    Args:
        low: First position that a rank reads, relative to its first.
        high: End of these positions.
        s: Rows per rank.
        n: Number of ranks.
        wraps: True if rank 0 follows the last rank.
    """
    parts = split_by_owner(low, high, s)
    return [(_ring_offset(part.hop, n), part.rows) for part in parts if part.is_exchanged(n, wraps)]
