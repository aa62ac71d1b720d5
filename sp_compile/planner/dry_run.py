"""Lower every graph of a model in several configurations, without processes.

`explain`, `verify` and `plan` call `DryRun.run`. Dynamo traces the model once; each of its graphs is lowered to the
program of one rank in each configuration, such as 8 ranks with ring attention. No lowered program runs; `verify`
simulates it. A configuration is a number of ranks with options. The step is the predicted memory of a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.fx import GraphModule

from sp_compile.backend import lower_or_keep
from sp_compile.lowering.base.errors import SpError, did_you_mean, user_line
from sp_compile.lowering.base.model_kwargs import ModelKwargs, find_model_kwargs
from sp_compile.lowering.base.options import SPConfig, suggest_option
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.lowering.torch_compat import (
    BackendCompilerFailed,
    allow_meta_constants,
    enable_losses_on_meta,
    flex_on_any_device,
    fold_small_reads,
    is_compiling,
    partition_joint_graph,
    pop_dispatch_mode,
    replace_meta_constants,
    resume_trace,
    skip_graph_printing,
    trace_input_grads,
)
from sp_compile.passes.capture.capture import cache_captures
from sp_compile.passes.capture.user_program import CapturedGraphs, UserProgram
from sp_compile.passes.context import Note, NoteKind
from sp_compile.passes.cost.few_layers import FewLayers
from sp_compile.passes.cost.step_memory import StepMemory
from sp_compile.passes.cost.weight_memory import ModelBytes
from sp_compile.passes.graph.edit import copy_graph
from sp_compile.passes.report import Report
from sp_compile.passes.tensor_parallel.scatter_layers import SequenceParallelLinear
from sp_compile.rank_program import NO_COLLECTIVE_PASSES, RankProgram
from sp_compile.runtime.compile_failure import shorten_failure
from sp_compile.runtime.session import CompileSession
from sp_compile.runtime.sharded_values import simulate_sharded_outputs

from .eager_work import CountEagerWork
from .graph_steps import graph_step, unroll_step
from .unroll import Unroll

EAGER_READ = "eager code reads it: code between two graphs, or code that Dynamo does not trace"

# (number of ranks or None for the default, options and keyword arguments of the model by name) of each configuration;
# the keyword arguments are equal in all of them
DryRunConfigs: TypeAlias = Sequence[tuple[int | None, Mapping[str, Any]]]

# function that compares the program of a rank with the graph that it was lowered from, on the inputs of a call
CompareRanks: TypeAlias = Callable[[GraphModule, RankProgram, Sequence[Any]], None]


@dataclass
class DryRunResult:
    """The result of a dry run in one configuration."""

    user_options: SPConfig  # the options, as the user passed them
    sp: int | None  # the number of ranks
    report: Report  # merged from the reports of all graphs
    steps: list[Unroll] | None = None  # for a plan: the step of each graph, for any share of saved values on the host
    checkpoints: bool = False  # the backward recomputes a part of the program
    problem: SpError | None = None  # the reason why the configuration is not possible

    @property
    def options(self) -> SPConfig:
        """Return the options of the lowering; with aot_eager in place of Inductor, because nothing is compiled."""
        options = self.user_options
        return replace(options, compiler="aot_eager") if options.has_joint_passes else options


class _Lowered(NamedTuple):
    """A graph that was lowered in one configuration."""

    result: DryRunResult  # of the configuration
    session: CompileSession  # the ranks and facts with which it was lowered
    program: RankProgram  # the program of one rank


@dataclass
class DryRun:
    """A model, and the configurations in which each of its graphs is lowered."""

    entry: str  # the function that runs it: "explain", "verify" or "plan"
    model: Callable[..., Any]  # a module or a function
    args: Sequence[Any]  # positional arguments of the model
    configs: DryRunConfigs  # the configurations
    refused: Mapping[str, str]  # options without an effect, each with the reason
    per_weight: float | None = None  # bytes of optimizer state for a byte of parameters; None: no memory is predicted
    compare: CompareRanks | None = None  # called for each split graph; the ranks are simulated then
    partitions: bool = False  # True to run the passes over forward and backward
    repeats: FewLayers | None = None  # the layers that the model represents
    keeps_steps: bool = False  # True to set `steps` of the results
    captured: CapturedGraphs | None = None  # graphs of earlier dry runs of the model; its own are added
    results: list[DryRunResult] = field(default_factory=list)  # one for each configuration, set by `run`
    _graphs: list[GraphModule] = field(default_factory=list)  # all graphs that Dynamo has passed to the backend
    _running: list[GraphModule] = field(default_factory=list)  # the graph that is running, if any

    def run(self) -> list[DryRunResult]:
        """Lower every graph that Dynamo finds in the model, in every configuration.

        Returns:
            A result for each configuration, with the merged reports of all graphs.

        Raises:
            SpError: An option has no effect, no configuration is possible, or Dynamo finds nothing to compile.
        """
        kwargs = self._add_results()
        captures = nullcontext() if self.captured is None else cache_captures(self.captured.captured)
        # With `skip_graph_printing` a graph generates its code when it first runs. Simulated ranks (`compare`) run the
        # graphs in several threads, which would generate it at the same time.
        printing = skip_graph_printing() if self.compare is None else nullcontext()
        with flex_on_any_device(), enable_losses_on_meta(), printing, captures:
            if self.captured is None or self.captured.graph is None:
                self._trace(kwargs)
            else:  # an earlier dry run has traced the complete model as one graph
                self._resume(*self.captured.graph)
        problems = [result.problem for result in self.results if result.problem is not None]
        if len(problems) == len(self.results):  # no configuration is possible
            raise problems[0]
        if not self._graphs:
            raise SpError("SP201", f"{self.entry}: torch.compile finds nothing to compile in the model.")
        return self.results

    def _add_results(self) -> dict[str, Any]:
        """Check the configurations, append a result for each, and return the keyword arguments of the model.

        Users pass keyword arguments of the model among the options, so each configuration has them, the same in all.

        Raises:
            SpError: An option is not supported, or a number of ranks is not positive (SP711).
        """
        weights = ModelBytes.of(self.model) if self.repeats is None else self.repeats.weights
        kwargs: dict[str, Any] = {}
        for sp, passed in self.configs:
            fields_of_config, kwargs = split_kwargs(self.entry, self.model, passed)
            options = SPConfig.of(fields_of_config)
            options.refuse(self.entry, **self.refused)
            if sp is not None and (type(sp) is not int or sp < 1):
                raise SpError("SP711", f"sp: expected a number of ranks, 1 or more, got {sp!r}.")
            step = StepMemory(weights, self.per_weight) if self.per_weight is not None else None
            report = Report(2 if sp is None else sp, step=step)  # by default, two ranks are simulated
            self.results.append(DryRunResult(options, sp, report, [] if self.keeps_steps else None))
        return kwargs

    def _trace(self, kwargs: Mapping[str, Any]) -> None:
        """Run the model once under torch.compile with `backend`, which lowers its graphs in all configurations."""
        torch.compiler.reset()  # code that was compiled earlier would not call the backend
        eager = CountEagerWork(lambda: not is_compiling())  # adds the FLOPs of ops outside of graphs to the report
        with _restore_buffers(self.model), allow_meta_constants(), eager:
            try:
                torch.compile(self.model, backend=self.backend)(*self.args, **kwargs)
            except BackendCompilerFailed as failure:
                raise shorten_failure(failure.inner_exception, self.entry) from None
        torch.compiler.reset()  # later calls of the model do not run the code of the dry run
        for result in self.results:
            result.report.work.merge(eager.work)

    def _resume(self, gm: GraphModule, inputs: Sequence[Any], context: Any) -> None:
        """Lower the graph of an earlier dry run and merge the reports, so that the model is not traced again.

        Args:
            gm: The graph as Dynamo traced it.
            inputs: Its example inputs.
            context: The tracing context of Dynamo, in which the graph is lowered.
        """
        self._graphs.append(gm)
        with resume_trace(context):
            for lowered in self._lower_all(UserProgram.from_dynamo(gm, inputs)):
                lowered.result.report.merge(lowered.program.report)

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Lower a graph in every configuration; Dynamo calls it as the backend of torch.compile.

        Returns:
            A function that runs the graph as it was traced, on a single device. Dynamo then traces the next graph.
        """
        self._graphs.append(gm)
        replace_meta_constants(gm)
        if self.captured is not None:
            self.captured.add(gm, example_inputs)
        all_lowered = self._lower_all(UserProgram.from_dynamo(gm, example_inputs))
        if not all_lowered:
            return gm.forward

        def call(*inputs: Any) -> Any:
            """Run the graph on a single device, and merge the reports of the programs that it was lowered to."""
            self._running.append(gm)
            with pop_dispatch_mode():  # `CountEagerWork`, since ops with torch.func inside do not run under a mode
                for lowered in all_lowered:
                    if self.compare is not None and lowered.session.split:
                        self.compare(gm, lowered.program, inputs)
                    lowered.result.report.merge(lowered.program.report)
                results = gm.forward(*inputs)
            self._running.pop()
            # The next graph takes sharded results, as in a run on ranks; all configurations shard the same results.
            return simulate_sharded_outputs(results, inputs, all_lowered[0].program.boundary, self._note_read)

        return call

    def _note_read(self, name: str) -> None:
        """Add a note to all reports, with the user's line, if eager code reads a sharded result.

        `simulate_sharded_outputs` calls it for each read; those inside of a graph and by Dynamo are not noted.
        """
        if self._running or is_compiling():
            return
        text = f"{name} is sharded, and {EAGER_READ}"
        for result in self.results:
            result.report.add([Note(NoteKind.UNSHARDED, name, text, node=name, where=user_line())])

    def _lower_all(self, program: UserProgram) -> list[_Lowered]:
        """Lower a graph in every configuration without a problem; set `problem` of those in which this fails."""
        all_lowered: list[_Lowered] = []
        for result in self.results:
            try:
                if result.problem is None:
                    all_lowered.append(self._lower(program, result))
            except SpError as error:
                result.problem = error
        return all_lowered

    def _lower(self, program: UserProgram, result: DryRunResult) -> _Lowered:
        """Lower a graph in the configuration of a result, as the backend does, and examine it in place of compiling."""
        session = CompileSession(program.graph, program.inputs, result.options, measures=False)
        report, options = result.report, result.options
        # If the program's own collectives use all axes of the mesh, no axis is left for a sequence to be split over.
        if session.may_split:
            report.n = _simulate_ranks(session, result.sp, simulate=self.compare is not None)
            if self.compare is not None:  # complete results are compared
                options = replace(options, outputs="gather")
        if report.step is not None and options.state == "sharded":
            report.step.shards = report.n
        # The second result is that of `_examine`, None.
        lowered, _ = lower_or_keep(program, options, session, partial(self._examine, result=result), self.repeats)
        return _Lowered(result, session, lowered)

    def _examine(self, lowered: RankProgram, result: DryRunResult) -> None:
        """Examine the forward and the backward of a lowered program, in place of compiling it.

        Run the passes over the joint graph, which add notes to the report, if a step is predicted, the user has
        requested these passes (`partitions`), or the program has collectives of its own. Otherwise only check that
        torch can partition the program into forward and backward, so that `explain` and `verify` raise the errors of
        the backend.
        """
        if lowered.eager:  # eager code runs the graph: nothing is compiled
            return
        options, needs_step = result.user_options, self.partitions or result.report.step is not None
        # `exchanges`: the program has collectives of its own. If `compare` simulates the ranks, they are not examined.
        examines_collectives = lowered.has_user_collectives and self.compare is None
        if examines_collectives and not options.has_joint_passes:
            text = NO_COLLECTIVE_PASSES.format(options.compiler)
            lowered.report.add([Note(NoteKind.DECLINED, SequenceParallelLinear.name, text)])
        # Only passes on the joint graph depend on the option `compiler`, and here none runs.
        elif self.entry == "explain" and not lowered.has_user_collectives and not needs_step:
            options.refuse(self.entry, compiler="compiles nothing of a program without its own collectives")
        runs_joint_passes = examines_collectives and options.has_joint_passes
        if needs_step or runs_joint_passes:
            self._add_step(lowered, result)  # runs the passes over the joint graph, too
        elif self.entry != "plan" and not lowered.unsplit_reason:
            partition_joint_graph(copy_graph(lowered.graph), lowered.inputs, transform=None, for_inductor=False)

    def _add_step(self, lowered: RankProgram, result: DryRunResult) -> None:
        """Predict the training step of a graph, and add it to the result and its report."""
        options = result.user_options
        if not lowered.unsplit_reason:
            lowered.add_boundary_outputs()
        # The nodes of regions of activation checkpointing have "ac_graph_id".
        result.checkpoints |= any("ac_graph_id" in node.meta for node in lowered.graph.graph.nodes)
        # The field `hosted` of a step is the same step with all saved values on the host. Steps with a part of the
        # values there are computed from the two. It is needed
        # - without the option `offload`, if a plan compares shares of saved values on the host (`keeps_steps`);
        # - with it, if the graph has a few of the layers: `unroll_step` selects the share for all layers.
        needs_hosted = self.keeps_steps if options.offload == "never" else self.repeats is not None
        step = graph_step(lowered, options, with_hosted=needs_hosted and options.has_joint_passes)
        if self.repeats is not None or result.steps is not None:
            step = unroll_step(step, lowered, self.repeats, result.steps)
        if result.report.step is not None:
            result.report.step.graphs.append(step)


