"""Match single nodes by their effect: copies, casts, permutations, reshapes, slices, pads, joins and fills.

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

from sp_compile.lowering.torch_compat import FakeTensor
from sp_compile.passes.graph.call import OpCall, is_tensor, node_shape, node_tensors, parse_overloads
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.mutation import is_pure, is_written
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_size, is_same_shape, is_same_size, normalize_position, size_product
from sp_compile.passes.graph.strides import is_identity

from .factors import BoundRule, flatten_dims
from .rule import lookup_rule
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
NON_MOVE_OPS = re.compile("new_.*|.*_like|view[.]dtype")  # lazy, too, but they do not read the elements


def _match_movement(node: Any) -> tuple[Node, BoundRule] | None:
    """Return the operand of which the result has the elements, and the rule that maps them, or None.

    A detach that stops a gradient does not match, because its operand differs from it under differentiation.
    """
    found = lookup_rule(node) if is_tensor(node) and not _is_private(node) and not stops_gradient(node) else None
    if found is None or node.target.namespace not in ("aten", "prims") or NON_MOVE_OPS.match(str(node.target)[5:]):
        return None
    call, rule = found
    if not call.operands:
        return None
    lent = [x for x in call.operands[1:] if x is not call.get("other")]  # view_as, type_as: its shape, its dtype
    moves = rule is not None and rule.lazy and (rule.reshapes or rule.spans or not rule.kinds)
    return (call.operands[0], rule) if moves and rule is not None and not lent else None


def _is_private(node: Node) -> bool:
    """Return True for a clone that functionalize created for an op without a functional form, which writes it."""
    return node.target is aten.clone.default and is_written(node)


def stops_gradient(node: Node) -> bool:
    """Return True if the node is a detach of a value that may need a gradient."""
    return node.target is aten.detach.default and carries_gradient(node.args[0])


def carries_gradient(node: Node) -> bool:
    """Return True if the value is computed from floats that may require a gradient."""
    ancestors = iterate_reachable(
        [node], lambda n: n.all_input_nodes if _has_float_result(n) and n.target not in DETACH_OPS else ()
    )
    leaves = (n for n in ancestors if n.op in ("placeholder", "get_attr") and is_tensor(n) and _has_float_result(n))
    return any(node_info(leaf).requires_grad is not False for leaf in leaves)


def _has_float_result(node: Node) -> bool:
    """Return True if a result is a floating point or complex tensor; sizes of such tensors do not count."""
    return any(x.is_floating_point() or x.is_complex() for x in node_tensors(node))


def move_source(node: Any) -> Node | None:
    """Return the operand that the op moves, cuts, repeats, copies or casts, or None."""
    found = _match_movement(node)
    return found[0] if found is not None else None


def is_cast_op(node: Any) -> bool:
    """Return True if the result is the operand in another dtype or on another device."""
    found = _match_movement(node)
    return found is not None and not _has_same_type(found[0], node) and _is_identity_order(_derive_order(node, *found))


def skip_widening_cast(node: Any) -> Node | None:
    """Return x if the node casts x to a wider dtype, which has all its values, and back; else None."""
    wide = move_source(node) if is_cast_op(node) else None
    x = move_source(wide) if is_cast_op(wide) else None
    if wide is None or x is None or not _has_same_type(x, node):
        return None
    a, b = (n.meta["val"].dtype for n in (x, wide))
    kinds = [(d.is_floating_point, d.is_complex, d.is_signed) for d in (a, b)]
    wider = (
        kinds[0] == kinds[1] and b.itemsize > a.itemsize >= 1 + a.is_floating_point
    )  # one-byte floats have any exponent
    return x if wider or a is torch.bool else None


def is_copy(node: Any) -> bool:
    """Return True if the node copies values: clone, contiguous, alias, a view or cast to its own shape or dtype.

    A detach is a copy if no gradient would pass.
    """
    return _is_identity_order(permutation_of(node))


def _has_same_type(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.dtype == y.dtype and x.device == y.device


def _is_identity_order(order: tuple[int, ...] | None) -> bool:
    return order is not None and is_identity(order)


def permutation_of(node: Any) -> tuple[int, ...] | None:
    """Return the dims of the operand in result order if the op permutes dims or copies, else None."""
    found = _match_movement(node)
    return _derive_order(node, *found) if found is not None and _has_same_type(found[0], node) else None


def _derive_order(node: Node, source: Node, rule: BoundRule) -> tuple[int, ...] | None:
    before, after = rule.operands[0], rule.results[0]
    if rule.reshapes or rule.spans:
        return tuple(range(len(after))) if _same_shape_value(source, node) else None
    permuted = "" not in before and sorted(before) == sorted(after)
    return tuple(before.index(f) for f in after) if permuted else None


def keeps_order(node: Any) -> bool:
    """Return True if the op changes only the shape: view, flatten, unsqueeze, squeeze, and copies."""
    found = _match_movement(node)
    if found is None or not _has_same_type(found[0], node):
        return False
    source, rule = found
    kept = flatten_dims(rule.operands[0]) == flatten_dims(rule.results[0])
    return rule.reshapes or (kept and is_same_size(size_product(node_shape(source)), size_product(node_shape(node))))


def map_coordinates(node: Node, at: Sequence[Any]) -> tuple[Node, tuple[Any, ...]] | None:
    """Return the operand and the coordinates in it of the element at `at`, or None if the rule does not define them."""
    found = _match_movement(node)
    if found is None:
        return None
    source, rule = found
    place = {f: c for f, c in zip(rule.results[0], at) if f}
    if any(f and f not in place for f in rule.operands[0]):  # a dim that is split or merged
        return None
    coords = [place.get(f, 0) for f in rule.operands[0]]
    if rule.window is not None:
        coords[rule.window] += rule.spans[0][0]
    return source, tuple(coords)


def skip_ops(node: Node, passes: Callable[[Node], bool]) -> Node:
    """Skip single-operand ops for which `passes` is true, and return the first other value."""
    while node.op == "call_function" and passes(node):
        node = OpCall(node).operands[0]
    return node


def skip_reshapes(node: Node) -> Node:
    """Skip all reshapes and copies, and return the first other value."""
    node = value_origin(node)
    while keeps_order(node):
        node = value_origin(OpCall(node).operands[0])
    return node


def _same_shape_value(a: Node, b: Node) -> bool:
    return is_same_shape(node_shape(a), node_shape(b))


def value_origin(node: Any) -> Any:
    """Return the first value with the same elements at the same positions.

    Copies and canceling views are skipped.
    """
    if not is_rearrangement(node):
        return node
    chain, at = [], node
    while is_rearrangement(at):
        chain.append(at)
        at = OpCall(at).operands[0]
    found = {at: at}
    for step in reversed(chain):
        before = found[OpCall(step).operands[0]]
        found[step] = before if is_copy(step) else _cancel_chain(step, before, found)
    return found[node]


def is_rearrangement(node: Any) -> bool:
    """Return True if the op is a permutation or reshape that can be reverted: each element once, with its gradient."""
    return permutation_of(node) is not None or keeps_order(node)


def _cancel_chain(node: Node, operand: Node, found: dict[Node, Node]) -> Node:
    """Return the origin of a chain of permutations or of reshapes that cancel, else the node."""
    order, at = permutation_of(node), operand
    while order is not None and is_rearrangement(at) and (inner := permutation_of(at)) is not None:
        order, at = tuple(inner[d] for d in order), OpCall(at).operands[0]
        if is_identity(order):
            return found[at]
    at = operand
    while keeps_order(node):
        if _same_shape_value(at, node):
            return found[at]
        if not is_rearrangement(at) or not keeps_order(at):
            break
        at = OpCall(at).operands[0]
    return node


def steps_between(node: Node, source: Node) -> list[Node]:
    """Return the nodes after `source` up to `node` in graph order, where source is `value_origin(node)`."""
    steps: list[Node] = []
    while node is not source:
        steps.insert(0, node)
        node = OpCall(node).operands[0]
    return steps


def steps_from(node: Node) -> list[Node]:
    """Return the single-user chain from a value to the last node that equals it; often empty."""
    steps: list[Node] = []
    last, at = 0, node
    while len(at.users) == 1:
        (at,) = at.users
        if not is_rearrangement(at):
            break
        steps.append(at)
        last = len(steps) if value_origin(at) is value_origin(node) else last
    return steps[:last]


def value_readers(node: Node) -> list[Node]:
    """Return the users of a value, directly or through rearrangements that `value_origin` skips."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        value = waiting.pop(0)
        for user in value.users:
            if is_rearrangement(user) and user.users and OpCall(user).operands[0] is value:
                waiting.append(user)
            else:
                found[user if value_origin(value) is value_origin(node) else value] = None
    return list(found)


