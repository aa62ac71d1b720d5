"""Every refusal of a recognizer has a reason, a line of the report (tests/backend/test_pass_form.py)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sp_compile
from sp_compile import lowering, passes

FILES = [file for package in (sp_compile, passes, lowering) for file in Path(*package.__path__).rglob("*.py")]
REFUSALS = ("NotSymbolic", "NotALoop", "SpError", "CaptureError", "WriteError", "SimulationError")


def raised(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the name of each raised exception and whether it has a message; re-raised ones are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = isinstance(node.exc, ast.Call)
            name = ast.unparse(node.exc.func if call else node.exc)
            yield name.rpartition(".")[2], call and bool(node.exc.args)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise NotALoop", [("NotALoop", False)]),
        ("raise NotALoop()", [("NotALoop", False)]),
        ("raise steps.NotALoop('no list') from None", [("NotALoop", True)]),
        ("raise", []),
    ],
)
def test_what_says_why(source: str, found: list[tuple[str, bool]]) -> None:
    assert list(raised(ast.parse(source))) == found


def test_refusals_say_why() -> None:
    found = [(f.name, *one) for f in FILES for one in raised(ast.parse(f.read_text())) if one[0] in REFUSALS]
    assert {name for _, name, _ in found} >= {"NotSymbolic", "NotALoop", "SpError"}
    assert not [one for one in found if not one[-1]]
