"""Choose an attention strategy by predicted time.

An `AttentionShape` describes one attention of the unsplit program. Each strategy (ring, all-to-all of heads, all-gather
of keys, ...) proposes `Candidate`s with their seconds and bytes on a `Machine`; `choose_attention` returns the fastest.
Costs of a strategy are defined in `passes/strategies/attention`. Bytes are those that one rank sends or receives.
Gradients of keys and values are sent in float32 (float64 for float64). The backward has 2.5 times the FLOPs.

    row           position of the sequence: a query of a rank and, for equal lengths, a key
    layout        order in which ranks store rows: contiguous, zigzag (two chunks, one from each end of the sequence),
                  or balanced (computed by the program at run time)
    relayout      exchange of q, k and v from contiguous to zigzag order before the attention, and of the result back
    accumulator   sum of the results of key blocks, or of their gradients, in float32 (float64)
    refusal       None if possible for this shape, these options and this memory
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

# Kernels whose backward has a workspace, see `cost/walk/workspace.py`
WORKSPACE_KERNELS = frozenset({"cudnn", "flash", "flash3", "flash4"})
# candidates up to this factor slower, or with this factor more memory, count as equal to the fastest one
TIE_RATIO = 1.05
MAX_DOCUMENTS = 8  # documents of a sequence in the model of documents with unknown lengths


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one global attention, from which strategies predict seconds and bytes.

    They are those of q (batch, heads, q_len, head_dim) and v (batch, kv_heads, kv_len, v_head_dim).
    """

    n: int  # number of ranks
    batch: int  # global batch size
    q_len: int  # queries
    kv_len: int  # keys
    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int  # of queries and keys
    v_head_dim: int  # of values
    element_size: int  # bytes
    causal: bool = False  # query i attends to keys 0..i
    window: int | None = None  # maximum distance of a key that a query attends to, in positions
    mask: bool = False  # a mask is described by data only
    mask_rows: bool = False  # a rank has the rows of a tensor mask for its own queries only
    kernel: str = "named"  # kernel whose rate `Machine` has; "fused": FlexAttention, "dense": stores all scores
    order: RowOrder = CONTIGUOUS  # row order of the program, in which attention needs no relayout
    documents: bool = False  # queries attend within documents of unknown length, see `halving_documents`
    training: bool = True  # gradients are computed

    @property
    def q_rows(self) -> int:
        """Return the number of queries per rank, with padding."""
        return -(-self.q_len // self.n)

    @property
    def kv_rows(self) -> int:
        """Return the number of keys per rank, with padding."""
        return -(-self.kv_len // self.n)

    @property
    def q_bytes(self) -> int:
        """Return the bytes of one query head on one rank."""
        return self.batch * self.q_rows * self.head_dim * self.element_size

    @property
    def head_bytes(self) -> HeadBytes:
        """Return the bytes of all heads on one rank, from which strategies compute their exchanges."""
        queries = self.heads * self.q_bytes
        results = self.batch * self.heads * self.q_rows * self.v_head_dim * self.element_size
        keys_and_values = self.batch * self.kv_heads * self.kv_rows * (self.head_dim + self.v_head_dim)
        return HeadBytes(queries, results, keys_and_values * self.element_size, self.kv_heads, self.element_size)

    @property
    def widening(self) -> int:
        """Return the bytes per element of a float32 (float64) accumulator, divided by those of an operand."""
        return self.head_bytes.widening

    @property
    def merge_bytes(self) -> float:
        """Return the bytes read and written to add the result of one key block to the accumulator of a rank.

        The block's result is read, and the accumulator, whose elements are `widening` times as large, read and written.
        """
        return self.head_bytes.results * (1 + 2 * self.widening)

    @property
    def gradient_bytes(self) -> float:
        """Return the bytes of a rank's accumulator of the gradient of q; 0 without gradients."""
        return self.heads * self.q_bytes * self.widening if self.training else 0.0

    @property
    def accumulate_bytes(self) -> float:
        """Return the bytes read and written to add the gradient of q of one key block to its accumulator.

        Both have the dtype of the accumulator, whose elements are `widening` times as large as those of q. The gradient
        is read, and the accumulator read and written.
        """
        return self.heads * self.q_bytes * 3 * self.widening

    def workspace(self, ulysses: int, keys: int) -> int:
        """Return the bytes that the backward kernel allocates besides its operands and results.

        Strategies add them to the memory of their candidates.

        Args:
            ulysses: Ranks that exchange heads for rows: a rank has the rows of all of them for its part of the heads.
            keys: Keys of one call.
        """
        if not self.training or self.kernel not in WORKSPACE_KERNELS:
            return 0
        # Key heads are repeated until the ranks divide them.
        heads, key_heads = self.heads // ulysses, math.lcm(self.kv_heads, ulysses) // ulysses
        key_bytes = self.batch * key_heads * keys * (self.head_dim + self.v_head_dim) * self.element_size
        return flash_workspace(
            batch=self.batch,
            heads=heads,
            key_heads=key_heads,
            rows=self.q_rows * ulysses,
            dim=self.head_dim,
            key_bytes=key_bytes,
        )

    @property
    def flops(self) -> float:
        """Return the forward FLOPs of one rank if the work is balanced."""
        dims = self.head_dim + self.v_head_dim
        return 2 * self.batch * self.heads * dims * self.pairs(0, self.q_len) / self.n

    def pairs(self, start: float, stop: float) -> float:
        """Return the number of (query, key) pairs of the queries [start, stop), to which the FLOPs are proportional.

        Positions are treated as real numbers, an approximation for long sequences.
        """
        if self.documents and self.q_len == self.kv_len:
            total = 0.0
            for first, length in halving_documents(self.q_len):
                document = replace(self, q_len=length, kv_len=length, documents=False)
                # The queries in [start, stop) as positions in the document.
                begin, end = (min(max(position - first, 0), length) for position in (start, stop))
                total += document.pairs(begin, end)
            return total

        def pairs_from(distance: float) -> float:
            """Return the number of pairs whose key is at least `distance` positions before the query."""
            return _integrate_clamped(stop - distance, self.kv_len) - _integrate_clamped(start - distance, self.kv_len)

        # Pairs whose key is not too far ahead of the query, less those whose key is too far before it.
        if self.causal:
            not_ahead = pairs_from(0)
        elif self.window is not None:
            not_ahead = pairs_from(-self.window)
        else:
            not_ahead = (stop - start) * self.kv_len
        return not_ahead if self.window is None else not_ahead - pairs_from(self.window)

    def imbalance(self, parts: int, layout: str = CONTIGUOUS.name) -> float:
        """Return the work of the busiest of `parts` ranks that share the queries in this layout, divided by the mean.

        The busiest rank determines the seconds of an attention, so strategies multiply the FLOPs by this number.
        """
        chunks = LAYOUTS[layout].chunks
        # Balanced order, zigzag order without documents, or nothing to compute.
        if LAYOUTS[layout].has_equal_causal_work(self.documents) or not self.q_len * self.kv_len:
            return 1.0
        rows = self.q_len / parts / chunks
        work = [self.pairs(i * rows, (i + 1) * rows) for i in range(chunks * parts)]
        if chunks == 2:  # zigzag: rank i has chunk i, and chunk i from the end
            work = [work[i] + work[-1 - i] for i in range(parts)]
        return max(work) * parts / self.pairs(0, self.q_len)


def halving_documents(length: int) -> list[tuple[int, int]]:
    """Return documents as (start, length), each half of the remaining positions: (0, 4), (4, 2), (6, 1), (7, 1) for 8.

    They model documents of unknown lengths in `AttentionShape.pairs`. As with documents of log-normal lengths
    (`benchmarks/plans.py`), there are long and short ones, and neither contiguous nor zigzag order balances their work.
    """
    documents: list[tuple[int, int]] = []
    start = 0
    while length - start > 1 and len(documents) < MAX_DOCUMENTS - 1:
        documents.append((start, (length - start + 1) // 2))
        start += documents[-1][1]
    return [*documents, (start, length - start)]


def _integrate_clamped(end: float, keys: int) -> float:
    """Return the integral of clamp(t, 0, keys) for t up to `end`.

    This is the number of pairs of the queries before position `end` if query t attends to the keys before t, of which
    there are `keys` in total.
    """
    if end <= 0:
        return 0.0
    return end * end / 2 if end <= keys else keys * keys / 2 + (end - keys) * keys


@dataclass(frozen=True)
class Candidate:
    """Candidate implementation of an attention on n = ulysses * ring ranks.

    Each `ulysses` neighboring ranks exchange heads for rows; `ring` such groups pass keys around a ring.
    """

    kind: str  # name of the strategy
    ulysses: int  # ranks that exchange heads
    ring: int  # ranks whose keys each rank reads, in a ring or by an all-gather
    layout: str  # row order during the attention: "contiguous", "zigzag" or "balanced"
    forward: float  # predicted seconds
    backward: float  # predicted seconds
    memory: float  # bytes of a rank in addition to its shards, maximum of forward and backward
    rounds: tuple[int, int]  # number of collectives of forward and backward
    ring_grads: str = ""  # gradients of K and V "travel" or are reduced by "scatter"; "" without a ring
    refusal: str | None = None  # reason why it is not possible; None if it is
    fits: bool = True  # False if memory is insufficient
    relayout: bool = False  # True if a relayout is required; its cost is added by `all_candidates`
    folds_keys: bool = True  # True if a relayout moves keys and values, too
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
    """Registration of a strategy that splits attention over ranks.

    `candidates` and `sends` both count exchanged bytes. `candidates` needs those of each collective, as numbers and
    before an op exists, to predict times; `sends` reads the op of the final program, whose sizes may be symbols.
    """

    name: str  # value of the option attention=, and `kind` of its candidates
    preference: int  # lower values win ties
    rewrite: Any  # `AttentionPass` of the same name; its `op` replaces attention
    # (shape, machine, layout) -> candidates in this layout, possible or not
    candidates: Callable[[AttentionShape, Machine, str], Iterable[Candidate]]
    # (forward, backward) bytes that a rank sends in a call of the op; required with an op
    sends: Callable[[OpCall, int], tuple[Size, Size]] | None = None
    # declares the routes (which rank sends to which) of the op's exchanges when a program with it is lowered
    declare: Callable[[OpCall, Ranks], None] = lambda call, ranks: None
    neighbors: Callable[[OpCall], int] = lambda call: 1  # neighboring ranks that exchange heads in a call
    axes: tuple[()] | tuple[str, str] = ()  # names of the mesh axes (ring, neighbors)
    always: bool = False  # True if it splits any attention over any number of ranks
    options: tuple[str, ...] = ()  # fields of SPConfig for this strategy only

    def __post_init__(self) -> None:
        if self.op is not None and self.sends is None:
            expected = f"a function (call, ranks) -> (forward, backward) bytes that a rank sends in {self.op}"
            raise SpError("SP981", f"sends: expected {expected}, got None in {self.name!r}.")

    @property
    def op(self) -> Any:
        """Return the op, or None if the strategy uses the original attention between exchanges."""
        return self.rewrite.op


def attention_strategies() -> list[Strategy]:
    """Return all registered strategies by preference."""
    return sorted(STRATEGIES.values(), key=lambda s: s.preference)


def all_candidates(shape: AttentionShape, machine: Machine) -> list[Candidate]:
    """Return the candidates of all strategies and layouts for a shape, possible or not.

    A report shows those that are not possible with the reasons. On one rank nothing is split.
    """
    # A window leaves little to balance, and zigzag order would distribute its neighbors over all ranks.
    can_zigzag = shape.n > 1 and shape.causal and shape.window is None and shape.q_len == shape.kv_len
    if shape.order.is_balanced:
        layouts = [shape.order.name]
    else:
        layouts = [x.name for x in LAYOUTS.values() if not x.is_balanced and (x.is_in_order or can_zigzag)]
    # On one rank only strategies that keep the original attention.
    strategies = [s for s in attention_strategies() if shape.n > 1 or s.op is None]
    machine = replace(machine, flops=machine.flops * machine.efficiency(shape.kernel))
    return [
        _complete_candidate(candidate, shape, machine)
        for layout in layouts
        for strategy in strategies
        for candidate in strategy.candidates(shape, machine, layout)
    ]


def candidates_in_order(shape: AttentionShape, machine: Machine) -> list[Candidate]:
    """Return the candidates for a program whose rows are already in `shape.order`, from which a pass chooses.

    In a permuted order (zigzag, balanced) the keys of a window are on many ranks, so that reading them costs the same
    as without the window: candidates that read keys of other ranks are those of the shape without it. A balanced order
    is that of a ring, so that all of its candidates are.
    """
    unwindowed = replace(shape, window=None)
    if shape.order.is_balanced:
        return all_candidates(unwindowed, machine)
    candidates = all_candidates(shape, machine)
    if shape.order.is_in_order:
        return candidates
    without_rings = [c for c in candidates if c.ring == 1]
    rings = [c for c in all_candidates(unwindowed, machine) if c.ring > 1]
    # Keep those with the layout of the program. Without a ring the rows are gathered, so that any layout is possible;
    # attention that is not causal has candidates of contiguous order only.
    if shape.causal and shape.q_len == shape.kv_len:
        rings = [c for c in rings if c.layout == shape.order.name]
    return without_rings + rings


def fastest_candidate(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest possible candidate.

    Raises:
        SpError: If no candidate is possible.
    """
    possible = [c for c in candidates if c.refusal is None]
    if not possible:
        raise SpError(
            "SP701", f"attention: no strategy can run: {'; '.join(f'{c.kind}: {c.refusal}' for c in candidates)}."
        )
    return min(possible, key=lambda c: (c.seconds, *_preference_key(c)))


def choose_attention(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate, or one within 5 % in time and memory that has fewer collectives.

    Ties are resolved by the preference of the strategies.

    Raises:
        SpError: If no candidate is possible.
    """
    fastest = fastest_candidate(candidates)
    possible = [c for c in candidates if c.refusal is None]
    # Without the bound on memory a gather, which has one collective less, would win every long sequence.
    tied = [c for c in possible if c.seconds <= TIE_RATIO * fastest.seconds and c.memory <= TIE_RATIO * fastest.memory]
    # The key compares the numbers of collectives first, then the preference of the strategies.
    return min(tied, key=lambda c: (*_preference_key(c), c.seconds))


def _preference_key(c: Candidate) -> tuple[int, int, bool, int, str]:
    """Return the key that is smallest for the simplest of equally fast candidates."""
    return c.collectives, STRATEGIES[c.kind].preference, c.relayout, c.ring, c.layout


def _complete_candidate(c: Candidate, shape: AttentionShape, machine: Machine) -> Candidate:
    """Add the costs that are equal for all strategies to a candidate, and apply the memory limit.

    These are the cost of a relayout, if the layout requires one, and the bytes of a mask. Without training, the
    backward has no cost.
    """
    if not LAYOUTS[c.layout].is_in_order and c.layout != shape.order.name:
        extra = _relayout_seconds(shape, machine, c.folds_keys)
        rounds = (c.rounds[0] + 2, c.rounds[1] + 2)  # collectives of (forward, backward): one before, one after
        c = replace(c, relayout=True, forward=c.forward + extra, backward=c.backward + extra, rounds=rounds)
    if shape.mask:  # one byte for each query of the `ulysses` ranks and each key
        c = replace(c, memory=c.memory + shape.batch * c.ulysses * shape.q_rows * shape.kv_len)
    if shape.mask_rows and c.ulysses > 1 and c.refusal is None:
        c = replace(c, refusal="its mask is sharded along the queries, and every rank would need all of its rows")
    if not shape.training:
        c = replace(c, backward=0.0, rounds=(c.rounds[0], 0), ring_grads="")
    if c.refusal is None and c.memory > machine.memory:
        needed, free = (f"{nbytes / 2**20:.1f} MiB" for nbytes in (c.memory, machine.memory))
        return replace(c, refusal=f"it needs {needed}, of which {free} are free", fits=False)
    return c


def _relayout_seconds(shape: AttentionShape, machine: Machine, moves_keys: bool) -> float:
    """Return the seconds to move q (with `moves_keys` also k and v) to zigzag order, and the result back.

    This is the cost in the forward, and the same again in the backward.
    """
    sizes = shape.head_bytes
    moved = (sizes.queries + (sizes.keys if moves_keys else 0), sizes.results)
    # "fold" is the exchange; the rows are also copied to and from its buffers.
    return sum(machine.seconds("fold", nbytes, shape.n) + machine.copy(2 * nbytes) for nbytes in moved)