# A dry run traces the program once for all configurations, with full inputs.
fold_small_reads(DryRun.backend, lambda _: True)
trace_input_grads(DryRun.backend)


def split_kwargs(
    entry: str, model: Callable[..., Any], passed: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate options of the backend from keyword arguments of the model, which users pass together.

    A field of `SPConfig` is an option. Another name is an argument if the model has a parameter of this name. If the
    model accepts **kwargs, parameters of its submodules are arguments, too, and so are names that are not similar to an
    option, if a module with **kwargs may read them (`find_model_kwargs`). All others are returned as options, so that
    `SPConfig` raises an error for them.

    Args:
        entry: The function that the names were passed to: "explain", "verify" or "plan".
        model: The model.
        passed: Options and arguments by name. `passed["kwargs"]` is a dict of arguments only, whose names may be those
            of options.

    Returns:
        The options, and the keyword arguments of the model.

    Raises:
        SpError: A name is another name for the number of ranks, such as `ranks` in a call of `explain`, an argument of
            torch.compile, or a name that no module reads from its **kwargs, and not a parameter of the model (SP102).
    """
    passed = dict(passed)
    kwargs: dict[str, Any] = dict(passed.pop("kwargs", {}))
    options: dict[str, Any] = {}
    field_names = [field.name for field in fields(SPConfig)]
    option_names = [*field_names, *ENTRY_ARGUMENTS]
    known = find_model_kwargs(model)
    ranks_name = RANKS_ARGUMENTS[entry]
    for name, value in passed.items():
        if name in OTHER_RANKS_NAMES and name not in known.parameters:
            raise SpError("SP102", f"{entry}: unknown option {name!r}.", f"Use {ranks_name}={value!r}.")
        if name in COMPILE_ARGUMENTS and name not in known.parameters:
            fix = "Pass fields of `SPConfig` by name, such as attention='ring'."
            raise SpError("SP102", f"{entry}: unknown option {name!r}, an argument of torch.compile.", fix)
        # An option with a wrong name: the closest known name is that of an option.
        is_similar = bool(suggest_option(name, option_names)) and (
            did_you_mean(name, option_names) == did_you_mean(name, [*option_names, *known.parameters])
        )
        is_argument = known.has_kwargs and (name in known.read or not is_similar)
        if is_argument and isinstance(model, torch.nn.Module):
            _check_read(entry, name, known)
        if (name in known.parameters or is_argument) and name not in field_names:
            kwargs[name] = value
        else:
            options[name] = value
    return options, kwargs


RANKS_ARGUMENTS = {"explain": "sp", "verify": "sp", "plan": "ranks"}  # the argument with the number of ranks
# names that users pass for the number of ranks
OTHER_RANKS_NAMES = "sp ranks world_size num_ranks nproc_per_node sp_size cp_size n_ranks".split()
COMPILE_ARGUMENTS = ("backend", "mode", "options", "fullgraph", "dynamic")
ENTRY_ARGUMENTS = ("memory", "optimizer", "passes", "host_memory")  # further arguments, which may be misspelled


def _check_read(entry: str, name: str, known: ModelKwargs) -> None:
    """Raise SpError if no module of a model with **kwargs reads an argument, as far as the code of its modules shows.

    A module that loops over its **kwargs may read any name, unless it is close to that of a known argument.

    Raises:
        SpError: The name is not a parameter of a module, not in the code of a module with **kwargs, and not an argument
            of attention functions and losses of transformers (SP102).
    """
    hint = did_you_mean(name, known.parameters, count=3)
    if name in known.parameters | known.read or (known.reads_any and not hint):
        return
    cause = f"{entry}: unknown option {name!r}, which no module of the model reads{hint}."
    raise SpError("SP102", cause, f"Correct the name, or pass it as kwargs={{{name!r}: ...}}.")


def _simulate_ranks(session: CompileSession, sp: int | None, simulate: bool) -> int:
    """Set `session.ranks` to the ranks of a configuration, and return their number.

    Args:
        session: The session. The ranks of a mesh of the user remain, so that the report has their groups.
        sp: The number of ranks that the user requests; None for that of the mesh, or for two.
        simulate: True if the ranks will run as threads of this process, also those of a mesh.

    Raises:
        SpError: `sp` differs from the size of the mesh (SP712).
    """
    ranks = session.ranks
    has_valid_mesh = session.has_mesh and session.problem is None  # lowering raises `problem`
    if has_valid_mesh and sp not in (None, ranks.n):
        raise SpError("SP712", f"sp: expected {ranks.n}, the ranks of the mesh that share the sequence, got {sp}.")
    if not session.has_mesh:
        session.ranks = Ranks(2 if sp is None else sp, SIMULATED_GROUP)
    elif simulate:
        session.ranks = replace(ranks, group=SIMULATED_GROUP)
    return session.ranks.n


@contextmanager
def _restore_buffers(model: Callable[..., Any]) -> Iterator[None]:
    """Restore the buffers of a model after the context, in which a run may update them, as batch norm does."""
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    saved = [b.detach().clone() for b in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved):
                buffer.copy_(value)
