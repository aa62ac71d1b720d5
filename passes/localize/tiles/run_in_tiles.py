"""Run token-wise work with large intermediate values in tiles of rows, one after the other.

    z = linear(h, w); cross_entropy(z, y, sum)     ->     sp.tiled([h, y], [w], tiles, program)

One op replaces a region (`tile_regions.py`) and calls the program of one tile, a part of the rows, in a loop. Forward
and backward store the intermediate values (the inside) of one tile. Regions are found in a view of the local graph
(`tile_view.py`), whose nodes `view.to_local` maps to nodes of the local graph, the program of one rank. The op runs
after the insertion node, at the end of the region; nodes between those of the region that read its results (late nodes)
move after the op.
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
from sp_compile.passes.sharding.rule import rule_of

from .choose_tiles import TILE_BYTES, choose_tile_counts, inner_bytes, is_scalar_loss, node_bytes
from .tile_regions import MIN_WIDENING, TileRegion, count_rows, find_regions, has_thin_results, row_width, sort_groups
from .tile_symbols import has_symbols, split_row_dim, symbol_places
from .tile_view import TokenView, is_dropout, token_view
from .trace_tile import has_same_draws, tile_program

sp, aten = torch.ops.sp, torch.ops.aten
SEED_LIMIT = 1 << 62  # seeds of dropout in tiles are non-negative int64 numbers below this
ONCE_REASON = "tiles='auto' does not recompute where the step fits in memory: pass a number of tiles"


class RunInTiles(Pass):
    """Pass that replaces each region for which tiles save memory by one op."""

    requires = frozenset({"validated", "saved attention"})  # no pass reads the program of a tile
    provides = frozenset({"tiled"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Replace regions of the local graph by sp::tiled calls, in place; return their number.

        A region computes wide values from rows, such as logits; `sp::tiled` runs it for some rows (a tile) at a time.
        """
        option = context.options.tiles  # "never", "auto" or a number of tiles
        if option == "never" or (option == "auto" and not any(node_bytes(n) > TILE_BYTES for n in gm.graph.nodes)):
            _clear_recomputed(gm)
            return 0
        assert context.input_placements is not None
        settle_dtypes(gm.graph)  # meta["val"] of the nodes then has the dtypes of autocast regions
        # A copy of the graph in which propagation places the rows of each value, with tiles in the role of ranks. Which
        # ops can run on tiles does not depend on the number of tiles, as long as there are at least 2.
        view_tiles = max(2, option) if isinstance(option, int) else 2
        view = token_view(gm, context.input_placements, context.ranks.n, view_tiles)
        regions = [region for region in find_regions(view) if self._can_tile(view, region)]
        if isinstance(option, int):
            tile_counts = [option] * len(regions)
        else:
            memory = context.memory[-1] if context.memory else None  # the current estimate of a rank's memory, if any
            tile_counts = choose_tile_counts(view, regions, memory, context.times)
        changes = sum(self._tile_region(view, region, tiles, context) for region, tiles in zip(regions, tile_counts))
        if changes:
            erase_dead(gm.graph)
            return changes
        _clear_recomputed(gm)
        if isinstance(option, int) and not self.notes:
            reason = "no matmul of a rank's rows with a weight doubles their width"
            self.notes.append(Note(NoteKind.DECLINED, self.name, reason))
        return 0

    def _can_tile(self, view: TokenView, region: TileRegion) -> bool:
        """Return True if the region can be tiled; else add a note with the reason, unless it is not worth one ("")."""
        reason = _refusal(view, region)
        if reason:
            self.note_refusal(view.to_local[region.seed_products[0]], reason)
        return reason is None

    def _tile_region(self, view: TokenView, region: TileRegion, tiles: int, context: PassContext) -> bool:
        """Replace the region by an sp::tiled call and report it; return True, or False if it is not tiled.

        A region is a set of token-wise nodes that compute wide values, such as logits. Updates `view.to_local`, since
        the results of the region may be operands of the next regions.

        Args:
            view: The token view; `view.to_local` maps its nodes to those of the local graph.
            region: The region, of nodes of the view.
            tiles: The number of tiles; 0 if the region is not to be tiled.
            context: The context, to which the tiled region is added for the report.
        """
        node = view.to_local[region.seed_products[0]]
        if not tiles:
            # Tiles of a loss are computed once. Tiles of another region would be computed again in the backward, which
            # is then the reason not to tile it.
            if not is_scalar_loss(view, region):
                self.note_refusal(node, ONCE_REASON)
            return False
        total = count_rows(view, region)
        tiles = min(tiles, total)
        program = tile_program(view, region, tiles)
        if not has_same_draws(program):
            self.note_refusal(node, "a backward that recomputes it would draw different random numbers")
            return False
        last_line = node_line(view.to_local[region.nodes[-1]])
        replacements = self._emit_tiles(view, region, program, tiles)
        nbytes, length = inner_bytes(region), tile_length(total, tiles)
        tile_bytes = nbytes * length // total
        is_recomputed = bool(program.gradients) and not program.at_once  # at_once: gradients in the forward's loop
        sizes = f"intermediate values of {_format_size(nbytes)} become {_format_size(tile_bytes)}"
        repeated_work = _describe_repeated_work(region, program)
        self.note(node, f"{tiles} tiles of {length} of {total} rows: {sizes}{repeated_work}")
        if is_recomputed and any(has_policy(view.to_local[n]) for n in region.nodes):
            self.note_refusal(node, "its checkpoint policy does not apply to tiles", "checkpoint_policy")
        if region.shared:  # wide values with readers outside: the nodes of the region remain, as repeated work
            for n in region.nodes:
                set_node_info(view.to_local[n], recomputed=True)
        tiled_region = TiledRegion(
            node=node.name, where=node_line(node), tiles=tiles, rows=total, inside=nbytes, tile=tile_bytes,
            layer=node_layer(node), ends=last_line, recomputed=is_recomputed, repeated=bool(region.shared),
        )  # fmt: skip
        context.tiled_regions.append(tiled_region)
        view.to_local.update(replacements)
        return True

    def _emit_tiles(self, view: TokenView, region: TileRegion, program: TileProgram, tiles: int) -> dict[Node, Node]:
        """Emit the sp::tiled call of a region, and return the nodes that replace the region's results.

        The keys of the returned dict are nodes of the view, the values nodes of the local graph.
        """
        # Nodes between those of the region that read its results, and therefore move after the call.
        late_nodes = _late_nodes(view, region)
        last, insertion_node = view.to_local[region.nodes[-1]], _insertion_node(view, region)
        assert insertion_node is not None
        with self.graph.inserting_before(insertion_node.next):
            rows = [self._split_rows(view, x, last) for x in region.rows]
            replicated = [view.to_local[x] for x in region.replicated]
            seed = None
            if any(is_dropout(n) for n in region.nodes):  # each run of the graph draws a new seed
                options = {"dtype": torch.int64, "device": torch.device("cpu")}
                scalar_shape: list[int] = []
                seed = self.compute(aten.randint.default, (SEED_LIMIT, scalar_shape), last, options)
            tiled = self.compute(sp.tiled.default, (rows, replicated, tiles, program.name, seed), last)
            replacements = {x: self._merge_rows(view, x, tiled, i) for i, x in enumerate(region.results)}
        for node in reversed(late_nodes):  # move them after the last result, in their order
            replacements[region.results[-1]].append(node)
        inside = {view.to_local[n] for n in region.nodes}
        for x, replacement in replacements.items():
            view.to_local[x].replace_all_uses_with(replacement, lambda user: user not in inside)
        return replacements

    def _split_rows(self, view: TokenView, x: Node, like: Node) -> Node:
        """Return the operand x of a region with its rows in a separate dim, along which the loop over tiles slices it.

        An operand (B * S, D) with rows S is reshaped to (B, S, D).
        """
        shard = view.rows(x)
        assert shard is not None
        node = self._emit_flags(view, x, like) if x in view.flags else view.to_local[x]
        return self.reshape(node, split_row_dim(view, x, shard.frame.size), like)

    def _merge_rows(self, view: TokenView, x: Node, tiled: Node, index: int) -> Node:
        """Return result number `index` of the sp::tiled call, reshaped to the shape of the node x that it replaces."""
        result = self.emit(operator.getitem, (tiled, index), tiled.meta["val"][index], view.to_local[x])
        return self.reshape(result, as_sizes(x.meta["val"].shape), view.to_local[x])

    def _emit_flags(self, view: TokenView, x: Node, like: Node) -> Node:
        """Emit a bool tensor that is True in the rows that a mask of the local graph fills with a constant.

        x is an input of the view that has no node in the local graph: the view replaces sp::mask and sp::window by a
        masked_fill with these flags.
        """
        call, shape = OpCall(view.to_local[x]), as_sizes(x.meta["val"].shape)
        options = {"dtype": torch.bool, "device": x.meta["val"].device}
        all_false = self.compute(aten.zeros.default, (self.sizes.list(shape),), like, options)
        fill = True
        args = (all_false, call["dim"], call["frame"], fill, call["n"], call["group"])
        return self.compute(sp.mask.default, args, like)


