"""Predict the memory of a rank over a training step: state, saved values, and peaks with their causes.

    state      parameters and buffers, inputs, optimizer state: constant
    forward    values of every graph as it runs, and saved values of earlier graphs
    loss       from the last matrix product of the last forward (the logits) to the first one of its backward
    backward   saved values until they are read; values; gradients as they are computed

A moment is the run of one kernel of a graph. Saved values are computed in a forward and read by its backward; tangents
are the gradients of results, inputs of a backward.

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
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch.fx import Graph, Node

from sp_compile.lowering.base.layers import node_layer
from sp_compile.passes.cost.walk.live_values import LiveValue, WalkMoment, is_on_host, storage_bytes
from sp_compile.passes.cost.walk.liveness import LivenessWalk, walk
from sp_compile.passes.graph.call import graph_tangents, node_tensors
from sp_compile.passes.graph.node_info import is_on_shards
from sp_compile.passes.graph.sizes import as_sizes, is_same_size, size_product

from .attention_memory import GIB
from .weight_memory import ADAMW_STATE, ModelBytes

PHASES = ("forward", "loss", "backward")
OTHER_VALUES_ORIGIN = "results, their gradients, and values saved by other graphs"
ALIVE_LINES = 6  # lines of a report for values alive at a peak
# minimum size of an offloaded value as a fraction of all saved bytes: smaller copies cost more than they free
MIN_OFFLOAD_BYTES = 1e-3
LINE_WIDTH = 56  # characters of a table column


@dataclass(frozen=True)
class HostValues:
    """Values of a graph or a step that are copied to the host in the forward and back in the backward."""

    values: int = 0  # number of values
    nbytes: int = 0  # bytes of these
    kept: int = 0  # bytes that remain on the device
    seconds: float = 0.0  # seconds of copies, each way
    waits: float = 0.0  # seconds that compute waits for copies, both ways


@dataclass
class GraphStep:
    """Memory of one graph of a program, forward and backward, in bytes."""

    forward: LivenessWalk  # live bytes at each kernel
    backward: LivenessWalk | None  # None without gradients
    inputs: int  # inputs of the program, without the model
    results: int  # results that remain after the forward, without saved values
    saved: int = 0  # saved on the device for the backward, besides parameters and inputs
    tangents: int = 0  # gradients of results, zeros for unused ones
    copied: int = 0  # part of `tangents` that is copied to row-major strides
    offloaded: HostValues | None = None  # values on the host; None if offloading is off
    hosted: GraphStep | None = None  # same graph with all permitted values on the host, if requested
    sharded: int = 0  # part of `saved` in values that are shards
    saved_bytes: Sequence[tuple[str, LiveValue]] = ()  # (layer that reads it last in the backward or "", saved value)

    @staticmethod
    def of(forward: Graph, backward: Graph | None, fused: bool, inputs: int) -> GraphStep:
        """Return the memory of a graph's forward and backward, from a walk over the live values of both.

        Args:
            forward: Forward graph.
            backward: Backward graph, if any.
            fused: Model Inductor's fusion.
            inputs: Bytes of the program's inputs, without the model.
        """
        forward_walk = walk(forward, fused)
        if backward is None:
            return GraphStep(forward_walk, None, inputs, forward_walk.end)
        # The forward returns (*results, *saved values); the backward has the inputs (*saved values, *tangents).
        tangents = graph_tangents(backward)
        saved_inputs = [n for n in backward.find_nodes(op="placeholder") if n not in tangents]
        outputs = forward.output_node().args[0]
        results = [n for n in outputs[: len(outputs) - len(saved_inputs)] if isinstance(n, Node)]
        # Not counted as saved: values that the caller has, too, so that they remain; and offloaded ones, which have no
        # users or are copied from the host.
        callers = storage_bytes([*forward.find_nodes(op="placeholder"), *results]).keys()
        saved = [n for n in saved_inputs if n.users and not is_on_host(n) and callers.isdisjoint(storage_bytes([n]))]
        copied = [n for n in tangents if not all(map(_is_row_major, node_tensors(n)))]
        backward_walk = walk(backward, fused, [*saved, *tangents])
        saved_sum, tangents_sum, copied_sum = (sum(storage_bytes(x).values()) for x in (saved, tangents, copied))
        # A saved value belongs to the layer that reads it last in the backward. A value that was computed outside of
        # layers, such as positions, which all layers read, belongs to none (""). But if the first layer reads it last,
        # it is the input of this layer (the embedding), and belongs to it.
        layers = {n.name: node_layer(n) for n in forward.nodes}
        first_layer = next(filter(None, layers.values()), "")
        shards = {n.name for n in forward.nodes if is_on_shards(n)}
        saved_bytes = [
            (
                layer if layers.get(value.name) or layer == first_layer else "",
                replace(value, is_shard=value.name in shards),
            )
            for layer, value in backward_walk.by_last_layer(saved)
        ]
        return GraphStep(
            forward_walk,
            backward_walk,
            inputs,
            results=max(0, forward_walk.end - saved_sum),  # what the forward leaves in memory, except for saved values
            saved=saved_sum,
            tangents=tangents_sum,
            copied=copied_sum,
            sharded=sum(value.nbytes for _, value in saved_bytes if value.is_shard),
            saved_bytes=saved_bytes,
        )


def _is_row_major(x: torch.Tensor) -> bool:
    """Return True if the strides are row-major, also those of dims of size 1: such a tangent is not copied."""
    shape = as_sizes(x.shape)
    return all(is_same_size(stride, size_product(shape[d + 1 :])) for d, stride in enumerate(as_sizes(x.stride())))


class LiveSummary(NamedTuple):
    """Live values of one line of the user's code."""

    origin: str  # as in `LiveValue`, or "others"
    where: str  # user's line
    nbytes: int  # their sum
    count_text: str  # text of the number of values, "" for one


