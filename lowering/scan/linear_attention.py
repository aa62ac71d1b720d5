"""Define ``sp::linear_attention``: attention through a matrix of state, for full tensors and for shards.

    h_t = D_t h_(t-1) + k_t v_t^T                                   decay only
    h_t = D_t h_(t-1) + beta_t k_t (v_t - (D_t h_(t-1))^T k_t)^T    with beta: the gated delta rule
    h_t = D_t h_(t-1) + b_t (a_t^T h_(t-1)) + k_t v_t^T             with a and b: a diagonal plus a low rank
    o_t = scale * h_t^T q_t                                         D_t = diag(exp(decay_t)), h: (K, V)

Tokens are processed in chunks. Everything within a chunk is a few batched products: its result without a state before
it, ``out``; the rows that read that state, ``reads``; and the affine map of its state, ``factor`` and ``state``. The
state h before each chunk is an exclusive affine scan of these maps, over the ranks too; the result is out + reads @ h.
Sources: Yang et al., arXiv:2312.06635 (decay), arXiv:2412.06464 (gated delta rule), arXiv:2503.14456 (a and b).

A start marks the first token of a document, at which the state is zero. Where a document starts in a chunk, the factor
of the chunk is zero, so that no state of an earlier document passes the chunk.

If the kernel that a call names is installed (``attention_kernels.py``), it processes all tokens of a rank as one chunk.
Its values have K more columns, zeros, with the identity as the state of these columns before the chunk: the results of
these columns are then ``reads``, and their state after the chunk is ``factor``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.library import composite

from .attention_kernels import TokenRows, has_kernel, run_attention_kernel
from .carries import CarryExchange, last_end
from .document_states import add_initial_states, final_states
from .log_decays import Decays, LogDecay
from .scan_ops import SHARD_ARGUMENTS, ScanShards, to_chunks

sp = torch.ops.sp
CHUNK = 64  # tokens of a chunk with one decay a head
SMALL_CHUNK = 16  # with K decays a head, one a row of the state: products within a chunk are K times larger
ATTENTION_OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor? a, Tensor? b, Tensor? starts, Tensor? opened, "
    f"Tensor? closed, Tensor? initial, float scale, str kernel, {SHARD_ARGUMENTS}"
)


class ChunkMaps(NamedTuple):
    """Results of chunks as functions of the states h before them."""

    out: Tensor  # (B, H, N, T, V); the result is out + reads @ h
    reads: Tensor  # (B, H, N, T, K)
    factor: Tensor  # (B, H, N, K, K), or (B, H, N, K, 1) if it is diagonal; the state after is factor @ h + state
    state: Tensor  # (B, H, N, K, V)
    ends: Callable[[Tensor], Tensor]  # returns the states after documents, from the states before chunks


@composite(f"linear_attention({ATTENTION_OPERANDS}) -> Tensor", padded="nearest")
def linear_attention(*operands: Any) -> Tensor:
    """Compute attention through a state of one matrix a head.

    Placement: Shard(1) for operands with S, invariant for initial -> Shard(1).
    Shapes: q, k, a, b (B, S, H, K); v (B, S, H, V); decay (B, S, H, 1) or (B, S, H, K), at most 0, where -inf resets
    the state; beta (B, S, H); starts bool (B, S); initial (B, H, K, V), the state before the first token ->
    (B, S, H, V), of the dtype of v. With opened and closed, int64 (1, S), initial (N, H, K, V) has a state for each
    document (``document_states.py``), and its gradient is partial. Computed in float32, or float64. kernel: a key of
    `attention_kernels.KERNELS`, or "".
    Bytes: (n - 1) * B * H * K * (K + V) in the dtype of the computation, and the same number in the backward.
    Backward: through the same products, differentiable once.
    """
    shards, out, _ = _process_tokens(*operands)
    return shards.window(out, 1)  # padded rows repeat the nearest valid row, and have zero cotangents


@composite(f"linear_attention_state({ATTENTION_OPERANDS}) -> Tensor")
def linear_attention_state(*operands: Any) -> Tensor:
    """Compute the state after the last token of ``sp::linear_attention``, from the same operands.

    Placement: Shard(1) for operands with S, invariant for initial -> replicated.
    Shapes: those of ``sp::linear_attention`` -> (B, H, K, V), float32 or float64; with opened and closed (N, H, K, V),
    the states after the documents. Bytes: those of ``sp::linear_attention``, and (n - 1) * B * H * K * V for the states
    that each rank sends. Backward: through the same products, differentiable once.
    """
    shards, _, ends = _process_tokens(*operands)  # ends: (B, H, folds, K, V), or with closed (N, H, K, V)
    tokens = TokenRows(*operands[:10])  # its ten fields are the first operands
    exchange = shards.carry_exchange(tokens.v, dim=1, reverse=False)
    if tokens.closed is not None:  # each state is computed by the rank with the last token; the others have zeros
        return ends if exchange.is_single else sp.all_reduce(ends, exchange.n, exchange.group)
    return ends[:, :, -1] if exchange.is_single else last_end(ends.movedim(2, 0), exchange)


LINEAR_ATTENTION_OPS = (sp.linear_attention.default, sp.linear_attention_state.default)


def _process_tokens(*operands: Any) -> tuple[ScanShards, Tensor, Tensor]:
    """Compute both results of linear attention from the operands of its operators, `ATTENTION_OPERANDS`.

    A fold is one of the contiguous runs of tokens of a rank: one, or two in a zigzag frame. Documents have states of
    their own if `opened` is given: it has the number of the document at its first token, `closed` at its last one.

    Returns:
        The shards; the result (B, S, H, V); and the state after each fold, (B, H, folds, K, V), or if documents have
        states of their own the state after each, (N, H, K, V).
    """
    *rows, initial, scale, kernel = operands[:13]  # `rows`: the ten fields of `TokenRows`
    shards = ScanShards(*operands[13:])  # the frame and the ranks
    tokens = TokenRows(*rows)
    exchange = shards.carry_exchange(tokens.v, dim=1, reverse=False)  # of the states, between ranks
    size = chunk_tokens(tokens.decay.shape[-1])  # smaller chunks if each of the K channels has its own decay
    dtype = accumulation_dtype(tokens.v.dtype)
    # Add dims of size 1 at the end, so that beta, starts and marks have 4 dims, too.
    tokens = tokens.map(lambda x: x[(...,) + (None,) * (4 - x.ndim)])
    # Zeros in padded rows, also as the logarithm of the decay, keep the state.
    tokens = tokens.map(lambda x: shards.fill_padding(x, 1, 0))
    initial = None if initial is None else initial.to(dtype)
    if has_kernel(kernel, tokens.v.device) and tokens.opened is None:
        out, ends = _run_kernel(tokens, initial, scale, kernel, exchange)
        return shards, out, ends
    cast = tokens.map(lambda x: _split_chunks(x.to(dtype) if x.is_floating_point() else x, size, exchange))
    maps = _map_chunks(cast._replace(q=cast.q * scale), initial)
    # Initial states of documents are parts of `maps` already.
    before, ends = _scan_chunk_states(maps, initial if tokens.opened is None else None, exchange)
    ends = ends if tokens.closed is None else maps.ends(before)  # after folds, or after documents
    out = _join_chunks(maps.out + maps.reads @ before, tokens.v.shape[1], exchange)
    return shards, out.to(tokens.v.dtype).contiguous(), ends


def chunk_tokens(decays: Any) -> int:
    """Return the number of tokens of a chunk, from the number of decays of a head and token: 1 or K."""
    return CHUNK if decays == 1 else SMALL_CHUNK


def _split_chunks(x: Tensor, size: int, exchange: CarryExchange) -> Tensor:
    """Return (B, S, H, D) as (B, H, N, T, D): N chunks of T = `size` tokens, with zeros to complete each fold."""
    x = to_chunks(x, exchange)  # (B, folds, S / folds, H, D)
    missing = -x.shape[2] % size  # tokens that the last chunk of a fold lacks
    # Not F.pad, whose backward has strides that fake tensors do not predict for a symbolic length.
    x = torch.cat([x, x.new_zeros((*x.shape[:2], missing, *x.shape[3:]))], 2)
    x = x.unflatten(2, (x.shape[2] // size, size))  # (B, folds, chunks of a fold, T, H, D)
    return x.permute(0, 4, 1, 2, 3, 5).flatten(2, 3)


def _join_chunks(x: Tensor, rows: int, exchange: CarryExchange) -> Tensor:
    """Undo `_split_chunks`: (B, H, N, T, D) -> (B, S, H, D), where S is `rows`."""
    x = x.unflatten(2, (exchange.folds, x.shape[2] // exchange.folds))  # (B, H, folds, chunks of a fold, T, D)
    x = x.permute(0, 2, 3, 4, 1, 5).flatten(2, 3)  # (B, folds, tokens of a fold and zeros, H, D)
    return x.narrow(2, 0, rows // exchange.folds).flatten(1, 2)


def _map_chunks(x: TokenRows, initial: Tensor | None) -> ChunkMaps:
    """Return the results of chunks as functions of the states before them.

    With decay only, for the tokens i and j of a chunk and the state h before it:

        result of i:   sum over j <= i of (q_i . k_j) v_j, decayed from j to i; plus q_i h decayed to i
        state after:   sum over all j of k_j v_j^T, decayed from j to the end; plus h decayed to the end

    With beta, or a and b, the written values depend on h, too. In the body, h is the state at the start of a token's
    document, or of the chunk if the document has started before. The last lines remove the tokens that do not read the
    state before the chunk. If documents have initial states, their effects are added before.

    Args:
        x: Operands (B, H, N, T, ...).
        initial: (N, H, K, V), the initial states of N documents, if ``x.opened`` marks documents; else not used.
    """
    decays = Decays.of(x.decay, x.starts)
    # The decays from the start of the chunk to the end of each token, and to the start of the token's document.
    after, base, causal = decays.after, decays.base, decays.causal_mask()
    kept_last = after.map(lambda y: y[..., -1:, :]).since(after)  # decay from each token to the end of the chunk
    if decays.segment is not None:
        kept_last = kept_last * (decays.segment == decays.segment[..., -1:, :])  # only of the chunk's last document
    written = _written_values(x, decays, causal)
    # Start without what the tokens of the chunk write: queries read only the decayed h, which remains in the state.
    out, reads, state = 0, x.q * after.since(base), 0
    factor = after.since(base)[..., -1:, :].mT
    for key, values, reading in written:  # token t writes the outer product of key_t and values_t + reading_t @ h
        weights = _decayed_products(x.q, key, after, after, causal)  # of what is written, in the results
        kept = (key * kept_last).mT  # the keys, decayed to the end of the chunk
        out, state = out + weights @ values, state + kept @ values
        if reading is not None:
            identity = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
            reads, factor = reads + weights @ reading, factor * identity + kept @ reading
    if factor.shape[-1] == 1:  # the diagonal of a matrix, also if all K rows have the same decay
        factor = factor.expand(*factor.shape[:-2], x.k.shape[-1], 1)
    if x.opened is not None and decays.segment is not None and initial is not None:
        out, state = add_initial_states(out, state, reads, factor, decays.segment, x.opened, initial)

    def ends(before: Tensor) -> Tensor:
        """Return the states after documents, from the states before chunks."""
        return final_states(written, after, base, decays.segment, before, x.closed, initial)

    if decays.segment is not None:  # a chunk in which a document starts discards the state before it
        factor = factor * (decays.segment[..., -1:, :] == 0)
    # Only tokens before the first document that starts in the chunk read the state before the chunk.
    return ChunkMaps(out, decays.zero_later_documents(reads), factor, state, ends)


def _written_values(x: TokenRows, decays: Decays, causal: Tensor) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Return what tokens write to the state, as triples (key, values, reading).

    Token t writes the outer product of row t of the key and row t of ``values + reading @ h``, where h is the state at
    the start of its document, or of the chunk. A reading of None means zeros. With beta, or a and b, the value u_t that
    a token writes depends on the values u_s that earlier tokens of the chunk write. All u of a chunk solve a triangular
    system, which is a function of h: its right side has a part that is multiplied by h.

    Args:
        x: Operands (B, H, N, T, ...).
        decays: The decays from the start of the chunk to the point after each token, to the point before it, and to the
            start of the token's document (`base`).
        causal: Bool (..., T, T), True for pairs of a token and an earlier one, or the same, of its document.
    """
    identity = torch.eye(x.q.shape[-2], dtype=x.q.dtype, device=x.q.device)
    after = decays.after
    strict = causal & (identity == 0)  # without the token itself
    size = x.v.shape[-1]  # V: the first columns of a solution are `values`, the others are `reading`
    if x.beta is not None:
        # u_t = v_t - k_t h - sum over s < t of (k_t . key_s) u_s, each decayed up to t
        key = x.k * x.beta
        system = identity + _decayed_products(x.k, key, after, after, strict)
        solution = _solve(system, torch.cat([x.v, -x.k * after.since(decays.base)], -1))
        return [(key, solution[..., :size], solution[..., size:])]
    if x.a is not None and x.b is not None:
        # u_t = a_t h + sum over s < t of ((a_t . k_s) v_s + (a_t . b_s) u_s), each decayed up to t - 1
        read_values = _decayed_products(x.a, x.k, decays.before, after, strict) @ x.v
        system = identity - _decayed_products(x.a, x.b, decays.before, after, strict)
        solution = _solve(system, torch.cat([read_values, x.a * decays.before.since(decays.base)], -1))
        return [(x.b, solution[..., :size], solution[..., size:]), (x.k, x.v, None)]
    return [(x.k, x.v, None)]


