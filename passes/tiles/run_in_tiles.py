"""Token-wise work whose inside is large runs in tiles, one behind the other.

    z = linear(h, w); cross_entropy(z, y, sum)     ->     sp.tiled([h, y], [w], tiles, program)

One op in a region's place, which calls the program of one tile in a loop; forward and backward hold one tile's inside.
What ends in a number gets its gradients in the forward's loop; all else is computed again in the backward. A wide value
that is read elsewhere, as logits that the model returns, is made for its readers by the nodes that made it.
Bytes between ranks: none. Leaves alone: random draws but dropout's, a state or no rule, sizes that no operand has.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import at
from sp_compile.lowering.base.layers import layer_of
from sp_compile.lowering.base.library import COMPOSITES
from sp_compile.lowering.tiles.tile_ops import tile_length
from sp_compile.lowering.tiles.tile_program import PROGRAMS, TileProgram
from sp_compile.lowering.torch_compat import SYMBOLIC_GRAPHS, OpOverload, has_autocast_kernel, has_policy, pytree
from sp_compile.passes.base import Pass
from sp_compile.passes.context import Job, Note, NoteKind, RegionInTiles
from sp_compile.passes.graph.call import Call, is_tensor
from sp_compile.passes.graph.edit import drop_dead
from sp_compile.passes.graph.modes import same_autocast, settle_dtypes
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.node_info import mark, record
from sp_compile.passes.graph.sizes import sizes
from sp_compile.passes.sharding.rule import lookup

from .choose_tiles import PIECE, amounts, inside, makes_a_number, node_bytes
from .tile_regions import THIN, WIDER, Region, regions_of, row_count, sorted_rows, width
from .tile_symbols import has_symbols, rows_apart, symbol_places
from .tile_view import TokenView, is_dropout, view_of
from .trace_tile import draws_again, tile_program

sp, aten = torch.ops.sp, torch.ops.aten
ONCE = "tiles='auto' does no work again, as its backward would, where the step fits: give a number of tiles"


class Tiles(Pass):
    """Puts one op in the place of each region that is worth it."""

    requires = frozenset({"proved", "attention is kept"})  # no pass looks into tiles
    provides = frozenset({"tiled"})

    def apply(self, gm: GraphModule, job: Job) -> int:
        if job.tiles == "never" or (job.tiles == "auto" and not any(node_bytes(n) > PIECE for n in gm.graph.nodes)):
            _make_now(gm)
            return 0
        assert job.planned is not None
        settle_dtypes(gm.graph)
        view = view_of(gm, job.planned, job.ranks.n, max(2, job.tiles) if isinstance(job.tiles, int) else 2)
        regions = [region for region in regions_of(view) if self._may(view, region)]
        if isinstance(job.tiles, int):
            found = [job.tiles] * len(regions)
        else:
            found = amounts(view, regions, job.memory[-1] if job.memory else None, job.times)
        done = [region for region, tiles in zip(regions, found) if self._tile(view, region, tiles, job)]
        if done:
            drop_dead(gm.graph)
            return len(done)
        _make_now(gm)
        if isinstance(job.tiles, int) and not self.notes:
            why = "no product of a rank's rows with a weight makes them twice as wide"
            self.notes.append(Note(NoteKind.DECLINED, self.name, why))
        return 0

    def _may(self, view: TokenView, region: Region) -> bool:
        """Could it be done in tiles? If not, a line of the report."""
        why = _reason(view, region)
        if why:
            self.refused(view.source[region.seeds[0]], why)
        return why is None

    def _tile(self, view: TokenView, region: Region, tiles: int, job: Job) -> bool:
        """Put the region's tiles in its place; False, and a line of the report, where that is not to be."""
        node = view.source[region.seeds[0]]
        if not tiles:
            if not makes_a_number(view, region):
                self.refused(node, ONCE)
            return False
        total = row_count(view, region)
        tiles = min(tiles, total)
        program = tile_program(view, region, tiles)
        if not draws_again(program):
            self.refused(node, "a backward that computes it again would not draw the random numbers that it drew")
            return False
        late, ends = _late(view, region), at(view.source[region.nodes[-1]])
        made_by_tiles = self._emit(view, region, program, tiles, late)
        length, whole = tile_length(total, tiles), inside(region)
        recomputed = bool(program.gradients) and not program.at_once
        way = "the backward computes it again" if recomputed else "its gradients are computed in the same loop"
        back = f"; {way}" if program.gradients else ""
        again = "; the results that others read are computed once more for them" if region.also else ""
        self.note(
            node,
            f"{tiles} tiles of {length} of {total} rows: an inside of {_words(whole)} becomes "
            f"{_words(whole * length // total)}{back}{again}",
        )
        if recomputed and any(has_policy(view.source[one]) for one in region.nodes):
            self.refused(node, "its checkpoint's policy saves nothing of a tile", "checkpoint_policy")
        if region.also:
            for one in region.nodes:
                mark(view.source[one], again=True)
        of_tile = whole * length // total
        made = RegionInTiles(
            node.name, at(node), tiles, total, whole, of_tile, layer_of(node), ends, recomputed, bool(region.also)
        )
        job.tiled.append(made)
        view.source.update(made_by_tiles)  # what the next regions read
        return True

    def _emit(
        self, view: TokenView, region: Region, program: TileProgram, tiles: int, late: list[Node]
    ) -> dict[Node, Node]:
        """Put it there; what the region's results have become."""
        last, place = view.source[region.nodes[-1]], _place(view, region)
        assert place is not None
        with self.graph.inserting_before(place.next):
            rows = [self._apart(view, x, last) for x in region.rows]
            whole = [view.source[x] for x in region.whole]
            seed = self._seed(last) if any(is_dropout(n) for n in region.nodes) else None
            args = (rows, whole, tiles, program.name, seed)
            one = self.compute(sp.tiled.default, args, last)
            made = [self._together(view, x, one, i) for i, x in enumerate(region.results)]
        for node in reversed(late):
            made[-1].append(node)
        for x, fresh in zip(region.results, made):
            inside = {view.source[n] for n in region.nodes}
            view.source[x].replace_all_uses_with(fresh, lambda user, inside=inside: user not in inside)
        return dict(zip(region.results, made))

    def _seed(self, like: Node) -> Node:
        """Drawn anew in each call."""
        options = {"dtype": torch.int64, "device": torch.device("cpu")}
        return self.compute(aten.randint.default, (1 << 62, []), like, options)

    def _apart(self, view: TokenView, x: Node, like: Node) -> Node:
        """The operand with its rows alone in a dim."""
        have = view.rows(x)
        assert have is not None
        node = self._flags(view, x, like) if x in view.flags else view.source[x]
        return self.reshaped(node, rows_apart(sizes(x.meta["val"].shape), have, have.frame.size), like)

    def _together(self, view: TokenView, x: Node, one: Node, index: int) -> Node:
        """The result as others read it."""
        values = one.meta["val"]
        made = self.emit(operator.getitem, (one, index), values[index], view.source[x])
        return self.reshaped(made, sizes(x.meta["val"].shape), view.source[x])

    def _flags(self, view: TokenView, x: Node, like: Node) -> Node:
        """Which rows a mask fills."""
        call, shape = Call(view.source[x]), sizes(x.meta["val"].shape)
        options = {"dtype": torch.bool, "device": x.meta["val"].device}
        none = self.compute(aten.zeros.default, (self.sizes.list(shape),), like, options)
        args = (none, call["dim"], call["frame"], True, call["n"], call["group"])
        return self.compute(sp.mask.default, args, like)


