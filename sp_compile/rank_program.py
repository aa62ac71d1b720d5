"""Represent the program of one rank, compile it with Inductor or another compiler, and guard it.

The passes over the joint graph of AOTAutograd (forward and backward) run while the compiler traces the program.
The guard is the compiled program with an exchange of messages before each call: all ranks must make the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from sp_compile.lowering import torch_compat
from sp_compile.lowering.base.errors import SpError, did_you_mean
from sp_compile.lowering.base.library import sources_digest
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.progress import set_step
from sp_compile.lowering.base.ranks import SINGLE_RANK, Ranks
from sp_compile.passes.boundary.add_tokens import BoundaryPasses
from sp_compile.passes.boundary.boundary_context import BoundaryContext
from sp_compile.passes.boundary.graph_boundary import GraphBoundary
from sp_compile.passes.capture.user_program import UserProgram
from sp_compile.passes.cost.group_names import is_collective
from sp_compile.passes.cost.input_facts import InputFacts
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.walk.live_values import nbytes_of
from sp_compile.passes.graph.call import node_tensors
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.provenance import exchange_sources, node_lines
from sp_compile.passes.graph.rank_rng import has_random_ops, with_rank_rng
from sp_compile.passes.joint.joint import JointPasses
from sp_compile.passes.joint.joint_context import JointContext, PartitionContext
from sp_compile.passes.joint.partitioned import PartitionedPasses
from sp_compile.passes.joint.save_attention import apply_checkpoint_policies
from sp_compile.passes.localize.tiles.run_in_tiles import programs_of
from sp_compile.passes.report import Report
from sp_compile.runtime.control.channel import publish_stop
from sp_compile.runtime.fingerprint import ProgramDigest, exchange_digest, graph_digest, input_names, program_subject
from sp_compile.runtime.guard import GuardedProgram, ProgramInfo, WorldProgram
from sp_compile.runtime.input_checks import ComparedInputs, group_inputs, local_tensors, sequence_inputs
from sp_compile.runtime.session import CompileSession
from sp_compile.runtime.settings_digest import settings_fields
from sp_compile.runtime.sharded_values import GatheredProgram, ShardedProgram, has_sharded_args

log = logging.getLogger(__name__)

NO_CUDA_GRAPHS = (
    "records CUDA graphs, which are not supported: attention launches kernels by the documents of each batch, and "
    "ranks cannot record and replay together."
)
NO_COLLECTIVE_PASSES = "compiler={!r} does not support passes on collectives: they are not changed"


@dataclass
class RankProgram:
    """A Dynamo graph as it is lowered for one rank."""

    graph: GraphModule  # the graph of this rank
    options: SPConfig  # the options of the backend
    report: Report  # the decisions of the passes
    inputs: Sequence[Any]  # example inputs of `graph` for the compiler, with the shapes of one rank
    joint: JointPasses = field(default_factory=JointPasses)  # passes over the joint graph of AOTAutograd
    ranks: Ranks = SINGLE_RANK  # the ranks that shard the sequence; one rank if the graph is unsplit
    machine: Machine | None = None  # measured constants of the cost model
    boundary: GraphBoundary = field(default_factory=GraphBoundary)  # sharded inputs and outputs
    unsplit_reason: str = ""  # the reason why every rank runs the graph as it was written; "" if it is split
    eager: bool = False  # eager code runs the graph

    @property
    def has_user_collectives(self) -> bool:
        """Return True if the user's program has collectives of its own, which passes on the joint graph may change."""
        return bool(self.joint.context.session.groups)

    @property
    def input_bytes(self) -> int:
        """Return the bytes of the arguments on this rank, without parameters and buffers."""
        inputs = self.graph.graph.find_nodes(op="placeholder")
        # `parameter` is True for a parameter or buffer, and None if it was not determined.
        arguments = [node for node in inputs if node_info(node).parameter is False]
        return sum(nbytes_of(x) for node in arguments for x in node_tensors(node))

    def add_boundary_outputs(self) -> None:
        """Add the outputs that sharded results need to the graph, and update the boundary; called before compilation.

        A deferred result, such as logits, is computed only when it is read: its operands become outputs. A result in a
        load-balanced order adds the tensors that describe this order. A result that may get a gradient adds a gradient
        token, a tensor of one element: the backward stores the gradient of the result outside of the graph, and passes
        the number under which it is stored as the gradient of the token.
        """
        context = BoundaryContext(
            self.ranks,
            self.options,
            machine=self.machine,
            boundary=self.boundary,
            trains=torch.is_grad_enabled(),
            is_split_only=not self.has_user_collectives,  # the program has no collectives of its own
        )
        BoundaryPasses(context)(self.graph)
        self.boundary = context.boundary
        self.report.passes += context.runs

    def partitioned_passes(self, options: SPConfig | None = None) -> PartitionedPasses | None:
        """Return the passes over forward and backward: overlap of collectives, and offload of saved values.

        The compiler runs them after AOTAutograd has partitioned the joint graph into forward and backward.

        Args:
            options: Options that replace those of the program; None for those of the program.

        Returns:
            The passes; None if there are no collectives to overlap and no values to offload, or if the compiler does
            not run passes on joint graphs.
        """
        options = options or self.options
        has_nothing_to_do = options.offload == "never" and self.ranks.n == 1
        if has_nothing_to_do or not options.has_joint_passes:
            return None
        memory = list(self.report.memory)  # the predicted memory of a rank
        context = PartitionContext(
            self.ranks, options, machine=self.machine, memory=memory, input_bytes=self.input_bytes
        )
        return PartitionedPasses(context)


