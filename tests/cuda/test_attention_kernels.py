"""Attention as a GPU runs it, on borrowed tensors: the kernels that it calls, and the numbers of every mask."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from support.attention.attending import PREDICATES, Problem, row_indices, shard
from support.cuda.blocks import TOLERANCE, Found, arguments, check, one_device, reference, rounded
from support.cuda.borrowed import Watch, borrow, give_back
from support.cuda.worker import AbsentGpu
from torch import Tensor

from sp_compile.lowering.attention import attend as bodies
from sp_compile.lowering.attention.merge_blocks import merge
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP, run_ranks

CUDNN = "_scaled_dot_product_cudnn_attention"


BANDS = [
    "(k <= q) & (q - k < 23)",
    "(k <= q) & (q - k < 1)",
    "(k <= q - 3) & (q - k < 12)",
    "(k < q + 4) & (q - k < 9)",
    "q - k < 6",
    "k < q + 5",
    "(k <= q) & Eq(row1, col1) & (q - k < 6)",
    "(k <= q - 2) & Eq(row1, col1)",
    "Eq(row1, col1) & (q - k < 6) & (k - q < 3)",
]


def ring(
    predicate: str, length: int, n: int, folds: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Run all steps of all ranks, with padding at the start of the sequence.

    Returns:
        The results, the expected ones, the largest number of attention kernels in one forward or backward, and the
        number of other matrix products.
    """
    p = Problem("none", length, length, key_heads=2)
    p.predicate = predicate
    rounded(p, dtype)
    wanted = reference(p)
    out_, lse_ = wanted[0].to(dtype), wanted[1].float()
    spans = [[n, folds, 1, shift, 1, length] for shift in range(n)]
    found = [torch.zeros_like(x) for x in wanted]

    def live(rank: int) -> tuple[int, int]:
        def here(x: Tensor, span: list[int]) -> Tensor:
            return borrow(shard(x, span, rank))

        rows = [i for i in row_indices(spans[0], rank) if i is not None]
        valid = torch.tensor([i is not None for i in row_indices(spans[0], rank)])
        q, out = here(p.q, spans[0]), here(out_, spans[0])
        grad = borrow(shard(p.grad, spans[0], rank) * valid[:, None])
        lse = borrow(shard(lse_[..., None], spans[0], rank)[..., 0].contiguous())
        parts, launches, products = [], 0, 0
        for span in spans:
            args, keys, values = arguments(p, spans[0], span, SIMULATED_GROUP), here(p.k, span), here(p.v, span)
            with Watch() as forward, torch.no_grad():
                parts.append([give_back(x) for x in bodies.attend(q, keys, values, *args)])
            with Watch() as backward, torch.no_grad():
                grads = bodies.attend_backward(grad, q, keys, values, out, lse, *args, False)
            dq, dk, dv, _ = map(give_back, grads)
            launches = max(launches, len(forward.seen.kernels), len(backward.seen.kernels))
            products += forward.seen.products + backward.seen.products
            found[2][:, :, rows] += dq[:, :, valid]
            for local, i in enumerate(row_indices(span, rank)):
                if i is not None:
                    found[3][:, :, i] += dk[:, :, local]
                    found[4][:, :, i] += dv[:, :, local]
        total, total_lse = reduce(lambda a, b: list(merge(*a, *b)), parts)
        found[0][:, :, rows] = total[:, :, valid].double()
        found[1][:, :, rows] = total_lse[:, :, valid].double()
        return launches, products

    launches, products = map(max, zip(*run_ranks(n, live)))
    return found, wanted, launches, products


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("key_heads", "widths"), [(4, (8, 8)), (2, (12, 5)), (1, (16, 24))])
@pytest.mark.parametrize(("q_len", "k_len"), [(29, 29), (13, 30), (30, 13)])
@pytest.mark.parametrize("name", PREDICATES)
def test_every_mask(
    gpu: AbsentGpu, name: str, q_len: int, k_len: int, key_heads: int, widths: tuple[int, int], dtype: torch.dtype
) -> None:
    found, wanted, _ = gpu.run(one_device, name, q_len, k_len, key_heads, widths, dtype)
    check(found, wanted, dtype)


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize(("n", "length"), [(2, 31), (4, 45)])
@pytest.mark.parametrize("name", PREDICATES)
def test_every_mask_round_a_ring(
    gpu: AbsentGpu, name: str, n: int, length: int, folds: int, dtype: torch.dtype
) -> None:
    found, wanted, *_ = gpu.run(ring, PREDICATES[name], length, n, folds, dtype)
    check(found, wanted, dtype)


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize("folds", [1, 2])
@pytest.mark.parametrize(("n", "length"), [(1, 37), (2, 37), (3, 62), (4, 85)])
@pytest.mark.parametrize("predicate", BANDS)
def test_bands_are_few_calls(gpu: AbsentGpu, predicate: str, n: int, length: int, folds: int) -> None:
    """Windows within a rank and over several, none of them dense."""
    found, wanted, launches, products = gpu.run(ring, predicate, length, n, folds, torch.bfloat16)
    check(found, wanted, torch.bfloat16)
    assert products == 0
    assert launches <= (3 if predicate.startswith("(k <= q) &") else 4)


@pytest.mark.parametrize("predicate", ["k <= q", "k <= q - 90", "(k <= q) & (q - k < 200)"])
def test_long_blocks_round_a_ring(gpu: AbsentGpu, predicate: str) -> None:
    """By several kernels, which get each other's log-sum-exps; and queries without keys."""
    found, wanted, launches, products = gpu.run(ring, predicate, 270, 2, 1, torch.float16)
    check(found, wanted, torch.float16)
    assert products == 0
    assert launches <= 4


@pytest.mark.parametrize(
    ("name", "rows", "width", "dtype", "kernel"),
    [
        ("causal", 128, 64, torch.bfloat16, CUDNN),
        ("none", 130, 60, torch.float16, CUDNN),
        ("causal", 127, 64, torch.bfloat16, "_flash_attention"),
        ("causal", 128, 136, torch.bfloat16, "_flash_attention"),
        ("causal", 128, 264, torch.float16, "_efficient_attention"),
        ("causal", 128, 264, torch.bfloat16, "_efficient_attention"),
        ("none", 40, 12, torch.float32, "_efficient_attention"),
    ],
)
def test_the_kernel_of_a_block(
    gpu: AbsentGpu, name: str, rows: int, width: int, dtype: torch.dtype, kernel: str
) -> None:
    """Forward and backward, one call each, and numbers."""
    found, wanted, kernels = gpu.run(one_device, name, rows, rows, 2, (width, width), dtype)
    check(found, wanted, dtype)
    ends = ("", "_backward") if kernel == CUDNN else ("_forward", "_backward")
    assert kernels == [kernel + end for end in ends]


def deterministic() -> Found:
    torch.use_deterministic_algorithms(True)
    try:
        return one_device("causal", 128, 128, 2, (16, 16), torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_same_bits_each_time(gpu: AbsentGpu) -> None:
    """cuDNN's backward does not promise them."""
    *_, kernels = gpu.run(deterministic)
    assert kernels == ["_flash_attention_forward", "_flash_attention_backward"]
