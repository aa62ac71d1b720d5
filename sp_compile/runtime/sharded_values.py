"""Values that cross from one compiled graph to the next in shards: what a program takes of them, and what it returns.

Reading one takes every rank, so ranks tell each other of it first: a rank that reads alone hears who does what instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import SpError, user_line
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.collectives.deferred import LateGraph
from sp_compile.lowering.collectives.shard_storage import Layout, Orders, Origin
from sp_compile.lowering.collectives.shard_views import HeldView, make_view
from sp_compile.lowering.collectives.sharded import Sharded, entering, known_whole, leaving, leaving_late, write
from sp_compile.lowering.masks.balance_rows import undealt
from sp_compile.lowering.torch_compat import (
    AsyncCollectiveTensor,
    FakeTensor,
    arrived,
    compiled_frame,
    evaluated,
    may_overlap,
    versions,
    wraps_others,
)
from sp_compile.passes.boundary.graph_boundary import Edges, Result, first_dealt
from sp_compile.passes.graph.node_info import record
from sp_compile.passes.graph.sizes import Size, size
from sp_compile.runtime.control.message import READS, Message

from .agreement import different_work, exchanged

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def are_traced(args: Sequence[Any]) -> bool:
    """Is one of them a stand-in, with which nothing runs?"""
    return _has((Sharded, FakeTensor), args) and any(
        isinstance(a.held.near if isinstance(a, Sharded) else a, FakeTensor) for a in args
    )


def have_shards(args: Sequence[Any]) -> bool:
    """Is one of them a value in shards, or one that a collective is still to bring?"""
    return _has((Sharded, AsyncCollectiveTensor), args)


def _has(kinds: type | tuple[type, ...], args: Sequence[Any]) -> bool:
    """Is one of them of these kinds? Of hundreds of arguments there are few types."""
    return any(issubclass(kind, kinds) for kind in set(map(type, args)))


def read_arguments(args: Sequence[Any], layouts: Mapping[int, Layout]) -> Sequence[Any]:
    """What the program of one rank takes: of a value in shards its rows, of one that it takes whole the whole, and
    what a collective brings once it is there. Behind all, the order of rows that are dealt.

    layouts: by number, how the program takes arguments. Raises SpError where ranks do not all read the same.
    """
    if not have_shards(args):
        return args
    orders = orders_given(args, layouts)
    told = [] if orders is None else [orders.order, orders.inverse, orders.chunks]
    return [*(_taken(a, layouts.get(i), orders) for i, a in enumerate(args)), *told]


@dataclass(eq=False)
class OnWhole:
    """Calls a program that takes nothing in shards; what it writes to a value in shards is written to that.

    eager: by eager code. written: the arguments that calls have changed in place so far, by number; none by eager code,
    to which arguments that share memory are nothing special.
    """

    run: Callable[..., Any]
    eager: bool = False
    written: set[int] = field(default_factory=set)

    def __call__(self, *args: Any) -> Any:
        taken = read_arguments(args, {})
        tensors = {i: x for i, x in enumerate(taken) if isinstance(x, torch.Tensor)}
        before = versions([*tensors.values()])
        out = self.run(*taken)
        changed = [*compress(tensors, before != versions([*tensors.values()]))]
        for i in changed:
            if isinstance(args[i], Sharded):
                write(args[i], tensors[i])
        self.written.update([] if self.eager else changed)
        return out


def _taken(a: Any, layout: Layout | None, orders: Orders | None) -> Any:
    if isinstance(a, Sharded):
        return a.full() if layout is None else entering(a, replace(layout, dealt=orders if layout.is_dealt else None))
    return arrived(a) if isinstance(a, AsyncCollectiveTensor) else a


def orders_given(args: Sequence[Any], layouts: Mapping[int, Layout]) -> Orders | None:
    """The order in which the rows of a call are dealt; that of the program where they are not."""
    given = first_dealt(layouts)
    if given is None:
        return None
    a, layout = args[given], layouts[given]
    return a.lies.dealt or Orders(*undealt(a.shape[layout.dim], layout.n, a.device))


@dataclass(eq=False)
class ShardedProgram:
    """Calls `run` and returns values that know their shard, and no more; writes to those that it was given.

    edges: of the program, whose symbols say how to find a symbolic length among the arguments. subject: what a person
    calls it.
    """

    run: Callable[..., Any]
    ranks: Ranks
    subject: str
    edges: Edges
    calls: int = 0

    def __call__(self, *args: Any) -> Any:
        out = self.run(*args)
        self.calls += 1
        given: dict[tuple[Any, ...], torch.Tensor] = {}  # of one value that is returned twice, one
        values = list(out)
        made = [out[i] for i in self.edges.deal]
        orders = Orders(*made) if made else orders_given(args, self.edges.layouts)
        dealt = {} if orders is None else {"dealt": orders}
        for i, result in self.edges.results.items():
            local, length = values[i], self._value(result.length, args)
            parts: dict[str, Any] = {part: self._value(one, args) for part, one in result.parts.items()} | dealt
            layout = replace(result.layout, **parts)
            # A window of a value is made of the same rows.
            key = id(result.late or local), result.layout, result.length, *result.parts.items()
            if key not in given:
                source = None if result.ticket is None else out[result.ticket]
                given[key] = (
                    leaving(local, layout, length, self._origin(result), source)
                    if result.late is None
                    else self._late(result, result.late, layout, length, args, out)
                )
            values[i] = given[key]
        for i, number in self.edges.writes.items():
            write(args[i], values[number])
        own = len(values) if self.edges.own is None else self.edges.own
        values = values[: own - len(self.edges.writes) - len(self.edges.deal)]
        return type(out)(make_views(values, args, self.edges))

    def _late(
        self, result: Result, late: LateGraph, layout: Layout, length: int, args: Sequence[Any], out: Sequence[Any]
    ) -> torch.Tensor:
        """A result that is not made yet."""
        origin = self._origin(result)
        shape = [self._value(extent, args) for extent in result.shape]
        tickets = [out[ticket] for ticket in late.tickets if ticket is not None]
        return leaving_late(late.of(args, out, origin.words), shape, layout, length, origin, tickets)

    def _origin(self, result: Result) -> Origin:
        words = f"result {result.name!r} of call {self.calls} of {self.subject}, made at {result.where}"
        return Origin(words, partial(meet, self.ranks))

    def _value(self, length: Size, args: Sequence[Any]) -> int | torch.SymInt:
        """Symbolic where nothing runs: DDPOptimizer compiles each bucket for what the one before returns."""
        if isinstance(length, int):
            return length
        symbols = self.edges.symbols
        known = {symbol: _at(args, place) for symbol, place in symbols.items() if symbol in length.free_symbols}
        return evaluated(length, known)


def make_views(values: Sequence[Any], args: Sequence[Any], edges: Edges) -> list[Any]:
    """The results of a program, those among them that are views of others, or of its arguments, made as such."""
    found = list(values)
    for view in edges.views:
        base = (args if view.of_argument else values)[view.base]
        known = {symbol: _at(args, place) for symbol, place in edges.symbols.items()} if view.symbols else {}
        found[view.number] = make_view(base, view.steps_at(base, known))
    return found[: len(found) - edges.hidden]


_left: set[tuple[int, str]] = set()
"""Groups of whose programs one has left results in shards, each with the number of Dynamo's resets before."""


