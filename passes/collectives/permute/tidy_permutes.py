"""What autograd and AOTAutograd write around exchanges, brought back to what was meant.

Sums of pieces that are padded with zeros -> the pieces side by side. Autograd makes them where pieces were read.

    cat([p, zeros]) + cat([zeros, q])                                       ->  cat([p, q])
    select_backward(p, shape, d, 0) + select_backward(q, shape, d, 1)       ->  stack([p, q], d)

Exact: every element is one piece's. In joint graphs of ATen ops, decomposed for Inductor or not.

A buffer that is made only to be filled with what an exchange brings -> what it brings.

    copy(empty_like(x), wait)                                               ->  wait
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.base import Pass
from sp_compile.passes.canonical.pad_inputs import padding
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import WAIT, Call, is_tensor, packet_of
from sp_compile.passes.graph.sizes import Size, sizes
from sp_compile.passes.sharding.matchers import Piece, constant_of

aten = torch.ops.aten


class DropBuffers(Pass):
    """An exchange's result instead of a buffer like it that the result fills."""

    def apply(self, gm: GraphModule, job: Job) -> int:
        copies = gm.graph.find_nodes(op="call_function", target=aten.copy.default)
        found = [node for node in copies if node.args[1].target is WAIT and _same_layout(*node.args[:2])]
        for node in found:
            self.replace(node, node.args[1])
        return len(found)


def _same_layout(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    shaped = sizes(x.shape) == sizes(y.shape) and sizes(x.stride()) == sizes(y.stride())
    return shaped and (x.dtype, x.device) == (y.dtype, y.device)


class JoinPadded(Pass):
    """Pieces side by side instead of a sum of padded ones."""

    def apply(self, gm: GraphModule, job: Job) -> int:
        # The parts of a sum that was replaced have no users.
        return sum([node.users != {} and self._joined(node) for node in reversed(list(gm.graph.nodes))])

    def _joined(self, node: Node) -> bool:
        pieces = _pieces(node)
        if pieces is None:
            return False
        target = aten.cat.default if pieces[0].keeps else aten.stack.default
        with self.graph.inserting_before(node):
            joined = self.compute(target, ([leaf.source for leaf in pieces], pieces[0].dim), node)
        self.replace(node, joined)
        return True


def _pieces(node: Node) -> list[Piece] | None:
    """What is added up in the node, in order, if it is all of it and each once."""
    if not _is_sum(node):
        return None
    found: list[Piece] = []
    waiting: list[Any] = list(node.args[:2])
    while waiting:
        part = waiting.pop()
        leaf = placed(part) if _shape(part) == _shape(node) else None  # pieces are not broadcast
        if leaf is not None:
            found.append(leaf)
        elif _is_sum(part) and len(part.users) == 1:
            waiting += part.args[:2]
        else:
            return None
    found.sort(key=lambda leaf: leaf.start)
    first, at = found[0], 0
    for leaf in found:
        if (leaf.dim, leaf.keeps, leaf.start) != (first.dim, first.keeps, at):
            return None
        at += leaf.length
    value = node.meta["val"]
    of_one_type = all(leaf.source.meta["val"].dtype == value.dtype for leaf in found)
    return found if of_one_type and sizes(value.shape)[first.dim] == at else None


def _is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and all(map(is_tensor, node.args))


def _shape(node: Node) -> tuple[Size, ...]:
    return sizes(node.meta["val"].shape)


def placed(node: Node) -> Piece | None:
    """What lies where in the node among zeros: padded, joined to them, or the gradient of a slice or a select."""
    pad, op = padding(node), packet_of(node)
    if pad is not None:
        inside = not pad.fill and all(isinstance(rows, int) and rows >= 0 for rows in (pad.before, pad.after))
        length = _shape(pad.source)[pad.dim]
        whole = inside and isinstance(length, int)
        return Piece(pad.source, pad.dim, pad.before, length) if whole else None
    if op not in (aten.select_backward, aten.slice_backward, aten.select_scatter, aten.slice_scatter):
        return None
    found = _of_slice(Call(node), op in (aten.select_backward, aten.select_scatter))
    return found if found is not None and _shape(found.source) == _part(_shape(node), found) else None


def _part(whole: Sequence[Size], leaf: Piece) -> tuple[Size, ...]:
    """The shape that the piece has to have."""
    own = [leaf.length] if leaf.keeps else []
    return (*whole[: leaf.dim], *own, *whole[leaf.dim + 1 :])


def _of_slice(call: Call, one: bool) -> Piece | None:
    """Of a slice, or of `one` position: written into zeros, or their gradient."""
    whole, dim = call.result_shapes()[0], call["dim"]
    start, end = (call["index"], None) if one else (call["start"] or 0, call["end"] or whole[dim])
    known = all(isinstance(x, int) for x in (start, whole[dim], end or 0))
    if not known or call.get("step", 1) != 1 or ("self" in call.args and constant_of(call["self"]) != 0):
        return None
    start = start + whole[dim] if start < 0 else start
    length = 1 if one else min(end, whole[dim]) - start
    return Piece(call.get("grad_output") or call["src"], dim % len(whole), start, length, keeps=not one)
