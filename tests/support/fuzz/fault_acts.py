"""Steps of a training loop with a fault, for one rank."""

from __future__ import annotations

import copy
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from support.fuzz.loop import TIMEOUT, Left, Loop, Wrong
from support.parallel import raising
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sp_compile import SpError

Acts = Callable[[Loop, int], None]


def skip_batch(loop: Loop, step: int) -> None:
    loop.shift = 1
    loop.train(step)


def skip_step(loop: Loop, step: int) -> None:
    """No call at all, as where an error is caught and the batch left out."""


def skip_backward(loop: Loop, step: int) -> None:
    loop.run(*loop.batch(step))


def backward_twice(loop: Loop, step: int) -> None:
    loss = loop.run(*loop.batch(step))
    loss.backward(retain_graph=True)
    loss.backward()


def writes_before_backward(loop: Loop, step: int) -> None:
    """Write to a weight before the backward, so that autograd raises."""
    loss = loop.run(*loop.batch(step))
    with torch.no_grad():
        loop.net.head.weight.mul_(1)
    loss.backward()


def other_scale(loop: Loop, step: int) -> None:
    (2 * loop.run(*loop.batch(step))).backward()


def other_input(place: int) -> Acts:
    def act(loop: Loop, step: int) -> None:
        batch = loop.batch(step)
        batch[place] = loop.batch(step, seed=100)[place]
        loop.train(step, batch)

    return act


def other_length(loop: Loop, step: int) -> None:
    loop.length = lambda step: 9
    loop.train(step)


def other_batch_size(loop: Loop, step: int) -> None:
    loop.train(step, [torch.cat([x, x]) for x in loop.batch(step)])


def other_dtype(loop: Loop, step: int) -> None:
    ids, labels, noise = loop.batch(step)
    loop.train(step, [ids, labels, noise.float()])


def input_requires_grad(loop: Loop, step: int) -> None:
    ids, labels, noise = loop.batch(step)
    loop.train(step, [ids, labels, noise.requires_grad_()])


def other_strides(loop: Loop, step: int) -> None:
    """Pass equal values with other strides."""
    ids, labels, noise = loop.batch(step)
    loop.train(step, [ids, labels, noise.mT.contiguous().mT])


def calls_once_more(context: Callable[[], Any]) -> Acts:
    """Call the model once more, as an evaluation on one rank does."""

    def act(loop: Loop, step: int) -> None:
        with context():
            loop.run(*loop.batch(step))
        loop.train(step)

    return act


def changed(name: str) -> Acts:
    """A weight or a buffer."""

    def act(loop: Loop, step: int) -> None:
        loop.honest = False
        with torch.no_grad():
            loop.net.get_parameter(name).add_(1) if "weight" in name else loop.net.get_buffer(name).add_(1)
        loop.train(step)

    return act


def other_number(loop: Loop, step: int) -> None:
    """Python's own, which the model holds."""
    loop.net.slope = 2.0
    loop.train(step)


def other_numbers(loop: Loop, step: int) -> None:
    """Every rank has a new one."""
    loop.net.slope = loop.alone.slope = 3.0 if loop.is_odd else 2.0
    loop.train(step)


def exchanged(loop: Loop, step: int) -> None:
    """Values of a weight, past autograd, which counts changes in place."""
    loop.honest = False
    loop.net.head.weight.data = loop.net.head.weight.detach() * 2
    loop.train(step)


def replaced(loop: Loop, step: int) -> None:
    """A weight by another one of the same values."""
    loop.net.head.weight = nn.Parameter(loop.net.head.weight.detach().clone())
    loop.train(step)


def freezes(loop: Loop, step: int) -> None:
    loop.net.head.weight.requires_grad_(False)
    loop.train(step)


def seeds(loop: Loop, step: int) -> None:
    """Set another seed; random numbers of ranks differ anyway."""
    torch.manual_seed(99)
    loop.train(step)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def under(context: Callable[[], Any]) -> Acts:
    def act(loop: Loop, step: int) -> None:
        with context():
            loop.train(step)

    return act


def evaluates(loop: Loop, step: int) -> None:
    """Switch to eval mode, which changes nothing without dropout."""
    loop.net.eval()
    loop.train(step)


def memory_budget(loop: Loop, step: int) -> None:
    """Change the memory budget of a compiled program."""
    functorch_config.activation_memory_budget = 0.5
    loop.train(step)


def barrier(loop: Loop, step: int) -> None:
    dist.barrier()
    loop.train(step)


def slow(loop: Loop, step: int) -> None:
    time.sleep(TIMEOUT / 2)
    loop.train(step)


def fails_in_forward(error: type[BaseException]) -> Acts:
    def act(loop: Loop, step: int) -> None:
        loop.raises = error("of the fault")
        loop.train(step)

    return act


def fails_at_op(half: str, error: type[BaseException], number: int = 5) -> Acts:
    """Inside of the compiled program. half: "forward" or "backward"."""

    def act(loop: Loop, step: int) -> None:
        raising.step(loop.run, loop.net, loop.batch(step), half, number, error)

    return act


def fails_before_backward(error: type[BaseException]) -> Acts:
    def act(loop: Loop, step: int) -> None:
        loss = loop.run(*loop.batch(step))
        loss.register_hook(_raising(error))
        loss.backward()

    return act


