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

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

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
    scan_chunks,
    segment_starts,
    shift_rows,
)


def scan_with_grad(x: Tensor, cuts: Tensor | None, first: Tensor | None, last: Tensor | None, job: ScanSpec) -> Tensor:
    """Return the scan of x in job.dtype. Differentiable in x any number of times."""
    return _ScanFunction.apply(x, cuts, first, last, job)[0]


def extremes_with_grad(x: Tensor, op: str, exchange: CarryExchange) -> Pair:
    """Return the running extreme, differentiable, and its position, int64."""
    best, index, _ = _ExtremesFunction.apply(x, op, exchange)
    return best, index


def recurrence_with_grad(
    a: Tensor, b: Tensor, initial: Tensor | None, job: RecurrenceSpec
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h, the carries and the final state, as `recurrence_chunks` does.

    Only h is differentiable.
    """
    return _RecurrenceFunction.apply(a, b, initial, job)


class _ScanFunction(Function):
    generate_vmap_rule = True
    forward = staticmethod(scan_chunks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the operands and results that the derivative of the operation reads."""
        (x, cuts, *_, job), (y, carry, cut) = inputs, output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(saved for saved in (carry, cut) if saved is not None))
        ctx.job, ctx.x_dtype = job, x.dtype
        values = (None, None, None) if job.op == "sum" else (x, y, carry)
        ctx.save_for_backward(cuts, cut, *values)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, by a scan in the other direction."""
        if grad is None:
            return None, None, None, None, None
        (cuts, cut, x, y, carry), job = ctx.saved_tensors, ctx.job
        if cut is not None:
            cuts = join_boundaries(cuts, cut, job.way)
        if job.op == "sum":
            dx = scan_with_grad(grad, cuts, None, None, job._replace(way=job.way.backward, dtype=grad.dtype)).to(
                ctx.x_dtype
            )
        else:
            dx = _scan_vjp(grad, x, y, carry, cuts, job)
        return dx, None, None, None, None


class _ExtremesFunction(Function):
    generate_vmap_rule = True
    forward = staticmethod(extremum_chunks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the operand, the result and the carry."""
        (x, op, exchange), (y, index, carry) = inputs, output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(saved for saved in (index, carry) if saved is not None))
        ctx.job = ScanSpec(op, False, exchange, x.dtype, x.dtype)
        ctx.save_for_backward(x, y, carry)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, added at the position of each extreme."""
        if grad is None:
            return None, None, None
        x, y, carry = ctx.saved_tensors
        return _scan_vjp(grad, x, y, carry, None, ctx.job), None, None


class _RecurrenceFunction(Function):
    generate_vmap_rule = True
    forward = staticmethod(recurrence_chunks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the factors, and the states if the factors require a gradient."""
        (a, b, initial, job), (h, carry, final) = inputs, output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(saved for saved in (carry, final) if saved is not None))
        ctx.job, ctx.b_dtype = job, b.dtype
        ctx.save_for_backward(a, *((h, carry, initial) if ctx.needs_input_grad[0] else (None, None, None)))

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of a, b and the initial state, by a recurrence in the other direction."""
        if grad is None:
            return None, None, None, None
        (a, h, carry, initial), job = ctx.saved_tensors, ctx.job
        wants_a, _, wants_initial, _ = ctx.needs_input_grad
        # With steps, only one rank would compute the final state, which is the gradient of the initial one.
        back = job.way.backward._replace(exchange="gather") if wants_initial else job.way.backward
        dtype = torch.promote_types(grad.dtype, torch.float32)
        w, carried, final = recurrence_with_grad(
            a, grad, None, RecurrenceSpec(not job.lagged, back, dtype, job.accumulate)
        )
        da = dinitial = None
        if wants_a and job.lagged:
            da = h * shift_rows(w, _carried_states(w, carried, None, back), back)
        elif wants_a:
            da = w * shift_rows(h, _carried_states(h, carry, initial, job.way), job.way)
        if wants_initial:
            dinitial = _final_state(a, w, final, not job.lagged, back).to(job.dtype)
        return None if da is None else da.to(a.dtype), w.to(ctx.b_dtype), dinitial, None


def _scan_vjp(grad: Tensor, x: Tensor, y: Tensor, carry: Tensor | None, cuts: Tensor | None, job: ScanSpec) -> Tensor:
    """Return the cotangent of x, from that of y."""
    exchange, neutral = job.way, MONOIDS[job.op].identity(y.dtype)
    begins = None if cuts is None else segment_starts(cuts, exchange)
    prior = y
    if not job.exclusive:
        first = y.new_full(last_rows(y, exchange).shape[1:], neutral)
        prior = shift_rows(y, _carried_states(y, carry, first, exchange), exchange)
        prior = prior if begins is None else prior.masked_fill(begins, neutral)
    a, c = _linearize_scan(job.op, x.to(y.dtype), prior, None if job.exclusive else y)
    if begins is not None:
        a = a.masked_fill(begins, 0)
        grad = grad.masked_fill(begins, 0) if job.exclusive else grad
    wide = accumulate_dtype("sum", torch.promote_types(y.dtype, job.accumulate), y.device)
    dtype = torch.promote_types(y.dtype, torch.float32)
    w, carried, _ = recurrence_with_grad(
        a, grad, None, RecurrenceSpec(not job.exclusive, exchange.backward, dtype, wide)
    )
    if job.exclusive:
        w = shift_rows(w, _carried_states(w, carried, None, exchange.backward), exchange.backward)
    return (w.masked_fill(~c, 0) if c.dtype is torch.bool else c * w).to(x.dtype)


def _carried_states(y: Tensor, carry: Tensor | None, first: Tensor | None, exchange: CarryExchange) -> Tensor:
    """Return the end of the chunk before each chunk, (..., chunks, 1, ...).

    Args:
        y: The result of the scan.
        carry: The same carries as the forward received them, not differentiable.
        first: (...), the state before the first chunk; zeros if None.
        exchange: The direction and the exchange.
    """
    if carry is not None and not (torch.is_grad_enabled() and y.requires_grad):
        return carry.to(y.dtype)
    ends = last_rows(y, exchange)
    first = y.new_zeros(ends.shape[1:]) if first is None else first.to(y.dtype)
    return chunk_rows(first[None] if exchange.is_single else previous_ends(ends, first, exchange), exchange)


def _final_state(a: Tensor, w: Tensor, final: Tensor | None, lagged: bool, exchange: CarryExchange) -> Tensor:
    """Return the state after the last chunk."""
    if final is not None and not (torch.is_grad_enabled() and w.requires_grad):
        return final
    ends = last_rows(w, exchange) * last_rows(a, exchange) if lagged else last_rows(w, exchange)
    return ends[0] if exchange.is_single else last_end(ends, exchange)


def _linearize_scan(op: str, x: Tensor, prior: Tensor, y: Tensor | None) -> Pair:
    """Return a and c of the table above; prior is P."""
    if op == "prod":
        return x, prior
    if op in ("max", "min"):
        won = is_later_extreme(op, x, prior)
        return (~won).to(x.dtype), won
    y = torch.logaddexp(prior, x) if y is None else y
    same = (prior == y) & (y == torch.inf)  # where the difference would be NaN, and only the previous state counts
    y = y.masked_fill(y == -torch.inf, 0)
    return (prior - y).exp().masked_fill(same, 1), (x - y).exp()
