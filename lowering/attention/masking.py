"""Build the masks of attention blocks from an operator's arguments, for local queries and keys.

A ``CallMask`` describes the mask of one attention call. It returns the ``KernelArgs`` of each block: the part of the
mask tensor, the evaluated predicate ("(k <= q) & Eq(row0, col0)"), the dropout mask and the inputs of a score function.

Dropout selects weights by a hash of their global position, not by a stream of random numbers. The backward therefore
computes the mask again instead of saving it. Every partition of a sequence or its heads over ranks and blocks drops the
same weights.

    predicate     the text of a mask. Its symbols: q and k (indices of the query and the key in the sequence), b (the
                  batch entry), row<i> and col<i> (vectors of the queries and of the keys), n<i> (sizes)
    conditions    the parts of a predicate that remain to be evaluated in a block; the plan has settled the others
    tables        (of pieces) bounds of the vectors on the host, for the plan; (of a score function) tensors it indexes
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.collectives.checksums import HASH_FACTORS, mix_bits
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.lowering.masks import predicate as language
from sp_compile.lowering.masks import score as scores
from sp_compile.lowering.masks.block_plan import plan_blocks
from sp_compile.lowering.masks.blocks import Block, BlockPlan, Kind, PackedCall
from sp_compile.lowering.masks.pieces import Pieces
from sp_compile.lowering.masks.predicate import is_query_symbol
from sp_compile.lowering.masks.spans import Rows, index_intervals, local_valid_rows, row_indices, take_rows
from sp_compile.lowering.triton.flex.flex_texts import PairTexts

from .kernel_args import Kernel, KernelArgs, ScoreCall
from .op_args import LocalArgs
from .packed import PackedSequences

_HASH_HALF_FACTORS = (-0x7A143589, -0x3D4D51C3)  # odd, with well mixed bits, as signed integers: products of int32 wrap


class Dropout(NamedTuple):
    """Attention dropout of some batch entries and heads."""

    seed: Tensor  # int64 (), of the hash
    p: float  # probability to drop a weight
    batch: Tensor  # int64 (B,), indices of the batch entries
    heads: Tensor  # int64 (H,), global indices of the heads

    @staticmethod
    def of(q: Tensor, args: LocalArgs) -> "Dropout | None":
        """Return the dropout for this rank's heads of q (B, H, Q, D), or None if nothing is dropped.

        Adjacent ranks, `args.split_heads` of them, may split the heads: of 8 heads on 4 ranks with split_heads=2, ranks
        0 and 2 have the heads 0 to 3, ranks 1 and 3 the heads 4 to 7.

        Raises:
            SpError: If there is no seed.
        """
        if args.dropout_p <= 0:
            return None
        if args.seed is None:
            raise SpError("SP431", f"seed of sp::attend: expected a tensor for dropout_p={args.dropout_p}, got None.")
        batch, heads = (torch.arange(size, device=q.device) for size in q.shape[:2])
        if args.split_heads > 1:
            heads += current_communicator().rank(args.group) % args.split_heads * q.shape[1]
        return Dropout(args.seed, args.dropout_p, batch, heads)

    def keep_mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the mask of kept weights, bool (B, H, Q, K), True with probability 1 - p.

        It is a hash of the global position of each weight, so that the backward computes the same mask again, and each
        block and rank its part of it.

        Args:
            queries: int64 (Q,), global indices of the queries.
            keys: int64 (K,), global indices of the keys.
        """
        # One 64-bit hash per query, of the seed, batch entry, head and query: (B, H, Q, 1).
        state = mix_bits(self.seed + self.batch * HASH_FACTORS[0])[:, None]
        state = mix_bits(state + self.heads * HASH_FACTORS[1])[:, :, None]
        state = mix_bits(state + queries * HASH_FACTORS[2])[:, :, :, None]
        first, second = _split_int64(state)
        # One 32-bit hash per weight, from both halves of the query's hash and that of the key, in one buffer.
        numbers = first ^ _split_int64(mix_bits(keys * HASH_FACTORS[0] + HASH_FACTORS[1]))[0]
        numbers.mul_(_HASH_HALF_FACTORS[0])
        numbers ^= numbers >> 15
        numbers.add_(second).mul_(_HASH_HALF_FACTORS[1])
        # The numbers are uniform in [-2**31, 2**31): a part p of them is at most this threshold, all of them for p = 1.
        threshold = max(int(self.p * 2**32) - 2**31 - 1, -(2**31))
        return numbers > threshold


