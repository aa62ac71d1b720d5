"""Report the rewrites of a graph, its exchanges with bytes per rank, and its fallbacks with reasons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from sp_compile.passes.cost.attention_memory import RankMemory
from sp_compile.passes.cost.decision import Decision, merge_decisions
from sp_compile.passes.cost.exchange_cost import Exchange
from sp_compile.passes.cost.step_memory import LINE_WIDTH, StepMemory, format_bytes, shorten_line
from sp_compile.passes.graph.sizes import Size, assume_large
from sp_compile.passes.sharding.sharded_work import SequenceCandidate, ShardedWork

from .context import FALLBACKS, Note, NoteKind, PassRun, TiledRegion, runs_by_pass

NO_INPUT_WARNING = (
    "the sequence of {} positions is not an input dim: every rank loads the full inputs, and inputs='local' does not "
    "apply to them. If an input has the tokens, name its dim: options={{'seq_dims': {{'<input>': <dim>}}}}; or compute "
    "the tokens before the compiled function, and pass them."
)
NAME_ATTENDED = "To split it, name it: options={'seq_dims': {'<input>': <dim>}}."


@dataclass
class Report:
    """The report of one graph; `str(report)` is its text."""

    n: int  # ranks that shard the sequence
    notes: list[Note] = field(default_factory=list)  # rewrites, fallbacks and other events
    exchanges: list[Exchange] = field(default_factory=list)  # collectives of the forward, with their bytes
    attention: list[Decision] = field(default_factory=list)  # strategies of attention, with their predicted times
    memory: list[RankMemory] = field(default_factory=list)  # predicted memory of a rank, for each graph
    tiled: list[TiledRegion] = field(default_factory=list)  # regions that run in tiles
    inputs: dict[str, list[int]] = field(default_factory=dict)  # sequence dims by input
    sharded_outputs: list[str] = field(default_factory=list)  # names of outputs that stay sharded
    candidates: list[SequenceCandidate] = field(default_factory=list)  # dims that may be sequences, chosen ones first
    work: ShardedWork = field(default_factory=ShardedWork)  # FLOPs and activations, and their shares on shards
    constraints: list[str] = field(default_factory=list)  # numbers that the ranks must divide, and padding
    passes: list[PassRun] = field(default_factory=list)  # all runs, in order
    errors: list = field(default_factory=list)  # (name, largest relative error against a single device)
    layers: list = field(default_factory=list)  # `LinearLayer`s: tensor-parallel layers
    parallel: list[int] = field(default_factory=list)  # sizes of tensor-parallel groups, in ranks
    show_passes: bool = False  # the text contains the passes
    step: StepMemory | None = None  # memory of a training step, if requested

    def add(self, notes: Iterable[Note]) -> None:
        """Append the notes that are not in the report yet: passes that run again repeat theirs.

        Args:
            notes: The notes.
        """
        self.notes.extend(note for note in notes if note not in self.notes)

    def merge(self, other: Report) -> None:
        """Merge the report of another graph of the same model, of the same ranks.

        Args:
            other: The report, which is not changed.
        """
        self.add(other.notes)
        self.inputs.update(other.inputs)
        self.work.merge(other.work)
        self.candidates += [c for c in other.candidates if c not in self.candidates]
        self.constraints += [c for c in other.constraints if c not in self.constraints]
        self.attention = merge_decisions([*self.attention, *other.attention])
        for name in ("passes", "exchanges", "memory", "tiled", "sharded_outputs", "errors", "layers"):
            getattr(self, name).extend(getattr(other, name))
        self.parallel = sorted({*self.parallel, *other.parallel})

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each pass, over all its runs.

        Returns:
            The seconds by name of the pass, in the order in which the passes ran first.
        """
        return {run.name: run.seconds for run in runs_by_pass(self.passes)}

    @property
    def worst(self) -> float:
        """Return the largest relative error that `verify` found.

        Returns:
            The error, or 0.0 if nothing was verified.
        """
        return max((error for _, error in self.errors), default=0.0)

    @property
    def fallbacks(self) -> list[Note]:
        """Return the notes on work that every rank does on all rows, because no pass runs it on shards.

        Returns:
            The notes of the kinds in `FALLBACKS`, in order.
        """
        return self.find_notes(*FALLBACKS)

    @property
    def warnings(self) -> list[str]:
        """Return a text for each large part of the work that the ranks do not share, with a remedy.

        Returns:
            The texts; [] on one rank.
        """
        if self.n == 1:
            return []
        split_sizes = [assume_large(c.size) for c in self.candidates if c.is_split]  # symbolic sizes count as large
        attended = [c for c in self.candidates if c.is_attended and not c.is_split]
        longest = max(attended, key=lambda c: assume_large(c.size), default=None)
        texts = []
        if longest is not None and assume_large(longest.size) > max(split_sizes, default=0):
            cause = f"the longest attended dim, of {longest.size} positions, is not split"
            texts.append(f"{cause}: a rank attends over all of it, in time and memory. {NAME_ATTENDED}")
        main = self.main_sequence
        if main is not None and main.is_split and not main.is_input:
            texts.append(NO_INPUT_WARNING.format(main.size))
        return texts + self.work.describe_excess(self.n)

    @property
    def main_sequence(self) -> SequenceCandidate | None:
        """Return the sequence whose shards divide the most FLOPs.

        Returns:
            The candidate; None if no op is evidence for a sequence.
        """
        chosen = [c for c in self.candidates if c.is_chosen]
        return max(chosen, key=lambda c: (c.share, assume_large(c.size)), default=None)

    def find_notes(self, *kinds: NoteKind, subject: str | None = None) -> list[Note]:
        """Return the notes of the given kinds, in order.

        Args:
            kinds: The kinds.
            subject: The `Note.subject` that the notes must have; None for any.

        Returns:
            The notes.
        """
        return [note for note in self.notes if note.kind in kinds and subject in (None, note.subject)]

    def count(self, op: str) -> int:
        """Return the number of exchanges in the forward graph that are a given op.

        Args:
            op: "all_to_all", "all_gather", ...

        Returns:
            The number; the exchanges of the backward are not counted.
        """
        return sum(exchange.op == op for exchange in self.exchanges)

    def __str__(self) -> str:
        return "\n\n".join(self._sections())

    def _sections(self) -> Iterable[str]:
        """Yield the sections of the text, each with its heading; those without content are omitted."""
        yield self._describe_ranks()
        if self.candidates:
            yield "Sequences\n" + "\n".join(f"  {c}" for c in self.candidates)
        if self.constraints:
            yield "Constraints\n" + "\n".join(f"  {c}" for c in self.constraints)
        if self.sharded_outputs:
            yield f"Sharded results: {', '.join(self.sharded_outputs)}"
        if self.notes:
            rows = _group_rows((note.label, shorten_line(note.where), note.text) for note in self.notes)
            yield "Rewrites\n" + tabulate(
                rows, headers=("nodes", "pass", "at", "rewrite and reason"), maxcolwidths=LINE_WIDTH
            )
        if self.layers:
            yield "Tensor-parallel layers\n" + self._layer_table()
        # The capacity of the device is infinite where it is unknown.
        estimates = [estimate for estimate in self.memory if not math.isinf(estimate.device)]
        if estimates:
            yield "Memory of a rank, predicted\n" + "\n".join(f"  {estimate}" for estimate in estimates)
        if self.step is not None:
            yield f"Memory of a training step on a rank, predicted\n{self.step.text(self.n)}"
        if self.attention:
            yield "Attention, predicted\n" + "\n\n".join(map(str, merge_decisions(self.attention)))
        if self.exchanges:
            yield "Collectives, bytes that one rank sends\n" + self._exchange_table()
        if self.show_passes:
            yield "Passes, in order\n" + self._pass_table()
        if self.errors:
            yield tabulate(self.errors, headers=("against a single device", "largest relative error"), floatfmt=".2e")

    def _layer_table(self) -> str:
        """Return a table of the tensor-parallel layers: a row for each all_reduce of the program.

        In the mode "scattered", the rows of the sum, a tensor of `shape`, are scattered along `dim`.
        """
        rows = [
            (shorten_line(layer.where), layer.mode, list(layer.shape), layer.dim, layer.ops, layer.why)
            for layer in self.layers
        ]
        headers = ("linear + all_reduce at", "mode", "rows of", "sharded dim", "ops on rows", "why")
        return tabulate(rows, headers=headers, maxcolwidths=LINE_WIDTH)

    def _exchange_table(self) -> str:
        """Return a table of the exchanges, with the total of the bytes that one rank sends in each direction."""
        sent = [
            (e.op, e.shape, _show_bytes(e.forward), _show_bytes(e.backward), shorten_line(e.where))
            for e in self.exchanges
        ]
        sums = sum(e.forward for e in self.exchanges), sum(e.backward for e in self.exchanges)
        totals = map(_show_bytes, sums)
        headers = ("times", "exchange", "local shape", "sent forward", "sent backward", "at")
        rows = [*_group_rows(sent), ("", "total", "", *totals, "")]
        return tabulate(rows, headers=headers, maxcolwidths=LINE_WIDTH)

    def _pass_table(self) -> str:
        """Return a table of the passes, with the sums over all runs of each."""
        rows = [
            (r.name, ", ".join(sorted(r.requires)), ", ".join(sorted(r.provides)), r.changes, r.nodes, r.seconds)
            for r in runs_by_pass(self.passes)
        ]
        headers = ("pass", "requires", "provides", "rewrites", "nodes", "seconds")
        return tabulate(rows, headers=headers, maxcolwidths=LINE_WIDTH, floatfmt=".3f")

    def _describe_ranks(self) -> str:
        """Return the first lines: work on shards, the ranks, the sequence, tensor-parallel groups, and warnings.

        The line on ranks is such as "4 ranks; the sequence is ids dim 1".
        """
        groups = f"tensor-parallel groups of {' and '.join(map(str, self.parallel))} ranks"
        if self.parallel and not self.inputs:
            return f"{groups}; the sequence is not split"
        has_sequence = bool(self.inputs) or self.main_sequence is not None
        sequence = f"the sequence is {self._describe_sequence()}" if has_sequence else "no sequence is found"
        text = f"{self.n} ranks; {sequence}"
        if self.parallel:
            text += f"; {groups}"
        saved = self.step.saved_share(self.n) if self.step is not None else None
        work = [self.work.describe(saved)] if self.n > 1 and self.work.flops else []
        return "\n".join([*work, text, *(f"Warning: {warning}" for warning in self.warnings)])

    def _describe_sequence(self) -> str:
        """Return the dims that are sequences, those with the most FLOPs first."""
        inputs = sorted(self.inputs.items(), key=lambda item: -self._share_of(*item))  # equal ones in order
        named = ", ".join(f"{name} dim {'/'.join(map(str, dims))}" for name, dims in inputs)
        main = self.main_sequence
        if main is not None and not main.is_input:
            text = f"a dim of {main.size} positions, not an input dim"
            return f"{text}; and {named}" if named else text
        others = [c.size for c in self.candidates if c.is_chosen and not c.is_input]
        hidden = f", and {'a dim' if len(others) == 1 else 'dims'} of {' and '.join(map(str, others))} positions"
        return f"{named or 'not an input dim'}{hidden + ', not of an input' if others else ''}"

    def _share_of(self, name: str, dims: list[int]) -> float:
        """Return the largest share of the FLOPs of the sequences of an input."""
        labels = {f"{name} dim {dim}" for dim in dims}
        return max((c.share for c in self.candidates if c.is_chosen and not labels.isdisjoint(c.inputs)), default=0.0)


def _group_rows(rows: Iterable[tuple[str, ...]]) -> list[tuple[Any, ...]]:
    """Return the distinct rows of a table, each after the number of its occurrences: equal layers give equal rows."""
    return [(times, *row) for row, times in Counter(rows).items()]


def _show_bytes(value: Size) -> str:
    """Return bytes with a unit, or the expression of a size with symbolic lengths."""
    return format_bytes(value) if isinstance(value, int) else str(value)
