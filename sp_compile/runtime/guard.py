"""Check before each call and each backward that all ranks run the same program, call, mode and inputs.

There is one exchange of a few bytes a call, before the compiled graph: each rank announces the call with a `Message`. A
rank that could not compile takes part as well, so that its error reaches the others instead of blocking them in a
collective. A program with several groups has one guard for each, nested: `run` of the outer one is the inner one.

One exchange for all calls of a step would not be enough, even if the calls are those of the last step. If one rank then
makes another call, the others are already in a collective. Interrupting it ends the group, and a different collective
of the same size would be paired with it.

Checksums of values on an accelerator are complete only after the device has computed them. They are added to
`channel.later` and sent with the next call, as its `earlier` values. An alias error is that of a call that changes an
input in place whose memory another input shares.

    GuardedProgram(run, ranks, ...)(*args)      # exchange a message with ranks, then run(*args)
"""

from __future__ import annotations

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
from sp_compile.lowering.collectives.checksums import checksum, sample_view, start_checksums, start_cpu_copy, summarize
from sp_compile.lowering.collectives.shard_views import refuse_transforms
from sp_compile.lowering.collectives.sharded import Sharded
from sp_compile.lowering.torch_compat import FakeTensor, find_backward_nodes, is_wrapper, pytree
from sp_compile.passes.boundary.graph_boundary import GraphBoundary
from sp_compile.passes.graph.provenance import ExchangeSource
from sp_compile.passes.sharding.sharded_work import ShardedWork
from sp_compile.runtime.control.channel import ControlChannel, channel_of
from sp_compile.runtime.control.failures import abort_if_connected, announce_failures, mark_agreed
from sp_compile.runtime.control.message import (
    BACKWARD_VERB,
    CALL_VERB,
    STOP_MESSAGE,
    EarlierValue,
    FieldValue,
    InputRecord,
    Message,
    ProgramRecord,
)
from sp_compile.runtime.control.watch import involved_channels, mark_running

from .agreement import (
    all_gather_messages,
    describe_field_mismatch,
    describe_operation_mismatch,
    describe_raised,
    error_to_send,
    find_mismatch,
    format_mismatch,
    merge_failures,
    wrap_error,
)
from .eager_fallback import count_step_call
from .fingerprint import ProgramDigest
from .input_checks import FEW_FLOATS, ComparedInputs, is_cheap_to_compare, is_on_accelerator, local_value
from .input_mismatch import describe_by_rank, find_input_mismatch
from .settings_digest import mode_text
from .sharded_values import GatheredProgram, find_alias_error, has_sharded_args, has_traced_args, unwrap_arguments

OTHER_GRADIENTS = SpError(
    "SP637", "the ranks of this group run the backward with different gradients of the results of the program"
)
OTHER_OPTIONS = "the ranks of this group were given different options, or are in different modes"
OTHER_VALUES_EARLIER = (
    "the ranks of this group were given different values at an earlier call; values on a device are compared one call "
    "later, so the steps since then are wrong"
)
SPLIT_ON_SOME = "backend='sp' could split this program on some ranks of this group only"
LEFT_PARTIAL = (
    "param_grads='partial' requires that DDP or FSDP averages the gradients over these ranks. Either none does, or "
    "weights were changed on some ranks only: "
)
LEFT_PARTIAL_FIX = (
    "Apply DDP or fully_shard over a group that includes these ranks, not over the mesh's axis of replicas alone, or "
    "use param_grads='reduce'. "
)


def _refuse_second_backward(*_: Any) -> None:
    """Raise SpError (SP325): a gradient of a compiled program is differentiated again."""
    raise SpError("SP325", "double backward through a compiled program is not supported by torch.compile.")