def _make_now(gm: GraphModule) -> None:
    """No tiles do what others have left to whoever reads it: it is made as it is written."""
    for node in gm.graph.nodes:
        if record(node).again:
            mark(node, again=False)


def _reason(view: TokenView, region: Region) -> str | None:
    """Why the region stays as it is; "" if it is not worth a word, None if it may be tiled."""
    nodes = (*region.nodes, *region.rows, *region.whole)
    if any(_reads_symbols(n) for n in nodes) or symbol_places(view, region) is None:
        return "a size is a symbol that no operand has as a dim: compile one graph a size with dynamic=False"
    if has_symbols(view, region) and not SYMBOLIC_GRAPHS:
        return "a size is a symbol, which takes torch 2.13: compile with dynamic=False"
    thin = all(view.is_sum(x) or width(view, x) * THIN <= region.narrow for x in region.results)
    made, left = (sum(width(view, x) for x in nodes) for nodes in (region.seeds, region.results))
    if made < WIDER * left or not (region.results and region.rows):
        return "what it makes is read elsewhere"
    if region.also and not thin:
        return f"{region.also[0].name}, of its inside, is read elsewhere"
    if row_count(view, region) < 2:
        return ""
    mine = {view.source[n] for n in region.nodes}
    if any(not mine.isdisjoint(one) and not one <= mine for one in sorted_rows(view)):
        return "some of what is sorted with its rows is no part of it"
    place, late = _place(view, region), _late(view, region)
    if place is None:
        return "it ends where no gradients are recorded, and begins where they are"
    cast = next((n for n in late if not same_autocast([n, place]) and _is_cast(n)), None)
    if cast is not None:
        return f"{cast.name} comes between its nodes, in another autocast than its end"
    stuck = [n for n in late if not (is_pure(n) or n.target in COMPOSITES)]
    return f"{stuck[0].name} comes between its nodes and has an effect" if stuck else None


