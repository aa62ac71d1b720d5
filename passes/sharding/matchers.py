"""Match single nodes by their effect, such as copies, casts, reshapes, slices, pads and fills.

    move_source(view(x))       x                            the op moves, cuts, repeats or casts the elements of x
    is_copy(clone(x))                     is_cast_op        the same values at the same positions; in another dtype
    permutation_of(x.mT)       (0, 2, 1)                    dims of x in the order of the result's
    match_piece(x[:, 1:])      SlicePiece(x, 1, 1, S - 1)   also narrow, select, and one result of a split or an unbind
    match_pad(pad(x, (k, 0)))  PadMatch(x, dim, k, 0, fill)
    constant_value(zeros(3).view(3, 1).clone())   0.0

The movement of elements is derived from the op's rule (`rule.py`), so that an op with a new rule is matched, too.
`value_origin` skips copies, and views that cancel each other. No nodes are created.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
from sp_compile.lowering.torch_compat import FakeTensor
from sp_compile.passes.graph.call import OpCall, is_same_argument, is_tensor, node_shape, node_tensors, parse_overloads
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.mutation import is_pure, is_written
from sp_compile.passes.graph.node_info import can_require_grad, node_info
from sp_compile.passes.graph.sizes import Size, as_size, is_same_shape, is_same_size, normalize_position, size_product
from sp_compile.passes.graph.strides import is_identity

from .factors import BoundRule, flatten_dims
from .rule import lookup_rule, rule_of
from .window_rules import sliding_calls

aten = torch.ops.aten
Number = int | float
FULL_OPS: dict[Any, Number] = {
    **dict.fromkeys(parse_overloads("zeros zeros_like new_zeros"), 0),
    **dict.fromkeys(parse_overloads("ones ones_like new_ones"), 1),
}
FILL_OPS = parse_overloads("full full_like new_full")
LITERAL_OPS = parse_overloads("lift_fresh lift_fresh_copy")  # of a number in the program's source
DETACH_OPS = {*LITERAL_OPS, aten.detach.default}  # gradients stop at these
CONCAT_OPS = parse_overloads("cat concat concatenate stack hstack vstack row_stack dstack")
PAD_OPS = parse_overloads("constant_pad_nd pad")
ARANGE_OPS = parse_overloads("arange arange.start arange.start_step")
# Ops with lazy rules that move no elements: they create a tensor like another one, or read its bytes as other elements.
NON_MOVE_OPS = re.compile("new_.*|.*_like|view[.]dtype")


def _match_movement(node: Any) -> tuple[Node, BoundRule] | None:
    """Match an op that only moves elements of one operand, as view, permute, slice, expand, copy or cast.

    Returns:
        The operand, and the sharding rule of the op, which maps its dims to those of the result. None for other ops,
        and for a detach that stops a gradient, because it differs from its operand under differentiation.
    """
    if not is_tensor(node) or is_gradient_stop(node):
        return None
    if node.target is aten.clone.default and is_written(node):  # the clone is changed in place later
        return None
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or not call.operands or not rule.lazy:  # `lazy`: the op only moves data
        return None
    op_name = str(node.target).partition(".")[2]  # without the namespace
    if node.target.namespace not in ("aten", "prims") or NON_MOVE_OPS.match(op_name):
        return None
    # Of `other`, only the shape or dtype is read (view_as, type_as).
    has_other_elements = any(x is not call.get("other") for x in call.operands[1:])
    # Without kinds (but of `other`) all dims pass. Reshapes have dims of the kind "replicate", slices "window".
    moves_elements = rule.reshapes or rule.spans or rule.kinds.keys() <= {*flatten_dims(sum(rule.operands[1:], ()))}
    return (call.operands[0], rule) if moves_elements and not has_other_elements else None


def is_gradient_stop(node: Node) -> bool:
    """Return True if the node is a detach of a value that may need a gradient."""
    return node.target is aten.detach.default and may_carry_gradient(node.args[0])


def may_carry_gradient(node: Node) -> bool:
    """Return True if the value is computed from floats that may require a gradient, without a detach between them."""

    def differentiable_operands(n: Node) -> Sequence[Node]:
        """Return the operands to which a gradient of the node may flow."""
        return n.all_input_nodes if any(map(has_gradient_dtype, node_tensors(n))) and n.target not in DETACH_OPS else ()

    ancestors = iterate_reachable([node], differentiable_operands)
    return any(n.op in ("placeholder", "get_attr") and is_tensor(n) and can_require_grad(n) for n in ancestors)


def move_source(node: Any) -> Node | None:
    """Return the operand of which the op moves, cuts, repeats, copies or casts elements; None for other ops."""
    movement = _match_movement(node)
    return movement[0] if movement is not None else None


def is_cast_op(node: Any) -> bool:
    """Return True if the result is the operand in another dtype or on another device."""
    movement = _match_movement(node)
    if movement is None or _has_same_type(movement[0], node):
        return False
    return _is_identity_order(_derive_order(node, *movement))


def is_float_cast(node: Any) -> bool:
    """Return True for a cast of one floating-point dtype to another, which only rounds; x.int() drops fractions."""
    source = move_source(node) if is_cast_op(node) else None
    return source is not None and source.meta["val"].is_floating_point() and node.meta["val"].is_floating_point()


def skip_widening_cast(node: Any) -> Node | None:
    """Return x if the node casts x to a wider dtype and back, so that it equals x: x.float().to(x.dtype); else None.

    The wider dtype must represent all values of that of x.
    """
    wide = move_source(node) if is_cast_op(node) else None
    x = move_source(wide) if is_cast_op(wide) else None
    if wide is None or x is None or not _has_same_type(x, node):
        return None
    dtype = x.meta["val"].dtype
    return x if dtype is torch.bool or is_wider_dtype(wide.meta["val"].dtype, dtype) else None


def is_wider_dtype(wide: torch.dtype, dtype: torch.dtype) -> bool:
    """Return True if a dtype of the same kind has more bytes and all values of `dtype`, as float32 for bfloat16.

    Floats of one byte have no wider dtype: some have exponents that other dtypes do not represent.
    """
    kinds = {(d.is_floating_point, d.is_complex, d.is_signed) for d in (wide, dtype)}
    min_itemsize = 2 if dtype.is_floating_point else 1
    return len(kinds) == 1 and wide.itemsize > dtype.itemsize >= min_itemsize


def is_copy(node: Any) -> bool:
    """Return True if the node copies values without a change of shape or dtype.

    Examples are clone, contiguous, alias, and a view or cast to its own shape or dtype. A detach is a copy if no
    gradient would pass.
    """
    return _is_identity_order(permutation_of(node))


def _has_same_type(a: Node, b: Node) -> bool:
    """Return True if the values have the same dtype and device."""
    x, y = a.meta["val"], b.meta["val"]
    return x.dtype == y.dtype and x.device == y.device


def _is_identity_order(order: tuple[int, ...] | None) -> bool:
    return order is not None and is_identity(order)


def permutation_of(node: Any) -> tuple[int, ...] | None:
    """Return the operand's dims in the order of the result's, (0, 2, 1) for x.mT with 3 dims; None for other ops.

    A copy is a permutation, too: its dims are in order.
    """
    movement = _match_movement(node)
    if movement is None or not _has_same_type(movement[0], node):
        return None
    return _derive_order(node, *movement)


def _derive_order(node: Node, source: Node, rule: BoundRule) -> tuple[int, ...] | None:
    """Return the dims of an operand in the order of the result's, or None if an op does not only permute dims.

    Args:
        node: Node of an op that moves the elements of its operand.
        source: The operand.
        rule: The sharding rule of the op.
    """
    before, after = rule.operands[0], rule.results[0]
    if rule.reshapes or rule.spans:  # a view to the same shape, or a slice of all rows, is a copy
        return tuple(range(len(after))) if _has_same_shape(source, node) else None
    is_permutation = "" not in before and sorted(before) == sorted(after)
    return tuple(before.index(f) for f in after) if is_permutation else None


def is_order_preserving(node: Any) -> bool:
    """Return True if the op changes only the shape, not the row-major order: view, flatten, unsqueeze, or a copy."""
    movement = _match_movement(node)
    if movement is None or not _has_same_type(movement[0], node):
        return False
    source, rule = movement
    if rule.reshapes:
        return True
    # Equal factors exclude permutations, equal sizes exclude slices and expands.
    has_same_factors = flatten_dims(rule.operands[0]) == flatten_dims(rule.results[0])
    return has_same_factors and is_same_size(size_product(node_shape(source)), size_product(node_shape(node)))


def map_coordinates(node: Node, coordinates: Sequence[Any]) -> tuple[Node, tuple[Any, ...]] | None:
    """Return (operand, coordinates in the operand) for the element of an op's result at some coordinates.

    Element (b, i, j) of x.mT is (b, j, i) of x; (b, i) of x[:, 3:] is (b, i + 3). The result is None if the op does not
    only move elements, or splits or merges dims. A coordinate is an int, or an object that can be added to a size.
    """
    movement = _match_movement(node)
    if movement is None:
        return None
    source, rule = movement
    coordinate_of = {f: c for f, c in zip(rule.results[0], coordinates) if f}
    if any(f and f not in coordinate_of for f in rule.operands[0]):  # a dim that is split or merged
        return None
    source_coordinates = [coordinate_of.get(f, 0) for f in rule.operands[0]]  # 0 in dims that broadcast
    if rule.window_dim is not None:  # the op cuts this dim: position i of the result is start + i of the operand
        start, _ = rule.spans[0]
        source_coordinates[rule.window_dim] += start
    return source, tuple(source_coordinates)


def skip_ops(node: Node, passes: Callable[[Node], bool]) -> Node:
    """Return the first value, from a node upwards along first operands, that is an input or that `passes` rejects."""
    while node.op == "call_function" and passes(node):
        node = OpCall(node).operands[0]
    return node


def skip_reshapes(node: Node) -> Node:
    """Return the first value, from a node upwards, that is not the result of a reshape, or of a copy."""
    node = value_origin(node)
    while is_order_preserving(node):
        node = value_origin(OpCall(node).operands[0])
    return node


def _has_same_shape(a: Node, b: Node) -> bool:
    """Return True if the shapes of two values are equal for all values of symbolic sizes."""
    return is_same_shape(node_shape(a), node_shape(b))


def value_origin(node: Any) -> Any:
    """Return the first value with the same elements at the same positions: x for x.mT.clone().mT.

    Copies and views that cancel each other are skipped.
    """
    if not is_rearrangement(node):
        return node
    chain, source = [], node  # the permutations, reshapes and copies that lead to the node, the last one first
    while is_rearrangement(source):
        chain.append(source)
        source = OpCall(source).operands[0]
    origins = {source: source}  # each value of the chain -> the first value that is equal to it, from the source on
    for step in reversed(chain):
        operand = origins[OpCall(step).operands[0]]
        origins[step] = operand if is_copy(step) else _cancel_chain(step, operand, origins)
    return origins[node]


def is_rearrangement(node: Any) -> bool:
    """Return True if the op is a permutation, a reshape or a copy: its result has each element of the operand once."""
    return permutation_of(node) is not None or is_order_preserving(node)


def _cancel_chain(node: Node, operand: Node, origins: dict[Node, Node]) -> Node:
    """Return the value that a node equals because it cancels earlier permutations or reshapes, else the node.

    For x.mT.mT, the two permutations compose to the identity, so the result is the origin of x. For reshapes it is that
    of an earlier value with the node's shape: x for x.view(6).view(2, 3) with x (2, 3).

    Args:
        node: A permutation or reshape.
        operand: Origin of its operand.
        origins: Origins of the values before it: the first values with the same elements at the same positions.
    """
    order, is_reshape, source = permutation_of(node), is_order_preserving(node), operand
    # Go back from the operand, `source`, as long as there are only permutations between it and the node, which bring
    # its dims to `order`, or only reshapes; stop at a source that is equal to the node.
    while True:
        if _is_identity_order(order) or (is_reshape and _has_same_shape(source, node)):
            return origins[source]
        inner_order = permutation_of(source)
        order = tuple(inner_order[d] for d in order) if order is not None and inner_order is not None else None
        is_reshape = is_reshape and is_order_preserving(source)
        if order is None and not is_reshape:
            return node
        source = OpCall(source).operands[0]


def steps_between(node: Node, source: Node) -> list[Node]:
    """Return the copies and views from `source`, which is `value_origin(node)`, to the node, in order.

    The node is included, `source` is not. Callers check or replace these nodes.
    """
    steps: list[Node] = []
    while node is not source:
        steps.insert(0, node)
        node = OpCall(node).operands[0]
    return steps


def steps_from(node: Node) -> list[Node]:
    """Return the copies and views after a value, each its predecessor's only user, up to the last one that equals it.

    For x.mT.mT.exp() these are both transposes; for x.mT.exp() there are none.
    """
    chain = [node]
    while len(chain[-1].users) == 1 and all(map(is_rearrangement, chain[-1].users)):
        chain.extend(chain[-1].users)
    equal_indices = [i for i, x in enumerate(chain) if value_origin(x) is value_origin(node)]
    return chain[1 : equal_indices[-1] + 1]


def value_readers(node: Node) -> list[Node]:
    """Return the users of a value, and those of the copies and views that equal it (`value_origin`).

    A view that differs from the value is itself a reader, in place of its users. With y = x.mT, y.mT.exp() and y + 1,
    the readers of x are the exp and y.
    """
    readers: dict[Node, None] = {}
    derived_values = [node]  # the value, and copies and views of it
    for value in derived_values:  # which grows in this loop
        for user in value.users:
            # A copy or view of the value, with readers of its own.
            if is_rearrangement(user) and user.users and OpCall(user).operands[0] is value:
                derived_values.append(user)
            else:
                equals_node = value_origin(value) is value_origin(node)
                readers[user if equals_node else value] = None
    return list(readers)


def is_same_call(a: Node, b: Node) -> bool:
    """Return True if both are the same node, or the same call of a pure op."""
    if a is b:
        return True
    if a.op != "call_function" or a.target != b.target or not is_pure(a):
        return False
    return is_same_argument((a.args, a.kwargs), (b.args, b.kwargs))


def is_only_read_by(value: Node, node: Node) -> bool:
    """Return True if a value is used only to compute a node: every chain of users leads to the node.

    It then is not needed if the node is replaced.
    """
    derived = iterate_reachable([value], lambda n: n.users if n < node else ())  # the value, and all up to the node
    return all(n is node or (n.users and n < node) for n in derived)


@dataclass(frozen=True)
class SlicePiece:
    """Positions start, start + step, ... of a dim of the source."""

    source: Node  # tensor that is sliced
    dim: int  # dim of the source
    start: Size  # first position
    length: Size  # number of positions
    step: int = 1  # distance of the positions
    keeps_dim: bool = True  # False if the piece does not have the dim (select, unbind)


def match_piece(node: Any) -> SlicePiece | None:
    """Match a slice, a select, or one result of a split, chunk or unbind with a provable position."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    return nth_result(*node.args) if node.target is operator.getitem else nth_result(node, 0)  # getitem(split, i)


