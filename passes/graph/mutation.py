"""Find the arguments that an ATen op mutates, and its functional form.

x.add_(y)     mutates x; the new value of x is add(x, y)
x.copy_(y)    mutates x; the new value of x is y

The functional form of an in-place op returns the new value in place of writing it: add for add_.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import WriteError, node_line
from sp_compile.lowering.torch_compat import OpOverload, schema_of, storage_of

from .call import collect_nodes, is_tensor

aten = torch.ops.aten

# function of (args, kwargs, emit) that returns the new value of a mutated argument; emit(op, *args) adds a call
NewValue = Callable[[Any, Any, Callable[..., Node]], Node]

_NORM_OPS = [aten.batch_norm, aten.native_batch_norm, aten._batch_norm_impl_index, aten.cudnn_batch_norm]
_UPDATE_OPS = [aten.batch_norm_update_stats, aten.batch_norm_gather_stats, aten.batch_norm_gather_stats_with_counts]
# Ops that mutate running statistics although their schema does not declare it, by the argument that enables it. No
# gradient passes through these writes.
SILENT_WRITERS: dict[OpOverload, str] = {
    **{op.default: "training" for op in (*_NORM_OPS, aten.miopen_batch_norm)},
    **{op.default: "input" for op in _UPDATE_OPS},
    aten.instance_norm.default: "use_input_stats",
}


@dataclass(frozen=True)
class Mutation:
    """Arguments that an in-place op mutates, and the computation of the new value."""

    targets: list[Node]  # mutated arguments
    value: NewValue | None  # computes the new value of the only target; None if the op has no functional form
    returns_target: bool  # True if the op returns the target itself


def is_mutation(node: Node) -> bool:
    """Return True if the op of the node mutates an argument."""
    op = node.target
    # Norms that write running statistics, in training only, though their schema does not declare it.
    if op in SILENT_WRITERS and _mutated_arguments(op, node.args, node.kwargs):
        return True
    return isinstance(op, OpOverload) and schema_of(op).is_mutable


def _mutated_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Node]:
    """Return the arguments that a call mutates according to its schema or to `SILENT_WRITERS`.

    The latter are norms that write running statistics without declaring it, if the argument in the table enables it.
    """
    arguments = schema_of(op).arguments
    passed = {**{argument.name: x for argument, x in zip(arguments, args)}, **kwargs}
    writes_statistics = op in SILENT_WRITERS and passed[SILENT_WRITERS[op]]
    undeclared = ("running_mean", "running_var") if writes_statistics else ()
    names = [a.name for a in arguments if a.is_write or a.name in undeclared]
    return collect_nodes([passed.get(name) for name in names])


def is_view_change(node: Node) -> bool:
    """Return True if the op changes only the shape of its argument in place, as x.unsqueeze_(0) does."""
    return is_mutation(node) and torch.Tag.inplace_view in node.target.tags


def is_written(node: Node) -> bool:
    """Return True if a user mutates the value of this call in place, as a custom op without functional form does.

    Other users then read the mutated value, so that no pass may insert a copy between the two. Inputs of the graph do
    not count: they are written back once, at the end of the program.
    """
    users = [user for user in node.users if is_mutation(user)] if node.op == "call_function" else []
    return any(node in _mutated_arguments(user.target, user.args, user.kwargs) for user in users)


def can_replace_copy(copy: Node, source: Node) -> bool:
    """Return True if `source` can replace `copy`: no result then shares memory with an input or another result.

    Callers may write to a result of the graph.
    """

    def storages(nodes: Iterable[Node]) -> set[int]:
        """Return the identities of the storages of strided tensors."""
        values = [node.meta["val"] for node in nodes if is_tensor(node)]
        return {storage_of(value) for value in values if value.layout == torch.strided}

    results = storages(copy.graph.output_node().all_input_nodes)
    inputs = storages(node for node in copy.graph.nodes if node.op in ("placeholder", "get_attr"))
    return storages([copy]).isdisjoint(results) or storages([source]).isdisjoint(results | inputs)


def is_pure(node: Node) -> bool:
    """Return True if the node has no mutation, random draw or other side effect.

    Such a node may be erased if it has no users, and may replace another node with the same call.
    """
    if node.op == "get_attr":
        return True
    if is_written(node):
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return not is_mutation(node) and not is_random and not node.is_impure()


def to_positional(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return `args`, extended by the arguments in `kwargs` that follow them in the schema without a gap.

    A caller can then unpack them, whichever way the program has passed them.
    """
    arguments = schema_of(target).arguments if isinstance(target, OpOverload) else []
    later_names = takewhile(kwargs.__contains__, (argument.name for argument in arguments[len(args) :]))
    return (*args, *(kwargs[name] for name in later_names))