def _solve(system: Tensor, values: Tensor) -> Tensor:
    """Return the solution u of system @ u = values, for a lower triangular system with ones on its diagonal."""
    return torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)


def _decayed_products(x: Tensor, y: Tensor, at_x: LogDecay, at_y: LogDecay, is_allowed: Tensor) -> Tensor:
    """Return the sum over k of x_ik y_jk d_ijk, with the decay d from token j to token i; 0 where not allowed.

    These are the products of rows of tokens i and of earlier tokens j. `at_x` and `at_y` are the decays from the start
    of the chunk to the tokens of x and of y, so that d_ij is exp(at_x_i - at_y_j). With one decay for all k, d is a
    factor of the product x @ y.mT.
    Shapes: x, y (..., T, K); at_x, at_y (..., T, 1) or (..., T, K); is_allowed (..., T, T) -> (..., T, T).
    """
    # `since` is exp(at_x - at_y), or 0 where not allowed: (..., T, 1) and (..., 1, T) broadcast to all pairs of tokens.
    if at_x.log.shape[-1] == 1:
        return (x @ y.mT) * at_x.since(at_y.map(lambda z: z.mT), is_allowed)
    factors = at_x.map(lambda z: z.unsqueeze(-2)).since(at_y.map(lambda z: z.unsqueeze(-3)), is_allowed.unsqueeze(-1))
    return (x.unsqueeze(-2) * y.unsqueeze(-3) * factors).sum(-1)


