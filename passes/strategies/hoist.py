"""A short window of rows, cut behind what makes rows wide, is cut in front of it: nothing wide is gathered for it.

    tanh(linear(h, w))[:, n:]     ->     tanh(linear(h[:, n:], w))          also select, narrow, split, chunk
    tanh(linear(h, w))[:, ids]    ->     tanh(linear(h[:, ids], w))         also index_select

Rows that were not asked for are no longer computed, the ranks share out those of the window, and what is gathered is as
narrow as hidden values are, where logits are as wide as the vocabulary. Bytes sent by this pass: none. Leaves alone:
windows of most rows, which ranks cut without an exchange; what draws random numbers; values that are as wide further
back; on one rank that was not asked for tiles, what others read, too; rows that the ranks would not share out, unless
each has as many of its own; parts of sequences flattened with their batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, collect_nodes, is_tensor, node_shape, read_results
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.modes import no_grad_nodes, restore_autocast
from sp_compile.passes.graph.mutation import is_pure
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.rank_rng import is_random
from sp_compile.passes.graph.sizes import Size, assume_large, is_same_size, size_product
from sp_compile.passes.sharding.factors import BoundRule, flatten_dims
from sp_compile.passes.sharding.matchers import SlicePiece, nth_result
from sp_compile.passes.sharding.placement import Demand, Shard
from sp_compile.passes.sharding.rule import lookup_rule
from sp_compile.passes.sharding.rules.movement import SPLIT_OPS

from .discharge import DemandPass

aten = torch.ops.aten
READ_OPS = (aten.index.Tensor, aten.index_select.default)
SLICE_OPS = (aten.slice.Tensor, aten.narrow.default, aten.select.int, *SPLIT_OPS, *READ_OPS)
RowsAt = tuple[int, Size]
"""Where the rows of a chain's end lie in a value: the dim, and the place of the first."""


@dataclass(frozen=True)
class SelectedRows:
    """The rows of a dim of the source at these numbers; the rest as of a `SlicePiece`."""

    source: Node
    dim: int
    indices: Node
    length: Size
    keeps_dim: bool = True


RowsAsked = SlicePiece | SelectedRows


@dataclass(frozen=True)
class RowWiseNode:
    """A node that makes each row of one row. dim: of its rows; operands: where theirs lie, by number."""

    node: Node
    dim: int
    operands: dict[int, RowsAt]


@dataclass(frozen=True)
class RowChain:
    """What makes a value row by row. steps: the last one first; given: the values of rows that these read."""

    inputs: dict[Node, RowsAt]
    steps: tuple[RowWiseNode, ...] = ()

    @property
    def nodes(self) -> list[Node]:
        """Of the steps."""
        return [step.node for step in self.steps]

    def first_reader(self, given: Node) -> Node:
        """The first of the steps that read these rows."""
        return min(s.node for s in self.steps if any(OpCall(s.node).operands[i] is given for i in s.operands))

    @property
    def width(self) -> int:
        """Elements of all that would be cut."""
        return sum(assume_large(size_product(node_shape(x))) for x in self.inputs)


