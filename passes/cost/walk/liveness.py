"""Model the memory of a running graph: each value lives from its definition to its last use.

`walk` returns a `WalkMoment` for each kernel of a graph (see `fused_kernels.py`), in order, with the bytes of all
values alive while it runs. Graphs are those of AOTAutograd's partition, with fake tensors. Values that share memory
(views, in-place writes) are one storage. With fusion, an elementwise op has no storage: its readers recompute it. It
gets storage only if an unfused op (product, attention, collective) reads it, at the end of a reduction, or if it reads
more storages than Inductor inlines. A kernel may write over an operand that it reads last.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice

import torch
from torch.fx import Graph, Node

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.layers import node_layer
from sp_compile.lowering.base.library import INTERNAL_OPS
from sp_compile.lowering.tiles.tile_flops import node_flops
from sp_compile.lowering.tiles.tile_program import PROGRAMS, TilePart, TileProgram
from sp_compile.lowering.torch_compat import (
    FakeTensorMode,
    inductor_decompositions,
    make_fx,
    namespace_of,
    size_hint,
    storage_of,
)
from sp_compile.passes.graph.call import WAIT_OP, is_tangent, node_tensors
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.sizes import current_bytes

from .fused_kernels import KernelSchedule, StorageKey, is_on_gpu, joined_results, products_in_additions
from .kinds import (
    ARRIVALS,
    ATTENTIONS,
    CAT,
    IN_PLACE_COLLECTIVES,
    INLINED_OFTEN,
    INLINED_ONCE,
    MATRIX_PRODUCTS,
    MUTATIONS,
    REDUCTIONS,
    TILE_LOOP,
    TO_HOST,
    UNFREEABLE_INPUTS,
    is_product,
    needs_operands_in_memory,
)
from .live_values import LiveValue, WalkMoment, nbytes_of, nearest_line
from .workspace import conversion_bytes, op_workspace


@dataclass
class LivenessWalk:
    """Liveness of one graph."""

    moments: list[WalkMoment] = field(default_factory=list)  # one for each kernel, in order
    end: int = 0  # live bytes after the last one
    _storages: StorageTable | None = None  # storages of the graph
    _inputs: dict[StorageKey, LiveValue] = field(default_factory=dict)  # inputs that are freed after their last use

    @property
    def traffic(self) -> int:
        """Return the bytes that kernels other than products read and write."""
        return sum(moment.traffic for moment in self.moments)

    @property
    def flops(self) -> int:
        """Return the FLOPs of matrix products, without attention."""
        return sum(moment.flops for moment in self.moments)

    def by_last_layer(self, saved: Iterable[Node]) -> list[tuple[str, LiveValue]]:
        """Return (path of the layer that reads it last, value) for each storage of these inputs of the graph.

        The path is "" for an input that no layer reads, or that is read before the first layer.
        """
        assert self._storages is not None
        keys = dict.fromkeys(self._storages.key(x) for node in saved for x in node_tensors(node))
        layers = [""]  # layers[i + 1] is the layer of moment i, or the last layer before it
        for moment in self.moments:
            layers.append(moment.layer or layers[-1])
        return [(layers[self._storages.last_read.get(key, -1) + 1], self._inputs[key]) for key in keys]

    def alive(self, moment: int) -> list[LiveValue]:
        """Return the values that are live at the kernel of this index, for reports; the largest is first.

        The list is empty for a graph with fewer kernels.
        """
        assert self._storages is not None
        kernels = islice(self._storages.run(self._inputs), moment, None)  # from this index on
        _, live = next(kernels, (None, []))
        return sorted(live, key=lambda value: -value.nbytes)


def walk(graph: Graph, fused: bool, saved: Iterable[Node] = ()) -> LivenessWalk:
    """Return the live bytes at each kernel of a graph.

    Args:
        graph: Graph with fake tensors as `meta["val"]`.
        fused: Model Inductor's fusion.
        saved: Inputs that are freed after their last use; others are permanent and not counted.
    """
    storages = StorageTable(graph, fused)
    inputs = {
        storages.key(x): LiveValue(node.name, nearest_line(node), nbytes_of(x), "saved")
        for node in saved
        for x in node_tensors(node)
    }
    result = LivenessWalk(_storages=storages, _inputs=inputs)
    for node, live in storages.run(inputs):
        computed = storages.product_of_addition.get(node, node)  # `addmm` is a product
        nbytes = Counter[str]()  # by origin
        for value in live:
            nbytes[value.origin] += value.nbytes
        product, attends = is_product(computed), node.target in ATTENTIONS
        # Products are limited by FLOPs, other kernels by the bytes that they read and write.
        traffic = 0 if product else storages.traffic(node)
        if node.target is TILE_LOOP:  # each tile also reads and writes the accumulators
            loop = _TileLoop.of(node)
            traffic += loop.tiles * (_walk_tile(loop.part, fused).traffic + 2 * loop.accumulator_bytes)
        moment = WalkMoment(
            name=node.name,
            where=nearest_line(node),
            nbytes=nbytes.total(),
            results=nbytes["result"],
            idle=nbytes["reuse"],  # retained buffers
            product=product,
            layer=node_layer(node),
            traffic=traffic,
            flops=0 if attends else node_flops(computed),  # the cost of attention is predicted separately
            attends=attends,
        )
        result.moments.append(moment)
    result.end = sum(value.nbytes for value in storages.remaining.values())
    return result


@dataclass(frozen=True)
class _TileLoop:
    """Sizes of an op that runs a program on each tile of rows in turn, and sums some of its results."""

    tiles: int  # number of tiles
    part: TilePart  # program of one tile
    accumulator_bytes: int  # of the sums over tiles
    wide_bytes: int  # of the accumulators that are cast to a narrower dtype at the end
    narrow_bytes: int  # of these after the cast
    copied_bytes: int  # of a tile's operands that are copied to be contiguous

    @staticmethod
    def of(node: Node) -> _TileLoop:
        """Return the tile loop of a node whose target is `TILE_LOOP`."""
        kinds, _, tiled, untiled, tiles, name, _ = node.args  # without the cotangents and the seed
        program: TileProgram = PROGRAMS[name]
        sizes = program.sizes([x.meta["val"] for x in (*tiled, *untiled)])
        accumulators = wide = narrow = 0  # bytes
        for value in chain.from_iterable(getattr(program, kind) for kind in kinds):
            if value.dim is not None:  # each tile computes other rows of it, which are not summed
                continue
            # The sum over tiles is accumulated in a dtype that may be wider than that of the result.
            elements, dtype = math.prod(map(size_hint, value.sizes(sizes))), accumulation_dtype(value.dtype)
            accumulators += elements * dtype.itemsize
            if dtype != value.dtype:
                wide += elements * dtype.itemsize
                narrow += elements * value.dtype.itemsize
        # Slices of rows are not contiguous if the dims before them have more than one element.
        operands = zip((n.meta["val"] for n in tiled), program.rows)
        copied = sum(current_bytes(x) for x, dim in operands if size_hint(math.prod(x.shape[:dim])) > 1) // tiles
        _, body = max(program.bodies.items())  # (rows of a tile, its program) of the longest tile
        return _TileLoop(tiles, body.part(kinds), accumulators, wide, narrow, copied)

    def peak_bytes(self, fused: bool) -> int:
        """Return the bytes that a loop over tiles of rows allocates at its peak, besides its results.

        While tiles run, wide accumulators exist in addition; the narrow results to which they are cast at the end do
        not yet, but are counted as results, so they are subtracted. At the end both exist, without a tile.
        """
        tile = max((moment.nbytes for moment in _walk_tile(self.part, fused).moments), default=0)
        while_tiles_run = tile + self.copied_bytes + self.wide_bytes - self.narrow_bytes
        return max(while_tiles_run, self.wide_bytes)


@cache
def _walk_tile(part: TilePart, fused: bool) -> LivenessWalk:
    """Return the liveness of the program of a tile; if `fused`, that after Inductor's decompositions."""
    if not fused:
        return walk(part.graph.graph, fused)
    with FakeTensorMode(allow_non_fake_inputs=True):  # the graph may contain constants
        inputs = []
        for x in part.inputs:
            shape, stride = ([size_hint(size) for size in sizes] for sizes in (x.shape, x.stride()))
            inputs.append(torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device))
        return walk(make_fx(part.graph, inductor_decompositions())(*inputs).graph, fused)


