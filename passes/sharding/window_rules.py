"""Place ops whose results read a window of rows along a dim.

These are convolutions, poolings, unfolds, shifts and rolls.

    row j of the result reads rows j * stride - before + [0, width) of the operand, and constants beyond its ends

A shift has width 1. A roll reads one row, too, but wraps around. These are ops of torch, and the sp:: ops that replace
them on shards, whose frame defines the placement:

    F.conv1d(x, w, b, padding=2)   along its last dim:   sp::conv1d(x, w, b, before=2, after=2, ...), width 3
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
from sp_compile.passes.graph.call import OpCall, parse_overloads
from sp_compile.passes.graph.sizes import Size, as_size, assume_large, divides, exact_quotient, is_most_of, is_same_size

from .placement import Frame, Shard

aten, sp = torch.ops.aten, torch.ops.sp


@dataclass(frozen=True)
class SlidingRows:
    """Rows that a result of `length` rows reads."""

    length: Size  # rows of the result
    before: Size = 0  # rows of padding before the operand; 0 for a roll
    width: Size = 1  # rows that a row of the result reads; 1 for a roll
    stride: int = 1  # step in rows of the operand
    rolls: Size | None = None  # rows to roll by, for a roll

    def num_after(self, rows: Size) -> Size:
        """Return the rows of padding after an operand of `rows` rows; negative if the last rows are not read."""
        return simplify_size((self.length - 1) * self.stride + self.width - self.before - rows)

    def is_pointwise(self, rows: Size) -> bool:
        """Return True if each row of the result reads the same row of an operand of `rows` rows."""
        is_row = self.rolls is None and is_same_size(self.width, 1) and self.stride == 1
        return is_row and is_same_size(self.before, 0) and is_same_size(self.length, rows)

    def is_within(self, rows: Size) -> bool:
        """Return True if the result has at most one row for each `stride` rows (the last: or fewer) of `rows` rows."""
        return _is_at_most((self.length - 1) * self.stride + 1, rows)


def simplify_size(a: Size) -> Size:
    """Collect the terms of a size; the result is an int if the symbols cancel."""
    return a if isinstance(a, int) else as_size(sympy.expand(a))


def place_window(sliding: SlidingRows, shard: Shard, n: int) -> Shard | str:
    """Return the placement of the result for an operand with this shard, or the reason to gather.

    Args:
        sliding: Rows that the op reads.
        shard: Placement of the operand.
        n: Number of ranks.
    """
    frame = shard.frame
    if not frame.order.is_in_order:
        return f"its neighbors are not adjacent in the {frame.order.name} layout"
    if not (is_same_size(shard.outer, 1) and is_same_size(shard.inner, 1)):
        return "the sequence shares a dim with others"
    if sliding.rolls is not None:
        return _place_roll(sliding, shard, n)
    # The result needs a frame with one row per `stride` rows of the operand's.
    size = frame.size if sliding.stride == 1 else exact_quotient(frame.size, sliding.stride)
    if size is None or (sliding.stride > 1 and not divides(n, size)):
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
    halo = max(-first_row, 0) + max(first_row + sliding.width - sliding.stride, 0)
    if sliding.width > 1 and 2 * halo > assume_large(frame.size):
        return f"its halo has {halo} rows, more than half of the sequence of {frame.size}"
    return replace(shard, frame=result_frame)


def _place_roll(sliding: SlidingRows, shard: Shard, n: int) -> Shard | str:
    """Return the operand's shard, or the reason to gather: padding of an unknown size would roll, too."""
    sizes = (sliding.rolls, shard.frame.size, shard.frame.start, shard.frame.length)
    if isinstance(sliding.rolls, int) and (shard.frame.is_exact(n) or all(isinstance(s, int) for s in sizes)):
        return shard
    return f"{n} ranks do not provably divide the sequence of {shard.frame.size} that it rolls"


def _result_frame(sliding: SlidingRows, frame: Frame, size: Size) -> Frame | None:
    """Return the window of the result: aligned with the operand's, else at the start, else at the end."""
    last = simplify_size(size - sliding.length)
    aligned = exact_quotient(frame.start, sliding.stride)
    for start in (aligned, 0, last):
        if start is not None and _is_at_most(start, last) and _is_at_most(0, start):
            return Frame(size, start, sliding.length)
    return None


def _is_at_most(a: Size, b: Size) -> bool:
    """Return True if a <= b for all positive values of the symbols."""
    difference = sympy.expand(sympy.sympify(b) - sympy.sympify(a))
    return bool(difference.is_nonnegative)


