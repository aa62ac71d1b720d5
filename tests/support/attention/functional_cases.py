"""Functional attention on every rank's shard, and the unsharded attention that it must equal."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from support import ranks
from support.attention.attending import randn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sp_compile
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

BATCH, DIM = 2, 8
OPS = {
    "ulysses": (sp_compile.ulysses_attention, {}),
    "ring": (sp_compile.ring_attention, {}),
    "ring, scattered": (sp_compile.ring_attention, {"kv_grads": "scatter"}),
    "hybrid": (sp_compile.hybrid_attention, {"ulysses": 2}),
    "gathered": (sp_compile.gathered_attention, {}),
}


@dataclass(frozen=True)
class Case:
    """A call of a functional attention."""

    options: dict[str, Any] = field(default_factory=dict)  # arguments of the op, without length and layout
    heads: int = 4
    kv_heads: int = 4
    v_dim: int = DIM
    s: int = 16  # queries
    t: int = 0  # keys; s if 0
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64
    multiple: int = 1  # divides the rows of each chunk
    fill: float | None = None  # value of padding; None: a copy of the last row

    def operands(self) -> list[Tensor]:
        """Return the full q, k, v and the cotangent."""
        t = self.t or self.s
        shapes = (
            (self.heads, self.s, DIM),
            (self.kv_heads, t, DIM),
            (self.kv_heads, t, self.v_dim),
            (self.heads, self.s, self.v_dim),
        )
        return [randn(BATCH, *shape, seed=i).to(self.dtype) for i, shape in enumerate(shapes)]

    def mask(self) -> Tensor | None:
        """Return attn_mask as a new leaf, if it has a gradient."""
        mask = self.options.get("attn_mask")
        return mask.detach().clone().requires_grad_(mask.is_floating_point()) if mask is not None else None

    def sinks(self) -> Tensor | None:
        """Return sinks as a new leaf."""
        sinks = self.options.get("sinks")
        return sinks.detach().clone().requires_grad_() if sinks is not None else None

    def lengths(self, n: int) -> dict[str, int]:
        """Return the arguments length and kv_length, if n ranks must pad."""
        chunks = self.multiple * n * (2 if self.layout == "zigzag" else 1)
        given = {"length": self.s, "kv_length": self.t or self.s}
        return given if any(x % chunks for x in given.values()) else {}

    def allowed(self) -> Tensor:
        """Return the mask, bool, broadcastable to (B, H, s, t)."""
        q, k = torch.arange(self.s)[:, None], torch.arange(self.t or self.s)
        options, true = self.options, torch.ones(self.s, self.t or self.s, dtype=torch.bool)
        allowed = (k <= q) if options.get("is_causal") else true
        if window := options.get("window"):
            allowed = allowed & ((q - k).abs() < window)
        if (documents := options.get("documents")) is not None:
            allowed = allowed & (documents[:, None, :, None] == documents[:, None, None])
        mask = options.get("attn_mask")
        return allowed & mask if mask is not None and mask.dtype == torch.bool else allowed


def dense(case: Case) -> list[Tensor]:
    """Return the single-device result and gradients of q, k, v (and of mask and sinks), in float64."""
    *leaves, grad = (x.double().requires_grad_() for x in case.operands())
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * case.options.get("scale", 1 / math.sqrt(DIM))
    mask, sinks = case.mask(), case.sinks()
    if mask is not None and mask.requires_grad:
        scores, leaves = scores + mask, [*leaves, mask]
    scores = scores.masked_fill(~case.allowed(), -math.inf)
    if sinks is not None:
        leaves = [*leaves, sinks]
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    out = scores.softmax(-1)[..., : k.shape[2]] @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.detach())]


def positions(case: Case, length: int, rank: int, n: int) -> Tensor:
    """Return the positions of a rank's rows; those of padding are past the end."""
    folds = 2 if case.layout == "zigzag" else 1
    unit = folds * n * case.multiple
    chunks = torch.arange(-(-length // unit) * unit).chunk(folds * n)
    return chunks[rank] if folds == 1 else torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])


def cut(case: Case, x: Tensor, rank: int, n: int) -> Tensor:
    """Return a rank's rows of a full x (B, H, S, D), with padding."""
    places, last = positions(case, x.shape[2], rank, n), x.shape[2] - 1
    rows = x[:, :, places.clamp(max=last)]
    return rows if case.fill is None else rows.masked_fill((places > last)[:, None], case.fill)


def joined(case: Case, shards: list[Tensor], length: int) -> Tensor:
    """Return the full tensor of all ranks' rows."""
    places = torch.cat([positions(case, length, rank, len(shards)) for rank in range(len(shards))])
    return torch.cat(shards, 2)[:, :, places.argsort()[:length]]


def attend(op: str, case: Case, mesh: Any, rank: int, n: int, transposed: bool = False) -> list[Tensor]:
    """Return this rank's result and gradients of q, k, v, and its part of those of mask and sinks."""
    *operands, grad = (cut(case, x, rank, n) for x in case.operands())
    padding = positions(case, case.s, rank, n)[:, None] >= case.s
    grad = grad.masked_fill(padding, 0)  # no loss uses the result of padding
    if transposed:
        operands = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
    leaves, mask, sinks = [x.requires_grad_() for x in operands], case.mask(), case.sinks()
    fn, extra = OPS[op]
    options = {**case.options, **extra, **case.lengths(n), "layout": case.layout}
    if mask is not None:
        options["attn_mask"] = mask
        leaves += [mask] if mask.requires_grad else []
    if sinks is not None:
        options["sinks"] = sinks
        leaves += [sinks]
    out = fn(*leaves[:3], mesh=mesh, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def whole(case: Case, found: list[list[Tensor]]) -> list[Tensor]:
    """Return the full result and gradients of all ranks, in the order of `dense`."""
    t = case.t or case.s
    lengths = (case.s, case.s, t, t)
    values = [joined(case, list(x), length) for x, length in zip(zip(*found), lengths)]
    return values + [torch.stack(x).sum(0) for x in list(zip(*found))[4:]]


def simulated(op: str, case: Case, n: int, transposed: bool = False) -> list[Tensor]:
    """Return the full result and gradients of n simulated ranks."""
    mesh = Ranks(n, SIMULATED_GROUP)
    return whole(case, run_ranks(n, lambda rank: attend(op, case, mesh, rank, n, transposed)))


@functools.cache
def ring_by_ulysses() -> DeviceMesh:
    """Return a 2 x 2 mesh; a collective call of all four ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))


MESHES = {
    "default group": lambda: None,
    "process group": ranks.group,
    "mesh of one axis": ranks.mesh,
    "ring x ulysses": ring_by_ulysses,
    "dp x sp, sliced": lambda: ranks.mesh2d(2, 2)["sp"],
    "dp x sp": lambda: ranks.mesh2d(2, 2),
}
