"""Define the arguments of the attention operators other than q, k and v, as dataclasses.

The fields are an operator's arguments in their order. `schema()` returns them as text, `of` parses them from an
operator's positional arguments, and `to_flat()` returns them in order.

    LocalArgs   of ``sp::attend`` and ``sp::attend_backward``: this rank's queries over one block of keys
    ShardArgs   of the operators over shards, in ``attention_ops.py``

    frame          how the sequence dim of a tensor is sharded over n ranks (``base/frames.py``)
    span           which rows of the sequence a local tensor contains, as six ints (``masks/spans.py``)
    neighborhood   `stride` adjacent ranks that exchange heads for queries: each then has all of their queries, and
                   1 / stride of the heads. With a stride of 1 there is no exchange
    padded rows    rows that a shard stores beyond the sequence; their values repeat the nearest valid row
    zigzag         the layout in which rank r stores chunks r and 2n - 1 - r of 2n, which balances causal attention
    tables         (of pieces) bounds of the vectors on the host, from which blocks of pairs are planned
                   (of a score function) tensors that the function indexes; floating-point ones are learned
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, is_padded, nearest_rows, own_positions
from sp_compile.lowering.masks.spans import Span, shard_span

HEADS, SEQUENCE = 1, 2  # dims of q, k and v
_SCHEMA_TYPES = {  # types of fields in an operator's schema, where they differ from Python's
    "Tensor | None": "Tensor?",
    "list[Tensor]": "Tensor[]",
    "list[int]": "SymInt[]",
    "Span": "SymInt[]",
    "FrameArg": "SymInt[]",
    "float | None": "float?",
}


@dataclass(frozen=True)
class AttentionArgs:
    """Arguments that determine the softmax weights; all attention operators share them."""

    mask: Tensor | None  # tensor mask: bool or additive, (B | 1, H | 1, S | 1, T | 1)
    rows: list[Tensor]  # query vectors that the predicate reads, (B | 1, S), replicated
    cols: list[Tensor]  # key vectors that the predicate reads, (B | 1, T), replicated
    pieces: list[Tensor]  # tables of rows, then of cols (see ``masks/pieces.py``); [] if they do not exist yet
    sizes: list[int]  # sizes that the predicate reads
    predicate: str  # text of the mask predicate (see ``masks/predicate.py``), "" if every query attends to all keys
    seed: Tensor | None  # Dropout seed, int64 (). One seed drops the same weights on any number of ranks.
    dropout_p: float  # probability to drop a weight
    scale: float | None  # factor of the scores
    score: str  # name of the score function, applied before masks (see ``masks/score.py``), "" for none
    heads: list[Tensor]  # constant vectors (H,) that the score function reads, one number per query head
    tables: list[Tensor]  # tables that the score function indexes, replicated; not together with a mask

    @classmethod
    def schema(cls) -> str:
        """Return the arguments as the text of an operator schema, for the registration of the operators."""
        return ", ".join(f"{_SCHEMA_TYPES.get(str(f.type), f.type)} {f.name}" for f in fields(cls))

    @classmethod
    def of(cls, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Parse the fields of this class from an operator's positional arguments.

        Returns:
            The dataclass, and the arguments after its fields. The latter may be fewer than in the schema, as the
            dispatcher omits trailing arguments with default values.
        """
        names = cls.__match_args__
        return cls(*args[: len(names)]), args[len(names) :]

    def to_flat(self) -> tuple[Any, ...]:
        """Return the fields in order, as positional arguments of the operator."""
        return tuple(getattr(self, name) for name in self.__match_args__)

    def make_pieces(self) -> list[Tensor]:
        """Return one table for each vector of rows and cols: bounds of its values on the host (``masks/pieces.py``).

        The plan of an attention reads them to skip blocks. Tables that do not exist yet are created, which synchronizes
        with the device. A vector that is passed several times gets one table.
        """
        vectors = [*self.rows, *self.cols]
        if self.pieces or not vectors:
            return self.pieces
        distinct = {id(x): x for x in vectors}  # tensors compare elementwise, so their ids are the keys
        tables = dict(zip(distinct, torch.ops.sp.pieces(list(distinct.values())), strict=True))
        return [tables[id(x)] for x in vectors]