def _workspace_bytes(node: Node, fused: bool) -> int:
    """Return the bytes that a kernel allocates for its run and frees at its end, besides operands and results."""
    if node.target is TILE_LOOP:
        return _TileLoop.of(node).peak_bytes(fused)
    values = [arg.meta.get("val") if isinstance(arg, Node) else arg for arg in node.args]
    operands = [x for x in values if isinstance(x, torch.Tensor)]
    if node.target not in ATTENTIONS:
        tensors = [] if fused else node_tensors(node)  # fused kernels convert elements in registers: no workspace
        return conversion_bytes(node.target, operands, tensors[0]) if tensors else 0
    kernel_workspace = op_workspace(node.target, operands)
    if node.target in INTERNAL_OPS:  # an sp:: op, whose function adds the op's own temporary values
        return INTERNAL_OPS[node.target](kernel_workspace, *values)
    return kernel_workspace


class StorageTable(KernelSchedule):
    """Storage of each value of a graph, and the kernels that read and write it."""

    def __init__(self, graph: Graph, fused: bool) -> None:
        super().__init__(fused)
        self.reused: dict[StorageKey, StorageKey] = {}  # storage -> operand's storage that it reuses
        self.producer: dict[StorageKey, Node] = {}  # storage -> node that creates it
        self.inlined: set[StorageKey] = set()  # storages that do not exist, since readers recompute the values
        # node -> storages that a kernel reads to read its value: its own, or those from which it is recomputed
        self.value_reads: dict[Node, frozenset[StorageKey]] = {}
        # node that is stored only for attention and sp:: ops -> storages that generated kernels read instead
        self.reads_to_recompute: dict[Node, frozenset[StorageKey]] = {}
        self.dtypes: dict[StorageKey, torch.dtype] = {}
        self.remaining: dict[StorageKey, LiveValue] = {}  # values after the last kernel, set by `_iterate_live`
        # storages of inputs on a CPU, and of what library calls return for such operands; set by `_iterate_live`
        self.unaligned: set[StorageKey] = set()
        # addition -> the matrix product that one kernel computes together with it (addmm)
        self.product_of_addition = products_in_additions(graph) if fused else {}
        self.inputs = graph.find_nodes(op="placeholder")
        for node in graph.nodes:
            if node.op != "output":
                self._place(node)
        self.results = {self.key(x) for node in graph.output_node().all_input_nodes for x in node_tensors(node)}
        if fused:
            self.fuse()
        # storage -> index of the last kernel that reads it
        self.last_read = {key: i for i, node in enumerate(self.kernel_writes) for key in self.kernel_reads[node]}
        # storages of values that only become parts of results, such as gradients in a cat, and so count as results
        self.joined = {self.key(x) for node in joined_results(graph) for x in node_tensors(node)}

    def key(self, value: torch.Tensor) -> StorageKey:
        """Return the key of a tensor's storage, or of the storage that it reuses."""
        key = storage_of(value)
        while key in self.reused:
            key = self.reused[key]
        return key

    def run(self, inputs: dict[StorageKey, LiveValue]) -> Iterator[tuple[Node, list[LiveValue]]]:
        """Yield each kernel with the values that are alive while it runs, and its workspace.

        In compiled code these include idle buffers, which Inductor retains after the last use of their value, for a
        later value of the same size.

        Args:
            inputs: Inputs of the graph to count, until their last use; others are permanent.
        """
        kernels = [(node, dict(live)) for node, live in self._iterate_live(inputs)]
        idle = self._idle_buffers([live for _, live in kernels]) if self.fused else [[] for _ in kernels]
        for (node, live), idle_buffers in zip(kernels, idle, strict=True):
            nbytes = _workspace_bytes(node, self.fused)
            workspace = [LiveValue(node.name, nearest_line(node), nbytes, "workspace")] if nbytes else []
            yield node, [*live.values(), *idle_buffers, *workspace]

    def _iterate_live(self, inputs: dict[StorageKey, LiveValue]) -> Iterator[tuple[Node, dict[StorageKey, LiveValue]]]:
        """Yield each kernel with the live values by storage, without idle buffers and workspace.

        The same dict is yielded each time. Sets `unaligned`, and at the end `remaining`: see `__init__`.

        A value becomes live when its kernel runs, and is removed after the last kernel that reads it. A fused kernel
        may write its result over an operand of the same size that it reads last: then the result replaces the operand.
        """
        live = {key: value for key, value in inputs.items() if key in self.last_read or key in self.results}
        self.unaligned = {self.key(x) for node in self.inputs if not is_on_gpu(node) for x in node_tensors(node)}
        for i, (node, written) in enumerate(self.kernel_writes.items()):
            reads = self.kernel_reads[node]
            # Operands that no later kernel reads, so that they are freed after this one; the latest definition first.
            ending = [k for k in reversed(live) if k in reads and k not in self.results and self.last_read[k] == i]
            overwritable = list[StorageKey]()
            if self.is_fused(node):
                retained = self._retained_by(node)
                overwritable = [key for key in ending if key not in retained]
            # A library call allocates unaligned results for unaligned operands.
            returns_unaligned = self._is_allocated_by_torch(node) and not reads.isdisjoint(self.unaligned)
            for key in written:
                value = self._written_value(key)
                overwritten = next((k for k in overwritable if live[k].nbytes == value.nbytes), None)
                if overwritten is not None:
                    overwritable.remove(overwritten)
                    ending.remove(overwritten)
                    del live[overwritten]
                if overwritten in self.unaligned or returns_unaligned:
                    self.unaligned.add(key)
                live[key] = value
            yield node, live
            unread = [key for key in written if key not in self.last_read and key not in self.results]
            for key in [*ending, *unread]:
                del live[key]
        self.remaining = live

    def _idle_buffers(self, lives: Sequence[dict[StorageKey, LiveValue]]) -> list[list[LiveValue]]:
        """Return the idle buffers at each kernel: freed ones that Inductor retains until a later kernel writes to them.

        A generated kernel or a matrix product reuses a freed buffer of the same bytes and dtype, unless retaining this
        buffer until then would raise the peak that Inductor estimates. Its estimate counts only the inputs that it can
        free, and the retained buffers: it has the sizes of other buffers only if it sorts the graph, which is
        disabled here (`torch_compat.joint_compiler`). Unaligned buffers are not reused for aligned ones.

        Args:
            lives: Live values by storage at each kernel, as `_iterate_live` yields them.
        """
        estimates = self._freeable_input_bytes(len(lives))  # Inductor's estimate of the live bytes at each kernel
        peak = max(estimates, default=0)
        idle: list[list[LiveValue]] = [[] for _ in lives]
        # (bytes, dtype) -> freed buffers, each with the index of the first kernel at which it is free
        free: dict[tuple[int, torch.dtype], list[tuple[int, LiveValue]]] = defaultdict(list)
        previous: dict[StorageKey, LiveValue] = {}
        for i, (node, live) in enumerate(zip(self.kernel_writes, lives)):
            for key in [key for key in live if key not in previous]:  # values that this kernel writes
                candidates = free[live[key].nbytes, self.dtypes[key]]
                if not candidates or not (self.is_fused(node) or self._is_matrix_product(node)):
                    continue  # no buffer of this size, or torch allocates the result
                start, buffer = candidates[-1]  # the one that was freed last; it is free from kernel `start` on
                if start == i or max(estimates[start:i]) + buffer.nbytes <= peak:
                    candidates.pop()
                    for k in range(start, i):  # it was retained at these kernels
                        estimates[k] += buffer.nbytes
                        idle[k].append(buffer)
            following = lives[i + 1] if i + 1 < len(lives) else live
            for key in [key for key in live if key not in following]:  # values that are freed after this kernel
                # Saved values are inputs of the backward, which Inductor frees but does not reuse.
                if live[key].origin != "saved" and key not in self.unaligned:
                    free[live[key].nbytes, self.dtypes[key]].append((i + 1, replace(live[key], origin="reuse")))
            previous = live
        return idle

    def _freeable_input_bytes(self, num_kernels: int) -> list[int]:
        """Return for each kernel the bytes of the inputs that Inductor can free and has not yet freed."""
        totals = [0] * num_kernels
        freeable = [node for node in self.inputs if not node.name.startswith(UNFREEABLE_INPUTS)]
        for x in chain.from_iterable(map(node_tensors, freeable)):
            key = self.key(x)
            # An input is freed after its last read; one that the graph returns is not freed.
            end = num_kernels if key in self.results else self.last_read.get(key, -1) + 1
            for i in range(end):
                totals[i] += current_bytes(x)
        return totals

    def _is_allocated_by_torch(self, node: Node) -> bool:
        """Return True for a call of a library whose results torch allocates; they may be unaligned.

        Inductor allocates the results of its own kernels, of matrix products and of collectives.
        """
        is_collective = namespace_of(node.target) == "_c10d_functional"
        return not (self.is_fused(node) or self._is_matrix_product(node) or is_collective)

    def _is_matrix_product(self, node: Node) -> bool:
        """Return True if the kernel computes a matrix product, alone or with a sum."""
        return node in self.product_of_addition or node.target in MATRIX_PRODUCTS

    def _retained_by(self, node: Node) -> set[StorageKey]:
        """Return the storages that a kernel does not overwrite although it reads them last.

        These are tangents, which AOTAutograd does not donate, and, on a GPU, what several nodes of a fused kernel read:
        Inductor writes over an operand only if a single node of the kernel reads it.
        """
        tangents = {key for key in self.kernel_reads[node] if is_tangent(self.producer[key])}
        return tangents | self.read_often.get(node, frozenset())

    def _written_value(self, key: StorageKey) -> LiveValue:
        """Return the live value of a storage that a kernel writes."""
        node = self.producer[key]
        returned = key in self.results or key in self.joined
        return LiveValue(node.name, nearest_line(node), self.sizes[key], "result" if returned else "value")

    def traffic(self, node: Node) -> int:
        """Return the bytes that a kernel reads and writes, from which its seconds follow; 0 for a wait."""
        keys = [] if node.target is WAIT_OP else [*self.kernel_reads[node], *self.kernel_writes[node]]
        return sum(self.sizes[key] for key in keys)

    def _place(self, node: Node) -> None:
        """Add a node to the tables: its storages, those that its readers read, and its kernel, if any.

        A value that its readers recompute is inlined: it has no storage, and they read what it is computed from. With
        fusion, `y` of `y = x * 2; z = y.sum()` is inlined: `value_reads[y]` is x's storage, which z's kernel reads. In
        `y = x * 2; z = y @ w`, y has a kernel and a storage, since a product reads its operands from memory.
        """
        self._reuse_operands(node)
        new = self._add_storages(node)
        keys = dict.fromkeys(self.key(x) for x in node_tensors(node))
        # Storages to read for the operands. A generated kernel recomputes those of `reads_to_recompute`.
        recomputed = self.reads_to_recompute if self.is_fused(node) else {}
        operand_reads = frozenset(key for x in node.all_input_nodes for key in recomputed.get(x, self.value_reads[x]))
        if node.op in ("placeholder", "get_attr"):
            self.value_reads[node] = frozenset(keys)
        elif node.target is WAIT_OP:  # a kernel that writes nothing; the collective's operands are alive until then
            self.value_reads[node] = frozenset(keys)
            self.kernel_writes[node] = []
            self.kernel_reads[node] = operand_reads | self.kernel_reads.get(node.args[0], frozenset())
        elif node.target in ARRIVALS:  # a wait for a copy to or from the host, without a result
            self.value_reads[node] = frozenset()
            self.kernel_writes[node], self.kernel_reads[node] = [], operand_reads
        elif not new and node.target in MUTATIONS:  # a kernel that writes to its operands
            self.value_reads[node] = frozenset(keys)
            self.kernel_writes[node], self.kernel_reads[node] = [], operand_reads
        elif not new:  # a view: no kernel; one of an inlined value is recomputed with this value
            is_recomputed = not keys or not self.inlined.isdisjoint(keys)
            self.value_reads[node] = operand_reads if is_recomputed else frozenset(keys)
            for x in node.all_input_nodes:
                if x in self.reads_to_recompute:
                    self.reads_to_recompute[node] = self.reads_to_recompute[x]
        # A product that is computed together with the addition of its result (addmm) has no kernel of its own.
        elif node in self.product_of_addition.values() or self._is_inlined(node, operand_reads):
            self.inlined.update(new)
            self.value_reads[node] = operand_reads
        else:
            self.value_reads[node] = frozenset(keys)
            self.kernel_reads[node], self.kernel_writes[node] = operand_reads, []
            # Only attention and sp:: ops need this value in memory; generated kernels of a GPU recompute it.
            if is_on_gpu(node) and self._is_inlined(node, operand_reads, needs_operands_in_memory):
                self.reads_to_recompute[node] = operand_reads
            # The storages exist from the kernel that first writes them: for a cat, this may be that of an operand.
            self.kernel_writes[self._first_writer(node)] += new

    def _add_storages(self, node: Node) -> list[StorageKey]:
        """Add the storages of a node's value to the tables; return the new ones, which no earlier node has."""
        nbytes = {self.key(x): nbytes_of(x) for x in node_tensors(node)}
        new = [key for key in nbytes if key not in self.producer]
        for key in new:
            self.producer[key] = node
            self.sizes[key] = 0 if node.target is TO_HOST else nbytes[key]  # a copy on the host has no device memory
        self.dtypes.update((self.key(x), x.dtype) for x in node_tensors(node))
        return new

    def _first_writer(self, node: Node) -> Node:
        """Return the kernel that first writes a node's storage: for a cat, the first reduction that it reads."""
        if not self.fused or node.target is not CAT:
            return node
        # Inductor writes the operands of a cat directly to its result: a reduction by a kernel of its own, which runs
        # before; elementwise operands are computed by the kernel of the cat.
        operands = {self.producer[key] for x in node.all_input_nodes for key in self.value_reads[x]}
        return next((x for x in self.kernel_writes if x in operands and x.target in REDUCTIONS), node)

    def _reuse_operands(self, node: Node) -> None:
        """Record that the results of waits, in-place collectives and mutations reuse the storages of operands."""
        # Only Inductor (`fused`) runs collectives and mutations in place.
        is_in_place = self.fused and node.target in IN_PLACE_COLLECTIVES and len(node.args[0].users) == 1
        if node.target is WAIT_OP or is_in_place:
            bases: list[Node] = [node.args[0]]
        elif self.fused and node.target in MUTATIONS:
            bases = node.kwargs.get("_all_bases", [])
        else:
            return
        for base, value in zip(bases, node_tensors(node)[-len(bases) :]):  # a mutation returns its bases last
            base_key, key = self.key(node_tensors(base)[0]), storage_of(value)
            # The fake result has a storage of its own, which no earlier node has, although no memory is allocated.
            if key not in self.producer and key != base_key:
                self.reused[key] = base_key

    def _is_inlined(
        self, node: Node, reads: frozenset[StorageKey], is_ignored: Callable[[Node], bool] = lambda user: False
    ) -> bool:
        """Return True if a value has no storage, because all its users recompute it.

        Args:
            node: Node of the value.
            reads: Storages from which the users recompute it.
            is_ignored: Users that do not count.
        """
        if not self.is_fused(node) or node.target in REDUCTIONS:
            return False
        # Inductor stores a value for which readers would have to read many storages.
        if len(reads) > INLINED_ONCE or (len(node.users) > 1 and len(reads) > INLINED_OFTEN):
            return False
        keys = {storage_of(x) for x in node_tensors(node)}

        def is_view(n: Node) -> bool:
            """Return True if a user is a view of the value."""
            shares = n.target is operator.getitem or bool(keys & {storage_of(x) for x in node_tensors(n)})
            return n.op != "output" and shares

        views = iterate_reachable([node], lambda n: [user for user in n.users if is_view(user)])
        readers = (user for n in views for user in n.users if not is_view(user))
        return all(self.is_fused(user) or is_ignored(user) for user in readers)
