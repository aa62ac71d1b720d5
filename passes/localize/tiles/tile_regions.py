"""Find regions with wide rows between narrow ones, such as logits or the hidden values of an MLP.

    h -> linear -> float -> cross_entropy(sum)      a region that ends in a number
    h -> gate, up -> silu, mul -> down              a region that ends in rows
    h -> each k times, sorted -> experts -> back, summed      a mixture of experts, which ends in rows

A region is a set of token-wise nodes of a token view (`tile_view.py`), a copy of the local graph: `view.to_local` maps
nodes of the view to local ones, `view.to_view` back. `RunInTiles` replaces each region by one op that computes it for a
part of the rows at a time. Rows are wide or narrow by their number of elements, relative to the operands of the region.

A region starts at a product that widens rows (a seed). It grows over all token-wise nodes that read or compute wide
rows, and over numbers per token (thin rows) computed from them. It ends at narrow rows and at sums over the tokens.
Copies of a row that only the region reads are computed in it, so that neither they nor their gradients are stored for
all rows. Rows that are sorted by a key have no order that a tile can split: a region contains all nodes of such a sort,
or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from sp_compile.lowering.torch_compat import size_hint
from sp_compile.passes.graph.call import is_tensor
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.sizes import as_sizes, assume_large, size_product
from sp_compile.passes.sharding.matchers import move_source
from sp_compile.passes.sharding.rule import rule_of

from .tile_view import TokenView

sp, aten = torch.ops.sp, torch.ops.aten
MIN_WIDENING = 2  # minimum ratio of elements per row, result to operand: excludes projections of equal width
MIN_NARROWING = 8  # minimum ratio of elements per row, operand to result, of thin rows such as the loss of a token


@dataclass(frozen=True)
class TileRegion:
    """A region of a token view (`tile_view.py`)."""

    nodes: tuple[Node, ...]  # nodes of the view, in its order
    seed_products: tuple[Node, ...]  # products that widen rows, and tables that are read by row
    rows: tuple[Node, ...]  # operands that are split into tiles
    replicated: tuple[Node, ...]  # operands that all tiles read
    results: tuple[Node, ...]  # narrow values with readers outside
    shared: tuple[Node, ...]  # wide values with readers outside, for which they are computed a second time
    input_width: int  # elements per row of the operands of the first seed


def row_width(view: TokenView, node: Node) -> int:
    """Return the width of a value, its number of elements per row (token): D for [B, S, D]; 0 without rows."""
    shard = view.rows(node)
    if shard is None:
        return 0
    other_dims = [extent for d, extent in enumerate(as_sizes(node.meta["val"].shape)) if d != shard.dim]
    # The dim of the rows may also contain other factors: [B * S, D] has rows S, and `outer` is B.
    return assume_large(size_product((*other_dims, shard.outer, shard.inner)))


def has_thin_results(view: TokenView, region: TileRegion) -> bool:
    """Return True if all results of the region are sums over the tokens or thin rows.

    Thin rows have few numbers per token, such as its loss: at most 1 / MIN_NARROWING of the operands' width.
    """
    return all(view.is_sum(x) or row_width(view, x) * MIN_NARROWING <= region.input_width for x in region.results)


def count_rows(view: TokenView, region: TileRegion) -> int:
    """Return the region's number of rows on this rank; if it is symbolic, its value in the call being compiled."""
    shard, value = view.rows(region.seed_products[0]), region.seed_products[0].meta["val"]
    assert shard is not None
    if isinstance(shard.frame.size, int):  # the frames of a token view have the rows of one rank
        return shard.frame.size
    # A dim (outer * rows * inner): divide by the other factors.
    other_factors = (x if isinstance(x, int) else view.size_hints.get(x, 1) for x in (shard.outer, shard.inner))
    return size_hint(value.shape[shard.dim]) // math.prod(other_factors)


def _is_widening(view: TokenView, node: Node) -> bool:
    """Return True if the node can be a seed: it makes rows at least MIN_WIDENING times as wide.

    It is a matrix product, or a sort of rows that were repeated, such as a token for each of its experts. If a product
    reads a row of a shared table for each token, such as the weights of its expert, the width of that row counts, too.
    """
    if node.target is sp.to_sorted.default:
        return row_width(view, node) >= MIN_WIDENING * row_width(view, _skip_moves(view, node))
    rule = rule_of(node)
    if rule is None or not rule.is_contraction:
        return False
    table_rows = [x for x in node.all_input_nodes if _is_table_lookup(view, x)]
    return max(row_width(view, x) for x in (node, *table_rows)) >= MIN_WIDENING * _input_width(view, node)


def _input_width(view: TokenView, node: Node) -> int:
    """Return the largest number of elements per row of a seed's operands, before rows were repeated or sorted.

    Rows that the seed reads from a table, such as the matrix w[expert] of each token, are wide rows that the region
    computes. They count as its operands only if the seed has no other operands with rows.
    """
    operands = [x for x in node.all_input_nodes if view.rows(x)]
    inputs = [x for x in operands if not _is_table_lookup(view, x)] or operands
    return max((row_width(view, _skip_moves(view, x)) for x in inputs), default=0)


