"""Copy the tables of mask vectors to the host once per graph.

A mask vector is an integer per position that a mask predicate reads, such as a document id; its table lists the runs
of equal or consecutive values, from which kernels skip masked blocks (`lowering/masks/pieces.py`).

    ring_attention(.., rows=[doc], cols=[doc], pieces=[], ..)      a, b = sp.pieces([doc, padding])
    ring_attention(.., rows=[], cols=[padding], pieces=[], ..)     ring_attention(.., [doc], [doc], [a, a], ..)
                                                             ->    ring_attention(.., [], [padding], [b], ..)

One call serves all attentions of the graph; no other op synchronizes with the device. It runs directly after the last
vector. Ops that compute vectors move before the first attention. A vector that depends on an attention needs another
call. The tables are saved for the backward graph. The pass adds no traffic between ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch.fx import GraphModule, Node, map_arg

from sp_compile.lowering.torch_compat import OpOverload
from sp_compile.passes.base import Pass
from sp_compile.passes.context import PassContext
from sp_compile.passes.graph.call import OpCall, is_same_argument
from sp_compile.passes.graph.closure import reachable_set
from sp_compile.passes.graph.mutation import is_pure

sp = torch.ops.sp


class HoistMaskTables(Pass):
    """Pass that adds the tables of mask vectors to every sharded attention."""

    requires = frozenset({"balanced rows", "restored strides"})  # it moves vectors and their copies, and adds no copies
    provides = frozenset({"mask tables"})

    def apply(self, gm: GraphModule, context: PassContext) -> int:
        """Emit sp::pieces, which computes the tables of mask vectors, for all attentions that have none.

        One call serves all attentions, unless a vector depends on the result of an attention. Returns the number of
        calls.
        """
        waiting = [n for n in gm.graph.nodes if n.op == "call_function" and _needs_tables(n)]
        calls = 0
        while waiting:
            first = waiting[0]
            readers = [n for n in waiting if all(can_precede(v, first) for v in mask_vectors(n))]
            self._emit_tables(first, readers)
            waiting = [n for n in waiting if n not in readers]
            calls += 1
        return calls

    def _emit_tables(self, first: Node, readers: list[Node]) -> None:
        """Emit one sp::pieces before `first`, the first of the readers, and pass its tables to all readers.

        sp::pieces copies the mask vectors, such as document ids, to the host, and returns a table of each: its runs of
        equal or consecutive values, by which attention finds masked blocks. It is emitted directly after the last
        vector, once these are moved before `first`. Vectors that are the same computation share one table.
        """
        representatives = unique_vectors(v for n in readers for v in mask_vectors(n))
        vectors = list(dict.fromkeys(representatives.values()))
        move_before(first, vectors)
        last = max(vectors)  # fx compares nodes by their position in the graph
        with self.insert_after(last):
            pieces = self.compute(sp.pieces.default, (vectors,), last)
            values = pieces.meta["val"]
            tables = {v: self.emit(operator.getitem, (pieces, i), values[i], last) for i, v in enumerate(vectors)}
        for node in readers:
            call, node_tables = OpCall(node), [tables[representatives[v]] for v in mask_vectors(node)]
            node.args, node.kwargs = call.with_operands(call.operands, pieces=node_tables)


def _needs_tables(node: Node) -> bool:
    """Return True if the node is a sharded attention that reads mask vectors and does not have their tables."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "sp":
        return False
    call = OpCall(node)
    return "pieces" in call.args and not call["pieces"] and bool(mask_vectors(node))


def mask_vectors(node: Node) -> list[Node]:
    """Return the mask vectors of a sharded attention: those read by query, then those read by key."""
    call = OpCall(node)
    return [*call["rows"], *call["cols"]]


def unique_vectors(vectors: Iterable[Node]) -> dict[Node, Node]:
    """Map each vector to the first vector that is the result of the same computation, which may be itself."""
    representatives: dict[Node, Node] = {}
    for vector in vectors:
        equal_vectors = (v for v in representatives.values() if _is_same_computation(v, vector))
        representatives[vector] = next(equal_vectors, vector)
    return representatives


def _is_same_computation(a: Node, b: Node) -> bool:
    """Return True if a and b are one node, or calls of the same pure op on operands that are the same computation."""
    if a is b:
        return True
    if a.op != "call_function" or a.target != b.target or not (is_pure(a) and is_pure(b)):
        return False
    operands_of_a, operands_of_b = list[Node](), list[Node]()
    # map_arg returns the arguments with None, the result of `append`, in place of each node
    constants_of_a = map_arg((a.args, a.kwargs), operands_of_a.append)
    constants_of_b = map_arg((b.args, b.kwargs), operands_of_b.append)
    is_same_form = is_same_argument(constants_of_a, constants_of_b) and len(operands_of_a) == len(operands_of_b)
    return is_same_form and all(map(_is_same_computation, operands_of_a, operands_of_b))


def move_before(first: Node, vectors: Sequence[Node]) -> None:
    """Move the nodes that compute the vectors before the node `first`, in their order, if they are not already."""
    moved = set[Node]().union(*(_nodes_to_move(v, first) for v in vectors))
    for node in [n for n in first.graph.nodes if n in moved]:
        first.prepend(node)


def _nodes_to_move(vector: Node, first: Node) -> set[Node]:
    """Return the vector and the nodes that it depends on, without those that precede `first` in the graph."""
    if vector < first:
        return set()
    return reachable_set([vector], lambda n: [x for x in n.all_input_nodes if not x < first])


def can_precede(vector: Node, first: Node) -> bool:
    """Return True if `move_before` can move the computation of the vector before `first`, on which it may depend."""
    return all(n is not first and is_pure(n) for n in _nodes_to_move(vector, first))
