"""Define the ``sp::local_*`` operators: scans of one tensor along any dim, run by the lowering table.

They are opaque and have no derivatives; ``sp::scan``, ``sp::extremes`` and ``sp::linear_scan`` have them. Results are
contiguous. starts: bool, (length,) or broadcast to x; True where a segment begins in scan order.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sp_compile.lowering.base.library import opaque

from .monoids import Pair
from .scan_table import ScanProblem, choose_kernel, one_pass_gradients


@opaque(
    "local_scan(Tensor x, Tensor? starts, int dim, str op, bool exclusive, bool reverse, ScalarType dtype, "
    "ScalarType accumulate, bool total=True) -> (Tensor, Tensor)",
    lambda x, starts, dim, op, exclusive, reverse, dtype, accumulate, total=True: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(_total_shape(x, dim) if total else [0], dtype=accumulate),
    ),
)
def local_scan(
    x: Tensor,
    starts: Tensor | None,
    dim: int,
    op: str,
    exclusive: bool,
    reverse: bool,
    dtype: torch.dtype,
    accumulate: torch.dtype,
    total: bool = True,
) -> Pair:
    """Scan x along dim by one of `monoids.MONOIDS`.

    Shapes: x (..., S, ...) -> out like x in dtype, and the combination of the last segment in scan order, x's shape
    without dim, in accumulate. With total=False the total is an empty tensor, which saves some kernels a pass over x.
    x is rounded to dtype before it is combined, as in torch.cumsum(x, dim, dtype=...).
    Runs: the implementation that `scan_table` selects.
    """
    x = x if torch.promote_types(x.dtype, dtype) == dtype else x.to(dtype)
    rows, starts = _to_three_dims(x, dim), _compact_starts(starts, x, dim)
    options = {"op": op, "segmented": starts is not None, "exclusive": exclusive, "reverse": reverse, "total": total}
    problem = ScanProblem.of("scan", rows, dtype, accumulate, **options)
    out, last = choose_kernel(problem)(problem, rows, starts)
    if not total:
        return out.view(x.shape), last.new_empty(0)
    # Results of an operator must not share memory; some kernels return a view of `out`.
    is_view = any(last.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in (out, rows))
    last = last.clone() if is_view else last
    return out.view(x.shape), last.contiguous().view(_total_shape(x, dim))


@opaque(
    "local_extremes(Tensor x, Tensor? starts, int dim, str op, bool reverse) -> (Tensor, Tensor)",
    lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)),
)
def local_extremes(x: Tensor, starts: Tensor | None, dim: int, op: str, reverse: bool) -> Pair:
    """Return the running max or min of x along dim, and its index.

    Shapes: x (..., S, ...) -> values like x, indices int64 like x. Of equal values the later in scan order wins, and
    NaN wins over all others, as in torch.cummax. Runs: the implementation that `scan_table` selects.
    """
    rows, starts = _to_three_dims(x, dim), _compact_starts(starts, x, dim)
    segmented = starts is not None
    problem = ScanProblem.of("extremes", rows, x.dtype, x.dtype, op=op, segmented=segmented, reverse=reverse)
    values, indices = choose_kernel(problem)(problem, rows, starts)
    return values.view(x.shape), indices.view(x.shape)


@opaque(
    "local_linear_scan(Tensor a, Tensor b, Tensor? initial, int dim, bool reverse, bool lagged, ScalarType dtype, "
    "ScalarType accumulate) -> Tensor",
    lambda a, b, initial, dim, reverse, lagged, dtype, accumulate: b.new_empty(b.shape, dtype=dtype),
)
def local_linear_scan(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None,
    dim: int,
    reverse: bool,
    lagged: bool,
    dtype: torch.dtype,
    accumulate: torch.dtype,
) -> Tensor:
    """Return h with h_i = a_i * h_(i-1) + b_i, from h_(-1) = initial, or zeros.

    Shapes: a and b (..., S, ...) of one shape, initial that shape without dim -> h like b in dtype.
    lagged: h_i = s_(i-1) + b_i with s_i = a_i * h_i and s_(-1) = initial, the adjoint of a scan in the other direction.
    Runs: the implementation that `scan_table` selects.
    """
    a_rows, b_rows = _to_three_dims(a, dim), _to_three_dims(b, dim)
    problem = ScanProblem.of("linear", b_rows, dtype, accumulate, reverse=reverse, lagged=lagged)
    if initial is not None:
        initial = initial.reshape(problem.outer, problem.inner).contiguous()
    h: Tensor = choose_kernel(problem)(problem, a_rows, b_rows, initial)
    return h.view(b.shape)


@opaque(
    "local_linear_scan_grads(Tensor a, Tensor grad, Tensor? initial, Tensor h, Tensor? before, int dim, bool reverse, "
    "ScalarType dtype, ScalarType accumulate) -> (Tensor, Tensor)",
    lambda a, grad, initial, h, before, dim, reverse, dtype, accumulate: (
        grad.new_empty(grad.shape, dtype=dtype),
        a.new_empty(a.shape),
    ),
)
def local_linear_scan_grads(
    a: Tensor,
    grad: Tensor,
    initial: Tensor | None,
    h: Tensor,
    before: Tensor | None,
    dim: int,
    reverse: bool,
    dtype: torch.dtype,
    accumulate: torch.dtype,
) -> Pair:
    """Return the gradients w of b and da of a, for h of ``sp::local_linear_scan`` and its cotangent grad.

    w is the lagged recurrence of grad, from w = initial or zeros, and da_i = w_i * h_(i-1). It runs in the direction
    opposite to that of h, and ``reverse`` is its own. ``before`` is the state of h before its first row, or zeros.
    Shapes: a, grad and h (..., S, ...) of one shape, initial and before that shape without dim -> w in dtype, da in the
    dtype of a.
    Runs: the implementation that `scan_table` selects, in one pass if it has a function for it.
    """
    rows, grad_rows, h_rows = (_to_three_dims(x, dim) for x in (a, grad, h))
    problem = ScanProblem.of("linear", grad_rows, dtype, accumulate, reverse=reverse, lagged=True)
    shape = problem.outer, problem.inner
    initial, before = (None if x is None else x.reshape(shape).contiguous() for x in (initial, before))
    run = one_pass_gradients(problem)
    if run is not None:
        w, da = run(problem, rows, grad_rows, initial, h_rows, before)
        return w.view(grad.shape), da.view(a.shape)
    w = choose_kernel(problem)(problem, rows, grad_rows, initial)
    first = h_rows.new_zeros(shape) if before is None else before.to(h_rows.dtype)
    kept = h_rows[:, 1:] if not reverse else h_rows[:, :-1]
    previous = torch.cat([kept, first[:, None]] if not reverse else [first[:, None], kept], 1)
    return w.view(grad.shape), (w * previous[:, : h_rows.shape[1]]).to(a.dtype).view(a.shape)


@opaque(
    "local_linear_total(Tensor a, Tensor b, int dim, bool reverse, bool lagged, ScalarType accumulate) "
    "-> (Tensor, Tensor)",
    lambda a, b, dim, reverse, lagged, accumulate: (
        b.new_empty(_total_shape(b, dim), dtype=accumulate),
        b.new_empty(_total_shape(b, dim), dtype=accumulate),
    ),
)
def local_linear_total(a: Tensor, b: Tensor, dim: int, reverse: bool, lagged: bool, accumulate: torch.dtype) -> Pair:
    """Return the affine map of all rows of ``sp::local_linear_scan``: its factor and its state.

    The recurrence is h_i = a_i * h_(i-1) + b_i, or if lagged s_i = a_i * (s_(i-1) + b_i). Its last value is
    factor * initial + state, where initial is the value before the first row.
    Shapes: a and b (..., S, ...) of one shape -> two of that shape without dim, in accumulate.
    Runs: the implementation that `scan_table` selects.
    """
    a_rows, b_rows = _to_three_dims(a, dim), _to_three_dims(b, dim)
    problem = ScanProblem.of("linear_total", b_rows, accumulate, accumulate, reverse=reverse, lagged=lagged)
    factor, state = choose_kernel(problem)(problem, a_rows, b_rows)
    shape = _total_shape(b, dim)
    return factor.view(shape), state.view(shape)


def _to_three_dims(x: Tensor, dim: int) -> Tensor:
    """Return x as (outer, length, inner), contiguous, as kernels read it; `dim` becomes the length."""
    if x.ndim == 0:
        return x.reshape(1, 1, 1)
    dim %= x.ndim
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    return x.reshape(outer, x.shape[dim], inner).contiguous()


def _compact_starts(starts: Tensor | None, x: Tensor, dim: int) -> Tensor | None:
    """Return starts as kernels read them, (outer|1, length, inner|1): 1 if they are the same along outer or inner.

    Args:
        starts: (length,), or broadcast to x; None without segments.
        x: The operand of the scan.
        dim: The dim of the scan.
    """
    if starts is None:
        return None
    dim %= max(x.ndim, 1)
    if starts.ndim <= 1:
        return starts.expand(x.shape[dim] if x.ndim else 1).reshape(1, -1, 1).contiguous()
    sizes = [1] * (x.ndim - starts.ndim) + list(starts.shape)  # of the dims of x
    # Expand the dims before and after `dim` to those of x, but not if all on this side are 1.
    outer, inner = _expanded_sizes(sizes[:dim], x.shape[:dim]), _expanded_sizes(sizes[dim + 1 :], x.shape[dim + 1 :])
    return _to_three_dims(starts.reshape(sizes).expand(*outer, x.shape[dim], *inner), dim)


def _expanded_sizes(sizes: Sequence[int], x_sizes: Sequence[int]) -> Sequence[int]:
    """Return the sizes to which the dims of `starts` on one side of dim are expanded: x's, unless all are 1."""
    return sizes if math.prod(sizes) == 1 else x_sizes


def _total_shape(x: Tensor, dim: int) -> list[int]:
    """Return the shape of the total of x along dim: that of x without dim."""
    shape = list(x.shape)
    if shape:
        del shape[dim]
    return shape