@dataclass(frozen=True)
class WindowCall:
    """Call along one dim as `op(x, *head, before, after, *tail)`; a roll has no before and after."""

    sliding: SlidingRows  # rows that it reads
    op: Any  # sp:: op
    head: tuple[Any, ...] = ()  # arguments before `before`
    tail: tuple[Any, ...] = ()  # arguments after `after`
    # op, and its arguments after x, that applies the call along other dims first
    first: tuple[Any, tuple[Any, ...]] | None = None

    def args(self, rows: Size) -> tuple[Any, ...]:
        """Return the arguments after an x of `rows` rows."""
        if self.sliding.rolls is not None:
            return self.head
        return (*self.head, self.sliding.before, self.sliding.num_after(rows), *self.tail)


def sliding_calls(call: OpCall) -> Mapping[int, WindowCall]:
    """Return the window calls of a call by dim of its first operand; dims with unknown steps are omitted."""
    function = WINDOW_CALLS.get(call.node.target)
    window_calls = function(call) if function is not None else {}
    return {d: w for d, w in window_calls.items() if _has_known_rows(w.sliding, call.shape()[d])}


def _has_known_rows(sliding: SlidingRows, rows: Size) -> bool:
    """Return True if the numbers of rows that a call reads from an operand of `rows` rows are ints."""
    if sliding.rolls is not None:
        return isinstance(sliding.rolls, int)
    numbers = (sliding.before, sliding.width, sliding.stride, sliding.num_after(rows))
    return all(isinstance(s, int) for s in numbers) and not is_same_size(sliding.length, 0)


WindowCalls = Mapping[int, WindowCall]  # by dim of the first operand


def _single_number(value: Any, default: Any = None) -> Any:
    """Return the number in a list argument of an op with one spatial dim.

    The default is for an empty list.
    """
    listed = value if isinstance(value, Sequence) else [value]
    return as_size(listed[0]) if listed else default


def _along_last_dim(call: OpCall, before: Size, width: Size, stride: int) -> SlidingRows:
    """Return the sliding rows of a convolution or a pool, whose windows slide over the last dim."""
    return SlidingRows(call.result_shapes()[0][call.ndim() - 1], before, width, stride)


