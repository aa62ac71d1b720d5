"""Compile Triton kernels for sm_90 without a GPU, for their registers, spills and widths of memory accesses.

`launches(fn)` calls the project's own launch code on CPU tensors, which may be as large as on a GPU if they are not
accessed. Each kernel is compiled for its launch, and none runs.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import triton
import triton.language as tl
from support.cuda.absent import PROPERTIES
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ACCESS = re.compile(r"\b(LDG|STG)\.E[.\w]*")
WIDTH = re.compile(r"\.(\d+)\b|\.[US](8|16)\b")
LOCAL = re.compile(r"\b(?:LDL|STL)\b")
USED = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True)
class Launch:
    """One launch. programs: 0 where nothing is known of them. registers: of a thread; spills: instructions that read or write registers that did not fit.

    shared: bytes of a program. loads, stores: bits of global memory that an instruction moves a thread, the distinct ones, ascending.
    """

    kernel: str
    programs: int
    threads: int
    registers: int
    spills: int
    shared: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]


def launches(fn: Callable[[], Any]) -> list[Launch]:
    """What `fn()` would launch on the absent GPU, in order."""
    found: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(_measured(self.__name__, tuple(grid), kernel))
        return kernel

    from sp_compile.lowering.scan.kernels.triton import dispatch as ways

    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(ways, "_multiprocessors", return_value=PROPERTIES.multi_processor_count),
    ):
        fn()
    return found


def kernels_of_inductor(fn: Callable[[], Any]) -> list[Launch]:
    """What Inductor writes for the absent GPU while `fn()` compiles graphs, and how ptxas compiles it.

    Of a kernel that it would tune, its first choice.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers

    sources: list[tuple[str, str]] = []

    def written(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        sources.append((name, source))
        return mock.Mock()

    no_examples = [mock.patch(f"torch._inductor.fx_passes.{p}.lazy_init") for p in ("joint_graph", "post_grad")]
    with contextlib.ExitStack() as stack:
        for patch in (*no_examples, mock.patch.object(AsyncCompile, "triton", written)):
            stack.enter_context(patch)
        fn()
    found = []
    with config.patch(use_static_cuda_launcher=False), mock.patch.object(triton_helpers, "set_driver_to_gpu"):
        for name, source in sources:
            kernel = getattr(PyCodeCache.load(source), name)
            found.append(_measured(name, (0,), kernel._precompile_config(kernel.configs[0]).kernel))
    return found


def _measured(name: str, grid: tuple[int, ...], kernel: Any) -> Launch:
    programs = 1
    for size in grid:
        programs *= size
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", "-sass", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = USED.search(text)
    assert used is not None, text[:500]
    registers, _, static = map(int, used.groups())
    widths: dict[str, set[int]] = {"LDG": set(), "STG": set()}
    for access in ACCESS.finditer(text):
        widths[access[1]].add(_bits(access[0]))
    threads = kernel.metadata.num_warps * 32
    spills = len(LOCAL.findall(text))
    shared = max(static, kernel.metadata.shared)
    return Launch(name, programs, threads, registers, spills, shared, *(tuple(sorted(w)) for w in widths.values()))


def _bits(instruction: str) -> int:
    """LDG.E.128.STRONG -> 128, LDG.E.U16 -> 16, LDG.E -> 32."""
    width = WIDTH.search(instruction)
    return 32 if width is None else int(width[1] or width[2])


@triton.jit
def crowded(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel whose values cannot all be in registers, if it has few threads."""
    at = tl.arange(0, N)
    values = tl.load(x + at)
    tl.store(out + at, tl.cumsum(values) * tl.sum(values))
