"""Find the process groups of a program's own collectives, their axes, and how they are related.

Two groups may be axes of a grid, one may contain the other, or they are unrelated. All ranks must agree on this while
they compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from sp_compile.lowering.base.errors import SpError, describe_node
from sp_compile.lowering.base.ranks import Ranks
from sp_compile.lowering.torch_compat import (
    OpOverload,
    group_names,
    known_process_group,
    namespace_of,
    process_group,
    pytree,
    schema_of,
)
from sp_compile.passes.graph.call import node_packet
from sp_compile.passes.sharding.placement import REPLICATE, VARYING, Placement

from .known_groups import declared_groups

c10d, sp = torch.ops._c10d_functional, torch.ops.sp
TORCH_EXCHANGES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")  # namespaces
ALL_REDUCES = (c10d.all_reduce, c10d.all_reduce_, c10d.all_reduce_coalesced, c10d.all_reduce_coalesced_)
GROUP_ARGUMENTS = ("group_name", "group")
LISTS_OF_GROUPS = ("forward", "backward")  # "sum 3", as sp::reduce_pair has it

GatherRanks = Callable[[Ranks, tuple[int, ...]], Sequence[tuple[int, ...] | None]]


def program_groups(gm: GraphModule, inputs: Sequence[Any]) -> list[Ranks]:
    """Return the groups of more than one rank in the program's collectives and DTensors, in order.

    Groups that only reduce scalars and vectors count if another group occurs, too, because these reductions may be
    merged.
    """
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    tensors = [name for x in (*inputs, *values) if isinstance(x, DTensor) for name in group_names(x.device_mesh)]
    several = _multi_rank_names([*_named_groups(gm, _is_mergeable), *tensors])
    rows = {*_named_groups(gm, _is_row_exchange), *tensors}
    return several if len(several) > 1 or not rows.isdisjoint(r.group for r in several) else []


def has_user_exchanges(gm: GraphModule) -> bool:
    """Return True if a collective of the program uses a group of more than one rank."""
    return bool(_multi_rank_names(_named_groups(gm, is_collective)))


def _multi_rank_names(names: Iterable[str]) -> list[Ranks]:
    """Return the groups of more than one rank among the names, without duplicates."""
    found = [n for n in dict.fromkeys(names) if known_process_group(n)] if dist.is_initialized() else []
    return [ranks for ranks in (Ranks(process_group(n).size(), n) for n in found) if ranks.n > 1]


def check_groups(gm: GraphModule) -> None:
    """Check that every collective names an existing process group.

    Raises:
        SpError: If this rank does not have the group of a collective.
    """
    for node in gm.graph.nodes if dist.is_initialized() else ():
        group = exchange_group(node)
        if group and namespace_of(node.target).startswith(c10d.name) and not known_process_group(group):
            raise SpError("SP612", f"this rank has no process group {group!r}, which {describe_node(node)} uses.")


def _named_groups(gm: GraphModule, counts: Callable[[Node], bool]) -> Iterator[str]:
    """Yield the groups of the collectives for which `counts` is true, including bodies of regions."""
    for node in iterate_nodes(gm):
        names = named_groups(node)
        if names and counts(node):
            yield from sorted(names)


def iterate_nodes(gm: GraphModule) -> Iterator[Node]:
    """Iterate over the nodes of a graph in order; a region's body replaces the node that references it."""
    for node in gm.graph.nodes:
        body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield from iterate_nodes(body)
        else:
            yield node


def _is_mergeable(node: Node) -> bool:
    """Return True for `_is_row_exchange` and for reductions over a declared group."""
    declares = not declared_groups().members.keys().isdisjoint(named_groups(node))
    return _is_row_exchange(node) or (node_packet(node) in ALL_REDUCES and declares)


def _is_row_exchange(node: Node) -> bool:
    """Return True if the collective is more than a reduction of scalars or vectors.

    Such reductions, as of losses over data-parallel ranks, leave no layer to scatter. The kind of reduction is ignored,
    because ranks that disagree on it must communicate to detect that.
    """
    if namespace_of(node.target) not in TORCH_EXCHANGES:
        return node_packet(node) is sp.all_to_all_permute
    if node_packet(node) not in ALL_REDUCES:
        return True
    operands = [n.meta.get("example_value") for n in node.all_input_nodes]
    ranks_of = [x.ndim for x in operands if isinstance(x, torch.Tensor)]
    return not ranks_of or max(ranks_of) > 1