def make_joint_passes(example_inputs: Sequence[Any], options: SPConfig, session: CompileSession) -> JointPasses:
    """Return the passes over the joint graph of a program, which its compiler runs.

    The context of these passes has the local shapes of the inputs, and the groups of the session.
    """
    shapes = [tuple(x.shape) for x in local_tensors(example_inputs)]
    return JointPasses(JointContext(options=options, session=session, shapes=shapes))


def compile_rank_program(lowered: RankProgram, mode: str | None) -> Callable[..., Any]:
    """Return the compiled program of one rank; if eager code runs it, the uncompiled forward of its graph."""
    if lowered.eager:
        return lowered.graph.forward
    if not lowered.unsplit_reason:  # an unsplit program has no sharded results
        with torch_compat.without_saved_tensor_hooks():  # hooks of a checkpoint around the program must not run here
            lowered.add_boundary_outputs()
    return compile_local(lowered, mode)


def compile_local(lowered: RankProgram, mode: str | None = None) -> Callable[..., Any]:
    """Compile the local graph and its joint passes with Inductor, or with the compiler of the options."""
    options, joint, local = lowered.options, lowered.joint, lowered.graph
    name = options.compiler  # a name of `torch.compiler.list_backends()`, or a callable
    patches = _mode_options(mode, name)
    compiler = torch_compat.get_compiler(name, patches)
    policies: AbstractContextManager[Any] = nullcontext()  # of selective checkpointing, for the ops of this package
    partitioned = lowered.partitioned_passes()
    needs_joint_graph = (
        lowered.has_user_collectives or partitioned is not None or torch_compat.has_checkpoint_regions(local)
    )
    if options.has_joint_passes and needs_joint_graph:
        # The key is None if the passes exchange messages: every rank must run them, so AOTAutograd's cache is off.
        compiler = torch_compat.joint_compiler(name, joint, joint.key(), patches, partitioned)
        policies = apply_checkpoint_policies(local)
    elif lowered.has_user_collectives:
        log.warning("%s", NO_COLLECTIVE_PASSES.format(name))
    # torch caches compiled code by graph; code from another version of the operators must not be loaded.
    tag = f"{torch.compiler.config.cache_key_tag} sp_compile {sources_digest()}"
    budget = torch_compat.memory_budget(options.activation_memory_budget)
    with budget, torch.compiler.config.patch(cache_key_tag=tag), policies:
        set_step(f"compiler {name}" if isinstance(name, str) else "compiler")
        # Regions that run in tiles are separate graphs, which operators of the local graph call.
        tile_compiler = torch_compat.nested_compiler(torch_compat.get_compiler(name, patches))
        key = name, str(patches)  # the program of a region is compiled again only if this changes
        for program in programs_of(local):
            program.compile(tile_compiler, key, for_training=torch.is_grad_enabled())
        run = compiler(local, lowered.inputs)
    if lowered.has_user_collectives:
        log.info("%s", joint.report)
    draws_on_shards = lowered.ranks.n > 1 and has_random_ops(local)
    return with_rank_rng(run, lowered.ranks) if draws_on_shards else run  # each rank draws other numbers for its rows


def _mode_options(mode: str | None, compiler: str | Callable[..., Any]) -> Mapping[str, Any]:
    """Return Inductor's settings of a mode, or {} without one.

    Raises:
        SpError: The compiler is not Inductor, or the mode is unknown or uses CUDA graphs.
    """
    if mode is None:
        return {}
    if compiler != "inductor":
        raise SpError("SP107", f"mode={mode!r} is not supported with compiler={compiler!r}, only with 'inductor'.")
    known = torch_compat.inductor_mode_options()
    if mode not in known:
        hint = did_you_mean(mode, known)
        raise SpError("SP103", f"mode: expected one of {', '.join(map(repr, known))}, got {mode!r}{hint}.")
    if known[mode].get("triton.cudagraphs"):
        raise SpError("SP108", f"mode={mode!r} {NO_CUDA_GRAPHS}")
    return known[mode]


