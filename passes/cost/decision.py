"""Attention decisions of a graph, and the table in which a report prints their candidates.

Attentions of equal shape share one `Decision`. A candidate that is not possible has a reason (`refusal`), printed
instead of its numbers. A relayout moves rows to the layout of the candidate before the attention, and back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from .attention_cost import AttentionShape, Candidate, choose_attention, fastest_candidate

# columns; U neighboring ranks exchange heads, R such groups are a ring
HEADERS = ("attention", "U x R", "layout", "forward ms", "backward ms", "total ms", "memory MiB", "why")
# kernels other than the default of a device
KERNEL_NAMES = {
    "flash3": "FlashAttention-3",
    "flash4": "FlashAttention-4",
    "fused": "one kernel from texts",
    "dense": "dense scores",
}


@dataclass(frozen=True)
class Decision:
    """Candidates of the attentions of one shape, and the chosen one."""

    shape: AttentionShape  # shape of the attentions
    candidates: Sequence[Candidate]  # all candidates
    chosen: Candidate  # chosen candidate
    nodes: int = 1  # number of attentions
    requested: bool = False  # True if an option or the mesh names the strategy

    def __str__(self) -> str:
        times = f"{self.nodes} x " if self.nodes > 1 else ""
        return f"{times}{describe_shape(self.shape)}\n{candidate_table(self.candidates, self.chosen, self.requested)}"


def merge_decisions(decisions: Iterable[Decision]) -> list[Decision]:
    """Merge decisions of equal shape and choice, as of several graphs, so that a report prints each once."""
    merged: dict[tuple[AttentionShape, Candidate], Decision] = {}
    for d in decisions:
        earlier = merged.get((d.shape, d.chosen))
        merged[d.shape, d.chosen] = replace(d, nodes=d.nodes + earlier.nodes) if earlier else d
    return list(merged.values())


def describe_shape(shape: AttentionShape) -> str:
    """Format heads, lengths and mask of an attention in one line, the title of its table."""
    heads = f"{shape.heads} heads" + (f" ({shape.kv_heads} of keys)" if shape.kv_heads != shape.heads else "")
    dims = f"{shape.head_dim}" + (f"/{shape.v_head_dim}" if shape.v_head_dim != shape.head_dim else "")
    length = f"{shape.q_len}" + (f" x {shape.kv_len} keys" if shape.kv_len != shape.q_len else "")
    marks = [
        "causal" if shape.causal else "",
        f"window {shape.window}" if shape.window is not None else "",
        "documents" if shape.documents else "",
        "mask as data" if shape.mask else "",
        KERNEL_NAMES.get(shape.kernel, ""),
        "" if shape.training else "no gradient",
    ]
    parts = [f"batch {shape.batch}", f"{heads} x {dims}", f"{length} positions", *marks]
    return ", ".join(part for part in parts if part)


def candidate_table(candidates: Sequence[Candidate], chosen: Candidate, requested: bool = False) -> str:
    """Format the candidates: the chosen one, then alternatives by time, then those that are not possible.

    `requested` is True if an option or the mesh names the strategy: the table then shows this as the reason.
    """
    alternatives = sorted((c for c in candidates if c != chosen), key=lambda c: (c.refusal is not None, c.seconds))
    reason = _winning_reason(chosen, candidates, requested)
    rows = [_candidate_row(c, chosen, reason) for c in [chosen, *alternatives]]
    return tabulate(rows, headers=HEADERS, floatfmt=".3f", disable_numparse=[1])  # column 1, "U x R", is no number


def _candidate_row(c: Candidate, chosen: Candidate, reason: str) -> tuple[object, ...]:
    """Return the columns of `HEADERS` for a candidate; None for numbers that are not shown.

    The last column is `reason` for the chosen candidate, else the reason why it is not possible, or the additional time
    relative to the chosen one.
    """
    # "groups": heads that are exchanged separately, one group after the other
    layout = c.layout + (", moved" if c.relayout else "") + (f", {c.chunks} groups" if c.chunks > 1 else "")
    numbers = [x * 1e3 for x in (c.forward, c.backward, c.seconds)] + [c.memory / 2**20]
    shown = numbers if c.refusal is None or c == chosen else [None] * 4
    note = reason if c == chosen else c.refusal or f"{c.seconds / chosen.seconds - 1:+.1%}"
    return (c.kind, f"{c.ulysses} x {c.ring}", layout, *shown, note)


def _winning_reason(c: Candidate, candidates: Sequence[Candidate], requested: bool) -> str:
    """Return the reason why the candidate `c` was chosen, as shown in the last column.

    `requested` is True if an option or the mesh names the strategy.
    """
    if not c.fits:  # chosen although no allowed candidate fits in memory; `refusal` has the bytes needed and free
        return f"chosen: needs the least memory, {c.refusal}"
    has_possible = any(other.refusal is None for other in candidates)
    # Not the choice of the cost model (`choose_attention`), which raises an error without a possible candidate.
    if requested or not has_possible or c != choose_attention(candidates):
        return "chosen: requested"
    best = fastest_candidate(candidates)
    if c == best:
        return "chosen: fastest"
    return f"chosen: within 5 % of {best.kind} {best.ulysses} x {best.ring}, {_simplicity_reason(c, best)}"


def _simplicity_reason(c: Candidate, best: Candidate) -> str:
    """Return the reason why `c` was preferred to the equally fast `best`: see `choose_attention`."""
    if c.collectives != best.collectives:
        return f"{c.collectives} collectives instead of {best.collectives}"
    if c.kind != best.kind:
        return f"same number of collectives, and {c.kind} is preferred to {best.kind}"
    if c.relayout != best.relayout:
        return "same number of collectives, and no rows are moved"
    return "same number of collectives, in a " + ("shorter ring" if c.ring != best.ring else f"{c.layout} layout")
