"""The torch.compile backend "sp": capture -> pipeline -> Inductor, for every graph that Dynamo hands over.

Programs that exchange over groups of their own and have no sequence: they run as they are written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.fx import GraphModule

from sp_compile.capture.capture import capture
from sp_compile.capture.inputs import global_view
from sp_compile.cost import measure
from sp_compile.cost.exchanges import declare_routes
from sp_compile.cost.machine import Machine
from sp_compile.graph.random import decorrelated, draws
from sp_compile.lowering.library import digest
from sp_compile.passes.canonical.canonicalize import Canonicalize
from sp_compile.passes.rewrite import Note, Settings
from sp_compile.sharding.axes import find_sequences, name_axes
from sp_compile.spmd.check_compile import Lockstep, rounds
from sp_compile.spmd.check_run import Agreed, fingerprint, input_names
from sp_compile.spmd.fingerprint import Program, program_of
from sp_compile.spmd.inputs import (
    Facts,
    are_apart,
    check_groups,
    check_options,
    equal_arguments,
    equal_inputs,
    exchanges_by_itself,
    facts_of,
    groups_of,
    has_dtensors,
    known,
    local_tensors,
    sized_inputs,
)

from . import _compat
from .config import Ranks, SPConfig, resolve, splits_sequence
from .errors import SpError
from .explain import Report
from .joint import QUESTIONS, JointPasses
from .pipeline import run_pipeline

WHY = "the program has exchanges of its own and no sequence, so nothing of it is split"


def runs_as_written(gm: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Is a Dynamo graph a program of its own groups alone? Not where options name the sequence or its ranks.

    What the program holds decides, and nobody is asked: all ranks with one program find the same.
    """
    if (
        options.get("mesh") is not None
        or options.get("seq_dims", "auto") != "auto"
        or not exchanges_by_itself(gm)
    ):
        return False
    try:
        graph = capture(gm, example_inputs)
        Canonicalize()(graph)
        axes = name_axes(graph)
        find_sequences(graph, axes)
    except SpError:  # whoever compiles it says so
        return False
    return not axes.sequences


def note() -> Note:
    """What the report says of such a program."""
    return Note("replicated", "graph", "the whole graph", WHY)


log = logging.getLogger(__name__)

JOINT_OPTIONS = ("merge_reductions", "sequence_parallel_linear")  # what decides over exchanges

CHANGING_LENGTHS = (
    "torch could not trace this program of DTensors (RecursionError), as it cannot, with backend='aot_eager' either, "
    "where the length of a sequence changes from call to call and becomes a symbol. Compile one graph a length: "
    "torch.compile(..., dynamic=False), or pad to one length"
)


def sp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: SPConfig | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Any:
    """Compile one Dynamo graph for the ranks that share its sequence. `options`: the fields of SPConfig.

    Errors are raised when the graph is first called, on every rank of the group, as SpError.
    """
    given = vars(options) if isinstance(options, SPConfig) else options or {}
    others = groups_of(gm, example_inputs)
    splits = bool(others) and splits_sequence(given.get("mesh"), given.get("mesh_dim"), others)
    sequence = _sequence_ranks(given) if splits else []
    talk = Lockstep(questions(others, sequence))
    talk.open(sequence)
    error: Exception | None = None
    joint: JointPasses | None = None
    try:
        check_groups(gm)
        _check_axis(sequence, others)
        joint = joint_passes(gm, example_inputs, others, talk, given)
        if joint is not None and not splits:
            _refuse_mode(mode)
            joint.place(())
            run: Any = compile_local(gm, example_inputs, SPConfig.of(options), Ranks(1, ""), joint)
        elif runs_as_written(gm, example_inputs, given):
            _refuse_mode(mode)
            run = compile_local(gm, example_inputs, SPConfig.of(options), Ranks(1, ""))
            log.info("%s", note())
        else:
            run = sequence_parallel(gm, example_inputs, options, mode, joint)
    except _compat.RestartAnalysis:  # Dynamo will trace the program again, on every rank
        raise
    except Exception as failure:
        run, error = None, _taught(failure, gm, example_inputs)
    talk.finish(error)
    if error is not None and not others:
        return Agreed(None, Ranks(1, ""), Program(), [], error)
    return _agreed(run, gm, example_inputs, others, joint, error)


