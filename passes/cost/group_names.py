"""Find the process groups of a program's own collectives, their axes, and how they are related.

A program may call collectives itself, for tensor parallelism or to average a loss. Their process group is an argument,
a string in functional collectives. Two groups may be axes of a grid of ranks (a `DeviceMesh`), one may contain the
other, or they are unrelated: see `GroupGrid`. All ranks must agree on this while they compile.

A group is called by the name of its process group. A declared group is in the table of `known_groups.py`. A row
exchange is a collective that may move rows of the sequence: any but a reduction of scalars and vectors.
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
    is_known_process_group,
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
LISTS_OF_GROUPS = ("forward", "backward")  # arguments of sp::reduce_pair: lists of "reduction group", such as "sum 3"

# function of a group and a tuple that returns the tuples of all ranks of the group
GatherRanks = Callable[[Ranks, tuple[int, ...]], Sequence[tuple[int, ...] | None]]


def program_groups(gm: GraphModule, inputs: Sequence[Any]) -> list[Ranks]:
    """Return the groups of more than one rank that the program's collectives and DTensors use, in order.

    For each of these groups, the runtime compares the inputs of its ranks. A group over which the program only reduces
    scalars and vectors, as for the average of a loss, is included if it is declared and there is another group: then
    the reductions over both may be merged.
    """
    values = [node.meta.get("example_value") for node in gm.graph.nodes]
    of_tensors = [name for x in (*inputs, *values) if isinstance(x, DTensor) for name in group_names(x.device_mesh)]
    groups = _multi_rank_groups([*_collective_groups(gm, _is_mergeable), *of_tensors])
    row_groups = {*_collective_groups(gm, _is_row_exchange), *of_tensors}
    has_row_group = any(ranks.group in row_groups for ranks in groups)
    return groups if len(groups) > 1 or has_row_group else []


def has_user_exchanges(gm: GraphModule) -> bool:
    """Return True if the program itself calls a collective over more than one rank."""
    return bool(_multi_rank_groups(_collective_groups(gm, is_collective)))


def _multi_rank_groups(names: Iterable[str]) -> list[Ranks]:
    """Return the groups of more than one rank among the names, without duplicates."""
    if not dist.is_initialized():
        return []
    groups = [Ranks(process_group(name).size(), name) for name in dict.fromkeys(names) if is_known_process_group(name)]
    return [ranks for ranks in groups if ranks.n > 1]


def check_groups(gm: GraphModule) -> None:
    """Check that every functional collective of torch names an existing process group, before ranks communicate.

    Raises:
        SpError: If this rank does not have the group of a collective.
    """
    for node in gm.graph.nodes if dist.is_initialized() else ():
        group = exchange_group(node)
        if group and namespace_of(node.target).startswith(c10d.name) and not is_known_process_group(group):
            raise SpError("SP612", f"this rank has no process group {group!r}, which {describe_node(node)} uses.")


def _collective_groups(gm: GraphModule, is_counted: Callable[[Node], bool]) -> Iterator[str]:
    """Yield the names of the groups of the collectives for which `is_counted` is true, also of subgraphs."""
    for node in iterate_nodes(gm):
        names = named_groups(node)
        if names and is_counted(node):
            yield from sorted(names)


def iterate_nodes(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph in order, including those of subgraphs of higher-order ops.

    The nodes of a subgraph replace its `get_attr` node.
    """
    for node in gm.graph.nodes:
        body = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield from iterate_nodes(body)
        else:
            yield node


def _is_mergeable(node: Node) -> bool:
    """Return True for a collective that may move rows, or an all_reduce over a declared group, which may be merged."""
    is_declared = not named_groups(node).isdisjoint(declared_groups().members)
    return _is_row_exchange(node) or (node_packet(node) in ALL_REDUCES and is_declared)


def _is_row_exchange(node: Node) -> bool:
    """Return True if the collective may move rows: it is more than a reduction of scalars or vectors.

    Such reductions, as of losses over data-parallel ranks, move no rows. The kind of reduction (sum, max, ...) is
    ignored: if it differs between ranks, all of them must still get the same answer, and then find the difference.
    """
    if namespace_of(node.target) not in TORCH_EXCHANGES:
        return node_packet(node) is sp.all_to_all_permute
    if node_packet(node) not in ALL_REDUCES:
        return True
    operands = [n.meta.get("example_value") for n in node.all_input_nodes]
    dims = [x.ndim for x in operands if isinstance(x, torch.Tensor)]
    return not dims or max(dims) > 1  # operands of unknown shape may have rows


def is_collective(node: Node) -> bool:
    """Return True if the node calls a collective: any op of torch's namespaces of collectives or of `sp`."""
    target: Any = node.target if node.op == "call_function" else None
    # Dynamo's graphs call Python functions of torch.distributed._functional_collectives.
    is_functional = "functional_collectives" in getattr(target, "__module__", "")
    return is_functional or namespace_of(target) in (*TORCH_EXCHANGES, sp.name)


