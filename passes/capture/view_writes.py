"""Return results that share memory as one base, and recreate the others as views of it after the run.

    (h, h[:, 0])  ->  (h, None)     and the second is select(h, 1, 0), computed eagerly after the program

A write to one is then visible in the other, and autograd treats them as views, as AOTAutograd does on a single device.
Views are detected before functionalization, which removes all sharing of mutated memory.

The base of a view is the tensor in whose memory it is; its root is the node where the chain of bases starts, and the
chain is the views from the root (or from a base) to the node (`aliases.py`). A hidden result is a base that the program
does not return itself, added to the results of the graph after all others.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from sp_compile.lowering.torch_compat import evaluate_expr, pytree, schema_of, set_grad_enabled
from sp_compile.passes.graph.call import is_tensor, parse_overloads
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.graph.mutation import find_mutation, functional_form, is_mutation, is_view_change, to_positional
from sp_compile.passes.graph.sizes import (
    Size,
    as_size,
    as_sizes,
    assume_large,
    is_same_shape,
    nonempty_size,
    symbolic_sizes,
)
from sp_compile.passes.sharding.matchers import match_piece

from .aliases import Aliases, node_storages

aten = torch.ops.aten

VIEW_OPS = "sp_views"  # key of `SharedResults` in the meta of a captured graph

# Ops whose result is a view or a copy, depending on strides (and, for the second set, on dtype and device).
_RESHAPES = parse_overloads("reshape reshape_as view_as flatten.using_ints ravel contiguous")
# Ops whose results have no element in common. Those of others may: tensor_split at positions, meshgrid(x, x).
_PARTITIONS = parse_overloads("""
    chunk split.Tensor split.sizes split_with_sizes tensor_split.sections hsplit.int vsplit.int dsplit.int unbind.int
""")
_VIEW_OR_COPY_OPS = {*_RESHAPES, *parse_overloads("to.dtype to.device to.dtype_layout to.other type_as expand_as")}


@dataclass(frozen=True)
class ViewStep:
    """One op in a chain of views; sizes among the arguments may be symbolic."""

    op: Any  # view op
    args: tuple[Any, ...] = ()  # arguments after the base
    kwargs: Mapping[str, Any] | None = None  # keyword arguments; None for none

    def bind(self, known: Mapping[sympy.Symbol, Any]) -> Callable[[Any], Any]:
        """Return a function that applies the op to a base, with the symbols replaced by their `known` values."""

        def evaluate(x: Any) -> Any:
            """Evaluate a symbolic expression; return other values unchanged."""
            return evaluate_expr(x, known) if isinstance(x, sympy.Expr) else x

        args, kwargs = pytree.tree_map(evaluate, (self.args, dict(self.kwargs or {})))
        return lambda x: self.op(x, *args, **kwargs)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """Return the symbols in the arguments, whose values `bind` needs."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs or {})))
        return {symbol for x in leaves if isinstance(x, sympy.Expr) for symbol in x.free_symbols}


@dataclass(frozen=True)
class ResultView:
    """Result that is recreated after the run, as a view of another result or of an argument."""

    number: int  # index of the result
    of_argument: bool  # True if the base is an argument
    base: int  # index of the base
    steps: tuple[ViewStep, ...]  # view ops from the base to the result
    shape: tuple[Size, ...] = ()  # of the base

    @cached_property
    def symbols(self) -> set[sympy.Symbol]:
        """Return the symbols of all steps, whose values `steps_at` needs."""
        return {symbol for step in self.steps for symbol in step.symbols}

    def steps_at(self, base: Tensor, known: Mapping[sympy.Symbol, Any]) -> list[Callable[[Any], Any]]:
        """Return the functions that compute the result from a base, to apply one after the other.

        The runtime applies them after each run.

        Args:
            base: Base tensor of this call.
            known: Values of the symbols of the inputs in this call; those of the base's shape may be missing.
        """
        base_sizes = {size: length for size, length in zip(self.shape, base.shape) if isinstance(size, sympy.Symbol)}
        return [step.bind({**base_sizes, **known}) for step in self.steps]


