"""Fold constant padding into the op that reads it, so that no tensor is longer than its sequence.

    constant_pad_nd(x, (k, 0))[..., :S]              ->   sp.shift(x, dim, k, -k, value)
    conv1d(constant_pad_nd(x, (k, 0)), w)            ->   sp.conv1d(x, w, None, k, 0)         also pools and unfold
    conv1d(x, w, padding=k)[..., :S]                 ->   sp.conv1d(x, w, None, k, 0)
    cat([zeros of k rows, x[:-k]])                   ->   sp.shift(x, dim, k, -k, 0)

Part of canonicalize, after scan idioms, which use the same ops. Bytes moved: none. Unchanged: padding of several dims,
padding and convolutions with other readers, and lengths that are not provably those of the sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.base import CanonicalPass, register_pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, node_shape
from sp_compile.passes.graph.sizes import Size, is_same_size
from sp_compile.passes.sharding.matchers import (
    PadMatch,
    constant_value,
    match_join,
    match_pad,
    match_slice,
    value_origin,
    value_readers,
)
from sp_compile.passes.sharding.window_rules import SlidingRows, WindowCall, simplify_size, sliding_calls

aten, sp = torch.ops.aten, torch.ops.sp


@register_pass
class FoldPaddings(CanonicalPass):
    """Replacement of the padded windows of one graph."""

    requires = frozenset({"scan idioms"})  # these use the same ops

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        changes = 0
        for rewrite in (self._fold_readers, self._drop_cut):  # a reader of padding may itself be sliced
            for node in list(self.graph.nodes):
                if node.op == "call_function" and node.users:
                    changes += rewrite(node)
        return changes

    def _fold_readers(self, node: Node) -> bool:
        """Fold a padding into all of its readers, or leave it unchanged."""
        pad = match_padding(node)
        if pad is None:
            return False
        length, padded = node_shape(node)[pad.dim], pad
        while (wider := pad_of_source(padded)) is not None:
            padded = wider
        rows = node_shape(padded.source)[padded.dim]
        shifted = _shift_rows(padded, 0, length)
        shifts = _is_within_sequence(length, padded) and (match_join(node) is not None or padded is not pad)
        if shifts and _is_static(shifted, rows):
            self._merge_slides([node], padded.source, padded.dim, shifted)
            return True
        users = value_readers(node)
        found = [_padding_reader(user, node, padded) for user in users]
        known = [one for one in found if one is not None and _is_static(one, rows)]
        if len(known) < len(found):
            if any(one.op is not sp.shift.default for one in known):
                other = next(user for user, one in zip(users, found) if one not in known)
                self.note_refusal(other, f"it reads {node.name} with its padding; pass the padding to the window op")
            return False
        for user, one in zip(users, known):
            self._merge_slides([user], padded.source, padded.dim, one)
        return True

    def _drop_cut(self, node: Node) -> bool:
        """Replace a result that is longer than its sequence and sliced back by the sliced result."""
        call = OpCall(node) if isinstance(node.target, OpOverload) else None
        for dim, slides in sliding_calls(call).items() if call is not None else ():
            assert call is not None
            users, rows = value_readers(node), call.shape()[dim]
            cuts = [_slice_span(user, node, dim) for user in users]
            if slides.first is not None or slides.sliding.is_within(rows) or cuts[0] is None or len(set(cuts)) > 1:
                continue
            (start, length), sliding = cuts[0], slides.sliding
            before = simplify_size(sliding.before - start * sliding.stride)
            one = replace(slides, sliding=replace(sliding, before=before, length=length))
            if _is_static(one, rows):
                self._merge_slides(users, call.operands[0], dim, one, before=node)
                return True
        return False

    def _merge_slides(
        self, nodes: list[Node], x: Node, dim: int, slides: WindowCall, before: Node | None = None
    ) -> None:
        """Emit one call in place of equal nodes."""
        with self.graph.inserting_before(before or nodes[0]):
            args = (x, *slides.args(node_shape(x)[dim]))
            new = self.emit(slides.op, args, nodes[0].meta["val"], nodes[0])
        for node in nodes:
            self.replace(node, new)


def _shift_rows(padded: PadMatch, start: Size, length: Size) -> WindowCall:
    """Return the call for `length` rows of a padded value from `start` on."""
    sliding = SlidingRows(length, simplify_size(padded.before - start))
    return WindowCall(sliding, sp.shift.default, (padded.dim,), (padded.fill,))


def _is_static(slides: WindowCall, rows: Size) -> bool:
    """Return True if all numbers of the call are known."""
    return isinstance(slides.sliding.before, int) and isinstance(slides.sliding.num_after(rows), int)


def pad_of_source(pad: PadMatch) -> PadMatch | None:
    """Return the rows as a padding of a slice's source, or None if other rows would be visible."""
    piece = match_slice(pad.source)
    if piece is None or piece.dim != pad.dim:
        return None
    source = value_origin(piece.source)
    cut_after = simplify_size(node_shape(source)[pad.dim] - piece.start - piece.length)
    if not _hides_slice(pad.before, piece.start) or not _hides_slice(pad.after, cut_after):
        return None
    return replace(
        pad, source=source, before=simplify_size(pad.before - piece.start), after=simplify_size(pad.after - cut_after)
    )


