"""The torch.compile backend "sp": capture -> pipeline -> Inductor, for every graph that Dynamo hands over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import CaptureError, SpError, WriteError, did_you_mean, node_line, source_line
from sp_compile.lowering.base.library import sources_digest
from sp_compile.lowering.base.options import AnyOptions, SPConfig
from sp_compile.lowering.base.progress import set_step
from sp_compile.lowering.base.ranks import SINGLE_RANK, Ranks
from sp_compile.lowering.collectives.shard_storage import Layout
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.passes.boundary.add_tokens import BoundaryPasses
from sp_compile.passes.boundary.boundary_context import BoundaryContext
from sp_compile.passes.boundary.graph_boundary import GraphBoundary, ShardedOutput
from sp_compile.passes.boundary.outputs import OUTPUT_RULES, gather_reason
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.capture.capture import capture, fix_lengths
from sp_compile.passes.capture.graph_inputs import GlobalView, global_view, local_inputs
from sp_compile.passes.capture.uncaptured import unsplit_reason, warn_unsplit, wrap_failures
from sp_compile.passes.context import Note, NoteKind, PassSettings, Refusal, RefusalKind
from sp_compile.passes.cost.exchange_cost import declare_routes
from sp_compile.passes.cost.few_layers import FewLayers
from sp_compile.passes.cost.walk.liveness import nbytes_of
from sp_compile.passes.graph.call import node_tensors
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.rank_rng import has_random_ops, with_rank_rng
from sp_compile.passes.graph.sizes import as_sizes, is_same_size
from sp_compile.passes.graph.strides import order_of_strides
from sp_compile.passes.joint.joint import JointPasses
from sp_compile.passes.joint.joint_context import JointContext, PartitionContext
from sp_compile.passes.joint.partitioned import PartitionedPasses
from sp_compile.passes.joint.save_attention import apply_checkpoint_policies
from sp_compile.passes.report import Report
from sp_compile.passes.sharding.axes import find_sequences, name_axes
from sp_compile.passes.sharding.group_names import has_dtensors, has_user_exchanges
from sp_compile.passes.sharding.placement import Shard
from sp_compile.passes.tiles.run_in_tiles import programs_of
from sp_compile.runtime.eager_fallback import warn_eager_fallback, warn_fsdp_submodules
from sp_compile.runtime.fingerprint import program_subject
from sp_compile.runtime.input_checks import local_tensors
from sp_compile.runtime.session import CompileSession
from sp_compile.runtime.sharded_values import has_sharded_outputs, register_sharded_outputs, symbol_sources

from .lowering import torch_compat
from .pipeline import run_pipeline

log = logging.getLogger(__name__)

CHANGING_LENGTHS = (
    "torch cannot trace this program of DTensors (RecursionError), with any backend, when the length of a sequence "
    "changes from call to call and becomes a symbol."
)
REPLICATED_DTENSORS_FIX = "mesh: DTensor parameters are not supported on a mesh with an axis of the sequence."
NO_CUDA_GRAPHS = (
    "records CUDA graphs, which are not supported: attention launches kernels by the documents of each batch, and "
    "ranks cannot record and replay together."
)
NO_COLLECTIVE_PASSES = "compiler={!r} has no place for passes on collectives: they stay"
GRAPH_BREAK_NOTE = "torch.compile ends the graph here and goes on in Python"
SEQUENCE_OPTIONS = dict.fromkeys(
    (
        *("seq_dims", "attention", "layout", "inputs", "outputs", "param_grads", "state", "fallback", "tiles"),
        "ulysses_chunks",
    ),
    "has no ranks left to split a sequence over",
)
NAME_RANKS = "Leave the option out, or name the ranks by mesh and mesh_dim."
CANNOT_SPLIT = "every rank runs it whole, as it was written: it cannot be split"
UNSPLIT_NOTE = Note(
    NoteKind.REPLICATED, "capture", "the program has exchanges of its own and no sequence, so nothing of it is split"
)


def sp(gm: GraphModule, example_inputs: Sequence[Any], *, options: AnyOptions = None, mode: str | None = None) -> Any:
    """Compile one Dynamo graph for the ranks that share its sequence. `options`: the fields of SPConfig.

    mode: a set of Inductor's settings, as `torch.compile` names them; those with CUDA graphs are refused.
    Errors are raised when the graph is first called, on every rank of the group, as SpError; here, and anew at the next
    call, where ranks of a program's own group do not come to compile it.
    """
    session = CompileSession(gm, example_inputs, options, mode=mode)
    lowered: RankProgram | None = None
    run: Callable[..., Any] | None = None
    error: Exception | None = None
    with session.publish_interrupt(gm):
        try:
            session.start(gm)
            with session.show_compiling(gm):
                lowered, run = lower_or_keep(
                    gm, example_inputs, options, session, partial(_compile_rank_program, mode=mode)
                )
        except torch_compat.RestartAnalysis:  # Dynamo will trace the program again, on every rank
            raise
        except Exception as failure:
            error = _explain_failure(failure, gm, example_inputs)
        error = session.finish(gm, error)
    if torch_compat.is_cut_by_ddp(gm):
        torch_compat.keep_first_call_fake()
    if lowered is None:
        return session.guard(None, error, gm, example_inputs)
    of_groups = lowered.joint.given.common_inputs, lowered.joint.given.backward
    if lowered.unsplit_reason:
        warn_unsplit(program_subject(gm), lowered.unsplit_reason)
    kept = lowered.unsplit_reason, lowered.eager
    return session.guard(run, error, gm, example_inputs, lowered.graph, *of_groups, lowered.boundary, *kept)


torch_compat.on_eager(sp, warn_eager_fallback, warn_fsdp_submodules)


def _explain_failure(failure: Exception, gm: GraphModule, example_inputs: Sequence[Any]) -> Exception:
    """What to do about an error that does not say it."""
    if not isinstance(failure, RecursionError) or not has_dtensors(gm, example_inputs):
        return failure
    error = SpError("SP242", CHANGING_LENGTHS)
    error.__cause__ = failure
    return error


@dataclass
class RankProgram:
    """A Dynamo graph for one rank, by these settings.

    inputs: what stands for its inputs when it is compiled. edges: what it takes and returns in shards.
    joint: what becomes of it, and of its exchanges over other groups, when AOTAutograd has made a joint graph of it.
    whole: why it is the graph as it was written, which every rank runs whole; "" of one that was lowered. eager: by
    eager code.
    """

    graph: GraphModule
    settings: PassSettings
    report: Report
    inputs: Sequence[Any]
    joint: JointPasses = field(default_factory=JointPasses)
    boundary: GraphBoundary = field(default_factory=GraphBoundary)
    unsplit_reason: str = ""
    eager: bool = False

    @property
    def ranks(self) -> Ranks:
        """Those that its sequence is split over, a single one where it is not split."""
        return self.settings.ranks

    @property
    def exchanges(self) -> bool:
        """Does it exchange over groups of its own?"""
        return bool(self.joint.given.session.groups)

    @property
    def given_bytes(self) -> int:
        """What it is given on this rank, besides what is the model's own."""
        inputs = self.graph.graph.find_nodes(op="placeholder")
        return sum(nbytes_of(x) for node in inputs if node_info(node).parameter is False for x in node_tensors(node))

    def return_edges(self) -> None:
        """Let it return what its results in shards need, behind them."""
        own = vars(self.settings)
        job = BoundaryContext(
            **own, edges=self.boundary, trains=torch.is_grad_enabled(), is_split_only=not self.exchanges
        )
        BoundaryPasses(job)(self.graph)
        self.boundary = job.edges
        self.report.passes += job.runs

    def halves(self, **changed: Any) -> PartitionedPasses | None:
        """What is done to the halves of its joint graph; None: nothing. changed: settings that are others."""
        given = {**vars(self.settings), **changed}
        job = PartitionContext(**given, memory=list(self.report.memory), given_bytes=self.given_bytes)
        return PartitionedPasses(job) if job.has_place and (job.offload != "never" or job.ranks.n > 1) else None


