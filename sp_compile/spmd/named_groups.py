"""Over which groups a program exchanges by itself, what, and how these lie to each other: as the axes of a grid, one
around another, or neither. Its ranks have to agree on that while they compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from sp_compile._compat import group_names, known_process_group, namespace_of, process_group, pytree
from sp_compile.config import Ranks
from sp_compile.errors import SpError, at
from sp_compile.graph.call import is_tensor
from sp_compile.graph.sizes import same, sizes
from sp_compile.sharding.placement import REPLICATE, VARYING, Placement

from .declare import declared

c10d = torch.ops._c10d_functional
# Namespaces of ops whose strings name groups, which ranks call as they like.
WORDS = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "sp")


Ask = Callable[[Ranks, tuple[int, ...]], Sequence[tuple[int, ...] | None]]


def groups_of(gm: GraphModule, inputs: Sequence[Any]) -> list[Ranks]:
    """The groups of more than one rank that the program's collectives and DTensors name, in order of appearance.

    Those over which it only reduces numbers and vectors count where another group is named too: they may be merged.
    """
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    tensors = [name for x in (*inputs, *values) if isinstance(x, DTensor) for name in group_names(x.device_mesh)]
    several = _of_several([*_named(gm, _may_merge), *tensors])
    rows = {*_named(gm, _exchanges_rows), *tensors}
    return several if len(several) > 1 or not rows.isdisjoint(r.group for r in several) else []


def exchanges_by_itself(gm: GraphModule) -> bool:
    """Does the program name a group of more than one rank in any exchange?"""
    return bool(_of_several(_named(gm, is_collective)))


def _of_several(names: Iterable[str]) -> list[Ranks]:
    """The names that are those of groups of more than one rank, once each."""
    found = [n for n in dict.fromkeys(names) if known_process_group(n)] if dist.is_initialized() else []
    return [ranks for ranks in (Ranks(process_group(n).size(), n) for n in found) if ranks.n > 1]


def check_groups(gm: GraphModule) -> None:
    """Does every collective name a process group that there is? Raises SpError where one does not."""
    for node in gm.graph.nodes if dist.is_initialized() else ():
        words = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]  # the group comes last
        functional = words and namespace_of(node.target).startswith("_c10d_functional")
        if functional and not known_process_group(words[-1]):
            raise SpError(
                f"this rank has no process group {words[-1]!r}, which {node.target} names: pass the group_name of a "
                f"group that all its ranks have made. At {at(node)}"
            )


def _named(gm: GraphModule, counts: Callable[[Node], bool]) -> Iterator[str]:
    """Every string among the arguments of the exchanges that count, in bodies of regions too."""
    for node in every_node(gm):
        names = named_groups(node) if node.op == "call_function" else set()
        if names and counts(node):
            yield from sorted(names)


def every_node(gm: GraphModule) -> Iterator[Node]:
    """The nodes of a graph, in order; of a region's body its nodes in place of the one that names it."""
    for node in gm.graph.nodes:
        body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield from every_node(body)
        else:
            yield node


def _may_merge(node: Node) -> bool:
    """Also: is it a reduction over a declared group?"""
    names = {a for a in node.args if isinstance(a, str)}
    return _exchanges_rows(node) or ("all_reduce" in str(node.target) and bool(declared().members.keys() & names))


def _exchanges_rows(node: Node) -> bool:
    """Reductions of numbers and vectors, as of losses over data-parallel ranks, leave no layer to scatter.

    Whatever the reduction: ranks that disagree on it must meet to find out.
    """
    if "c10d" not in str(node.target):
        return "sp.all_to_all_permute" in str(node.target)
    if "all_reduce" not in str(node.target):
        return True
    operands = [n.meta.get("example_value") for n in node.all_input_nodes]
    ranks_of = [x.ndim for x in operands if isinstance(x, torch.Tensor)]
    return not ranks_of or max(ranks_of) > 1


def is_collective(node: Node) -> bool:
    """Does the node exchange something with other ranks?"""
    target: Any = node.target if node.op == "call_function" else None
    return namespace_of(target) in WORDS or "functional_collectives" in getattr(target, "__module__", "")


def is_under_way(node: Node) -> bool:
    """Is it an exchange that has begun, and that somebody has to wait for?"""
    return namespace_of(node.target) == c10d.name and node.target is not c10d.wait_tensor.default


def named_groups(node: Node) -> set[str]:
    """The strings among an exchange's arguments; of "sum 3", as sp::reduce_pair has it, the group."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return {leaf.rpartition(" ")[2] for leaf in leaves if isinstance(leaf, str)}


def cut_exchanges(gm: GraphModule, local: GraphModule, group: str) -> str:
    """Which dims of what goes over a group have another size in `local`; the sizes where these are other exchanges."""
    before, after = (_operands(graph_module, group) for graph_module in (gm, local))
    if [list(map(len, one)) for one in before] != [list(map(len, one)) for one in after]:
        return str(after)
    pairs = [pair for old, new in zip(before, after) for pair in zip(old, new)]
    return str([[i for i, (a, b) in enumerate(zip(*pair)) if not same(a, b)] for pair in pairs])


def _operands(gm: GraphModule, group: str) -> list[list[tuple[Any, ...]]]:
    """The shapes of what each exchange over the group sends."""
    found = [node for node in gm.graph.nodes if is_collective(node) and group in named_groups(node)]
    return [[tuple(sizes(x.meta["val"].shape)) for x in node.all_input_nodes if is_tensor(x)] for node in found]


def has_dtensors(gm: GraphModule, inputs: Iterable[Any]) -> bool:
    """Is any input a DTensor, or any value of the Dynamo graph?"""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return any(isinstance(x, DTensor) for x in (*inputs, *values))


@dataclass(frozen=True)
class Grid:
    """Other groups, by name, as the ranks of one group see them.

    level: all its ranks have the same rank there. beside: all the ranks there have the same rank in it. around: those
    groups that hold all its ranks. The axes of a mesh are level and beside each other.
    """

    level: frozenset[str] = frozenset()
    beside: frozenset[str] = frozenset()
    around: frozenset[str] = frozenset()

    def leaves(self, over: str, whole: bool) -> Placement | None:
        """What an exchange of equal values leaves; None: the same on all ranks, row by row if its operand is cut.

        whole: its results are the same on all ranks that take part.
        """
        if over in self.level and over in self.beside:
            return None
        return REPLICATE if whole and over in self.around else VARYING


def grids(groups: Sequence[Ranks], ask: Ask) -> dict[str, Grid]:
    """The Grid of every group; `ask`: every rank's answer, over a group. Every rank calls it, with its own groups."""
    members = {r.group: _members(r) for r in groups}
    mine = tuple(dist.get_rank(r.process_group) if r.process_group is not None else 0 for r in groups)
    level: dict[str, frozenset[str]] = {}
    for ranks in groups:
        everyone = [places for places in ask(ranks, mine) if places is not None and len(places) == len(mine)]
        alike = [len({places[i] for places in everyone}) == 1 for i in range(len(groups))]
        level[ranks.group] = frozenset(g.group for g, is_alike in zip(groups, alike) if is_alike)
    return {
        name: Grid(
            level[name],
            frozenset(other for other, theirs in level.items() if name in theirs),
            frozenset(other for other, theirs in members.items() if members[name] <= theirs),
        )
        for name in level
    }


def _members(ranks: Ranks) -> frozenset[int]:
    group = ranks.process_group
    return frozenset() if group is None else frozenset(dist.get_process_group_ranks(group))
