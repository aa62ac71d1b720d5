"""Ranks of one host compile a graph once: the first one compiles, and the others load its result."""

import fcntl
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.ranks import Ranks, mesh
from torch import Tensor

from sp_compile.lowering.torch_compat.compile_once import wait_for_turn


def start_waiting(path: Path, log: list[str], name: str, limit: float = 60) -> threading.Thread:
    def take_turn() -> None:
        with wait_for_turn(path, limit):
            log.append(name)

    thread = threading.Thread(target=take_turn)
    thread.start()
    return thread


def test_others_wait_for_the_first(tmp_path: Path) -> None:
    log: list[str] = []
    with wait_for_turn(tmp_path / "lock"):
        threads = [start_waiting(tmp_path / "lock", log, "other") for _ in range(2)]
        time.sleep(0.2)
        log.append("first")
    for thread in threads:
        thread.join(10)
    assert log == ["first", "other", "other"]


def test_no_wait_after_a_compilation(tmp_path: Path) -> None:
    with wait_for_turn(tmp_path / "lock"):
        pass
    with wait_for_turn(tmp_path / "lock"):  # this one does not hold the lock
        log: list[str] = []
        start_waiting(tmp_path / "lock", log, "other").join(10)
    assert log == ["other"]


def test_a_failed_compilation_lets_others_run(tmp_path: Path) -> None:
    log, threads = list[str](), list[threading.Thread]()

    def fail_in_turn() -> None:
        with wait_for_turn(tmp_path / "lock"):
            threads.append(start_waiting(tmp_path / "lock", log, "other"))
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fail_in_turn()
    threads[0].join(10)
    assert log == ["other"]


def test_a_process_that_is_killed_lets_others_run(tmp_path: Path) -> None:
    """The lock of a killed process is released without its mark, so that the next process holds it."""
    log: list[str] = []
    with (tmp_path / "lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        thread = start_waiting(tmp_path / "lock", log, "next")
        time.sleep(0.2)
        assert log == []
    thread.join(10)
    assert log == ["next"]
    assert (tmp_path / "lock").read_text() == "finished"


def test_the_wait_is_limited(tmp_path: Path) -> None:
    log: list[str] = []
    with wait_for_turn(tmp_path / "lock"):
        start_waiting(tmp_path / "lock", log, "other", limit=0.2).join(10)
        assert log == ["other"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with wait_for_turn(tmp_path / "file" / "lock"):  # a file in place of the folder
        pass


def count_compilations(cache: str) -> list[int]:
    """Compile a function with gradients; return how many graphs this rank compiled, and loaded with their backward."""
    from torch._dynamo.utils import counters

    counters.clear()
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(1, 12, 4).requires_grad_()

    def running_mean(x: Tensor) -> Tensor:
        return (x.sin().cumsum(1) * x).mean()

    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": cache}):
        torch.compile(running_mean, backend="sp", options={"mesh": mesh()})(x).backward()
    expected = torch.autograd.grad(running_mean(x), x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-9, atol=1e-9)
    return [counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"]]


@pytest.mark.slow
def test_one_of_two_ranks_compiles(ranks: Ranks, tmp_path: Path) -> None:
    (missed, loaded), (missed_by_first, loaded_by_first) = sorted(ranks.run(2, count_compilations, str(tmp_path)))
    assert missed_by_first - missed == 2  # forward and backward
    assert loaded - loaded_by_first == 1
