"""Rewrite a local graph for layout="balanced": ranks attend to about the same number of pairs.

    shard(ids, 1, ..)                  order, inverse, .., table = balance_rows([doc], ["Eq(row0, col0) & (k <= q)"])
    ring_attention(.., rows=[doc], ..)     shard(reorder(ids, 1, order, inverse), ..)
    unshard(y, 1, ..)                  ->  ring_attention(.., rows=[reorder(doc), order], pieces=[table, ..],
                                               "Eq(row0, col0) & (col1 <= row1)")
                                           reorder(unshard(y, 1, ..), 1, inverse, order)

The order is computed once per graph, at its start, from the vectors and predicates of the masks
(`lowering/masks/balance_rows.py`). Masks are replicated, so all ranks compute the same order. Replicated values keep
the order of the program: they are reordered before they are sharded and after they are gathered. Predicates read
positions from a vector in place of row indices. The tables of all vectors (their runs of equal or consecutive values)
are computed with the order, so that a graph synchronizes with the device once. The pass adds no traffic between ranks.
`strategies/attention/row_layouts.py` decides where it applies. A graph whose inputs are balanced already receives the
order as three additional inputs and keeps it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.frames import BALANCED, row_order
from sp_compile.lowering.masks.balance_rows import balance_rows, fake_orders
from sp_compile.lowering.masks.predicate import parse_predicate, position_conditions, predicate_symbols
from sp_compile.lowering.masks.score import rename_score, score_symbols
from sp_compile.lowering.torch_compat import namespace_of, size_hint
from sp_compile.passes.base import Pass
from sp_compile.passes.context import Note, NoteKind, PassContext
from sp_compile.passes.graph.call import OpCall, node_shape, node_tensors
from sp_compile.passes.graph.fakes import fake_mode_of
from sp_compile.passes.graph.node_info import node_info, set_node_info
from sp_compile.passes.graph.sizes import Size, as_size, as_sizes, is_same_size, size_product
from sp_compile.passes.sharding.attention_axes import op_strategy
from sp_compile.passes.sharding.placement import Shard

from .mask_tables import mask_vectors, move_before, unique_vectors

aten, sp = torch.ops.aten, torch.ops.sp
ORDER_INPUTS = ("row_order", "row_inverse", "row_chunks")
# rows at either end that keep their place, for graphs that read the neighbor of each row, such as shifted labels
FIXED_END_POSITIONS = 1
FRAME_ARGUMENTS = ("frame", "scatter_frame", "gather_frame", "q_frame", "k_frame")


class FrameArgument(NamedTuple):
    """Balanced frame among the arguments of an sp:: op, see `Shard.frame_arg`."""

    outer: Size  # size of the factors before the sequence in its dim
    size: Size  # positions of the sequence
    start: Size  # first valid position
    length: Size  # number of valid positions
    folds: int  # row order, see `RowOrder`


FrameMap = dict[str, FrameArgument]  # the balanced frames of a call by argument name


class MaskWork(NamedTuple):
    """Attention work as arguments of the op that balances rows."""

    predicates: list[str]  # masks, as functions of the vectors and sizes of all attentions
    weights: list[Node | int]  # cost of a query-key pair under each predicate: heads times head dims, summed
    sizes: list[Node | int]  # values of n0, n1, ... in the predicates


class BalanceLayout(Pass):
    """Pass that computes the balanced order and applies it to every balanced frame."""

    requires = frozenset({"validated"})
    provides = frozenset({"balanced rows"})

    @classmethod
    def of(cls, context: Any) -> Pass | None:
        """Create the pass for a context with the layout "balanced", or return None."""
        return cls() if row_order(context.folds).is_balanced else None

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Reorder the rows of every call with a balanced frame, in place; return the number of these calls."""
        calls = [(OpCall(n), _balanced_frames(n)) for n in gm.graph.nodes if _balanced_frames(n)]
        balanced = balanced_inputs(context)
        if not calls and not balanced:
            return 0
        # Another graph may read the neighbors of an output's rows, so that the first and last rows keep their place.
        self.fixed_ends = FIXED_END_POSITIONS if _has_sharded_output(gm, context) else 0
        self._emit_order(gm, calls, context.ranks.n, balanced)
        for call, frames in calls:
            self._rewrite_call(call, frames)
        self.drop(*self.optional_nodes)  # those without readers
        return len(calls)

    def _emit_order(
        self, gm: GraphModule, calls: Sequence[tuple[OpCall, FrameMap]], n: int, shards: Sequence[Shard]
    ) -> None:
        """Emit the op that balances rows before the first call, or read the order of balanced inputs.

        Sets the attributes that `_rewrite_call` reads: `order` (the position of each row in the balanced order) and
        `inverse` (the row of each position); for the masks `representatives`, `vectors`, `tables`, `positions` and
        `reordered`, which are described where they are set. `optional_nodes` are erased if no call reads them.

        Args:
            gm: The local graph.
            calls: The calls with balanced frames, in the order of the graph.
            n: The number of ranks.
            shards: The placements of balanced inputs; empty if this graph computes the order.
        """
        inputs = gm.graph.find_nodes(op="placeholder")
        balanced_nodes = [call.node for call, _ in calls]
        first = balanced_nodes[0] if calls else inputs[-1].next
        all_frames = [frame for _, frames in calls for frame in frames.values()]
        length = shards[0].frame.size if shards else all_frames[0].size
        _require_length(calls, length)
        attentions = [call for call, frames in calls if "q_frame" in frames]  # only attentions have queries
        read_vectors = [v for call in attentions for v in mask_vectors(call.node)]
        # each mask vector of the sequence's length -> the first vector that is the same computation
        self.representatives = unique_vectors(v for v in read_vectors if is_same_size(node_shape(v)[1], length))
        self.vectors = list(dict.fromkeys(self.representatives.values()))
        move_before(first, self.vectors)
        device = next(x.device for node in inputs for x in node_tensors(node))
        # An order has three tensors: the order itself, its inverse, and the chunks, from which tables are computed.
        given_order = self._add_order_inputs(inputs, length, n, device) if shards else []
        with self.graph.inserting_before(first):
            if given_order:
                arguments: tuple[Any, ...] = self.vectors, given_order[-1], self.sizes(length)
                results = self._emit_results(sp.balance_tables.default, arguments, first)
                self.order, self.inverse, _ = given_order
                tables = results
            else:
                arguments = self._balance_arguments(attentions, all_frames, length, n, device)
                results = self._emit_results(sp.balance_rows.default, arguments, first)
                self.order, self.inverse, _, *tables = results  # other graphs read the chunks
            # tables of the positions, of each vector, and of each reordered vector
            positions_table, *tables = tables
            vector_tables, reordered_tables = tables[: len(self.vectors)], tables[len(self.vectors) :]
            self.tables = dict(zip(self.vectors, vector_tables, strict=True))
            # the position of each row as a vector (1, length), and its table
            self.positions = self.compute(aten.unsqueeze.default, (self.order, 0), first), positions_table
            all_rows = FrameArgument(1, length, 0, length, BALANCED.folds)
            self.reordered = {  # each vector -> the reordered vector and its table
                v: (self._emit_reorder(v, 1, all_rows, first), table)
                for v, table in zip(self.vectors, reordered_tables, strict=True)
            }
            self.optional_nodes = [*results, self.positions[0], *(vector for vector, _ in self.reordered.values())]

    def _emit_results(self, op: Any, arguments: tuple[Any, ...], anchor: Node) -> list[Node]:
        """Emit an op and return the nodes of its results, with the metadata of `anchor`."""
        outputs = self.compute(op, arguments, anchor)
        return [self.emit(operator.getitem, (outputs, i), x, anchor) for i, x in enumerate(outputs.meta["val"])]

    def _balance_arguments(
        self, attentions: Sequence[OpCall], frames: Iterable[FrameArgument], length: Size, n: int, device: torch.device
    ) -> tuple[Any, ...]:
        """Return the arguments of the op that computes the balanced order.

        The positions before and after a frame's window keep their place. The op receives their numbers for each frame
        and uses the largest, because symbolic sizes have no order here.
        """
        work = self._attention_work(attentions)
        self._report_imbalance(work, self.sizes(length), n)
        # For each frame: the number of positions before its window, and of those after it.
        outside_windows = {(frame.start, as_size(frame.size - frame.start - frame.length)) for frame in frames}
        # `fixed_ends` is the number of positions that other graphs may cut off at each end of a sharded output, or 0.
        fixed = sorted(outside_windows | {(self.fixed_ends, self.fixed_ends)}, key=str)
        front, back = (self.sizes.list(dict.fromkeys(numbers)) for numbers in zip(*fixed))  # without duplicates
        # Neighboring ranks that split the heads of an attention read the same rows, so the op counts them (`stride` of
        # them) as one rank. If the attentions differ, it is the smallest number of neighbors.
        strategies = ((op_strategy(call.node.target), call) for call in attentions)
        stride = min((strategy.neighbors(call) if strategy else 1 for strategy, call in strategies), default=1)
        return self.vectors, *work, self.sizes(length), front, back, n, stride, device

    def _add_order_inputs(self, inputs: Sequence[Node], length: Size, n: int, device: torch.device) -> list[Node]:
        """Add three inputs to the graph and return them: the order of the balanced inputs, its inverse, its chunks."""
        self.notes.append(Note(NoteKind.REWRITTEN, BALANCED.name, "reuses the balanced order of the inputs"))
        size, orders = self.sizes(length), []
        with fake_mode_of([node.meta.get("val") for node in inputs]):
            values = fake_orders(size.meta["val"] if isinstance(size, Node) else size, n, device)
        last = inputs[-1]
        with self.graph.inserting_before(last.next):
            for name, value in zip(ORDER_INPUTS, values, strict=True):
                orders.append(self.graph.placeholder(name))
                orders[-1].meta["val"] = value
        if self.sizes.last is last:
            self.sizes.last = orders[-1]  # nodes for sizes follow all inputs
        return orders

    def _attention_work(self, attentions: Iterable[OpCall]) -> MaskWork:
        """Return the work of all attentions to the sequence, from which the balanced order is computed.

        In the predicate of a call, row0, col0, n0, ... are the first vectors and the first size of this call. In the
        result they are the first ones of all calls, so that equal predicates of several calls become one.
        """
        sizes: list[Any] = []
        weights: dict[str, Size] = {}  # by predicate
        for call in attentions:
            if not all(v in self.representatives for v in mask_vectors(call.node)):
                continue  # its keys are not the sequence
            names: dict[str, str] = {}  # symbol in the call's predicate -> symbol in the result
            for kind in ("row", "col"):
                indices = [self.vectors.index(self.representatives[v]) for v in call[f"{kind}s"]]
                names |= {f"{kind}{i}": f"{kind}{index}" for i, index in enumerate(indices)}
            for i, size in enumerate(call["sizes"]):
                if size not in sizes:
                    sizes.append(size)
                names[f"n{i}"] = f"n{sizes.index(size)}"
            predicate = _rename_symbols(call["predicate"], names)
            (_, heads, _, query_dim), (*_, value_dim) = call.shape(0), call.shape(2)
            weights[predicate] = weights.get(predicate, 0) + size_product((heads, query_dim + value_dim))
        return MaskWork(list(weights), self.sizes.list(weights.values()), sizes)

    def _report_imbalance(self, work: MaskWork, length: Any, n: int) -> None:
        """Add a note to the report on the imbalance of the ranks' work, computed here from positions alone.

        The values of mask vectors, such as document ids, are only known at run time.
        """
        predicates = tuple(map(position_conditions, work.predicates))
        weights, sizes = (tuple(map(_current_size, values)) for values in (work.weights, work.sizes))
        vectors = ()  # position conditions read none
        chunks = balance_rows(predicates, weights, sizes, vectors, _current_size(length), n)
        contiguous = f"contiguous {chunks.contiguous_imbalance:.2f}"
        text = f"the busiest rank has {chunks.imbalance:.2f} times the mean of query-key pairs, {contiguous}"
        if predicates != tuple(work.predicates):  # conditions that read vectors were removed above
            text = f"chunks are assigned at run time from the data of masks; without masked pairs, {text}"
        self.notes.append(Note(NoteKind.REWRITTEN, BALANCED.name, text))

    def _rewrite_call(self, call: OpCall, frames: FrameMap) -> None:
        """Insert the change of order before or after a call, and declare its frames contiguous (without `folds`).

        Calls that shard a replicated value read it in the balanced order; values that a call gathers are returned to
        the order of the program.
        """
        node = call.node
        if "q_frame" in frames:
            self._rewrite_attention(call, frames)
        elif node.target in (sp.shard.default, sp.reduce_scatter.default):
            operand = self._reorder_operand(node, node.args[0], call["dim"], frames["frame"])
            node.args = (operand, *node.args[1:])
        elif node.target in (sp.unshard.default, sp.all_gather.default):
            self._restore_order(node, call["dim"], frames["frame"])
        elif node.target is sp.all_to_all.default and "scatter_frame" in frames:
            dim, frame = call["scatter_dim"], frames["scatter_frame"]
            operands = [self._reorder_operand(node, x, dim, frame) for x in call.operands]
            node.args, node.kwargs = call.with_operands(operands)
        elif node.target is sp.all_to_all.default:
            for result in list(node.users):
                self._restore_order(result, call["gather_dim"], frames["gather_frame"])
        elif node.target not in (sp.mask.default, sp.window.default):  # they change padded rows, which are not moved
            cause = "needs its rows in the order of the sequence, which this layout changes"
            raise SpError("SP411", f"layout='balanced': {describe_node(node)} {cause}.")
        call = OpCall(node)  # its arguments have changed
        # The first four entries of a frame are [outer, size, start, length]; the fifth, `folds`, is the layout.
        contiguous_frames = {name: list(call[name])[:4] for name in frames}
        node.args, node.kwargs = call.with_operands(call.operands, **contiguous_frames)

    def _rewrite_attention(self, call: OpCall, frames: FrameMap) -> None:
        """Reorder the mask vectors and the mask of an attention, and pass the positions of its rows as a vector.

        With causal attention, for example, the predicate k <= q becomes col0 <= row0: the index of a reordered row is
        not its position any more, so that queries (rows) and keys (cols) read their positions from vectors.

        Replicated keys keep their order. An op that gathers keys itself (it has the argument `orders`) receives the
        order and restores the keys' own order, in which each document covers few blocks.
        """
        node = call.node
        names: dict[str, str] = {}  # index symbol, q or k -> the vector of positions that replaces it
        changed: dict[str, Any] = {}
        reordered_frames = frames
        if "orders" in call.args:
            reordered_frames = {"q_frame": frames["q_frame"]}
            if "k_frame" in frames:
                changed["orders"] = [self.order, self.inverse]
        mask = call["mask"]
        tables: list[Node | None] = []  # of all vectors, first those of queries
        with self.graph.inserting_before(node):
            # The dims of the mask are (batch, heads, queries, keys): `dim` is that of the rows or columns.
            for kind, index, dim in (("row", "q", 2), ("col", "k", 3)):
                vectors, frame = list(call[f"{kind}s"]), reordered_frames.get(f"{index}_frame")
                if frame is None:  # these rows keep the order of the program
                    tables += [self.tables.get(self.representatives.get(v)) for v in vectors]
                else:
                    reordered = [self._reorder_vector(v, frame, node) for v in vectors]
                    if index in predicate_symbols(call["predicate"]) | score_symbols(call["score"]):
                        names[index] = f"{kind}{len(vectors)}"  # the next vector: q becomes row1 after [doc]
                        reordered.append(self._row_positions(frame, node))
                    vectors = [vector for vector, _ in reordered]
                    tables += [table for _, table in reordered]
                    is_local_mask = kind == "row" and call.get("mask_rows")  # has this rank's rows, in their order
                    if mask is not None and not is_local_mask and not is_same_size(node_shape(mask)[dim], 1):
                        mask = self._emit_reorder(mask, dim, frame, node)
                changed[f"{kind}s"] = vectors
        if None not in tables:  # else `HoistMaskTables` adds them
            changed["pieces"] = tables
        if names:
            changed["score"] = rename_score(call["score"], names)
        predicate = _rename_symbols(call["predicate"], names)
        node.args, node.kwargs = call.with_operands(call.operands, predicate=predicate, mask=mask, **changed)

    def _row_positions(self, frame: FrameArgument, like: Node) -> tuple[Node, Node | None]:
        """Return the vector of the positions of a frame's rows, relative to its first valid row, and its table.

        The table is None if the window does not start at 0: `HoistMaskTables` adds it.
        """
        if is_same_size(frame.start, 0):
            return self.positions
        # The rows before the window keep their place (`_balance_arguments`), so that those of the window are a slice.
        bounds = self.sizes.list((frame.start, as_size(frame.start + frame.length)))
        rows = self.compute(aten.slice.Tensor, (self.order, 0, *bounds), like)
        positions = self.compute(aten.sub.Tensor, (rows, self.sizes(frame.start)), like)
        return self.compute(aten.unsqueeze.default, (positions, 0), like), None

    def _reorder_vector(self, vector: Node, frame: FrameArgument, like: Node) -> tuple[Node, Node | None]:
        """Return a mask vector in the order of the frame's rows, and its table; None if no table is computed for it."""
        # `_emit_order` has reordered the vectors of the sequence's length, once for all vectors with equal values
        # (`representatives` names the one of them that `reordered` contains). Others are reordered here, and
        # `HoistMaskTables` adds their tables.
        if vector in self.representatives:
            return self.reordered[self.representatives[vector]]
        return self._emit_reorder(vector, 1, frame, like), None

    def _reorder_operand(self, node: Node, x: Node, dim: int, frame: FrameArgument) -> Node:
        """Emit the operand x of a call in the balanced order before the call, and return it."""
        with self.graph.inserting_before(node):
            return self._emit_reorder(x, dim, frame, node)

    def _restore_order(self, node: Node, dim: int, frame: FrameArgument) -> None:
        """Restore the program's order of a gathered value for all its readers."""
        with self.insert_after(node):
            restored = self._emit_reorder(node, dim, frame, node, back=True)
        set_node_info(restored, origin=node_info(node).origin)
        self.insert_between(node, restored)

    def _emit_reorder(self, x: Node, dim: int, frame: FrameArgument, like: Node, back: bool = False) -> Node:
        """Emit the rows of x in the balanced order or, with `back`, rows in that order in the order of the program.

        Metadata such as the user's line is that of `like`.
        """
        orders = (self.inverse, self.order) if back else (self.order, self.inverse)  # (rows to read, its inverse)
        full_frame = self.sizes.list(frame[:4])  # without the fifth entry, the order
        reordered = self.compute(sp.reorder.default, (x, dim, full_frame, *orders), like)
        set_node_info(reordered, requires_grad=node_info(x).requires_grad)
        return reordered


