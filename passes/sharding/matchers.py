"""What one node does, whatever its op is called: does it copy, cast, permute, regroup, cut, pad, join or fill?

    source_of(view(x))       x                              the op moves, cuts, repeats or casts the elements of x
    is_copy(clone(x))                   is_cast             the same values at the same places; in another dtype
    order_of(x.mT)           (0, 2, 1)                      dims of x in the order of the result's
    piece_of(x[:, 1:])       Piece(x, 1, 1, S - 1)          also narrow, select, and one result of a split or an unbind
    pad_of(pad(x, (k, 0)))   Pad(x, dim, k, 0, fill)
    constant_of(zeros(3).view(3, 1).clone())   0.0

What moves elements, and where it moves them, is read off the op's rule (`rule.py`), so that an op which gets a rule is
known here, too. `origin` reads through what changes nothing: copies, and views that undo each other. No node is made.
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
from sp_compile.passes.graph.call import Call, is_tensor, overloads, shape_of, tensors_of
from sp_compile.passes.graph.closure import reached
from sp_compile.passes.graph.mutation import is_pure, is_written
from sp_compile.passes.graph.node_info import record
from sp_compile.passes.graph.sizes import Size, all_same, from_front, product, same, size
from sp_compile.passes.graph.strides import is_identity

from .factors import Factors, flat
from .rule import lookup
from .window_rules import slides_of

aten = torch.ops.aten
Number = int | float
FULL_OF: dict[Any, Number] = {
    **dict.fromkeys(overloads("zeros zeros_like new_zeros"), 0),
    **dict.fromkeys(overloads("ones ones_like new_ones"), 1),
}
FILLS = overloads("full full_like new_full")
LITERALS = overloads("lift_fresh lift_fresh_copy")  # of a number that the program writes down
GRADIENT_ENDS = {*LITERALS, aten.detach.default}  # no gradient goes past them
JOINS = overloads("cat concat concatenate stack hstack vstack row_stack dstack")
PADS = overloads("constant_pad_nd pad")
NO_MOVES = re.compile("new_.*|.*_like|view[.]dtype")  # lazy, too, but they do not read what the elements are


def _movement(node: Any) -> tuple[Node, Factors] | None:
    """The operand whose elements are all that the result has, and the rule that says where they go.

    None of a detach that stops a gradient: what is behind it is another value to whoever differentiates.
    """
    found = lookup(node) if is_tensor(node) and not _is_private(node) and not _stops_gradient(node) else None
    if found is None or node.target.namespace not in ("aten", "prims") or NO_MOVES.match(str(node.target)[5:]):
        return None
    call, rule = found
    if not call.operands:
        return None
    lent = [x for x in call.operands[1:] if x is not call.get("other")]  # view_as, type_as: its shape, its dtype
    moves = rule is not None and rule.lazy and (rule.reshapes or rule.spans or not rule.kinds)
    return (call.operands[0], rule) if moves and rule is not None and not lent else None


def _is_private(node: Node) -> bool:
    """Is it the clone that functionalize has made for an op without a functional form, which writes it?"""
    return node.target is aten.clone.default and is_written(node)


def _stops_gradient(node: Node) -> bool:
    return node.target is aten.detach.default and carries_gradient(node.args[0])


def carries_gradient(node: Node) -> bool:
    """Is it made of floats that may need a gradient?"""
    made_of = reached([node], lambda n: n.all_input_nodes if _floats(n) and n.target not in GRADIENT_ENDS else ())
    leaves = (n for n in made_of if n.op in ("placeholder", "get_attr") and is_tensor(n) and _floats(n))
    return any(record(leaf).requires_grad is not False for leaf in leaves)


def _floats(node: Node) -> bool:
    """Are there floats in what it gives? A size of floats is none."""
    return any(x.is_floating_point() or x.is_complex() for x in tensors_of(node))


def source_of(node: Any) -> Node | None:
    """The operand that the op moves, cuts, repeats, copies or casts: every element of the result is one of it."""
    found = _movement(node)
    return found[0] if found is not None else None


def is_cast(node: Any) -> bool:
    """Is the result the operand in another dtype, or on another device?"""
    found = _movement(node)
    return found is not None and not _same_type(found[0], node) and _stays(_order(node, *found))


def uncast(node: Any) -> Node | None:
    """x, if the node is x in a wider dtype, which has all its values, and in its own again."""
    wide = source_of(node) if is_cast(node) else None
    x = source_of(wide) if is_cast(wide) else None
    if wide is None or x is None or not _same_type(x, node):
        return None
    a, b = (n.meta["val"].dtype for n in (x, wide))
    kinds = [(d.is_floating_point, d.is_complex, d.is_signed) for d in (a, b)]
    wider = kinds[0] == kinds[1] and b.itemsize > a.itemsize >= 1 + a.is_floating_point  # one byte has any exponent
    return x if wider or a is torch.bool else None


def is_copy(node: Any) -> bool:
    """The same values at the same places: clone, contiguous, alias, a view to its own shape, a cast to its own dtype.

    A detach is one where no gradient would pass.
    """
    return _stays(order_of(node))


def _same_type(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    return x.dtype == y.dtype and x.device == y.device


def _stays(order: tuple[int, ...] | None) -> bool:
    return order is not None and is_identity(order)


def order_of(node: Any) -> tuple[int, ...] | None:
    """The dims of the operand in the order of the result's, if the op permutes dims or copies; None for all else."""
    found = _movement(node)
    return _order(node, *found) if found is not None and _same_type(found[0], node) else None