def nth_result(node: Node, index: Any) -> SlicePiece | None:
    """Match one result of a slice, select, split, chunk or unbind as a piece of its operand, or return None.

    Args:
        node: Node of the op.
        index: Index of the result; 0 for ops with one result.
    """
    call, rule = lookup_rule(node) or (None, None)
    if call is None or not isinstance(index, int):
        return None
    if rule is not None and rule.window_dim is not None:
        start, length = rule.spans[index]
        return SlicePiece(call.operands[0], rule.window_dim, start, length)
    if node.target in (aten.select.int, aten.unbind.int):
        position = as_size(call["index"]) if node.target is aten.select.int else index
        if not isinstance(position, int):  # a negative one would count from the end, but the sign is not known
            return None
        position = normalize_position(position, call.shape()[call.dim()])
        return SlicePiece(call.operands[0], call.dim(), position, 1, keeps_dim=False)
    return _strided_slice(call) if node.target is aten.slice.Tensor else None


def _strided_slice(call: OpCall) -> SlicePiece | None:
    """Match a slice with a step other than 1, if its start, step and extent are ints; else return None."""
    dim, start, step = call.dim(), call["start"] or 0, call["step"]
    extent, length = call.shape()[dim], node_shape(call.node)[dim]
    if step == 1 or not all(isinstance(n, int) for n in (start, step, extent)):
        return None
    start = min(max(normalize_position(start, extent), 0), extent)  # as torch clamps it
    return SlicePiece(call.operands[0], dim, start, length, step)


