"""``sp::ring_attention``, ``sp::hybrid_attention``, ``sp::gathered_attention``: attention whose sequence is split.

q (B, H, s, D), k (B, Hkv, t, D), v (B, Hkv, t, E) are this rank's shards as q_frame and k_frame tell; the result is
(B, H, s, E). H is a multiple of Hkv. In the global view each of them is the attention of the whole sequences.

    mask        bool or additive, (B|1, H|1, S|1, T|1), whole on every rank; its cotangent is partial
    rows, cols  vectors that the predicate reads, (B|1, S) and (B|1, T), whole on every rank
    predicate   which keys a query may attend to (``sp_compile.lowering.attention.predicate``), "" for all
    seed        of dropout, int64 (); drawn where it is None. One seed drops the same weights on any number of ranks
    balance     move contiguous shards to the zigzag layout and back, inside the op
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering import routes
from sp_compile.lowering.frames import Frame, folds_of, is_padded, known, nearest_rows, own_positions
from sp_compile.lowering.library import composite

from .autograd import Scores
from .gathered import Gathering, gathered
from .masked import autocast
from .ring import Ring, ring
from .zigzag import folded

HEADS, SEQUENCE = 1, 2
ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[] rows, Tensor[] cols, SymInt[] sizes, str predicate,"
    " Tensor? seed, float dropout_p, float? scale, SymInt[] q_frame, SymInt[] k_frame, int n, str group, bool balance"
)


class _Sharded(NamedTuple):
    """The arguments that the three ops share, behind q, k and v."""

    mask: Tensor | None
    rows: list[Tensor]
    cols: list[Tensor]
    sizes: list[int]
    predicate: str
    seed: Tensor | None
    dropout_p: float
    scale: float | None
    q_frame: Frame
    k_frame: Frame
    n: int
    group: str
    balance: bool

    def scores(self, q: Tensor, stride: int) -> Scores:
        """What every block of this rank needs, for the queries of its neighbourhood of `stride` ranks."""
        seed = self.seed
        if self.dropout_p and seed is None:
            seed = torch.randint(1 << 62, (), dtype=torch.int64, device=q.device)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        lookups = (list(self.rows), list(self.cols), list(self.sizes), self.predicate)
        return Scores(self._mask(stride), *lookups, seed, self.dropout_p, scale, stride, self.group)

    def _mask(self, stride: int) -> Tensor | None:
        """The mask's rows of the neighbourhood's queries and its heads of this rank."""
        mask, n, group = self.mask, self.n, self.group
        if mask is None or (n == 1 and not is_padded(self.q_frame, 1)):
            return mask
        if mask.shape[SEQUENCE] != 1:
            positions = own_positions(self.q_frame, n, group, mask.device, stride)
            mask = mask.index_select(SEQUENCE, nearest_rows(positions, self.q_frame, 1))
        if stride > 1 and mask.shape[HEADS] != 1:
            heads = mask.shape[HEADS] // stride
            first = torch.ops.sp.rank(group, mask.device) % stride * heads
            mask = mask.index_select(HEADS, first + torch.arange(heads, device=mask.device))
        return mask

    def folded(self) -> _Sharded:
        """The same in the zigzag layout."""
        zigzag = [[*frame[:4], 2] if len(frame) else frame for frame in (self.q_frame, self.k_frame)]
        return self._replace(q_frame=zigzag[0], k_frame=zigzag[1], balance=False)


def _around(q: Tensor, k: Tensor, v: Tensor, job: _Sharded, stride: int, steps: int, grads: str) -> Tensor:
    if job.balance:
        q, k, v = folded([q, k, v], job.n, job.group)
        out = _around(q, k, v, job.folded(), stride, steps, grads)
        return folded([out], job.n, job.group, back=True)[0]
    if stride > 1:
        q, k, v = _to_heads([q, *_repeated(k, v, stride)], job, stride)
    way = Ring(list(job.q_frame), list(job.k_frame), job.n, stride, steps, grads, job.group)
    out = ring(q, k, v, job.scores(q, stride), way)
    return _to_sequence(out, job, stride) if stride > 1 else out


def _repeated(k: Tensor, v: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Key heads as often as needed for the ranks to divide them; backward: summed over the repetitions."""
    times = math.lcm(k.shape[HEADS], ranks) // k.shape[HEADS]
    if times == 1:
        return k, v
    keys, values = (x.repeat_interleave(times, HEADS) for x in (k, v))
    return keys, values


