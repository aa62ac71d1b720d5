"""The predicate language against evaluation of every pair."""

import itertools
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention.score_texts import score_of

from sp_compile.lowering.base.errors import SpError
from sp_compile.lowering.comm.simulate import SIMULATED_GROUP
from sp_compile.lowering.masks.pieces import FAR_VALUE
from sp_compile.lowering.masks.predicate import (
    Linear,
    as_linear,
    check_known,
    evaluate_mask,
    evaluate_over,
    is_within_documents,
    parse_predicate,
    predicate_symbols,
    split_conjuncts,
)
from sp_compile.lowering.masks.spans import full_span

PREDICATES = [
    "",
    "k <= q",
    "k < q + n0",
    "(k <= q) & (q - k < 4)",
    "Abs(q - k) <= 3",
    "(k < n0) | (k <= q)",
    "Eq(row0, col0) & (k <= q)",
    "Ne(col0, 0)",
    "~(Eq(col0, 0) & (k > 2))",
    "Eq(floor(q/4), floor(k/4))",
    "Eq(q//4, k//4)",
    "Eq(Mod(q - k, 3), 0) | (k < 2)",
    "Max(q, k) - Min(q, k) < row0 + 2",
    "2*k <= 3*q - n0*row0",
    "k/2 <= q/3 + 1/2",
]


def is_satisfied(text: str, pair: dict[str, int]) -> bool:
    """The predicate of one pair, by sympy."""
    return bool(parse_predicate(text).subs({sympy.Symbol(name, integer=True): value for name, value in pair.items()}))


def pairs(box: dict[str, tuple[int, int]]) -> list[dict[str, int]]:
    """Every assignment inside the box."""
    ranges = [range(low, high + 1) for low, high in box.values()]
    return [dict(zip(box, values)) for values in itertools.product(*ranges)]


def bounds(least: int, most: int, width: int) -> Any:
    return st.tuples(st.integers(least, most), st.integers(0, width)).map(lambda x: (x[0], x[0] + x[1]))


@settings(max_examples=400)
@given(st.sampled_from(PREDICATES), st.data())
def test_verdicts_hold_for_every_pair(text: str, data: st.DataObject) -> None:
    limits = {"q": (0, 12, 4), "k": (0, 12, 4), "row0": (0, 3, 1), "col0": (-1, 2, 1), "n0": (0, 5, 0)}
    box = {name: data.draw(bounds(*limits[name])) for name in sorted(predicate_symbols(text))}
    found = {is_satisfied(text, pair) for pair in pairs(box)}
    verdict = evaluate_over(text, box)
    assert verdict is None or found == {verdict}


@pytest.mark.parametrize("text", ["k <= q", "(k <= q) & (q - k < 3)", "k < n0", "Eq(row0, col0)", "Ne(col0, 0)"])
def test_verdicts_are_exact(text: str) -> None:
    """None only where some pairs may attend and some not."""
    stretches = [(a, b) for a in range(0, 7) for b in range(a, 7)]
    names = sorted(predicate_symbols(text))
    fixed = {"n0": [(3, 3)]}
    for box in itertools.product(*(fixed.get(name, stretches) for name in names)):
        named = dict(zip(names, box))
        found = {is_satisfied(text, pair) for pair in pairs(named)}
        assert evaluate_over(text, named) == (found.pop() if len(found) == 1 else None)


@pytest.mark.parametrize("text", PREDICATES)
def test_masks(text: str) -> None:
    """The tensor holds the value of every pair."""
    q, k = torch.arange(9), torch.arange(11)
    row, col = q % 3, k % 4
    values = {"q": q[:, None], "k": k[None], "row0": row[:, None], "col0": col[None], "n0": 3}
    mask = torch.as_tensor(evaluate_mask(text, values)).expand(9, 11)
    for i, j in itertools.product(range(9), range(11)):
        pair = {"q": i, "k": j, "row0": int(row[i]), "col0": int(col[j]), "n0": 3}
        assert bool(mask[i, j]) == is_satisfied(text, pair)


def test_text_is_canonical() -> None:
    assert str(parse_predicate("(q >= k) & (q - k < 4)")) == str(
        parse_predicate(str(parse_predicate("(q >= k) & (q - k < 4)")))
    )
    assert split_conjuncts("Eq(row0, col0) & (k <= q)") == ("Eq(col0, row0)", "k <= q") or split_conjuncts(
        "Eq(row0, col0) & (k <= q)"
    ) == ("Eq(row0, col0)", "k <= q")
    assert split_conjuncts("") == ()
    assert predicate_symbols("Eq(row10, col2) & (k < n1)") == {"row10", "col2", "k", "n1"}


@pytest.mark.parametrize(
    ("text", "documents"),
    [
        ("Eq(row0, col0) & (k <= q)", True),
        ("Eq(row3, 2*col1) & Ne(col0, 0)", True),
        ("Ne(col0, 0) & Ne(row0, 0) & (k <= q)", False),
        ("Eq(col0, 1)", False),
        ("Eq(row0, col0) | (k <= q)", False),
        ("col0 <= row0", False),
        ("", False),
    ],
)
def test_documents(text: str, documents: bool) -> None:
    assert is_within_documents(text) == documents


def test_linear() -> None:
    causal = Linear("<=", (("q", -1),), (("k", 1),), 0)
    assert all(as_linear(text, ()) == causal for text in ("k <= q", "q >= k", "k < q + 1", "k - q <= 0", "k/2 <= q/2"))
    assert as_linear("k <= q + n0 - 2", (5,)) == causal._replace(constant=-3)
    assert as_linear("k < q/2", ()) == Linear("<=", (("q", -1),), (("k", 2),), 1)
    assert as_linear("Eq(row0, 2*col0 + 1)", ()) == Linear("==", (("row0", 1),), (("col0", -2),), -1)
    assert as_linear("Ne(col0, 0)", ()) == Linear("!=", (), (("col0", 1),), 0)


