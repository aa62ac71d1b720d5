"""Find regions with wide rows between narrow ones, such as a head's logits or the inside of an MLP.

    h -> linear -> float -> cross_entropy(sum)      a region that ends in a number
    h -> gate, up -> silu, mul -> down              a region that ends in rows
    h -> each k times, sorted -> experts -> back, summed      a mixture of experts, which ends in rows

A region starts at a product that widens rows (a seed). It grows over all token-wise nodes that read or compute wide
rows, and over numbers per token computed from them. It ends at narrow rows and at sums over the tokens. Copies of a row
that only the region reads are computed in it, so that neither they nor their gradients are stored for all rows. Rows
that are sorted by a key have no order that a tile can split: a region contains all nodes of such a sort, or none.
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
from sp_compile.passes.sharding.rule import lookup_rule

from .tile_view import TokenView

sp, aten = torch.ops.sp, torch.ops.aten
MIN_WIDENING = 2  # minimum ratio of elements per row, result to operand: excludes projections of equal width
MAX_THIN_WIDTH = 8  # minimum ratio of operand to result for a few numbers per token, such as its loss


@dataclass(frozen=True)
class TileRegion:
    """A region of a token view."""

    nodes: tuple[Node, ...]  # nodes of the view, in its order
    seed_products: tuple[Node, ...]  # products that widen rows, and tables that are read by row
    rows: tuple[Node, ...]  # operands that are split into tiles
    replicated: tuple[Node, ...]  # operands that all tiles read
    results: tuple[Node, ...]  # narrow values with readers outside
    shared: tuple[Node, ...]  # wide values with readers outside, which recompute them
    narrow: int  # elements per row of the operands


def row_width(view: TokenView, node: Node) -> int:
    """Return the number of elements per row; 0 for a value without rows."""
    have = view.rows(node)
    if have is None:
        return 0
    others = [extent for d, extent in enumerate(as_sizes(node.meta["val"].shape)) if d != have.dim]
    return assume_large(size_product((*others, have.outer, have.inner)))


def count_rows(view: TokenView, region: TileRegion) -> int:
    """Return the region's number of rows; of a symbolic one, that of the current call."""
    have, value = view.rows(region.seed_products[0]), region.seed_products[0].meta["val"]
    assert have is not None
    if isinstance(have.frame.size, int):
        return have.frame.size
    beside = (x if isinstance(x, int) else view.size_hints.get(x, 1) for x in (have.outer, have.inner))
    return size_hint(value.shape[have.dim]) // math.prod(beside)


def find_seeds(view: TokenView) -> list[Node]:
    """Return the products that widen rows."""
    return [n for n in view.gm.graph.nodes if view.is_inside(n) and view.rows(n) and _is_widening(view, n)]


def _is_widening(view: TokenView, node: Node) -> bool:
    if node.target is sp.to_sorted.default:
        return row_width(view, node) >= MIN_WIDENING * row_width(view, _skip_moves(view, node))
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or not rule.is_contraction:
        return False
    wide = max(row_width(view, x) for x in (node, *call.operands) if x is node or _is_table_lookup(view, x))
    return wide >= MIN_WIDENING * _input_width(view, node)


def _input_width(view: TokenView, node: Node) -> int:
    """Return the elements per row of a seed's operands, before rows were repeated, moved or sorted."""
    operands = [x for x in node.all_input_nodes if view.rows(x)]
    given = [x for x in operands if not _is_table_lookup(view, x)] or operands
    return max((row_width(view, _skip_moves(view, x)) for x in given), default=0)


def _skip_moves(view: TokenView, x: Node) -> Node:
    while view.is_inside(x):
        source = x.args[0] if x.target is sp.to_sorted.default else move_source(x)
        if source is None or not 0 < row_width(view, source) <= row_width(view, x):
            break
        x = source
    return x


def _is_table_lookup(view: TokenView, node: Node) -> bool:
    """Return True if each row is read from a table that all rows share."""
    return node.target is aten.index.Tensor and view.is_inside(node) and not view.rows(node.args[0])


def find_regions(view: TokenView) -> Iterator[TileRegion]:
    """Yield the regions in the order of the graph; seeds that share nodes are in one region."""
    groups: dict[Node, set[Node]] = {}  # by first seed
    sorts = sort_groups(view)
    for seed in find_seeds(view):
        if not any(seed in nodes for nodes in groups.values()):
            grown = _grow(view, seed, sorts)
            while seed not in (nodes := _drop_unreachable(view, grown)):
                grown -= nodes  # of a residual, from which attention and a later seed are computed
            _add_group(view, groups, seed, nodes)
    for seed, nodes in groups.items():
        copies = _row_copies(view, seed, nodes)
        for others in groups.values():
            others -= copies
        nodes |= copies
    for seed, nodes in groups.items():
        yield _make_region(view, nodes, _input_width(view, seed))


