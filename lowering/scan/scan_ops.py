"""Define ``sp::scan``, ``sp::extremes`` and ``sp::linear_scan``, for full tensors and for shards.

    sp.scan(x, None, 1, "sum", frame=[1, 8, 0, 8], n=2, group="sp")    x: columns 4 r to 4 r + 3 of rank r, of 8

Without a frame, x is the full tensor and nothing is exchanged. With a frame, [1, size, start, length(, folds)], x is
the shard of this rank and the results are shards of the scan of the full sequence. `exchange` selects how carries are
exchanged (see ``carries.py``): "gather" in one all-gather forward and one backward, "steps" in ceil(log2 n) shifts each
way, for contiguous frames. Bytes below are for "gather", with C = elements of x without dim (twice those in zigzag
frames). Another exchange, or one that the frame does not support, is an SpError.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import FrameArg, column_along, frame_folds, is_known, is_padded
from sp_compile.lowering.base.library import composite
from sp_compile.lowering.torch_compat import is_functorch_tensor

from . import scan_autograd as autograd
from .carries import CarryExchange
from .monoids import MONOIDS, Pair, accumulate_dtype, result_dtype
from .rank_chunks import RecurrenceSpec, ScanSpec

sp = torch.ops.sp
SHARD_ARGUMENTS = 'SymInt[]? frame=None, str exchange="gather", int n=1, str group=""'
# Cuts between segments, and the first and the last segment id of each chunk; see ``rank_chunks.py``.
Cuts = tuple[Tensor | None, Tensor | None, Tensor | None]


class ScanShards(NamedTuple):
    """The frame of operands and results: the last arguments of every operator (``SHARD_ARGUMENTS``)."""

    frame: FrameArg | None = None  # None for full tensors
    exchange: str = "gather"  # "gather" or "steps"
    n: int = 1  # number of ranks
    group: str = ""  # name of the process group

    def carry_exchange(self, x: Tensor, dim: int, reverse: bool) -> CarryExchange:
        """Return the exchange of the carries between ranks, for a scan of x along dim in this direction.

        Raises:
            SpError: The exchange is unknown, or does not support the frame.
        """
        if self.exchange not in ("gather", "steps"):
            raise SpError("SP551", f"exchange: expected 'gather' or 'steps', got {self.exchange!r}.")
        n = 1 if self.frame is None else self.n
        folds = 1 if self.frame is None or n == 1 else frame_folds(self.frame)
        if self.exchange == "steps" and folds > 1:
            raise SpError("SP551", "exchange: 'steps' is not supported with a zigzag frame.")
        return CarryExchange(dim % x.ndim, reverse, n, folds, self.exchange, self.group)

    def fill_padding(self, x: Tensor, dim: int, fill: float) -> Tensor:
        """Write ``fill``, the neutral element, into padded rows, so that they change no result of valid rows."""
        return x if self.frame is None else sp.mask(x, dim, self.frame, fill, self.n, self.group)

    def window(self, y: Tensor, dim: int) -> Tensor:
        """Return a result whose padded rows repeat the nearest valid row, and have zero cotangents."""
        padded = self.frame is not None and is_padded(self.frame, self.n)
        return sp.window(y, dim, self.frame, self.n, self.group) if padded else y


@composite(
    "scan(Tensor x, Tensor? segments, int dim, str op, bool exclusive=False, bool reverse=False, "
    f"ScalarType? dtype=None, ScalarType? accumulate=None, {SHARD_ARGUMENTS}) -> Tensor",
    padded="nearest",
)
def scan(
    x: Tensor,
    segments: Tensor | None,
    dim: int,
    op: str,
    exclusive: bool = False,
    reverse: bool = False,
    dtype: torch.dtype | None = None,
    accumulate: torch.dtype | None = None,
    *across: Any,
) -> Tensor:
    """Compute the sum, prod, max, min or logsumexp of all elements up to each, or before it.

    Placement: Shard(dim) -> Shard(dim).
    Shapes: x (..., S, ...) -> the same. segments: int ids, (S,) or broadcast to x, sharded like x; nothing is carried
    from one run of equal ids into the next. dtype: x is cast to it first; torch's defaults. accumulate: the dtype of
    the accumulation, ``monoids.accumulate_dtype`` if None; unused for max and min. ``across``: fields of `ScanShards`.
    Bytes: (n - 1) * C * bytes(accumulate), with C = elements of x without dim; segments add two ids and a flag to each
    element. Bytes of the backward: those of the forward for sum (segments add the flag only), twice these otherwise.
    Backward: a scan or a recurrence in the other direction, see ``scan_autograd.py``; differentiable again.
    """
    if x.ndim == 0:
        return sp.scan(x[None], segments, 0, op, exclusive, reverse, dtype, accumulate)[0]
    shards = ScanShards(*across)
    exchange = shards.carry_exchange(x, dim, reverse)
    dtype = result_dtype(op, x.dtype) if dtype is None else dtype
    if is_known(x.shape[exchange.dim] == 0):
        return x.to(dtype, copy=True)
    if accumulate is None or MONOIDS[op].has_index:
        accumulate = accumulate_dtype(op, dtype, x.device)
    if shards.frame is None and segments is None and not _may_need_gradient(x):
        # The code below is equivalent, but its overhead is measurable for short scans.
        returns_total = False  # the combination of all rows
        return sp.local_scan(x, None, exchange.dim, op, exclusive, reverse, dtype, accumulate, returns_total)[0]
    # Kernels widen x without a copy. Integers are rounded to a floating-point dtype first, as its rows are in torch.
    is_widened = torch.promote_types(x.dtype, dtype) == dtype and x.is_floating_point() == dtype.is_floating_point
    x = x if is_widened else x.to(dtype)
    x = shards.fill_padding(x, exchange.dim, MONOIDS[op].identity(x.dtype))
    spec = ScanSpec(op, exclusive, exchange, _saved_dtype(x, op, dtype, accumulate), accumulate)
    out = autograd.scan_with_grad(to_chunks(x, exchange), *_segment_cuts(segments, x, exchange), spec)
    return shards.window(out.flatten(exchange.dim, exchange.rows).to(dtype), exchange.dim)


@composite(
    f"extremes(Tensor x, int dim, str op, bool reverse=False, {SHARD_ARGUMENTS}) -> (Tensor, Tensor)", padded="nearest"
)
def extremes(x: Tensor, dim: int, op: str, reverse: bool = False, *across: Any) -> Pair:
    """Compute the running max or min, and its position in the window, int64.

    Placement: Shard(dim) -> Shard(dim), Shard(dim).
    Shapes: x (..., S, ...) -> twice the same. Of equal elements the last in scan order is selected, and NaN before all
    others, as in torch.cummax. ``across``: fields of `ScanShards`. Bytes: (n - 1) * C * (bytes(x) + 8), with C =
    elements of x without dim; backward: (n - 1) * C * 2 * bytes(accumulation dtype of sums of x). Backward: cotangents
    are summed at the position of the extreme, on any rank; differentiable again.
    """
    if x.ndim == 0:
        best, index = sp.extremes(x[None], 0, op, reverse)
        return best[0], index[0]
    shards = ScanShards(*across)
    exchange = shards.carry_exchange(x, dim, reverse)
    if is_known(x.shape[exchange.dim] == 0):
        return x.clone(), torch.empty_like(x, dtype=torch.int64)
    x = shards.fill_padding(x, exchange.dim, MONOIDS[op].identity(x.dtype))
    chunked = autograd.extremes_with_grad(to_chunks(x, exchange), op, exchange)
    best, index = (y.flatten(exchange.dim, exchange.rows) for y in chunked)
    if shards.frame is not None:
        window_start = shards.frame[2]
        if not is_known(window_start == 0):
            index = index - window_start  # count from the first row of the window
    return shards.window(best, exchange.dim), shards.window(index, exchange.dim)


@composite(
    "linear_scan(Tensor a, Tensor b, Tensor? initial, int dim, bool reverse=False, ScalarType? accumulate=None, "
    f"{SHARD_ARGUMENTS}) -> Tensor",
    padded="nearest",
)
def linear_scan(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    dim: int,
    reverse: bool = False,
    accumulate: torch.dtype | None = None,
    *across: Any,
) -> Tensor:
    """Compute h_i = a_i * h_(i-1) + b_i from h_(-1) = initial, or zeros.

    Placement: Shard(dim), Shard(dim), invariant -> Shard(dim).
    Shapes: a and b (..., S, ...), broadcast to one shape, which h has; initial, replicated, broadcasts to that shape
    without dim. ``across``: fields of `ScanShards`. Bytes: (n - 1) * C * 2 * bytes(accumulate), with C = elements of h
    without dim; the same backward. A shard is read twice: for its affine map, and once its carry is known. Backward:
    the recurrence in the other direction; differentiable again.
    """
    a, b = torch.broadcast_tensors(a, b)
    dtype = torch.promote_types(a.dtype, b.dtype)
    if a.ndim == 0:
        first = None if initial is None else initial.reshape(())
        return sp.linear_scan(a[None], b[None], first, 0, reverse, accumulate)[0]
    shards = ScanShards(*across)
    exchange = shards.carry_exchange(a, dim, reverse)
    if initial is not None:
        initial = initial.to(dtype).expand([size for d, size in enumerate(a.shape) if d != exchange.dim])
    accumulate = accumulate_dtype("sum", dtype, a.device) if accumulate is None else accumulate
    a, b = a.to(dtype), b.to(dtype)
    if is_known(a.shape[exchange.dim] == 0):
        return a * b  # empty, but with the gradients of both operands
    # The factor 1 and the summand 0 of a padded row keep the state.
    a, b = shards.fill_padding(a, exchange.dim, 1), shards.fill_padding(b, exchange.dim, 0)
    spec = RecurrenceSpec(lagged=False, exchange=exchange, dtype=dtype, accumulate=accumulate)
    h, _, _ = autograd.recurrence_with_grad(to_chunks(a, exchange), to_chunks(b, exchange), initial, spec)
    return shards.window(h.flatten(exchange.dim, exchange.rows), exchange.dim)


def to_chunks(x: Tensor, exchange: CarryExchange) -> Tensor:
    """View (..., S, ...) as (..., chunks, rows, ...): one chunk of a rank, or two in a zigzag frame."""
    return x.unflatten(exchange.dim, (exchange.folds, x.shape[exchange.dim] // exchange.folds))


def _expand_segments(segments: Tensor, x: Tensor, dim: int) -> Tensor:
    """Return segment ids with the number of dims of x: of x's size in dim, and of 1 or x's size in the others."""
    if segments.ndim == 1:
        segments = column_along(segments, dim, x.ndim)
    segments = segments.view([1] * (x.ndim - segments.ndim) + list(segments.shape))
    return segments.expand([x.shape[d] if d == dim else segments.shape[d] for d in range(x.ndim)])


def _segment_cuts(segments: Tensor | None, x: Tensor, exchange: CarryExchange) -> Cuts:
    """Return the cuts between segments, and the first and the last id of each chunk, as `scan_chunks` takes them.

    A cut is a boundary of two rows at which one segment ends and another begins: ids [4, 4, 7] have the cuts
    [False, False, True, False], one before each row and one after the last. The boundaries at the ends of a chunk are
    False here: the exchange compares their ids with those of other ranks. All results are None without segments, and
    the ids are None on one rank, where no other chunk exists.
    """
    if segments is None:
        return None, None, None
    ids = to_chunks(_expand_segments(segments, x, exchange.dim), exchange)
    rows = ids.shape[exchange.rows]
    first, last = ids.narrow(exchange.rows, 0, 1), ids.narrow(exchange.rows, rows - 1, 1)
    # Repeating the first and the last id makes the cuts at the ends False. The ids are extended, not the result of
    # comparing them: Inductor's C++ has no comparison within padding.
    ids = torch.cat([first, ids, last], exchange.rows)
    cuts = ids.narrow(exchange.rows, 1, rows + 1) != ids.narrow(exchange.rows, 0, rows + 1)
    return (cuts, None, None) if exchange.is_single else (cuts, first, last)


def _may_need_gradient(x: Tensor) -> bool:
    """Return True if x may need a gradient. A functorch wrapper hides whether it does, and counts as one that may."""
    return is_functorch_tensor(x) or (x.requires_grad and torch.is_grad_enabled())


def _saved_dtype(x: Tensor, op: str, dtype: torch.dtype, accumulate: torch.dtype) -> torch.dtype:
    """Return the dtype of a scan's result y as saved for the backward; the user's result is cast to `dtype`.

    The backwards of prod and logsumexp are recurrences whose factors are computed from y, such as exp(x - y). Rounding
    errors of y would add up along them, so that y is saved in the accumulation dtype.
    """
    if op in ("prod", "logsumexp") and _may_need_gradient(x):
        return torch.promote_types(dtype, accumulate)
    return dtype
