"""Model the memory of a running graph: each value lives from its definition to its last use.

Graphs are those of AOTAutograd's partition, with fake tensors. Values that share memory (views, in-place writes) are
one. With fusion, elementwise work has no storage: its readers recompute it. It gets storage only if an unfused op
(product, attention, collective) reads it, at the end of a reduction, or if it reads more storages than Inductor
inlines. A kernel may write over an operand that it reads last.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate

import torch
from torch.fx import Graph, Node

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.errors import PARAMETERS_LINE, TANGENTS_LINE, node_line, stack_trace
from sp_compile.lowering.base.layers import node_layer
from sp_compile.lowering.base.library import INTERNAL_OPS
from sp_compile.lowering.tiles.tile_flops import is_grouped_product, node_flops
from sp_compile.lowering.tiles.tile_program import PROGRAMS, TilePart, TileProgram
from sp_compile.lowering.torch_compat import (
    FakeTensorMode,
    OpOverload,
    inductor_decompositions,
    make_fx,
    size_hint,
    storage_of,
)
from sp_compile.passes.graph.call import WAIT_OPS, is_tangent, node_tensors
from sp_compile.passes.graph.closure import iterate_reachable
from sp_compile.passes.graph.sizes import current_bytes
from sp_compile.passes.sharding.matchers import move_source

from .fused_kernels import FusedEvents, PlaceKey, is_on_gpu, products_in_sums
from .kinds import (
    ARRIVALS,
    ATTENTIONS,
    CAT,
    CONCAT_CALLS,
    FROM_HOST,
    IN_PLACE_COLLECTIVES,
    INLINED_OFTEN,
    INLINED_ONCE,
    MATRIX_PRODUCTS,
    MUTATIONS,
    REDUCTIONS,
    TILE_LOOPS,
    TO_HOST,
    UNFUSED_OPS,
)
from .workspace import conversion_bytes, op_workspace

MAX_WALK_STEPS = 8
"""Maximum steps from a node without a line to one that has one."""


@dataclass(frozen=True)
class LiveValue:
    """Value in memory at a moment."""

    name: str  # name of its node
    where: str  # user's line
    nbytes: int  # bytes of its storage
    origin: str = "value"  # or "saved", "result" ("gradient" in a backward), "workspace" or "reuse" (retained buffer)


@dataclass(frozen=True)
class WalkMoment:
    """Node as it runs, and the bytes of all live values."""

    name: str
    where: str
    nbytes: int
    results: int = 0  # bytes of graph results
    idle: int = 0  # bytes retained for later buffers
    product: bool = False
    layer: str = ""  # path of the layer
    traffic: int = 0  # bytes read and written, except by products
    flops: int = 0  # FLOPs of products, without attention
    attends: bool = False  # True for attention


@dataclass
class LivenessWalk:
    """Liveness of one graph."""

    moments: list[WalkMoment] = field(default_factory=list)
    start: int = 0  # live bytes before the run, without permanent inputs
    end: int = 0  # live bytes after it
    _places: _StoragePlaces | None = None
    _inputs: dict[PlaceKey, LiveValue] = field(default_factory=dict)

    @property
    def traffic(self) -> int:
        """Return the bytes that kernels other than products read and write."""
        return sum(moment.traffic for moment in self.moments)

    @property
    def flops(self) -> int:
        """Return the FLOPs of matrix products, without attention."""
        return sum(moment.flops for moment in self.moments)

    def by_last_layer(self, saved: Iterable[Node]) -> list[tuple[str, LiveValue]]:
        """Return these inputs with the layer that reads each last."""
        assert self._places is not None
        found = {self._places.key(x): one for one in saved for x in node_tensors(one)}
        layers = list(accumulate(self.moments, lambda layer, moment: moment.layer or layer, initial=""))
        return [(layers[self._places.last.get(key, -1) + 1], self._inputs[key]) for key in found]

    def alive(self, moment: int) -> list[LiveValue]:
        """Return the live values at a moment, largest first."""
        assert self._places is not None
        for i, (_, live) in enumerate(self._places.run(self._inputs)):
            if i == moment:
                return sorted(live, key=lambda held: -held.nbytes)
        return []


def nbytes_of(value: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage."""
    return size_hint(value.untyped_storage().nbytes())


