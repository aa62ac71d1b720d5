"""One compilation among the ranks that it connects: whom they are, and all that they tell each other meanwhile.

A program may exchange over groups of its own (tensor and data parallelism), and its sequence be split over the ranks
of one more. All of them compile it, and what they decide has to fit: every question that one rank has for others is a
method here, and every rank asks the same ones in the same order, whatever fails on one of them (see `check_compile`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import cached_property, partial
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule

from sp_compile.config import can_split_sequence, parse_unchecked
from sp_compile.lowering.base.errors import RankMismatchError, SpError
from sp_compile.lowering.base.options import AnyOptions, SPConfig
from sp_compile.lowering.base.progress import show_in_thread, show_progress
from sp_compile.lowering.base.ranks import SINGLE_RANK, Ranks, resolve
from sp_compile.lowering.torch_compat import argument_name, on_recompile_limit, wrap_late_backward
from sp_compile.passes.boundary.graph_boundary import GraphBoundary
from sp_compile.passes.context import PassSettings
from sp_compile.passes.cost import measure
from sp_compile.passes.cost.group_names import (
    GroupGrid,
    check_groups,
    group_grids,
    is_collective,
    named_groups,
    program_groups,
)
from sp_compile.passes.cost.input_facts import InputFacts
from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.graph.provenance import exchange_sources, node_lines
from sp_compile.runtime.control.channel import (
    HEARTBEAT_INTERVAL,
    STOPPED_CAUSE,
    broken_context,
    channel_of,
    publish_stop,
)
from sp_compile.runtime.control.message import MEASURE_VERB, hash_text, register_sendable
from sp_compile.runtime.control.store import STORE_TIMEOUT

from .agreement import make_error_barrier, wrap_error
from .compile_protocol import CompileProtocol
from .fingerprint import ProgramDigest, exchange_digest, graph_digest, input_names, program_subject
from .guard import GuardedProgram, InProcesses
from .input_checks import (
    check_options,
    combine_facts,
    common_weights,
    equal_arguments,
    equal_inputs,
    input_digests,
    sized_inputs,
    trained_inputs,
)
from .settings_digest import settings_fields
from .sharded_values import GatheredProgram, ShardedProgram, any_sharded

register_sendable(Machine)
on_recompile_limit(partial(publish_stop, goes_on=True))
JOINT_OPTIONS = ("merge_reductions", "sequence_parallel_linear")  # what decides over exchanges


class CompileSession:
    """The ranks of one program, given to Dynamo's graph and its inputs; until `open` or `learn` nobody is asked.

    options: as the user gave them, unchecked. groups: those that the program exchanges over by itself, in the order of
    their appearance. ranks: those that its sequence is split over; `splits` is False where no rank is left for that.
    facts: what is known of the inputs on each group, by its name: tensors are called input_0, input_1, ..., symbols
    size_0, ... grids: how the groups lie to each other, by their names.
    aligned: the groups whose ranks all hold the same rows of the sequence; None: all. measures: time the links of the
    ranks for the cost model. mode: Inductor's, as `torch.compile` was given it.
    """

    def __init__(
        self,
        gm: GraphModule | None = None,
        inputs: Sequence[Any] = (),
        options: AnyOptions = None,
        measures: bool = True,
        mode: str | None = None,
    ) -> None:
        given = vars(options) if isinstance(options, SPConfig) else options
        self.given, self.mode = given if isinstance(given, Mapping) else {}, mode
        mesh, mesh_dim, self.named = parse_unchecked(self.given)
        self.has_mesh = mesh is not None
        self.options = str({name: self.given[name] for name in JOINT_OPTIONS if name in self.given})
        self.groups = program_groups(gm, inputs) if gm is not None else []
        self.splits = not self.groups or can_split_sequence(mesh, mesh_dim, self.groups)
        asked = self.splits or not self.has_mesh  # an axis of no mesh is an error of any program's
        found, self.problem = _resolve_or_single(mesh, mesh_dim) if asked else (SINGLE_RANK, None)
        self.ranks = found if self.splits else SINGLE_RANK
        self.sequence = [self.ranks] if self.groups and self.splits and self.problem is None else []
        self.everyone = [*self.groups, *(ranks for ranks in self.sequence if ranks not in self.groups)]
        self.facts: dict[str, InputFacts] = {}
        self.grids: dict[str, GroupGrid] = {}
        self.aligned: frozenset[str] | None = None
        self.measures, self.split = measures, False

    @cached_property
    def _settings(self) -> PassSettings:
        """As the options say; the default ones, where they are wrong and `lower` has said so."""
        try:
            return PassSettings.of(SPConfig.of(self.given), SINGLE_RANK)
        except Exception:
            return PassSettings(SINGLE_RANK)

    @cached_property
    def _protocol(self) -> CompileProtocol:
        return CompileProtocol(self._question_plan())

    def _question_plan(self) -> list[tuple[Ranks, str]]:
        """All that ranks may ask each other, in order. What one group decides, its neighbours over all others hear."""
        out = [(ranks, "inputs") for ranks in self.groups] + [(ranks, "place") for ranks in self.everyone]
        out += [(ranks, "machine") for ranks in self.everyone if self.sequence]
        return out + [(ranks, "programs") for ranks in self.everyone]

    # In front of the passes.

    def start(self, gm: GraphModule) -> None:
        """Begin: are the others compiling as well? Raises SpError on every rank of a group that is of two minds."""
        if self.groups:
            if self.problem is not None:  # then ranks wait over an axis that this one does not know
                publish_stop(str(self.problem), subject=program_subject(gm))
            self._protocol.start(self.sequence)

    def exchange_facts(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Which inputs are equal on the ranks of each group, and how the groups lie to each other.

        Raises SpError: a mesh that is wrong, a group that this rank lacks, other options than other ranks'.
        """
        check_groups(gm)
        self._check_axis()
        if not self.groups:
            return
        mine = input_digests(gm, inputs, self.options)
        for ranks in self.groups:
            everyone = self._protocol.exchange(ranks, "inputs", mine)
            check_options(everyone)
            self.facts[ranks.group] = combine_facts(mine, everyone)
        self._place_groups()

    def _check_axis(self) -> None:
        """A sequence cannot be split over ranks between which the program exchanges by itself."""
        if self.problem is not None:
            raise self.problem
        taken = [ranks for ranks in self.sequence if ranks in self.groups]
        if taken:
            raise SpError(
                "SP619",
                f"mesh_dim: the program's own collectives use this axis (group {taken[0].group!r}), so its "
                f"{taken[0].n} ranks cannot share the sequence.",
            )

    def _place_groups(self) -> None:
        """How the groups lie to each other and to the ranks of the sequence."""
        self.grids = group_grids(self.everyone, lambda ranks, mine: self._protocol.exchange(ranks, "place", mine))
        self.facts = {name: replace(facts, grid=self.grids[name]) for name, facts in self.facts.items()}
        if self.sequence:
            names = {ranks.group for ranks in self.sequence}
            self.aligned = frozenset(name for name in self.facts if names <= self.grids[name].level)

    def machine(self, device: torch.device) -> Machine | None:
        """The cost model's constants on the ranks of the sequence; None: the device's defaults.

        Two groups that split one sequence each, as the columns of a mesh do, measure apart. All that the program
        connects take the same constants, or a tensor-parallel group would be given two programs.
        """
        self.split = True
        if not self.measures or self.ranks.process_group is None:
            return None
        found = measure.machine(self.ranks, device, make_error_barrier(self.ranks, MEASURE_VERB))
        for ranks in self.everyone:  # the axes of a grid: what all have in the end is the least of all
            answers = self._protocol.exchange(ranks, "machine", found)
            found = min((one for one in answers if one is not None), key=astuple)
        return found

    @contextmanager
    def show_compiling(self, gm: GraphModule) -> Iterator[None]:
        """Show the ranks that are done and wait that this one is alive, and the user what it is at."""
        done = threading.Event()
        wires = [*filter(None, map(channel_of, dict.fromkeys([*self.everyone, self.ranks])))]

        def beat() -> None:
            while not done.wait(HEARTBEAT_INTERVAL):
                for wire in wires:
                    wire.send_heartbeat()

        thread = threading.Thread(target=beat, daemon=True)
        title = (lambda: f"compiling {program_subject(gm)}"), done
        shown = threading.Thread(target=show_in_thread, args=title, daemon=True)
        thread.start()
        shown.start()
        try:
            yield
            later = f"compiling the backward of {program_subject(gm)}"
            wrap_late_backward(lambda: show_progress(later))
        finally:
            done.set()
            thread.join(STORE_TIMEOUT)
            shown.join(STORE_TIMEOUT)

    # Between the passes.

    def has_same_programs(self, gm: GraphModule) -> bool:
        """Return whether all ranks have the same joint graph, and know the same of its inputs.

        If so, passes decide the same on every rank. Asked once a compilation. Every rank gets the same answer: each
        group passes on what the groups before it have found, which reaches all ranks where the groups are the axes of
        a grid. Elsewhere the answer is no.
        """
        same, mine = self._is_grid(), self._program_hash(gm)
        for ranks in self.everyone:
            same = all(theirs == (True, mine) for theirs in self._protocol.exchange(ranks, "programs", (same, mine)))
        return same

    def _is_grid(self) -> bool:
        """Return whether each two groups are axes of a grid, or one holds the other."""

        def fits(one: str, other: str) -> bool:
            a, b = self.grids[one], self.grids[other]
            return (other in a.level and one in b.level) or other in a.enclosing or one in b.enclosing

        names = [ranks.group for ranks in self.everyone]
        return all(fits(one, other) for one, other in combinations(names, 2))

    def _program_hash(self, gm: GraphModule) -> int:
        """Return a hash of the graph, of which groups it exchanges over, and of what is known of the inputs."""
        numbers = {ranks.group: i for i, ranks in enumerate(self.everyone)}
        over = [sorted(numbers.get(name, -1) for name in named_groups(node)) for node in gm.graph.nodes]
        facts = [self.facts[ranks.group] for ranks in self.groups]
        known = [[sorted(one) for one in (facts.differing, facts.equal or (), facts.constants)] for facts in facts]
        lies = [
            [sorted(numbers[name] for name in names) for names in (grid.level, grid.parallel, grid.enclosing)]
            for grid in self.grids.values()
        ]
        sizes = [ranks.n for ranks in self.everyone]
        return hash_text(str((graph_digest(gm).digest, over, known, lies, sizes)))

    def compares_gradients(self, ranks: Ranks) -> bool:
        """Not in a look at a program without processes, on torch's fake groups."""
        return ranks.process_group is None or ranks.exchanges

    # Behind the passes.

    def finish(self, gm: GraphModule, error: Exception | None) -> Exception | None:
        """Answer what the others will still ask; why this rank fails, as they may have told it.

        Raises SpError, as Dynamo lets it out, if a group of the program cannot meet at the call and hear it there.
        """
        if not self.groups:
            return error
        error = self._protocol.finish(error)
        meets = self._protocol.opened and not any(ranks in self._protocol.apart for ranks in self.groups)
        if meets or error is None:
            return error
        if self._protocol.opened:  # who has heard of it over another group waits there for this rank's call
            publish_stop(
                str(error).replace("\n", " ")[:STOPPED_CAUSE], subject=program_subject(gm), within=broken_context()
            )
        found = wrap_error(error)
        assert found is not None
        raise RankMismatchError(found.code, found.cause, found.fix) from error

    @contextmanager
    def publish_interrupt(self, gm: GraphModule) -> Iterator[None]:
        """Where this rank is interrupted meanwhile, it says so: no other need wait for it."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            subject = program_subject(gm)
            publish_stop(f"{type(error).__name__} when it compiles {subject}", subject=subject, within=broken_context())
            raise

    def guard(
        self,
        run: Callable[..., Any] | None,
        error: Exception | None,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        local: GraphModule | None = None,
        common: Mapping[str, Collection[str]] = MappingProxyType({}),
        backward: Collection[str] = (),
        edges: GraphBoundary | None = None,
        whole: str = "",
        eager: bool = False,
    ) -> Callable[..., Any]:
        """The compiled program, called only where the ranks of each group agree on what it is and what it is given.

        run, local: what this rank compiled, and of which graph; None where that failed with `error`, which every call
        raises on all ranks. common: the groups that share work where values are equal, and the inputs that
        have to be for that, as `InputFacts` call them. backward: the groups that a backward exchanges over.
        edges: what it takes and returns in shards. whole: why it is the program as it was written, which every rank
        runs whole; "" if it is not. eager: by eager code, to which inputs that share memory are nothing special.
        """
        job, edges = self._settings, edges or GraphBoundary()
        subject, options = program_subject(gm), settings_fields({"mode": self.mode, **self.given})
        asked, partial_sums = job.user_io, job.param_grads == "partial"
        exchanges = filter(is_collective, local.graph.nodes) if local is not None else ()
        places = exchange_sources(exchanges, {x.name: argument_name(x) for x in gm.graph.find_nodes(op="placeholder")})
        lines = node_lines(local.graph) if local is not None else {}
        if self.split:
            done = run is not None and local is not None
            program = (
                ProgramDigest() if not done else exchange_digest(gm) if whole else graph_digest(local, input_names(gm))
            )
            run = GatheredProgram(run, eager) if run is not None and whole else run
            equal, arguments = equal_inputs(gm, example_inputs, edges.own_rows) if done else (frozenset(), frozenset())
            run = GuardedProgram(
                run,
                self.ranks,
                program,
                input_names(gm),
                error,
                equal,
                subject=subject,
                options=options,
                backward=True,
                whole=asked.outputs != "local",
                leaves_partial=partial_sums,
                check_every=job.check_every,
                arguments=arguments,
                layouts=edges.layouts,
                sharded=edges.rows,
                wanted=trained_inputs(gm, example_inputs, weights=True),
                exchange_sources=places,
                lines=lines,
                written=edges.written,
                unsplit_reason=whole,
                takes_rows=bool(edges.own_rows),
            )
            error = None
        elif error is not None and not self.groups:
            publish_stop(str(error), subject=subject)  # whoever they are that this rank will not reach
            run = GuardedProgram(None, SINGLE_RANK, ProgramDigest(), [], error)
        elif run is not None and not self.groups and any_sharded(example_inputs):  # which others ask for it
            run = GatheredProgram(run)
        for ranks in reversed(self.groups):  # the first group is asked first, as in Lockstep.open
            facts = self.facts.get(ranks.group, InputFacts())
            compares = run is not None and ranks.group in common
            always = equal_arguments(gm, example_inputs, facts) if compares else frozenset()
            weights = common_weights(gm, example_inputs, common[ranks.group]) if compares else frozenset()
            run = GuardedProgram(
                run,
                ranks,
                exchange_digest(gm),
                sized_inputs(gm, example_inputs, facts),
                error,
                equal=weights,
                always=always,
                subject=subject,
                options=options,
                backward=ranks.group in backward,
                leaves_partial=partial_sums,
                check_every=job.check_every,
                shared=always | weights,
                wanted=trained_inputs(gm, example_inputs, weights=False),  # of which ranks may hold other ones
                exchange_sources=places,
                lines=lines,
                unsplit_reason=whole,
            )
        assert run is not None
        if edges.results or edges.writes or edges.views:
            run = ShardedProgram(run, self.ranks, subject, edges)
        return run if self.groups else InProcesses(run)


def _resolve_or_single(mesh: Any, mesh_dim: str | None) -> tuple[Ranks, Exception | None]:
    """The ranks of the sequence; where the mesh is wrong a single one, and what will be said of it."""
    try:
        return resolve(mesh, mesh_dim), None
    except Exception as problem:
        return SINGLE_RANK, problem
