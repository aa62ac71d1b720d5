"""Rewrite a local graph for layout="balanced": ranks attend to about the same number of pairs.

    shard(ids, 1, ..)                  order, inverse, .., table = balanced_order([doc], ["Eq(row0, col0) & (k <= q)"])
    ring_attention(.., rows=[doc], ..)     shard(reorder(ids, 1, order, inverse), ..)
    unshard(y, 1, ..)                  ->  ring_attention(.., rows=[reorder(doc), order], pieces=[table, ..],
                                               "Eq(row0, col0) & (col1 <= row1)")
                                           reorder(unshard(y, 1, ..), 1, inverse, order)

The order is computed once per graph, at its start, from the vectors and predicates of the masks. Masks are replicated,
so all ranks compute the same order. Replicated values keep the order of the program: they are reordered before they
are sharded and after they are gathered. Predicates read positions from a vector in place of row indices. The tables of
all vectors are computed with the order, so that a graph synchronizes with the device once. The pass adds no traffic
between ranks. `strategies.attention.layouts` decides where it applies. A graph whose inputs are balanced already
receives the order as three additional inputs and keeps it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

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

sp = torch.ops.sp
ORDER_INPUTS = ("dealt_order", "dealt_inverse", "dealt_chunks")
FIXED_END_POSITIONS = 1
"""Rows at either end that keep their place, for graphs that read the neighbor of each row, such as shifted labels."""
FRAME_ARGUMENTS = ("frame", "scatter_frame", "gather_frame", "q_frame", "k_frame")
FrameMap = dict[str, tuple[Size, ...]]
"""The balanced frames among a call's arguments, by argument name."""


