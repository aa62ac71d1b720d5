"""Build the masks of attention blocks from an operator's arguments, for local queries and keys.

Dropout selects weights by a hash of their global position, not by a stream of random numbers. The backward therefore
computes the mask again instead of saving it. Every partition of a sequence or its heads over ranks and blocks drops the
same weights.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
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

# Odd multipliers with well mixed bits, as signed integers: products of int64 wrap.
_HASH_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_HASH_HALF_FACTORS = (-0x7A143589, -0x3D4D51C3)


class Dropout(NamedTuple):
    """Attention dropout of some batch entries and heads."""

    seed: Tensor  # int64 ()
    p: float  # probability to drop a weight
    batch: Tensor  # int64 (B,), indices of the batch entries
    heads: Tensor  # int64 (H,), global indices of the heads

    def keep_mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the mask of kept weights, bool (B, H, Q, K), True with probability 1 - p.

        Args:
            queries: int64 (Q,), global indices of the queries.
            keys: int64 (K,), global indices of the keys.
        """
        state = _mix_bits(self.seed + self.batch * _HASH_FACTORS[0])[:, None]
        state = _mix_bits(state + self.heads * _HASH_FACTORS[1])[:, :, None]
        state = _mix_bits(state + queries * _HASH_FACTORS[2])[:, :, :, None]
        first, second = _split_int64(state)
        # The work per weight is small: 32-bit arithmetic in one buffer.
        numbers = first ^ _split_int64(_mix_bits(keys * _HASH_FACTORS[0] + _HASH_FACTORS[1]))[0]
        numbers.mul_(_HASH_HALF_FACTORS[0])
        numbers ^= numbers >> 15
        numbers.add_(second).mul_(_HASH_HALF_FACTORS[1])
        return numbers >= min(int(self.p * 2**32) - 2**31, 2**31 - 1)


