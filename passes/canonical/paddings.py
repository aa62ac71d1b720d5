"""Constants at the ends of a dim become part of the op that reads them, so that nothing is longer than its sequence.

    constant_pad_nd(x, (k, 0))[..., :S]              ->   sp.shift(x, dim, k, -k, value)
    conv1d(constant_pad_nd(x, (k, 0)), w)            ->   sp.conv1d(x, w, None, k, 0)         pools and unfold alike
    conv1d(x, w, padding=k)[..., :S]                 ->   sp.conv1d(x, w, None, k, 0)
    cat([zeros of k rows, x[:-k]])                   ->   sp.shift(x, dim, k, -k, 0)

Part of canonicalize, behind the idioms of scans, which are spelt with the same words. Bytes moved: none. Leaves alone:
paddings of several dims, paddings and convolutions that anything else reads as they are, and lengths that are not
provably those of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile._compat import OpOverload
from sp_compile.graph.call import Call
from sp_compile.graph.sizes import Size, same, size
from sp_compile.passes.base import Spelling, register
from sp_compile.passes.job import Job
from sp_compile.sharding.matchers import constant_of, origin, pad_of, readers, slice_of
from sp_compile.sharding.windows import Slides, Sliding, plain, slides_of

aten, sp = torch.ops.aten, torch.ops.sp


@dataclass(frozen=True)
class Padded:
    """x with `before` rows of `fill` in front of it along `dim`, and perhaps some behind it."""

    x: Node
    dim: int
    before: Size
    fill: Any


@register
class Paddings(Spelling):
    """Rewrites the padded windows of one graph."""

    name = "paddings"
    requires = frozenset({"scan idioms"})  # which are written with the same words

    def apply(self, gm: GraphModule, job: Job) -> int:
        changes = 0
        for rewrite in (self._read, self._cut):  # what reads a padding may itself be cut
            for node in list(self.graph.nodes):
                if node.op == "call_function" and node.users:
                    changes += rewrite(node)
        return changes

    def _read(self, node: Node) -> bool:
        """A padding becomes part of everything that reads it, or stays."""
        cut = _padding(node)
        if cut is None:
            return False
        length = _rows(node, cut.dim)
        padded = _uncut(cut, length)
        whole = _shift(padded, 0, length)
        shifts = _fits(length, padded) and (node.target is aten.cat.default or padded is not cut)
        if shifts and _spelt(whole, _rows(padded.x, padded.dim)):
            self._slide([node], padded.x, padded.dim, whole)
            return True
        users = readers(node)
        found = [_reading(user, node, padded) for user in users]
        known = [one for one in found if one is not None and _spelt(one, _rows(padded.x, padded.dim))]
        if len(known) < len(found):
            return False
        for user, one in zip(users, known):
            self._slide([user], padded.x, padded.dim, one)
        return True

    def _cut(self, node: Node) -> bool:
        """What is longer than its sequence and cut back at once is never made."""
        call = Call(node) if isinstance(node.target, OpOverload) else None
        for dim, slides in slides_of(call).items() if call is not None else ():
            assert call is not None
            users, rows = readers(node), call.shape()[dim]
            cuts = [_span(user, node, dim) for user in users]
            if slides.first is not None or slides.sliding.fits(rows) or cuts[0] is None or len(set(cuts)) > 1:
                continue
            (start, length), sliding = cuts[0], slides.sliding
            before = plain(sliding.before - start * sliding.stride)
            one = replace(slides, sliding=replace(sliding, before=before, length=length))
            if _spelt(one, rows):
                self._slide(users, call.operands[0], dim, one, before=node)
                return True
        return False

    def _slide(self, nodes: list[Node], x: Node, dim: int, slides: Slides, before: Node | None = None) -> None:
        """One call in the place of nodes that are all the same."""
        with self.graph.inserting_before(before or nodes[0]):
            args = (x, *slides.args(_rows(x, dim)))
            new = self.emit(slides.op, args, nodes[0].meta["val"], nodes[0])
        for node in nodes:
            self.replace(node, new)


def _rows(x: Node, dim: int) -> Size:
    return size(x.meta["val"].shape[dim])


def _shift(padded: Padded, start: Size, length: Size) -> Slides:
    """So many rows of a padded value, from `start` on."""
    sliding = Sliding(length, plain(padded.before - start))
    return Slides(sliding, sp.shift.default, (padded.dim,), (padded.fill,))


def _spelt(slides: Slides, rows: Size) -> bool:
    """Are all its numbers known?"""
    return isinstance(slides.sliding.before, int) and isinstance(slides.sliding.after(rows), int)


def _uncut(padded: Padded, length: Size) -> Padded:
    """The same rows as a padding of what x is a slice of, unless rows that the slice left out would show."""
    x, dim, before = padded.x, padded.dim, padded.before
    piece = slice_of(x)
    if piece is None or piece.dim != dim:
        return padded
    start, rows, source = piece.start, piece.length, origin(piece.source)
    in_front = same(start, 0) or (isinstance(before, int) and before <= 0)
    after = plain(length - rows - before)
    behind = same(start + rows, _rows(source, dim)) or (isinstance(after, int) and after <= 0)
    if not (in_front and behind):
        return padded
    return _uncut(replace(padded, x=source, before=plain(before - start)), length)


def _fits(length: Size, padded: Padded) -> bool:
    """Is a result of so many rows no longer than the sequence that x is a slice of?"""
    source = padded.x
    while (piece := slice_of(source)) is not None:
        source = origin(piece.source)
    return Sliding(length).fits(_rows(source, padded.dim))


def _padding(node: Node) -> Padded | None:
    if node.target is aten.cat.default:
        return _joined(node)
    pad = pad_of(node)
    return Padded(origin(pad.source), pad.dim, pad.before, pad.fill) if pad is not None else None


def _joined(node: Node) -> Padded | None:
    """A cat of constants and one other value."""
    call, value = Call(node), node.meta["val"]
    fills = [constant_of(o) if o.meta["val"].dtype == value.dtype else None for o in call.operands]
    others = [i for i, fill in enumerate(fills) if fill is None]
    if len(others) != 1 or len(fills) < 2 or len({f for f in fills if f is not None}) != 1:
        return None
    x, dim = call.operands[others[0]], call.dim()
    if x.meta["val"].dtype != value.dtype:
        return None
    before = plain(sum((call.shape(i)[dim] for i in range(others[0])), start=0))
    return Padded(origin(x), dim, before, next(f for f in fills if f is not None))


def _span(user: Node, node: Node, dim: int) -> tuple[Size, Size] | None:
    """(start, length) if the user is a slice of the node along the dim."""
    piece = slice_of(user)
    of = piece is not None and piece.dim == dim and origin(piece.source) is origin(node)
    return (piece.start, piece.length) if piece is not None and of else None


def _reading(user: Node, node: Node, padded: Padded) -> Slides | None:
    """What reads a padding, as a window that slides over what is padded; its own constants must be the same."""
    span = _span(user, node, padded.dim)
    if span is not None:
        return _shift(padded, *span)
    if not isinstance(user.target, OpOverload) or origin(user.all_input_nodes[0]) is not origin(node):
        return None
    call = Call(user)
    slides = slides_of(call).get(padded.dim)
    reads = [origin(x) for x in call.operands].count(origin(node))
    if slides is None or slides.op in (sp.roll.default, sp.shift.default) or reads > 1:
        return None
    fill: Any = 0
    if slides.op in FILLED:
        if not _pads(slides.sliding, call.shape()[padded.dim]):
            slides = replace(slides, tail=(padded.fill, *slides.tail[1:]))
        fill = slides.tail[0]
    before = plain(slides.sliding.before + padded.before)
    return replace(slides, sliding=replace(slides.sliding, before=before)) if fill == padded.fill else None


FILLED = (sp.max_pool1d.default, sp.unfold.default)


def _pads(sliding: Sliding, rows: Size) -> bool:
    after = sliding.after(rows)
    return not (same(sliding.before, 0) and isinstance(after, int) and after <= 0)
