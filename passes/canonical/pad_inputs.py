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

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.base import Spelling, register
from sp_compile.passes.context import Job
from sp_compile.passes.graph.call import Call, shape_of
from sp_compile.passes.graph.sizes import Size, same
from sp_compile.passes.sharding.matchers import Pad, constant_of, join_of, origin, pad_of, readers, slice_of
from sp_compile.passes.sharding.window_rules import SlidingRows, WindowCall, plain, slides_of

aten, sp = torch.ops.aten, torch.ops.sp


@register
class Paddings(Spelling):
    """Rewrites the padded windows of one graph."""

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
        pad = padding(node)
        if pad is None:
            return False
        length, padded = shape_of(node)[pad.dim], pad
        while (wider := uncut(padded)) is not None:
            padded = wider
        rows = shape_of(padded.source)[padded.dim]
        whole = _shift(padded, 0, length)
        shifts = _fits(length, padded) and (join_of(node) is not None or padded is not pad)
        if shifts and _spelt(whole, rows):
            self._slide([node], padded.source, padded.dim, whole)
            return True
        users = readers(node)
        found = [_reading(user, node, padded) for user in users]
        known = [one for one in found if one is not None and _spelt(one, rows)]
        if len(known) < len(found):
            if any(one.op is not sp.shift.default for one in known):
                other = next(user for user, one in zip(users, found) if one not in known)
                self.refused(
                    other, f"it reads {node.name} with its padding, which a window that pads itself could take"
                )
            return False
        for user, one in zip(users, known):
            self._slide([user], padded.source, padded.dim, one)
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

    def _slide(self, nodes: list[Node], x: Node, dim: int, slides: WindowCall, before: Node | None = None) -> None:
        """One call in the place of nodes that are all the same."""
        with self.graph.inserting_before(before or nodes[0]):
            args = (x, *slides.args(shape_of(x)[dim]))
            new = self.emit(slides.op, args, nodes[0].meta["val"], nodes[0])
        for node in nodes:
            self.replace(node, new)


def _shift(padded: Pad, start: Size, length: Size) -> WindowCall:
    """So many rows of a padded value, from `start` on."""
    sliding = SlidingRows(length, plain(padded.before - start))
    return WindowCall(sliding, sp.shift.default, (padded.dim,), (padded.fill,))


def _spelt(slides: WindowCall, rows: Size) -> bool:
    """Are all its numbers known?"""
    return isinstance(slides.sliding.before, int) and isinstance(slides.sliding.after(rows), int)


def uncut(pad: Pad) -> Pad | None:
    """The same rows as a padding of what the source is a slice of; None if rows that the slice left out would show."""
    piece = slice_of(pad.source)
    if piece is None or piece.dim != pad.dim:
        return None
    source = origin(piece.source)
    behind = plain(shape_of(source)[pad.dim] - piece.start - piece.length)
    if not _hides(pad.before, piece.start) or not _hides(pad.after, behind):
        return None
    return replace(pad, source=source, before=plain(pad.before - piece.start), after=plain(pad.after - behind))


def _hides(pad: Size, left_out: Size) -> bool:
    """Do none of the rows show that a slice left out at an end where so many are added?"""
    return same(left_out, 0) or (isinstance(pad, int) and pad <= 0)


def _fits(length: Size, padded: Pad) -> bool:
    """Is a result of so many rows no longer than the sequence that the source is a slice of?"""
    source = padded.source
    while (piece := slice_of(source)) is not None:
        source = origin(piece.source)
    return SlidingRows(length).fits(shape_of(source)[padded.dim])


def padding(node: Node) -> Pad | None:
    """A pad of one dim by a constant, or a cat of constants and one other value."""
    along, is_new = join_of(node) or (None, True)
    if along is not None and not is_new:
        return _joined(node, along)
    pad = pad_of(node)
    return replace(pad, source=origin(pad.source)) if pad is not None else None


def _joined(node: Node, dim: int) -> Pad | None:
    call, dtype = Call(node), node.meta["val"].dtype
    fills = [_fill(x, dtype) for x in call.operands]
    others = [i for i, fill in enumerate(fills) if fill is None]
    known = {fill for fill in fills if fill is not None}
    if len(others) != 1 or len(known) != 1 or call.operands[others[0]].meta["val"].dtype != dtype:
        return None
    if len({call.ndim(i) for i in range(len(fills))}) > 1:
        return None  # cat takes empty ones of one dim too
    (at,) = others
    extents = [call.shape(i)[dim] for i in range(len(fills))]
    before, after = (plain(sum(rows, start=0)) for rows in (extents[:at], extents[at + 1 :]))
    return Pad(origin(call.operands[at]), dim, before, after, known.pop())


def _fill(x: Node, dtype: torch.dtype) -> Any:
    """The constant that the operand adds to a cat of the dtype, where that holds it exactly."""
    fill = constant_of(x)
    return fill if x.meta["val"].dtype == dtype or fill in (0, 1) else None


def _span(user: Node, node: Node, dim: int) -> tuple[Size, Size] | None:
    """(start, length) if the user is a slice of the node along the dim."""
    piece = slice_of(user)
    of = piece is not None and piece.dim == dim and origin(piece.source) is origin(node)
    return (piece.start, piece.length) if piece is not None and of else None


def _reading(user: Node, node: Node, padded: Pad) -> WindowCall | None:
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
    if slides.op in FILL_READERS:
        if not _pads(slides.sliding, call.shape()[padded.dim]):
            slides = replace(slides, tail=(padded.fill, *slides.tail[1:]))
        fill = slides.tail[0]
    before = plain(slides.sliding.before + padded.before)
    return replace(slides, sliding=replace(slides.sliding, before=before)) if fill == padded.fill else None


FILL_READERS = (sp.max_pool1d.default, sp.unfold.default)


def _pads(sliding: SlidingRows, rows: Size) -> bool:
    after = sliding.after(rows)
    return not (same(sliding.before, 0) and isinstance(after, int) and after <= 0)
