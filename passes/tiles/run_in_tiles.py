"""Run token-wise work with a large inside in tiles, one after the other.

    z = linear(h, w); cross_entropy(z, y, sum)     ->     sp.tiled([h, y], [w], tiles, program)

One op replaces a region and calls the program of one tile in a loop; forward and backward store the inside of one tile.
Gradients of a region that ends in a number are computed in the forward's loop; other regions are recomputed in the
backward. A wide value with readers outside, such as returned logits, is computed for its readers by the original nodes.
The pass adds no traffic. Not tiled: random draws other than dropout, ops with a state or without a rule, and sizes that
no operand has.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import node_line
from sp_compile.lowering.base.layers import node_layer
from sp_compile.lowering.base.library import COMPOSITES
from sp_compile.lowering.tiles.tile_ops import tile_length
from sp_compile.lowering.tiles.tile_program import PROGRAMS, TileProgram
from sp_compile.lowering.torch_compat import SYMBOLIC_GRAPHS, OpOverload, has_autocast_kernel, has_policy, pytree
from sp_compile.passes.base import Pass
from sp_compile.passes.context import Note, NoteKind, PassContext, TiledRegion
from sp_compile.passes.graph.call import OpCall, is_tensor
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.graph.modes import has_same_autocast, settle_dtypes
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import as_sizes
from sp_compile.passes.sharding.rule import lookup_rule

from .choose_tiles import TILE_BYTES, choose_tile_counts, inner_bytes, is_scalar_loss, node_bytes
from .tile_regions import MAX_THIN_WIDTH, MIN_WIDENING, TileRegion, count_rows, find_regions, row_width, sort_groups
from .tile_symbols import has_symbols, split_row_dim, symbol_places
from .tile_view import TokenView, is_dropout, token_view
from .trace_tile import redraws_in_backward, tile_program

sp, aten = torch.ops.sp, torch.ops.aten
ONCE_REASON = "tiles='auto' does not recompute where the step fits in memory: pass a number of tiles"


class RunInTiles(Pass):
    """Pass that replaces each region that is worth tiling by one op."""

    requires = frozenset({"validated", "saved attention"})  # no pass reads the program of a tile
    provides = frozenset({"tiled"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        asked = job.options.tiles
        if asked == "never" or (asked == "auto" and not any(node_bytes(n) > TILE_BYTES for n in gm.graph.nodes)):
            _materialize_deferred(gm)
            return 0
        assert job.input_placements is not None
        settle_dtypes(gm.graph)
        view = token_view(gm, job.input_placements, job.ranks.n, max(2, asked) if isinstance(asked, int) else 2)
        regions = [region for region in find_regions(view) if self._can_tile(view, region)]
        if isinstance(asked, int):
            found = [asked] * len(regions)
        else:
            found = choose_tile_counts(view, regions, job.memory[-1] if job.memory else None, job.times)
        done = [region for region, tiles in zip(regions, found) if self._tile_region(view, region, tiles, job)]
        if done:
            erase_dead(gm.graph)
            return len(done)
        _materialize_deferred(gm)
        if isinstance(asked, int) and not self.notes:
            why = "no matmul of a rank's rows with a weight doubles their width"
            self.notes.append(Note(NoteKind.DECLINED, self.name, why))
        return 0

    def _can_tile(self, view: TokenView, region: TileRegion) -> bool:
        """Return True if the region can be tiled; else add a note."""
        why = _refusal(view, region)
        if why:
            self.note_refusal(view.source[region.seed_products[0]], why)
        return why is None

    def _tile_region(self, view: TokenView, region: TileRegion, tiles: int, job: PassContext) -> bool:
        """Replace the region by its tiles; return False, possibly with a note, if it is not tiled."""
        node = view.source[region.seed_products[0]]
        if not tiles:
            if not is_scalar_loss(view, region):
                self.note_refusal(node, ONCE_REASON)
            return False
        total = count_rows(view, region)
        tiles = min(tiles, total)
        program = tile_program(view, region, tiles)
        if not redraws_in_backward(program):
            self.note_refusal(node, "a backward that recomputes it would draw different random numbers")
            return False
        late_nodes, ends = _late_nodes(view, region), node_line(view.source[region.nodes[-1]])
        replacements = self._emit_tiles(view, region, program, tiles, late_nodes)
        length, nbytes = tile_length(total, tiles), inner_bytes(region)
        recomputed = bool(program.gradients) and not program.at_once
        way = "the backward recomputes it" if recomputed else "its gradients are computed in the same loop"
        back = f"; {way}" if program.gradients else ""
        again = "; results with other readers are computed twice" if region.shared else ""
        self.note(
            node,
            f"{tiles} tiles of {length} of {total} rows: intermediate values of {_format_size(nbytes)} become "
            f"{_format_size(nbytes * length // total)}{back}{again}",
        )
        if recomputed and any(has_policy(view.source[one]) for one in region.nodes):
            self.note_refusal(node, "its checkpoint policy does not apply to tiles", "checkpoint_policy")
        if region.shared:
            for one in region.nodes:
                set_node_info(view.source[one], recomputed=True)
        of_tile = nbytes * length // total
        tiled = TiledRegion(
            node.name,
            node_line(node),
            tiles,
            total,
            nbytes,
            of_tile,
            node_layer(node),
            ends,
            recomputed,
            bool(region.shared),
        )
        job.tiled_regions.append(tiled)
        view.source.update(replacements)  # the operands of the next regions
        return True

    def _emit_tiles(
        self, view: TokenView, region: TileRegion, program: TileProgram, tiles: int, late_nodes: list[Node]
    ) -> dict[Node, Node]:
        """Emit the tiles, and return the nodes that replace the region's results."""
        last, place = view.source[region.nodes[-1]], _insertion_node(view, region)
        assert place is not None
        with self.graph.inserting_before(place.next):
            rows = [self._split_rows(view, x, last) for x in region.rows]
            replicated = [view.source[x] for x in region.replicated]
            seed = self._emit_seed(last) if any(is_dropout(n) for n in region.nodes) else None
            args = (rows, replicated, tiles, program.name, seed)
            one = self.compute(sp.tiled.default, args, last)
            merged = [self._merge_rows(view, x, one, i) for i, x in enumerate(region.results)]
        for node in reversed(late_nodes):
            merged[-1].append(node)
        for x, fresh in zip(region.results, merged):
            inside = {view.source[n] for n in region.nodes}
            view.source[x].replace_all_uses_with(fresh, lambda user, inside=inside: user not in inside)
        return dict(zip(region.results, merged))

    def _emit_seed(self, like: Node) -> Node:
        """Emit a seed that is drawn again in each call."""
        options = {"dtype": torch.int64, "device": torch.device("cpu")}
        return self.compute(aten.randint.default, (1 << 62, []), like, options)

    def _split_rows(self, view: TokenView, x: Node, like: Node) -> Node:
        """Return the operand with its rows in a separate dim."""
        have = view.rows(x)
        assert have is not None
        node = self._emit_flags(view, x, like) if x in view.flags else view.source[x]
        return self.reshape(node, split_row_dim(as_sizes(x.meta["val"].shape), have, have.frame.size), like)

    def _merge_rows(self, view: TokenView, x: Node, one: Node, index: int) -> Node:
        """Return the result in the shape that its readers expect."""
        values = one.meta["val"]
        rows = self.emit(operator.getitem, (one, index), values[index], view.source[x])
        return self.reshape(rows, as_sizes(x.meta["val"].shape), view.source[x])

    def _emit_flags(self, view: TokenView, x: Node, like: Node) -> Node:
        """Emit flags of the rows that a mask fills."""
        call, shape = OpCall(view.source[x]), as_sizes(x.meta["val"].shape)
        options = {"dtype": torch.bool, "device": x.meta["val"].device}
        none = self.compute(aten.zeros.default, (self.sizes.list(shape),), like, options)
        args = (none, call["dim"], call["frame"], True, call["n"], call["group"])
        return self.compute(sp.mask.default, args, like)