def _clear_recomputed(gm: GraphModule) -> None:
    """Clear `NodeInfo.recomputed` of all nodes, for a graph without tiles.

    The flag marks nodes that only repeat the work of tiles, for outputs: a later pass moves them to a graph that runs
    only if such an output is read. Without tiles, they are part of the program.
    """
    for node in gm.graph.nodes:
        if node_info(node).recomputed:
            set_node_info(node, recomputed=False)


def _refusal(view: TokenView, region: TileRegion) -> str | None:
    """Return the reason for which the region cannot be tiled, or None if it can be.

    A region is a set of token-wise nodes that compute wide values, such as logits. The report contains the reason,
    unless it is "": a region with fewer than two rows is not worth a note.
    """
    nodes = (*region.nodes, *region.rows, *region.replicated)
    # `symbol_places` is None if a tile cannot read a symbolic size from the dims of its operands.
    if any(_has_size_symbols(n) for n in nodes) or symbol_places(view, region) is None:
        return "a size is a symbol that no operand has as a dim: compile one graph a size with dynamic=False"
    if has_symbols(view, region) and not SYMBOLIC_GRAPHS:
        return "a size is a symbol, which requires torch 2.13: compile with dynamic=False"
    inner_width = sum(row_width(view, x) for x in region.seed_products)
    result_width = sum(row_width(view, x) for x in region.results)
    # A region ends where its values are narrow again. If it returns about as much as it computes, nodes outside read
    # values before that, and tiles would save no memory.
    is_narrow = inner_width >= MIN_WIDENING * result_width
    if not is_narrow or not region.results or not region.rows:  # without results, nodes outside read wide values only
        return "its result has other readers"
    # Wide values with readers outside are computed twice, which is worth it for sums, or results such as a row's loss.
    if region.shared and not has_thin_results(view, region):
        return f"{region.shared[0].name}, an intermediate value, has other readers"
    if count_rows(view, region) < 2:
        return ""
    inside = {view.to_local[n] for n in region.nodes}
    # Sorted rows have no order that a tile can split: a region contains all nodes with the rows of a sort, or none.
    if any(group & inside and not group <= inside for group in sort_groups(view)):
        return "values that are sorted with its rows are outside of it"
    insertion_node, late_nodes = _insertion_node(view, region), _late_nodes(view, region)
    if insertion_node is None:
        return "it starts in grad mode and ends in no_grad mode"
    for node in late_nodes:  # which would move after the insertion node
        if _can_depend_on_autocast(node) and not has_same_autocast([node, insertion_node]):
            return f"{node.name} is between its nodes, in another autocast region than its end"
    for node in late_nodes:
        if not is_pure(node) and node.target not in COMPOSITES:
            return f"{node.name} is between its nodes and has a side effect"
    return None


