"""Differentiate scans by scans: one exchange forward, one backward; shards are saved in between.

Every linearized scan is a recurrence: y_i = a_i * y_(i-1) + c_i * x_i, so that with P_i the scan before i

    op          a_i                 c_i
    prod        x_i                 P_i                 no division, so zeros are right
    logsumexp   exp(P_i - y_i)      exp(x_i - y_i)      at most 1; both 0 where y_i is -inf
    max, min    0 if x_i won        1 if x_i won        the later of equal ones wins, as in torch.cummax
    sum         1                   1                   its adjoint is the sum the other way
    recurrence  a_i                 1                   and the cotangent of a_i is that of y_i times y_(i-1)

and the cotangent of x_i is c_i * w_i with w_i = g_i + a_(i+1) * w_(i+1), the lagged recurrence in the other direction;
if the result was exclusive, w_i = g_(i+1) + a_(i+1) * w_(i+1). Where a segment begins, a is 0 and P neutral. The state
before a rank's first row was carried into it, and is saved. Only second derivatives exchange it again, because it
depends on the operands of other ranks.

Tensors are chunked, see `rank_chunks.py`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.triton import AVAILABLE

from .carries import CarryExchange, last_end, previous_ends
from .monoids import MONOIDS, Pair, accumulate_dtype, is_later_extreme
from .rank_chunks import (
    RecurrenceSpec,
    ScanSpec,
    chunk_rows,
    extremum_chunks,
    join_boundaries,
    last_rows,
    recurrence_chunks,
    recurrence_grads,
    scan_chunks,
    segment_starts,
    shift_rows,
)


def scan_with_grad(x: Tensor, cuts: Tensor | None, first: Tensor | None, last: Tensor | None, spec: ScanSpec) -> Tensor:
    """Return the scan of `scan_chunks`, differentiable in x any number of times."""
    return _ScanFunction.apply(x, cuts, first, last, spec)[0]


def extremes_with_grad(x: Tensor, op: str, exchange: CarryExchange) -> Pair:
    """Return the running max or min of `extremum_chunks`, differentiable, and its position, int64."""
    best, index, _ = _ExtremesFunction.apply(x, op, exchange)
    return best, index


def recurrence_with_grad(
    a: Tensor, b: Tensor, initial: Tensor | None, spec: RecurrenceSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h, the carries and the final state, as `recurrence_chunks` does. Only h is differentiable."""
    return _RecurrenceFunction.apply(a, b, initial, spec)


def _mark_undifferentiated(ctx: Any, *results: Tensor | None) -> None:
    """Mark the results of an autograd function that have no gradient, except those that are None.

    Missing cotangents of its results become None. Zeros in their place would make a backward exchange carries.
    """
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(result for result in results if result is not None))


