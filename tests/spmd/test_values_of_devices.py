"""Checks of device values: no call waits for the device, and differences raise one call later."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch
from scan.kernels.test_scan_triton import python
from support import ranks as worker
from support.parallel.parallel_training import message
from support.parity import error_text
from support.ranks import Ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sp_compile.lowering.base.ranks import ranks_of
from sp_compile.lowering.collectives import checksums
from sp_compile.runtime import compare_gradients as gradients
from sp_compile.runtime import guard as check_run
from sp_compile.runtime.fingerprint import ProgramDigest
from sp_compile.runtime.guard import GuardedProgram, ProgramInfo
from sp_compile.runtime.input_checks import ComparedInputs

CHECKSUMS = """
import torch
from sp_compile.lowering.collectives import checksums
from sp_compile.lowering.triton import checksum_kernel
for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
    for n in (1, 1024, 40_000):
        x, out = torch.randint(-100, 100, (n,)).to(dtype), torch.zeros((), dtype=torch.int64)
        checksum_kernel.add_checksum(x, out)
        assert out == checksums.checksum_of(x), (dtype, n)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernel_checksums_equal_the_cpus() -> None:
    python(CHECKSUMS)


class Launches(TorchDispatchMode):
    """A mode that counts ops."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def of_absent_device(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors of a device that is not there have shapes, and nothing that could be read: reading them raises."""
    copied: list[Tensor] = []

    def sent(x: Tensor) -> checksums.PendingChecksums:
        copied.append(x)
        return checksums.PendingChecksums(torch.zeros(x.shape, dtype=x.dtype))

    monkeypatch.setattr(checksums, "start_cpu_copy", sent)
    return copied


def program(names: Sequence[str]) -> GuardedProgram:
    every = frozenset(names)
    inputs = ComparedInputs(names, every, every)
    return GuardedProgram(lambda *xs: xs, ranks_of(worker.group()), ProgramInfo(), ProgramDigest(), inputs)


def call(n: int) -> tuple[int, int]:
    """Return the copies from the device in two calls of a program of n tensors, and the ops of the second call."""
    with pytest.MonkeyPatch.context() as patch:
        copied = of_absent_device(patch)
        run = program([f"x{i}" for i in range(n)])
        xs = [torch.empty(4, 2048, dtype=torch.int64, device="meta") for _ in range(n)]
        run(*xs)
        with Launches() as launches:
            run(*xs)
    return len(copied), launches.count


def test_no_value_of_a_device_is_read_on_the_path_of_a_call(ranks: Ranks) -> None:
    """Each call copies to the CPU once for any number of tensors; .item(), .tolist() and .cpu() of these would raise."""
    (copied, few), _ = ranks.run(2, call, 1)
    (again, many), _ = ranks.run(2, call, 3)
    assert copied == again == 2
    assert many <= 3 * few


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_number_of_launches_does_not_grow_with_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel a tensor, and no other work on its elements."""
    from sp_compile.lowering.triton import checksum_kernel as checksum

    of_absent_device(monkeypatch)
    kernel = Mock()
    monkeypatch.setattr(checksums.triton, "can_use_triton", lambda x: True)
    monkeypatch.setattr(checksum, "add_checksum", kernel)
    counts = []
    for rows in (1, 1 << 20):
        xs = [torch.empty(rows, 2048, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.int64)]
        with Launches() as ops:
            checksums.start_checksums(xs)
        counts.append((ops.count, kernel.call_count))
        kernel.reset_mock()
    assert counts[0] == counts[1]
    assert counts[0][1] == 2


@pytest.mark.parametrize(("came", "waits"), [(True, 0), (False, 1)])
def test_ready_checksums_are_read_without_a_wait(came: bool, waits: int) -> None:
    """A call waits for the device only if its last checksums are not ready."""
    event = Mock(query=Mock(return_value=came))
    assert checksums.PendingChecksums(torch.tensor([3, 5]), event).read() == ["3", "5"]
    assert event.synchronize.call_count == waits


def drifts() -> list[str]:
    """Pass another value on rank 1 in the second call; CPU tensors replace device tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_run, "is_on_accelerator", lambda a: isinstance(a, Tensor))
        run, results = program(["x"]), []
        for step in range(4):
            x = torch.full((4,), step + 10 * (step == 1 and worker.group().rank()))
            results.append(error_text(partial(run, x)) if step == 2 else str(run(x)))
    return results


def test_differences_raise_one_call_later(ranks: Ranks) -> None:
    for *_, error, after in ranks.run(2, drifts):
        assert "SP638" in error
        assert "value of x " in error
        assert "tensor" in after


def shared_gradients(factors: Sequence[float]) -> list[str]:
    """Return the error of each call after a backward whose shared gradient is scaled by a factor on rank 1."""
    group, errors = worker.group(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "is_on_accelerator", lambda a: True)
        run, x = program(["x"]), torch.ones(4, dtype=torch.int64)
        run(x)
        for factor in factors:
            gradient = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
            if group.rank() == 1:
                gradient *= factor
            (copy,) = gradients.check_shared_gradients([gradient], ["y"], group.size(), group.group_name)
            assert torch.equal(copy, gradient)
            errors.append(message(partial(run, x)))
    return errors


def test_shared_gradients_of_a_device_are_compared_at_the_next_call(ranks: Ranks) -> None:
    """Gradients are compared by norm and projections, with a tolerance for rounding."""
    for same, rounded, doubled in ranks.run(2, shared_gradients, [1.0, 1 + 1e-6, 2.0]):
        assert not same
        assert not rounded
        assert re.search(r"\bgradient 0\b.* y\b.*\bcalls ", doubled), doubled


def shared_copies() -> int:
    """Return the number of copies of device gradients in a backward; reading one would raise."""
    group = worker.group()
    with pytest.MonkeyPatch.context() as patch:
        copied = of_absent_device(patch)
        patch.setattr(gradients, "start_cpu_copy", checksums.start_cpu_copy)
        gradients.check_shared_gradients(
            [torch.empty(8, 16, device="meta")] * 3, ["x", "y", "z"], group.size(), group.group_name
        )
    return len(copied)


def test_no_shared_gradient_of_a_device_is_read_in_a_backward(ranks: Ranks) -> None:
    assert ranks.run(2, shared_copies) == [1, 1]
