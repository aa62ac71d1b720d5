"""Check before each call and each backward that all ranks run the same program, call, mode and inputs.

There is one exchange of a few bytes a call, before the compiled graph. A rank that could not compile takes part as
well, so that its error reaches the others instead of blocking them in a collective.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any

import torch

from sp_compile.lowering.base.errors import RemoteError, SpError
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.checksums import (
    SUMMARY_PREFIX,
    checksum,
    sample_view,
    start_checksums,
    start_cpu_copy,
    summarize,
)
from sp_compile.lowering.collectives.sharded import Sharded, refuse_transforms
from sp_compile.lowering.torch_compat import FakeTensor, find_backward_nodes, is_wrapper, pytree
from sp_compile.passes.boundary.graph_boundary import GraphBoundary
from sp_compile.passes.graph.provenance import ExchangeSource
from sp_compile.runtime.control.channel import ControlChannel, channel_of
from sp_compile.runtime.control.failures import abort_if_connected, announce_failures, mark_agreed
from sp_compile.runtime.control.message import BACKWARD, CALL_VERB, STOP_VERB, InputRecord, Message, ProgramRecord
from sp_compile.runtime.control.watch import involved_groups, mark_running

from .agreement import (
    all_gather_messages,
    describe_field_mismatch,
    describe_operation_mismatch,
    describe_raised,
    failure,
    find_mismatch,
    format_mismatch,
    not_compiled,
    wrap_error,
)
from .fingerprint import ProgramDigest
from .input_checks import FEW_FLOATS, ComparedInputs, is_cheap_to_compare, is_on_accelerator, local_value
from .input_mismatch import find_input_mismatch
from .settings_digest import mode_fields
from .sharded_values import GatheredProgram, any_sharded, any_traced, call_refusal, unwrap_arguments

OTHER_GRADIENTS = SpError(
    "SP637", "the ranks of this group go backward from other gradients of what the program has returned"
)
OTHER_OPTIONS = "the ranks of this group were given different options, or are in different modes"
OTHER_VALUES_EARLIER = (
    "the ranks of this group were given different values at an earlier call; values on a device are compared one call "
    "later, so the steps since then are wrong"
)
SPLIT_ON_SOME = "backend='sp' could compile this program on some ranks of this group only"
LEFT_PARTIAL = (
    "param_grads='partial' leaves gradients to a DDP or FSDP that averages them over these ranks, too. If it averages "
    "over other ranks, such as the mesh's axis of replicas, use param_grads='reduce'."
)


@dataclass(frozen=True)
class ProgramInfo:
    """Facts about a program that the guards of all its groups share."""

    subject: str = "a program"  # name of the program in messages
    options: Mapping[str, str] = field(default_factory=dict)  # from `settings_fields`
    unsplit_reason: str = ""  # why the program runs unsplit; "" if it is split
    leaves_partial: bool = False  # the gradients of parameters stay partial
    check_every: int = 0  # calls between two comparisons of all values; 0 for none
    exchange_sources: Mapping[str, ExchangeSource] = field(default_factory=dict)  # sources of its collectives
    lines: Mapping[str, str] = field(default_factory=dict)  # from `node_lines`


@dataclass(eq=False)
class GuardedProgram:
    """Program that runs after all ranks of a group have agreed on it and on its inputs.

    Raises:
        SpError: On every rank, if a rank failed, compiled another graph or compiles while others run, is in another
            mode or call, or has other sizes or values.
    """

    run: Callable[..., Any] | None  # compiled graph; None if compilation failed with `error`
    ranks: Ranks
    info: ProgramInfo
    program: ProgramDigest  # must be equal on every rank
    inputs: ComparedInputs
    error: Exception | None = None
    boundary: GraphBoundary = field(default_factory=GraphBoundary)  # layouts of inputs, sharded results, mutations
    backward: bool = False  # compare the backwards as well
    gradients: bool = False  # compare gradients of results that are not sharded
    called: set[int] = field(default_factory=set)  # models whose ranks agreed on their last call
    parameters: Sequence[bool] | None = None  # flags of the parameters; None before the first call

    @cached_property
    def _record(self) -> ProgramRecord:
        """Return the description of the program, which is part of every call."""
        reason = re.sub("0x[0-9a-f]+", "", self.info.unsplit_reason)
        return ProgramRecord(self.info.options, self.program.digest, reason, self.inputs.trained)

    @cached_property
    def _named_inputs(self) -> list[tuple[int, str]]:
        """Return index and name of each named input."""
        return [(i, name) for i, name in enumerate(self.inputs.names) if name]

    @cached_property
    def _reported_inputs(self) -> list[tuple[int, str]]:
        """Return the inputs that every call describes."""
        given = self.parameters or ()
        return [(i, name) for i, name in self._named_inputs if not given[i] or name in self.inputs.always]

    @cached_property
    def _sharding_inputs(self) -> list[bool]:
        """Return flags of the inputs that show fake or sharded values: non-parameters and one parameter."""
        parameters = self.parameters or ()
        return [not one or not any(parameters[:i]) for i, one in enumerate(parameters)]

    def __call__(self, *args: Any) -> Any:
        """Compare the call over the ranks, then run the program."""
        refuse_transforms()
        some = args if self.parameters is None else [*compress(args, self._sharding_inputs)]
        traced = any_traced(some)  # nothing is executed
        written = self.run.written if isinstance(self.run, GatheredProgram) else self.boundary.written
        refused = call_refusal(args, sorted(written), self.inputs.names) if written and not traced else None
        with mark_agreed():
            call = self._agree(args, refused) if self.ranks.n > 1 and not traced else Message(CALL_VERB)
        if refused is not None:  # single rank only; several ranks raise it together in _agree
            raise refused
        if self.error is not None:
            raise self.error
        assert self.run is not None
        takes = self._accepts(args) if any_sharded(some) else args
        if traced:
            return self.run(*takes)
        with self._run_marked(call):
            out = self.run(*takes)
        if self.backward and torch.is_grad_enabled():
            self._watch(out, call)
        return out

    def _accepts(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the unwrapped arguments, unless the inner program unwraps them itself."""
        inner = isinstance(self.run, GuardedProgram | GatheredProgram)
        return args if inner else unwrap_arguments(args, self.boundary.layouts)

    def _agree(self, args: Sequence[Any], refused: SpError | None = None) -> Message:
        """Return the announcement of this call after all ranks have agreed on it.

        Args:
            args: Arguments of the call.
            refused: Error of the call on this rank.
        """
        if self.parameters is None:
            self.parameters = [isinstance(a, torch.nn.Parameter) for a in args]
        wire, subject, every = channel_of(self.ranks), self.info.subject, self.info.check_every
        model, number = (0, 0) if wire is None else wire.count_call(subject, [*compress(args, self.parameters)])
        everything = model not in self.called or (every > 0 and number % every == 0)
        self.called.discard(model)  # until the ranks agree; a refused call is compared again in full
        mine = Message(
            CALL_VERB,
            subject,
            number,
            model=model,
            program=self._record,
            earlier={} if wire is None else wire.take_earlier(),
            error=not_compiled(self.error) or refused,
        )
        with self._announce_failure(mine):
            mine = replace(mine, mode=mode_fields(), inputs=self._describe_inputs(args, everything, wire, mine))
        has_raised = wire is not None and wire.raised is not None
        everyone = all_gather_messages(self.ranks, mine)
        if everyone is None:  # no difference, or all ranks raise an error of another group
            problem, different = wrap_error(self.error) or refused, None
        else:
            different = describe_operation_mismatch(everyone)
            problem = different or self._difference(everyone)
        if problem is None:
            self.called.add(model)
            return mine
        inner = self.run  # notify the inner groups, whose other ranks wait for this call
        while isinstance(inner, GuardedProgram):
            all_gather_messages(inner.ranks, STOP_VERB)
            inner = inner.run
        raised = describe_raised(everyone or ())
        if raised and different is not None:
            if has_raised and len(involved_groups()) == 1:  # the others were in the step in which this rank has raised
                return self._agree(args, refused)  # and raise now
            abort_if_connected(wire, everyone or (), mine)
        raise (problem if different is not None else problem.with_context(raised)) from self.error

    def _describe_inputs(
        self, args: Sequence[Any], everything: bool, wire: ControlChannel | None, mine: Message
    ) -> dict[str, InputRecord]:
        """Return the records of the inputs of a call.

        Values on an accelerator are compared at the next call, when the device has computed their checksums.

        Args:
            args: Arguments of the call.
            everything: If True, include all compared values, not only those that change with each call.
            wire: The channel of the group, or None.
            mine: The announcement of the call.
        """
        inputs, out = self.inputs, {}
        compared = inputs.always | inputs.equal if everything else inputs.always
        sampled = frozenset() if everything else inputs.arguments
        away: defaultdict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
        for i, name in self._named_inputs if everything else self._reported_inputs:
            given, checksums = args[i], ["", ""]
            size = _value_size(given) + (f" in shards {given.sharding}" if isinstance(given, Sharded) else "")
            if self.error is None and (name in compared or name in sampled) and isinstance(given, torch.Tensor):
                a = local_value(given)
                some = name not in compared and not is_cheap_to_compare(a)
                a = sample_view(a, FEW_FLOATS, mine.number) if some else a
                if wire is not None and is_on_accelerator(a):
                    away[a.device][f"value of {'part of ' if some else ''}{name} when it {mine}"] = a
                else:
                    checksums[some] = checksum(a)
            is_weight = isinstance(given, torch.nn.Parameter) and name not in inputs.always
            out[name] = InputRecord(size, checksums[0], checksums[1], is_weight)
        if wire is not None:
            found = ({name: x for name, x in each.items() if x.numel()} for each in away.values())
            wire.later += [(list(tensors), start_checksums(list(tensors.values()))) for tensors in found if tensors]
        return out

    def _difference(self, everyone: Sequence[Message]) -> SpError | None:
        """Return the error of ranks with different calls, or None. Values of only some ranks are ignored."""
        if failed := failure([one.error for one in everyone]):
            return failed
        if isinstance(self.error, RemoteError):
            return self.error
        whole = [one.program.unsplit_reason for one in everyone]
        if any(whole) and not all(whole):
            rows = [f"whole: {reason}" if reason else "as backend='sp' compiles it" for reason in whole]
            return SpError("SP609", format_mismatch(SPLIT_ON_SOME, rows))
        modes = [{**one.program.options, "mode": one.mode} for one in everyone]
        if other := describe_field_mismatch(modes, OTHER_OPTIONS):
            return SpError("SP610", other)
        if other := describe_field_mismatch([one.earlier for one in everyone], OTHER_VALUES_EARLIER):
            return SpError("SP638", other)
        same = len({one.program.digest for one in everyone}) == 1
        lines = [] if same else self.program.first_difference(self.ranks)
        found = find_input_mismatch(everyone, lines, self.inputs, bool(self.boundary.own_rows))
        if found is not None and found.code == "SP635" and self.info.leaves_partial:
            return SpError(found.code, found.cause, f"{found.fix} {LEFT_PARTIAL}")
        return found

    @cached_property
    def connected(self) -> list[Ranks]:
        """Return the groups of this program and of the programs that it calls."""
        return [self.ranks, *(self.run.connected if isinstance(self.run, GuardedProgram) else [])]

    @contextmanager
    def _run_marked(self, what: Message) -> Iterator[None]:
        """Mark that the program runs in the context, and publish its failures."""
        with self._announce_failure(what), mark_running(self.connected):
            yield

    def _announce_failure(self, what: Message) -> AbstractContextManager[None]:
        return announce_failures(channel_of(self.ranks), what, self.info.exchange_sources, self.info.lines)

    def _watch(self, out: Any, call: Message) -> None:
        """Compare the backward of a call over the ranks when it begins."""
        mine, leaves = Message(BACKWARD, call.subject, call.number, model=call.model), pytree.tree_leaves(out)
        for node, alone in find_backward_nodes(leaves, self.boundary.rows, lambda: self._run_marked(mine)):
            node.register_prehook(partial(self._start_backward, mine, alone))

    @torch.compiler.disable
    def _start_backward(self, mine: Message, rows: frozenset[int], grads: Sequence[Any]) -> None:
        """Compare the gradients of replicated results, since each rank continues with its own rows.

        Args:
            mine: The message of this rank.
            rows: Indices of the results of which a rank has only its rows.
            grads: Gradients of the results.
        """
        refuse_transforms(grads)
        wire, fields = channel_of(self.ranks), dict[str, str]()
        for i, grad in [(i, grad) for i, grad in enumerate(grads if self.gradients else ()) if i not in rows]:
            name = f"gradient of result {i}"
            if not isinstance(grad, torch.Tensor) or isinstance(grad, FakeTensor) or is_wrapper(grad):
                fields[name] = "none" if grad is None else ""
            elif wire is not None and is_on_accelerator(grad):
                earlier = f"value of the {name} when it {mine}"
                wire.later.append(([earlier], start_cpu_copy(summarize(grad)[None])))
            else:
                fields[name] = _grad_field(grad)
        everyone = all_gather_messages(self.ranks, replace(mine, fields=fields)) or ()
        if problem := find_mismatch(everyone, OTHER_GRADIENTS):
            abort_if_connected(wire, everyone, mine)
            raise problem


def world() -> Any:
    """Return the default process group, or None without one."""
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


@dataclass(eq=False)
class InProcesses:
    """Program compiled for the default process group at its creation.

    Raises:
        SpError: If the default process group has changed.
    """

    run: Callable[..., Any]
    world: Any = field(default_factory=world)

    def __call__(self, *args: Any) -> Any:
        """Run the program."""
        if world() is not self.world:
            raise SpError("SP681", "the model was compiled for another default process group.")
        return self.run(*args)


def _grad_field(grad: torch.Tensor) -> str:
    """Return the summary of a CPU gradient, without a new tensor for a scalar."""
    if grad.numel() == 1 and not grad.is_complex():
        return f"{SUMMARY_PREFIX}{abs(value := grad.item())!r} {value!r}"
    return start_cpu_copy(summarize(grad)[None]).read()[0]


def _value_size(a: Any) -> str:
    """Return the shape of a tensor, or the value of a Python scalar.

    Dynamo passes a Python float as a tensor without dims.
    """
    if isinstance(a, torch.Tensor) and a.ndim == 0 and a.device.type == "cpu":
        return str(a.item())
    return str(tuple(a.shape)) if isinstance(a, torch.Tensor) else str(a)
