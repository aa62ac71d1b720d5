"""Run the passes, in order, on one captured graph.

A demand is a node's need for rows of other ranks, which a strategy pass satisfies by an exchange. The graph is checked
and analyzed again after each pass, and the report records the changes and the time of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Unpack

from torch.export import ExportedProgram
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import SPConfig, SPOptions
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.passes.base import Pass, Passes, check_pass_order, iterate_passes
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.canonical.merge_repeats import MergeRepeats
from sp_compile.passes.canonical.scan_forms.associative_scan import ExpandAssociativeScans
from sp_compile.passes.capture.capture import capture_export
from sp_compile.passes.context import Note, NoteKind, PassContext, Refusal
from sp_compile.passes.cost.decision import merge_decisions
from sp_compile.passes.cost.exchange_cost import find_exchanges
from sp_compile.passes.localize.balance_layout import BalanceLayout
from sp_compile.passes.localize.localize import Localize
from sp_compile.passes.localize.mask_tables import HoistMaskTables
from sp_compile.passes.localize.memory_order import RestoreStrides
from sp_compile.passes.localize.tiles.run_in_tiles import RunInTiles
from sp_compile.passes.localize.validate_shapes import ValidateShapes
from sp_compile.passes.report import Report
from sp_compile.passes.sharding.output_rules import OUTPUT_INFOS, output_infos
from sp_compile.passes.sharding.placement import Shard
from sp_compile.passes.strategies.attention.base import attention_passes
from sp_compile.passes.strategies.attention.checkpoint_attention import SaveAttentionOutputs
from sp_compile.passes.strategies.attention.choose_attention import ChooseAttention
from sp_compile.passes.strategies.attention.expand_heads import ExpandHeads
from sp_compile.passes.strategies.combine_partials import MarkPartialSums
from sp_compile.passes.strategies.compare_positions import ComparePositions
from sp_compile.passes.strategies.discharge import DemandPass, RepeatPasses
from sp_compile.passes.strategies.gather_demands import GatherOperands, GatherPairs, RevertStaleExchanges
from sp_compile.passes.strategies.halo_demands import ExchangeHalos
from sp_compile.passes.strategies.hoist import HoistSlices
from sp_compile.passes.strategies.join_sequences import JoinSequences
from sp_compile.passes.strategies.random_draws import BroadcastDraws
from sp_compile.passes.strategies.reduce_demands import (
    DecomposeGroupNorms,
    DecomposeMeans,
    ReduceExtremes,
    ReducePartials,
)
from sp_compile.passes.strategies.scan_demands import ShardScans, SplitNestedScans, UseFastScans
from sp_compile.passes.strategies.select_row import SelectRow
from sp_compile.passes.strategies.select_rows import SelectRows
from sp_compile.passes.strategies.sequence_checks import FindSequences, MarkUserCollectives, PlaceOutputs
from sp_compile.passes.strategies.starts.shard_inputs import ShardAttentionInputs
from sp_compile.passes.strategies.starts.side_regions import DecomposeChainedNorms, ShardSideRegions


class ApplyStrategies(RepeatPasses):
    """Passes that satisfy the demands of operations on shards, repeated until no demand remains."""

    requires = frozenset({"canonical", "chosen attention"})

    @classmethod
    def parts(cls) -> Sequence[type[Pass]]:
        """Return the passes of one round, in order.

        Returns:
            The passes at the time of the call, since strategies may be registered after import.
        """
        return strategy_passes()


class Pipeline(Passes):
    """All passes that lower a captured graph in the global view to the validated graph of one rank."""

    steps = (
        Canonicalize,
        MergeRepeats,
        MarkUserCollectives,
        JoinSequences,
        ShardAttentionInputs,
        FindSequences,
        DecomposeChainedNorms,
        ShardSideRegions,
        ComparePositions,
        ChooseAttention,
        ApplyStrategies,
        UseFastScans,
        ExpandHeads,
        PlaceOutputs,
        Localize,
        ExpandAssociativeScans,
        ValidateShapes,
        BalanceLayout,
        RestoreStrides,
        HoistMaskTables,
        SaveAttentionOutputs,
        RunInTiles,
    )


def strategy_passes() -> tuple[type[DemandPass], ...]:
    """Return the passes that satisfy demands, in order.

    Each handles demands of certain kinds. `GatherOperands` gathers the operands of all that remain. `BroadcastDraws` is
    the last, because it handles random draws that are replicated in the end.

    Returns:
        The classes of the passes.
    """
    return (
        RevertStaleExchanges,
        HoistSlices,
        SplitNestedScans,
        DecomposeGroupNorms,
        DecomposeMeans,
        ReduceExtremes,
        SelectRow,
        SelectRows,
        *attention_passes(),
        ShardScans,
        ExchangeHalos,
        GatherPairs,
        MarkPartialSums,
        ReducePartials,
        GatherOperands,
        BroadcastDraws,
    )


def run_pipeline(gm: GraphModule, context: PassContext) -> tuple[GraphModule, Report] | Refusal:
    """Lower a captured graph in the global view to the graph of one rank.

    Args:
        gm: The captured graph, which is changed.
        context: The context of the passes.

    Returns:
        The graph of one rank and the report; or a Refusal, if a pass cannot split the graph with these inputs. The
        caller may then capture the program with other lengths, or another order of rows, and run the passes again.

    Raises:
        SpError: The graph does not support an option; see the passes.
    """
    if context.ranks.n == 1:  # nothing is exchanged
        context.notes += _note_idle_options(context)
        context.options = replace(context.options, attention="auto", layout="auto")
    pipeline = Pipeline(context)
    check_pass_order(iterate_passes(Pipeline))
    pipeline.run(gm, context)
    if context.refusal is not None:
        return context.refusal
    assert context.input_placements is not None
    # `pipeline.gm` is the graph of one rank. `gm` has the nodes of the global view, for which the placements are known.
    results = gm.graph.output_node().all_input_nodes
    pipeline.gm.meta[OUTPUT_INFOS] = output_infos(gm, context.input_placements)
    return pipeline.gm, Report(
        context.ranks.n,
        notes=context.notes,
        exchanges=find_exchanges(pipeline.gm, context.ranks.n),
        attention=merge_decisions(context.decisions),
        memory=context.memory,
        tiled=context.tiled_regions,
        inputs=context.sequence_inputs,
        sharded_outputs=[n.name for n in results if isinstance(context.input_placements.of(n), Shard)],
        work=context.work,
        candidates=context.candidates,
        constraints=context.constraints,
        passes=context.runs,
    )


def _note_idle_options(context: PassContext) -> Iterator[Note]:
    """Yield a note for each option that one rank does not use; no error, so that scripts run on any number of ranks."""
    for option, requested in (("attention", context.options.attention), ("layout", context.options.layout)):
        if requested != "auto":
            yield Note(NoteKind.DECLINED, requested, f"{option}={requested!r} has no effect on one rank")


def parallelize(
    program: ExportedProgram | GraphModule, sp: int | None = None, **options: Unpack[SPOptions]
) -> GraphModule:
    """Run all passes on an exported program, and return the module that each rank runs.

    Args:
        program: The exported program, or its graph module.
        sp: The number of ranks, for an examination or a simulation without processes. None selects the ranks of the
            option `mesh`, or of the default process group.
        **options: See `SPConfig`. `seq_dims` contains names of inputs of the exported graph, and `outputs` is "gather"
            (the default) or "local".

    Returns:
        A module with the calling convention of the program. `meta["sp_report"]` is its report.

    Raises:
        SpError: An option is invalid (SP101 to SP116) or has no effect on a graph that is not compiled (SP109), or the
            backend would raise.
    """
    config = SPConfig.of({"outputs": "gather", **options})
    # `refuse` raises if one of the named options is set; the texts are the reasons.
    config.refuse("parallelize", WHEN_COMPILED, **CALL_OPTIONS)
    if sp is not None:
        config.refuse(f"sp={sp}", mesh="already sets the number of ranks", mesh_dim="has no mesh")
    ranks = config.ranks() if sp is None else Ranks(sp, SIMULATED_GROUP)
    seq_dims, outputs = config.seq_dims, config.outputs
    if outputs not in ("gather", "local"):
        raise SpError("SP103", f"outputs: expected 'gather' or 'local' for parallelize, got {outputs!r}.")
    gm = capture_export(program)
    dims_by_input = None if isinstance(seq_dims, str) else seq_dims  # None for "auto": the passes find the sequence
    result = run_pipeline(gm, PassContext(ranks, config, dims_by_input, outputs=outputs))
    if isinstance(result, Refusal):
        raise result.error()
    local, report = result
    local.meta["sp_report"] = report
    return local


WHEN_COMPILED = "Omit the option, or compile the model with torch.compile(model, backend='sp')."
_COMPILE_OPTIONS = "returns a module that is not compiled yet"
# options that `parallelize` rejects, since they apply to the joint graph or to its compilation, and the reasons
CALL_OPTIONS = {
    "inputs": "supports only programs with a fixed sequence length",
    "compiler": _COMPILE_OPTIONS,
    "check_every": "returns a graph whose calls are not compared",
    "activation_memory_budget": _COMPILE_OPTIONS,
    "offload": _COMPILE_OPTIONS,
    "sequence_parallel_linear": "does not change layers over the program's own groups",
    "merge_reductions": "does not merge reductions",
}
