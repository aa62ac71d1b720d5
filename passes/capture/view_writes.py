"""Return results that share memory as one base, and recreate the others as views of it after the run.

    (h, h[:, 0])  ->  (h, None)     and the second is select(h, 1, 0), computed eagerly after the program

A write to one is then visible in the other, and autograd treats them as views, as AOTAutograd does on a single device.
Views are detected before functionalization, which removes all sharing of mutated memory.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node, map_arg

from sp_compile.lowering.torch_compat import evaluate_expr, pytree, schema_of, set_grad_enabled
from sp_compile.passes.graph.call import is_tensor, parse_overloads
from sp_compile.passes.graph.edit import erase_dead
from sp_compile.passes.graph.mutation import find_mutation, functional_form, is_mutation, is_view_change, to_positional
from sp_compile.passes.graph.sizes import Size, as_size, as_sizes, is_same_shape, is_same_size

from .aliases import Aliases, node_storages

aten = torch.ops.aten

VIEW_OPS = "sp_views"
"""Key of `SharedResults` in the meta of a captured graph."""

# Ops whose result may share memory, depending on strides.
_RESHAPES = parse_overloads("reshape reshape_as view_as flatten.using_ints ravel contiguous")
_MAY_COPY = {*_RESHAPES, *parse_overloads("to.dtype to.device to.dtype_layout to.other type_as expand_as")}


@dataclass(frozen=True)
class ViewStep:
    """One op in a chain of views; sizes among the arguments may be symbolic."""

    op: Any  # view op
    args: tuple[Any, ...] = ()  # arguments after the base
    kwargs: Mapping[str, Any] | None = None

    def bind(self, known: Mapping[sympy.Symbol, Any]) -> Callable[[Any], Any]:
        """Return the view as a function of a tensor, with the symbols replaced by `known`."""

        def number(x: Any) -> Any:
            """Evaluate a symbolic expression; return other values unchanged."""
            return evaluate_expr(x, known) if isinstance(x, sympy.Expr) else x

        args, kwargs = pytree.tree_map(number, (self.args, dict(self.kwargs or {})))
        return lambda x: self.op(x, *args, **kwargs)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """Return the symbols among the arguments."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs or {})))
        return {one for x in leaves if isinstance(x, sympy.Expr) for one in x.free_symbols}


@dataclass(frozen=True)
class ResultView:
    """View that computes a result from another result or an argument."""

    number: int  # index of the result
    of_argument: bool  # True if the base is an argument
    base: int  # index of the base
    steps: tuple[ViewStep, ...]  # view ops from the base to the result
    shape: tuple[Size, ...] = ()  # of the base

    @cached_property
    def symbols(self) -> set[sympy.Symbol]:
        """Return the symbols of all steps."""
        return {one for step in self.steps for one in step.symbols}

    def steps_at(self, base: Tensor, known: Mapping[sympy.Symbol, Any]) -> list[Callable[[Any], Any]]:
        """Return the functions that compute the result from this base.

        Args:
            base: Base tensor.
            known: Values of the symbols of the inputs.
        """
        own = {symbol: extent for symbol, extent in zip(self.shape, base.shape) if isinstance(symbol, sympy.Symbol)}
        return [step.bind({**own, **known}) for step in self.steps]


@dataclass(frozen=True)
class SharedResults:
    """Results that are views of others."""

    views: tuple[ResultView, ...] = ()  # views among the results
    hidden: int = 0  # number of bases that the graph returns after its own results


