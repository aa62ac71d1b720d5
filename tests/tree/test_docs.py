"""README.md and docs/ against the tree: navigation, links, code blocks, commands, options, names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from support.docs.pages import DOCS, PAGES, ROOT, anchors, blocks, code_of, links, prose

import sp_compile
from sp_compile import SPConfig, data
from sp_compile.config import CHOICES, OUTPUTS, STRATEGIES

RECIPES = sorted((DOCS / "recipes").glob("*.md"))
WRITTEN = [*PAGES, *RECIPES, *(ROOT / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"))]
EVERY = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
LANGUAGES = {"", "python", "sh"}
INCLUDED = re.compile(r"\{(include|toctree|eval-rst)\}.*")


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_navigation_has_every_page() -> None:
    trees = [body for kind, body in blocks(DOCS / "index.md") if kind == "{toctree}"]
    named = [line for body in trees for line in body.splitlines() if line and not line.startswith(":")]
    pages = [page.relative_to(DOCS).with_suffix("").as_posix() for page in [*PAGES[1:], *RECIPES]]
    assert sorted([*named, "index"]) == sorted(pages)
    linked = {(ROOT / link).resolve() for link in links(ROOT / "README.md")}
    assert {*DOCS.glob("*.md")} - {DOCS / "index.md"} <= linked


@EVERY
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@EVERY
def test_code_blocks_are_of_known_kinds(page: Path) -> None:
    """Python is run: of a recipe by tests/models/test_recipes.py, of other pages by tests/models/test_pages.py."""
    kinds = {kind for kind, _ in blocks(page) if not INCLUDED.fullmatch(kind)}
    assert kinds <= LANGUAGES, kinds
    assert "python" not in kinds or page in {*PAGES, *RECIPES}
    for number, code in enumerate(code_of(page)):
        compile(code, f"{page.name}, block {number}", "exec")


COMMAND = re.compile(r"(?:^|`)((?:make|pytest|python|torchrun|\.venv/bin/python) [^`\n]+)", re.MULTILINE)


@cache
def is_selected(word: str) -> bool:
    """Is it part of a name that `pytest -k` looks at?"""
    found = re.compile(rf"def test_\w*{word}|class \w*{word}", re.IGNORECASE)
    files = [*(ROOT / "tests").rglob("*.py")]
    return any(word in file.as_posix() for file in files) or any(found.search(file.read_text()) for file in files)


def faults(command: str) -> Iterator[str]:
    """What of a command is not there."""
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
    assert list(faults("make demo    # of nothing")) == []
    assert list(faults("make tea FILES=tests/none.py")) == ["tea", "tests/none.py"]
    assert list(faults('pytest tests -k "merge or unheard_of"')) == ["unheard_of"]


@EVERY
def test_commands_exist(page: Path) -> None:
    shown = [body for kind, body in blocks(page) if kind in ("", "sh")]
    for command in COMMAND.findall("\n".join([*shown, prose(page)])):
        assert not list(faults(command)), command


def table(page: Path, heading: str = "") -> list[list[str]]:
    """The cells of a page's tables, below a heading."""
    rows = re.findall(r"^\| (.*) \|$", prose(page).partition(heading)[2] if heading else prose(page), re.MULTILINE)
    return [row.split(" | ") for row in rows]


def test_options() -> None:
    """Every field has a row in order, whose values are those that the field takes, the default first."""
    rows = [(re.findall(r"`(\w+)`", cells[0]), cells[1]) for cells in table(DOCS / "options.md") if "`" in cells[0]]
    assert [name for names, _ in rows for name in names] == sorted(
        (field.name for field in fields(SPConfig)), key=[name for names, _ in rows for name in names].index
    )
    defaults = {field.name: field.default for field in fields(SPConfig)}
    known = {**CHOICES, "outputs": OUTPUTS, "attention": ("auto", *STRATEGIES)}
    for names, values in rows:
        said = re.findall(r'"(\w+)"', values)
        for name in names:
            if isinstance(defaults[name], str):
                assert said[0] == defaults[name], name
            elif isinstance(defaults[name], int):
                assert values.startswith(str(defaults[name])), name
            assert name not in known or {*known[name]} >= {*said} >= {*CHOICES.get(name, ())}, name
    shown = {name for names, values in rows for name in names if '"' in values}
    assert shown >= {*CHOICES, "outputs", "attention"}


def test_api_has_every_public_name() -> None:
    api = (DOCS / "api.md").read_text()
    named = set(re.findall(r"auto(?:function|class):: ([\w.]+)", api))
    assert {*sp_compile.__all__} - {"__version__"} <= named
    assert {*data.__all__} <= named
