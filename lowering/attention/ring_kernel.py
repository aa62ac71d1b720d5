"""Compute ring attention: keys and values rotate over the ranks, queries do not move.

Liu et al. 2023, arXiv:2310.01889.

    step i of R     local queries x the keys of the rank i places back; the next keys are received during the step
    merge           by log-sum-exp, into one accumulator in float32
    backward        keys rotate again (see ``sp::pack``); their gradients follow, or return in one exchange

The forward shifts packed K and V R - 1 times, the backward again. dK and dV are either shifted R times, overlapped with
the blocks ("travel"), or returned in one all-to-all of the same number of bytes ("scatter", which stores all R parts).
Each step decides at run time which of its blocks are needed (causal, zigzag, windows, documents), so every rank has the
same graph.

    hop, step i    the keys of a step were sent i times to the next rank: they are those of the rank i places back
    stride         number of adjacent ranks that split the heads (a neighborhood). A ring links every stride-th rank
    owner          the rank whose shard contains a key; gradients of the key are summed there
    packed         keys and values (or dK and dV) in one tensor, for one exchange
    steps          number of steps R. A sliding window needs fewer than the ring has ranks
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.frames import FrameArg, is_known
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.lowering.masks.block_plan import plan_blocks
from sp_compile.lowering.masks.blocks import Block, PackedCall, has_masked
from sp_compile.lowering.masks.spans import Span, shard_span, span_rows

from .merge_blocks import merge_block
from .op_args import LocalArgs

Cat = Callable[[list[Tensor], int], Tensor]  # torch.cat, or one that waits for another tensor


class RingStep(NamedTuple):
    """Keys and values that a rank has during one step of the ring."""

    keys: Tensor  # (B, Hkv, t, D)
    values: Tensor  # (B, Hkv, t, E)
    span: Span  # span of the keys
    next_shift: Any  # shift in progress, which receives those of the next step; None in the last step


def window_hops(window: int, rows: int, n: int) -> int:
    """Return the number of preceding ranks whose keys a causal window reaches; a ring has one step more.

    With 4 rows per rank, windows of 2 to 5 keys reach one rank: the first query of a rank reads up to 4 rows before it.

    Args:
        window: The number of keys of a query, counted backward from its own position.
        rows: The number of rows per rank, in sequence order.
        n: The number of ranks.
    """
    # The first query of a rank reads window - 1 rows before its own. Comparisons instead of a division, so that the
    # result is a Python number while sizes are symbolic.
    return next((hops for hops in range(n - 1) if window <= hops * rows + 1), n - 1)


class RingKeys(NamedTuple):
    """Keys and values that rotate over a ring of ranks; see `KeySource`."""

    frame: FrameArg  # placement of the keys' sequence dim
    n: int  # number of ranks
    stride: int  # number of neighboring ranks that split the heads; the ring links every stride-th rank
    steps: int  # number of key blocks that a query needs, counted backward from its own
    grads: str  # "travel" or "scatter" (which needs the full ring)
    group: str  # name of the process group

    @property
    def size(self) -> int:
        """Return the number of ranks of a ring, which links every stride-th of the n ranks."""
        return self.n // self.stride

    def shift(self, offset: int) -> str:
        """Return the name of the route by which each rank sends to the rank ``offset`` places further in its ring."""
        return routes.shift_route(self.group, offset, self.stride)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotate keys and values, and return out (B, H, s, E) and lse (B, H, s) of local queries over all keys.

        In each step, the queries attend to the keys that have arrived, and the next ones are being received. The first
        merge reads two results of kernels and the last one writes ``dtype``, so that no cast reads the sum again.

        Args:
            q: (B, H, s, D), any floating dtype.
            k: (B, Hkv, t, D), this rank's shard.
            v: (B, Hkv, t, E), this rank's shard.
            args: Arguments of the local queries.
            dtype: Dtype of out: that of q, or the dtype of lse.
        """
        out: Any = None
        lse: Any = None
        for step in self._ring_steps(k, v, torch.cat):
            # The block runs after the shift of the next keys has started, and after the last block's result exists.
            after = _drop_none(step.next_shift, out)
            is_first = out is None
            block_out, block_lse = args.attend(q, step.keys, step.values, step.span, after, filled=is_first)
            if is_first:
                out, lse = block_out, block_lse
            else:
                out, lse = merge_block(out, lse, block_out, block_lse, dtype if step.next_shift is None else lse.dtype)
        return out, lse

    def backward(
        self, upstream: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, mask_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rotate keys and values again, and return dq, dk, dv, and the gradient of the mask or of the tables.

        In each step, the gradients of the keys that are on this rank are computed. They are sent to the ranks that own
        the keys, and summed there. The gradient of tables is flattened.

        Args:
            upstream: (cotangent of out, out, lse), over all keys.
            q: (B, H, s, D).
            k: (B, Hkv, t, D), this rank's shard.
            v: (B, Hkv, t, E), this rank's shard.
            args: Arguments of the local queries.
            mask_grad: Whether the mask or the tables need a gradient.
        """
        dq: Tensor | None = None
        dmask: Tensor | None = None
        # If fewer steps than ranks are needed, gradients always rotate: a scatter would need a part of every rank.
        method = "travel" if self.steps < self.size else self.grads
        # Sums over all keys are written in the dtype of the operands, to which the caller would cast them.
        key_grads = RING_GRADIENTS[method](self, k.dtype if k.dtype == v.dtype else accumulation_dtype(k.dtype))
        packed = ""  # the layout of one tensor for dk and dv, which is sent; "" for separate tensors
        if self.steps > 1:
            packed = "stack" if _can_stack(k, v) else "last"
        for step in self._ring_steps(k, v, wait_then_concat(upstream[0])):
            after = _drop_none(step.next_shift, key_grads.pending, dq)
            operands = upstream, q, step.keys, step.values, step.span, mask_grad
            # In the first step there are no sums yet, and "scatter" stores the key gradients of each step separately.
            if dq is None or isinstance(key_grads, _ScatteredGradients):
                step_dq, dk, dv, step_dmask = args.grads(*operands, after, packed)
                dq = accumulate(dq, step_dq)
                if self.steps > 1:  # dk is the packed gradient of keys and values
                    key_grads.add(dk)
            else:  # parts are added to the sums that exist
                narrow = can_keep_query_dtype(q, step.keys, args, step.span)
                step_dq, dk, dv, q_rows, k_rows, step_dmask = args.grad_parts(*operands, narrow, after)
                dq = add_part_rows(dq, [step_dq], q_rows, dq.dtype if step.next_shift is not None else q.dtype)
                key_grads.add_rows([dk, dv], k_rows)
            dmask = accumulate(dmask, step_dmask) if mask_grad else step_dmask
        if self.steps > 1:  # the sums over all ranks
            dk, dv = split_keys_values(key_grads.collect(), k, v)
        assert dq is not None
        return dq, dk, dv, dmask

    def _ring_steps(self, k: Tensor, v: Tensor, cat: Cat) -> Iterator[RingStep]:
        """Yield each step's keys and values while the shift of those of the next step is in progress.

        ``cat`` concatenates keys and values to one tensor: torch.cat, or in a backward a function that waits for the
        cotangent.
        """
        if self.steps == 1:
            yield RingStep(k, v, shard_span(self.frame, self.n, self.stride), next_shift=None)
            return
        both = _pack_keys_values(k, v, cat)
        for step in range(self.steps):
            next_shift = current_communicator().start_shift(both, self.shift(1)) if step < self.steps - 1 else None
            span = shard_span(self.frame, self.n, self.stride, step)
            yield RingStep(*split_keys_values(both, k, v), span, next_shift)
            if next_shift is not None:
                both = current_communicator().wait(next_shift)


def _drop_none(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None, for the argument ``after`` of an attention, which runs after they exist."""
    return [x for x in tensors if x is not None]


def accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """Add ``part`` to ``total`` in place and return the total; return ``part`` if it is the first one."""
    if total is None:
        return part
    torch.ops.sp.add_into(total, part)
    return total


def add_part_rows(total: Tensor, parts: list[Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the rows of ``parts`` to ``total``, as ``sp::add_rows_into``, and return the sum in ``dtype``.

    The total is updated in place if it has this dtype.
    """
    if dtype != total.dtype:
        return torch.ops.sp.add_rows_to(total, parts, rows, dtype)
    torch.ops.sp.add_rows_into(total, parts, rows)
    return total


def wait_then_concat(cotangent: Tensor) -> Cat:
    """Return a function like torch.cat that a compiler does not move before the cotangent of a backward exists.

    A compiler would otherwise merge the equal exchanges of forward and backward, and save all keys and values.
    """
    return lambda xs, dim: torch.ops.sp.pack(xs, dim, cotangent)


def _can_stack(k: Tensor, v: Tensor) -> bool:
    """Return True if keys and values are known to have equal widths, so that they are stacked into one tensor."""
    return is_known(k.shape[3] == v.shape[3])


def _pack_keys_values(k: Tensor, v: Tensor, cat: Cat) -> Tensor:
    """Return keys (B, Hkv, s, D) and values (B, Hkv, s, E) as one tensor, with one copy.

    Its shape is (2, B, Hkv, s, D) for equal widths, since kernels read consecutive rows faster; otherwise it is
    (B, Hkv, s, D + E).
    """
    return cat([k.unsqueeze(0), v.unsqueeze(0)], 0) if _can_stack(k, v) else cat([k, v], 3)


def split_keys_values(both: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the keys and of the values in a packed tensor, or of their gradients.

    Args:
        both: (2, B, Hkv, S, D), possible for equal widths, or (B, Hkv, S, D + E).
        k: A tensor with the width of keys.
        v: A tensor with the width of values.
    """
    keys, values = both.unbind(0) if both.ndim > k.ndim else both.split([k.shape[3], v.shape[3]], 3)
    return keys, values


def can_keep_query_dtype(q: Tensor, k: Tensor, args: LocalArgs, k_span: Sequence[int]) -> bool:
    """Return True if the gradients of a ring step may have the dtype of q without loss.

    A row to which several kernel calls add needs the accumulation dtype. The result is True if there is no such row on
    any rank. It is False if that is not known: for masks that read vectors, which are planned at run time, for symbolic
    sizes, and for mask tensors, whose blocks may be cut into strips of queries. Equal on all ranks.
    """
    if q.dtype == accumulation_dtype(q.dtype):  # no half type
        return True
    is_position_mask = args.mask is None and not args.rows and not args.cols and not args.score and not args.dropout_p
    numbers = (*args.q_span, *k_span, *args.sizes, q.shape[2], k.shape[2])
    if not is_position_mask or not all(isinstance(x, int) for x in numbers):
        return False
    return _has_one_call_per_row(
        args.predicate, tuple(args.q_span), tuple(k_span), q.shape[2], k.shape[2], tuple(args.sizes)
    )


@lru_cache(maxsize=1024)
def _has_one_call_per_row(
    predicate: str, q_span: tuple[int, ...], k_span: tuple[int, ...], queries: int, keys: int, sizes: tuple[int, ...]
) -> bool:
    """Return True if no block is masked, and no two kernel calls of a rank share a row of queries or of keys."""
    num_ranks = max(q_span[0], k_span[0])  # a span begins with the number of ranks of a ring; 1: not sharded
    for rank in range(num_ranks):
        plan = plan_blocks(predicate, span_rows(q_span, queries, rank), span_rows(k_span, keys, rank), sizes)
        if has_masked((*plan.blocks, *plan.others)):
            return False
        # The calls of kernels without windows, and of those with windows.
        alternatives: list[list[Block | PackedCall]] = [[*plan.blocks], [*plan.packed, *plan.others]]
        for calls in alternatives:
            if _has_overlap([x.query_rows for x in calls]) or _has_overlap([x.key_rows for x in calls]):
                return False
    return True


def _has_overlap(ranges: Sequence[tuple[int, int]]) -> bool:
    """Return True if two of the ranges (offset, length) overlap."""
    return any(a[0] + a[1] > b[0] for a, b in pairwise(sorted(ranges)))


class _RingGradients:
    """Gradients of keys that rotate around the ring one step after the keys.

    At the end they return to the owners of the keys ("travel"). `pending` is the shift in progress; the next block runs
    after it has started.
    """

    def __init__(self, ring: RingKeys, dtype: torch.dtype) -> None:
        """Start with no gradients, of which the sum over all ranks has ``dtype``.

        `pending` is the shift in progress, which receives the sum of earlier ranks.
        """
        self.ring, self.dtype, self.num_added = ring, dtype, 0
        self.pending: Any = None

    def add(self, key_grads: Tensor) -> None:
        """Send the packed gradients of the first step's keys to the next rank."""
        self._send(key_grads)

    def add_rows(self, parts: list[Tensor], rows: Tensor) -> None:
        """Add the gradients of one step's keys and values to the sum that rotates with the keys, and send it.

        The sum of earlier ranks has been received during the step. It is sent to the next rank; after the last step, to
        the rank that owns the keys, in the dtype of the result.

        Args:
            parts: Gradients of keys and of values.
            rows: Flags of the rows that have gradients.
        """
        assert self.pending is not None
        total = current_communicator().wait(self.pending)
        is_last = self.num_added + 1 == self.ring.steps
        self._send(add_part_rows(total, parts, rows, self.dtype if is_last else total.dtype))

    def _send(self, key_grads: Tensor) -> None:
        """Start to send the packed sum of the gradients of the keys."""
        self.num_added += 1
        # Gradients follow the keys to the next rank. In the last step, the keys have moved steps - 1 places from their
        # owner, so their gradients move back by the same number.
        hops = 1 if self.num_added < self.ring.steps else 1 - self.ring.steps
        self.pending = current_communicator().start_shift(key_grads, self.ring.shift(hops))

    def collect(self) -> Tensor:
        """Wait for the last shift, and return the packed gradients of this rank's keys, summed over the ranks."""
        assert self.pending is not None
        return current_communicator().wait(self.pending)


class _ScatteredGradients:
    """Gradients of keys that are stored until the end, then sent to their owners at once ("scatter")."""

    pending = None  # no shift is in progress between steps

    def __init__(self, ring: RingKeys, _dtype: torch.dtype) -> None:
        """Start with no gradients; `step_grads` collects those of each step."""
        self.ring = ring
        self.step_grads: list[Tensor] = []

    def add(self, key_grads: Tensor) -> None:
        """Store the packed gradients of the keys of one step, until `collect` sends all of them."""
        self.step_grads.append(key_grads)

    def collect(self) -> Tensor:
        """Send the gradients of all steps to the owners of the keys, in one all-to-all.

        Returns the packed gradients of this rank's keys, summed over the ranks.
        """
        ring = self.ring
        by_owner = torch.ops.sp.pack_by_owner(self.step_grads, ring.stride, ring.group)  # a block for each rank
        route = routes.cross_route(ring.group, ring.stride)  # between the ranks of this ring only
        return current_communicator().all_to_all(by_owner, ring.size, route).sum(0)


# classes that return the gradients of keys to their owners, by the option `RingKeys.grads`
RING_GRADIENTS: dict[str, type[_RingGradients] | type[_ScatteredGradients]] = {
    "travel": _RingGradients,
    "scatter": _ScatteredGradients,
}