def storage_bytes(nodes: Iterable[Node]) -> dict[PlaceKey, int]:
    """Return the storages of the values of nodes, with their bytes."""
    return {storage_of(x): nbytes_of(x) for n in nodes for x in node_tensors(n)}


def is_on_host(node: Node) -> bool:
    """Return True for an input that is in host memory."""
    return bool(node.users) and all(user.target is FROM_HOST for user in node.users)


def walk(graph: Graph, fused: bool, saved: Iterable[Node] = ()) -> LivenessWalk:
    """Simulate a run of a graph.

    Args:
        graph: Graph.
        fused: Model Inductor's fusion.
        saved: Inputs that are freed after their last use.
    """
    places = _StoragePlaces(graph, fused)
    inputs = {
        places.key(x): LiveValue(one.name, _node_line(one), nbytes_of(x), "saved")
        for one in saved
        for x in node_tensors(one)
    }
    found = LivenessWalk(start=sum(value.nbytes for value in inputs.values()), _places=places, _inputs=inputs)
    for node, live in places.run(inputs):
        ran = places.sums.get(node, node)
        total, product = sum(value.nbytes for value in live), is_product(ran)
        results, idle = (sum(value.nbytes for value in live if value.origin == of) for of in ("result", "reuse"))
        traffic = 0 if product else places.traffic(node)
        if node.target in TILE_LOOPS:
            one = _TileLoop.of(node)
            traffic += one.tiles * (one.tile(fused).traffic + 2 * one.sums)
        attends, memory = node.target in ATTENTIONS, (total, results, idle, product)
        flops = 0 if attends else node_flops(ran)
        found.moments.append(
            WalkMoment(node.name, _node_line(node), *memory, node_layer(node), traffic, flops, attends)
        )
    found.end = sum(value.nbytes for value in places.left.values())
    return found


def _node_line(node: Node) -> str:
    """Return the user's line of a node, or else of its first operand."""
    for _ in range(MAX_WALK_STEPS):
        if is_tangent(node):
            return TANGENTS_LINE
        if stack_trace(node) or not node.all_input_nodes:
            break
        if node.target is CAT:
            return PARAMETERS_LINE  # gradients that are added over the ranks together
        node = node.all_input_nodes[0]
    return node_line(node)


def is_product(node: Node) -> bool:
    """Return True for a matrix product or an attention."""
    return node.target in MATRIX_PRODUCTS or node.target in ATTENTIONS or is_grouped_product(node)


@dataclass(frozen=True)
class _TileLoop:
    """Loop over tiles."""

    tiles: int
    part: TilePart
    sums: int  # bytes of accumulators
    wide: int  # bytes of accumulators that are cast at the end
    narrow: int  # bytes of these after the cast
    rows: int  # bytes of a tile's operands that are copied to be contiguous

    @staticmethod
    def of(node: Node) -> _TileLoop:
        """Return the tile loop of a node, with the bytes of its sums and gaps."""
        first, part, kinds = TILE_LOOPS[node.target]
        rows, whole, tiles, name, _ = node.args[first:]
        program: TileProgram = PROGRAMS[name]
        sums = [value for kind in kinds for value in getattr(program, kind) if value.dim is None]
        wide = {value: accumulation_dtype(value.dtype) for value in sums}
        other = [value for value in sums if wide[value] != value.dtype]
        sizes = program.sizes([x.meta["val"] for x in (*rows, *whole)])
        count = {value: math.prod(map(size_hint, value.sizes(sizes))) for value in sums}
        gaps = [
            x for x, dim in zip((n.meta["val"] for n in rows), program.rows) if size_hint(x.shape[:dim].numel()) > 1
        ]
        _, body = max(program.bodies.items())
        return _TileLoop(
            tiles,
            getattr(body, part),
            sum(count[value] * wide[value].itemsize for value in sums),
            sum(count[value] * wide[value].itemsize for value in other),
            sum(count[value] * value.dtype.itemsize for value in other),
            sum(map(current_bytes, gaps)) // tiles,
        )

    def tile(self, fused: bool) -> LivenessWalk:
        """Return the liveness of one tile."""
        return _tile_bytes(self.part, fused)

    def inside(self, fused: bool) -> int:
        """Return the largest number of bytes during the loop, without operands and results."""
        tile = max((moment.nbytes for moment in self.tile(fused).moments), default=0)
        return max(tile + self.rows + self.wide - self.narrow, self.wide)