def match_slice(node: Any) -> SlicePiece | None:
    """Match a contiguous piece that keeps its dim: a slice, a narrow, or one result of a split or chunk."""
    piece = match_piece(node)
    return piece if piece is not None and piece.keeps_dim and piece.step == 1 else None


def match_join(node: Any) -> tuple[int, bool] | None:
    """Return (dim along which a cat or stack joins its operands, True if the dim is new, as for stack), or None."""
    rule = rule_of(node) if node.target in CONCAT_OPS else None
    if rule is None:
        return None
    operand, result = rule.operands[0], rule.results[0]
    joined_dims = [d for d, f in enumerate(result) if f not in operand]  # all other dims pass
    return (joined_dims[0], len(result) > len(operand)) if len(joined_dims) == 1 else None


@dataclass(frozen=True)
class PadMatch:
    """Source padded with `before` and `after` rows of a constant along a dim; negative numbers cut it."""

    source: Node  # tensor that is padded
    dim: int  # dim of the rows
    before: Size  # rows added before the source
    after: Size  # rows added after it
    fill: Any  # number in the added rows


def match_pad(node: Node) -> PadMatch | None:
    """Match a pad of one dim by a constant, or return None."""
    call = OpCall(node) if node.target in PAD_OPS else None
    # A pad is an op with sliding windows of one row. In `window_calls` are its padded dims, each with its form on
    # shards, sp.op(x, before, after, fill).
    window_calls = sliding_calls(call) if call is not None else {}
    if call is None or len(window_calls) != 1:
        return None
    ((dim, window_call),) = window_calls.items()
    if window_call.first is not None:  # it also pads a dim by symbolic sizes, which `window_calls` omits
        return None
    after = window_call.sliding.num_after(call.shape()[dim])
    (fill,) = window_call.tail  # the arguments after `after`
    return PadMatch(call.operands[0], dim, window_call.sliding.before, after, fill)


