"""Tests of the tracer: counted events, and the lifetime of memory."""

from __future__ import annotations

import torch
from support.cuda.tracing import Trace, Tracer
from support.cuda.worker import AbsentGpu
from torch._subclasses.fake_tensor import FakeTensorMode

MIB = 1 << 20


def added(count: int, keep: bool) -> Trace:
    """The sum of `count` values of a MiB each, which are kept until the end or not."""
    with FakeTensorMode(), Tracer() as tracer:
        total = torch.empty(MIB // 4, device="cuda")
        parts = []
        for _ in range(count):
            part = torch.empty(MIB // 4, device="cuda")
            parts.append(part)
            if not keep:
                total.add_(parts.pop())
            del part
        for part in parts:
            total.add_(part)
    return tracer.trace


def test_saved_values_are_traced(gpu: AbsentGpu) -> None:
    assert [gpu.run(added, count, True).peak // MIB for count in (2, 5)] == [3, 6]
    assert [gpu.run(added, count, False).peak // MIB for count in (2, 5)] == [2, 2]


def handed_over() -> list[Trace]:
    """A value that was there before, kept by its owner or freed."""
    found = []
    for kept in (True, False):
        with FakeTensorMode() as mode:
            given = [torch.empty(MIB // 4, device="cuda")]
            tracer = Tracer([("given", given[0])])
            with mode, tracer:
                x = given[0]
                if not kept:
                    given.clear()
                y = x * 2
                del x
                _ = y * 2, y * 3
            found.append(tracer.trace)
    return found


def test_given_values_count_until_they_are_freed(gpu: AbsentGpu) -> None:
    kept, freed = gpu.run(handed_over)
    assert kept.peak == 4 * MIB
    assert freed.peak == 3 * MIB
    assert kept.alive == {"mul": 3 * MIB, "given": MIB}


def exchanged() -> Trace:
    c10d = torch.ops._c10d_functional
    with FakeTensorMode(), Tracer() as tracer:
        x = torch.empty(4, 8, device="cuda")
        sent = c10d.all_to_all_single(x, [4], [4], "0/shift:1:1")
        y = x @ torch.empty(8, 8, device="cuda")
        c10d.wait_tensor(sent)
        c10d.all_reduce_(y @ sent.T, "sum", "0")
    return tracer.trace


def test_text(gpu: AbsentGpu) -> None:
    trace = gpu.run(exchanged)
    assert trace.text() == (
        "1 = shift:1:1 float32[4, 8]\nproduct\nwait 1\npermute of 1\nproduct\n2 = all_reduce float32[4, 4]"
    )
    assert trace.count("1 =", "2 =") == 2
    assert trace.peak == 4 * (32 + 32 + 32 + 64)
