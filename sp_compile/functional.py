"""Attention on local shards, by hand: ulysses_attention, ring_attention, hybrid_attention, gathered_attention.

Every rank passes its shard of q, k and v and gets its shard of the result; gradients flow to the shards. All take

    q (B, H, s, D), k (B, Hkv, t, D), v (B, Hkv, t, E), any strides; H is a multiple of Hkv; the same s, t on all ranks
    mesh        None: the default process group; a ProcessGroup; a DeviceMesh of one axis; ("ring", "ulysses") axes
    layout      "contiguous": rank r of n holds rows r * s ...; "zigzag": chunks r and 2n - 1 - r of 2n (s is even)
    length, kv_length   of the whole sequences; n * s and n * t unless the last rows are padding
    is_causal   query i attends to keys 0..i of the whole sequence
    window      and of these (or, without is_causal, of all) only to those less than `window` positions away
    documents   int (B|1, S), whole on every rank: a query attends to keys of its own document
    attn_mask   bool or additive, (B|1, H|1, S|1, T|1), whole on every rank; its gradient is this rank's share
    dropout_p, seed     weights are dropped by a hash of seed, batch, head, query and key: one seed, the same weights on
                any number of ranks. Without one it is drawn from this rank's generator: torch.manual_seed decides
    scale       1 / sqrt(D) if None
    check       compare shapes over the ranks first (one all-gather of a few integers), so that shards which do not fit
                raise on every rank instead of hanging

and return (B, H, s, E). Raise SpError for shapes, heads, meshes and layouts that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .errors import SpError
from .lowering.communicator import current
from .mesh import Ranks, resolve

sp = torch.ops.sp
Mesh = DeviceMesh | dist.ProcessGroup | Ranks | None


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, **options: Any) -> Tensor:
    """Heads are exchanged for sequence: two all-to-alls. The ranks must divide the query heads (arXiv:2309.14509)."""
    job = _Job.of(q, k, v, mesh, options)
    return job.run(sp.hybrid_attention, job.ranks.n, "travel")


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, kv_grads: str = "travel", **options: Any
) -> Tensor:
    """Keys and values go round in n - 1 shifts (arXiv:2310.01889); any number of heads.

    kv_grads: "travel", gradients of keys and values go round behind them; "scatter", they go home in one exchange.
    """
    job = _Job.of(q, k, v, mesh, options)
    return job.run(sp.ring_attention, job.ranks.n, _one_of(kv_grads, ("travel", "scatter"), "kv_grads"))


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

    ulysses: a divisor of n and of the query heads; that of the mesh's "ulysses" axis if None.
    """
    job = _Job.of(q, k, v, mesh, options)
    width = ulysses or job.ranks.ulysses
    if width is None:
        raise SpError("hybrid_attention: pass ulysses=..., or a mesh with axes ('ring', 'ulysses')")
    return job.run(sp.hybrid_attention, width, _one_of(kv_grads, ("travel", "scatter"), "kv_grads"))


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh = None, **options: Any) -> Tensor:
    """Keys and values are gathered, and gathered again in the backward; any number of heads."""
    return _Job.of(q, k, v, mesh, options).run(sp.gathered_attention)


@dataclass(frozen=True)
class _Options:
    layout: str = "contiguous"
    length: int | None = None
    kv_length: int | None = None
    is_causal: bool = False
    window: int | None = None
    documents: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | int | None = None
    scale: float | None = None
    check: bool = True

    def lookups(self) -> tuple[list[Tensor], list[Tensor], list[int], str]:
        """rows, cols, sizes and predicate."""
        parts = ["(k <= q)"] if self.is_causal else []
        if self.window is not None:
            parts += ["(q - k < n0)"] if self.is_causal else ["(q - k < n0) & (k - q < n0)"]
        vectors = [] if self.documents is None else [self.documents]
        parts += ["Eq(row0, col0)"] if vectors else []
        sizes = [] if self.window is None else [self.window]
        return vectors, vectors, sizes, " & ".join(parts)


