"""Compute ring attention: keys and values rotate over the ranks, queries do not move.

Liu et al. 2023, arXiv:2310.01889.

    step i of R     local queries x the keys of the rank i places back; the next keys are received during the step
    merge           by log-sum-exp, into one accumulator in float32
    backward        keys rotate again (see ``sp::pack``); their gradients follow, or return in one exchange

The forward shifts packed K and V R - 1 times, the backward again. dK and dV are either shifted R times, overlapped with
the blocks ("travel"), or returned in one all-to-all of the same number of bytes ("scatter", which stores all R parts).
Each step decides at run time which of its blocks are needed (causal, zigzag, windows, documents), so every rank has the
same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_compile.lowering.base.frames import FrameArg, is_known
from sp_compile.lowering.comm import routes
from sp_compile.lowering.comm.communicator import current_communicator
from sp_compile.lowering.masks.spans import Span, shard_span

from .op_args import LocalArgs

Cat = Callable[[list[Tensor], int], Tensor]


def window_hops(window: int, rows: int, n: int) -> int:
    """Return the number of ranks backward that a causal window reaches.

    Args:
        window: The window in rows.
        rows: The number of rows per rank, in sequence order.
        n: The number of ranks.
    """
    # Separate comparisons, so that a tracer gets a number.
    return next((hops for hops in range(n - 1) if window <= hops * rows + 1), n - 1)


class RingKeys(NamedTuple):
    """Keys that rotate over a ring of ranks."""

    frame: FrameArg  # placement of the keys' sequence dim
    n: int  # number of ranks
    stride: int  # number of neighboring ranks that split the heads; the ring links every stride-th rank
    steps: int  # number of key blocks that a query needs, counted backward from its own
    grads: str  # "travel" or "scatter" (which needs the full ring)
    group: str  # name of the process group

    @property
    def size(self) -> int:
        """Return the number of ranks of the ring."""
        return self.n // self.stride

    def shift(self, offset: int) -> str:
        """Return the route of a shift by ``offset`` places in the ring."""
        return routes.shift_route(self.group, offset, self.stride)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: LocalArgs) -> tuple[Tensor, Tensor]:
        """Return the output and log-sum-exps of local queries over the keys of all steps.

        Args:
            q: (B, H, s, D), any floating dtype.
            k: (B, Hkv, t, D), this rank's shard.
            v: (B, Hkv, t, E), this rank's shard.
            args: Arguments of the local queries.

        Returns:
            out (B, H, s, E) and lse (B, H, s).
        """
        out = lse = done = None
        for keys, values, where, pending in self._ring_steps(k, v, torch.cat):
            block = args.attend(q, keys, values, where, _drop_none(pending, done))
            if out is None:
                # The accumulator of several blocks; a single block needs none. The next block waits for this one and
                # not for its cast: a compiler that has not written the cast yet would write it a second time.
                out, lse = block if self.steps == 1 else (block[0].to(block[1].dtype), block[1])
                done = block[0]
            else:
                torch.ops.sp.merge_into(out, lse, *block)
                done = out
        return out, lse

    def backward(
        self, upstream: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, mask_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return dq, dk, dv and dmask.

        Args:
            upstream: The cotangent, out and lse of the forward.
            q: (B, H, s, D).
            k: (B, Hkv, t, D), this rank's shard.
            v: (B, Hkv, t, E), this rank's shard.
            args: Arguments of the local queries.
            mask_grad: Whether the mask or the tables need a gradient.
        """
        dq: Tensor | None = None
        dmask: Tensor | None = None
        carried = RING_GRADIENTS["travel" if self.steps < self.size else self.grads](self)
        packed = "" if self.steps == 1 else "stack" if _can_stack(k, v) else "last"
        for keys, values, where, pending in self._ring_steps(k, v, wait_then_concat(upstream[0])):
            before = _drop_none(pending, carried.pending, dq)
            dq_, dk_, dv_, dmask_ = args.grads(upstream, q, keys, values, where, mask_grad, before, packed)
            dq, dmask = accumulate(dq, dq_), accumulate(dmask, dmask_) if mask_grad else dmask_
            if self.steps > 1:
                carried.add(dk_)
        if self.steps > 1:
            dk_, dv_ = split_keys_values(carried.collect(), k, v)
        assert dq is not None
        return dq, dk_, dv_, dmask

    def _ring_steps(self, k: Tensor, v: Tensor, cat: Cat) -> Iterator[tuple[Tensor, Tensor, Span, Any]]:
        """Yield each step's keys, values and span, and the shift in progress."""
        if self.steps == 1:
            yield k, v, shard_span(self.frame, self.n, self.stride), None
            return
        both = _pack_keys_values(k, v, cat)
        for step in range(self.steps):
            pending = current_communicator().start_shift(both, self.shift(1)) if step < self.steps - 1 else None
            yield *split_keys_values(both, k, v), shard_span(self.frame, self.n, self.stride, step), pending
            if pending is not None:
                both = current_communicator().wait(pending)


