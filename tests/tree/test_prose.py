"""Prose of the tree: banned words, summaries, documented arguments. The counts in prose.json may only fall.

`EXPECTTEST_ACCEPT=1` writes counts that have fallen to prose.json.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tree.test_layers import FILES, ROOT

LIST = Path(__file__).with_name("prose.json")
FOLDERS = ("sp_compile", "passes", "lowering", "tests", "benchmarks", "examples", "docs", "top")
BUILD_FILES = ("Makefile", "pyproject.toml", ".ci/run")
OTHER_TEXTS = ("page.html", "native.cpp", "error_codes.toml")  # with prose for users or contributors
IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*[A-Z_]\w*")  # of more than one word
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
CLAUSE = re.compile(  # a noun clause, a question or a fragment in place of an imperative sentence
    r"(?:What|Which|Where|How|Why|Whether|Who|When|Is|Are|Does|Do|Has|Have|May|Can|Would|Will|Must|Could|Of|As|Those"
    r"|The same)\b"
)


@cache
def listed() -> dict[str, dict[str, str | int]]:
    """Return the patterns of banned words, the public files, and the largest count of each kind."""
    return json.loads(LIST.read_text())


def files_to_read() -> Iterator[tuple[str, Path]]:
    """Yield the files with prose and their top folder, without symbolic links.

    These are the Python and Markdown files, the build files and `OTHER_TEXTS`.
    """
    for folder in FOLDERS:
        top_files = [*ROOT.glob("*.md"), *(ROOT / name for name in BUILD_FILES)]
        for path in sorted(top_files if folder == "top" else (ROOT / folder).rglob("*")):
            is_read = path in top_files or path.suffix in (".py", ".md") or path.name in OTHER_TEXTS
            if is_read and path.resolve() == path:
                yield folder, path


def text_to_search(path: Path) -> str:
    """Return the text of a file, with the identifiers of a Python file once more, as their words in lower case."""
    text = path.read_text()
    if path.suffix != ".py":
        return text
    names = sorted(set(IDENTIFIER.findall(text)))
    return "\n".join([text, *(" ".join(WORD.findall(name)).lower() for name in names)])


def fields_without_comment(file: Path, tree: ast.Module) -> list[str]:
    """Return the fields of dataclasses and NamedTuples that neither a comment nor `Args:` of the class describes."""
    lines = file.read_text().splitlines()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
        described = (ast.get_docstring(node) or "").partition("Args:")[2]
        for field in node.body if any(mark.startswith(("dataclass", "NamedTuple")) for mark in marks) else ():
            if isinstance(field, ast.AnnAssign):
                name, own = ast.unparse(field.target), lines[field.lineno - 1 : field.end_lineno]
                is_commented = any("  # " in line for line in own) or lines[field.lineno - 2].lstrip().startswith("#")
                if not is_commented and not re.search(rf"^\s*{name}:", described, re.MULTILINE):
                    found.append(f"{node.name}.{name}")
    return found


def public_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the public functions of a module and the public methods of its classes."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return [node for body in bodies for node in body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]


@cache
def places() -> dict[str, list[str]]:
    """Return the places of what the list limits, by kind."""
    found: dict[str, list[str]] = {kind: [] for kind in listed()["largest counts"]}
    banned = [re.compile(pattern) for pattern in listed()["banned words"].values()]
    for folder, path in files_to_read():
        text = text_to_search(path)
        words = [match.group() for pattern in banned for match in pattern.finditer(text)]
        found.setdefault(f"banned words in {folder}", []).extend(f"{path.relative_to(ROOT)}: {word}" for word in words)
    public = tuple(listed()["public files"])
    for file in FILES.values():
        tree, name = ast.parse(file.read_text()), file.relative_to(ROOT).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                doc = ast.get_docstring(node)
                place = f"{name}: {getattr(node, 'name', 'module')}"
                if doc is not None and CLAUSE.match(doc):
                    found["summaries that are clauses or questions"].append(place)
                if doc is None and not getattr(node, "name", "").startswith("_"):
                    found["public definitions without a docstring"].append(place)
        found["fields without a comment"] += [f"{name}: {field}" for field in fields_without_comment(file, tree)]
        for node in public_functions(tree) if name.startswith(public) else ():
            doc = ast.get_docstring(node) or ""
            section = doc.partition("Args:")[2]
            names = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs) if arg.arg not in ("self", "cls")]
            missing = [arg for arg in names if not re.search(rf"^\s*\*{{0,2}}{arg}\b", section, re.MULTILINE)]
            found["public arguments that are not in Args:"] += [f"{name}: {node.name}: {arg}" for arg in missing]
            has_result = node in tree.body or ast.unparse(node.returns or ast.Name("Any")) != "None"
            if has_result and "Returns:" not in doc:
                found["public functions without Returns:"].append(f"{name}: {node.name}")
    return found


@pytest.mark.parametrize("kind", listed()["largest counts"])
def test_counts_only_fall(kind: str) -> None:
    largest = listed()["largest counts"]
    found = places()[kind]
    assert len(found) <= largest[kind], found
    if len(found) < largest[kind] and os.environ.get("EXPECTTEST_ACCEPT") == "1":
        largest[kind] = len(found)
        LIST.write_text(json.dumps(listed(), indent=2) + "\n")


def test_every_count_is_limited() -> None:
    assert places().keys() == listed()["largest counts"].keys()


def test_public_files_exist() -> None:
    assert not [name for name in listed()["public files"] if not (ROOT / name).exists()]
