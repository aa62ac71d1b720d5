"""A wait for a missing rank ends with an error within the group's timeout, and later calls of the group raise."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.parity import error_text, sp
from support.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compile import SpError
from sp_compile.lowering.base.error_codes import ERRORS
from sp_compile.lowering.torch_compat import drain_gloo_threads, find_backward_nodes
from sp_compile.runtime.agreement import describe_operation_mismatch
from sp_compile.runtime.control import channel, store
from sp_compile.runtime.control.message import CALL_VERB, READ_VERB, Message

SECONDS = 5


class Floats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 16).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).cumsum(1).sin().sum()


class Halves(nn.Module):
    """Another program than that of Floats."""

    def forward(self, x: Tensor) -> Tensor:
        return (x / 2).cumsum(1).cos().sum()


def impatient(name: str) -> DeviceMesh | None:
    """The first two ranks, which wait for seconds only; a group of its own for each test, which breaks it."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS), group_desc=name)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",)) if dist.get_rank() < 2 else None


def fails_inside(calls: list[int], gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler whose program fails on rank 1 when it is called again."""

    def run(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise MemoryError("no memory for the activations")
        return gm.forward(*args)

    return run


def run_of(how: str) -> tuple[str, str, float]:
    """Return errors of rank 0 for a call that rank 1 skips or fails in, and for the next one, and the seconds."""
    mesh = impatient(how)
    if mesh is None:
        return "", "", 0.0
    x = torch.ones(2, 8, 16, dtype=torch.float64)
    compiler = functools.partial(fails_inside, []) if how == "fails" else "aot_eager"
    run = sp(Floats(), mesh=mesh, compiler=compiler)
    run(x)
    begun = time.monotonic()
    if dist.get_rank() == 1:
        if how == "fails":
            with pytest.raises(MemoryError):
                run(x)
        time.sleep(1.5 * SECONDS)
        return "", "", 0.0
    message = error_text(lambda: run(x))
    return message, error_text(lambda: run(x)), time.monotonic() - begun


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("skips", r"^SP621: rank 1 .*: rank 0 .*\n.* rank 0, 1: (runs .*|calls Floats at )spmd/test_waits.py:\d+ "),
        ("fails", "^SP661: rank 1 .*MemoryError: no memory for the activations, .*Floats at spmd/test_waits.py:"),
    ],
)
def test_a_rank_that_does_not_come(ranks: Ranks, how: str, why: str) -> None:
    message, again, seconds = ranks.run(4, run_of, how)[0]
    assert re.search(why, message), message
    assert "SP623" in again
    assert seconds < 3 * SECONDS


def slow_on_rank_1(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    time.sleep(1.5 * SECONDS * dist.get_rank())
    return gm.forward


def compiles_for_long() -> float:
    mesh = impatient("compiles")
    if mesh is None:
        return 0.0
    return sp(Halves(), mesh=mesh, compiler=slow_on_rank_1)(torch.ones(2, 8, 16, dtype=torch.float64)).item()


@pytest.mark.slow
def test_a_compilation_may_take_longer_than_the_timeout(ranks: Ranks) -> None:
    first, second, *_ = ranks.run(4, compiles_for_long)
    assert first == second == pytest.approx(Halves()(torch.ones(2, 8, 16, dtype=torch.float64)).item())


def measures_alone() -> tuple[str, float]:
    """Return the error of rank 0 if rank 1 skips the cost measurements of compilation, and the seconds."""
    mesh, begun = impatient("measures"), time.monotonic()
    if mesh is None or dist.get_rank() == 1:
        return "", 0.0
    run = sp(Floats(), mesh=mesh, cost=None)
    return error_text(lambda: run(torch.ones(2, 8, 16, dtype=torch.float64))), time.monotonic() - begun


@pytest.mark.slow
def test_a_rank_that_waits_while_it_compiles_is_no_sign_of_life_to_itself(ranks: Ranks) -> None:
    message, seconds = ranks.run(4, measures_alone)[0]
    assert "SP623" in message
    assert seconds < 3 * SECONDS


def wrong_mesh_dim() -> tuple[str, float]:
    mesh, begun = impatient("mesh"), time.monotonic()
    if mesh is None:
        return "", 0.0
    run = sp(Floats(), mesh=mesh, mesh_dim="sq" if dist.get_rank() else "sp", compiler="aot_eager")
    return error_text(lambda: run(torch.ones(2, 8, 16, dtype=torch.float64))), time.monotonic() - begun


def test_a_mesh_that_one_rank_cannot_resolve(ranks: Ranks) -> None:
    (first, seconds), (second, _), *_ = ranks.run(4, wrong_mesh_dim)
    assert "rank 1 stopped: SP11" in first, first
    assert "SP11" in second
    assert seconds < 3 * SECONDS


def another_program() -> tuple[str, float]:
    """Return the error of a program that rank 1 cannot compile, and a later result of another program."""
    x, groups = torch.ones(2, 8, 16, dtype=torch.float64), [impatient("one"), impatient("other")]
    if groups[0] is None:
        return "", 0.0
    run = sp(Floats(), mesh=groups[0], mesh_dim="sq" if dist.get_rank() else "sp", compiler="aot_eager")
    message = error_text(lambda: run(x))
    time.sleep(3 * dist.get_rank())
    return message, sp(Halves(), mesh=groups[1], compiler="aot_eager")(x).item()


def test_a_rank_that_cannot_compile_one_program_runs_the_next(ranks: Ranks) -> None:
    (first, then), (second, also), *_ = ranks.run(4, another_program)
    assert "SP11" in first
    assert "SP11" in second
    assert then == also == pytest.approx(Halves()(torch.ones(2, 8, 16, dtype=torch.float64)).item())


@pytest.mark.parametrize(("name", "believed"), [("there", True), ("later", False)])
def test_a_stop_holds_for_existing_groups(monkeypatch: pytest.MonkeyPatch, name: str, believed: bool) -> None:
    """A rank that could not compile a program may run it over a group that is created later."""
    said = channel.StopNotice(1, "mesh: it has no axis 'sq'", False, {"there": 0}, "Floats")
    monkeypatch.setattr(channel, "_read_last_stop", lambda _: said)
    monkeypatch.setattr(channel.dist, "get_rank", lambda: 0)
    waiting = channel.ControlChannel(name, [0, 1], None, timedelta(seconds=SECONDS), ["joined the group"] * 2)
    found = waiting._find_stop(Message(CALL_VERB, "Floats", 1))
    assert found == (said if believed else channel.NO_RANK)


@pytest.mark.parametrize(
    ("subject", "believed"),
    [
        ("", True),
        ("forward at model.py:12: x", True),
        ("forward at model.py:1", False),
        ("forward at model.py:3", False),
    ],
)
def test_a_stop_holds_for_its_program(monkeypatch: pytest.MonkeyPatch, subject: str, believed: bool) -> None:
    """Not for another program with the same prefix."""
    monkeypatch.setattr(
        channel, "_read_last_stop", lambda _: channel.StopNotice(1, "no memory", False, {"one": 0}, subject)
    )
    monkeypatch.setattr(channel.dist, "get_rank", lambda: 0)
    waiting = channel.ControlChannel("one", [0, 1], None, timedelta(seconds=SECONDS), ["joined the group"] * 2)
    found = waiting._find_stop(Message(CALL_VERB, "forward at model.py:12: x", 3, model=2))
    assert (found != channel.NO_RANK) == believed


def test_a_rank_that_loses_a_group_publishes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later rank does not wait for the lost group and gets the complete reason; other groups are not affected."""
    store, rank = dist.HashStore(), [0]
    monkeypatch.setattr(channel.dist, "get_rank", lambda: rank[0])
    monkeypatch.setattr(channel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(channel, "package_store", lambda: store)
    monkeypatch.setattr(channel, "_own_stop", [])
    monkeypatch.setattr(channel, "_channels", {})

    def waiting(name: str = "three") -> channel.ControlChannel:
        return channel.ControlChannel(name, [0, 1, 2], store, timedelta(seconds=SECONDS), ["joined the group"] * 3)

    call = Message(CALL_VERB, "Floats", 4)
    with monkeypatch.context() as patch:
        patch.setattr(channel, "process_groups", lambda: [("three", (0, 1, 2), "")])
        channel.publish_stop("MemoryError: no memory", continues=True)
    rank[0], channel._own_stop[:] = 1, []
    assert re.search("rank 0 .*MemoryError: no memory", waiting().fail_timeout(call, 30.0).cause)
    rank[0], channel._own_stop[:] = 2, []
    said = waiting()._find_stop(call)
    assert (said.rank, said.continues) == (1, False)
    assert re.match(
        r"it calls Floats \(number 4\) .* 30 s, .*rank 0, 2 .*; rank 0 .*MemoryError: no memory$", said.text
    ), said.text
    assert waiting("another group")._find_stop(call) == channel.NO_RANK


def model_number(waiting: channel.ControlChannel, parameters: list[nn.Parameter]) -> int:
    """Return the number of the model with these parameters, of which a call is counted."""
    return waiting.count_call("Floats", parameters)[0]


def test_deleted_models_are_not_reused() -> None:
    """A parameter may reuse the address of a deleted one; a model is known by its first parameter that still exists."""
    waiting = channel.ControlChannel("one", [0, 1], None, timedelta(seconds=SECONDS), ["joined the group"] * 2)
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    assert model_number(waiting, [first, second]) == model_number(waiting, [first, second]) == 1
    del second
    assert not waiting.models
    assert model_number(waiting, [first, nn.Parameter(torch.ones(1))]) == 2
    assert model_number(waiting, []) == 0


def test_model_numbers_are_equal_after_ranks_diverged() -> None:
    """A weight that one rank replaces changes its model number; ranks raise once, and later numbers are equal."""
    wires = [
        channel.ControlChannel("one", [0, 1], None, timedelta(seconds=SECONDS), ["joined the group"] * 2)
        for _ in range(2)
    ]
    first, weight, other = (nn.Parameter(torch.ones(1)) for _ in range(3))
    assert [model_number(one, [first]) for one in wires] == [1, 1]
    assert [model_number(one, [weight]) for one in wires] == [2, 2]
    said = [Message(CALL_VERB, "Floats", 2, model=model_number(one, [w])) for one, w in zip(wires, (weight, other))]
    assert describe_operation_mismatch(said)
    for one in wires:
        one.reset_counters(said)
    numbers = [[model_number(one, [x]) for x in (w, first)] for one, w in zip(wires, (weight, other))]
    assert numbers[0] == numbers[1]
    assert set(numbers[0]).isdisjoint({1, 2, 3})  # what is known of a number is of one model


def test_a_backward_runs_in_its_wait_context() -> None:
    """The context covers the complete backward, also errors of autograd such as a modified weight."""
    entered = []

    @contextmanager
    def around() -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            entered.append(type(error))
            raise
        entered.append(None)

    weight = torch.ones(3, requires_grad=True)
    run = torch.compile(lambda x: (x * weight).sin(), backend="aot_eager")
    for _ in range(2):
        out = run(torch.ones(3, requires_grad=True))
        assert find_backward_nodes([out], {0}, around) == [(out.grad_fn, frozenset({0}))]
        out.sum().backward()
    assert entered == [None, None]
    out = run(torch.ones(3, requires_grad=True))
    find_backward_nodes([out], (), around)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert entered[2:] == [RuntimeError]


def test_a_rank_that_gives_up_before_all_have_met_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise later ranks would connect to a missing one, in a call that no signal interrupts."""
    store = dist.HashStore()
    monkeypatch.setattr(channel.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(channel, "publish_stop", lambda *_, **__: None)
    monkeypatch.setattr(channel, "_read_last_stop", lambda _: channel.NO_RANK)
    waiting = channel.ControlChannel("one", [0, 1], store, timedelta(seconds=0.2), ["joined the group"] * 2)
    with pytest.raises(SpError, match=r"SP621: .*\b0 s"):
        waiting.are_all_equal(Message(CALL_VERB, "Floats", 1))
    assert store.add("here", 0) == 0
    alone = channel.ControlChannel("one", [0], store, timedelta(seconds=5), ["joined the group"])
    for number in (1, 2):
        assert alone.are_all_equal(Message(CALL_VERB, "Floats", number))
        assert alone.all_gather(b"text", Message(CALL_VERB, "Floats", number)) == [b"text"]


class SlowStore:
    """A store that answers the first `set` only after `awake`."""

    def __init__(self) -> None:
        self.store, self.awake = dist.HashStore(), threading.Event()

    def set(self, key: str, value: str) -> None:
        self.awake.wait(60)
        self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_rank_that_gives_up_while_the_store_is_slow_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of its query counts it later, and removes it again."""
    slow = SlowStore()
    monkeypatch.setattr(channel.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(channel, "store_host", lambda _: "localhost")
    monkeypatch.setattr(channel, "publish_stop", lambda *_, **__: None)
    monkeypatch.setattr(channel, "_read_last_stop", lambda _: channel.NO_RANK)
    monkeypatch.setattr(store, "STORE_TIMEOUT", 0.05)
    waiting = channel.ControlChannel("one", [0, 1], slow, timedelta(seconds=0.2), ["joined the group"] * 2)
    with pytest.raises(SpError, match="SP621"):
        waiting.are_all_equal(Message(CALL_VERB, "Floats", 1))
    slow.awake.set()
    for thread in [*store._pending_queries]:
        thread.join(10)
    assert slow.store.check(["address/0"])
    assert slow.store.add("here", 0) == 0


def test_heartbeats_while_another_thread_waits() -> None:
    """A rank that compiles in one thread is not absent because another thread waits, for ranks of another group."""
    compiles = channel.ControlChannel("one", [0, 1], dist.HashStore(), timedelta(seconds=SECONDS), ["joined"] * 2)
    waits = [channel.ControlChannel(name, [0], None, timedelta(seconds=SECONDS), ["joined"]) for name in "ab"]
    both, first_ends, last_ends = threading.Barrier(3), threading.Event(), threading.Event()

    def wait_for(end: threading.Event) -> Callable[[Any, Any], bool]:
        """Return an exchange that ends with an event."""
        return lambda *_: (both.wait(10), end.wait(10), True)[-1]

    def heartbeats(thread: int) -> int:
        before = compiles.store.add("compiles", 0)
        compiles.send_heartbeat(thread)
        return int(compiles.store.add("compiles", 0) - before)

    idents: list[int] = []

    def exchange(own: channel.ControlChannel, end: threading.Event) -> None:
        own.links = object()  # type: ignore[assignment]
        idents.append(threading.get_ident())
        own._exchange(wait_for(end), Message(CALL_VERB, "Floats", 1))

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(exchange, own, end) for own, end in zip(waits, (first_ends, last_ends))]
        both.wait(10)
        assert heartbeats(threading.get_ident()) == 1
        assert [heartbeats(ident) for ident in idents] == [0, 0]
        first_ends.set()
        ended[0].result(10)
        assert sorted(map(heartbeats, idents)) == [0, 1]
        last_ends.set()


def test_a_read_that_waits_is_warned_of_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(channel, "publish_stop", lambda *_, **__: None)
    monkeypatch.setattr(channel, "_read_last_stop", lambda _: channel.NO_RANK)
    monkeypatch.setattr(channel, "READ_SECONDS", 0.0)
    waiting = channel.ControlChannel("one", [0, 1, 2], dist.HashStore(), timedelta(seconds=1), ["joined the group"] * 3)
    with caplog.at_level("WARNING"), pytest.raises(SpError, match="SP622") as failure:
        waiting.are_all_equal(Message(READ_VERB, "y", 1))
    (warning,) = (record.args for record in caplog.records if record.name == channel.__name__)
    assert str(Message(READ_VERB, "y", 1)) in warning
    assert ERRORS["SP604"].fix in warning[-1]
    assert f"rank 0, 1, 2: {waiting.last_fields[0]}" in str(failure.value)


def test_a_backward_may_call_programs_from_a_thread_of_its_own() -> None:
    """A checkpoint that recomputes on a GPU calls from autograd's thread; any other second thread raises."""
    waiting = channel.ControlChannel("one", [0, 1], None, timedelta(seconds=SECONDS), ["joined the group"] * 2)
    waiting.check_thread()
    x = torch.ones(1, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda gradient: waiting.check_thread())
    with ThreadPoolExecutor(1) as another:
        another.submit(y.sum().backward).result()
        with pytest.raises(SpError, match="SP624"):
            another.submit(waiting.check_thread).result()
    assert x.grad is not None


def test_a_query_directly_after_another() -> None:
    """The thread of a query may outlive its result: the next query still runs."""
    ended = threading.Event()
    store._pending_queries[:] = [threading.Thread(target=ended.wait)]
    store._pending_queries[0].start()
    threading.Timer(0.05, ended.set).start()
    assert store.query_store(lambda: "found", "nothing") == "found"


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a stopped rank: queries time out, are not repeated while one is pending, and leak no threads."""
    monkeypatch.setattr(store, "STORE_TIMEOUT", 0.1)
    awake, asked = threading.Event(), []

    def ask() -> str:
        asked.append(1)
        awake.wait(60)
        return "found"

    assert store.query_store(ask, "nothing") == "nothing"
    assert store.query_store(ask, "nothing") == "nothing"
    assert len(asked) == 1
    awake.set()
    store._pending_queries[0].join()
    assert store.query_store(ask, "nothing") == "found"
    with pytest.raises(ZeroDivisionError):
        store.query_store(lambda: 1 // 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says of threads")
@pytest.mark.parametrize(("works", "seconds"), [(True, 60.0), (True, 0.01), (False, 60.0)])
def test_the_end_waits_for_threads_of_gloo_that_work(works: bool, seconds: float) -> None:
    """Such a thread may want the GIL yet, and aborts the process where Python has ended. One that waits is let be."""
    began, ended, times = threading.Event(), threading.Event(), list[float]()

    def run() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")  # PR_SET_NAME: as torch calls them
        times.append(time.monotonic())
        began.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 600_000) if works else ended.wait()  # without the GIL
        times.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    drain_gloo_threads(seconds)
    back = time.monotonic()
    ended.set()
    thread.join()
    start, end = times
    if works:
        assert (end - back < 0.5 * (end - start)) is (seconds == 60.0)
    else:
        assert back - start < 30