def _conv_windows(call: OpCall) -> WindowCalls:
    """Return the windows of a convolution along each dim of the image in which it has a known width.

    The result is empty for transposed convolutions, and without channels.
    """
    weight, first = call.shape("weight"), call.ndim() - len(call.shape("weight")) + 2  # the first dim of the image
    axes = range(len(weight) - 2)
    if call.get("transposed") or first < 1 or not all(isinstance(k, int) for k in weight[2:]):
        return {}
    stride, dilation = (_image_numbers(call[name], 1, len(axes)) for name in ("stride", "dilation"))
    widths = [dilation[i] * (weight[2 + i] - 1) + 1 for i in axes]
    if isinstance(call["padding"], str):
        padding = [(width - 1) // 2 if call["padding"] == "same" else 0 for width in widths]
    else:
        padding = _image_numbers(call["padding"], 0, len(axes))
    lengths, window_calls = call.result_shapes()[0][first:], {}
    if len(axes) == 1 and call.ndim() == 3:
        head, numbers = (call["weight"], call["bias"]), (stride[0], dilation[0], call["groups"])
        sliding = SlidingRows(lengths[0], padding[0], widths[0], stride[0])
        return {first: WindowCall(sliding, sp.conv1d.default, head, numbers)}
    if len(axes) == 1 or (call["padding"] == "same" and any(width % 2 == 0 for width in widths)):
        return {}
    for i in axes:
        operands, tail = (call["weight"], call["bias"], first + i), (stride, padding, dilation, call["groups"])
        sliding = SlidingRows(lengths[i], padding[i], widths[i], stride[i])
        window_calls[first + i] = WindowCall(sliding, sp.conv_along.default, operands, tail)
    return window_calls


def _image_numbers(value: Any, default: int, count: int) -> list[Any]:
    """Return one number for each dim of an image; an argument with one number applies to all dims."""
    listed = list(value) if isinstance(value, Sequence) else [value]
    return [as_size(x) for x in (listed if len(listed) == count else (listed or [default]) * count)]


def _avg_pool_windows(call: OpCall) -> WindowCalls:
    """Return no windows if they end beyond the padding or do not count it: these divide by fewer rows."""
    width, before = _single_number(call["kernel_size"]), _single_number(call["padding"], 0)
    stride = _single_number(call["stride"], width)
    sliding = _along_last_dim(call, before, width, stride)
    after = sliding.num_after(call.shape()[-1])
    if not (isinstance(after, int) and after <= before) or not (before == 0 or call["count_include_pad"]):
        return {}
    return {call.ndim() - 1: WindowCall(sliding, sp.avg_pool1d.default, (), (width, stride))}


def _max_pool_windows(call: OpCall) -> WindowCalls:
    """Return the windows of a pool of floats; rows beyond the ends are -inf, which integers do not have."""
    rows, before, dilation = (_single_number(call[name]) for name in ("kernel_size", "padding", "dilation"))
    stride, width = _single_number(call["stride"], rows), dilation * (rows - 1) + 1
    if not call.results()[0].is_floating_point():
        return {}
    tail = (-math.inf, width, stride, dilation)
    return {call.ndim() - 1: WindowCall(_along_last_dim(call, before, width, stride), sp.max_pool1d.default, (), tail)}


def _unfold_windows(call: OpCall) -> WindowCalls:
    """Return the windows along the unfolded dim, which have no padding."""
    dim, width, stride = call.dim("dimension"), as_size(call["size"]), as_size(call["step"])
    if call.ndim() == 0 or not isinstance(stride, int):
        return {}
    sliding = SlidingRows(call.result_shapes()[0][dim], 0, width, stride)
    return {dim: WindowCall(sliding, sp.unfold.default, (dim,), (0, width, stride))}


def _pad_windows(call: OpCall) -> WindowCalls:
    """Return a shift along each dim that a constant pad extends or cuts; the other dims are padded first."""
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
        window_calls[dim] = WindowCall(sliding, sp.shift.default, (dim,), (fill,), first)
    return window_calls


def _roll_windows(call: OpCall) -> WindowCalls:
    """Return a roll along each dim; the other dims are rolled first."""
    shape, shifts, shift_of_dim = call.shape(), call["shifts"], dict[int, Size]()
    for d, shift in zip(call["dims"] or (), shifts if isinstance(shifts, Sequence) else [shifts]):
        dim = int(d) % max(len(shape), 1)
        shift_of_dim[dim] = simplify_size(shift_of_dim.get(dim, 0) + as_size(shift))
    window_calls = {}
    for dim, shift in shift_of_dim.items():
        other_dims = [d for d in shift_of_dim if d != dim]
        first = (aten.roll.default, ([shift_of_dim[d] for d in other_dims], other_dims)) if other_dims else None
        rows = _shorter_shift(shift, shape[dim])
        window_calls[dim] = WindowCall(SlidingRows(shape[dim], rolls=rows), sp.roll.default, (dim, rows), first=first)
    return window_calls


def _shorter_shift(shift: Size, length: Size) -> Size:
    """Return the equivalent roll by at most half of the length, if the sizes are ints."""
    if not isinstance(shift, int) or not isinstance(length, int) or length == 0:
        return shift
    forward = shift % length
    return forward if 2 * forward <= length else forward - length


def _sp_windows(call: OpCall) -> WindowCalls:
    """Derive the windows of an sp:: op from its arguments."""
    op, arguments = call.node.target, list(call.args)
    dim = call.dim() if "dim" in call.args else call.ndim() - 1
    if op is sp.roll.default:
        rows = call["shift"]
        return {dim: WindowCall(SlidingRows(call.shape()[dim], rolls=rows), op, (dim, rows))}
    width = call.get("width", 1)
    stride = call.get("stride", 1)
    if op is sp.conv1d.default:
        width = call["dilation"] * (int(call.shape("weight")[-1]) - 1) + 1
    elif op is sp.conv_along.default:
        axis = dim - call.ndim() + len(stride)
        width, stride = call["dilation"][axis] * (int(call.shape("weight")[2 + axis]) - 1) + 1, stride[axis]
    sliding = SlidingRows(call.result_shapes()[0][dim], call["before"], width, stride)
    head = tuple(call[name] for name in arguments[1 : arguments.index("before")])
    tail = tuple(call[name] for name in arguments[arguments.index("after") + 1 : arguments.index("frame")])
    return {dim: WindowCall(sliding, op, head, tail)}


# ops that accept shards, if their frame argument is set
_WINDOW_OPS = (sp.avg_pool1d, sp.conv1d, sp.conv_along, sp.max_pool1d, sp.roll, sp.shift, sp.unfold)
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
    """Return (rank offset, rows) of every shift in the forward of a call on shards.

    The backward runs the reversed shifts.
    """
    if call.node.target not in SHARD_WINDOWS or call["frame"] is None or n == 1:
        return []
    (sliding,) = (window_call.sliding for window_call in _sp_windows(call).values())
    frames = (call["frame"], call.get("result") or call["frame"])
    frame, result = map_arg(frames, lambda node: node.meta["val"])
    if sliding.rolls is not None:
        return ops.roll_shifts(sliding.rolls, frame, n)
    return ops.window_shifts(sliding.before, sliding.width, sliding.stride, frame, result, n)
