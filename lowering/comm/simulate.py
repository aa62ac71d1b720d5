"""Ranks of a group as threads of this process: the same operators, no process group, no waiting in vain.

The ranks take turns: each runs until its next collective, then the next rank does. A run is therefore
deterministic, every rank has a random number generator of its own that starts from the caller's state, as
processes with one seed do, and a rank that does not come to a collective is noticed instead of waited for.
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

SIMULATED_GROUP = "sim"
"""A group name for programs that are only simulated. Any other name works as well."""

T = TypeVar("T")
Collective = Callable[[list[Tensor]], list[Tensor]]


class SimulationError(SpError):
    """The simulated ranks do not make the same collective calls."""


class _RankStopped(BaseException):
    """Ends a rank's thread after another rank failed; no ``except Exception`` may swallow it."""


def run_ranks(n: int, fn: Callable[[int], T], threads: Sequence[Executor] | None = None) -> list[T]:
    """Run ``fn(rank)`` on ``n`` simulated ranks and return their results in rank order.

    threads: executors of one thread, one a rank, where ranks keep their threads from run to run; cuDNN builds its
    programs anew in each thread. New threads if None.

    Inside, every ``sp::`` operator talks to the other simulated ranks, forward and backward. Tensors that
    ``fn`` closes over are shared: give each rank its own leaves, or ``backward`` adds all ranks' gradients.

    Raises what a rank raised, with a note that names the rank, or SimulationError when the ranks' calls differ.
    """
    world = _SimulatedWorld(n)
    results: dict[int, T] = {}
    grad_enabled, casts = torch.is_grad_enabled(), _inherit_autocast()

    def live(rank: int) -> None:
        with (
            ExitStack() as modes,
            torch.set_grad_enabled(grad_enabled),
            torch.autograd.set_multithreading_enabled(False),
            use_communicator(_SimulatedRank(world, rank)),
        ):
            for given in casts:
                modes.enter_context(torch.autocast(*given))
            results[rank] = fn(rank)

    if threads is not None:
        wait([executor.submit(world.run, rank, live) for rank, executor in enumerate(threads)])
    else:
        ranks = [threading.Thread(target=world.run, args=(rank, live), daemon=True) for rank in range(n)]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
    world.raise_failures()
    return [results[rank] for rank in range(n)]


def _inherit_autocast() -> list[tuple[str, torch.dtype, bool, bool]]:
    """The caller's autocast: a thread begins without."""
    cached = torch.is_autocast_cache_enabled()
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return [(kind, torch.get_autocast_dtype(kind), True, cached) for kind in on]


