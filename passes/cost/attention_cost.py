"""Choose an attention strategy: sizes of an attention, candidates of every strategy, and the fastest one.

Costs of a strategy are defined in `passes/strategies/attention`. Bytes are those that one rank sends or receives.
Gradients of keys and values are sent in float32 (float64 for float64). The backward has 2.5 times the FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.frames import CONTIGUOUS, LAYOUTS, RowOrder
from sp_compile.lowering.base.ranks import STRATEGIES, Ranks
from sp_compile.passes.cost.walk.workspace import flash_workspace
from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size

from .collective_time import HeadBytes
from .machine import Machine


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one global attention: q (batch, heads, q_len, head_dim), v (batch, kv_heads, kv_len, v_head_dim)."""

    n: int  # number of ranks
    batch: int  # global batch size
    q_len: int  # queries
    kv_len: int  # keys
    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int
    v_head_dim: int
    element_size: int  # bytes
    causal: bool = False  # query i attends to keys 0..i
    window: int | None = None  # last keys of these that it attends to; distance if not causal
    mask: bool = False  # a mask is described by data only
    kernel: str = "named"  # rate in `Machine`; "fused": text masks or scores, "dense": all scores
    order: RowOrder = CONTIGUOUS  # row order of the program, in which attention needs no relayout
    documents: bool = False  # queries attend within documents of unknown length, see `halving_documents`
    training: bool = True  # gradients are computed

    @property
    def q_rows(self) -> int:
        """Return the number of queries per rank."""
        return -(-self.q_len // self.n)

    @property
    def kv_rows(self) -> int:
        """Return the number of keys per rank."""
        return -(-self.kv_len // self.n)

    @property
    def q_bytes(self) -> int:
        """Return the bytes of one query head on one rank."""
        return self.batch * self.q_rows * self.head_dim * self.element_size

    @property
    def out_bytes(self) -> int:
        """Return the bytes of one head of the result on one rank."""
        return self.batch * self.q_rows * self.v_head_dim * self.element_size

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of one key head and one value head on one rank."""
        return self.batch * self.kv_rows * (self.head_dim + self.v_head_dim) * self.element_size

    @property
    def head_bytes(self) -> HeadBytes:
        """Return the bytes of all heads on one rank."""
        queries, results = self.heads * self.q_bytes, self.heads * self.out_bytes
        return HeadBytes(queries, results, self.kv_heads * self.kv_bytes, self.kv_heads, self.element_size)

    @property
    def widening(self) -> int:
        """Return the ratio of bytes per element of accumulators and operands."""
        return self.head_bytes.widening

    @property
    def merge_bytes(self) -> float:
        """Return the bytes read and written to add one block's result to the accumulator of a rank."""
        return self.heads * self.out_bytes * (1 + 2 * self.widening)

    @property
    def gradient_bytes(self) -> float:
        """Return the bytes of a rank's gradient of q in its accumulation dtype; 0 without gradients."""
        return self.heads * self.q_bytes * self.widening if self.training else 0.0

    @property
    def accumulate_bytes(self) -> float:
        """Return the bytes read and written to add one block's gradient of q to that of a rank."""
        return self.heads * self.q_bytes * 3 * self.widening

    def workspace(self, ulysses: int, keys: int) -> int:
        """Return the workspace of a kernel's backward in bytes.

        Args:
            ulysses: Ranks that share heads; a rank has their rows for its part of the heads.
            keys: Keys of one call.
        """
        if not self.training or self.kernel not in FLASH_RATE:
            return 0
        heads, of_keys = self.heads // ulysses, math.lcm(self.kv_heads, ulysses) // ulysses
        nbytes = self.batch * of_keys * keys * (self.head_dim + self.v_head_dim) * self.element_size
        return flash_workspace(self.batch, heads, of_keys, self.q_rows * ulysses, self.head_dim, nbytes)

    @property
    def flops(self) -> float:
        """Return the forward FLOPs of one rank if the work is balanced."""
        dims = self.head_dim + self.v_head_dim
        return 2 * self.batch * self.heads * dims * self.pairs(0, self.q_len) / self.n

    def pairs(self, start: float, stop: float) -> float:
        """Return the (query, key) pairs of the queries [start, stop), in the limit of long sequences."""
        if self.documents and self.q_len == self.kv_len:
            return sum(
                self._pairs_within_document(first, length, start, stop)
                for first, length in halving_documents(self.q_len)
            )

        def distant(by: float) -> float:  # pairs with the key at least `by` before the query
            """Return the number of pairs whose key is at least `by` positions before the query."""
            return _integrate_clamped(stop - by, self.kv_len) - _integrate_clamped(start - by, self.kv_len)

        later = (stop - start) * self.kv_len - distant(0)
        attended = (stop - start) * self.kv_len - (later if self.causal else 0)
        if self.window is None:
            return attended
        ahead = 0.0 if self.causal else (stop - start) * self.kv_len - distant(-self.window)
        return attended - distant(self.window) - ahead

    def _pairs_within_document(self, first: int, length: int, start: float, stop: float) -> float:
        """Return the pairs of one document."""
        document = replace(self, q_len=length, kv_len=length, documents=False)
        begin, end = (min(max(at - first, 0), length) for at in (start, stop))
        return document.pairs(begin, end)

    def imbalance(self, parts: int, layout: str = CONTIGUOUS.name) -> float:
        """Return the maximum over the mean work of `parts` parts of the queries in this layout."""
        folds = LAYOUTS[layout].chunks
        if LAYOUTS[layout].balances_causal(self.documents) or not self.q_len * self.kv_len:
            return 1.0
        rows = self.q_len / parts / folds
        work = [self.pairs(i * rows, (i + 1) * rows) for i in range(folds * parts)]
        if folds == 2:
            work = [work[i] + work[-1 - i] for i in range(parts)]
        return max(work) * parts / self.pairs(0, self.q_len)


def halving_documents(length: int) -> list[tuple[int, int]]:
    """Return documents as (start, length), each half of the remaining positions.

    They model documents of unknown lengths. No split balances them, which is true for log-normal lengths as well
    (`benchmarks/plans.py`), and there are long and short documents for any sequence length.
    """
    found: list[tuple[int, int]] = []
    first = 0
    while length - first > 1 and len(found) < MAX_DOCUMENTS - 1:
        found.append((first, (length - first + 1) // 2))
        first += found[-1][1]
    return [*found, (first, length - first)]


def _integrate_clamped(x: float, keys: int) -> float:
    """Return the integral of clamp(t, 0, keys) for t up to x."""
    if x <= 0:
        return 0.0
    return x * x / 2 if x <= keys else keys * keys / 2 + (x - keys) * keys


BACKWARD_FLOPS = 2.5
FLASH_RATE = frozenset({"cudnn", "flash", "flash3", "flash4"})
"""Kernels whose backward has a workspace, see `cost/walk/workspace.py`."""
TIE_RATIO = 1.05
MAX_DOCUMENTS = 8  # documents of a sequence in this model


@dataclass(frozen=True)
class Candidate:
    """Candidate implementation of an attention: `ulysses` neighboring ranks share heads, `ring` groups the sequence."""

    kind: str  # name of the strategy
    ulysses: int  # ranks that exchange heads
    ring: int  # ranks of a ring
    layout: str  # "contiguous", "zigzag" or "balanced": row order inside
    forward: float  # predicted seconds
    backward: float  # predicted seconds
    memory: float  # bytes of a rank in addition to its shards, maximum of forward and backward
    rounds: tuple[int, int]  # collectives of forward and backward
    ring_grads: str = ""  # gradients of K and V "travel" or are reduced by "scatter"; "" without a ring
    legal: str | None = None  # reason why it is not possible
    fits: bool = True  # False if memory is insufficient
    relayout: bool = False  # q, k, v move to zigzag order and the result back; cost from `all_candidates`
    folds_keys: bool = True  # keys and values move, too
    chunks: int = 1  # groups of heads that are exchanged separately

    @property
    def seconds(self) -> float:
        """Return the seconds of forward and backward."""
        return self.forward + self.backward

    @property
    def collectives(self) -> int:
        """Return the number of collectives of forward and backward."""
        return sum(self.rounds)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Registration of a strategy that splits attention over ranks."""

    name: str  # value of the option attention=, and `kind` of its candidates
    preference: int  # lower values win ties
    rewrite: Any  # `AttentionPass` of the same name; its `op` replaces attention
    candidates: Callable[[AttentionShape, Machine, str], Iterable[Candidate]]
    # (forward, backward) bytes that a rank sends in a call of the op; required with an op
    sends: Callable[[OpCall, int], tuple[Size, Size]] | None = None
    declare: Callable[[OpCall, Ranks], None] = lambda call, ranks: None  # declares the routes of the op's exchanges
    neighbours: Callable[[OpCall], int] = lambda call: 1  # neighboring ranks that exchange heads in a call
    axes: tuple[()] | tuple[str, str] = ()  # names of the mesh axes (ring, neighbors)
    always: bool = False  # True if it splits any attention over any number of ranks
    options: tuple[str, ...] = ()  # fields of SPConfig for this strategy only

    def __post_init__(self) -> None:
        if self.op is not None and self.sends is None:
            raise SpError(
                "SP981", f"sends: expected the bytes that a rank sends in {self.op}, got None in {self.name!r}."
            )

    @property
    def op(self) -> Any:
        """Return the op, or None if the strategy uses the original attention between exchanges."""
        return self.rewrite.op


def attention_strategies() -> list[Strategy]:
    """Return all registered strategies by preference."""
    return sorted(STRATEGIES.values(), key=lambda s: s.preference)


def all_candidates(shape: AttentionShape, machine: Machine) -> list[Candidate]:
    """Return all candidates, legal or not, in a fixed order; on one rank nothing is split."""
    # A window leaves little to balance, and zigzag order would distribute its neighbors over all ranks.
    halves = shape.n > 1 and shape.causal and shape.window is None and shape.q_len == shape.kv_len
    undealt = (order for order in LAYOUTS.values() if not order.is_balanced and (order.is_in_order or halves))
    layouts = [order.name for order in ([shape.order] if shape.order.is_balanced else undealt)]
    strategies = [s for s in attention_strategies() if shape.n > 1 or s.op is None]
    machine = replace(machine, flops=machine.flops * machine.efficiency(shape.kernel))
    found = [c for layout in layouts for s in strategies for c in s.candidates(shape, machine, layout)]
    return [_complete_candidate(c, shape, machine) for c in found]


def candidates_in_order(shape: AttentionShape, machine: Machine) -> list[Candidate]:
    """Return the candidates in the program's row order; in a permuted order a window reaches all ranks."""
    if shape.order.is_balanced:
        return all_candidates(replace(shape, window=None), machine)
    found = all_candidates(shape, machine)
    if shape.order.is_in_order or not shape.causal or shape.q_len != shape.kv_len:
        return found
    others = all_candidates(replace(shape, window=None), machine)
    return [c for c in found if c.ring == 1] + [c for c in others if c.ring > 1 and c.layout == shape.order.name]


def fastest_candidate(found: Iterable[Candidate]) -> Candidate:
    """Return the fastest legal candidate.

    Raises:
        SpError: If no candidate is legal.
    """
    found = list(found)
    legal = [c for c in found if c.legal is None]
    if not legal:
        raise SpError("SP701", f"attention: {'; '.join(f'{c.kind}: {c.legal}' for c in found)}.")
    return min(legal, key=lambda c: (c.seconds, *_preference_key(c)))


def choose_attention(found: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate, or one within 5 % in time and memory that has fewer collectives.

    Ties are resolved by the preference of the strategies.

    Raises:
        SpError: If no candidate is legal.
    """
    best = fastest_candidate(found)
    # Without the bound on memory a gather, which has one collective less, would win every long sequence.
    fast = [c for c in found if c.seconds <= TIE_RATIO * best.seconds and c.memory <= TIE_RATIO * best.memory]
    tied = [c for c in fast if c.legal is None]
    return min(tied, key=lambda c: (*_preference_key(c), c.seconds))


def _preference_key(c: Candidate) -> tuple[int, int, bool, int, str]:
    return c.collectives, STRATEGIES[c.kind].preference, c.relayout, c.ring, c.layout


def _complete_candidate(c: Candidate, shape: AttentionShape, machine: Machine) -> Candidate:
    """Add the cost of a relayout and a mask, omit the backward without training, and apply the memory limit."""
    if not LAYOUTS[c.layout].is_in_order and c.layout != shape.order.name:
        extra = _relayout_seconds(shape, machine, c.folds_keys)
        rounds = (c.rounds[0] + 2, c.rounds[1] + 2)
        c = replace(c, relayout=True, forward=c.forward + extra, backward=c.backward + extra, rounds=rounds)
    if shape.mask:
        c = replace(c, memory=c.memory + shape.batch * c.ulysses * shape.q_rows * shape.kv_len)
    if not shape.training:
        c = replace(c, backward=0.0, rounds=(c.rounds[0], 0), ring_grads="")
    if c.legal is None and c.memory > machine.memory:
        return replace(c, legal=f"{c.memory / 2**20:.1f} MiB, with {machine.memory / 2**20:.1f} MiB free", fits=False)
    return c


def _relayout_seconds(shape: AttentionShape, machine: Machine, keys: bool) -> float:
    """Return the seconds to move q, and k and v, from contiguous to zigzag order, and the result back."""
    moved = shape.head_bytes
    both = (moved.queries + (moved.keys if keys else 0), moved.results)
    return sum(machine.seconds("fold", nbytes, shape.n) + machine.copy(2 * nbytes) for nbytes in both)