def leave_results(ranks: Ranks) -> None:
    """A program of these ranks, which is compiled now, leaves results in shards."""
    _left.add((compiled_frame()[0], ranks.group))


def have_left_results(ranks: Ranks) -> bool:
    """Has a program of these ranks done so that was compiled before this one?"""
    return (compiled_frame()[0], ranks.group) in _left


def as_if_sharded(
    results: Sequence[Any], args: Sequence[Any], edges: Edges, looked: Callable[[str], None]
) -> Sequence[Any]:
    """Whole results that say where they would lie, as the next graph takes them: a look at a model without ranks.

    One that lies along a part of a dim the next graph takes whole. looked: is told of each, by name, when it is read.
    """
    values = list(results)
    for i, result in edges.results.items():
        if not result.parts and i < len(values):
            values[i] = known_whole(values[i], result.layout, Origin(result.name, looked=looked))
    views = [view for view in edges.views if not view.of_argument and view.base < len(values)]
    return make_views(values, args, replace(edges, views=views, hidden=0))


def refusal(args: Sequence[Any], written: Sequence[int], names: Sequence[str]) -> SpError | None:
    """Return the error of a call that changes one argument in place while another shares its memory; None without one.

    names: as `input_names` gives them.
    """
    places = [_extent(args[i]) for i in written]
    end_of_all = max((end for _, _, end in places), default=0)
    for k, a in enumerate(args):
        if type(a) in PLAIN and a.layout is torch.strided and a.data_ptr() >= end_of_all:
            continue
        memory, first, last = _extent(a) if isinstance(a, torch.Tensor) else (None, 0, 0)
        for i, (other, begin, end) in zip(written, places):
            if i == k or memory != other or begin >= last or first >= end:
                continue
            if isinstance(memory, int) or may_overlap(_in_memory(a), _in_memory(args[i])):
                one, two = (getattr(names[x], "shown", names[x]) for x in (i, k))
                return SpError("SP221", f"input {one} is changed in place and shares memory with input {two}.")
    return None