def fails_after_backward(error: type[BaseException]) -> Acts:
    def act(loop: Loop, step: int) -> None:
        handle = loop.net.embed.weight.register_hook(_raising(error))
        try:
            loop.train(step)
        finally:
            handle.remove()

    return act


def _raising(error: type[BaseException]) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        raise error("of the fault")

    return hook


def kill(sign: signal.Signals) -> Acts:
    def act(loop: Loop, step: int) -> None:
        os.kill(os.getpid(), sign)

    return act


def forks(loop: Loop, step: int) -> None:
    """Fork a child that exits at once, like a data loader's worker."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    loop.train(step)


def copies(loop: Loop, step: int) -> None:
    """The compiled model gives way to a copy of itself."""
    loop.net = copy.deepcopy(loop.net)
    loop.compile()
    loop.train(step)


def loads(loop: Loop, step: int) -> None:
    """A checkpoint, which has been on a disk."""
    with io.BytesIO() as disk:
        torch.save({name.removeprefix("_orig_mod."): x for name, x in loop.run.state_dict().items()}, disk)
        disk.seek(0)
        loop.net.load_state_dict(torch.load(disk))
    loop.train(step)


def interrupts_another(loop: Loop, step: int) -> None:
    """Interrupt another rank while it waits for this one."""
    time.sleep(TIMEOUT / 4)
    os.kill(loop.pid((loop.rank + 1) % loop.scene.world), signal.SIGINT)
    time.sleep(1)
    loop.train(step)


def in_a_thread(loop: Loop, step: int) -> None:
    raised: list[BaseException] = []

    def other() -> None:
        try:
            loop.run(*loop.batch(step))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def force_eager(loop: Loop, step: int) -> None:
    with torch.compiler.set_stance("force_eager"):
        loop.train(step)


def recompiles_too_often(loop: Loop, step: int) -> None:
    """Every rank has a new length, which one of them does not compile any more."""
    loop.length = lambda step: 11
    if loop.is_odd:
        torch._dynamo.config.recompile_limit = 1
    loop.train(step)


def fails_to_recompile(error: type[BaseException]) -> Acts:
    def act(loop: Loop, step: int) -> None:
        loop.length = lambda step: 11
        if loop.is_odd:
            loop.compile_raises = error("of the fault")
        loop.train(step)

    return act


def a_child_calls(loop: Loop, step: int) -> None:
    """Call the model in a forked child, as a data loader's worker may; it raises, and the rank continues."""
    child = os.fork()
    if child == 0:
        try:
            loop.run(*loop.batch(step))
        except SpError as error:
            os._exit(0 if error.code == "SP682" else 2)
        os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise Wrong("a forked child called the model without an SpError")
    loop.train(step)


def checkpoints(loop: Loop, step: int) -> None:
    """Checkpoint the complete model: its backward calls it again."""
    checkpoint(loop.run, *loop.batch(step), use_reentrant=False).backward()


def under_func(loop: Loop, step: int) -> None:
    """Call the model under torch.func, for which Dynamo falls back to Python from then on."""
    ids, labels, noise = loop.batch(step)
    torch.func.grad(lambda x: loop.run(ids, labels, x))(noise)


def buffer_as_float(loop: Loop, step: int) -> None:
    loop.net.scale = loop.net.scale.float()
    loop.train(step)


def without_memory(loop: Loop, step: int) -> None:
    """A weight, as a wrapper leaves it that has its parts elsewhere."""
    loop.honest = False
    loop.net.head.weight.untyped_storage().resize_(0)
    loop.train(step)


def other_default_device(loop: Loop, step: int) -> None:
    """Set a default device, which the model does not use."""
    given = loop.batch(step)
    loop.net.zero_grad()
    with torch.device("meta"):
        loss = loop.run(*given)
        loss.backward()
    loop.compare(loss, given)


def without_sync(loop: Loop, step: int) -> None:
    """Gradients of this step stay on the rank."""
    assert isinstance(loop.run, DistributedDataParallel)
    with loop.run.no_sync():
        loop.train(step)


def compiles_for_long(loop: Loop, step: int) -> None:
    loop.length = lambda step: 11
    loop.compile_takes = 2 * TIMEOUT if loop.is_odd else 0.0
    loop.train(step)


def leaves(loop: Loop, step: int) -> None:
    """The other ranks continue in a group of their own."""
    dist.destroy_process_group()
    if loop.is_odd:
        raise Left
    loop.connect(1, [rank for rank in range(loop.scene.world) if rank != loop.scene.odd])
    torch.compiler.reset()  # as SP681 requires
    loop.train(step)


def renumbered(loop: Loop, step: int) -> None:
    """Form the group again with the ranks in reverse order."""
    dist.destroy_process_group()
    loop.connect(1, list(range(loop.scene.world))[::-1])
    torch.compiler.reset()
    loop.train(step)


def connects_late(loop: Loop, step: int) -> None:
    """The steps before this one were made without a group."""
    loop.connect(0, range(loop.scene.world))
    torch.compiler.reset()
    loop.train(step)


def two_models(loop: Loop, step: int) -> None:
    """Train two models of one class; the odd rank calls the second one first."""
    other = Loop(loop.scene, loop.rank, {})
    other.compile()
    for one in (other, loop) if loop.is_odd else (loop, other):
        one.train(step)
