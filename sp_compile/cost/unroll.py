"""A step of a model with many layers, from one of a program with a few of them that stand for the others.

What a layer takes while it runs is the same for each that it stands for; what it leaves for its backward, and the
gradients that it makes, add up. So the moments of a layer are there as often as the layer is, each beside what those
before it have left:

    forward   ... 0 | 1 1 1 ...    what is kept grows with every layer
    backward  ... 1 1 1 | 0        what is kept falls, gradients grow

Of what may wait on the host, that goes first which frees most, as `Offload` has it: bytes, times the layers that run
until it is read. Copies are taken to end before the next layer does, as they do where it works for long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from .machine import Machine
from .offload import LEAST, OnHost, copy_seconds
from .step import GraphStep
from .walk.liveness import Alive, Walk

Sent = Counter[tuple[str, str]]
"""By a layer's path and the name of what it keeps: how many that it stands for, the first ones, send theirs."""


@dataclass(frozen=True)
class _AlikeLayer:
    """One of the program. times: how many it stands for. kept: what each leaves. may: names of that which may go.

    made: bytes of the gradients that each makes.
    """

    path: str
    times: int
    kept: Sequence[Alive]
    may: frozenset[str]
    made: int = 0

    def leaves(self, sent: Sent, upto: int | None = None) -> list[Alive]:
        """What the first `upto` of them leave on the device."""
        upto = self.times if upto is None else upto
        return [held for held in self.kept for _ in range(upto - min(sent[self.path, held.name], upto))]


@dataclass(frozen=True)
class _Stretch:
    """Moments of a walk that are there so often. layer: by its number in the forward."""

    begin: int
    end: int
    layer: int | None = None


@dataclass
class _Unrolled(Walk):
    """of: the moment of the program's walk that each is, by number. more: what is alive beside that."""

    walk: Walk = field(default_factory=Walk)
    of: list[int] = field(default_factory=list)
    more: list[Callable[[], list[Alive]]] = field(default_factory=list)

    def alive(self, moment: int) -> list[Alive]:
        return sorted([*self.walk.alive(self.of[moment]), *self.more[moment]()], key=lambda held: -held.nbytes)


@dataclass(frozen=True)
class Unroll:
    """One graph's step, whatever of what layers keep is on the host. rest: bytes of what no layer keeps."""

    graph: GraphStep
    layers: tuple[_AlikeLayer, ...]
    machine: Machine
    rest: int

    @staticmethod
    def of(graph: GraphStep, times: Mapping[str, int], machine: Machine) -> Unroll:
        """times: how many layers each stands for, by its path, where that is not one."""
        paths = [path for path, _ in _begins(graph.forward)]
        back = _parts(graph.backward, {}) if graph.backward is not None else []
        made = {path: _made(graph.backward, part) for path, part in back} if graph.backward is not None else {}
        left = {held.name for _, held in (graph.hosted or graph).kept}
        layers = list[_AlikeLayer]()
        for path in paths:
            kept = [held for one, held in graph.kept if one == path]
            may = frozenset(held.name for held in kept) - left
            layers.append(_AlikeLayer(path, times.get(path, 1), kept, may, made.get(path, 0)))
        rest = graph.saved - sum(_bytes(layer.kept) for layer in layers)
        return Unroll(graph, tuple(layers), machine, rest)

    @cached_property
    def kept(self) -> int:
        """Bytes of all that is kept, where nothing is on the host."""
        return self.rest + sum(_bytes(layer.kept) * layer.times for layer in self.layers)

    @cached_property
    def pieces(self) -> list[tuple[tuple[str, str], int]]:
        """What may go and its bytes, as often as it is kept; first what frees most."""
        found, place, count = list[tuple[tuple[str, str], int, int]](), 0, sum(layer.times for layer in self.layers)
        for layer in self.layers:
            may = [held for held in layer.kept if held.name in layer.may and held.nbytes > LEAST * self.kept]
            for idle in range(count - place, count - place - layer.times, -1):
                found += [((layer.path, held.name), held.nbytes, held.nbytes * idle) for held in may]
            place += layer.times
        return [(key, nbytes) for key, nbytes, _ in sorted(found, key=lambda one: -one[2])]

    def share(self, share: float) -> Sent:
        """What goes, so that it is no more than this share of all that is kept."""
        found, left = Sent(), share * self.kept
        for key, nbytes in self.pieces:
            if nbytes <= left:
                found[key] += 1
                left -= nbytes
        return found

    def fewest(self, fits: Callable[[GraphStep], bool]) -> Sent:
        """As little as lets the step fit: of what goes last, the smallest that is enough. All, if it does not fit."""
        keys = [key for key, _ in self.pieces]
        number = bisect_left(range(len(keys)), True, key=lambda n: fits(self.step(Sent(keys[:n]))))
        if number:
            sizes, before = dict(self.pieces), Sent(keys[: number - 1])
            smaller = {key for key in keys[number:] if sizes[key] < sizes[keys[number - 1]]}
            for key in sorted(smaller, key=sizes.__getitem__):
                if fits(self.step(before + Sent([key]))):
                    return before + Sent([key])
        return Sent(keys[:number])

    def step(self, sent: Sent | None = None) -> GraphStep:
        """Of all layers, where this is on the host."""
        graph, sent = self.graph, Sent() if sent is None else sent
        saved = self.rest + sum(_bytes(layer.leaves(sent)) for layer in self.layers)
        nbytes = self.kept - saved
        backward = None if graph.backward is None else self._walk(graph.backward, sent, behind=True)
        offloaded = None
        if (all_of_it := graph.hosted.offloaded if graph.hosted is not None else None) is not None:
            waits = all_of_it.waits * nbytes / all_of_it.nbytes if all_of_it.nbytes else 0.0
            offloaded = OnHost(sent.total(), nbytes, saved, copy_seconds(nbytes, self.machine), waits)
        forward = self._walk(graph.forward, sent, behind=False)
        return replace(graph, forward=forward, backward=backward, saved=saved, offloaded=offloaded, hosted=None)

    def _walk(self, walk: Walk, sent: Sent, behind: bool) -> _Unrolled:
        """behind: is it the backward, which takes the layers in the other order and makes gradients?"""
        numbers = {layer.path: i for i, layer in enumerate(self.layers)}
        before = _all_before(self.layers, sent)
        extra = [_bytes(held) - sum(_bytes(layer.kept) for layer in self.layers[:i]) for i, held in enumerate(before)]
        found = _Unrolled(walk=walk)
        done = 0  # gradients of those that are counted already, beside the program's own
        now = len(self.layers) if behind else 0
        for _, part in _parts(walk, numbers):
            if part.layer is None:
                more = partial(_beside, before[now], self.layers[:now], done, behind)
                self._add(found, part, extra[now], done, more)
                continue
            i, layer = part.layer, self.layers[part.layer]
            for r in reversed(range(layer.times)) if behind else range(layer.times):
                own = layer.leaves(sent, r)
                made = done + (layer.times - 1 - r) * layer.made if behind else 0
                more = partial(_beside, [*before[i], *own], self.layers[:i], made, behind)
                self._add(found, part, extra[i] + _bytes(own), made, more)
            done += (layer.times - 1) * layer.made if behind else 0
            now = i if behind else i + 1
        found.start = walk.start + (extra[-1] if behind else 0)
        found.end = walk.end + (done if behind else extra[-1])
        return found

    @staticmethod
    def _add(found: _Unrolled, part: _Stretch, kept: int, made: int, more: Callable[[], list[Alive]]) -> None:
        """The part once more, beside what is kept and the gradients that are made."""
        for i in range(part.begin, part.end):
            one = found.walk.moments[i]
            found.moments.append(replace(one, nbytes=one.nbytes + kept + made, results=one.results + made))
            found.of.append(i)
            found.more.append(more)


