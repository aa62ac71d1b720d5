"""Simplify code that autograd and AOTAutograd write around exchanges.

Sums of pieces that are padded with zeros become a cat of the pieces. Autograd creates them where pieces were read.

    cat([p, zeros]) + cat([zeros, q])                                       ->  cat([p, q])
    select_backward(p, shape, d, 0) + select_backward(q, shape, d, 1)       ->  stack([p, q], d)

The rewrite is exact, as every element is from one piece. It works in joint graphs of ATen ops, decomposed for Inductor
or not. A buffer that is created only to be filled with the result of an exchange is replaced by that result.

    copy(empty_like(x), wait)                                               ->  wait
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.canonical.pad_inputs import match_padding
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import WAIT_OPS, OpCall, is_tensor, node_packet
from sp_compile.passes.graph.sizes import Size, as_sizes
from sp_compile.passes.sharding.matchers import SlicePiece, constant_value

aten = torch.ops.aten


class DropBuffers(Pass):
    """Pass that replaces a buffer by the result of an exchange that fills it."""

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        copies = gm.graph.find_nodes(op="call_function", target=aten.copy.default)
        found = [node for node in copies if node.args[1].target is WAIT_OPS and _has_same_layout(*node.args[:2])]
        for node in found:
            self.replace(node, node.args[1])
        return len(found)


def _has_same_layout(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    shaped = as_sizes(x.shape) == as_sizes(y.shape) and as_sizes(x.stride()) == as_sizes(y.stride())
    return shaped and (x.dtype, x.device) == (y.dtype, y.device)


class ConcatPadded(Pass):
    """Pass that replaces a sum of padded pieces by a cat of the pieces."""

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        # The parts of a sum that was replaced have no users.
        """Apply the pass to a graph and return the number of changes."""
        return sum(node.users != {} and self._concat(node) for node in reversed(list(gm.graph.nodes)))

    def _concat(self, node: Node) -> bool:
        pieces = _sum_terms(node)
        if pieces is None:
            return False
        target = aten.cat.default if pieces[0].keeps_dim else aten.stack.default
        with self.graph.inserting_before(node):
            joined = self.compute(target, ([leaf.source for leaf in pieces], pieces[0].dim), node)
        self.replace(node, joined)
        return True


def _sum_terms(node: Node) -> list[SlicePiece] | None:
    """Return the pieces that the node adds, in order, if they cover it and do not overlap; else None."""
    if not _is_addition(node):
        return None
    found: list[SlicePiece] = []
    waiting: list[Any] = list(node.args[:2])
    while waiting:
        part = waiting.pop()
        leaf = match_placed(part) if _static_shape(part) == _static_shape(node) else None  # pieces are not broadcast
        if leaf is not None:
            found.append(leaf)
        elif _is_addition(part) and len(part.users) == 1:
            waiting += part.args[:2]
        else:
            return None
    found.sort(key=lambda leaf: leaf.start)
    first, at = found[0], 0
    for leaf in found:
        if (leaf.dim, leaf.keeps_dim, leaf.start) != (first.dim, first.keeps_dim, at):
            return None
        at += leaf.length
    value = node.meta["val"]
    of_one_type = all(leaf.source.meta["val"].dtype == value.dtype for leaf in found)
    return found if of_one_type and as_sizes(value.shape)[first.dim] == at else None


def _is_addition(node: Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and all(map(is_tensor, node.args))


def _static_shape(node: Node) -> tuple[Size, ...]:
    return as_sizes(node.meta["val"].shape)


def match_placed(node: Node) -> SlicePiece | None:
    """Return the piece that the node places among zeros, or None.

    The node is a padding, a cat with zeros, or the gradient of a slice or a select.
    """
    pad, op = match_padding(node), node_packet(node)
    if pad is not None:
        inside = not pad.fill and all(isinstance(rows, int) and rows >= 0 for rows in (pad.before, pad.after))
        length = _static_shape(pad.source)[pad.dim]
        is_complete = inside and isinstance(length, int)
        return SlicePiece(pad.source, pad.dim, pad.before, length) if is_complete else None
    if op not in (aten.select_backward, aten.slice_backward, aten.select_scatter, aten.slice_scatter):
        return None
    found = _match_slice_write(OpCall(node), op in (aten.select_backward, aten.select_scatter))
    return (
        found if found is not None and _static_shape(found.source) == _piece_shape(_static_shape(node), found) else None
    )


def _piece_shape(shape: Sequence[Size], leaf: SlicePiece) -> tuple[Size, ...]:
    """Return the shape that the piece must have."""
    own = [leaf.length] if leaf.keeps_dim else []
    return (*shape[: leaf.dim], *own, *shape[leaf.dim + 1 :])


def _match_slice_write(call: OpCall, one: bool) -> SlicePiece | None:
    """Return the piece that is written into zeros, or whose gradient is zeros elsewhere; `one`: a select."""
    shape, dim = call.result_shapes()[0], call["dim"]
    start, end = (call["index"], None) if one else (call["start"] or 0, call["end"] or shape[dim])
    known = all(isinstance(x, int) for x in (start, shape[dim], end or 0))
    if not known or call.get("step", 1) != 1 or ("self" in call.args and constant_value(call["self"]) != 0):
        return None
    start = start + shape[dim] if start < 0 else start
    length = 1 if one else min(end, shape[dim]) - start
    return SlicePiece(call.get("grad_output") or call["src"], dim % len(shape), start, length, keeps_dim=not one)
