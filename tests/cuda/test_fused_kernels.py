"""The fused kernel of attention, as Inductor's template and Triton compile it for sm_90: registers, spills, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from support.cuda.worker import AbsentGpu
from torch import Tensor

SOFT_CAP, SLOPES = "50.0*tanh(s/50.0)", "30.0*tanh((s + head0*(k - q))/30.0)"
CAUSAL, DOCUMENTS, PREFIX = "k <= q", "(k <= q) & Eq(row0, col0)", "(k <= q) | (k < n0)"
LEARNED = "learned"
"""A bias of a distance and a head, whose table is learned."""
ROWS = 4096
SHARED = 227 << 10
"""Bytes of shared memory that a program may have on sm_90."""
slow = pytest.mark.slow


def pairs_of(predicate: str, score: str, rows: int) -> Any:
    from support.attention.score_texts import score_of, traced_score

    from sp_compile.lowering.masks.block_plan import plan_blocks
    from sp_compile.lowering.masks.pieces import Pieces
    from sp_compile.lowering.masks.spans import full_span, span_rows
    from sp_compile.lowering.triton.flex.flex_texts import PairTexts

    documents = (torch.arange(rows) // 1000)[None]
    vectors, sizes = ({"row0": documents, "col0": documents} if "row0" in predicate else {}), {"n0": 700}
    pieces = tuple(Pieces.of(table) for table in torch.ops.sp.pieces([documents] * len(vectors)))
    here = span_rows(full_span(rows), rows, 0)
    found = plan_blocks(predicate, here, here, tuple(sizes.values()), pieces[:1], pieces[1:])
    tables = [torch.ones(rows, 8)] if score == LEARNED else []
    heads = [torch.arange(8) if tables else torch.ones(8)] if tables or "head0" in score else []
    name = traced_score(_learned_bias) if tables else score_of(score)
    return PairTexts(found, here, here, predicate, name, vectors, sizes, heads, tables, None)


def _learned_bias(s: Any, q: Any, k: Any, head0: Any, table0: Any) -> Any:
    aten = torch.ops.aten
    return aten.add.Tensor(s, aten.index.Tensor(table0, [aten.sub.Tensor(q, k), head0]))


def compiled(
    predicate: str, score: str, head_dim: int, dtype: torch.dtype, back: bool, lengths: Sequence[int] = (ROWS,)
) -> list[Any]:
    """The kernels of forward or backward of 8 query heads over 2, for these lengths one after the other."""
    from support.cuda.kernels import kernels_of_inductor
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sp_compile.lowering.torch_compat import flex
    from sp_compile.lowering.triton.flex import flex_calls as calls

    fake, inductor = flex._make_fake, flex._compile_fx

    def there(mode: FakeTensorMode, x: Tensor, dims: Sequence[int]) -> Tensor:
        with mode:
            return fake(mode, x, dims).to("cuda")

    def no_run(graph: torch.fx.GraphModule, fakes: Sequence[Tensor]) -> Any:
        inductor(graph, fakes)
        return lambda xs: [None] * (3 if back else 2) + [torch.zeros(()) for _ in totals]

    totals = {"table0": torch.zeros(())} if back and score == LEARNED else {}

    def call() -> None:
        for rows in lengths:
            q, out, grad = (torch.empty(1, 8, rows, head_dim, dtype=dtype) for _ in range(3))
            k, v = (torch.empty(1, 2, rows, head_dim, dtype=dtype) for _ in range(2))
            pairs = pairs_of(predicate, score, rows)
            if back:
                calls.flex_block_backward(grad, q, k, v, out, torch.empty(1, 8, rows), pairs, head_dim**-0.5, totals)
            else:
                calls.flex_block_forward(q, k, v, pairs, head_dim**-0.5)

    with (
        mock.patch.object(flex, "_make_fake", there),
        mock.patch.object(flex, "_compile_fx", no_run),
        mock.patch.object(calls, "_programs", {}),
        mock.patch.object(calls, "_first_shapes", {}),
    ):
        return kernels_of_inductor(call)


@pytest.mark.parametrize(
    ("predicate", "score", "head_dim", "dtype", "back"),
    [
        (DOCUMENTS, SLOPES, 64, torch.bfloat16, False),
        *(
            pytest.param(*texts, head_dim, dtype, back, marks=slow)
            for texts, dtype in [
                ((DOCUMENTS, SLOPES), torch.bfloat16),
                ((CAUSAL, SOFT_CAP), torch.bfloat16),
                ((CAUSAL, LEARNED), torch.bfloat16),
                ((PREFIX, ""), torch.float16),
                ((DOCUMENTS, SLOPES), torch.float32),
                ((CAUSAL, SOFT_CAP), torch.float32),
            ]
            for head_dim in (64, 96, 128, 192, 256)
            for back in (False, True)
        ),
    ],
)
def test_no_spills(gpu: AbsentGpu, predicate: str, score: str, head_dim: int, dtype: torch.dtype, back: bool) -> None:
    """One kernel of the template, and small ones: log-sum-exps; what each row's gradient and result have in common; zeros
    to which it adds the gradients of a table."""
    found = gpu.run(compiled, predicate, score, head_dim, dtype, back)
    assert len(found) == (3 + (score == LEARNED) if back else 2)
    (fused,) = (launch for launch in found if "tem" in launch.kernel)
    assert max(fused.loads) == 128
    assert all(launch.spills == 0 for launch in found), found
    assert fused.shared <= SHARED


@slow
def test_any_length(gpu: AbsentGpu) -> None:
    """The second length is a program of all lengths; the others compile nothing."""
    found = gpu.run(compiled, DOCUMENTS, SLOPES, 128, torch.bfloat16, False, (ROWS, 3001, 5000, 777))
    assert sum("tem" in launch.kernel for launch in found) == 2
    assert all(launch.spills == 0 for launch in found)
