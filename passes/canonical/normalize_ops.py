"""Normalize ops: arguments become explicit, and aliases become one op.

    new_zeros(x, size)   ->  zeros(size, dtype, device)        x need not be gathered or computed
    type_as(x, y)        ->  to(x, dtype of y)
    x.double().float()   ->  clone(x)                          if x is float32 or the casts are exact
    squeeze(x)           ->  squeeze(x, the dims of size 1)    a rank with one row must not lose the dim
    squeeze(x, dim)      ->  squeeze(x, no dim)                if the dim has another size than 1
    pad_sequence(xs)     ->  stack(xs)                         if all have the same length
    cat([empty, x])      ->  clone(x)                          and cat([empty, x, y])  ->  cat([x, y])
    assert x's dtype     ->  nothing                           checked by the trace; shards have the same dtype
    multiply(x, y)       ->  mul(x, y)                         torch has two names for one op
    hstack([x, y])       ->  cat([x, y], 1)                    and other shorthands
    adaptive_avg_pool1d(x, 1)  ->  mean(x, -1, True)           as torch computes it

A *normalizer* is a function of a node that returns its canonical call (`CallForm`), or None if the node keeps its
call; `_NORMALIZERS` maps ops to normalizers. Every entry keeps the value exactly. An *alias* is another name of an op,
such as multiply for mul; each op has several *overloads*, such as mul.Tensor and mul.Scalar.

`NormalizeRepeats` runs later, after repeated heads of attention are matched. Repeated elements get a dim of their own,
so that repeats of a shard are a shard of repeats:

    repeat_interleave(x, k, 1)     (B, S, E) -> (B, S * k, E)
        ->  reshape(expand(unsqueeze(x, 2), (B, S, k, E)), (B, S * k, E))

Bytes moved: none. Unchanged: repeats given by a tensor, and repeats of the flattened operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import schema_of
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, wrap_dim
from sp_compile.passes.graph.sizes import as_size, is_same_size
from sp_compile.passes.sharding.matchers import skip_widening_cast

aten = torch.ops.aten


class CallForm(NamedTuple):
    """Canonical call of a node."""

    target: Any  # op
    args: tuple[Any, ...]  # positional arguments
    kwargs: dict[str, Any] | None = None  # keyword arguments, if any


@register_pass
class NormalizeOps(CanonicalPass):
    """Replacement of every node that has a simpler form.

    It runs before the passes that match ops, so that these need to know one form only. Ops that are not in the table
    are already in their simplest form.
    """

    provides = frozenset({"canonical", "normalized"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace aliases, erase assertions on metadata, and apply `_NORMALIZERS`; return the number of changes."""
        changes = _replace_aliases(gm)
        for node in list(gm.graph.nodes):
            if node.target is aten._assert_tensor_metadata.default:
                gm.graph.erase_node(node)
                changes += 1
                continue
            form = _NORMALIZERS[node.target](node) if node.target in _NORMALIZERS else None
            if form is not None:
                operands = node.all_input_nodes
                node.target, node.args, node.kwargs = form.target, form.args, form.kwargs or {}
                self.drop(*operands)  # erase those that have no users any more
                changes += 1
        return changes


def _replace_aliases(gm: GraphModule) -> int:
    """Replace aliases, such as multiply for mul, in a graph and in its subgraphs; return the number of aliases."""
    aliases = [node for node in gm.graph.nodes if node.target in _CANONICAL_OVERLOADS]
    for node in aliases:
        node.target = _CANONICAL_OVERLOADS[node.target]
    if aliases:
        gm.recompile()
    bodies = [body for _, body in gm.named_children() if isinstance(body, GraphModule)]
    return len(aliases) + sum(map(_replace_aliases, bodies))


def _normalize_new(op: Any, node: Node) -> CallForm:
    """Return x.new_zeros(size), ... as `op`, such as zeros, with the dtype and device of the result.

    That call does not read x, so that x need not be gathered or computed.
    """
    call, value = OpCall(node), node.meta["val"]
    args = tuple(call[name] for name in ("size", "fill_value") if name in call.args)
    return CallForm(op, args, {"dtype": value.dtype, "device": value.device})


