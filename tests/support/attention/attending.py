"""Attention problems and their solution by dense arithmetic in float64."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.predicate import evaluate_mask

PREDICATES = {
    "none": "",
    "causal": "k <= q",
    "shifted": "k <= q + n1",
    "window": "(k <= q) & (q - k < 5)",
    "prefix": "(k < n0) | (k <= q)",
    "padding": "Ne(col0, 0)",
    "documents": "Eq(row1, col1)",
    "all": "(k <= q) & Eq(row1, col1) & Ne(col0, 0)",
    "sink": "(k <= q) & ((k < 2) | (q - k < 4))",
    "chunks": "Eq(floor(q/4), floor(k/4)) & (k <= q)",
    "nothing": "k < 0",
}
SIZES = [3, 2]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape)), dtype=dtype)


def pieces_of(x: Tensor) -> Pieces:
    """Return the pieces of an int or bool vector (B, S)."""
    return Pieces.of(torch.ops.sp.pieces([x])[0])


def packed(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the document of each position and the position in the document, int64 (1, S) each."""
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return documents[None], torch.cat([torch.arange(length) for length in lengths])[None]


class Problem:
    """Operands of the full length, vectors, and the dense mask of a predicate."""

    def __init__(
        self, name: str, q_len: int, k_len: int, heads: int = 4, key_heads: int = 4, width: int = 8, v_width: int = 8
    ) -> None:
        self.predicate = PREDICATES[name]
        self.q, self.k = randn(2, heads, q_len, width, seed=1), randn(2, key_heads, k_len, width, seed=2)
        self.v, self.grad = (randn(2, key_heads, k_len, v_width, seed=3), randn(2, heads, q_len, v_width, seed=4))
        pad = torch.ones(2, k_len, dtype=torch.bool)
        pad[0, :2] = pad[1, -3:] = False
        length = max(q_len, k_len)
        documents = torch.bucketize(torch.arange(length), torch.tensor([length // 3, 2 * length // 3]))[None]
        self.rows = [torch.zeros(1, q_len, dtype=torch.long), documents[:, :q_len]]
        self.cols = [pad, documents[:, :k_len]]

    def allowed(self) -> Tensor:
        """Return the mask, bool (2, 1, Q, K)."""
        q_len, k_len = self.q.shape[2], self.k.shape[2]
        values: dict[str, Tensor | int] = {"q": torch.arange(q_len)[:, None], "k": torch.arange(k_len)}
        values |= {f"row{i}": x[:, None, :, None] for i, x in enumerate(self.rows)}
        values |= {f"col{i}": x[:, None, None, :].long() for i, x in enumerate(self.cols)}
        values |= {f"n{i}": size for i, size in enumerate(SIZES)}
        mask = torch.ones(2, 1, q_len, k_len, dtype=torch.bool)
        return mask & torch.as_tensor(evaluate_mask(self.predicate, values))

    def arguments(self, q_span: Sequence[int], k_span: Sequence[int], group: str = "", **other: Any) -> list[Any]:
        """Return the operators' arguments from `mask` to `group`."""
        given = {
            "mask": None,
            "seed": None,
            "dropout_p": 0.0,
            "scale": 0.3,
            "split_heads": 1,
            "score": "",
            "heads": [],
            "tables": [],
        } | other
        return [
            given["mask"], self.rows, self.cols, [], SIZES, self.predicate, given["seed"], given["dropout_p"],
            given["scale"], given["score"], given["heads"], given["tables"], q_span, k_span,
            given["split_heads"], group,
        ]  # fmt: skip


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float = 0.3,
    bias: Tensor | None = None,
    dropout: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of dense attention; 0 and -inf for rows without allowed keys."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if bias is not None:
        allowed = allowed & (bias != -math.inf)
        scores = scores + bias.masked_fill(bias == -math.inf, 0.0)
    scores = scores.masked_fill(~allowed, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(lse == -math.inf, 0.0, 1.0)[..., None] * torch.exp(
        scores - torch.where(lse == -math.inf, 0.0, lse)[..., None]
    )
    return (weights if dropout is None else weights * dropout) @ v, lse


def leaves(*xs: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in xs]


def row_indices(span: Sequence[int], rank: int) -> list[int | None]:
    """Return the indices of a rank's rows by the definition of spans; None is padding."""
    n, folds, stride, shift, start, length = span
    chunk = -(-(start + length) // (n * folds))
    r = (rank // stride - shift) % n
    positions = [*range(r * chunk, (r + 1) * chunk)]
    if folds == 2:
        positions += range((2 * n - 1 - r) * chunk, (2 * n - r) * chunk)
    return [p - start if 0 <= p - start < length else None for p in positions]


def shard(x: Tensor, span: Sequence[int], rank: int) -> Tensor:
    """Return a rank's rows of `x`, with copies of row 0 as padding."""
    return x.index_select(2, torch.tensor([i or 0 for i in row_indices(span, rank)]))