T = TypeVar("T")


def lower_or_keep(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: AnyOptions,
    session: CompileSession,
    finish: Callable[[RankProgram], T],
    repeats: FewLayers | None = None,
) -> tuple[RankProgram, T]:
    """The program of one rank, and what `finish` makes of it; of the graph as it was written where either cannot be.

    finish: raises an error on which Dynamo falls back where the program cannot run.
    """
    try:
        with torch_compat.preserve_thread_state():
            with torch_compat.without_saved_tensor_hooks():  # not of a checkpoint around it
                lowered = lower(gm, example_inputs, options, session, repeats)
            return lowered, finish(lowered)
    except torch_compat.RestartAnalysis:
        raise
    except Exception as failure:
        why, eager = unsplit_reason(failure), isinstance(failure, WriteError)
        stays = not why or _is_split_only(gm, example_inputs, options)
        if stays and torch_compat.is_fallback_error(failure):  # as Dynamo would
            raise CaptureError("SP212", f"{program_subject(gm)}: {why}") from failure
        if stays:
            raise
    kept = _keep_unsplit(gm, example_inputs, options, session, why)
    if not eager:
        try:
            with torch_compat.preserve_thread_state():
                return kept, finish(kept)
        except Exception as failure:
            if not torch_compat.is_fallback_error(failure):
                raise
    kept.eager = True
    return kept, finish(kept)