@dataclass(frozen=True)
class SharedResults:
    """Results that are views of others, as stored in the metadata of a captured graph."""

    views: tuple[ResultView, ...] = ()  # views among the results
    hidden: int = 0  # number of hidden results


def find_shared_results(gm: GraphModule) -> SharedResults:
    """Find the results of a graph that are views of other results or of inputs, before functionalization.

    Of `return h, h[:, 0]`, the second result is a view of the first one. The results of `return h[:2], h[1:]` overlap,
    and neither is a view of the other: h, their base, is added to the results of the graph, as a hidden result.
    """
    output, inputs = gm.graph.output_node(), list(gm.graph.find_nodes(op="placeholder"))
    results = list(output.args[0])  # type: ignore[arg-type]
    tensors = {i: x for i, x in enumerate(results) if is_tensor(x)}  # result index -> node
    storage_uses = Counter(s for x in (*inputs, *tensors.values()) if is_tensor(x) for s in node_storages(x))
    if not any(storage_uses[storage] > 1 for x in tensors.values() for storage in node_storages(x)):
        return SharedResults()  # no two results, and no result and input, have the same memory
    aliases = _read_aliases(gm.graph)
    nodes = {i: aliases.resolve(x) for i, x in tensors.items()}  # result index -> its node at the end of the program
    input_symbols = {size for x in inputs for size in symbolic_sizes(x) if isinstance(size, sympy.Symbol)}
    results_of_root: dict[Node, list[int]] = {}  # node that owns the memory -> indices of results
    for i, node in nodes.items():
        results_of_root.setdefault(aliases.root(node), []).append(i)
    views, n_results = list[ResultView](), len(results)
    for root, indices in results_of_root.items():
        if root.op == "placeholder":  # views of an argument
            base_index = inputs.index(root)
            candidates = [_result_view(aliases, i, nodes[i], root, base_index, input_symbols) for i in indices]
            views += [view for view in candidates if view is not None]
            continue
        if root.op == "get_attr":  # a buffer: it is neither an argument nor a result, so it cannot be a base
            continue
        for group in _overlapping_groups(aliases, {i: nodes[i] for i in indices}):
            # The base is a result of which the others are views, or else the root, as a new, hidden result.
            base = _find_common_base(aliases, [nodes[i] for i in group]) or root
            if aliases.resolve(base) is not base:  # its shape was changed in place: it would be returned in the new one
                continue
            base_index = next((i for i in group if nodes[i] is base), len(results))
            members = [i for i in group if i != base_index]
            candidates = [_result_view(aliases, i, nodes[i], base, base_index, input_symbols) for i in members]
            group_views = [view for view in candidates if view is not None]
            if len(group_views) < len(members):  # view ops cannot express one of them
                continue
            views += group_views
            if base_index == len(results):
                results.append(base)
    output.args = (type(output.args[0])(results),)
    return SharedResults(tuple(views), len(results) - n_results)


def omit_views(gm: GraphModule, views: Sequence[ResultView], hidden: int) -> None:
    """Replace these views by None in the results of a graph, as the runtime recreates them.

    Args:
        gm: Captured and functionalized graph.
        views: The views, a part of those that `find_shared_results` has found.
        hidden: Number of hidden results (additional results that are bases of views) to keep; later ones are removed.
    """
    output, shared = gm.graph.output_node(), gm.meta[VIEW_OPS]
    results = list(output.args[0])  # type: ignore[arg-type]
    for view in views:
        results[view.number] = None
    output.args = (type(output.args[0])(results[: len(results) - shared.hidden + hidden]),)
    erase_dead(gm.graph)
    gm.recompile()