def _in_memory(a: torch.Tensor) -> torch.Tensor:
    """The argument, or what has been read of it."""
    return a if not isinstance(a, Sharded) or a.held.whole is None else a.held.whole


def _extent(a: torch.Tensor) -> tuple[Any, int, int]:
    """Where the elements of an argument are: in which memory, and the bytes there from the first to the last.

    A value in shards, with all its views, has a memory of its own, a number, until it is read.
    """
    if isinstance(a, Sharded) and not a.is_whole:
        return (id(a.held.base) if isinstance(a.held, HeldView) else id(a.held)), 0, 1
    a = _in_memory(a)
    if a.layout is not torch.strided or (type(a) not in PLAIN and wraps_others(a)):
        return None, 0, 0
    begin, size = a.data_ptr(), a.element_size()
    if not begin:
        return None, 0, 0
    if a.is_contiguous():
        return a.device, begin, begin + a.numel() * size
    last = sum((extent - 1) * stride for extent, stride in zip(a.shape, a.stride()))
    return a.device, begin, begin + (last + 1) * size * (a.numel() > 0)


def _at(args: Sequence[Any], place: tuple[int, int | None]) -> Any:
    i, dim = place
    return args[i] if dim is None else args[i].shape[dim]


def symbols_of(graph: GraphModule) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Where each symbol of a graph in the global view can be read: the number of an input, and the dim of a tensor.

    With inputs="local" a program is called with a rank's shard, whose length a symbol is; the view's is n times that.
    """
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val") if record(node).local is None else record(node).local
        if isinstance(value, torch.SymInt):
            found.setdefault(size(value), (i, None))
        for dim, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(extent, torch.SymInt):
                found.setdefault(size(extent), (i, dim))
    return {symbol: place for symbol, place in found.items() if isinstance(symbol, sympy.Symbol)}


def meet(ranks: Ranks, words: str) -> None:
    """All ranks are about to read the same value. Raises SpError, on every rank, if they are not."""
    everyone = exchanged(ranks, Message(READS, words, fields={"": f"at {user_line()}"})) or ()
    problem = different_work(everyone)  # lines may differ: it is one value
    if problem is not None:
        raise problem
