"""Approximate Inductor's fusion decisions for the liveness model (`liveness.py`).

A fused event runs at the position of the first; values that only the kernel itself reads have no storage.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compile.lowering.torch_compat import OpOverload, schema_of, size_hint
from sp_compile.passes.graph.call import WAIT_OPS, node_tensors
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.sizes import as_sizes, is_same_size

from .kinds import (
    ARRIVALS,
    CAT,
    ELEMENTWISE,
    FEWEST_ELEMENTS,
    FEWEST_ROWS,
    FUSABLE_VIEWS,
    LATE_WRITE_OPS,
    PRIMS,
    REDUCTIONS,
    VIEW_CALLS,
    WIDE_ROW,
    WIDEST_ROW,
)

PlaceKey = int


@dataclass(frozen=True)
class RowKernel:
    """Events over the same rows in graph order, and the storages that they read and write."""

    nodes: list[Node]
    reads: set[PlaceKey]
    writes: set[PlaceKey]

    def join(self, later: RowKernel) -> RowKernel:
        """Return both kernels as one."""
        return RowKernel([*self.nodes, *later.nodes], self.reads | later.reads, self.writes | later.writes)


class FusedEvents:
    """Events in order, with the storages that each reads and writes; unfused events are single ops."""

    def __init__(self, fused: bool) -> None:
        self.fused, self.on_gpu = fused, False
        self.sums: dict[Node, Node] = {}  # sum -> product computed with it
        self.written: dict[Node, list[PlaceKey]] = {}
        self.read: dict[Node, frozenset[PlaceKey]] = {}
        self.sizes: dict[PlaceKey, int] = {}
        self.results: set[PlaceKey] = set()
        self.often: dict[
            Node, frozenset[PlaceKey]
        ] = {}  # read by several parts of an event, so that none writes over it

    def fuse(self) -> None:
        """Fuse events; on a CPU only sums, as measured."""
        self.on_gpu = any(map(is_on_gpu, self.written))
        self._fuse_sums()
        if self.on_gpu:
            self._fuse_rows()

    def is_fused(self, node: Node) -> bool:
        """Return True if the node is part of kernels that Inductor generates."""
        target = node.target
        if not self.fused or node in self.sums or not isinstance(target, OpOverload):
            return False
        return (
            _op_name(target) in PRIMS
            or target in REDUCTIONS
            or target in ELEMENTWISE
            or torch.Tag.pointwise in target.tags
        )

    def _fuse_sums(self) -> None:
        """Fuse nearby sums that read a common value with the same number of rows.

        Inductor does so with gradients of scales and biases, which nothing waits for. It sorts kernels by their first
        part, so nodes between the first and last sum that no sum needs run later than in the graph.
        """
        results = (
            len(node_tensors(node)) for node in self.written
        )  # of several, each has a place in Inductor's order, too
        number = dict(zip(self.written, accumulate((1 if n < 2 else 1 + n for n in results), initial=0)))
        sums = [node for node in self.written if self._is_last_sum(node)]
        pairs = [(a, b) for i, b in enumerate(sums) for a in sums[:i] if self._read_in_common(a, b)]
        if any(map(is_on_gpu, sums)):  # those that have the most to read in common come first
            pairs.sort(key=lambda pair: -sum(self.sizes[key] for key in self.read[pair[0]] & self.read[pair[1]]))
        group_of = {node: [node] for node in sums}
        for a, b in pairs:
            one, other = group_of[a], group_of[b]
            both = sorted([*one, *other], key=number.__getitem__)
            near = number[both[-1]] - number[both[0]] <= FUSABLE_VIEWS
            if one is not other and near and (len(both) == 2 or not _is_row_reduction(a)):
                group_of.update(dict.fromkeys(both, both))
        groups = {id(group): group for group in group_of.values() if len(group) > 1}
        if groups:
            self._sort({node: group for group in groups.values() for node in group})

    def _read_in_common(self, a: Node, b: Node) -> bool:
        """Return True if two sums read enough common values; wide rows on GPUs need more than one (observed)."""
        wide = is_on_gpu(a) and size_hint(a.args[0].meta["val"].shape[-1]) > WIDE_ROW  # type: ignore[union-attr]
        return _is_same_reduction(a, b) and len(self.read[a] & self.read[b]) > wide

    def _fuse_rows(self) -> None:
        """Fuse row-wise events with reductions over rows, if all that they read is available.

        Examples are a norm or softmax with its users; on a GPU also the gradient of its scale.
        """
        number = {node: i for i, node in enumerate(self.written)}
        written: dict[PlaceKey, int] = {}  # by the last event that writes it
        for node, keys in self.written.items():
            waits = self.read[node] if node.target in LATE_WRITE_OPS else ()
            written.update((key, number[node]) for key in (*keys, *waits))
        units = defaultdict[int, list[RowKernel]](list)  # by number of elements
        for node in self.written:
            count = self._elements_by_row(node)
            if not count:
                continue
            last, others = RowKernel([node], {*self.read[node]}, {*self.written[node]}), units[count]
            while (found := self._find_partner(last, others, count, number, written)) is not None:
                others.remove(found)
                last = found.join(last)
            others.append(last)
        together = [one.nodes for others in units.values() for one in others if len(one.nodes) > 1]
        if together:
            self._sort({node: group for group in together for node in group})

    def _find_partner(
        self,
        last: RowKernel,
        others: list[RowKernel],
        count: int,
        number: dict[Node, int],
        written: dict[PlaceKey, int],
    ) -> RowKernel | None:
        """Return an earlier kernel over the same number of elements at which all operands are available, or None."""
        large = {key for key in last.reads if self.sizes[key] >= count}
        for one in others:
            first = number[one.nodes[0]]
            near = one.reads & large or one.writes & last.reads
            there = (written.get(key, -1) < first for key in last.reads - one.writes - last.writes)
            if first < number[last.nodes[0]] and near and all(there):
                return one
        return None

    def _elements_by_row(self, node: Node) -> int:
        """Return the number of elements of a row-wise event, or 0 for others."""
        if not self.is_fused(node):
            return 0
        if node.target not in REDUCTIONS:
            return size_hint(node.meta["val"].numel()) if isinstance(node.meta["val"], torch.Tensor) else 0
        x, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not isinstance(x, Node) or not isinstance(dims, list | tuple):
            return 0
        shape = x.meta["val"].shape
        of_rows = len(dims) == 1 and dims[0] in (-1, len(shape) - 1)
        return size_hint(shape.numel()) if of_rows or _is_row_reduction(node) else 0

    def _is_last_sum(self, node: Node) -> bool:
        """Return True for a sum that is only returned or concatenated."""
        if node.target not in REDUCTIONS:
            return False
        passed = iterate_reachable([node], lambda n: [x for x in n.users if n is node or _is_reinterpretation(x)])
        return all(n is node or _is_reinterpretation(n) or n.target is CAT or n.op == "output" for n in passed)

    def _sort(self, together: dict[Node, list[Node]]) -> None:
        """Sort events in graph order after their operands, with each fused group as one."""
        groups = {node: together.get(node, [node]) for node in self.written}
        number = {node: i for i, node in enumerate(self.written)}
        makers = defaultdict[PlaceKey, list[Node]](list)  # and events that must be waited for
        for node, keys in self.written.items():
            waits = self.read[node] if node.target is WAIT_OPS or node.target in ARRIVALS else ()
            for key in (*keys, *waits):
                makers[key].append(groups[node][0])
        order = dict[Node, None]()
        waiting = [groups[node][0] for node in reversed(self.written)]
        while waiting:
            node = waiting[-1]
            read = {
                before
                for one in groups[node]
                for key in self.read[one]
                for before in makers[key]
                if number[before] < number[one]
            }
            before = sorted(read - order.keys() - {node}, key=number.__getitem__, reverse=True)
            waiting += before
            if not before:
                order[waiting.pop()] = None
        for group in {id(group): group for group in together.values()}.values():
            first, *others = group
            reads = Counter(key for one in group for key in self.read[one])
            if self.on_gpu:
                self.often[first] = frozenset(key for key, count in reads.items() if count > 1)
            self.written[first] = [key for one in group for key in self.written[one]]
            self.read[first] = frozenset().union(*(self.read[one] for one in group))
            for one in others:
                del self.written[one], self.read[one]
            self._keep_inside(first)
        self.written = {node: self.written[node] for node in order}

    def _keep_inside(self, event: Node) -> None:
        """Remove the storages that only the event itself reads."""
        elsewhere = frozenset().union(*(keys for one, keys in self.read.items() if one is not event))
        inside = (self.read[event] & {*self.written[event]}) - elsewhere - self.results
        self.written[event] = [key for key in self.written[event] if key not in inside]
        self.read[event] -= inside


def products_in_sums(graph: Graph) -> dict[Node, Node]:
    """Map each sum to the product that only it reads: Inductor computes both at once (`addmm`).

    An example is a weight's gradient added to that of a tied embedding. On a GPU, sums with elementwise users do not
    count.
    """
    found = dict[Node, Node]()
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        fusible = is_on_gpu(node) and all(map(_is_elementwise, node.users))
        pairs = [] if node.kwargs or fusible else [node.args[::-1], node.args]  # of two products, the first one
        found.update((node, product) for product, other in pairs if _can_fuse_addend(product, other))
    return found


def _can_fuse_addend(product: Any, other: Any) -> bool:
    """Return True if the product's kernel can add the other operand."""
    if not isinstance(product, Node) or product.target is not torch.ops.aten.mm.default or len(product.users) > 1:
        return False
    if not isinstance(other, Node) or other is product or not isinstance(other.meta.get("val"), torch.Tensor):
        return False
    x, y = product.meta["val"], other.meta["val"]
    fits = all(
        is_same_size(a, b) or is_same_size(a, 1) for a, b in zip(as_sizes(y.shape)[::-1], as_sizes(x.shape)[::-1])
    )
    return fits and y.dim() <= x.dim() and x.dtype == y.dtype


