"""No product code depends on prose: the text of a note or a refusal, or the message of an error.

Errors of torch and of other packages are recognized by their text in `torch_compat` alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree.test_layers import FILES, ROOT

PROSE = {"text", "label", "cause", "fix", "args"}
SOURCES = ("Note", "Refusal", "Error", "Exception")
LISTS = ("notes", "fallbacks", "find_notes")
READS = {"startswith", "endswith", "partition", "rpartition", "split", "removeprefix", "removesuffix", "find", "index"}


def holders(tree: ast.AST) -> set[str]:
    """Return the names of variables that hold notes, refusals or errors."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation).endswith(SOURCES):
            found.add(node.arg)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            listed = node.iter.func if isinstance(node.iter, ast.Call) else node.iter
            if isinstance(listed, ast.Attribute) and listed.attr in LISTS:
                found.add(node.target.id)
    return found | {"note", "refusal", "error"}


def searches_phrase(node: ast.Compare) -> bool:
    """Return True for `"several words" in text` and for `"word" in reason`, of any source."""
    if not isinstance(node.ops[0], ast.In | ast.NotIn) or not isinstance(node.left, ast.Constant):
        return False
    phrase, text = str(node.left.value).strip(), ast.unparse(node.comparators[0]).rpartition(".")[2]
    return " " in phrase or (bool(phrase) and text in {"reason", "message", "cause"})


def comparisons(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield each expression that compares, cuts or searches prose."""
    names = holders(tree)

    def is_prose(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            return is_prose(node.value)
        if isinstance(node, ast.Call):
            return ast.unparse(node.func) == "str" and any(is_holder(one) for one in node.args)
        if isinstance(node, ast.Name):
            return node.id in texts
        return isinstance(node, ast.Attribute) and node.attr in PROSE and is_holder(node.value)

    def is_holder(node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in names

    texts: set[str] = set()
    texts = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and is_prose(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if searches_phrase(node):
                yield node
            read = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func
            read = list(node.args) if ast.unparse(method.value) == "re" else [method.value] * (method.attr in READS)
        else:
            continue
        if any(map(is_prose, read)):
            yield node


def found_in(file: Path) -> list[str]:
    """Return the places of a file whose code depends on prose."""
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    wrong = {node.lineno: ast.unparse(node) for one in functions for node in comparisons(one)}
    return [f"{file.relative_to(ROOT)}:{line}: {code}" for line, code in wrong.items()]


def test_no_code_depends_on_prose() -> None:
    files = [file for name, file in FILES.items() if "torch_compat" not in name.split(".")]
    assert not [place for file in files for place in found_in(file)]


@pytest.mark.parametrize(
    "code",
    [
        "for note in report.notes:\n if note.text.startswith('x'): pass",
        "[one for one in report.find_notes(kind) if 'x' in one.label]",
        "def f(refused: Refusal): return refused.text == 'x'",
        "try: pass\nexcept ValueError as failure:\n text = str(failure)\n found = re.search('x', text)",
        "try: pass\nexcept ValueError as failure:\n found = failure.args[0].partition(';')",
        "def f(text: str): return 'recompile limit' in text",
        "def f(reason: str): return 'skipfiles' in reason",
    ],
)
def test_prose_that_is_read_is_found(code: str) -> None:
    assert [*comparisons(ast.parse(code))]
