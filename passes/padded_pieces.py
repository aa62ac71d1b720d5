"""Sums of pieces that are padded with zeros -> the pieces side by side. Autograd makes them where pieces were read.

cat([p, zeros]) + cat([zeros, q])                                       ->  cat([p, q])
select_backward(p, shape, d, 0) + select_backward(q, shape, d, 1)       ->  stack([p, q], d)

Exact: every element is one piece's. In joint graphs of ATen ops, decomposed for Inductor or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..shapes import Size, sizes
from .edit import Editor
from .exchanges import is_exchange
from .moves import name_of, value_of
from .writes import between

aten = torch.ops.aten
_ZEROS = frozenset("zeros zeros_like new_zeros".split())
_FILLS = frozenset("full full_like new_full".split())


class Padded(NamedTuple):
    """A piece of `length` positions of dim from start on; length None: one position, without the dim.

    zeros: the nodes around it.
    """

    piece: Node
    dim: int
    start: int
    length: int | None
    zeros: tuple[Node, ...] = ()


def join_padded(editor: Editor, writes: frozenset[Node]) -> bool:
    """Edit the graph in place, if it has exchanges; whether there was such a sum. writes: to memory, in the graph."""
    nodes = list(editor.graph.nodes)
    changed = False
    for node in reversed(nodes) if any(map(is_exchange, nodes)) else ():
        pieces = _pieces(node) if node.users else None  # the parts of one that was replaced have none
        if pieces is None:
            continue
        # Neither may the zeros have been filled with something else since they were made.
        first = min(part for leaf in pieces for part in (leaf.piece, *leaf.zeros))
        if not between(writes, first, node):
            _replace(editor, node, pieces)
            changed = True
    return changed


def _pieces(node: Node) -> list[Padded] | None:
    """What is added up in the node, in order, if it is all of it and each once."""
    if not _is_sum(node):
        return None
    found: list[Padded] = []
    waiting: list[Any] = list(node.args[:2])
    while waiting:
        part = waiting.pop()
        leaf = _leaf(part) if _shape(part) == _shape(node) else None  # pieces are not broadcast
        if leaf is not None:
            found.append(leaf)
        elif isinstance(part, Node) and _is_sum(part) and len(part.users) == 1:
            waiting += part.args[:2]
        else:
            return None
    found.sort(key=lambda leaf: leaf.start)
    first, at = found[0], 0
    for leaf in found:
        if (leaf.dim, leaf.length is None, leaf.start) != (first.dim, first.length is None, at):
            return None
        at += 1 if leaf.length is None else leaf.length
    whole = sizes(value_of(node).shape)
    alike = all(value_of(leaf.piece).dtype == value_of(node).dtype for leaf in found)
    return found if alike and whole[first.dim] == at else None


def _is_sum(node: Node) -> bool:
    added = node.target is aten.add.Tensor and not node.kwargs
    return added and len(node.args) == 2 and all(isinstance(x, Node) for x in node.args)


def _shape(node: object) -> tuple[Size, ...] | None:
    value = value_of(node) if isinstance(node, Node) else None
    return sizes(value.shape) if isinstance(value, torch.Tensor) else None


def _leaf(node: object) -> Padded | None:
    whole = _shape(node)
    if not isinstance(node, Node) or node.op != "call_function" or node.kwargs or whole is None:
        return None
    name, args = name_of(node), node.args
    if name == "cat" and isinstance(args[0], list | tuple):
        found = _of_cat(args[0], args[1] if len(args) > 1 else 0)
    elif name == "select_backward" and len(args) == 4:
        found = _at(args[0], args[2], args[3], None, whole)
    elif name == "slice_backward" and len(args) == 6 and args[5] == 1:
        found = _at(args[0], args[2], args[3], args[4], whole)
    elif name == "select_scatter" and len(args) == 4 and _is_zero(args[0]):
        found = _at(args[1], args[2], args[3], None, whole, args[0])
    elif name == "slice_scatter" and len(args) == 5 and _is_zero(args[0]):
        found = _at(args[1], args[2], args[3] or 0, args[4], whole, args[0])
    else:
        return None
    return found if found is not None and _shape(found.piece) == _part(whole, found) else None


def _part(whole: Sequence[Size], leaf: Padded) -> tuple[Size, ...]:
    """The shape that the piece has to have."""
    own = [] if leaf.length is None else [leaf.length]
    return (*whole[: leaf.dim], *own, *whole[leaf.dim + 1 :])


def _at(piece: Any, dim: Any, start: Any, end: Any, whole: Sequence[Any], *zeros: Node) -> Padded | None:
    size = whole[dim]
    if not all(isinstance(x, int) for x in (start, size)) or not (end is None or isinstance(end, int)):
        return None
    start = start + size if start < 0 else start
    return Padded(piece, dim % len(whole), start, None if end is None else min(end, size) - start, zeros)


def _of_cat(parts: Sequence[Node], dim: int) -> Padded | None:
    """Of zeros and one piece."""
    live = [i for i, part in enumerate(parts) if not _is_zero(part)]
    if len({value_of(part).ndim for part in parts}) > 1:
        return None  # cat takes empty ones of one dim too
    zeros = tuple(part for part in parts if _is_zero(part))
    lengths = [sizes(value_of(part).shape)[dim] for part in parts]
    if len(live) != 1 or len(parts) == 1 or not all(isinstance(length, int) for length in lengths):
        return None
    (i,) = live
    return Padded(parts[i], dim % value_of(parts[i]).ndim, sum(lengths[:i]), lengths[i], zeros)


def _is_zero(node: object) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    return name_of(node) in _ZEROS or (name_of(node) in _FILLS and len(node.args) > 1 and node.args[-1] == 0)


def _replace(editor: Editor, node: Node, pieces: list[Padded]) -> None:
    target = aten.stack.default if pieces[0].length is None else aten.cat.default
    with editor.graph.inserting_before(node):
        joined = editor.compute(target, ([leaf.piece for leaf in pieces], pieces[0].dim), node)
    editor.replace(node, joined)