@dataclass(frozen=True)
class _Job:
    q: Tensor
    k: Tensor
    v: Tensor
    ranks: Ranks
    options: _Options

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, mesh: Mesh, options: dict[str, Any]) -> _Job:
        try:
            job = _Job(q, k, v, _ranks(mesh), _Options(**options))
        except TypeError as error:
            raise SpError(f"attention: {error}; see sp_compile.functional for the options") from error
        problem = job.problem()
        if job.options.check and job.ranks.n > 1:
            job.agree(problem)
        if problem is not None:
            raise SpError(problem)
        return job

    def problem(self) -> str | None:
        """What is wrong with this rank's operands."""
        q, k, v, given, n = self.q, self.k, self.v, self.options, self.ranks.n
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        fits = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0]
        if not fits or k.shape[1:3] != v.shape[1:3] or q.shape[3] != k.shape[3]:
            return f"attention: expected q (B, H, s, D), k (B, Hkv, t, D), v (B, Hkv, t, E), got {shapes}"
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            return f"attention: the {k.shape[1]} key heads do not divide the {q.shape[1]} query heads ({shapes})"
        if given.layout not in ("contiguous", "zigzag"):
            return f"attention: layout={given.layout!r}: expected 'contiguous' or 'zigzag'"
        if given.layout == "zigzag" and (q.shape[2] % 2 or k.shape[2] % 2):
            return f"attention: zigzag shards are two equal chunks, but their lengths are odd ({shapes})"
        for name, local, whole in (("length", q, given.length), ("kv_length", k, given.kv_length)):
            held = _held(whole, n, self.folds) if whole is not None else local.shape[2]
            if held != local.shape[2]:
                return (
                    f"attention: a sequence of {name}={whole} on {n} ranks ({given.layout}) has {held} rows a rank, "
                    f"but this rank's shard has {local.shape[2]}"
                )
        return None

    @property
    def folds(self) -> int:
        return 2 if self.options.layout == "zigzag" else 1

    def agree(self, problem: str | None) -> None:
        """Raise on every rank if any has a problem, or if their shapes differ."""
        shape = [*self.q.shape, *self.k.shape, self.v.shape[-1], self.folds, int(self.options.is_causal)]
        mine = torch.tensor([int(problem is not None), *shape, *[0] * (16 - len(shape))], device=self.q.device)
        all_ranks = current().all_gather(mine, self.ranks.n, self.ranks.group).view(self.ranks.n, -1).tolist()
        if problem is None and any(others != all_ranks[0] for others in all_ranks):
            told = "; ".join(f"rank {r}: q {o[1:5]}, k {o[5:9]}, v's last {o[9]}" for r, o in enumerate(all_ranks))
            raise SpError(f"attention: the ranks' shards differ or one of them has a problem ({told})")

    def run(self, op: Callable[..., Tensor], *last: Any) -> Tensor:
        q, k, v, given, ranks = self.q, self.k, self.v, self.options, self.ranks
        if op is sp.hybrid_attention and (ranks.n % last[0] or q.shape[1] % last[0]):
            raise SpError(
                f"attention: {last[0]} ranks that share heads must divide the {ranks.n} ranks and the {q.shape[1]} "
                "query heads; use ring_attention, gathered_attention, or another hybrid"
            )
        seed = given.seed if given.seed is None else torch.as_tensor(given.seed, device=q.device)
        frames = [
            [1, x.shape[2] * ranks.n if whole is None else whole, 0, x.shape[2] * ranks.n if whole is None else whole]
            + ([2] if self.folds == 2 else [])
            for x, whole in ((q, given.length), (k, given.kv_length))
        ]
        scores = (given.attn_mask, *given.lookups(), seed, given.dropout_p, given.scale)
        balance = False
        return op(q, k, v, *scores, *frames, ranks.n, ranks.group, balance, *last)


def _held(length: int, n: int, folds: int) -> int:
    return folds * -(-length // (folds * n))


def _one_of(value: str, known: tuple[str, ...], name: str) -> str:
    if value not in known:
        raise SpError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")
    return value


def _ranks(mesh: Mesh) -> Ranks:
    if isinstance(mesh, Ranks):
        return mesh
    if isinstance(mesh, dist.ProcessGroup):
        return Ranks(dist.get_world_size(mesh), mesh.group_name)
    return resolve(mesh, None)
