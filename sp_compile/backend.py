"""The torch.compile backend "sp".

Every graph that Dynamo passes to the backend is captured, planned and split by the passes along its sequence, and
given a boundary for sharded inputs and outputs (`lower`), compiled (`compile_rank_program`) and guarded
(`guard_program`). To lower is to rewrite a program to that of one rank. `sp` runs these stages on all ranks of one
compilation together. The guard is the function that Dynamo calls: it checks that all ranks make the same call, and then
runs the compiled program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch.fx import GraphModule

from sp_compile.generation import must_run_eagerly
from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.garbage import reduce_collections
from sp_compile.lowering.base.options import AnyOptions, can_fold_reads
from sp_compile.passes.capture import package_kernels  # noqa: F401  (Dynamo traces stand-ins)
from sp_compile.passes.capture.uncaptured import UnsplitDecision, warn_unsplit
from sp_compile.passes.capture.user_program import UserProgram
from sp_compile.passes.cost.few_layers import FewLayers
from sp_compile.runtime.eager_fallback import warn_eager_fallback, warn_fsdp_submodules
from sp_compile.runtime.fingerprint import program_subject
from sp_compile.runtime.session import CompileSession, warn_one_rank

from .rank_program import RankProgram, compile_rank_program, guard_program
from .split import SplitProgram
from .unsplit import UNSPLIT_NOTE, explain_failure, finish_unsplit, keep_unsplit, lower_unsplit, run_or_decide

log = logging.getLogger(__name__)
T = TypeVar("T")


def sp(gm: GraphModule, example_inputs: Sequence[Any], *, options: AnyOptions = None, mode: str | None = None) -> Any:
    """Compile one Dynamo graph for the ranks that share its sequence; `torch.compile(backend="sp")` calls it.

    Args:
        gm: The graph, as Dynamo passes it to a backend.
        example_inputs: Its inputs: fake or real tensors, and sizes.
        options: The fields of `SPConfig`.
        mode: A mode of Inductor, as `torch.compile` names it; modes with CUDA graphs are refused.

    Returns:
        The guard of the compiled program. If the compilation failed on a rank, the guard sends the error to the other
        ranks when it is called, and raises it on all of them.

    Raises:
        SpError: Some ranks of the program's groups run another operation instead of this compilation. Nothing is cached
            then, so Dynamo compiles again at the next call.
    """
    program = UserProgram.from_dynamo(gm, example_inputs)
    session = CompileSession(gm, example_inputs, options, mode=mode)
    warn_one_rank(session)
    lowered: RankProgram | None = None
    run: Callable[..., Any] | None = None
    error: Exception | None = None
    with session.publish_interrupt(gm):
        try:
            session.start(gm)
            with session.show_compiling(gm), reduce_collections():  # heartbeats and a progress line
                lowered, run = lower_or_keep(program, options, session, partial(compile_rank_program, mode=mode))
        except torch_compat.RestartAnalysis:  # Dynamo traces the program again, on every rank
            raise
        except Exception as failure:
            error = explain_failure(failure, program)
        error = session.finish(gm, error)  # run the remaining exchanges, for which the other ranks wait
    if torch_compat.is_cut_by_ddp(gm):  # DDPOptimizer calls the program of a bucket once on fake tensors
        torch_compat.keep_first_call_fake()
    if lowered is not None and lowered.unsplit_reason:
        warn_unsplit(program_subject(gm), lowered.unsplit_reason)
    return guard_program(program, session, lowered, run, error)


torch_compat.on_eager(sp, must_run_eagerly, warn_eager_fallback, warn_fsdp_submodules)
torch_compat.trace_tensor_checks()
torch_compat.fold_small_reads(sp, can_fold_reads)
torch_compat.trace_input_grads(sp)


def lower_or_keep(
    program: UserProgram,
    options: AnyOptions,
    session: CompileSession,
    finish: Callable[[RankProgram], T],
    repeats: FewLayers | None = None,
) -> tuple[RankProgram, T]:
    """Lower a program and compile the result; if it cannot be split, compile the unsplit program instead.

    An unsplit program is the graph as it was written, which every rank runs on full tensors.

    Args:
        program: The program.
        options: The options of the backend.
        session: The ranks that compile the program.
        finish: The function that compiles the result, or examines it in a dry run. If it raises an error for which
            Dynamo would run the program eagerly (`is_fallback_error`), torch cannot compile the result.
        repeats: As for `lower`.

    Returns:
        The program of one rank, and the value of `finish`.
    """

    def lower_and_finish() -> tuple[RankProgram, T]:
        """Lower the program and compile the result."""
        with torch_compat.without_saved_tensor_hooks():  # those of a checkpoint around the program
            lowered = lower(program, options, session, repeats)
        return lowered, finish(lowered)

    result = run_or_decide(lower_and_finish, program, options)
    if isinstance(result, UnsplitDecision):
        return finish_unsplit(keep_unsplit(program, options, session, result.reason), finish, result.can_compile)
    return result


def lower(
    program: UserProgram, options: AnyOptions, session: CompileSession, repeats: FewLayers | None = None
) -> RankProgram:
    """Lower a program to that of one rank.

    A program with a sequence is split along it. A program with collectives of its own, such as those of tensor
    parallelism, is not split if no ranks are left for a sequence, or if it has none. If no ranks are left, its
    collectives are optimized in the joint graph.

    Args:
        program: The program.
        options: The options of the backend.
        session: The ranks that compile the program.
        repeats: In a dry run, the layers of the model that a program with a few layers represents; None for all.

    Raises:
        SpError: The ranks disagree, or the program cannot be split.
    """
    session.exchange_facts(program.graph, program.inputs)
    if not session.may_split:  # the program has its own collectives, and no axis of a mesh is left for a sequence
        return lower_unsplit(program, options, session)
    # Without a mesh or seq_dims, a program with collectives of its own is split only if it has a sequence.
    if not session.names_sequence and program.has_only_user_exchanges():
        log.info("%s", UNSPLIT_NOTE.text)
        return lower_unsplit(program, options, CompileSession(), UNSPLIT_NOTE)  # without groups nothing is optimized
    split = SplitProgram.capture(program, options, session, repeats)
    split.run_passes()
    return split.add_boundary()