@cache
def _tile_bytes(part: TilePart, fused: bool) -> LivenessWalk:
    if not fused:
        return walk(part.graph.graph, fused)
    with FakeTensorMode(allow_non_fake_inputs=True):  # the graph may contain constants
        inputs = [
            torch.empty_strided(
                *([size_hint(size) for size in of] for of in (x.shape, x.stride())), dtype=x.dtype, device=x.device
            )
            for x in part.inputs
        ]
        return walk(make_fx(part.graph, inductor_decompositions())(*inputs).graph, fused)


def _workspace_bytes(node: Node, fused: bool) -> int:
    """Return the workspace of an op in bytes."""
    if node.target in TILE_LOOPS:
        return _TileLoop.of(node).inside(fused)
    values = [one.meta.get("val") if isinstance(one, Node) else one for one in node.args]
    operands = [x for x in values if isinstance(x, torch.Tensor)]
    if node.target not in ATTENTIONS:
        tensors = [] if fused else node_tensors(node)
        return conversion_bytes(node.target, operands, tensors[0]) if tensors else 0
    workspace = op_workspace(node.target, operands)
    return INTERNAL_OPS[node.target](workspace, *values) if node.target in INTERNAL_OPS else workspace


def _joined_results(graph: Graph) -> set[Node]:
    """Return values that are only joined into results, such as weight gradients until they are reduced."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.users and all(x.op == "output" or (x in found and _holds_operand(x)) for x in node.users):
            found.add(node)
    return found


def _holds_operand(node: Node) -> bool:
    """Return True if the result contains the operands' elements, or their sums over ranks."""
    if node.target in CONCAT_CALLS or move_source(node) is not None:
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional"


def _copies_operands(node: Node) -> bool:
    """Return True if Inductor copies inlined operands for the op, as it does for required strides."""
    return node.target in ATTENTIONS or getattr(node.target, "namespace", "") == "sp"