@dataclass(frozen=True)
class LocalArgs(AttentionArgs):
    """Arguments of attention over local queries and local keys: of one block of keys, with its span."""

    scale: float  # factor of the scores
    q_span: Span  # span of the local queries (see ``masks/spans.py``)
    k_span: Span  # span of the local keys
    split_heads: int  # number of ranks in a neighborhood, each of which has 1 / split_heads of the heads
    group: str  # process group of the spans

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, k_span: Span, after: list[Tensor] | None = None, filled: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Compute attention of the local queries over some keys, whose result is merged with that of other keys.

        Args:
            q: (B, H, s, D).
            k: (B, Hkv, t, D).
            v: (B, Hkv, t, E).
            k_span: The span of the keys: which rows of the sequence they are (``masks/spans.py``).
            after: Tensors that must exist before the operator runs, such as the shift of the next keys.
            filled: As of ``sp::attend``: False if ``merge_into`` or ``merge_to`` merges the result as a block.

        Returns:
            out (B, H, s, E) and lse (B, H, s).
        """
        return torch.ops.sp.attend(q, k, v, *replace(self, k_span=k_span).to_flat(), after, filled)

    def grads(
        self, upstream: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, k_span: Span, mask_grad: bool,
        after: list[Tensor] | None = None, packed: str = "",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the contribution of some keys to the gradients: dq, dk, dv, and that of the mask or of the tables.

        Those of tables, the tensors that a score function indexes, are concatenated and flat.

        Args:
            upstream: (cotangent of out, out, lse), over all keys.
            q: (B, H, s, D).
            k: (B, Hkv, t, D).
            v: (B, Hkv, t, E).
            k_span: The span of the keys, as in `attend`.
            mask_grad: Whether the mask or the tables need a gradient.
            after: Tensors that must exist before the operator runs.
            packed: "", or a layout of ``sp::attend_backward`` for one tensor with dk and dv, which is returned as dk.
        """
        grad, out, lse = upstream
        args = replace(self, k_span=k_span).to_flat()
        return torch.ops.sp.attend_backward(grad, q, k, v, out, lse, *args, mask_grad, after, packed)

    def grad_parts(
        self, upstream: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, k_span: Span, mask_grad: bool,
        narrow: bool, after: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return ``sp::attend_backward_parts`` over some keys: dq, dk, dv, q_rows, k_rows and dmask.

        Rows without a gradient are not filled: q_rows marks the rows of dq that are written, k_rows those of dk and dv
        (bool, on the host). Arguments are those of `grads`, and ``narrow``: True if dq, dk and dv have the dtype of q,
        False for float32 gradients of half types.
        """
        grad, out, lse = upstream
        args = replace(self, k_span=k_span).to_flat()
        return torch.ops.sp.attend_backward_parts(grad, q, k, v, out, lse, *args, mask_grad, narrow, after)

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors in the fields, in order, so that autograd can save them; `with_tensors` restores them."""
        return [self.mask, self.seed, *self.rows, *self.cols, *self.pieces, *self.heads, *self.tables]

    def with_tensors(self, tensors: list[Tensor | None]) -> LocalArgs:
        """Return a copy with these tensors in place of `tensors()`, in the same order.

        An autograd function saves the tensors separately, and keeps a copy of the arguments in which they are None.
        """
        mask, seed, *vectors = tensors
        names, remaining = ("rows", "cols", "pieces", "heads", "tables"), iter(vectors)
        lists: dict[str, Any] = {name: list(islice(remaining, len(getattr(self, name)))) for name in names}
        return replace(self, mask=mask, seed=seed, **lists)

    def num_learned(self) -> int:
        """Return the number of elements of the learned (floating-point) tables.

        ``sp::attend_backward`` returns the gradients of these tables as one flat tensor of this size.
        """
        return sum(x.numel() for x in self.tables if x.is_floating_point())

    def split_tables(self, learned: Tensor) -> list[Tensor | None]:
        """Return a view of the flat gradient for each table, in its shape; None for a table of integers.

        Args:
            learned: (num_learned(),), the concatenated gradients of the floating-point tables.
        """
        sizes = [x.numel() for x in self.tables if x.is_floating_point()]
        parts = iter(learned.split(sizes) if sizes else ())
        return [next(parts).view(x.shape) if x.is_floating_point() else None for x in self.tables]

    def table_grads(self, learned: Tensor) -> list[Tensor | None]:
        """Return the gradient of each table in its dtype, for autograd; None for a table of integers.

        Args:
            learned: (num_learned(),), the concatenated gradients of the floating-point tables.
        """
        return [None if x is None else x.to(table.dtype) for x, table in zip(self.split_tables(learned), self.tables)]


@dataclass(frozen=True)
class ShardArgs(AttentionArgs):
    """Arguments of attention over sequence shards of n ranks.

    The mask is replicated and its cotangent is partial. If there is dropout and the seed is None, a seed is drawn.
    """

    sinks: Tensor | None  # (H,), a logit per query head that belongs to no key; replicated, with a partial cotangent
    lse: bool  # whether each row of the result ends with its log-sum-exp; not together with sinks
    q_frame: FrameArg  # placement of the queries' sequence dim
    k_frame: FrameArg  # placement of the keys' sequence dim; [] if keys are replicated
    n: int  # number of ranks
    group: str  # name of the process group
    balance: bool  # whether the operator exchanges contiguous shards for zigzag ones, and back

    def local(self, q: Tensor, stride: int) -> LocalArgs:
        """Return the arguments of this rank's part of the attention: with its heads and its rows of the mask.

        If adjacent ranks (a neighborhood) exchange heads for rows, these are the heads and rows after the exchange.
        ``k_span`` is empty here: `LocalArgs.attend` and `LocalArgs.grads` set it.

        Args:
            q: (B, H, s, D), this rank's queries; only its device and width are read.
            stride: The number of ranks of a neighborhood; 1 without an exchange of heads.
        """
        seed = self.seed
        if self.dropout_p and seed is None:
            seed = torch.randint(1 << 62, (), dtype=torch.int64, device=q.device)
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        heads = [self._local_heads(x, dim=0, stride=stride) for x in self.heads]
        return LocalArgs(
            mask=self._local_mask(stride), rows=list(self.rows), cols=list(self.cols), pieces=self.make_pieces(),
            sizes=list(self.sizes), predicate=self.predicate, seed=seed, dropout_p=self.dropout_p, scale=scale,
            score=self.score, heads=heads, tables=list(self.tables),
            q_span=shard_span(self.q_frame, self.n, stride), k_span=[], split_heads=stride, group=self.group,
        )  # fmt: skip

    def local_sinks(self, stride: int) -> Tensor | None:
        """Return the sinks of this rank's heads if ``stride`` adjacent ranks split the heads; None without sinks."""
        return None if self.sinks is None else self._local_heads(self.sinks, dim=0, stride=stride)

    def _local_heads(self, x: Tensor, dim: int, stride: int) -> Tensor:
        """Return this rank's heads: one of ``stride`` equal parts of x along ``dim``.

        Adjacent ranks have the parts in order. The rank is read at run time, so that the graph is equal on every rank.
        """
        if stride == 1:
            return x
        heads = x.shape[dim] // stride
        first = torch.ops.sp.rank(self.group, x.device) % stride * heads
        return x.index_select(dim, first + torch.arange(heads, device=x.device))

    def _local_mask(self, stride: int) -> Tensor | None:
        """Return the rows of the mask for the queries that this rank computes, and its heads; None without a mask.

        If ``stride`` adjacent ranks exchange heads for queries, these are the queries of all of them. Dims of size 1
        broadcast and remain.
        """
        mask, n, group = self.mask, self.n, self.group
        if mask is None or (n == 1 and not is_padded(self.q_frame, 1)):
            return mask
        if mask.shape[SEQUENCE] != 1:
            positions = own_positions(self.q_frame, n, group, mask.device, stride)
            # Padded rows repeat the nearest valid row of the mask.
            mask = mask.index_select(SEQUENCE, nearest_rows(positions, self.q_frame, inner=1))
        return mask if mask.shape[HEADS] == 1 else self._local_heads(mask, HEADS, stride)

    def to_zigzag(self) -> ShardArgs:
        """Return a copy for operands in the zigzag layout (2 chunks per rank), which need no exchange (``balance``)."""
        # The fifth entry of a frame, 2, selects the zigzag layout. The frame of replicated keys, [], remains.
        q_frame, k_frame = ([*frame[:4], 2] if len(frame) else frame for frame in (self.q_frame, self.k_frame))
        return replace(self, q_frame=q_frame, k_frame=k_frame, balance=False)