class HoistSlices(DemandPass):
    """Claims the demand of a short window for all of its operand, where something narrower can be cut instead."""

    kinds = frozenset({"whole"})

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        self.demanding, self.axes = {demand.node for demand in job.plan(gm).demands}, job.axes(gm)
        self.learns_nothing = no_grad_nodes(gm.graph)
        placed = (p for placements in job.plan(gm).placements.values() for p in placements)
        self.dealt = any(isinstance(p, Shard) and p.frame.order.is_balanced for p in placed)
        self.asked: dict[Node, int] = {}  # rows of a source that all its windows have together
        return super().apply(gm, job)

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        return None if node.target in SLICE_OPS and self._find_chain(node) is not None else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        chain, source = self._find_chain(node), OpCall(node).operands[0]
        assert chain is not None
        for x in _late_inputs(node, source, first := min(chain.nodes)) or ():
            first.prepend(x)
        fresh = {
            number: self._rebuild_chain(chain, source, piece, node) for number, piece in _slices_read(node).items()
        }
        self.replace(node, fresh[0] if is_tensor(node) else fresh)
        _defer_chain_outputs(chain)
        narrow = ", ".join(x.name for x in chain.inputs)
        for one in fresh.values():
            self.note(one, f"the window is cut from {narrow}, which is narrower than {source.name}")

    def _find_chain(self, node: Node) -> RowChain | None:
        """The chain that ends in what the node cuts, from where its rows are narrowest; None if that is no chain."""
        pieces = _slices_read(node)
        if not pieces or not self._saves_work(node, pieces):
            return None
        first = next(iter(pieces.values()))
        chain = best = RowChain({first.source: (first.dim, 0)})
        while (longer := self._extend_chain(chain, node)) is not None:
            chain = longer
            best = chain if chain.width < best.width else best
        return best if best.steps and _late_inputs(node, first.source, min(best.nodes)) is not None else None

    def _saves_work(self, node: Node, pieces: dict[int, RowsAsked]) -> bool:
        """Does each rank then make a share of the pieces, or no more rows, with all that others cut, than it has now?

        A sequence of the window's own is in no order in which rows were dealt out.
        """
        n, source = self.job.ranks.n, OpCall(node).operands[0]
        results = [node] if is_tensor(node) else list(read_results(node).values())
        if all(self.axes.sequence_dims(x) for x in results):
            return not self.dealt
        if source not in self.asked:
            cuts = [user for user in source.users if user in self.demanding and user.target in SLICE_OPS]
            self.asked[source] = sum(assume_large(piece.length) for cut in cuts for piece in _slices_read(cut).values())
        return all(n * self.asked[source] <= assume_large(node_shape(source)[piece.dim]) for piece in pieces.values())

    def _extend_chain(self, chain: RowChain, cut: Node) -> RowChain | None:
        """The chain with what makes the last of the values that it reads and may be made anew; None without any."""
        for node in sorted(chain.inputs, reverse=True):
            step = _match_row_wise(node, chain.inputs[node]) if self._can_recompute(node, chain, cut) else None
            if step is None:
                continue
            others = {x: rows for x, rows in chain.inputs.items() if x is not node}
            made_of = {OpCall(node).operands[i]: rows for i, rows in step.operands.items()}
            if all(_is_same_slice(others.get(x, rows), rows) for x, rows in made_of.items()):
                return RowChain({**others, **made_of}, (*chain.steps, step))
        return None

    def _can_recompute(self, node: Node, chain: RowChain, cut: Node) -> bool:
        """May the node be made once more, for the window, or does nothing else read it?

        Not where one of them runs without gradients and the other with: so would what is cut in front of both.
        """
        if node.op != "call_function" or node in self.demanding:
            return False
        if (node in self.learns_nothing) != (cut in self.learns_nothing):
            return False
        mine = {*chain.nodes, cut}
        alone = all(user in mine or (user in self.demanding and user.target in SLICE_OPS) for user in node.users)
        return alone or self.job.ranks.n > 1 or isinstance(self.job.tiles, int)

    def _rebuild_chain(self, chain: RowChain, source: Node, piece: RowsAsked, like: Node) -> Node:
        """The piece of the source, made of pieces of what the chain reads."""
        made: dict[Node, Node] = {}
        for x, rows in chain.inputs.items():
            with self.graph.inserting_before(chain.first_reader(x)):  # made behind the first step, x may be
                made[x] = self._slice_rows(x, rows, piece, like)
        for step in reversed(chain.steps):
            made[step.node] = self._rebuild_step(step, made, piece)
        if piece.keeps_dim:
            return made[source]
        with self.graph.inserting_before(like):
            return self.compute(aten.select.int, (made[source], piece.dim, 0), like)

    def _slice_rows(self, x: Node, rows: RowsAt, piece: RowsAsked, like: Node) -> Node:
        """The rows of the piece."""
        dim, first = rows
        if isinstance(piece, SlicePiece):
            start = piece.start + first
            end = start + (piece.length - 1) * piece.step + 1
            return self.compute(aten.slice.Tensor, (x, dim, *map(self.sizes, (start, end)), piece.step), like)
        at, extent = piece.indices, node_shape(piece.source)[piece.dim]
        if not is_same_size(
            node_shape(x)[dim], extent
        ):  # a window of x, of which alone they are numbers, from its end, too
            numbers = (self.sizes(first), self.sizes(first + extent))
            device = {"device": at.meta["val"].device}
            at = self._select_rows(self.compute(aten.arange.start, numbers, like, device), 0, at, like)
        return self._select_rows(x, dim, at, like)

    def _select_rows(self, x: Node, dim: int, at: Node, like: Node) -> Node:
        args = ([None] * dim + [at],) if like.target is aten.index.Tensor else (dim, at)
        return self.compute(like.target, (x, *args), like)

    def _rebuild_step(self, step: RowWiseNode, made: dict[Node, Node], piece: RowsAsked) -> Node:
        """The step on the rows of the piece."""
        node, (call, rule) = step.node, _has_known_shape(step.node)
        operands = [made[x] if i in step.operands else x for i, x in enumerate(call.operands)]
        if rule.window == step.dim:
            return operands[0]
        with self.graph.inserting_before(node), restore_autocast(node):
            if rule.reshapes:
                shape = node_shape(node)
                return self.reshape(operands[0], (*shape[: step.dim], piece.length, *shape[step.dim + 1 :]), node)
            args, kwargs = call.with_operands(operands)
            return self.compute(node.target, args, node, kwargs)


