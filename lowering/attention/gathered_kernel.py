"""Compute attention of local queries over all-gathered keys and values, which are not saved.

    k, v  (B, Hkv, s, D)  ->  rows first, concatenated, one all_gather  ->  views (B, Hkv, S, D)
    backward: the same all-gather again, then one reduce-scatter of dK and dV in float32

Zigzag shards are gathered in two steps: the first chunks, which are in sequence order, and the second chunks, in
reverse order. No copy reorders rows or removes padding, and the second gather overlaps with the first half's attention.

All keys are copied into sequence order in two cases only. If a table balances chunks, documents in rank order need more
kernel calls than three (up to 14 for 1,000 documents on 8 ranks). If shards are zigzag and the mask is a tensor, its
columns would have to be copied instead, which are more.

Llama 3 uses this method (arXiv:2407.21783, section 3.3.2): it is cheap with few key heads, and every block is large.
The causal part of a contiguous or zigzag shard is cut into full blocks and diagonals (``masks/block_plan.py``).

    zigzag         rank r stores chunks r and 2n - 1 - r of 2n (the first and the second chunk of the rank)
    part           the keys of one all-gather: all keys, or those of the first or of the second chunks
    rank order     the rows of rank 0, then those of rank 1, ..., with their padding; not always the sequence order
    cat            the function that concatenates K and V before an exchange: torch.cat, or in a backward one that waits
                   for the cotangent, so that a compiler does not save the forward's gathered keys instead
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.frames import FrameArg, frame_folds, pad_to_frame, to_rank_order, to_sequence_order, trim
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.lowering.masks.score import may_have_fills
from sp_compile.lowering.masks.spans import Span, full_span, shard_spans

from .merge_blocks import merge
from .op_args import SEQUENCE, LocalArgs
from .ring_kernel import Cat, accumulate, split_keys_values, wait_then_concat


class GatheredKeys(NamedTuple):
    """Keys and values that are all-gathered; see `KeySource`. Arguments of its methods: see `RingKeys`."""

    frame: FrameArg | None  # placement of the keys' sequence dim; None if keys are replicated
    n: int  # number of ranks
    group: str  # name of the process group
    # None, or the order in which ranks store keys, and its inverse (see ``masks/balance_rows.py``)
    orders: Sequence[Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gather the keys and values of all ranks, and return out (B, H, s, E) and lse (B, H, s) over all of them."""
        out: Any = None
        lse: Any = None
        is_half = q.dtype != accumulation_dtype(q.dtype)  # merges of other types are traced, for compilers to fuse
        for keys, values, span in self._gather_parts(k, v, args, torch.cat):
            block_out, block_lse = args.attend(q, keys, values, span, filled=out is None or not is_half)
            if out is None:
                out, lse = block_out, block_lse
            elif is_half:  # the last one: there are at most two parts
                out, lse = torch.ops.sp.merge_to(out, lse, block_out, block_lse, dtype)
            else:
                out, lse = merge(out, lse, block_out, block_lse)
        return out, lse

    def backward(
        self, upstream: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, mask_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gather the keys and values again, and return the gradients of the shards.

        Args:
            upstream: (cotangent of out, out, lse), over all keys.
            q: (B, H, s, D).
            k: (B, Hkv, t, D).
            v: (B, Hkv, t, E).
            args: The arguments of the attention.
            mask_grad: Whether the mask or the tables of a score function need a gradient.

        Returns:
            dq, dk and dv with the shapes of q, k and v, and the gradient of the mask, or of the tables of the score
            function, flattened; without `mask_grad` an empty tensor.
        """
        dq: Tensor | None = None
        dmask: Tensor | None = None
        key_grads = []  # dk and dv of this rank's keys, from each gathered part
        # With packed="rows", `dk` has the gradients of keys and values, which the reduce-scatter sends without a copy.
        packed = "rows" if self.n > 1 and self.frame is not None else ""
        for keys, values, span in self._gather_parts(k, v, args, wait_then_concat(upstream[0])):
            part_dq, dk, dv, part_dmask = args.grads(upstream, q, keys, values, span, mask_grad, packed=packed)
            dq = accumulate(dq, part_dq)
            dmask = accumulate(dmask, part_dmask) if mask_grad else part_dmask
            if packed:
                dk, dv = split_keys_values(self._reduce_scatter(dk, self._is_rank_order(args)), k, v)
            elif self.frame is not None:  # one rank: add the padded rows that `_gather` has removed, as zeros
                dk, dv = (pad_to_frame(x, SEQUENCE, self.frame, 1, edge=False) for x in (dk, dv))
            key_grads.append((dk, dv))
        assert dq is not None
        assert dmask is not None
        dk, dv = (parts[0] if len(parts) == 1 else torch.cat(parts, SEQUENCE) for parts in zip(*key_grads))
        return dq, dk, dv, dmask

    def _is_rank_order(self, args: LocalArgs) -> bool:
        """Return True if queries attend to the gathered keys in rank order, which needs no copy of the keys.

        In rank order, keys are those of rank 0, then of rank 1, and so on, with padding; zigzag shards are gathered in
        two parts. A tensor mask prevents it, as it has a column for each key in sequence order. So do fills (large
        finite scores in place of -inf): the results of two parts with fills cannot be merged.
        """
        if self.frame is None or self.n == 1 or self.orders:
            return False
        return args.mask is None and not may_have_fills(args.score)

    def _gather_parts(self, k: Tensor, v: Tensor, args: LocalArgs, cat: Cat) -> Iterator[tuple[Tensor, Tensor, Span]]:
        """Yield (keys, values, span) of each gathered part: two for zigzag shards in rank order, else one.

        A span describes which rows of the sequence the part contains, in which order. ``cat`` concatenates K and V:
        torch.cat, or in a backward a function that waits for the cotangent.
        """
        if self.frame is None or not self._is_rank_order(args):
            keys, values = self._gather(k, v, cat)
            yield keys, values, full_span(keys.shape[SEQUENCE])
            return
        chunks = _concat_keys_values(k, v, cat).chunk(frame_folds(self.frame))
        for chunk, span in zip(chunks, shard_spans(self.frame, self.n)):
            rows = current_communicator().all_gather(chunk, self.n, self.group)
            yield *split_keys_values(rows.movedim(0, SEQUENCE), k, v), span

    def _gather(self, k: Tensor, v: Tensor, cat: Cat) -> tuple[Tensor, Tensor]:
        """Return all keys and values in sequence order, without padding, for masks that need that order."""
        frame, n = self.frame, self.n
        if frame is None:  # the keys are replicated
            return k, v
        if n == 1:  # only padding has to be removed
            return trim(k, SEQUENCE, frame, n, inner=1), trim(v, SEQUENCE, frame, n, inner=1)
        rows = current_communicator().all_gather(_concat_keys_values(k, v, cat), n, self.group)
        rows = trim(to_sequence_order(rows, frame, n), 0, frame, n, inner=1)
        if self.orders:  # the rows are in the order of a table: order[i] is the sequence position of row i
            order, inverse = self.orders  # sp::reorder with the inverse permutation restores the sequence order
            rows = torch.ops.sp.reorder(rows, 0, frame, inverse, order)
        return split_keys_values(rows.movedim(0, SEQUENCE), k, v)

    def _reduce_scatter(self, both: Tensor, in_rank_order: bool) -> Tensor:
        """Sum the key gradients of a gathered part over the ranks, and return those of this rank's keys.

        Shapes: (B, Hkv, S, D + E) -> (B, Hkv, s, D + E).

        Args:
            both: dk and dv of the part, concatenated along the last dim.
            in_rank_order: Whether the rows are in rank order already. Else they are reordered and padded first.
        """
        frame, n = self.frame, self.n
        assert frame is not None
        rows = both.movedim(SEQUENCE, 0)
        if not in_rank_order:
            rows = torch.ops.sp.reorder(rows, 0, frame, *self.orders) if self.orders else rows
            rows = pad_to_frame(rows, 0, frame, n, edge=False)  # padded rows of a gradient are zero
            rows = to_rank_order(rows, frame, n)
        return current_communicator().reduce_scatter(rows, n, self.group).movedim(0, SEQUENCE)


def _concat_keys_values(k: Tensor, v: Tensor, cat: Cat) -> Tensor:
    """Concatenate (B, Hkv, s, D) and (B, Hkv, s, E) to (s, B, Hkv, D + E) with one copy.

    The rows are first, since an all_gather concatenates along dim 0.
    """
    return cat([x.movedim(SEQUENCE, 0) for x in (k, v)], 3)
