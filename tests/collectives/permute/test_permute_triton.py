"""The kernels that permute, and how their tiles are cut: in Triton's interpreter, and compiled for a GPU."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from scan.kernels.test_scan_triton import python

from sp_compile.lowering.collectives import all_to_all_permute
from sp_compile.lowering.collectives import all_to_all_permute as lowering
from sp_compile.lowering.triton import can_use_triton
from sp_compile.lowering.triton.move_kernel import MOVE_TILE, choose_tiling

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("check", ["copies", "narrow_runs", "few_rows", "many_dims"])
def test_kernel(check: str) -> None:
    python(f"from support.attention import triton_moves as t; t.check_{check}()")


def cut(shape: tuple[int, ...], read: tuple[int, ...], itemsize: int = 2) -> Any:
    return choose_tiling(shape, read, torch.empty(shape, device="meta").stride(), itemsize)


def test_tiles() -> None:
    """Read and written in lines of 128 bytes at least wherever the tensor has them, 16 bytes a thread at a time."""
    pack = cut((8, 1024, 4, 128), (512, 4096, 128, 1))  # (s, n * h, D) -> (n, s, h, D): runs of 1 KB
    assert (pack.unit, pack.run, pack.columns.size, pack.tile) == (16, 64, 1, (16, 1, 128))
    narrow = cut((8, 8192, 8), (8, 64, 1))  # runs of 16 bytes
    assert (narrow.unit, narrow.run, narrow.tile) == (16, 1, (128, 8, 2))
    assert narrow.rows.written == narrow.columns.read == 1
    transpose = cut((4096, 8192), (1, 4096))
    assert (transpose.unit, transpose.run, transpose.tile) == (2, 1, (64, 128, 1))
    heads = cut((8, 1024, 4, 128), (4 * 1024 * 128, 128, 1024 * 128, 1))  # (n * h, s, D) -> (n, s, h, D)
    assert (heads.unit, heads.run, heads.rows.size, heads.columns.size, heads.tile) == (16, 16, 4, 1024, (4, 16, 32))
    odd = cut((2, 100, 3), (3, 6, 1), itemsize=1)
    assert (odd.unit, odd.run) == (1, 3)
    assert cut((4, 8), (8, 1)).programs == 1
    for plan in (pack, narrow, transpose, heads, odd):
        rows, columns, run = plan.tile
        assert rows * columns * run * plan.word <= MOVE_TILE


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_exchanges_of_heads_move_4_kib_a_program(head_dim: int, batch: int, heads: int) -> None:
    """(B, n h, s, D) and (B, s, n h, D) into n blocks of either order, and blocks into either: bf16, 1,000 rows."""
    n, s = 4, 1000
    by_heads = torch.empty(batch, n, heads, s, head_dim, device="meta", dtype=torch.bfloat16)
    by_rows = torch.empty(batch, s, n, heads, head_dim, device="meta", dtype=torch.bfloat16)
    blocks = torch.empty(n, batch, s, heads, head_dim, device="meta", dtype=torch.bfloat16)
    for x in (
        by_heads.permute(1, 3, 0, 2, 4),
        by_heads.permute(1, 0, 3, 2, 4),
        by_rows.permute(2, 1, 0, 3, 4),
        by_rows.permute(2, 0, 3, 1, 4),
        blocks.permute(1, 0, 2, 3, 4),
        blocks.permute(1, 3, 0, 2, 4),
    ):
        plan = cut(tuple(x.shape), x.stride())
        assert x.nbytes / plan.programs >= 4096, plan


def test_unaligned_rows_are_moved_in_smaller_units() -> None:
    assert choose_tiling((4, 64), (64, 1), (64, 1), 2, aligned=4).unit == 4
    assert choose_tiling((4, 64), (65, 1), (64, 1), 2).unit == 2


def test_too_many_dims() -> None:
    shape = (2,) * 9
    read = tuple(2**i for i in (0, 2, 4, 6, 8, 1, 3, 5, 7))
    assert cut(shape, read) is None


def test_rows_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only packing is possible, even with a declared buffer."""
    x = torch.zeros(2, 4)
    buffer = all_to_all_permute.SymmetricBuffer(torch.zeros(64, dtype=torch.uint8), lambda: None)
    monkeypatch.setitem(all_to_all_permute.BUFFERS, "declared", buffer)
    assert lowering.PERMUTE_KERNELS.choose(lowering.PermuteProblem(x, 1, 0, 2, "declared")) == "packed"
    assert not can_use_triton(x)


def test_torchs_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all_to_all_nd and symmetric memory, torch's own op exchanges a matrix."""
    barriers: list[int] = []
    buffer = all_to_all_permute.SymmetricBuffer(torch.zeros(64, dtype=torch.uint8), lambda: barriers.append(1))
    given: list[object] = []

    def nd(x: torch.Tensor, out: torch.Tensor, scatter: int, gather: int, *, group: str) -> None:
        given.extend((x.clone(), scatter, gather, group))
        out.fill_(7)

    monkeypatch.setattr(lowering, "symmetric_all_to_all", lambda: nd)
    monkeypatch.setitem(all_to_all_permute.BUFFERS, "declared", buffer)
    x = torch.arange(8.0).view(2, 4)
    out = torch.ops.sp.all_to_all_permute(x, 1, 0, 2, "declared")
    assert torch.equal(given[0], x)
    assert given[1:] == [1, 0, "declared"]
    assert torch.equal(out, torch.full((4, 2), 7.0))
    assert len(barriers) == 2


COMPILE = """
import re
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

from sp_compile.lowering.triton import move_kernel

bf16 = torch.bfloat16
wide, narrow = torch.empty(1024, 8, 512, dtype=bf16).movedim(1, 0), torch.empty(8192, 8, 8, dtype=bf16).movedim(1, 0)
for x in (wide, narrow, torch.empty(512, 512, dtype=bf16).mT, torch.empty(64, 8, 3, dtype=torch.bool).movedim(1, 0)):
    assert move_kernel.copy_strided(torch.empty(x.shape, dtype=x.dtype), x)
assert len(compiled) == 4
for kernel in (compiled[0], compiled[1]):  # 16 bytes at a time, both ways
    moves = set(re.findall(r"(?:ld|st)[.]global[.v2]*[.]b64", kernel.asm["ptx"]))
    assert {"ld.global.v2.b64", "st.global.v2.b64"} <= moves, moves
"""


@pytest.mark.slow  # tests/cuda/test_kernels.py compiles most of them, for their spills and loads
@needs_triton
def test_kernels_compile_for_hopper() -> None:
    python(COMPILE, interpret=False)