def _slices_read(node: Node) -> dict[int, RowsAsked]:
    """What is read of a cut, by number; nothing if the place of one is not known."""
    numbers = [0] if is_tensor(node) else list(read_results(node))
    found = {
        number: _match_selected(node) if node.target in READ_OPS else nth_result(node, number) for number in numbers
    }
    known = {number: piece for number, piece in found.items() if piece is not None}
    return known if len(known) == len(found) else {}


def _match_selected(node: Node) -> SelectedRows | None:
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or not rule.picks:
        return None
    source, at = call.operands
    ((picked, factor),) = rule.picks.items()
    dim = rule.operands[0].index(factor)
    return SelectedRows(source, dim, at, node_shape(node)[dim]) if rule.results[0][dim] == picked else None


def _has_known_shape(node: Node) -> tuple[OpCall, BoundRule]:
    found = lookup_rule(node)
    assert found is not None
    assert found[1] is not None
    return found[0], found[1]


def _match_row_wise(node: Node, rows: RowsAt) -> RowWiseNode | None:
    """How the node makes rows that lie so in its result, each of one row; None if it does not."""
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or not is_tensor(node) or rule.operand_placements is not None or rule.lenders:
        return None
    if not is_pure(node) or is_random(node) or (rule.sizes and not rule.reshapes):
        return None
    dim, first = rows
    factor = rule.results[0][dim]
    if rule.window == dim:
        return RowWiseNode(node, dim, {0: (dim, first + rule.spans[0][0])})
    operands = {i: (dims.index(factor), first) for i, dims in enumerate(rule.operands) if factor in dims}
    grouped = any(factor in flatten_dims(dims) and factor not in dims for dims in rule.operands)
    found = factor and operands and rule.kind(factor) == "pass" and not grouped
    return RowWiseNode(node, dim, operands) if found else None


def _late_inputs(cut: Node, source: Node, first: Node) -> list[Node] | None:
    """What the cut reads besides its source, and is made behind the first step; None if that may not move.

    Numbers of rows and sizes may: no mode (autocast, no_grad) changes what they are.
    """
    given = [x for x in collect_nodes((cut.args, cut.kwargs)) if x is not source]
    late = reachable_set(given, lambda n: n.all_input_nodes if not n < first else ())
    moved = [n for n in sorted(late) if not n < first]
    return moved if all(is_pure(n) and _is_index_like(n) and n is not first for n in moved) else None


def _is_index_like(node: Node) -> bool:
    """Is it a size, or a tensor of integers or truth values?"""
    value = node.meta.get("val")
    exact = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    return exact or isinstance(value, torch.SymInt)


def _is_same_slice(a: RowsAt, b: RowsAt) -> bool:
    return a[0] == b[0] and is_same_size(a[1], b[1])


def _defer_chain_outputs(chain: RowChain) -> None:
    """What is left of the chain, and read as a result only, is made when somebody reads that."""
    for node in chain.nodes:
        if node.users and all(user.op == "output" or node_info(user).recomputed for user in node.users):
            set_node_info(node, recomputed=True)
