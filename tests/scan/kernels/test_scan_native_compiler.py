"""The C++ scans and their compiler: many processes at once, one that is missing, one that fails."""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.scans.local_scans import has_native

from sp_compile.lowering.scan.kernels import native
from sp_compile.lowering.scan.scan_table import ScanProblem

needs_compiler = pytest.mark.skipif(not has_native(), reason="no C++ compiler")


@pytest.mark.slow
@needs_compiler
def test_processes_compile_at_the_same_time(tmp_path: Path) -> None:
    """Ranks that start with an empty cache compile at the same time."""
    code = (
        "import torch; from sp_compile.lowering.scan.kernels import native; "
        "from sp_compile.lowering.scan.scan_table import ScanProblem; "
        "x = torch.ones(1, 9, 3); problem = ScanProblem.of('scan', x, torch.float32, torch.float64, op='sum'); "
        "print(native.scan_native(problem, x, None)[0].sum())"
    )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    work = [
        subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", "-c", code], env=environment, stdout=-1, stderr=-1
        )
        for _ in range(3)
    ]
    for process in work:
        out, error = process.communicate(timeout=300)
        assert out.decode().strip() == "tensor(135.)", error.decode()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    native._compile.cache_clear()
    yield
    native._compile.cache_clear()


PROBLEM = ScanProblem("scan", "cpu", 1, 8, 8, torch.float32, torch.float32, torch.float64, op="sum")


@pytest.mark.usefixtures("nothing_compiled")
def test_without_a_compiler_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_cpp_compiler", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not has_native()
        assert not native.can_run_native(PROBLEM)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiler_that_fails_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("C++ compile error")

    monkeypatch.setattr(native, "compile_cpp", fail)
    monkeypatch.setattr(native, "has_cpp_compiler", lambda: True)
    with pytest.warns(UserWarning, match="C\\+\\+ compile error"):
        assert not native.can_run_native(PROBLEM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not native.can_run_native(PROBLEM)


@pytest.mark.parametrize(
    "problem",
    [
        ScanProblem("scan", "cuda", 1, 8, 8, torch.float32, torch.float32, torch.float64, op="sum"),
        ScanProblem("scan", "cpu", 1, 8, 8, torch.complex64, torch.complex64, torch.complex64, op="sum"),
        ScanProblem("scan", "cpu", 1, 8, 8, torch.uint16, torch.int64, torch.int64, op="sum"),
        ScanProblem("scan", "cpu", 1, 8, 8, torch.bfloat16, torch.bfloat16, torch.bfloat16, op="sum"),
        ScanProblem("scan", "cpu", 1, 8, 8, torch.int64, torch.int64, torch.int32, op="sum"),
        ScanProblem("linear", "cpu", 1, 8, 8, torch.int64, torch.int64, torch.int64),
    ],
)
def test_does_not_fit(problem: ScanProblem) -> None:
    assert not native.can_run_native(problem)
