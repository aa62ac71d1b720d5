"""A step of a model with many layers, from one of a program with a few of them that stand for the others.

What a layer takes while it runs is the same for each that it stands for; what it leaves for its backward, and the
gradients that it makes, add up. So the moments of a layer are there as often as the layer is, in the model's order,
each beside what those before it have left. Of layers 0, 1, and 2, which is of another kind, for the model's eight:

    forward   ... 0 1 1 2 1 1 1 2 ...    what is kept grows with every layer
    backward  ... 2 1 1 1 2 1 1 0 ...    what is kept falls, gradients grow

Of what may wait on the host, that goes first which frees most, as `Offload` has it: bytes, times the layers that run
until it is read. Copies are taken to end before the next layer does, as they do where it works for long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain

from sp_compile.passes.cost.machine import Machine
from sp_compile.passes.cost.offload_cost import LEAST, OnHost, copy_seconds
from sp_compile.passes.cost.step_memory import GraphStep
from sp_compile.passes.cost.walk.liveness import Alive, Walk

Sent = Counter[tuple[str, str]]
"""By a layer's path and the name of what it keeps: how many that it stands for, the first ones, send theirs."""


@dataclass(frozen=True)
class _AlikeLayer:
    """One of the program. kept: what each that is like it leaves. may: names of that which may go.

    made: bytes of the gradients that each makes.
    """

    path: str
    kept: Sequence[Alive]
    may: frozenset[str]
    made: int = 0


@dataclass(frozen=True)
class _Stretch:
    """Moments of a walk."""

    begin: int
    end: int


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
    """One graph's step, whatever of what layers keep is on the host. layers: of the program, as they run.

    order: all that these stand for, each by the number of the one it is like. rest: bytes of what no layer keeps.
    """

    graph: GraphStep
    layers: tuple[_AlikeLayer, ...]
    order: tuple[int, ...]
    machine: Machine
    rest: int

    @staticmethod
    def of(graph: GraphStep, order: Sequence[str], machine: Machine) -> Unroll:
        """order: as `FewLayers` has it; layers that are not in it are one each."""
        paths = [path for path, _ in _begins(graph.forward)]
        back = _parts(graph.backward, paths) if graph.backward is not None else {}
        made = {path: _made(graph.backward, part) for path, part in back.items()} if graph.backward is not None else {}
        left = {held.name for _, held in (graph.hosted or graph).kept}
        layers = list[_AlikeLayer]()
        for path in paths:
            kept = [held for one, held in graph.kept if one == path]
            may = frozenset(held.name for held in kept) - left
            layers.append(_AlikeLayer(path, kept, may, made.get(path, 0)))
        rest = graph.saved - sum(_bytes(layer.kept) for layer in layers)
        alike = [path for path in order if path in paths]
        begin = min(map(paths.index, alike), default=len(paths))
        others = [path for path in paths if path not in alike]
        numbers = map(paths.index, [*others[:begin], *alike, *others[begin:]])
        return Unroll(graph, tuple(layers), tuple(numbers), machine, rest)

    @cached_property
    def kept(self) -> int:
        """Bytes of all that is kept, where nothing is on the host."""
        return self.rest + sum(_bytes(self.layers[i].kept) for i in self.order)

    @cached_property
    def pieces(self) -> list[tuple[tuple[str, str], int]]:
        """What may go and its bytes, as often as it is kept; first what frees most."""
        found = list[tuple[tuple[str, str], int, int]]()
        for place, i in enumerate(self.order):
            layer, idle = self.layers[i], len(self.order) - place
            may = [held for held in layer.kept if held.name in layer.may and held.nbytes > LEAST * self.kept]
            found += [((layer.path, held.name), held.nbytes, held.nbytes * idle) for held in may]
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
        saved = self.rest + sum(map(_bytes, self._leave(sent)))
        nbytes = self.kept - saved
        backward = None if graph.backward is None else self._walk(graph.backward, sent, behind=True)
        offloaded = None
        if (all_of_it := graph.hosted.offloaded if graph.hosted is not None else None) is not None:
            waits = all_of_it.waits * nbytes / all_of_it.nbytes if all_of_it.nbytes else 0.0
            offloaded = OnHost(sent.total(), nbytes, saved, copy_seconds(nbytes, self.machine), waits)
        forward = self._walk(graph.forward, sent, behind=False)
        return replace(graph, forward=forward, backward=backward, saved=saved, offloaded=offloaded, hosted=None)

    def _leave(self, sent: Sent) -> Iterator[list[Alive]]:
        """What each layer leaves on the device, in their order."""
        before = Counter[int]()
        for i in self.order:
            layer = self.layers[i]
            yield [held for held in layer.kept if before[i] >= sent[layer.path, held.name]]
            before[i] += 1

    def _walk(self, walk: Walk, sent: Sent, behind: bool) -> _Unrolled:
        """behind: is it the backward, which takes the layers in the other order and makes gradients?"""
        parts = _parts(walk, [layer.path for layer in self.layers])
        leave = list(self._leave(sent))
        kept, counts = [*chain(*leave)], [0, *accumulate(map(len, leave))]
        more_kept = [0, *accumulate(map(_bytes, leave))]  # before each layer of all
        own_kept = [0, *accumulate(_bytes(layer.kept) for layer in self.layers)]  # of the program
        more_made = _from_each([self.layers[i].made for i in self.order])
        own_made = _from_each([layer.made for layer in self.layers])
        found = _Unrolled(walk=walk)

        def add(path: str, place: int, i: int, ended: int) -> None:
            """A part, beside what all before that place keep in place of i of the program. ended: 1 for a layer."""
            made = more_made[place + ended] - own_made[i + ended] if behind else 0
            extra = more_kept[place] - own_kept[i]
            self._add(
                found, parts[path], extra, made, partial(_beside, kept, counts[place], self.layers[:i], made, behind)
            )

        last = len(self.order), len(self.layers)
        add(BEFORE, *(last if behind else (0, 0)), 0)
        for place, i in reversed([*enumerate(self.order)]) if behind else enumerate(self.order):
            if self.layers[i].path in parts:
                add(self.layers[i].path, place, i, 1)
        add(BEHIND, *((0, 0) if behind else last), 0)
        of_all = more_kept[-1] - own_kept[-1]
        found.start = walk.start + (of_all if behind else 0)
        found.end = walk.end + (more_made[0] - own_made[0] if behind else of_all)
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


