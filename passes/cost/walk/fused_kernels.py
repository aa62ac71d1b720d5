"""Approximate Inductor's fusion decisions for the liveness model (`liveness.py`).

A *kernel* is a node that reads and writes memory when it runs: a generated kernel, a library call or a collective, but
no view, and no elementwise op that its readers recompute. `KernelSchedule` is the list of kernels of a graph in order.
Kernels that Inductor fuses become one, represented by its first node, at the position of that node. Values that only
the fused kernel itself reads have no storage.

A storage is the memory of one or several values, in bytes. A reduction is a sum, mean, maximum and the like; an
addition adds two tensors. A row-wise kernel processes the rows of a tensor (its last dim) one by one.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.fx import Graph, Node

from sp_compile.lowering.torch_compat import OpOverload, namespace_of, schema_of, size_hint
from sp_compile.passes.graph.call import node_tensors, op_name
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.sizes import as_sizes, is_same_size
from sp_compile.passes.sharding.matchers import move_source

from .kinds import (
    CAT,
    CONCAT_CALLS,
    ELEMENTWISE,
    FEWEST_ELEMENTS,
    FEWEST_ROWS,
    LATE_WRITE_OPS,
    MAX_FUSION_DISTANCE,
    MUTATIONS,
    PRIMS,
    REDUCTIONS,
    VIEW_CALLS,
    WIDE_ROW,
    WIDEST_ROW,
)

StorageKey = int  # key of a storage: equal for tensors that share memory


@dataclass(frozen=True)
class RowKernel:
    """Fused kernels over the same rows in graph order, and the storages that they read and write."""

    nodes: list[Node]  # kernels before fusion
    reads: set[StorageKey]  # storages that one of them reads
    writes: set[StorageKey]  # storages that one of them writes

    def join(self, later: RowKernel) -> RowKernel:
        """Return both kernels as one."""
        return RowKernel([*self.nodes, *later.nodes], self.reads | later.reads, self.writes | later.writes)


class KernelSchedule:
    """Kernels of a graph in order, with the storages that each reads and writes.

    A subclass fills the tables from a graph, then calls `fuse`.
    """

    def __init__(self, fused: bool) -> None:
        self.fused = fused  # True if Inductor compiles the graph and fuses kernels
        self.on_gpu = False  # True if a kernel runs on a GPU; set by `fuse`
        self.product_of_addition: dict[Node, Node] = {}  # addition -> product whose kernel also adds (`addmm`)
        self.kernel_writes: dict[Node, list[StorageKey]] = {}  # kernel -> storages; its order is that of the kernels
        self.kernel_reads: dict[Node, frozenset[StorageKey]] = {}  # kernel -> storages
        self.sizes: dict[StorageKey, int] = {}  # storage -> bytes
        self.results: set[StorageKey] = set()  # storages that the graph returns
        self.mutated: list[tuple[int, frozenset[StorageKey]]] = []  # position and operands of kernels that mutate some
        # fused kernel -> storages that several of its nodes read, so that none of them overwrites these
        self.read_often: dict[Node, frozenset[StorageKey]] = {}

    def fuse(self) -> None:
        """Fuse kernels in the tables, as Inductor would; on a CPU it fuses only reductions, as measured."""
        self.on_gpu = any(map(is_on_gpu, self.kernel_writes))
        self._fuse_reductions()
        if self.on_gpu:
            self._fuse_row_kernels()

    def is_fused(self, node: Node) -> bool:
        """Return True if Inductor generates code for the node, which it may fuse; False for calls of a library."""
        target = node.target
        computed_by_library = node in self.product_of_addition  # by the kernel of the product
        if not self.fused or computed_by_library or not isinstance(target, OpOverload):
            return False
        is_listed = target in REDUCTIONS or target in ELEMENTWISE or op_name(node) in PRIMS
        return is_listed or torch.Tag.pointwise in target.tags

    def _fuse_reductions(self) -> None:
        """Fuse nearby reductions that the graph only returns, if they read a common value and have equal shapes.

        These are rules of Inductor's scheduler (its methods `can_fuse` and `score_fusion`), which apply to gradients of
        scales and biases.
        """
        # Position in Inductor's order, in which an op with n > 1 results has 1 + n places: its own, and one for each.
        num_results = (len(node_tensors(node)) for node in self.kernel_writes)
        places = (1 if n < 2 else 1 + n for n in num_results)
        position = dict(zip(self.kernel_writes, accumulate(places, initial=0)))
        sums = [node for node in self.kernel_writes if self._is_returned_reduction(node)]
        pairs = [(a, b) for i, b in enumerate(sums) for a in sums[:i] if self._can_fuse_reductions(a, b)]
        if any(map(is_on_gpu, sums)):  # pairs with the most common bytes are fused first
            pairs.sort(key=lambda pair: -sum(self.sizes[storage] for storage in self._common_reads(*pair)))
        group_of = {node: [node] for node in sums}  # reduction -> reductions of its fused kernel
        for a, b in pairs:
            merged = sorted({*group_of[a], *group_of[b]}, key=position.__getitem__)
            is_near = position[merged[-1]] - position[merged[0]] <= MAX_FUSION_DISTANCE
            if group_of[a] is group_of[b] or not is_near:
                continue
            # A reduction that a row-wise kernel can compute (`_fuse_row_kernels`) is fused with one other only.
            if len(merged) == 2 or not _can_join_row_kernel(a):
                group_of.update(dict.fromkeys(merged, merged))
        distinct_groups = {id(group): group for group in group_of.values()}  # all members have the same list
        self._merge_kernels([*distinct_groups.values()])

    def _common_reads(self, a: Node, b: Node) -> frozenset[StorageKey]:
        """Return the storages that both kernels read."""
        return self.kernel_reads[a] & self.kernel_reads[b]

    def _can_fuse_reductions(self, a: Node, b: Node) -> bool:
        """Return True if two reductions have operands of equal size and results of equal shape, and common operands.

        One common storage is enough; for wide rows on GPUs two are required, as observed.
        """
        x, y = (n.args[0].meta["val"] for n in (a, b))  # type: ignore[union-attr]
        have_equal_sizes = size_hint(x.numel()) == size_hint(y.numel())
        have_equal_results = tuple(a.meta["val"].shape) == tuple(b.meta["val"].shape)
        required = 2 if is_on_gpu(a) and size_hint(x.shape[-1]) > WIDE_ROW else 1
        return have_equal_sizes and have_equal_results and len(self._common_reads(a, b)) >= required

    def _fuse_row_kernels(self) -> None:
        """Fuse kernels that process a tensor row by row, if all that they read exists before the first one.

        Examples are a norm or softmax (reductions over rows) with its users; on a GPU also the gradient of its scale.
        """
        position = {node: i for i, node in enumerate(self.kernel_writes)}
        last_write: dict[StorageKey, int] = {}  # storage -> position of the last kernel that writes it
        self.mutated = [(i, self.kernel_reads[node]) for node, i in position.items() if node.target in MUTATIONS]
        for node, keys in self.kernel_writes.items():
            # These ops mutate their operands, or wait for the collectives that write them.
            late_writes = self.kernel_reads[node] if node.target in LATE_WRITE_OPS else ()
            last_write.update((key, position[node]) for key in (*keys, *late_writes))
        # number of elements that a kernel processes -> kernels so far, some of them fused; only equal numbers are fused
        by_size = defaultdict[int, list[RowKernel]](list)
        for node in self.kernel_writes:
            num_elements = self._row_wise_elements(node)
            if not num_elements:
                continue
            kernels = by_size[num_elements]
            kernel = RowKernel([node], {*self.kernel_reads[node]}, {*self.kernel_writes[node]})
            # Fuse it with earlier kernels until none fits.
            while (partner := self._find_partner(kernel, kernels, num_elements, position, last_write)) is not None:
                kernels.remove(partner)
                kernel = partner.join(kernel)
            kernels.append(kernel)
        self._merge_kernels([kernel.nodes for kernels in by_size.values() for kernel in kernels])

    def _find_partner(
        self,
        kernel: RowKernel,
        candidates: list[RowKernel],
        num_elements: int,
        position: dict[Node, int],
        last_write: dict[StorageKey, int],
    ) -> RowKernel | None:
        """Return an earlier kernel with which `kernel` can be fused, or None.

        Both read a common large value, or the earlier one writes what `kernel` reads. Everything else that `kernel`
        reads exists before the earlier one, and nothing that they read or write is mutated between them.

        Args:
            kernel: Kernel, possibly of several fused ones.
            candidates: Kernels with the same number of elements.
            num_elements: This number.
            position: Position of each kernel before fusion.
            last_write: Position of the last kernel that writes each storage.
        """
        large_reads = {key for key in kernel.reads if self.sizes[key] >= num_elements}  # a byte or more per element
        for candidate in candidates:
            start = position[candidate.nodes[0]]
            if start >= position[kernel.nodes[0]]:
                continue
            is_related = candidate.reads & large_reads or candidate.writes & kernel.reads
            # What the kernel reads from others must be written before the candidate runs.
            other_reads = kernel.reads - candidate.writes - kernel.writes
            if not is_related or any(last_write.get(key, -1) >= start for key in other_reads):
                continue
            joined = candidate.join(kernel)
            end = max(position[node] for node in kernel.nodes)
            if not any(start < i < end and keys & (joined.reads | joined.writes) for i, keys in self.mutated):
                return candidate
        return None

    def _row_wise_elements(self, node: Node) -> int:
        """Return the number of elements that a row-wise op processes; 0 for nodes that are not row-wise.

        Row-wise are elementwise ops and reductions over the last dim. On a GPU, so are large reductions over all rows,
        such as the gradient of a norm's scale: a row-wise kernel can compute these, too (`_can_join_row_kernel`).
        """
        if not self.is_fused(node):
            return 0
        if node.target not in REDUCTIONS:
            return size_hint(node.meta["val"].numel()) if isinstance(node.meta["val"], torch.Tensor) else 0
        x = node.args[0]  # of a reduction such as sum(x, dims)
        dims = node.args[1] if len(node.args) > 1 else None
        if not isinstance(x, Node) or not isinstance(dims, list | tuple):
            return 0
        shape = x.meta["val"].shape
        is_over_last_dim = len(dims) == 1 and dims[0] in (-1, len(shape) - 1)
        is_row_wise = is_over_last_dim or _can_join_row_kernel(node)
        return size_hint(math.prod(shape)) if is_row_wise else 0

    def _is_returned_reduction(self, node: Node) -> bool:
        """Return True for a reduction that is only returned or concatenated, such as the gradient of a bias.

        Views and dtype conversions of it may be returned, too.
        """
        if node.target not in REDUCTIONS:
            return False
        # The users of the reduction, and the views and conversions of these.
        reached = iterate_reachable([node], lambda n: [x for x in n.users if n is node or _is_reinterpretation(x)])
        return all(n is node or _is_reinterpretation(n) or n.target is CAT or n.op == "output" for n in reached)

    def _merge_kernels(self, kernels: list[list[Node]]) -> None:
        """Fuse the nodes of each list to one kernel in the tables, and sort all kernels after their operands."""
        fused = [kernel for kernel in kernels if len(kernel) > 1]
        if not fused:
            return
        order = self._order_kernels({node: kernel for kernel in fused for node in kernel})
        for kernel in fused:
            first, *others = kernel
            reads = Counter(key for node in kernel for key in self.kernel_reads[node])
            if self.on_gpu:  # the kernel does not overwrite these storages, see `__init__`
                self.read_often[first] = frozenset(key for key, count in reads.items() if count > 1)
            self.kernel_writes[first] = [key for node in kernel for key in self.kernel_writes[node]]
            self.kernel_reads[first] = frozenset(reads)
            for node in others:
                del self.kernel_writes[node], self.kernel_reads[node]
            self._remove_inner_storages(first)
        self.kernel_writes = {node: self.kernel_writes[node] for node in order}

    def _order_kernels(self, kernel_of: dict[Node, list[Node]]) -> Collection[Node]:
        """Return the first node of each kernel, in graph order but after the kernels that write its operands.

        `kernel_of` maps each fused node to the nodes of its kernel.
        """
        kernels = {node: kernel_of.get(node, [node]) for node in self.kernel_writes}
        position = {node: i for i, node in enumerate(self.kernel_writes)}
        # storage -> kernels that write or mutate it, or wait for the collective that writes it
        writers = defaultdict[StorageKey, list[Node]](list)
        for node, keys in self.kernel_writes.items():
            late_writes = self.kernel_reads[node] if node.target in LATE_WRITE_OPS else ()
            for key in (*keys, *late_writes):
                writers[key].append(kernels[node][0])
        # A depth-first search: a kernel is added to the order after the kernels that write what it reads. A kernel that
        # is on the stack twice is added when it is visited first.
        order = dict[Node, None]()
        stack = [kernels[node][0] for node in reversed(self.kernel_writes)]
        while stack:
            first = stack[-1]
            operands: set[Node] = set()  # kernels that write what this one reads
            for node in kernels[first]:
                for key in self.kernel_reads[node]:
                    operands.update(writer for writer in writers[key] if position[writer] < position[node])
            missing = sorted(operands - order.keys() - {first}, key=position.__getitem__, reverse=True)
            stack += missing
            if not missing:
                order[stack.pop()] = None
        return order

    def _remove_inner_storages(self, kernel: Node) -> None:
        """Remove the storages that only this fused kernel writes and reads, since it does not store these values."""
        read_by_others = frozenset().union(*(keys for node, keys in self.kernel_reads.items() if node is not kernel))
        inner = (self.kernel_reads[kernel] & {*self.kernel_writes[kernel]}) - read_by_others - self.results
        self.kernel_writes[kernel] = [key for key in self.kernel_writes[kernel] if key not in inner]
        self.kernel_reads[kernel] -= inner


def joined_results(graph: Graph) -> set[Node]:
    """Return values that only become parts of results, such as weight gradients in a cat, and so count as results."""
    joined: set[Node] = set()
    for node in reversed(graph.nodes):  # users first: `joined` then has all users that are joined themselves
        if node.users and all(
            user.op == "output" or (user in joined and _has_operand_elements(user)) for user in node.users
        ):
            joined.add(node)
    return joined


def _has_operand_elements(node: Node) -> bool:
    """Return True if the result contains the operands' elements, or their sums over ranks."""
    is_collective = namespace_of(node.target) == "_c10d_functional"
    return is_collective or node.target in CONCAT_CALLS or move_source(node) is not None


