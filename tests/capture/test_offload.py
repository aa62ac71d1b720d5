"""offload=: values that move to host memory between forward and backward, their order, and single-device results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from support import ranks as worker
from support.capturing import compile_halves
from support.cuda.borrowed import Watch, borrow
from support.parity import Checkpointed, Decoder, Outcome, against_eager, build, check, text
from support.parity import sp as compiled
from support.ranks import Ranks
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import sp_compile
from sp_compile.lowering import offload_ops as ops
from sp_compile.lowering.base.options import SPConfig
from sp_compile.lowering.torch_compat import storage_of
from sp_compile.passes.cost.step_memory import StepMemory, format_bytes
from sp_compile.passes.cost.walk.live_values import nbytes_of
from sp_compile.passes.graph.call import node_tensors
from sp_compile.passes.joint.partitioned import PartitionedPasses

sp = torch.ops.sp


class Chain(nn.Module):
    """(1, S, 8) -> a number; each layer keeps its result."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x.cumsum(1)).square().sum()


class Handed(Chain):
    """Gives its caller a value that it keeps, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.parts(x.cumsum(1))
        return h.square().sum(), h


MODELS = {"as written": Decoder, "checkpointed": Checkpointed}
ROWS = torch.zeros(1, 64, 8, dtype=torch.float64)


@cache
def halves(
    share: Any, model: str = "as written", attention: str = "ring", dynamic: bool = False, **options: Any
) -> tuple[Graph, Graph, int]:
    """Return forward and backward of a rank of two after the pass, and the number of the caller's results; run nothing.

    dynamic: compile for symbolic lengths.
    """
    found: list[Any] = []
    plain = PartitionedPasses.run_training

    def seen(self: PartitionedPasses, forward: GraphModule, backward: GraphModule, results: int) -> None:
        plain(self, forward, backward, results)
        found.extend([forward.graph, backward.graph, results])

    with mock.patch.object(PartitionedPasses, "run_training", seen):
        if model == "handed out":
            compile_halves(build(Handed), (ROWS,), 1, offload=share, **options)
        else:
            given = text(32)
            for x in given if dynamic else ():
                torch._dynamo.mark_dynamic(x, 1)
            compile_halves(build(MODELS[model], layers=1), given, 2, attention=attention, offload=share, **options)
    return found[0], found[1], found[2]


def kept(forward: Graph, results: int) -> dict[Any, int]:
    """Return bytes per storage that the device keeps for the backward in addition to its inputs."""
    given = {storage_of(x) for n in forward.find_nodes(op="placeholder") for x in node_tensors(n)}
    values: list[Node] = [n for n in forward.output_node().args[0][results:] if n.target is not sp.offload.default]
    found = {storage_of(x): nbytes_of(x) for n in values for x in node_tensors(n)}
    return {place: nbytes for place, nbytes in found.items() if place not in given}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["as written", pytest.param("checkpointed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_device_memory_shrinks_by_the_share(model: str, share: float) -> None:
    """Up to the size of the largest value; queries, keys and values in one storage move together."""
    (before, _, results), (after, backward, _) = halves(0.0, model), halves(share, model)
    all_of_it, left = kept(before, results), kept(after, results)
    gone = sum(all_of_it.values()) - sum(left.values())
    assert gone <= share * sum(all_of_it.values())
    assert gone >= 0.99 * share * sum(all_of_it.values()) - max(all_of_it.values())
    hosts = after.find_nodes(op="call_function", target=sp.offload.default)
    assert sum(n.meta["val"].untyped_storage().nbytes() for n in hosts) == gone
    assert len(backward.find_nodes(op="call_function", target=sp.reload.default)) == len(hosts) > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["checkpointed", pytest.param("as written", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["ulysses", pytest.param("ring", marks=pytest.mark.slow)])
def test_a_program_of_any_length_leaves_no_more_than_one_of_that_length(model: str, attention: str) -> None:
    """Attention results are not contiguous, and queries, keys and values share one storage.

    At a symbolic length the mask of the labels, of one byte a token, has the rows of both ranks.
    """
    one, every = (kept(*halves(1.0, model, attention, dynamic)[::2]) for dynamic in (False, True))
    assert sum(every.values()) <= sum(one.values()) + text(32)[0].shape[1] // 2


class Thirds(nn.Module):
    """(1, S, 8) -> a number; the parts of one product are read by other products."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.flatten(0, 1) for y in self.parts(x).chunk(3, -1))
        return (q @ k.t() @ v).square().sum()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_of_one_piece_of_memory(dynamic: bool) -> None:
    """One copy is made of them, and all three are views of it again, once it is there."""
    model, backwards, plain = build(Thirds), list[Graph](), PartitionedPasses.run_training

    def seen(self: PartitionedPasses, forward: GraphModule, backward: GraphModule, results: int) -> None:
        plain(self, forward, backward, results)
        backwards.append(backward.graph)

    x = torch.randn(1, 6, 8, dtype=torch.float64)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1)
    gradients = []
    with mock.patch.object(PartitionedPasses, "run_training", seen):
        for run in (model, compiled(model, offload=1.0, seq_dims={"x": 1})):
            model.zero_grad()
            run(x).backward()
            gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    (graph,) = backwards
    order = {n: i for i, n in enumerate(graph.nodes)}
    views = graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    (piece,) = {view.args[0] for view in views}
    assert len(views) == 3
    assert piece.target is sp.reload.default
    (wait,) = [user for user in piece.users if user.target is sp.reloaded.default]
    assert order[wait] < min(order[view] for view in views)


