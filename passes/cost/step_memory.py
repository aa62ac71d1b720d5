"""Predict the memory of one rank over a training step: state, saved values, and peaks with their causes.

    state      parameters and buffers, inputs, optimizer state: constant
    forward    values of every graph as it runs, and saved values of earlier graphs
    loss       from the last matrix product of the last forward (the logits) to the first one of its backward
    backward   saved values until they are read; values; gradients as they are computed

The graphs are those of AOTAutograd (`liveness.py`). FSDP is modeled as `fully_shard` of each layer and of the model:
parameters and state are sharded, and in addition there are

    weights     unsharded weights outside of layers from the forward to the end of the backward; those of one layer
                being gathered, except for the last layer in a backward; inside of a layer its own parameters, too
    gradients   as they are computed: outside of layers, of the layer, and of the previous one, which are being
                reduced to shards; and these shards
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace

import torch
from tabulate import tabulate
from torch.fx import Graph, Node

from sp_compile.lowering.base.layers import node_layer
from sp_compile.passes.cost.walk.liveness import LivenessWalk, LiveValue, WalkMoment, is_on_host, storage_bytes, walk
from sp_compile.passes.graph.call import graph_tangents, node_tensors
from sp_compile.passes.graph.sizes import as_sizes, is_same_size, size_product

from .attention_memory import GIB
from .offload_cost import HostValues
from .weight_memory import ADAMW_STATE, ModelBytes

PHASES = ("forward", "loss", "backward")
OTHER_VALUES_ORIGIN = "results, their gradients, and values saved by other graphs"
ALIVE_LINES = 6
"""Lines of a report for values alive at a peak."""
LINE_WIDTH = 56
"""Characters of a table column."""


@dataclass
class GraphStep:
    """Memory of one graph of a program, forward and backward, in bytes."""

    forward: LivenessWalk
    backward: LivenessWalk | None
    inputs: int  # inputs of the program, without the model
    results: int  # results that remain after the forward, without saved values
    saved: int = 0  # saved on the device for the backward, besides parameters and inputs
    tangents: int = 0  # gradients of results, zeros for unused ones
    copied: int = 0  # part of these that is copied to another layout
    offloaded: HostValues | None = None
    hosted: GraphStep | None = None  # same graph with all permitted values on the host, if requested
    saved_bytes: Sequence[tuple[str, LiveValue]] = ()  # by the layer that reads them last, or ""

    @staticmethod
    def of(forward: Graph, backward: Graph | None, fused: bool, inputs: int) -> GraphStep:
        """Run the liveness walk on both graphs.

        Args:
            forward: Forward graph.
            backward: Backward graph, if any.
            fused: Model Inductor's fusion.
            inputs: Bytes of the program's inputs, without the model.
        """
        first = walk(forward, fused)
        if backward is None:
            return GraphStep(first, None, inputs, first.end)
        tangents = graph_tangents(backward)
        values = [n for n in backward.find_nodes(op="placeholder") if n not in tangents]
        read = [n for n in values if n.users]  # others are part of offloaded values
        outputs = forward.output_node().args[0]
        results = [n for n in outputs[: len(outputs) - len(values)] if isinstance(n, Node)]
        # Values that the caller also holds remain after the backward reads them.
        others = storage_bytes([*forward.find_nodes(op="placeholder"), *results]).keys()
        saved = [n for n in read if not is_on_host(n) and others.isdisjoint(storage_bytes([n]))]
        copied = [n for n in tangents if not all(map(_is_row_major, node_tensors(n)))]
        second = walk(backward, fused, [*saved, *tangents])
        of_saved, of_tangents, of_copied = (sum(storage_bytes(nodes).values()) for nodes in (saved, tangents, copied))
        results_of = max(0, first.end - of_saved)
        layers = {n.name: node_layer(n) for n in forward.nodes}
        begins = next((layer for layer in layers.values() if layer), "")
        by_layer = [
            (layer if layers.get(live.name) or layer == begins else "", live)
            for layer, live in second.by_last_layer(saved)
        ]
        return GraphStep(first, second, inputs, results_of, of_saved, of_tangents, of_copied, saved_bytes=by_layer)


def _is_row_major(x: torch.Tensor) -> bool:
    """Return True if the strides are row-major, including dims of size 1."""
    shape = as_sizes(x.shape)
    return all(is_same_size(stride, size_product(shape[d + 1 :])) for d, stride in enumerate(as_sizes(x.stride())))


@dataclass(frozen=True)
class StepMoment:
    """Moment of a step; state is not counted."""

    phase: str  # one of `PHASES`
    moment: WalkMoment
    nbytes: int  # bytes of live values of all graphs
    graph: int  # index of the graph
    index: int  # index of the moment in its walk
    is_after: bool = False  # True in a backward
    gradients: int = 0  # bytes of gradients of parameters
    arriving: bool = True  # True if gathered weights arrive or are present
    whole: int = 0  # unsharded bytes of these gradients


@dataclass
class StepMemory:
    """Memory of one rank over a step."""

    weights: ModelBytes
    per_weight: float = ADAMW_STATE  # bytes of optimizer state per byte of parameters
    graphs: list[GraphStep] = field(default_factory=list)
    shards: int = 1  # ranks that shard parameters, gradients and state; 1 if unknown

    @property
    def optimizer(self) -> int:
        """Return the bytes of the optimizer state."""
        return round(self.per_weight * self.weights.trainable)

    @property
    def inputs(self) -> int:
        """Return the bytes of the unsharded inputs."""
        return max((graph.inputs for graph in self.graphs), default=0)

    @property
    def saved(self) -> int:
        """Return the bytes saved for the backward."""
        return sum(graph.saved for graph in self.graphs)

    @property
    def offloaded(self) -> HostValues | None:
        """Return the offloaded values, or None if offloading was not requested."""
        found = [graph.offloaded for graph in self.graphs if graph.offloaded is not None]
        return HostValues(*map(sum, zip(*map(astuple, found)))) if found else None

    @property
    def state(self) -> int:
        """Return the constant bytes, without gradients."""
        return self.weights.parameters + self.weights.buffers + self.optimizer + self.inputs

    @property
    def constant(self) -> int:
        """Return the constant bytes with the program's sharding of state."""
        return self.state if self.shards == 1 else self.sharded_state(self.shards)

    def peak_with(self, point: StepMoment) -> int:
        """Return the bytes at a moment in addition to `constant`."""
        return point.nbytes if self.shards == 1 else self.sharded_bytes(point, self.shards)

    def sharded_bytes(self, point: StepMoment, n: int) -> int:
        """Return the bytes of values and unsharded gradients and weights if n ranks shard these by layer."""
        weights = self.weights.unsharded_bytes(bool(point.moment.layer), point.arriving)
        return point.nbytes - point.gradients + weights + self.weights.gradients(point.gradients, n, point.whole)

    def points(self) -> Iterator[StepMoment]:
        """Yield the moments of the forward of each graph, then of the backwards in reverse order."""
        live = 0
        last = len(self.graphs) - 1
        for g, graph in enumerate(self.graphs):
            begins = _last_product(graph.forward.moments) if g == last and graph.backward is not None else None
            for i, moment in enumerate(graph.forward.moments):
                phase = "forward" if begins is None or i < begins else "loss"
                yield StepMoment(phase, moment, live + moment.nbytes, g, i)
            live += graph.saved + graph.results
        ended = 0
        for g, graph in reversed(list(enumerate(self.graphs))):
            if graph.backward is None:
                continue
            live -= graph.saved
            if g < last:  # computed by the backward of a later graph
                live -= min(ended, graph.tangents)
            ends = next((i for i, m in enumerate(graph.backward.moments) if m.product), 0) if g == last else 0
            arrived = 0 if not self.weights.unit else _last_layer_start(graph.backward.moments) if g == 0 else None
            gradients = _unsharded_bytes(graph.backward.moments, self.weights.unit)
            for i, moment in enumerate(graph.backward.moments):
                phase = "loss" if i < ends else "backward"
                nbytes = live + (graph.copied if i == 0 else 0) + moment.nbytes
                arriving = arrived is None or i < arrived
                yield StepMoment(phase, moment, nbytes, g, i, True, moment.results, arriving, gradients[i])
            ended = graph.backward.end
            live += ended

    def peaks(self) -> dict[str, StepMoment]:
        """Return the largest moment of each phase."""
        found: dict[str, StepMoment] = {}
        for point in self.points():
            if point.phase not in found or self.peak_with(point) > self.peak_with(found[point.phase]):
                found[point.phase] = point
        return {phase: found[phase] for phase in PHASES if phase in found}

    def alive(self, point: StepMoment) -> list[LiveValue]:
        """Return the live values of the running graph; values of callers and other graphs are one entry."""
        graph = self.graphs[point.graph]
        run = graph.backward if point.is_after and graph.backward is not None else graph.forward
        others = point.nbytes - point.moment.nbytes
        found = run.alive(point.index)
        if point.is_after:
            found = [replace(live, origin="gradient") if live.origin == "result" else live for live in found]
        return [*found, LiveValue("results", OTHER_VALUES_ORIGIN, others, "result")] if others > 0 else found

    @property
    def values(self) -> int:
        """Return the bytes of values and gradients at the peak."""
        return max((point.nbytes for point in self.points()), default=0)

    @property
    def peak_without_gradients(self) -> int:
        """Return the peak bytes without gradients of parameters."""
        return max((point.nbytes - point.gradients for point in self.points()), default=0)

    @property
    def peak(self) -> int:
        """Return the peak bytes of the step or of the optimizer with unsharded gradients."""
        return self.state + max(self.values, self.weights.trainable)

    def fsdp(self, n: int) -> int:
        """Return the peak bytes if n ranks shard parameters, gradients and state by layer."""
        return self.sharded_peak(max((self.sharded_bytes(point, n) for point in self.points()), default=0), n)

    def sharded_peak(self, peak: int, n: int) -> int:
        """Return the peak bytes if n ranks shard the state: of the optimizer, or of a step with `peak` other bytes."""
        return self.sharded_state(n) + max(peak, -(-self.weights.trainable // n))

    def sharded_state(self, n: int) -> int:
        """Return the constant bytes if n ranks shard parameters and state by layer."""
        return self.weights.shard_bytes(n, self.per_weight) + self.weights.buffers + self.inputs

    def text(self, n: int) -> str:
        """Format a report.

        Args:
            n: Ranks over which FSDP would shard the state.
        """
        w = self.weights
        state = {"parameters": w.parameters, "gradients": w.trainable, "optimizer": self.optimizer}
        state |= {"buffers": w.buffers, "inputs": self.inputs, "saved for the backward": self.saved}
        lines = [", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in state.items() if nbytes)]
        if (sent := self.offloaded) is not None:
            saved = format_bytes(sent.nbytes + sent.kept)
            amount = f"of {saved} saved, {format_bytes(sent.nbytes)} are copied to the host"
            timing = f"copies of {sent.seconds:.3g} s each way, {sent.waits:.3g} s of them not overlapped"
            lines.append(f"offload: {amount} ({sent.values} values); {timing}")
        rows: list[tuple[str, ...]] = []
        for phase, point in self.peaks().items():
            live = self.peak_with(point)
            total = format_bytes(self.constant + live)
            rows.append((phase, total, format_bytes(live), point.moment.name, shorten_line(point.moment.where)))
        lines.append(tabulate(rows, headers=("peak of", "total", "values", "at node", "line"), disable_numparse=True))
        if self.graphs:
            top = max(self.peaks().values(), key=self.peak_with)
            rows = [
                (format_bytes(nbytes), origin, times, shorten_line(where))
                for origin, where, nbytes, times in self.summary(top)
            ]
            lines.append(f"alive at the peak of {top.phase}:\n" + tabulate(rows, tablefmt="plain"))
        if self.shards > 1:
            peak = format_bytes(self.fsdp(self.shards))
            lines.append(f"peak of a rank {peak}, with sharded parameters, gradients and optimizer")
        else:
            lines.append(
                f"peak of a rank {format_bytes(self.peak)}; with FSDP over {n} ranks {format_bytes(self.fsdp(n))}"
            )
        return "\n".join(lines)

    def summary(self, point: StepMoment, limit: int = ALIVE_LINES) -> list[tuple[str, str, int, str]]:
        """Return (origin, user's line, bytes, number of values) of live values by line, largest first."""
        total: Counter[tuple[str, str]] = Counter()
        count: Counter[tuple[str, str]] = Counter()
        for live in self.alive(point):
            total[live.origin, live.where] += live.nbytes
            count[live.origin, live.where] += live.nbytes > 0
        found = [
            (*key, nbytes, f"{count[key]} values" if count[key] > 1 else "") for key, nbytes in total.most_common()
        ]
        rest = sum(nbytes for _, _, nbytes, _ in found[limit:])
        return found[:limit] + ([("others", "", rest, f"{len(found) - limit} lines")] if rest else [])


def _last_product(moments: Sequence[WalkMoment]) -> int | None:
    return next((i for i in reversed(range(len(moments))) if moments[i].product), None)


def _last_layer_start(moments: Sequence[WalkMoment]) -> int:
    """Return the first moment after which no other layer runs."""
    layers = [moment.layer for moment in moments]
    last = next(filter(None, reversed(layers)), "")
    others = [i for i, layer in enumerate(layers) if layer not in ("", last)]
    return layers.index(last, others[-1] if others else 0) if last else 0


def _unsharded_bytes(moments: Sequence[WalkMoment], unit: int) -> list[int]:
    """Return the unsharded gradients of a backward at each moment: outside of layers, current and previous layer."""
    found, grad_bytes, begin, apart, before = list[int](), 0, ("", ""), 0, 0
    for moment in moments:
        if moment.layer and (moment.layer != begin[0] or begin == (moment.layer, moment.name)):
            apart, before = (apart if begin[0] else grad_bytes), grad_bytes
            begin = moment.layer, moment.name
        found.append(apart + min(unit, before - apart) + moment.results - before)
        grad_bytes = moment.results
    return found


def shorten_line(where: str) -> str:
    """Shorten a line to the width of a table column."""
    return where if len(where) <= LINE_WIDTH else where[: LINE_WIDTH - 3] + "..."


def format_bytes(nbytes: float) -> str:
    """Format bytes with a binary unit."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