@dataclass(frozen=True)
class ProgramInfo:
    """Facts about a program that the guards of all its groups share."""

    subject: str = "a program"  # name of the program in messages
    options: Mapping[str, str] = field(default_factory=dict)  # from `settings_fields`
    training: str = ""  # the modes of the model, from `describe_training`
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
    ranks: Ranks  # the group whose ranks agree
    info: ProgramInfo  # facts of the program that the guards of all groups share
    program: ProgramDigest  # must be equal on every rank
    inputs: ComparedInputs  # the arguments that are compared
    error: Exception | None = None  # the error of compilation, which every call raises
    boundary: GraphBoundary = field(default_factory=GraphBoundary)  # layouts of inputs, sharded results, mutations
    backward: bool = False  # compare the backwards as well
    gradients: bool = False  # compare gradients of results that are not sharded
    called: set[int] = field(default_factory=set)  # numbers of the models whose ranks agreed on their last call
    parameters: Sequence[bool] | None = None  # flags of the parameters; None before the first call
    work: ShardedWork | None = None  # its work, to find parts of a step that every rank runs; None if not known

    @cached_property
    def _program_record(self) -> ProgramRecord:
        """Return the description of the program, which is a part of the message of every call."""
        info = self.info
        return ProgramRecord(
            options=info.options,
            digest=self.program.digest,
            is_split=not info.unsplit_reason,
            trained=self.inputs.trained,
            unsplit_reason=info.unsplit_reason,
            dtypes=self.inputs.dtypes,
            training=info.training,
        )

    @cached_property
    def _named_inputs(self) -> list[tuple[int, str]]:
        """Return index and name of each input whose size ranks compare; the others have no name."""
        return [(i, name) for i, name in enumerate(self.inputs.names) if name]

    @cached_property
    def _described_inputs(self) -> list[tuple[int, str]]:
        """Return index and name of the inputs that every call describes.

        These are all but parameters, and the parameters whose values every call compares (`inputs.always`).
        """
        is_parameter = self.parameters or ()
        return [(i, name) for i, name in self._named_inputs if not is_parameter[i] or name in self.inputs.always]

    @cached_property
    def _is_tested(self) -> list[bool]:
        """Return for each input whether a call tests it for a fake or sharded value.

        These are all but parameters, and the first parameter, since either all parameters are fake or none is.
        """
        parameters = self.parameters or ()
        return [not is_parameter or not any(parameters[:i]) for i, is_parameter in enumerate(parameters)]

    def __call__(self, *args: Any) -> Any:
        """Compare the call over the ranks, then run the program."""
        refuse_transforms()
        # The arguments to test for fake or sharded values: all in the first call, then all but most parameters.
        tested_args = args if self.parameters is None else [*compress(args, self._is_tested)]
        is_traced = has_traced_args(tested_args)  # a call with fake tensors runs nothing, so no message is exchanged
        # Agree on the call. `written` are the inputs that the program changes in place; those of an unsplit program are
        # known from its earlier calls.
        written = self.run.written if isinstance(self.run, GatheredProgram) else self.boundary.written
        alias_error = find_alias_error(args, sorted(written), self.inputs.names) if written and not is_traced else None
        with mark_agreed():  # all ranks raise the SpError of this block, so it is not published again
            call = self._agree(args, alias_error) if self.ranks.n > 1 and not is_traced else Message(CALL_VERB)
        if alias_error is not None:  # single rank only; several ranks raise it together in _agree
            raise alias_error
        if self.error is not None:
            raise self.error
        # Run the program.
        assert self.run is not None
        run_args: Sequence[Any] = args
        if has_sharded_args(tested_args) and not isinstance(
            self.run, GuardedProgram | GatheredProgram
        ):  # these unwrap them
            run_args = unwrap_arguments(args, self.boundary.layouts)
        if is_traced:
            return self.run(*run_args)
        if self.work is not None:
            count_step_call(self, self.work, self.ranks.n)
        with self._run_marked(call):
            out = self.run(*run_args)
        if self.backward and torch.is_grad_enabled():
            self._register_backward_check(out, call)
        return out

    def _agree(self, args: Sequence[Any], alias_error: SpError | None = None) -> Message:
        """Announce this call to the ranks, and return its message after all have agreed on it.

        A problem is the error that the call raises: the ranks do not agree, or one of them has failed. It is a mismatch
        of operations if the ranks announce different ones, such as calls with other numbers.

        Args:
            args: Arguments of the call.
            alias_error: Error of a call that changes an input in place whose memory another input shares, or None.

        Raises:
            SpError: On every rank, if the ranks do not agree or one has failed.
        """
        channel = channel_of(self.ranks)
        mine = self._count_call(args, channel, alias_error)
        has_raised = channel is not None and channel.raised is not None  # this rank, since the last exchange
        messages = all_gather_messages(self.ranks, mine)
        if messages is None:  # the messages are equal; all ranks may have one error, received in another group
            problem, operation_mismatch = wrap_error(self.error) or alias_error, None
        else:
            operation_mismatch = describe_operation_mismatch(messages)
            problem = operation_mismatch or self._difference(messages)
        if problem is None:
            self.called.add(mine.model)
            return mine
        # `connected` are the groups of this guard and of its inner guards, whose ranks wait for this call: inform the
        # latter that it does not take place.
        for ranks in self.connected[1:]:
            all_gather_messages(ranks, STOP_MESSAGE)
        # A rank that has raised in a step, and whose program caught it, announces its next call while the other ranks
        # are still in that step, such as at its backward. `raised` is the text of such exceptions, "" without one.
        raised = describe_raised(messages or ())
        if raised and operation_mismatch is not None:
            if has_raised and len(involved_channels()) == 1:
                # This is the rank that has raised. The others raise now, and then announce the same call as this rank:
                # announce it again.
                return self._agree(args, alias_error)
            # With several groups, ranks of another one may wait in the program for this rank: end the groups.
            abort_if_connected(channel, messages or (), mine)
        if operation_mismatch is None:  # the error of a mismatch has the exceptions already
            problem = problem.with_context(raised)
        own = self.error
        if isinstance(own, SpError) and own.code == problem.code:  # the problem has its text: print it once
            raise problem.with_traceback(own.__traceback__) from own.__cause__
        raise problem from own

    def _count_call(self, args: Sequence[Any], channel: ControlChannel | None, alias_error: SpError | None) -> Message:
        """Count this call, and return the message that announces it; the arguments are those of `_agree`."""
        if self.parameters is None:
            self.parameters = [isinstance(a, torch.nn.Parameter) for a in args]
        subject, check_every = self.info.subject, self.info.check_every
        # The numbers of the model, which its parameters identify, and of this call of it.
        model, number = (0, 0) if channel is None else channel.count_call(subject, [*compress(args, self.parameters)])
        compares_all = model not in self.called or (check_every > 0 and number % check_every == 0)
        self.called.discard(model)  # until the ranks agree: the call after an error is compared in full
        earlier = {} if channel is None else channel.take_earlier()
        error = error_to_send(self.error) or alias_error
        call = Message(CALL_VERB, subject, number, model=model)
        with self._announce_failure(call):
            inputs = self._describe_inputs(args, compares_all, channel, call)
        return replace(
            call, mode=mode_text(), program=self._program_record, inputs=inputs, earlier=earlier, error=error
        )

    def _describe_inputs(
        self, args: Sequence[Any], compares_all: bool, channel: ControlChannel | None, call: Message
    ) -> dict[str, InputRecord]:
        """Return the records of the inputs of a call, by name.

        A record has the size of an input and, if its value is compared, a checksum of all its elements or of a sample.
        Every call compares the inputs in `inputs.always`, and those in `inputs.arguments`, of large ones only a sample.
        With `compares_all` it compares those in `inputs.equal`, too, and no samples. The checksum of a value on an
        accelerator is added to `channel.later` instead, and compared at the next call.

        Args:
            args: Arguments of the call.
            compares_all: If True, compare all values of `ComparedInputs` completely.
            channel: The channel of the group, or None.
            call: The announcement of the call.
        """
        inputs, records = self.inputs, {}
        # Names of the inputs that are compared completely, and of those of which a sample is sufficient.
        compared = inputs.always | inputs.equal if compares_all else inputs.always
        sampled = frozenset() if compares_all else inputs.arguments
        on_device: defaultdict[torch.device, dict[EarlierValue, torch.Tensor]] = defaultdict(dict)
        # Parameters that `inputs.always` does not name are described only if all inputs are compared.
        for i, name in self._named_inputs if compares_all else self._described_inputs:
            arg, checksums = args[i], {"checksum": "", "sample": ""}
            size, is_scalar = _describe_size(arg)
            if self.error is None and (name in compared or name in sampled) and isinstance(arg, torch.Tensor):
                value = local_value(arg)
                is_sample = name not in compared and not is_cheap_to_compare(value)
                if is_sample:
                    value = sample_view(value, FEW_FLOATS, call.number)
                if channel is None or not is_on_accelerator(value):
                    checksums["sample" if is_sample else "checksum"] = checksum(value)
                elif value.numel():
                    key = EarlierValue("sample" if is_sample else "input", name, str(call))
                    on_device[value.device][key] = value
            is_weight = isinstance(arg, torch.nn.Parameter) and name not in inputs.always
            records[name] = InputRecord(size, **checksums, weight=is_weight, is_scalar=is_scalar)
        if channel is not None:
            for values in on_device.values():
                channel.later.append((list(values), start_checksums(list(values.values()))))
        return records

    def _difference(self, messages: Sequence[Message]) -> SpError | None:
        """Return the error of ranks that announce calls with different contents, or None.

        The error is that of the first cause found: a failed rank, then unsplit programs, options, values of earlier
        calls, programs and inputs. Values that only some ranks send are ignored.
        """
        failed = merge_failures([message.error for message in messages])
        if failed is not None:
            return failed
        if isinstance(self.error, RemoteError):  # of a rank of another group; ranks do not send it again
            return self.error
        programs = [message.program for message in messages]
        if len({program.is_split for program in programs}) > 1:
            rows = ["sharded" if program.is_split else f"not sharded: {program.unsplit_reason}" for program in programs]
            return SpError("SP609", format_mismatch(SPLIT_ON_SOME, rows))
        modes = [{**message.program.options, "mode": message.mode} for message in messages]
        cause = describe_field_mismatch(modes, OTHER_OPTIONS)
        if cause:
            training = describe_by_rank([message.program.training for message in messages])
            return SpError("SP610", f"{training}: {cause}" if training else cause)
        earlier = [{str(key): value for key, value in message.earlier.items()} for message in messages]
        cause = describe_field_mismatch(earlier, OTHER_VALUES_EARLIER)
        if cause:
            return SpError("SP638", cause)
        is_same_program = len({message.program.digest for message in messages}) == 1
        # A line of each rank's program, where they differ first. All ranks call this, as all have the same messages.
        lines = [] if is_same_program else self.program.first_difference(self.ranks)
        has_shards = bool(self.boundary.own_rows)  # each rank passes its rows of some inputs
        mismatch = find_input_mismatch(messages, lines, self.inputs, has_shards)
        # Different weights (SP635) may be due to partial gradients that the option param_grads='partial' leaves.
        if mismatch is not None and mismatch.code == "SP635" and self.info.leaves_partial:
            return SpError(mismatch.code, f"{LEFT_PARTIAL}{mismatch.cause}", f"{LEFT_PARTIAL_FIX}{mismatch.fix}")
        return mismatch

    @cached_property
    def connected(self) -> list[Ranks]:
        """Return the groups of this guard and of its inner guards; an exception in the program ends them all."""
        return [self.ranks, *(self.run.connected if isinstance(self.run, GuardedProgram) else [])]

    @contextmanager
    def _run_marked(self, operation: Message) -> Iterator[None]:
        """Mark that the program runs `operation` in the context, and publish its exceptions to waiting ranks."""
        with self._announce_failure(operation), mark_running(self.connected):
            yield

    def _announce_failure(self, operation: Message) -> AbstractContextManager[None]:
        """Return a context that publishes exceptions of this rank to the ranks of the group."""
        return announce_failures(channel_of(self.ranks), operation, self.info.exchange_sources, self.info.lines)

    def _register_backward_check(self, out: Any, call: Message) -> None:
        """Register autograd hooks on the results that compare the backward over ranks when it begins.

        Args:
            out: The results of the call.
            call: The announcement of the call.
        """
        mine, leaves = Message(BACKWARD_VERB, call.subject, call.number, model=call.model), pytree.tree_leaves(out)
        # The autograd nodes at which the backward of the program begins, each with the indices of the results of which
        # a rank has only its rows. Their backwards run inside of `_run_marked`, which publishes exceptions.
        context = partial(self._run_marked, mine)
        for node, row_results in find_backward_nodes(leaves, self.boundary.rows, context, _refuse_second_backward):
            node.register_prehook(partial(self._check_backward, mine, row_results))

    @torch.compiler.disable
    def _check_backward(self, mine: Message, row_results: frozenset[int], grads: Sequence[Any]) -> None:
        """Check at the start of a backward that all ranks run it, with equal gradients of replicated results.

        Each rank continues with the gradients of its rows only, so that different ones would not be noticed later.

        Args:
            mine: The announcement of the backward.
            row_results: Indices of the results of which a rank has only its rows.
            grads: Gradients of the results.

        Raises:
            SpError: On every rank, if the gradients differ or the ranks run different operations.
        """
        refuse_transforms(grads)
        channel, fields = channel_of(self.ranks), dict[str, FieldValue]()
        for i, grad in enumerate(grads if self.gradients else ()):
            if i in row_results:
                continue
            name, gradient_name = f"result {i}", f"gradient of result {i}"
            if not isinstance(grad, torch.Tensor) or isinstance(grad, FakeTensor) or is_wrapper(grad):
                fields[gradient_name] = "none" if grad is None else ""  # values without plain memory are not compared
            elif channel is not None and is_on_accelerator(grad):  # compared at the next call
                key = EarlierValue("gradient", name, str(mine))
                channel.later.append(([key], start_cpu_copy(summarize(grad)[None])))
            else:
                fields[gradient_name] = _grad_field(grad)
        messages = all_gather_messages(self.ranks, replace(mine, fields=fields)) or ()
        mismatch = find_mismatch(messages, OTHER_GRADIENTS)
        if mismatch is not None:
            abort_if_connected(channel, messages, mine)
            raise mismatch