def _drop_none(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None."""
    return [x for x in tensors if x is not None]


def accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """Add ``part`` to ``total`` in place and return it; return ``part`` if there is no total."""
    if total is None:
        return part
    torch.ops.sp.add_into(total, part)
    return total


def wait_then_concat(tensor: Tensor) -> Cat:
    """Return a concatenation that waits for a tensor; see ``sp::pack``."""
    return lambda xs, dim: torch.ops.sp.pack(xs, dim, tensor)


def _can_stack(k: Tensor, v: Tensor) -> bool:
    return is_known(k.shape[3] == v.shape[3])


def _pack_keys_values(k: Tensor, v: Tensor, cat: Cat) -> Tensor:
    """Pack (B, Hkv, s, D) and (B, Hkv, s, E) with one copy, for any strides.

    With equal widths to (2, B, Hkv, s, D), because kernels read consecutive rows faster; else to (B, Hkv, s, D + E).
    """
    return cat([k.unsqueeze(0), v.unsqueeze(0)], 0) if _can_stack(k, v) else cat([k, v], 3)


def split_keys_values(both: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Split a packed tensor into views of keys and values, for any number of rows.

    Args:
        both: (2, B, Hkv, S, D) or (B, Hkv, S, D + E).
        k: A tensor with the width of keys.
        v: A tensor with the width of values.
    """
    keys, values = both.unbind(0) if both.ndim > k.ndim else both.split([k.shape[3], v.shape[3]], 3)
    return keys, values


class _RingGradients:
    """Gradients of keys that rotate one step after the keys and return to their owners at the end."""

    def __init__(self, ring: RingKeys) -> None:
        self.ring, self.added, self.pending = ring, 0, None

    def add(self, part: Tensor) -> None:
        """Add the packed gradients of the next step's keys and values, which are one rank further away."""
        self.added += 1
        if self.pending is not None:
            part = part.add_(current_communicator().wait(self.pending))
        last = self.added == self.ring.steps
        self.pending = current_communicator().start_shift(part, self.ring.shift(1 - self.ring.steps if last else 1))

    def collect(self) -> Tensor:
        """Return the sum over all ranks for this rank's keys."""
        assert self.pending is not None
        return current_communicator().wait(self.pending)


class _ScatteredGradients:
    """Gradients of keys that are stored until the end and then sent to their owners in one exchange."""

    pending = None

    def __init__(self, ring: RingKeys) -> None:
        self.ring = ring
        self.parts: list[Tensor] = []

    def add(self, part: Tensor) -> None:
        """Store the packed gradients of the next step's keys and values."""
        self.parts.append(part)

    def collect(self) -> Tensor:
        """Return the sum over all ranks for this rank's keys."""
        ring = self.ring
        parts = torch.ops.sp.pack_by_owner(self.parts, ring.stride, ring.group)
        return current_communicator().all_to_all(parts, ring.size, routes.cross_route(ring.group, ring.stride)).sum(0)


# classes of the ways to return gradients, by name
RING_GRADIENTS: dict[str, type[_RingGradients] | type[_ScatteredGradients]] = {
    "travel": _RingGradients,
    "scatter": _ScatteredGradients,
}