def find_shared_results(gm: GraphModule) -> SharedResults:
    """Find the results of a captured graph, before functionalization, that are views of others.

    A common base of several results that is not a result itself is added to the results.
    """
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    inputs = gm.graph.find_nodes(op="placeholder")
    memory = Counter(one for x in (*inputs, *results) if is_tensor(x) for one in node_storages(x))
    if not any(memory[one] > 1 for x in results if is_tensor(x) for one in node_storages(x)):
        return SharedResults()
    aliases = _read_aliases(gm.graph)
    names = {i: aliases.name(x) for i, x in enumerate(results) if is_tensor(x)}
    known = {symbol for node in inputs for symbol in _step_symbols(node)}
    groups: dict[Node, list[int]] = {}
    for i, node in names.items():
        groups.setdefault(aliases.root(node), []).append(i)
    views, own = list[ResultView](), len(results)
    for root, numbers in groups.items():
        if root.op == "placeholder":
            base = list(inputs).index(root)
            found = [_result_view(aliases, i, names[i], root, True, base, known) for i in numbers]
            views += [one for one in found if one is not None]
        elif root.op != "get_attr":
            for together in _overlapping_groups(aliases, {i: names[i] for i in numbers}):
                node = _common_base(aliases, [names[i] for i in together]) or root
                if aliases.name(node) is not node:  # its shape was changed in place
                    continue
                at = next((i for i in together if names[i] is node), len(results))
                found = [_result_view(aliases, i, names[i], node, False, at, known) for i in together if i != at]
                if None not in found:
                    views += [one for one in found if one is not None]
                    results += [node] if at == len(results) else []
    if len(results) > own:
        output = gm.graph.output_node()
        output.args = (type(output.args[0])(results),)
    return SharedResults(tuple(views), len(results) - own)


def omit_views(gm: GraphModule, views: Sequence[ResultView], hidden: int) -> None:
    """Replace these views by None in the results, and return only the first `hidden` of the added bases."""
    output, shared = gm.graph.output_node(), gm.meta[VIEW_OPS]
    results = list(output.args[0])  # type: ignore[arg-type]
    for view in views:
        results[view.number] = None
    output.args = (type(output.args[0])(results[: len(results) - shared.hidden + hidden]),)
    erase_dead(gm.graph)
    gm.recompile()


def _read_aliases(graph: Graph) -> Aliases:
    """Return the aliases at the end of a program with in-place ops."""
    aliases = Aliases(graph)
    for node in graph.nodes:
        args, kwargs = aliases.calls[node] = map_arg((node.args, node.kwargs), aliases.name)
        if node.op == "output":
            break
        if node.target is set_grad_enabled:
            aliases.grad = bool(node.args[0])
        if is_view_change(node):
            aliases.adopt(node)
            aliases.rename(args[0], node)
        elif is_mutation(node):
            mutation = find_mutation(node, args, kwargs)
            if mutation.value is not None or mutation.returns_target:
                aliases.rename(node, mutation.targets[0])
            else:
                aliases.adopt(node)
        else:
            aliases.adopt(node)
    return aliases


def _view_chain(aliases: Aliases, node: Node, base: Node | None = None) -> list[Node]:
    """Return the views from a base (default: the root) to a node, in order."""
    found = list[Node]()
    while node is not base and node in aliases.parent:
        found.append(node)
        node = aliases.parent[node]
    return found[::-1]


def _common_base(aliases: Aliases, nodes: Sequence[Node]) -> Node | None:
    """Return the node of which all others are views, or None."""
    for node in nodes:
        if all(one is node or node in (_view_chain(aliases, one)) for one in nodes):
            return node
    return None


def _overlapping_groups(aliases: Aliases, names: Mapping[int, Node]) -> Iterator[list[int]]:
    """Yield groups of results in which a write to one may change others; pieces of a split are separate."""
    groups: list[list[int]] = []
    for i, node in names.items():
        touched = [g for g in groups if not all(_are_disjoint(aliases, node, names[k]) for k in g)]
        groups = [g for g in groups if g not in touched]
        groups.append([*(k for g in touched for k in g), i])
    yield from (sorted(g) for g in groups if len(g) > 1)


def _are_disjoint(aliases: Aliases, a: Node, b: Node) -> bool:
    """Return True if two views of one tensor provably have no element in common."""
    pairs = zip(_view_chain(aliases, a), _view_chain(aliases, b))
    first, second = next(((x, y) for x, y in pairs if x is not y), (None, None))
    if first is None or second is None:
        return False
    if first.target is operator.getitem and second.target is operator.getitem:
        return bool(first.args[0] is second.args[0] and first.args[1] != second.args[1])
    one, other = _cut_range(aliases, first), _cut_range(aliases, second)
    if one is None or other is None or one[0] != other[0]:
        return False
    return one[2] <= other[1] or other[2] <= one[1]


