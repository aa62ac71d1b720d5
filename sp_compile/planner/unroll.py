"""Extend the step of a program with a few layers to a model with all layers.

The memory of a layer while it runs is the same for each layer that it represents. The values that it saves for its
backward, and its gradients, add up. So the moments of a layer are repeated for each represented layer, in the model's
order, each in addition to the values of earlier ones. Example: layers 0, 1, and 2, of another kind, for eight layers:

    forward   ... 0 1 1 2 1 1 1 2 ...    saved bytes increase with every layer
    backward  ... 2 1 1 1 2 1 1 0 ...    saved bytes decrease, gradients increase

The program has a few layers, the model all of them. A walk lists the moments of a graph: one for each kernel, with the
bytes of live values. The representative of a layer of the model is the equal layer of the program. The model has its
layers in the order 0 1 1 2 1 1 1 2 in the example: each entry is the index of a representative.

Offloadable values go to the host in the order of `OffloadValues`: the largest product of bytes and the number of layers
that run until they are read. Copies are assumed to end before the next layer does, which holds if offload is efficient.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import NamedTuple

from sp_compile.passes.cost.machine import Machine, copy_seconds
from sp_compile.passes.cost.step_memory import MIN_OFFLOAD_BYTES, GraphStep, HostValues
from sp_compile.passes.cost.walk.live_values import LiveValue
from sp_compile.passes.cost.walk.liveness import LivenessWalk

# The values on the host: (path of a representative, name of a value that it saves) -> number of the layers that it
# represents, from the first one of the model, that offload this value.
OffloadCounts = Counter[tuple[str, str]]


@dataclass(frozen=True)
class _RepeatedLayer:
    """A layer of the program, which represents equal layers of the model."""

    path: str  # as in `node_layer`
    saved: Sequence[LiveValue]  # values that each represented layer saves for its backward
    can_offload: frozenset[str]  # names of the offloadable ones
    gradients: int = 0  # bytes of its gradients


@dataclass
class _Unrolled(LivenessWalk):
    """The walk of a graph with all layers, in which moments of the program are repeated."""

    walk: LivenessWalk = field(default_factory=LivenessWalk)  # of the program
    sources: list[int] = field(default_factory=list)  # for each moment its index in `walk`
    # for each moment a function that returns the values that are alive in addition to those of `walk`
    extra_values: list[Callable[[], list[LiveValue]]] = field(default_factory=list)

    def alive(self, moment: int) -> list[LiveValue]:
        """Return the values that are alive at a moment, the largest first."""
        values = [*self.walk.alive(self.sources[moment]), *self.extra_values[moment]()]
        return sorted(values, key=lambda value: -value.nbytes)


class _OffloadPiece(NamedTuple):
    """A saved value of one layer of the model that may be offloaded to the host."""

    key: tuple[str, str]  # path of the representative, name of the value
    nbytes: int  # bytes of the value
    idle_layers: int  # number of layers that run until the backward reads it


@dataclass(frozen=True)
class Unroll:
    """Data from which the step of one graph with all layers is computed, for any share of saved values on the host."""

    graph: GraphStep  # the step of the program with a few layers
    layers: tuple[_RepeatedLayer, ...]  # layers of the program, in execution order
    order: tuple[int, ...]  # all layers, each by the index of its representative
    machine: Machine  # for the seconds of copies
    outside_layers: int  # bytes of saved values that are not of a layer

    @staticmethod
    def of(graph: GraphStep, order: Sequence[str], machine: Machine) -> Unroll:
        """Return the data from which `step` computes the step of a graph with all layers.

        Args:
            graph: The step of the program with a few layers.
            order: The path of the representative of each layer of the model, in execution order, from `FewLayers`. A
                layer of the program that is not in it, such as one of another list of layers, represents itself only.
            machine: The constants of the device.
        """
        paths = [path for path, _ in _layer_starts(graph.forward)]
        gradients: dict[str, int] = {}  # path -> bytes of the gradients of its parameters
        if graph.backward is not None:
            ranges = _split_walk(graph.backward, paths)
            gradients = {path: _gradient_bytes(graph.backward, moments) for path, moments in ranges.items()}
        # `graph.hosted` is the step with all offloadable values on the host. What it still saves on the device cannot
        # be offloaded; if it is None, nothing can.
        remaining = {value.name for _, value in (graph.hosted or graph).saved_bytes}
        layers = list[_RepeatedLayer]()
        for path in paths:
            saved = [value for layer, value in graph.saved_bytes if layer == path]
            can_offload = frozenset(value.name for value in saved) - remaining
            layers.append(_RepeatedLayer(path, saved, can_offload, gradients.get(path, 0)))
        outside_layers = graph.saved - sum(_total_bytes(layer.saved) for layer in layers)
        # The order of all layers: those before the repeated ones, the repeated ones, those after.
        repeated = [path for path in order if path in paths]
        num_before = min(map(paths.index, repeated), default=len(paths))
        others = [path for path in paths if path not in repeated]
        all_layers = [*others[:num_before], *repeated, *others[num_before:]]
        return Unroll(graph, tuple(layers), tuple(map(paths.index, all_layers)), machine, outside_layers)

    @cached_property
    def saved_bytes(self) -> int:
        """Return the bytes of all saved values, with nothing on the host."""
        return self.outside_layers + sum(_total_bytes(self.layers[i].saved) for i in self.order)

    @cached_property
    def offload_pieces(self) -> list[_OffloadPiece]:
        """Return the offloadable values of all layers of the model, in the order in which they are offloaded.

        Values with the largest product of bytes and idle time are first. Small values are not worth a copy.
        """
        min_bytes = MIN_OFFLOAD_BYTES * self.saved_bytes  # MIN_OFFLOAD_BYTES is a share of all saved bytes
        pieces: list[_OffloadPiece] = []
        for position, i in enumerate(self.order):
            layer = self.layers[i]
            idle_layers = len(self.order) - position  # the later a layer runs, the earlier its backward
            for value in layer.saved:
                if value.name in layer.can_offload and value.nbytes > min_bytes:
                    pieces.append(_OffloadPiece((layer.path, value.name), value.nbytes, idle_layers))
        return sorted(pieces, key=lambda piece: -piece.nbytes * piece.idle_layers)

    def share(self, max_share: float) -> OffloadCounts:
        """Return the values to offload so that their bytes are at most this share of all saved bytes."""
        counts, remaining_bytes = OffloadCounts(), max_share * self.saved_bytes
        for piece in self.offload_pieces:
            if piece.nbytes <= remaining_bytes:
                counts[piece.key] += 1
                remaining_bytes -= piece.nbytes
        return counts

    def min_offload(self, can_fit: Callable[[GraphStep], bool]) -> OffloadCounts:
        """Return the values to offload so that the step just fits; all offloadable values if it never fits.

        The values are offloaded in order until the step fits. The last one of them is then replaced by the smallest
        value that is sufficient in its place.

        Args:
            can_fit: Returns True if a step fits in memory.
        """
        keys = [piece.key for piece in self.offload_pieces]
        # The least number of values with which the step fits.
        count = bisect_left(range(len(keys)), True, key=lambda n: can_fit(self.step(OffloadCounts(keys[:n]))))
        if count == 0:
            return OffloadCounts()
        sizes = {piece.key: piece.nbytes for piece in self.offload_pieces}
        smaller_keys = {key for key in keys[count:] if sizes[key] < sizes[keys[count - 1]]}
        for key in sorted(smaller_keys, key=sizes.__getitem__):
            with_smaller = OffloadCounts([*keys[: count - 1], key])
            if can_fit(self.step(with_smaller)):
                return with_smaller
        return OffloadCounts(keys[:count])

    def step(self, counts: OffloadCounts | None = None) -> GraphStep:
        """Return the step of the model with all layers and these values on the host; by default with none there.

        `graph.hosted`, if known, is the program's step with all offloadable values on the host. Its seconds of waits
        are scaled by the bytes that the model has there. A step of all layers has no `hosted` of its own.
        """
        graph, counts = self.graph, OffloadCounts() if counts is None else counts
        saved = self.outside_layers + sum(map(_total_bytes, self._remaining_per_layer(counts)))  # bytes on the device
        sharded = graph.sharded - sum(_sharded_bytes(layer.saved) for layer in self.layers)  # outside of layers
        sharded += sum(map(_sharded_bytes, self._remaining_per_layer(counts)))
        nbytes = self.saved_bytes - saved  # bytes on the host
        offloaded = None
        all_values = None if graph.hosted is None else graph.hosted.offloaded
        if all_values is not None:
            waits = all_values.waits * nbytes / all_values.nbytes if all_values.nbytes else 0.0
            seconds = copy_seconds(nbytes, self.machine)
            offloaded = HostValues(counts.total(), nbytes, kept=saved, seconds=seconds, waits=waits)
        forward = self._walk(graph.forward, counts, is_backward=False)
        backward = None if graph.backward is None else self._walk(graph.backward, counts, is_backward=True)
        graph = replace(graph, saved=saved, sharded=sharded)
        return replace(graph, forward=forward, backward=backward, offloaded=offloaded, hosted=None)

    def _remaining_per_layer(self, counts: OffloadCounts) -> Iterator[list[LiveValue]]:
        """Yield for each layer of the model the saved values that remain on the device, if `counts` are offloaded."""
        occurrences = Counter[int]()  # index of a representative -> number of its layers so far
        for i in self.order:
            layer = self.layers[i]
            # `counts` has the number of layers, from the first one on, that offload the value.
            yield [value for value in layer.saved if occurrences[i] >= counts[layer.path, value.name]]
            occurrences[i] += 1

    def _walk(self, walk: LivenessWalk, counts: OffloadCounts, is_backward: bool) -> _Unrolled:
        """Return the walk of a graph with all layers, with these values on the host.

        The moments of a layer of the program are repeated for each layer of the model that it represents. A repeated
        moment has the bytes of the program's moment, plus what the earlier layers of the model save, minus what the
        earlier layers of the program save, which are among the bytes of its moment. Example: layer 1 of the program has
        one layer before it, the fifth layer of the model has four; the moment gets the bytes of four in place of one.
        A backward runs the layers in reverse order; there the gradients of all later layers are added and subtracted in
        the same way.

        Args:
            walk: The walk of the program, forward or backward.
            counts: The values on the host.
            is_backward: True for the walk of a backward.
        """
        ranges = _split_walk(walk, [layer.path for layer in self.layers])
        remaining = list(self._remaining_per_layer(counts))  # saved values on the device, of each layer of the model
        saved = [*chain(*remaining)]
        num_saved_before = [0, *accumulate(map(len, remaining))]
        # By the number of layers before a moment, in the model and in the program: the bytes that these layers save,
        # and the bytes of the gradients of all other layers.
        saved_before = [0, *accumulate(map(_total_bytes, remaining))]
        program_saved_before = [0, *accumulate(_total_bytes(layer.saved) for layer in self.layers)]
        grads_from = _suffix_sums([self.layers[i].gradients for i in self.order])
        program_grads_from = _suffix_sums([layer.gradients for layer in self.layers])
        unrolled = _Unrolled(walk=walk)  # its moments, and for each its index in `walk` and a function for reports

        def add_range(path: str, num_before: int, program_before: int, own: int) -> None:
            """Add the moments of a range of the program's walk, with the bytes of other layers.

            The bytes of the model's other layers are added, and those of the program's are subtracted.

            Args:
                path: Key of the range: the path of a layer, or the moments before or after all layers.
                num_before: Number of layers of the model that a forward runs before it.
                program_before: Number of layers of the program that a forward runs before it.
                own: 1 for the range of a layer, whose own gradients its moments contain already; 0 for the ranges
                    before and after all layers.
            """
            grads = grads_from[num_before + own] - program_grads_from[program_before + own] if is_backward else 0
            count, layers = num_saved_before[num_before], self.layers[:program_before]
            extra_values = partial(_extra_values, saved, count, layers, grads, is_backward)  # for reports
            nbytes = saved_before[num_before] - program_saved_before[program_before] + grads
            for source in ranges[path]:  # indices of moments; `results` of a moment are the bytes of gradients so far
                moment = walk.moments[source]
                unrolled.moments.append(replace(moment, nbytes=moment.nbytes + nbytes, results=moment.results + grads))
                unrolled.sources.append(source)
                unrolled.extra_values.append(extra_values)

        none, all_layers = (0, 0), (len(self.order), len(self.layers))  # layers before, of the model and of the program
        add_range(BEFORE_LAYERS, *(all_layers if is_backward else none), own=0)
        positions = list(enumerate(self.order))
        for position, i in reversed(positions) if is_backward else positions:
            if self.layers[i].path in ranges:
                add_range(self.layers[i].path, position, i, own=1)
        add_range(AFTER_LAYERS, *(none if is_backward else all_layers), own=0)
        extra_saved = saved_before[-1] - program_saved_before[-1]
        extra_grads = grads_from[0] - program_grads_from[0]
        unrolled.end = walk.end + (extra_grads if is_backward else extra_saved)  # bytes after the last moment
        return unrolled


def _total_bytes(values: Sequence[LiveValue]) -> int:
    """Return the total bytes of values."""
    return sum(value.nbytes for value in values)


def _sharded_bytes(values: Sequence[LiveValue]) -> int:
    """Return the total bytes of the values that are shards."""
    return sum(value.nbytes for value in values if value.is_shard)


def _suffix_sums(numbers: Sequence[int]) -> list[int]:
    """Return for each number the sum of it and all after it, and a final 0."""
    return [*accumulate(reversed(numbers), initial=0)][::-1]


def _extra_values(
    saved: Sequence[LiveValue], count: int, layers: Sequence[_RepeatedLayer], grad_bytes: int, is_backward: bool
) -> list[LiveValue]:
    """Return the values that a repeated moment has in addition to those of the program's moment, for reports.

    Values that only the program's moment has are returned with negative bytes, since reports add bytes by line.

    Args:
        saved: The saved values of all layers of the model, in order.
        count: Number of those before the moment.
        layers: The layers of the program before the moment, whose saved values are subtracted.
        grad_bytes: Bytes of the gradients of other layers.
        is_backward: True for a moment of a backward.
    """
    origin = "saved" if is_backward else "result"  # a forward returns the values that it saves
    subtracted = [replace(value, nbytes=-value.nbytes) for layer in layers for value in layer.saved]
    values = [replace(value, origin=origin) for value in [*saved[:count], *subtracted]]
    if grad_bytes:
        values.append(LiveValue("gradients", OTHER_LAYERS_ORIGIN, grad_bytes, "result"))
    return values


BEFORE_LAYERS, AFTER_LAYERS = "before the layers", "after the layers"  # keys of the ranges of a walk outside of layers
OTHER_LAYERS_ORIGIN = "gradients of equal layers"


def _layer_starts(walk: LivenessWalk) -> list[tuple[str, int]]:
    """Return (path, first moment) of each layer, in execution order."""
    starts: dict[str, int] = {}
    for i, moment in enumerate(walk.moments):
        if moment.layer:
            starts.setdefault(moment.layer, i)
    return list(starts.items())


def _split_walk(walk: LivenessWalk, paths: Sequence[str]) -> dict[str, range]:
    """Split a walk into ranges: the moments before all layers, of each layer up to the next one, and after all layers.

    Args:
        walk: The walk of a forward or a backward.
        paths: The layers; moments of others are in the range of the layer before them.

    Returns:
        The indices of the moments, by path of the layer, and by `BEFORE_LAYERS` and `AFTER_LAYERS`.
    """
    starts = [(path, start) for path, start in _layer_starts(walk) if path in paths]
    layers_end = max((i for i, moment in enumerate(walk.moments) if moment.layer), default=-1) + 1
    boundaries = [*(start for _, start in starts), layers_end]
    layers = {path: range(start, end) for (path, start), end in zip(starts, boundaries[1:])}
    return {BEFORE_LAYERS: range(boundaries[0]), **layers, AFTER_LAYERS: range(layers_end, len(walk.moments))}


def _gradient_bytes(walk: LivenessWalk, moments: range) -> int:
    """Return the bytes of gradients that the moments of one layer in a backward, with these indices, create.

    The results of a backward are gradients of parameters; `results` of a moment are the bytes of those so far.
    """
    if not moments:
        return 0
    following = walk.moments[min(moments.stop, len(walk.moments) - 1)]
    return max(0, following.results - walk.moments[moments.start].results)
