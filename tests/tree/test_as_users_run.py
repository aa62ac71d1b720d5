"""In every folder, a share of the parity tests runs with Inductor, all default options and undivided lengths."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.parity import Decoder, build, sp, text
from support.ranks import Ranks, RanksError, mesh

TESTS = Path(__file__).parents[1]
COMPARES = {"sp", "against_eager", "trained"}
"""Functions that compile a model on the ranks of a test, of `support.parity` and `support.parallel`."""
SHARE = 10
"""One in this number of parity tests of a folder, and at least one, is marked `as_users_run`."""
KNOWN = {
    "attention", "backend", "canonical", "capture", "models", "scan", "sharding", "spmd", "tensor_parallel", "windows",
}  # fmt: skip
"""The folders with parity tests; the others compare operators, rules, predictions, or GPU code."""


def parity_tests(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the parity tests of a file, and whether they are marked: those with `ranks` as an argument."""
    module = ast.parse(path.read_text())
    imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    names = {a.name for node in imports if str(node.module).startswith("support.par") for a in node.names}
    if not names & COMPARES:
        return
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    for node in tests:
        if "ranks" in [argument.arg for argument in node.args.args]:
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            yield f"{path.stem}::{node.name}", any("mark.as_users_run" in mark for mark in marks)


def folders() -> dict[str, dict[str, bool]]:
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for path in TESTS.rglob("test_*.py"):
        folder = path.relative_to(TESTS).parts[0]
        if folder != "tree":
            found[folder].update(parity_tests(path))
    return {folder: tests for folder, tests in found.items() if tests}


def test_every_folder_has_its_share() -> None:
    found = folders()
    assert set(found) == KNOWN
    few = {}
    for folder, tests in found.items():
        marked, wanted = sum(tests.values()), max(1, len(tests) // SHARE)
        if marked < wanted:
            few[folder] = f"{marked} of {len(tests)} marked, {wanted} wanted"
    assert not few


def step(length: int, **options: str) -> None:
    sp(build(Decoder, layers=0), mesh=mesh(), seq_dims={"ids": 1, "labels": 1}, **options)(*text(length))


@pytest.mark.parametrize(
    ("length", "options", "words"),
    [
        (9, {"compiler": "aot_eager"}, "compiled by {'aot_eager'}"),
        pytest.param(8, {}, "the ranks divide every length", marks=pytest.mark.slow),
    ],
    ids=["compiler", "length"],
)
def test_other_compilers_and_lengths_are_reported(
    ranks: Ranks, length: int, options: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "as_users_run", True)
    with pytest.raises(RanksError, match=words):
        ranks.run(2, step_with, length, options)


def step_with(length: int, options: dict[str, str]) -> None:
    step(length, **options)
