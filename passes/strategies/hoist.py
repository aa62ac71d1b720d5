"""Move a short slice of rows before the ops that widen rows, so that no wide value is gathered for it.

    tanh(linear(h, w))[:, n:]     ->     tanh(linear(h[:, n:], w))          also select, narrow, split, chunk
    tanh(linear(h, w))[:, ids]    ->     tanh(linear(h[:, ids], w))         also index_select

Unused rows are no longer computed, the ranks share the rows of the slice, and the gathered rows are as narrow as hidden
values instead of logits. Bytes sent by this pass: none. Unchanged: slices of most rows, which need no exchange; random
draws; values without a narrower predecessor; sequences that are flattened with their batch. Also unchanged, on one rank
without requested tiles: values with other readers. Rows that the ranks would not share are unchanged, unless each rank
has the same number of its own.

A chain is the list of ops from the narrow value to the slice that compute each row from one row (tanh, linear). The
pass extends it upwards from the slice, and rebuilds its ops on the sliced rows. The source is the value that the slice
reads. A piece is one slice of the source: a range or indices of rows (several for a split). The steps of a chain are
its nodes, its inputs the values of rows that the steps read; each has the width of its rows in elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.dtypes import has_gradient_dtype
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
INDEX_OPS = (aten.index.Tensor, aten.index_select.default)
SLICE_OPS = (aten.slice.Tensor, aten.narrow.default, aten.select.int, *SPLIT_OPS, *INDEX_OPS)
# dim of a value that contains the rows of a chain's result, and the index of the first of them
RowsAt = tuple[int, Size]


@dataclass(frozen=True)
class SelectedRows:
    """Rows of a dim that are selected by index; the common fields are those of `SlicePiece`."""

    source: Node  # tensor before the selection
    dim: int  # dim of the rows
    indices: Node  # indices of the rows
    length: Size  # number of rows
    keeps_dim: bool = True  # False if the dim is removed


RowRequest = SlicePiece | SelectedRows


@dataclass(frozen=True)
class RowWiseNode:
    """Node that computes each row of its result from one row."""

    call: OpCall  # call of the node
    rule: BoundRule  # its sharding rule
    dim: int  # dim of its rows
    operands: dict[int, RowsAt]  # positions of the operands' rows, by index of the operand


@dataclass(frozen=True)
class RowChain:
    """Chain of nodes that compute a value row by row."""

    inputs: dict[Node, RowsAt]  # values of rows that the steps read
    steps: tuple[RowWiseNode, ...] = ()  # nodes, the last one first

    @property
    def nodes(self) -> list[Node]:
        """Return the nodes that compute the value row by row from the inputs, the last one first."""
        return [step.call.node for step in self.steps]

    def first_reader(self, x: Node) -> Node:
        """Return the first node of the chain, in graph order, that reads an input."""
        readers = (step for step in self.steps if any(step.call.operands[i] is x for i in step.operands))
        return min(step.call.node for step in readers)

    @property
    def input_elements(self) -> int:
        """Return the number of elements of all inputs, to find the chain that starts at the narrowest values."""
        return sum(assume_large(size_product(node_shape(x))) for x in self.inputs)


class HoistSlices(DemandPass):
    """Slicing of a narrower value for a demand of a short slice."""

    kinds = frozenset({"gathered"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Move short slices, for which full sequences would be gathered, before the ops that widen their rows.

        Return the number of slices that are moved.
        """
        self.demanding, self.axes = {demand.node for demand in context.plan(gm).demands}, context.axes(gm)
        self.no_grad = no_grad_nodes(gm.graph)
        placed = (p for placements in context.plan(gm).placements.values() for p in placements)
        self.is_balanced = any(isinstance(p, Shard) and p.frame.order.is_balanced for p in placed)
        self.rows_read: dict[Node, int] = {}  # by sliced value: rows that all of its slices read together
        return super().apply(gm, context)

    def refusal(self, node: Node, demands: list[Demand]) -> str | None:
        """Return None to claim the demands of a node, else the reason ("" if they do not concern this pass)."""
        return None if node.target in SLICE_OPS and self._find_chain(node) is not None else ""

    def rewrite(self, node: Node, demands: list[Demand]) -> None:
        """Replace a slice of a wide value: slice narrow values, and compute the wide one from these rows only.

        For tanh(linear(h, w))[:, n:], the chain is linear and tanh, and its narrow input is h.
        """
        chain, source = self._find_chain(node), OpCall(node).operands[0]
        assert chain is not None
        first_node = min(chain.nodes)
        for x in _late_inputs(node, source, first_node) or ():  # nodes of the slice's indices and sizes
            first_node.prepend(x)
        new_slices = {i: self._rebuild_chain(chain, source, piece, node) for i, piece in _slices_read(node).items()}
        self.replace(node, new_slices[0] if is_tensor(node) else new_slices)  # a split has several results, by index
        _defer_chain_outputs(chain)
        inputs = ", ".join(x.name for x in chain.inputs)
        for new in new_slices.values():
            self.note(new, f"the window is sliced from {inputs}, which is narrower than {source.name}")

    def _find_chain(self, node: Node) -> RowChain | None:
        """Return the chain of row-wise ops that computes the operand of a slice from the narrowest values, or None.

        The search starts with the operand itself, and adds one op after the other, upwards in the graph.
        """
        pieces = _slices_read(node)
        if not pieces or not self._is_less_work(node, pieces):
            return None
        piece = next(iter(pieces.values()))  # all have the same source and dim
        best = RowChain({piece.source: (piece.dim, 0)})
        longer = self._extend_chain(best, node)
        while longer is not None:
            if longer.input_elements < best.input_elements:
                best = longer
            longer = self._extend_chain(longer, node)
        if not best.steps:  # no value is narrower than the operand
            return None
        # Nodes are ordered as in the graph. What computes the indices of the slice must be able to move before the
        # first node of the chain, where its inputs are sliced.
        can_move = _late_inputs(node, piece.source, min(best.nodes)) is not None
        return best if can_move else None

    def _is_less_work(self, node: Node, pieces: dict[int, RowRequest]) -> bool:
        """Return True if no rank would compute more rows for the slices of a value than for its shard of the value.

        Slices that are sequences are sharded again, but are not moved if a value is in the load-balanced order. Every
        rank computes all rows of other slices, so that the rows of all slices of the value count together.

        Args:
            node: The slice, or split.
            pieces: The rows that it selects, for each result.
        """
        n, source = self.context.ranks.n, OpCall(node).operands[0]
        results = [node] if is_tensor(node) else list(read_results(node).values())
        # A slice that is a sequence is sharded in its own frame. The balanced order is computed for one sequence only.
        if all(self.axes.sequence_dims(x) for x in results):
            return not self.is_balanced
        if source not in self.rows_read:  # cached, as the number of its slices falls while they are rewritten
            # All slices of the value that this pass may move; `demanding` contains the nodes that have a demand.
            cuts = [user for user in source.users if user in self.demanding and user.target in SLICE_OPS]
            lengths = [piece.length for cut in cuts for piece in _slices_read(cut).values()]
            self.rows_read[source] = sum(map(assume_large, lengths))
        rows_of_ranks = n * self.rows_read[source]  # of all ranks together: each computes the rows of all slices
        return all(rows_of_ranks <= assume_large(node_shape(source)[piece.dim]) for piece in pieces.values())

    def _extend_chain(self, chain: RowChain, cut: Node) -> RowChain | None:
        """Return the chain with one more op at its start, or None: an input becomes a step, and its operands inputs.

        It is the last input in graph order that is computed row by row and may be recomputed.

        Args:
            chain: The chain so far.
            cut: The slice for which it is recomputed.
        """
        for node in sorted(chain.inputs, reverse=True):
            step = _match_row_wise(node, chain.inputs[node]) if self._can_recompute(node, chain, cut) else None
            if step is None:
                continue
            other_inputs = {x: rows for x, rows in chain.inputs.items() if x is not node}
            operand_rows = {step.call.operands[i]: rows for i, rows in step.operands.items()}
            # If an operand is an input already, both readers must need the same rows of it: it is sliced once.
            if all(_is_same_slice(other_inputs.get(x, rows), rows) for x, rows in operand_rows.items()):
                return RowChain({**other_inputs, **operand_rows}, (*chain.steps, step))
        return None

    def _can_recompute(self, node: Node, chain: RowChain, cut: Node) -> bool:
        """Return True if a node may be computed again for the rows of a slice only.

        If the grad mode of the node differs from that of the slice, recomputation would change gradients. On one rank
        with automatic tiles, only nodes without other readers than the chain and such slices are recomputed: a node
        with other readers is computed in any case, and there is no gather to avoid.

        Args:
            node: An input of the chain.
            chain: The nodes between it and the slice.
            cut: The slice.
        """
        # A node that has a demand itself runs on gathered operands, or is another slice.
        if node.op != "call_function" or node in self.demanding:
            return False
        if (node in self.no_grad) != (cut in self.no_grad):
            return False
        if self.context.ranks.n > 1 or isinstance(self.context.options.tiles, int):
            return True
        chain_nodes = {*chain.nodes, cut}
        return all(user in chain_nodes or (user in self.demanding and user.target in SLICE_OPS) for user in node.users)

    def _rebuild_chain(self, chain: RowChain, source: Node, piece: RowRequest, like: Node) -> Node:
        """Emit the nodes of a chain on sliced inputs, and return the node that replaces one slice.

        Args:
            chain: The row-wise nodes between narrow inputs and the sliced value.
            source: The sliced value, which the last node computes.
            piece: The rows of the value that the slice selects.
            like: The slice.
        """
        emitted: dict[Node, Node] = {}  # the new node with the selected rows of each old one
        for x, rows in chain.inputs.items():
            with self.graph.inserting_before(chain.first_reader(x)):  # an input may be created after the first step
                emitted[x] = self._slice_rows(x, rows, piece, like)
        for step in reversed(chain.steps):  # the last node is the first in `steps`
            emitted[step.call.node] = self._rebuild_step(step, emitted, piece)
        if piece.keeps_dim:
            return emitted[source]
        with self.graph.inserting_before(like):  # a select: the dim has one row
            return self.compute(aten.select.int, (emitted[source], piece.dim, 0), like)

    def _slice_rows(self, x: Node, rows: RowsAt, piece: RowRequest, like: Node) -> Node:
        """Emit a slice of a chain's input: the rows from which the chain computes the selected rows of its result.

        Args:
            x: The input.
            rows: The dim of x with the rows of the chain's result, and the index of the first of them.
            piece: The rows of the chain's result that are selected.
            like: The slice of the result that this one replaces.
        """
        dim, first = rows
        if isinstance(piece, SlicePiece):
            start = piece.start + first
            end = start + (piece.length - 1) * piece.step + 1
            return self.compute(aten.slice.Tensor, (x, dim, self.sizes(start), self.sizes(end), piece.step), like)
        indices, extent = piece.indices, node_shape(piece.source)[piece.dim]
        if not is_same_size(node_shape(x)[dim], extent):
            # The rows are x[first : first + extent]. Indices of these, possibly negative ones, become indices of x.
            ends = self.sizes(first), self.sizes(first + extent)
            device = {"device": indices.meta["val"].device}
            positions = self.compute(aten.arange.start, ends, like, device)
            indices = self._select_rows(positions, 0, indices, like)
        return self._select_rows(x, dim, indices, like)

    def _select_rows(self, x: Node, dim: int, indices: Node, like: Node) -> Node:
        """Emit x[:, indices] along a dim by the op of `like`: index or index_select."""
        args = ([None] * dim + [indices],) if like.target is aten.index.Tensor else (dim, indices)
        return self.compute(like.target, (x, *args), like)

    def _rebuild_step(self, step: RowWiseNode, emitted: dict[Node, Node], piece: RowRequest) -> Node:
        """Emit one node of a chain for the selected rows only, and return the new node.

        Args:
            step: The node, with the operands that have rows.
            emitted: The new nodes of these operands, by the old ones.
            piece: The rows that are selected.
        """
        call, rule, node = step.call, step.rule, step.call.node
        operands = [emitted[x] if i in step.operands else x for i, x in enumerate(call.operands)]
        # A step that is a slice of the rows itself: its operand is already the result, as its input was sliced by both
        # slices at once (`_slice_rows`).
        if rule.window_dim == step.dim:
            return operands[0]
        with self.graph.inserting_before(node), restore_autocast(node):
            if rule.reshapes:
                shape = node_shape(node)
                return self.reshape(operands[0], (*shape[: step.dim], piece.length, *shape[step.dim + 1 :]), node)
            args, kwargs = call.with_operands(operands)
            return self.compute(node.target, args, node, kwargs)