def _agreed(
    run: Any,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    others: Sequence[Ranks],
    joint: JointPasses | None,
    error: Exception | None,
) -> Any:
    """The compiled program, called only where the ranks of each group agree on what it is and what it is given."""
    scattered = joint.scattered if joint else set()
    for ranks in reversed(others):  # the first group is asked first, as in Lockstep.open
        always: list[str] = []
        facts = joint.facts[ranks.group] if joint else Facts()
        if run is not None and ranks.group in scattered:
            always = equal_arguments(gm, example_inputs, facts)
        run = Agreed(
            run, ranks, program_of(gm), sized_inputs(gm, example_inputs, facts), error, always=always
        )
    return run


def _taught(failure: Exception, gm: GraphModule, example_inputs: Sequence[Any]) -> Exception:
    """What to do about an error that does not say it."""
    if not isinstance(failure, RecursionError) or not has_dtensors(gm, example_inputs):
        return failure
    error = SpError(CHANGING_LENGTHS)
    error.__cause__ = failure
    return error


def _refuse_mode(mode: str | None) -> None:
    if mode is not None:
        raise SpError(
            f"mode={mode!r} is Inductor's; set torch._inductor.config instead, which backend='sp' compiles with"
        )


def _sequence_ranks(given: Mapping[str, Any]) -> list[Ranks]:
    """The ranks of the sequence; none where the mesh is wrong, which is said later."""
    with suppress(SpError):
        return [resolve(given.get("mesh"), given.get("mesh_dim"))]
    return []


def _check_axis(sequence: Sequence[Ranks], others: Sequence[Ranks]) -> None:
    """A sequence cannot be split over ranks between which the program exchanges by itself."""
    taken = [ranks for ranks in sequence if ranks in others]
    if taken:
        raise SpError(
            f"mesh_dim: the program's own collectives go over this axis (group {taken[0].group!r}), so its "
            f"{taken[0].n} ranks cannot share the sequence as well: name another axis of the mesh"
        )


def sequence_parallel(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: SPConfig | Mapping[str, Any] | None,
    mode: str | None,
    joint: JointPasses | None,
) -> Agreed:
    """The graph for the ranks of the sequence; joint: what its collectives over other ranks become.

    Errors are raised when the result is called, on every rank of the sequence, as SpError.
    """
    ranks = Ranks(1, "")
    names = input_names(gm)
    given = vars(options) if isinstance(options, SPConfig) else options or {}
    try:
        ranks = resolve(given.get("mesh"), given.get("mesh_dim"))
        measured = measure.machine(
            ranks, _device(example_inputs)
        )  # together, before anything can fail on one rank
        config = SPConfig.of(options)
        _refuse_mode(mode)
        if has_dtensors(gm, example_inputs):
            raise SpError(
                "DTensor parameters on a mesh with a sequence axis: the sequence passes work above DTensor. Write the "
                "tensor-parallel linears with functional collectives, or name a mesh without the sequence axis"
            )
        aligned = joint.place([ranks]) if joint is not None else None
        local, _report = lower(gm, example_inputs, config, ranks, measured, aligned)
        run = compile_local(local, example_inputs, config, ranks, joint)
    except _compat.RestartAnalysis:
        raise
    except Exception as error:
        if joint is not None:
            joint.talk.finish(error)
        return Agreed(None, ranks, Program(), names, error)
    equal = equal_inputs(gm, example_inputs, config.inputs)
    return Agreed(run, ranks, fingerprint(local), names, equal=equal)