def _skip_moves(view: TokenView, x: Node) -> Node:
    """Return the value whose rows x has, before ops that only move, repeat or sort rows; x itself without such ops.

    The width of this value, not that of its copies, decides if a product widens rows.
    """
    while view.is_inside(x):
        source = x.args[0] if x.target is sp.to_sorted.default else move_source(x)
        # Stop at an op that cuts rows (x is narrower than its source), and at a source without rows (width 0).
        if source is None or not 0 < row_width(view, source) <= row_width(view, x):
            break
        x = source
    return x


def _is_table_lookup(view: TokenView, node: Node) -> bool:
    """Return True if the node reads its rows by index from a table that all rows share, such as an embedding."""
    return node.target is aten.index.Tensor and view.is_inside(node) and not view.rows(node.args[0])


def find_regions(view: TokenView) -> Iterator[TileRegion]:
    """Yield the regions of the view: sets of token-wise nodes that compute wide rows, which one op can run in tiles.

    A region grows around a seed, a product that widens rows. Seeds whose regions share nodes are in one region. The
    regions are in the order of their first seeds.
    """
    groups: dict[Node, set[Node]] = {}  # first seed of a region -> nodes of the region
    sorts = sort_groups(view)
    seeds = [n for n in view.gm.graph.nodes if view.is_inside(n) and view.rows(n) and _is_widening(view, n)]
    for seed in seeds:
        if any(seed in nodes for nodes in groups.values()):
            continue
        grown = _grow(view, seed, sorts)
        nodes = _drop_unreachable(view, grown)
        # In x -> attention -> seed, with x grown into the region, the seed is dropped, since it can only run after the
        # attention. Then the remaining nodes, such as x, are removed from the region instead, until the seed remains.
        while seed not in nodes:
            grown -= nodes
            nodes = _drop_unreachable(view, grown)
        _add_group(view, groups, seed, nodes)
    # Ops that repeat rows, and whose results only one region reads, move into this region from any other one.
    for seed, nodes in groups.items():
        copies = _row_copies(view, seed, nodes)
        for group in groups.values():
            group -= copies
        nodes |= copies
    for seed, nodes in groups.items():
        yield _make_region(view, nodes, _input_width(view, seed))


def _add_group(view: TokenView, groups: dict[Node, set[Node]], seed: Node, nodes: set[Node]) -> None:
    """Add the nodes of a new region to `groups`, or to a group with which they share nodes.

    Two products may share a loss that reads the logits of both. If the union of two groups cannot run as one op, the
    shared nodes remain in the earlier group.

    Args:
        view: The token view: a copy of the local graph, with the placement of the rows of each value.
        groups: The nodes of each region so far, by its first seed; changed in place.
        seed: The seed of the new region.
        nodes: Its nodes.
    """
    for first_seed, group in groups.items():
        if nodes.isdisjoint(group):
            continue
        union = nodes | group
        can_run_as_one = _drop_unreachable(view, union) == union
        if can_run_as_one:
            groups[first_seed] = union
            return
        nodes = _drop_partial_sums(view, _drop_unreachable(view, nodes - group))
    if seed in nodes:
        groups[seed] = nodes


def sort_groups(view: TokenView) -> list[set[Node]]:
    """Return one set for each sort of rows: the nodes of the local graph from sp::sort_rows to the inverse sort.

    Rows between the two are in sorted order, of which a tile has no contiguous part. A region therefore contains all
    nodes of a set or none.
    """
    sorts = view.local.find_nodes(op="call_function", target=sp.sort_rows.default)
    return [reachable_set([x], lambda n: n.users if n.target is not sp.from_sorted.default else ()) for x in sorts]


def _grow(view: TokenView, seed: Node, sorts: Sequence[set[Node]]) -> set[Node]:
    """Return the nodes of the region around a seed: the token-wise nodes that read or compute wide rows.

    Numbers per token (thin rows) and sums that are computed from wide rows also belong to the region. It ends at rows
    of about the width of the seed's operands.

    Args:
        view: The token view: a copy of the local graph, with the placement of the rows of each value.
        seed: A node of the view at which the region starts.
        sorts: The groups of `sort_groups`, of nodes of the local graph.
    """
    input_width = _input_width(view, seed)  # elements per row; rows with MIN_WIDENING times this number are wide

    def can_continue(node: Node) -> bool:
        """Return True if the region includes users of the node: its rows are wide or thin, or it is a sum."""
        if not is_tensor(node) or view.is_sum(node):  # a tuple of results: its getitem nodes have the rows
            return True
        is_narrow = input_width / MIN_NARROWING < row_width(view, node) < MIN_WIDENING * input_width
        return view.rows(node) is not None and not is_narrow

    def neighbors(node: Node) -> Iterable[Node]:
        """Return the nodes that belong to the region if `node` does.

        They are its users if the region continues, its wide operands (or the tuple from which it is read), and all
        nodes between the same sort of rows and its inverse, as far as they are in the view.
        """
        users = node.users if can_continue(node) else ()
        wide = [x for x in node.all_input_nodes if row_width(view, x) >= MIN_WIDENING * input_width or not is_tensor(x)]
        local_nodes_of_sorts = [n for group in sorts if view.to_local[node] in group for n in group]
        same_sort = [view.to_view[n] for n in local_nodes_of_sorts if n in view.to_view]
        return [x for x in (*users, *wide, *same_sort) if _can_join_region(view, x, seed)]

    return _drop_partial_sums(view, reachable_set([seed], neighbors))


