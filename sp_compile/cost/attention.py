"""What every way to compute an attention over the ranks would cost: compute, exchanges, copies and merges, both ways.

Bytes are those that one rank sends or receives; `n_h = batch * s * head_dim * element_size` is one head of one rank's
`s` rows. Forward, P ranks, H query heads, G key heads, which U ranks of Ulysses repeat to G' = lcm(G, U):
    ulysses  (P-1)/P * n_h * (2 H + 2 G')                           2 collectives, 2 backward
    gather   (P-1) * 2 G * n_h                                      1 collective, 2 backward: again, reduce-scatter
    ring     (P-1) * 2 G * n_h in P-1 hops                          as many backward, and the gradients of K and V
    hybrid   (U-1)/U * n_h * (2 H + 2 G') + (R-1) * 2 G' * n_h      ulysses over U neighbours, a ring over R = P/U
Gradients of keys and values move in float32 (float64 for float64). Backward computes 2.5 times as much.

The sizes of one attention: what its cost depends on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sp_compile.errors import SpError

from .machine import Machine


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention of the global program: q (batch, heads, q_len, head_dim), v (batch, kv_heads, kv_len, v_head_dim).

    n: ranks. causal: query i attends to keys 0..i. window: and, of these, to the last `window` only (without causal:
    to the keys less than `window` away). mask: there is a mask that only data describes. zigzag: the whole program may
    keep the sequence in zigzag order, so that a balanced causal attention costs no exchange. training: gradients flow.
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
    zigzag: bool = False
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
    def flops(self) -> float:
        """Forward FLOPs of one rank if all ranks do the same."""
        dims = self.head_dim + self.v_head_dim
        return 2 * self.batch * self.heads * dims * self.pairs(0, self.q_len) / self.n

    def pairs(self, start: float, stop: float) -> float:
        """How many (query, key) pairs the queries [start, stop) attend to, in the limit of long sequences."""

        def distant(by: float) -> float:  # pairs whose key lies at least `by` before the query
            return _below(stop - by, self.kv_len) - _below(start - by, self.kv_len)

        later = (stop - start) * self.kv_len - distant(0)
        attended = (stop - start) * self.kv_len - (later if self.causal else 0)
        if self.window is None:
            return attended
        ahead = 0.0 if self.causal else (stop - start) * self.kv_len - distant(-self.window)
        return attended - distant(self.window) - ahead

    def imbalance(self, parts: int) -> float:
        """The work of the busiest of so many contiguous parts of the queries, over the mean."""
        if not self.q_len * self.kv_len:
            return 1.0
        rows = self.q_len / parts
        return (
            max(self.pairs(r * rows, (r + 1) * rows) for r in range(parts))
            * parts
            / self.pairs(0, self.q_len)
        )


def _below(x: float, keys: int) -> float:
    """The integral of clamp(t, 0, keys) for t up to x."""
    if x <= 0:
        return 0.0
    return x * x / 2 if x <= keys else keys * keys / 2 + (x - keys) * keys


__all__ = ["Candidate", "Machine", "Shape", "candidates", "choose", "fastest", "ring_grads"]

BACKWARD_FLOPS = 2.5
TIE = 1.05
PREFERENCE = ("ulysses", "gather", "ring", "hybrid")


@dataclass(frozen=True)
class Candidate:
    """One way to compute an attention: Ulysses over `ulysses` neighbouring ranks, a ring or a gather over `ring`.

    layout: "contiguous" or "zigzag", the order of the sequence inside; relayout: q, k and v first move from contiguous
    to zigzag order, and the result back. forward, backward: predicted seconds. memory: bytes that the forward holds per
    rank beyond its shards. rounds: collectives forward and backward. ring_grads: how the gradients of K and V get home:
    they "travel" with them, or "scatter" (one reduce-scatter); "" without a ring. legal: None, or the reason why not.
    folds_keys: does a relayout move keys and values, too?
    """

    kind: str
    ulysses: int
    ring: int
    layout: str
    relayout: bool
    forward: float
    backward: float
    memory: float
    rounds: tuple[int, int]
    ring_grads: str = ""
    legal: str | None = None
    folds_keys: bool = True

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward

    @property
    def collectives(self) -> int:
        """Forward and backward together."""
        return sum(self.rounds)


def candidates(shape: Shape, machine: Machine) -> list[Candidate]:
    """Every way to compute the attention, legal or not, in a fixed order."""
    found = [_ulysses(shape, machine)]
    if shape.n > 1:
        # A window leaves little to balance, and zigzag order would spread its few neighbours over all ranks.
        halves = shape.causal and shape.window is None and shape.q_len == shape.kv_len
        inner = [u for u in range(1, shape.n) if shape.n % u == 0 and shape.heads % u == 0]
        for layout in ("contiguous", "zigzag") if halves else ("contiguous",):
            found.append(_gather(shape, machine, layout))
            found += [_ring(shape, machine, u, layout) for u in inner]
    return [_finished(c, shape, machine) for c in found]


def fastest(found: Iterable[Candidate]) -> Candidate:
    """The fastest legal candidate. Raises SpError: there is none."""
    found = list(found)
    legal = [c for c in found if c.legal is None]
    if not legal:
        raise SpError("attention: " + "; ".join(f"{c.kind}: {c.legal}" for c in found))
    return min(legal, key=lambda c: (c.seconds, *_preference(c)))


def choose(found: Sequence[Candidate]) -> Candidate:
    """The fastest; of those within 5 % of it that need no more memory, the one with the fewest collectives.

    Then Ulysses, gather, ring, hybrid in this order. Raises SpError: no candidate is legal.
    """
    best = fastest(found)
    tied = [c for c in found if c.legal is None and _ties(c, best)]
    return min(tied, key=lambda c: (*_preference(c), c.seconds))


def _ties(c: Candidate, best: Candidate) -> bool:
    # Without the bound on memory a gather, which has one collective less, would win every long sequence.
    return c.seconds <= TIE * best.seconds and c.memory <= TIE * best.memory


def _preference(c: Candidate) -> tuple[int, int, bool, int, str]:
    return c.collectives, PREFERENCE.index(c.kind), c.relayout, c.ring, c.layout


def ring_grads(shape: Shape, machine: Machine, ulysses: int = 1, layout: str = "contiguous") -> str:
    """The cheaper way home for the gradients of K and V in a ring: "travel" with them, or "scatter" at the end."""
    return _ring(shape, machine, ulysses, layout).ring_grads


def _finished(c: Candidate, shape: Shape, machine: Machine) -> Candidate:
    """With the exchanges of a relayout, what a mask takes, no backward where nothing is trained, and the memory cap."""
    if c.layout == "zigzag" and not shape.zigzag:
        extra = _relayout(shape, machine, c.folds_keys)
        rounds = (c.rounds[0] + 2, c.rounds[1] + 2)
        c = replace(c, relayout=True, forward=c.forward + extra, backward=c.backward + extra, rounds=rounds)
    if shape.mask:
        c = replace(c, memory=c.memory + shape.batch * c.ulysses * shape.q_rows * shape.kv_len)
    if not shape.training:
        c = replace(c, backward=0.0, rounds=(c.rounds[0], 0), ring_grads="")
    if c.legal is None and c.memory > machine.memory:
        return replace(c, legal=f"{c.memory / 2**20:.1f} MiB, with {machine.memory / 2**20:.1f} MiB allowed")
    return c


def _relayout(shape: Shape, machine: Machine, keys: bool) -> float:
    """Seconds to bring q, and k and v, from contiguous to zigzag order, and the result back."""
    there = shape.heads * shape.q_bytes + (shape.kv_heads * shape.kv_bytes if keys else 0)
    both = (there, shape.heads * shape.out_bytes)
    return sum(machine.seconds("fold", nbytes, shape.n) + machine.copy(2 * nbytes) for nbytes in both)


def _ulysses(shape: Shape, machine: Machine) -> Candidate:
    n = shape.n
    legal = None if shape.heads % n == 0 else f"{n} ranks do not divide {shape.heads} query heads"
    compute = machine.attention(shape.flops, shape.kv_len)
    fixed = _exchange_heads(shape, machine, n) + machine.call
    memory = _exchanged_bytes(shape, n) if n > 1 else 0
    rounds = (2, 2) if n > 1 else (0, 0)
    backward = BACKWARD_FLOPS * compute + fixed
    return Candidate(
        "ulysses", n, 1, "contiguous", False, compute + fixed, backward, memory, rounds, "", legal
    )


def _exchange_heads(shape: Shape, machine: Machine, ulysses: int) -> float:
    """Seconds of the all-to-all of q, k and v over so many neighbours, that of the result, and their packing."""
    if ulysses == 1:
        return 0.0
    back = shape.heads * shape.out_bytes
    there = _exchanged_bytes(shape, ulysses) - back
    exchanges = machine.all_to_all(there, ulysses) + machine.all_to_all(back, ulysses)
    return exchanges + machine.copy(2 * (there + back))


def _exchanged_bytes(shape: Shape, ulysses: int) -> int:
    """q, k, v and the result of one rank on either side of the exchange; too few key heads are repeated."""
    repeated = math.lcm(shape.kv_heads, ulysses)
    return shape.heads * (shape.q_bytes + shape.out_bytes) + repeated * shape.kv_bytes


def _gather(shape: Shape, machine: Machine, layout: str) -> Candidate:
    n, kv = shape.n, shape.kv_heads * shape.kv_bytes
    busiest = 1.0 if layout == "zigzag" else shape.imbalance(n)
    compute = machine.attention(shape.flops * busiest, shape.kv_len)
    # A causal mask cuts the keys of a run of queries into a full block and a diagonal one, merged.
    runs = 2 if layout == "zigzag" else 1
    calls = (3 if shape.causal else 1) * runs * machine.call
    again = machine.all_gather(kv, n) + machine.copy(2 * n * kv)
    grads = machine.all_gather(kv * shape.widening, n) + machine.copy(2 * n * kv * shape.widening)
    merge, accumulate = (_merge(shape, machine), _accumulate(shape, machine)) if shape.causal else (0.0, 0.0)
    forward = compute + again + merge + calls
    backward = BACKWARD_FLOPS * compute + again + grads + accumulate + calls
    return Candidate("gather", 1, n, layout, False, forward, backward, n * kv, (1, 2), folds_keys=False)


def _merge(shape: Shape, machine: Machine) -> float:
    """Seconds to add one block's result to the accumulator of all of one rank's rows: read both, write one."""
    return machine.copy(shape.heads * shape.out_bytes * (1 + 2 * shape.widening))


def _accumulate(shape: Shape, machine: Machine) -> float:
    """Seconds to add one block's gradient of q to that of all of one rank's rows."""
    return machine.copy(shape.heads * shape.q_bytes * 3 * shape.widening)


def _ring(shape: Shape, machine: Machine, ulysses: int, layout: str) -> Candidate:
    """A ring of `n / ulysses`; what it sends is the same with and without Ulysses inside but for repeated heads."""
    n, size = shape.n, shape.n // ulysses
    kv = math.lcm(shape.kv_heads, ulysses) * shape.kv_bytes
    grads = kv * shape.widening
    zigzag = layout == "zigzag"
    hops = _hops(shape, size) if ulysses == 1 else size - 1
    busiest = 1.0 if zigzag else shape.imbalance(size)
    keys = ulysses * shape.kv_rows / (2 if zigzag else 1)
    step = machine.attention(shape.flops * busiest, keys) / machine.ring_efficiency / (hops + 1)
    # Zigzag: every step is two blocks, and three in four halves of the queries take part in one.
    blocks, share = (2, 0.75) if zigzag else (1, 1.0)
    fixed = _exchange_heads(shape, machine, ulysses) + (blocks * (hops + 1) + hops) * machine.call
    hop, hop_grads = machine.hop(kv, n), machine.hop(grads, n)

    forward = fixed + step + hops * machine.together(step, hop)
    forward += hops * share * _merge(shape, machine)
    back = BACKWARD_FLOPS * step
    shared = fixed + back + hops * share * _accumulate(shape, machine)
    travel = hops * (machine.together(back, hop + hop_grads) + machine.copy(3 * grads))
    last = 1 if hops else 0  # from the last rank home; there is none if no rank needs another one's keys
    travel += last * hop_grads
    scatter = hops * machine.together(back, hop) + machine.all_gather(grads, size, ulysses)
    way, home = ("travel", travel) if travel <= scatter else ("scatter", scatter)

    exchanged = 2 if ulysses > 1 else 0
    rounds = (exchanged + hops, exchanged + hops + (hops + last if way == "travel" else 1))
    accumulators = shape.heads * shape.out_bytes * shape.widening
    memory = 2 * kv + accumulators + (_exchanged_bytes(shape, ulysses) if ulysses > 1 else 0)
    memory += 2 * size * grads if way == "scatter" else 0  # every part, and all of them packed
    kind = "hybrid" if ulysses > 1 else "ring"
    return Candidate(kind, ulysses, size, layout, False, forward, shared + home, memory, rounds, way)


def _hops(shape: Shape, size: int) -> int:
    """How many ranks of a ring of `size` hold keys that another one needs, in contiguous order."""
    if shape.window is None or not shape.causal or shape.q_len != shape.kv_len:
        return size - 1
    rows = -(-shape.q_len // size)
    return min(size - 1, -(-(shape.window - 1) // rows))