def is_same_call(a: Node, b: Node) -> bool:
    """Return True if both are the same node, or the same call of a pure op."""
    same_call = a.op == "call_function" and (a.target, a.args, a.kwargs) == (b.target, b.args, b.kwargs)
    return a is b or (same_call and is_pure(a))


def is_only_read_by(value: Node, node: Node) -> bool:
    """Return True if every path from the value leads to the node."""
    readers = iterate_reachable([value], lambda n: n.users if n < node else ())
    return all(n is node or (n.users and n < node) for n in readers)


@dataclass(frozen=True)
class SlicePiece:
    """Positions start, start + step, ... of a dim of the source."""

    source: Node  # tensor that is sliced
    dim: int
    start: Size  # first position
    length: Size  # number of positions
    step: int = 1
    keeps_dim: bool = True  # False if the piece does not have the dim (select, unbind)


def match_piece(node: Any) -> SlicePiece | None:
    """Match a slice, a select, or one result of a split, chunk or unbind with a provable position."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    return nth_result(*node.args) if node.target is operator.getitem else nth_result(node, 0)


def nth_result(of: Node, which: Any) -> SlicePiece | None:
    """Match a result of a node by its index."""
    found = lookup_rule(of)
    if found is None or not isinstance(which, int):
        return None
    call, rule = found
    if rule is not None and rule.window is not None:
        return SlicePiece(call.operands[0], rule.window, *rule.spans[which])
    if of.target in (aten.select.int, aten.unbind.int):
        at = as_size(call["index"]) if of.target is aten.select.int else which
        if not isinstance(at, int):  # the sign is not known
            return None
        return SlicePiece(
            call.operands[0], call.dim(), normalize_position(at, call.shape()[call.dim()]), 1, keeps_dim=False
        )
    return _strided_slice(call) if of.target is aten.slice.Tensor else None


def _strided_slice(call: OpCall) -> SlicePiece | None:
    """Match a slice with a step if its sizes are ints."""
    dim, start, step = call.dim(), call["start"] or 0, call["step"]
    extent, length = call.shape()[dim], node_shape(call.node)[dim]
    if step == 1 or not all(isinstance(n, int) for n in (start, step, extent)):
        return None
    return SlicePiece(call.operands[0], dim, min(max(normalize_position(start, extent), 0), extent), length, step)


def match_slice(node: Any) -> SlicePiece | None:
    """Match a contiguous piece that keeps its dim: a slice, a narrow, or one result of a split or chunk."""
    piece = match_piece(node)
    return piece if piece is not None and piece.keeps_dim and piece.step == 1 else None


def match_join(node: Any) -> tuple[int, bool] | None:
    """Return the dim along which a cat or stack joins operands and whether it is a new dim, or None."""
    found = lookup_rule(node) if node.target in CONCAT_OPS else None
    if found is None or found[1] is None:
        return None
    before, after = found[1].operands[0], found[1].results[0]
    along = [d for d, f in enumerate(after) if f not in before]
    return (along[0], len(after) > len(before)) if len(along) == 1 else None


@dataclass(frozen=True)
class PadMatch:
    """Source padded with `before` and `after` rows of a constant along a dim; negative numbers cut it."""

    source: Node
    dim: int
    before: Size
    after: Size
    fill: Any


def match_pad(node: Node) -> PadMatch | None:
    """Match a pad of one dim by a constant."""
    along = sliding_calls(OpCall(node)) if node.target in PAD_OPS else {}
    if len(along) != 1:
        return None
    ((dim, slides),) = along.items()
    call, before = OpCall(node), slides.sliding.before
    after = slides.sliding.num_after(call.shape()[dim])
    return PadMatch(call.operands[0], dim, before, after, slides.tail[0]) if slides.first is None else None


def is_arange(node: Any) -> bool:
    """Return True if the node computes 0, 1, 2, ..."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node.target is aten.arange.default:
        return True
    call = OpCall(node) if node.target in (aten.arange.start, aten.arange.start_step) else None
    return call is not None and call["start"] == 0 and call.get("step", 1) == 1