def products_in_additions(graph: Graph) -> dict[Node, Node]:
    """Map each addition to the matrix product that only it reads: Inductor computes both at once (`addmm`).

    An example is a weight's gradient added to that of a tied embedding. On a GPU, additions with only elementwise users
    do not count: Inductor fuses these with their users instead.
    """
    product_of_addition = dict[Node, Node]()
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        has_factor = bool(node.kwargs)  # alpha, the factor of the second operand
        if has_factor or (is_on_gpu(node) and all(map(_is_elementwise, node.users))):
            continue
        for product, addend in (node.args, node.args[::-1]):  # of two products, the first one
            if _can_fuse_addend(product, addend):
                product_of_addition.setdefault(node, product)
    return product_of_addition


def _can_fuse_addend(product: Any, addend: Any) -> bool:
    """Return True if `product` is a matrix product with one user, whose kernel can add `addend` (shape and dtype)."""
    if not isinstance(product, Node) or product.target is not torch.ops.aten.mm.default or len(product.users) > 1:
        return False
    if not isinstance(addend, Node) or addend is product or not isinstance(addend.meta.get("val"), torch.Tensor):
        return False
    x, y = product.meta["val"], addend.meta["val"]
    sizes = zip(as_sizes(y.shape)[::-1], as_sizes(x.shape)[::-1])
    can_broadcast = y.dim() <= x.dim() and all(is_same_size(a, b) or is_same_size(a, 1) for a, b in sizes)
    return can_broadcast and x.dtype == y.dtype


