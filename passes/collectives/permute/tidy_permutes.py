"""Simplify code that autograd and AOTAutograd write around exchanges.

Sums of pieces that are padded with zeros become a cat of the pieces. Autograd creates them where pieces were read.

    cat([p, zeros]) + cat([zeros, q])                                       ->  cat([p, q])
    select_backward(p, shape, d, 0) + select_backward(q, shape, d, 1)       ->  stack([p, q], d)

The rewrite is exact, as every element is from one piece. It works in joint graphs of ATen ops, decomposed for Inductor
or not. A buffer that is created only to be filled with the result of an exchange is replaced by that result.

    copy(empty_like(x), wait)                                               ->  wait
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.canonical.pad_inputs import match_padding
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import WAIT_OP, OpCall, is_tensor, node_packet, node_shape
from sp_compile.passes.graph.mutation import can_replace_copy
from sp_compile.passes.graph.sizes import as_sizes
from sp_compile.passes.sharding.matchers import SlicePiece, constant_value

aten = torch.ops.aten


class DropBuffers(Pass):
    """Pass that replaces a buffer by the result of an exchange that fills it, if both have equal strides.

    A buffer that is a result of the graph remains, so that it has memory of its own (`can_replace_copy`).
    """

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace copies of an exchange's result to a buffer by this result, and return their number."""
        copies = gm.graph.find_nodes(op="call_function", target=aten.copy.default)
        changes = 0
        for node in copies:
            buffer, result = node.args[:2]
            is_equal = result.target is WAIT_OP and _memory_format(buffer) == _memory_format(result)
            if is_equal and can_replace_copy(node, result):
                self.replace(node, result)
                changes += 1
        return changes


def _memory_format(node: Node) -> tuple[Any, ...]:
    """Return the shape, strides, dtype and device of the node's value; with equal ones it can replace a buffer."""
    value = node.meta["val"]
    return as_sizes(value.shape), as_sizes(value.stride()), value.dtype, value.device


class ConcatPadded(Pass):
    """Pass that replaces a sum of padded pieces by a cat or stack of the pieces."""

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace each sum of padded pieces, with its nested sums, by one op; return the number of replaced sums."""
        changes = 0
        for node in reversed(list(gm.graph.nodes)):  # the largest sum before its terms
            pieces = _match_padded_sum(node) if node.users else None  # terms of a replaced sum have no users
            if pieces is not None:
                target = aten.cat.default if pieces[0].keeps_dim else aten.stack.default
                with self.graph.inserting_before(node):
                    joined = self.compute(target, ([piece.source for piece in pieces], pieces[0].dim), node)
                self.replace(node, joined)
                changes += 1
        return changes


def _match_padded_sum(node: Node) -> list[SlicePiece] | None:
    """Return the pieces in order if the node is a sum of padded pieces that cover it without overlap, else None.

    The sum, possibly of sums, then equals a cat or a stack of the pieces.
    """
    if not _is_addition(node):
        return None
    pieces: list[SlicePiece] = []
    terms: list[Any] = list(node.args[:2])
    while terms:
        term = terms.pop()
        piece = match_placed(term) if node_shape(term) == node_shape(node) else None  # pieces are not broadcast
        if piece is not None:
            pieces.append(piece)
        elif _is_addition(term) and len(term.users) == 1:
            terms += term.args[:2]
        else:
            return None
    # The sorted pieces must be slices (or selects) of one dim, each starting where the one before it ends.
    pieces.sort(key=lambda piece: piece.start)
    first, position = pieces[0], 0
    for piece in pieces:
        if (piece.dim, piece.keeps_dim, piece.start) != (first.dim, first.keeps_dim, position):
            return None
        position += piece.length
    dtypes = {x.meta["val"].dtype for x in (node, *(piece.source for piece in pieces))}
    return pieces if len(dtypes) == 1 and node_shape(node)[first.dim] == position else None


def _is_addition(node: Node) -> bool:
    """Return True for the sum of two tensors, without a factor (`alpha`)."""
    return node.target is aten.add.Tensor and not node.kwargs and all(map(is_tensor, node.args))


def match_placed(node: Node) -> SlicePiece | None:
    """Return the piece that the node pads with zeros, or None.

    The node is a padding, a cat with zeros, or the gradient of a slice or a select. The returned `SlicePiece` has the
    piece as `source`, and its place in the result of the node: dim, start and length. For cat([p, zeros]), with p of 3
    rows, it is (p, 0, 0, 3).
    """
    pad, op = match_padding(node), node_packet(node)
    if pad is not None:  # with a `fill` other than 0 the node adds no zeros; a negative `before` or `after` crops
        length = node_shape(pad.source)[pad.dim]
        is_static = all(isinstance(rows, int) for rows in (pad.before, pad.after, length))
        if not is_static or pad.fill or min(pad.before, pad.after) < 0:
            return None
        return SlicePiece(pad.source, pad.dim, pad.before, length)
    if op not in (aten.select_backward, aten.slice_backward, aten.select_scatter, aten.slice_scatter):
        return None
    piece = _match_slice_write(OpCall(node), is_select=op in (aten.select_backward, aten.select_scatter))
    if piece is None:
        return None
    # The written value must have the shape of the place that it is written to: a scatter may broadcast it.
    shape = node_shape(node)
    piece_dims = [piece.length] if piece.keeps_dim else []  # a select has removed the dim
    piece_shape = (*shape[: piece.dim], *piece_dims, *shape[piece.dim + 1 :])
    return piece if node_shape(piece.source) == piece_shape else None


def _match_slice_write(call: OpCall, is_select: bool) -> SlicePiece | None:
    """Return the piece that a scatter or gradient op of a slice or select pads with zeros, or None.

    Returns None for a step, for symbolic positions, and for a scatter into values that are not all zero.
    """
    shape, dim = call.result_shapes()[0], call["dim"]
    size: Any = shape[dim]
    ends: tuple[Any, ...] = (call["index"],) if is_select else (call["start"], call["end"])
    is_static = all(isinstance(position, int | None) for position in (size, *ends))
    has_zeros = "self" not in call.args or constant_value(call["self"]) == 0  # a gradient op has no `self`
    if not is_static or call.get("step", 1) != 1 or not has_zeros:
        return None
    if is_select:
        start, length = ends[0] % size, 1
    else:
        start, end, _ = slice(*ends).indices(size)
        length = max(end - start, 0)
    source = call.get("grad_output") or call["src"]
    return SlicePiece(source, dim % len(shape), start, length, keeps_dim=not is_select)
