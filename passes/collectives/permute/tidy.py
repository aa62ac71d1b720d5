"""A buffer that is made only to be filled: what is copied into it takes its place.

out = empty_like(x); out.copy_(y); f(out)   ->   f(y)      so Dynamo writes dist.all_to_all_single(out, x)
f(copy(empty_like(x), y))                   ->   f(y)      and AOTAutograd that

dist.all_to_all_single as make_fx records it, in place -> the functional collective and a copy into its buffer.

c10d.alltoall_base_(out, x, group, [], [])   ->   out.copy_(wait_tensor(all_to_all_single(x, ...)))

Sums of pieces that are padded with zeros -> the pieces side by side. Autograd makes them where pieces were read.

cat([p, zeros]) + cat([zeros, q])                                       ->  cat([p, q])
select_backward(p, shape, d, 0) + select_backward(q, shape, d, 1)       ->  stack([p, q], d)

Exact: every element is one piece's. In joint graphs of ATen ops, decomposed for Inductor or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule, Node

from sp_compile.graph.edit import Editor, infer
from sp_compile.graph.sizes import Size, sizes

from .arrangement import name_of, value_of
from .match import is_exchange
from .writes import between, is_write

_MAKERS = frozenset(
    "empty empty_like new_empty empty_strided new_empty_strided zeros zeros_like new_zeros full full_like".split()
)


def settle(graph: Graph) -> bool:
    """Edit the graph in place where an exchange's result fills a buffer; whether there was one.

    A buffer that is used before it is filled stays, and one that is not the only reader of what came: either may be
    written later.
    """
    changed = False
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not is_filling(node):
            continue
        buffer, source = node.args[:2]
        if name_of(node) == "copy_":
            if not _is_fresh(buffer) or any(place[user] < place[node] for user in buffer.users):
                continue
            buffer.replace_all_uses_with(source, delete_user_cb=lambda user, copy=node: user is not copy)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        if _is_fresh(buffer) and not buffer.users:
            graph.erase_node(buffer)
        changed = True
    return changed


def is_filling(node: Node) -> bool:
    """Does it copy all that an exchange brought, and nothing else reads, to a tensor like it?"""
    if node.op not in ("call_function", "call_method") or name_of(node) not in ("copy_", "copy"):
        return False
    if len(node.args) < 2 or not all(isinstance(x, Node) for x in node.args[:2]):
        return False
    buffer, source = node.args[:2]
    # Of what came, a buffer that is made like it reads the shape only.
    return _is_received(source) and set(source.users) <= {node, *_only(buffer)} and _alike(buffer, source)


def _is_received(source: Node) -> bool:
    if name_of(source) != "wait_tensor" or not source.args:
        return False
    return is_exchange(source.args[0]) and len(source.args[0].users) == 1


def _only(buffer: Node) -> list[Node]:
    return [buffer] if _is_fresh(buffer) else []


def _is_fresh(buffer: Node) -> bool:
    return (
        buffer.op in ("call_function", "call_method") and name_of(buffer) in _MAKERS and not is_write(buffer)
    )


def _alike(a: Node, b: Node) -> bool:
    x, y = value_of(a), value_of(b)
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    shaped = sizes(x.shape) == sizes(y.shape) and sizes(x.stride()) == sizes(y.stride())
    return shaped and (x.dtype, x.device) == (y.dtype, y.device)


aten, functional = torch.ops.aten, torch.ops._c10d_functional


def make_functional(gm: GraphModule) -> bool:
    """Edit the graph in place; whether there was one. Left alone: symbolic shares, and a buffer of another shape."""
    if not dist.is_available():
        return False
    found = gm.graph.find_nodes(op="call_function", target=torch.ops.c10d.alltoall_base_.default)
    return sum(_rewritten(gm, node) for node in found) > 0


def _rewritten(gm: GraphModule, node: Node) -> bool:
    out, x, holder, received, sent = node.args[:5]
    group = dist.ProcessGroup.unbox(getattr(gm, str(holder.target)))
    rows, n = sizes(value_of(x).shape), group.size()
    shares = (
        [list(given) or [rows[0] // n] * n for given in (received, sent)] if isinstance(rows[0], int) else []
    )
    fits = sizes(value_of(out).shape) == rows and all(sum(share) == rows[0] for share in shares)
    if node.users or not shares or not fits:
        return False
    with gm.graph.inserting_before(node):
        arrived: Node = node
        for target, args in (
            (functional.all_to_all_single.default, (x, *shares, group.group_name)),
            (functional.wait_tensor.default, ()),
            (aten.copy_.default, (out,)),
        ):
            given = args if target is functional.all_to_all_single.default else (*args, arrived)
            arrived = gm.graph.call_function(target, given)
            arrived.meta["val"] = (
                infer(target, given, {}) if target is not aten.copy_.default else value_of(out)
            )
    gm.graph.erase_node(node)
    if not holder.users:
        gm.graph.erase_node(holder)
    return True


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
