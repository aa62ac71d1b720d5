"""Define the communication primitives that every ``sp::`` operator uses.

`current_communicator()` is the one of real process groups, or that of a simulated rank (``simulate.py``).
Every exchange works on dim 0 with equal shares, accepts any strides and returns a new contiguous tensor. With a single
rank each primitive returns its argument. None is differentiable: the operators define pairs of forward and backward. A
shift is started first and waited for later. The group of an all-to-all may be a route (see ``routes.py``).

    share      the rows of dim 0 that one rank sends to another, or that it receives from it
    shift      an exchange in which each rank sends its tensor to one rank and receives that of another, as on a ring
    summed     of a collective that adds the tensors of the ranks
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from sp_compile.lowering.torch_compat import process_group

from . import routes

c10d = torch.ops._c10d_functional

# Dtypes that every backend supports; bool is sent as one of the others.
_COMMON_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)


class Communicator(ABC):
    """Collectives over the ``n`` ranks of a group, as called by one of them."""

    def all_reduce(self, x: Tensor, n: int, group: str) -> Tensor:
        """Sum over the ranks: (...) -> (...)."""
        return x if n == 1 else self._all_reduce(x, n, group)

    def all_gather(self, x: Tensor, n: int, group: str) -> Tensor:
        """Concatenate the ranks' tensors: (s, ...) -> (n * s, ...)."""
        return x if n == 1 else self._all_gather(x, n, group)

    def reduce_scatter(self, x: Tensor, n: int, group: str, plain: bool = False) -> Tensor:
        """Sum over the ranks and return this rank's share: (n * s, ...) -> (s, ...).

        Args:
            x: (n * s, ...), any dtype that can be summed.
            n: Number of ranks.
            group: Name of the process group.
            plain: True to call torch's reduce_scatter even where an all-to-all is faster, so that passes and readers of
                a graph find it.
        """
        return x if n == 1 else self._reduce_scatter(x, n, group, plain)

    def all_to_all(self, x: Tensor, n: int, group: str) -> Tensor:
        """Send share p to rank p and return the received shares in rank order: (n, ...) -> (n, ...)."""
        return x if n == 1 else self._all_to_all(x, n, group)

    @abstractmethod
    def start_shift(self, x: Tensor, route: str) -> Tensor:
        """Start to send x along a route of shifts: (...) -> (...).

        A route is the name of a group that defines to which rank each rank sends (``routes.py``). Pass the result to
        ``wait`` before it is read.
        """

    @abstractmethod
    def wait(self, x: Tensor) -> Tensor:
        """Wait for the result of ``start_shift`` and return it."""

    @abstractmethod
    def broadcast(self, x: Tensor, group: str) -> Tensor:
        """Return rank 0's tensor: (...) -> (...)."""

    @abstractmethod
    def rank(self, group: str) -> int:
        """Return this rank's index in the group. Only operators that are opaque in graphs may call it."""

    # The collectives above for n > 1, with the same arguments.

    @abstractmethod
    def _all_reduce(self, x: Tensor, n: int, group: str) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, n: int, group: str) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, n: int, group: str, plain: bool) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor, n: int, group: str) -> Tensor: ...


class FunctionalCommunicator(Communicator):
    """Communicator of real ranks: torch's functional collectives, which can be traced and compiled."""

    def broadcast(self, x: Tensor, group: str) -> Tensor:
        """Broadcast with ``_c10d_functional.broadcast``."""
        return _run_collective(x, lambda y: c10d.broadcast(y, 0, group))

    def rank(self, group: str) -> int:
        """Return the rank in the process group."""
        return dist.get_rank(process_group(group))

    def _all_reduce(self, x: Tensor, n: int, group: str) -> Tensor:
        return _run_collective(x, lambda y: c10d.all_reduce(y, "sum", group), summed=True)

    def _all_gather(self, x: Tensor, n: int, group: str) -> Tensor:
        return _run_collective(x, lambda y: c10d.all_gather_into_tensor(y, n, group))

    def _reduce_scatter(self, x: Tensor, n: int, group: str, plain: bool) -> Tensor:
        if x.device.type == "cpu" and not plain:  # Gloo's own reduce_scatter takes 1.5 times as long
            return self._all_to_all(x.unflatten(0, (n, x.shape[0] // n)), n, group).sum(0, dtype=x.dtype)
        return _run_collective(x, lambda y: c10d.reduce_scatter_tensor(y, "sum", n, group), summed=True)

    def start_shift(self, x: Tensor, route: str) -> Tensor:
        """Start an all_to_all_single over the route, on which a rank has one destination and one source."""
        splits = [x.shape[0]]  # all rows are sent to the destination, and the same number received from the source
        return c10d.all_to_all_single(x.contiguous(), splits, splits, routes.ensure_route(route))

    def wait(self, x: Tensor) -> Tensor:
        """Wait with ``_c10d_functional.wait_tensor``."""
        return c10d.wait_tensor(x)

    def _all_to_all(self, x: Tensor, n: int, group: str) -> Tensor:
        splits = [1] * n  # one share is sent to each rank, and one received from each
        routes.ensure_route(group)
        return _run_collective(x, lambda y: c10d.all_to_all_single(y, splits, splits, group))


def to_sendable(x: Tensor, summed: bool = False) -> Tensor:
    """Return x in a dtype that every backend can send; `from_sendable` restores its dtype.

    Bool collectives return wrong values under Inductor, and some backends do not support complex dtypes.

    Args:
        x: Any shape and dtype.
        summed: True if the collective adds values, which must then keep a numeric dtype. If False, dtypes that some
            backends do not support, such as float8, are viewed as bytes in a further dim.
    """
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    if summed and x.dtype == torch.int16:  # the lower 16 bits of the sum are the sum of int16
        return x.to(torch.int32)
    if summed or x.dtype in _COMMON_DTYPES:
        return x
    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def from_sendable(x: Tensor, like: Tensor) -> Tensor:
    """Undo `to_sendable`: convert a received tensor back to the dtype of ``like``, the tensor before `to_sendable`."""
    if like.dtype == torch.bool:
        return x.to(torch.bool)
    if like.is_complex():
        return torch.view_as_complex(x)
    if like.dtype == torch.int16 and x.dtype == torch.int32:
        return x.to(torch.int16)
    return x if x.dtype == like.dtype else x.view(like.dtype).squeeze(-1)


def _run_collective(x: Tensor, collective: Callable[[Tensor], Tensor], summed: bool = False) -> Tensor:
    """Run a collective on x, wait, and return its result in the dtype of x.

    The collective runs on a dtype that every backend supports. `summed` is True if it adds values, see `to_sendable`.
    """
    received = c10d.wait_tensor(collective(to_sendable(x, summed).contiguous()))
    return from_sendable(received, x)


_FUNCTIONAL_COMMUNICATOR = FunctionalCommunicator()
_active = threading.local()  # .communicator inside `use_communicator`


def current_communicator() -> Communicator:
    """Return this thread's communicator: that of ``use_communicator``, or the functional one."""
    return getattr(_active, "communicator", _FUNCTIONAL_COMMUNICATOR)


@contextlib.contextmanager
def use_communicator(communicator: Communicator) -> Iterator[None]:
    """Run this thread's collectives on ``communicator`` inside the block, as for a simulated rank."""
    previous = current_communicator()
    _active.communicator = communicator
    try:
        yield
    finally:
        _active.communicator = previous