def _split_int64(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split the 64 bits of x into two int32 tensors."""
    return x.to(torch.int32), (x >> 32).to(torch.int32)


def _mix_bits(x: Tensor) -> Tensor:
    """Mix the bits of x so that every bit of the result depends on every bit of x."""
    x = (x ^ _logical_shift_right(x, 30)) * _HASH_FACTORS[1]
    x = (x ^ _logical_shift_right(x, 27)) * _HASH_FACTORS[2]
    return x ^ _logical_shift_right(x, 31)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift x right and fill with zeros instead of the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class CallMask:
    """The mask of one attention call, which provides the part of each block."""

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
        """Create the mask from the arguments of ``sp::attend``.

        Raises:
            SpError: If there is dropout without a seed.
        """
        rows, cols, group = args.rows, args.cols, args.group
        q_rows, k_rows = (
            local_valid_rows(args.q_span, q.shape[2], group),
            local_valid_rows(args.k_span, k.shape[2], group),
        )
        numbers = tuple(int(size) for size in args.sizes)
        found_plan = BlockPlan()
        if q.shape[0] * q.shape[1] and q_rows and k_rows:
            found = tuple(map(Pieces.of, args.make_pieces()))
            vectors_of = found[: len(rows)], found[len(rows) :]
            found_plan = plan_blocks(args.predicate, q_rows, k_rows, numbers, *vectors_of)
        dropout = None
        if args.dropout_p > 0:
            if args.seed is None:
                raise SpError("SP431", f"sp::attend: dropout_p={args.dropout_p} needs a seed, got None.")
            rank = current_communicator().rank(group) if args.split_heads > 1 else 0
            heads = torch.arange(q.shape[1], device=q.device) + rank % args.split_heads * q.shape[1]
            batch = torch.arange(q.shape[0], device=q.device)
            dropout = Dropout(args.seed, args.dropout_p, batch, heads)
        vectors = {f"row{i}": x for i, x in enumerate(rows)} | {f"col{i}": x for i, x in enumerate(cols)}
        named = {f"n{i}": size for i, size in enumerate(numbers)}
        of_scores = dropout, args.score, args.heads, args.tables
        return CallMask(
            found_plan, q_rows, k_rows, args.predicate, args.mask, vectors, named, *of_scores, q.device, q.shape[0]
        )

    def kernel_args(self, block: Block | PackedCall, batch: int, scale: float, kernel: Kernel) -> KernelArgs:
        """Return the kernel arguments of a block or a packed call.

        Args:
            block: The block or packed call.
            batch: The batch size.
            scale: The factor of the scores.
            kernel: The kernel that runs the block.
        """
        if kernel.fused:
            return KernelArgs(scale, pairs=self._masked_pairs())
        if isinstance(block, PackedCall):
            return KernelArgs(
                scale, window=block.window, sequences=PackedSequences.of(block, batch, self.device, kernel.pads)
            )
        if block.kind is Kind.BAND:
            return KernelArgs(scale, window=block.window)
        causal = block.kind is Kind.CAUSAL and not kernel.dense and (self.mask is None or kernel.aligned_at_end)
        allowed = None if causal else self.evaluate_predicate(block)
        bias = self._mask_block(block)
        if bias is not None and bias.dtype == torch.bool:
            allowed, bias = bias if allowed is None else allowed & bias, None
        keep_mask = None
        if self.dropout is not None:
            keep_mask = self.dropout.keep_mask(
                *(row_indices(*rows, self.device) for rows in (self._query_rows(block), self._key_rows(block)))
            )
        rate = 1 if self.dropout is None else 1 - self.dropout.p
        return KernelArgs(scale, causal, allowed, bias, keep_mask, self._score_call(block), rate)

    def _masked_pairs(self) -> PairTexts:
        """Return the texts and values for a fused kernel."""
        rows, texts = (self.q_rows, self.k_rows), (self.predicate, self.score)
        return PairTexts(self.plan, *rows, *texts, self.vectors, self.sizes, self.heads, self.tables, self.mask)

    def _score_call(self, block: Block) -> ScoreCall | None:
        """Return the score function of a block with the values that it reads."""
        if not self.score:
            return None
        of_heads = {f"head{i}": x[:, None, None] for i, x in enumerate(self.heads)}
        vectors = of_heads | {f"table{i}": x for i, x in enumerate(self.tables)}
        places = {name: self._symbol_value(name, block) for name in scores.score_symbols(self.score) - vectors.keys()}
        return ScoreCall(self.score, places | vectors)

    def evaluate_predicate(self, block: Block) -> Tensor | None:
        """Evaluate the block's remaining conditions for each pair: bool (B | 1, 1, Q | 1, K | 1), or None."""
        if not block.conditions:
            return None
        names = {name for condition in block.conditions for name in language.predicate_symbols(condition)}
        values = {name: self._symbol_value(name, block) for name in names}
        allowed = reduce(
            torch.logical_and, (torch.as_tensor(language.evaluate_mask(c, values)) for c in block.conditions)
        )
        return allowed.view([1] * (4 - allowed.ndim) + list(allowed.shape))

    def _symbol_value(self, name: str, block: Block) -> Any:
        """Return a symbol's values in a shape that broadcasts to (B, 1, Q, K); an int for a size."""
        if name in self.sizes:
            return self.sizes[name]
        if name == "b":
            return torch.arange(self.batch, device=self.device)[:, None, None, None]
        of_query = is_query_symbol(name)
        where = self._query_rows(block) if of_query else self._key_rows(block)
        if name not in self.vectors:
            x = row_indices(*where, self.device)
            return x[:, None] if of_query else x[None, :]
        x = take_rows(self.vectors[name], 1, *where)[:, None, :].unsqueeze(-1 if of_query else -2)
        return x.to(torch.int64) if x.dtype == torch.bool else x

    def _mask_block(self, block: Block) -> Tensor | None:
        """Return the block's part of the tensor mask."""
        if self.mask is None:
            return None
        part = self.mask.narrow(2, *block.query_rows) if self.mask.shape[2] > 1 else self.mask
        return take_rows(part, 3, *self._key_rows(block)) if part.shape[3] > 1 else part

    def _query_rows(self, block: Block) -> tuple[Rows, int, int]:
        return self.q_rows, block.q_off, block.q_off + block.q_len

    def _key_rows(self, block: Block) -> tuple[Rows, int, int]:
        return self.k_rows, block.k_off, block.k_off + block.k_len

    def add_grad(self, total: Tensor, part: Tensor, block: Block) -> None:
        """Add the gradient of a block's mask to the gradient of the mask in place.

        Args:
            total: The gradient of the mask, in the shape of the mask.
            part: The gradient of the block's mask.
            block: The block.
        """
        rows = total.narrow(2, *block.query_rows) if total.shape[2] > 1 else total
        if total.shape[3] == 1:
            rows += part
            return
        done = 0
        for first, last in index_intervals(*self._key_rows(block)):
            rows.narrow(3, first, last + 1 - first).add_(part.narrow(3, done, last + 1 - first))
            done += last + 1 - first