def _from_each(numbers: Sequence[int]) -> list[int]:
    """Sums of each and all behind it, and of none."""
    return [*accumulate(reversed(numbers), initial=0)][::-1]


def _beside(kept: Sequence[Alive], count: int, layers: Sequence[_AlikeLayer], made: int, behind: bool) -> list[Alive]:
    """What is kept, the first so many, and made, without what the program itself has of these layers."""
    origin = "saved" if behind else "result"
    own = [replace(held, nbytes=-held.nbytes) for layer in layers for held in layer.kept]
    found = [replace(held, origin=origin) for held in [*kept[:count], *own]]
    return [*found, Alive("gradients", OF_OTHER_LAYERS, made, "result")] if made else found


BEFORE, BEHIND = "before the layers", "behind the layers"
OF_OTHER_LAYERS = "gradients of layers that are alike"


def _begins(walk: Walk) -> list[tuple[str, int]]:
    """Each layer and its first moment, in the order in which they run."""
    found: dict[str, int] = {}
    for i, moment in enumerate(walk.moments):
        if moment.layer:
            found.setdefault(moment.layer, i)
    return sorted(found.items(), key=lambda item: item[1])


def _parts(walk: Walk, paths: Sequence[str]) -> dict[str, _Stretch]:
    """What lies before these layers, each of them up to the next one, and what lies behind."""
    begins = [(path, begin) for path, begin in _begins(walk) if path in paths]
    last = max((i for i, moment in enumerate(walk.moments) if moment.layer), default=-1) + 1
    ends = [*(begin for _, begin in begins[1:]), last]
    inside = {path: _Stretch(begin, end) for (path, begin), end in zip(begins, ends)}
    first = begins[0][1] if begins else last
    return {BEFORE: _Stretch(0, first), **inside, BEHIND: _Stretch(last, len(walk.moments))}


def _made(walk: Walk, part: _Stretch) -> int:
    """Bytes of gradients that are made in a part."""
    if part.begin >= part.end:
        return 0
    behind = walk.moments[part.end] if part.end < len(walk.moments) else walk.moments[-1]
    return max(0, behind.results - walk.moments[part.begin].results)
