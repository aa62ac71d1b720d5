"""What was decided for each distinct attention of a graph, and the table that says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from .attention_cost import AttentionShape, Candidate, choose_attention, fastest_candidate

HEADERS = ("attention", "U x R", "layout", "forward ms", "backward ms", "total ms", "memory MiB", "why")
KERNEL_NAMES = {
    "flash3": "FlashAttention-3",
    "flash4": "FlashAttention-4",
    "fused": "one kernel from texts",
    "dense": "dense scores",
}
"""Where it is not the one that a device has for such attention anyway."""


@dataclass(frozen=True)
class Decision:
    """All candidates for the `nodes` attentions of one shape, and the one that they became.

    asked: somebody named its strategy, as an option or by the mesh.
    """

    shape: AttentionShape
    candidates: Sequence[Candidate]
    chosen: Candidate
    nodes: int = 1
    requested: bool = False

    def __str__(self) -> str:
        times = f"{self.nodes} x " if self.nodes > 1 else ""
        return f"{times}{describe_shape(self.shape)}\n{candidate_table(self.candidates, self.chosen, self.requested)}"


def merge_decisions(decisions: Iterable[Decision]) -> list[Decision]:
    """One entry per shape and choice, with the number of nodes that it covers."""
    found: dict[tuple[AttentionShape, Candidate], Decision] = {}
    for d in decisions:
        known = found.get((d.shape, d.chosen))
        found[d.shape, d.chosen] = replace(d, nodes=d.nodes + known.nodes) if known else d
    return list(found.values())


def describe_shape(shape: AttentionShape) -> str:
    """One line: q and kv heads, lengths, mask."""
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


def candidate_table(found: Sequence[Candidate], chosen: Candidate, asked: bool = False) -> str:
    """The candidates, the chosen one first, the others from fast to slow, those that are not legal last."""
    others = sorted((c for c in found if c != chosen), key=lambda c: (c.legal is not None, c.seconds))
    rows = [_candidate_row(c, chosen, _winning_reason(chosen, found, asked)) for c in [chosen, *others]]
    return tabulate(rows, headers=HEADERS, floatfmt=".3f", disable_numparse=[1])


def _candidate_row(c: Candidate, chosen: Candidate, won: str) -> tuple[object, ...]:
    layout = c.layout + (", moved" if c.relayout else "") + (f", {c.chunks} groups" if c.chunks > 1 else "")
    numbers = [x * 1e3 for x in (c.forward, c.backward, c.seconds)] + [c.memory / 2**20]
    known = numbers if c.legal is None or c == chosen else [None] * 4
    why = won if c == chosen else c.legal or f"{c.seconds / chosen.seconds - 1:+.1%}"
    return (c.kind, f"{c.ulysses} x {c.ring}", layout, *known, why)


def _winning_reason(c: Candidate, found: Sequence[Candidate], asked: bool) -> str:
    if not c.fits:
        return f"chosen: needs least, {c.legal}"
    if asked or not any(other.legal is None for other in found) or c != choose_attention(found):
        return "chosen: asked for"
    best = fastest_candidate(found)
    if c == best:
        return "chosen: fastest"
    return f"chosen: within 5 % of {best.kind} {best.ulysses} x {best.ring}, {_simplicity_reason(c, best)}"


def _simplicity_reason(c: Candidate, best: Candidate) -> str:
    """What speaks for the first of two that are as good: see `choose_attention`."""
    if c.collectives != best.collectives:
        return f"{c.collectives} collectives instead of {best.collectives}"
    if c.kind != best.kind:
        return f"as many collectives, and {c.kind} is preferred to {best.kind}"
    if c.relayout != best.relayout:
        return "as many collectives, and nothing is moved"
    return "as many collectives, in a " + ("shorter ring" if c.ring != best.ring else f"{c.layout} layout")