def _normalize_cast(node: Node) -> CallForm | None:
    """Return type_as(x, y) or to(x, y) as a cast to y's dtype; None if x also moves to another device."""
    value, call = node.meta["val"], OpCall(node)
    source = call.operands[0]
    if value.device != source.meta["val"].device:
        return None
    options = {name: call.get(name) for name in ("copy", "memory_format") if call.get(name)}  # only of to(x, y)
    return CallForm(aten.to.dtype, (source, value.dtype), options)


def _normalize_round_trip(node: Node) -> CallForm | None:
    """Return x.double().float() of a float32 x as a copy of x; None for other casts, and if the first one may round."""
    source = skip_widening_cast(node)
    return CallForm(aten.clone.default, (source,)) if source is not None else None


def _normalize_squeeze(node: Node) -> CallForm | None:
    """Return squeeze with the list of the dims that it removes, of size 1 in the global view; None if that is its list.

    A rank with one row of a sharded dim must keep that dim.
    """
    call = OpCall(node)
    source, sizes = call.operands[0], node_shape(call.operands[0])
    if node.target is aten.squeeze.default:
        dims = list(range(len(sizes)))
    else:
        given = call["dim"]
        dims = [wrap_dim(d, len(sizes)) for d in ([given] if isinstance(given, int) else given)]
    removed = [d for d in dims if d < len(sizes) and is_same_size(sizes[d], 1)]
    is_unchanged = removed == dims and node.target is not aten.squeeze.default
    return None if is_unchanged else CallForm(aten.squeeze.dims, (source, removed))


def _normalize_pad_sequence(node: Node) -> CallForm | None:
    """Return pad_sequence of sequences of equal length, which needs no padding, as stack; None for other lengths."""
    call = OpCall(node)
    lengths = [node_shape(x)[0] for x in call.operands]
    if not all(is_same_size(length, lengths[0]) for length in lengths):
        return None
    return CallForm(aten.stack.default, (node.args[0], 0 if call["batch_first"] else 1))


def _normalize_cat(node: Node) -> CallForm | None:
    """Return a cat without its empty 1d tensors, which torch ignores, as a copy if one is left; None for other cats."""
    call = OpCall(node)
    parts = [x for x in call.operands if node_shape(x) != (0,)]
    dtypes = [x.meta["val"].dtype for x in parts]
    if not parts or reduce(torch.promote_types, dtypes) != node.meta["val"].dtype:
        return None
    if len(parts) == 1:
        return CallForm(aten.clone.default, (parts[0],))
    return CallForm(node.target, (parts, call["dim"])) if len(parts) < len(call.operands) else None


def _normalize_join(dim: int, node: Node) -> CallForm | None:
    """Return hstack, vstack or dstack as cat along `dim`: 1, 0 or 2, as `_NORMALIZERS` binds it for each of them.

    hstack of vectors is a cat along their only dim. None if the op adds dims to its operands, as vstack of vectors.
    """
    ndim = node.meta["val"].ndim
    if any(x.meta["val"].ndim != ndim for x in OpCall(node).operands):
        return None
    return CallForm(aten.cat.default, (node.args[0], min(dim, ndim - 1)))


def _normalize_flip(dim: int, node: Node) -> CallForm:
    """Return fliplr or flipud as flip along `dim`: 1 or 0, as `_NORMALIZERS` binds it for each of them."""
    return CallForm(aten.flip.default, (node.args[0], [dim]))


def _normalize_pool(node: Node) -> CallForm | None:
    """Return an average pool with one result for each channel as a mean over all positions; None for other pools."""
    call = OpCall(node)
    if any(size != 1 for size in call["output_size"]):
        return None
    dims = [-1 - i for i in range(len(call["output_size"]))]
    keepdim = True
    return CallForm(aten.mean.dim, (call.operands[0], dims, keepdim))


def _normalize_tile(node: Node) -> CallForm:
    """Return tile as repeat, which needs a number for every dim: 1 for the leading dims without one."""
    call = OpCall(node)
    missing_dims = [1] * (call.ndim() - len(call["dims"]))
    return CallForm(aten.repeat.default, (call.operands[0], [*missing_dims, *call["dims"]]))