def constant_value(node: Any) -> Number | None:
    """Return the number that every element of a tensor has if it is known from the graph, else None."""
    if not is_tensor(node) or is_written(node):
        return None
    if node.op == "get_attr":
        return _literal_tensor(node) if not node.meta["val"].ndim else None
    if node.op != "call_function" or node.target in FULL_OPS:
        return FULL_OPS.get(node.target)
    if node.target in FILL_OPS or node.target is aten.scalar_tensor.default:
        fill = OpCall(node)["fill_value" if node.target in FILL_OPS else "s"]
        number = fill if isinstance(fill, Number) else constant_value(fill)
        return None if number is None else _round_to_dtype(number, node.meta["val"].dtype)
    if node.target is aten.repeat.default:
        return constant_value(node.args[0])
    if node.target is aten.sqrt.default:
        root = constant_value(node.args[0])
        return math.sqrt(root) if root is not None and root >= 0 else None
    source = move_source(node)
    number = constant_value(source) if source is not None else None
    return (
        number
        if number is None or source is None or _has_same_type(source, node)
        else _cast_exactly(number, node.meta["val"].dtype)
    )


def _cast_exactly(number: Number, dtype: torch.dtype) -> Number | None:
    """Return the number in the dtype if it is exact, else None."""
    found = _round_to_dtype(number, dtype)
    return found if found == number else None


def _round_to_dtype(number: Number, dtype: torch.dtype) -> Number | None:
    """Return an element of a tensor of the dtype filled with the number, or None if it cannot represent it."""
    try:
        return torch.tensor(number, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError, ValueError):
        return None


def _literal_tensor(x: Node) -> Number | None:
    """Return the value of a constant that make_fx or export recorded.

    Parameters and buffers do not count, because the user may change them.
    """
    number = operator.attrgetter(x.target)(x.graph.owning_module)
    constant = node_info(x).constant or str(x.target).startswith(("_tensor_constant", "lifted_tensor_"))
    return number.item() if constant and not isinstance(number, FakeTensor) else None


def scalar_value(x: Any, dtype: torch.dtype) -> float | None:
    """Return a Python scalar, or the value of a 0-dim tensor of this dtype, as a float, or None if it is unknown."""
    if is_tensor(x) and not x.meta["val"].ndim and x.meta["val"].dtype == dtype:
        x = constant_value(x)
    return float(x) if isinstance(x, Number) and not isinstance(x, bool) else None