def _hides_slice(pad: Size, left_out: Size) -> bool:
    """Return True if no row outside a slice is visible at an end with this padding."""
    return is_same_size(left_out, 0) or (isinstance(pad, int) and pad <= 0)


def _is_within_sequence(length: Size, padded: PadMatch) -> bool:
    """Return True if the result is no longer than the sequence that the source is a slice of."""
    source = padded.source
    while (piece := match_slice(source)) is not None:
        source = value_origin(piece.source)
    return SlidingRows(length).is_within(node_shape(source)[padded.dim])


def match_padding(node: Node) -> PadMatch | None:
    """Return the pad of one dim by a constant, or the cat of constants and one other value; else None."""
    along, is_new = match_join(node) or (None, True)
    if along is not None and not is_new:
        return _match_padding_cat(node, along)
    pad = match_pad(node)
    return replace(pad, source=value_origin(pad.source)) if pad is not None else None


def _match_padding_cat(node: Node, dim: int) -> PadMatch | None:
    call, dtype = OpCall(node), node.meta["val"].dtype
    fills = [_padding_constant(x, dtype) for x in call.operands]
    others = [i for i, fill in enumerate(fills) if fill is None]
    known = {fill for fill in fills if fill is not None}
    if len(others) != 1 or len(known) != 1 or call.operands[others[0]].meta["val"].dtype != dtype:
        return None
    if len({call.ndim(i) for i in range(len(fills))}) > 1:
        return None  # cat accepts empty one-dimensional operands, too
    (at,) = others
    extents = [call.shape(i)[dim] for i in range(len(fills))]
    before, after = (simplify_size(sum(rows, start=0)) for rows in (extents[:at], extents[at + 1 :]))
    return PadMatch(value_origin(call.operands[at]), dim, before, after, known.pop())


def _padding_constant(x: Node, dtype: torch.dtype) -> Any:
    """Return the constant that an operand adds to a cat of the dtype, if it is exact there."""
    fill = constant_value(x)
    return fill if x.meta["val"].dtype == dtype or fill in (0, 1) else None


def _slice_span(user: Node, node: Node, dim: int) -> tuple[Size, Size] | None:
    """Return (start, length) if the user is a slice of the node along the dim."""
    piece = match_slice(user)
    of = piece is not None and piece.dim == dim and value_origin(piece.source) is value_origin(node)
    return (piece.start, piece.length) if piece is not None and of else None


def _padding_reader(user: Node, node: Node, padded: PadMatch) -> WindowCall | None:
    """Return the reader of a padding as a window on the unpadded value; its own constants must be equal."""
    span = _slice_span(user, node, padded.dim)
    if span is not None:
        return _shift_rows(padded, *span)
    if not isinstance(user.target, OpOverload) or value_origin(user.all_input_nodes[0]) is not value_origin(node):
        return None
    call = OpCall(user)
    slides = sliding_calls(call).get(padded.dim)
    reads = [value_origin(x) for x in call.operands].count(value_origin(node))
    if slides is None or slides.op in (sp.roll.default, sp.shift.default) or reads > 1:
        return None
    fill: Any = 0
    if slides.op in FILL_READERS:
        if not _padded_blocks(slides.sliding, call.shape()[padded.dim]):
            slides = replace(slides, tail=(padded.fill, *slides.tail[1:]))
        fill = slides.tail[0]
    before = simplify_size(slides.sliding.before + padded.before)
    return replace(slides, sliding=replace(slides.sliding, before=before)) if fill == padded.fill else None


FILL_READERS = (sp.max_pool1d.default, sp.unfold.default)


def _padded_blocks(sliding: SlidingRows, rows: Size) -> bool:
    after = sliding.num_after(rows)
    return not (is_same_size(sliding.before, 0) and isinstance(after, int) and after <= 0)