@dataclass(frozen=True)
class StepMoment:
    """Memory while one node of a step runs, without the constant state."""

    phase: str  # one of `PHASES`
    moment: WalkMoment  # the kernel, with the bytes of its graph
    nbytes: int  # bytes of live values of all graphs
    graph: int  # index of the graph
    index: int  # index of the moment in its walk
    in_backward: bool = False  # True in a backward
    gradients: int = 0  # bytes of all gradients of parameters computed so far
    arriving: bool = True  # True if FSDP is gathering the weights of the next layer
    unsharded: int = 0  # bytes of those gradients that FSDP has not yet reduced to shards


@dataclass
class StepMemory:
    """Memory of one rank over a step."""

    weights: ModelBytes  # bytes of the model
    per_weight: float = ADAMW_STATE  # bytes of optimizer state per byte of parameters
    graphs: list[GraphStep] = field(default_factory=list)  # graphs of the program in the order in which they run
    shards: int = 1  # ranks that shard parameters, gradients and state; 1 if unknown

    @property
    def optimizer(self) -> int:
        """Return the bytes of the optimizer state."""
        return round(self.per_weight * self.weights.trainable)

    @property
    def inputs(self) -> int:
        """Return the bytes of the program's inputs, which are not sharded: those of the graph with the most."""
        return max((graph.inputs for graph in self.graphs), default=0)

    @property
    def saved(self) -> int:
        """Return the bytes that all graphs save on the device for the backward."""
        return sum(graph.saved for graph in self.graphs)

    def saved_share(self, n: int) -> float | None:
        """Return the share of the saved bytes of a model that n ranks have in shards; None if nothing is saved.

        Each rank has an n-th of the bytes of values in shards, and all bytes of others.
        """
        sharded = n * sum(graph.sharded for graph in self.graphs)
        full = self.saved - sharded // n
        return sharded / (sharded + full) if self.saved else None

    @property
    def offloaded(self) -> HostValues | None:
        """Return the sum of the offloaded values of all graphs; None if offloading was not requested."""
        by_graph = [astuple(graph.offloaded) for graph in self.graphs if graph.offloaded is not None]
        return HostValues(*map(sum, zip(*by_graph))) if by_graph else None

    @property
    def state(self) -> int:
        """Return the constant bytes of unsharded state: parameters, buffers, optimizer state and inputs."""
        return self.sharded_state(1)

    @property
    def constant(self) -> int:
        """Return the bytes of the state throughout the step, sharded over `shards` ranks."""
        return self.sharded_state(self.shards)

    def bytes_at(self, point: StepMoment) -> int:
        """Return the bytes of a rank at a moment in addition to `constant`, with state sharded over `shards` ranks."""
        return point.nbytes if self.shards == 1 else self.sharded_bytes(point, self.shards)

    def sharded_bytes(self, point: StepMoment, n: int) -> int:
        """Return the bytes at a moment besides sharded state, if n ranks shard the state by layer (FSDP).

        They are values, gathered weights, unsharded gradients, and shards of gradients.
        """
        weights = self.weights.unsharded_bytes(bool(point.moment.layer), point.arriving)
        return point.nbytes - point.gradients + weights + self.weights.gradients(point.gradients, n, point.unsharded)

    def points(self) -> Iterator[StepMoment]:
        """Yield the moments (runs of one kernel) of the forward of each graph, then of the backwards in reverse order.

        The phase "loss" is from the last matrix product of the last forward to the first one of its backward.
        """
        yield from self._forward_points()
        yield from self._backward_points()

    def _forward_points(self) -> Iterator[StepMoment]:
        """Yield the moments of the forward of each graph."""
        other_bytes = 0  # bytes that earlier graphs have left: saved values and results
        for g, graph in enumerate(self.graphs):
            moments = graph.forward.moments
            has_loss = g == len(self.graphs) - 1 and graph.backward is not None
            products = [i for i, moment in enumerate(moments) if moment.product] if has_loss else []
            loss_start = products[-1] if products else len(moments)  # the last product computes the logits
            for i, moment in enumerate(moments):
                yield StepMoment("forward" if i < loss_start else "loss", moment, other_bytes + moment.nbytes, g, i)
            other_bytes += graph.saved + graph.results

    def _backward_points(self) -> Iterator[StepMoment]:
        """Yield the moments of the backward of each graph, the last graph first."""
        # Bytes that the forwards, and the backwards so far, have left.
        other_bytes = sum(graph.saved + graph.results for graph in self.graphs)
        later_gradients = 0  # bytes that the backward of the next graph has left, among them tangents of this one
        for g, graph in reversed(list(enumerate(self.graphs))):
            if graph.backward is None:
                continue
            moments = graph.backward.moments
            # `moment.nbytes` includes the saved values and tangents of this graph, so they are no longer other bytes.
            # Of the tangents, `other_bytes` has only those that the next graph's backward has computed. The others,
            # of results that no later graph reads, are zeros.
            computed_tangents = min(later_gradients, graph.tangents)
            other_bytes -= graph.saved + computed_tangents
            has_loss = g == len(self.graphs) - 1
            loss_end = next((i for i, moment in enumerate(moments) if moment.product), 0) if has_loss else 0
            # While a layer runs, FSDP gathers the weights of the next one (`arriving`), but none in the last layer of
            # the step, which is in the first graph. `weights.unit` are the bytes of the largest layer.
            if not self.weights.unit:  # no layers
                gather_end = 0
            else:
                gather_end = _last_layer_start(moments) if g == 0 else len(moments)
            unsharded = _unsharded_bytes(moments, self.weights.unit)  # of gradients, at each moment
            for i, moment in enumerate(moments):
                phase = "loss" if i < loss_end else "backward"
                copied = graph.copied if i == 0 else 0  # tangents are copied to row-major strides before it starts
                yield StepMoment(
                    phase,
                    moment,
                    other_bytes + copied + moment.nbytes,
                    g,
                    i,
                    in_backward=True,
                    gradients=moment.results,
                    arriving=i < gather_end,
                    unsharded=unsharded[i],
                )
            later_gradients = graph.backward.end
            other_bytes += later_gradients

    def peaks(self) -> dict[str, StepMoment]:
        """Return the moment with the most bytes of each phase, for reports."""
        points = list(self.points())
        by_phase = {phase: [point for point in points if point.phase == phase] for phase in PHASES}
        return {phase: max(moments, key=self.bytes_at) for phase, moments in by_phase.items() if moments}

    def alive(self, point: StepMoment) -> list[LiveValue]:
        """Return the live values of the running graph at a moment, and one entry for all other graphs."""
        graph = self.graphs[point.graph]
        graph_walk = graph.backward if point.in_backward and graph.backward is not None else graph.forward
        values = graph_walk.alive(point.index)
        if point.in_backward:  # the results of a backward are gradients
            values = [replace(live, origin="gradient") if live.origin == "result" else live for live in values]
        other_bytes = point.nbytes - point.moment.nbytes
        if other_bytes > 0:
            values.append(LiveValue("results", OTHER_VALUES_ORIGIN, other_bytes, "result"))
        return values

    @property
    def values(self) -> int:
        """Return the bytes of values and gradients at the peak of the step, without state."""
        return max((point.nbytes for point in self.points()), default=0)

    @property
    def peak_without_gradients(self) -> int:
        """Return the bytes of values at the peak of the step, without state and gradients of parameters."""
        return max((point.nbytes - point.gradients for point in self.points()), default=0)

    @property
    def peak(self) -> int:
        """Return the peak bytes of the step with its optimizer, without sharding.

        The optimizer runs with all gradients, when the values are freed.
        """
        return self.sharded_peak(self.values, 1)

    def fsdp(self, n: int) -> int:
        """Return the peak bytes if n ranks shard parameters, gradients and state by layer."""
        return self.sharded_peak(max((self.sharded_bytes(point, n) for point in self.points()), default=0), n)

    def sharded_peak(self, forward_backward: int, n: int) -> int:
        """Return the peak bytes if n ranks shard the state: that of forward and backward, or of the optimizer's step.

        During the optimizer's step a rank has its shards of the gradients, and no values.

        Args:
            forward_backward: Largest `sharded_bytes` of a moment of forward and backward.
            n: Number of ranks.
        """
        gradient_shards = -(-self.weights.trainable // n)  # rounded up
        return self.sharded_state(n) + max(forward_backward, gradient_shards)

    def sharded_state(self, n: int) -> int:
        """Return the constant bytes if n ranks shard parameters and state by layer."""
        return self.weights.shard_bytes(n, self.per_weight) + self.weights.buffers + self.inputs

    def text(self, n: int) -> str:
        """Format the memory of the step as a part of a report.

        Args:
            n: Ranks over which FSDP would shard the state.
        """
        weights = self.weights
        state = {"parameters": weights.parameters, "gradients": weights.trainable, "optimizer": self.optimizer}
        state |= {"buffers": weights.buffers, "inputs": self.inputs, "saved for the backward": self.saved}
        lines = [", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in state.items() if nbytes)]
        offloaded = self.offloaded
        if offloaded is not None:
            saved = format_bytes(offloaded.nbytes + offloaded.kept)
            amount = f"of {saved} saved, {format_bytes(offloaded.nbytes)} are copied to the host"
            timing = f"copies of {offloaded.seconds:.3g} s each way, {offloaded.waits:.3g} s of them not overlapped"
            lines.append(f"offload: {amount} ({offloaded.values} values); {timing}")
        peaks, rows = self.peaks(), list[tuple[str, ...]]()
        for phase, point in peaks.items():
            live = self.bytes_at(point)
            total = format_bytes(self.constant + live)
            rows.append((phase, total, format_bytes(live), point.moment.name, shorten_line(point.moment.where)))
        lines.append(tabulate(rows, headers=("peak of", "total", "values", "at node", "line"), disable_numparse=True))
        if peaks:
            top = max(peaks.values(), key=self.bytes_at)
            rows = [(format_bytes(x.nbytes), x.origin, x.count_text, shorten_line(x.where)) for x in self.summary(top)]
            lines.append(f"alive at the peak of {top.phase}:\n" + tabulate(rows, tablefmt="plain"))
        fsdp = format_bytes(self.fsdp(self.shards if self.shards > 1 else n))
        if self.shards > 1:
            lines.append(f"peak of a rank {fsdp}, with sharded parameters, gradients and optimizer")
        else:
            lines.append(f"peak of a rank {format_bytes(self.peak)}; with FSDP over {n} ranks {fsdp}")
        return "\n".join(lines)

    def summary(self, point: StepMoment, limit: int = ALIVE_LINES) -> list[LiveSummary]:
        """Return the live values at a moment, merged by origin and line, largest first.

        Entries after the first `limit` are merged to one.
        """
        total: Counter[tuple[str, str]] = Counter()
        count: Counter[tuple[str, str]] = Counter()
        for live in self.alive(point):
            total[live.origin, live.where] += live.nbytes
            count[live.origin, live.where] += live.nbytes > 0  # values that are not empty
        texts = {key: f"{n} values" if n > 1 else "" for key, n in count.items()}
        lines = [LiveSummary(*key, nbytes, texts[key]) for key, nbytes in total.most_common()]
        other_bytes = sum(line.nbytes for line in lines[limit:])
        if not other_bytes:
            return lines[:limit]
        return [*lines[:limit], LiveSummary("others", "", other_bytes, f"{len(lines) - limit} lines")]


def _last_layer_start(moments: Sequence[WalkMoment]) -> int:
    """Return the index of the moment at which the last layer to run starts; 0 without layers.

    For the layers 1, "", 1, 0, "", 0 (by moment; "" outside of layers), it is 3: the first moment of layer 0 after the
    last one of another layer.
    """
    layers = [moment.layer for moment in moments]
    last = next(filter(None, reversed(layers)), "")
    if not last:
        return 0
    other_layers = [i for i, layer in enumerate(layers) if layer not in ("", last)]  # moments of other layers
    return layers.index(last, other_layers[-1] if other_layers else 0)


def _unsharded_bytes(moments: Sequence[WalkMoment], largest_layer: int) -> list[int]:
    """Return the bytes of unsharded gradients at each moment of a backward.

    FSDP reduces the gradients of a layer after the backward of the next one, so these are the gradients outside of
    layers, of the current layer, and of the previous one. `moment.results` are the bytes of all gradients computed so
    far. If a traced layer represents several equal ones, its moments are repeated: a layer starts where the path
    changes, or where the first node of the path occurs again. Example: 2 bytes outside of layers and 10 in each; in the
    third layer, after 4 of its bytes, 2 + 10 + 4 are unsharded.

    Args:
        moments: The moments of the backward, in order.
        largest_layer: Bytes of the largest layer.
    """
    unsharded: list[int] = []
    current_layer, start_name = "", ""  # path of the current layer, and name of the node at its first moment
    outside_layers = 0  # bytes of all gradients computed before the first layer
    at_layer_start = 0  # those before the current layer
    so_far = 0  # those before this moment
    for moment in moments:
        if moment.layer and (moment.layer != current_layer or moment.name == start_name):
            if not current_layer:  # the first layer starts
                outside_layers = so_far
            at_layer_start, current_layer, start_name = so_far, moment.layer, moment.name
        previous_layer = min(largest_layer, at_layer_start - outside_layers)
        unsharded.append(outside_layers + previous_layer + moment.results - at_layer_start)
        so_far = moment.results
    return unsharded


def shorten_line(line: str) -> str:
    """Shorten a line to the width of a table column."""
    return line if len(line) <= LINE_WIDTH else line[: LINE_WIDTH - 3] + "..."


def format_bytes(nbytes: float) -> str:
    """Format bytes with a binary unit."""
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
