"""The primitive layer under every ``sp::`` operator: eight calls, and whose job it is to answer them.

Every exchange works on dim 0 with equal shares, takes any strides and returns a new contiguous tensor.
With one rank each returns its argument. No call is differentiable: the operators above hold the pairs.
A shift is started first and waited for later. The group of an all-to-all may be a route (see ``routes.py``).
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

# What every backend moves; bool is sent as one of these.
_COMMON_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64)
)


class Communicator(ABC):
    """Collectives over the ``n`` ranks of a group, as seen by one of them."""

    def all_reduce(self, x: Tensor, n: int, group: str) -> Tensor:
        """Sum over the ranks: (...) -> (...)."""
        return x if n == 1 else self._all_reduce(x, n, group)

    def all_gather(self, x: Tensor, n: int, group: str) -> Tensor:
        """Concatenate the ranks' tensors: (s, ...) -> (n * s, ...)."""
        return x if n == 1 else self._all_gather(x, n, group)

    def reduce_scatter(self, x: Tensor, n: int, group: str, plain: bool = False) -> Tensor:
        """Sum over the ranks, keep this rank's share: (n * s, ...) -> (s, ...).

        plain: by the collective of that name, for passes and people that look for it, whatever is faster.
        """
        return x if n == 1 else self._reduce_scatter(x, n, group, plain)

    def all_to_all(self, x: Tensor, n: int, group: str) -> Tensor:
        """Share p goes to rank p; the result holds rank p's at p: (n, ...) -> (n, ...)."""
        return x if n == 1 else self._all_to_all(x, n, group)

    @abstractmethod
    def start_shift(self, x: Tensor, route: str) -> Tensor:
        """Send x along a route of shifts: (...) -> (...), whose values may be read after ``wait``."""

    @abstractmethod
    def wait(self, x: Tensor) -> Tensor:
        """What was started, once it has arrived."""

    @abstractmethod
    def broadcast(self, x: Tensor, group: str) -> Tensor:
        """Rank 0's tensor: (...) -> (...)."""

    @abstractmethod
    def rank(self, group: str) -> int:
        """This rank's index in the group. Only operators that stay opaque in a graph may ask."""

    @abstractmethod
    def _all_reduce(self, x: Tensor, n: int, group: str) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, n: int, group: str) -> Tensor: ...

    @abstractmethod
    def _reduce_scatter(self, x: Tensor, n: int, group: str, plain: bool) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, x: Tensor, n: int, group: str) -> Tensor: ...


class FunctionalCommunicator(Communicator):
    """Real ranks: torch's functional collectives, which trace, compile and run in eager."""

    def broadcast(self, x: Tensor, group: str) -> Tensor:
        return _run_collective(x, lambda y: torch.ops._c10d_functional.broadcast(y, 0, group))

    def rank(self, group: str) -> int:
        return dist.get_rank(process_group(group))

    def _all_reduce(self, x: Tensor, n: int, group: str) -> Tensor:
        return _run_collective(x, lambda y: torch.ops._c10d_functional.all_reduce(y, "sum", group), summed=True)

    def _all_gather(self, x: Tensor, n: int, group: str) -> Tensor:
        return _run_collective(x, lambda y: torch.ops._c10d_functional.all_gather_into_tensor(y, n, group))

    def _reduce_scatter(self, x: Tensor, n: int, group: str, plain: bool) -> Tensor:
        if x.device.type == "cpu" and not plain:  # Gloo's own takes half as long again
            return self._all_to_all(x.unflatten(0, (n, x.shape[0] // n)), n, group).sum(0, dtype=x.dtype)
        return _run_collective(
            x, lambda y: torch.ops._c10d_functional.reduce_scatter_tensor(y, "sum", n, group), summed=True
        )

    def start_shift(self, x: Tensor, route: str) -> Tensor:
        rows = [x.shape[0]]
        return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), rows, rows, routes.ensure_route(route))

    def wait(self, x: Tensor) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(x)

    def _all_to_all(self, x: Tensor, n: int, group: str) -> Tensor:
        ones = [1] * n
        routes.ensure_route(group)
        return _run_collective(x, lambda y: torch.ops._c10d_functional.all_to_all_single(y, ones, ones, group))


def to_wire(x: Tensor, summed: bool = False) -> Tensor:
    """x as it is sent. What is only moved goes as bytes if its dtype is not everywhere."""
    # Bool collectives give wrong values under Inductor, and not every backend knows complex numbers.
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x if summed or x.dtype in _COMMON_DTYPES else x.contiguous().unsqueeze(-1).view(torch.uint8)


def from_wire(x: Tensor, like: Tensor) -> Tensor:
    """What has arrived, in the dtype of what was sent."""
    if like.dtype == torch.bool:
        return x.to(torch.bool)
    if like.is_complex():
        return torch.view_as_complex(x)
    return x if x.dtype == like.dtype else x.view(like.dtype).squeeze(-1)


def _run_collective(x: Tensor, collective: Callable[[Tensor], Tensor], summed: bool = False) -> Tensor:
    """Run one collective on ``x`` and wait for it."""
    arrived = torch.ops._c10d_functional.wait_tensor(collective(to_wire(x, summed).contiguous()))
    return from_wire(arrived, x)


_FUNCTIONAL_COMMUNICATOR = FunctionalCommunicator()
_active = threading.local()


def current_communicator() -> Communicator:
    """The communicator of this thread: a simulated rank's inside ``use_communicator``, the functional one otherwise."""
    return getattr(_active, "communicator", _FUNCTIONAL_COMMUNICATOR)


@contextlib.contextmanager
def use_communicator(communicator: Communicator) -> Iterator[None]:
    """Answer this thread's collectives with ``communicator``."""
    previous = current_communicator()
    _active.communicator = communicator
    try:
        yield
    finally:
        _active.communicator = previous