def _scan_chunk_states(maps: ChunkMaps, initial: Tensor | None, exchange: CarryExchange) -> tuple[Tensor, Tensor]:
    """Return the states before the chunks, (B, H, N, K, V), and after each fold, (B, H, folds, K, V).

    A fold is one of the contiguous runs of chunks of a rank: one, or two in a zigzag frame.
    """
    factor, state = maps.factor, maps.state
    chunks = factor.shape[2] // exchange.folds  # of a fold
    is_matrix = factor.shape[-1] > 1 or factor.shape[-2] == 1  # (K, K), not the diagonal (K, 1); both if K is 1
    if is_matrix:
        before = _scan_chunk_maps(factor, state, initial, exchange)
        after = factor @ before + state
        return before, after.unflatten(2, (exchange.folds, chunks))[:, :, :, -1]
    # Diagonal factors (B, H, N, K, 1): scan the chunks of a fold, dim 3 of (B, H, folds, chunks, K, ...) from 0.
    # Then add the decayed state before the fold, `first`.
    factor, state = (x.unflatten(2, (exchange.folds, chunks)) for x in (factor, state))
    scanned, decay = sp.linear_scan(factor, state, None, 3), factor.cumprod(3)
    # The factor of each fold, as a diagonal matrix (K, K).
    total = decay[:, :, :, -1] * torch.eye(factor.shape[-2], dtype=factor.dtype, device=factor.device)
    first = _scan_chunk_maps(total, scanned[:, :, :, -1], initial, exchange)
    after = scanned + decay * first.unsqueeze(3)
    before = torch.cat([first.unsqueeze(3), after[:, :, :, :-1]], 3)
    return before.flatten(2, 3), after[:, :, :, -1]


