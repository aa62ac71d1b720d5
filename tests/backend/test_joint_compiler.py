"""Inductor with a pass on the joint graph: the user's own pass still runs, before it. Its code for CPUs is corrected.

Of processes that compile equal graphs, one compiles.
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import ranks as worker
from support.ranks import Ranks
from torch import Tensor
from torch._inductor import compile_fx, config
from torch.nn import functional

from sp_compile.lowering.torch_compat import get_compiler, joint_compiler, shared_compiles


@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: [own]], ids=["one", "list"])
def test_own_pass(wrap: Callable[..., object]) -> None:
    seen: list[str] = []
    compiler = joint_compiler("inductor", lambda gm: seen.append("ours"), None)
    with config.patch(joint_custom_pre_pass=wrap(lambda graph: seen.append("theirs"))):
        torch.compile(lambda x: x.sin(), backend=compiler)(torch.ones(4))
    assert seen == ["theirs", "ours"]


def multiply_padded(x: Tensor) -> Tensor:
    """Reduce over a loop that Inductor vectorizes, beside an outer one, with a loop between them."""
    gelu = (x * 0.5) * (torch.erf(x * 0.5**0.5) + 1)
    missing = x.shape[2] - x.shape[1]
    rows = functional.pad(gelu, (0, 0, 0, 0, 0, missing), value=0.5)
    return rows @ functional.pad(gelu.permute(3, 2, 1, 0), (0, 0, 0, missing), value=0.5)


def test_a_reduction_with_a_short_last_vector_stores_its_elements_only() -> None:
    """Inductor alone stores a whole vector: it overwrites elements, and the heap after the result (pytorch#196681)."""
    torch.manual_seed(0)
    x = torch.randn(1, 8, 66, 66).contiguous(memory_format=torch.channels_last)  # vectors have 4, 8 or 16 elements
    torch.testing.assert_close(torch.compile(multiply_padded, backend="sp")(x), multiply_padded(x))


@pytest.mark.parametrize("key", [None, "key"])
def test_a_pass_without_key_runs_before_a_cached_graph_is_loaded(tmp_path: Path, key: str | None) -> None:
    """A pass that exchanges messages has no key; it runs on every rank, also if one has a cached result."""
    seen: list[str] = []
    compiler = joint_compiler("inductor", lambda gm: seen.append("ours"), key)
    for _ in range(2):
        with cache_in(str(tmp_path)) as compiled:
            torch.compile(lambda x: x.cos() * x, backend=compiler)(torch.ones(4, requires_grad=True)).sum().backward()
    assert compiled == []
    assert len(seen) == (1 if key else 2)


# Processes that compile equal graphs.


@contextmanager
def cache_in(folder: str) -> Iterator[list[int]]:
    """Use a new cache of Inductor; yield the process ids of its compilations by this process."""
    compile_graph, compiled = compile_fx.fx_codegen_and_compile, list[int]()

    def count(*args: object, **kwargs: object) -> object:
        compiled.append(os.getpid())
        return compile_graph(*args, **kwargs)

    torch._dynamo.reset()
    environment = mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder)
    caches = config.patch(force_disable_caches=False, fx_graph_cache=True)
    with environment, caches, mock.patch.object(compile_fx, "fx_codegen_and_compile", count):
        yield compiled


def compile_on_rank(folder: str, environment: dict[str, str], fails: bool = False) -> tuple[int, bool, list[float]]:
    """Compile forward and backward; the number of compilations, whether one failed, and the gradient."""
    x = torch.arange(4.0).requires_grad_()
    program = torch.compile(lambda x: (x.sin() * x).sum(), backend=joint_compiler("inductor", lambda gm: None, "key"))
    patched = mock.patch.dict(os.environ, environment)
    with cache_in(folder) as compiled, patched, fail_once(folder) if fails else nullcontext():
        dist.barrier(worker.group())
        with suppress(torch._inductor.exc.InductorError):
            program(x).backward()
    return len(compiled), x.grad is None, [] if x.grad is None else x.grad.tolist()


@contextmanager
def fail_once(folder: str) -> Iterator[None]:
    """Make the first compilation of all processes fail."""
    compile_graph = compile_fx.fx_codegen_and_compile

    def fail(*args: object, **kwargs: object) -> object:
        with suppress(FileExistsError):
            os.close(os.open(f"{folder}/failed", os.O_CREAT | os.O_EXCL))
            compile_graph(*args, **kwargs)
            raise ValueError("the first compilation fails")
        return compile_graph(*args, **kwargs)

    with mock.patch.object(compile_fx, "fx_codegen_and_compile", fail):
        yield


@pytest.mark.parametrize("hosts", [1, 2])
def test_one_of_two_processes_compiles(ranks: Ranks, tmp_path: Path, hosts: int) -> None:
    """Ranks of one host also share the joint graph; others share a forward and a backward if they share a cache."""
    x = torch.arange(4.0)
    gradient = (x.cos() * x + x.sin()).tolist()
    outcomes = ranks.run(2, compile_on_rank, str(tmp_path), {"LOCAL_WORLD_SIZE": str(2 // hosts)})
    numbers = sorted(number for number, *_ in outcomes)
    assert sum(numbers) == 2, "one forward and one backward"
    assert hosts == 2 or numbers == [0, 2]
    assert [found for *_, found in outcomes] == [pytest.approx(gradient)] * 2


def test_the_other_process_compiles_after_an_error(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.run(2, compile_on_rank, str(tmp_path), {}, True)
    assert sorted(failed for _, failed, _ in outcomes) == [False, True]
    assert sorted(number for number, *_ in outcomes) == [1, 2], "a forward; a forward and a backward"


HOLD = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"


def compile_sine(folder: Path, **settings: object) -> tuple[int, float]:
    """The number of compilations, and the seconds of the call."""
    with cache_in(str(folder)) as compiled, config.patch(settings), torch.no_grad():
        start = time.monotonic()
        x = torch.ones(4)
        torch.testing.assert_close(torch.compile(torch.sin, backend=get_compiler("inductor"))(x), x.sin())
        return len(compiled), time.monotonic() - start


@pytest.mark.parametrize("limit", [60, 0.3], ids=["ends", "hangs"])
def test_a_process_that_stores_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    """Another process holds the lock of a graph, and is killed before it has a result, or never ends."""
    monkeypatch.setattr(shared_compiles, "WAIT_LIMIT", limit)
    assert compile_sine(tmp_path)[0] == 1
    (lock,) = (tmp_path / "locks").glob("*.sp.lock")
    assert compile_sine(tmp_path)[0] == 0, "the result is in the cache"
    shutil.rmtree(tmp_path / "fxgraph")
    shutil.rmtree(tmp_path / "aotautograd")
    other = subprocess.Popen([sys.executable, "-c", HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        other.stdout.readline()  # it holds the lock
        timer = threading.Timer(0.3, other.kill if limit > 1 else lambda: None)
        timer.start()
        compiled, seconds = compile_sine(tmp_path)
        assert compiled == 1
        assert 0.3 <= seconds < 60
        timer.join()
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize(
    "settings",
    [
        {"fx_graph_cache": False},
        {"force_disable_caches": True},
        {"joint_custom_pre_pass": lambda graph: None},  # a pass without a key
        {"reorder_for_compute_comm_overlap": True},  # may exchange messages between ranks
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_nothing_waits_without_a_cached_result(tmp_path: Path, settings: dict[str, object]) -> None:
    assert compile_sine(tmp_path, **settings)[0] == 1
    assert not list(tmp_path.rglob("*.sp.lock"))
