"""Simulate the ranks of a group as threads of this process, without process groups.

The ranks take turns: each runs until its next collective, then the next rank runs. Runs are therefore deterministic.
Every rank has its own random number generator, which starts from the caller's state, as in processes with one seed. A
rank that misses a collective raises an error instead of a timeout.

    turn       the permission to run, a semaphore per rank; rank r passes it to rank r + 1, the last one to rank 0
    call       the next collective of a rank (its name and operand), which the rank stores before it passes its turn
    combine    the function that computes a collective: operands of all ranks -> results of all ranks
    route      the ranks that each rank sends to and receives from, if these are not all; a group name (`routes.py`)
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor

from sp_compile.lowering.base.dtypes import accumulation_dtype
from sp_compile.lowering.base.errors import SpError

from . import routes
from .communicator import Communicator, use_communicator

# Group name for programs that are only simulated. Any other name works as well.
SIMULATED_GROUP = "sim"

T = TypeVar("T")
Collective = Callable[[list[Tensor]], list[Tensor]]  # operands of all ranks -> results of all ranks


class SimulationError(SpError):
    """Mismatch between the collective calls of the simulated ranks."""


class _RankStopped(BaseException):
    """Exit of a rank's thread after a failure of another rank; ``except Exception`` must not catch it."""


