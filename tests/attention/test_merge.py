"""The merge of two attention results, against a float64 softmax, and sums of gradients of a ring's steps."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from support.attention.attending import Problem
from torch import Tensor

from sp_compile.lowering.attention import attend
from sp_compile.lowering.attention.attend_parts import PartAccumulator
from sp_compile.lowering.attention.merge_blocks import WrittenRows, merge
from sp_compile.lowering.attention.op_args import LocalArgs
from sp_compile.lowering.attention.ring_kernel import can_keep_query_dtype
from sp_compile.lowering.masks.spans import full_span, shard_span

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


def to_new(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``merge`` by the operator that a ring begins and ends with; rows without keys in b are not read."""
    out_b = out_b.masked_fill((lse_b == -math.inf).all(0).all(0)[:, None], math.nan)
    return torch.ops.sp.merge_to(out_a, lse_a, out_b, lse_b, lse_a.dtype)


@pytest.mark.sampled(every=14)
@pytest.mark.parametrize("fn", [merge, in_place, to_new])
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
    torch.library.opcheck(torch.ops.sp.merge_to.default, (out, lse, *block, torch.bfloat16))
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

out_a, lse_a, out_b, lse_b = (x.float() for x in test_merge.halves(1.0)[0])
lse_b[:, :, :9] = lse_b[:, :, 30:] = -torch.inf
want = test_merge.merge(out_a, lse_a, out_b, lse_b)
out_b[:, :, :9] = out_b[:, :, 30:] = torch.nan
for dtype in (torch.float32, torch.bfloat16):
    results = torch.empty(out_a.shape, dtype=dtype), torch.empty_like(lse_a)
    launch_merge(out_a, lse_a, out_b, lse_b, into=results)
    torch.testing.assert_close(results, (want[0].to(dtype), want[1]))
"""


@needs_triton
def test_triton_kernel_in_the_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported: in a process of its own."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


sp = torch.ops.sp
ROWS = 12
EARLIER = "(k <= q - 4) & (k < 6)"
"""Queries from the fifth on attend to the first six keys."""


def part_problem(dtype: torch.dtype, predicate: str = EARLIER) -> tuple[list[torch.Tensor], list[object]]:
    """Return (grad, q, k, v, out, lse) and the arguments of an attention with rows that have no gradient."""
    p = Problem("none", ROWS, ROWS, key_heads=2)
    p.predicate = predicate
    arguments = p.arguments(full_span(ROWS), full_span(ROWS))
    grad, q, k, v = (x.to(dtype) for x in (p.grad, p.q, p.k, p.v))
    return [grad, q, k, v, *sp.attend(q, k, v, *arguments)], arguments


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("packed", ["stack", "last"])
def test_rows_are_added(dtype: torch.dtype, narrow: bool, packed: str) -> None:
    """Sums equal those of full gradients; rows without a gradient keep their values."""
    operands, arguments = part_problem(dtype)
    dq, both, _, _ = sp.attend_backward(*operands, *arguments, False, None, packed)
    *parts, q_rows, k_rows, dmask = sp.attend_backward_parts(*operands, *arguments, False, narrow)
    assert {x.dtype for x in parts} == {dtype if narrow else dq.dtype}
    assert dmask.shape == (0,)
    assert q_rows.tolist() == [i >= 4 for i in range(ROWS)]
    assert k_rows.tolist() == [i < 6 for i in range(ROWS)]
    parts[0][:, :, :4] = parts[1][:, :, 6:] = parts[2][:, :, 6:] = torch.nan
    queries, keys = torch.ones_like(dq), torch.ones_like(both)
    for total, added, rows in ((queries, parts[:1], q_rows), (keys, parts[1:], k_rows)):
        rounded = sp.add_rows_to(total, added, rows, torch.bfloat16)
        assert rounded.stride() == total.stride()
        sp.add_rows_into(total, added, rows)
        assert torch.equal(rounded, total.bfloat16())
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if narrow else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(queries, 1 + dq, **tolerance)
    torch.testing.assert_close(keys, 1 + both, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strips_are_added_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel calls of strips of queries share keys: their parts, of any dtype, are summed in float32 and rounded once."""
    p = Problem("none", ROWS, ROWS, key_heads=2)
    arguments = p.arguments(full_span(ROWS), full_span(ROWS), seed=torch.tensor(3), dropout_p=0.3)
    grad, q, k, v = (x.bfloat16() for x in (p.grad, p.q, p.k, p.v))
    operands = [grad, q, k, v, *sp.attend(q, k, v, *arguments)]
    sums, calls, add = [torch.zeros(x.shape) for x in (q, k, v)], [], PartAccumulator.add

    def add_and_sum(accumulator: PartAccumulator, part: Tensor, rows: tuple[int, int]) -> None:
        part = part.to(dtype)
        sums[len(calls) % 3].narrow(2, *rows).add_(part)
        calls.append(rows)
        add(accumulator, part, rows)

    monkeypatch.setattr(PartAccumulator, "add", add_and_sum)
    monkeypatch.setattr(attend, "CPU_SCORES", 2 * 4 * ROWS)  # of one query
    found = sp.attend_backward_parts(*operands, *arguments, False, True)[:3]
    assert calls == [rows for i in range(ROWS) for rows in ((i, 1), (0, ROWS), (0, ROWS))]
    for x, total in zip(found, sums):
        assert torch.equal(x, total.bfloat16())


@pytest.mark.parametrize("narrow", [False, True])
def test_opcheck_of_parts(narrow: bool) -> None:
    """Every row has a gradient: others have any values."""
    operands, arguments = part_problem(torch.float32, "k <= q")
    torch.library.opcheck(sp.attend_backward_parts.default, (*operands, *arguments, False, narrow, [operands[0]]))
    dq = torch.zeros(2, 4, ROWS, 8)
    torch.library.opcheck(sp.add_rows_into.default, (dq, [dq.bfloat16()], torch.arange(ROWS) < 5))
    torch.library.opcheck(sp.add_rows_to.default, (dq, [dq.bfloat16()], torch.arange(ROWS) < 5, torch.bfloat16))


@pytest.mark.parametrize(
    ("predicate", "step", "dtype", "expected"),
    [
        ("k <= q", 1, torch.bfloat16, True),
        ("k <= q", 0, torch.bfloat16, True),
        ("", 1, torch.bfloat16, True),
        ("(k <= q) & (q - k < 300)", 0, torch.bfloat16, False),
        ("(k <= q) & (q - k < 300)", 0, torch.float32, True),
        ("Eq(row0, col0)", 1, torch.bfloat16, False),
        ("Ne(q - k, 3)", 0, torch.bfloat16, False),
        ("Ne(q - k, 3)", 0, torch.float32, True),
    ],
)
def test_parts_are_narrow_if_rows_have_one_call(predicate: str, step: int, dtype: torch.dtype, expected: bool) -> None:
    frame = [1, 4096, 0, 4096, 2]
    q = torch.empty(1, 2, 1024, 8, dtype=dtype)
    vectors = [torch.zeros(1, 4096)] if "row0" in predicate else []
    args = LocalArgs(
        None, vectors, vectors, [], [], predicate, None, 0.0, 1.0, "", [], [], shard_span(frame, 4, 1), [], 1, ""
    )  # fmt: skip
    assert can_keep_query_dtype(q, q, args, shard_span(frame, 4, 1, step)) is expected
