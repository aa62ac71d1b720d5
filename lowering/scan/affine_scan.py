"""Define ``sp::affine_scan``, recurrences of matrices, for full tensors and for shards.

    h_i = m_i @ h_(i-1) + b_i        m: (..., S, K, K)   b, h: (..., S, K, V)

A map is a pair (m, b); maps compose to (m' m, m' b + b'), so that each rank computes the map of its rows, all ranks
exchange them by one all-gather, and each rank scans its rows from the state before them. The map of the last rank, and
the matrix of the first one, are computed only if they are read. The cotangent of b_i is
w_i = g_i + m_(i+1)^T w_(i+1), a lagged scan in the other direction, and that of m_i is w_i h_(i-1)^T. Linear attention
with a delta rule is such a recurrence over chunks (Yang et al., arXiv:2406.06484, arXiv:2412.06464). Tensors are
chunked as in ``rank_chunks.py``: (..., chunks, rows, K, V).
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.frames import is_known, is_padded, outside_window
from sp_compile.lowering.base.library import composite, opaque
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.lowering.torch_compat import size_hint
from sp_compile.lowering.triton import can_use_triton

from .carries import CarryExchange, gather_parts
from .monoids import Pair
from .rank_chunks import chunk_rows, chunks_first, last_rows, shift_rows
from .scan_ops import SHARD_ARGUMENTS, ScanShards, to_chunks

sp = torch.ops.sp
ALL_READ = -1
# For each form, the number of rows by which the factor and the summand of a result precede it.
ROW_LAGS = {"inclusive": (0, 0), "exclusive": (1, 1), "lagged": (1, 0)}


@composite(
    "affine_scan(Tensor m, Tensor b, Tensor? initial, int dim, bool reverse=False, "
    f"ScalarType? accumulate=None, bool exclusive=False, {SHARD_ARGUMENTS}) -> Tensor",
    padded="nearest",
)
def affine_scan(
    m: Tensor,
    b: Tensor,
    initial: Tensor | None,
    dim: int,
    reverse: bool = False,
    accumulate: torch.dtype | None = None,
    exclusive: bool = False,
    *across: Any,
) -> Tensor:
    """Compute h_i = m_i @ h_(i-1) + b_i from h_(-1) = initial, or zeros; return h_(i-1) of each row if exclusive.

    Placement: Shard(dim), Shard(dim), invariant -> Shard(dim).
    Shapes: m (..., S, K, K) and b (..., S, K, V), with equal other dims; dim is that of S. initial, a full tensor,
    (..., K, V). accumulate: the dtype of the states; float32 for shorter floats if None. ``across``: fields of
    `ScanShards`. Bytes: (n - 1) * C, where C is the number of elements of b without dim times (K + V) / V; the same
    backward. Backward: the scan in the other direction; differentiable once.
    """
    assert dim % b.ndim == b.ndim - 3, "the dim of the scan is before those of the matrices"
    shards = ScanShards(*across)
    exchange = shards.carry_exchange(b, dim, reverse)
    dtype = torch.promote_types(m.dtype, b.dtype)
    if accumulate is None:
        accumulate = accumulation_dtype(dtype)
    if is_known(b.shape[exchange.dim] == 0):
        return b.to(dtype, copy=True)
    m, b = m.to(accumulate), b.to(accumulate)
    if initial is not None:
        initial = initial.to(accumulate)
    if shards.frame is not None and is_padded(shards.frame, shards.n):  # padded rows keep the state
        outside = outside_window(b, exchange.dim, shards.frame, shards.n, shards.group)
        m = torch.where(outside, torch.eye(m.shape[-1], dtype=m.dtype, device=m.device), m)
        b = b.masked_fill(outside, 0)
    form = "exclusive" if exclusive else "inclusive"
    reads_final = False  # the result has the state after each row, and nothing else reads that after the last chunk
    h, _ = _AffineFunction.apply(to_chunks(m, exchange), to_chunks(b, exchange), initial, form, exchange, reads_final)
    return shards.window(h.flatten(exchange.dim, exchange.rows).to(dtype), exchange.dim)


class _AffineFunction(Function):
    """Affine scan of chunks, whose backward is an affine scan in the other direction."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Return the states and the carries into the chunks, from the arguments of `_scan_affine_chunks`."""
        return _scan_affine_chunks(*arguments)[:2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Save the maps and the states."""
        (m, _, initial, ctx.form, ctx.exchange, _), (h, carry) = inputs, output
        ctx.set_materialize_grads(False)
        if carry is not None:
            ctx.mark_non_differentiable(carry)
        ctx.save_for_backward(m, h, carry, initial)

    @staticmethod
    @torch.compiler.disable
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Return the gradients of m, b and the initial state, for the states h_i = m_i h_(i-1) + b_i.

        The gradient of b_i is w_i = g_i + m_(i+1)^T w_(i+1), a lagged scan in the other direction (an exclusive one for
        an exclusive result), and that of m_i is w_i h_(i-1)^T. The gradient of the initial state is the final state of
        this scan. The arguments are those of `_scan_affine_chunks`, of which the last three have no gradient.
        """
        if grad is None:
            return None, None, None, None, None, None
        (m, h, carry, initial), exchange = ctx.saved_tensors, ctx.exchange  # carry: the state before each chunk
        is_exclusive, transposed = ctx.form == "exclusive", m.transpose(-1, -2)
        back_form = "exclusive" if is_exclusive else "lagged"
        reads_final = ctx.needs_input_grad[2]
        w, _, final = _scan_affine_chunks(
            transposed, grad.contiguous(), None, back_form, exchange.backward, reads_final
        )
        if carry is None:  # on one rank: the state before its only chunk, at index 0 of the chunks, is the initial one
            first = torch.zeros_like(last_rows(h, exchange)[0]) if initial is None else initial
            carry = chunk_rows(first[None], exchange)
        previous = h if is_exclusive else shift_rows(h, carry, exchange)
        dm = w @ previous.transpose(-1, -2) if ctx.needs_input_grad[0] else None
        if final is None:  # on one rank: compute the state after the scan's last row
            factor, last_w, last_grad = (last_rows(x, exchange.backward)[0] for x in (transposed, w, grad))
            # The last row of this scan is row 0: the gradient of the initial state is m_0^T w_0, and also g_0 if the
            # result is exclusive, whose row 0 is the initial state itself.
            final = factor @ last_w + last_grad if is_exclusive else factor @ last_w
        return dm, w, final if reads_final else None, None, None, None


def _scan_affine_chunks(
    m: Tensor, b: Tensor, initial: Tensor | None, form: str, exchange: CarryExchange, reads_final: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return h, the carries into the chunks, and the state after the last chunk.

    Args:
        m: (..., chunks, rows, K, K), the factors.
        b: (..., chunks, rows, K, V), the summands.
        initial: (..., K, V), the state before the first chunk; zeros if None.
        form: "inclusive", "exclusive" or "lagged"; see `local_affine_scan`.
        exchange: The direction of the scan and the exchange of carries.
        reads_final: True if the state after the last chunk is read.

    Returns:
        h, like b; the carries (..., chunks, 1, K, V); and the final state (..., K, V), which is undefined unless it is
        read. The last two are None on one rank, where nothing is exchanged.
    """
    options = exchange.reverse, form
    first = None if initial is None else initial.unsqueeze(exchange.dim)
    if exchange.is_single:
        return sp.local_affine_scan(m, b, first, *options), None, None
    first_rank, last_rank = (exchange.n - 1, 0) if exchange.reverse else (0, exchange.n - 1)
    is_contiguous = exchange.folds == 1  # else the first and the last chunk are those of one rank
    unread = last_rank if is_contiguous and not reads_final else ALL_READ
    unread_factor = first_rank if is_contiguous and initial is None else ALL_READ  # it would be multiplied by zeros
    totals = sp.local_affine_total(m, b, *options, unread, unread_factor, exchange.group)
    factor, state = (chunks_first(x, exchange) for x in totals)
    maps = gather_parts([torch.cat([factor, state], -1)], exchange)[0]  # of all chunks, in scan order
    factors, states = maps.split([factor.shape[-1], state.shape[-1]], -1)
    # The state before each chunk of all ranks, and at the end the state after the last one.
    carried = [torch.zeros_like(states[0]) if initial is None else initial]
    for factor, state in zip(factors.unbind(), states.unbind()):
        carried.append(state + factor @ carried[-1])
    # The states before this rank's chunks.
    carry = torch.stack(carried[:-1]).index_select(0, exchange.scan_positions(b.device))
    h = sp.local_affine_scan(m, b, carry.movedim(0, exchange.dim), *options)
    return h, chunk_rows(carry, exchange), carried[-1]


@opaque(
    "local_affine_scan(Tensor m, Tensor b, Tensor? initial, bool reverse, str form) -> Tensor",
    lambda m, b, initial, reverse, form: b.new_empty(b.shape),
)
def local_affine_scan(m: Tensor, b: Tensor, initial: Tensor | None, reverse: bool, form: str) -> Tensor:
    """Return the states of a recurrence from initial, or zeros.

        inclusive    h_i = m_i @ h_(i-1) + b_i
        exclusive    the same; returns h_(i-1) in place of h_i
        lagged       h_i = s_(i-1) + b_i and s_i = m_i @ h_i, where s is the carried state

    Each result is a factor times the result before it, plus a summand; `ROW_LAGS` has the rows of both.

    Shapes: m (..., S, K, K), b (..., S, K, V), initial broadcast to (..., K, V) -> h like b. Implementation: a Triton
    kernel for float32 on a GPU, one launch; else a batched matrix product for each row.
    """
    factors, terms = _rows_of_batch(m), _rows_of_batch(b)
    if initial is not None:
        initial = initial.expand((*b.shape[:-3], *b.shape[-2:])).reshape(terms[:, 0].shape).contiguous()
    if _has_affine_kernel(terms):
        from sp_compile.lowering.triton.affine_kernel import scan_affine_rows

        return scan_affine_rows(factors, terms, initial, reverse, *ROW_LAGS[form]).view(b.shape)
    h = torch.empty_like(terms)
    order = _scan_order(terms.shape[1], reverse)
    if order:
        _write_first_state(h[:, order[0]], factors[:, order[0]], terms[:, order[0]], initial, form)
    for row_before, row in pairwise(order):
        factor_row, term_row = (row_before if lag else row for lag in ROW_LAGS[form])
        torch.baddbmm(terms[:, term_row], factors[:, factor_row], h[:, row_before], out=h[:, row])
    return h.view(b.shape)


def _write_first_state(out: Tensor, factor: Tensor, term: Tensor, initial: Tensor | None, form: str) -> None:
    """Write the result of the first row, (N, K, V), from its factor, its summand and the initial state."""
    factor_lag, term_lag = ROW_LAGS[form]
    if initial is None:
        out.zero_()
    elif factor_lag:
        out.copy_(initial)
    else:
        torch.bmm(factor, initial, out=out)
    if not term_lag:
        out.add_(term)


@opaque(
    "local_affine_total(Tensor m, Tensor b, bool reverse, str form, int unread, int unread_factor, str group) "
    "-> (Tensor, Tensor)",
    lambda m, b, *_: (m.new_empty((*m.shape[:-3], *m.shape[-2:])), b.new_empty((*b.shape[:-3], *b.shape[-2:]))),
)
def local_affine_total(
    m: Tensor, b: Tensor, reverse: bool, form: str, unread: int, unread_factor: int, group: str
) -> Pair:
    """Return the map (factor, state) of all rows: the last state is factor @ initial + state.

    Shapes: m (..., S, K, K), b (..., S, K, V) -> (..., K, K), (..., K, V). form: as for ``sp::local_affine_scan``.
    unread and unread_factor: the ranks of the group that return zeros as their map, and as their factor, because no
    rank reads it; -1 for none. Implementation: as ``sp::local_affine_scan``.
    """
    reads_all = unread == unread_factor == ALL_READ
    rank = None if reads_all else current_communicator().rank(group)
    factor, state = m.new_zeros((*m.shape[:-3], *m.shape[-2:])), b.new_zeros((*b.shape[:-3], *b.shape[-2:]))
    if rank == unread:
        return factor, state
    has_factor = rank != unread_factor
    factors, terms = _rows_of_batch(m), _rows_of_batch(b)
    size = m.shape[-1] if has_factor else 0
    # (N, K, size + V): factor and state side by side, which begin with the identity and zeros.
    total = torch.zeros(terms.shape[0], terms.shape[2], size + terms.shape[3], dtype=b.dtype, device=b.device)
    total[..., :size] = torch.eye(terms.shape[2], size, dtype=b.dtype, device=b.device)
    if _has_affine_kernel(terms):
        from sp_compile.lowering.triton.affine_kernel import total_affine_rows

        total = total_affine_rows(factors, terms, total, reverse, is_lagged=form == "lagged")
    else:
        for row in _scan_order(terms.shape[1], reverse):
            if form == "lagged":  # the summand of a row is added before its factor: state = m @ (state + b)
                total[..., size:] += terms[:, row]
                total = torch.bmm(factors[:, row], total)
            else:
                total = torch.bmm(factors[:, row], total)
                total[..., size:] += terms[:, row]
    if has_factor:
        factor.copy_(total[..., :size].view(factor.shape))
    state.copy_(total[..., size:].view(state.shape))  # results of ops do not alias
    return factor, state


def _has_affine_kernel(b: Tensor) -> bool:
    """Return True if the Triton kernel computes a recurrence with the summands b."""
    return can_use_triton(b) and b.dtype is torch.float32 and b.numel() > 0


def _rows_of_batch(x: Tensor) -> Tensor:
    """Return matrices (..., S, K, V) as (N, S, K, V), contiguous, with one batch dim for torch.bmm."""
    return x.reshape(-1, *x.shape[-3:]).contiguous()


def _scan_order(rows: int, reverse: bool) -> range:
    """Return the rows in the order of the scan."""
    return range(rows - 1, -1, -1) if reverse else range(rows)


@register_flop_formula(torch.ops.sp.local_affine_scan, get_raw=True)
def affine_scan_flops(m: Tensor, b: Tensor, *_: Any, **_meta: Any) -> int:
    """Return the FLOPs of ``sp::local_affine_scan``: for each row, a product of (K, K) and (K, V)."""
    return 2 * size_hint(b.numel() * m.shape[-1])


@register_flop_formula(torch.ops.sp.local_affine_total, get_raw=True)
def affine_total_flops(m: Tensor, b: Tensor, *_: Any, **_meta: Any) -> int:
    """Return the FLOPs of ``sp::local_affine_total``: for each row, a product of (K, K) and (K, K + V).

    The ranks whose map no rank reads compute less.
    """
    return 2 * size_hint((m.numel() + b.numel()) * m.shape[-1])