def is_arange(node: Any) -> bool:
    """Return True if the node is an arange from 0 in steps of 1: 0, 1, 2, ..."""
    call = OpCall(node) if isinstance(node, Node) and node.target in ARANGE_OPS else None
    return call is not None and call.get("start", 0) == 0 and call.get("step", 1) == 1


def constant_value(node: Any) -> Number | None:
    """Return the number that every element of a tensor has if it is known from the graph, else None.

    It is known for full, zeros, constant 0-dim tensors, and for views, copies, exact casts and square roots of these.
    """
    if not is_tensor(node) or is_written(node):
        return None
    if node.op == "get_attr":
        return _literal_value(node) if not node.meta["val"].ndim else None
    if node.op != "call_function":
        return None
    if node.target in FULL_OPS:
        return FULL_OPS[node.target]
    if node.target in FILL_OPS or node.target is aten.scalar_tensor.default:
        fill = OpCall(node)["fill_value" if node.target in FILL_OPS else "s"]
        number = fill if isinstance(fill, Number) else constant_value(fill)
        return None if number is None else round_to_dtype(number, node.meta["val"].dtype)
    if node.target is aten.sqrt.default:
        root = constant_value(node.args[0])
        if root is None or root < 0:
            return None
        return round_to_dtype(math.sqrt(root), node.meta["val"].dtype)
    source = node.args[0] if node.target is aten.repeat.default else move_source(node)
    number = constant_value(source) if source is not None else None
    if number is None or source is None or _has_same_type(source, node):
        return number
    rounded = round_to_dtype(number, node.meta["val"].dtype)
    return rounded if rounded == number else None  # a cast that rounds is not followed


def round_to_dtype(number: Number, dtype: torch.dtype) -> Number | None:
    """Return the number as an element of a tensor of the dtype, or None if it does not fit."""
    try:
        return torch.tensor(number, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError, ValueError):
        return None


def _literal_value(x: Node) -> Number | None:
    """Return the value of a 0-dim attribute if it is a constant that make_fx or export recorded, else None.

    Parameters and buffers are no constants, because the user may change them.
    """
    tensor = operator.attrgetter(x.target)(x.graph.owning_module)
    is_constant = node_info(x).constant or str(x.target).startswith(("_tensor_constant", "lifted_tensor_"))
    return tensor.item() if is_constant and not isinstance(tensor, FakeTensor) else None


def scalar_value(x: Any, dtype: torch.dtype) -> float | None:
    """Return the value of an argument as a float: a Python scalar, or a 0-dim tensor of this dtype.

    The result is None for other arguments, for bools, and if the value of the tensor is not known from the graph.
    """
    if is_tensor(x) and not x.meta["val"].ndim and x.meta["val"].dtype == dtype:
        x = constant_value(x)
    return float(x) if isinstance(x, Number) and not isinstance(x, bool) else None
