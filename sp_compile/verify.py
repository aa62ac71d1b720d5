"""`explain` and `verify`: what would be done to a model, and whether it is right, with no processes and no GPUs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import SpError, did_you_mean, user_line
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.base.progress import set_step, show_progress
from sp_compile.lowering.base.ranks import SINGLE_RANK, Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks
from sp_compile.lowering.torch_compat import (
    TorchRuntimeError,
    enable_losses_on_meta,
    flex_on_any_device,
    is_compiling,
    line_of_meta_constant,
    memory_budget,
    partition_joint_graph,
    pytree,
    resume_trace,
    skip_graph_printing,
)
from sp_compile.passes.capture.capture import cache_captures
from sp_compile.passes.capture.is_traced import CapturedGraphs
from sp_compile.passes.context import Note, NoteKind, PassSettings
from sp_compile.passes.cost.decision import Decision
from sp_compile.passes.cost.few_layers import FewLayers, LayerList
from sp_compile.passes.cost.step_memory import GraphStep, StepMemory
from sp_compile.passes.cost.weight_memory import ADAMW_STATE, ModelBytes, state_per_weight
from sp_compile.passes.graph.compare_runs import compare_runs, run_with_grads
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.joint.offload_values import OffloadValues
from sp_compile.passes.joint.partitioned import PartitionedPasses
from sp_compile.passes.joint.save_attention import apply_checkpoint_policies
from sp_compile.passes.report import Report
from sp_compile.passes.tensor_parallel.scatter_layers import SequenceParallelLinear
from sp_compile.planner.fused import fuse_on_meta
from sp_compile.planner.unroll import Unroll
from sp_compile.runtime.session import CompileSession
from sp_compile.runtime.sharded_values import rebuild_views, simulate_sharded_outputs

from .backend import NO_COLLECTIVE_PASSES, RankProgram, lower_or_keep
from .pipeline import CALL_OPTIONS

SIMILAR_LAYERS_NOTE = 8
"""Layers from which on as many less are looked at, where the model is on the meta device."""
READ_BY_EAGER_CODE = "eager code reads it: what stands between two graphs, or was left to Python"


def explain(
    model: Callable[..., Any],
    *args: Any,
    sp: int | None = None,
    passes: bool = False,
    memory: bool = False,
    optimizer: Any = None,
    **config: Any,
) -> Report:
    """What `backend="sp"` would do to `model(*args)` on `sp` ranks: rewrites, collectives with bytes, fallbacks.

    Needs no processes; the model runs once, on one device. A program that is tensor-parallel already needs its groups:
    of processes, all of which ask, or of the "fake" backend; the report then has a line for each of its layers.
    sp: how many ranks share the sequence; 2, or as many as a `mesh` has along the axis for it. passes: show every pass
    that ran, with its order's words, rewrites, nodes and seconds; those over forward and backward run, too. memory:
    predict what a rank holds over a training step (`report.step`), from the forward and the backward that AOTAutograd
    makes; of a model on "meta" with many layers that are alike, a few are looked at, and count for all. optimizer: the
    one that trains, or its class; AdamW by default. config: fields of SPConfig, and keyword arguments of the model;
    those that are called as a field go into a dict `kwargs={...}`.
    Raises SpError as the backend would, for an option that has no effect on a report, and where nothing of the model is
    compiled.
    """
    if not isinstance(memory, bool):
        raise SpError("SP713", f"memory: expected True or False, got {memory!r}.")
    if optimizer is not None and not memory:
        raise SpError("SP714", "optimizer: expected None with memory=False, as explain does not report its state.")
    refused = DRY_RUN_OPTIONS if memory or passes else DRY_RUN_OPTIONS | MEMORY_OPTIONS
    per_weight = state_per_weight(optimizer) if memory else 0.0
    depth = _many_similar_layers(model) if memory else None
    with show_progress("explain"):
        found = None
        if depth is not None:
            found = _explain_few_layers(depth, refused, model, args, [(sp, config)], per_weight, passes)
        if found is None:
            found = _lower_each_graph(
                "explain", refused, model, args, [(sp, config)], per_weight if memory else None, behind=passes
            )
    report = found[0].report
    report.show_passes = passes
    return report


def _many_similar_layers(model: Callable[..., Any]) -> LayerList | None:
    """The layers of a model on the meta device, if so many are alike that a few are looked at."""
    if not isinstance(model, torch.nn.Module) or not any(p.is_meta for p in model.parameters()):
        return None
    return similar_layers(model)


def similar_layers(model: torch.nn.Module) -> LayerList | None:
    """The layers of a model, if so many are alike that a few say what all do."""
    depth = LayerList.of(model)
    return depth if depth is not None and len(depth.layers) - len(depth.reduce_layers) >= SIMILAR_LAYERS_NOTE else None


@dataclass
class DryRun:
    """One way to lower every graph of a model on `sp` ranks, and the report on it. given: the options, as asked.

    steps: of each graph, with what layers keep on the device or on the host, where a plan asked. checkpoints: is a part
    of the program computed again in the backward? problem: why it cannot be; without one, the report is complete.
    """

    call_options: SPConfig
    sp: int | None
    report: Report
    steps: list[Unroll] | None = None
    checkpoints: bool = False
    problem: SpError | None = None

    @cached_property
    def settings(self) -> PassSettings:
        return PassSettings.of(self.call_options, SINGLE_RANK)

    @property
    def options(self) -> SPConfig:
        """Those that the graph is lowered with, by which nothing is compiled."""
        return replace(self.call_options, compiler="aot_eager") if self.settings.has_place else self.call_options


DryRuns: TypeAlias = Sequence[tuple[int | None, Mapping[str, Any]]]
"""Numbers of ranks, each with options and the model's keyword arguments; these are the same in all."""


