"""Gradients of a ring step as parts, and the sums to which their rows are added."""

import pytest
import torch
from support.attention.attending import Problem

from sp_compile.lowering.attention.op_args import LocalArgs
from sp_compile.lowering.attention.ring_kernel import is_narrow
from sp_compile.lowering.masks.spans import full_span, shard_span

sp = torch.ops.sp
ROWS = 12
EARLIER = "(k <= q - 4) & (k < 6)"
"""Queries from the fifth on attend to the first six keys."""


def problem(dtype: torch.dtype, predicate: str = EARLIER) -> tuple[list[torch.Tensor], list[object]]:
    """Return (grad, q, k, v, out, lse) and the arguments of an attention with rows that have no gradient."""
    p = Problem("none", ROWS, ROWS, key_heads=2)
    p.predicate = predicate
    arguments = p.arguments(full_span(ROWS), full_span(ROWS))
    grad, q, k, v = (x.to(dtype) for x in (p.grad, p.q, p.k, p.v))
    return [grad, q, k, v, *sp.attend(q, k, v, *arguments)], arguments


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("packed", ["stack", "last"])
def test_rows_are_added(dtype: torch.dtype, narrow: bool, packed: str) -> None:
    """Sums equal those of full gradients; rows without a gradient keep their values, whatever the part has there."""
    operands, arguments = problem(dtype)
    dq, both, _, _ = sp.attend_backward(*operands, *arguments, False, None, packed)
    *parts, q_rows, k_rows, dmask = sp.attend_backward_parts(*operands, *arguments, False, narrow)
    assert {x.dtype for x in parts} == {dtype if narrow else dq.dtype}
    assert dmask.shape == (0,)
    assert q_rows.tolist() == [i >= 4 for i in range(ROWS)]
    assert k_rows.tolist() == [i < 6 for i in range(ROWS)]
    parts[0][:, :, :4] = parts[1][:, :, 6:] = parts[2][:, :, 6:] = torch.nan
    queries, keys = torch.ones_like(dq), torch.ones_like(both)
    sp.add_rows_into(queries, parts[:1], q_rows)
    sp.add_rows_into(keys, parts[1:], k_rows)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if narrow else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(queries, 1 + dq, **tolerance)
    torch.testing.assert_close(keys, 1 + both, **tolerance)


@pytest.mark.parametrize("narrow", [False, True])
def test_opcheck(narrow: bool) -> None:
    """Every row has a gradient: others have any values."""
    operands, arguments = problem(torch.float32, "k <= q")
    torch.library.opcheck(sp.attend_backward_parts.default, (*operands, *arguments, False, narrow, [operands[0]]))
    dq = torch.zeros(2, 4, ROWS, 8)
    torch.library.opcheck(sp.add_rows_into.default, (dq, [dq.bfloat16()], torch.arange(ROWS) < 5))


@pytest.mark.parametrize(
    ("predicate", "step", "dtype", "expected"),
    [
        ("k <= q", 1, torch.bfloat16, True),
        ("k <= q", 0, torch.bfloat16, True),
        ("", 1, torch.bfloat16, True),
        ("(k <= q) & (q - k < 300)", 0, torch.bfloat16, False),
        ("(k <= q) & (q - k < 300)", 0, torch.float32, True),
        ("Eq(row0, col0)", 1, torch.bfloat16, False),
    ],
)
def test_parts_are_narrow_if_rows_have_one_call(predicate: str, step: int, dtype: torch.dtype, expected: bool) -> None:
    frame = [1, 4096, 0, 4096, 2]
    q = torch.empty(1, 2, 1024, 8, dtype=dtype)
    vectors = [torch.zeros(1, 4096)] if "row0" in predicate else []
    args = LocalArgs(
        None, vectors, vectors, [], [], predicate, None, 0.0, 1.0, "", [], [], shard_span(frame, 4, 1), [], 1, ""
    )  # fmt: skip
    assert is_narrow(q, q, args, shard_span(frame, 4, 1, step)) is expected