class _StoragePlaces(FusedEvents):
    """Storage of each value of a graph."""

    def __init__(self, graph: Graph, fused: bool) -> None:
        super().__init__(fused)
        self.same: dict[PlaceKey, PlaceKey] = {}  # storage -> storage that it reuses
        self.maker: dict[PlaceKey, Node] = {}
        self.inlined: set[PlaceKey] = set()
        self.reads: dict[Node, frozenset[PlaceKey]] = {}  # storages to read for the node's value
        self.copied: dict[
            Node, frozenset[PlaceKey]
        ] = {}  # storages that kernels read instead of a copy for an operator
        self.dtypes: dict[PlaceKey, torch.dtype] = {}
        self.left: dict[PlaceKey, LiveValue] = {}
        self.unaligned: set[PlaceKey] = (
            set()
        )  # as inputs on a CPU, and what operators that run as they are make of such
        self.sums = products_in_sums(graph) if fused else {}
        self.inputs = graph.find_nodes(op="placeholder")
        for node in graph.nodes:
            if node.op != "output":
                self._place(node)
        self.results = {self.key(x) for node in graph.output_node().all_input_nodes for x in node_tensors(node)}
        if fused:
            self.fuse()
        self.last = {key: i for i, node in enumerate(self.written) for key in self.read[node]}
        self.joining = {self.key(x) for node in _joined_results(graph) for x in node_tensors(node)}

    def key(self, value: torch.Tensor) -> PlaceKey:
        """Return the storage key of a tensor."""
        found = storage_of(value)
        while found in self.same:
            found = self.same[found]
        return found

    def run(self, inputs: dict[PlaceKey, LiveValue]) -> Iterator[tuple[Node, list[LiveValue]]]:
        """Yield each event with the live values."""
        events = [(node, dict(live)) for node, live in self._live(inputs)]
        idle = self._idle(inputs, [live for _, live in events]) if self.fused else [[] for _ in events]
        for (node, live), waiting in zip(events, idle, strict=True):
            inside = _workspace_bytes(node, self.fused)
            work = [LiveValue(node.name, _node_line(node), inside, "workspace")] if inside else []
            yield node, [*live.values(), *waiting, *work]

    def _live(self, inputs: dict[PlaceKey, LiveValue]) -> Iterator[tuple[Node, dict[PlaceKey, LiveValue]]]:
        """Yield each event with the live values, without retained buffers."""
        live = {key: value for key, value in inputs.items() if key in self.last or key in self.results}
        self.unaligned = {self.key(x) for node in self.inputs if not is_on_gpu(node) for x in node_tensors(node)}
        for i, (node, written) in enumerate(self.written.items()):
            read = self.read[node] - self.results
            ending = [key for key in reversed(live) if key in read and self.last[key] == i]  # latest definition first
            for key in written:
                value = self._live_bytes(key)
                free = [k for k in ending if k not in self._retained_by(node)] if self.is_fused(node) else []
                over = next((k for k in free if live[k].nbytes == value.nbytes), None)
                if over is not None:  # writes over an operand that it reads last
                    ending.remove(over)
                    del live[over]
                if over in self.unaligned or (self._is_extern_kernel(node) and self.read[node] & self.unaligned):
                    self.unaligned.add(key)
                live[key] = value
            yield node, live
            for key in [*ending, *(key for key in written if key not in self.last and key not in self.results)]:
                del live[key]
        self.left = live

    def _idle(
        self, inputs: dict[PlaceKey, LiveValue], lives: Sequence[dict[PlaceKey, LiveValue]]
    ) -> list[list[LiveValue]]:
        """Return the buffers that Inductor retains for reuse at each event, if that does not raise the peak.

        The peak is that of Inductor, which identifies freeable inputs by name. It queries buffer sizes only when it
        sorts for the peak; here it runs graphs in order (`torch_compat.joint_compiler`), so they have none. Unaligned
        buffers are not reused for aligned ones.
        """
        totals = [0] * len(lives)
        for node in self.inputs:
            keys = [
                (self.key(x), current_bytes(x)) for x in node_tensors(node) if not node.name.startswith(UNFUSED_OPS)
            ]
            for key, nbytes in keys:
                for i in range(len(lives) if key in self.results else self.last.get(key, -1) + 1):
                    totals[i] += nbytes
        most, waiting = max(totals, default=0), [[] for _ in lives]  # type: tuple[int, list[list[LiveValue]]]
        free: dict[tuple[int, torch.dtype], list[tuple[int, LiveValue]]] = defaultdict(list)
        before: dict[PlaceKey, LiveValue] = {}
        for i, (node, live) in enumerate(zip(self.written, lives)):
            for key in [key for key in live if key not in before]:
                kind = live[key].nbytes, self.dtypes[key]
                if not free[kind] or not (self.is_fused(node) or self._is_matrix_product(node)):
                    continue
                since, value = free[kind][-1]
                if since == i or max(totals[since:i]) + value.nbytes <= most:
                    free[kind].pop()
                    for k in range(since, i):
                        totals[k] += value.nbytes
                        waiting[k].append(value)
            after = lives[i + 1] if i + 1 < len(lives) else live
            for key in [key for key in live if key not in after]:
                if live[key].origin != "saved" and key not in self.unaligned:
                    free[live[key].nbytes, self.dtypes[key]].append((i + 1, replace(live[key], origin="reuse")))
            before = live
        return waiting

    def _is_extern_kernel(self, node: Node) -> bool:
        """Return True for a call that Inductor passes to torch without a kernel or buffer of its own."""
        exchanges = isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional"
        return not (self.is_fused(node) or self._is_matrix_product(node) or exchanges)

    def _is_matrix_product(self, node: Node) -> bool:
        return node in self.sums or node.target in MATRIX_PRODUCTS

    def _retained_by(self, node: Node) -> set[PlaceKey]:
        """Return storages that an event does not overwrite although it reads them last.

        Inductor overwrites only inputs that AOTAutograd donates, which were saved for this graph alone.
        """
        return {*self.often.get(node, ()), *(key for key in self.read[node] if is_tangent(self.maker[key]))}

    def _live_bytes(self, key: PlaceKey) -> LiveValue:
        node = self.maker[key]
        returned = key in self.results or key in self.joining
        return LiveValue(node.name, _node_line(node), self.sizes[key], "result" if returned else "value")

    def traffic(self, node: Node) -> int:
        """Return the bytes that an event reads and writes."""
        return sum(self.sizes[key] for key in [*self.read[node], *self.written[node]] if node.target is not WAIT_OPS)

    def _place(self, node: Node) -> None:
        """Record the storage of a node's value, and what its readers read."""
        self._join(node)
        keys = {self.key(x): nbytes_of(x) for x in node_tensors(node)}
        new = [key for key in keys if key not in self.maker]
        self.maker.update(dict.fromkeys(new, node))
        self.sizes.update((key, 0 if node.target is TO_HOST else keys[key]) for key in new)
        self.dtypes.update((self.key(x), x.dtype) for x in node_tensors(node))
        instead = self.copied if self.is_fused(node) else {}
        through = frozenset(key for one in node.all_input_nodes for key in instead.get(one, self.reads[one]))
        if node.op in ("placeholder", "get_attr"):
            self.reads[node] = frozenset(keys)
        elif node.target is WAIT_OPS:  # the operand is alive until the wait
            self.reads[node] = frozenset(keys)
            self.written[node], self.read[node] = [], through | self.read.get(node.args[0], frozenset())
        elif node.target in ARRIVALS:
            self.reads[node], self.written[node], self.read[node] = frozenset(), [], through
        elif not new:  # a view
            self.reads[node] = through if not keys or self.inlined & keys.keys() else frozenset(keys)
            self.copied.update((node, self.copied[one]) for one in node.all_input_nodes if one in self.copied)
        elif node in self.sums.values() or self._is_inlined(node, through):
            self.inlined.update(new)
            self.reads[node] = through
        else:
            self.reads[node] = frozenset(keys)
            self.read[node], self.written[node] = through, []
            if is_on_gpu(node) and self._is_inlined_but_for(node, through, _copies_operands):
                self.copied[node] = through
            self.written[self._writes_first(node)] += new

    def _writes_first(self, node: Node) -> Node:
        """Return the event that first writes a node's storage; for a cat, its first reduction."""
        if not self.fused or node.target is not CAT:
            return node
        of = [self.maker[key] for one in node.all_input_nodes for key in self.reads[one]]
        return next((one for one in self.written if one in of and one.target in REDUCTIONS), node)

    def _join(self, node: Node) -> None:
        """Reuse the storage of operands that are waited for or mutated."""
        before: list[Node] = []
        if node.target is WAIT_OPS or (
            self.fused and node.target in IN_PLACE_COLLECTIVES and len(node.args[0].users) == 1
        ):
            before = [node.args[0]]
        elif self.fused and node.target in MUTATIONS:
            before = node.kwargs.get("_all_bases", [])
        for base, value in zip(before, node_tensors(node)[-len(before) :]):
            old, new = self.key(node_tensors(base)[0]), storage_of(value)
            if new not in self.maker and new != old:
                self.same[new] = old

    def _is_inlined(self, node: Node, reads: frozenset[PlaceKey]) -> bool:
        return self._is_inlined_but_for(node, reads, lambda user: False)

    def _is_inlined_but_for(self, node: Node, reads: frozenset[PlaceKey], passes: Callable[[Node], bool]) -> bool:
        """Return True if the value is inlined into its users, ignoring users for which `passes` is true."""
        if not self.is_fused(node) or node.target in REDUCTIONS:
            return False
        if len(reads) > INLINED_ONCE or (len(node.users) > 1 and len(reads) > INLINED_OFTEN):
            return False
        keys = {storage_of(x) for x in node_tensors(node)}

        def is_view(n: Node) -> bool:
            """Return True if a node returns the same memory as one of its operands."""
            shares = n.target is operator.getitem or bool(keys & {storage_of(x) for x in node_tensors(n)})
            return n.op != "output" and shares

        views = iterate_reachable([node], lambda n: [user for user in n.users if is_view(user)])
        readers = (user for n in views for user in n.users if not is_view(user))
        return all(self.is_fused(user) or passes(user) for user in readers)
