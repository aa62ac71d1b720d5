"""Invert views: compute the new value of a view's base from the new value of the view.

`y = x.transpose(0, 1); y.add_(1)` changes x as well. With y' the new y, the new x is y'.transpose(0, 1): each view op
has such an inverse. The inverse of a permutation or reshape is derived from its rule; the others are defined here.
`functionalize.py` uses them for the bases of views that the program writes to. In all functions `new` is the new value
of the view, and `emit(target, *args, **kwargs)` appends a node to the graph and returns it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.passes.graph.call import node_shape
from sp_compile.passes.graph.sizes import as_size, is_same_size, position_from_start
from sp_compile.passes.graph.strides import has_other_strides, inverse_permutation, is_identity, stride_copy_ops
from sp_compile.passes.sharding.matchers import is_order_preserving, match_piece, permutation_of

aten = torch.ops.aten

Emit = Callable[..., Node]  # emit(target, *args, **kwargs)


@dataclass(frozen=True)
class ViewCall:
    """Application of a view op to a base."""

    node: Node  # node of the view
    base: Node  # current value of the base
    args: tuple[Any, ...]  # other arguments, all positional and current


def invert_view(view: ViewCall, new: Node, emit: Emit) -> Node | None:
    """Append nodes that compute the new base of `view` from its new value, and return it.

    Returns None if the op has no known inverse. `emit(target, *args, **kwargs)` appends a node.
    """
    if view.node.target in _INVERSES:
        return _INVERSES[view.node.target](view, new, emit)
    order = permutation_of(view.node)
    if order is not None:
        return _invert_permute(view, new, order, emit)
    is_reshape = is_order_preserving(view.node)
    return _invert_reshape(view, new, emit) if is_reshape else None


def shape_in_graph(node: Node, emit: Emit) -> list[Any]:
    """Return the shape of `node` as ints, or as sym_size nodes for symbolic sizes."""
    return [
        int(s) if isinstance(s, int) or s.node.expr.is_number else emit(aten.sym_size.int, node, d)
        for d, s in enumerate(node.meta["val"].shape)
    ]


def match_strides(value: Node, like: torch.Tensor, emit: Emit) -> Node:
    """Emit a copy of `value` with the strides of `like`, if these are dense and others than its own; return it.

    Strides are dense if the elements fill the memory without a gap. Views of `like` may depend on them.
    """
    if like.is_contiguous():
        is_contiguous = value.meta["val"].is_contiguous()
        return value if is_contiguous else emit(aten.clone.default, value, memory_format=torch.contiguous_format)
    is_dense = like.layout is torch.strided and not has_other_strides(torch.empty_like(like), like)
    if not is_dense or not has_other_strides(value.meta["val"], like):
        return value
    for target, args, kwargs in stride_copy_ops(like):
        value = emit(target, value, *args, **kwargs)
    return value


def _invert_reshape(view: ViewCall, new: Node, emit: Emit) -> Node:
    """Emit the new base of a reshape: the new value in the shape of the base."""
    return emit(aten.reshape.default, new, shape_in_graph(view.base, emit))


def _invert_by_scatter(op: Any) -> Callable[[ViewCall, Node, Emit], Node]:
    """Return the inverse of a view of some elements, such as slice: `op` writes its new value to them in the base."""
    return lambda view, new, emit: emit(op, view.base, new, *view.args)


def _invert_narrow(view: ViewCall, new: Node, emit: Emit) -> Node:
    """Emit the new base of `narrow(base, dim, start, length)`: the base with the new value in the selected rows."""
    dim, start, length = view.args
    extent = node_shape(view.base)[dim]
    position = position_from_start(as_size(start), extent, view.base.meta["val"])
    if position is not None and not is_same_size(position, as_size(start)):  # negative: the last rows would end at 0
        size = shape_in_graph(view.base, emit)[dim]
        start = emit(operator.add, size, start) if isinstance(size, Node) else size + start
    symbolic = isinstance(start, Node) or isinstance(length, Node)
    end = emit(operator.add, start, length) if symbolic else start + length
    return emit(aten.slice_scatter.default, view.base, new, dim, start, end)


def _invert_permute(view: ViewCall, new: Node, order: tuple[int, ...], emit: Emit) -> Node:
    """Emit the new base of a permutation: the new value, permuted back.

    A permutation that is its own inverse (transpose) is emitted as the op of the view.

    Args:
        view: The view.
        new: Its new value.
        order: Dim of the base for each dim of the view, as for permute.
        emit: Appends a node.
    """
    if is_identity(order):  # an op such as contiguous, which returned its operand without a copy
        return new
    inverse = inverse_permutation(order)
    is_einsum = not isinstance(view.base, Node)  # its first argument is the equation
    if inverse == [*order] and not is_einsum:
        return emit(view.node.target, new, *view.args)
    return emit(aten.permute.default, new, inverse)


def _invert_adjoint(view: ViewCall, new: Node, emit: Emit) -> Node:
    """Emit the new base of mH: mH of the new value.

    Its conjugate is computed, not lazy, because other views of the base would reject a lazy one.
    """
    base = emit(view.node.target, new)
    return emit(aten.resolve_conj.default, base) if base.meta["val"].is_conj() else base


def _invert_expand(view: ViewCall, new: Node, emit: Emit) -> Node | None:
    """Return the new value if expand did not repeat any dim, else None: repeated rows have no inverse."""
    return new if new.meta["val"].shape == view.base.meta["val"].shape else None


def rejoin_split(split: ViewCall, piece: Node, new: Node, emit: Emit) -> Node | None:
    """Emit the base of a split (or chunk, unbind) after `piece`, one of its pieces, is replaced by `new`.

    Returns None if the position of the piece is not known.
    """
    match = match_piece(piece)
    if match is None:
        return None
    split_node = emit(split.node.target, split.base, *split.args)
    n = len(split_node.meta["val"])
    replaced = piece.args[1] % n
    pieces = [new if i == replaced else emit(operator.getitem, split_node, i) for i in range(n)]
    return emit(aten.cat.default if match.keeps_dim else aten.stack.default, pieces, match.dim)


_INVERSES: dict[Any, Callable[[ViewCall, Node, Emit], Node | None]] = {
    aten.detach.default: lambda view, new, emit: emit(aten.detach.default, new),
    # Dims longer than 1 are not removed.
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _invert_reshape),
    aten.slice.Tensor: _invert_by_scatter(aten.slice_scatter.default),
    aten.select.int: _invert_by_scatter(aten.select_scatter.default),
    aten.diagonal.default: _invert_by_scatter(aten.diagonal_scatter.default),
    # Not as_strided: torch's derivative of as_strided_scatter is wrong, as it keeps the gradient of replaced elements.
    aten.narrow.default: _invert_narrow,
    **dict.fromkeys((aten.mH.default, aten.adjoint.default), _invert_adjoint),
    aten.expand.default: _invert_expand,
    aten.expand_as.default: _invert_expand,
    aten.view.dtype: lambda view, new, emit: emit(aten.view.dtype, new, view.base.meta["val"].dtype),
    aten.view_as_real.default: lambda view, new, emit: emit(aten.view_as_complex.default, new),
    aten.view_as_complex.default: lambda view, new, emit: emit(aten.view_as_real.default, new),
}
