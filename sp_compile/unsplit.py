"""Lower programs that are not split along a sequence.

These have collectives of their own and no sequence, or cannot be split. Each rank runs the graph as it was written, on
full tensors. A fragment is a graph between graph breaks, a part of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import CaptureError, SpError, node_line
from sp_compile.lowering.base.options import AnyOptions, SPConfig
from sp_compile.passes.capture.capture import capture, trace_ops
from sp_compile.passes.capture.graph_inputs import local_inputs
from sp_compile.passes.capture.uncaptured import UnsplitDecision, decide_unsplit
from sp_compile.passes.capture.user_program import UserProgram
from sp_compile.passes.context import Note, NoteKind
from sp_compile.passes.graph.differentiable import differentiable_nodes
from sp_compile.passes.report import Report
from sp_compile.passes.sharding.placement import PlacementPlan
from sp_compile.passes.sharding.sharded_work import ShardedWork, count_work
from sp_compile.runtime.compile_failure import shorten_failure
from sp_compile.runtime.fingerprint import program_subject
from sp_compile.runtime.session import CompileSession

from .rank_program import RankProgram, make_joint_passes

T = TypeVar("T")

SEQUENCE_OPTIONS = dict.fromkeys(
    "seq_dims attention layout inputs outputs param_grads state fallback tiles ulysses_chunks".split(),
    "has no effect without ranks that split a sequence",
)
NAME_RANKS = "Omit the option, or pass the ranks with mesh and mesh_dim."
CANNOT_SPLIT = "every rank runs the unsplit graph, because it cannot be split"
UNSPLIT_NOTE = Note(
    NoteKind.REPLICATED, "capture", "the program has its own collectives and no sequence, so it is not split"
)
CHANGING_LENGTHS = (
    "torch cannot trace this program of DTensors (RecursionError), with any backend, when the length of a sequence "
    "is dynamic."
)


def lower_unsplit(program: UserProgram, options: AnyOptions, session: CompileSession, *notes: Note) -> RankProgram:
    """Return a program that has no sequence to split; its own collectives may still be optimized.

    Args:
        program: The program.
        options: The options of the backend. Options on the sequence are refused, except in a fragment of a model.
        session: The session. Passes on the joint graph optimize the collectives of its groups. A new session,
            `CompileSession()`, has no groups: then nothing is optimized.
        *notes: Notes of the report.

    Raises:
        SpError: An option has no effect without a sequence (SP109).
    """
    config = SPConfig.of(options)
    if not torch_compat.is_fragment(program.graph):  # other fragments of the model may have a sequence
        config.refuse("a program with its own collectives", NAME_RANKS, **SEQUENCE_OPTIONS)
    report, inputs = Report(1, list(notes)), local_inputs(program.inputs)
    return RankProgram(program.graph, config, report, inputs, make_joint_passes(inputs, config, session))


def run_or_decide(run: Callable[[], T], program: UserProgram, options: AnyOptions) -> T | UnsplitDecision:
    """Return the result of `run`, or the decision that every rank runs the program as it was written.

    Only here an exception becomes that decision: errors are raised deep in the capture, in the passes and in torch.

    Args:
        run: Lowers the program and compiles the result.
        program: The program.
        options: The options of the backend.

    Raises:
        Exception: The error of `run`, if it is one of the user, such as an invalid option, or the program must be split
            (SP212 if Dynamo would run it eagerly).
    """
    try:
        with torch_compat.preserve_thread_state():
            return run()
    except torch_compat.RestartAnalysis:  # Dynamo traces the program again
        raise
    except Exception as failure:
        decision = decide_unsplit(failure)
        if decision is None:
            raise
        if not must_split(program, options):
            return decision
        if torch_compat.is_fallback_error(failure):  # Dynamo would run eagerly; an SpError reaches the user
            raise CaptureError("SP212", f"{program_subject(program.graph)}: {decision.reason}") from failure
        raise


def keep_unsplit(program: UserProgram, options: AnyOptions, session: CompileSession, why: str) -> RankProgram:
    """Return a program that should be split and cannot be: every rank runs its graph as it was written.

    Args:
        program: The program.
        options: The options of the backend.
        session: The ranks that would share the sequence.
        why: The reason, for the report and a warning.
    """
    gm, config, inputs = program.graph, SPConfig.of(options), local_inputs(program.inputs)
    first_op = next((node for node in gm.graph.nodes if node.op == "call_function"), None)
    where = program_subject(gm) if first_op is None else node_line(first_op)
    report = Report(session.ranks.n, [Note(NoteKind.REPLICATED, "capture", f"{CANNOT_SPLIT}: {why}", where=where)])
    report.work = _count_unsplit_work(program)
    joint = make_joint_passes(inputs, config, CompileSession())  # a session without groups: nothing is optimized
    return RankProgram(gm, config, report, inputs, joint, unsplit_reason=why)


def finish_unsplit(
    unsplit: RankProgram, finish: Callable[[RankProgram], T], can_compile: bool
) -> tuple[RankProgram, T]:
    """Compile an unsplit program; if that is not possible, run it eagerly.

    Args:
        unsplit: The program.
        finish: The function that compiles it, as for `sp_compile.backend.lower_or_keep`.
        can_compile: False if only eager code runs it correctly.

    Returns:
        The program, and the value of `finish`.
    """
    if can_compile:
        try:
            with torch_compat.preserve_thread_state():
                return unsplit, finish(unsplit)
        except Exception as failure:
            if not torch_compat.is_fallback_error(failure):
                raise
    unsplit.eager = True
    return unsplit, finish(unsplit)


def _count_unsplit_work(program: UserProgram) -> ShardedWork:
    """Return the FLOPs and bytes of a graph that every rank runs; zeros if its ops cannot be traced."""
    for convert in (capture, trace_ops):  # a failed capture may be the reason why the program runs unsplit
        try:
            graph = convert(program.graph, program.inputs)
            replicated = PlacementPlan()  # of a graph without sharded values
            return count_work(graph, replicated, differentiable_nodes(graph), times=lambda node: 1, n=1)
        except torch_compat.RestartAnalysis:
            raise
        except Exception:  # the report has the error
            continue
    return ShardedWork()


def must_split(program: UserProgram, options: AnyOptions) -> bool:
    """Return True if the graph may not run unsplit.

    That is so with fallback='error', and if its inputs or results are shards or DTensors, of which a rank has a part.
    """
    config = SPConfig.of(options)
    has_local_values = "local" in (config.inputs, config.outputs)
    return config.fallback == "error" or has_local_values or program.has_dtensors


def explain_failure(failure: Exception, program: UserProgram) -> Exception:
    """Return the error of the compilation, shortened, or SP242 with a fix for torch's RecursionError on DTensors."""
    # torch (without this package, too) recurses without end on DTensors with a dynamic length.
    if not isinstance(failure, RecursionError) or not program.has_dtensors:
        return shorten_failure(failure, program_subject(program.graph))
    error = SpError("SP242", CHANGING_LENGTHS)
    error.__cause__ = failure
    return error