def _is_split_only(gm: GraphModule, example_inputs: Sequence[Any], options: AnyOptions) -> bool:
    """May the graph not run whole: do options forbid it, or is it given, or to return, a rank's part of a value?"""
    job = PassSettings.of(SPConfig.of(options), SINGLE_RANK)
    local = "local" in (job.user_io.inputs, job.user_io.outputs)
    return job.fallback == "error" or local or has_dtensors(gm, example_inputs)


def _keep_unsplit(
    gm: GraphModule, example_inputs: Sequence[Any], options: AnyOptions, session: CompileSession, why: str
) -> RankProgram:
    """The graph as it was written, which every rank runs whole."""
    settings, plain = PassSettings.of(SPConfig.of(options), SINGLE_RANK), local_inputs(example_inputs)
    where = next((node_line(node) for node in gm.graph.nodes if node.op == "call_function"), program_subject(gm))
    report = Report(session.ranks.n, [Note(NoteKind.REPLICATED, "capture", f"{CANNOT_SPLIT}: {why}", where=where)])
    return RankProgram(
        gm, settings, report, plain, _joint_passes(plain, settings, CompileSession()), unsplit_reason=why
    )


def lower(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: AnyOptions,
    session: CompileSession,
    repeats: FewLayers | None = None,
) -> RankProgram:
    """Dynamo graph -> graph of one rank, in one of three ways. Runs inside a torch.compile backend.

    A program with a sequence is split along it. One that exchanges by itself and has no ranks left for a sequence stays
    whole, and its exchanges are a matter of passes on the joint graph. One without a sequence runs as it is written.
    repeats: the program's layers stand for more.
    """
    session.exchange_facts(gm, example_inputs)
    if not session.splits:
        return _lower_unsplit(gm, example_inputs, options, session)
    if has_no_sequence(gm, example_inputs, session):
        log.info("%s", UNSPLIT_NOTE.text)
        return _lower_unsplit(gm, example_inputs, options, CompileSession(), UNSPLIT_NOTE)
    return _lower_split(gm, example_inputs, options, session, repeats)


def _lower_unsplit(
    gm: GraphModule, example_inputs: Sequence[Any], options: AnyOptions, session: CompileSession, *notes: Note
) -> RankProgram:
    """Not split. session: of the groups whose exchanges are looked at."""
    config = SPConfig.of(options)
    if not torch_compat.is_fragment(gm):  # options of a sequence may be meant for other pieces of a model
        config.refuse("a program that exchanges by itself", NAME_RANKS, **SEQUENCE_OPTIONS)
    settings, plain = PassSettings.of(config, SINGLE_RANK), local_inputs(example_inputs)
    return RankProgram(gm, settings, Report(1, list(notes)), plain, _joint_passes(plain, settings, session))


