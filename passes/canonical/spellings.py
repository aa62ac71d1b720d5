"""Ops that read nothing of an operand but its dtype, device or number become ops that say so.

    new_zeros(x, size)   ->  zeros(size, dtype, device)        x need not be whole, nor anywhere
    type_as(x, y)        ->  to(x, dtype of y)
    x.double().float()   ->  clone(x)                          where x is float32, or whatever is exact
    squeeze(x)           ->  squeeze(x, the dims of size 1)    a rank with one row must not lose the dim
    cat([empty, x])      ->  x
    assert x's dtype     ->  nothing                           the trace knows it; a rank's shard has the same

Part of canonicalize; every entry keeps the value exactly. Leaves alone: what is not in the table.

Elements that repeat in place become a dim of their own, which regroups: repeats of a shard are a shard of repeats.

    repeat_interleave(x, k, 1)     (B, S, E) -> (B, S * k, E)
        ->  reshape(expand(unsqueeze(x, 2), (B, S, k, E)), (B, S * k, E))

Part of canonicalize, after attention has found its repeated heads. Bytes moved: none. Leaves alone: numbers of repeats
that are tensors, and repeats of the flattened operand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.graph.call import Call
from sp_compile.graph.sizes import size, sizes
from sp_compile.passes.base import Spelling, register
from sp_compile.passes.job import Job
from sp_compile.sharding.matchers import uncast

aten = torch.ops.aten
REMOVED = object()
CallForm = tuple[Any, tuple[Any, ...], dict[str, Any]]  # target, args, kwargs


@register
class Explicit(Spelling):
    """Rewrites every node that has a plainer spelling."""

    provides = frozenset({"canonical", "explicit"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        changes = 0
        for node in list(gm.graph.nodes):
            spelling = _SPELLINGS[node.target](node) if node.target in _SPELLINGS else None
            if spelling is REMOVED:
                gm.graph.erase_node(node)
            elif isinstance(spelling, Node):
                self.replace(node, spelling)
            elif spelling is not None:
                before = node.all_input_nodes
                node.target, node.args, node.kwargs = spelling
                self.drop(*before)
            changes += spelling is not None
        return changes


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
    ones = [d for d, s in enumerate(sizes(source.meta["val"].shape)) if s == 1]
    return aten.squeeze.dims, (source, ones), {}


def _cat(node: Node) -> Node | None:
    parts = [p for p in Call(node).operands if sizes(p.meta["val"].shape) != (0,)]
    return parts[0] if len(parts) == 1 and parts[0].meta["val"].dtype == node.meta["val"].dtype else None


_SPELLINGS = {
    aten._assert_tensor_metadata.default: lambda node: REMOVED,
    aten.cat.default: _cat,
    aten.new_empty.default: _made_like(aten.empty.memory_format),
    aten.new_full.default: _made_like(aten.full.default, fill=True),
    aten.new_ones.default: _made_like(aten.ones.default),
    aten.new_zeros.default: _made_like(aten.zeros.default),
    aten.squeeze.default: _squeeze,
    aten.to.dtype: lambda node: (aten.clone.default, (x,), {}) if (x := uncast(node)) is not None else None,
    aten.to.other: _cast,
    aten.type_as.default: _cast,
}


@register
class Repeats(Spelling):
    """Rewrites every repeat_interleave along a dim."""

    requires = frozenset({"heads are grouped"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        nodes = self.graph.find_nodes(op="call_function", target=aten.repeat_interleave.self_int)
        found = [n for n in nodes if Call(n)["dim"] is not None and Call(n).ndim()]
        for node in found:
            call = Call(node)
            with self.graph.inserting_before(node):
                self.replace(node, self.repeat_each(call.operands[0], call.dim(), size(call["repeats"]), node))
        return len(found)
