"""Exchanges between some ranks of a group, over the group's own communicator: no sub-group is ever created.

    "<group>/shift:<offset>:<stride>"   to the rank `offset` further on the ring of every stride-th rank
    "<group>/among:<size>"              between the `size` neighbours r // size * size ...
    "<group>/across:<size>"             between the ranks r % size, r % size + size, ...
    "<group>/fold" and "<group>/unfold" from contiguous chunks to zigzag ones, and back

A route is the name of a group that knows one collective, all_to_all_single, and turns it into the parent's with split
sizes that depend on the rank. They are looked up when the program runs, so the graph is the same on every rank; one
communicator carries everything, so all ranks see its collectives in one order; and a mesh of (ring, ulysses) axes needs
no collective set-up, which a compiler pass could not do safely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sp_compile.lowering.torch_compat import known_process_group, process_group, register_process_group

Ends = tuple[list[int], list[int]]  # ranks that this rank's blocks go to, and that they come from; both ascending


def shift_route(group: str, offset: int, stride: int = 1) -> str:
    """The route of one ring step: rank r's block goes to r + offset * stride, on the ring of r % stride."""
    return f"{group}/shift:{offset}:{stride}"


def neighborhood_route(group: str, size: int) -> str:
    """The route of all-to-alls between `size` neighbouring ranks."""
    return f"{group}/among:{size}"


def cross_route(group: str, size: int) -> str:
    """The route of all-to-alls between the ranks of one index in their neighbourhoods of `size`."""
    return f"{group}/across:{size}"


def fold_route(group: str, back: bool = False) -> str:
    """The route of two chunks a rank, from rank 2r, 2r + 1's order to r, 2n - 1 - r's (or `back`)."""
    return f"{group}/{'unfold' if back else 'fold'}"


def parent_group(group: str) -> str:
    """The group that carries a route; a plain group carries itself."""
    return group.partition("/")[0]


def route_ends(group: str, rank: int, n: int) -> Ends:
    """Where the blocks of `rank` of the parent's `n` ranks go, and where its new ones come from."""
    kind, *numbers = group.partition("/")[2].split(":")
    return _ENDS[kind](rank, n, *map(int, numbers))


def _all_members(members: range) -> Ends:
    return list(members), list(members)


def _fold_ends(rank: int, n: int) -> Ends:
    """Who holds the rank's chunks, two of 2n, in a zigzag frame, and who has those that it is to hold."""
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
    """Make every route of a sharded attention known, for programs that a cache brings back without tracing them."""
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
    """The same for shifts around the ring of all ranks, and for the way back that their gradients take."""
    for offset in offsets:
        ensure_route(shift_route(group, offset))
        ensure_route(shift_route(group, -offset))


_routes: dict[str, dist.ProcessGroup] = {}  # the registry of process groups holds them weakly


def ensure_route(group: str) -> str:
    """Make the route known to this process (no communication); `group` itself. Nothing without its parent."""
    name = parent_group(group)
    if name != group and known_process_group(name) and not known_process_group(group):
        _routes[group] = _Route(group)
        register_process_group(group, _routes[group])
    return group


class _Route(dist.ProcessGroup):
    """A process group of one collective."""

    def __init__(self, group: str) -> None:
        carrier = process_group(parent_group(group))
        super().__init__(carrier.rank(), carrier.size())
        self._route = group

    def getBackendName(self) -> str:
        return "sp"

    def alltoall_base(
        self, output: Tensor, sent: Tensor, output_splits: list[int], splits: list[int], *options: Any
    ) -> Any:
        carrier = process_group(parent_group(self._route))
        to, came = route_ends(self._route, carrier.rank(), carrier.size())
        there, here = [0] * carrier.size(), [0] * carrier.size()
        for rank, rows in zip(to, splits, strict=True):
            there[rank] += rows
        for rank, rows in zip(came, output_splits, strict=True):
            here[rank] += rows
        return carrier.alltoall_base(output, sent, here, there, *options)