def _bytes(held: Sequence[Alive]) -> int:
    return sum(one.nbytes for one in held)


def _all_before(layers: Sequence[_AlikeLayer], sent: Sent) -> list[list[Alive]]:
    """What is kept before each layer, and behind the last one, of all that they stand for."""
    found: list[list[Alive]] = [[]]
    for layer in layers:
        found.append([*found[-1], *layer.leaves(sent)])
    return found


def _beside(kept: Sequence[Alive], layers: Sequence[_AlikeLayer], made: int, behind: bool) -> list[Alive]:
    """What is kept and made, without what the program itself has of these layers."""
    origin = "saved" if behind else "result"
    own = [replace(held, nbytes=-held.nbytes) for layer in layers for held in layer.kept]
    found = [replace(held, origin=origin) for held in [*kept, *own]]
    return [*found, Alive("gradients", OF_OTHER_LAYERS, made, "result")] if made else found


OF_OTHER_LAYERS = "gradients of layers that are alike"


def _begins(walk: Walk) -> list[tuple[str, int]]:
    """Each layer and its first moment, in the order in which they run."""
    found: dict[str, int] = {}
    for i, moment in enumerate(walk.moments):
        if moment.layer:
            found.setdefault(moment.layer, i)
    return sorted(found.items(), key=lambda item: item[1])


def _parts(walk: Walk, numbers: Mapping[str, int]) -> list[tuple[str, _Stretch]]:
    """What lies before the layers, each of them up to the next one, and what lies behind."""
    begins = _begins(walk)
    last = max((i for i, moment in enumerate(walk.moments) if moment.layer), default=-1) + 1
    ends = [*(begin for _, begin in begins[1:]), last]
    first = begins[0][1] if begins else last
    inside = [(path, _Stretch(begin, end, numbers.get(path))) for (path, begin), end in zip(begins, ends)]
    return [("", _Stretch(0, first)), *inside, ("", _Stretch(last, len(walk.moments)))]


def _made(walk: Walk, part: _Stretch) -> int:
    """Bytes of gradients that are made in a part."""
    if part.begin >= part.end:
        return 0
    behind = walk.moments[part.end] if part.end < len(walk.moments) else walk.moments[-1]
    return max(0, behind.results - walk.moments[part.begin].results)