def _lower_split(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: AnyOptions,
    session: CompileSession,
    repeats: FewLayers | None,
) -> RankProgram:
    """Along its sequence, over the ranks of the session."""
    device = next((x.device for x in example_inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))
    try:
        config = SPConfig.of(options)
        if has_dtensors(gm, example_inputs):
            raise SpError("SP241", REPLICATED_DTENSORS_FIX)
        deals = any(isinstance(x, Sharded) and x.sharding.is_balanced for x in example_inputs)
        with wrap_failures():
            view = global_view(gm, example_inputs, config.io_options, session.ranks, deals)
        session.ranks.check_carries(device)
    finally:  # with the other ranks, whatever failed on this one
        machine = session.machine(device)

    def run_passes(view: GlobalView) -> tuple[list[Any], PassSettings, GraphModule, Report] | Refusal:
        plain = local_inputs(example_inputs, view.layouts, view.graph)
        settings = PassSettings.of(
            config,
            session.ranks,
            seq_dims=view.seq_dims,
            inputs=view.inputs,
            outputs=view.outputs,
            folds=view.folds,
            machine=machine,
            aligned=session.aligned,
            repeats=repeats,
        )
        found = run_pipeline(view.graph, settings, view.fragment, has_sharded_outputs(session.ranks))
        if isinstance(found, Refusal):
            return found
        local, report = found
        plain += [node.meta["val"] for node in local.graph.find_nodes(op="placeholder")[len(plain) :]]  # rows' order
        return plain, settings, local, report

    symbols, why = symbol_sources(view.graph), ""
    with wrap_failures():
        found = run_passes(view)
        if isinstance(found, Refusal) and found.kind is RefusalKind.ROW_ORDER:
            why, view = found.text, global_view(gm, example_inputs, config.io_options, session.ranks, not deals)
            found = run_passes(view)
        elif isinstance(found, Refusal) and fix_lengths(gm, example_inputs):
            view = global_view(gm, example_inputs, config.io_options, session.ranks, deals)
            symbols, found = symbol_sources(view.graph), run_passes(view)
        if isinstance(found, Refusal):
            raise found.error()
        plain, settings, local, report = found
    report.add(_sharded_input_notes(view, example_inputs, why))
    report.add(_graph_break_notes(gm))
    for note in report.find_notes(NoteKind.SEQUENCE_LOST):
        if not (dist.is_initialized() and dist.get_rank()):
            log.warning("%s is compiled with backend='sp', and %s", program_subject(gm), note.text)
    declare_routes(local, session.ranks)
    rows = frozenset(i for i, one in enumerate(local.meta[OUTPUT_RULES]) if one and isinstance(one.placement, Shard))
    inputs = view.graph.graph.find_nodes(op="placeholder")
    edges = GraphBoundary(
        view.layouts,
        _sharded_outputs(local, view, session.ranks),
        rows,
        view.writes,
        symbols,
        views=view.views,
        hidden=view.hidden,
        written=view.has_writes,
        own_rows=frozenset(i for i, node in enumerate(inputs) if node.name in view.inputs and i not in view.layouts),
    )
    if edges.results:
        register_sharded_outputs(session.ranks)
        written = edges.writes.values()
        report.sharded_outputs = [result.name for i, result in edges.results.items() if i not in written]
    return RankProgram(local, settings, report, plain, _joint_passes(plain, settings, session), edges)


def _sharded_input_notes(view: GlobalView, example_inputs: Sequence[Any], why: str) -> Iterator[Note]:
    """What the report says of inputs that earlier graphs left in shards. why: rows in another order are whole."""
    for i, (name, x) in enumerate(zip(view.arguments, example_inputs, strict=True)):
        if isinstance(x, Sharded):
            stays = f"an earlier graph left it {x.sharding}"
            other = f"{stays}, and this one runs on other ranks" if x.sharding.is_plain else stays
            if why:
                other = f"{stays}, and {why}"
            kind, text = (NoteKind.KEPT_SHARDED, stays) if i in view.layouts else (NoteKind.UNSHARDED, other)
            yield Note(kind, name, text, name, f"input {name}")


def _graph_break_notes(gm: GraphModule) -> Iterator[Note]:
    """What the report says of a graph that ends where Dynamo goes on in Python."""
    if found := torch_compat.graph_break_reason(gm):
        trace, reason = found
        yield Note(NoteKind.GRAPH_BREAK, "capture", f"{GRAPH_BREAK_NOTE}: {reason}", where=source_line(trace))