def _to_heads(xs: list[Tensor], job: _Sharded, ranks: int) -> list[Tensor]:
    """Ulysses between neighbours: the whole heads of this rank for the rows of them all. Padding stays."""
    heads = xs[1].shape[HEADS]
    # The queries of a key head as part of its rows: as many heads as keys have, so that backward is one exchange too.
    xs = [xs[0].unflatten(HEADS, (heads, xs[0].shape[HEADS] // heads)).movedim(2, 3), *xs[1:]]
    places = zip(xs, (job.q_frame, job.k_frame, job.k_frame), strict=True)
    alike = known(xs[0].shape[SEQUENCE] == xs[1].shape[SEQUENCE])
    out = [] if not alike else _exchanged(xs, heads, _rows(xs[0], job.q_frame, ranks), job, ranks)
    out = out or [_exchanged([x], heads, _rows(x, frame, ranks), job, ranks)[0] for x, frame in places]
    return [out[0].movedim(3, 2).flatten(HEADS, 2), *out[1:]]


def _exchanged(xs: list[Tensor], heads: int, rows: Frame, job: _Sharded, ranks: int) -> list[Tensor]:
    group = routes.among(job.group, ranks)
    return torch.ops.sp.all_to_all(xs, HEADS, [1, heads, 0, heads], SEQUENCE, rows, ranks, group)


def _rows(x: Tensor, frame: Frame, ranks: int) -> Frame:
    """All rows of a neighbourhood, as a frame: nothing is trimmed, and zigzag halves come in order."""
    return [1, x.shape[SEQUENCE] * ranks, 0, x.shape[SEQUENCE] * ranks, folds_of(frame)]


def _to_sequence(out: Tensor, job: _Sharded, ranks: int) -> Tensor:
    heads, length = out.shape[HEADS] * ranks, out.shape[SEQUENCE]
    rows, group = [1, length, 0, length, folds_of(job.q_frame)], routes.among(job.group, ranks)
    return torch.ops.sp.all_to_all([out], SEQUENCE, rows, HEADS, [1, heads, 0, heads], ranks, group)[0]


@composite(f"ring_attention({ARGUMENTS}, int steps, str grads) -> Tensor")
def ring_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Shard(2), Shard(2), Shard(2) -> Shard(2): keys and values go round a ring of n ranks.

    steps: how many ranks' keys any query needs, counted backwards from its own (n, or fewer for a sliding window).
    grads: "travel" or "scatter", the way home of dK and dV. Bytes: (steps - 1) * bytes(k, v), as many again in the
    backward, and those of dK and dV in float32. Source: arXiv:2310.01889; see ``ring.py``.
    """
    *shared, steps, grads = rest
    q, k, v = autocast(q, k, v)
    return _around(q, k, v, _Sharded(*shared), 1, steps, grads)


@composite(f"hybrid_attention({ARGUMENTS}, int ulysses, str grads) -> Tensor")
def hybrid_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Shard(2), Shard(2), Shard(2) -> Shard(2): heads split over `ulysses` neighbours, a ring between neighbourhoods.

    `ulysses` divides n and the query heads. Bytes: those of Ulysses on `ulysses` ranks and of a ring of n / ulysses.
    Source: USP, arXiv:2405.07719.
    """
    *shared, ulysses, grads = rest
    job = _Sharded(*shared)
    q, k, v = autocast(q, k, v)
    return _around(q, k, v, job, ulysses, job.n // ulysses, grads)


@composite(f"gathered_attention({ARGUMENTS}) -> Tensor")
def gathered_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Shard(2), Shard(2), Shard(2) -> Shard(2): keys and values are gathered; only shards are kept for the backward.

    k_frame []: the keys are whole on every rank already, and their cotangents partial. Bytes: (n - 1) * bytes(k, v),
    as many again in the backward, and those of dK and dV in float32.
    """
    job = _Sharded(*rest)
    q, k, v = autocast(q, k, v)
    if job.balance:
        (q,) = folded([q], job.n, job.group)
        where = job.folded()
        out = gathered(q, k, v, where.scores(q, 1), _gathering(where, job.k_frame))
        return folded([out], job.n, job.group, back=True)[0]
    return gathered(q, k, v, job.scores(q, 1), _gathering(job, job.k_frame))


def _gathering(job: _Sharded, k_frame: Frame) -> Gathering:
    return Gathering(list(job.q_frame), list(k_frame) or None, job.n, job.group)
