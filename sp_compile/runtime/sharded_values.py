"""Pass sharded values between compiled graphs: unwrap arguments and wrap results.

A compiled program returns `Sharded` tensors: they have the global shape, and each rank stores its rows. The next
program takes the rows directly. A read of a sharded value is its gather in eager code, in which all ranks take part.
Ranks therefore announce it first, so that a rank that reads alone raises with the operations of the others.

Deferred result: the program returns the operands of a result, such as hidden states and a weight, in place of the
result (logits). A small graph computes the rows of the result from these operands when the value is read.
Grad token: an output of one element that is returned next to a result. The gradient of the result is stored outside of
the graph, and the gradient of the token is the number under which it is stored. For a result that nothing reads, the
backward thus needs no gradient of the size of the result.
Part: a factor of a sharded dim, such as the batch in a dim of batch * sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import GraphModule

from sp_compile.lowering.base.errors import SpError, user_line
from sp_compile.lowering.base.ranks import Ranks
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
from .eager_fallback import count_eager_read

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def has_traced_args(args: Sequence[Any]) -> bool:
    """Return True if an argument, or the rows that it stores, is fake: such a call is traced and not executed."""
    if not _has_type((Sharded, FakeTensor), args):
        return False
    stored_values = [a.shard_storage.local_like if isinstance(a, Sharded) else a for a in args]
    return any(isinstance(value, FakeTensor) for value in stored_values)


def has_sharded_args(args: Sequence[Any]) -> bool:
    """Return True if an argument is sharded or the result of a pending collective."""
    return _has_type((Sharded, AsyncCollectiveTensor), args)


def _has_type(kinds: type | tuple[type, ...], args: Sequence[Any]) -> bool:
    """Return True if one of the arguments, often hundreds, has one of the types; called in each call of a program."""
    return any(issubclass(kind, kinds) for kind in set(map(type, args)))  # they have few different types


def unwrap_arguments(args: Sequence[Any], layouts: Mapping[int, Layout]) -> Sequence[Any]:
    """Return the arguments of the compiled program of one rank for those of a call.

    A sharded value is replaced by its rows, or by the full tensor if the program takes it replicated. The result of a
    pending collective is awaited. If the rows are load-balanced, the tensors of their order are appended.

    Args:
        args: Arguments of the call.
        layouts: Layout in which the program takes arguments, by index.

    Raises:
        SpError: If the ranks do not all read the same value.
    """
    if not has_sharded_args(args):
        return args
    orders = input_orders(args, layouts)
    order_arguments = [] if orders is None else [orders.order, orders.inverse, orders.chunks]
    return [*(_unwrap_argument(a, layouts.get(i), orders) for i, a in enumerate(args)), *order_arguments]


@dataclass(eq=False)
class GatheredProgram:
    """Program that takes gathered arguments, as eager code or an unsplit program does.

    Arguments that it changes in place are written back to the sharded values.
    """

    run: Callable[..., Any]  # the program of gathered tensors
    eager: bool = False  # called by eager code, where arguments that share memory need no check
    written: set[int] = field(default_factory=set)  # indices of arguments mutated so far; empty for eager code

    def __call__(self, *args: Any) -> Any:
        """Run the program on gathered arguments, and write changed ones back."""
        gathered = unwrap_arguments(args, {})  # {}: the program takes no argument as rows
        tensors = {i: x for i, x in enumerate(gathered) if isinstance(x, torch.Tensor)}
        versions = tensor_versions([*tensors.values()])
        out = self.run(*gathered)
        has_changed = versions != tensor_versions([*tensors.values()])  # an array with a bool for each tensor
        changed = [*compress(tensors, has_changed)]  # indices of the arguments that the program has written to
        for i in changed:
            if isinstance(args[i], Sharded):  # the program has written to a gathered copy, not to the argument
                write(args[i], tensors[i])
        self.written.update([] if self.eager else changed)
        return out


def _unwrap_argument(arg: Any, layout: Layout | None, orders: RowPermutation | None) -> Any:
    """Return an argument of one rank's program: rows in a layout, a full tensor, or the argument itself.

    Args:
        arg: Argument of the call.
        layout: Layout in which the program takes a sharded value; None to gather it.
        orders: Order of load-balanced rows of the call.
    """
    if isinstance(arg, AsyncCollectiveTensor):
        return wait_async_tensor(arg)
    if not isinstance(arg, Sharded):
        return arg
    if layout is None:
        return arg.full()
    return to_local(arg, replace(layout, balanced=orders if layout.is_balanced else None))


def input_orders(args: Sequence[Any], layouts: Mapping[int, Layout]) -> RowPermutation | None:
    """Return the order of load-balanced rows of a call, or None if the program takes no balanced rows.

    All balanced arguments and results of a call have one order, that of the first argument that the program takes in
    balanced rows. If the value that is passed there is in its original order, the order is the identity.

    Args:
        args: Arguments of the call.
        layouts: Layout in which the program takes arguments, by index.
    """
    index = first_balanced(layouts)
    if index is None:
        return None
    arg, layout = args[index], layouts[index]
    return arg.sharding.balanced or RowPermutation(*identity_order(arg.shape[layout.dim], layout.n, arg.device))


@dataclass(eq=False)
class ShardedProgram:
    """Program that returns its results as sharded values and writes to sharded arguments."""

    run: Callable[..., Any]  # the program of this rank's rows
    ranks: Ranks  # the ranks that share the sequence
    subject: str  # name of the program in messages
    boundary: GraphBoundary  # sharded arguments and results, and the sources of symbols
    calls: int = 0  # number of calls so far

    def __call__(self, *args: Any) -> Any:
        """Run the program on the rows of this rank; return its results, of which sharded ones are wrapped.

        The outputs of `run` are the results, then the new values of written arguments, the three tensors of the row
        order of balanced results, and the tokens and operands of deferred results. Only the results are returned, of
        which some are recreated as views of others.
        """
        out = self.run(*args)
        self.calls += 1
        values, boundary = list(out), self.boundary
        order_tensors = [out[i] for i in boundary.balanced_order]
        orders = RowPermutation(*order_tensors) if order_tensors else input_orders(args, boundary.layouts)
        wrapped: dict[tuple[Any, ...], torch.Tensor] = {}  # a value that is returned twice is wrapped once
        for i, result in boundary.results.items():
            # A window of a value may have the same rows on this rank as the value; the lengths differ.
            key = id(result.deferred or values[i]), result.layout, result.length, *result.parts.items()
            if key not in wrapped:
                wrapped[key] = self._wrap(result, values[i], orders, args, out)
            values[i] = wrapped[key]
        for i, number in boundary.writes.items():  # the output `number` is the new value of argument `i`
            write(args[i], values[number])
        # Omit the tokens and operands (None: there are none), then the row order and the written arguments.
        num_outputs = len(values) if boundary.num_program_outputs is None else boundary.num_program_outputs
        num_results = num_outputs - len(boundary.writes) - len(boundary.balanced_order)
        return type(out)(rebuild_views(values[:num_results], args, boundary))

    def _wrap(
        self,
        result: ShardedOutput,
        local: torch.Tensor,
        orders: RowPermutation | None,
        args: Sequence[Any],
        out: Sequence[Any],
    ) -> torch.Tensor:
        """Return a result as a sharded value, which the next program or eager code takes.

        Args:
            result: The description of the result.
            local: The rows of this rank; unused for a deferred result.
            orders: The order of load-balanced rows; None if no rows are balanced.
            args: The arguments of the call.
            out: All outputs of the call.
        """
        length = self._evaluate_size(result.length, args)
        # Sizes of the layout that may be symbolic, by field, such as `outer` and `inner`.
        parts: dict[str, Any] = {name: self._evaluate_size(size, args) for name, size in result.parts.items()}
        layout = replace(result.layout, balanced=orders or result.layout.balanced, **parts)
        # The description of the result for errors, with the check that ranks run before a read.
        text = f"result {result.name!r} of call {self.calls} of {self.subject}, made at {result.where}"
        origin = Origin(text, partial(agree_to_read, self.ranks), count_read=count_eager_read)
        if result.deferred is None:
            grad_token = None if result.grad_token is None else out[result.grad_token]
            return from_local(local, layout, length, origin, grad_token)
        # The rows of a deferred result are computed from operands if it is read: unread logits cost nothing.
        shape = [self._evaluate_size(extent, args) for extent in result.shape]
        operands = result.deferred.operands
        grad_tokens = [out[operand.grad_token] for operand in operands if operand.grad_token is not None]
        return from_deferred(result.deferred.bind(args, out, text), shape, layout, length, origin, grad_tokens)

    def _evaluate_size(self, length: Size, args: Sequence[Any]) -> int | torch.SymInt:
        """Return the value of a symbolic length in a call.

        It remains symbolic in a call with fake arguments, as of DDPOptimizer, which compiles each bucket for the fake
        results of the previous one.
        """
        if isinstance(length, int):
            return length
        sources = {x: source for x, source in self.boundary.symbols.items() if x in length.free_symbols}
        return evaluate_expr(length, {symbol: _argument_at(args, source) for symbol, source in sources.items()})


def rebuild_views(values: Sequence[Any], args: Sequence[Any], edges: GraphBoundary) -> list[Any]:
    """Return the results of a program, with views of other results or of arguments recreated as views.

    In-place writes of the caller to a view then change its base, as without the compiler.

    Args:
        values: Results of the program, including hidden ones at the end that only views need.
        args: Arguments of the call.
        edges: Boundary of the program.
    """
    results = list(values)
    for view in edges.views:
        base = args[view.base] if view.of_argument else values[view.base]
        sources = edges.symbols if view.symbols else {}  # a view with constant sizes needs no values of symbols
        symbol_values = {symbol: _argument_at(args, source) for symbol, source in sources.items()}
        results[view.number] = make_view(base, view.steps_at(base, symbol_values))
    return results[: len(results) - edges.hidden]


# groups with a program that returns sharded results, each with the number of earlier Dynamo resets
_sharded_output_ranks: set[tuple[int, str]] = set()


def register_sharded_outputs(ranks: Ranks) -> None:
    """Record that the program that is compiled now returns sharded results, see `has_sharded_outputs`."""
    _sharded_output_ranks.add((compiled_frame_id()[0], ranks.group))


def has_sharded_outputs(ranks: Ranks) -> bool:
    """Return True if an earlier program of these ranks returns sharded results.

    The current graph may then be a part of the same model, so that a missing sequence is no error.
    """
    num_resets = compiled_frame_id()[0]  # programs from before a reset of Dynamo no longer count
    return (num_resets, ranks.group) in _sharded_output_ranks


def simulate_sharded_outputs(
    results: Sequence[Any], args: Sequence[Any], edges: GraphBoundary, on_read: Callable[[str], None]
) -> Sequence[Any]:
    """Return the full results of a dry run without ranks as sharded values, as a real run returns them.

    The next graph of the model then takes them sharded. A result that is sharded along a part of a dim stays a plain
    tensor, since a real run gathers it before the next graph.

    Args:
        results: Results of the program.
        args: Arguments of the call.
        edges: Boundary of the program.
        on_read: Called with the name of each result that is read.
    """
    values = list(results)
    for i, result in edges.results.items():
        if not result.parts and i < len(values):
            values[i] = from_replicated(values[i], result.layout, Origin(result.name, record_read=on_read))
    # A dry run executes the graph as it was traced. It has no hidden results, which a rank's program appends for views,
    # and its results that are views of arguments are such views already.
    views = [view for view in edges.views if not view.of_argument and view.base < len(values)]
    return rebuild_views(values, args, replace(edges, views=views, hidden=0))


def find_alias_error(args: Sequence[Any], written: Sequence[int], names: Sequence[str]) -> SpError | None:
    """Return the error of a call that mutates an argument whose memory another one shares, or None.

    Args:
        args: Arguments of the call.
        written: Indices of the mutated arguments.
        names: Names of the arguments for the error, from `input_names`.
    """
    written_ranges = [_memory_range(args[i]) for i in written]
    last_end = max((r.end for r in written_ranges), default=0)
    for k, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            continue
        if type(arg) in PLAIN_TYPES and arg.layout is torch.strided and arg.data_ptr() >= last_end:
            continue  # it begins after all changed arguments; a fast test, as for most parameters
        arg_range = _memory_range(arg)
        for i, written_range in zip(written, written_ranges):
            if i == k or not arg_range.has_overlap(written_range):
                continue
            # Views of one sharded value (`memory` is its number) share it. The ranges of two strided tensors may
            # intersect without a common element.
            if isinstance(arg_range.memory, int) or may_overlap(_plain_argument(arg), _plain_argument(args[i])):
                cause = f"input {names[i]} is changed in place and shares memory with input {names[k]}."
                return SpError("SP221", cause)
    return None


def _plain_argument(arg: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose memory an argument has: the full tensor of a gathered sharded value, or the argument."""
    if isinstance(arg, Sharded) and arg.shard_storage.full is not None:
        return arg.shard_storage.full
    return arg