def _slices_read(node: Node) -> dict[int, RowRequest]:
    """Return the rows that a slice selects, or that each result of a split selects if it is read, by result index.

    The result is {} if the position of one of them is unknown.
    """
    pieces: dict[int, RowRequest] = {}
    for i in [0] if is_tensor(node) else read_results(node):
        # The indices, or the range of rows of the i-th result.
        piece = _match_index(node) if node.target in INDEX_OPS else nth_result(node, i)
        if piece is None:
            return {}
        pieces[i] = piece
    return pieces


def _match_index(node: Node) -> SelectedRows | None:
    """Match x[:, indices] with one vector of indices, in which the rows remain in the same dim; else return None."""
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or not rule.picks:
        return None
    source, indices = call.operands
    ((index_factor, row_factor),) = rule.picks.items()  # the dim of the result, and the indexed dim of x
    dim = rule.operands[0].index(row_factor)
    if rule.results[0][dim] != index_factor:
        return None
    return SelectedRows(source, dim, indices, node_shape(node)[dim])


def _match_row_wise(node: Node, rows: RowsAt) -> RowWiseNode | None:
    """Match a node that computes each row of its result from one row of its operands, such as linear or tanh.

    Args:
        node: The node.
        rows: The dim of the rows in its result, and the index of the first row that is needed.

    Returns:
        The node with the same description of the rows of each operand, or None if it does not match.
    """
    call, rule = lookup_rule(node) or (None, None)
    if call is None or rule is None or not is_tensor(node):
        return None
    if rule.operand_placements is not None or rule.lenders:  # fixed placements, or an operand that is read as a shape
        return None
    # An argument with the number of rows, which would change. The size argument of a reshape is computed again.
    has_sizes = rule.sizes and not rule.reshapes
    if not is_pure(node) or is_random(node) or has_sizes:
        return None
    dim, first = rows
    if rule.window_dim == dim:  # a slice of the rows, from `start` on
        start, _ = rule.spans[0]
        return RowWiseNode(call, rule, dim, operands={0: (dim, first + start)})
    factor = rule.results[0][dim]
    operands = {i: (dims.index(factor), first) for i, dims in enumerate(rule.operands) if factor in dims}
    # If the rows are one of several factors of an operand's dim, they are no range of it.
    is_grouped = any(factor in flatten_dims(dims) and factor not in dims for dims in rule.operands)
    is_row_wise = factor and operands and rule.kind(factor) == "pass" and not is_grouped
    return RowWiseNode(call, rule, dim, operands) if is_row_wise else None


