"""What may go wrong on one rank around the steps of a training loop: its optimizer, its weights, what else runs there."""

from __future__ import annotations

import copy
import io
import os
import pickle
import resource
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.fuzz.fault_acts import Acts
from support.fuzz.loop import Loop
from torch import Tensor, nn

Between = Callable[[Loop], None]


def trains(loop: Loop) -> None:
    """Add an optimizer step to each step of the loop, also for the single-device model."""
    loop.optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (loop.net, loop.alone)]


def between(change: Between) -> Acts:
    """Change something between the backward and the optimizer's step."""

    def act(loop: Loop, step: int) -> None:
        loop.train(step, between=lambda: change(loop))

    return act


def clips(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.net.parameters(), 1e-3)


def nan_gradients(loop: Loop) -> None:
    for p in loop.net.parameters():
        p.grad = p.grad * float("nan") if p.grad is not None else None


def other_rate(loop: Loop) -> None:
    loop.optimizers[0].param_groups[0]["lr"] = 0.2


def decays(loop: Loop) -> None:
    loop.optimizers[0].param_groups[0]["weight_decay"] = 0.2


def forgets_momentum(loop: Loop) -> None:
    loop.optimizers[0].state.clear()


def scaler_skips(loop: Loop, step: int) -> None:
    """The optimizer's step, as a gradient scaler does that has found an infinity."""
    skipped = loop.optimizers.pop(0)
    loop.train(step)
    loop.optimizers.insert(0, skipped)


def keeps_gradients(loop: Loop, step: int) -> None:
    """zero_grad is left out."""
    given, loop.honest = loop.batch(step), False
    loop.run(*given).backward()
    for optimizer in loop.optimizers:
        optimizer.step()


def fails_in_optimizer(error: type[BaseException]) -> Acts:
    def fail(loop: Loop) -> None:
        raise error("of the fault")

    return between(fail)


def averages(loop: Loop, step: int) -> None:
    """Weights give way to their averages, as for an evaluation, and stay."""
    loop.honest = False
    for p in loop.net.parameters():
        p.data = p.data * 0.9
    loop.train(step)


def averages_and_back(loop: Loop, step: int) -> None:
    held = [p.data for p in loop.net.parameters()]
    for p in loop.net.parameters():
        p.data = p.data * 0.9
    for p, one in zip(loop.net.parameters(), held, strict=True):
        p.data = one
    loop.train(step)


def loads_other(loop: Loop, step: int) -> None:
    loop.honest = False
    loop.net.load_state_dict({name: 2 * x for name, x in loop.net.state_dict().items()})
    loop.train(step)


def assigns(loop: Loop, step: int) -> None:
    """A checkpoint of the same values, whose tensors become the weights."""
    loop.net.load_state_dict({name: x.clone() for name, x in loop.net.state_dict().items()}, assign=True)
    loop.train(step)


def ties(loop: Loop, step: int) -> None:
    loop.honest = False
    loop.net.head.weight = loop.net.embed.weight
    loop.train(step)


def casts(dtype: torch.dtype) -> Acts:
    def act(loop: Loop, step: int) -> None:
        loop.honest = loop.honest and dtype == torch.float64
        loop.net.to("cpu").to(dtype)
        ids, labels, noise = loop.batch(step)
        loop.train(step, [ids, labels, noise.to(dtype)])

    return act


def adds_a_token(loop: Loop, step: int) -> None:
    loop.honest = False
    old = loop.net.embed.weight.detach()
    loop.net.embed = nn.Embedding(len(old) + 1, old.shape[1], _weight=torch.cat([old, old[:1]]))
    loop.train(step)


class LowRank(nn.Module):
    """A layer and an adapter of rank 2, which may be merged."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.base, self.merged = base, False
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64, generator=generator))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.merged else self.base(x) + x @ self.down.T @ self.up.T


def adapted(loop: Loop) -> None:
    loop.net.inner = LowRank(loop.net.inner)
    loop.alone = copy.deepcopy(loop.net)


def adapts(loop: Loop, step: int) -> None:
    loop.honest = False
    loop.net.inner = LowRank(loop.net.inner)
    loop.train(step)


def merges(loop: Loop, step: int) -> None:
    """Which leaves the results as they are, but for rounding."""
    layer = loop.net.inner
    layer.merged = True
    with torch.no_grad():
        layer.base.weight += layer.up @ layer.down
    loop.train(step)


def narrow_tokens(loop: Loop, step: int) -> None:
    ids, labels, noise = loop.batch(step)
    loop.train(step, [ids.int(), labels, noise])


def as_parameter(loop: Loop, step: int) -> None:
    ids, labels, noise = loop.batch(step)
    loop.train(step, [ids, labels, nn.Parameter(noise, requires_grad=False)])


def by_name(loop: Loop, step: int) -> None:
    """The same arguments."""
    given = loop.batch(step)
    loop.net.zero_grad()
    loss = loop.run(noise=given[2], ids=given[0], labels=given[1])
    loss.backward()
    loop.compare(loss, given)


def marks_dynamic(loop: Loop, step: int) -> None:
    batch = loop.batch(step)
    for x in batch:
        torch._dynamo.mark_dynamic(x, 1)
    loop.train(step, batch)


def nan_input(loop: Loop, step: int) -> None:
    batch = loop.batch(step)
    batch[2][0, 0, 0] = float("nan")
    loop.honest = False
    loop.train(step, batch)
    loop.honest = not loop.optimizers


def nan_loss(loop: Loop, step: int) -> None:
    (loop.run(*loop.batch(step)) * float("nan")).backward()


def nan_weight(loop: Loop, step: int) -> None:
    loop.honest = False
    with torch.no_grad():
        loop.net.inner.weight[0, 0] = float("nan")
    loop.train(step)


def other_buffer(loop: Loop, step: int) -> None:
    """Another tensor, where others keep theirs."""
    loop.honest = False
    loop.net.scale = loop.net.scale * 2
    loop.train(step)


def makes_numbers(loop: Loop) -> None:
    """The model makes a tensor of the default dtype."""
    for net in (loop.net, loop.alone):
        forward = net.inner.forward
        net.inner.forward = lambda x, forward=forward: forward(x) * torch.linspace(0, 1, x.shape[-1])


def sets(change: Callable[[], Any]) -> Acts:
    """Something of the process, from then on."""

    def act(loop: Loop, step: int) -> None:
        change()
        loop.train(step)

    return act


def of_environment() -> None:
    """What torch reads when it is imported, or compiles."""
    os.environ.update(TORCH_COMPILE_DISABLE="1", TORCHDYNAMO_DISABLE="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")


def profiles(loop: Loop, step: int) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        loop.train(step)


def warnings_are_errors(loop: Loop, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.train(step)


def few_files(loop: Loop, step: int) -> None:
    """None may be opened more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, hard))
    try:
        loop.train(step)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def shallow(loop: Loop, step: int) -> None:
    deep = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        loop.train(step)
    finally:
        sys.setrecursionlimit(deep)