def _explain_few_layers(
    depth: LayerList, refused: Mapping[str, str], model: Any, args: Any, ways: DryRuns, per_weight: float,
    passes: bool = False, unrolled: bool = False, entry: str = "explain", traced: CapturedGraphs | None = None,
) -> list[DryRun] | None:  # fmt: skip
    """The reports on all layers, from a few; None if the graphs do not say of each node which layer it is of."""
    repeats, few = FewLayers(depth.order, ModelBytes.of(model)), len(depth.reduce_layers)
    with depth.only(depth.reduce_layers):
        looks = _lower_each_graph(
            entry, refused, model, args, ways, per_weight, behind=passes, repeats=repeats, unrolled=unrolled,
            traced=traced,
        )  # fmt: skip
    kinds = max(depth.kinds) + 1
    why = f"{few} layers were looked at, and count for {len(depth.kinds)} of {kinds} kind{'s' if kinds > 1 else ''}"
    for report in (look.report for look in looks if look.problem is None):
        assert report.step is not None
        if not repeats.times.keys() <= {m.layer for graph in report.step.graphs for m in graph.forward.moments}:
            return None
        for name in ("notes", "tiled"):
            found = getattr(report, name)
            setattr(report, name, [one for one in found for _ in range(repeats.times.get(one.layer, 1))])
        report.exchanges = [one for e in report.exchanges for one in e.repeat(repeats.times)]
        report.notes.append(Note(NoteKind.EXTRAPOLATED, depth.name, why, where=f"layers {depth.name}"))
    return looks


def explain_configs(
    model: Callable[..., Any],
    args: Sequence[Any],
    ways: DryRuns,
    per_weight: float,
    depth: LayerList | None,
    traced: CapturedGraphs | None = None,
) -> list[DryRun]:
    """`explain(memory=True)` in several ways, for a plan; the model is traced once.

    per_weight: bytes of the optimizer's state for a byte of parameters. depth: layers of which a few count for all.
    traced: what was made of the same model before, if anything was, and is told what is.
    What cannot be is said in a look's `problem`; raises SpError where none can.
    """
    told: dict[str, Any] = {"unrolled": True, "traced": traced}
    found = None
    if depth:
        found = _explain_few_layers(depth, DRY_RUN_OPTIONS, model, args, ways, per_weight, entry="plan", **told)
    return found or _lower_each_graph("plan", DRY_RUN_OPTIONS, model, args, ways, per_weight, **told)


def attentions_of(
    model: Callable[..., Any],
    args: Sequence[Any],
    way: tuple[int, Mapping[str, Any]],
    depth: LayerList | None,
    traced: CapturedGraphs | None = None,
) -> list[Decision]:
    """The attentions of a model, for a plan. depth, traced: as for `explain_configs`."""
    if depth is None:
        (look,) = _lower_each_graph("plan", DRY_RUN_OPTIONS, model, args, [way], traced=traced)
        return look.report.attention
    repeats = FewLayers(depth.order, ModelBytes.of(model))
    with depth.only(depth.reduce_layers):
        (look,) = _lower_each_graph("plan", DRY_RUN_OPTIONS, model, args, [way], repeats=repeats, traced=traced)
    return look.report.attention


