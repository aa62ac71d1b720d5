"""README.md and docs/ against the tree: navigation, links, code blocks, commands, options, names."""

from __future__ import annotations

import ast
import pydoc
import re
from collections.abc import Iterator
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.docs.pages import DOCS, PAGES, RECIPES, ROOT, TUTORIALS, anchors, blocks, code_of, links, prose

import sp_compile
from sp_compile import SPConfig, data
from sp_compile.lowering.base.options import OPTION_RULES, OptionRule

WRITTEN = [
    *PAGES,
    *TUTORIALS,
    *RECIPES,
    *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
]
EVERY = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
LANGUAGES = {"", "python", "sh"}
INCLUDED = re.compile(r"\{(include|toctree|eval-rst)\}.*")


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_changelog_is_short() -> None:
    """The first release has at most 40 lines."""
    release = (ROOT / "CHANGELOG.md").read_text().partition("## 0.1.0")[2].partition("\n## ")[0]
    assert 0 < len(release.splitlines()) <= 40


def test_navigation_has_every_page() -> None:
    trees = [body for kind, body in blocks(DOCS / "index.md") if kind == "{toctree}"]
    named = [line for body in trees for line in body.splitlines() if line and not line.startswith(":")]
    pages = [page.relative_to(DOCS).with_suffix("").as_posix() for page in [*PAGES[1:], *TUTORIALS, *RECIPES]]
    assert sorted([*named, "index"]) == sorted(pages)
    linked = {(ROOT / link).resolve() for link in links(ROOT / "README.md")}
    assert {*DOCS.glob("*.md"), *DOCS.glob("reference/*.md")} - {DOCS / "index.md"} <= linked


@EVERY
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@EVERY
def test_code_blocks_are_of_known_kinds(page: Path) -> None:
    """Check languages, and that Python is on pages only that a test of tests/models/ runs."""
    kinds = {kind for kind, _ in blocks(page) if not INCLUDED.fullmatch(kind)}
    assert kinds <= LANGUAGES, kinds
    assert "python" not in kinds or page in {*PAGES, *TUTORIALS, *RECIPES}
    for number, code in enumerate(code_of(page)):
        compile(code, f"{page.name}, block {number}", "exec")


COMMAND = re.compile(r"(?:^|`)((?:make|pytest|python|torchrun|\.venv/bin/python) [^`\n]+)", re.MULTILINE)


@cache
def is_selected(word: str) -> bool:
    """Return True if the word is part of a name that `pytest -k` matches."""
    found = re.compile(rf"def test_\w*{word}|class \w*{word}", re.IGNORECASE)
    files = [*(ROOT / "tests").rglob("*.py")]
    return any(word in file.as_posix() for file in files) or any(found.search(file.read_text()) for file in files)


def faults(command: str) -> Iterator[str]:
    """Yield the targets, paths and names of a command that do not exist."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    command = command.partition("  #")[0]
    if command.startswith("make "):
        yield from (word for word in re.findall(r"^[\w-]+", command.removeprefix("make ")) if word not in targets)
    yield from (
        path for path in re.findall(r"\b(?:tests|examples|benchmarks)/[\w/.]*", command) if not (ROOT / path).exists()
    )
    for words in re.findall(r"-k (?:\"([^\"]+)\"|(\w+))", command):
        yield from (word for word in re.findall(r"\w+", "".join(words)) if word != "or" and not is_selected(word))


def test_faults_of_commands() -> None:
    assert list(faults("make demo    # a comment")) == []
    assert list(faults("make tea FILES=tests/none.py")) == ["tea", "tests/none.py"]
    assert list(faults('pytest tests -k "merge or unheard_of"')) == ["unheard_of"]


@EVERY
def test_commands_exist(page: Path) -> None:
    shown = [body for kind, body in blocks(page) if kind in ("", "sh")]
    for command in COMMAND.findall("\n".join([*shown, prose(page)])):
        assert not list(faults(command)), command


def table(page: Path, heading: str = "") -> list[list[str]]:
    """Return the rows of the tables on a page, below a heading, as lists of cells: the head too, not the line below."""
    rows = re.findall(r"^\| (.*) \|$", prose(page).partition(heading)[2] if heading else prose(page), re.MULTILINE)
    return [row.split(" | ") for row in rows]


def option_sections() -> dict[str, str]:
    """Return the text below each heading of options.md that names an option."""
    page = (DOCS / "reference" / "options.md").read_text()
    return dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))


def test_every_option_has_a_section() -> None:
    assert sorted(option_sections()) == sorted(field.name for field in fields(SPConfig))


@pytest.mark.parametrize("field", fields(SPConfig), ids=lambda field: field.name)
def test_option(field: Field[Any]) -> None:
    """A section states the default and every value of its option, and its example is accepted."""
    text = option_sections()[field.name]
    (default,), (values,) = (re.findall(rf"^- {word}: (.*)", text, re.MULTILINE) for word in ("Default", "Values"))
    stated = default.strip("`").partition("`")[0] if "`" in default else default
    assert ast.literal_eval(stated) == field.default
    rule = OPTION_RULES.get(field.name, OptionRule())
    known = rule.words if field.name == "compiler" else rule.choices  # programs may register more compilers
    if known:
        assert set(re.findall(r'"(\w+)"', values)) == set(known)
    (example,) = re.findall(r"^```python\ntorch\.compile\(model, .*, options=(\{.*\})\)\n```$", text, re.MULTILINE)
    options = eval(example, {"mesh": mock.MagicMock()})
    assert field.name in options
    assert getattr(SPConfig.of(options), field.name) is options[field.name]


def test_limits_are_a_table() -> None:
    """The table has at most 40 complete rows, each with an existing test or none."""
    head, *rows = table(DOCS / "reference" / "limits.md")
    assert head == ["area", "limit", "effect", "affects", "workaround", "test"]
    assert 0 < len(rows) <= 40
    for row in rows:
        assert len(row) == len(head), row
        assert all(cell.strip() for cell in row), row
        assert row[-1] == "none" or (ROOT / row[-1].strip("`")).is_file(), row


def test_api_has_every_public_name() -> None:
    api = (DOCS / "reference" / "api.md").read_text()
    named = set(re.findall(r"auto(?:function|class):: ([\w.]+)", api))
    assert {*sp_compile.__all__} - {"__version__"} <= named
    assert {*data.__all__} <= named


def api_names() -> Iterator[str]:
    """Yield the full name of each object that autodoc directives and their `:members:` list in docs/reference/api.md."""
    module = owner = ""
    for line in (DOCS / "reference" / "api.md").read_text().splitlines():
        if found := re.match(r"\.\. (?:currentmodule|automodule):: (\S+)", line):
            module = owner = found[1]
        elif found := re.match(r"\.\. auto\w+:: ([\w.]+)", line):
            owner = found[1] if "." in found[1] else f"{module}.{found[1]}"
            yield owner
        elif found := re.match(r"\s+:members: (\S.*)", line):
            yield from (f"{owner}.{name.strip()}" for name in found[1].split(","))


@pytest.mark.parametrize("name", list(api_names()))
def test_names_of_the_api_page_exist(name: str) -> None:
    if name.startswith(("sp_compile.integrations.transformers", "sp_compile.integrations.accelerate")):
        pytest.importorskip(name.split(".")[2])
    assert pydoc.locate(name) is not None
