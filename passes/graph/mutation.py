"""What a mutating ATen op changes, and its functional form."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.errors import WriteError, node_line
from sp_compile.lowering.torch_compat import OpOverload, schema_of

from .call import collect_nodes

aten = torch.ops.aten

NewValue = Callable[[Any, Any, Callable[..., Node]], Node]


_NORM_OPS = [aten.batch_norm, aten.native_batch_norm, aten._batch_norm_impl_index, aten.cudnn_batch_norm]
_UPDATE_OPS = [aten.batch_norm_update_stats, aten.batch_norm_gather_stats, aten.batch_norm_gather_stats_with_counts]
SILENT_WRITERS: dict[OpOverload, str] = {
    **{op.default: "training" for op in (*_NORM_OPS, aten.miopen_batch_norm)},
    **{op.default: "input" for op in _UPDATE_OPS},
    aten.instance_norm.default: "use_input_stats",
}
"""Ops that write running statistics, which their schema does not say, and the argument that has them do it.

No gradient passes through these.
"""


@dataclass(frozen=True)
class Mutation:
    """What an in-place op changes, and how to compute the new value."""

    targets: list[Node]
    value: NewValue | None  # makes the new value of the only target; None where the op has no functional form
    returns_target: bool  # the op's result is the target itself


def is_mutation(node: Node) -> bool:
    """Does the node's op change an argument?"""
    op = node.target
    silently = op in SILENT_WRITERS and bool(_mutated_arguments(op, node.args, node.kwargs))
    return silently or (isinstance(op, OpOverload) and schema_of(op).is_mutable)


def _mutated_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Node]:
    """What a call changes: what the op's schema says, and what `SILENT_WRITERS` does."""
    arguments = schema_of(op).arguments
    given = {**{argument.name: x for argument, x in zip(arguments, args)}, **kwargs}
    unsaid = ("running_mean", "running_var") if op in SILENT_WRITERS and given[SILENT_WRITERS[op]] else ()
    names = [a.name for a in arguments if a.is_write or a.name in unsaid]
    return collect_nodes([given.get(name) for name in names])


def is_view_change(node: Node) -> bool:
    """x.t_(), x.unsqueeze_(0): the shape of x changes, its memory does not."""
    return is_mutation(node) and torch.Tag.inplace_view in node.target.tags


def is_written(node: Node) -> bool:
    """Does a user change the node's value in place (a custom op)? Then nothing may be put between the two.

    What the node computes is then not what its other users read. Inputs do not count: they are written back once, at
    the end of the program.
    """
    users = [user for user in node.users if is_mutation(user)] if node.op == "call_function" else []
    return any(node in _mutated_arguments(user.target, user.args, user.kwargs) for user in users)


def is_pure(node: Node) -> bool:
    """Is the value what the call says, whenever it is made: no mutation, no random draw, no state change?

    Such a node may be dropped when nothing reads it, and stand for another one with the same call.
    """
    if node.op == "get_attr":
        return True
    if is_written(node):
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not is_mutation(node) and not random and not node.is_impure()


def to_positional(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`args` with the leading ones of `kwargs` put in their places."""
    args = tuple(args)
    if isinstance(target, OpOverload):
        for argument in schema_of(target).arguments[len(args) :]:
            if argument.name not in kwargs:
                break
            args += (kwargs[argument.name],)
    return args


def find_mutation(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mutation:
    """What `node`, called with `args` and `kwargs`, changes.

    Raises SpError where the op returns some of several changed tensors: which is which can not be told.
    """
    schema = schema_of(node.target)
    targets = _mutated_arguments(node.target, args, kwargs)
    aliased = [r for r in schema.returns if r.alias_info is not None]
    if aliased and len(targets) != 1:
        raise WriteError("SP226", f"{node.name}: {node.target} at {node_line(node)} changes several tensors.")
    value = _new_value(node.target) if args and targets == [args[0]] else None
    return Mutation(targets, value, bool(aliased))


@cache
def functional_form(target: OpOverload) -> OpOverload | None:
    """aten.add_.Tensor -> aten.add.Tensor; None where there is none."""
    if target.namespace != "aten":
        return None
    base = _functional_name(schema_of(target).name.split("::")[1])
    packet = getattr(aten, _OTHER_NAMES.get(base, base), None) if base else None
    for overload in packet.overloads() if packet else ():
        found = getattr(packet, overload)
        if not schema_of(found).is_mutable and _schema_signature(found) == _schema_signature(target):
            return found
    return None


def _schema_signature(op: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema_of(op).arguments]


# Where the op without underscore is another one.
_OTHER_NAMES = {"normal": "normal_functional"}


def _functional_name(name: str) -> str | None:
    if name.startswith("__i") and name.endswith("__"):
        return "__" + name[3:]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else None


def _new_value(target: OpOverload) -> NewValue | None:
    if target in _NEW_VALUES:
        return _NEW_VALUES[target]
    op = functional_form(target)
    if op is None:
        return None
    return lambda args, kwargs, emit: emit(op, *args, **kwargs)


def _copy_value(args: Any, kwargs: Any, emit: Callable[..., Node]) -> Node:
    source, target = args[1], args[0].meta["val"]
    if source.meta["val"].device != target.device:
        source = emit(aten.to.device, source, target.device, target.dtype)
    return source


def _draw_value(args: Any, kwargs: Any, emit: Callable[..., Node], op: OpOverload) -> Node:
    """Without the gradient that the tensor had, which is zero from here on: op itself has no derivative."""
    return emit(op, emit(aten.detach.default, args[0]), *args[1:], **kwargs)


_NEW_VALUES: dict[OpOverload, NewValue] = {
    aten.copy_.default: _copy_value,
    aten.zero_.default: lambda args, kwargs, emit: emit(aten.full_like.default, args[0], 0),
    aten.fill_.Scalar: lambda args, kwargs, emit: emit(aten.full_like.default, *args),
    aten.fill_.Tensor: lambda args, kwargs, emit: args[1],
    aten.normal_.default: partial(_draw_value, op=aten.normal_functional.default),
    aten.bernoulli_.float: partial(_draw_value, op=aten.bernoulli.p),
    aten.bernoulli_.Tensor: partial(_draw_value, op=aten.bernoulli.Tensor),
}