def _materialize_deferred(gm: GraphModule) -> None:
    """Clear the marks of deferred outputs: without tiles they are computed as written."""
    for node in gm.graph.nodes:
        if node_info(node).recomputed:
            set_node_info(node, recomputed=False)


def _refusal(view: TokenView, region: TileRegion) -> str | None:
    """Return the reason for which the region is not tiled; None if it may be.

    The reason is "" if it is not reported.
    """
    nodes = (*region.nodes, *region.rows, *region.replicated)
    if any(_reads_symbols(n) for n in nodes) or symbol_places(view, region) is None:
        return "a size is a symbol that no operand has as a dim: compile one graph a size with dynamic=False"
    if has_symbols(view, region) and not SYMBOLIC_GRAPHS:
        return "a size is a symbol, which requires torch 2.13: compile with dynamic=False"
    thin = all(view.is_sum(x) or row_width(view, x) * MAX_THIN_WIDTH <= region.narrow for x in region.results)
    width, left = (sum(row_width(view, x) for x in nodes) for nodes in (region.seed_products, region.results))
    if width < MIN_WIDENING * left or not (region.results and region.rows):
        return "its result has other readers"
    if region.shared and not thin:
        return f"{region.shared[0].name}, an intermediate value, has other readers"
    if count_rows(view, region) < 2:
        return ""
    mine = {view.source[n] for n in region.nodes}
    if any(not mine.isdisjoint(one) and not one <= mine for one in sort_groups(view)):
        return "values that are sorted with its rows are outside of it"
    place, late_nodes = _insertion_node(view, region), _late_nodes(view, region)
    if place is None:
        return "it starts in grad mode and ends in no_grad mode"
    cast = next((n for n in late_nodes if not has_same_autocast([n, place]) and _is_cast(n)), None)
    if cast is not None:
        return f"{cast.name} is between its nodes, in another autocast region than its end"
    stuck = [n for n in late_nodes if not (is_pure(n) or n.target in COMPOSITES)]
    return f"{stuck[0].name} is between its nodes and has a side effect" if stuck else None