def guard_program(
    program: UserProgram,
    session: CompileSession,
    lowered: RankProgram | None,
    run: Callable[..., Any] | None,
    error: Exception | None,
) -> Callable[..., Any]:
    """Return the compiled program with checks that the ranks of each group agree on it and its inputs.

    Args:
        program: The program.
        session: The ranks that compiled it.
        lowered: The program of one rank; None if the compilation failed.
        run: The compiled program; None if the compilation failed.
        error: The error of the compilation on a rank, which every call raises on all ranks.
    """
    gm, info = program.graph, _describe_program(program, session, lowered)
    # A graph that is not split takes full tensors, so sharded arguments are gathered here, or by the guard of a group.
    # `session.split` is True if ranks were to share the sequence; with an `unsplit_reason`, each rank runs all of it.
    if session.split:
        gathers_inputs = bool(info.unsplit_reason)
    else:
        gathers_inputs = not session.groups and has_sharded_args(program.inputs)
    if run is not None and lowered is not None and gathers_inputs:
        run = GatheredProgram(run, lowered.eager)
    # The innermost guard is that of the ranks of the sequence, around it are those of the groups.
    if session.split:
        # This guard raises the error, so that those around it do not.
        run, error = _guard_sequence(program, session, lowered, run, error, info), None
    elif error is not None and not session.groups:
        publish_stop(str(error), subject=info.subject)  # with an invalid mesh, the waiting ranks are not known
        run = GuardedProgram(
            run=None, ranks=SINGLE_RANK, info=info, program=ProgramDigest(), inputs=ComparedInputs(), error=error
        )
    for ranks in reversed(session.groups):  # the first group is checked first, as in CompileProtocol.start
        joint = None if lowered is None else lowered.joint.context
        # The inputs whose values the passes assume to be equal on these ranks.
        common_inputs = None if joint is None else joint.common_inputs.get(ranks.group)
        has_backward_collectives = joint is not None and ranks.group in joint.backward
        inputs = group_inputs(gm, program.inputs, session.facts.get(ranks.group, InputFacts()), common_inputs)
        run = GuardedProgram(run, ranks, info, exchange_digest(gm), inputs, error, backward=has_backward_collectives)
    assert run is not None
    boundary = GraphBoundary() if lowered is None else lowered.boundary
    if boundary.results or boundary.writes or boundary.views:
        run = ShardedProgram(run, session.ranks, info.subject, boundary)
    # `WorldProgram` refuses calls after the default process group has changed.
    return run if session.groups else WorldProgram(run)


def _describe_program(program: UserProgram, session: CompileSession, lowered: RankProgram | None) -> ProgramInfo:
    """Return the facts that the guards of all groups share; the arguments are those of `guard_program`."""
    inputs = program.graph.graph.find_nodes(op="placeholder")
    argument_names = {node.name: torch_compat.argument_name(node) for node in inputs}
    graph = None if lowered is None else lowered.graph.graph
    collectives = () if graph is None else filter(is_collective, graph.nodes)
    return ProgramInfo(
        subject=program_subject(program.graph),
        options=settings_fields({"mode": session.mode, **session.given}),
        training=torch_compat.describe_training(),
        unsplit_reason="" if lowered is None else lowered.unsplit_reason,
        leaves_partial=session.options.param_grads == "partial",
        check_every=session.options.check_every,
        exchange_sources=exchange_sources(collectives, argument_names),
        lines={} if graph is None else node_lines(graph),
    )


def _guard_sequence(
    program: UserProgram,
    session: CompileSession,
    lowered: RankProgram | None,
    run: Callable[..., Any] | None,
    error: Exception | None,
    info: ProgramInfo,
) -> GuardedProgram:
    """Return the program with checks of the ranks of the sequence; `guard_program` adds those of the groups.

    The arguments are those of `guard_program`, and the facts of `_describe_program`.
    """
    gm, digest, boundary = program.graph, ProgramDigest(), GraphBoundary()  # empty for a failed compilation
    if lowered is not None:
        boundary = lowered.boundary
        # Ranks of an unsplit program compare only its collectives, or all ops if it has none.
        digest = exchange_digest(gm) if info.unsplit_reason else graph_digest(lowered.graph, input_names(gm))
    inputs = sequence_inputs(gm, program.inputs, boundary.own_rows, is_run=lowered is not None)
    return GuardedProgram(
        run,
        session.ranks,
        info,
        digest,
        inputs,
        error,
        boundary,
        backward=True,
        gradients=session.options.outputs != "local",  # local results are rows of a rank, so their gradients differ
        work=None if lowered is None else lowered.report.work,
    )