class _ScanFunction(Function):
    """Scan of chunks, whose backward is a scan or a recurrence in the other direction."""

    generate_vmap_rule = True
    forward = staticmethod(scan_chunks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the cuts and, unless the operation is a sum, the operand, the result and the carry."""
        (x, cuts, *_, spec), (y, carry, chunk_cuts) = inputs, output
        _mark_undifferentiated(ctx, carry, chunk_cuts)
        ctx.spec, ctx.x_dtype = spec, x.dtype
        values = (None, None, None) if spec.op == "sum" else (x, y, carry)
        ctx.save_for_backward(cuts, chunk_cuts, *values)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, by a scan in the other direction."""
        if grad is None:
            return None, None, None, None, None
        # `cuts` are the operand of the forward, where segments end within a chunk. `chunk_cuts` are a result of it, the
        # cuts between chunks, for which ranks compared segment ids; None if no ids were passed.
        (cuts, chunk_cuts, x, y, carry), spec = ctx.saved_tensors, ctx.spec
        if chunk_cuts is not None:
            cuts = join_boundaries(cuts, chunk_cuts, spec.exchange)
        if spec.op == "sum":  # its adjoint is the sum in the other direction
            backward_spec = spec._replace(exchange=spec.exchange.backward, dtype=grad.dtype)
            # `cuts` have the boundaries between chunks already: no ids are passed.
            dx = scan_with_grad(grad, cuts, first=None, last=None, spec=backward_spec).to(ctx.x_dtype)
        else:
            dx = _scan_vjp(grad, x, y, carry, cuts, spec)
        return dx, None, None, None, None


class _ExtremesFunction(Function):
    """Running extreme of chunks and its position, whose backward is a recurrence the other way."""

    generate_vmap_rule = True
    forward = staticmethod(extremum_chunks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the operand, the result and the carry."""
        (x, op, exchange), (y, index, carry) = inputs, output
        _mark_undifferentiated(ctx, index, carry)
        # An extreme is exact in the dtype of x.
        ctx.spec = ScanSpec(op, exclusive=False, exchange=exchange, dtype=x.dtype, accumulate=x.dtype)
        ctx.save_for_backward(x, y, carry)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, added at the position of each extreme."""
        if grad is None:
            return None, None, None
        x, y, carry = ctx.saved_tensors
        return _scan_vjp(grad, x, y, carry, cuts=None, spec=ctx.spec), None, None


class _RecurrenceFunction(Function):
    """Diagonal recurrence of chunks, whose backward is a recurrence in the other direction."""

    generate_vmap_rule = True
    forward = staticmethod(recurrence_chunks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the factors, and the states if the factors require a gradient."""
        (a, b, initial, spec), (h, carry, final) = inputs, output
        _mark_undifferentiated(ctx, carry, final)
        ctx.spec, ctx.b_dtype = spec, b.dtype
        ctx.save_for_backward(a, *((h, carry, initial) if ctx.needs_input_grad[0] else (None, None, None)))

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of a, b and the initial state, by a recurrence w in the other direction.

        w is the gradient of b. That of a_i is w_i * h_(i-1), and h_i * w_(i+1) for a lagged recurrence. That of the
        initial state is the final state of w.
        """
        if grad is None:
            return None, None, None, None
        (a, h, carry, initial), spec = ctx.saved_tensors, ctx.spec
        needs_a, _, needs_initial, _ = ctx.needs_input_grad
        # Every rank needs the final state of w, the gradient of the initial state. With method="steps" (shifts between
        # ranks, see `CarryExchange`) only the last rank would have it; with "gather" all have it.
        back = spec.exchange.backward._replace(method="gather") if needs_initial else spec.exchange.backward
        dtype = accumulation_dtype(grad.dtype)
        # The adjoint of a recurrence is the lagged one in the other direction, and vice versa.
        backward_spec = RecurrenceSpec(not spec.lagged, back, dtype, spec.accumulate)
        da = dinitial = None
        if needs_a and not spec.lagged and _can_fuse_gradients(a):
            before = _carried_states(h, carry, initial, spec.exchange)
            w, da, final = recurrence_grads(a, grad, h, before, backward_spec)
        else:
            w, carried, final = recurrence_with_grad(a, grad, initial=None, spec=backward_spec)
            if needs_a and spec.lagged:
                da = h * shift_rows(w, _carried_states(w, carried, first=None, exchange=back), back)
            elif needs_a:
                da = w * shift_rows(h, _carried_states(h, carry, initial, spec.exchange), spec.exchange)
        if needs_initial:
            dinitial = _final_state(a, w, final, lagged=backward_spec.lagged, exchange=back).to(spec.dtype)
        return None if da is None else da.to(a.dtype), w.to(ctx.b_dtype), dinitial, None


def _can_fuse_gradients(x: Tensor) -> bool:
    """Return True if one kernel should compute both gradients of a recurrence: on a GPU, without second derivatives.

    Elsewhere a compiler fuses the product with its consumers.
    """
    return AVAILABLE and x.device.type == "cuda" and not torch.is_grad_enabled()


def _scan_vjp(grad: Tensor, x: Tensor, y: Tensor, carry: Tensor | None, cuts: Tensor | None, spec: ScanSpec) -> Tensor:
    """Return the cotangent of x, by a recurrence in the other direction.

    The linearized scan is y_i = a_i * y_(i-1) + c_i * x_i with factors of `_linearize_scan`. The cotangent of x_i is
    c_i * w_i with w_i = g_i + a_(i+1) * w_(i+1), a lagged recurrence, where g is the cotangent of y. For an exclusive
    scan, w_i = g_(i+1) + a_(i+1) * w_(i+1): the recurrence without lag, one row later.

    Args:
        grad: The cotangent of y.
        x: The operand.
        y: The scan of x.
        carry: The carries into the chunks; None on one rank.
        cuts: Where segments end and begin; None without segments.
        spec: The options of the scan.
    """
    exchange, neutral = spec.exchange, MONOIDS[spec.op].identity(y.dtype)
    begins = None if cuts is None else segment_starts(cuts, exchange)
    previous = y  # the scan before each row: the result itself, if exclusive
    if not spec.exclusive:
        first = y.new_full(last_rows(y, exchange).shape[1:], neutral)
        previous = shift_rows(y, _carried_states(y, carry, first, exchange), exchange)
        previous = previous if begins is None else previous.masked_fill(begins, neutral)
    a, c = _linearize_scan(spec.op, x.to(y.dtype), previous, None if spec.exclusive else y)
    if begins is not None:
        a = a.masked_fill(begins, 0)
        grad = grad.masked_fill(begins, 0) if spec.exclusive else grad  # its result there is the constant `neutral`
    back, dtype = exchange.backward, accumulation_dtype(y.dtype)
    accumulate = accumulate_dtype("sum", torch.promote_types(y.dtype, spec.accumulate), y.device)
    backward_spec = RecurrenceSpec(not spec.exclusive, back, dtype, accumulate)  # lagged if the result is inclusive
    w, carried, _ = recurrence_with_grad(a, grad, initial=None, spec=backward_spec)
    if spec.exclusive:
        w = shift_rows(w, _carried_states(w, carried, first=None, exchange=back), back)
    dx = w.masked_fill(~c, 0) if c.dtype is torch.bool else c * w  # bool for "max" and "min"
    return dx.to(x.dtype)


def _carried_states(y: Tensor, carry: Tensor | None, first: Tensor | None, exchange: CarryExchange) -> Tensor:
    """Return the end of the chunk before each chunk: the result y at its last row, (..., chunks, 1, ...).

    These are the carries that the forward saved. If a second derivative is computed, they must depend on y, and the
    ends are exchanged again by a differentiable collective.

    Args:
        y: The result of the scan.
        carry: The carries that the forward received, which are constants; None on one rank.
        first: (...), the state before the first chunk; zeros if None.
        exchange: The direction and the exchange.
    """
    if carry is not None and not (torch.is_grad_enabled() and y.requires_grad):
        return carry.to(y.dtype)
    ends = last_rows(y, exchange)  # (chunks, ...)
    first = y.new_zeros(ends.shape[1:]) if first is None else first.to(y.dtype)
    return chunk_rows(first[None] if exchange.is_single else previous_ends(ends, first, exchange), exchange)


def _final_state(a: Tensor, w: Tensor, final: Tensor | None, lagged: bool, exchange: CarryExchange) -> Tensor:
    """Return the state after the last chunk, (...), of the recurrence w with the factors a.

    In a backward it is the gradient of the initial state.

    Args:
        a: The factors.
        w: The result of the recurrence.
        final: The state that `recurrence_chunks` returned, a constant; None on one rank. It is used unless a second
            derivative is computed.
        lagged: True if the recurrence is lagged, so that its state is a * w.
        exchange: The direction and the exchange.
    """
    if final is not None and not (torch.is_grad_enabled() and w.requires_grad):
        return final
    ends = last_rows(w, exchange) * last_rows(a, exchange) if lagged else last_rows(w, exchange)
    return ends[0] if exchange.is_single else last_end(ends, exchange)


def _linearize_scan(op: str, x: Tensor, previous: Tensor, y: Tensor | None) -> Pair:
    """Return the factors a and c of the linearized scan y_i = a_i * y_(i-1) + c_i * x_i.

    They are the derivatives of the combination of `previous` and x by each of the two.

    Args:
        op: The operation; not "sum".
        x: The operand.
        previous: The scan before each row, P of the module's table.
        y: The inclusive scan; None to compute it from `previous` and x.

    Returns:
        a, and c, which is bool for "max" and "min".
    """
    if op == "prod":
        return x, previous
    if op in ("max", "min"):
        is_x = is_later_extreme(op, x, previous)
        return (~is_x).to(x.dtype), is_x
    y = torch.logaddexp(previous, x) if y is None else y
    both_infinite = (previous == y) & (y == torch.inf)  # previous - y would be NaN: a is set to 1
    y = y.masked_fill(y == -torch.inf, 0)  # a and c are then exp(-inf) = 0, and not NaN
    return (previous - y).exp().masked_fill(both_infinite, 1), (x - y).exp()