def _read_aliases(graph: Graph) -> Aliases:
    """Return the aliases at the end of a program with in-place ops, by visiting all its nodes in order.

    As in functionalization, readers of x.add_(y) read x, if the op has a functional form or returns x. An op that
    changes the shape of x, such as x.t_(), is a view instead: later readers of x read its result.
    """
    aliases = Aliases(graph)
    for node in graph.nodes:
        args, kwargs = aliases.calls[node] = map_arg((node.args, node.kwargs), aliases.resolve)
        if node.op == "output":
            break
        if node.target is set_grad_enabled:
            aliases.grad_enabled = bool(node.args[0])
        if is_mutation(node) and not is_view_change(node):
            mutation = find_mutation(node, args, kwargs)
            if mutation.value is not None or mutation.returns_target:
                aliases.replace(node, mutation.targets[0])
                continue
        aliases.record(node)
        if is_view_change(node):
            aliases.replace(args[0], node)
    return aliases


def _view_chain(aliases: Aliases, node: Node, base: Node | None = None) -> list[Node]:
    """Return the chain of views from a base (default: the root) to a node, in order, without the base."""
    views = list[Node]()
    while node is not base and node in aliases.parent:
        views.append(node)
        node = aliases.parent[node]
    return views[::-1]


def _find_common_base(aliases: Aliases, nodes: Sequence[Node]) -> Node | None:
    """Return the node among these of which all others are views, or None."""
    for base in nodes:
        if all(node is base or base in _view_chain(aliases, node) for node in nodes):
            return base
    return None


def _overlapping_groups(aliases: Aliases, nodes: Mapping[int, Node]) -> Iterator[list[int]]:
    """Yield groups of two and more results, by index, in which a write to one may change others.

    Each group gets a common base. Results that provably share no element, such as pieces of a split, are separate.

    Args:
        aliases: Aliases at the end of the program.
        nodes: Views of one root that are results, by index of the result.
    """
    groups: list[list[int]] = []
    for i, node in nodes.items():
        # Merge the groups with which this result may overlap.
        overlapping = [group for group in groups if not all(_are_disjoint(aliases, node, nodes[k]) for k in group)]
        groups = [group for group in groups if group not in overlapping]
        groups.append([*chain.from_iterable(overlapping), i])
    yield from (sorted(group) for group in groups if len(group) > 1)


def _are_disjoint(aliases: Aliases, a: Node, b: Node) -> bool:
    """Return True if two views of one tensor provably have no element in common.

    The first views in which their chains of views differ are compared: elements of one split, or slices along one dim.
    For `x[0, :2]` and `x[0, 2:]` these are the slices, since both chains start with `x[0]`. Their positions show
    nothing if the elements of `x[0]` overlap, as those of an unfold or expand do.
    """
    chains = _view_chain(aliases, a), _view_chain(aliases, b)
    view_a, view_b = next(((x, y) for x, y in zip(*chains) if x is not y), (None, None))
    if view_a is None or view_b is None:  # one is a view of the other
        return False
    is_same_split = view_a.target is view_b.target is operator.getitem and view_a.args[0] is view_b.args[0]
    split = aliases.parent[view_a] if is_same_split else None
    if not _has_distinct_elements(aliases.parent[split or view_a].meta["val"]):
        return False
    if split is not None and split.target in _PARTITIONS:
        return view_a.args[1] != view_b.args[1]
    # Otherwise each must be a contiguous range of rows of the same dim, and one must end before the other one starts.
    pieces = [piece for piece in map(match_piece, (view_a, view_b)) if piece is not None and piece.step == 1]
    if len(pieces) < 2 or pieces[0].dim != pieces[1].dim:
        return False
    ranges = [(piece.start, piece.start + piece.length) for piece in pieces]
    pairs_of_bounds = ((ranges[0][1], ranges[1][0]), (ranges[1][1], ranges[0][0]))  # (end of one, start of the other)
    return any(isinstance(end, int) and isinstance(start, int) and end <= start for end, start in pairs_of_bounds)