class BalanceLayout(Pass):
    """Pass that computes the balanced order and applies it to every balanced frame."""

    requires = frozenset({"validated"})
    provides = frozenset({"balanced rows"})

    @classmethod
    def of(cls, job: Any) -> Pass | None:
        """Create the pass for a job, or return None if it does not apply."""
        return cls() if row_order(job.folds).is_balanced else None

    def apply(self, gm: GraphModule, job: PassContext) -> int:
        """Apply the pass to a graph and return the number of changes."""
        calls = [
            (OpCall(n), frames) for n in gm.graph.nodes if n.op == "call_function" and (frames := _balanced_frames(n))
        ]
        balanced = balanced_inputs(job)
        if calls or balanced:
            self.ends = FIXED_END_POSITIONS if _has_sharded_output(gm, job) else 0
            self._emit_order(gm, calls, job.ranks.n, balanced)
        for call, frames in calls:
            self._write(call, frames)
        if calls or balanced:
            self.drop(*self.emitted)
        return len(calls)

    def _emit_order(
        self, gm: GraphModule, calls: Sequence[tuple[OpCall, FrameMap]], n: int, shards: Sequence[Shard]
    ) -> None:
        """Emit ``sp::balanced_order`` at the start of the graph, or read the order of balanced inputs."""
        inputs = gm.graph.find_nodes(op="placeholder")
        first = calls[0][0].node if calls else inputs[-1].next
        found = [frame for _, frames in calls for frame in frames.values()]
        length = shards[0].frame.size if shards else found[0][1]
        for call, frames in calls:
            if not all(is_same_size(frame[1], length) for frame in frames.values()):
                raise SpError("SP411", f"layout='balanced': {describe_node(call.node)} reads rows of another sequence.")
        attends = [call for call, frames in calls if "q_frame" in frames]
        self.known = unique_vectors(v for call in attends for v in mask_vectors(call.node) if _with_length(v, length))
        self.vectors = list(dict.fromkeys(self.known.values()))
        move_before(first, self.vectors)
        device = next(x.device for node in inputs for x in node_tensors(node))
        orders = self._order_inputs(inputs, length, n, device) if shards else []
        with self.graph.inserting_before(first):
            if shards:
                both = self.compute(sp.dealt_tables.default, (self.vectors, orders[-1], self.sizes(length)), first)
            else:
                both = self.compute(sp.deal.default, self._balance_arguments(attends, found, length, n, device), first)
            parts = [self.emit(operator.getitem, (both, i), x, first) for i, x in enumerate(both.meta["val"])]
            self.order, self.inverse, _, positions, *tables = *orders, *parts
            where = self.compute(torch.ops.aten.unsqueeze.default, (self.order, 0), first)
            count = len(self.vectors)
            self.tables = dict(zip(self.vectors, tables[:count]))
            self.moved = {
                v: (self._emit_reorder(v, 1, (1, length, 0, length), first), table)
                for v, table in zip(self.vectors, tables[count:], strict=True)
            }
            self.positions = where, positions
            self.emitted = [*parts, where, *(v for v, _ in self.moved.values())]

    def _balance_arguments(
        self, attends: Sequence[OpCall], found: Iterable[tuple[Size, ...]], length: Size, n: int, device: torch.device
    ) -> tuple[Any, ...]:
        """Return the arguments of ``sp::balanced_order``."""
        predicates, weights, numbers = self._work(attends)
        self._report_imbalance(predicates, weights, numbers, self.sizes(length), n)
        ends = {(start, as_size(whole - start - part)) for _, whole, start, part, *_ in found} | {
            (self.ends, self.ends)
        }
        fronts, behinds = (self.sizes.list(dict.fromkeys(x)) for x in zip(*sorted(ends, key=str)))
        strategies = ((op_strategy(call.node.target), call) for call in attends)
        stride = min((strategy.neighbours(call) if strategy else 1 for strategy, call in strategies), default=1)
        return self.vectors, predicates, weights, numbers, self.sizes(length), fronts, behinds, n, stride, device

    def _order_inputs(self, inputs: Sequence[Node], length: Size, n: int, device: torch.device) -> list[Node]:
        """Add the order of the balanced inputs as inputs of the graph."""
        self.notes.append(Note(NoteKind.REWRITTEN, BALANCED.name, "reuses the balanced order of the inputs"))
        extent, orders = self.sizes(length), []
        with fake_mode_of([node.meta.get("val") for node in inputs]):
            values = fake_orders(extent.meta["val"] if isinstance(extent, Node) else extent, n, device)
        last = inputs[-1]
        with self.graph.inserting_before(last.next):
            for name, value in zip(ORDER_INPUTS, values, strict=True):
                orders.append(self.graph.placeholder(name))
                orders[-1].meta["val"] = value
        if self.sizes.last is last:
            self.sizes.last = orders[-1]
        return orders

    def _work(self, attends: Iterable[OpCall]) -> tuple[list[str], list[Node | int], list[Node | int]]:
        """Return predicates, weights and numbers.

        Predicates are over all vectors and numbers; a weight is the relative cost of one query-key pair.
        """
        numbers: list[Any] = []
        weights: dict[str, Size] = {}
        for call in attends:
            if not all(v in self.known for v in mask_vectors(call.node)):
                continue  # its keys are not the sequence
            names: dict[str, str] = {}
            for kind in ("row", "col"):
                names |= {
                    f"{kind}{i}": f"{kind}{self.vectors.index(self.known[v])}" for i, v in enumerate(call[f"{kind}s"])
                }
            for i, number in enumerate(call["sizes"]):
                numbers += [] if number in numbers else [number]
                names[f"n{i}"] = f"n{numbers.index(number)}"
            predicate = _rename_symbols(call["predicate"], names)
            heads, dims = call.shape(0)[1], call.shape(0)[3] + call.shape(2)[3]
            weights[predicate] = weights.get(predicate, 0) + size_product((heads, dims))
        return list(weights), self.sizes.list(weights.values()), numbers

    def _report_imbalance(
        self, predicates: list[str], weights: list[Any], numbers: list[Any], length: Any, n: int
    ) -> None:
        """Note the imbalance that is known without the values of masks."""
        known = tuple(map(position_conditions, predicates))
        balanced = balance_rows(
            known, tuple(map(_current_size, weights)), tuple(map(_current_size, numbers)), (), _current_size(length), n
        )
        contiguous = f"contiguous {balanced.contiguous_imbalance:.2f}"
        times = f"{balanced.imbalance:.2f} times the mean of query-key pairs, {contiguous}"
        why = f"the busiest rank has {times}"
        if known != tuple(predicates):
            why = f"chunks are assigned at run time from the data of masks; without masked pairs, {why}"
        self.notes.append(Note(NoteKind.REWRITTEN, BALANCED.name, why))

    def _write(self, call: OpCall, frames: FrameMap) -> None:
        node = call.node
        if "q_frame" in frames:
            self._rewrite_attention(call, frames)
        elif node.target in (sp.shard.default, sp.reduce_scatter.default):
            node.args = (self._before(node, node.args[0], call["dim"], frames["frame"]), *node.args[1:])
        elif node.target in (sp.unshard.default, sp.all_gather.default):
            self._after(node, call["dim"], frames["frame"])
        elif node.target is sp.all_to_all.default and "scatter_frame" in frames:
            where = call["scatter_dim"], frames["scatter_frame"]
            operands = [self._before(node, x, *where) for x in call.operands]
            node.args, node.kwargs = call.with_operands(operands)
        elif node.target is sp.all_to_all.default:
            for part in list(node.users):
                self._after(part, call["gather_dim"], frames["gather_frame"])
        elif node.target not in (sp.mask.default, sp.window.default):
            raise SpError("SP411", f"layout='balanced': {describe_node(node)} does not support it.")
        call = OpCall(node)
        plain = {name: list(call[name])[:4] for name in frames}
        node.args, node.kwargs = call.with_operands(call.operands, **plain)

    def _rewrite_attention(self, call: OpCall, frames: FrameMap) -> None:
        """Replace indices by positions, and reorder vectors and masks.

        Replicated keys keep their order. An op that gathers keys itself receives the order and restores the keys' own
        order, in which each document covers few blocks.
        """
        node, names = call.node, dict[str, str]()
        changed: dict[str, Any] = {}
        if "orders" in call.args and "k_frame" in frames:
            changed["orders"] = [self.order, self.inverse]
        moved_frames = frames if "orders" not in call.args else {"q_frame": frames["q_frame"]}
        moved: list[tuple[Node, Node | None]]
        tables: list[Node | None] = []
        with self.graph.inserting_before(node):
            for kind, index, frame in (("row", "q", "q_frame"), ("col", "k", "k_frame")):
                vectors = list(call[f"{kind}s"])
                if frame in moved_frames:
                    moved = [self._reorder_vector(v, frames[frame], node) for v in vectors]
                    if index in predicate_symbols(call["predicate"]) | score_symbols(call["score"]):
                        names[index] = f"{kind}{len(vectors)}"
                        moved.append(self._positions(frames[frame], node))
                    vectors, known = [v for v, _ in moved], [table for _, table in moved]
                else:
                    known = [self.tables[self.known[v]] if v in self.known else None for v in vectors]
                changed[f"{kind}s"] = vectors
                tables += known
            mask = call["mask"]
            for dim, frame in ((2, "q_frame"), (3, "k_frame")):
                if mask is not None and frame in moved_frames and not is_same_size(node_shape(mask)[dim], 1):
                    mask = self._emit_reorder(mask, dim, moved_frames[frame], node)
        more = {"pieces": tables} if None not in tables else {}  # `HoistMaskTables` adds missing tables
        if names:
            changed["score"] = rename_score(call["score"], names)
        predicate = _rename_symbols(call["predicate"], names)
        node.args, node.kwargs = call.with_operands(call.operands, predicate=predicate, mask=mask, **changed, **more)

    def _positions(self, frame: tuple[Size, ...], like: Node) -> tuple[Node, Node | None]:
        """Return the positions of a frame's rows, relative to its first row, and their table or None."""
        _, _, start, length, *_ = frame
        if is_same_size(start, 0):
            return self.positions
        aten = torch.ops.aten
        rows = self.compute(
            aten.slice.Tensor, (self.order, 0, *self.sizes.list((start, as_size(start + length)))), like
        )
        own = self.compute(aten.sub.Tensor, (rows, self.sizes(start)), like)
        return self.compute(aten.unsqueeze.default, (own, 0), like), None

    def _reorder_vector(self, vector: Node, frame: tuple[Size, ...], like: Node) -> tuple[Node, Node | None]:
        """Return a vector in the order of the frame's rows, and its table or None."""
        if vector in self.known:
            return self.moved[self.known[vector]]
        return self._emit_reorder(vector, 1, frame, like), None

    def _before(self, node: Node, x: Node, dim: int, frame: tuple[Size, ...]) -> Node:
        with self.graph.inserting_before(node):
            return self._emit_reorder(x, dim, frame, node)

    def _after(self, node: Node, dim: int, frame: tuple[Size, ...]) -> None:
        """Restore the program's order for all readers of the node."""
        with self.insert_after(node):
            fresh = self._emit_reorder(node, dim, frame, node, back=True)
        set_node_info(fresh, origin=node_info(node).origin)
        self.insert_between(node, fresh)

    def _emit_reorder(self, x: Node, dim: int, frame: tuple[Size, ...], like: Node, back: bool = False) -> Node:
        orders = (self.inverse, self.order) if back else (self.order, self.inverse)
        args = (x, dim, self.sizes.list(frame[:4]), *orders)
        fresh = self.compute(sp.reorder.default, args, like)
        set_node_info(fresh, requires_grad=node_info(x).requires_grad)
        return fresh


