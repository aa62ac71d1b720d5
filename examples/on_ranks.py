"""Run an example on the processes of torchrun, or on four simulated ranks of one process.

    everywhere(work)        runs work(here) on every rank with its shards, and compares the results with a single device
    compiled(model, *args)  runs a single-device model under backend="sp", and compares results and gradients with eager

`finish()` ends the script; its exit code is 0 if all results agreed.
"""

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import sp_compile
from sp_compile.lowering.base.ranks import Mesh, Ranks
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

SIMULATED = 4
TOLERANCE = 1e-9  # all data is float64
_worst: list[float] = []


@dataclass
class Here:
    """One rank of a group."""

    rank: int
    n: int  # number of ranks
    group: Mesh  # the argument of functions on shards

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's rows of a full tensor as a new leaf."""
        mine = x.detach().chunk(self.n, dim)[self.rank].clone()
        return mine.requires_grad_(x.requires_grad)


Pairs = list[tuple[str, Tensor, Tensor]]


def is_launched() -> bool:
    """Return True if torchrun started this process."""
    return "RANK" in os.environ


def begin() -> None:
    """Initialize the process group under torchrun."""
    if is_launched() and not dist.is_initialized():
        dist.init_process_group("gloo")


def everywhere(work: Callable[[Here], Pairs]) -> None:
    """Compare values on every rank with a single device.

    `work` returns tuples: a name, this rank's value, and its shard of the expected value.
    """
    begin()
    if is_launched():
        n = dist.get_world_size()
        each = [work(Here(dist.get_rank(), n, dist.group.WORLD))]
    else:
        n = SIMULATED
        each = run_ranks(n, lambda rank: work(Here(rank, n, Ranks(n, SIMULATED_GROUP))))
    for rows in zip(*each, strict=True):
        _compare(f"{rows[0][0]}, {n} ranks", [_error(found, right) for _, found, right in rows])


def compiled(model: nn.Module, *args: Tensor, **config: object) -> sp_compile.Report | None:
    """Compare a compiled model with eager. Returns the report on simulated ranks, None under torchrun."""
    begin()
    if not is_launched():
        report = sp_compile.verify(model, *args, sp=SIMULATED, **config)
        _compare(f"compiled, {SIMULATED} ranks", [report.worst])
        return report
    config["compiler"] = "aot_eager"  # fast to compile; remove it to use Inductor
    alone = copy.deepcopy(model)
    expected = list(_step(alone, alone, args))
    found = list(_step(torch.compile(model, backend="sp", options=config), model, args))
    errors = [_error(a, b) for a, b in zip(found, expected, strict=True)]
    _compare(f"compiled, {dist.get_world_size()} ranks", errors)
    return None


def crossing(report: sp_compile.Report) -> str:
    """Return the bytes that a rank sends in the forward and in the backward, as text."""
    sent = [e for e in report.exchanges if e.op != "shard" or e.forward]
    return ", ".join(f"{e.op} {e.forward} + {e.backward} bytes" for e in sent)


def _step(run: Callable[..., object], model: nn.Module, args: tuple[Tensor, ...]) -> Iterator[Tensor]:
    results = tree_leaves(run(*args))
    yield from (y.detach() for y in results)
    sum(y.square().mean() for y in results if y.requires_grad).backward()
    yield from (p.grad for p in model.parameters())


def _error(found: Tensor, right: Tensor) -> float:
    if not right.is_floating_point():
        return 0.0 if torch.equal(found, right) else float("inf")
    return ((found - right).abs().max() / right.abs().max().clamp(min=1e-30)).item()


def _compare(what: str, errors: list[float]) -> None:
    worst = torch.tensor(max(errors))
    if is_launched():
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    _worst.append(worst.item())
    print_once(f"{what:<48} largest relative error against one device: {worst.item():.1e}")


def print_once(text: str) -> None:
    """Print on rank 0."""
    begin()
    if not is_launched() or dist.get_rank() == 0:
        print(text)


def finish() -> None:
    """Exit with 1 if any result differed from a single device."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if not _worst or max(_worst) > TOLERANCE:
        raise SystemExit("something differs from one device")