def _device(example_inputs: Sequence[Any]) -> torch.device:
    return next((x.device for x in example_inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))


def lower(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: SPConfig,
    ranks: Ranks,
    measured: Machine | None = None,
    aligned: frozenset[str] | None = None,
) -> tuple[GraphModule, Report]:
    """Dynamo graph -> (graph of one rank, report). Runs inside a torch.compile backend.

    measured: the cost model's constants on these ranks, which those of the config replace; None: the device's defaults.
    aligned: as in Settings.
    """
    fragment = _compat.is_fragment(gm)
    if fragment and (config.outputs == "local" or config.inputs == "local"):
        raise SpError(
            "inputs='local' and outputs='local' need a model without graph breaks: what crosses one is whole"
        )
    graph, inputs, seq_dims = global_view(gm, example_inputs, config, ranks.n, fragment)
    job = Settings(
        ranks,
        seq_dims=seq_dims,
        inputs=inputs,
        gather_outputs=config.outputs == "gather",
        attention=config.attention,
        layout=config.layout,
        machine=Machine.of(_device(example_inputs).type, config.cost)
        if config.cost is not None
        else measured,
        fallback=config.fallback,
        param_grads=config.param_grads,
        aligned=aligned,
    )
    local, report = run_pipeline(graph, job, fragment)
    declare_routes(local, ranks)
    return local, report


def joint_passes(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    groups: Sequence[Ranks],
    talk: Lockstep,
    options: Mapping[str, Any],
) -> JointPasses | None:
    """The passes over the joint graph; None if there is nothing for them. The ranks of the groups ask together."""
    if not groups:
        return None
    mine = known(gm, example_inputs, str({name: options[name] for name in JOINT_OPTIONS if name in options}))
    facts, apart = {}, set()
    for ranks in groups:
        everyone = talk.ask(ranks, "inputs", mine)
        check_options(everyone)
        facts[ranks.group] = facts_of(mine, everyone)
        if are_apart(everyone):
            apart.add(ranks.group)
        else:
            talk.skip(ranks, QUESTIONS)
    shapes = [tuple(x.shape) for x in local_tensors(example_inputs)]
    return JointPasses(groups, facts, shapes, talk, frozenset(apart))


def questions(groups: Sequence[Ranks], sequence: Sequence[Ranks] = ()) -> list[tuple[Ranks, str]]:
    """All that the ranks of a program's groups may ask each other while they compile, in order.

    sequence: the ranks that its sequence is split over. What one group decides, its neighbours over all others hear.
    """
    everyone = [*groups, *(ranks for ranks in sequence if ranks not in groups)]
    out = [(ranks, question) for question in ("inputs", "place") for ranks in groups]
    for number, group in enumerate(groups):
        out += [(group, question) for question in QUESTIONS]
        out += rounds(everyone, f"layers {number}")
    return out + rounds(everyone, "unlike")


def compile_local(
    local: GraphModule,
    example_inputs: Sequence[Any],
    config: SPConfig,
    ranks: Ranks,
    joint: JointPasses | None = None,
) -> Callable[..., Any]:
    """Hand the local graph to Inductor (or the compiler that the config names)."""
    tag = f"{torch.compiler.config.cache_key_tag} sp_compile {digest()}"
    with (
        _compat.memory_budget(config.activation_memory_budget),
        torch.compiler.config.patch(cache_key_tag=tag),
    ):
        if joint is None or config.compiler not in _compat.JOINT_COMPILERS:
            if joint is not None:
                log.warning("compiler=%r has no place for passes on collectives: they stay", config.compiler)
            run = _compat.compiler(config.compiler)(local, example_inputs)
        else:
            joint.configure(config)
            run = _compat.joint_compiler(config.compiler, joint, joint.key())(local, example_inputs)
            log.info("%s", joint.report)
    return decorrelated(run, ranks) if ranks.n > 1 and draws(local) else run