def verify(model: Callable[..., Any], *args: Any, sp: int | None = None, **config: Any) -> Report:
    """Run `model(*args)` on `sp` simulated ranks against one device, forward and backward.

    The report's `errors` holds the largest relative error over the ranks of every result, every gradient, and every
    input or buffer that one device or a rank has changed; infinite, and said in words, where a dtype or a shape is
    another (strides are promised to nobody: they may be others). A random model (dropout) is compared as drawn, so
    expect its errors to be large.
    sp, config: as for `explain`. Raises SpError where there is nothing to compare.
    """

    def compare(gm: GraphModule, lowered: RankProgram, inputs: Sequence[Any]) -> None:
        set_step("one device")
        worst, alone = dict(lowered.report.errors), run_with_grads(gm, inputs)
        set_step(f"{lowered.ranks.n} simulated ranks")
        views = partial(rebuild_views, edges=lowered.boundary)
        for rank in run_ranks(lowered.ranks.n, lambda _: run_with_grads(lowered.graph, inputs, views)):
            for name, error in compare_runs(gm, inputs, alone, rank):
                worst[name] = max(worst.get(name, 0.0), error)
        lowered.report.errors = list(worst.items())

    tensors = pytree.tree_leaves((args, config))
    tensors += model.parameters() if isinstance(model, torch.nn.Module) else ()
    if any(isinstance(x, Tensor) and x.is_meta for x in tensors):
        raise SpError("SP715", "verify: the model or an input is on the meta device, which has no numbers to compare.")
    with show_progress("verify"):
        (look,) = _lower_each_graph("verify", COMPARISON_OPTIONS, model, args, [(sp, config)], compare=compare)
    report = look.report
    if not report.errors:
        raise SpError("SP716", "verify: the program splits no sequence, and its own exchanges are not simulated.")
    return report


DRY_RUN_OPTIONS = {"check_every": "has one process, so there is nothing to compare"}
MEMORY_OPTIONS = dict.fromkeys(("activation_memory_budget", "offload"), "does not report what a backward keeps")
COMPARISON_OPTIONS = {
    **dict.fromkeys(CALL_OPTIONS, "compiles nothing"),
    **DRY_RUN_OPTIONS,
    **MEMORY_OPTIONS,
    **dict.fromkeys(("inputs", "outputs", "param_grads"), "compares complete results and gradients"),
}
"""Options that `explain` and `verify` refuse, and why."""