def _order(node: Node, source: Node, rule: Factors) -> tuple[int, ...] | None:
    before, after = rule.operands[0], rule.results[0]
    if rule.reshapes or rule.spans:
        return tuple(range(len(after))) if _sameshape_of(source, node) else None
    permuted = "" not in before and sorted(before) == sorted(after)
    return tuple(before.index(f) for f in after) if permuted else None


def keeps_order(node: Any) -> bool:
    """Does the op change nothing but the shape: view, flatten, unsqueeze, squeeze, and copies?"""
    found = _movement(node)
    if found is None or not _same_type(found[0], node):
        return False
    source, rule = found
    kept = flat(rule.operands[0]) == flat(rule.results[0])
    return rule.reshapes or (kept and same(product(shape_of(source)), product(shape_of(node))))


def element_of(node: Node, at: Sequence[Any]) -> tuple[Node, tuple[Any, ...]] | None:
    """The operand, and which of its elements the result has at the coordinates; None where the op does not say."""
    found = _movement(node)
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


def behind(node: Node, passes: Callable[[Node], bool]) -> Node:
    """The value that ops of one operand, those that `passes` lets through, have made this one of."""
    while node.op == "call_function" and passes(node):
        node = Call(node).operands[0]
    return node


def before_reshapes(node: Node) -> Node:
    """The value that all changes of the shape began with."""
    node = origin(node)
    while keeps_order(node):
        node = origin(Call(node).operands[0])
    return node


def _sameshape_of(a: Node, b: Node) -> bool:
    return all_same(shape_of(a), shape_of(b))


def origin(node: Any) -> Any:
    """The first value that holds the same elements at the same places: without copies, and views undone again."""
    if not rearranges(node):
        return node
    chain, at = [], node
    while rearranges(at):
        chain.append(at)
        at = Call(at).operands[0]
    found = {at: at}
    for step in reversed(chain):
        before = found[Call(step).operands[0]]
        found[step] = before if is_copy(step) else _undone(step, before, found)
    return found[node]


def rearranges(node: Any) -> bool:
    """The same elements, each once, in other places or another shape, and all of the gradient: can that be undone?"""
    return order_of(node) is not None or keeps_order(node)


