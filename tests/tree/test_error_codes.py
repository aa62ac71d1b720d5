"""Every error has a code of the registry; every code is raised; docs/reference/errors.md is generated from the registry."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree.test_layers import FILES, ROOT

from sp_compile.lowering.base.error_codes import ERRORS, SECTIONS, errors_page
from sp_compile.lowering.base.errors import RankMismatchError, SpError

RAISED = {"SpError", "CaptureError", "WriteError", "RemoteError", "RankMismatchError", "CannotCompileError"}
RAISED |= {"SimulationError"}


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """Return each call that makes an error of the package."""
    for file in FILES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in RAISED:
                yield file, node


def test_every_error_has_a_code() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for file, call in calls()
        if not (call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value in ERRORS)
        and not (call.args and ast.unparse(call.args[0]).endswith((".code", "*parts")))  # of another error
    ]
    assert not wrong


def test_every_code_is_raised() -> None:
    text = "\n".join(file.read_text() for file in FILES.values())
    assert not [code for code in ERRORS if f'"{code}"' not in text]


@pytest.mark.parametrize("code", ERRORS)
def test_a_code_has_a_cause_and_a_fix(code: str) -> None:
    info = ERRORS[code]
    assert re.fullmatch(r"SP[1-9]\d\d", code)
    assert code[2] in SECTIONS
    assert re.fullmatch(r"\S.*[^.]", info.title)
    assert info.fix.endswith(".")


def test_the_page_is_generated() -> None:
    assert (ROOT / "docs" / "reference" / "errors.md").read_text() == errors_page()


@pytest.mark.parametrize("kind", [SpError, RankMismatchError])
def test_an_error_is_pickled(kind: type[SpError]) -> None:
    code = next(iter(ERRORS))
    error = pickle.loads(pickle.dumps(kind(code, "x: expected 1, got 2.")))
    assert (error.code, error.cause, type(error)) == (code, "x: expected 1, got 2.", kind)
    assert str(error) == f"{code}: x: expected 1, got 2. {ERRORS[code].fix}"