@pytest.mark.parametrize("text", ["", "(k <= q) & (k < 4)", "k*q < 4", "Mod(q, 4) < k", f"k < {2**60}", "k < 20*q"])
def test_nonlinear_expressions(text: str) -> None:
    """Nonlinear expressions, and sums that overflow int64."""
    assert as_linear(text, ()) is None


@pytest.mark.parametrize("text", ["k <= p", "k +", "k", "q + k", "f(q) < k", "k <= position", "'x'", "lambda: k"])
def test_errors(text: str) -> None:
    with pytest.raises(SpError, match="SP441"):
        evaluate_over(text, {"q": (0, 1), "k": (0, 1)})


def test_missing_values_are_named() -> None:
    with pytest.raises(SpError, match=r"SP443.*row3"):
        check_known("Eq(row3, col0)", {"q", "k", "col0"})


# The text may come from a file: it is read, and nothing of it is executed.


GOOD = [
    "(k <= q) & (q - k < 4)",
    "Eq(row0, col0) & (k <= q)",
    "Ne(Mod(q, 4), 3) | ~(k < n0)",
    "k <= 2*floor(q/2) + Min(n0, Max(3, q**2))",
    "FloorDiv(k, 3) <= PythonMod(q, n1) - Abs(row1)",
    "True",
    "",
]
BAD = [
    "__import__('os').system('touch {}')",
    "(lambda: open('{}', 'w'))()",
    "[open('{}', 'w') for q in [1]]",
    "q.__class__",
    "exec('open(1)') < k",
    "Symbol('q') <= k",
    "k <= 9**9**9",
    "k <= 9**99999999",
    "'a' < k",
    "k <= q if q else k",
    "(q := 3) < k",
    "f'{{q}}' < k",
    "q",
    "q + k",
    "Mod(q) < k",
    "k <= z",
    "k <= q; 1",
    "~" * 5000 + "(k < q)",
    "~" * 200_000 + "(k < q)",
    "(" * 500 + "k",
    "k < " + "(" * 20 + "9" + "**8)" * 20,
    "1.5 < k",
    "Ne(q < k, True)",
    "(q < k) == (k < q)",
]


@pytest.mark.parametrize("text", GOOD)
def test_is_read_as_it_is_written(text: str) -> None:
    assert parse_predicate(str(parse_predicate(text))) == parse_predicate(text)


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:30])
def test_all_else_is_refused_and_not_executed(text: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(SpError, match="SP441"):
        parse_predicate(text.replace("{}", str(made)))
    assert not made.exists()


def random_text(rng: random.Random, depth: int = 0) -> str:
    """Mostly of the language; now and then a word of Python's."""
    words = ["q", "k", "row0", "n1", "3", "-1"] * 4 + ["open('x')", "q.real", "[q]", "'a'", "z", "1.5"]
    if depth > 2 or rng.random() < 0.3:
        return rng.choice(words)
    left, right = random_text(rng, depth + 1), random_text(rng, depth + 1)
    return rng.choice(["({} {} {})", "Min({}, {}{})"]).format(
        left, *(rng.choice(["+", "-", "*", "<=", "==", "&"]), right)
    )


def test_random_texts_are_conditions_or_refused() -> None:
    rng, found = random.Random(0), 0
    for _ in range(300):
        try:
            text = f"{random_text(rng)} <= {random_text(rng)}"
            found += isinstance(parse_predicate(text), sympy.logic.boolalg.Boolean)
            evaluate_over(text, dict.fromkeys(predicate_symbols(text), (0, 3)))
        except SpError:
            continue
    assert 20 < found < 280


class Attends(torch.nn.Module):
    """(batch, heads, 8, dim) three times -> the same; with a predicate and a score function."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        span = full_span(8)
        texts = "k <= q", None, 0.0, 0.5, score_of("s + k")
        return torch.ops.sp.attend(q, k, v, None, [], [], [], [], *texts, [], [], span, span, 1, SIMULATED_GROUP)[0]


@pytest.mark.parametrize("text", ["k <= q", score_of("s + k")])
def test_an_exported_program_that_was_edited_runs_nothing(text: str, tmp_path: Path) -> None:
    made, file = tmp_path / "made", tmp_path / "program.pt2"
    inputs = tuple(torch.ones(1, 2, 8, 4) for _ in range(3))
    torch.export.save(torch.export.export(Attends(), inputs), file)
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    evil = f"open('{made}', 'w') and {text}".encode()
    assert sum(part.count(text.encode()) for part in parts.values()) == 1
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part.replace(text.encode(), evil))
    with pytest.raises(SpError, match=r"SP441|SP908"):
        torch.export.load(file).module()(*inputs)
    assert not made.exists()


def test_values_without_bounds_decide_nothing() -> None:
    """Vectors with values from FAR_VALUE on, such as sentinels of padding, have its bounds."""
    far = {"row0": (0, 3), "col0": (-FAR_VALUE, FAR_VALUE)}
    assert evaluate_over(f"col0 - row0 < {1 << 60}", far) is None
    assert evaluate_over(f"Ne(col0, {1 << 62})", far) is None
    assert evaluate_over("col0 - row0 < 5", {"row0": (0, 3), "col0": (0, 4)}) is True