def _undone(node: Node, operand: Node, found: dict[Node, Node]) -> Node:
    """What a chain of permutations, or one of changes of the shape, ends where it began."""
    order, at = order_of(node), operand
    while order is not None and rearranges(at) and (inner := order_of(at)) is not None:
        order, at = tuple(inner[d] for d in order), Call(at).operands[0]
        if is_identity(order):
            return found[at]
    at = operand
    while keeps_order(node):
        if _sameshape_of(at, node):
            return found[at]
        if not rearranges(at) or not keeps_order(at):
            break
        at = Call(at).operands[0]
    return node


def steps_to(node: Node, source: Node) -> list[Node]:
    """From the source, without it, to the node, where the source is `origin(node)`; in the graph's order."""
    steps: list[Node] = []
    while node is not source:
        steps.insert(0, node)
        node = Call(node).operands[0]
    return steps


def steps_from(node: Node) -> list[Node]:
    """What only each other read, from behind a value to the last that is the same value again; often nothing."""
    steps: list[Node] = []
    last, at = 0, node
    while len(at.users) == 1:
        (at,) = at.users
        if not rearranges(at):
            break
        steps.append(at)
        last = len(steps) if origin(at) is origin(node) else last
    return steps[:last]


def readers(node: Node) -> list[Node]:
    """Who reads the value, directly or through what `origin` reads through."""
    found: dict[Node, None] = {}
    waiting = [node]
    while waiting:
        value = waiting.pop(0)
        for user in value.users:
            if rearranges(user) and user.users and Call(user).operands[0] is value:
                waiting.append(user)
            else:
                found[user if origin(value) is origin(node) else value] = None
    return list(found)


def same_call(a: Node, b: Node) -> bool:
    """Are they one value: the same node, or the same call of a pure op?"""
    alike = a.op == "call_function" and (a.target, a.args, a.kwargs) == (b.target, b.args, b.kwargs)
    return a is b or (alike and is_pure(a))


def dies_with(value: Node, node: Node) -> bool:
    """Does all that reads the value, at any distance, lead to the node and nowhere else?"""
    readers = reached([value], lambda n: n.users if n < node else ())
    return all(n is node or (n.users and n < node) for n in readers)


@dataclass(frozen=True)
class Piece:
    """Positions start, start + step, ... of a dim of the source; keeps: the piece has that dim, too."""

    source: Node
    dim: int
    start: Size
    length: Size
    step: int = 1
    keeps: bool = True


def piece_of(node: Any) -> Piece | None:
    """A slice, a select, or one result of a split, a chunk or an unbind; None where its place is not provable."""
    if not is_tensor(node) or node.op != "call_function":
        return None
    return nth_piece(*node.args) if node.target is operator.getitem else nth_piece(node, 0)


def nth_piece(of: Node, which: Any) -> Piece | None:
    """One of the results of a node."""
    found = lookup(of)
    if found is None or not isinstance(which, int):
        return None
    call, rule = found
    if rule is not None and rule.window is not None:
        return Piece(call.operands[0], rule.window, *rule.spans[which])
    if of.target in (aten.select.int, aten.unbind.int):
        at = size(call["index"]) if of.target is aten.select.int else which
        if not isinstance(at, int):  # of a sign that is not known
            return None
        return Piece(call.operands[0], call.dim(), from_front(at, call.shape()[call.dim()]), 1, keeps=False)
    return _strided(call) if of.target is aten.slice.Tensor else None


def _strided(call: Call) -> Piece | None:
    """A slice that leaves rows out, where numbers tell which."""
    dim, start, step = call.dim(), call["start"] or 0, call["step"]
    extent, length = call.shape()[dim], shape_of(call.node)[dim]
    if step == 1 or not all(isinstance(n, int) for n in (start, step, extent)):
        return None
    return Piece(call.operands[0], dim, min(max(from_front(start, extent), 0), extent), length, step)