def _sharded_outputs(local: GraphModule, view: GlobalView, ranks: Ranks) -> dict[int, ShardedOutput]:
    """Results that know their shard, by number."""
    found: dict[int, ShardedOutput] = {}
    for i, (name, asked, of_result) in enumerate(zip(view.names, view.outputs, local.meta[OUTPUT_RULES], strict=True)):
        if asked == "local" or of_result is None or not isinstance(of_result.placement, Shard):
            continue
        have, value, where = of_result
        if ranks.n == 1 and gather_reason(value, [asked]):
            continue
        order, frame = tuple(order_of_strides(as_sizes(value.stride()))), have.frame
        layout = Layout(have.dim, ranks.n, ranks.group, order, frame.folds)
        after = frame.size - frame.start - frame.length
        parts = {"outer": have.outer, "inner": have.inner, "before": frame.start, "after": after}
        own = {part: value for part, value in parts.items() if not is_same_size(value, getattr(layout, part))}
        found[i] = ShardedOutput(name, where, layout, as_sizes(value.shape)[have.dim], own)
    return found


def _joint_passes(example_inputs: Sequence[Any], settings: PassSettings, session: CompileSession) -> JointPasses:
    """The passes over the joint graph of a program."""
    shapes = [tuple(x.shape) for x in local_tensors(example_inputs)]
    own = vars(replace(settings, ranks=SINGLE_RANK, machine=None))  # what was measured are links of other ranks
    return JointPasses(JointContext(**own, session=session, shapes=shapes))


def _mode_options(mode: str | None, compiler: str | Callable[..., Any]) -> Mapping[str, Any]:
    """Inductor's settings in this mode. Raises SpError: for another compiler, an unknown one, one with CUDA graphs."""
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


def has_no_sequence(gm: GraphModule, example_inputs: Sequence[Any], session: CompileSession) -> bool:
    """Is a Dynamo graph a program of its own groups alone? Not where options name the sequence or its ranks.

    What the program holds decides, and nobody is asked: all ranks with one program find the same.
    """
    if session.named or not has_user_exchanges(gm):
        return False
    try:
        graph = capture(gm, example_inputs)
        Canonicalize()(graph)
        axes = name_axes(graph)
        find_sequences(graph, axes)
    except torch_compat.RestartAnalysis:
        raise
    except Exception:  # whoever compiles it says so
        return False
    return not axes.sequences


def _compile_rank_program(lowered: RankProgram, mode: str | None) -> Callable[..., Any]:
    """The program of one rank, as it runs."""
    if lowered.eager:
        return lowered.graph.forward
    if not lowered.unsplit_reason:
        with torch_compat.without_saved_tensor_hooks():
            lowered.return_edges()
    return compile_local(lowered, mode)


def compile_local(lowered: RankProgram, mode: str | None = None) -> Callable[..., Any]:
    """Hand the local graph to Inductor (or the compiler that the options name)."""
    settings, joint, local = lowered.settings, lowered.joint, lowered.graph
    patches, name = _mode_options(mode, settings.compiler), settings.compiler
    compiler = torch_compat.get_compiler(name, patches)
    asks: AbstractContextManager[Any] = nullcontext()
    halves = lowered.halves()
    if settings.has_place and (lowered.exchanges or halves is not None or torch_compat.has_checkpoint_regions(local)):
        compiler = torch_compat.joint_compiler(name, joint, joint.key(), patches, halves)
        asks = apply_checkpoint_policies(local)
    elif lowered.exchanges:
        log.warning("%s", NO_COLLECTIVE_PASSES.format(name))
    tag = f"{torch.compiler.config.cache_key_tag} sp_compile {sources_digest()}"
    with (
        torch_compat.memory_budget(settings.activation_memory_budget),
        torch.compiler.config.patch(cache_key_tag=tag),
        asks,
    ):
        set_step(f"compiler {name}" if isinstance(name, str) else "compiler")
        inner, key = torch_compat.nested_compiler(torch_compat.get_compiler(name, patches)), (name, str(patches))
        for program in programs_of(local):
            program.compile(inner, key, learns=torch.is_grad_enabled())
        run = compiler(local, lowered.inputs)
    if lowered.exchanges:
        log.info("%s", joint.report)
    return with_rank_rng(run, lowered.ranks) if lowered.ranks.n > 1 and has_random_ops(local) else run