def test_copies_are_in_order() -> None:
    """Offloads start after their value and end before the return; reloads start early and end before use."""
    forward, backward, results = halves(0.5)
    order = {n: i for graph in (forward, backward) for i, n in enumerate(graph.nodes)}
    for host in forward.find_nodes(op="call_function", target=sp.offload.default):
        (x,) = host.args
        (wait,) = (user for user in host.users if user.op != "output")
        assert order[host] == order[x] + 1
        assert wait.target is sp.offloaded.default
        assert wait.args == (host, x)
        assert order[host] < order[wait]
        assert host in forward.output_node().args[0][results:]
        assert x not in forward.output_node().args[0][results:]
    for x in backward.find_nodes(op="call_function", target=sp.reload.default):
        wait, *reads = sorted(x.users, key=order.__getitem__)
        assert wait.target is sp.reloaded.default
        assert order[x] < order[wait] < min(map(order.__getitem__, reads))
        assert x.args[0].op == "placeholder"
        assert list(x.args[0].users) == [x]


def test_values_of_the_caller_stay() -> None:
    """Of all saved values, only the result is not offloaded."""
    forward, _, results = halves(1.0, "handed out")
    outputs = forward.output_node().args[0]
    assert not [n for n in outputs[:results] if n.target is sp.offload.default]
    gone = forward.find_nodes(op="call_function", target=sp.offload.default)
    left = set(kept(forward, results))
    theirs = {storage_of(n.meta["val"]) for n in outputs[:results]}
    assert len(gone) > 1
    assert len(left) == 1
    assert left < theirs


@pytest.mark.parametrize("model", ["handed out", pytest.param("as written", marks=pytest.mark.slow)])
def test_copies_back_begin_ahead(model: str) -> None:
    """With a slow way to the host, all begin at once; in the order of their use."""
    _, backward, _ = halves(0.5, model, cost=Slow(host_bandwidth=1e3))
    order = {n: i for i, n in enumerate(backward.nodes)}
    fresh = backward.find_nodes(op="call_function", target=sp.reload.default)
    uses = [min(order[user] for user in x.users) for x in fresh]
    assert uses == sorted(uses)
    products = [n for n in backward.nodes if n.op == "call_function" and "mm" in n.name]
    assert max(map(order.__getitem__, fresh)) < order[products[0]]


class Slow(dict):  # type: ignore[type-arg]
    """Hashable constants of a cost model with slow copies."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


@pytest.mark.slow
def test_inputs_of_checkpointed_blocks_go() -> None:
    """All that such a decoder keeps of a block is its input and attention's results."""
    forward, _, _ = halves(1.0, "checkpointed")
    shapes = {tuple(n.meta["val"].shape) for n in forward.find_nodes(op="call_function", target=sp.offload.default)}
    assert (2, 16, 16) in shapes