def _lower_each_graph(
    entry: str,
    refused: Mapping[str, str],
    model: Callable[..., Any],
    args: Any,
    ways: DryRuns,
    per_weight: float | None = None,
    compare: Callable[..., None] | None = None,
    behind: bool = False,
    repeats: FewLayers | None = None,
    unrolled: bool = False,
    traced: CapturedGraphs | None = None,
) -> list[DryRun]:
    """Lower every graph that Dynamo finds in the model, in each of these ways, and merge the reports of each.

    refused: options that say nothing here, and why. per_weight: bytes of the optimizer's state for a byte of
    parameters, where a report tells of memory. compare: what to do with each that was split, over simulated ranks;
    None: the ranks of a mesh are taken as they are. behind: run the passes on forward and backward, whoever is told of
    it. repeats: the model's layers stand for more. unrolled: keep what a step is with any share on the host. traced:
    what is known of this model already; nothing is run where that is enough.
    """
    weights = ModelBytes.of(model) if repeats is None else repeats.weights
    looks, kwargs = list[DryRun](), dict[str, Any]()
    for sp, asked in ways:
        config, kwargs = split_kwargs(model, asked)
        given = SPConfig.of(config)
        given.refuse(entry, **refused)
        if sp is not None and (type(sp) is not int or sp < 1):
            raise SpError("SP711", f"sp: expected a number of ranks, 1 or more, got {sp!r}.")
        step = StepMemory(weights, per_weight) if per_weight is not None else None
        looks.append(DryRun(given, sp, Report(2 if sp is None else sp, step=step), [] if unrolled else None))
    seen: list[GraphModule] = []
    running: list[GraphModule] = []

    def run_dry(name: str) -> None:
        """Eager code reads a result of this name."""
        if not running and not is_compiling():
            for one in looks:
                why = f"{name} lies in shards, and {READ_BY_EAGER_CODE}"
                one.report.add([Note(NoteKind.UNSHARDED, name, why, name, user_line())])

    def lowered_for(gm: GraphModule, example_inputs: Sequence[Any], one: DryRun) -> tuple[CompileSession, RankProgram]:
        session = CompileSession(gm, example_inputs, one.options, measures=False)
        total, settings = one.report, one.settings
        if session.splits:
            total.n = _simulate_ranks(session, one.sp, simulate=compare is not None)
        whole = session.splits and compare is not None
        taken = replace(one.options, outputs="gather") if whole else one.options
        if total.step is not None and settings.state == "sharded":
            total.step.shards = total.n
        walks = behind or total.step is not None
        finish = partial(looked_at, one=one, walks=walks)
        lowered, _ = lower_or_keep(gm, example_inputs, taken, session, finish, repeats)
        return session, lowered

    def looked_at(lowered: RankProgram, one: DryRun, walks: bool) -> None:
        if lowered.eager:
            return
        total, settings = one.report, one.settings
        if lowered.exchanges and compare is None and not settings.has_place:
            why = NO_COLLECTIVE_PASSES.format(settings.compiler)
            lowered.report.add([Note(NoteKind.DECLINED, SequenceParallelLinear.name, why)])
        elif entry == "explain" and not lowered.exchanges and not walks:
            one.call_options.refuse(entry, compiler="compiles nothing of a program without exchanges")
        if walks or (compare is None and lowered.exchanges and settings.has_place):
            if not lowered.unsplit_reason:
                lowered.return_edges()
            one.checkpoints |= any("ac_graph_id" in node.meta for node in lowered.graph.graph.nodes)
            sends = unrolled if settings.offload == "never" else repeats is not None
            step = _graph_step(lowered, settings.fused, sends and settings.has_place)
            if repeats is not None or one.steps is not None:
                step = _unroll_step(step, lowered, repeats, one.steps)
            if total.step is not None:
                total.step.graphs.append(step)
        elif entry != "plan" and torch.is_grad_enabled() and not lowered.unsplit_reason:
            # Raises where it cannot run.
            partition_joint_graph(copy_graph(lowered.graph), lowered.inputs, None, for_inductor=False)

    def lowered_in_each(
        gm: GraphModule, example_inputs: Sequence[Any]
    ) -> list[tuple[DryRun, CompileSession, RankProgram]]:
        found = list[tuple[DryRun, CompileSession, RankProgram]]()
        for one in looks:
            try:
                found += [(one, *lowered_for(gm, example_inputs, one))] if one.problem is None else []
            except SpError as error:
                one.problem = error
        return found

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(gm)
        if traced is not None:
            traced.add(gm, example_inputs)
        found = lowered_in_each(gm, example_inputs)
        if not found:
            return gm.forward

        def call(*inputs: Any) -> Any:
            for one, session, lowered in found:
                if compare is not None and session.split:
                    compare(gm, lowered, inputs)
                one.report.merge(lowered.report)
            running.append(gm)
            results = gm.forward(*inputs)
            running.pop()
            return simulate_sharded_outputs(results, inputs, found[0][2].boundary, run_dry)

        return call

    def trace() -> None:
        torch.compiler.reset()
        with _restore_buffers(model), _constants_on_meta(entry):
            torch.compile(model, backend=backend)(*args, **kwargs)
        torch.compiler.reset()

    once = nullcontext() if traced is None else cache_captures(traced.captured)
    lazily = skip_graph_printing() if compare is None else nullcontext()  # simulated ranks run it in threads
    with flex_on_any_device(), enable_losses_on_meta(), lazily, once:
        if traced is None or traced.graph is None:
            trace()
        else:
            gm, inputs, context = traced.graph
            seen.append(gm)
            with resume_trace(context):
                for one, _, lowered in lowered_in_each(gm, inputs):
                    one.report.merge(lowered.report)
    problems = [one.problem for one in looks if one.problem is not None]
    if len(problems) == len(looks):
        raise problems[0]
    if not seen:
        raise SpError("SP201", f"{entry}: torch.compile finds nothing to compile in the model.")
    return looks


@contextmanager
def _constants_on_meta(entry: str) -> Iterator[None]:
    """Raise SpError where a program calls `torch.tensor` on the meta device, which torch cannot trace."""
    try:
        yield
    except TorchRuntimeError as error:
        line = line_of_meta_constant(error)
        if line is None:
            raise
        what = f"{entry}: torch does not trace torch.tensor(...) on the meta device, which {line} reads."
        raise SpError("SP202", what) from error


