"""Attention on local shards, by hand: ulysses_attention, ring_attention, hybrid_attention, gathered_attention.

Every rank passes its shard of q, k and v and gets its shard of the result; gradients flow to the shards. All take

    q (B, H, s, D), k (B, Hkv, t, D), v (B, Hkv, t, E), any strides; H is a multiple of Hkv; the same s, t on all ranks
    mesh        None: the default process group; a ProcessGroup; a DeviceMesh of one axis, of ("ring", "ulysses") axes,
                or with an axis "sp"; what `sp_compile.mesh.resolve` makes of one, which saves doing so every time
    layout      "contiguous": rank r of n holds rows r * s ...; "zigzag": chunks r and 2n - 1 - r of 2n (s is even)
    length, kv_length   of the whole sequences, where the last of the n * s and n * t rows are padding, which may hold
                anything: no query attends to them, and what is returned for them is for no loss to use
    is_causal   query i attends to keys 0..i of the whole sequence
    window      and of these (or, without is_causal, of all) only to those less than `window` positions away
    documents   int (B|1, S), whole on every rank: a query attends to keys of its own document
    attn_mask   bool or additive, whole on every rank, broadcast to (B, H, S, T); its gradient is this rank's share
    dropout_p, seed     weights are dropped by a hash of seed, batch, head, query and key: one seed, the same weights on
                any number of ranks. Without one it is drawn from this rank's generator: torch.manual_seed decides
    scale       1 / sqrt(D) if None
    check       compare the call over the ranks first (one all-gather of 16 bytes, for which a GPU is waited for), so
                that calls which do not fit raise on every rank instead of hanging. Not done inside torch.compile

and return (B, H, s, E). Modules that keep (B, s, H, D) pass q.transpose(1, 2) and transpose the result: views, which
cost no copy that (B, H, s, D) would not. Under autocast q, k, v are cast as scaled_dot_product_attention casts them.
Raise SpError for shapes, heads, meshes, layouts and options that do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .functional_call import NAMES, Attending, Options
from .lowering import routes
from .lowering.masked_attention import autocast
from .lowering.version import tag_programs
from .mesh import Mesh, Ranks, ranks_of

sp = torch.ops.sp


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, **options: Any) -> Tensor:
    """Heads are exchanged for sequence: two all-to-alls. The ranks must divide the query heads (arXiv:2309.14509)."""
    ranks = ranks_of(mesh)
    return _attend("ulysses", q, k, v, ranks, options, ranks.n)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, kv_grads: str = "travel", **options: Any
) -> Tensor:
    """Keys and values go round in n - 1 shifts, or as many as a causal window needs (arXiv:2310.01889); any heads.

    kv_grads: "travel", gradients of keys and values go round behind them; "scatter", they go home in one exchange.
    """
    return _attend("ring", q, k, v, ranks_of(mesh), options, 1, kv_grads)


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: Mesh = None,
    ulysses: int | None = None,
    kv_grads: str = "travel",
    **options: Any,
) -> Tensor:
    """Ulysses between `ulysses` neighbouring ranks, a ring between their neighbourhoods (arXiv:2405.07719).

    ulysses: a divisor of n and of the query heads; that of the mesh's "ulysses" axis if None. One rank needs none.
    """
    ranks = ranks_of(mesh)
    width = 1 if ranks.n == 1 else ranks.ulysses if ulysses is None else ulysses
    return _attend("hybrid", q, k, v, ranks, options, width, kv_grads)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, **options: Any) -> Tensor:
    """Keys and values are gathered, and gathered again in the backward; any number of heads."""
    return _attend("gathered", q, k, v, ranks_of(mesh), options, 1)


def _attend(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: Ranks,
    options: Mapping[str, Any],
    width: int | None,
    kv_grads: str = "travel",
) -> Tensor:
    known = {name: value for name, value in options.items() if name in NAMES}
    unknown = [name for name in options if name not in NAMES]
    device = q.device.type
    given = Options(**known)
    if given.attn_mask is not None and given.attn_mask.ndim < 4:
        mask = given.attn_mask
        given = Options(**{**known, "attn_mask": mask.view([1] * (4 - mask.ndim) + list(mask.shape))})
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _run(Attending(kind, q, k, v, ranks, given, width, kv_grads, unknown))
    q, k, v = autocast(q, k, v)
    with torch.autocast(device, enabled=False):
        return _run(Attending(kind, q, k, v, ranks, given, width, kv_grads, unknown))


def _run(job: Attending) -> Tensor:
    job.check()
    given, ranks = job.options, job.ranks
    seed = given.seed if given.seed is None else torch.as_tensor(given.seed, device=job.q.device)
    scores = (given.attn_mask, *given.lookups(), seed, given.dropout_p, given.scale)
    balance = False
    shared = (job.q, job.k, job.v, *scores, *job.frames(), ranks.n, ranks.group, balance)
    width = job.width or 1
    steps = job.steps() if job.kind == "ring" else ranks.n // width
    if torch.compiler.is_compiling():
        _prepare(ranks.group, width, steps)
    if job.kind == "gathered":
        return sp.gathered_attention(*shared)
    if job.kind == "ring":
        return sp.ring_attention(*shared, steps, job.kv_grads)
    return sp.hybrid_attention(*shared, width, job.kv_grads)


@torch.compiler.assume_constant_result
def _prepare(group: str, stride: int, steps: int) -> None:
    """A compiled program may come from a cache, untraced: its routes are known then, and it was made of these ops."""
    routes.declare(group, stride, steps)
    tag_programs()
