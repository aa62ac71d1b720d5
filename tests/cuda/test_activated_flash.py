"""Blocks that run on FlashAttention-3 or -4 if a user has activated it, and the arguments of its kernels.

torch's registry and its Python glue for FlashAttention-3 are unmodified. The kernel itself is replaced by arithmetic:
neither it nor that of -4 is installed here, and no GPU has run them from this project.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from support.attention.attending import PREDICATES
from support.cuda.blocks import Found, check, one_device
from support.cuda.flash3 import GLUE, active, installed
from support.cuda.worker import AbsentGpu

from sp_compile.lowering.attention import kernel_args as case
from sp_compile.lowering.attention.kernel_args import KernelKey
from sp_compile.lowering.attention.kernels import expected_kernel
from sp_compile.lowering.masks.blocks import Kind

FLASH, EFFICIENT = ([f"_{name}_attention_{way}" for way in ("forward", "backward")] for name in ("flash", "efficient"))


def with_flash3(
    name: str, q_len: int, k_len: int, width: int, dtype: torch.dtype, same_bits: bool = False, major: int = 9
) -> Found:
    """Return results of one block on a GPU of compute capability (major, 0)."""
    capability = mock.patch.object(torch.cuda, "get_device_capability", return_value=(major, 0))
    known = mock.patch.object(case, "_device_capability", return_value=(major, 0))
    torch.use_deterministic_algorithms(same_bits)
    try:
        with installed(), capability, known:
            return one_device(name, q_len, k_len, 2, (width, width), dtype, GLUE)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(("q_len", "k_len"), [(29, 29), (13, 30), (30, 13)])
@pytest.mark.parametrize("name", PREDICATES)
def test_every_mask(gpu: AbsentGpu, name: str, q_len: int, k_len: int) -> None:
    found, wanted, _ = gpu.run(with_flash3, name, q_len, k_len, 16, torch.bfloat16)
    check(found, wanted, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "width", "options", "kernels"),
    [
        ("causal", 64, {}, FLASH),  # not cuDNN's
        ("causal", 256, {}, FLASH),
        ("causal", 264, {}, EFFICIENT),
        ("causal", 192, {"same_bits": True}, FLASH),
        ("causal", 200, {"same_bits": True}, EFFICIENT),
        ("causal", 192, {"major": 8}, EFFICIENT),
        ("causal", 192, {"major": 10}, EFFICIENT),
    ],
)
def test_unsupported_blocks_use_other_kernels(
    gpu: AbsentGpu, name: str, width: int, options: dict[str, int], kernels: list[str]
) -> None:
    """Or torch's glue, and what stands for the kernel, would raise."""
    found, wanted, ran = gpu.run(with_flash3, name, 128, 128, width, torch.float16, **options)
    check(found, wanted, torch.float16)
    assert ran == kernels


@pytest.mark.parametrize(
    ("name", "kind", "width", "rate"),
    [
        ("FA3", Kind.FULL, 128, "flash3"),
        ("FA3", Kind.BAND, 256, "flash3"),
        ("FA3", Kind.PACKED, 64, "flash3"),
        ("FA3", Kind.MASKED, 64, "fused"),
        ("FA4", Kind.CAUSAL, 128, "flash4"),
        ("another", Kind.FULL, 128, "cudnn"),
        ("another", Kind.BAND, 128, "flash"),
        ("", Kind.FULL, 128, "cudnn"),
        ("", Kind.FULL, 192, "flash"),
        ("", Kind.PACKED, 64, "flash"),
        ("", Kind.FULL, 264, "efficient"),
    ],
)
def test_predicted_rates(name: str, kind: Kind, width: int, rate: str) -> None:
    """The predicted rate is that of the activated kernel, also without a GPU."""
    need = KernelKey(torch.device("cuda"), torch.bfloat16, kind, width, 1 << 20)
    if not name:
        assert expected_kernel(need).rate == rate
        return
    with active(name):
        assert expected_kernel(need).rate == rate
