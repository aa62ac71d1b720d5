"""Count the bytes that elementwise kernels of an attention move on the absent GPU: ours, and torch's in eager mode.

The operators' bodies run on borrowed tensors, so values are checked and row ranges are those of each rank. Attention
kernels, products and exchanges are not counted. A tensor that a kernel reads or writes counts with its elements.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from support.cuda.attention import KERNELS
from support.cuda.borrowed import PRODUCTS, Borrowed, Watch, borrow, give_back
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sp_compile.lowering.attention import attend, attend_parts, merge_blocks
from sp_compile.lowering.attention.gathered_kernel import GatheredKeys
from sp_compile.lowering.attention.op_args import LocalArgs
from sp_compile.lowering.attention.ring_kernel import RingKeys
from sp_compile.lowering.comm import simulate
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.masks.spans import shard_span

aten, sp = torch.ops.aten, torch.ops.sp

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
OVERWRITES = {"copy_", "zero_", "fill_"}
"""Operators that write an operand without reading it, as those that write to `out`."""


@dataclass
class Moved:
    """Bytes that elementwise kernels move in one pass of a rank, and the results filled with zeros."""

    bytes: Counter[str] = field(default_factory=Counter)  # by kernel
    zeros: int = 0  # bytes of zero fills

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class CountBytes(Watch):
    """A mode that counts the bytes of elementwise kernels in `moved`, except in `paused` blocks."""

    def __init__(self, bodies: dict[Any, Callable[..., Any]]) -> None:
        """bodies: implementations of opaque operators, which are traced in place of the operators."""
        super().__init__(bodies)
        self.moved, self.is_paused = Moved(), False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def add(self, name: str, *tensors: Tensor) -> None:
        """Count one read or write of each tensor for a kernel."""
        if not self.is_paused:
            self.moved.bytes[name] += sum(x.numel() * x.element_size() for x in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.partition("::")[2]
        is_counted = func not in KERNELS and func not in PRODUCTS and func not in self.glue
        if not is_counted or func.is_view or name in ALLOCATIONS:
            return out
        given = [*zip(args, func._schema.arguments)]
        given += [(kwargs[x.name], x) for x in func._schema.arguments if kwargs and x.name in kwargs]
        written = [
            x for value, argument in given
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_leaves(value)
        ]  # fmt: skip
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor) and not any(x is y for y in written)]
        read = [] if name.startswith("new_") else tree_leaves((args, kwargs))
        overwrites = name in OVERWRITES or func._overloadname == "out"
        read = [x for x in read if not (overwrites and any(x is y for y in written))]
        moved = [x for x in (*read, *written, *results) if isinstance(x, Borrowed)]
        self.add(name, *moved)
        if name in {"zero_", "zeros", "new_zeros", "zeros_like"} and not self.is_paused:
            self.moved.zeros += sum(x.numel() * x.element_size() for x in (*written, *results))
        return out


_active = threading.local()  # .mode: the counting mode of a simulated rank's thread


def _merge_by_kernel(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `launch_merge` by arithmetic, and count the rows that its kernel reads and writes."""
    mode = _active.mode
    with mode.paused():
        read_b = out_b.masked_fill((lse_b == -torch.inf).unsqueeze(-1), 0)
        merged = merge_blocks.merge_pointwise(out_a, lse_a, read_b, lse_b)
        if into is None:
            into, moved = merged, [out_a, out_b, merged[0]]
        else:
            for x, value in zip(into, merged):
                x.copy_(value)
            # Rows without keys in the block are not read from it, and in place they are neither read nor written.
            rows = (give_back(lse_b) != -torch.inf).flatten(0, -2).any(0).nonzero()
            half = slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) else slice(0)
            others = half if into[0] is out_a else slice(None)
            moved = [out_a[..., others, :], out_b[..., half, :], into[0][..., others, :]]
    mode.add("merge", *moved)
    return into


def _exchange_free(*args: Any) -> Tensor:
    """Run an exchange of simulated ranks, whose copies do not count."""
    with _active.mode.paused():
        return _exchange(*args)


_exchange = simulate._SimulatedWorld.exchange


BODIES: dict[Any, Callable[..., Any]] = {
    sp.attend.default: attend.attend,
    sp.attend_backward.default: attend.attend_backward,
    sp.merge_into.default: merge_blocks.merge_into,
    sp.merge_to.default: merge_blocks.merge_to,
    sp.add_into.default: merge_blocks.add_into,
    sp.attend_backward_parts.default: attend_parts.attend_backward_parts,
    sp.add_rows_into.default: attend_parts.add_rows_into,
    sp.add_rows_to.default: attend_parts.add_rows_to,
}
"""Bodies of the operators of attention, which are counted in place of the operators."""


