"""Ops that read nothing of an operand but its dtype, device or number become ops that say so; aliases become the op.

    new_zeros(x, size)   ->  zeros(size, dtype, device)        x need not be whole, nor anywhere
    type_as(x, y)        ->  to(x, dtype of y)
    x.double().float()   ->  clone(x)                          where x is float32, or whatever is exact
    squeeze(x)           ->  squeeze(x, the dims of size 1)    a rank with one row must not lose the dim
    cat([empty, x])      ->  clone(x)
    assert x's dtype     ->  nothing                           the trace knows it; a rank's shard has the same
    multiply(x, y)       ->  mul(x, y)                         torch has two names for one op
    hstack([x, y])       ->  cat([x, y], 1)                    and short ones for options of an op

Part of canonicalize; every entry keeps the value exactly. Leaves alone: what is not in the table.

Elements that repeat in place become a dim of their own, which regroups: repeats of a shard are a shard of repeats.

    repeat_interleave(x, k, 1)     (B, S, E) -> (B, S * k, E)
        ->  reshape(expand(unsqueeze(x, 2), (B, S, k, E)), (B, S * k, E))

Part of canonicalize, after attention has found its repeated heads. Bytes moved: none. Leaves alone: numbers of repeats
that are tensors, and repeats of the flattened operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import schema_of
from sp_compile.passes.base import Spelling, register
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call, shape_of
from sp_compile.passes.graph.sizes import size
from sp_compile.passes.sharding.matchers import uncast

aten = torch.ops.aten
NO_CALL = object()
CallForm = tuple[Any, tuple[Any, ...], dict[str, Any]]  # target, args, kwargs


@register
class Explicit(Spelling):
    """Rewrites every node that has a plainer spelling.

    Refuses none: what is not in the table is as plain as it can be.
    """

    provides = frozenset({"canonical", "explicit"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        changes = _by_one_name(gm)
        for node in list(gm.graph.nodes):
            spelling = _SPELLINGS[node.target](node) if node.target in _SPELLINGS else None
            if spelling is NO_CALL:
                gm.graph.erase_node(node)
            elif spelling is not None:
                before = node.all_input_nodes
                node.target, node.args, node.kwargs = spelling
                self.drop(*before)
            changes += spelling is not None
        return changes


def _by_one_name(gm: GraphModule) -> int:
    """Call the ops of a graph, and of the bodies of its regions, by the one name that they have here; how many."""
    found = [node for node in gm.graph.nodes if node.target in _ONE_NAME]
    for node in found:
        node.target = _ONE_NAME[node.target]
    if found:
        gm.recompile()
    bodies = [body for _, body in gm.named_children() if isinstance(body, GraphModule)]
    return len(found) + sum(map(_by_one_name, bodies))


def _made_like(target: Any, fill: bool = False) -> Any:
    def spell(node: Node) -> CallForm:
        value, call = node.meta["val"], Call(node)
        args = (call["size"], call["fill_value"]) if fill else (call["size"],)
        return target, args, {"dtype": value.dtype, "device": value.device}

    return spell


def _cast(node: Node) -> CallForm | None:
    value, source = node.meta["val"], Call(node).operands[0]
    if value.device != source.meta["val"].device:
        return None
    return aten.to.dtype, (source, value.dtype), {}


def _squeeze(node: Node) -> CallForm:
    source = Call(node).operands[0]
    ones = [d for d, s in enumerate(shape_of(source)) if s == 1]
    return aten.squeeze.dims, (source, ones), {}


def _cat(node: Node) -> CallForm | None:
    parts = [p for p in Call(node).operands if shape_of(p) != (0,)]
    alone = len(parts) == 1 and parts[0].meta["val"].dtype == node.meta["val"].dtype
    return (aten.clone.default, (parts[0],), {}) if alone else None


def _join(dim: int) -> Any:
    """Operands that have the dim already, one behind the other along it; vectors along their only one, by hstack."""

    def spell(node: Node) -> CallForm | None:
        ndim = node.meta["val"].ndim
        if any(x.meta["val"].ndim != ndim for x in Call(node).operands):
            return None
        return aten.cat.default, (node.args[0], min(dim, ndim - 1)), {}

    return spell


def _flip(dim: int) -> Any:
    return lambda node: (aten.flip.default, (node.args[0], [dim]), {})


def _tile(node: Node) -> CallForm:
    call = Call(node)
    ones = [1] * (call.ndim() - len(call["dims"]))
    return aten.repeat.default, (call.operands[0], [*ones, *call["dims"]]), {}


def _log_softmax(node: Node) -> CallForm:
    call = Call(node)
    return aten.log_softmax.int, (call.operands[0], call["dim"], call["dtype"]), {}


_ALIASES = {
    "absolute": aten.abs,
    "arctan2": aten.atan2,
    "clip": aten.clamp,
    "concat": aten.cat,
    "concatenate": aten.cat,
    "divide": aten.div,
    "greater": aten.gt,
    "greater_equal": aten.ge,
    "less": aten.lt,
    "less_equal": aten.le,
    "moveaxis": aten.movedim,
    "multiply": aten.mul,
    "negative": aten.neg,
    "not_equal": aten.ne,
    "special_exp2": aten.exp2,
    "special_expit": aten.sigmoid,
    "special_expm1": aten.expm1,
    "special_log1p": aten.log1p,
    "special_logsumexp": aten.logsumexp,
    "special_softmax": aten.softmax,
    "subtract": aten.sub,
    "swapaxes": aten.transpose,
    "swapdims": aten.transpose,
    "true_divide": aten.div,
}
"""Names of one op."""


def _taken(op: Any) -> list[tuple[str, bool]]:
    return [(str(argument.type), argument.kwarg_only) for argument in schema_of(op).arguments]


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, overload) for overload in packet.overloads()]


def _aliases() -> Iterator[tuple[Any, Any]]:
    """Each overload, and the one of the other name that takes the same."""
    for name, packet in _ALIASES.items():
        for alias in _overloads(getattr(aten, name)):
            same = [other for other in _overloads(packet) if _taken(other) == _taken(alias)]
            if same and not schema_of(alias).is_mutable:
                yield alias, same[0]


_ONE_NAME = dict(_aliases())

_SPELLINGS = {
    aten._assert_tensor_metadata.default: lambda node: NO_CALL,
    aten.cat.default: _cat,
    aten.dstack.default: _join(2),
    aten.fliplr.default: _flip(1),
    aten.flipud.default: _flip(0),
    aten.hstack.default: _join(1),
    aten.new_empty.default: _made_like(aten.empty.memory_format),
    aten.new_full.default: _made_like(aten.full.default, fill=True),
    aten.new_ones.default: _made_like(aten.ones.default),
    aten.new_zeros.default: _made_like(aten.zeros.default),
    aten.row_stack.default: _join(0),
    aten.special_log_softmax.default: _log_softmax,
    aten.squeeze.default: _squeeze,
    aten.tile.default: _tile,
    aten.to.dtype: lambda node: (aten.clone.default, (x,), {}) if (x := uncast(node)) is not None else None,
    aten.to.other: _cast,
    aten.type_as.default: _cast,
    aten.vstack.default: _join(0),
}


@register
class Repeats(Spelling):
    """Rewrites every repeat_interleave along a dim."""

    requires = frozenset({"heads are grouped"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        nodes = self.graph.find_nodes(op="call_function", target=aten.repeat_interleave.self_int)
        found = [n for n in nodes if Call(n)["dim"] is not None and Call(n).ndim()]
        for node in nodes:
            if Call(node)["dim"] is None and Call(node).ndim() > 1:
                self.refused(
                    node, "without a dim it repeats the flattened tensor, which is no shard of it; give the dim"
                )
        for node in found:
            call = Call(node)
            with self.graph.inserting_before(node):
                self.replace(node, self.repeat_each(call.operands[0], call.dim(), size(call["repeats"]), node))
        return len(found)
