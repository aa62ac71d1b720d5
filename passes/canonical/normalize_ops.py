"""Normalize ops: arguments become explicit, and aliases become one op.

    new_zeros(x, size)   ->  zeros(size, dtype, device)        x need not be gathered or computed
    type_as(x, y)        ->  to(x, dtype of y)
    x.double().float()   ->  clone(x)                          if x is float32 or the casts are exact
    squeeze(x)           ->  squeeze(x, the dims of size 1)    a rank with one row must not lose the dim
    cat([empty, x])      ->  clone(x)
    assert x's dtype     ->  nothing                           checked by the trace; shards have the same dtype
    multiply(x, y)       ->  mul(x, y)                         torch has two names for one op
    hstack([x, y])       ->  cat([x, y], 1)                    and other shorthands

Part of canonicalize; every entry keeps the value exactly. Unchanged: ops that are not in the table.

Repeated elements get a dim of their own, so that repeats of a shard are a shard of repeats.

    repeat_interleave(x, k, 1)     (B, S, E) -> (B, S * k, E)
        ->  reshape(expand(unsqueeze(x, 2), (B, S, k, E)), (B, S * k, E))

Part of canonicalize, after repeated heads of attention are matched. Bytes moved: none. Unchanged: repeats given by a
tensor, and repeats of the flattened operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import schema_of
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import as_size
from sp_compile.passes.sharding.matchers import skip_widening_cast

aten = torch.ops.aten
SKIP_CALL = object()
CallForm = tuple[Any, tuple[Any, ...], dict[str, Any]]  # target, args, kwargs


@register_pass
class NormalizeOps(CanonicalPass):
    """Replacement of every node with a simpler form.

    Ops that are not in the table are already in their simplest form.
    """

    provides = frozenset({"canonical", "normalized"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        changes = _unify_overloads(gm)
        for node in list(gm.graph.nodes):
            form = _NORMALIZERS[node.target](node) if node.target in _NORMALIZERS else None
            if form is SKIP_CALL:
                gm.graph.erase_node(node)
            elif form is not None:
                before = node.all_input_nodes
                node.target, node.args, node.kwargs = form
                self.drop(*before)
            changes += form is not None
        return changes


def _unify_overloads(gm: GraphModule) -> int:
    """Replace aliases in a graph and in the bodies of its regions; return the number of replaced nodes."""
    found = [node for node in gm.graph.nodes if node.target in _CANONICAL_OVERLOADS]
    for node in found:
        node.target = _CANONICAL_OVERLOADS[node.target]
    if found:
        gm.recompile()
    bodies = [body for _, body in gm.named_children() if isinstance(body, GraphModule)]
    return len(found) + sum(map(_unify_overloads, bodies))


def _normalize_like(target: Any, fill: bool = False) -> Any:
    def normalize(node: Node) -> CallForm:
        """Return the canonical call of a node that creates a tensor."""
        value, call = node.meta["val"], OpCall(node)
        args = (call["size"], call["fill_value"]) if fill else (call["size"],)
        return target, args, {"dtype": value.dtype, "device": value.device}

    return normalize


def _normalize_cast(node: Node) -> CallForm | None:
    value, source = node.meta["val"], OpCall(node).operands[0]
    if value.device != source.meta["val"].device:
        return None
    return aten.to.dtype, (source, value.dtype), {}


def _normalize_squeeze(node: Node) -> CallForm:
    source = OpCall(node).operands[0]
    ones = [d for d, s in enumerate(node_shape(source)) if s == 1]
    return aten.squeeze.dims, (source, ones), {}


def _normalize_cat(node: Node) -> CallForm | None:
    parts = [p for p in OpCall(node).operands if node_shape(p) != (0,)]
    is_identity = len(parts) == 1 and parts[0].meta["val"].dtype == node.meta["val"].dtype
    return (aten.clone.default, (parts[0],), {}) if is_identity else None


def _normalize_join(dim: int) -> Any:
    """Concatenate operands that have the dim already; hstack concatenates vectors along their only dim."""

    def normalize(node: Node) -> CallForm | None:
        """Return the node as a concatenation, or None if its operands have fewer dims than its result."""
        ndim = node.meta["val"].ndim
        if any(x.meta["val"].ndim != ndim for x in OpCall(node).operands):
            return None
        return aten.cat.default, (node.args[0], min(dim, ndim - 1)), {}

    return normalize


def _normalize_flip(dim: int) -> Any:
    return lambda node: (aten.flip.default, (node.args[0], [dim]), {})


def _normalize_tile(node: Node) -> CallForm:
    call = OpCall(node)
    ones = [1] * (call.ndim() - len(call["dims"]))
    return aten.repeat.default, (call.operands[0], [*ones, *call["dims"]]), {}


def _normalize_log_softmax(node: Node) -> CallForm:
    call = OpCall(node)
    return aten.log_softmax.int, (call.operands[0], call["dim"], call["dtype"]), {}


_OP_ALIASES = {
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
"""Canonical overload of each alias."""


def _op_arguments(op: Any) -> list[tuple[str, bool]]:
    return [(str(argument.type), argument.kwarg_only) for argument in schema_of(op).arguments]


def _packet_overloads(packet: Any) -> list[Any]:
    return [getattr(packet, overload) for overload in packet.overloads()]


def _find_aliases() -> Iterator[tuple[Any, Any]]:
    """Yield pairs of an overload and the overload of another name with the same arguments."""
    for name, packet in _OP_ALIASES.items():
        for alias in _packet_overloads(getattr(aten, name)):
            same = [other for other in _packet_overloads(packet) if _op_arguments(other) == _op_arguments(alias)]
            if same and not schema_of(alias).is_mutable:
                yield alias, same[0]


_CANONICAL_OVERLOADS = dict(_find_aliases())

_NORMALIZERS = {
    aten._assert_tensor_metadata.default: lambda node: SKIP_CALL,
    aten.cat.default: _normalize_cat,
    aten.dstack.default: _normalize_join(2),
    aten.fliplr.default: _normalize_flip(1),
    aten.flipud.default: _normalize_flip(0),
    aten.hstack.default: _normalize_join(1),
    aten.new_empty.default: _normalize_like(aten.empty.memory_format),
    aten.new_full.default: _normalize_like(aten.full.default, fill=True),
    aten.new_ones.default: _normalize_like(aten.ones.default),
    aten.new_zeros.default: _normalize_like(aten.zeros.default),
    aten.row_stack.default: _normalize_join(0),
    aten.special_log_softmax.default: _normalize_log_softmax,
    aten.squeeze.default: _normalize_squeeze,
    aten.tile.default: _normalize_tile,
    aten.to.dtype: lambda node: (aten.clone.default, (x,), {}) if (x := skip_widening_cast(node)) is not None else None,
    aten.to.other: _normalize_cast,
    aten.type_as.default: _normalize_cast,
    aten.vstack.default: _normalize_join(0),
}


@register_pass
class NormalizeRepeats(CanonicalPass):
    """Replacement of every repeat_interleave along a dim."""

    requires = frozenset({"grouped heads"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        nodes = self.graph.find_nodes(op="call_function", target=aten.repeat_interleave.self_int)
        found = [n for n in nodes if OpCall(n)["dim"] is not None and OpCall(n).ndim()]
        for node in nodes:
            if OpCall(node)["dim"] is None and OpCall(node).ndim() > 1:
                self.note_refusal(
                    node, "without dim= it repeats the flattened tensor, which cannot be sharded; pass dim="
                )
        for node in found:
            call = OpCall(node)
            with self.graph.inserting_before(node):
                self.replace(node, self.repeat_each(call.operands[0], call.dim(), as_size(call["repeats"]), node))
        return len(found)
