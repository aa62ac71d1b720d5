"""The merge of two attention results: expression, Inductor and Triton against a float64 softmax."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from sp_compile.lowering.attention.merge_blocks import WrittenRows, merge

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def attention(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax average and log-sum-exp in float64; 0 and -inf of a row of -inf."""
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return weights @ v, lse


def halves(scale: float) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """out and lse over each half of the keys, some of them masked, and over all."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 40, 10, generator=generator, dtype=torch.float64) * scale
    scores[0, :, :5, :5] = -math.inf
    scores[0, :, 3:8, 5:] = -math.inf
    v = torch.randn(2, 3, 10, 7, generator=generator, dtype=torch.float64)
    parts = [*attention(scores[..., :5], v[..., :5, :]), *attention(scores[..., 5:], v[..., 5:, :])]
    return parts, attention(scores, v)


def check(fn: Merge, dtype: torch.dtype = torch.float64, lse_dtype: torch.dtype = torch.float64) -> None:
    for scale in (1.0, 1e4):
        (out_a, lse_a, out_b, lse_b), expected = halves(scale)
        given = out_a.to(dtype), lse_a.to(lse_dtype), out_b.to(dtype).mT.contiguous().mT, lse_b.to(lse_dtype)
        got = fn(*given)
        assert [x.dtype for x in got] == [lse_dtype] * 2
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-3, torch.bfloat16: 2e-2}[dtype]
        for a, b in zip(got, expected):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_runs_of_written_rows() -> None:
    """Runs of any parts in any order, against a flag per row."""
    generator = random.Random(0)
    for _ in range(200):
        written, flags = WrittenRows(12), [False] * 12
        for _ in range(generator.randrange(6)):
            start = generator.randrange(12)
            rows = start, generator.randrange(12 - start + 1)
            here = range(start, sum(rows))
            found = written.add(rows)
            assert [i for first, length, _ in found for i in range(first, first + length)] == list(here)
            assert all(flags[i] != new for first, length, new in found for i in range(first, first + length))
            flags = [flag or i in here for i, flag in enumerate(flags)]
        gaps = [i for first, length in written.gaps() for i in range(first, first + length)]
        assert gaps == [i for i, flag in enumerate(flags) if not flag]


def test_rows_without_keys_are_left_alone() -> None:
    """The block's values there are not even read: they may be anything."""
    (out_a, lse_a, out_b, lse_b), _ = halves(1.0)
    lse_b[:, :, :9] = lse_b[:, :, 30:] = -math.inf
    want, want_lse = merge(out_a, lse_a, out_b, lse_b)
    out_b[:, :, :9] = out_b[:, :, 30:] = math.nan
    got = in_place(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(got, (want, want_lse))
    nothing = in_place(out_a, lse_a, out_b * math.nan, torch.full_like(lse_b, -math.inf))
    assert torch.equal(nothing[0], out_a)


def in_place(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``merge`` by the operator that a ring accumulates with."""
    out, lse = out_a.to(lse_a.dtype, copy=True), lse_a.clone()
    torch.ops.sp.merge_into(out, lse, out_b, lse_b)
    return out, lse


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("fn", [merge, in_place])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_merge(fn: Merge, compiled: bool, dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    check(torch.compile(fn, fullgraph=True) if compiled else fn, dtype, lse_dtype)


def test_added_in_place() -> None:
    total, part = torch.ones(2, 3), torch.arange(3.0).expand(2, 3)
    torch.ops.sp.add_into(total, part)
    assert torch.equal(total, part + 1)


def test_opcheck() -> None:
    (out, lse, *block), _ = halves(1.0)
    torch.library.opcheck(torch.ops.sp.merge_into.default, (out, lse, *block))
    torch.library.opcheck(torch.ops.sp.add_into.default, (out, block[0]))


def test_order_does_not_matter() -> None:
    """Three parts merge to equal results in any order, also with very different logits."""
    out = torch.randn(3, 5, 4, dtype=torch.float64)
    lse = torch.tensor([[-1e30, 0.0, 700.0, -math.inf, 3.0]] * 3) * torch.tensor([[1.0], [0.5], [-1.0]])
    lse[:, 3] = -math.inf
    lse = lse.double()
    parts = list(zip(out, lse))
    a = merge(*merge(*parts[0], *parts[1]), *parts[2])
    b = merge(*merge(*parts[2], *parts[0]), *parts[1])
    torch.testing.assert_close(a, b)
    assert a[0].isfinite().all()
    assert not a[1].isnan().any()


PROGRAM = """
import torch
import test_merge
from sp_compile.lowering.triton.merge_kernel import launch_merge
for dtypes in ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
    test_merge.check(launch_merge, *dtypes)

def in_place(out_a, lse_a, out_b, lse_b):
    out, lse = out_a.to(lse_a.dtype, copy=True), lse_a.clone()
    return launch_merge(out, lse, out_b, lse_b, into=(out, lse))

test_merge.check(in_place)
"""


@needs_triton
def test_triton_kernel_in_the_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported: in a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.path.dirname(__file__)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
