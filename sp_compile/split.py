"""Split a program along its sequence: capture it, run the passes, determine its boundary.

The captured graph has the shapes of the full sequence (the global view). The passes rewrite it to the graph of one
rank. The boundary describes which inputs and results of that graph are sharded. A refusal is a pass's decision that the
graph cannot be split with its inputs; other lengths or orders of the inputs may allow it. Balanced inputs have
load-balanced rows, in the order of an earlier graph.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
from torch.fx import GraphModule

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import SpError, source_line
from sp_compile.lowering.base.options import AnyOptions, SPConfig
from sp_compile.lowering.base.ranks import process_rank
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.passes.boundary.make_boundary import make_boundary
from sp_compile.passes.capture.capture import fix_lengths
from sp_compile.passes.capture.graph_inputs import GlobalView, global_view, local_inputs
from sp_compile.passes.capture.uncaptured import wrap_failures
from sp_compile.passes.capture.user_program import UserProgram
from sp_compile.passes.context import Note, NoteKind, PassContext, Refusal, RefusalKind
from sp_compile.passes.cost.exchange_cost import declare_routes
from sp_compile.passes.cost.few_layers import FewLayers
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.report import Report
from sp_compile.runtime.fingerprint import program_subject
from sp_compile.runtime.session import CompileSession
from sp_compile.runtime.sharded_values import has_sharded_outputs, register_sharded_outputs, symbol_sources

from .pipeline import run_pipeline
from .rank_program import RankProgram, make_joint_passes

log = logging.getLogger(__name__)

DTENSORS = "parameters: expected plain tensors in a program that is split along a sequence, got DTensors."
GRAPH_BREAK_NOTE = "torch.compile ends the graph here and continues in Python"
# symbol -> (input, dim) whose size it is, by index; dim None if the input is the symbol itself (`symbol_sources`)
Symbols = Mapping[sympy.Symbol, tuple[int, int | None]]


class LocalGraph(NamedTuple):
    """The result of the passes."""

    graph: GraphModule  # of one rank
    inputs: list[Any]  # example inputs of the graph
    report: Report  # the decisions of the passes


@dataclass
class SplitProgram:
    """A program between capture and the program of one rank."""

    program: UserProgram  # as the user wrote it
    config: SPConfig  # the options
    session: CompileSession  # the ranks that compile the program
    view: GlobalView  # the captured graph
    machine: Machine | None  # measured constants of the cost model
    repeats: FewLayers | None  # in a dry run, the layers that a program with a few layers represents
    symbols: Symbols = field(default_factory=dict)  # for each symbolic length, the input and dim whose size it is
    local: LocalGraph | None = None  # the result of the passes
    row_order_conflict: str = ""  # why the graph cannot run in the row order of its inputs; "" if it can

    @classmethod
    def capture(
        cls, program: UserProgram, options: AnyOptions, session: CompileSession, repeats: FewLayers | None = None
    ) -> SplitProgram:
        """Capture the global view of a program, and agree with the other ranks on the cost model's constants.

        Arguments are those of `sp_compile.backend.lower`.
        """
        try:
            config = SPConfig.of(options)
            if program.has_dtensors:
                raise SpError("SP241", DTENSORS)
            with wrap_failures():
                balanced = program.has_balanced_inputs
                view = global_view(program.graph, program.inputs, config, session.ranks, balanced)
            session.ranks.check_backend(program.device)
        finally:  # a collective measurement: the other ranks wait for this one even if its capture has failed
            machine = session.agree_on_machine(program.device)
        return cls(program, config, session, view, machine, repeats)

    def run_passes(self) -> None:
        """Rewrite the captured graph to that of one rank, `local`.

        If a pass refuses the inputs, capture them in another way and try once more.

        Raises:
            SpError: A pass refuses the program.
        """
        self.symbols = symbol_sources(self.view.graph)  # before the passes change the graph
        with wrap_failures():
            result = self._try_passes()
            if isinstance(result, Refusal) and self._change_view(result):
                if result.kind is RefusalKind.NO_SEQUENCE:  # lengths that were symbols are constants now
                    self.symbols = symbol_sources(self.view.graph)
                result = self._try_passes()
            if isinstance(result, Refusal):
                raise result.error()
        self.local = result

    def _change_view(self, refusal: Refusal) -> bool:
        """Capture the program again, without the property of its inputs that a pass has refused.

        Sharded inputs in two row orders cannot stay sharded together. With `balanced`, those that an earlier graph has
        returned in a load-balanced order stay sharded, and the others are gathered; without it, the reverse. If the
        graph cannot run in one of the orders, it is captured with the other. If no sequence was found, symbolic lengths
        become constants: passes then recognize a Python loop over the positions, which Dynamo has unrolled, by its
        number of steps.

        Returns:
            True if the program was captured again; False if it has no symbolic lengths to fix.
        """
        program, balanced = self.program, self.program.has_balanced_inputs
        if refusal.kind is RefusalKind.ROW_ORDER:
            self.row_order_conflict, balanced = refusal.text, not balanced
        elif not fix_lengths(program.graph, program.inputs):
            return False
        self.view = global_view(program.graph, program.inputs, self.config, self.session.ranks, balanced)
        return True

    def _try_passes(self) -> LocalGraph | Refusal:
        """Run the passes over the captured graph, and return the graph of one rank, or the refusal of a pass."""
        view, ranks = self.view, self.session.ranks
        inputs = local_inputs(self.program.inputs, view.layouts, view.graph)
        context = PassContext(
            ranks,
            self.config,
            seq_dims=view.seq_dims,
            inputs=view.inputs,
            outputs=view.outputs,
            folds=view.folds,
            machine=self.machine,
            aligned=self.session.aligned,
            repeats=self.repeats,
            fragment=view.fragment,
            has_sharded_peer=has_sharded_outputs(ranks),
        )
        result = run_pipeline(view.graph, context)
        if isinstance(result, Refusal):
            return result
        local, report = result
        # If the rows are in a load-balanced order, the passes have appended placeholders for the tensors of this order.
        added = local.graph.find_nodes(op="placeholder")[len(inputs) :]
        return LocalGraph(local, inputs + [node.meta["val"] for node in added], report)

    def add_boundary(self) -> RankProgram:
        """Return the program of one rank: its graph with the boundary, which inputs and results are sharded."""
        assert self.local is not None  # run_passes
        local, inputs, report = self.local
        ranks = self.session.ranks
        report.add(self._input_notes())
        report.add(graph_break_notes(self.program.graph))
        warn_lost_sequence(self.program.graph, report)
        declare_routes(local, ranks)  # register the names of groups for exchanges between some of the ranks
        boundary = make_boundary(local, self.view, ranks, self.symbols)
        if boundary.results:
            register_sharded_outputs(ranks)
            written = boundary.writes.values()  # outputs that are new values of inputs, no results of the program
            report.sharded_outputs = [result.name for i, result in boundary.results.items() if i not in written]
        joint = make_joint_passes(inputs, self.config, self.session)
        return RankProgram(local, self.config, report, inputs, joint, ranks, self.machine, boundary)

    def _input_notes(self) -> Iterator[Note]:
        """Yield a note for each input that an earlier graph returned sharded; if it is gathered, with the reason."""
        for i, (name, x) in enumerate(zip(self.view.arguments, self.program.inputs, strict=True)):
            if not isinstance(x, Sharded):
                continue
            kind, text = NoteKind.KEPT_SHARDED, f"an earlier graph returned it {x.sharding}"
            if i not in self.view.layouts:  # it is gathered
                kind = NoteKind.UNSHARDED
                if self.row_order_conflict:
                    text += f", and {self.row_order_conflict}"
                elif x.sharding.is_plain:  # if it is sharded along a part of a dim, the text of `sharding` states that
                    text += ", and this one runs on other ranks"
            yield Note(kind, name, text, name, f"input {name}")


def graph_break_notes(gm: GraphModule) -> Iterator[Note]:
    """Yield a note if the graph ends at a graph break."""
    graph_break = torch_compat.graph_break_reason(gm)
    if graph_break:
        trace, reason = graph_break
        yield Note(NoteKind.GRAPH_BREAK, "capture", f"{GRAPH_BREAK_NOTE}: {reason}", where=source_line(trace))


def warn_lost_sequence(gm: GraphModule, report: Report) -> None:
    """Warn on rank 0 if eager code has gathered the sequence before this graph."""
    if process_rank() > 0:
        return
    for note in report.find_notes(NoteKind.SEQUENCE_LOST):
        log.warning("%s is compiled with backend='sp', and %s", program_subject(gm), note.text)
