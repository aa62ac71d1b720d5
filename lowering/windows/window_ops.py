"""Run sliding-window ops over a sharded sequence: fetch rows of neighbors, then call a torch op.

    row j of the result reads rows j * stride - before + [0, width) of x; rows outside x contain ``fill``

Without ``frame``, x is a full tensor and torch's own padding is used. With it, x is a shard placed by ``frame``, and
the result is placed by ``result``: on rank r positions [r * s / stride, (r + 1) * s / stride) of a dim of size /
stride positions. ``stride`` must divide s. The outer and inner factors of both are 1, and neither is zigzag.

Bytes: those of the rows that other ranks own, forward and backward, in one shift per owner (see ``halo_exchange.py``):
one for each direction if a window reaches no further than the next rank. Cotangents of rows outside the window are
exact zeros. The dim of the sequence is the last one of x unless there is an argument ``dim``.

    window         `width` rows of x, from which one row of the result is computed
    before, after  rows of ``fill`` before the first and after the last row of x; negative to remove rows
    frame          how a sequence is sharded over n ranks. Its valid positions are [start, start + length); all others
                   are padded rows (``base/frames.py``)
    s              rows of x per rank, including padding
    wrapped rows   (of a roll) rows of the result whose source is at the other end of the sequence
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import (
    FrameArg,
    column_along,
    frame_folds,
    is_known,
    is_padded,
    local_row_count,
    own_positions,
)
from sp_compile.lowering.base.library import composite
from sp_compile.lowering.collectives.pad_rows import window

from .halo_exchange import read_around, read_around_ring, ring_shifts

# Schema of the fields of `WindowPlacement` and of the result, the end of each operator's schema.
WINDOW_ARGUMENTS = "SymInt[]? frame=None, SymInt[]? result=None, int n=1, str group='') -> Tensor"


def _read_rows(before: int, width: int, stride: int, frame: FrameArg, result: FrameArg, n: int) -> tuple[int, int]:
    """Return the rows [low, high) that the windows of one rank read, relative to its first row.

    Result row j reads rows j * stride - before + [0, width). Arguments: as of `window_shifts`.
    """
    assert frame_folds(frame) == frame_folds(result) == 1, "the zigzag layout separates the neighbors of a window"
    start, result_start = frame[2], result[2]  # positions of the first rows of x and of the result
    # A rank with s rows of x from position p on has the result's positions from p / stride on. The first of them is row
    # j = p / stride - result_start of the result. Its window begins at row j * stride - before of x, which is at
    # position start + j * stride - before. Minus p, this is `low`.
    low = start - before - stride * result_start
    return low, low + local_row_count(frame, n) + width - stride  # the last window begins at low + s - stride


def window_shifts(
    before: int, width: int, stride: int, frame: FrameArg, result: FrameArg, n: int
) -> list[tuple[int, int]]:
    """Return (offset in ranks, number of rows) of every shift in the forward of a window on shards, for its cost.

    Args:
        before: Rows of padding before the first position.
        width: Rows of a window.
        stride: Distance between windows, in rows.
        frame: Frame of the operand.
        result: Frame of the result.
        n: Number of ranks.
    """
    low, high = _read_rows(before, width, stride, frame, result, n)
    return ring_shifts(low, high, local_row_count(frame, n), n)


class WindowPlacement(NamedTuple):
    """Placement of the operand and the result of a window op (``WINDOW_ARGUMENTS``)."""

    frame: FrameArg | None = None  # frame of the operand; None for a full tensor
    result: FrameArg | None = None  # frame of the result; None for that of the operand
    n: int = 1  # number of ranks
    group: str = ""  # name of the process group

    def rows(self, x: Tensor, dim: int, before: int, after: int, width: int, stride: int, fill: float) -> Tensor:
        """Return the rows that this rank's windows read, with ``fill`` outside the sequence.

        Without a frame, x is a full tensor, and the result is the padded tensor. Otherwise x is this rank's shard, and
        rows of other ranks are fetched.

        Args:
            x: The operand; its sequence is along ``dim``.
            dim: The dim of the sequence.
            before: Rows of ``fill`` before the first row.
            after: Rows of ``fill`` after the last row.
            width: Rows of a window.
            stride: Distance between windows, in rows.
            fill: The value of rows outside x.
        """
        if self.frame is None:
            return _pad_rows(x, dim, before, after, fill)
        low, high = _read_rows(before, width, stride, self.frame, self.result or self.frame, self.n)
        return read_around(x, dim, low, high, self.frame, fill, self.n, self.group)

    def finish(self, y: Tensor, dim: int) -> Tensor:
        """Return the result y with padded rows replaced by the nearest valid row.

        Every window operator returns its result through this, as other ops rely on finite padded rows. The cotangents
        of padded rows become exact zeros.
        """
        result = self.result or self.frame
        if self.frame is None or result is None or not is_padded(result, self.n):
            return y
        return window(y, dim, result, self.n, self.group)


def _pad_rows(x: Tensor, dim: int, before: int, after: int, fill: float) -> Tensor:
    """Add rows of ``fill`` at both ends of a dim, or remove rows where a number is negative."""
    if before == 0 and after == 0:
        return x
    length = x.shape[dim]
    if (before < 0 and length <= -before) or (after < 0 and length <= -after):  # all rows of x are removed
        x, before, after = x.narrow(dim, 0, 0), length + before + after, 0
    return torch.constant_pad_nd(x, [0, 0] * (x.ndim - 1 - dim) + [before, after], fill)


@composite(f"shift(Tensor x, int dim, int before, int after, Scalar fill, {WINDOW_ARGUMENTS}", padded="nearest")
def shift(x: Tensor, dim: int, before: int, after: int, fill: float, *placement_args: Any) -> Tensor:
    """Shift the rows: row i of the result is row i - before of x, or ``fill`` outside x.

    ``placement_args`` are the fields of `WindowPlacement`: how x and the result are sharded; none for a full tensor.

    Shapes: dim of length -> length + before + after, either of which may be negative. Any dtype.
    Runs: constant_pad_nd.
    """
    dim, placement = dim % x.ndim, WindowPlacement(*placement_args)
    return placement.finish(placement.rows(x, dim, before, after, width=1, stride=1, fill=fill), dim)


@composite(
    "conv_along(Tensor x, Tensor weight, Tensor? bias, int dim, int before, int after, int[] stride, int[] padding, "
    f"int[] dilation, int groups, {WINDOW_ARGUMENTS}",
    padded="nearest",
)
def conv_along(
    x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, before: int, after: int, stride: list[int],
    padding: list[int], dilation: list[int], groups: int, *placement_args: Any,
) -> Tensor:  # fmt: skip
    """Convolve along the sequence, or images along several dims, one of which is the sequence, such as their rows.

    Along ``dim`` there are ``before`` and ``after`` rows of zeros at the two ends; the other dims have ``padding``.
    ``placement_args`` are the fields of `WindowPlacement`: how x and the result are sharded; none for a full tensor.

    Shapes: ([B,] C, S), (O, C / groups, K), (O,) -> ([B,] O, (S + before + after - width) // stride + 1), where width =
    dilation * (K - 1) + 1; with one more dim for images, and two for volumes. Runs: aten.conv1d, conv2d or conv3d,
    which autocast casts on every device.
    """
    placement, first = WindowPlacement(*placement_args), x.ndim - len(stride)  # first: the first dim of the image
    image_dim = dim % x.ndim - first  # index of the sequence among the dims of the image
    width = dilation[image_dim] * (weight.shape[2 + image_dim] - 1) + 1
    dim, step = first + image_dim, stride[image_dim]
    has_torch_padding = placement.frame is None and 0 <= after <= before
    rows = x if has_torch_padding else placement.rows(x, dim, before, after, width, step, fill=0)
    padding = [*padding[:image_dim], before if has_torch_padding else 0, *padding[image_dim + 1 :]]
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[len(stride) - 1]
    y = convolve(rows, weight, bias, stride, padding, dilation, groups)
    if has_torch_padding and after != before:  # torch pads both ends equally; remove the results of rows beyond `after`
        y = torch.ops.aten.slice.Tensor(y, dim, 0, (x.shape[dim] + before + after - width) // step + 1)
    return placement.finish(y, dim)


@composite(f"avg_pool1d(Tensor x, int before, int after, int width, int stride, {WINDOW_ARGUMENTS}", padded="nearest")
def avg_pool1d(x: Tensor, before: int, after: int, width: int, stride: int, *placement_args: Any) -> Tensor:
    """Average windows of ``width`` rows, with ``before`` and ``after`` rows of zeros at the two ends.

    ``placement_args`` are the fields of `WindowPlacement`: how x and the result are sharded; none for a full tensor.

    Shapes: ([B,] C, S) -> ([B,] C, (S + before + after - width) // stride + 1). Runs: aten.avg_pool1d.
    """
    placement = WindowPlacement(*placement_args)
    rows = placement.rows(x, x.ndim - 1, before, after, width, stride, fill=0)
    return placement.finish(torch.avg_pool1d(rows, [width], [stride]), x.ndim - 1)


@composite(
    "max_pool1d(Tensor x, int before, int after, Scalar fill, int width, int stride, int dilation=1, "
    f"{WINDOW_ARGUMENTS}",
    padded="nearest",
)
def max_pool1d(
    x: Tensor, before: int, after: int, fill: float, width: int, stride: int, dilation: int = 1, *placement_args: Any
) -> Tensor:
    """Return the maximum of each window: every ``dilation``-th of ``width`` rows.

    There are ``before`` and ``after`` rows of ``fill`` at the two ends, which is usually -inf, as in torch.
    ``placement_args`` are the fields of `WindowPlacement`: how x and the result are sharded; none for a full tensor.

    Shapes: ([B,] C, S) -> ([B,] C, (S + before + after - width) // stride + 1). Runs: aten.max_pool1d.
    """
    placement, kernel_size = WindowPlacement(*placement_args), [(width - 1) // dilation + 1]
    rows = placement.rows(x, x.ndim - 1, before, after, width, stride, fill)
    y = torch.max_pool1d(rows, kernel_size, [stride], padding=[0], dilation=[dilation])
    return placement.finish(y, x.ndim - 1)


@composite(
    f"unfold(Tensor x, int dim, int before, int after, Scalar fill, int width, int stride, {WINDOW_ARGUMENTS}",
    padded="nearest",
)
def unfold(
    x: Tensor, dim: int, before: int, after: int, fill: float, width: int, stride: int, *placement_args: Any
) -> Tensor:
    """Return every window of ``width`` rows, as a last dim.

    There are ``before`` and ``after`` rows of ``fill`` at the two ends.
    ``placement_args`` are the fields of `WindowPlacement`: how x and the result are sharded; none for a full tensor.

    Shapes: dim of length -> (length + before + after - width) // stride + 1, and a last dim of width. Any dtype.
    Runs: aten.unfold.
    """
    dim, placement = dim % x.ndim, WindowPlacement(*placement_args)
    rows = placement.rows(x, dim, before, after, width, stride, fill)
    return placement.finish(rows.unfold(dim, width, stride), dim)


class WrappedRows(NamedTuple):
    """Wrapped rows: rows of a roll's result whose source is at the other end of the sequence.

    ``low`` and ``high`` are equal on all ranks, and cover the local rows that wrap on any rank.
    """

    first: int  # first result position
    last: int  # end of the result positions, exclusive
    delta: int  # offset from a result position to its source
    low: int  # first local row that wraps on some rank
    high: int  # end of these local rows, exclusive

    @property
    def source(self) -> tuple[int, int]:
        """Return the rows [low, high), relative to a rank's first row, from which its wrapped rows are read."""
        return self.low + self.delta, self.high + self.delta


def wrapped_rows(shift: int, frame: FrameArg, s: int) -> WrappedRows:
    """Return the wrapped rows of a roll by 0 < abs(shift) < length, for a sequence with padding.

    They are the first `shift` positions of the result, whose sources are at the end of the sequence, or for a negative
    shift the last ones. All ranks read the same local rows [low, high), which contain those that wrap on any rank. For
    7 positions, s = 2 and a shift of 1, position 0 has the source 6: first = 0, last = 1, delta = 6, low = 0, high = 1.

    Args:
        shift: Number of rows, as of `roll`.
        frame: Frame of the sequence.
        s: Rows per rank.
    """
    _, _, start, length = frame[:4]
    first = start if shift > 0 else start + length + shift
    delta = length - shift if shift > 0 else -(length + shift)  # from a position to its source
    low, last = first % s, first + abs(shift)
    high = low + abs(shift)
    if high > s:  # they are on several ranks, at different local rows
        low, high = 0, s
    return WrappedRows(first, last, delta, low, high)


def roll_shifts(shift: int, frame: FrameArg, n: int) -> list[tuple[int, int]]:
    """Return (offset in ranks, number of rows) of every shift in the forward of a roll on shards, for its cost."""
    s = local_row_count(frame, n)
    if shift == 0 or is_known(s == 0):
        return []
    if not is_padded(frame, n):  # rank 0 follows the last rank
        return ring_shifts(-shift, s - shift, s, n, wraps=True)
    wrapped = wrapped_rows(shift, frame, s)
    # Row i reads row i - shift: the rows [-shift, s - shift), relative to a rank's first row. With padding, the wrapped
    # rows are read from the other end of the sequence, which is not on the next rank.
    return ring_shifts(-shift, s - shift, s, n) + ring_shifts(*wrapped.source, s, n)


@composite(
    "roll(Tensor x, int dim, int shift, SymInt[]? frame=None, int n=1, str group='') -> Tensor", padded="nearest"
)
def roll(x: Tensor, dim: int, shift: int, frame: FrameArg | None = None, n: int = 1, group: str = "") -> Tensor:
    """Roll the rows: row i of the result is row i - shift of x, modulo the length. Any dtype.

    Shapes: any -> same; abs(shift) < the length, and sizes must be integers if the ranks do not divide the length.
    Bytes: one shift forward and backward if they do. Otherwise the rows that wrap around are sent separately.
    Runs: narrow, cat, where.
    """
    dim = dim % x.ndim
    if frame is None:
        return x.roll(shift, dim)
    s = local_row_count(frame, n)
    if shift == 0 or is_known(s == 0):
        return x
    if not is_padded(frame, n):  # rank 0 follows the last rank: the shifted rows are adjacent on a ring
        return read_around_ring(x, dim, -shift, s - shift, s, n, group)
    # Read the shifted rows, and those that wrap around; select between them by position.
    wrapped = wrapped_rows(shift, frame, s)
    fill = 0  # in rows that are not selected
    rows = read_around(x, dim, -shift, s - shift, frame, fill, n, group)
    wrapped_values = read_around(x, dim, *wrapped.source, frame, fill, n, group)
    wrapped_values = _pad_rows(wrapped_values, dim, wrapped.low, s - wrapped.high, fill)
    positions = own_positions(frame, n, group, x.device)
    wraps = (positions >= wrapped.first) & (positions < wrapped.last)
    return window(torch.where(column_along(wraps, dim, x.ndim), wrapped_values, rows), dim, frame, n, group)
