"""Report the effect of the backend on a model, without processes and without GPUs.

A model with many equal layers is lowered with a few of them (`few_layers.py`), and the report is extended to all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import ReportOptions
from sp_compile.lowering.base.progress import show_progress
from sp_compile.passes.context import Note, NoteKind
from sp_compile.passes.cost.few_layers import FewLayers, LayerList
from sp_compile.passes.cost.weight_memory import ModelBytes, state_per_weight
from sp_compile.passes.report import Report

from .dry_run import DryRun, DryRunResult

MIN_SKIPPED_LAYERS = 8  # minimum number of omitted layers for which a few layers of a model are lowered instead of all

# options that all dry runs reject, with the reasons
DRY_RUN_OPTIONS = {"check_every": "runs in one process, so there is nothing to compare"}
# further options that `verify` rejects, and `explain` unless memory=True or passes=True
MEMORY_OPTIONS = dict.fromkeys(("activation_memory_budget", "offload"), "does not report saved values")


def explain(
    model: Callable[..., Any],
    *args: Any,
    sp: int | None = None,
    passes: bool = False,
    memory: bool = False,
    optimizer: Any = None,
    **options: Unpack[ReportOptions],
) -> Report:
    """Report the rewrites, collectives with bytes, and fallbacks of `backend="sp"` for `model(*args)`.

    No processes are needed; the model runs once, on a single device. A program that is already tensor-parallel needs
    its groups, of processes that all call `explain`, or of the "fake" backend; the report then has a line for each of
    its layers.

    Args:
        model: The model, or a function.
        *args: Its arguments, with global shapes.
        sp: The number of ranks that share the sequence. By default 2, or the size of the axis of `mesh`.
        passes: Show every pass that ran, including those over forward and backward, with rewrites, nodes and seconds.
        memory: Predict the memory of a rank over a training step (`report.step`, in bytes) from the forward and the
            backward graph. Of a model on the meta device with many equal layers, a few are lowered.
        optimizer: The optimizer that trains the model, or its class. AdamW by default.
        **options: See `SPConfig` (`attention="ring"`). Keyword arguments of the model go into a dict `kwargs={...}`.
            Those without the name of an option may also be passed directly (`labels=ids`), which type checkers do not
            accept; other names raise.

    Returns:
        The report.

    Raises:
        SpError: The backend would raise; an option has no effect on a report (SP109, SP714); `memory` is not a bool
            (SP713); `sp` is invalid or contradicts the mesh (SP711, SP712); or Dynamo finds nothing to compile.
    """
    if not isinstance(memory, bool):
        raise SpError("SP713", f"memory: expected True or False, got {memory!r}.")
    if optimizer is not None and not memory:
        raise SpError("SP714", "optimizer: expected None with memory=False, as explain does not report its state.")
    # The options that have no effect on the report, with the reasons: they raise.
    refused = DRY_RUN_OPTIONS if memory or passes else DRY_RUN_OPTIONS | MEMORY_OPTIONS
    run = DryRun("explain", model, args, [(sp, options)], refused, partitions=passes)
    run.per_weight = state_per_weight(optimizer) if memory else None
    is_on_meta = isinstance(model, torch.nn.Module) and any(p.is_meta for p in model.parameters())
    with show_progress("explain"):
        layers = similar_layers(model) if memory and is_on_meta else None
        (result,) = run_layers(run, layers)
    result.report.show_passes = passes
    return result.report


def similar_layers(model: Any) -> LayerList | None:
    """Return the layers of a model if a few of them represent all, so that a dry run lowers only these.

    Args:
        model: The model, or a function.

    Returns:
        The layers; None if the model has too few equal ones.
    """
    layers = LayerList.of(model) if isinstance(model, torch.nn.Module) else None
    num_skipped = 0 if layers is None else len(layers.layers) - len(layers.reduced_positions)
    return layers if num_skipped >= MIN_SKIPPED_LAYERS else None


def run_few_layers(run: DryRun, layers: LayerList | None) -> list[DryRunResult]:
    """Run a dry run with a few of the model's layers; its reports have only these.

    `run_layers` extends the reports to all layers.

    Args:
        run: The dry run.
        layers: Layers of which a few represent all; None to lower all layers.

    Returns:
        A result for each configuration.
    """
    if layers is None:
        return run.run()
    # Before the model is reduced: the layers that each remaining layer represents, and the bytes of all weights.
    run.repeats = FewLayers(layers.representatives, ModelBytes.of(run.model))
    with layers.only(layers.reduced_positions):
        return run.run()


def run_layers(run: DryRun, layers: LayerList | None) -> list[DryRunResult]:
    """Run a dry run that predicts memory with a few of the model's layers, and extend its reports to all layers.

    If the traced graphs lack one of these layers, its part of the report cannot be repeated. A second dry run then
    lowers all layers.

    Args:
        run: The dry run.
        layers: As for `run_few_layers`.

    Returns:
        A result for each configuration.
    """
    results, repeats = run_few_layers(run, layers), run.repeats
    if layers is None or repeats is None:
        return results
    # `kinds` has the number of the kind of each layer of the model, from 0 on.
    num_lowered, num_kinds = len(layers.reduced_positions), max(layers.kinds) + 1
    text = f"{num_lowered} layers were lowered, and represent {len(layers.kinds)} of {num_kinds} kind"
    text += "s" if num_kinds > 1 else ""
    for report in (result.report for result in results if result.problem is None):
        assert report.step is not None
        traced_layers = {moment.layer for graph in report.step.graphs for moment in graph.forward.moments}
        # `times` is the number of layers that each lowered one represents, by its path.
        if not repeats.times.keys() <= traced_layers:
            run.repeats, run.results = None, []
            return run.run()
        # List what one layer has once for each layer that it represents.
        report.notes = [note for note in report.notes for _ in range(repeats.times.get(note.layer, 1))]
        report.tiled = [region for region in report.tiled for _ in range(repeats.times.get(region.layer, 1))]
        report.exchanges = [repeated for e in report.exchanges for repeated in e.repeat(repeats.times)]
        report.notes.append(Note(NoteKind.EXTRAPOLATED, layers.name, text, where=f"layers {layers.name}"))
    return results