def _has_distinct_elements(x: Tensor) -> bool:
    """Return True if no two elements of a tensor provably have the same memory.

    In the order of strides, each stride must be longer than the distance from the first to the last element of the dims
    before it. Strides that are not provably so, such as some products of symbols, give False.
    """
    dims = [(stride, size) for stride, size in zip(as_sizes(x.stride()), as_sizes(x.shape)) if size != 1]
    extent: Size = 0  # distance from the first to the last element
    for stride, size in sorted(dims, key=lambda dim: assume_large(dim[0])):
        if not sympy.expand(nonempty_size(stride) - extent).is_positive:
            return False
        extent += (size - 1) * nonempty_size(stride)
    return True


def _result_view(
    aliases: Aliases, number: int, node: Node, base: Node, base_index: int, known: Set[sympy.Symbol]
) -> ResultView | None:
    """Return the description of a result as a view of a base, or None if known view ops cannot express it.

    Args:
        aliases: Aliases at the end of the program.
        number: Index of the result.
        node: Node of the result.
        base: Node of the base.
        base_index: Index of the base among the arguments, if it is one, else among the results.
        known: Symbols whose values are known after the run: sizes of inputs.
    """
    view_nodes = _view_chain(aliases, node, base)
    steps = [_view_step(aliases, view) for view in view_nodes]
    # Views that were created under no_grad, and not by a detach, receive no gradient either.
    is_detached = aliases.is_detached_view(node) and not aliases.is_detached_view(base)
    if view_nodes and is_detached and not any(view.target is aten.detach.default for view in view_nodes):
        steps.insert(0, ViewStep(aten.detach.default))
    shape = as_sizes(base.meta["val"].shape)
    known_steps = [step for step in steps if step is not None and step.symbols <= {*known, *shape}]
    if len(known_steps) < len(steps):
        return None
    return ResultView(number, base.op == "placeholder", base_index, tuple(known_steps), shape)


def _view_step(aliases: Aliases, node: Node) -> ViewStep | None:
    """Return a view op that computes the value of a view node from its base, or None if there is none.

    This is the op of the node, unless it copies depending on strides or reads other tensors: then `view` or
    `as_strided` to the node's shape and strides, or `alias` if these are the base's. None if one of these would be
    needed and the dtype is not that of the base, since they do not change it.
    """
    source, value = aliases.parent[node], node.meta["val"]
    base = source.meta["val"]  # the tensor in whose memory the view is
    op = functional_form(node.target) if is_view_change(node) else node.target  # x.unsqueeze_(0): unsqueeze
    if op is operator.getitem:  # a part of a split
        return ViewStep(operator.getitem, (node.args[1],))
    given, kwargs = aliases.calls[node]  # positional and keyword arguments
    args = to_positional(op, given, kwargs)
    reads_other_tensor = any(map(is_tensor, pytree.tree_leaves((args[1:], kwargs))))
    is_view_of_source = bool(args) and args[0] is source and not reads_other_tensor
    # The op itself.
    if is_view_of_source and op not in _VIEW_OR_COPY_OPS and getattr(op, "is_view", False):
        positional_names = [argument.name for argument in schema_of(op).arguments[: len(args)]]
        kwargs = {name: x for name, x in kwargs.items() if name not in positional_names}
        return ViewStep(op, *map_arg((args[1:], kwargs), as_size))
    # A view of the same memory that is described by its shape and strides.
    if not isinstance(value, Tensor) or not isinstance(base, Tensor) or value.dtype != base.dtype:
        return None
    shape, strides = as_sizes(value.shape), as_sizes(value.stride())
    base_offset, offset = as_size(base.storage_offset()), as_size(value.storage_offset())
    base_layout = as_sizes((*base.shape, *base.stride(), base.storage_offset()))
    if is_same_shape((*shape, *strides, offset), base_layout):
        return ViewStep(aten.alias.default)
    if op in _RESHAPES:  # it has returned a view, so that the shape suffices
        return ViewStep(aten.view.default, (list(shape),))
    return ViewStep(_as_strided, (list(shape), list(strides), offset - base_offset))


def _as_strided(x: Tensor, shape: Sequence[int], strides: Sequence[int], start: int) -> Tensor:
    """Return a strided view that starts `start` elements after the start of x."""
    return x.as_strided(shape, strides, int(x.storage_offset()) + start)