def _row_copies(view: TokenView, seed: Node, nodes: set[Node]) -> set[Node]:
    """Return nodes outside of a region that repeat rows only for it, such as the row of a token for each expert.

    They are added to the region, so that the repeated rows are not stored.

    Args:
        view: The token view: a copy of the local graph, with the placement of the rows of each value.
        seed: The seed of the region.
        nodes: The nodes of the region.
    """

    def is_repeat(x: Node) -> bool:
        """Return True if the node is a copy of narrower rows, and a tile of the region may compute it.

        An example is x.repeat_interleave(k, 1), which has k times the elements per token of x.
        """
        is_wider = move_source(x) is not None and row_width(view, _skip_moves(view, x)) < row_width(view, x)
        return is_wider and _can_join_region(view, x, seed)

    extended = reachable_set(nodes, lambda node: [x for x in node.all_input_nodes if is_repeat(x)])
    # Drop nodes with other readers, then those that these read, until no other reader remains.
    while read_outside := {n for n in extended - nodes if outside_readers(view, n, extended)}:
        extended -= read_outside
    return extended - nodes


def _drop_partial_sums(view: TokenView, nodes: set[Node]) -> set[Node]:
    """Return the nodes without those that read a sum over the rows which is computed outside of the set.

    In `loss + other_loss`, where only `loss` is computed in tiles, every tile would add all of `other_loss`.
    """
    while readers := {n for n in nodes if any(view.is_sum(x) and x not in nodes for x in n.all_input_nodes)}:
        nodes = nodes - readers
    return nodes


def _can_join_region(view: TokenView, node: Node, seed: Node) -> bool:
    """Return True if a region with this seed may contain the node.

    It then is a token-wise call with the same number of rows, in the same checkpointed region (or in none) as the seed.
    """
    if not view.is_inside(node) or view.checkpoint(node) != view.checkpoint(seed):
        return False
    shards = map(view.rows, (*node.all_input_nodes, node, seed))
    return len({shard.frame.size for shard in shards if shard is not None}) == 1


def _drop_unreachable(view: TokenView, nodes: set[Node]) -> set[Node]:
    """Return the nodes (of the view) without those that read an outside value which depends on others of the set.

    A region runs as one op, before which all its operands have to be computed. In `a -> attention -> b`, with a and b
    in the set, b is dropped.
    """
    inside = {view.to_local[n]: n for n in nodes}  # node of the local graph -> node of the view
    remaining, dependents = set[Node](), set[Node]()  # dependents: outside nodes that depend on remaining ones
    for node in view.local.nodes:
        operands = node.all_input_nodes
        if node in inside and dependents.isdisjoint(operands):
            remaining.add(node)
        elif not remaining.isdisjoint(operands) or not dependents.isdisjoint(operands):
            dependents.add(node)
    return {inside[n] for n in remaining}


def outside_readers(view: TokenView, node: Node, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes of the local graph that read `node` and do not belong to `nodes`.

    Args:
        view: The token view: a copy of the local graph; `view.to_local` maps its nodes to those of the local graph.
        node: A node of the view.
        nodes: Nodes of the view, such as those of a region.
    """
    inside = {view.to_local[n] for n in nodes}
    return [user for user in view.to_local[node].users if user not in inside]


def _make_region(view: TokenView, nodes: set[Node], input_width: int) -> TileRegion:
    """Return the region of these nodes: their order, operands, and results with readers outside.

    Args:
        view: The token view: a copy of the local graph, with the placement of the rows of each value.
        nodes: Nodes of the view.
        input_width: Elements per row of the seed's operands; rows with MIN_WIDENING times this number are wide.
    """
    ordered = [n for n in view.gm.graph.nodes if n in nodes]
    operands = dict.fromkeys(x for n in ordered for x in n.all_input_nodes if x not in nodes and is_tensor(x))
    read_outside = [n for n in ordered if is_tensor(n) and outside_readers(view, n, nodes)]
    # Results are stored for all rows. Wide values are not stored: for outside readers they are computed a second time.
    shared = [n for n in read_outside if row_width(view, n) >= MIN_WIDENING * input_width]
    return TileRegion(
        nodes=tuple(ordered),
        seed_products=tuple(
            n for n in ordered if view.rows(n) and (_is_widening(view, n) or _is_table_lookup(view, n))
        ),
        rows=tuple(x for x in operands if view.rows(x)),
        replicated=tuple(x for x in operands if not view.rows(x)),
        results=tuple(n for n in read_outside if n not in shared),
        shared=tuple(shared),
        input_width=input_width,
    )
