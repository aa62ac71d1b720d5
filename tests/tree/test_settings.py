"""Options are read in one place, `PassSettings.of`; later code reads the settings.

An `SPConfig` is recognized by its name: a parameter or field with this annotation (or `AnyOptions`), or a variable to
which `SPConfig(...)`, `SPConfig.of(...)` or `replace` of one is assigned. Unparsed options are recognized by their key.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields

import pytest
from tree.test_layers import FILES

from sp_compile import SPConfig

FIELDS = {field.name for field in fields(SPConfig)} | {"has_place"}
UNSEEN = {"options", "given", "config"}  # names of mappings of options
READ_THEM = {"sp_compile.config", "sp_compile.passes.context"}
WRITE_THEM = {f"sp_compile.planner.{name}" for name in ("plan", "planned_steps")}  # several options in place of one


def is_config(node: ast.expr | None, known: set[str]) -> bool:
    """Return True if the source of the value shows that it is an `SPConfig`."""
    if isinstance(node, ast.Call):
        made = ast.unparse(node.func)
        return made in ("SPConfig", "SPConfig.of") or (made == "replace" and is_config(node.args[0], known))
    return node is not None and ast.unparse(node) in known


def configs(tree: ast.AST) -> set[str]:
    """Return the variables and fields of a file that are an `SPConfig`."""
    found = {"SPConfig"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.arg | ast.AnnAssign) or node.annotation is None:
            continue
        if re.search(r"\b(SPConfig|AnyOptions)\b", ast.unparse(node.annotation)):
            found.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
    for node in ast.walk(tree):  # in the order of the text
        if isinstance(node, ast.Assign) and is_config(node.value, found):
            found |= {ast.unparse(target) for target in node.targets}
    return found


def reads(source: str) -> Iterator[str]:
    """Yield the expressions of a source that read a field of an `SPConfig`, or the option of that name."""
    tree = ast.parse(source)
    known = configs(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FIELDS:
            holder = ast.unparse(node.value)
            if holder in known or holder.rpartition(".")[2] in known or is_config(node.value, known):
                yield ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder, key = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript):
            holder, key = node.value, node.slice
        else:
            continue
        name = str(key.value) if isinstance(key, ast.Constant) else ""
        unseen = ast.unparse(holder).rpartition(".")[2] in UNSEEN and name in FIELDS
        if unseen or name.removeprefix("option ") in FIELDS - {name}:
            yield ast.unparse(node)


def test_options_become_settings_in_one_place() -> None:
    found = {module: list(reads(file.read_text())) for module, file in FILES.items()}
    assert {module for module, where in found.items() if where} == READ_THEM | WRITE_THEM, found


@pytest.mark.parametrize(
    "source",
    [
        "def f(config: SPConfig): return config.layout",
        "def f(options: SPConfig | None): return options.layout",
        "class A:\n    config: SPConfig\n\ndef f(a): return a.config.layout",
        "def f(x):\n    given = chosen = SPConfig.of(x)\n    chosen = replace(given, tiles=2)\n    return chosen.tiles",
        "SPConfig.check_every",
        "SPConfig.of(x).check_every",
        "options.get('layout', 'auto')",
        "options['option param_grads']",
    ],
)
def test_reads_are_recognized(source: str) -> None:
    assert list(reads(source))


def test_reads_of_settings_are_no_reads_of_options() -> None:
    assert not list(reads("def f(job: Settings): return job.layout"))