def compiles_again(**given: Any) -> Acts:
    """Every rank, the odd one with other options than before."""

    def act(loop: Loop, step: int) -> None:
        if loop.is_odd:
            loop.options = {**loop.options, **given}
        loop.compile()
        loop.train(step)

    return act


def hooks_module(loop: Loop, step: int) -> None:
    loop.net.inner.register_full_backward_hook(lambda module, inputs, outputs: None)
    loop.train(step)


def hooks_weight(loop: Loop, step: int) -> None:
    """Its gradient is changed, on this step."""
    loop.honest = False
    handle = loop.net.inner.weight.register_hook(lambda gradient: 2 * gradient)
    loop.train(step)
    handle.remove()


def both_then_backwards(loop: Loop, step: int) -> None:
    """Where others go backward after each call."""
    losses = [loop.run(*loop.batch(step)) for _ in range(2)]
    for loss in losses:
        loss.backward()


def backward_in_a_thread(loop: Loop, step: int) -> None:
    given = loop.batch(step)
    loop.net.zero_grad()
    loss = loop.run(*given)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    loop.compare(loss, given)


def reduces(loop: Loop, step: int) -> None:
    """All-reduce a value of the user after the step."""
    loop.train(step)
    dist.all_reduce(torch.ones(1))


def reduces_asynchronously(loop: Loop, step: int) -> None:
    """Start an all-reduce of the user before the step, without a wait."""
    dist.all_reduce(torch.ones(1), async_op=True)
    loop.train(step)


def sends(loop: Loop, step: int) -> None:
    """Send a value from rank 0 to rank 1 before the step."""
    if loop.rank == 0:
        dist.send(torch.ones(1), 1)
    elif loop.rank == 1:
        dist.recv(torch.ones(1), 0)
    loop.train(step)


def destroys(loop: Loop, step: int) -> None:
    """It goes on by itself, and is right."""
    dist.destroy_process_group()
    loop.train(step)


def forgets_gradients(loop: Loop, step: int) -> None:
    torch.set_grad_enabled(False)
    try:
        loop.run(*loop.batch(step))
    finally:
        torch.set_grad_enabled(True)


def exits(loop: Loop, step: int) -> None:
    os._exit(3)


def fails_in_loss(error: type[BaseException]) -> Acts:
    """Behind the call, as where a loss of the user's own fails."""

    def act(loop: Loop, step: int) -> None:
        loop.run(*loop.batch(step))
        raise error("of the fault")

    return act


def fails_before(error: type[BaseException]) -> Acts:
    def act(loop: Loop, step: int) -> None:
        raise error("of the fault")

    return act


def copied_by(copied: Callable[[Any], Any]) -> Acts:
    """The compiled model gives way to a copy."""

    def act(loop: Loop, step: int) -> None:
        run = torch.compile(loop.net, backend="sp", options={"compiler": "aot_eager", "cost": {}})
        loop.run = copied(run)
        loop.net = loop.run._orig_mod
        loop.train(step)

    return act


def pickled(run: Any) -> Any:
    return pickle.loads(pickle.dumps(run))


def saved(run: Any) -> Any:
    with io.BytesIO() as disk:
        torch.save(run, disk)
        disk.seek(0)
        return torch.load(disk, weights_only=False)


def by_inductor(loop: Loop) -> None:
    """Compile with Inductor, with a separate cache of the rank."""
    loop.options["compiler"] = "inductor"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{loop.scene.folder}/cache{loop.rank}"


def closes_cache(loop: Loop, step: int) -> None:
    """Compile again on every rank; on the odd one, no folder can be created, as on a full or read-only disk."""
    path, name = Path(loop.scene.folder, "file"), "TORCHINDUCTOR_CACHE_DIR"
    path.touch()
    torch._dynamo.reset()
    with mock.patch.dict(os.environ, {name: str(path / "cache")} if loop.is_odd else {}):
        loop.train(step)


def damages_cache(loop: Loop, step: int) -> None:
    """Compile again from the cache on every rank; the cache of the odd one is truncated."""
    kept = [x for x in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "fxgraph").rglob("*") if x.is_file()]
    for entry in kept if loop.is_odd else ():
        os.truncate(entry, entry.stat().st_size // 2)
    if not kept:
        raise AssertionError("the cache of Inductor is empty")
    torch._dynamo.reset()
    loop.train(step)
