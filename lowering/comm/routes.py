"""Route exchanges between some ranks of a group over its own communicator, without sub-groups.

    "<group>/shift:<offset>:<stride>"   to the rank `offset` further on the ring of every stride-th rank
    "<group>/among:<size>"              between the `size` neighbors r // size * size ...
    "<group>/across:<size>"             between the ranks r % size, r % size + size, ...
    "<group>/fold" and "<group>/unfold" from contiguous chunks to zigzag ones, and back

A route is the name of a group with a single collective, all_to_all_single, which runs as the parent's with split sizes
that depend on the rank. Routes are resolved at run time, so that the graph is equal on every rank. One communicator
carries everything, so that all ranks issue its collectives in one order. A mesh of (ring, ulysses) axes needs no
collective setup, which a compiler pass could not do safely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sp_compile.lowering.torch_compat import known_process_group, process_group, register_process_group

Ends = tuple[list[int], list[int]]  # destinations and sources of a rank's blocks, ascending


def shift_route(group: str, offset: int, stride: int = 1) -> str:
    """Return the route of one ring step, on which rank r sends to r + offset * stride, modulo the ring.

    Args:
        group: Name of the parent group.
        offset: Steps on the ring.
        stride: Distance between ranks of a ring; rank r is on the ring of r % stride.
    """
    return f"{group}/shift:{offset}:{stride}"


def neighborhood_route(group: str, size: int) -> str:
    """Return the route of all-to-alls between `size` adjacent ranks."""
    return f"{group}/among:{size}"


def cross_route(group: str, size: int) -> str:
    """Return the route of all-to-alls between ranks of equal index in their neighborhoods of `size`."""
    return f"{group}/across:{size}"


def fold_route(group: str, back: bool = False) -> str:
    """Return the route from contiguous to zigzag order, of two chunks per rank.

    Args:
        group: Name of the parent group.
        back: True for the route from zigzag to contiguous order. Contiguous ranks store chunks 2r and 2r + 1, zigzag
            ranks chunks r and 2n - 1 - r.
    """
    return f"{group}/{'unfold' if back else 'fold'}"


def parent_group(group: str) -> str:
    """Return the group that carries a route; a plain group carries itself."""
    return group.partition("/")[0]


def route_ends(group: str, rank: int, n: int) -> Ends:
    """Return the destinations of a rank's blocks and the sources of the blocks that it receives.

    Args:
        group: Name of the route.
        rank: Rank in the parent group.
        n: Number of ranks of the parent group.
    """
    kind, *numbers = group.partition("/")[2].split(":")
    return _ENDS[kind](rank, n, *map(int, numbers))


def _all_members(members: range) -> Ends:
    return list(members), list(members)


def _fold_ends(rank: int, n: int) -> Ends:
    """Return the zigzag owners of a rank's two contiguous chunks, and the owners of its zigzag chunks."""
    owners = sorted(min(chunk, 2 * n - 1 - chunk) for chunk in (2 * rank, 2 * rank + 1))
    return owners, [rank // 2, (2 * n - 1 - rank) // 2]


_ENDS: dict[str, Callable[..., Ends]] = {
    "shift": lambda rank, n, offset, stride: ([(rank + offset * stride) % n], [(rank - offset * stride) % n]),
    "among": lambda rank, n, size: _all_members(range(rank // size * size, rank // size * size + size)),
    "across": lambda rank, n, size: _all_members(range(rank % size, n, size)),
    "fold": _fold_ends,
    "unfold": lambda rank, n: _fold_ends(rank, n)[::-1],
}


def declare_attention_routes(group: str, stride: int, steps: int) -> None:
    """Register every route of a sharded attention, for programs that a cache loads without tracing.

    Args:
        group: Name of the parent group.
        stride: Number of adjacent ranks that share heads.
        steps: Number of steps of the ring.
    """
    shifts = [shift_route(group, offset, stride) for offset in (1, 1 - steps)]
    for route in (
        *shifts,
        neighborhood_route(group, stride),
        cross_route(group, stride),
        fold_route(group),
        fold_route(group, back=True),
    ):
        ensure_route(route)


def declare_shift_routes(group: str, offsets: Iterable[int]) -> None:
    """Register the routes of shifts around the ring of all ranks, and of their gradients."""
    for offset in offsets:
        ensure_route(shift_route(group, offset))
        ensure_route(shift_route(group, -offset))


_routes: dict[str, dist.ProcessGroup] = {}  # strong references: the registry of process groups stores weak ones


def ensure_route(group: str) -> str:
    """Register the route in this process, without communication, and return `group`.

    Does nothing for a plain group, and if the parent is not registered.
    """
    name = parent_group(group)
    if name != group and known_process_group(name) and not known_process_group(group):
        _routes[group] = _Route(group)
        register_process_group(group, _routes[group])
    return group


class _Route(dist.ProcessGroup):
    """Process group whose only collective is all_to_all_single over a route."""

    def __init__(self, group: str) -> None:
        carrier = process_group(parent_group(group))
        super().__init__(carrier.rank(), carrier.size())
        self._route = group

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "sp"

    def alltoall_base(
        self, output: Tensor, sent: Tensor, output_splits: list[int], splits: list[int], *options: Any
    ) -> Any:
        """Run the route's all-to-all as one of the parent group."""
        carrier = process_group(parent_group(self._route))
        to, source = route_ends(self._route, carrier.rank(), carrier.size())
        there, here = [0] * carrier.size(), [0] * carrier.size()
        for rank, rows in zip(to, splits, strict=True):
            there[rank] += rows
        for rank, rows in zip(source, output_splits, strict=True):
            here[rank] += rows
        return carrier.alltoall_base(output, sent, here, there, *options)