def split_kwargs(model: Callable[..., Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of SPConfig, keyword arguments of the model).

    What is neither a field nor in the model's signature goes to a model that takes any, unless it looks like a field
    that is misspelt.
    """
    given = dict(given)
    kwargs, config = dict(given.pop("kwargs", {})), dict[str, Any]()
    known = [field.name for field in fields(SPConfig)]
    try:
        parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        parameters = inspect.Signature().parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name, value in given.items():
        of_model = name not in known and (name in names or (takes_any and not did_you_mean(name, known)))
        (kwargs if of_model else config)[name] = value
    return config, kwargs


def _simulate_ranks(session: CompileSession, sp: int | None, simulate: bool) -> int:
    """Set the ranks of the sequence for a look without processes; their number."""
    ranks = session.ranks
    if session.has_mesh and session.problem is None and sp not in (None, ranks.n):
        raise SpError("SP712", f"sp: expected {ranks.n}, the ranks of the mesh that share the sequence, got {sp}.")
    if not session.has_mesh:
        session.ranks = Ranks(2 if sp is None else sp, SIMULATED_GROUP)
    elif simulate:
        session.ranks = replace(ranks, group=SIMULATED_GROUP)
    return session.ranks.n


def _graph_step(lowered: RankProgram, fused: bool, hosted: bool) -> GraphStep:
    """What one graph holds over a step: its joint graph, walked and not run; the report hears what passes did to it.

    fused: Inductor would compile it. hosted: both without and with what goes to the host.
    """
    halves = lowered.halves(fused=fused, **({"offload": 1.0} if hosted else {}))
    first = PartitionedPasses(replace(halves.given, offload="never")) if halves is not None and hosted else halves
    forward, backward = _partition_graph(lowered, fused, first)

    def walked() -> GraphStep:
        return GraphStep.of(forward.graph, backward.graph if backward is not None else None, fused, lowered.given_bytes)

    step = walked()
    if halves is None or first is None:
        return step
    if hosted and backward is not None:
        OffloadValues().run(forward, replace(halves.given, backward=backward, results=first.given.results))
        step = replace(step, hosted=walked())
    (step.hosted or step).offloaded = next(iter(halves.given.on_host), None)
    lowered.report.passes += halves.given.runs
    return step


def _unroll_step(
    step: GraphStep, lowered: RankProgram, repeats: FewLayers | None, steps: list[Unroll] | None
) -> GraphStep:
    """One graph's step with all layers, as many of which wait on the host as the options ask for.

    steps: are told of it with any other number.
    """
    settings, n = lowered.settings, lowered.ranks.n
    nodes = lowered.graph.graph.find_nodes(op="placeholder")
    machine = settings.machine_of_nodes(nodes)
    whole = Unroll.of(step, () if repeats is None else repeats.order, machine)
    if steps is not None:
        steps.append(whole)
    if repeats is None or settings.offload == "never" or step.hosted is None:
        return whole.step() if repeats is not None else replace(step, hosted=None)
    weights = repeats.weights

    def fits(one: GraphStep) -> bool:
        held = StepMemory(weights, ADAMW_STATE if settings.state == "sharded" else 0.0, [one])
        return (held.fsdp(n) if settings.state == "sharded" else held.peak) <= machine.memory

    return whole.step(whole.min_offload(fits) if settings.offload == "auto" else whole.share(float(settings.offload)))


def _partition_graph(
    lowered: RankProgram, fused: bool, halves: PartitionedPasses | None
) -> tuple[GraphModule, GraphModule | None]:
    """The forward and the backward of a copy, behind all passes."""
    local, settings = copy_graph(lowered.graph), lowered.settings
    fuse_on_meta(local)
    with memory_budget(settings.activation_memory_budget), apply_checkpoint_policies(local):
        joint = lowered.joint if settings.has_place else None
        found = partition_joint_graph(local, lowered.inputs, joint, fused, halves)
    lowered.report.merge(lowered.joint.report)
    return found


@contextmanager
def _restore_buffers(model: Callable[..., Any]) -> Iterator[None]:
    """Running the model is our doing: counters and running averages are put back."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    kept = [b.detach().clone() for b in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, kept):
                buffer.copy_(value)