def _is_cast(node: Node) -> bool:
    """May autocast say what it computes in? Of operators of ours, it does not of those that add up numbers."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    if node.target in COMPOSITES:
        return value.dim() > 0
    return isinstance(node.target, OpOverload) and has_autocast_kernel(node.target, value.device.type)


def _reads_symbols(node: Node) -> bool:
    """Does it take sizes that are symbols, but for where the op's rule says its shape?"""
    call, rule = lookup(node) or (None, None)
    if call is None or rule is None or node.op != "call_function" or rule.reshapes:
        return False
    left = [x for name, x in call.args.items() if name != rule.sizes]
    return any(isinstance(x, Node) and not is_tensor(x) for x in pytree.tree_leaves(left))


def programs_of(gm: GraphModule) -> list[TileProgram]:
    """The programs that a local graph calls, once each."""
    nodes = gm.graph.find_nodes(op="call_function", target=sp.tiled.default)
    return list(dict.fromkeys(PROGRAMS[node.args[3]] for node in nodes))


def _place(view: TokenView, region: Region) -> Node | None:
    """The node behind which the region runs: its last one, or, if that has no gradients and others have, the one that
    records them again; None where nothing does.
    """
    nodes = [view.source[n] for n in region.nodes]
    last = nodes[-1]
    if last not in view.without_grad or view.without_grad.issuperset(nodes):
        return last
    place = next((n for n in view.local.nodes if last < n and n not in view.without_grad), None)
    return place if place is not None and place.op != "output" else None


def _late(view: TokenView, region: Region) -> list[Node]:
    """What reads a result before the place where the region runs, and all that it leads to till there: it moves behind.

    Out of a part without gradients, too: what leaves that is read through a detach.
    """
    inside = {view.source[n] for n in region.nodes}
    place = _place(view, region)
    found: dict[Node, None] = {}
    for node in view.local.nodes:
        if node is place:
            return list(found)
        mine = inside.union(found)
        if node not in inside and not mine.isdisjoint(node.all_input_nodes):
            found[node] = None
    return list(found)


def _words(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
