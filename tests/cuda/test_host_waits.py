"""Operations of the host for attention on a GPU: kernel launches, and waits for values of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.cuda.borrowed import Seen, Watch, borrow, give_back
from support.cuda.worker import AbsentGpu
from torch import Tensor

from sp_compile.lowering.attention import attend as bodies
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.lowering.masks.balance_chunks import ChunkOrder
from sp_compile.lowering.masks.balance_rows import order_tensors
from sp_compile.lowering.masks.pieces import pieces
from sp_compile.lowering.masks.spans import full_span

HEADS, ROWS, WIDTH = 2, 1024, 60
CAUSAL = "k <= q"
SAME_DOCUMENT = "Eq(row0, col0)"


def documents(count: int, rows: int = ROWS, spread: float = 0.0) -> Tensor:
    """The number of the document that each of the rows is of, (1, rows). spread: of their log-normal lengths."""
    lengths = (spread * torch.randn(count, generator=torch.Generator().manual_seed(0))).exp()
    ends = 1 + (lengths.cumsum(0) / lengths.sum() * (rows - count)).long() + torch.arange(count)
    return torch.bucketize(torch.arange(rows), ends[:-1], right=True)[None]


def attend(
    on_gpu: bool,
    predicate: str,
    vectors: int,
    count: int,
    rows: int = ROWS,
    spread: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[Tensor], Seen]:
    """Results of attention and of its backward over `count` documents, named by `vectors` vectors on either side."""
    random, span = torch.Generator().manual_seed(0), full_span(rows)
    q, k, v, grad = (torch.randn(1, HEADS, rows, WIDTH, generator=random).to(dtype) for _ in range(4))
    place: Callable[[Tensor], Tensor] = borrow if on_gpu else lambda x: x
    numbers = [documents(count, rows, spread) for _ in range(vectors)]
    tables, named = torch.ops.sp.pieces(numbers) * 2, [place(x) for x in numbers]
    args = None, named, named, tables, [], predicate, None, 0.0, WIDTH**-0.5, "", [], [], span, span, 1, SIMULATED_GROUP
    q, k, v, grad = map(place, (q, k, v, grad))
    with Watch() as watch, torch.no_grad():
        out, lse = bodies.attend(q, k, v, *args)
        grads = bodies.attend_backward(grad, q, k, v, out, lse, *args, False)
    return [give_back(x) for x in (out, lse, *grads)], watch.seen


def host(predicate: str, vectors: int = 0, count: int = 1, *options: Any) -> Seen:
    return attend(True, predicate, vectors, count, *options)[1]


@pytest.mark.parametrize(("predicate", "vectors", "count"), [(CAUSAL, 0, 1), (SAME_DOCUMENT, 1, 4)])
def test_attention_on_a_gpu_equals_that_on_a_cpu(gpu: AbsentGpu, predicate: str, vectors: int, count: int) -> None:
    """The way that CUDA tensors take, on borrowed ones: the same numbers, by other kernels."""
    there, seen = gpu.run(attend, True, predicate, vectors, count)
    here, nothing = gpu.run(attend, False, predicate, vectors, count)
    for a, b in zip(there, here, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert seen.kernels
    assert not nothing.kernels


def test_causal_attention_waits_for_nothing(gpu: AbsentGpu) -> None:
    seen = gpu.run(host, CAUSAL)
    assert seen.waits == []
    assert seen.products == 0
    assert len(seen.kernels) == 2


def waiting(x: Tensor) -> Seen:
    x = borrow(x)
    with Watch() as watch:
        x.tolist(), x.sum().item(), bool(x.any()), x.nonzero(), x.cpu(), x.to("cpu", non_blocking=True)
        x + torch.zeros(3, device="cuda")
    return watch.seen


def test_waits_are_recognized(gpu: AbsentGpu) -> None:
    seen = gpu.run(waiting, torch.arange(3))
    assert seen.waits == ["_to_copy", "_local_scalar_dense", "_local_scalar_dense", "nonzero", "_to_copy"]


def test_attention_waits_for_no_documents(gpu: AbsentGpu) -> None:
    """Their tables are on the host already."""
    assert gpu.run(host, SAME_DOCUMENT, 1, 4).waits == []


def tables() -> tuple[Seen, int]:
    """Return the recorded waits of `pieces`, and the number of stream synchronizations."""
    vectors = [borrow(documents(count)) for count in (2, 3)]
    with Watch() as watch, mock.patch.object(torch.accelerator, "current_stream") as stream:
        pieces(vectors)
    return watch.seen, stream.return_value.synchronize.call_count


def test_one_wait_for_all_tables(gpu: AbsentGpu) -> None:
    seen, waits = gpu.run(tables)
    assert (seen.waits, waits) == ([], 1)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "spread"), [(40_000, 0.0), (20_000, 0.0), (40_000, 1.0)])
@pytest.mark.parametrize("predicate", [SAME_DOCUMENT, f"{SAME_DOCUMENT} & ({CAUSAL})"])
def test_few_launches_however_many_documents(
    gpu: AbsentGpu, predicate: str, rows: int, spread: float, dtype: torch.dtype
) -> None:
    """Short ones too, and of any length. In float32 those of very different lengths are two or three calls."""
    seen = gpu.run(host, predicate, 1, 1000, rows, spread, dtype)
    assert (seen.products, seen.waits) == (0, [])
    assert len(seen.kernels) <= (6 if dtype == torch.float32 and spread else 2)
    assert len(seen.kernels) % 2 == 0


def ordered() -> tuple[Seen, list[Tensor]]:
    found = ChunkOrder(np.array([0, 6, 3]), np.array([3, 2, 3]), 1.0, 1.0)
    with Watch() as watch:
        orders = order_tensors(found, torch.device("cuda"))
    return watch.seen, [give_back(x) for x in orders]


def test_an_order_of_rows_is_not_waited_for(gpu: AbsentGpu) -> None:
    seen, (order, inverse) = gpu.run(ordered)
    assert seen.waits == []
    assert order.tolist() == [0, 1, 2, 6, 7, 3, 4, 5]
    assert inverse.tolist() == [0, 1, 2, 5, 6, 7, 3, 4]


@pytest.mark.parametrize("predicate", [f"({CAUSAL}) & (q - k < 300)"])
def test_windows_are_not_dense(gpu: AbsentGpu, predicate: str) -> None:
    assert gpu.run(host, predicate).products == 0
