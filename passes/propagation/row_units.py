"""Express placements in the rows of the sequence, if it is the rows of windows (`choose_rows.py`).

An image of 16 rows with windows of 4 has values of 16 rows with all columns, and of 4 rows of windows. A reshape may
pass the placement of the one to the other, so that its frame still counts rows of windows: 2 of 4 on each rank, with
4 w columns (`Shard.inner`). That is the same part of the value as 8 of 16 rows with w columns, and ops with several
operands need the same form of all. So a frame counts the rows of the dim of which it is a part, or, if attention reads
a product of rows and columns, the positions of the product.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from sp_compile.passes.graph.call import OpCall
from sp_compile.passes.graph.sizes import Size, exact_quotient, is_divisor, is_same_size, size_product
from sp_compile.passes.sharding.axes import Atom, Axes, Dim
from sp_compile.passes.sharding.placement import Frame, Placement, Shard
from sp_compile.passes.sharding.rule import lookup_rule


def express_in_rows(axes: Axes, node: Node, index: int, placement: Placement) -> Placement:
    """Return the placement of a result with a frame that counts its rows, and that has their `granule` and `block`.

    A frame of 4 rows of windows becomes one of 16 rows if a window has 4 rows. If a program computes a sequence in
    windows or in chunks, each rank has complete ones: a frame is only cut at multiples of its `granule`. The granule of
    a dim of rows is the number of rows of a window, here 4; the `block` of a dim of windows is the same number. Without
    windows (`axes.windowed`), a frame counts the same units as before, with the `granule` and `block` of chunks.

    Args:
        axes: The axes.
        node: The node.
        index: The index of the result.
        placement: The placement of the result.
    """
    if not axes.windowed:
        return axes.with_chunks(node, index, placement)
    if not isinstance(placement, Shard) or (node, index) not in axes.dims:
        return placement
    dim = axes.dims[node, index][placement.dim]
    for i, atom in enumerate(dim):
        name = axes.find(atom.name)  # of the class of dims that are sharded together
        granule, block = axes.granules.get(name, 1), axes.blocks.get(name, 1)
        if max(granule, block) == 1 or not is_same_size(placement.outer, _size_of(dim[:i])):
            continue  # not a dim of rows or of windows, or not the one at which the shard starts
        converted = _convert_units(placement, atom, _size_of(dim[i + 1 :]), axes.n)
        # In a frame whose size is no multiple of (granule * ranks * chunks of a rank), a chunk may be on two ranks.
        if converted is not None and is_divisor(granule * axes.n * converted.frame.order.chunks, converted.frame.size):
            converted = replace(converted, frame=replace(converted.frame, granule=granule, block=block))
            return _flatten_product(axes, converted, dim[i:])
    return placement


def chunk_shard(axes: Axes, call: OpCall) -> Shard | None:
    """Return the placement of the result of an op on chunks of a sequence that starts there, or None.

    An example is linear(x.view(B, chunks, rows, D)) of an input x: it has a dim of chunks, but not the sequence.

    Args:
        axes: The axes.
        call: The call of the op.
    """
    dims = axes.dims.get((call.node, 0), ())
    # (dim, index of the factor in the dim) of each dim of chunks
    positions = [(d, i) for d, dim in enumerate(dims) for i, a in enumerate(dim) if axes.find(a.name) in axes.blocks]
    if len(positions) != 1 or not any(_is_moved_sequence(axes, x) for x in call.operands):
        return None
    ((d, i),) = positions
    chunks, outer, inner = dims[d][i], _size_of(dims[d][:i]), _size_of(dims[d][i + 1 :])
    name = axes.find(chunks.name)
    sources = [x for x, blocks in axes.chunk_blocks.items() if name in blocks]
    sources += [s.source.name for s in axes.all_splits() if axes.find(s.factors[0].name) == name]
    sequence = next((x for x in map(axes.find, sources) if x in axes.sequences), None)
    if sequence is None or is_same_size(chunks.size, 1):
        return None
    frame = axes.frame(Atom(sequence, chunks.size * axes.blocks[name])).split(axes.blocks[name])
    return Shard(d, frame, outer, inner) if frame is not None else None


def _is_moved_sequence(axes: Axes, x: Node) -> bool:
    """Return True if a value without a dim of the sequence is one with it whose elements are only moved (`lazy`)."""
    call, rule = lookup_rule(x) or (None, None)
    while call is not None and call.operands and rule is not None and rule.lazy and axes.shard(x) is None:
        x = call.operands[0]
        call, rule = lookup_rule(x) or (None, None)
        if axes.shard(x) is not None:
            return True
    return False


def _convert_units(shard: Shard, atom: Atom, inner: Size, n: int) -> Shard | None:
    """Return the same shard with a frame that counts the rows of an atom, or None if it is no shard of complete rows.

    In the example above, a frame of 4 rows of windows, with inner = 4 w, becomes one of 16 rows with inner = w. The
    positions of the frame, times inner, and the outer factor do not change.

    Args:
        shard: The placement.
        atom: A factor of its dim, such as the 16 rows of the image.
        inner: The size of the factors of the dim after the atom.
        n: Number of ranks.
    """
    frame = shard.frame
    if is_same_size(frame.length, atom.size) and is_same_size(shard.inner, inner):
        return shard
    if not is_same_size(frame.length * shard.inner, atom.size * inner):
        return None
    size, start = (exact_quotient(rows * shard.inner, inner) for rows in (frame.size, frame.start))
    # Both frames are cut at the same elements if each rank has the same number of rows of each, without a remainder.
    is_complete = size is not None and all(is_divisor(n * frame.order.chunks, x) for x in (frame.size, size))
    if not is_complete or start is None:
        return None
    return replace(shard, frame=replace(frame, size=size, start=start, length=atom.size), inner=inner)


def _flatten_product(axes: Axes, shard: Shard, dim: Dim) -> Shard:
    """Return a shard whose frame counts the positions of a product of dims that attention reads as one sequence.

    If attention reads (rows * columns), a frame of 16 rows with 8 columns each becomes one of 128 positions. The shard
    is unchanged if `dim` does not start with such a product.

    Args:
        axes: The axes.
        shard: The placement, whose frame counts the first atom of `dim`.
        dim: The factors of its dim, from the rows on.
    """
    names, frame = tuple(axes.find(a.name) for a in dim), shard.frame
    for product in axes.flat:  # the names of rows and columns, which attention reads as one sequence
        if names[: len(product)] == product:
            columns = _size_of(dim[1 : len(product)])
            sizes = (frame.size * columns, frame.start * columns, frame.length * columns)
            flat = Frame(*sizes, frame.folds, frame.granule * columns)
            return replace(shard, frame=flat, inner=_size_of(dim[len(product) :]))
    return shard


def _size_of(dim: Dim) -> Size:
    """Return the number of positions of some factors."""
    return size_product(a.size for a in dim)