def _require_length(calls: Sequence[tuple[OpCall, FrameMap]], length: Size) -> None:
    """Raise SpError if a balanced frame has another number of positions: one order is computed for all frames."""
    for call, frames in calls:
        if not all(is_same_size(frame.size, length) for frame in frames.values()):
            sizes = ", ".join(dict.fromkeys(str(frame.size) for frame in frames.values()))
            raise SpError(
                "SP411",
                f"layout='balanced': expected one sequence, of {length} positions, got {describe_node(call.node)} "
                f"with a sequence of {sizes} positions.",
            )


def balanced_inputs(context: PassContext) -> list[Shard]:
    """Return the placements of the inputs that are in a balanced order already, which another graph has computed."""
    return [p for p in context.inputs.values() if isinstance(p, Shard) and p.frame.order.is_balanced]


def _has_sharded_output(gm: GraphModule, context: PassContext) -> bool:
    """Return True if an output of the local graph stays sharded.

    Another graph may then read the neighbors of its rows, as for shifted labels, so that the end rows keep their place.
    """
    assert context.input_placements is not None
    origins = [node_info(node).origin for node in gm.graph.output_node().all_input_nodes]  # in the global graph
    return any(isinstance(context.input_placements.of(origin), Shard) for origin in origins if origin is not None)


def _balanced_frames(node: Node) -> FrameMap:
    """Return the balanced frames of an sp:: op, or an empty dict for other nodes."""
    if node.op != "call_function" or namespace_of(node.target) != sp.name:
        return {}
    call = OpCall(node)
    frames = {name: as_sizes(call.get(name) or ()) for name in FRAME_ARGUMENTS}
    # A fifth number, `folds`, is present only if the rows are not contiguous.
    return {name: FrameArgument(*x) for name, x in frames.items() if len(x) == 5 and x[4] == BALANCED.folds}


def _current_size(value: Any) -> int:
    """Return the current value of a size or of a node that computes one: that of the call which is being compiled."""
    return size_hint(value.meta["val"] if isinstance(value, Node) else value)


def _rename_symbols(predicate: str, names: dict[str, str]) -> str:
    """Return the predicate with renamed symbols, such as a row index q that becomes a vector row1."""
    if not names:
        return predicate
    symbols = {sympy.Symbol(old, integer=True): sympy.Symbol(new, integer=True) for old, new in names.items()}
    return str(parse_predicate(predicate).xreplace(symbols))