def find_mutation(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mutation:
    """Return what `node` mutates if it is called with `args` and `kwargs`, and how to compute the new value.

    Raises:
        WriteError: If the op mutates several tensors and returns some of them: the schema does not declare which.
    """
    targets = _mutated_arguments(node.target, args, kwargs)
    returns_target = any(result.alias_info is not None for result in schema_of(node.target).returns)
    if returns_target and len(targets) != 1:
        raise WriteError("SP226", f"{node.name}: {node.target} at {node_line(node)} changes several tensors in place.")
    writes_first = bool(args) and targets == [args[0]]  # only its first argument
    value = _new_value_function(node.target) if writes_first else None
    return Mutation(targets, value, returns_target)


@cache
def functional_form(target: OpOverload) -> OpOverload | None:
    """Return the functional overload of an in-place op (aten.add_.Tensor -> aten.add.Tensor), or None."""
    if target.namespace != "aten":
        return None
    packet = getattr(aten, _functional_name(schema_of(target).name.split("::")[1]), None)
    for overload in packet.overloads() if packet else ():
        candidate = getattr(packet, overload)
        if not schema_of(candidate).is_mutable and _parameter_types(candidate) == _parameter_types(target):
            return candidate
    return None


def _parameter_types(op: OpOverload) -> list[tuple[str, str]]:
    """Return the name and type of each parameter, by which an in-place op matches its functional form."""
    return [(a.name, str(a.type)) for a in schema_of(op).arguments]


def _functional_name(name: str) -> str:
    """Return the name of the functional op (add_ -> add, __iand__ -> __and__), or "" for other names."""
    if name == "normal_":
        return "normal_functional"
    if name.startswith("__i") and name.endswith("__"):
        return "__" + name[3:]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else ""


def _new_value_function(target: OpOverload) -> NewValue | None:
    """Return the function that computes what an in-place op writes to its first argument, or None."""
    if target in _NEW_VALUES:
        return _NEW_VALUES[target]
    op = functional_form(target)
    if op is None:
        return None
    return lambda args, kwargs, emit: emit(op, *args, **kwargs)


def _copy_value(args: Any, kwargs: Any, emit: Callable[..., Node]) -> Node:
    """Return the source of a copy_ on the device of its target; the caller broadcasts it, and casts it if it must."""
    source, target = args[1], args[0].meta["val"]
    if source.meta["val"].device != target.device:
        source = emit(aten.to.device, source, target.device, target.dtype)
    return source


def _draw_value(args: Any, kwargs: Any, emit: Callable[..., Node], op: OpOverload) -> Node:
    """Emit `op`, the functional form of an in-place draw, and return the drawn values.

    The target, args[0], is detached: no gradient passes to it, since its old values are overwritten.
    """
    return emit(op, emit(aten.detach.default, args[0]), *args[1:], **kwargs)


def _bernoulli_value(args: Any, kwargs: Any, emit: Callable[..., Node]) -> Node:
    """Emit the functional form of target.bernoulli_(p) for a number p. A trace omits p if it is the default, 0.5."""
    given = dict(kwargs)
    target, p = args if len(args) == 2 else (args[0], given.pop("p", 0.5))
    return _draw_value((target, p), given, emit, aten.bernoulli.p)


_NEW_VALUES: dict[OpOverload, NewValue] = {
    aten.copy_.default: _copy_value,
    aten.zero_.default: lambda args, kwargs, emit: emit(aten.full_like.default, args[0], 0),
    aten.fill_.Scalar: lambda args, kwargs, emit: emit(aten.full_like.default, *args),
    aten.fill_.Tensor: lambda args, kwargs, emit: args[1],
    aten.normal_.default: partial(_draw_value, op=aten.normal_functional.default),
    aten.bernoulli_.float: _bernoulli_value,
    aten.bernoulli_.Tensor: partial(_draw_value, op=aten.bernoulli.Tensor),
}
