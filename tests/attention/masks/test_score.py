"""What becomes of scores, as text: values, derivatives, and what is no text."""

from __future__ import annotations

import pytest
import torch

from sp_compile.errors import SpError
from sp_compile.lowering.masks import score

TEXTS = ["30*tanh(s/30)", "s + head0*(k - q)", "s*Abs(s)", "exp(-s**2/2)", "2*tanh(s*head0/2) - (q - k)/7"]


@pytest.mark.parametrize("text", TEXTS)
def test_derivative(text: str) -> None:
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=generator).requires_grad_()
    values = {"q": torch.arange(4)[:, None], "k": torch.arange(5), "head0": torch.rand(3, 1, 1, generator=generator)}
    score.check(text)
    assert score.symbols_in(text) <= {"q", "k", "head0"}
    out = score.evaluate(text, s, values)
    assert out.dtype == torch.float64
    (wanted,) = torch.autograd.grad(out.sum(), s)
    torch.testing.assert_close(score.slope(text, s, values).expand_as(s), wanted, rtol=1e-12, atol=1e-12)


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
    with pytest.raises(SpError, match="not a text about scores"):
        score.check(text)


def test_no_derivative() -> None:
    with pytest.raises(SpError, match="needs a derivative"):
        score.check("s + sign(s)")
