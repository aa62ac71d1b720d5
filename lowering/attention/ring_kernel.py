"""Ring attention: keys and values go round, queries stay (Liu et al. 2023, arXiv:2310.01889).

    step i of R     local queries x the keys that started i ranks back; the next keys are already on their way
    merge           by log-sum-exp, into one accumulator in float32
    backward        keys go round again (see ``pack.py``); their gradients behind them, or home in one exchange

Forward: R - 1 shifts of packed K and V. Backward: R - 1 of K and V, and R of dK and dV ("travel", overlapped with the
blocks) or one all-to-all that carries as many bytes ("scatter", which keeps all R parts). Which blocks of a step are
needed at all (causal, zigzag, windows, documents) is decided when the step runs, so every rank has the same graph.
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
    """How many ranks backwards a causal window reaches, if each of n holds so many rows, in order."""
    # One comparison after another, so that a tracer is left with a number.
    return next((hops for hops in range(n - 1) if window <= hops * rows + 1), n - 1)


class RingKeys(NamedTuple):
    """Where keys lie and how they go round.

    n: ranks; stride: neighbours that share heads (the ring links every stride-th rank); steps: blocks of keys that
    anybody needs, counted from one's own backwards; grads: "travel" or "scatter" (which takes the whole ring).
    """

    frame: FrameArg
    n: int
    stride: int
    steps: int
    grads: str
    group: str

    @property
    def size(self) -> int:
        return self.n // self.stride

    def shift(self, offset: int) -> str:
        return routes.shift_route(self.group, offset, self.stride)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, args: LocalArgs) -> tuple[Tensor, Tensor]:
        out = lse = done = None
        for keys, values, where, coming in self._ring_steps(k, v, torch.cat):
            block = args.attend(q, keys, values, where, _drop_none(coming, done))
            if out is None:
                # The accumulator of several blocks; a single one stays as it is. The next block waits for this one and
                # not for what is made of it: a compiler that has not written that yet would write it a second time.
                out, lse = block if self.steps == 1 else (block[0].to(block[1].dtype), block[1])
                done = block[0]
            else:
                torch.ops.sp.merge_into(out, lse, *block)
                done = out
        return out, lse

    def backward(
        self, given: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, args: LocalArgs, mask_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dq: Tensor | None = None
        dmask: Tensor | None = None
        carried = RING_GRADIENTS["travel" if self.steps < self.size else self.grads](self)
        packed = "" if self.steps == 1 else "stack" if _can_stack(k, v) else "last"
        for keys, values, where, coming in self._ring_steps(k, v, wait_then_concat(given[0])):
            before = _drop_none(coming, carried.coming, dq)
            dq_, dk_, dv_, dmask_ = args.grads(given, q, keys, values, where, mask_grad, before, packed)
            dq, dmask = accumulate(dq, dq_), accumulate(dmask, dmask_) if mask_grad else dmask_
            if self.steps > 1:
                carried.add(dk_)
        if self.steps > 1:
            dk_, dv_ = split_keys_values(carried.collect(), k, v)
        assert dq is not None
        return dq, dk_, dv_, dmask

    def _ring_steps(self, k: Tensor, v: Tensor, cat: Cat) -> Iterator[tuple[Tensor, Tensor, Span, Any]]:
        """Keys, values and their span in each step, and what is on its way meanwhile."""
        if self.steps == 1:
            yield k, v, shard_span(self.frame, self.n, self.stride), None
            return
        both = _pack_keys_values(k, v, cat)
        for step in range(self.steps):
            coming = current_communicator().start_shift(both, self.shift(1)) if step < self.steps - 1 else None
            yield *split_keys_values(both, k, v), shard_span(self.frame, self.n, self.stride, step), coming
            if coming is not None:
                both = current_communicator().wait(coming)


def _drop_none(*tensors: Tensor | None) -> list[Tensor]:
    """Those that are there: what is sent, and the accumulators, before a block is computed."""
    return [x for x in tensors if x is not None]


def accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """part, or the total that it was added to in place."""
    if total is None:
        return part
    torch.ops.sp.add_into(total, part)
    return total


def wait_then_concat(made: Tensor) -> Cat:
    """A concatenation that waits for a tensor; see ``pack.py``."""
    return lambda xs, dim: torch.ops.sp.pack(xs, dim, made)


def _can_stack(k: Tensor, v: Tensor) -> bool:
    return is_known(k.shape[3] == v.shape[3])


def _pack_keys_values(k: Tensor, v: Tensor, cat: Cat) -> Tensor:
    """(B, Hkv, s, D) and (B, Hkv, s, E), copied once, whatever the strides are.

    As wide as each other: (2, B, Hkv, s, D), because kernels read rows that follow each other faster. Else
    (B, Hkv, s, D + E).
    """
    return cat([k.unsqueeze(0), v.unsqueeze(0)], 0) if _can_stack(k, v) else cat([k, v], 3)


def split_keys_values(both: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The parts of k and of v in what was stacked or is side by side, for any number of rows; views."""
    keys, values = both.unbind(0) if both.ndim > k.ndim else both.split([k.shape[3], v.shape[3]], 3)
    return keys, values


class _RingGradients:
    """Gradients of keys that go round with the keys, one step behind, and home at the end."""

    def __init__(self, ring: RingKeys) -> None:
        self.ring, self.added, self.coming = ring, 0, None

    def add(self, part: Tensor) -> None:
        """The gradients of the next step's keys and values, packed, which are one rank further from home."""
        self.added += 1
        if self.coming is not None:
            part = part.add_(current_communicator().wait(self.coming))
        last = self.added == self.ring.steps
        self.coming = current_communicator().start_shift(part, self.ring.shift(1 - self.ring.steps if last else 1))

    def collect(self) -> Tensor:
        """The sum over all ranks for one's own keys."""
        assert self.coming is not None
        return current_communicator().wait(self.coming)


class _ScatteredGradients:
    """Gradients of keys that are kept until the end and then sent home in one exchange."""

    coming = None

    def __init__(self, ring: RingKeys) -> None:
        self.ring = ring
        self.parts: list[Tensor] = []

    def add(self, part: Tensor) -> None:
        """The gradients of the next step's keys and values, packed."""
        self.parts.append(part)

    def collect(self) -> Tensor:
        """The sum over all ranks for one's own keys."""
        ring = self.ring
        parts = torch.ops.sp.pack_by_owner(self.parts, ring.stride, ring.group)
        return current_communicator().all_to_all(parts, ring.size, routes.cross_route(ring.group, ring.stride)).sum(0)


RING_GRADIENTS: dict[str, type[_RingGradients] | type[_ScatteredGradients]] = {
    "travel": _RingGradients,
    "scatter": _ScatteredGradients,
}
