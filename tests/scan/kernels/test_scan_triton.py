"""The Triton row of the scans' lowering table: in Triton's interpreter against loops, and its compilation."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sp_compile.lowering.scan.kernels.triton import triton_scan as row
from sp_compile.lowering.scan.scan_table import ScanProblem

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

TESTS = Path(__file__).parents[2]
PATHS = str(TESTS), str(TESTS.parent / "benchmarks")


def python(program: str, interpret: bool = True) -> None:
    """Triton reads TRITON_INTERPRET when it is imported: in a process of its own, where the tests can be imported."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
    environment = environment | {"TRITON_INTERPRET": "1" if interpret else "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("way", ["one", "parts"])
def test_way(way: str) -> None:
    python(f"from support.scans import triton_scans as t; t.check_way({way!r})")


@pytest.mark.slow
@needs_triton
def test_row() -> None:
    calls = "t.check_operators(); t.check_public(); t.check_empty(); t.check_choice(); t.check_matrices(takes_all=True)"
    python(f"from support.scans import triton_scans as t; {calls}")


@needs_triton
def test_launches_and_recurrences() -> None:
    python(
        "from support.scans import triton_scans as t; t.check_launches(); t.check_linear_backward(); "
        "t.check_matrices(takes_all=False)"
    )


@pytest.mark.slow
def test_without_triton() -> None:
    """The row can be imported, and fits nothing."""
    python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from sp_compile.lowering.scan.scan_table import ScanProblem\n"
        "from sp_compile.lowering.scan.kernels.triton import triton_scan as row\n"
        "f32 = torch.float32\n"
        "assert not row.can_run_triton(ScanProblem('scan', 'cuda', 1, 9, 1, f32, f32, f32))"
    )


@needs_triton
def test_fits() -> None:
    """Any tensor on a GPU of a dtype that the kernels have."""
    f32 = torch.float32
    assert row.can_run_triton(ScanProblem("scan", "cuda", 1, 9, 1, f32, f32, f32))
    assert not row.can_run_triton(ScanProblem("scan", "cuda", 1, 9, 1, torch.complex64, f32, f32))
    assert not row.can_run_triton(ScanProblem("scan", "mps", 1, 9, 1, f32, f32, f32))


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)


driver.set_active(Hopper())
compiled = []
JITFunction.__getitem__ = lambda kernel, grid: lambda *args, **options: compiled.append(
    JITFunction.run(kernel, *args, grid=grid, warmup=True, **options)
)

from measuring.scans.scan_direct import Direct
from measuring.scans.scan_schedules import using_schedule
from sp_compile.lowering.scan.kernels.triton import triton_scan as row
from sp_compile.lowering.scan.scan_table import ScanProblem

f32, bf16, i64 = torch.float32, torch.bfloat16, torch.int64
scan = Direct(row.TRITON_LOWERING)
x, starts = torch.empty(1, 2**20, 1), torch.empty(1, 2**20, 1, dtype=torch.bool)
few = torch.empty(1, 2**16, 8, dtype=torch.int32)
grads = ScanProblem.of("linear", x, f32, f32, reverse=True, lagged=True)
for way in ("one", "parts"):
    with using_schedule(way):
        scan.scan(x, None, "sum", False, False, f32, f32)
        scan.scan(x.to(bf16), starts, "max", True, True, bf16, f32)
        scan.scan(few, None, "sum", False, False, i64, i64)
        scan.extremes(x, None, "min", False)
        scan.linear(x, x, torch.empty(1, 1), True, True, f32, f32)
        row.linear_grads_triton(grads, x, x.to(bf16), None, x, torch.empty(1, 1))
        scan.scan(x, None, "logsumexp", False, False, f32, f32)
assert len(compiled) == 7 * (1 + 2)
assert all("mov" in kernel.asm["ptx"] for kernel in compiled)
"""


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """Triton and its assembler compile for a GPU that is not here: not all that the interpreter takes passes."""
    python(COMPILE, interpret=False)
