"""Attention's arguments besides q, k and v: one dataclass for an operator's schema, body, fake and backward.

The fields are an operator's arguments in their order: `schema()` is their text, `of` reads them from an operator's
positional arguments, and `flat()` gives them back.

    LocalArgs   of ``sp::attend`` and ``sp::attend_backward``: this rank's queries over one block of keys
    ShardArgs   of the operators on shards, in ``ops.py``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, is_padded, nearest_rows, own_positions
from sp_compile.lowering.masks.spans import Span, shard_span

HEADS, SEQUENCE = 1, 2
_SCHEMA_TYPES = {
    "Tensor | None": "Tensor?",
    "list[Tensor]": "Tensor[]",
    "list[int]": "SymInt[]",
    "Span": "SymInt[]",
    "FrameArg": "SymInt[]",
    "float | None": "float?",
}


@dataclass(frozen=True)
class AttentionArgs:
    """Which weights a softmax of scaled scores gives.

    mask        data: bool or additive, (B|1, H|1, S|1, T|1)
    rows, cols  vectors that the predicate reads, (B|1, S) and (B|1, T), whole on every rank
    pieces      their tables, of rows and then of cols (see ``masks/pieces.py``); [] if nobody has made them yet
    sizes       numbers that it reads
    predicate   which keys a query may attend to (see ``masks/predicate.py``), "" for all
    seed        of dropout, int64 (). One seed drops the same weights on any number of ranks
    score       what becomes of a scaled score before masks (see ``masks/score.py``), "" for nothing
    heads       vectors that it reads, (H,), a number for each query head; constants
    tables      tables of a score program (``masks/score_program.py``), replicated; not with a mask
    """

    mask: Tensor | None
    rows: list[Tensor]
    cols: list[Tensor]
    pieces: list[Tensor]
    sizes: list[int]
    predicate: str
    seed: Tensor | None
    dropout_p: float
    scale: float | None
    score: str
    heads: list[Tensor]
    tables: list[Tensor]

    @classmethod
    def schema(cls) -> str:
        """The arguments as an operator's schema has them."""
        return ", ".join(f"{_SCHEMA_TYPES.get(str(f.type), f.type)} {f.name}" for f in fields(cls))

    @classmethod
    def of(cls, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """These arguments, and what an operator has behind them; the dispatcher leaves out what is the default."""
        names = cls.__match_args__
        return cls(*args[: len(names)]), args[len(names) :]

    def to_flat(self) -> tuple[Any, ...]:
        """The arguments in an operator's order."""
        return tuple(getattr(self, name) for name in self.__match_args__)

    def make_pieces(self) -> list[Tensor]:
        """The tables of rows and cols: those that are given, or made now, which waits for the device."""
        vectors = [*self.rows, *self.cols]
        if self.pieces or not vectors:
            return self.pieces
        distinct = list({id(x): x for x in vectors}.values())
        found = dict(zip(map(id, distinct), torch.ops.sp.pieces(distinct), strict=True))
        return [found[id(x)] for x in vectors]


@dataclass(frozen=True)
class LocalArgs(AttentionArgs):
    """Of the rows that are here: `q_span` and `k_span` tell which (see ``masks/spans.py``).

    split_heads: the heads here are every `split_heads`-th rank's share. group: the ranks that spans speak of.
    """

    scale: float
    q_span: Span
    k_span: Span
    split_heads: int
    group: str

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, k_span: Span, after: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of local queries over these keys alone: (B, H, s, E), and its lse (B, H, s)."""
        return torch.ops.sp.attend(q, k, v, *replace(self, k_span=k_span).to_flat(), after)

    def grads(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_span: Span,
        mask_grad: bool,
        after: list[Tensor] | None = None,
        packed: str = "",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv (and of the mask, or of the tables) from these keys.

        given: the cotangent, and the row's global out and lse.
        packed: dk and dv as one, in the place of dk, as they are to be sent: "last", "stack" or "rows".
        """
        grad, out, lse = given
        args = replace(self, k_span=k_span).to_flat()
        return torch.ops.sp.attend_backward(grad, q, k, v, out, lse, *args, mask_grad, after, packed)

    def tensors(self) -> list[Tensor | None]:
        """What a backward must save."""
        return [self.mask, self.seed, *self.rows, *self.cols, *self.pieces, *self.heads, *self.tables]

    def with_tensors(self, tensors: list[Tensor | None]) -> LocalArgs:
        """The same with other `tensors()`."""
        mask, seed, *vectors = tensors
        lengths = [len(x) for x in (self.rows, self.cols, self.pieces, self.heads, self.tables)]
        rows, cols, pieces, heads, tables = ([vectors.pop(0) for _ in range(length)] for length in lengths)
        return replace(self, mask=mask, seed=seed, rows=rows, cols=cols, pieces=pieces, heads=heads, tables=tables)

    def num_learned(self) -> int:
        """How many numbers of its tables are floats, which may need gradients: these come as one, in their order."""
        return sum(x.numel() for x in self.tables if x.is_floating_point())

    def split_tables(self, learned: Tensor) -> list[Tensor | None]:
        """For each table the view of its part, in its shape; None for those that are no floats."""
        found: list[Tensor | None] = []
        for x in self.tables:
            if not x.is_floating_point():
                found.append(None)
                continue
            found.append(learned[: x.numel()].view(x.shape))
            learned = learned[x.numel() :]
        return found

    def table_grads(self, learned: Tensor) -> list[Tensor | None]:
        """The same parts in the tables' dtypes."""
        return [None if x is None else x.to(table.dtype) for x, table in zip(self.split_tables(learned), self.tables)]


@dataclass(frozen=True)
class ShardArgs(AttentionArgs):
    """Of shards of n ranks. The mask is whole on every rank and its cotangent partial; a seed of None is drawn.

    sinks: (H,), a logit of each query head that no key has, whole on every rank and its cotangent partial.
    lse: whether each row of the result ends with its log-sum-exp; not with sinks.
    q_frame, k_frame: where the shards lie; a k_frame [] for keys that are whole. scale: 1 / sqrt(D) if None.
    balance: move contiguous shards to the zigzag layout and back, inside the operator.
    """

    sinks: Tensor | None
    lse: bool
    q_frame: FrameArg
    k_frame: FrameArg
    n: int
    group: str
    balance: bool

    def local(self, q: Tensor, stride: int) -> LocalArgs:
        """What every block of this rank needs, for the queries of its neighbourhood of `stride` ranks."""
        seed = self.seed
        if self.dropout_p and seed is None:
            seed = torch.randint(1 << 62, (), dtype=torch.int64, device=q.device)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        lookups = list(self.rows), list(self.cols), self.make_pieces(), list(self.sizes), self.predicate
        rows = shard_span(self.q_frame, self.n, stride)
        scores = seed, self.dropout_p, scale, self.score, [self._local_heads(x, 0, stride) for x in self.heads]
        return LocalArgs(self._local_mask(stride), *lookups, *scores, list(self.tables), rows, [], stride, self.group)

    def local_sinks(self, stride: int) -> Tensor | None:
        """Those of the heads that this rank has among its `stride` neighbours."""
        return None if self.sinks is None else self._local_heads(self.sinks, 0, stride)

    def _local_heads(self, x: Tensor, dim: int, stride: int) -> Tensor:
        """The share of the heads that this rank has among its `stride` neighbours."""
        if stride == 1:
            return x
        heads = x.shape[dim] // stride
        first = torch.ops.sp.rank(self.group, x.device) % stride * heads
        return x.index_select(dim, first + torch.arange(heads, device=x.device))

    def _local_mask(self, stride: int) -> Tensor | None:
        """The mask's rows of the neighbourhood's queries and its heads of this rank."""
        mask, n, group = self.mask, self.n, self.group
        if mask is None or (n == 1 and not is_padded(self.q_frame, 1)):
            return mask
        if mask.shape[SEQUENCE] != 1:
            positions = own_positions(self.q_frame, n, group, mask.device, stride)
            mask = mask.index_select(SEQUENCE, nearest_rows(positions, self.q_frame, 1))
        return mask if mask.shape[HEADS] == 1 else self._local_heads(mask, HEADS, stride)

    def to_zigzag(self) -> ShardArgs:
        """The same in the zigzag layout."""
        q_frame, k_frame = ([*frame[:4], 2] if len(frame) else frame for frame in (self.q_frame, self.k_frame))
        return replace(self, q_frame=q_frame, k_frame=k_frame, balance=False)
