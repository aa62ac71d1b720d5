"""Pass sharded values between compiled graphs: unwrap arguments and wrap results.

Reading a sharded value takes every rank. Ranks therefore announce it first, so that a rank that reads alone raises with
the operations of the others.
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
from sp_compile.lowering.collectives.deferred import DeferredGraph
from sp_compile.lowering.collectives.shard_storage import Layout, Origin, RowPermutation
from sp_compile.lowering.collectives.shard_views import ViewStorage, make_view
from sp_compile.lowering.collectives.sharded import Sharded, from_deferred, from_local, from_replicated, to_local, write
from sp_compile.lowering.masks.balance_rows import identity_order
from sp_compile.lowering.torch_compat import (
    AsyncCollectiveTensor,
    FakeTensor,
    compiled_frame_id,
    evaluate_expr,
    is_wrapper,
    may_overlap,
    tensor_versions,
    wait_async_tensor,
)
from sp_compile.passes.boundary.graph_boundary import GraphBoundary, ShardedOutput, first_balanced
from sp_compile.passes.graph.node_info import node_info
from sp_compile.passes.graph.sizes import Size, as_size
from sp_compile.runtime.control.message import READ_VERB, Message

from .agreement import require_agreement

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def any_traced(args: Sequence[Any]) -> bool:
    """Return True if an argument is fake, so that nothing is executed."""
    return _has_type((Sharded, FakeTensor), args) and any(
        isinstance(a.shard_storage.local_like if isinstance(a, Sharded) else a, FakeTensor) for a in args
    )


def any_sharded(args: Sequence[Any]) -> bool:
    """Return True if an argument is sharded or the result of a pending collective."""
    return _has_type((Sharded, AsyncCollectiveTensor), args)


def _has_type(kinds: type | tuple[type, ...], args: Sequence[Any]) -> bool:
    """Return True if an argument has one of the types. Hundreds of arguments have few types."""
    return any(issubclass(kind, kinds) for kind in set(map(type, args)))


def unwrap_arguments(args: Sequence[Any], layouts: Mapping[int, Layout]) -> Sequence[Any]:
    """Return the arguments of the single-rank program.

    A sharded value is replaced by its rows, or by the full tensor if the program takes it replicated. Pending
    collectives are awaited. The order of load-balanced rows is appended.

    Args:
        args: Arguments of the call.
        layouts: Layout in which the program takes arguments, by index.

    Raises:
        SpError: If the ranks do not all read the same value.
    """
    if not any_sharded(args):
        return args
    orders = input_orders(args, layouts)
    order_arguments = [] if orders is None else [orders.order, orders.inverse, orders.chunks]
    return [*(_unwrap_argument(a, layouts.get(i), orders) for i, a in enumerate(args)), *order_arguments]


@dataclass(eq=False)
class GatheredProgram:
    """Program that takes gathered arguments, with mutations written back to sharded values."""

    run: Callable[..., Any]
    eager: bool = False  # called by eager code, where arguments that share memory need no check
    written: set[int] = field(default_factory=set)  # indices of arguments mutated so far; empty for eager code

    def __call__(self, *args: Any) -> Any:
        """Run the program on gathered arguments, and write changed ones back."""
        taken = unwrap_arguments(args, {})
        tensors = {i: x for i, x in enumerate(taken) if isinstance(x, torch.Tensor)}
        before = tensor_versions([*tensors.values()])
        out = self.run(*taken)
        changed = [*compress(tensors, before != tensor_versions([*tensors.values()]))]
        for i in changed:
            if isinstance(args[i], Sharded):
                write(args[i], tensors[i])
        self.written.update([] if self.eager else changed)
        return out


def _unwrap_argument(a: Any, layout: Layout | None, orders: RowPermutation | None) -> Any:
    if isinstance(a, Sharded):
        return (
            a.full()
            if layout is None
            else to_local(a, replace(layout, balanced=orders if layout.is_balanced else None))
        )
    return wait_async_tensor(a) if isinstance(a, AsyncCollectiveTensor) else a


def input_orders(args: Sequence[Any], layouts: Mapping[int, Layout]) -> RowPermutation | None:
    """Return the order of load-balanced rows of a call, or None if the program takes no balanced rows.

    If the argument is not balanced, it is the order of the original rows.
    """
    given = first_balanced(layouts)
    if given is None:
        return None
    a, layout = args[given], layouts[given]
    return a.sharding.balanced or RowPermutation(*identity_order(a.shape[layout.dim], layout.n, a.device))


@dataclass(eq=False)
class ShardedProgram:
    """Program that returns its results as sharded values and writes to sharded arguments."""

    run: Callable[..., Any]
    ranks: Ranks
    subject: str  # name of the program in messages
    boundary: GraphBoundary  # sharded arguments and results, and the sources of symbols
    calls: int = 0  # number of calls so far

    def __call__(self, *args: Any) -> Any:
        """Run the program on the rows of this rank, and wrap its sharded results."""
        out = self.run(*args)
        self.calls += 1
        given: dict[tuple[Any, ...], torch.Tensor] = {}  # a value that is returned twice is wrapped once
        values = list(out)
        made = [out[i] for i in self.boundary.balanced_order]
        orders = RowPermutation(*made) if made else input_orders(args, self.boundary.layouts)
        for i, result in self.boundary.results.items():
            local, length = values[i], self._value(result.length, args)
            parts: dict[str, Any] = {part: self._value(one, args) for part, one in result.parts.items()}
            layout = replace(result.layout, balanced=orders or result.layout.balanced, **parts)
            # A window of a value has the same rows.
            key = id(result.deferred or local), result.layout, result.length, *result.parts.items()
            if key not in given:
                source = None if result.grad_token is None else out[result.grad_token]
                given[key] = (
                    from_local(local, layout, length, self._origin(result), source)
                    if result.deferred is None
                    else self._deferred_value(result, result.deferred, layout, length, args, out)
                )
            values[i] = given[key]
        for i, number in self.boundary.writes.items():
            write(args[i], values[number])
        own = len(values) if self.boundary.num_base_outputs is None else self.boundary.num_base_outputs
        values = values[: own - len(self.boundary.writes) - len(self.boundary.balanced_order)]
        return type(out)(rebuild_views(values, args, self.boundary))

    def _deferred_value(
        self,
        result: ShardedOutput,
        deferred: DeferredGraph,
        layout: Layout,
        length: int,
        args: Sequence[Any],
        out: Sequence[Any],
    ) -> torch.Tensor:
        """Return a result that is computed later."""
        origin = self._origin(result)
        shape = [self._value(extent, args) for extent in result.shape]
        tokens = [out[operand.grad_token] for operand in deferred.operands if operand.grad_token is not None]
        return from_deferred(deferred.bind(args, out, origin.description), shape, layout, length, origin, tokens)

    def _origin(self, result: ShardedOutput) -> Origin:
        words = f"result {result.name!r} of call {self.calls} of {self.subject}, made at {result.where}"
        return Origin(words, partial(meet_to_read, self.ranks))

    def _value(self, length: Size, args: Sequence[Any]) -> int | torch.SymInt:
        """Return the value of a length, which is symbolic while nothing is executed.

        DDPOptimizer compiles each bucket for the results of the previous one.
        """
        if isinstance(length, int):
            return length
        symbols = self.boundary.symbols
        known = {
            symbol: _argument_at(args, place) for symbol, place in symbols.items() if symbol in length.free_symbols
        }
        return evaluate_expr(length, known)


def rebuild_views(values: Sequence[Any], args: Sequence[Any], edges: GraphBoundary) -> list[Any]:
    """Return the results of a program, with views of other results or of arguments created as views."""
    found = list(values)
    for view in edges.views:
        base = (args if view.of_argument else values)[view.base]
        known = {symbol: _argument_at(args, place) for symbol, place in edges.symbols.items()} if view.symbols else {}
        found[view.number] = make_view(base, view.steps_at(base, known))
    return found[: len(found) - edges.hidden]


_sharded_output_ranks: set[tuple[int, str]] = set()
"""Groups with a program that returns sharded results, each with the number of earlier Dynamo resets."""


def register_sharded_outputs(ranks: Ranks) -> None:
    """Register that the program of these ranks that is compiled now returns sharded results."""
    _sharded_output_ranks.add((compiled_frame_id()[0], ranks.group))


def has_sharded_outputs(ranks: Ranks) -> bool:
    """Return True if an earlier program of these ranks returns sharded results."""
    return (compiled_frame_id()[0], ranks.group) in _sharded_output_ranks


def simulate_sharded_outputs(
    results: Sequence[Any], args: Sequence[Any], edges: GraphBoundary, looked: Callable[[str], None]
) -> Sequence[Any]:
    """Return full results with the sharding of a real run, in a dry run without ranks.

    A result that is sharded along a part of a dim is passed to the next graph replicated.

    Args:
        results: Results of the program.
        args: Arguments of the call.
        edges: Boundary of the program.
        looked: Called with the name of each result that is read.
    """
    values = list(results)
    for i, result in edges.results.items():
        if not result.parts and i < len(values):
            values[i] = from_replicated(values[i], result.layout, Origin(result.name, record_read=looked))
    views = [view for view in edges.views if not view.of_argument and view.base < len(values)]
    return rebuild_views(values, args, replace(edges, views=views, hidden=0))


def call_refusal(args: Sequence[Any], written: Sequence[int], names: Sequence[str]) -> SpError | None:
    """Return the error of a call that mutates an argument whose memory another one shares, or None.

    Args:
        args: Arguments of the call.
        written: Indices of the mutated arguments.
        names: Names from `input_names`.
    """
    places = [_memory_range(args[i]) for i in written]
    end_of_all = max((end for _, _, end in places), default=0)
    for k, a in enumerate(args):
        if type(a) in PLAIN_TYPES and a.layout is torch.strided and a.data_ptr() >= end_of_all:
            continue
        memory, first, last = _memory_range(a) if isinstance(a, torch.Tensor) else (None, 0, 0)
        for i, (other, begin, end) in zip(written, places):
            if i == k or memory != other or begin >= last or first >= end:
                continue
            if isinstance(memory, int) or may_overlap(_plain_argument(a), _plain_argument(args[i])):
                return SpError(
                    "SP221", f"input {names[i]} is changed in place and shares memory with input {names[k]}."
                )
    return None


def _plain_argument(a: torch.Tensor) -> torch.Tensor:
    """Return the argument, or its full tensor if it is gathered."""
    return a if not isinstance(a, Sharded) or a.shard_storage.full is None else a.shard_storage.full


def _memory_range(a: torch.Tensor) -> tuple[Any, int, int]:
    """Return the memory of an argument, and the first and last byte of its elements.

    A sharded value that is not gathered has, with all its views, a separate memory, identified by a number.
    """
    if isinstance(a, Sharded) and not a.is_gathered:
        return (id(a.shard_storage.base) if isinstance(a.shard_storage, ViewStorage) else id(a.shard_storage)), 0, 1
    a = _plain_argument(a)
    if a.layout is not torch.strided or (type(a) not in PLAIN_TYPES and is_wrapper(a)):
        return None, 0, 0
    begin, size = a.data_ptr(), a.element_size()
    if not begin:
        return None, 0, 0
    if a.is_contiguous():
        return a.device, begin, begin + a.numel() * size
    last = sum((extent - 1) * stride for extent, stride in zip(a.shape, a.stride()))
    return a.device, begin, begin + (last + 1) * size * (a.numel() > 0)


def _argument_at(args: Sequence[Any], place: tuple[int, int | None]) -> Any:
    i, dim = place
    return args[i] if dim is None else args[i].shape[dim]


def symbol_sources(graph: GraphModule) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Return the input index, and the dim of a tensor, at which each symbol of a global graph is read.

    With inputs="local" a symbol is the length of a rank's shard; the length in the global view is n times that.
    """
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val") if node_info(node).local is None else node_info(node).local
        if isinstance(value, torch.SymInt):
            found.setdefault(as_size(value), (i, None))
        for dim, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(extent, torch.SymInt):
                found.setdefault(as_size(extent), (i, dim))
    return {symbol: place for symbol, place in found.items() if isinstance(symbol, sympy.Symbol)}


def meet_to_read(ranks: Ranks, words: str) -> None:
    """Announce that all ranks read the same value.

    Raises:
        SpError: On every rank, if they do not.
    """
    require_agreement(ranks, Message(READ_VERB, words, note=f"at {user_line()}"))  # which may differ
