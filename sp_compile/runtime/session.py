"""Run one compilation together with all ranks that the program connects.

A program may have its own groups (tensor and data parallelism), and its sequence may be split over another one. All
their ranks compile it, and their decisions must agree. Each decision that needs other ranks is a method of the session.
Every rank calls them in the same order, even if a rank fails (see `CompileProtocol`). The guard (`guard_program` in
`rank_program.py`) is the compiled program with the exchange of messages before each call, in which errors of the
compilation are raised on all ranks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import RankMismatchError, SpError
from sp_compile.lowering.base.options import AnyOptions, SPConfig
from sp_compile.lowering.base.progress import show_in_thread, show_progress
from sp_compile.lowering.base.ranks import SINGLE_RANK, Ranks, can_split_sequence, resolve
from sp_compile.lowering.base.warn import warn_once
from sp_compile.lowering.torch_compat import wrap_late_backward
from sp_compile.passes.collectives.collective_context import RankQueries
from sp_compile.passes.cost import measure
from sp_compile.passes.cost.collective_time import LatencyBandwidth
from sp_compile.passes.cost.group_names import GroupGrid, check_groups, group_grids, named_groups, program_groups
from sp_compile.passes.cost.input_facts import InputFacts
from sp_compile.passes.cost.machine import Machine
from sp_compile.runtime.control.channel import (
    HEARTBEAT_INTERVAL,
    broken_context,
    channel_of,
    open_channels,
    publish_stop,
)
from sp_compile.runtime.control.message import MEASURE_MESSAGE, hash_text, register_sendable
from sp_compile.runtime.control.store import STORE_TIMEOUT

from .agreement import make_exchange, wrap_error
from .compile_protocol import CompileProtocol
from .fingerprint import graph_digest, program_subject
from .input_checks import check_options, combine_facts, input_digests

log = logging.getLogger(__name__)

register_sendable(Machine)
register_sendable(LatencyBandwidth)
JOINT_OPTIONS = ("merge_reductions", "sequence_parallel_linear")  # options of the passes on collectives

# warnings of `warn_one_rank`
NO_GROUP = (
    "torchrun started %d processes and this program has no process group: backend='sp' splits nothing, and every "
    "process computes alone. Call torch.distributed.init_process_group() before the first call of the compiled model."
)
ONE_RANK_OF_MESH = (
    "The axis of the mesh that splits the sequence has one rank, and the program has %d: backend='sp' splits nothing. "
    "Pass an axis of several ranks with options={'mesh': mesh, 'mesh_dim': '<axis>'}, such as that of size %d of "
    "init_device_mesh(device, (1, %d), mesh_dim_names=('dp', 'sp'))."
)
ONE_RANK = (
    "The process group has one rank: backend='sp' splits nothing. Start several ranks, such as with torchrun "
    "--nproc-per-node=2."
)


class CompileSession(RankQueries):
    """Ranks and exchanges of one compilation, created from Dynamo's graph and its inputs.

    There is no communication before `start` or `exchange_facts`.

    Args:
        gm: Dynamo's graph.
        inputs: Example inputs of the graph.
        options: The options of the backend, as the user passed them.
        measures: True to time transfers between the ranks for the cost model.
        mode: The mode of `torch.compile`.

    Attributes:
        given: The options by name, as the user passed them; they may be invalid.
        options: The options, or the defaults if an option is invalid.
        has_mesh: True if the user has passed a mesh.
        names_sequence: True if the options name the ranks or the dims of a sequence.
        groups: Groups of the program's own collectives, in the order of their appearance.
        may_split: True if the program may be split along a sequence: it has no groups, or the mesh has a further axis.
        split: True from the moment when the passes split it, so that the guard compares the ranks of the sequence.
        ranks: Ranks over which the sequence is split; a single rank if there are none.
        problem: The error of an invalid mesh, or None.
        sequence: [ranks] if the program has both groups and ranks for a sequence, else [].
        all_groups: The groups, and the ranks of the sequence.
        facts: Known facts of the inputs on each group, by name of the group.
        grids: Relation of the groups to each other, by name.
        aligned: Groups whose ranks all have the same rows of the sequence; None for all.
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
        mesh, mesh_dim = self.given.get("mesh"), self.given.get("mesh_dim")
        self.has_mesh = mesh is not None
        self.names_sequence = self.has_mesh or self.given.get("seq_dims", "auto") != "auto"
        self.options = _parse_or_default(self.given)
        self.groups = program_groups(gm, inputs) if gm is not None else []
        self.may_split = not self.groups or can_split_sequence(mesh, mesh_dim, self.groups)
        must_resolve = self.may_split or not self.has_mesh  # an axis without a mesh is an error in every program
        resolved, self.problem = _resolve_or_single(mesh, mesh_dim) if must_resolve else (SINGLE_RANK, None)
        self.ranks = resolved if self.may_split else SINGLE_RANK
        self.sequence = [self.ranks] if self.groups and self.may_split and self.problem is None else []
        self.all_groups = [*self.groups, *(ranks for ranks in self.sequence if ranks not in self.groups)]
        self.facts: dict[str, InputFacts] = {}
        self.grids: dict[str, GroupGrid] = {}
        self.aligned: frozenset[str] | None = None
        self.measures, self.split = measures, False

    @cached_property
    def _protocol(self) -> CompileProtocol:
        """Return the protocol with all exchanges of the compilation, in order.

        "inputs" is the exchange of `exchange_facts`, "place" of `_place_groups`, "machine" of `agree_on_machine`, and
        "programs" of `has_same_programs`.
        """
        exchanges = [(ranks, "inputs") for ranks in self.groups] + [(ranks, "place") for ranks in self.all_groups]
        exchanges += [(ranks, "machine") for ranks in self.all_groups if self.sequence]
        return CompileProtocol(exchanges + [(ranks, "programs") for ranks in self.all_groups])

    # Before the passes.

    def start(self, gm: GraphModule) -> None:
        """Check that the other ranks compile as well, in a program with process groups of its own.

        Without these, the first exchange of the protocol compares the ranks of the sequence.

        Raises:
            SpError: On every rank of a group whose ranks run different operations.
        """
        if self.groups:
            if self.problem is not None:  # other ranks wait over an axis that this one does not have
                publish_stop(str(self.problem), subject=program_subject(gm))
            self._protocol.start(self.sequence)

    def exchange_facts(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Set `facts`, the inputs that are equal on the ranks of each group, and `grids`, the relation of the groups.

        Passes on the program's own collectives read them. A program without such collectives exchanges nothing.

        Raises:
            SpError: If the mesh is invalid, this rank lacks a group, or the options differ between ranks.
        """
        check_groups(gm)
        self._check_axis()
        if not self.groups:
            return
        options = str({name: getattr(self.options, name) for name in JOINT_OPTIONS})
        own_digests = input_digests(gm, inputs, options)  # of the options, too, which `check_options` compares
        for ranks in self.groups:
            all_digests = self._protocol.exchange(ranks, "inputs", own_digests)
            check_options(all_digests)
            self.facts[ranks.group] = combine_facts(own_digests, all_digests)
        self._place_groups()

    def _check_axis(self) -> None:
        """Raise SpError if the mesh is invalid or the program's own collectives use the sequence's ranks."""
        if self.problem is not None:
            raise self.problem
        for ranks in self.sequence:
            if ranks in self.groups:
                raise SpError(
                    "SP619",
                    f"mesh_dim: the program's own collectives use the {ranks.n} ranks of the sequence (group "
                    f"{ranks.group!r}), so these cannot share the sequence.",
                )

    def _place_groups(self) -> None:
        """Set `grids`, how the ranks of each group are arranged in the other groups, such as along the axes of a mesh.

        In each group the ranks exchange their ranks in the other groups. `aligned` are the groups whose ranks all have
        the same rank in the group of the sequence, and so the same rows.
        """
        self.grids = group_grids(self.all_groups, lambda ranks, place: self._protocol.exchange(ranks, "place", place))
        self.facts = {name: replace(facts, grid=self.grids[name]) for name, facts in self.facts.items()}
        if self.sequence:  # `level` of a group: the groups in which all of its ranks have the same rank
            self.aligned = frozenset(name for name in self.facts if self.ranks.group in self.grids[name].level)

    def agree_on_machine(self, device: torch.device) -> Machine | None:
        """Return the cost model's constants for the ranks of the sequence; None for the device defaults.

        Each group that splits a sequence, such as a column of a mesh, measures its ranks. All connected ranks then use
        the least tuple of constants, a choice that is equal on all of them: with different constants, the ranks of a
        tensor-parallel group would compile different programs.
        """
        self.split = True  # so that `guard` compares the ranks of the sequence, even if the compilation fails
        if not self.measures or self.ranks.process_group is None:
            return None
        machine = measure.machine(self.ranks, device, make_exchange(self.ranks, MEASURE_MESSAGE))
        for ranks in self.all_groups:  # one axis of a grid after the other: the last result is the minimum of all ranks
            machines = self._protocol.exchange(ranks, "machine", machine)
            machine = min(filter(None, machines), key=astuple)  # None from ranks that have failed
        return machine

    @contextmanager
    def show_compiling(self, gm: GraphModule) -> Iterator[None]:
        """Send heartbeats to waiting ranks in the context, and show the progress to the user.

        A compilation may take longer than the timeout of any group of the program, in each of which ranks may wait for
        it: without heartbeats in all groups, these ranks would raise.
        """
        done, subject = threading.Event(), program_subject(gm)
        groups = [*dict.fromkeys([*self.all_groups, self.ranks])]
        progress_thread = threading.Thread(target=show_in_thread, args=(f"compiling {subject}", done), daemon=True)
        progress_thread.start()
        try:
            with _send_heartbeats(groups):
                yield
            # AOTAutograd may compile the backward at the first backward.
            wrap_late_backward(lambda: _show_late_backward(groups, f"compiling the backward of {subject}"))
        finally:
            done.set()
            progress_thread.join(STORE_TIMEOUT)

    # Between the passes.

    def has_same_programs(self, gm: GraphModule) -> bool:
        """Return True if all ranks have the same joint graph and the same facts of its inputs.

        If so, passes decide the same on every rank. Called once a compilation; the result is the same on every rank.
        Each group exchanges whether the ranks of earlier groups agree. If the groups are the axes of a grid, this
        reaches all ranks; if they are not, the result is False.
        """
        is_same, digest = self._is_grid(), self._program_hash(gm)
        for ranks in self.all_groups:
            answers = self._protocol.exchange(ranks, "programs", (is_same, digest))
            is_same = all(answer == (True, digest) for answer in answers)
        return is_same

    def _is_grid(self) -> bool:
        """Return True if each two groups are axes of a grid, or one contains the other.

        Values that each group exchanges then reach all ranks. Two groups are axes if all ranks of each have the same
        rank in the other (`GroupGrid.level`).
        """
        for a, b in combinations([ranks.group for ranks in self.all_groups], 2):
            are_axes = b in self.grids[a].level and a in self.grids[b].level
            if not are_axes and b not in self.grids[a].enclosing and a not in self.grids[b].enclosing:
                return False
        return True

    def _program_hash(self, gm: GraphModule) -> int:
        """Return a hash of what passes on collectives read: the graph, its groups and their relation, facts of inputs.

        Names of groups differ between ranks, so groups are named by their number.
        """
        numbers = {ranks.group: i for i, ranks in enumerate(self.all_groups)}
        # -1 for a group of the program that is not in `all_groups`.
        groups = [sorted(numbers.get(name, -1) for name in named_groups(node)) for node in gm.graph.nodes]
        facts = [self.facts[ranks.group] for ranks in self.groups]
        labels = [[sorted(names) for names in (fact.differing, fact.equal or (), fact.constants)] for fact in facts]
        relations = [
            [sorted(numbers[name] for name in names) for names in (grid.level, grid.parallel, grid.enclosing)]
            for grid in self.grids.values()
        ]
        sizes = [ranks.n for ranks in self.all_groups]
        return hash_text(str((graph_digest(gm).digest, groups, labels, relations, sizes)))

    def can_compare_gradients(self, ranks: Ranks) -> bool:
        """Return True if the ranks compare the gradients of shared results (those that are equal on all ranks).

        Simulated ranks, threads without a process group, exchange values and so compare them. In a dry run on torch's
        fake groups there are no other ranks.
        """
        return ranks.process_group is None or ranks.has_other_processes

    # After the passes.

    def finish(self, gm: GraphModule, error: Exception | None) -> Exception | None:
        """Run the remaining exchanges of the compilation.

        Args:
            gm: Dynamo's graph.
            error: The error of the passes on this rank, if any.

        Returns:
            That error, or one that the exchanges received. The guard raises it on all ranks, in the exchange of
            messages before the call.

        Raises:
            RankMismatchError: There is an error, and that exchange will not take place: some ranks of a group have not
                started to compile, or the group has stopped, since one of its exchanges failed.
        """
        if not self.groups:
            return error
        error = self._protocol.finish(error)
        stopped = self._protocol.stopped_groups.keys() & set(self.groups)
        # `opened`: all ranks have started to compile, and none runs another operation instead.
        meets_at_call = self._protocol.opened and not stopped
        if meets_at_call or error is None:
            return error
        # Ranks of groups that have not stopped wait for this rank at the call, if all have started to compile.
        if self._protocol.opened:
            # They read the notice that this rank publishes. A new notice replaces the last one, so it repeats the group
            # whose exchange is broken (`within`).
            publish_stop(str(error).replace("\n", " "), subject=program_subject(gm), within=broken_context())
        sp_error = wrap_error(error)
        assert sp_error is not None  # as `error` is not None
        raise RankMismatchError(sp_error.code, sp_error.cause, sp_error.fix) from error

    @contextmanager
    def publish_interrupt(self, gm: GraphModule) -> Iterator[None]:
        """Publish a KeyboardInterrupt or exit of this rank in the context, so that other ranks do not wait for it."""
        try:
            yield
        except Exception:  # an error, which `finish` and the guard send to the other ranks
            raise
        except BaseException as error:
            subject = program_subject(gm)
            text = f"{type(error).__name__} when it compiles {subject}"
            # The notice replaces the last one of this rank, and repeats its group whose exchange is broken, if any.
            publish_stop(text, subject=subject, within=broken_context())
            raise


@contextmanager
def _send_heartbeats(groups: Sequence[Ranks]) -> Iterator[None]:
    """Send heartbeats in the context, in which this thread compiles, to ranks of these groups that wait.

    Ranks of other groups may wait, too, such as those with shards of the weights: all groups with a channel receive
    heartbeats.
    """
    done, compiling = threading.Event(), threading.get_ident()
    channels = [*dict.fromkeys([*filter(None, map(channel_of, groups)), *open_channels()])]

    def send() -> None:
        """Send heartbeats until the compilation ends."""
        while not done.wait(HEARTBEAT_INTERVAL):
            for channel in channels:
                channel.send_heartbeat(compiling)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(STORE_TIMEOUT)


@contextmanager
def _show_late_backward(groups: Sequence[Ranks], title: str) -> Iterator[None]:
    """Send heartbeats and show the progress in the context, which compiles the backward of a program."""
    with _send_heartbeats(groups), show_progress(title):
        yield


def _parse_or_default(options: Mapping[str, Any]) -> SPConfig:
    """Return the options, or the defaults if one is invalid; lowering raises that error."""
    try:
        return SPConfig.of(options)
    except Exception:
        return SPConfig()


def _resolve_or_single(mesh: Any, mesh_dim: str | None) -> tuple[Ranks, Exception | None]:
    """Return the ranks of the sequence and None; or, for an invalid mesh, a single rank and the error."""
    try:
        return resolve(mesh, mesh_dim), None
    except Exception as problem:
        return SINGLE_RANK, problem


def warn_one_rank(session: CompileSession) -> None:
    """Warn on rank 0, once for each reason, if there is only one rank for the sequence although others exist.

    There is no warning for a program on a single device, without torchrun and without a process group, nor for one
    with its own collectives and without a mesh for a sequence.

    Args:
        session: The session of the compilation.
    """
    if not session.may_split or session.problem is not None or session.ranks.n > 1:
        return
    num_started = int(os.environ.get("WORLD_SIZE", "1"))  # processes that torchrun has started
    if not (dist.is_available() and dist.is_initialized()):
        if num_started > 1 and os.environ.get("RANK", "0") == "0":
            warn_once(log, NO_GROUP, num_started)
        return
    world_size = dist.get_world_size()
    if world_size > 1:
        warn_once(log, ONE_RANK_OF_MESH, world_size, world_size, world_size)
    else:
        warn_once(log, ONE_RANK)
