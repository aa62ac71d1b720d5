"""The passes, in order, over one captured graph; each lints, is timed and recorded, and has the graph analysed anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import GROUP
from sp_compile.passes.base import Pass, Passes, check_order, passes_in
from sp_compile.passes.boundary.outputs import RESULTS, results_of
from sp_compile.passes.canonical.associative_scan import Trees
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.capture.capture import capture_export
from sp_compile.passes.context import Job, Note, NoteKind, Refusal, Settings
from sp_compile.passes.cost.decision import merged
from sp_compile.passes.cost.exchange_cost import exchanges_of
from sp_compile.passes.localize.balance_layout import Deal
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.localize.mask_tables import Lookups
from sp_compile.passes.localize.memory_order import RestoreStrides
from sp_compile.passes.localize.validate_shapes import Prove
from sp_compile.passes.report import Report
from sp_compile.passes.sharding.placement import Shard
from sp_compile.passes.strategies.attention.base import attention_passes
from sp_compile.passes.strategies.attention.checkpoint_attention import KeepAttention
from sp_compile.passes.strategies.attention.choose_attention import ChooseAttention
from sp_compile.passes.strategies.attention.expand_heads import ExpandHeads
from sp_compile.passes.strategies.combine_partials import CombineSums
from sp_compile.passes.strategies.discharge import Rewrite, Rounds
from sp_compile.passes.strategies.gather_demands import Gather, Undo
from sp_compile.passes.strategies.halo_demands import Halo
from sp_compile.passes.strategies.hoist import Hoist
from sp_compile.passes.strategies.local_scan import SlowScans
from sp_compile.passes.strategies.random_draws import Draws
from sp_compile.passes.strategies.reduce_demands import Means, Reduce
from sp_compile.passes.strategies.scan_demands import NestedScan, Scan
from sp_compile.passes.strategies.select_row import Pick
from sp_compile.passes.strategies.sequence_checks import LocalOutputs, MarkExchanges, Sequences
from sp_compile.passes.strategies.shard_inputs import BeginAttention
from sp_compile.passes.tiles.run_in_tiles import Tiles


class Discharge(Rounds):
    """The strategies, round after round, until no demand is left."""

    requires = frozenset({"canonical", "attention is chosen"})

    @classmethod
    def parts(cls) -> Sequence[type[Pass]]:
        return strategies()


class Pipeline(Passes):
    """Captured graph in the global view -> the proved graph of one rank: all there is, in order."""

    steps = (
        Canonicalize,
        MarkExchanges,
        BeginAttention,
        Sequences,
        ChooseAttention,
        Discharge,
        SlowScans,
        ExpandHeads,
        LocalOutputs,
        Localize,
        Trees,
        Prove,
        Deal,
        RestoreStrides,
        Lookups,
        KeepAttention,
        Tiles,
    )


def strategies() -> tuple[type[Rewrite], ...]:
    """Each claims demands by kind and may be run alone, by hand; what the others leave is gathered."""
    return (Undo, Hoist, NestedScan, Means, Pick, *attention_passes(), Scan, Halo, CombineSums, Reduce, Gather, Draws)


def run_pipeline(
    gm: GraphModule, job: Settings, fragment: bool = False, follows: bool = False
) -> tuple[GraphModule, Report] | Refusal:
    """Lower a captured graph in the global view to the graph of one rank.

    Args:
        gm: The captured graph, which is changed.
        job: The settings.
        fragment: Whether the graph is a piece of a model, as `Job` has it.
        follows: Whether an earlier program left results in shards.

    Returns:
        The graph and the report; a Refusal where other views of its inputs may be lowered.

    Raises:
        SpError: An option does not fit the graph.
    """
    state = replace(Job.begin(job), fragment=fragment, follows=follows)
    if job.ranks.n == 1:
        state = replace(state, attention="auto", layout="auto", notes=list(_of_several(job)))
    pipeline = Pipeline(state)
    check_order(passes_in(Pipeline))
    pipeline.run(gm, state)
    if state.refusal is not None:
        return state.refusal
    assert state.planned is not None
    results = gm.graph.output_node().all_input_nodes
    pipeline.gm.meta[RESULTS] = results_of(gm, state.planned)
    return pipeline.gm, Report(
        job.ranks.n,
        notes=state.notes,
        exchanges=exchanges_of(pipeline.gm, job.ranks.n),
        attention=merged(state.decisions),
        memory=state.memory,
        tiled=state.tiled,
        inputs=state.sequence_inputs,
        sharded_outputs=[n.name for n in results if isinstance(state.planned.of(n), Shard)],
        constraints=state.constraints,
        passes=state.laps,
    )


def _of_several(job: Settings) -> Iterator[Note]:
    """What was asked for and takes more than the one rank that there is: a script runs on a laptop as it is."""
    for option, asked in (("attention", job.attention), ("layout", job.layout)):
        if asked != "auto":
            yield Note(NoteKind.DECLINED, asked, f"{option}={asked!r} has no effect on one rank")


def parallelize(program: ExportedProgram | GraphModule, sp: int | None = None, **config: Any) -> GraphModule:
    """Every pass on an exported program: the module that each rank runs, with the program's calling convention.

    sp: the number of ranks, for a look or a simulation without processes; None takes config's mesh or the default
    group. config: the fields of SPConfig; seq_dims names inputs of the exported graph. The report is in
    `meta["sp_report"]`. Raises SpError as the backend would, and for options of what comes behind these passes.
    """
    options = SPConfig.of({"outputs": "gather", **config})
    options.refuse("parallelize", WHEN_COMPILED, **BEHIND)
    if sp is not None:
        options.refuse(f"sp={sp}", mesh="gives the number of ranks already", mesh_dim="has no mesh")
    job = Settings.of(options, options.ranks() if sp is None else Ranks(sp, GROUP))
    seq_dims, outputs = job.asked.seq_dims, job.asked.outputs
    if outputs not in ("gather", "local"):
        raise SpError("SP103", f"outputs: expected 'gather' or 'local' for parallelize, got {outputs!r}.")
    gm = capture_export(program)
    job = replace(job, seq_dims=None if isinstance(seq_dims, str) else seq_dims, outputs=outputs)
    found = run_pipeline(gm, job)
    if isinstance(found, Refusal):
        raise found.error()
    local, report = found
    local.meta["sp_report"] = report
    return local


WHEN_COMPILED = "Leave the option out, or compile the model with torch.compile(model, backend='sp')."
_COMPILES = "returns a module that is not compiled yet"
BEHIND = {
    "inputs": "takes a program whose sequence length is fixed",
    "compiler": _COMPILES,
    "check_every": "returns a graph, whose calls are not compared",
    "activation_memory_budget": _COMPILES,
    "offload": _COMPILES,
    "sequence_parallel_linear": "changes no layers over groups of the program's own",
    "merge_reductions": "merges no reductions",
}
"""Options of what is done to a joint graph, and behind it."""