class MemoryRange(NamedTuple):
    """Addresses of the elements of an argument, to detect arguments that share memory."""

    memory: torch.device | int | None  # the number of a sharded value that is not gathered, else a device
    begin: int = 0  # address of the first byte
    end: int = 0  # address after the last byte

    def has_overlap(self, other: MemoryRange) -> bool:
        """Return True if two ranges have a byte in common."""
        return self.memory == other.memory and self.begin < other.end and other.begin < self.end


def _memory_range(arg: torch.Tensor) -> MemoryRange:
    """Return the addresses of an argument; an empty range if they are not known.

    A sharded value that is not gathered has, with all its views, a separate memory, identified by a number.
    """
    if isinstance(arg, Sharded) and not arg.is_gathered:
        storage = arg.shard_storage
        return MemoryRange(id(storage.base if isinstance(storage, ViewStorage) else storage), 0, 1)
    arg = _plain_argument(arg)
    # A sparse tensor or a wrapper subclass has its elements in other tensors.
    if arg.layout is not torch.strided or (type(arg) not in PLAIN_TYPES and is_wrapper(arg)):
        return MemoryRange(None)
    begin = arg.data_ptr()
    if not begin or not arg.numel():
        return MemoryRange(None)
    last = sum((extent - 1) * stride for extent, stride in zip(arg.shape, arg.stride()))  # index of the last element
    return MemoryRange(arg.device, begin, begin + (last + 1) * arg.element_size())