def _late_inputs(cut: Node, source: Node, first: Node) -> list[Node] | None:
    """Return the nodes from a chain's first node on that compute the indices or sizes of a slice, in graph order.

    They are moved before it, so that the inputs of the chain can be sliced there. The result is None if one of them may
    not move. Pure nodes of indices and sizes may, because no mode (autocast, no_grad) changes their values.

    Args:
        cut: The slice.
        source: The sliced value.
        first: The first node of the chain.
    """
    arguments = [x for x in collect_nodes((cut.args, cut.kwargs)) if x is not source]
    # `not n < first`: n is the first node of the chain, or comes after it in the graph.
    ancestors = reachable_set(arguments, lambda n: n.all_input_nodes if not n < first else ())
    late = [n for n in sorted(ancestors) if not n < first]
    can_move = all(is_pure(n) and _is_index_like(n) and n is not first for n in late)
    return late if can_move else None


def _is_index_like(node: Node) -> bool:
    """Return True for a size, or a tensor of integers or bools, whose value depends on no mode such as autocast."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return isinstance(value, torch.SymInt)
    return not has_gradient_dtype(value)


def _is_same_slice(a: RowsAt, b: RowsAt) -> bool:
    """Return True if two descriptions (dim, first row) of the rows of one value are equal."""
    (dim, first), (other_dim, other_first) = a, b
    return dim == other_dim and is_same_size(first, other_first)


def _defer_chain_outputs(chain: RowChain) -> None:
    """Mark each node of a chain as `recomputed` if, after the rewrite, all its users are outputs or marked nodes.

    An output that only repeats other work, such as full logits next to those of a slice, can then be computed when the
    caller reads it.
    """
    for node in chain.nodes:  # users first
        if node.users and all(user.op == "output" or node_info(user).recomputed for user in node.users):
            set_node_info(node, recomputed=True)
