"""Choose the rows of windows as the sequence, if attention runs in windows of them.

    view(x, (B, H / w, w, W / w, w, C)) -> permute -> (B * (H / w) * (W / w), w * w, C)    x: (B, H, W, C)

Attention then reads the w * w positions of a window, which are no large part of the program: most of its work is on
(B, H * W, C). If each rank has complete rows of windows, H / w is a batch dim of attention, which needs no exchange.

`find_sequences` finds the dims that attention reads. A dim is an alternative if it is split into windows, so that
attention reads their positions but does not relate the windows. It is chosen if a rank then has clearly less work.
Sequences that no value has beside the dim or its windows remain, such as the text beside windows of audio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from torch.fx import GraphModule, Node

from sp_compile.passes.graph.sizes import Size, assume_large, ceil_div, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import softmax_attended_dims
from sp_compile.passes.sharding.axes import Atom, Axes, attended_dims, name_factors
from sp_compile.passes.sharding.find_sequences import complete_sequences
from sp_compile.passes.sharding.sharded_work import LARGE_SHARE, RowWork, largest_share


class WindowedRows(NamedTuple):
    """A dim whose rows are split into windows."""

    rows: Atom  # the dim; of the values that have it, the longest
    # class of a dim of windows -> rows of one window; also of dims into which windows are split again
    blocks: dict[int, int]
    attentions: set[Node]  # attentions that read the positions of windows


def choose_rows(gm: GraphModule, axes: Axes) -> Axes:
    """Return axes whose sequence is the rows of windows if that is better (`_tolerated_flops`), else `axes`.

    Args:
        gm: The graph.
        axes: The axes after `find_sequences`.
    """
    if axes.n == 1 or not axes.sequences or not _may_have_windows(gm, axes):
        return axes
    # `find` returns the class of a dim: one number for all dims that ops identify with each other. In these axes,
    # windows and positions, into which a reshape splits a dim, have a class each.
    rows_axes = name_factors(gm)
    attentions = _attentions_by_class(gm, rows_axes)
    products = _attended_products(gm, rows_axes)
    # Attention may read a flattened product (rows, columns). A shard of it has complete rows, so the sequence may be
    # the rows, but not the columns, as each row has all of them.
    columns = {name for product in products for name in product[1:]}
    found = {x: nodes for x, nodes in _find_windowed_rows(rows_axes, attentions).items() if x not in columns}
    if not found:
        return axes
    work = RowWork(gm, rows_axes)
    # Rows without FLOPs of their own are no sequence, such as the frames of all videos, which are split at once.
    found = {x: nodes for x, nodes in found.items() if work.flops_of_rows({x})}
    if not found:
        return axes
    candidates = _describe_rows(rows_axes, found, work.multiplied_classes() - _joined_classes(rows_axes, attentions))
    # FLOPs of a rank that has a share of the rows of each candidate, and of the dims of its windows.
    kept = [_kept_sequences(rows_axes, axes, c, columns) for c in candidates]
    flops = []
    for candidate, others in zip(candidates, kept):
        rows = {rows_axes.find(candidate.rows.name), *candidate.blocks}
        shares = dict.fromkeys(rows, _windowed_share(candidate, axes.n))
        shares |= {x: largest_share(size, axes.n) for x, size in others.items()}
        flops.append(work.rank_flops(shares))
    others = kept[flops.index(min(flops))]
    chosen = candidates[flops.index(min(flops))]
    if min(flops) > _tolerated_flops(gm, axes, chosen):
        return axes
    name = rows_axes.find(chosen.rows.name)
    # `flat`: products that attention reads, with the rows as the slowest factor.
    # `windowed`: the ops that attend within windows. `reasons`: for the report, why dims are sequences or not.
    rows_axes.folds, rows_axes.n, rows_axes.sequences = axes.folds, axes.n, {name, *others}
    rows_axes.flat = {product for product in products if product[0] == name}
    rows_axes.windowed, rows_axes.chunk_blocks = {name: chosen.attentions}, {name: chosen.blocks}
    rows_axes.reasons = dict.fromkeys(
        attentions, f"each rank has less work with complete windows of the {chosen.rows.size}"
    )
    rows_axes.reasons |= dict.fromkeys(others, "no value has it beside the windows")
    rows_axes.reasons[name] = f"a rank has complete windows, and {min(flops) / work.total:.0%} of the FLOPs"
    complete_sequences(gm, rows_axes, picks=True)  # adds the dims that result from slices or splits of the rows
    return rows_axes


def _joined_classes(axes: Axes, attentions: Mapping[int, Set[Node]]) -> set[int]:
    """Return the attended classes of parts of concatenations: one token of each window, to which a text is joined."""
    return {axes.find(part.name) for part, _ in axes.joined} & attentions.keys()


def _kept_sequences(rows_axes: Axes, axes: Axes, windowed: WindowedRows, columns: Set[int]) -> dict[int, Size]:
    """Return the sequences of `axes` that remain beside rows of windows, by class in `rows_axes`, with their sizes.

    No value has a dim of these and one of the rows, of their windows or of the positions of a window.

    Args:
        rows_axes: The axes without products.
        axes: The axes after `find_sequences`.
        windowed: The rows.
        columns: Classes that are factors of products, which are no sequences by themselves.
    """
    kept: dict[int, Size] = {}
    for (node, index), dims in rows_axes.dims.items():
        for dim, known in zip(dims, axes.dims.get((node, index), ())):
            if len(dim) == len(known) == 1 and axes.is_sequence(known[0]) and not is_same_size(dim[0].size, 1):
                name = rows_axes.find(dim[0].name)
                kept[name] = max(dim[0].size, kept.get(name, 1), key=assume_large)
    rows = {rows_axes.find(windowed.rows.name), *windowed.blocks}
    excluded = {*rows, *columns}
    for dims in rows_axes.dims.values():
        classes = {rows_axes.find(a.name) for dim in dims for a in dim}
        excluded |= classes if classes & rows else set()
    return {x: size for x, size in kept.items() if x not in excluded}


def _may_have_windows(gm: GraphModule, axes: Axes) -> bool:
    """Return True if attention reads a product of dims, or a part of a dim that a reshape splits."""
    if axes.products:
        return True
    # A split is (windows, positions, ...): the first factor counts windows, the others are parts of a window.
    parts = {axes.find(a.name) for split in axes.all_splits() for a in split.factors[1:]}
    return bool(parts) and not parts.isdisjoint(_attentions_by_class(gm, axes))


def _attentions_by_class(gm: GraphModule, axes: Axes) -> dict[int, set[Node]]:
    """Return the ops of attention that read a dim, by its class, the number that `axes.find` gives to equal dims."""
    attentions: dict[int, set[Node]] = {}
    for find_evidence in (attended_dims, softmax_attended_dims):
        for node, dim in find_evidence(gm, axes):
            for atom in dim:
                if not is_same_size(atom.size, 1):
                    attentions.setdefault(axes.find(atom.name), set()).add(node)
    return attentions


def _attended_products(gm: GraphModule, axes: Axes) -> set[tuple[int, ...]]:
    """Return the products of dims that attention reads, as the classes of their factors, the slowest first."""
    dims = [axes.canonical(dim) for find in (attended_dims, softmax_attended_dims) for _, dim in find(gm, axes)]
    return {tuple(a.name for a in dim) for dim in dims if len(dim) > 1}


def _find_windowed_rows(axes: Axes, attentions: dict[int, set[Node]]) -> dict[int, set[Node]]:
    """Find dims that are split into (windows, positions), of which attention reads the positions, but not the windows.

    A class is the number of all dims that are equal: the dim H of several values, for example.

    Args:
        axes: The axes of the graph, without products.
        attentions: The ops of attention by the classes of the dims that they read.

    Returns:
        The ops of attention that read the positions of windows, by the class of the dim.
    """
    found: dict[int, set[Node]] = {}
    for split in axes.all_splits():
        windows, *positions = (axes.find(a.name) for a in split.factors)
        if windows not in attentions and any(name in attentions for name in positions):
            reads = found.setdefault(axes.find(split.source.name), set())
            reads |= {node for name in positions for node in attentions.get(name, ())}
    return found


def _describe_rows(axes: Axes, found: dict[int, set[Node]], multiplied: Set[int]) -> list[WindowedRows]:
    """Return the longest dim of each class that `_find_windowed_rows` found, with its windows.

    Args:
        axes: The axes of the graph.
        found: The ops of attention by class, a number that equal dims share.
        multiplied: The classes of dims of operands of matmuls and other ops with many FLOPs.
    """
    longest: dict[int, Atom] = {}  # class -> its longest dim
    for atom in (a for dims in axes.dims.values() for dim in dims for a in dim):
        name = axes.find(atom.name)
        if name in found and (name not in longest or assume_large(atom.size) > assume_large(longest[name].size)):
            longest[name] = atom
    return [WindowedRows(longest[x], _chunk_blocks(axes, x, multiplied), reads) for x, reads in found.items()]


def _chunk_blocks(axes: Axes, name: int, multiplied: Set[int]) -> dict[int, int]:
    """Return the number of positions in a chunk, for each dim of chunks into which rows are split, by its class.

    Chunks that are split into chunks again count, too. Those of symbolic sizes are omitted.

    Args:
        axes: The axes.
        name: The class of the rows.
        multiplied: The classes of dims of products; others are omitted.
    """
    blocks, queue = dict[int, int](), [(name, 1)]  # queue: classes to search, and the positions in one entry of each
    for source, rows in queue:  # the queue grows in the loop
        for split in axes.all_splits():
            chunks, chunk = axes.find(split.factors[0].name), size_product(a.size for a in split.factors[1:])
            is_new = axes.find(split.source.name) == source and chunks not in (name, *blocks)
            if is_new and chunks in multiplied and isinstance(chunk, int):
                blocks[chunks] = rows * chunk
                queue.append((chunks, rows * chunk))
    return blocks


def _windowed_share(candidate: WindowedRows, n: int) -> float:
    """Return the largest share of the rows that one of n ranks has, if each has complete windows.

    56 rows with windows of 7 on 3 ranks: a rank has up to 3 of 8 windows, 21 of 56 rows.
    """
    rows = assume_large(candidate.rows.size)
    window = math.lcm(*candidate.blocks.values())  # complete windows of each size that splits these rows
    return min(1.0, window * ceil_div(rows, window * n) / rows)


def _tolerated_flops(gm: GraphModule, axes: Axes, windowed: WindowedRows) -> float:
    """Return the FLOPs of a rank up to which the rows of windows replace the sequences of `axes`.

    Let F be the FLOPs of a rank if `axes.sequences` are sharded. The result is F / (1 + LARGE_SHARE), so that rows of
    windows must save work. It is F * (1 + LARGE_SHARE) if attention would exchange keys with these sequences but not
    with rows: positions of windows are a sequence, or a sequence is one factor of a product that attention reads.
    """
    sizes = [a.size for dims in axes.dims.values() for dim in dims for a in dim if axes.is_sequence(a)]
    share = min((largest_share(size, axes.n) for size in sizes if not is_same_size(size, 1)), default=1.0)
    # The first factor of a split sequence, chunks of (chunks, positions), is sharded with the sequence.
    chunks = {axes.find(s.factors[0].name) for s in axes.all_splits() if axes.is_sequence(s.source)}
    flops = RowWork(gm, axes).rank_flops(dict.fromkeys(axes.sequences | chunks, share))
    attentions = _attentions_by_class(gm, axes)
    exchanges_positions = any(not windowed.attentions.isdisjoint(attentions.get(x, ())) for x in axes.sequences)
    reads_parts = any(not axes.sequences.isdisjoint(product) for product in _attended_products(gm, axes))
    return flops * (1 + LARGE_SHARE) if exchanges_positions or reads_parts else flops / (1 + LARGE_SHARE)