def _argument_at(args: Sequence[Any], source: tuple[int, int | None]) -> Any:
    """Return the value of a symbol in a call: the argument, or the length of its dim, that `symbol_sources` names."""
    i, dim = source
    return args[i] if dim is None else args[i].shape[dim]


def symbol_sources(graph: GraphModule) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Return where a call reads the value of each symbolic length: {s0: (1, 0)} for the size of dim 0 of input 1.

    The dim is None for a symbol that is itself an input. With inputs="local" a symbol is the length of a rank's shard;
    the length in the global view is n times that.

    Args:
        graph: The graph in the global view, before it is split.
    """
    sources: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        local = node_info(node).local  # the shard of a sharded input
        value = node.meta.get("val") if local is None else local
        if isinstance(value, torch.SymInt):
            sources.setdefault(as_size(value), (i, None))
        for dim, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(extent, torch.SymInt):
                sources.setdefault(as_size(extent), (i, dim))
    return {symbol: source for symbol, source in sources.items() if isinstance(symbol, sympy.Symbol)}


def agree_to_read(ranks: Ranks, value: str) -> None:
    """Announce a read of a sharded value, before its gather, and check that all ranks read the same value.

    Args:
        ranks: The ranks over which the value is sharded.
        value: The description of the value.

    Raises:
        SpError: On every rank, if they do not.
    """
    require_agreement(ranks, Message(READ_VERB, value, note=f"at {user_line()}"))  # the line may differ
