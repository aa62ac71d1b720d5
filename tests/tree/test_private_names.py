"""Names that torch keeps to itself are used in lowering/torch_compat alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sp_compile
from sp_compile import lowering, passes

FILES = [file for package in (sp_compile, passes, lowering) for file in Path(*package.__path__).rglob("*.py")]
OURS = {"_replace", "_groups"}  # of a named tuple, and of Pattern
OPERATORS = ("aten.", "torch.ops.")  # torch.ops.aten._to_copy is as public as any


def private(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
            path = [*str(node.module).split("."), *(name.name for name in node.names)]
            if path[0] == "torch" and any(part.startswith("_") for part in path):
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            text = ast.unparse(node)
            own = text.startswith(("self.", "cls.")) and text.count(".") == 1
            if not own and node.attr not in OURS and not text.startswith(OPERATORS):
                yield text


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._ops import OpOverload", 1),
        ("import torch\nx: torch._ops.OpOverload", 1),
        ("node.target._schema", 1),
        ("self._sizes, torch.ops.aten._to_copy, __file__", 0),
    ],
)
def test_private_names_are_recognized(source: str, found: int) -> None:
    assert len(list(private(ast.parse(source)))) == found


def test_private_names() -> None:
    assert len(FILES) > 100
    found = {
        f.name: names
        for f in FILES
        if f.parent.name not in ("_compat", "torch_compat") and (names := list(private(ast.parse(f.read_text()))))
    }
    assert not found
