"""Tensor-parallel models whose parts resemble replicated weights, by their values or by the program."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.parallel.parallel_models import VOCAB, Decoder, Linear, Norm, Settings, Split, drawn
from torch import Tensor, nn

DIM, HIDDEN = 12, 24


class Stack(nn.Module):
    """An embedding, MLP blocks and the same embedding as the head; each variant defines its blocks."""

    def __init__(self, tp: Split, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tp, self.embed = tp, tp.part(drawn(VOCAB, DIM), None)
        self.norms = nn.ModuleList(Norm(tp, DIM, "rms") for _ in range(blocks + 1))
        self.weights = nn.ModuleList(nn.ParameterDict(self.drawn()) for _ in range(blocks))

    def drawn(self) -> dict[str, nn.Parameter]:
        up, down = drawn(HIDDEN, DIM), drawn(DIM, HIDDEN)
        return {"up": self.tp.part(up, 0), "down": self.tp.part(down, 1)}

    def block(self, h: Tensor, w: Any) -> Tensor:
        return self.tp.g(F.linear(F.gelu(F.linear(self.tp.f(h), w["up"])), w["down"]))

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.embed)
        for norm, w in zip(self.norms, self.weights):
            x = x + self.block(norm(x), w)
        logits = F.linear(self.norms[-1](x), self.embed)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LoRA(Stack):
    """Frozen linears; a replicated A with a cut B of zeros, and a cut A with a replicated B of zeros."""

    def drawn(self) -> dict[str, nn.Parameter]:
        frozen = super().drawn()
        for weight in frozen.values():
            weight.requires_grad = False
        zeros, part = (torch.zeros(size, 2, dtype=torch.float64) for size in (HIDDEN, DIM)), self.tp.part
        up = {"up_a": part(drawn(2, DIM), None), "up_b": part(next(zeros), 0)}
        return {**frozen, **up, "down_a": part(drawn(2, HIDDEN), 1), "down_b": part(next(zeros), None)}

    def block(self, h: Tensor, w: Any) -> Tensor:
        low = F.linear(self.tp.f(F.linear(h, w["up_a"])), w["up_b"])
        y = F.gelu(F.linear(self.tp.f(h), w["up"]) + low)
        return self.tp.g(F.linear(y, w["down"])) + F.linear(self.tp.g(F.linear(y, w["down_a"])), w["down_b"])


class GateOfZeros(Stack):
    """A cut gate that is zero on all ranks, until the first step."""

    def drawn(self) -> dict[str, nn.Parameter]:
        return {**super().drawn(), "gate": self.tp.part(torch.zeros(HIDDEN, DIM, dtype=torch.float64), 0)}

    def block(self, h: Tensor, w: Any) -> Tensor:
        h = self.tp.f(h)
        return self.tp.g(F.linear((1 + F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"]))


class EqualParts(Stack):
    """Every rank draws its parts from one seed, so they are equal."""

    def drawn(self) -> dict[str, nn.Parameter]:
        own, size = Split(), HIDDEN // self.tp.n
        return {"up": own.part(drawn(size, DIM), None), "down": own.part(drawn(DIM, size), None)}


class ByRank(EqualParts):
    """Equal parts that the program multiplies by the rank, a constant in its code."""

    def block(self, h: Tensor, w: Any) -> Tensor:
        return super().block(h, {"up": w["up"] * (self.tp.rank + 1.0), "down": w["down"]})


class BiasOnTheFirst(EqualParts):
    """The first rank adds a bias before the sum, so its program differs from the others."""

    def drawn(self) -> dict[str, nn.Parameter]:
        return {**super().drawn(), "bias": Split().part(drawn(DIM), None)}

    def block(self, h: Tensor, w: Any) -> Tensor:
        y = F.linear(F.gelu(F.linear(self.tp.f(h), w["up"])), w["down"])
        return self.tp.g(y + w["bias"] if self.tp.rank == 0 else y)


class Uneven(Stack):
    """Parts of 13 and 12 features."""

    def drawn(self) -> dict[str, nn.Parameter]:
        up, down, own = drawn(25, DIM), drawn(DIM, 25), Split()
        n, rank = self.tp.n, self.tp.rank
        return {"up": own.part(up.tensor_split(n)[rank], None), "down": own.part(down.tensor_split(n, 1)[rank], None)}


class OffsetInABuffer(Decoder):
    """A cut embedding whose first row is a buffer of no dims."""

    def __init__(self, tp: Split) -> None:
        torch.manual_seed(3)
        super().__init__(tp, Settings(head="vocab"))
        self.register_buffer("start", torch.tensor(tp.rank * (VOCAB // tp.n)))

    def embedded(self, ids: Tensor) -> Tensor:
        mine, size = ids - self.start, VOCAB // self.tp.n
        inside = (mine >= 0) & (mine < size)
        return self.tp.g(F.embedding(torch.where(inside, mine, 0), self.embed) * inside.unsqueeze(-1))


class Hidden(nn.Module):
    """A block without a loss: its result is replicated, and the caller passes its gradient."""

    def __init__(self, tp: Split) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tp, self.norm, self.after = tp, Norm(tp, DIM, "rms"), Norm(tp, DIM, "rms")
        self.up, self.down = Linear(tp, DIM, HIDDEN, 0), Linear(tp, HIDDEN, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.tp.f(self.norm(x)))))
        return x + self.down(F.gelu(self.up(self.tp.f(self.after(x)))))