@dataclass(frozen=True)
class Setting:
    """A causal attention of n ranks in bfloat16, with rows for the kernels of a GPU."""

    keys: str  # "travel", "scatter" (rings) or "gather"
    n: int = 4
    rows: int = 256  # of a rank
    folds: int = 2  # chunks of a rank: 2 for zigzag
    heads: int = 2
    key_heads: int = 2
    width: int = 16
    predicate: str = "k <= q"

    @property
    def frame(self) -> list[int]:
        length = self.n * self.rows
        return [1, length, 0, length, self.folds]

    def source(self) -> RingKeys | GatheredKeys:
        """Return the exchange of keys."""
        if self.keys == "gather":
            return GatheredKeys(self.frame, self.n, SIMULATED_GROUP)
        return RingKeys(self.frame, self.n, 1, self.n, self.keys, SIMULATED_GROUP)

    def arguments(self) -> LocalArgs:
        """Return the arguments of a rank's queries."""
        span = shard_span(self.frame, self.n, 1)
        return LocalArgs(
            None, [], [], [], [], self.predicate, None, 0.0, self.width**-0.5, "", [], [], span, [], 1, SIMULATED_GROUP
        )  # fmt: skip

    def order(self) -> Tensor:
        """Return the position of each row, by rank: (n, rows)."""
        chunks = torch.arange(self.n * self.rows).chunk(self.n * self.folds)
        if self.folds == 1:
            return torch.stack(chunks)
        return torch.stack([torch.cat([chunks[r], chunks[2 * self.n - 1 - r]]) for r in range(self.n)])

    def operands(self) -> list[Tensor]:
        """Return the full q, k, v and the cotangent, heads after rows in memory."""
        random, length = torch.Generator().manual_seed(0), self.n * self.rows
        heads = (self.heads, self.key_heads, self.key_heads, self.heads)
        made = [torch.randn(1, length, h, self.width, generator=random) for h in heads]
        return [x.to(torch.bfloat16).transpose(1, 2) for x in made]


@dataclass
class Counted:
    """Values of all ranks in sequence order, and the bytes of the average rank."""

    values: list[Tensor]  # out, dq, dk, dv
    forward: float  # bytes per element of the queries
    backward: float
    kernels: list[dict[str, int]]  # bytes by kernel, forward and backward of rank 0
    zeros: int  # bytes that all ranks fill with zeros


def count(setting: Setting) -> Counted:
    """Run forward and backward of all ranks, as the autograd function does, and count bytes."""
    order, full = setting.order(), setting.operands()
    shards = [[x[:, :, rows] for x in full] for rows in order]

    def run(rank: int) -> tuple[list[Tensor], list[Moved]]:
        q, k, v, grad = (borrow(x.transpose(1, 2).contiguous().transpose(1, 2)) for x in shards[rank])
        args, keys = setting.arguments(), setting.source()
        with _counting() as forward, torch.no_grad():
            out, lse = keys.forward(q, k, v, args, q.dtype)
            out = out.to(q.dtype)
        with _counting() as backward, torch.no_grad():
            grads = keys.backward((grad, out, lse), q, k, v, args, False)[:3]
            grads = [x.to(q.dtype) for x in grads]
        return [give_back(x) for x in (out, *grads)], [forward.moved, backward.moved]

    with _kernels_of_gpu():
        results = run_ranks(setting.n, run)
    values = []
    for parts in zip(*(found for found, _ in results)):
        value = torch.empty_like(torch.cat(parts, 2))
        for rows, part in zip(order, parts):
            value[:, :, rows] = part
        values.append(value)
    elements = full[0].numel()
    forward, backward = (sum(moved[i].total for _, moved in results) / elements for i in (0, 1))
    zeros = sum(one.zeros for _, moved in results for one in moved)
    return Counted(values, forward, backward, [dict(one.bytes) for one in results[0][1]], zeros)


@contextmanager
def _counting() -> Iterator[CountBytes]:
    """Count what this thread does inside the block."""
    _active.mode = CountBytes(BODIES)
    with _active.mode:
        yield _active.mode


@contextmanager
def _kernels_of_gpu() -> Iterator[None]:
    """Use Triton's kernels inside, by their arithmetic."""
    with (
        mock.patch.object(simulate._SimulatedWorld, "exchange", _exchange_free),
        mock.patch.object(merge_blocks, "can_use_triton", lambda x: x.is_cuda),
        mock.patch("sp_compile.lowering.triton.merge_kernel.launch_merge", _merge_by_kernel),
    ):
        yield


def reference(setting: Setting) -> Sequence[Tensor]:
    """Return out, dq, dk and dv of dense attention in float64."""
    q, k, v, grad = (x.double() for x in setting.operands())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    every = torch.arange(q.shape[2])
    allowed = every <= every[:, None] if setting.predicate else torch.ones(len(every), len(every), dtype=torch.bool)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