def frozen(model: Callable[..., nn.Module]) -> nn.Module:
    """Its embedding and the weights of its first layer learn nothing."""
    made = build(model, layers=2)
    for name, p in made.named_parameters():
        p.requires_grad_("embed" not in name and ".0." not in name)
    return made


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], int]] = {
    "decoder": (lambda: build(layers=1), text(32), 2),
    "checkpointed": (lambda: build(Checkpointed, layers=2), text(32), 2),
    "frozen": (partial(frozen, Decoder), text(32), 2),
    "handed out": (lambda: build(Handed), (ROWS,), 1),
    "chain": (lambda: build(Chain), (ROWS,), 1),
}
"""Models, what they are given, and on how many ranks."""


def explained(program: str = "decoder", **options: Any) -> sp_compile.Report:
    make, given, n = PROGRAMS[program]
    return sp_compile.explain(make(), *given, sp=n, memory=True, compiler="aot_eager", **options)


def on_a_device(step: StepMemory) -> int:
    """Bytes of a graph's weights, inputs, values and gradients at the peak."""
    return step.weights.parameters + step.inputs + step.values


@pytest.mark.parametrize(
    ("program", "shares"), [("chain", (0.95, 0.8)), pytest.param("decoder", (0.98, 0.9), marks=pytest.mark.slow)]
)
def test_auto_offloads_the_excess(program: str, shares: Sequence[float]) -> None:
    """Offloading moves the decoder's peak to another place; memory stays in the limit at each moment."""
    step = explained(program).step
    assert step is not None
    assert step.offloaded is None
    least = on_a_device(step)
    for memory, goes in ((least + 1, False), *((share * least, True) for share in shares)):
        found = explained(program, offload="auto", cost={"memory": memory, "host_bandwidth": 1e15}).step
        assert found is not None
        assert found.offloaded is not None
        assert (found.offloaded.nbytes > 0) == goes
        assert on_a_device(found) <= memory
        if program == "chain":  # all values are of one size
            assert found.offloaded.nbytes < max(0, least - memory) + 64 * 8 * 8
    assert explained(program, offload="auto").step.offloaded.nbytes == 0, "the memory of a CPU is unknown"


ROUTES = {"at once": 1e15, "slow": 1e10}
"""Bytes a second to the host: copies take nothing, or as long as some of the work."""


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("program", "state", "route"),
    [
        ("chain", "replicated", "slow"),
        ("chain", "sharded", "at once"),
        ("decoder", "sharded", "at once"),
        *(
            pytest.param(program, state, route, marks=pytest.mark.slow)
            for program, states in {
                "handed out": ["replicated", "sharded"],
                "checkpointed": ["replicated", "sharded"],
                "frozen": ["replicated", "sharded"],
            }.items()
            for state in states
            for route in ROUTES
        ),
    ],
)
def test_auto_ends_at_the_limit(program: str, state: str, route: str) -> None:
    """Wherever some share does, and sends at most a tenth more than the smallest of them."""
    n = PROGRAMS[program][2]

    def look(offload: Any, memory: float = 1e15) -> tuple[float, int]:
        cost = {"memory": memory, "host_bandwidth": ROUTES[route], "flops": 1e10}
        step = explained(program, offload=offload, cost=cost, state=state).step
        assert step is not None
        held = step.fsdp(n) if state == "sharded" else on_a_device(step)
        return held, step.offloaded.nbytes if step.offloaded is not None else 0

    shares = [look(quarters / 4) for quarters in range(5)]
    most, least = shares[0][0], min(held for held, _ in shares)
    assert least < most
    for part in (0.0, 0.2, 0.6, 0.999):
        memory = least + part * (most - least)
        held, sent = look("auto", memory)
        assert held <= memory
        assert 0 < sent <= 1.1 * min(nbytes for there, nbytes in shares if there <= memory)
    assert look("auto", most) == (most, 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.98, 0.9])