def run_ranks(n: int, fn: Callable[[int], T], threads: Sequence[Executor] | None = None) -> list[T]:
    """Run ``fn(rank)`` on ``n`` simulated ranks and return their results in rank order.

    Inside, every ``sp::`` operator communicates with the other simulated ranks, forward and backward. Tensors that
    ``fn`` closes over are shared: create separate leaves for each rank, or ``backward`` adds all ranks' gradients.

    Args:
        n: Number of ranks.
        fn: Function of the rank.
        threads: Executors of one thread, one per rank, to reuse threads between runs: cuDNN builds its programs again
            in each new thread. New threads if None.

    Returns:
        The results in rank order.

    Raises:
        SimulationError: The ranks' collective calls differ. Exceptions of a rank are raised with a note that names it.
    """
    world = _SimulatedWorld(n)
    results: dict[int, T] = {}
    grad_enabled, autocasts = torch.is_grad_enabled(), _autocast_settings()

    def run_rank(rank: int) -> None:
        """Run the function as one simulated rank, with the caller's modes."""
        with (
            ExitStack() as modes,
            torch.set_grad_enabled(grad_enabled),
            torch.autograd.set_multithreading_enabled(False),  # backwards run in this thread, with its communicator
            use_communicator(_SimulatedRank(world, rank)),
        ):
            for settings in autocasts:
                modes.enter_context(torch.autocast(*settings))
            results[rank] = fn(rank)

    if threads is not None:
        wait([executor.submit(world.run, rank, run_rank) for rank, executor in enumerate(threads)])
    else:
        started = [threading.Thread(target=world.run, args=(rank, run_rank), daemon=True) for rank in range(n)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    world.raise_failures()
    return [results[rank] for rank in range(n)]


def _autocast_settings() -> list[tuple[str, torch.dtype, bool, bool]]:
    """Return the arguments of the caller's torch.autocast contexts, which new threads do not inherit."""
    caches = torch.is_autocast_cache_enabled()
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [(device, torch.get_autocast_dtype(device), True, caches) for device in enabled]


class _SimulatedWorld:
    """State that the threads of the simulated ranks share.

    It consists of their turns, their pending collective calls and their first error.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._turns = [threading.Semaphore(int(rank == 0)) for rank in range(n)]  # rank 0 starts
        self._random_states = [torch.get_rng_state()] * n  # of each rank, while another runs
        self._calls: list[tuple[str, Tensor] | None] = [None] * n  # name and operand; None for a rank that has returned
        self._results: list[Tensor] = []  # of the last collective, by rank
        self._error: BaseException | None = None  # the first error of a rank

    def raise_failures(self) -> None:
        """Raise the first error of the ranks, and set the caller's random state to that of rank 0."""
        torch.set_rng_state(self._random_states[0])
        if self._error is not None:
            raise self._error

    def run(self, rank: int, run_rank: Callable[[int], None]) -> None:
        """Run a rank in its thread: wait for the first turn, run, and pass the turn on. Errors stop all ranks."""
        try:
            self._wait_for_turn(rank)
            run_rank(rank)
            self._calls[rank] = None  # the rank has returned
            if rank == self.n - 1:
                self._check_calls()  # the other ranks must have returned, too
            self._pass_turn(rank)
        except (_RankStopped, SimulationError) as error:  # of another rank, or of all ranks: no rank to name
            self._stop(error)
        except BaseException as error:
            error.add_note(f"raised on simulated rank {rank} of {self.n}")
            self._stop(error)

    def exchange(self, rank: int, name: str, x: Tensor, combine: Collective) -> Tensor:
        """Run a collective: store this rank's operand, let the others run, and return this rank's result.

        The last rank checks that all ranks call the same collective, and computes the results of all ranks.

        Args:
            rank: The calling rank.
            name: Name of the collective, compared across ranks.
            x: Operand of this rank.
            combine: Function from the operands of all ranks to their results.
        """
        self._calls[rank] = name, x
        if rank == self.n - 1:
            self._check_calls()
            with torch.no_grad():
                self._results = combine([call[1] for call in self._calls if call is not None])
        self._pass_turn(rank)
        self._wait_for_turn(rank)
        return self._results[rank]

    def _check_calls(self) -> None:
        """Raise SimulationError unless all ranks call the same collective next. The last rank of a round calls this."""
        described = [_describe_call(call) for call in self._calls]
        if len(set(described)) > 1:
            lines = "\n".join(f"  rank {r}: {call}" for r, call in enumerate(described))
            raise SimulationError("SP571", f"The next collectives of the simulated ranks differ:\n{lines}")

    def _pass_turn(self, rank: int) -> None:
        """Save the random state of a rank and let the next rank run, as in each collective."""
        self._random_states[rank] = torch.get_rng_state()
        self._turns[(rank + 1) % self.n].release()

    def _wait_for_turn(self, rank: int) -> None:
        """Wait until it is the rank's turn, and restore its random state. Raises _RankStopped after an error."""
        self._turns[rank].acquire()
        if self._error is not None:
            # Allow one more turn, so that a collective in a `finally` block of this rank does not wait forever.
            self._turns[rank].release()
            raise _RankStopped
        torch.set_rng_state(self._random_states[rank])

    def _stop(self, error: BaseException) -> None:
        """Save the error if it is the first, and let all ranks run to their next collective, where they stop."""
        if self._error is None:
            self._error = error
        for turn in self._turns:
            turn.release()


def _describe_call(call: tuple[str, Tensor] | None) -> str:
    """Return a collective call as text, such as "all_reduce of float32[2, 3]"; "finished" for a rank without one.

    The texts of the ranks are compared, and are part of error messages.
    """
    if call is None:
        return "finished"
    name, x = call
    return f"{name} of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class _SimulatedRank(Communicator):
    """Communicator of one simulated rank."""

    def __init__(self, world: _SimulatedWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    def rank(self, group: str) -> int:
        """Return the index of this rank."""
        return self._rank

    def broadcast(self, x: Tensor, group: str) -> Tensor:
        """Return a copy of rank 0's tensor."""
        return self._exchange("broadcast", x, lambda xs: [xs[0].clone() for _ in xs])

    def _all_reduce(self, x: Tensor, n: int, group: str) -> Tensor:
        return self._exchange("all_reduce", x, lambda xs: [_sum_rounded_once(xs) for _ in xs])

    def _all_gather(self, x: Tensor, n: int, group: str) -> Tensor:
        return self._exchange("all_gather", x, lambda xs: [torch.cat(xs) for _ in xs])

    def _reduce_scatter(self, x: Tensor, n: int, group: str, plain: bool) -> Tensor:
        return self._exchange("reduce_scatter", x, lambda xs: [rows.clone() for rows in _sum_rounded_once(xs).chunk(n)])

    def start_shift(self, x: Tensor, route: str) -> Tensor:
        """Return the received tensor: the exchange completes here, and `wait` returns its argument."""
        n = self._world.n
        sources = [routes.route_ends(route, rank, n).sources[0] for rank in range(n)]  # a shift has one per rank
        return self._exchange("shift", x, lambda xs: [xs[source].clone() for source in sources])

    def wait(self, x: Tensor) -> Tensor:
        """Return x, the result of ``start_shift``, which has received it already."""
        return x

    def _all_to_all(self, x: Tensor, n: int, group: str) -> Tensor:
        """Exchange blocks between all ranks, or over a route."""
        if routes.parent_group(group) == group:  # not a route: block i of a rank is for rank i
            return self._exchange("all_to_all", x, lambda xs: list(torch.stack(xs, 1).unbind(0)))
        # The destinations and sources of each rank.
        ends = [routes.route_ends(group, rank, self._world.n) for rank in range(self._world.n)]
        return self._exchange(group, x, lambda xs: _route_blocks(xs, ends))

    def _exchange(self, name: str, x: Tensor, combine: Collective) -> Tensor:
        """Run a collective with the other ranks, see `_SimulatedWorld.exchange`."""
        return self._world.exchange(self._rank, name, x.contiguous(), combine)


def _route_blocks(xs: list[Tensor], ends: list[routes.RouteEnds]) -> list[Tensor]:
    """Return the blocks that each rank receives, stacked in the order of their senders.

    Block i of a rank's tensor is sent to the i-th of the rank's destinations.

    Args:
        xs: Tensor of each rank, one block per destination.
        ends: Destinations and sources of each rank.
    """
    received: list[list[Tensor]] = [[] for _ in xs]
    for x, rank_ends in zip(xs, ends, strict=True):
        for block, destination in zip(x, rank_ends.destinations, strict=True):
            received[destination].append(block)
    return [torch.stack(blocks) for blocks in received]


def _sum_rounded_once(xs: list[Tensor]) -> Tensor:
    """Sum tensors, half-precision ones in float32 with a single rounding at the end.

    They are added in a loop and not stacked, which would copy all of them: key gradients are large.
    """
    dtype = xs[0].dtype
    total = xs[0].to(accumulation_dtype(dtype), copy=True)
    for x in xs[1:]:
        total += x
    return total.to(dtype)
