"""A rank's training loop with one fault; every step is compared with a single device.

Each step is reported through a pipe, since the rank may be killed at any time.
"""

from __future__ import annotations

import copy
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.backends.debugging as debugging
import torch._functorch.config as functorch_config
import torch.distributed as dist
from support.parallel.raising import inject_nodes
from support.parity import VOCAB, Sums, build, difference, text
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from sp_compile import SpError

STEPS = 4
AFTER = STEPS  # the step after the loop
TIMEOUT = 15.0  # seconds of a group; a step takes several on a busy machine
TOLERANCE = 1e-9
DIM = 8


@dataclass(frozen=True)
class Scene:
    """Place of a fault: a rank and a step. tcp: the ranks connect through a port instead of a file."""

    fault: str
    world: int
    odd: int
    step: int
    tcp: bool
    folder: str


@dataclass(frozen=True)
class Event:
    """Report of a rank about a step. kind: right, wrong, refused, raw, own (raised by the fault itself), left."""

    step: int
    kind: str
    words: str = ""
    seconds: float = 0.0


class Subject(nn.Module):
    """A small model with tokens, labels, floats, weights, a buffer and a scalar, which may differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)
        self.register_buffer("scale", torch.ones(DIM))
        self.slope = 1.0

    def forward(self, ids: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """(batch, seq) int64 twice, (batch, seq, dim) -> 0-d loss."""
        x = self.inner(self.embed(ids) * self.scale + noise).cumsum(1).mul(self.slope).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Loop:
    """The training loop of one rank.

    options: of the backend. length: tokens of a step. raises, compile_raises: errors that the compiled program or the
    compiler raises once. shift: batches that this rank is ahead. honest: compare its results with a single device.
    optimizers: of the model and of its single-device copy.
    """

    def __init__(self, scene: Scene, rank: int, options: dict[str, Any]) -> None:
        self.scene, self.rank = scene, rank
        self.net = build(Subject)
        self.alone = copy.deepcopy(self.net)
        self.options = {"compiler": self._compiler, "cost": {}, "check_every": 1, **options}
        self.length: Callable[[int], int] = lambda step: 7
        self.raises: BaseException | None = None
        self.compile_raises: BaseException | None = None
        self.compile_takes = 0.0
        self.shift = 0
        self.honest = True
        self.run: Callable[..., Tensor] = self.net
        self.optimizers: list[torch.optim.Optimizer] = []

    @property
    def is_odd(self) -> bool:
        return self.rank == self.scene.odd

    def connect(self, number: int, ranks: Sequence[int]) -> None:
        """Initialize a default group of these ranks. number: of earlier groups."""
        where = f"file://{self.scene.folder}/store{number}"
        if self.scene.tcp:
            where = f"tcp://127.0.0.1:{Path(self.scene.folder, f'port{number}').read_text()}"
        given = {"rank": ranks.index(self.rank), "world_size": len(ranks), "timeout": timedelta(seconds=TIMEOUT)}
        dist.init_process_group("gloo", init_method=where, **given)

    def compile(self) -> None:
        self.run = torch.compile(self.net, backend="sp", options=self.options)

    def _compiler(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        time.sleep(self.compile_takes)
        self._fail("compile_raises")
        run = aot_autograd(fw_compiler=inject_nodes, keep_inference_input_mutations=True)(gm, inputs)

        def call(*args: Any) -> Any:
            self._fail("raises")
            return run(*args)

        return call

    def _fail(self, name: str) -> None:
        error = getattr(self, name)
        setattr(self, name, None)
        if error is not None:
            raise error

    def batch(self, step: int, seed: int | None = None) -> list[Tensor]:
        """Return the arguments of a step, equal on every rank; `seed` selects others."""
        number = step + self.shift if seed is None else seed
        ids, labels = text(self.length(step), seed=number)
        generator = torch.Generator().manual_seed(number)
        return [ids, labels, torch.randn(*ids.shape, DIM, dtype=torch.float64, generator=generator)]

    def train(
        self, step: int, batch: Sequence[Tensor] | None = None, between: Callable[[], None] | None = None
    ) -> None:
        """Run one step. between: called before the optimizers' step."""
        given = self.batch(step) if batch is None else batch
        self.net.zero_grad()
        loss = self.run(*given)
        if loss.requires_grad:
            loss.backward()
        self.compare(loss, given)
        if between is not None:
            between()
        for optimizer in self.optimizers:
            optimizer.step()

    def compare(self, loss: Tensor, given: Sequence[Tensor]) -> None:
        """Raise Wrong if the loss or a gradient differs from a single device."""
        if not self.honest:
            return
        self.alone.zero_grad()
        expected = self.alone(*(x.detach() for x in given))
        errors = [difference(loss.detach(), expected.detach())]
        if loss.requires_grad:
            expected.backward()
            found = [p.grad for p in self.net.parameters()]
            right = [self._part(p.grad, like) for p, like in zip(self.alone.parameters(), self.net.parameters())]
            largest = max(g.abs().max().item() for g in right if g is not None)
            errors += [difference(a, b, floor=1e-6 * largest) for a, b in zip(found, right)]
        self.refuse(max(errors), f"entry {errors.index(max(errors))}")

    def refuse(self, error: float, where: str) -> None:
        """Raise Wrong if the error exceeds rounding."""
        if not error <= TOLERANCE:
            raise Wrong(f"relative error {error:.1e} in {where}")

    def _part(self, grad: Tensor | None, like: nn.Parameter) -> Tensor | None:
        """Return this rank's part of the gradient of a parameter."""
        dim = getattr(like, "cut", None)
        return grad if grad is None or dim is None else grad.chunk(self.scene.world, dim)[self.rank]

    def pid(self, rank: int) -> int:
        return int(Path(self.scene.folder, f"{rank}.pid").read_text())

    def afterwards(self) -> None:
        """Run another model over the same group; it is right, or raises an SpError if the group ended."""
        torch.manual_seed(0)
        net, x = build(Sums), torch.ones(2, 8, 16, dtype=torch.float64)
        run = torch.compile(net, backend="sp", options={"compiler": "aot_eager", "cost": {}})
        if not difference(run(x), net(x)) <= TOLERANCE:
            raise Wrong("another model afterwards")


