"""Constants at the ends of a dim become part of the op that reads them, so that nothing is longer than its sequence.

    constant_pad_nd(x, (k, 0))[..., :S]              ->   sp.shift(x, dim, k, -k, value)
    conv1d(constant_pad_nd(x, (k, 0)), w)            ->   sp.conv1d(x, w, None, k, 0)         pools and unfold alike
    conv1d(x, w, padding=k)[..., :S]                 ->   sp.conv1d(x, w, None, k, 0)
    cat([zeros of k rows, x[:-k]])                   ->   sp.shift(x[:-k], dim, k, 0, 0)

Part of canonicalize, behind the idioms of scans, which are spelt with the same words. Bytes moved: none. Leaves alone:
paddings of several dims, paddings and convolutions that anything else reads as they are, and lengths that are not
provably those of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..call import Call
from ..movement import Window
from ..rule import lookup
from ..shapes import Size, same, size
from ..sliding import Sliding, plain
from ..sliding_calls import Slides, slides_of
from .edit import Editor

aten, sp = torch.ops.aten, torch.ops.sp
FILLS: dict[Any, Any] = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.full.default: None,
    aten.full_like.default: None,
}


@dataclass(frozen=True)
class Padded:
    """x with `before` rows of `fill` in front of it along `dim`, and perhaps some behind it."""

    x: Node
    dim: int
    before: Size
    fill: Any

    @property
    def rows(self) -> Size:
        """How many rows x has."""
        return size(self.x.meta["val"].shape[self.dim])


class Paddings(Editor):
    """Rewrites the padded windows of one graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.edit(gm.graph)

    def run(self) -> bool:
        """True if the graph changed."""
        changed = False
        for rewrite in (self._cut, self._read, self._cut):  # what reads a padding may itself be cut
            for node in list(self.graph.nodes):
                if node.op == "call_function" and node.users:
                    changed = rewrite(node) or changed
        return changed

    def _read(self, node: Node) -> bool:
        """A padding becomes part of everything that reads it, or stays."""
        padded = _padding(node)
        if padded is None:
            return False
        if node.target is aten.cat.default and _fits(node, padded):
            length = size(node.meta["val"].shape[padded.dim])
            whole = Slides(Sliding(length, padded.before), sp.shift.default, (padded.dim,), (padded.fill,))
            return self._slide(node, padded.x, padded.dim, whole)
        found = [_reading(user, node, padded) for user in node.users]
        if not all(one is not None and _spelt(one, padded.rows) for one in found):
            return False
        for user, one in zip(list(node.users), found):
            self._slide(user, padded.x, padded.dim, one)
        return True

    def _cut(self, node: Node) -> bool:
        """What is longer than its sequence and cut back at once is never made."""
        call = Call(node) if node.target in WINDOWS else None
        for dim, slides in slides_of(call).items() if call is not None else ():
            assert call is not None
            cuts = [_span(user, node, dim) for user in node.users]
            rows = call.shape()[dim]
            if slides.first is not None or slides.sliding.fits(rows) or None in cuts or len(set(cuts)) != 1:
                continue
            assert cuts[0] is not None
            start, length = cuts[0]
            before = plain(slides.sliding.before - start * slides.sliding.stride)
            one = replace(slides, sliding=replace(slides.sliding, before=before, length=length))
            if _spelt(one, rows):
                first, *others = node.users
                for other in others:
                    other.replace_all_uses_with(first)
                    self.graph.erase_node(other)
                return self._slide(first, call.operands[0], dim, one)
        return False

    def _slide(self, node: Node, x: Node, dim: int, slides: Slides | None) -> bool:
        assert slides is not None
        with self.graph.inserting_before(node):
            args = (x, *slides.args(size(x.meta["val"].shape[dim])))
            new = self.emit(slides.op, args, node.meta["val"], node)
        self.replace(node, new)
        return True


WINDOWS = (aten.conv1d.default, aten.convolution.default, sp.conv1d.default)