def is_pending_exchange(node: Node) -> bool:
    """Return True if the node starts a functional collective, whose result must be waited for."""
    return namespace_of(node.target) == c10d.name and node.target is not c10d.wait_tensor.default


def named_groups(node: Node) -> set[str]:
    """Return the names of the groups in the arguments of a collective; empty for other nodes."""
    if not is_collective(node) or not any(isinstance(x, str) for x in pytree.tree_leaves((node.args, node.kwargs))):
        return set()
    positions = _group_arguments(node.target)
    values = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in positions]
    texts = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, str) and leaf]
    return {text.rpartition(" ")[2] for text in texts}  # "3", or "sum 3" with a reduction


def exchange_group(node: Node) -> str | None:
    """Return the name of the only group of a collective, or None if it has none or several."""
    names = named_groups(node)
    return names.pop() if len(names) == 1 else None


@cache
def _group_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Return (position, name) of each parameter of a collective that names groups."""
    op = getattr(target, "default", target)  # Dynamo writes an op without its overload
    if isinstance(op, OpOverload):
        names = [argument.name for argument in schema_of(op).arguments]
    else:
        names = list(inspect.signature(op).parameters)
    # Arguments called `forward` and `backward` name groups in sp::reduce_pair only.
    of_groups = GROUP_ARGUMENTS + (LISTS_OF_GROUPS if op is sp.reduce_pair.default else ())
    return tuple((i, name) for i, name in enumerate(names) if name in of_groups)


def has_dtensors(gm: GraphModule, inputs: Iterable[Any]) -> bool:
    """Return True if an input or a value of the Dynamo graph is a DTensor."""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return any(isinstance(x, DTensor) for x in (*inputs, *values))


@dataclass(frozen=True)
class GroupGrid:
    """Relations of the ranks of one group ("this group") to other groups, by name.

    Example: on a 2 x 2 mesh with the axes a = {0, 2}, {1, 3} and b = {0, 1}, {2, 3}, both ranks of a group of a have
    the same rank in their groups of b, and the reverse. So the axes of a mesh are level and parallel to each other.
    """

    level: frozenset[str] = frozenset()  # groups in which all ranks of this group have the same rank
    parallel: frozenset[str] = frozenset()  # groups whose ranks all have the same rank in this group
    enclosing: frozenset[str] = frozenset()  # groups that contain all ranks of this group

    def placement_after(self, over: str, is_full: bool) -> Placement | None:
        """Return the placement over this group of the result of a collective over another group.

        The operand is equal on the ranks of this group, or sharded over them. Example: on a mesh with the axes dp and
        sp, a value that is sharded over sp is still sharded over sp after an all_reduce over dp.

        Args:
            over: Group of the collective.
            is_full: True if the results are equal on all ranks of `over`, as those of an all_gather.

        Returns:
            REPLICATE or VARYING; None if the result has the placement of the operand, as in the example: if both groups
            are axes of one grid, ranks exchange with ranks that have the same rank in this group.
        """
        if over in self.level and over in self.parallel:
            return None
        # Results that are equal on all ranks of `over` are equal on those of this group if `over` contains them.
        return REPLICATE if is_full and over in self.enclosing else VARYING


def group_grids(groups: Sequence[Ranks], all_gather: GatherRanks) -> dict[str, GroupGrid]:
    """Return the relations of every group to the others. All ranks must call it, each with its own groups.

    Args:
        groups: Groups of this rank.
        all_gather: Exchanges a tuple with all ranks of a group.
    """
    members: dict[str, set[int]] = {}  # group -> global ranks
    positions: list[int] = []  # rank of this process in each group
    for ranks in groups:
        group = ranks.process_group
        members[ranks.group] = set() if group is None else set(dist.get_process_group_ranks(group))
        positions.append(0 if group is None else dist.get_rank(group))
    level: dict[str, frozenset[str]] = {}
    for ranks in groups:
        gathered = all_gather(ranks, tuple(positions))
        # Row = a rank of this group; column = its rank in each of the groups. Level groups have a constant column.
        # A rank that has failed sends None, and one with another program may have another number of groups.
        rows = [row for row in gathered if row is not None and len(row) == len(positions)]
        level[ranks.group] = frozenset(g.group for i, g in enumerate(groups) if len({row[i] for row in rows}) == 1)
    return {
        name: GroupGrid(
            level[name],
            parallel=frozenset(other for other, level_of_other in level.items() if name in level_of_other),
            enclosing=frozenset(other for other, other_ranks in members.items() if members[name] <= other_ranks),
        )
        for name in level
    }