def _cut_range(aliases: Aliases, node: Node) -> tuple[int, int, int] | None:
    """Return (dim, start, end) of a view that slices, with non-negative positions, or None if unknown."""
    if node.target not in (aten.select.int, aten.slice.Tensor, aten.narrow.default):
        return None
    base, *rest = to_positional(node.target, *aliases.calls[node])
    dim, *cut = rest or [0]
    length = as_sizes(base.meta["val"].shape)[dim]
    if node.target is aten.slice.Tensor:
        start, end, step = [*cut, *list[Any]([None, None, 1])[len(cut) :]]
        start, end = start or 0, length if end is None else end
    else:
        start, step = cut[0], 1
        end = None if isinstance(start, Node) else length if start == -1 else start + 1
        if node.target is aten.narrow.default:
            end = None if isinstance(start, Node) or isinstance(cut[1], Node) else start + cut[1]
    ends = [x for x in (start, end, step) if isinstance(x, int)]
    if isinstance(length, int) and len(ends) == 3:
        start, end = (x + length if x < 0 else min(x, length) for x in ends[:2])
    known = len(ends) == 3 and step == 1 and min(start, end) >= 0
    return (dim % base.meta["val"].ndim, start, end) if known else None


def _result_view(
    aliases: Aliases, number: int, node: Node, base: Node, of_argument: bool, at: int, known: Set[sympy.Symbol]
) -> ResultView | None:
    """Return the view of a result, or None if it cannot be expressed by view ops."""
    steps = list[ViewStep]()
    chain = _view_chain(aliases, node, base)
    detaches = any(one.target is aten.detach.default for one in chain)
    if chain and aliases.detach_view(node) and not aliases.detach_view(base) and not detaches:  # created under no_grad
        steps.append(ViewStep(aten.detach.default))
    for one in chain:
        step = _view_step(aliases, one)
        if step is None:
            return None
        steps.append(step)
    shape = as_sizes(base.meta["val"].shape)
    if any(not step.symbols <= {*known, *shape} for step in steps):
        return None
    return ResultView(number, of_argument, at, tuple(steps), shape)


def _view_step(aliases: Aliases, node: Node) -> ViewStep | None:
    source, value = aliases.parent[node], node.meta["val"]
    base = source.meta["val"]
    op = functional_form(node.target) if is_view_change(node) else node.target
    if op is operator.getitem:
        return ViewStep(operator.getitem, (node.args[1],))
    args, kwargs = to_positional(op, *aliases.calls[node]), aliases.calls[node][1]
    others = [x for x in pytree.tree_leaves((args[1:], kwargs)) if is_tensor(x)]
    kwargs = {name: x for name, x in kwargs.items() if not _is_positional(op, name, len(args))}
    is_view = bool(args) and args[0] is source and not others
    if is_view and op not in _MAY_COPY and getattr(op, "is_view", False):
        rest, kwargs = map_arg((args[1:], kwargs), as_size)
        return ViewStep(op, rest, kwargs)
    if not isinstance(value, Tensor) or not isinstance(base, Tensor) or value.dtype != base.dtype:
        return None
    shape, strides = as_sizes(value.shape), as_sizes(value.stride())
    starts = as_size(base.storage_offset()), as_size(value.storage_offset())
    if (
        is_same_shape(shape, as_sizes(base.shape))
        and is_same_shape(strides, as_sizes(base.stride()))
        and is_same_size(*starts)
    ):
        return ViewStep(aten.alias.default)
    if op in _RESHAPES:
        return ViewStep(aten.view.default, (list(shape),))
    return ViewStep(_as_strided, (list(shape), list(strides), starts[1] - starts[0]))


def _is_positional(op: Any, name: str, count: int) -> bool:
    return name in [argument.name for argument in schema_of(op).arguments[:count]]


def _as_strided(x: Tensor, shape: Sequence[int], strides: Sequence[int], start: int) -> Tensor:
    """Return a strided view that starts `start` elements after the start of x."""
    return x.as_strided(shape, strides, int(x.storage_offset()) + start)


def _step_symbols(node: Node) -> set[sympy.Symbol]:
    value = node.meta.get("val")
    found = (
        as_sizes(value.shape)
        if isinstance(value, Tensor)
        else [as_size(value)]
        if isinstance(value, torch.SymInt)
        else []
    )
    return {one for one in found if isinstance(one, sympy.Symbol)}