def _scan_chunk_maps(factor: Tensor, state: Tensor, initial: Tensor | None, exchange: CarryExchange) -> Tensor:
    """Return the states before the chunks of this rank, (B, H, chunks, K, V), by a scan over the chunks of all ranks.

    Args:
        factor: (B, H, chunks, K, K), of the affine map of each chunk.
        state: (B, H, chunks, K, V), of the same map.
        initial: (B, H, K, V), the state before the first chunk; zeros if None.
        exchange: The exchange of carries.
    """
    dim = 2  # of the chunks
    if exchange.is_single:
        return sp.affine_scan(factor, state, initial, dim, exclusive=True)
    rows = exchange.n * factor.shape[dim]  # chunks of all ranks
    frame = [1, rows, 0, rows, exchange.folds]  # all chunks are valid, with the folds of the tokens
    reverse, accumulate, exclusive = False, None, True
    return sp.affine_scan(
        factor, state, initial, dim, reverse, accumulate, exclusive, frame, exchange.method, exchange.n, exchange.group
    )


def _run_kernel(
    tokens: TokenRows, initial: Tensor | None, scale: float, kernel: str, exchange: CarryExchange
) -> tuple[Tensor, Tensor]:
    """Return the result (B, S, H, V) and the state after each fold (B, H, folds, K, V), from an installed kernel.

    The kernel processes each fold (a contiguous run of tokens of a rank) as one sequence. On several ranks the state
    before a fold is not known yet: the kernel runs with K additional columns of values, zeros, whose state before the
    fold is the identity. Their state after the fold is the factor of the fold's affine map, and their results are the
    rows that read the state before it.
    """
    folds, size, columns = exchange.folds, tokens.k.shape[-1], tokens.v.shape[-1]  # size: K, columns: V
    rows = tokens.map(lambda x: to_chunks(x, exchange).flatten(0, 1))  # (B * folds, rows, H, ...)
    if exchange.is_single:
        out, end = run_attention_kernel(*rows[:8], initial, scale, kernel)  # all but the marks of documents
        return out, end.unsqueeze(2)
    identity = torch.eye(size, dtype=accumulation_dtype(tokens.v.dtype), device=tokens.v.device)
    # The state before each fold, (B * folds, H, K, V + K): zeros, then the identity. `end` has the same shape.
    first = F.pad(identity, (columns, 0)).expand(rows.v.shape[0], rows.v.shape[2], -1, -1)
    out, end = run_attention_kernel(*rows._replace(v=F.pad(rows.v, (0, size)))[:8], first, scale, kernel)
    # (B * folds, H, K, V + K) -> (B, H, folds, K, V) and (B, H, folds, K, K)
    state, factor = end.unflatten(0, (-1, folds)).movedim(1, 2).split([columns, size], -1)
    before = _scan_chunk_maps(factor, state, initial, exchange)  # (B, H, folds, K, V)
    out, reads = (x.unflatten(0, (-1, folds)) for x in out.split([columns, size], -1))  # (B, folds, rows, H, ...)
    # Add what the rows read of the state before their fold: (B, folds, H, rows, K) @ (B, folds, H, K, V).
    read_values = reads.transpose(2, 3).to(before.dtype) @ before.movedim(2, 1)
    out = out + read_values.transpose(2, 3).to(out.dtype)
    return out.flatten(1, 2), factor @ before + state