def test_auto_takes_no_more_than_a_share_that_fits(part: float) -> None:
    fast = {"host_bandwidth": 1e15}
    memory = part * on_a_device(explained("decoder").step)
    steps = (explained("decoder", offload=twelfths / 12, cost=fast).step for twelfths in range(12))
    enough = next(step for step in steps if on_a_device(step) <= memory)
    found = explained("decoder", offload="auto", cost={"memory": memory, **fast}).step
    assert on_a_device(found) <= memory
    assert found.offloaded.nbytes <= enough.offloaded.nbytes


def test_a_report_lists_offloaded_values() -> None:
    """Slow copies run one after another and are not hidden."""
    report = explained("chain", offload=0.5)
    assert report.step is not None
    assert report.step.offloaded is not None
    assert report.step.offloaded.values > 0
    assert format_bytes(report.step.offloaded.nbytes) in str(report)
    assert report.step.saved == report.step.offloaded.kept
    assert 0 < report.step.offloaded.waits <= 2 * report.step.offloaded.seconds
    slow = explained("chain", offload=1.0, cost={"host_bandwidth": 1e3}).step
    assert slow is not None
    assert slow.offloaded is not None
    assert slow.offloaded.waits == pytest.approx(2 * slow.offloaded.seconds, rel=1e-3)


@pytest.mark.parametrize("value", ["allways", 2, -0.5, True, None])
def test_invalid_shares(value: Any) -> None:
    with pytest.raises(sp_compile.SpError, match="SP103: offload"):
        SPConfig(offload=value)


def test_a_compiler_without_a_place_for_it() -> None:
    with pytest.raises(sp_compile.SpError, match=r"SP105: offload=0.5.* compiler='eager'"):
        SPConfig(offload=0.5, compiler="eager")


class Stream:
    """A fake GPU stream that records its calls."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} is marked")
        return f"mark of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


def test_streams_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each direction has its own stream, which waits for the computation; the computation waits for marks where requested.

    The host waits for nothing, as its memory is pinned.
    """
    log: list[str] = []
    now = [computing := Stream(log, "computation")]
    gpu, x = torch.device("cuda", 0), torch.randn(4)

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        now.append(stream)
        yield
        now.pop()

    names = iter(["copy out", "copy back"])
    monkeypatch.setattr(ops, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(log, next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    with Watch() as watch:
        host = ops.offload(borrow(x))
        ops.offloaded(host, borrow(x))
        assert host.is_pinned()
    assert host.device.type == "cpu"
    assert not watch.seen.waits
    ops._streams[gpu, "cpu"] = Stream(log, next(names))  # its begin is on the CPU, and here its end, too
    back = ops._start_copy(torch.empty(4), host, gpu)
    ops._wait_for_copy(back, gpu)
    assert now == [computing]
    assert torch.equal(back, x)
    assert not ops._pending_copies
    assert log == [
        "copy out waits for computation",
        "copy out is marked",
        "computation waits for mark of copy out",
        "copy back waits for computation",
        "copy back is marked",
        "computation waits for mark of copy back",
    ]


def trained(model: str, share: Any, compiler: str) -> Outcome:
    return against_eager(
        build(MODELS[model], layers=1), *text(21), mesh=worker.mesh(), offload=share, compiler=compiler
    )


@pytest.mark.parametrize(
    ("n", "model", "share", "compiler"),
    [
        (2, "checkpointed", 1.0, "aot_eager"),
        pytest.param(2, "as written", 0.5, "aot_eager", marks=pytest.mark.slow),
        pytest.param(3, "as written", 1.0, "aot_eager", marks=pytest.mark.slow),
        pytest.param(2, "as written", 1.0, "inductor", marks=pytest.mark.slow),
        pytest.param(4, "checkpointed", 0.5, "inductor", marks=pytest.mark.slow),
    ],
)
def test_equals_one_device(ranks: Ranks, n: int, model: str, share: float, compiler: str) -> None:
    check(ranks.run(n, trained, model, share, compiler))