def _is_cast(node: Node) -> bool:
    """Return True if autocast may determine the dtype of the result. Scalars of sp operators are excluded."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    if node.target in COMPOSITES:
        return value.dim() > 0
    return isinstance(node.target, OpOverload) and has_autocast_kernel(node.target, value.device.type)


def _reads_symbols(node: Node) -> bool:
    """Return True if the node has symbolic size arguments other than the rule's shape argument."""
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or node.op != "call_function" or rule.reshapes:
        return False
    left = [x for name, x in call.args.items() if name != rule.sizes]
    return any(isinstance(x, Node) and not is_tensor(x) for x in pytree.tree_leaves(left))


def programs_of(gm: GraphModule) -> list[TileProgram]:
    """Return the distinct tile programs that a local graph calls."""
    nodes = gm.graph.find_nodes(op="call_function", target=sp.tiled.default)
    return list(dict.fromkeys(PROGRAMS[node.args[3]] for node in nodes))


def _insertion_node(view: TokenView, region: TileRegion) -> Node | None:
    """Return the node after which the region runs.

    It is the last node, or, if that has no gradients and others have, the next node that records gradients; None if
    there is none.
    """
    nodes = [view.source[n] for n in region.nodes]
    last = nodes[-1]
    if last not in view.without_grad or view.without_grad.issuperset(nodes):
        return last
    place = next((n for n in view.local.nodes if last < n and n not in view.without_grad), None)
    return place if place is not None and place.op != "output" else None


def _late_nodes(view: TokenView, region: TileRegion) -> list[Node]:
    """Return the readers of results before the insertion point and their dependents, which move after it.

    They may move out of a part without gradients, since its values are read through a detach.
    """
    inside = {view.source[n] for n in region.nodes}
    place = _insertion_node(view, region)
    found: dict[Node, None] = {}
    for node in view.local.nodes:
        if node is place:
            return list(found)
        mine = inside.union(found)
        if node not in inside and not mine.isdisjoint(node.all_input_nodes):
            found[node] = None
    return list(found)


def _format_size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