def _normalize_log_softmax(node: Node) -> CallForm:
    """Return special_log_softmax, whose dtype is a keyword argument, as log_softmax."""
    call = OpCall(node)
    return CallForm(aten.log_softmax.int, (call.operands[0], call["dim"], call["dtype"]))


# canonical name of each alias
_OP_ALIASES = dict(
    names.split("=")
    for names in (
        "absolute=abs arctan2=atan2 clip=clamp concat=cat concatenate=cat divide=div greater=gt greater_equal=ge "
        "less=lt less_equal=le moveaxis=movedim multiply=mul negative=neg not_equal=ne special_exp2=exp2 "
        "special_expit=sigmoid special_expm1=expm1 special_log1p=log1p special_logsumexp=logsumexp "
        "special_softmax=softmax subtract=sub swapaxes=transpose swapdims=transpose true_divide=div"
    ).split()
)


def _op_arguments(op: Any) -> list[tuple[str, bool]]:
    """Return (type, whether it is keyword-only) of each argument of an op, to compare overloads of two names."""
    return [(str(argument.type), argument.kwarg_only) for argument in schema_of(op).arguments]


def _packet_overloads(name: str) -> list[Any]:
    """Return all overloads of an aten op."""
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def _find_aliases() -> Iterator[tuple[Any, Any]]:
    """Yield (overload of an alias, canonical overload with equal arguments) for the table _CANONICAL_OVERLOADS.

    An example is (multiply.Tensor, mul.Tensor). Overloads that write to an argument are omitted.
    """
    for alias_name, name in _OP_ALIASES.items():
        for alias in _packet_overloads(alias_name):
            canonical = [op for op in _packet_overloads(name) if _op_arguments(op) == _op_arguments(alias)]
            if canonical and not schema_of(alias).is_mutable:
                yield alias, canonical[0]


_CANONICAL_OVERLOADS = dict(_find_aliases())  # overload of an alias to that of the canonical op

_NORMALIZERS: dict[Any, Callable[[Node], CallForm | None]] = {
    aten.adaptive_avg_pool1d.default: _normalize_pool,
    aten.adaptive_avg_pool2d.default: _normalize_pool,
    aten.adaptive_avg_pool3d.default: _normalize_pool,
    aten.cat.default: _normalize_cat,
    aten.dstack.default: partial(_normalize_join, 2),
    aten.fliplr.default: partial(_normalize_flip, 1),
    aten.flipud.default: partial(_normalize_flip, 0),
    aten.hstack.default: partial(_normalize_join, 1),
    aten.new_empty.default: partial(_normalize_new, aten.empty.memory_format),
    aten.new_full.default: partial(_normalize_new, aten.full.default),
    aten.new_ones.default: partial(_normalize_new, aten.ones.default),
    aten.new_zeros.default: partial(_normalize_new, aten.zeros.default),
    aten.row_stack.default: partial(_normalize_join, 0),
    aten.special_log_softmax.default: _normalize_log_softmax,
    aten.pad_sequence.default: _normalize_pad_sequence,
    aten.squeeze.default: _normalize_squeeze,
    aten.squeeze.dim: _normalize_squeeze,
    aten.squeeze.dims: _normalize_squeeze,
    aten.tile.default: _normalize_tile,
    aten.to.dtype: _normalize_round_trip,
    aten.to.other: _normalize_cast,
    aten.type_as.default: _normalize_cast,
    aten.vstack.default: partial(_normalize_join, 0),
}


@register_pass
class NormalizeRepeats(CanonicalPass):
    """Replacement of every repeat_interleave along a dim by views."""

    requires = frozenset({"grouped heads"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace repeat_interleave along a dim by views.

        Without a dim, it repeats the elements of the flattened tensor: such a call remains and is reported.
        """
        changes = 0
        for node in self.graph.find_nodes(op="call_function", target=aten.repeat_interleave.self_int):
            call = OpCall(node)
            if call["dim"] is not None and call.ndim():
                with self.graph.inserting_before(node):
                    self.replace(node, self.repeat_each(call.operands[0], call.dim(), as_size(call["repeats"]), node))
                changes += 1
            elif call.ndim() > 1:  # a vector is equal to its flattened form
                reason = "without dim= it repeats the flattened tensor, which cannot be sharded; pass dim="
                self.note_refusal(node, reason)
        return changes