def _is_elementwise(user: Node) -> bool:
    """Return True for an elementwise user of an addition, or a view with only elementwise users."""
    arguments = schema_of(user.target).arguments if isinstance(user.target, OpOverload) else ()
    if user.target is operator.getitem or any(argument.alias_info is not None for argument in arguments):  # a view
        return all(map(_is_elementwise, user.users))
    return torch.Tag.pointwise in getattr(user.target, "tags", ())


def is_on_gpu(node: Node) -> bool:
    """Return True if a value is not on a CPU; meta tensors count as GPU tensors."""
    return any(x.device.type != "cpu" for x in node_tensors(node))


def _is_reinterpretation(node: Node) -> bool:
    """Return True for a view or a dtype conversion."""
    return node.target in VIEW_CALLS or op_name(node) == "prims::convert_element_type"


def _can_join_row_kernel(node: Node) -> bool:
    """Return True if a row-wise GPU kernel can also compute this reduction, which is over the rows of its operand.

    Inductor (`MixOrderReduction`) does so for many elements, if there are at least two rows for each column.
    """
    if not is_on_gpu(node):
        return False
    *rows, width = map(size_hint, node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    count = math.prod(rows)
    return width <= WIDEST_ROW and count >= max(FEWEST_ROWS, 2 * width) and count * width >= FEWEST_ELEMENTS