def _spelt(slides: Slides, rows: Size) -> bool:
    """Are all its numbers known?"""
    return isinstance(slides.sliding.before, int) and isinstance(slides.sliding.after(rows), int)


def _fits(node: Node, padded: Padded) -> bool:
    """Is it no longer than the sequence that x is a slice of?"""
    source = padded.x
    while isinstance(lookup(source)[1] if lookup(source) else None, Window):  # type: ignore[index]
        source = Call(source).operands[0]
    length, whole = (size(n.meta["val"].shape[padded.dim]) for n in (node, source))
    return Sliding(length).fits(whole)


def _padding(node: Node) -> Padded | None:
    if node.target is aten.cat.default:
        return _joined(node)
    if node.target not in (aten.constant_pad_nd.default, aten.pad.default):
        return None
    call = Call(node)
    ((dim, slides), *others) = [*slides_of(call).items()] or [(0, None)]
    if slides is None or others or slides.first is not None:
        return None
    return Padded(call.operands[0], dim, slides.sliding.before, slides.tail[0])


def _joined(node: Node) -> Padded | None:
    """A cat of constants and one other value."""
    call, value = Call(node), node.meta["val"]
    fills = [_constant(o, value.dtype) for o in call.operands]
    others = [i for i, fill in enumerate(fills) if fill is None]
    if len(others) != 1 or len(fills) < 2 or len({f for f in fills if f is not None}) != 1:
        return None
    x, dim = call.operands[others[0]], call.dim()
    if x.meta["val"].dtype != value.dtype:
        return None
    before = plain(sum((call.shape(i)[dim] for i in range(others[0])), start=0))
    return Padded(x, dim, before, next(f for f in fills if f is not None))


def _constant(node: Node, dtype: torch.dtype) -> Any:
    """The number that a tensor is full of; None if it is not known to be a constant of this dtype."""
    if node.target not in FILLS or node.meta["val"].dtype != dtype:
        return None
    fill = FILLS[node.target]
    fill = Call(node)["fill_value"] if fill is None else fill
    return fill if isinstance(fill, (bool, int, float)) else None


def _span(user: Node, node: Node, dim: int) -> tuple[Size, Size] | None:
    """(start, length) if the user is a slice of the node along the dim."""
    found = lookup(user)
    rule = found[1] if found is not None else None
    if not isinstance(rule, Window) or user.target is not aten.slice.Tensor:
        return None
    assert found is not None
    return rule.spans[0] if rule.spans and rule.dim == dim and found[0].operands == [node] else None


def _reading(user: Node, node: Node, padded: Padded) -> Slides | None:
    """What reads a padding, as a window that slides over what is padded."""
    span = _span(user, node, padded.dim)
    if span is not None:
        sliding = Sliding(span[1], plain(padded.before - span[0]))
        return Slides(sliding, sp.shift.default, (padded.dim,), (padded.fill,))
    if user.op != "call_function" or node in user.all_input_nodes[1:]:
        return None
    call = Call(user) if isinstance(user.target, torch._ops.OpOverload) else None
    slides = slides_of(call).get(padded.dim) if call is not None else None
    if call is None or slides is None or slides.op in (sp.roll.default, sp.shift.default):
        return None
    pads_itself = not same(slides.sliding.before, 0) or not _at_most_zero(
        slides.sliding.after(call.shape()[padded.dim])
    )
    fill = slides.tail[0] if slides.op in FILLED else 0
    if slides.op in FILLED and not pads_itself:
        slides, fill = replace(slides, tail=(padded.fill, *slides.tail[1:])), padded.fill
    if fill != padded.fill:
        return None
    before = plain(slides.sliding.before + padded.before)
    return replace(slides, sliding=replace(slides.sliding, before=before))


FILLED = (sp.max_pool1d.default, sp.unfold.default)


def _at_most_zero(rows: Size) -> bool:
    return isinstance(rows, int) and rows <= 0