def _add_group(view: TokenView, groups: dict[Node, set[Node]], seed: Node, nodes: set[Node]) -> None:
    """Add a group, or extend one that shares its nodes, such as a loss of the logits of both."""
    for first, others in groups.items():
        if nodes.isdisjoint(others):
            continue
        both = nodes | others
        if _drop_unreachable(view, both) == both:
            groups[first] = both
            return
        nodes = _drop_partial_sums(view, _drop_unreachable(view, nodes - others))
    if seed in nodes:
        groups[seed] = nodes


def sort_groups(view: TokenView) -> list[set[Node]]:
    """Return, for each sort of the local graph, the nodes in its order, including the inverse."""
    sorts = view.local.find_nodes(op="call_function", target=sp.sort_rows.default)
    return [reachable_set([one], lambda n: n.users if n.target is not sp.from_sorted.default else ()) for one in sorts]


def _grow(view: TokenView, seed: Node, sorts: Sequence[set[Node]]) -> set[Node]:
    narrow = _input_width(view, seed)

    def is_tokenwise(node: Node) -> bool:
        """Return True if the region grows over the users of the node: it is wide, thin or a sum."""
        if not is_tensor(node):  # several results, which are read separately
            return True
        return view.is_sum(node) or (
            bool(view.rows(node)) and not narrow / MAX_THIN_WIDTH < row_width(view, node) < MIN_WIDENING * narrow
        )

    def onwards(node: Node) -> Iterable[Node]:
        """Return the neighbors of a node that the region includes."""
        users = node.users if is_tokenwise(node) else ()
        wide = [x for x in node.all_input_nodes if row_width(view, x) >= MIN_WIDENING * narrow or not is_tensor(x)]
        together = [x for one in sorts if view.source[node] in one for x in one]
        return [
            x for x in (*users, *wide, *filter(None, map(view.inner_nodes.get, together))) if _belongs_to(view, x, seed)
        ]

    return _drop_partial_sums(view, reachable_set([seed], onwards))


def _row_copies(view: TokenView, seed: Node, nodes: set[Node]) -> set[Node]:
    """Return the nodes that repeat rows only for this region, such as one for each of a token's experts."""

    def repeats(x: Node) -> bool:
        """Return True if the node repeats narrower rows for the seed."""
        narrower = move_source(x) is not None and row_width(view, _skip_moves(view, x)) < row_width(view, x)
        return narrower and _belongs_to(view, x, seed)

    found = reachable_set(nodes, lambda node: [x for x in node.all_input_nodes if repeats(x)])
    while others := {n for n in found - nodes if outside_readers(view, n, found)}:
        found -= others
    return found - nodes


def _drop_partial_sums(view: TokenView, nodes: set[Node]) -> set[Node]:
    """Remove nodes that add sums of which some are outside: these are equal for all tiles."""
    while short := {n for n in nodes if any(view.is_sum(x) and x not in nodes for x in n.all_input_nodes)}:
        nodes = nodes - short
    return nodes


def _belongs_to(view: TokenView, node: Node, seed: Node) -> bool:
    """Return True if the node has the seed's number of rows and checkpoint, so that a tile may have both."""
    can_join = view.is_inside(node) and view.checkpoint(node) == view.checkpoint(seed)
    return can_join and _row_sizes(view, node) <= {_row_size(view, seed)}


def _row_sizes(view: TokenView, node: Node) -> set[object]:
    """Return the numbers of rows of the node's operands and results."""
    return {_row_size(view, x) for x in (*node.all_input_nodes, node) if view.rows(x)}


def _row_size(view: TokenView, node: Node) -> object:
    have = view.rows(node)
    return have.frame.size if have is not None else None


def _drop_unreachable(view: TokenView, nodes: set[Node]) -> set[Node]:
    """Remove nodes that need an outside value which depends on the others: a region runs as one op."""
    inside = {view.source[n]: n for n in nodes}
    remaining, dropped = set[Node](), set[Node]()
    for node in view.local.nodes:
        before = node.all_input_nodes
        if node in inside and dropped.isdisjoint(before):
            remaining.add(node)
        elif not remaining.isdisjoint(before) or not dropped.isdisjoint(before):
            dropped.add(node)
    return {inside[n] for n in remaining}


def outside_readers(view: TokenView, node: Node, nodes: Iterable[Node]) -> list[Node]:
    """Return the readers of the value in the local graph that are not among the nodes."""
    inside = {view.source[n] for n in nodes}
    return [user for user in view.source[node].users if user not in inside]


def _make_region(view: TokenView, nodes: set[Node], narrow: int) -> TileRegion:
    ordered = [n for n in view.gm.graph.nodes if n in nodes]
    given = dict.fromkeys(x for n in ordered for x in n.all_input_nodes if x not in nodes and is_tensor(x))
    results = [n for n in ordered if is_tensor(n) and outside_readers(view, n, nodes)]
    also = [n for n in results if row_width(view, n) >= MIN_WIDENING * narrow]
    return TileRegion(
        tuple(ordered),
        tuple(n for n in ordered if view.rows(n) and (_is_widening(view, n) or _is_table_lookup(view, n))),
        tuple(x for x in given if view.rows(x)),
        tuple(x for x in given if not view.rows(x)),
        tuple(n for n in results if n not in also),
        tuple(also),
        narrow,
    )