def _can_depend_on_autocast(node: Node) -> bool:
    """Return True if autocast may determine the dtype of the node's result.

    Such a node cannot move to another autocast region. An sp operator counts, as it may call such ops. One with a 0-dim
    result, such as the sp::all_reduce of a loss, only exchanges it.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    if node.target in COMPOSITES:
        return value.dim() > 0
    return isinstance(node.target, OpOverload) and has_autocast_kernel(node.target, value.device.type)


def _has_size_symbols(node: Node) -> bool:
    """Return True if a node has a symbolic size as an argument that a tile cannot replace by its own size.

    A tile replaces the shape that a reshape or an expand has as its argument, `rule.sizes`.
    """
    rule = rule_of(node)
    if rule is None or rule.reshapes:
        return False
    other_args = [x for name, x in OpCall(node).args.items() if name != rule.sizes]
    return any(isinstance(x, Node) and not is_tensor(x) for x in pytree.tree_leaves(other_args))


def programs_of(gm: GraphModule) -> list[TileProgram]:
    """Return the distinct tile programs that a local graph calls, so that the runtime can compile them."""
    calls = map(OpCall, gm.graph.find_nodes(op="call_function", target=sp.tiled.default))
    return list(dict.fromkeys(PROGRAMS[call["program"]] for call in calls))


def _insertion_node(view: TokenView, region: TileRegion) -> Node | None:
    """Return the node of the local graph after which the sp::tiled call of the region is inserted.

    It is the last node of the region. If that is in no_grad and other nodes of the region are not, it is the next node
    outside of no_grad, so that the call has gradients; None if only the output follows.
    """
    nodes = [view.to_local[n] for n in region.nodes]
    last = nodes[-1]
    if last not in view.without_grad or view.without_grad.issuperset(nodes):
        return last
    with_grad = next((n for n in view.local.nodes if last < n and n not in view.without_grad), None)
    return with_grad if with_grad is not None and with_grad.op != "output" else None


def _late_nodes(view: TokenView, region: TileRegion) -> list[Node]:
    """Return the nodes of the local graph that depend on the region but run before its insertion node, in order.

    They move after the sp::tiled call, which computes their operands. They may move out of no_grad, since values of
    no_grad nodes are read through a detach.
    """
    inside = {view.to_local[n] for n in region.nodes}
    insertion_node = _insertion_node(view, region)
    dependents: dict[Node, None] = {}
    for node in view.local.nodes:
        if node is insertion_node:
            break
        if node not in inside and any(x in inside or x in dependents for x in node.all_input_nodes):
            dependents[node] = None
    return list(dependents)


def _describe_repeated_work(region: TileRegion, program: TileProgram) -> str:
    """Return text for the report on when the gradients of a tiled region are computed, and what is computed twice."""
    text = ""
    if program.gradients:
        text = "; its gradients are computed in the same loop" if program.at_once else "; the backward recomputes it"
    return text + ("; results with other readers are computed twice" if region.shared else "")


def _format_size(nbytes: int) -> str:
    """Return the size as text, such as "1.5 MiB"."""
    return f"{nbytes / 2**20:.1f} MiB"
