"""Tensor-parallel models of other shapes than those of parallel_models, some over the two axes of a mesh at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.parallel.parallel_models import VOCAB, Split, drawn
from torch import Tensor, nn

DIM, HEADS, HIDDEN, EXPERTS = 12, 6, 24, 6


class Model(nn.Module):
    """Embedding, blocks, head; `other`: a second axis for those that use one. What a block is, each class says."""

    layers = 1

    def __init__(self, tp: Split, other: Split | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tp, self.other = tp, other or tp
        self.embed, self.head = self.common(VOCAB, DIM), self.common(VOCAB, DIM)
        self.blocks = nn.ModuleList(nn.ParameterDict(self.weights()) for _ in range(self.layers))

    def common(self, *shape: int) -> nn.Parameter:
        return self.tp.part(drawn(*shape), None)

    def cut(self, wide: int, out: int, dim: int, over: Split | None = None) -> nn.Parameter:
        over = over or self.tp
        parameter = over.part(drawn(out, wide), dim)
        parameter.over = over
        return parameter

    def weights(self) -> dict[str, nn.Parameter]:
        columns = {name: self.cut(DIM, DIM, 0) for name in "qkv"}
        common = {name: self.common(DIM) for name in ("norm1", "norm2", "bias", "shift")}
        ends = {"gate": self.cut(DIM, HIDDEN, 0), "up": self.cut(DIM, HIDDEN, 0), "down": self.cut(HIDDEN, DIM, 1)}
        return {**columns, **common, **ends, "o": self.cut(DIM, DIM, 1)}

    def attend(self, h: Tensor, w: Any) -> Tensor:
        q, k, v = (F.linear(h, w[name]).unflatten(-1, (HEADS // self.tp.n, -1)).transpose(1, 2) for name in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(2), w["o"])

    def gated(self, h: Tensor, w: Any) -> Tensor:
        return F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (DIM,), weight)

    def block(self, x: Tensor, w: Any) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed)
        for w in self.blocks:
            x = self.block(x, w)
        return F.cross_entropy(F.linear(x, self.head)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class OneSum(Model):
    """Parallel attention and MLP, whose row-parallel results are added before one all_reduce."""

    layers = 2

    def block(self, x: Tensor, w: Any) -> Tensor:
        h = self.tp.f(F.layer_norm(x, (DIM,), w["norm1"], w["shift"]))
        return x + self.tp.g(self.attend(h, w) + self.gated(h, w)) + w["bias"]


class PostNorm(Model):
    """A norm after each residual; one head of keys and values, replicated on all ranks."""

    def weights(self) -> dict[str, nn.Parameter]:
        return {**super().weights(), "k": self.common(DIM // HEADS, DIM), "v": self.common(DIM // HEADS, DIM)}

    def attend(self, h: Tensor, w: Any) -> Tensor:
        common = {name: self.tp.f(w[name]) for name in "kv"}
        q = F.linear(h, w["q"]).unflatten(-1, (HEADS // self.tp.n, -1)).transpose(1, 2)
        k, v = (F.linear(h, common[name]).unsqueeze(1) for name in "kv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.linear(y.transpose(1, 2).flatten(2), w["o"])

    def block(self, x: Tensor, w: Any) -> Tensor:
        f, g = self.tp.f, self.tp.g
        x = F.layer_norm(x + g(self.attend(f(x), w)), (DIM,), w["norm1"], w["shift"])
        return self.norm(x + (g(self.gated(f(x), w)) + w["bias"]), w["norm2"])


class Flat(Model):
    """Hidden states (tokens, features) with sequences before batches, and a norm before and after each layer."""

    def attend(self, h: Tensor, w: Any) -> Tensor:
        heads = self.batch * HEADS // self.tp.n
        q, k, v = (F.linear(h, w[name]).view(-1, heads, DIM // HEADS).transpose(0, 1) for name in "qkv")
        scores = q @ k.transpose(1, 2) / (DIM // HEADS) ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return F.linear(y.transpose(0, 1).reshape(h.shape[0], -1), w["o"])

    def block(self, x: Tensor, w: Any) -> Tensor:
        f, g = self.tp.f, self.tp.g
        x = x + self.norm(g(self.attend(f(self.norm(x, w["norm1"])), w)), w["norm2"])
        return x + self.norm(g(self.gated(f(self.norm(x, w["shift"])), w)), w["bias"])

    def forward(self, ids: Tensor) -> Tensor:
        self.batch, rows = ids.shape[0], ids.t().flatten()
        x = F.embedding(rows, self.embed)
        for w in self.blocks:
            x = self.block(x, w)
        return F.cross_entropy(F.linear(x, self.head), rows)


class TwoAxes(Model):
    """Attention is cut over one axis of the mesh, the MLP over the other."""

    def weights(self) -> dict[str, nn.Parameter]:
        ends = {name: self.cut(DIM, HIDDEN, 0, self.other) for name in ("gate", "up")}
        return {**super().weights(), **ends, "down": self.cut(HIDDEN, DIM, 1, self.other)}

    def block(self, x: Tensor, w: Any) -> Tensor:
        x = x + self.tp.g(self.attend(self.tp.f(self.norm(x, w["norm1"])), w))
        h = self.other.f(F.layer_norm(x, (DIM,), w["norm2"], w["shift"]))
        return x + self.other.g(self.gated(h, w)) + w["bias"]


class Mixture(Model):
    """Experts cut over one axis, and each expert's features over the other: two sums in sequence."""

    def experts(self, *shape: int, dim: int) -> nn.Parameter:
        mine = drawn(EXPERTS, *shape).chunk(self.other.n, 0)[self.other.rank]
        parameter = self.tp.part(mine, dim)
        parameter.over, parameter.outside = self.tp, self.other
        return parameter

    def weights(self) -> dict[str, nn.Parameter]:
        own = {"up": self.experts(HIDDEN, DIM, dim=1), "down": self.experts(DIM, HIDDEN, dim=2)}
        return {**super().weights(), **own, "router": self.common(EXPERTS, DIM)}

    def block(self, x: Tensor, w: Any) -> Tensor:
        tp, ep = self.tp, self.other
        x = x + tp.g(self.attend(tp.f(self.norm(x, w["norm1"])), w))
        h = self.norm(x, w["norm2"])
        gates = F.linear(h, w["router"]).softmax(-1)
        mine, h = ep.f(tp.f(gates)).chunk(ep.n, -1)[ep.rank], ep.f(tp.f(h))
        y = torch.einsum("bld,ehd->bleh", h, w["up"]).relu()
        return x + ep.g(tp.g(torch.einsum("bleh,edh,ble->bld", y, w["down"], mine))) + w["bias"]