def _split_int64(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split the 64 bits of each hash into two int32 tensors: the lower and the upper half."""
    return x.to(torch.int32), (x >> 32).to(torch.int32)


@dataclass(frozen=True)
class CallMask:
    """The mask of one attention call, which returns the arguments of each block."""

    plan: BlockPlan  # blocks and packed calls to compute
    q_rows: Rows  # valid local query rows
    k_rows: Rows  # valid local key rows
    predicate: str  # text of the mask predicate, "" for none
    mask: Tensor | None  # tensor mask: bool or additive float (B | 1, Hq | 1, Sq | 1, global key length | 1)
    vectors: dict[str, Tensor]  # row<i> and col<i>, unsharded: int or bool (B | 1, S)
    sizes: dict[str, int]  # values of the predicate's n<i>
    dropout: Dropout | None  # dropout of the call, None without
    score: str  # name of the score function, "" for none
    heads: list[Tensor]  # vectors (H,) that the score function reads
    tables: list[Tensor]  # tables that the score function indexes
    device: torch.device  # device of the call
    batch: int  # batch size

    @staticmethod
    def of(q: Tensor, k: Tensor, args: LocalArgs) -> "CallMask":
        """Return the mask of an ``sp::attend``, with a plan of the blocks (queries x keys) in which pairs attend.

        Raises:
            SpError: If there is dropout without a seed.
        """
        q_rows = local_valid_rows(args.q_span, q.shape[2], args.group)
        k_rows = local_valid_rows(args.k_span, k.shape[2], args.group)
        sizes, plan = tuple(int(size) for size in args.sizes), BlockPlan()
        if q.shape[0] * q.shape[1] and q_rows and k_rows:  # else there are no pairs, and the plan remains empty
            # Bounds, on the host, of the vectors that the predicate reads, such as document numbers.
            tables = tuple(map(Pieces.of, args.make_pieces()))
            row_tables, col_tables = tables[: len(args.rows)], tables[len(args.rows) :]
            plan = plan_blocks(args.predicate, q_rows, k_rows, sizes, row_tables, col_tables)
        vectors = {f"row{i}": x for i, x in enumerate(args.rows)} | {f"col{i}": x for i, x in enumerate(args.cols)}
        return CallMask(
            plan,
            q_rows,
            k_rows,
            predicate=args.predicate,
            mask=args.mask,
            vectors=vectors,
            sizes={f"n{i}": size for i, size in enumerate(sizes)},
            dropout=Dropout.of(q, args),
            score=args.score,
            heads=args.heads,
            tables=args.tables,
            device=q.device,
            batch=q.shape[0],
        )

    def kernel_args(self, block: Block | PackedCall, scale: float, kernel: Kernel) -> KernelArgs:
        """Return the kernel arguments of a block or a packed call: its masks, dropout and score function.

        Args:
            block: The block or packed call.
            scale: The factor of the scores.
            kernel: The kernel that runs the block.
        """
        # Cases without mask tensors: a fused kernel evaluates the texts (predicate and score) for each pair itself;
        # other kernels have a window, the numbers of keys before and after each query.
        if kernel.fused:
            texts = self.plan, self.q_rows, self.k_rows, self.predicate, self.score
            values = self.vectors, self.sizes, self.heads, self.tables, self.mask
            return KernelArgs(scale, pairs=PairTexts(*texts, *values))
        if isinstance(block, PackedCall):
            sequences = PackedSequences.of(block, self.batch, self.device, drop_gaps=kernel.pads)
            return KernelArgs(scale, window=block.window, sequences=sequences)
        if block.kind is Kind.BAND:
            return KernelArgs(scale, window=block.window)
        # Mask tensors: the evaluated predicate and the block's part of the tensor mask. For a CAUSAL block, a flag of
        # the kernel replaces the predicate. Dense kernels, which store all scores, have no such flag. Together with a
        # tensor mask, which SDPA refuses, it is set only for efficient attention, whose op defines the combination.
        causal = block.kind is Kind.CAUSAL and not kernel.dense and (self.mask is None or kernel.aligned_at_end)
        allowed = None if causal else self.evaluate_predicate(block)
        bias = self._mask_block(block)
        if bias is not None and bias.dtype == torch.bool:
            allowed = bias if allowed is None else allowed & bias
            bias = None
        # Dropout and the score function.
        keep_mask, keep_prob = None, 1.0
        if self.dropout is not None:
            queries = row_indices(*self._query_rows(block), self.device)
            keys = row_indices(*self._key_rows(block), self.device)
            keep_mask, keep_prob = self.dropout.keep_mask(queries, keys), 1 - self.dropout.p
        score = self._score_call(block)
        return KernelArgs(
            scale, causal, allowed=allowed, bias=bias, keep_mask=keep_mask, score=score, keep_prob=keep_prob
        )

    def _score_call(self, block: Block) -> ScoreCall | None:
        """Return the score function with the values of its inputs for a block, for a dense kernel; None without one.

        Its inputs are vectors per head, tables, and symbols such as the indices of queries and keys.
        """
        if not self.score:
            return None
        values: dict[str, Any] = {f"head{i}": x[:, None, None] for i, x in enumerate(self.heads)}
        values |= {f"table{i}": x for i, x in enumerate(self.tables)}
        for name in scores.score_symbols(self.score) - values.keys():
            values[name] = self._symbol_value(name, block)
        return ScoreCall(self.score, values)

    def evaluate_predicate(self, block: Block) -> Tensor | None:
        """Return True for each pair of the block that attends: bool (B | 1, 1, Q | 1, K | 1).

        The block's conditions are the parts of the predicate that the plan has not settled. Without any, all pairs
        attend, and the result is None. Vectors of any integer dtype are read as int64, so that no sum overflows.
        """
        if not block.conditions:
            return None
        names = frozenset().union(*map(language.predicate_symbols, block.conditions))
        values = {name: self._symbol_value(name, block) for name in names}
        values = {name: x.to(torch.int64) if isinstance(x, Tensor) else x for name, x in values.items()}
        masks = [torch.as_tensor(language.evaluate_mask(condition, values)) for condition in block.conditions]
        allowed = reduce(torch.logical_and, masks)
        return allowed.view([1] * (4 - allowed.ndim) + list(allowed.shape))

    def _symbol_value(self, name: str, block: Block) -> Any:
        """Return the values of a symbol of the predicate in a block, as a tensor that broadcasts to (B, 1, Q, K).

        The symbols are q and k (indices of query and key), b (the batch entry), vectors of the queries or the keys, and
        sizes, whose value is an int.
        """
        if name in self.sizes:
            return self.sizes[name]
        if name == "b":
            return torch.arange(self.batch, device=self.device)[:, None, None, None]
        is_query = is_query_symbol(name)
        rows = self._query_rows(block) if is_query else self._key_rows(block)
        if name not in self.vectors:  # q or k
            indices = row_indices(*rows, self.device)
            return indices[:, None] if is_query else indices[None, :]
        values = take_rows(self.vectors[name], 1, *rows)[:, None, :].unsqueeze(-1 if is_query else -2)
        return values.to(torch.int64) if values.dtype == torch.bool else values

    def _mask_block(self, block: Block) -> Tensor | None:
        """Return the block's part of the tensor mask, of its queries and keys; None without a tensor mask."""
        if self.mask is None:
            return None
        mask = self.mask.narrow(2, *block.query_rows) if self.mask.shape[2] > 1 else self.mask
        return take_rows(mask, 3, *self._key_rows(block)) if mask.shape[3] > 1 else mask

    def _query_rows(self, block: Block) -> tuple[Rows, int, int]:
        """Return the block's queries as arguments of `row_indices`: all local rows, its first row, its end."""
        return self.q_rows, block.q_off, block.q_off + block.q_len

    def _key_rows(self, block: Block) -> tuple[Rows, int, int]:
        """Return the block's keys as arguments of `row_indices`: all local rows, its first row, its end."""
        return self.k_rows, block.k_off, block.k_off + block.k_len

    def add_grad(self, dmask: Tensor, block_dmask: Tensor, block: Block) -> None:
        """Add the gradient of a block's part of an additive mask to that of the mask, in place.

        Args:
            dmask: The gradient of the mask, in the shape of the mask.
            block_dmask: The gradient of the block's part of the mask.
            block: The block.
        """
        rows = dmask.narrow(2, *block.query_rows) if dmask.shape[2] > 1 else dmask
        if dmask.shape[3] == 1:
            rows += block_dmask
            return
        # The block's keys are consecutive local rows, which may be several intervals of global indices.
        offset = 0
        for first, last in index_intervals(*self._key_rows(block)):
            length = last + 1 - first
            rows.narrow(3, first, length).add_(block_dmask.narrow(3, offset, length))
            offset += length
