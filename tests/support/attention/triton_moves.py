"""Checks of the permute kernels for any strides and dtypes, in a process with Triton's interpreter."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sp_compile.lowering.triton import move_kernel as move

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int16, torch.int64,
    torch.complex64, torch.complex128,
)  # fmt: skip


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 50
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


def check(source: Tensor, target: Tensor | None = None) -> None:
    target = torch.empty(source.shape, dtype=source.dtype) if target is None else target
    assert move.copy_strided(target, source)
    assert torch.equal(target, source)


def check_copies() -> None:
    """Check packs, transposes, slices and broadcasts, into contiguous and strided memory."""
    for i, dtype in enumerate(DTYPES):
        x = draw((6, 4, 10), dtype, i)
        check(x.unflatten(1, (2, 2)).movedim(1, 0))
        check(x.movedim(2, 0))
        check(x[1:, ::2, 1:].movedim(0, 2))
        check(x[:1].expand(3, 4, 10))
        check(x[0, 0], torch.empty(30, dtype=dtype)[::3])
        check(x.flatten()[:0])
        check(x.mT, torch.empty(8, 12, 6, dtype=dtype)[1:7, 1:11, 1:5])
    check(x.conj().movedim(2, 0))
    check(x.conj().imag)
    assert not move.copy_strided(torch.empty_like(x).conj(), x)


def check_narrow_runs() -> None:
    """Check runs of 2 to 256 bytes, more rows than a tile, and odd numbers of rows."""
    for run, rows in itertools.product((1, 3, 8, 16, 32, 100), (1, 130)):
        x = draw((rows, 5, run), torch.bfloat16, run)
        check(x.movedim(1, 0))
        check(x.movedim(1, 0), torch.empty(5, rows, run + 2, dtype=x.dtype)[..., 1:-1])


def check_few_rows() -> None:
    """Check runs of full lines of which few are adjacent in the target: the pack of heads before positions."""
    for batch, heads, length, head_dim in ((1, 3, 19, 128), (3, 1, 9, 192)):
        x = draw((batch, 2 * heads, length, head_dim), torch.bfloat16, heads).unflatten(1, (2, heads))
        check(x.permute(1, 3, 0, 2, 4))
        check(draw((2, length, batch, heads, head_dim), torch.bfloat16, length).permute(2, 3, 0, 1, 4))


def check_many_dims() -> None:
    x = draw((2, 3, 2, 3, 2, 3), torch.float32)
    check(x.permute(5, 3, 1, 4, 2, 0))
    many = draw((2,) * 10, torch.float32)
    assert not move.copy_strided(torch.empty_like(many), many.permute(9, 7, 5, 3, 1, 8, 6, 4, 2, 0))