class _SimulatedWorld:
    """Whose turn it is, what each rank has handed in, and what went wrong."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._turns = [threading.Semaphore(int(rank == 0)) for rank in range(n)]  # rank 0's is the first
        self._random_states = [torch.get_rng_state()] * n
        self._calls: list[tuple[str, Tensor] | None] = [None] * n
        self._answers: list[Tensor] = []
        self._error: BaseException | None = None

    def raise_failures(self) -> None:
        """Raise what a rank raised. The caller's random state moves on as rank 0's did."""
        torch.set_rng_state(self._random_states[0])
        if self._error is not None:
            raise self._error

    def run(self, rank: int, live: Callable[[int], None]) -> None:
        """A thread's life: wait for the first turn, run, and leave the turn to the next."""
        try:
            self._wait(rank)
            live(rank)
            self._calls[rank] = None
            if rank == self.n - 1:
                self._check_calls()
            self._pass_turn(rank)
        except (_RankStopped, SimulationError) as error:
            self._stop(error)
        except BaseException as error:
            error.add_note(f"raised on simulated rank {rank} of {self.n}")
            self._stop(error)

    def exchange(self, rank: int, name: str, x: Tensor, combine: Collective) -> Tensor:
        """Hand in ``x`` for the collective ``name``; this rank's entry of ``combine(all ranks' tensors)``."""
        self._calls[rank] = name, x
        if rank == self.n - 1:
            self._check_calls()
            with torch.no_grad():
                self._answers = combine([call[1] for call in self._calls if call is not None])
        self._pass_turn(rank)
        self._wait(rank)
        return self._answers[rank]

    def _check_calls(self) -> None:
        """The last rank has made its call or finished: the others must have done the same."""
        made = [_describe_call(call) for call in self._calls]
        if len(set(made)) > 1:
            lines = "\n".join(f"  rank {r}: {call}" for r, call in enumerate(made))
            raise SimulationError("SP571", f"the next collectives of the simulated ranks differ:\n{lines}")

    def _pass_turn(self, rank: int) -> None:
        self._random_states[rank] = torch.get_rng_state()
        self._turns[(rank + 1) % self.n].release()

    def _wait(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._error is not None:
            # Whatever this rank still tries on its way out must not wait either.
            self._turns[rank].release()
            raise _RankStopped
        torch.set_rng_state(self._random_states[rank])

    def _stop(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        for turn in self._turns:
            turn.release()


def _describe_call(call: tuple[str, Tensor] | None) -> str:
    if call is None:
        return "finished"
    name, x = call
    return f"{name} of {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


class _SimulatedRank(Communicator):
    """One rank's end of the exchange."""

    def __init__(self, world: _SimulatedWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    def rank(self, group: str) -> int:
        return self._rank

    def broadcast(self, x: Tensor, group: str) -> Tensor:
        return self._exchange("broadcast", x, lambda xs: [xs[0].clone() for _ in xs])

    def _all_reduce(self, x: Tensor, n: int, group: str) -> Tensor:
        return self._exchange("all_reduce", x, lambda xs: [_sum_rounded_once(xs) for _ in xs])

    def _all_gather(self, x: Tensor, n: int, group: str) -> Tensor:
        return self._exchange("all_gather", x, lambda xs: [torch.cat(xs) for _ in xs])

    def _reduce_scatter(self, x: Tensor, n: int, group: str, plain: bool) -> Tensor:
        return self._exchange("reduce_scatter", x, lambda xs: [part.clone() for part in _sum_rounded_once(xs).chunk(n)])

    def start_shift(self, x: Tensor, route: str) -> Tensor:
        sources = [routes.route_ends(route, rank, self._world.n)[1][0] for rank in range(self._world.n)]
        return self._exchange("shift", x, lambda xs: [xs[source].clone() for source in sources])

    def wait(self, x: Tensor) -> Tensor:
        return x

    def _all_to_all(self, x: Tensor, n: int, group: str) -> Tensor:
        if routes.parent_group(group) == group:
            return self._exchange("all_to_all", x, lambda xs: list(torch.stack(xs, 1).unbind(0)))
        ends = [routes.route_ends(group, rank, self._world.n) for rank in range(self._world.n)]
        return self._exchange(group, x, lambda xs: _route_blocks(xs, ends))

    def _exchange(self, name: str, x: Tensor, combine: Collective) -> Tensor:
        return self._world.exchange(self._rank, name, x.contiguous(), combine)


def _route_blocks(xs: list[Tensor], ends: list[routes.Ends]) -> list[Tensor]:
    """Block i of a rank's tensor goes to the i-th of its ends; what comes is ordered by rank."""
    arriving: list[list[Tensor]] = [[] for _ in xs]
    for x, (to, _) in zip(xs, ends, strict=True):
        for block, rank in zip(x, to, strict=True):
            arriving[rank].append(block)
    return [torch.stack(blocks) for blocks in arriving]


def _sum_rounded_once(xs: list[Tensor]) -> Tensor:
    """Rounded once, and never all of them side by side: gradients of whole keys are large."""
    dtype = xs[0].dtype
    total = xs[0].to(accumulation_dtype(dtype), copy=True)
    for x in xs[1:]:
        total += x
    return total.to(dtype)
