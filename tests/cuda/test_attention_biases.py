"""Floats that are added to scores, on a GPU: which kernel takes them, and its numbers and gradients in every way."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.attention.attending import randn
from support.attention.functional_cases import OPS, Case
from support.cuda.blocks import TOLERANCE
from support.cuda.ranks import simulated_on_gpu
from support.cuda.worker import AbsentGpu
from torch import Tensor

from sp_compile.lowering.attention import attend
from sp_compile.lowering.attention.kernel_args import KernelKey
from sp_compile.lowering.attention.kernels import expected_kernel
from sp_compile.lowering.masks.blocks import CAUSAL_WINDOW, FULL_WINDOW, Kind, Window

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EFFICIENT = {f"_efficient_attention_{way}" for way in ("forward", "backward")}
Found = tuple[list[Tensor], list[Tensor], set[str], int]


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.CAUSAL, Kind.MASKED])
@pytest.mark.parametrize(
    ("dtype", "width", "rows", "options", "kernel"),
    [
        *((BF16, width, 4096, {"bias": BF16, "bias_grad": True}, "efficient") for width in (64, 128, 192, 256, 264)),
        (FP16, 128, 4096, {"bias": FP16, "bias_grad": True}, "efficient"),
        (FP32, 128, 4096, {"bias": FP32, "bias_grad": True}, "efficient"),
        (FP32, 128, 4096, {"bias": FP32}, "efficient"),
        (BF16, 128, 4096, {"bias": BF16}, "flex"),
        (BF16, 128, 100, {"bias": BF16}, "efficient"),
        (BF16, 264, 4096, {"bias": BF16}, "efficient"),
        (BF16, 128, 4096, {"bias": FP32}, "flex"),  # as precise as it is
        (BF16, 128, 4096, {"bias": FP32, "bias_grad": True}, "dense"),
        (torch.float64, 64, 4096, {"bias": torch.float64}, "dense"),
        (BF16, 64, 4096, {"bias": BF16, "dropout": True}, "dense"),
        (BF16, 64, 4096, {"bias": BF16, "bias_grad": True, "score": True}, "dense"),
        (BF16, 64, 4096, {"bias": BF16, "score": True}, "flex"),
    ],
)
def test_the_kernel_of_a_bias(
    kind: Kind, dtype: torch.dtype, width: int, rows: int, options: dict[str, object], kernel: str
) -> None:
    assert expected_kernel(KernelKey(torch.device("cuda"), dtype, kind, width, rows, **options)).name == kernel


@pytest.mark.parametrize(
    ("dtype", "width", "rows", "kernel"),
    [
        (FP32, 128, 4096, "flex"),
        (FP32, 128, 100, "efficient"),
        (FP32, 264, 4096, "efficient"),
        (BF16, 264, 4096, "efficient"),
        (torch.float64, 64, 4096, "dense"),
    ],
)
def test_the_kernel_of_a_mask(dtype: torch.dtype, width: int, rows: int, kernel: str) -> None:
    assert expected_kernel(KernelKey(torch.device("cuda"), dtype, Kind.MASKED, width, rows)).name == kernel


@pytest.mark.parametrize("kind", [Kind.BAND, Kind.PACKED])
@pytest.mark.parametrize(
    ("window", "square", "kernel"),
    [
        (FULL_WINDOW, False, "efficient"),
        (CAUSAL_WINDOW, False, "efficient"),
        (Window(5, 0), True, "efficient"),
        (Window(5, 0), False, "flex"),
        (Window(5, None), True, "flex"),
        (Window(5, 5), True, "flex"),
    ],
)
def test_the_kernel_of_a_window(kind: Kind, window: Window, square: bool, kernel: str) -> None:
    need = KernelKey(torch.device("cuda"), FP32, kind, 128, 4096, window=window, is_square=square)
    assert expected_kernel(need).name == kernel
    assert expected_kernel(need._replace(dtype=BF16)).name == "flash"


@pytest.mark.parametrize(
    ("dtype", "small", "large"), [(BF16, "cuDNN", "flash"), (FP32, "efficient", "flex")], ids=["bfloat16", "float32"]
)
def test_kernels_with_32_bit_offsets_run_no_larger_operands(dtype: torch.dtype, small: str, large: str) -> None:
    need = KernelKey(torch.device("cuda"), dtype, Kind.CAUSAL, 128, 1 << 19)
    most, more = 2**31 - 1, 2**31
    assert expected_kernel(need._replace(elements=most, repeated_elements=most)).name == small
    assert expected_kernel(need._replace(elements=more, repeated_elements=more)).name == large


def test_the_key_has_the_elements_of_the_largest_operand() -> None:
    q, v = torch.empty(1, 4, 1 << 22, 128, device="meta"), torch.empty(1, 2, 1 << 20, 128, device="meta")
    key = attend._kernel_key(torch.device("cuda"), q, v, 1 << 20, None, False, False, False)
    assert key.elements == 2**31
    assert expected_kernel(key).name != "cuDNN"


@pytest.mark.parametrize("key_heads", [32, 8])
def test_efficient_attention_runs_fewer_than_512k_keys_of_32_heads(key_heads: int) -> None:
    """Its strides are int32, and it reads key heads that are repeated for each query head, also for few queries."""
    q = torch.empty(1, 32, 256, 128, device="meta", dtype=FP32)
    for keys, is_efficient in (((1 << 19) - 1, True), (1 << 19, False)):
        v = torch.empty(1, key_heads, keys, 128, device="meta", dtype=FP32)
        key = attend._kernel_key(torch.device("cuda"), q, v, 256, None, False, False, False)
        assert (expected_kernel(key).name == "efficient") == is_efficient


def test_a_cpu_takes_a_bias_without_its_gradient() -> None:
    need = KernelKey(torch.device("cpu"), FP32, Kind.FULL, 64, 64, bias=FP32)
    assert expected_kernel(need).name == "flash, CPU"
    assert expected_kernel(need._replace(bias_grad=True)).name == "dense"


def checked(found: Found, dtype: torch.dtype) -> None:
    """Check that efficient attention alone ran, and that the values are those of a single device."""
    got, wanted, kernels, products = found
    assert kernels == EFFICIENT
    assert products == 0
    for a, b in zip(got, wanted, strict=True):
        largest = max(1.0, b.abs().max().item())  # a bias that is equal for all keys has a gradient of 0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=TOLERANCE[dtype] * largest)


def biased(mask: Tensor, s: int = 32, **options: object) -> Case:
    """Return a case in the dtype of the mask, on zigzag shards."""
    return Case({"attn_mask": mask, **options}, kv_heads=2, s=s, dtype=mask.dtype, layout="zigzag")


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_way(gpu: AbsentGpu, op: str, dtype: torch.dtype) -> None:
    """A learned bias of heads, shared by the samples of a batch, in causal blocks."""
    case = biased(randn(1, 4, 32, 32, seed=6).to(dtype), is_causal=True)
    checked(gpu.run(simulated_on_gpu, op, case, 2), dtype)


SHAPES = [(2, 4, 40, 40), (1, 4, 40, 40), (2, 1, 40, 40), (40, 40), (2, 4, 1, 40), (2, 1, 1, 40), (1, 4, 40, 1)]


@pytest.mark.sampled(every=32)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("options", [{"is_causal": True}, {}, {"is_causal": True, "window": 7}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_broadcast_biases(
    gpu: AbsentGpu, op: str, shape: tuple[int, ...], options: dict[str, object], dtype: torch.dtype
) -> None:
    """Its gradient is a sum; a window is made part of the bias."""
    case = biased(randn(*shape, seed=6).to(dtype), s=40, **options)
    checked(gpu.run(simulated_on_gpu, op, case, 4), dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("op", ["ring", "gathered"])
def test_masks_of_few_rows(gpu: AbsentGpu, op: str, dtype: torch.dtype) -> None:
    """A bias is made of them, of data and of conditions."""
    case = replace(biased(randn(2, 1, 32, 32, seed=6) > -1, is_causal=True), dtype=dtype)
    checked(gpu.run(simulated_on_gpu, op, case, 2), dtype)
    documents = torch.stack([torch.arange(32) // 5, torch.arange(32) // 7])
    case = Case({"window": 9, "documents": documents, "is_causal": True}, s=32, dtype=FP32)
    checked(gpu.run(simulated_on_gpu, op, case, 2), FP32)


@pytest.mark.parametrize("op", ["ulysses", "ring"])
@pytest.mark.parametrize(("s", "t", "causal"), [(13, 0, True), (19, 10, False), (16, 48, False)])
def test_lengths_that_are_not_aligned(gpu: AbsentGpu, op: str, s: int, t: int, causal: bool) -> None:
    """And of two lengths: rows are padded for the kernel, not for the user."""
    options = {"attn_mask": randn(1, 4, s, t or s, seed=6).to(FP32), "is_causal": causal}
    checked(gpu.run(simulated_on_gpu, op, Case(options, s=s, t=t, dtype=FP32), 2), FP32)


def under_autocast(op: str, case: Case) -> Found:
    fn, extra = OPS[op]

    def cast(*args: object, **options: object) -> Tensor:
        with torch.autocast("cpu", BF16):
            out = fn(*args, **options)
        assert out.dtype == BF16
        return out.float()

    with mock.patch.dict(OPS, {op: (cast, extra)}):
        return simulated_on_gpu(op, case, 2)


@pytest.mark.parametrize("op", ["ulysses", "ring", "gathered"])
def test_autocast_takes_the_bias_along(gpu: AbsentGpu, op: str) -> None:
    """Autocast casts the bias as before torch's attention; gradients have the dtype of the operands."""
    found = gpu.run(under_autocast, op, biased(randn(1, 4, 32, 32, seed=6).to(FP32), is_causal=True))
    assert {x.dtype for x in found[0]} == {FP32}
    checked(found, BF16)


