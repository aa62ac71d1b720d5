"""What an attention over ranks costs and which way is taken: its sizes, the candidates of every strategy, the choice.

What a strategy costs, it says itself: `passes/strategies/attention`. Bytes are those that one rank sends or receives.
Gradients of keys and values move in float32 (float64 for float64). Backward computes 2.5 times as much.
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

from .machine import Machine


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One attention of the global program: q (batch, heads, q_len, head_dim), v (batch, kv_heads, kv_len, v_head_dim).

    n: ranks. causal: query i attends to keys 0..i. window: and, of these, to the last `window` only (without causal:
    to the keys less than `window` away). mask: there is a mask that only data describes. kernel: whose throughput
    counts, by the name that `Machine` has for it; "fused" and "dense" are of texts and of arithmetic on all scores.
    order: that in which the whole program keeps its sequence, so that attention in it costs no exchange. documents: a
    query sees keys of its own document only; how long these are is not known yet, so they count as
    `halving_documents` ones.
    training: gradients flow.
    """

    n: int
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    element_size: int
    causal: bool = False
    window: int | None = None
    mask: bool = False
    kernel: str = "named"
    order: RowOrder = CONTIGUOUS
    documents: bool = False
    training: bool = True

    @property
    def q_rows(self) -> int:
        """Queries of one rank."""
        return -(-self.q_len // self.n)

    @property
    def kv_rows(self) -> int:
        """Keys of one rank."""
        return -(-self.kv_len // self.n)

    @property
    def q_bytes(self) -> int:
        """One query head on one rank."""
        return self.batch * self.q_rows * self.head_dim * self.element_size

    @property
    def out_bytes(self) -> int:
        """One head of the result on one rank."""
        return self.batch * self.q_rows * self.v_head_dim * self.element_size

    @property
    def kv_bytes(self) -> int:
        """One key head and one value head on one rank."""
        return self.batch * self.kv_rows * (self.head_dim + self.v_head_dim) * self.element_size

    @property
    def widening(self) -> float:
        """Bytes of an element of what is summed over blocks or ranks (float32, float64 for float64), over its own."""
        return max(4, self.element_size) / self.element_size

    @property
    def merge_bytes(self) -> float:
        """Read and written to add one block's result to the accumulator of all of one rank's rows."""
        return self.heads * self.out_bytes * (1 + 2 * self.widening)

    @property
    def gradient_bytes(self) -> float:
        """The gradient of q of all of one rank's rows, in what it is summed in; nothing where none flows."""
        return self.heads * self.q_bytes * self.widening if self.training else 0.0

    @property
    def accumulate_bytes(self) -> float:
        """Read and written to add one block's gradient of q to that of all of one rank's rows."""
        return self.heads * self.q_bytes * 3 * self.widening

    def workspace(self, ulysses: int, keys: int) -> int:
        """Bytes that a kernel's backward takes for itself, on a rank with the rows and a share of the heads of so many.

        keys: of one call.
        """
        if not self.training or self.kernel not in FLASH_RATE:
            return 0
        heads, of_keys = self.heads // ulysses, math.lcm(self.kv_heads, ulysses) // ulysses
        nbytes = self.batch * of_keys * keys * (self.head_dim + self.v_head_dim) * self.element_size
        return flash_workspace(self.batch, heads, of_keys, self.q_rows * ulysses, self.head_dim, nbytes)

    @property
    def flops(self) -> float:
        """Forward FLOPs of one rank if all ranks do the same."""
        dims = self.head_dim + self.v_head_dim
        return 2 * self.batch * self.heads * dims * self.pairs(0, self.q_len) / self.n

    def pairs(self, start: float, stop: float) -> float:
        """How many (query, key) pairs the queries [start, stop) attend to, in the limit of long sequences."""
        if self.documents and self.q_len == self.kv_len:
            return sum(
                self._pairs_within_document(first, length, start, stop)
                for first, length in halving_documents(self.q_len)
            )

        def distant(by: float) -> float:  # pairs whose key lies at least `by` before the query
            return _integrate_clamped(stop - by, self.kv_len) - _integrate_clamped(start - by, self.kv_len)

        later = (stop - start) * self.kv_len - distant(0)
        attended = (stop - start) * self.kv_len - (later if self.causal else 0)
        if self.window is None:
            return attended
        ahead = 0.0 if self.causal else (stop - start) * self.kv_len - distant(-self.window)
        return attended - distant(self.window) - ahead

    def _pairs_within_document(self, first: int, length: int, start: float, stop: float) -> float:
        """The pairs of one document."""
        alone = replace(self, q_len=length, kv_len=length, documents=False)
        begin, end = (min(max(at - first, 0), length) for at in (start, stop))
        return alone.pairs(begin, end)

    def imbalance(self, parts: int, layout: str = CONTIGUOUS.name) -> float:
        """The work of the busiest of so many parts of the queries in this layout, over the mean."""
        folds = LAYOUTS[layout].chunks
        if LAYOUTS[layout].balances_causal(self.documents) or not self.q_len * self.kv_len:
            return 1.0
        rows = self.q_len / parts / folds
        work = [self.pairs(i * rows, (i + 1) * rows) for i in range(folds * parts)]
        if folds == 2:
            work = [work[i] + work[-1 - i] for i in range(parts)]
        return max(work) * parts / self.pairs(0, self.q_len)


def halving_documents(length: int) -> list[tuple[int, int]]:
    """Documents of which each is half of what is left: (first position, positions).

    They stand for documents that nobody knows yet. No cut of a sequence suits them, as it suits no log-normal ones
    (`benchmarks/plans.py`), and whatever the length is, there are long and short ones.
    """
    found: list[tuple[int, int]] = []
    first = 0
    while length - first > 1 and len(found) < MAX_DOCUMENTS - 1:
        found.append((first, (length - first + 1) // 2))
        first += found[-1][1]
    return [*found, (first, length - first)]


def _integrate_clamped(x: float, keys: int) -> float:
    """The integral of clamp(t, 0, keys) for t up to x."""
    if x <= 0:
        return 0.0
    return x * x / 2 if x <= keys else keys * keys / 2 + (x - keys) * keys


BACKWARD_FLOPS = 2.5
FLASH_RATE = frozenset({"cudnn", "flash", "flash3", "flash4"})
"""Kernels whose backward takes memory for itself, as `cost/walk/workspace.py` has it."""
TIE_RATIO = 1.05
MAX_DOCUMENTS = 8  # that a sequence is thought to hold


@dataclass(frozen=True)
class Candidate:
    """One way to compute an attention: heads shared by `ulysses` neighbouring ranks, the sequence split over `ring`.

    kind: the strategy's name. layout: "contiguous", "zigzag" or "balanced", the order of the sequence inside. forward,
    backward: predicted seconds. memory: bytes that a rank holds beyond its shards, in the larger of both. rounds:
    collectives forward and backward. ring_grads: how the gradients of K and V get home: they "travel" with them, or
    "scatter" (one reduce-scatter); "" without a ring. legal: None, or the reason why not. fits: is there enough memory?
    relayout: q, k and v first move from contiguous to zigzag order, and the result back; `all_candidates` adds what
    that
    costs. folds_keys: do keys and values move then, too? chunks: groups of heads that are exchanged one by one.
    """

    kind: str
    ulysses: int
    ring: int
    layout: str
    forward: float
    backward: float
    memory: float
    rounds: tuple[int, int]
    ring_grads: str = ""
    legal: str | None = None
    fits: bool = True
    relayout: bool = False
    folds_keys: bool = True
    chunks: int = 1

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def collectives(self) -> int:
        """Forward and backward together."""
        return sum(self.rounds)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to split attention over ranks: all that the compiler knows of it.

    name: what the option attention= calls it, and the `kind` of its candidates.
    preference: of two that are as good, the one of lower preference is taken.
    rewrite: the pass, an `AttentionPass` of the same name; its `op` is what it puts in the place of attention.
    candidates(shape, machine, layout): the ways to run an attention so, with the sequence in that layout inside; one
        that cannot be is returned with the reason, or not at all.
    sends(call, n): the bytes that one of n ranks sends in a call of the op, forward and backward. Needed with an op.
    declare(call, ranks): declares the routes of the op's exchanges (`lowering/comm/routes.py`), if it has any.
    neighbours(call): how many ranks next to each other exchange heads in a call of the op, so that the rows of all of
        them are what one of them attends with.
    axes: names of two axes of a mesh that split the sequence together, of which the second one's ranks are neighbours.
    always: does it split any attention over any number of ranks, of which each holds its part only?
    options: fields of SPConfig that are for it alone, "auto" where nothing is asked for.
    """

    name: str
    preference: int
    rewrite: Any
    candidates: Callable[[AttentionShape, Machine, str], Iterable[Candidate]]
    sends: Callable[[OpCall, int], tuple[Size, Size]] | None = None
    declare: Callable[[OpCall, Ranks], None] = lambda call, ranks: None
    neighbours: Callable[[OpCall], int] = lambda call: 1
    axes: tuple[()] | tuple[str, str] = ()
    always: bool = False
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.op is not None and self.sends is None:
            raise SpError(
                "SP981", f"sends: expected the bytes that a rank sends in {self.op}, got None in {self.name!r}."
            )

    @property
    def op(self) -> Any:
        """Its op; None if it leaves the attention as it is, between exchanges."""
        return self.rewrite.op


def attention_strategies() -> list[Strategy]:
    """All that are registered, in the order of their preference."""
    return sorted(STRATEGIES.values(), key=lambda s: s.preference)


def all_candidates(shape: AttentionShape, machine: Machine) -> list[Candidate]:
    """Every way to compute the attention, legal or not, in a fixed order. On one rank nothing is split."""
    # A window leaves little to balance, and zigzag order would spread its few neighbours over all ranks.
    halves = shape.n > 1 and shape.causal and shape.window is None and shape.q_len == shape.kv_len
    undealt = (order for order in LAYOUTS.values() if not order.is_balanced and (order.is_in_order or halves))
    layouts = [order.name for order in ([shape.order] if shape.order.is_balanced else undealt)]
    ways = [s for s in attention_strategies() if shape.n > 1 or s.op is None]
    machine = replace(machine, flops=machine.flops * machine.efficiency(shape.kernel))
    found = [c for layout in layouts for s in ways for c in s.candidates(shape, machine, layout)]
    return [_complete_candidate(c, shape, machine) for c in found]


def candidates_in_order(shape: AttentionShape, machine: Machine) -> list[Candidate]:
    """The candidates in the program's order; in another than its own a window reaches the keys of all ranks."""
    if shape.order.is_balanced:
        return all_candidates(replace(shape, window=None), machine)
    found = all_candidates(shape, machine)
    if shape.order.is_in_order or not shape.causal or shape.q_len != shape.kv_len:
        return found
    others = all_candidates(replace(shape, window=None), machine)
    return [c for c in found if c.ring == 1] + [c for c in others if c.ring > 1 and c.layout == shape.order.name]


def fastest_candidate(found: Iterable[Candidate]) -> Candidate:
    """The fastest legal candidate. Raises SpError: there is none."""
    found = list(found)
    legal = [c for c in found if c.legal is None]
    if not legal:
        raise SpError("SP701", f"attention: {'; '.join(f'{c.kind}: {c.legal}' for c in found)}.")
    return min(legal, key=lambda c: (c.seconds, *_preference_key(c)))


def choose_attention(found: Sequence[Candidate]) -> Candidate:
    """The fastest; of those within 5 % of it that need no more memory, the one with the fewest collectives.

    Then in the order of the strategies' preference. Raises SpError: no candidate is legal.
    """
    best = fastest_candidate(found)
    # Without the bound on memory a gather, which has one collective less, would win every long sequence.
    fast = [c for c in found if c.seconds <= TIE_RATIO * best.seconds and c.memory <= TIE_RATIO * best.memory]
    tied = [c for c in fast if c.legal is None]
    return min(tied, key=lambda c: (*_preference_key(c), c.seconds))


def _preference_key(c: Candidate) -> tuple[int, int, bool, int, str]:
    return c.collectives, STRATEGIES[c.kind].preference, c.relayout, c.ring, c.layout


def _complete_candidate(c: Candidate, shape: AttentionShape, machine: Machine) -> Candidate:
    """With the exchanges of a relayout, what a mask takes, no backward where nothing is trained, and the memory cap."""
    if not LAYOUTS[c.layout].is_in_order and c.layout != shape.order.name:
        extra = _relayout_seconds(shape, machine, c.folds_keys)
        rounds = (c.rounds[0] + 2, c.rounds[1] + 2)
        c = replace(c, relayout=True, forward=c.forward + extra, backward=c.backward + extra, rounds=rounds)
    if shape.mask:
        c = replace(c, memory=c.memory + shape.batch * c.ulysses * shape.q_rows * shape.kv_len)
    if not shape.training:
        c = replace(c, backward=0.0, rounds=(c.rounds[0], 0), ring_grads="")
    if c.legal is None and c.memory > machine.memory:
        return replace(c, legal=f"{c.memory / 2**20:.1f} MiB, with {machine.memory / 2**20:.1f} MiB left", fits=False)
    return c


def _relayout_seconds(shape: AttentionShape, machine: Machine, keys: bool) -> float:
    """Seconds to bring q, and k and v, from contiguous to zigzag order, and the result back."""
    there = shape.heads * shape.q_bytes + (shape.kv_heads * shape.kv_bytes if keys else 0)
    both = (there, shape.heads * shape.out_bytes)
    return sum(machine.seconds("fold", nbytes, shape.n) + machine.copy(2 * nbytes) for nbytes in both)
