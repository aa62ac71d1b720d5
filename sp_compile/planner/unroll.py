"""Extend the step of a program with a few layers to a model with all layers.

The memory of a layer while it runs is the same for each layer that it represents. The values that it saves for its
backward, and its gradients, add up. So the moments of a layer are repeated for each represented layer, in the model's
order, each in addition to the values of earlier ones. Example: layers 0, 1, and 2, of another kind, for eight layers:

    forward   ... 0 1 1 2 1 1 1 2 ...    saved bytes increase with every layer
    backward  ... 2 1 1 1 2 1 1 0 ...    saved bytes decrease, gradients increase

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

from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.offload_cost import MIN_OFFLOAD_BYTES, HostValues, copy_seconds
from sp_compile.passes.cost.step_memory import GraphStep
from sp_compile.passes.cost.walk.liveness import LivenessWalk, LiveValue

OffloadedBytes = Counter[tuple[str, str]]
"""By layer path and value name: the number of represented layers, from the first, that offload the value."""


@dataclass(frozen=True)
class _RepeatedLayer:
    """A layer of the program."""

    path: str
    saved: Sequence[LiveValue]  # values that each represented layer saves
    can_offload: frozenset[str]  # names of the offloadable ones
    gradients: int = 0  # bytes of its gradients


@dataclass(frozen=True)
class _WalkRange:
    """A range of moments of a walk."""

    begin: int
    end: int


@dataclass
class _Unrolled(LivenessWalk):
    """The unrolled moments."""

    walk: LivenessWalk = field(default_factory=LivenessWalk)
    of: list[int] = field(default_factory=list)  # the index of each moment in the walk of the program
    more: list[Callable[[], list[LiveValue]]] = field(default_factory=list)  # the values that are alive in addition

    def alive(self, moment: int) -> list[LiveValue]:
        """Return the values that are alive at a moment, the largest first."""
        return sorted([*self.walk.alive(self.of[moment]), *self.more[moment]()], key=lambda held: -held.nbytes)


@dataclass(frozen=True)
class Unroll:
    """The step of one graph for all layers, for any share on the host."""

    graph: GraphStep
    layers: tuple[_RepeatedLayer, ...]  # layers of the program, in execution order
    order: tuple[int, ...]  # all layers, each by the index of its representative
    machine: Machine
    rest: int  # bytes of saved values that belong to no layer

    @staticmethod
    def of(graph: GraphStep, order: Sequence[str], machine: Machine) -> Unroll:
        """Return the unrolled step of a graph.

        `order` is that of `FewLayers`; a layer that is not in it represents itself only.
        """
        paths = [path for path, _ in _layer_starts(graph.forward)]
        back = _split_walk(graph.backward, paths) if graph.backward is not None else {}
        gradient_bytes = (
            {path: _gradient_bytes(graph.backward, part) for path, part in back.items()}
            if graph.backward is not None
            else {}
        )
        remaining = {value.name for _, value in (graph.hosted or graph).saved_bytes}
        layers = list[_RepeatedLayer]()
        for path in paths:
            saved = [value for one, value in graph.saved_bytes if one == path]
            may = frozenset(value.name for value in saved) - remaining
            layers.append(_RepeatedLayer(path, saved, may, gradient_bytes.get(path, 0)))
        rest = graph.saved - sum(_total_bytes(layer.saved) for layer in layers)
        shared = [path for path in order if path in paths]
        begin = min(map(paths.index, shared), default=len(paths))
        others = [path for path in paths if path not in shared]
        numbers = map(paths.index, [*others[:begin], *shared, *others[begin:]])
        return Unroll(graph, tuple(layers), tuple(numbers), machine, rest)

    @cached_property
    def saved_bytes(self) -> int:
        """Return the bytes of all saved values, with nothing on the host."""
        return self.rest + sum(_total_bytes(self.layers[i].saved) for i in self.order)

    @cached_property
    def offload_pieces(self) -> list[tuple[tuple[str, str], int]]:
        """Return the offloadable values and their bytes, once per layer, in the order of offloading."""
        found = list[tuple[tuple[str, str], int, int]]()
        for place, i in enumerate(self.order):
            layer, idle = self.layers[i], len(self.order) - place
            may = [
                value
                for value in layer.saved
                if value.name in layer.can_offload and value.nbytes > MIN_OFFLOAD_BYTES * self.saved_bytes
            ]
            found += [((layer.path, value.name), value.nbytes, value.nbytes * idle) for value in may]
        return [(key, nbytes) for key, nbytes, _ in sorted(found, key=lambda one: -one[2])]

    def share(self, share: float) -> OffloadedBytes:
        """Return the values to offload, at most this share of all saved bytes."""
        found, left = OffloadedBytes(), share * self.saved_bytes
        for key, nbytes in self.offload_pieces:
            if nbytes <= left:
                found[key] += 1
                left -= nbytes
        return found

    def min_offload(self, fits: Callable[[GraphStep], bool]) -> OffloadedBytes:
        """Return the smallest set of values whose offload lets the step fit.

        Of the last values, the smallest sufficient one is used. If the step never fits, return all.
        """
        keys = [key for key, _ in self.offload_pieces]
        number = bisect_left(range(len(keys)), True, key=lambda n: fits(self.step(OffloadedBytes(keys[:n]))))
        if number:
            sizes, before = dict(self.offload_pieces), OffloadedBytes(keys[: number - 1])
            smaller = {key for key in keys[number:] if sizes[key] < sizes[keys[number - 1]]}
            for key in sorted(smaller, key=sizes.__getitem__):
                if fits(self.step(before + OffloadedBytes([key]))):
                    return before + OffloadedBytes([key])
        return OffloadedBytes(keys[:number])

    def step(self, sent: OffloadedBytes | None = None) -> GraphStep:
        """Return the step of all layers with these values on the host."""
        graph, sent = self.graph, OffloadedBytes() if sent is None else sent
        saved = self.rest + sum(map(_total_bytes, self._remaining_per_layer(sent)))
        nbytes = self.saved_bytes - saved
        backward = None if graph.backward is None else self._walk(graph.backward, sent, is_backward=True)
        offloaded = None
        if (all_of_it := graph.hosted.offloaded if graph.hosted is not None else None) is not None:
            waits = all_of_it.waits * nbytes / all_of_it.nbytes if all_of_it.nbytes else 0.0
            offloaded = HostValues(sent.total(), nbytes, saved, copy_seconds(nbytes, self.machine), waits)
        forward = self._walk(graph.forward, sent, is_backward=False)
        return replace(graph, forward=forward, backward=backward, saved=saved, offloaded=offloaded, hosted=None)

    def _remaining_per_layer(self, sent: OffloadedBytes) -> Iterator[list[LiveValue]]:
        """Return the values that each layer stores on the device, in layer order."""
        before = Counter[int]()
        for i in self.order:
            layer = self.layers[i]
            yield [value for value in layer.saved if before[i] >= sent[layer.path, value.name]]
            before[i] += 1

    def _walk(self, walk: LivenessWalk, sent: OffloadedBytes, is_backward: bool) -> _Unrolled:
        """Return the unrolled walk of a graph.

        The backward runs the layers in reverse order and creates gradients.
        """
        parts = _split_walk(walk, [layer.path for layer in self.layers])
        remaining = list(self._remaining_per_layer(sent))
        saved, counts = [*chain(*remaining)], [0, *accumulate(map(len, remaining))]
        saved_before = [0, *accumulate(map(_total_bytes, remaining))]  # before each of all layers
        program_saved_before = [0, *accumulate(_total_bytes(layer.saved) for layer in self.layers)]  # of the program
        grads_after = _suffix_sums([self.layers[i].gradients for i in self.order])
        program_grads_after = _suffix_sums([layer.gradients for layer in self.layers])
        found = _Unrolled(walk=walk)

        def add(path: str, place: int, i: int, ended: int) -> None:
            """Add a part of layer i of the program at a place of the order; ended is 1 for a layer."""
            grad_bytes = grads_after[place + ended] - program_grads_after[i + ended] if is_backward else 0
            extra = saved_before[place] - program_saved_before[i]
            self._add(
                found,
                parts[path],
                extra,
                grad_bytes,
                partial(_extra_values, saved, counts[place], self.layers[:i], grad_bytes, is_backward),
            )

        last = len(self.order), len(self.layers)
        add(BEFORE_LAYERS, *(last if is_backward else (0, 0)), 0)
        for place, i in reversed([*enumerate(self.order)]) if is_backward else enumerate(self.order):
            if self.layers[i].path in parts:
                add(self.layers[i].path, place, i, 1)
        add(AFTER_LAYERS, *((0, 0) if is_backward else last), 0)
        of_all = saved_before[-1] - program_saved_before[-1]
        found.start = walk.start + (of_all if is_backward else 0)
        found.end = walk.end + (grads_after[0] - program_grads_after[0] if is_backward else of_all)
        return found

    @staticmethod
    def _add(
        found: _Unrolled, part: _WalkRange, n_saved: int, grad_bytes: int, more: Callable[[], list[LiveValue]]
    ) -> None:
        """Add the part again, with the saved values and the existing gradients."""
        for i in range(part.begin, part.end):
            one = found.walk.moments[i]
            found.moments.append(
                replace(one, nbytes=one.nbytes + n_saved + grad_bytes, results=one.results + grad_bytes)
            )
            found.of.append(i)
            found.more.append(more)


def _total_bytes(values: Sequence[LiveValue]) -> int:
    return sum(one.nbytes for one in values)


def _suffix_sums(numbers: Sequence[int]) -> list[int]:
    """Return the sums of each number and all after it, and 0."""
    return [*accumulate(reversed(numbers), initial=0)][::-1]


def _extra_values(
    saved: Sequence[LiveValue], count: int, layers: Sequence[_RepeatedLayer], grad_bytes: int, is_backward: bool
) -> list[LiveValue]:
    """Return the first `count` saved values and gradients, without those of these layers."""
    origin = "saved" if is_backward else "result"
    own = [replace(value, nbytes=-value.nbytes) for layer in layers for value in layer.saved]
    found = [replace(value, origin=origin) for value in [*saved[:count], *own]]
    return [*found, LiveValue("gradients", OTHER_LAYERS_ORIGIN, grad_bytes, "result")] if grad_bytes else found


BEFORE_LAYERS, AFTER_LAYERS = "before the layers", "after the layers"
OTHER_LAYERS_ORIGIN = "gradients of equal layers"


def _layer_starts(walk: LivenessWalk) -> list[tuple[str, int]]:
    """Return each layer and its first moment, in execution order."""
    found: dict[str, int] = {}
    for i, moment in enumerate(walk.moments):
        if moment.layer:
            found.setdefault(moment.layer, i)
    return sorted(found.items(), key=lambda item: item[1])


def _split_walk(walk: LivenessWalk, paths: Sequence[str]) -> dict[str, _WalkRange]:
    """Split a walk: before these layers, each layer up to the next one, and after them."""
    begins = [(path, begin) for path, begin in _layer_starts(walk) if path in paths]
    last = max((i for i, moment in enumerate(walk.moments) if moment.layer), default=-1) + 1
    ends = [*(begin for _, begin in begins[1:]), last]
    inside = {path: _WalkRange(begin, end) for (path, begin), end in zip(begins, ends)}
    first = begins[0][1] if begins else last
    return {BEFORE_LAYERS: _WalkRange(0, first), **inside, AFTER_LAYERS: _WalkRange(last, len(walk.moments))}


def _gradient_bytes(walk: LivenessWalk, part: _WalkRange) -> int:
    """Return the bytes of gradients that a part creates."""
    if part.begin >= part.end:
        return 0
    following = walk.moments[part.end] if part.end < len(walk.moments) else walk.moments[-1]
    return max(0, following.results - walk.moments[part.begin].results)
