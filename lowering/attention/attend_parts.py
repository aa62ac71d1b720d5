"""Compute the gradients of one ring step as parts, which are added to sums of other steps without a wide copy.

    sp::attend_backward_parts   gradients in the kernel's dtype, of the rows that have one; other rows are not written
    sp::add_rows_into           adds these rows to a float32 sum, in place
    sp::add_rows_to             the same as a new tensor in the dtype of the result, in the last step

The rows that have a gradient depend on the rank and on documents. They are known on the host, as one flag per row.

    part     the gradient that one step contributes
    narrow   of a part in the dtype of its kernel, such as bfloat16: exact if every row is of one call of a kernel
             that returns this dtype. Several calls of a row, such as strips of queries, are summed in float32, and the
             sum is rounded once, as is the float32 result of a kernel without fusion
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.library import opaque

from .attend import backward_workspace, dmask_shape, sum_gradients
from .kernel_args import cpu_copy_bytes, operand_bytes
from .kernels import retry_without_flex
from .merge_blocks import WrittenRows, empty_rows_first
from .op_args import LocalArgs
from .ring_kernel import split_keys_values


class PartAccumulator:
    """Accumulator of the parts of a gradient (B, H, S, D) whose missing rows are not filled.

    A first part with all rows becomes the result without a copy, if its dtype and strides are those of the result. The
    sum becomes float32 if a part is float32, or if a row gets a second part: nothing is added in a half type.
    """

    def __init__(self, like: Tensor, empty: Tensor) -> None:
        """Create an empty accumulator of the gradient of ``like``, with the dtype and strides of ``empty`` (meta)."""
        self._like, self._empty = like, empty
        self._total: Tensor | None = None
        self._written = WrittenRows(like.shape[2])

    def add(self, part: Tensor, rows: tuple[int, int]) -> None:
        """Write or add ``part`` (B, H, length, D) to the rows (offset, length)."""
        ranges = self._written.add(rows)  # (offset, length, is_new): new rows have no part yet
        has_all_rows = self._total is None and rows == (0, self._like.shape[2])
        # `_empty` is a meta tensor with the dtype and the strides of the result.
        if has_all_rows and part.dtype == self._empty.dtype and part.stride() == self._empty.stride():
            self._total = part
            return
        if self._total is None:
            self._total = torch.empty_like(self._empty, device=self._like.device)
        dtype = part.dtype if all(x.is_new for x in ranges) else accumulation_dtype(part.dtype)
        total = self._total = self._total.to(torch.promote_types(self._total.dtype, dtype))
        for offset, length, is_new in ranges:
            target, addend = total.narrow(2, offset, length), part.narrow(2, offset - rows[0], length)
            if is_new:
                target.copy_(addend)
            else:
                target.add_(addend)

    def total(self) -> Tensor:
        """Return the gradient; the values of rows without a part are undefined."""
        if self._total is None:
            return torch.empty_like(self._empty, device=self._like.device)
        return self._total.to(self._empty.dtype)

    def rows(self) -> Tensor:
        """Return a flag per row on the host, bool (S,): whether it has a part."""
        return self._written.flags()


def _empty_parts(q: Tensor, k: Tensor, v: Tensor, narrow: bool) -> tuple[Tensor, ...]:
    """Return empty dq, dk and dv: dq with heads after rows in memory, as in models; dk and dv contiguous.

    They have the dtype of q if ``narrow``, else float32 for half types.
    """
    dtype = q.dtype if narrow else accumulation_dtype(q.dtype)
    return empty_rows_first(q, dtype), *(x.new_empty(x.shape, dtype=dtype) for x in (k, v))


def _parts_workspace(
    workspace: int, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> int:
    """Return the peak memory of the operator in bytes, without its operands and results, for estimates.

    ``workspace`` is the memory that its kernel allocates.
    """
    _, (_, narrow, *_) = LocalArgs.of(arguments)
    if not narrow:
        return backward_workspace(workspace, grad, q, k, v, out, lse, *arguments)
    # If narrow, the gradients that a kernel returns are the results: no copies of them in a wider dtype are counted.
    return workspace + cpu_copy_bytes(q, k, v) + operand_bytes(lse)


def _fake_parts(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Return empty results of ``attend_backward_parts``, for fake tensors."""
    args, (mask_grad, narrow, *_) = LocalArgs.of(arguments)
    flags = [torch.empty(x.shape[2], dtype=torch.bool, device="cpu") for x in (q, k)]
    dmask = q.new_empty(dmask_shape(args, mask_grad), dtype=accumulation_dtype(q.dtype))
    return *_empty_parts(q, k, v, narrow), *flags, dmask


