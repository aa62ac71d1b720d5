"""Route exchanges between some ranks of a group over its own communicator, without sub-groups.

A route is the name of a group with a single collective, all_to_all_single:

    "<group>/shift:<offset>:<stride>"   to the rank `offset` further on the ring of every stride-th rank
    "<group>/among:<size>"              between the `size` neighbors r // size * size ...
    "<group>/across:<size>"             between the ranks r % size, r % size + size, ...
    "<group>/fold" and "<group>/unfold" from contiguous chunks to zigzag ones, and back

It runs as an all_to_all_single of the parent group `<group>` whose split sizes depend on the rank. Routes are resolved
at run time, so that the graph is equal on every rank. All routes use one communicator, so that all ranks issue its
collectives in one order. A mesh of (ring, ulysses) axes needs no collective setup, which a compiler pass could not do
safely.

    neighborhood   ranks of consecutive indices that share the heads of an attention
    ring           ranks that pass rows to each other in a circle
    chunk          one of 2n equal parts of a sequence. Contiguous ranks store chunks 2r and 2r + 1, zigzag ranks chunks
                   r and 2n - 1 - r. To fold is to exchange the first for the second
    block          the rows that one rank sends to another
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from sp_compile.lowering.torch_compat import is_known_process_group, process_group, register_process_group


class RouteEnds(NamedTuple):
    """The ranks with which one rank exchanges blocks on a route."""

    destinations: list[int]  # ranks that its blocks are sent to, ascending
    sources: list[int]  # ranks that it receives a block from, ascending


def route_kind(group: str) -> str:
    """Return the kind of a route, such as "among" of "0/among:4"; "" for a process group."""
    return group.partition("/")[2].partition(":")[0]


def shift_route(group: str, offset: int, stride: int = 1) -> str:
    """Return the route of one ring step, on which rank r sends to r + offset * stride, modulo the ring.

    Args:
        group: Name of the parent group.
        offset: Steps on the ring.
        stride: Distance between ranks of a ring; rank r is on the ring of r % stride.
    """
    return f"{group}/shift:{offset}:{stride}"


def neighborhood_route(group: str, size: int) -> str:
    """Return the route of all-to-alls between the ranks of a neighborhood of `size` adjacent ranks."""
    return f"{group}/among:{size}"


def cross_route(group: str, size: int) -> str:
    """Return the route of all-to-alls between ranks of equal index in their neighborhoods of `size`."""
    return f"{group}/across:{size}"


def fold_route(group: str, back: bool = False) -> str:
    """Return the route from contiguous to zigzag order, of two chunks per rank.

    Contiguous ranks store chunks 2r and 2r + 1, zigzag ranks chunks r and 2n - 1 - r.

    Args:
        group: Name of the parent group.
        back: True for the route in the opposite direction.
    """
    return f"{group}/{'unfold' if back else 'fold'}"


def parent_group(group: str) -> str:
    """Return the name of the group that a route belongs to, or of the group itself if it is not a route."""
    return group.partition("/")[0]


def route_ends(group: str, rank: int, n: int) -> RouteEnds:
    """Return the destinations of a rank's blocks and the sources of the blocks that it receives.

    On the route "0/shift:1:2" of 4 ranks, rank 1 sends to rank 3 and receives from it.

    Args:
        group: Name of the route.
        rank: Rank in the parent group.
        n: Number of ranks of the parent group.
    """
    kind, *numbers = group.partition("/")[2].split(":")  # such as "shift", and the offset and the stride
    return _ENDS[kind](rank, n, *map(int, numbers))


def _all_members(members: range) -> RouteEnds:
    """Return the ends of a route on which every member sends to all members."""
    return RouteEnds(list(members), list(members))


def _fold_ends(rank: int, n: int) -> RouteEnds:
    """Return the ends of a fold, the route from contiguous chunks to zigzag chunks.

    A rank sends its two contiguous chunks, 2r and 2r + 1, and receives its two zigzag chunks, r and 2n - 1 - r. In
    zigzag order, chunk c is on rank min(c, 2n - 1 - c); in contiguous order, on rank c // 2.
    """
    destinations = sorted(min(chunk, 2 * n - 1 - chunk) for chunk in (2 * rank, 2 * rank + 1))
    sources = [chunk // 2 for chunk in (rank, 2 * n - 1 - rank)]
    return RouteEnds(destinations, sources)


# Functions of the rank, the number of ranks and the numbers in the route's name, that return the ends of a route.
_ENDS: dict[str, Callable[..., RouteEnds]] = {
    "shift": lambda rank, n, offset, stride: RouteEnds([(rank + offset * stride) % n], [(rank - offset * stride) % n]),
    "among": lambda rank, n, size: _all_members(range(rank // size * size, rank // size * size + size)),
    "across": lambda rank, n, size: _all_members(range(rank % size, n, size)),
    "fold": _fold_ends,
    "unfold": lambda rank, n: RouteEnds(*reversed(_fold_ends(rank, n))),
}


def declare_attention_routes(group: str, stride: int, steps: int) -> None:
    """Register every route of a sharded attention.

    Tracing the attention would register them, but a program that torch loads from its cache is not traced.

    Args:
        group: Name of the parent group.
        stride: Number of ranks of a neighborhood.
        steps: Number of steps of the ring: the blocks of keys that a query needs.
    """
    # Keys, values and their gradients move by one rank per step. After the last step the gradients are steps - 1 ranks
    # from the owners of their keys, and return in one shift.
    shifts = [shift_route(group, offset, stride) for offset in (1, 1 - steps)]
    exchanges = [neighborhood_route(group, stride), cross_route(group, stride)]
    for route in (*shifts, *exchanges, fold_route(group), fold_route(group, back=True)):
        ensure_route(route)


def declare_shift_routes(group: str, offsets: Iterable[int]) -> None:
    """Register the routes of shifts around the ring of all ranks, and of the opposite shifts of their gradients.

    A program that torch loads from its cache was lowered in another process: its routes were registered only there.
    """
    for offset in offsets:
        ensure_route(shift_route(group, offset))
        ensure_route(shift_route(group, -offset))


_routes: dict[str, dist.ProcessGroup] = {}  # strong references: the registry of process groups stores weak ones


def ensure_route(group: str) -> str:
    """Register the process group of a route, without communication, and return `group`.

    A collective over a route requires it. Does nothing if `group` is not a route or is registered already, and for a
    parent that is not a process group, as in a simulation.
    """
    parent = parent_group(group)
    if parent != group and is_known_process_group(parent) and not is_known_process_group(group):
        _routes[group] = _Route(group)
        register_process_group(group, _routes[group])
    return group


class _Route(dist.ProcessGroup):
    """Process group whose only collective is all_to_all_single over a route."""

    def __init__(self, group: str) -> None:
        parent = process_group(parent_group(group))
        super().__init__(parent.rank(), parent.size())
        self._route = group

    def getBackendName(self) -> str:
        """Return "sp", the name of the backend, which torch requires."""
        return "sp"

    def alltoall_base(
        self, output: Tensor, sent: Tensor, output_splits: list[int], splits: list[int], *options: Any
    ) -> Any:
        """Run the route's all-to-all as one of the parent group.

        Args:
            output: The received rows; written in place.
            sent: The rows to send.
            output_splits: Number of rows from each source of the route.
            splits: Number of rows for each destination of the route.
            *options: Further arguments of ProcessGroup.alltoall_base.
        """
        parent = process_group(parent_group(self._route))
        destinations, sources = route_ends(self._route, parent.rank(), parent.size())
        rows_to, rows_from = [0] * parent.size(), [0] * parent.size()  # by rank of the parent
        for rank, rows in zip(destinations, splits, strict=True):
            rows_to[rank] += rows  # a fold may send both chunks to one rank
        for rank, rows in zip(sources, output_splits, strict=True):
            rows_from[rank] += rows
        return parent.alltoall_base(output, sent, rows_from, rows_to, *options)
