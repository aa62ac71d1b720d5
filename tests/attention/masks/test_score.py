"""Score functions as text: values, derivatives, and functions without a text."""

from __future__ import annotations

import pytest
import torch

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.masks import score

TEXTS = ["30*tanh(s/30)", "s + head0*(k - q)", "s*Abs(s)", "exp(-s**2/2)", "2*tanh(s*head0/2) - (q - k)/7"]


@pytest.mark.parametrize("text", TEXTS)
def test_derivative(text: str) -> None:
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    values = {"q": torch.arange(4)[:, None], "k": torch.arange(5), "head0": torch.rand(3, 1, 1, generator=generator)}
    score.check_score(text)
    assert score.score_symbols(text) <= {"q", "k", "head0"}
    out = score.evaluate_score(text, s, values)
    assert out.dtype == torch.float64
    (wanted,) = torch.autograd.grad(out.sum(), s)
    torch.testing.assert_close(score.score_slope(text, s, values).expand_as(s), wanted, rtol=1e-12, atol=1e-12)


NO_TEXTS = ["s +", "s + x", "s.real", "print(s)", "s if q else k", "True", "s < 1", "floor(s)", "sin(s)"]
LARGE = [
    "-" * 5000 + "s",
    "-" * 200_000 + "s",
    "(" * 500 + "s",
    "s" + "*s" * 20_000,
    "s*9**9**9",
    "(((3**64)**64)**64)**64",
]


@pytest.mark.parametrize("text", [*NO_TEXTS, *LARGE], ids=lambda text: text[:30])
def test_no_text(text: str) -> None:
    with pytest.raises(SpError, match="SP444"):
        score.check_score(text)


def test_no_derivative() -> None:
    with pytest.raises(SpError, match="SP445"):
        score.check_score("s + sign(s)")


PROGRAM = (
    "t0 = aten.sub.Tensor(q, k); t1 = aten.clamp.default(t0, 0, 3); t2 = aten.index.Tensor(table0, [head0, t1]); "
    "t3 = constant(2, torch.int64); t4 = aten.mul.Tensor(s, table1); t5 = aten.add.Tensor(t4, t2, alpha=2); "
    "t6 = aten.lt.Tensor(t0, t3); aten.where.ScalarOther(t6, t5, -inf)"
)


def test_gradients_of_a_program() -> None:
    """Gradients of the score, of looked-up values, and of a scalar that all pairs read."""
    generator = torch.Generator().manual_seed(0)
    s, table = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in [(2, 3, 4, 5), (3, 4)])
    number = torch.tensor(0.7, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (s, table, number)]
    values = {"q": torch.arange(4)[:, None], "k": torch.arange(5), "head0": torch.arange(3)[:, None, None]}
    assert score.score_symbols(PROGRAM) == {"q", "k", "head0", "table0", "table1"}
    given = {**values, "table0": table, "table1": number}
    out = score.evaluate_score(PROGRAM, s, given)
    distance = values["q"] - values["k"]
    every = s * number + 2 * table[:, distance.clamp(0, 3)]
    torch.testing.assert_close(out, every.masked_fill(distance >= 2, -torch.inf))
    grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    wanted = torch.autograd.grad(out, leaves, grad)
    totals = {"table0": torch.ones(3, 4, dtype=torch.float64), "table1": torch.ones((), dtype=torch.float64)}
    found = score.score_vjp(PROGRAM, s, given, grad, totals)
    for a, b in zip((found, *(total - 1 for total in totals.values())), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_program_with_other_names() -> None:
    names = {"q": "row1", "k": "col1"}
    renamed = score.rename_score(PROGRAM, names)
    assert score.score_symbols(renamed) == {"row1", "col1", "head0", "table0", "table1"}
    assert score.rename_score(renamed, {new: old for old, new in names.items()}) == PROGRAM
    assert score.rename_score("head0*(k - q) + s", names) == "head0*(col1 - row1) + s"


NO_PROGRAMS = {
    "changes its operand": "aten.add_.Tensor(s, 1)",
    "draws": "aten.rand_like.default(s)",
    "sums": "aten.sum.default(s)",
    "of another library": "c10d.aten.neg(s)",
    "no result": "t0 = aten.neg.default(s)",
    "before it is made": "t0 = aten.neg.default(t1); aten.neg.default(t0)",
    "made twice": "t0 = aten.neg.default(s); t0 = aten.neg.default(t0); aten.neg.default(t0)",
    "another name": "aten.neg.default(x)",
    "made over": "s = aten.neg.default(s); aten.neg.default(s)",
    "code": "aten.add.Tensor(s, __import__('os'))",
    "a part": "aten.neg.default(s).real",
    "a statement": "import aten.os",
}


@pytest.mark.parametrize("text", NO_PROGRAMS.values(), ids=NO_PROGRAMS)
def test_no_program(text: str) -> None:
    with pytest.raises(SpError, match="SP444"):
        score.check_score(text)