@opaque(
    "attend_backward_parts(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{LocalArgs.schema()}, bool mask_grad, bool narrow, Tensor[]? after=None) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor q_rows, Tensor k_rows, Tensor dmask)",
    _fake_parts,
    replays=False,
    inside=_parts_workspace,
)
@retry_without_flex
def attend_backward_parts(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """Compute the gradients of ``attend`` as ``attend_backward``, without filling rows that have none.

    Args:
        grad: (B, Hq, Sq, E), the cotangent of out.
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Sk, D).
        v: (B, Hkv, Sk, E).
        out: (B, Hq, Sq, E), over all keys.
        lse: (B, Hq, Sq), over all keys.
        *arguments: The fields of ``LocalArgs``, then:
            mask_grad: Whether the mask or the tables need a gradient.
            narrow: Whether dq, dk and dv have the dtype of q; else float32 for half types.
            after: Not read: values that must be computed before this call.

    Returns:
        dq, dk and dv with the shapes of q, k and v; dk and dv are contiguous, dq has heads after rows in memory. q_rows
        (Sq,) and k_rows (Sk,), bool on the host: the rows of dq, and of dk and dv, that are written. dmask as of
        ``attend_backward``.

    Bytes: none.
    """
    args, (mask_grad, narrow, *_) = LocalArgs.of(arguments)
    like_q, like_k, like_v = (torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (q, k, v))
    empty = _empty_parts(like_q, like_k, like_v, narrow)
    dq, dk, dv = (PartAccumulator(x, y) for x, y in zip((q, k, v), empty))
    sign, dmask = sum_gradients((grad, q, k, v, out, lse), args, mask_grad, (dq, dk, dv))
    # The gradients are computed for the absolute value of the scale, with its sign in q.
    q_total = dq.total() if sign == 1 else dq.total() * sign
    return q_total, dk.total(), dv.total(), dq.rows(), dk.rows(), dmask


@opaque("add_rows_into(Tensor(a!) total, Tensor[] parts, Tensor rows) -> ()", lambda *_: None, replays=False)
def add_rows_into(total: Tensor, parts: list[Tensor], rows: Tensor) -> None:
    """Add some rows of a part to a sum in place.

    Args:
        total: (B, H, S, D); for two parts, one tensor that ``split_keys_values`` splits in two; float32 or float64.
        parts: One part, or those of keys and values, (B, H, S, D) and (B, H, S, E) each; any floating dtype.
        rows: Flags of the rows that are added, bool (S,) on the host.

    Bytes: none.
    """
    for start, stop, is_added in _row_ranges(rows):
        for x, part in zip(_totals_of(total, parts), parts):
            if is_added:
                x.narrow(2, start, stop - start).add_(part.narrow(2, start, stop - start))


@opaque(
    "add_rows_to(Tensor total, Tensor[] parts, Tensor rows, ScalarType dtype) -> Tensor",
    lambda total, parts, rows, dtype: torch.empty_like(total, dtype=dtype),
    replays=False,
)
def add_rows_to(total: Tensor, parts: list[Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``add_rows_into`` in another dtype, rounded once, with the strides of ``total``.

    The arguments are those of ``add_rows_into``. Bytes: none.
    """
    result = torch.empty_like(total, dtype=dtype)
    targets, totals = _totals_of(result, parts), _totals_of(total, parts)
    for start, stop, is_added in _row_ranges(rows):
        for target, *terms in zip(targets, totals, parts):
            target, x, part = (y.narrow(2, start, stop - start) for y in (target, *terms))
            if is_added:  # computed in the wider dtype of the sum
                torch.add(x, part, out=target)
            else:
                target.copy_(x)
    return result


def _totals_of(total: Tensor, parts: list[Tensor]) -> Sequence[Tensor]:
    """Return the tensor to which each part is added: ``total``, or its views of keys and of values."""
    return [total] if len(parts) == 1 else split_keys_values(total, *parts)


def _row_ranges(rows: Tensor) -> list[tuple[int, int, bool]]:
    """Return the ranges (start, stop, flag) of rows with equal flags: [0, 1, 1] has (0, 1, False) and (1, 3, True)."""
    flags = rows.numpy()
    edges = [0, *(np.flatnonzero(np.diff(flags)) + 1).tolist(), len(flags)]
    return [(start, stop, bool(flags[start])) for start, stop in pairwise(edges) if start < stop]