def world() -> Any:
    """Return the default process group, or None without one."""
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


@dataclass(eq=False)
class WorldProgram:
    """Program that may run only with the default process group that it was compiled for.

    Raises:
        SpError: If the default process group has changed, since the ranks of its collectives then no longer exist.
    """

    run: Callable[..., Any]  # the compiled program
    world: Any = field(default_factory=world)  # the default process group at compilation

    def __call__(self, *args: Any) -> Any:
        """Check the default process group, then run the program."""
        if world() is not self.world:
            raise SpError("SP681", "the model was compiled for another default process group.")
        return self.run(*args)


def _grad_field(grad: torch.Tensor) -> FieldValue:
    """Return the summary of a gradient on the CPU, which `is_close` compares up to rounding.

    It has the norm and two projections of the elements (`summarize`). For one element, as of a loss, it has the
    absolute value and the value, which take no tensor operations.
    """
    if grad.numel() == 1 and not grad.is_complex():
        value = grad.item()
        return float(abs(value)), float(value)
    return start_cpu_copy(summarize(grad)[None]).read()[0]  # a batch of one summary


def _describe_size(value: Any) -> tuple[str, bool]:
    """Return the size of an input that ranks compare, and whether it is a Python scalar.

    The size is the shape and the sharding of a tensor, or the value of a scalar. Dynamo passes a Python float as a
    tensor without dims.
    """
    if not isinstance(value, torch.Tensor):
        return str(value), True
    if value.ndim == 0 and value.device.type == "cpu":
        return str(value.item()), True
    return f"{tuple(value.shape)}" + (f" in shards {value.sharding}" if isinstance(value, Sharded) else ""), False