def in_strips(op: str, case: Case, n: int) -> Found:
    with mock.patch.object(attend, "GPU_BIAS", 8 * 8 * 3):
        return simulated_on_gpu(op, case, n)


@pytest.mark.parametrize("op", ["gathered", "ulysses"])
def test_large_gradients_are_cut(gpu: AbsentGpu, op: str) -> None:
    """A strip of a causal block is one call, aligned at the end."""
    case = biased(randn(1, 4, 32, 32, seed=6).to(FP32), is_causal=True)
    checked(gpu.run(in_strips, op, case, 2), FP32)


@pytest.mark.parametrize("op", ["gathered", "ring"])
@pytest.mark.parametrize(("dtype", "none"), [(BF16, -math.inf), (FP32, -math.inf), (FP32, -3e38), (FP16, -math.inf)])
def test_keys_that_a_bias_leaves_out(gpu: AbsentGpu, op: str, dtype: torch.dtype, none: float) -> None:
    """A block may have rows without keys, of which the kernel gives a log-sum-exp of 0: the others count alone."""
    mask = randn(1, 4, 32, 32, seed=6).to(dtype)
    mask[:, :, 3:20, :16] = none
    mask[:, :, :, 2] = none
    mask[:, :, 8:, 5] = 0.25
    checked(gpu.run(simulated_on_gpu, op, biased(mask, check=False), 2), dtype)
    mask[:, :, :, 0] = 0.5
    mask[:, :, 20, 16:22] = none
    checked(gpu.run(simulated_on_gpu, op, biased(mask, is_causal=True, check=False), 2), dtype)
