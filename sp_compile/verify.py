"""Compare simulated ranks with a single device, without processes and without GPUs.

Simulated ranks are threads of one process that run the local graph in turns, up to its next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.base.options import ReportOptions
from sp_compile.lowering.base.progress import set_step, show_progress
from sp_compile.lowering.comm.simulate import run_ranks
from sp_compile.lowering.torch_compat import pytree
from sp_compile.passes.capture.capture import NESTED_CAUSE, NESTED_FIX
from sp_compile.passes.graph.compare_runs import compare_runs, run_with_grads
from sp_compile.passes.report import Report
from sp_compile.planner.dry_run import DryRun
from sp_compile.planner.explain import DRY_RUN_OPTIONS, MEMORY_OPTIONS
from sp_compile.runtime.sharded_values import rebuild_views

from .pipeline import CALL_OPTIONS
from .rank_program import RankProgram

# options that `verify` rejects, and the reasons
REFUSED_OPTIONS = {
    **dict.fromkeys(CALL_OPTIONS, "compiles nothing"),
    **DRY_RUN_OPTIONS,
    **MEMORY_OPTIONS,
    **dict.fromkeys(("inputs", "outputs", "param_grads"), "compares complete results and gradients"),
}


def verify(model: Callable[..., Any], *args: Any, sp: int | None = None, **options: Unpack[ReportOptions]) -> Report:
    """Compare `model(*args)` on `sp` simulated ranks with a single device.

    Both run forward and backward. The errors of a model with dropout are large, since each run draws other numbers.

    Args:
        model: The model, or a function.
        *args: Its arguments, with global shapes; not on the meta device.
        sp: The number of ranks. By default 2, or the size of the axis of `mesh`.
        **options: See `SPConfig`. Keyword arguments of the model are passed as for `explain`.

    Returns:
        The report. Its `errors` holds the largest relative error over the ranks of every result, every gradient, and
        every input or buffer that the single device or a rank has changed; infinite where a dtype or a shape differs.
        Strides may differ.

    Raises:
        SpError: The model or an input is on the meta device (SP715), an input is a nested tensor (SP212), no
            sequence is split (SP716), or `explain` would raise.
    """
    tensors = pytree.tree_leaves((args, options))
    tensors += model.parameters() if isinstance(model, torch.nn.Module) else ()
    if any(isinstance(x, Tensor) and x.is_meta for x in tensors):
        raise SpError("SP715", "verify: expected a model and inputs with values, got a tensor on the meta device.")
    if any(isinstance(x, Tensor) and x.is_nested for x in tensors):
        raise SpError("SP212", NESTED_CAUSE.format("verify"), NESTED_FIX)
    with show_progress("verify"):
        (result,) = DryRun("verify", model, args, [(sp, options)], REFUSED_OPTIONS, compare=_compare).run()
    if not result.report.errors:
        cause = "there is nothing to compare: no sequence of the program is split, and its own collectives do not run."
        raise SpError("SP716", f"verify: {cause}")
    return result.report


def _compare(gm: GraphModule, lowered: RankProgram, inputs: Sequence[Any]) -> None:
    """Run a graph on a single device and on simulated ranks, and add the largest errors to the program's report.

    `DryRun` calls it for each call of a graph that is split.

    Args:
        gm: The graph as Dynamo traced it, for the single device.
        lowered: The program of one rank.
        inputs: The arguments of the call.
    """
    set_step("single device")  # shown as the progress of the command
    largest_errors = dict(lowered.report.errors)  # name of a value -> error
    single_device = run_with_grads(gm, inputs)
    set_step(f"{lowered.ranks.n} simulated ranks")
    restore_views = partial(rebuild_views, edges=lowered.boundary)  # results that are views of other results
    for rank in run_ranks(lowered.ranks.n, lambda _: run_with_grads(lowered.graph, inputs, restore_views)):
        for name, error in compare_runs(gm, inputs, single_device, rank):
            largest_errors[name] = max(largest_errors.get(name, 0.0), error)
    lowered.report.errors = list(largest_errors.items())