def slice_of(node: Any) -> Piece | None:
    """A contiguous piece that keeps its dim: a slice, a narrow, or one result of a split or a chunk."""
    piece = piece_of(node)
    return piece if piece is not None and piece.keeps and piece.step == 1 else None


def join_of(node: Any) -> tuple[int, bool] | None:
    """The dim along which a cat or a stack joins several operands, and whether that is a new one."""
    found = lookup(node) if node.target in JOINS else None
    if found is None or found[1] is None:
        return None
    before, after = found[1].operands[0], found[1].results[0]
    along = [d for d, f in enumerate(after) if f not in before]
    return (along[0], len(after) > len(before)) if len(along) == 1 else None


@dataclass(frozen=True)
class Pad:
    """The source with `before` and `after` rows of a number around it along a dim; negative ones cut it."""

    source: Node
    dim: int
    before: Size
    after: Size
    fill: Any


def pad_of(node: Node) -> Pad | None:
    """A pad of one dim by a constant."""
    along = slides_of(Call(node)) if node.target in PADS else {}
    if len(along) != 1:
        return None
    ((dim, slides),) = along.items()
    call, before = Call(node), slides.sliding.before
    after = slides.sliding.after(call.shape()[dim])
    return Pad(call.operands[0], dim, before, after, slides.tail[0]) if slides.first is None else None


def counts_up(node: Any) -> bool:
    """Is it 0, 1, 2, ...?"""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node.target is aten.arange.default:
        return True
    call = Call(node) if node.target in (aten.arange.start, aten.arange.start_step) else None
    return call is not None and call["start"] == 0 and call.get("step", 1) == 1


def constant_of(node: Any) -> Number | None:
    """The number that every element of a tensor holds, where the graph itself says it; None if it is not known."""
    if not is_tensor(node) or is_written(node):
        return None
    if node.op == "get_attr":
        return _held(node) if not node.meta["val"].ndim else None
    if node.op != "call_function" or node.target in FULL_OF:
        return FULL_OF.get(node.target)
    if node.target in FILLS or node.target is aten.scalar_tensor.default:
        fill = Call(node)["fill_value" if node.target in FILLS else "s"]
        held = fill if isinstance(fill, Number) else constant_of(fill)
        return None if held is None else _in_dtype(held, node.meta["val"].dtype)
    if node.target is aten.repeat.default:
        return constant_of(node.args[0])
    if node.target is aten.sqrt.default:
        root = constant_of(node.args[0])
        return math.sqrt(root) if root is not None and root >= 0 else None
    source = source_of(node)
    held = constant_of(source) if source is not None else None
    return held if held is None or source is None or _same_type(source, node) else _cast(held, node.meta["val"].dtype)


def _cast(held: Number, dtype: torch.dtype) -> Number | None:
    """The same number in the dtype, if that holds it exactly."""
    found = _in_dtype(held, dtype)
    return found if found == held else None


def _in_dtype(held: Number, dtype: torch.dtype) -> Number | None:
    """What a tensor of the dtype holds that is filled with the number; None if it cannot hold it."""
    try:
        return torch.tensor(held, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError, ValueError):
        return None


def _held(x: Node) -> Number | None:
    """Written down by a trace, make_fx's or export's: neither a parameter nor a buffer, which the user may change."""
    held = operator.attrgetter(x.target)(x.graph.owning_module)
    constant = record(x).constant or str(x.target).startswith(("_tensor_constant", "lifted_tensor_"))
    return held.item() if constant and not isinstance(held, FakeTensor) else None


def scalar(x: Any, dtype: torch.dtype) -> float | None:
    """A Python number, or what a tensor of no dims and of this dtype holds; None if it is not known, or not exactly."""
    if is_tensor(x) and not x.meta["val"].ndim and x.meta["val"].dtype == dtype:
        x = constant_of(x)
    return float(x) if isinstance(x, Number) and not isinstance(x, bool) else None