class Wrong(Exception):
    """A result differs from a single device, without an error."""


class Left(Exception):
    """The rank leaves the loop, as the fault intends."""


def live(scene: Scene, rank: int, pipe: Connection) -> None:
    """Run the loop of one rank in its process."""
    from support.fuzz.fault_table import FAULTS  # imported here: it imports this module

    fault = FAULTS[scene.fault]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["SP_COMPILE_CACHE_DIR"] = tempfile.mkdtemp(dir=scene.folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell lack it
    torch.set_num_threads(1)
    torch.manual_seed(0)
    debugging.boxed_nop = inject_nodes  # of "aot_eager", by its name too
    functorch_config.donated_buffer = False  # otherwise torch raises in a second backward
    Path(scene.folder, f"{rank}.pid").write_text(str(os.getpid()))
    loop = Loop(scene, rank, dict(fault.options))
    if fault.connected:
        loop.connect(0, range(scene.world))
    for prepare in (fault.prepares, fault.begins if loop.is_odd else None):
        if prepare is not None:
            prepare(loop)
    if loop.run is loop.net:
        loop.compile()
    step = 0
    while step < STEPS and _report_step(pipe, step, fault.own, partial(_step, fault, loop, step)):
        step += 1
    if dist.is_initialized():
        _report_step(pipe, AFTER, fault.own, loop.afterwards)
    pipe.send(None)
    with suppress(EOFError):
        pipe.recv()  # the process may host the store of the others: wait until all have reported
    os._exit(0)


def _step(fault: Any, loop: Loop, step: int) -> None:
    now = step == loop.scene.step
    if now and fault.everyone is not None:
        fault.everyone(loop, step)
    elif now and loop.is_odd and fault.acts is not None:
        fault.acts(loop, step)
    else:
        loop.train(step)


def _report_step(pipe: Connection, step: int, own: tuple[type[BaseException], ...], do: Callable[[], None]) -> bool:
    """Run a step and report its outcome; return True if the loop continues."""
    begun, words = time.monotonic(), ""
    try:
        do()
        kind = "right"
    except SpError as error:
        kind, words = "refused", str(error)
    except Wrong as error:
        kind, words = "wrong", str(error)
    except Left:
        kind = "left"
    except own as error:
        kind, words = "own", repr(error)
    except BaseException:
        kind, words = "raw", traceback.format_exc()
    pipe.send(Event(step, kind, words, time.monotonic() - begun))
    return kind in ("right", "own")