def balanced_inputs(job: PassContext) -> list[Shard]:
    """Return the placements of the inputs that are balanced."""
    return [p for p in job.inputs.values() if isinstance(p, Shard) and p.frame.order.is_balanced]


def _has_sharded_output(gm: GraphModule, job: PassContext) -> bool:
    """Return True if an output stays sharded for another graph."""
    assert job.input_placements is not None
    origins = [node_info(node).origin for node in gm.graph.output_node().all_input_nodes]
    return any(isinstance(job.input_placements.of(one), Shard) for one in origins if one is not None)


def _balanced_frames(node: Node) -> FrameMap:
    if namespace_of(node.target) != sp.name:
        return {}
    call = OpCall(node)
    found = {name: as_sizes(call.get(name) or ()) for name in FRAME_ARGUMENTS}
    return {name: frame for name, frame in found.items() if len(frame) == 5 and frame[4] == BALANCED.folds}


def _current_size(value: Any) -> int:
    """Return a size, or the size of a node, in the call that is being compiled."""
    return size_hint(value.meta["val"] if isinstance(value, Node) else value)


def _with_length(vector: Node, length: Size) -> bool:
    return is_same_size(node_shape(vector)[1], length)


def _rename_symbols(predicate: str, names: dict[str, str]) -> str:
    """Return the predicate with renamed symbols."""
    if not names:
        return predicate
    known = {sympy.Symbol(old, integer=True): sympy.Symbol(new, integer=True) for old, new in names.items()}
    return str(parse_predicate(predicate).xreplace(known))
