"""Score functions: values, gradients, names, and what a process has not registered."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import sympy
import torch
from support.attention.score_texts import SYMBOLS, score_of, show_score, traced_score
from torch import Tensor

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.masks import score
from sp_compile.lowering.tiles.tile_program import PROGRAMS
from sp_compile.passes.canonical.attention.elements import NotSymbolic
from sp_compile.passes.canonical.attention.score_functions import register_expression

aten = torch.ops.aten
TEXTS = ["30*tanh(s/30)", "s + head0*(k - q)", "s*Abs(s)", "exp(-s**2/2)", "2*tanh(s*head0/2) - (q - k)/7"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expressions(text: str, dtype: torch.dtype) -> None:
    """Against the expression in float64: values and derivatives are at most rounded to the dtype of scores."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(2, 3, 4, 5, dtype=dtype, generator=generator)
    slopes = torch.rand(3, 1, 1, generator=generator)
    values = {"q": torch.arange(4)[:, None], "k": torch.arange(5), "head0": slopes}
    name, expr = score_of(text), sympy.sympify(text, SYMBOLS)
    assert score.score_symbols(name) <= {"q", "k", "head0"}
    out = score.evaluate_score(name, s, values)
    assert out.dtype == dtype
    grad = torch.randn(out.shape, dtype=dtype, generator=generator)
    of = [values.get(key, s).double().requires_grad_() for key in SYMBOLS]
    right = sympy.lambdify([*SYMBOLS.values()], expr, [{"tanh": torch.tanh, "Abs": torch.abs, "exp": torch.exp}])(*of)
    wanted = right, *torch.autograd.grad(right, of[0], grad.double())
    for one, other in zip((out, score.score_vjp(name, s, values, grad, {})), wanted, strict=True):
        rounding = 1e-6 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(one.double(), other, rtol=rounding, atol=rounding)


def test_no_score_function() -> None:
    with pytest.raises(NotSymbolic, match="floor"):
        register_expression(sympy.sympify("floor(s)", SYMBOLS))


@traced_score
def PROGRAM(s: Any, q: Tensor, k: Tensor, head0: Tensor, table0: Tensor, table1: Tensor) -> Tensor:
    distance = aten.sub.Tensor(q, k)
    found = aten.index.Tensor(table0, [head0, aten.clamp.default(distance, 0, 3)])
    scaled = aten.add.Tensor(aten.mul.Tensor(s, table1), found, alpha=2)
    two = s.tracer.create_proxy("call_function", aten.full.default, ([], 2), {"dtype": torch.int64})
    return aten.where.ScalarOther(aten.lt.Tensor(distance, two), scaled, -torch.inf)


def test_gradients_of_tables() -> None:
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


def test_other_names_of_inputs() -> None:
    names = {"q": "row1", "k": "col1"}
    renamed = score.rename_score(PROGRAM, names)
    assert score.score_symbols(renamed) == {"row1", "col1", "head0", "table0", "table1"}
    assert score.rename_score(renamed, {new: old for old, new in names.items()}) == PROGRAM
    slopes = score.rename_score(score_of("head0*(k - q) + s"), names)
    assert show_score(slopes) == show_score(score_of("head0*(k - q) + s")).replace("k ", "col1 ").replace("q ", "row1 ")
    assert score.rename_score(slopes, {"table0": "table1"}) == slopes


@pytest.mark.slow
def test_name_depends_on_code() -> None:
    """Equal functions have one name in every process; it depends on fills, numbers and inputs."""
    texts = ["tanh(s)", "2*tanh(s)", "2.5*tanh(s)", "s + head0", "s + q"]
    names = [*map(score_of, texts), traced_score(lambda s: aten.tanh.default(s), fills=True)]
    assert len({*names}) == len(names)
    assert [*map(score_of, texts)] == names[:-1]
    code = f"from support.attention.score_texts import score_of; print(*map(score_of, {texts}))"
    for seed in ("1",):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        assert done.stdout.split() == names[:-1]


def test_unregistered_name() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(SpError, match=r"SP908.*'unknown'"):
        torch.ops.sp.masked_attention(q, q, q, [], [], [], "", 0.0, None, False, score="unknown")
    with pytest.raises(SpError, match="SP908"):
        PROGRAMS["unknown"]