def _is_elementwise(user: Node) -> bool:
    """Return True for an elementwise op, or a view with only elementwise users."""
    if user.target is operator.getitem:
        return all(map(_is_elementwise, user.users))
    if not isinstance(user.target, OpOverload):
        return False
    if any(argument.alias_info is not None for argument in schema_of(user.target).arguments):
        return all(map(_is_elementwise, user.users))
    return torch.Tag.pointwise in user.target.tags


def _is_same_reduction(a: Node, b: Node) -> bool:
    """Return True if two sums have equal numbers of elements and equal result shapes."""
    (x, y), (u, v) = ((n.args[0].meta["val"].shape, n.meta["val"].shape) for n in (a, b))  # type: ignore[union-attr]
    return math.prod(map(size_hint, x)) == math.prod(map(size_hint, u)) and tuple(y) == tuple(v)


def is_on_gpu(node: Node) -> bool:
    """Return True if a value is not on a CPU; meta tensors count as GPU tensors."""
    return any(x.device.type != "cpu" for x in node_tensors(node))


def _is_reinterpretation(node: Node) -> bool:
    """Return True for a view or a dtype conversion."""
    return node.target in VIEW_CALLS or _op_name(node.target) == "prims::convert_element_type"


def _is_row_reduction(node: Node) -> bool:
    """Return True if a GPU kernel that processes rows computes this sum over rows, too.

    This holds for many elements and many more rows than columns: Inductor's `MixOrderReduction`.
    """
    if not is_on_gpu(node):
        return False
    *rows, width = map(size_hint, node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    count = math.prod(rows)
    return width <= WIDEST_ROW and count >= max(FEWEST_ROWS, 2 * width) and count * width >= FEWEST_ELEMENTS


def _op_name(target: Any) -> str:
    """Return the op name, such as aten::mm, or ""."""
    return str(schema_of(target).name) if isinstance(target, OpOverload) else ""
