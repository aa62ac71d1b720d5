"""Place ops whose results read a window of rows along a dim.

These are convolutions, poolings, unfolds, shifts and rolls.

    row j of the result reads rows j * stride - before + [0, width) of the operand, and constants beyond its ends

A shift has width 1. A roll reads one row, too, but wraps around. These are ops of torch, and the sp:: ops that replace
them on shards, whose frame defines the placement:

    F.conv1d(x, w, b, padding=2)   along its last dim:   sp::conv_along(x, w, b, ...), width 3
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx import map_arg

from sp_compile.lowering.windows import window_ops as ops
from sp_compile.passes.graph.call import OpCall, parse_overloads, wrap_dim
from sp_compile.passes.graph.sizes import (
    Size,
    as_size,
    assume_large,
    exact_quotient,
    is_divisor,
    is_most_of,
    is_same_size,
)

from .placement import Frame, Shard

aten, sp = torch.ops.aten, torch.ops.sp


@dataclass(frozen=True)
class SlidingRows:
    """Rows of an operand that each row of a result of `length` rows reads, along one dim.

    Row j of the result reads the rows from j * stride - before on, `width` of them; rows beyond the ends are padding.
    """

    length: Size  # rows of the result
    before: Size = 0  # rows of padding before the operand; 0 for a roll
    width: Size = 1  # rows that a row of the result reads; 1 for a roll
    stride: int = 1  # step in rows of the operand
    rolls: Size | None = None  # rows to roll by, for a roll

    def num_after(self, rows: Size) -> Size:
        """Return the rows of padding after an operand of `rows` rows; negative if the last rows are not read.

        The last window ends before row (length - 1) * stride + width - before of the operand.
        """
        return simplify_size((self.length - 1) * self.stride + self.width - self.before - rows)

    def is_pointwise(self, rows: Size) -> bool:
        """Return True if each row of the result reads the same row of an operand of `rows` rows."""
        is_row = self.rolls is None and is_same_size(self.width, 1) and self.stride == 1
        return is_row and is_same_size(self.before, 0) and is_same_size(self.length, rows)

    def is_within(self, rows: Size) -> bool:
        """Return True if the result is no longer than an operand of `rows` rows, apart from the stride.

        That is, it has at most ceil(rows / stride) rows. Then its rows can be placed as those of the operand.
        """
        return _is_at_most((self.length - 1) * self.stride + 1, rows)


def simplify_size(a: Size) -> Size:
    """Return a size with its terms collected, such as 3 for (S + 3) - S."""
    return a if isinstance(a, int) else as_size(sympy.expand(a))


def place_window(sliding: SlidingRows, shard: Shard, n: int) -> Shard | str:
    """Return the placement of a result with sliding windows over a sharded dim, or the reason to gather the operand.

    Args:
        sliding: Rows that each row of the result reads.
        shard: Placement of the operand.
        n: Number of ranks.

    Returns:
        The shard of the result, or, as a string, the reason why ranks cannot compute it from their rows and a few rows
        of their neighbors.
    """
    frame = shard.frame
    if not frame.order.is_in_order:
        return f"its neighbors are not adjacent in the {frame.order.name} layout"
    if not shard.is_only_factor:
        return "the sequence shares a dim with others"
    if sliding.rolls is not None:
        return _place_roll(sliding, shard, n)
    # The result needs a frame with one row per `stride` rows of the operand's.
    size = frame.size if sliding.stride == 1 else exact_quotient(frame.size, sliding.stride)
    if size is None or (sliding.stride > 1 and not is_divisor(n, size)):
        return f"{n} ranks times its stride of {sliding.stride} do not provably divide the sequence of {frame.size}"
    result_frame = _result_frame(sliding, frame, size)
    if result_frame is None:
        return f"a result of {sliding.length} rows does not fit into a sequence of {size}"
    if is_same_size(result_frame.length, 1) or not is_most_of(result_frame.length, result_frame.size):
        return f"a result of {sliding.length} rows would leave most ranks idle"
    # Row j of the result frame reads rows j * stride + first_row + [0, width) of the operand's frame.
    first_row = simplify_size(frame.start - sliding.before - sliding.stride * result_frame.start)
    if not isinstance(first_row, int) or not isinstance(sliding.width, int):
        return "the size of its halo is not known"
    # Rows of other ranks that a rank reads, before and after its own.
    halo = max(-first_row, 0) + max(first_row + sliding.width - sliding.stride, 0)
    # A shift (width 1) is exempt: it never reads more rows than the rank has, at any distance.
    if sliding.width > 1 and 2 * halo > assume_large(frame.size):
        return f"its halo has {halo} rows, more than half of the sequence of {frame.size}"
    return replace(shard, frame=result_frame)


def _place_roll(sliding: SlidingRows, shard: Shard, n: int) -> Shard | str:
    """Return the placement of a roll of a sharded dim, which is that of the operand, or the reason to gather.

    The op skips padded rows if their number is an int. Padding of an unknown size would be rolled into valid rows. The
    number of rows to roll by is an int (`_has_known_rows`).
    """
    frame = shard.frame
    has_known_padding = frame.is_exact(n) or all(isinstance(s, int) for s in (frame.size, frame.start, frame.length))
    if has_known_padding:
        return shard
    return f"{n} ranks do not provably divide the sequence of {frame.size} that it rolls"


def _result_frame(sliding: SlidingRows, frame: Frame, size: Size) -> Frame | None:
    """Return the frame of the result of sliding windows, or None if no place for its rows is proved to fit.

    The first row is placed at the row that reads the operand's first valid row, or else at the start of the frame, or
    else so that the last row is at its end.

    Args:
        sliding: Rows that each row of the result reads.
        frame: The frame of the operand.
        size: The size of the result's frame: one row for each `stride` rows of the operand's.
    """
    last_start = simplify_size(size - sliding.length)
    aligned_start = exact_quotient(frame.start, sliding.stride)  # of the row that reads the operand's first valid row
    for start in (aligned_start, 0, last_start):
        if start is not None and _is_at_most(start, last_start) and _is_at_most(0, start):
            return Frame(size, start, sliding.length)
    return None


def _is_at_most(a: Size, b: Size) -> bool:
    """Return True if a <= b provably, for all positive values of the symbols."""
    difference = sympy.expand(sympy.sympify(b) - sympy.sympify(a))
    return bool(difference.is_nonnegative)  # None: not known


@dataclass(frozen=True)
class WindowCall:
    """Form of a call with sliding windows along one dim as a call of the sp:: op that runs on shards.

    It is `op(x, *head, before, after, *tail)`; a roll, `op(x, *head)`, has no padding before and after.
    """

    sliding: SlidingRows  # rows that it reads
    op: Any  # sp:: op
    head: tuple[Any, ...] = ()  # arguments before `before`
    tail: tuple[Any, ...] = ()  # arguments after `after`
    # op, and its arguments after x, that applies the call along other dims first
    first: tuple[Any, tuple[Any, ...]] | None = None

    def args(self, rows: Size) -> tuple[Any, ...]:
        """Return the arguments after x; `rows`, the rows of x, determine the padding after them."""
        if self.sliding.rolls is not None:
            return self.head
        return (*self.head, self.sliding.before, self.sliding.num_after(rows), *self.tail)


def sliding_calls(call: OpCall) -> Mapping[int, WindowCall]:
    """Return the sliding windows of a call, with its form on shards, by dim of the first operand.

    {} for ops without windows. Dims in which padding, width or stride is not an int are omitted, because ranks must
    know how many rows to send.
    """
    function = WINDOW_CALLS.get(call.node.target)
    window_calls = function(call) if function is not None else {}
    return {
        dim: window_call
        for dim, window_call in window_calls.items()
        if _has_known_rows(window_call.sliding, call.shape()[dim])
    }


def _has_known_rows(sliding: SlidingRows, rows: Size) -> bool:
    """Return True if padding, width and stride of windows over an operand of `rows` rows are ints.

    The numbers of rows that ranks exchange are then known. A result without rows has no windows.
    """
    if sliding.rolls is not None:
        return isinstance(sliding.rolls, int)
    numbers = (sliding.before, sliding.width, sliding.stride, sliding.num_after(rows))
    return all(isinstance(s, int) for s in numbers) and not is_same_size(sliding.length, 0)


WindowCalls = Mapping[int, WindowCall]  # by dim of the first operand


def _conv_windows(call: OpCall) -> WindowCalls:
    """Return the windows of a convolution along each dim of the image, by dim.

    The result is empty for a transposed convolution, an operand without channels, a kernel of symbolic size, and where
    no sp:: op has the form of the call: a 1-dim convolution without batch, and "same" padding of an even width in
    several dims.
    """
    weight = call.shape("weight")  # (channels, channels of a group, *kernel)
    spatial, kernel = range(len(weight) - 2), weight[2:]
    first = call.ndim() - len(spatial)  # the first dim of the image
    if call.get("transposed") or first < 1 or not all(isinstance(k, int) for k in kernel):
        return {}
    stride, dilation = (_image_numbers(call[name], default=1, count=len(spatial)) for name in ("stride", "dilation"))
    widths = [dilation[i] * (kernel[i] - 1) + 1 for i in spatial]
    if isinstance(call["padding"], str):
        padding = [(width - 1) // 2 if call["padding"] == "same" else 0 for width in widths]
    else:
        padding = _image_numbers(call["padding"], default=0, count=len(spatial))
    has_equal_padding = call["padding"] != "same" or all(width % 2 for width in widths)  # before and after the image
    has_sp_form = call.ndim() == 3 if len(spatial) == 1 else has_equal_padding
    if not has_sp_form:
        return {}
    lengths = call.result_shapes()[0][first:]
    rows_of_dims = zip(lengths, padding, widths, stride, strict=True)
    slides = [SlidingRows(length, before, width, step) for length, before, width, step in rows_of_dims]
    # The sp:: op is called as op(x, *head, before, after, *tail): `head` has the weight and the bias.
    head, groups = (call["weight"], call["bias"]), call["groups"]
    tail = (stride, padding, dilation, groups)
    return {dim: WindowCall(x, sp.conv_along.default, (*head, dim), tail) for dim, x in enumerate(slides, first)}


def _image_numbers(value: Any, default: Any, count: int = 1) -> list[Any]:
    """Return one number for each of `count` dims of an image or sequence: [2, 2] for an argument 2 or [2].

    ATen represents an omitted argument by [], for which each number is `default`.
    """
    numbers = list(value) if isinstance(value, Sequence) else [value]
    if len(numbers) != count:
        numbers = (numbers or [default]) * count
    return [as_size(x) for x in numbers]


def _avg_pool_windows(call: OpCall) -> WindowCalls:
    """Return the windows of an average pool of a sequence (avg_pool1d) along its last dim.

    The sp:: op divides each sum by the width. So the result is {} if torch divides some sums by less: those of windows
    that end beyond the padding (ceil_mode), and, without count_include_pad, those of windows that contain padding.
    """
    # Each argument is a number or a list of one; the stride is [] if it is not given, and then the width.
    (width,), (before,) = (_image_numbers(call[name], default=0) for name in ("kernel_size", "padding"))
    (stride,) = _image_numbers(call["stride"], default=width)
    sliding = SlidingRows(call.result_shapes()[0][-1], before, width, stride)
    after = sliding.num_after(call.shape()[-1])
    ends_in_padding = isinstance(after, int) and after <= before  # the call pads both ends with `before` rows
    counts_padding = before == 0 or call["count_include_pad"]
    if not ends_in_padding or not counts_padding:
        return {}
    return {call.ndim() - 1: WindowCall(sliding, sp.avg_pool1d.default, tail=(width, stride))}


def _max_pool_windows(call: OpCall) -> WindowCalls:
    """Return the windows of a max pool along its last dim; {} for integers, which have no -inf for padded rows."""
    if not call.results()[0].is_floating_point():
        return {}
    # Each argument is a number or a list of one; only the stride may be [], and is then the size of the kernel.
    names = ("kernel_size", "padding", "dilation")
    (rows,), (before,), (dilation,) = (_image_numbers(call[name], default=None) for name in names)
    (stride,) = _image_numbers(call["stride"], default=rows)
    width = dilation * (rows - 1) + 1
    sliding = SlidingRows(call.result_shapes()[0][-1], before, width, stride)
    tail = (-math.inf, width, stride, dilation)  # -inf: the fill of padded rows
    return {call.ndim() - 1: WindowCall(sliding, sp.max_pool1d.default, tail=tail)}


def _unfold_windows(call: OpCall) -> WindowCalls:
    """Return the windows of an unfold along its dim, without padding.

    The result is {} for a tensor without dims and for a step that is a symbol.
    """
    dim, width, stride = call.dim("dimension"), as_size(call["size"]), as_size(call["step"])
    if call.ndim() == 0 or not isinstance(stride, int):
        return {}
    sliding = SlidingRows(call.result_shapes()[0][dim], before=0, width=width, stride=stride)
    fill = 0  # of rows beyond the ends, which no window reads
    return {dim: WindowCall(sliding, sp.unfold.default, head=(dim,), tail=(fill, width, stride))}


def _pad_windows(call: OpCall) -> WindowCalls:
    """Return the windows of a constant pad along each dim that it extends or cuts.

    They have one row: row j of the result is row j - before of the operand, or the fill. Along one dim, the call is a
    pad of the other dims (`WindowCall.first`), then sp::shift along this one. The result is {} for other modes of pad,
    and for a fill that is no constant.
    """
    fill = call["value"] if call["value"] is not None else 0
    if call.get("mode", "constant") != "constant" or not isinstance(fill, (bool, int, float)):
        return {}
    widths = [as_size(w) for w in call["pad"]]  # (before, after) of each dim, from the last dim on
    window_calls = {}
    for i in range(0, len(widths), 2):
        dim, before, after = call.ndim() - 1 - i // 2, widths[i], widths[i + 1]
        if is_same_size(before, 0) and is_same_size(after, 0):
            continue
        other_widths = [*widths[:i], 0, 0, *widths[i + 2 :]]
        first = (aten.constant_pad_nd.default, (other_widths, fill)) if any(other_widths) else None
        sliding = SlidingRows(call.result_shapes()[0][dim], before)
        window_calls[dim] = WindowCall(sliding, sp.shift.default, head=(dim,), tail=(fill,), first=first)
    return window_calls


def _roll_windows(call: OpCall) -> WindowCalls:
    """Return the form of a roll along each of its dims: a roll of the other dims (`first`), then sp::roll of this one.

    A dim that is named twice is rolled by the sum of its shifts. The result is {} for a roll without dims, which rolls
    the flattened tensor.
    """
    shape, shifts = call.shape(), call["shifts"]
    shift_of_dim: dict[int, Size] = {}
    for d, shift in zip(call["dims"] or (), shifts if isinstance(shifts, Sequence) else [shifts]):
        dim = wrap_dim(d, len(shape))
        shift_of_dim[dim] = simplify_size(shift_of_dim.get(dim, 0) + as_size(shift))
    window_calls = {}
    for dim, shift in shift_of_dim.items():
        other_dims = [d for d in shift_of_dim if d != dim]
        first = (aten.roll.default, ([shift_of_dim[d] for d in other_dims], other_dims)) if other_dims else None
        rows = _shorter_shift(shift, shape[dim])
        window_calls[dim] = WindowCall(SlidingRows(shape[dim], rolls=rows), sp.roll.default, (dim, rows), first=first)
    return window_calls


def _shorter_shift(shift: Size, length: Size) -> Size:
    """Return the equivalent roll by at most half of the rows: -1 for a roll of 10 rows by 9.

    Fewer rows are then sent. The shift is unchanged if it or the length is symbolic.
    """
    if not isinstance(shift, int) or not isinstance(length, int) or length == 0:
        return shift
    forward = shift % length
    return forward if 2 * forward <= length else forward - length


def _sp_windows(call: OpCall) -> WindowCalls:
    """Return the windows of a call of an sp:: window op, along its one dim, from its arguments.

    The schemas have the form (x, *head, before, after, *tail, frame, ...).
    """
    op, arguments = call.node.target, list(call.args)
    dim = call.dim() if "dim" in call.args else call.ndim() - 1
    if op is sp.roll.default:
        rows = call["shift"]
        return {dim: WindowCall(SlidingRows(call.shape()[dim], rolls=rows), op, head=(dim, rows))}
    width = call.get("width", 1)
    stride = call.get("stride", 1)
    if op is sp.conv_along.default:  # its numbers have one entry for each dim of the image
        i = dim - (call.ndim() - len(stride))  # the index of the dim among those of the image
        width = call["dilation"][i] * (int(call.shape("weight")[2 + i]) - 1) + 1
        stride = stride[i]
    sliding = SlidingRows(call.result_shapes()[0][dim], call["before"], width, stride)
    head = tuple(call[name] for name in arguments[1 : arguments.index("before")])
    tail = tuple(call[name] for name in arguments[arguments.index("after") + 1 : arguments.index("frame")])
    return {dim: WindowCall(sliding, op, head, tail)}


# ops that accept shards, if their frame argument is set
_WINDOW_OPS = (sp.avg_pool1d, sp.conv_along, sp.max_pool1d, sp.roll, sp.shift, sp.unfold)
SHARD_WINDOWS = tuple(op.default for op in _WINDOW_OPS)

WINDOW_CALLS: Mapping[Any, Callable[[OpCall], WindowCalls]] = {
    **dict.fromkeys(
        parse_overloads("conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding convolution"), _conv_windows
    ),
    **dict.fromkeys(parse_overloads("constant_pad_nd pad"), _pad_windows),
    aten.avg_pool1d.default: _avg_pool_windows,
    aten.max_pool1d.default: _max_pool_windows,
    aten.roll.default: _roll_windows,
    aten.unfold.default: _unfold_windows,
    **dict.fromkeys(SHARD_WINDOWS, _sp_windows),
}


def window_shift_sizes(call: OpCall, n: int) -> list[tuple[int, Any]]:
    """Return the exchanges of a call of an sp:: window op on shards: (hop, rows) for each shift of rows.

    Rank r receives `rows` rows from rank r - hop. The backward runs the reversed shifts. [] for other calls.
    """
    if call.node.target not in SHARD_WINDOWS or call["frame"] is None or n == 1:
        return []
    (window_call,) = _sp_windows(call).values()
    sliding = window_call.sliding
    frames = (call["frame"], call.get("result") or call["frame"])
    frame, result = map_arg(frames, lambda node: node.meta["val"])  # sizes may be nodes
    if sliding.rolls is not None:
        return ops.roll_shifts(sliding.rolls, frame, n)
    return ops.window_shifts(sliding.before, sliding.width, sliding.stride, frame, result, n)
