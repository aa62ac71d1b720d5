"""Check before each call and each backward that all ranks run the same program, call, mode and inputs.

There is one exchange of a few bytes a call, before the compiled graph. A rank that could not compile takes part as
well, so that its error reaches the others instead of blocking them in a collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any, NamedTuple

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
from sp_compile.lowering.collectives.shard_storage import Layout
from sp_compile.lowering.collectives.sharded import Sharded, refuse_transforms
from sp_compile.lowering.torch_compat import FakeTensor, find_backward_nodes, is_wrapper, pytree
from sp_compile.passes.graph.provenance import ExchangeSource
from sp_compile.runtime.control.channel import ControlChannel, channel_of
from sp_compile.runtime.control.failures import abort_if_connected, announce_failures, mark_agreed
from sp_compile.runtime.control.message import BACKWARD, CALL_VERB, STOP_VERB, Field, FieldKind, HashedFields, Message
from sp_compile.runtime.control.watch import involved_groups, mark_running

from .agreement import (
    all_gather_messages,
    describe_field_mismatch,
    describe_mode_mismatch,
    describe_operation_mismatch,
    describe_raised,
    failure,
    failure_or_mismatch,
    format_mismatch,
    format_rank_rows,
    not_compiled,
    run_mode,
    wrap_error,
)
from .fingerprint import InputName, ProgramDigest
from .input_checks import FEW_FLOATS, is_cheap_to_compare, is_on_accelerator, local_value, sharded_data_fix
from .settings_digest import mode_fields
from .sharded_values import GatheredProgram, any_sharded, any_traced, call_refusal, unwrap_arguments

OTHER_VALUES = "the ranks of this group were given different values"
OTHER_GRADIENTS = "the ranks of this group go backward from other gradients of what the program has returned"
PROGRAM = "program"
GRADIENTS = "gradients"


@dataclass(eq=False)
class GuardedProgram:
    """Program that runs after all ranks have agreed on it and on its inputs.

    Values in `equal` are compared as checksums on the first call of each model, and every `check_every` calls. So are
    the sizes of parameters. Values in `always` are compared on every call. So are `arguments`, or a sample of large
    ones.

    Raises:
        SpError: On every rank, if a rank failed, compiled another graph or compiles while others run, is in another
        mode
            or call, or has other sizes or values.
    """

    run: Callable[..., Any] | None  # compiled graph; None if compilation failed with `error`
    ranks: Ranks
    program: ProgramDigest  # must be equal on every rank
    names: Sequence[str]  # from `input_names`
    error: Exception | None = None
    equal: frozenset[str] = frozenset()  # inputs whose values must be equal on every rank
    always: frozenset[str] = frozenset()  # inputs whose values every call compares
    subject: str = "a program"  # name of the program in messages
    options: Mapping[str, str] = field(default_factory=dict)  # from `settings_fields`
    backward: bool = False  # compare the backwards as well
    whole: bool = False  # compare gradients of results that are not sharded
    leaves_partial: bool = False  # the gradients of parameters stay partial
    check_every: int = 0
    arguments: frozenset[str] = frozenset()  # inputs in `equal` that change with each call
    shared: frozenset[str] = frozenset()  # inputs that were equal at compilation
    layouts: Mapping[int, Layout] = field(default_factory=dict)  # layouts of sharded arguments; others are gathered
    sharded: frozenset[int] = frozenset()  # indices of sharded results
    wanted: Sequence[str] = ()  # inputs that require grad
    exchange_sources: Mapping[str, ExchangeSource] = field(default_factory=dict)  # sources of its collectives
    lines: Mapping[str, str] = field(default_factory=dict)  # from `node_lines`
    written: Sequence[int] = ()  # indices of the inputs that it mutates
    unsplit_reason: str = ""  # why the program runs unsplit; "" if it is split
    takes_rows: bool = False  # True if some inputs are shards as plain tensors
    called: set[int] = field(default_factory=set)  # models whose ranks agreed on their last call
    parameters: Sequence[bool] | None = None  # flags of the parameters; None before the first call

    @cached_property
    def static_fields(self) -> HashedFields:
        """Return the fields of the program that are part of every call."""
        wanted = "\n".join(map(_shown_name, self.wanted))
        return HashedFields(
            {**self.options, **run_mode(self.unsplit_reason), PROGRAM: str(self.program.digest), GRADIENTS: wanted}
        )

    def _parameters(self, args: Sequence[Any]) -> Sequence[bool]:
        """Return a flag of each input that is True for parameters, the same on every call."""
        if self.parameters is None:
            self.parameters = [isinstance(a, torch.nn.Parameter) for a in args]
        return self.parameters

    @cached_property
    def _names_shown(self) -> list[tuple[int, str, str]]:
        """Return index, name and displayed name of each named input."""
        return [(i, name, _shown_name(name)) for i, name in enumerate(self.names) if name]

    @cached_property
    def _reported_inputs(self) -> list[tuple[int, str, str]]:
        """Return the inputs that every call describes."""
        silent = [given and name not in self.always for name, given in zip(self.names, self.parameters or ())]
        return [one for one in self._names_shown if not silent[one[0]]]

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
        written = self.run.written if isinstance(self.run, GatheredProgram) else self.written
        refused = call_refusal(args, sorted(written), self.names) if written and not traced else None
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
        return args if isinstance(self.run, GuardedProgram | GatheredProgram) else unwrap_arguments(args, self.layouts)

    def _agree(self, args: Sequence[Any], refused: SpError | None = None) -> Message:
        wire, which, number, parameters = channel_of(self.ranks), 0, 0, self._parameters(args)
        if wire is not None:
            wire.check_thread()  # before the call counts
            which = wire.model([*compress(args, parameters)])
            wire.calls[self.subject, which] += 1
            number = wire.calls[self.subject, which]
        first = which not in self.called
        self.called.discard(which)  # until the ranks agree; a refused call is compared again in full
        again = bool(self.check_every) and number % self.check_every == 0
        fields = wire.earlier_fields() if wire is not None else {}
        error = not_compiled(self.error) or refused
        mine = Message(CALL_VERB, self.subject, number, fields, self.static_fields, error, model=which)
        with self._announce_failure(mine):
            fields.update(self._fields(args, first or again, wire, mine))
        has_raised = wire is not None and wire.raised is not None
        everyone = all_gather_messages(self.ranks, mine)
        raised, different = describe_raised(everyone or ()), describe_operation_mismatch(everyone or ())
        problem = different or (
            self._difference(everyone) if everyone is not None else wrap_error(self.error) or refused
        )
        if problem is None:
            self.called.add(which)
            return mine
        inner = self.run  # notify the inner groups, whose other ranks wait for this call
        while isinstance(inner, GuardedProgram):
            all_gather_messages(inner.ranks, STOP_VERB)
            inner = inner.run
        if raised and different is not None:
            if has_raised and len(involved_groups()) == 1:
                return self._agree(
                    args, refused
                )  # the others were in the step in which this rank has raised, and raise now
            abort_if_connected(wire, everyone or (), mine)
        raise (problem if different is not None else problem.with_context(raised)) from self.error

    def _fields(
        self, args: Sequence[Any], everything: bool, wire: ControlChannel | None, mine: Message
    ) -> dict[Any, str]:
        """Return the fields of this rank for a call.

        Values on an accelerator are compared at the next call, when the device has computed their checksums.

        Args:
            args: Arguments of the call.
            everything: If True, include all compared values, not only those that change with each call.
            wire: The control channel of the group; None without one.
            mine: The message of this rank.
        """
        compared = self.always | self.equal if everything else self.always
        looked_at = frozenset() if everything else self.arguments
        out: dict[Any, str] = {"mode": mode_fields()}
        away: defaultdict[torch.device, dict[Field, torch.Tensor]] = defaultdict(dict)
        for i, name, shown in self._names_shown if everything else self._reported_inputs:
            given = args[i]
            asked = self.error is None and (name in compared or name in looked_at) and isinstance(given, torch.Tensor)
            a = local_value(given) if asked else given
            where = f" in shards {given.sharding}" if isinstance(given, Sharded) else ""
            is_weight = isinstance(given, torch.nn.Parameter) and name not in self.always
            out[Field(FieldKind.WEIGHT if is_weight else FieldKind.INPUT, shown)] = _value_size(given) + where
            some = asked and name not in compared and not is_cheap_to_compare(a)
            a = sample_view(a, FEW_FLOATS, mine.number) if some else a
            if asked and wire is not None and is_on_accelerator(a):
                what = f"{Field(FieldKind.PART, shown) if some else shown} when it {mine}"
                away[a.device][Field(FieldKind.EARLIER, what)] = a
            elif some:
                out[Field(FieldKind.PART, shown)] = checksum(a)
            elif asked and (value := checksum(a)):
                out[Field(FieldKind.CHECKSUM, shown)] = value
        if wire is not None:
            found = ({name: x for name, x in each.items() if x.numel()} for each in away.values())
            wire.later += [(list(tensors), start_checksums(list(tensors.values()))) for tensors in found if tensors]
        return out

    def _difference(self, everyone: Sequence[Message]) -> SpError | None:
        """Return the error of ranks with different fields, or None. Fields of only some ranks are ignored."""
        failed = failure([one.error for one in everyone]) or (
            self.error if isinstance(self.error, RemoteError) else describe_mode_mismatch(everyone)
        )
        if failed is not None:
            return failed
        common = [_filter_message(one, {"mode", *self.options}.__contains__) for one in everyone]
        if other := describe_field_mismatch(common, OTHER_OPTIONS):
            return SpError("SP610", other)
        earlier = [_only_kind(one, FieldKind.EARLIER) for one in everyone]
        if other := describe_field_mismatch(earlier, OTHER_VALUES_EARLIER):
            return SpError("SP638", other)
        lines: list[str] = []
        if len({one.fields[PROGRAM] for one in everyone}) > 1:
            lines = self.program.first_difference(self.ranks)
        arguments, shared = (
            {_shown_name(n) for n in self.names if n in some} for some in (self.arguments, self.shared)
        )
        parts = describe_field_mismatch([_only_kind(one, FieldKind.PART) for one in everyone], OTHER_VALUES)
        held = set()
        if everyone[0].number > 1:
            held = {_shown_name(name) for name in self.names if name in self.equal - self.arguments - self.always}
        found = format_input_mismatch(everyone, lines, shared, arguments, held, self.takes_rows)
        if found is not None and found.code == "SP635" and self.leaves_partial:
            return SpError(found.code, found.cause, f"{found.fix} {LEFT_PARTIAL}")
        return found or (sharded_data_fix(parts, self.takes_rows) if parts else None)

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
        return announce_failures(channel_of(self.ranks), what, self.exchange_sources, self.lines)

    def _watch(self, out: Any, call: Message) -> None:
        """Compare the backward of a call over the ranks when it begins."""
        mine, leaves = Message(BACKWARD, call.subject, call.number, model=call.model), pytree.tree_leaves(out)
        for node, alone in find_backward_nodes(leaves, self.sharded, lambda: self._run_marked(mine)):
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
        for i, grad in [(i, grad) for i, grad in enumerate(grads if self.whole else ()) if i not in rows]:
            name = f"gradient of result {i}"
            if not isinstance(grad, torch.Tensor) or isinstance(grad, FakeTensor) or is_wrapper(grad):
                fields[name] = "none" if grad is None else ""
            elif wire is not None and is_on_accelerator(grad):
                earlier = Field(FieldKind.EARLIER, f"the {name} when it {mine}")
                wire.later.append(([earlier], start_cpu_copy(summarize(grad)[None])))
            else:
                fields[name] = _grad_field(grad)
        everyone = all_gather_messages(self.ranks, replace(mine, fields=fields))
        problem = failure_or_mismatch(everyone or ())
        if problem is None and (other := describe_field_mismatch(everyone or (), OTHER_GRADIENTS)):
            problem = SpError("SP637", other)
        if problem is not None:
            abort_if_connected(wire, everyone or (), mine)
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


def _filter_message(message: Message, wanted: Callable[[Any], bool]) -> Message:
    return replace(message, fields={name: value for name, value in message.fields.items() if wanted(name)})


def _only_kind(message: Message, kind: FieldKind) -> Message:
    return _filter_message(message, lambda name: isinstance(name, Field) and name.kind == kind)


OTHER_OPTIONS = "the ranks of this group were given different options, or are in different modes"
OTHER_VALUES_EARLIER = (
    "the ranks of this group were given different values at an earlier call; values on a device are compared one call "
    "later, so the steps since then are wrong"
)

LATER_CAUSE = (
    "They were equal when the program was compiled, and ranks with equal values share work. If they are meant to "
    "differ, compile the program with different values, or with sequence_parallel_linear='never'."
)

LEFT_PARTIAL = (
    "param_grads='partial' leaves gradients to a DDP or FSDP that averages them over these ranks, too. If it averages "
    "over other ranks, such as the mesh's axis of replicas, use param_grads='reduce'."
)


def format_input_mismatch(
    everyone: Sequence[Message], lines: Sequence[str], shared: Set[str], arguments: Set[str], held: Set[str], own: bool
) -> SpError | None:
    """Return the error of ranks whose programs or inputs differ, or None.

    Args:
        everyone: Message of each rank.
        lines: Lines of the ranks at the first difference of their programs.
        shared: Inputs that were equal at compilation.
        arguments: Inputs that must be replicated.
        held: Inputs that were equal at an earlier call.
        own: True if other inputs are shards.
    """
    inputs = _inputs_of(everyone)
    known = [name for name in inputs[0] if all(name in one for one in inputs)]
    if len(known) == min(map(len, inputs)):  # additional inputs are shown by the lines of the program
        inputs = [{name: one[name] for name in known} for one in inputs]
    first = inputs[0]
    names = [name for name in {**first, **inputs[-1]} if _has_differences([one.get(name) for one in inputs])]
    names.sort(key=lambda name: name in first and not first[name].is_tensor)  # tensors before symbols
    rows = format_rank_rows([{name: str(value) for name, value in one.items()} for one in inputs], names)
    heading = "What differs"
    same_program = len({one.fields[PROGRAM] for one in everyone}) == 1
    unlike = _describe_gradient_mismatch([one.fields.get(GRADIENTS, "").split("\n") for one in everyone])
    if unlike is not None and not names:
        return unlike
    same_names = all(one.keys() == first.keys() for one in inputs)
    sizes_differ = same_names and _describe_size_mismatch(inputs, known)
    if same_names and not sizes_differ and not same_program and lines:
        heading = "What differs first"
        rows = [line + (f"; {row}" if row else "") for line, row in zip(lines, rows)]
    rows = [row or "the same inputs as the others" for row in rows]
    given = f"the {len(inputs)} ranks of this group were given"
    if sizes_differ:
        numbers = bool(names) and not first[names[0]].is_tensor
        what = "different numbers" if numbers else "inputs of different sizes"
        return SpError("SP632", format_mismatch(f"{given} {what}", rows))
    if not same_names or not same_program:
        return SpError("SP631", format_mismatch(f"{given} different programs", rows, heading))
    if not names:
        return None
    cause = format_mismatch(f"{given} different values", rows)
    found = SpError("SP633", cause)
    if arguments >= set(names):
        found = sharded_data_fix(cause, own)
    elif held >= set(names):
        found = SpError("SP635", cause)
    return found if shared.isdisjoint(names) else SpError(found.code, cause, f"{found.fix} {LATER_CAUSE}")


def _describe_gradient_mismatch(wanted: Sequence[Sequence[str]]) -> SpError | None:
    """Return the error of ranks that require gradients of different inputs, or None."""
    names = dict.fromkeys(name for one in wanted for name in one if name and not all(name in other for other in wanted))
    if not names:
        return None
    rows = format_rank_rows([dict.fromkeys(set(names).intersection(one), "wanted") for one in wanted], list(names))
    return SpError("SP639", format_mismatch("the ranks of this group require gradients of different inputs", rows))


def _shown_name(name: str) -> str:
    return name.shown if isinstance(name, InputName) else name


class InputFields(NamedTuple):
    """Size or number of an input on a rank, and its checksum or ""."""

    size: str
    checksum: str

    @property
    def is_tensor(self) -> bool:
        """Return True if the input is a tensor with dims."""
        return "(" in self.size

    def __str__(self) -> str:
        return f"{self.size} with checksum {self.checksum}" if self.checksum else self.size


def _inputs_of(everyone: Sequence[Message]) -> list[dict[str, InputFields]]:
    """Return the described inputs of each rank. Parameters are included if all ranks describe them."""
    kinds = FieldKind.INPUT, FieldKind.WEIGHT
    named = [[key for key in one.fields if isinstance(key, Field) and key.kind in kinds] for one in everyone]
    common = set.intersection(*map(set, named))
    return [
        {
            key.name: InputFields(one.fields[key], one.fields.get(Field(FieldKind.CHECKSUM, key.name), ""))
            for key in keys
            if key.kind == FieldKind.INPUT or key in common
        }
        for one, keys in zip(everyone, named)
    ]


def _describe_size_mismatch(inputs: Sequence[Mapping[str, InputFields]], names: Sequence[str]) -> bool:
    return len({tuple(one[name].size for name in names) for one in inputs}) > 1


def _has_differences(values: Sequence[InputFields | None]) -> bool:
    """Return True if the inputs differ. A missing checksum equals any checksum."""
    sizes, sums = ({value and value[i] for value in values} for i in range(2))
    return len(sizes) > 1 or len({one for one in sums if one}) > 1


def _value_size(a: Any) -> str:
    """Return the shape of a tensor, or the value of a Python scalar.

    Dynamo passes a Python float as a tensor without dims.
    """
    if isinstance(a, torch.Tensor) and a.ndim == 0 and a.device.type == "cpu":
        return str(a.item())
    return str(tuple(a.shape)) if isinstance(a, torch.Tensor) else str(a)