def is_collective(node: Node) -> bool:
    """Return True if the node communicates with other ranks."""
    target: Any = node.target if node.op == "call_function" else None
    is_functional = "functional_collectives" in getattr(target, "__module__", "")
    return is_functional or namespace_of(target) in (*TORCH_EXCHANGES, sp.name)


def is_pending_exchange(node: Node) -> bool:
    """Return True if the node starts a collective that needs a wait."""
    return namespace_of(node.target) == c10d.name and node.target is not c10d.wait_tensor.default


def named_groups(node: Node) -> set[str]:
    """Return the groups that a collective names; empty for other nodes."""
    has_words = any(isinstance(leaf, str) for leaf in pytree.tree_leaves((node.args, node.kwargs)))
    places = _group_arguments(node.target) if has_words and is_collective(node) else ()
    arguments = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in places]
    return {leaf.rpartition(" ")[2] for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, str) and leaf}


def exchange_group(node: Node) -> str | None:
    """Return the only group that a collective names, or None if it names none or several."""
    names = named_groups(node)
    return names.pop() if len(names) == 1 else None


@cache
def _group_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments of a collective that name groups."""
    op = getattr(target, "default", target)  # Dynamo writes an op without its overload
    if isinstance(op, OpOverload):
        arguments = [a.name for a in schema_of(op).arguments]
        wanted = (*GROUP_ARGUMENTS, *(LISTS_OF_GROUPS if op is sp.reduce_pair.default else ()))
    else:
        arguments, wanted = list(inspect.signature(op).parameters), GROUP_ARGUMENTS
    return tuple((i, name) for i, name in enumerate(arguments) if name in wanted)


def has_dtensors(gm: GraphModule, inputs: Iterable[Any]) -> bool:
    """Return True if an input or a value of the Dynamo graph is a DTensor."""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return any(isinstance(x, DTensor) for x in (*inputs, *values))


@dataclass(frozen=True)
class GroupGrid:
    """Relations of the ranks of one group to other groups, by name.

    The axes of a mesh are level and parallel to each other.
    """

    level: frozenset[str] = frozenset()  # groups in which all ranks of this group have the same rank
    parallel: frozenset[str] = frozenset()  # groups whose ranks all have the same rank in this group
    enclosing: frozenset[str] = frozenset()  # groups that contain all ranks of this group

    def placement_after(self, over: str, is_full: bool) -> Placement | None:
        """Return the placement of the result of an exchange of equal values.

        Args:
            over: Group of the exchange.
            is_full: The results are equal on all ranks that take part.

        Returns:
            The placement; None if the result has the placement of the operand, row by row.
        """
        if over in self.level and over in self.parallel:
            return None
        return REPLICATE if is_full and over in self.enclosing else VARYING


def group_grids(groups: Sequence[Ranks], all_gather: GatherRanks) -> dict[str, GroupGrid]:
    """Return the `GroupGrid` of every group. All ranks must call it, each with its own groups.

    Args:
        groups: Groups of this rank.
        all_gather: Exchanges a tuple with all ranks of a group.
    """
    members = {r.group: _member_ranks(r) for r in groups}
    own = tuple(dist.get_rank(r.process_group) if r.process_group is not None else 0 for r in groups)
    level: dict[str, frozenset[str]] = {}
    for ranks in groups:
        everyone = [places for places in all_gather(ranks, own) if places is not None and len(places) == len(own)]
        equal = [len({places[i] for places in everyone}) == 1 for i in range(len(groups))]
        level[ranks.group] = frozenset(g.group for g, is_equal in zip(groups, equal) if is_equal)
    return {
        name: GroupGrid(
            level[name],
            frozenset(other for other, theirs in level.items() if name in theirs),
            frozenset(other for other, theirs in members.items() if members[name] <= theirs),
        )
        for name in level
    }


def _member_ranks(ranks: Ranks) -> frozenset[int]:
    group = ranks.process_group
    return frozenset() if group is None else frozenset(dist.get_process_group_ranks(group))
